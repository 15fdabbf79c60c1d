//! The state of the volume, and the next step that follows from it: to install, to boot the disk,
//! to back up and install again, or to refuse. State files and rules are those of the reference
//! image, except that no disk is erased that may have an installed system.
//!
//! `windows.base` names the medium of the installation, `windows.boot` marks that its disk has
//! booted. Both are written before the step that they describe can be interrupted.

pub mod changes;
pub mod content;
pub mod name;
#[cfg(test)]
mod test;
pub mod testutil;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::disks::FoundDisk;
use crate::files;
use crate::settings::value::{Value as _, quote};
use crate::status::{Failure, Status};

use content::Content;

/// Extensions of state files: the medium of the installation, the version that installed, the mark
/// of a disk that has booted, and the mark of a Windows that is not set up yet, with the names of
/// the files to remove afterwards.
pub const BASE: &str = "base";
pub const VERSION: &str = "ver";
pub const BOOTED: &str = "boot";
pub const SETUP: &str = "setup";

/// The content of `windows.base`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Base {
    #[default]
    None,
    /// The name of the medium, as [`name::of`] makes it.
    Name(String),
    /// The file is no such name. The reason is a sentence.
    Invalid(String),
}

/// Content of the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The first disk, if there is one.
    pub disk: Option<PathBuf>,
    pub content: Content,
    /// Whether the disk is the pod's own file on the volume.
    pub own: bool,
    /// Whether the disk can be moved to a backup: it is such a file, and not a link.
    pub movable: bool,
    /// Whether the disk is marked as booted.
    pub booted: bool,
    /// The mark of a Windows that is not set up yet, if it is there.
    pub setup: Option<PathBuf>,
    pub base: Base,
    /// The folder of a backup that was interrupted.
    pub backup: Option<PathBuf>,
}

impl Found {
    /// Examines a volume whose state files begin with `app`.
    pub fn look(volume: &Path, app: &str, disk: Option<&FoundDisk>) -> Self {
        let file = |end: &str| volume.join(format!("{app}.{end}"));
        Self {
            disk: disk.map(|found| found.disk.path.clone()),
            content: disk.map_or(Content::Blank, |found| content::look(&found.disk)),
            own: disk.is_some_and(|found| found.own),
            movable: disk.is_some_and(|found| {
                found.own
                    && found.disk.path.parent() == Some(volume)
                    && !found.disk.path.is_symlink()
            }),
            booted: file(BOOTED).is_file(),
            setup: Some(file(SETUP)).filter(|path| path.is_file()),
            base: read_base(&file(BASE)),
            backup: changes::interrupted(volume),
        }
    }
}

fn read_base(path: &Path) -> Base {
    let invalid = |why: &str| {
        let out = "delete it, if you know what is installed";
        Base::Invalid(format!("{}: {why}: {out}", quote(&path.to_string_lossy())))
    };
    match files::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Base::None,
        Err(error) => invalid(&error.to_string()),
        Ok(text) => match text.trim() {
            "" => Base::None,
            text => name::of_base(text)
                .map_or_else(|| invalid("it is not the name of a medium"), Base::Name),
        },
    }
}

/// Request of the settings and mounts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The name of the medium, as [`name::of`] makes it. `None` if there is a mistake in what would
    /// be installed.
    pub name: Option<String>,
    /// The medium exists, so that nothing has to be downloaded.
    pub here: bool,
    /// MANUAL=Y: a person installs, and nothing is erased without asking.
    pub manual: bool,
    /// COMPAT=dockur.
    pub dockur: bool,
}

/// Why the disk is booted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// It has booted before.
    Booted,
    /// It has booted before, and the settings ask for another medium than this one.
    Changed(String),
    /// It has not booted here, but it has a boot loader.
    Bootable,
    /// Its content is unknown.
    Unknown,
}

/// The next step of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing is installed yet.
    Install,
    /// An installation was interrupted: it begins again.
    InstallAgain,
    /// A person installs, beside what is on the disk.
    ByHand,
    /// A medium runs without the machine's disks, which stay as they are.
    Live,
    Boot(Why),
    /// The installation moves to a backup, and another one begins.
    Replace,
}

/// A step, and its cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Next {
    pub found: Found,
    pub step: Step,
    /// The name of the medium of a new installation. `None` if that is not Windows.
    pub base: Option<String>,
}

