//! An unattended installation: the Windows that is installed, and the files of the set-up disk that
//! depend on the settings.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::answer::custom::{self, Kind};
use crate::answer::release::usual;
use crate::answer::target::Target;
use crate::answer::xml::Secrets;
use crate::answer::{self, AUTOUNATTEND, Answers, INSTALL_BAT, SetupFile, from_settings};
use crate::disks::below;
use crate::download::drivers::Remote;
use crate::media::windows::Media;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::settle::Sizes;
use crate::settings::translate::Bus;
use crate::settings::version::Version;
use crate::settings::{Compat, Settings};
use crate::setup_disk::drivers::Drivers;
use crate::shared_folder::Shares;
use crate::source::Source;

use super::drivers;
use super::windows::{is_product, selects};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unattended {
    pub target: Target,
    /// The user's answer file.
    pub custom: Option<(PathBuf, Kind)>,
    /// The ISO image with Windows' drivers.
    pub bundle: Option<PathBuf>,
    /// That image, if it has to be downloaded first.
    pub remote: Option<Remote>,
    /// Drivers that it does not have, as far as is known.
    pub missing: Vec<&'static str>,
    /// The system disk is new.
    pub is_new: bool,
    /// Windows gets a drive and a link for the first shared folder.
    pub share: bool,
}

impl Unattended {
    /// `None` if a person installs (with MANUAL=Y, or a Windows that has no answer file), or if
    /// there is no disk.
    pub(super) fn of(
        input: &ParsedEnvironment,
        source: &Source,
        media: Option<&Media>,
        root: &Path,
    ) -> anyhow::Result<Option<Self>> {
        let windows = &input.settings.windows;
        if windows.manual || input.settings.disk.disable {
            return Ok(None);
        }
        let target = match (source, media) {
            (Source::Medium(path), Some(media)) => {
                Target::of_media(windows, wanted(input, path, media), media)
            }
            (Source::Download(_), _) => Target::of_version(windows).ok(),
            _ => None,
        };
        target.map(|target| Self::with(target, &input.settings, root)).transpose()
    }

    /// The installation of a Windows, with the files of the user.
    pub(super) fn with(target: Target, settings: &Settings, root: &Path) -> anyhow::Result<Self> {
        let volume = below(root, &settings.storage.folder);
        let custom = custom::find(root, &volume, &target.id)?;
        let bundle = drivers::local(settings, root)?;
        let remote = Remote::of(settings)?.filter(|_| bundle.is_none());
        let missing = match remote {
            Some(_) => Vec::new(),
            None => drivers::read(bundle.as_deref(), target.release)?.missing,
        };
        let is_new = drivers::is_new_disk(settings, root);
        let share = settings.shares.shortcut && Shares::of(settings, root).has_first();
        Ok(Self { target, custom, bundle, remote, missing, is_new, share })
    }

    /// Whether the installation can go on if its drivers cannot be downloaded.
    pub fn needs_drivers(&self, input: &ParsedEnvironment) -> bool {
        let is_asked = self.remote.as_ref().is_some_and(|remote| !remote.is_usual);
        let all = Drivers::none().missing;
        is_asked || drivers::controller(input, &all, self.is_new).is_err()
    }

    /// Whether the account's password is a generated one: PASSWORD is not set, and no answer file
    /// of the user has the account.
    pub fn makes_password(&self, input: &ParsedEnvironment) -> bool {
        let is_set = input.names.contains("PASSWORD");
        !is_set && !self.is_finished() && input.settings.pod.compat != Compat::Dockur
    }

    /// Whether the user's answer file is used as it is.
    pub(super) fn is_finished(&self) -> bool {
        matches!(self.custom, Some((_, Kind::Finished)))
    }

    /// Whether Windows reports the steps of the installation: an answer file of the user may have
    /// its own way to the end.
    pub fn reports(&self) -> bool {
        self.custom.is_none()
    }

    /// Where Windows' drivers come from, in words.
    pub fn drivers(&self) -> String {
        match (&self.bundle, &self.remote) {
            (Some(path), _) => path.display().to_string(),
            (None, Some(remote)) => format!("{}, after a download", remote.shown()),
            (None, None) => "none".into(),
        }
    }

    /// The controller of the disks.
    pub fn controller(&self, input: &ParsedEnvironment) -> anyhow::Result<Bus> {
        drivers::controller(input, &self.missing, self.is_new)
    }

    /// The answers, and warnings. `bus` is that of the machine's disks.
    pub fn answers(&self, settings: &Settings, sizes: &Sizes, bus: Bus) -> (Answers, Vec<String>) {
        let machine = from_settings::machine(settings, sizes, bus);
        let (mut answers, warnings) = from_settings::answers(settings, &self.target, machine);
        answers.finish.share = self.share;
        (answers, warnings)
    }

    /// The files of the set-up disk. A finished answer file of the user has its own way to end the
    /// installation, so that only `install.bat` is beside it.
    pub fn files(
        &self,
        answers: &Answers,
        install_bat: Option<&[u8]>,
        secrets: Secrets,
    ) -> anyhow::Result<Vec<SetupFile>> {
        let mut files = answer::files(answers, install_bat, secrets)?;
        let Some((path, kind)) = &self.custom else { return Ok(files) };
        let text = custom::load(path, *kind, answers, secrets)?;
        files.retain(|file| *kind == Kind::Template || file.path == INSTALL_BAT);
        files.retain(|file| file.path != AUTOUNATTEND);
        files.insert(0, SetupFile { path: AUTOUNATTEND, bytes: text.into_bytes() });
        Ok(files)
    }
}

/// One line, as in `Windows 11 Pro, unattended, with the answers of /custom.xml`.
impl fmt::Display for Unattended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, unattended", self.target.image.name)?;
        match &self.custom {
            Some((path, _)) => write!(f, ", with the answers of {}", path.display()),
            None => Ok(()),
        }
    }
}

/// The edition that VERSION names: always if it selected the medium, else if it names one beside
/// the release, as in `11l`.
fn wanted(input: &ParsedEnvironment, path: &Path, media: &Media) -> Option<&'static str> {
    let Version::Windows(product) = &input.settings.windows.version else { return None };
    let names_edition = || {
        input.names.contains("VERSION")
            && product.id.trim_end_matches("-eval").contains("-")
            && is_product(product, media)
    };
    let is_selected = selects(&input.settings.windows.version, path);
    (is_selected || names_edition()).then(|| usual(product.id))
}
