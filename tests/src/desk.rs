//! A machine for people and viewers: its screen, keyboard and pointer are reached through ports of
//! this host, wherever the machine itself runs.

use std::fs;
use std::net::TcpListener;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tempfile::TempDir;

use crate::guest::{Guest, Running};
use crate::lab::{self, Lab};
use crate::sight::Sight;

/// The password for VNC and for browsers.
pub const PASSWORD: &str = "at desks";

/// The machine's name in window titles.
pub const NAME: &str = "a desk";

/// A machine that serves its screen to VNC viewers and to browsers.
pub struct Desk {
    pub running: Running,
    pub vnc: u16,
    pub web: u16,
    /// Kept because the running machine uses its files.
    _folder: TempDir,
}

impl Desk {
    /// Starts a guest on this host or in the lab, and waits until viewers can connect.
    pub fn start(lab: &Lab, guest: Guest, within: Duration) -> anyhow::Result<Self> {
        let lacks = lab::lacks()?;
        let folder = tempfile::tempdir()?;
        let password = folder.path().join("password");
        fs::write(&password, PASSWORD)?;
        let [vnc, web] = free_ports()?;
        // In the lab, connections from this host are not from its loopback.
        let address = if lacks.is_some() { "0.0.0.0" } else { "127.0.0.1" };
        let door = |port| format!("{address}:{port},name={NAME},password={}", password.display());
        let guest = guest.word("--vnc").word(door(vnc)).word("--web").word(door(web));
        let running = guest.start_as(|command| match lacks {
            Some(_) => lab.around(&command, &[vnc, web]),
            None => Ok(command),
        })?;
        let desk = Self { running, vnc, web, _folder: folder };
        let end = Instant::now() + within;
        for door in ["vnc: listening", "web: listening"] {
            while !desk.running.stderr().contains(door) {
                ensure!(Instant::now() < end, "no {door}: {}", desk.running.stderr());
                sleep(Duration::from_millis(100));
            }
        }
        Ok(desk)
    }
}

/// Two free ports of the loopback. The kernel chooses them at random, so that no other program gets
/// them before they are used.
pub fn free_ports() -> anyhow::Result<[u16; 2]> {
    let listen = || TcpListener::bind("127.0.0.1:0").context("a port of the loopback");
    let both = [listen()?, listen()?];
    let [one, two] = both.each_ref().map(|it| it.local_addr().map(|it| it.port()));
    Ok([one?, two?])
}

/// A key that has no letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    Enter,
    Escape,
    Down,
    Up,
    F10,
}

/// A person at the machine, simulated by a viewer or a browser.
pub trait Sitter {
    fn see(&mut self) -> anyhow::Result<Sight>;
    /// Types letters, digits, blanks and the other characters of an American keyboard.
    fn type_text(&mut self, text: &str) -> anyhow::Result<()>;
    fn press(&mut self, key: Key) -> anyhow::Result<()>;
    /// Moves the pointer to a pixel of the guest and presses its first button there.
    fn click(&mut self, x: u16, y: u16) -> anyhow::Result<()>;

    /// Waits until `found` accepts two equal pictures in a row, because a picture arrives in parts.
    /// On failure, the last picture is saved under `name`.
    fn until(
        &mut self,
        name: &str,
        within: Duration,
        found: &mut dyn FnMut(&Sight) -> bool,
    ) -> anyhow::Result<Sight> {
        let end = Instant::now() + within;
        let mut before = None;
        loop {
            let sight = self.see();
            if let Ok(sight) = &sight
                && found(sight)
                && before.replace(sight.clone()).is_some_and(|before| before == *sight)
            {
                return Ok(sight.clone());
            }
            if Instant::now() > end {
                let kept = sight?.keep(name)?;
                anyhow::bail!("{name}: not seen within {within:?}; the last picture is in {kept}");
            }
            sleep(Duration::from_millis(100));
        }
    }
}
