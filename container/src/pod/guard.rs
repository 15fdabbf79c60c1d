//! Access to the screen: the passwords for browsers and VNC viewers, and the socket that shows it.

use std::io::{self, ErrorKind};
use std::path::PathBuf;

use anyhow::Context as _;
use host::listen::Address;
use rustix::io::Errno;
use screen::rfb::listen;
use screen::web::viewers::Passwords;

use super::runtime_folder::RuntimeFolder;
use super::volume::Volume;
use crate::files;
use crate::plan::Plan;
use crate::settings::value::{Secret, Value as _};
use crate::settings::{Compat, Settings};
use crate::source::Source;
use crate::story::log_layer;

/// Letters of generated passwords. None of them looks like another.
const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
const PASSWORD_LENGTH: usize = 16;
/// Ending of the file on the volume with the password: `windows.password`.
const PASSWORD_FILE: &str = "password";
/// VNC authentication uses only the first letters of a password. Since VNC has no TLS here, an
/// eavesdropper of one login can easily find them. So viewers have a password of their own, which
/// is not a part of the other one.
const VNC_LENGTH: usize = Passwords::VNC_BYTES;
const VNC_FILE: &str = "vnc";
/// Ending of the file with the generated password of Windows' account.
const ACCOUNT_FILE: &str = "account";
/// Ending of the file with the fingerprint of the remote desktop's certificate.
pub(super) const CERTIFICATE_FILE: &str = "rdp";

/// Access to the screen.
#[derive(Debug)]
pub enum Guard {
    Open,
    Password {
        user: String,
        password: PathBuf,
        /// `None` without VNC.
        vnc: Option<PathBuf>,
    },
}

impl Guard {
    /// By default the screen asks for a password, except for the probe.
    pub fn of(
        plan: &Plan,
        volume: Option<&Volume>,
        runtime_folder: &RuntimeFolder,
    ) -> anyhow::Result<Self> {
        let settings = &plan.input.settings;
        let secret = settings.screen.pass.as_ref().map(|it| it.0.clone());
        let is_set = plan.input.names.contains("PASSWORD");
        let chosen = secret.clone().or_else(|| is_set.then(|| settings.account.password.0.clone()));
        let probe = plan.source == Source::Probe;
        let open = match settings.screen.protect {
            Some(true) => None,
            Some(false) => Some("PROTECT=N disables it"),
            // The reference image also asks if PASS is set.
            None if secret.is_some() => None,
            None if settings.pod.compat == Compat::Dockur => {
                Some("with COMPAT=dockur it asks only if PROTECT=Y or PASS is set")
            }
            None if chosen.is_none() && probe => {
                Some("with VERSION=probe it asks only if PASSWORD or PROTECT=Y is set")
            }
            None => None,
        };
        if let Some(why) = open {
            if !probe {
                tracing::warn!("the screen has no password: set PROTECT=Y to require one");
            }
            runtime_folder.write(runtime_folder.open(), why)?;
            return Ok(Self::Open);
        }
        // The probe has no volume of its own, but may keep a password on the configured one.
        let folder = &settings.storage.folder;
        let lent = match volume {
            None if probe && folder.is_dir() => Volume::open(settings, &plan.source).ok(),
            _ => None,
        };
        let volume = volume.or(lent.as_ref());
        let text = match chosen {
            Some(text) => text,
            None => kept_password(volume, PASSWORD_FILE, PASSWORD_LENGTH)?,
        };
        let vnc = settings.vnc().map(|_| {
            let text = kept_password(volume, VNC_FILE, VNC_LENGTH)?;
            runtime_folder.write(runtime_folder.vnc_password(), &text)
        });
        let password = runtime_folder.write(runtime_folder.password(), &text)?;
        Ok(Self::Password {
            user: settings.account.user.0.clone(),
            password,
            vnc: vnc.transpose()?,
        })
    }

    /// The password of Windows' account: PASSWORD, or one that is made for the installation. A made
    /// one is kept for as long as what was installed with it, whatever PASSWORD says later. The
    /// volume is ready for the installation. A page for everybody does not show the password.
    pub fn account_password(
        &self,
        plan: &Plan,
        volume: &Volume,
        runtime_folder: &RuntimeFolder,
    ) -> anyhow::Result<Secret> {
        let account = &plan.input.settings.account;
        let kept = kept(volume, ACCOUNT_FILE)?;
        if plan.next.as_ref().is_some_and(|next| next.step.keeps()) {
            kept.map(|text| runtime_folder.write(runtime_folder.account_password(), &text))
                .transpose()?;
            return Ok(account.password.clone());
        }
        let makes = plan.unattended.as_ref().is_some_and(|it| it.makes_password(&plan.input));
        if !makes {
            // That of an earlier installation, which this one overwrites.
            std::fs::remove_file(volume.file(ACCOUNT_FILE)).ok();
            return Ok(account.password.clone());
        }
        let text = match kept {
            Some(text) => text,
            None => {
                let text = keep(Some(volume), PASSWORD_FILE, PASSWORD_LENGTH)?;
                volume.write(ACCOUNT_FILE, &text)?;
                text
            }
        };
        runtime_folder.write(runtime_folder.account_password(), &text)?;
        let user = account.user.0.escape_debug();
        let line = format!("PASSWORD is not set: in Windows, {user} has the password {text}");
        match self {
            Self::Open => tracing::info!(target: log_layer::RECORDED, "{line}"),
            Self::Password { .. } => tracing::info!("{line}"),
        }
        Ok(Secret(text))
    }

