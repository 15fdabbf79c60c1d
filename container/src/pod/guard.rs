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
    use std::fs;

    use super::*;
    use crate::settings::environment::read;
    use crate::settings::settle::Sizes;

    /// What the screen asks for, if it does.
    fn asked(words: &[(&str, &str)], probe: bool) -> Option<String> {
        let folder = tempfile::tempdir().unwrap();
        let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        let mut said = read(&words).unwrap();
        said.settings.storage.folder = folder.path().to_owned();
        let source = if probe { Source::Probe } else { Source::Medium("/custom.iso".into()) };
        let (sizes, warnings) = (Sizes::default(), Vec::new());
        let plan = Plan { said, sizes, source, warnings };
        let volume = (!probe).then(|| Volume::open(&plan.said.settings, &plan.source).unwrap());
        let room = Room::within(folder.path());
        match Guard::of(&plan, volume.as_ref(), &room).unwrap() {
            Guard::Open => None,
            Guard::Asks { password, .. } => Some(fs::read_to_string(password).unwrap()),
        }
    }

    #[test]
    fn the_screen_asks_unless_somebody_says_otherwise() {
        let [dockur, pass, password] =
            [("COMPAT", "dockur"), ("PASS", "hush"), ("PASSWORD", "hushhush")];
        let [yes, no] = ["Y", "N"].map(|word| ("PROTECT", word));
        assert_eq!(asked(&[], false).map(|it| it.len()), Some(LENGTH));
        assert_eq!(asked(&[], true), None);
        for (words, is) in [
            (&[dockur][..], None),
            (&[dockur, password], None),
            (&[no], None),
            (&[no, pass], None),
            (&[password], Some("hushhush")),
            (&[pass], Some("hush")),
            (&[pass, password, dockur], Some("hush")),
            (&[dockur, yes, password], Some("hushhush")),
        ] {
            assert_eq!(asked(words, false).as_deref(), is, "{words:?}");
        }
        assert_eq!(asked(&[pass], true).as_deref(), Some("hush"));
        assert_eq!(asked(&[yes], true).as_deref(), Some("admin"));
    }

    #[test]
    fn a_password_that_is_made_is_another_each_time() {
        let [one, two] = [made().unwrap(), made().unwrap()];
        assert_ne!(one, two);
        assert_eq!(one.len(), LENGTH);
        assert!(one.bytes().all(|it| LETTERS.contains(&it)));
    }
}
