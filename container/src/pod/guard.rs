//! Who may see the screen, and where it is shown.

use std::path::PathBuf;

use anyhow::Context as _;

use super::room::Room;
use super::volume::Volume;
use crate::plan::{Plan, Source};
use crate::settings::translate::Display;
use crate::settings::{Compat, Settings};

/// The letters of a password that we make: none that looks like another.
const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
const LENGTH: usize = 16;
/// The file on the volume that has it: `windows.password`.
const KEPT: &str = "password";

/// Who may see the screen.
#[derive(Debug)]
pub enum Guard {
    /// Everybody who reaches its port.
    Open,
    /// Who knows this.
    Asks {
        /// The name.
        user: String,
        /// The file with the password.
        password: PathBuf,
    },
}

impl Guard {
    /// As the settings say; if they say nothing the screen asks, unless there is nothing to guard.
    ///
    /// # Errors
    ///
    /// When the password cannot be kept.
    pub fn of(plan: &Plan, volume: Option<&Volume>, room: &Room) -> anyhow::Result<Self> {
        let settings = &plan.said.settings;
        let secret = settings.screen.pass.as_ref().map(|it| it.0.clone());
        let asks = match settings.screen.protect {
            Some(asks) => asks,
            // The reference image's word for a password is enough.
            None if secret.is_some() => true,
            None => settings.pod.compat != Compat::Dockur && plan.source != Source::Probe,
        };
        if !asks {
            if plan.source != Source::Probe {
                tracing::warn!("whoever reaches the screen's port may use it (PROTECT, COMPAT)");
            }
            return Ok(Self::Open);
        }
        let said = plan.said.names.contains("PASSWORD");
        let said = secret.or_else(|| said.then(|| settings.account.password.0.clone()));
        let text = match (said, volume) {
            (Some(text), _) => text,
            (None, Some(volume)) => kept(volume)?,
            (None, None) => settings.account.password.0.clone(),
        };
        let password = room.keep_password(&text)?;
        Ok(Self::Asks { user: settings.account.user.0.clone(), password })
    }

    /// Where the machine shows its screen, in the words of `vmm --vnc`.
    pub fn doors(&self, settings: &Settings, room: &Room) -> Vec<String> {
        let escaped = |path: &PathBuf| path.display().to_string().replace(',', ",,");
        let name = format!("name={}", settings.pod.app.0.replace(',', ",,"));
        let mut doors = Vec::new();
        if matches!(settings.screen.display.is, Display::Web | Display::Vnc) {
            let port = settings.screen.vnc_port.0;
            let who = match self {
                Self::Open => "auth=none".to_owned(),
                Self::Asks { password, .. } => format!("password={}", escaped(password)),
            };
            doors.push(format!("[::]:{port},{who},called=VNC_PORT={port}"));
        }
        // That of the viewer in the browser, which we let in ourselves.
        doors.push(format!("unix:{},{name}", escaped(&room.screen())));
        doors
    }
}

/// The password that was made for this volume.
fn kept(volume: &Volume) -> anyhow::Result<String> {
    let path = volume.file(KEPT);
    let text = match volume.read(KEPT).filter(|text| !text.is_empty()) {
        Some(text) => text,
        None => {
            let text = made()?;
            volume.write(KEPT, &text)?;
            text
        }
    };
    tracing::info!(
        "PASSWORD is not set, and one that everybody knows would guard nothing: the screen's is in \
         {} (`transom password` in the container prints it)",
        path.display()
    );
    Ok(text)
}

/// A new password.
fn made() -> anyhow::Result<String> {
    let mut bytes = [0; LENGTH];
    let mut filled = 0;
    while filled < LENGTH {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut bytes[filled..], flags).context("random numbers")?;
    }
    Ok(bytes.iter().map(|byte| char::from(LETTERS[usize::from(byte % 32)])).collect())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_password_that_is_made_is_another_each_time() {
        let [one, two] = [made().unwrap(), made().unwrap()];
        assert_ne!(one, two);
        assert_eq!(one.len(), LENGTH);
        assert!(one.bytes().all(|it| LETTERS.contains(&it)));
    }
}