    /// The made password of Windows' account, which pages show if they ask for a password.
    pub fn shown_password(&self, runtime_folder: &RuntimeFolder) -> Option<String> {
        match self {
            Self::Open => None,
            Self::Password { .. } => {
                std::fs::read_to_string(runtime_folder.account_password()).ok()
            }
        }
    }

    /// The password of Windows' account that the page of the remote desktop signs in with. A user
    /// who logged in with another one (`PASS`) may not know it, unless it was made.
    pub fn desktop_password(&self, settings: &Settings, volume: &Volume) -> Option<String> {
        let (password, made) = share_password(settings, Some(volume));
        let known = made || settings.screen.pass.is_none();
        (matches!(self, Self::Password { .. }) && known).then_some(password.0)
    }

    /// The socket on which the machine shows its screen. Only the pod connects to it, for browsers
    /// and VNC viewers.
    pub fn screen_socket(settings: &Settings, runtime_folder: &RuntimeFolder) -> listen::Config {
        listen::Config {
            address: Some(Address::Unix(runtime_folder.screen())),
            announced: true,
            name: Some(settings.title().to_owned()),
            ..listen::Config::default()
        }
    }
}

/// The password of the shared folders: that of Windows' account, made or set.
/// And whether it was made.
pub(super) fn share_password(settings: &Settings, volume: Option<&Volume>) -> (Secret, bool) {
    let made = volume.and_then(|volume| kept(volume, ACCOUNT_FILE).ok().flatten());
    let is_made = made.is_some();
    (made.map_or_else(|| settings.account.password.clone(), Secret), is_made)
}

/// A kept password of the screen, with a line in the log.
fn kept_password(volume: Option<&Volume>, end: &str, length: usize) -> anyhow::Result<String> {
    let place = match volume {
        None => "not kept, since there is no volume".to_owned(),
        Some(volume) => format!("in {}", volume.file(end).display()),
    };
    let text = keep(volume, end, length)?;
    let whose = match end {
        PASSWORD_FILE => "PASSWORD is not set: the generated password of the screen",
        _ => "the generated password for VNC viewers",
    };
    tracing::info!("{whose} is {place} (`transom password` in the container prints it)");
    Ok(text)
}

/// The password in a file of the volume. Others may write there: a link would show a file of the
/// pod in its log, and other text than a password would break the log. They are replaced; a file
/// that cannot be read now is an error.
fn kept(volume: &Volume, end: &str) -> anyhow::Result<Option<String>> {
    let text = match files::read_itself(&volume.file(end)) {
        Ok(text) => text,
        Err(error) if is_replaced(&error) => return Ok(None),
        Err(error) => return Err(volume.error(end, &error)),
    };
    let text = text.trim();
    Ok((!text.is_empty() && Secret::read(text).is_ok()).then(|| text.to_owned()))
}

/// Whether there is no file, or a link, or one without a text.
fn is_replaced(error: &io::Error) -> bool {
    let kinds = [ErrorKind::NotFound, ErrorKind::InvalidData, ErrorKind::InvalidInput];
    kinds.contains(&error.kind()) || Errno::from_io_error(error) == Some(Errno::LOOP)
}

/// The password that is kept on the volume, or a new one. Without a volume it is new each time.
fn keep(volume: Option<&Volume>, end: &str, length: usize) -> anyhow::Result<String> {
    if let Some(text) = volume.map(|volume| kept(volume, end)).transpose()?.flatten() {
        return Ok(text);
    }
    let text = random_password(length)?;
    volume.map_or(Ok(()), |volume| volume.write(end, &text))?;
    Ok(text)
}

/// With a capital letter, small ones and a digit, which Windows Server requires.
fn random_password(length: usize) -> anyhow::Result<String> {
    loop {
        let mut bytes = vec![0; length];
        let mut filled = 0;
        while filled < length {
            let flags = rustix::rand::GetRandomFlags::empty();
            filled +=
                rustix::rand::getrandom(&mut bytes[filled..], flags).context("random numbers")?;
        }
        let letter = |byte: &u8| char::from(LETTERS[usize::from(byte % 32)]);
        let text: String = bytes.iter().map(letter).collect();
        let (first, rest) = text.split_at(1);
        let has = |fits: fn(char) -> bool| rest.contains(fits);
        // A capital I looks like other letters.
        let has_capital = first.contains(|it: char| it.is_ascii_lowercase() && it != 'i');
        if has_capital && has(|it| it.is_ascii_digit()) && has(|it| it.is_ascii_lowercase()) {
            return Ok(first.to_ascii_uppercase() + rest);
        }
    }
}

#[cfg(test)]
mod test;