/// Decides the next step. Refuses to erase what may be someone's data.
pub fn decide(found: &Found, wanted: &Wanted) -> anyhow::Result<Step> {
    let changed = changed(&found.base, wanted.name.as_deref());
    match found.content {
        // The disk is in the backup already.
        Content::Blank if found.backup.is_some() => Ok(Step::Replace),
        Content::Blank => Ok(Step::Install),
        _ if changed && wanted.dockur && (found.booted || found.content != Content::Unfinished) => {
            if found.movable {
                Ok(Step::Replace)
            } else {
                Err(refusal(found, CANNOT_MOVE))
            }
        }
        _ if found.booted && changed => Ok(Step::Boot(Why::Changed(found.base.name()))),
        _ if found.booted => Ok(Step::Boot(Why::Booted)),
        _ if wanted.manual && wanted.here => Ok(Step::ByHand),
        Content::Bootable => Ok(Step::Boot(Why::Bootable)),
        Content::Unknown => Ok(Step::Boot(Why::Unknown)),
        Content::Unfinished => match &found.base {
            Base::Name(_) if found.own => Ok(Step::InstallAgain),
            Base::Invalid(why) => Err(Failure::new(Status::State, why.clone())),
            _ => Err(refusal(found, NOT_OURS)),
        },
    }
}

/// Whether another medium is asked for than the installed one. If a custom medium is gone, the
/// installation stays.
fn changed(base: &Base, wanted: Option<&str>) -> bool {
    let (Base::Name(base), Some(wanted)) = (base, wanted) else { return false };
    let gone = name::is_custom(base) && !name::is_custom(wanted);
    !gone && !base.eq_ignore_ascii_case(wanted)
}

/// Reasons and ways out of refusals.
const NOT_OURS: &str = "is divided into partitions, but nothing can be started from it, and the \
                        volume does not say that an installation began on it: delete it if it has \
                        no data of yours, or set MANUAL=Y to install by hand";
const CANNOT_MOVE: &str = "has another installation than the settings ask for, and only a disk \
                           that is a file on the volume can be moved to a backup: take it away, \
                           or set VERSION as it was";

fn refusal(found: &Found, sentence: &str) -> anyhow::Error {
    let disk = found.disk.as_ref().map(|path| path.show()).unwrap_or_default();
    Failure::new(Status::State, format!("the disk {disk} {sentence}"))
}

impl Base {
    fn name(&self) -> String {
        match self {
            Self::Name(name) => name.clone(),
            _ => String::new(),
        }
    }
}

impl Step {
    /// The name for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Install => "install",
            Self::InstallAgain => "install-again",
            Self::ByHand => "by-hand",
            Self::Live => "live",
            Self::Boot(_) => "boot",
            Self::Replace => "replace",
        }
    }

    pub fn json(&self) -> Value {
        json!({ "name": self.name(), "reason": self.reason() })
    }

    pub fn boots(&self) -> bool {
        matches!(self, Self::Boot(_))
    }

    /// Whether what is on the disk stays.
    pub fn keeps(&self) -> bool {
        matches!(self, Self::Boot(_) | Self::ByHand | Self::Live)
    }

    /// Why this is the next step.
    pub fn reason(&self) -> String {
        match self {
            Self::Install => "nothing is installed yet".into(),
            Self::InstallAgain => {
                "an installation was interrupted before its disk could boot: it begins again".into()
            }
            Self::ByHand => "MANUAL=Y: the disk starts first, if it can".into(),
            Self::Live => "DISK_DISABLE=Y: the machine has no disks, which stay as they are".into(),
            Self::Boot(Why::Booted) => "it has booted before".into(),
            Self::Boot(Why::Changed(base)) => format!("{} is installed", quote(base)),
            Self::Boot(Why::Bootable) => "it has a boot loader".into(),
            Self::Boot(Why::Unknown) => "it has unknown data, which is kept".into(),
            Self::Replace => "the former installation moves to backups/ on the volume".into(),
        }
    }
}

impl Next {
    /// The warning about a step that may surprise.
    pub fn warning(&self) -> Option<String> {
        let disk = self.found.disk.as_ref().map(|path| path.show()).unwrap_or_default();
        match (&self.step, &self.found.base) {
            (Step::Install, _) if self.found.booted => {
                let what = match &self.found.disk {
                    Some(_) => format!("but {disk} is blank"),
                    None => "but its disk is not there".to_owned(),
                };
                Some(format!(
                    "a system was installed on this volume, {what}: a new one is installed: if \
                     that is wrong, stop the container, and check DISK_NAME, DEVICE and the mounts"
                ))
            }
            (Step::Boot(Why::Changed(base)), _) => Some(format!(
                "the settings ask for another Windows than the installed one ({}), which starts \
                 as it is: use another volume to install, or set COMPAT=dockur to move it to a \
                 backup first",
                quote(base)
            )),
            (Step::Boot(Why::Bootable), Base::Name(_)) => Some(format!(
                "an installation on {disk} was interrupted when it could boot already: it goes on \
                 there: if it does not start, move {disk} away to install again"
            )),
            (Step::Boot(Why::Booted), _) if self.found.setup.is_some() => {
                let mark = self.found.setup.as_ref().map(|path| path.show()).unwrap_or_default();
                Some(format!(
                    "Windows was interrupted before it was set up: it goes on: if it shows an \
                     error instead, move {disk} away to install again; if it works, remove {mark}"
                ))
            }
            (Step::Boot(_), Base::Invalid(why)) => Some(why.clone()),
            _ => None,
        }
    }
}
