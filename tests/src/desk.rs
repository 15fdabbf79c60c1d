//! A place to sit at: a machine whose screen, keyboard and pointer are reached through ports of
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

/// What both doors ask for.
pub const PASSWORD: &str = "at desks";

/// What windows are called.
pub const NAME: &str = "a desk";

/// A machine that serves its screen to VNC viewers and to browsers.
pub struct Desk {
    /// The machine.
    pub running: Running,
    /// The port for viewers.
    pub vnc: u16,
    /// The port for browsers.
    pub web: u16,
    /// What is in it must stay as long as the machine runs.
    _folder: TempDir,
}

impl Desk {
    /// Switches a guest on, on this host or in the lab, and waits until viewers are let in.
    ///
    /// # Errors
    ///
    /// When it does not start in time.
    pub fn start(lab: &Lab, guest: Guest, within: Duration) -> anyhow::Result<Self> {
        let lacks = lab::lacks()?;
        let folder = tempfile::tempdir()?;
        let password = folder.path().join("password");
        fs::write(&password, PASSWORD)?;
        let [vnc, web] = free_ports()?;
        // In the lab, who comes from this host comes from outside.
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
            while !desk.running.complaints().contains(door) {
                ensure!(Instant::now() < end, "no {door}: {}", desk.running.complaints());
                sleep(Duration::from_millis(100));
            }
        }
        Ok(desk)
    }
}

/// Ports of the loopback that nobody has. The kernel gives each at random, so nobody else gets
/// them in the moment until they are taken.
///
/// # Errors
///
/// When there are none.
pub fn free_ports() -> anyhow::Result<[u16; 2]> {
    let listen = || TcpListener::bind("127.0.0.1:0").context("a port of the loopback");
    let both = [listen()?, listen()?];
    let [one, two] = both.each_ref().map(|it| it.local_addr().map(|it| it.port()));
    Ok([one?, two?])
}

/// A key that has no letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Enter
    Enter,
    /// Escape
    Escape,
    /// The arrow down.
    Down,
    /// The arrow up.
    Up,
    /// F10
    F10,
}

/// Somebody who sits there.
pub trait Sitter {
    /// What is seen at this moment.
    ///
    /// # Errors
    ///
    /// When there is nothing to be seen.
    fn see(&mut self) -> anyhow::Result<Sight>;
    /// Types small and capital letters, digits, blanks and what else is on an American keyboard.
    ///
    /// # Errors
    ///
    /// When there is no keyboard.
    fn type_text(&mut self, text: &str) -> anyhow::Result<()>;
    /// Presses a key.
    ///
    /// # Errors
    ///
    /// When there is no keyboard.
    fn press(&mut self, key: Key) -> anyhow::Result<()>;
    /// Moves the pointer to a pixel of the guest and presses its first button there.
    ///
    /// # Errors
    ///
    /// When there is no pointer.
    fn click(&mut self, x: u16, y: u16) -> anyhow::Result<()>;

    /// Looks until what is looked for is there, and stays as it is: a picture comes in parts.
    ///
    /// # Errors
    ///
    /// When it does not come in time: what was seen last is kept with this name.
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
                anyhow::bail!("{name}: not seen within {within:?}; the last that was is in {kept}");
            }
            sleep(Duration::from_millis(100));
        }
    }
}
