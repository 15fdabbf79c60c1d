//! A machine that moves to another pod on the same volume (`SHUTDOWN=migrate`).
//!
//! The pod that runs the machine holds the lock of the folder of the suspended machine, and writes
//! [`Running`] there. A pod that finds the lock taken waits, and writes [`Waiting`]. Each file has
//! a public key, and each pod accepts only the other one's (`tls`): somebody who can write to the
//! volume has the disks anyway, and somebody who can only read it learns no secret. When the first
//! pod is to stop, its machine moves (`pod/departure.rs`, `pod/arrival.rs`). If it suspends the
//! machine or shuts it down instead, or is gone, the other pod gets the lock, and starts as usual.

pub mod tls;

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use ::host::lock;
use anyhow::{Context as _, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::files;

/// The file of the pod that runs the machine.
pub const RUNNING: &str = "running.json";
/// The file of the pod that waits for it, and the one that it keeps locked.
pub const WAITING: &str = "waiting.json";
pub const WAITING_LOCK: &str = "waiting.lock";
/// The line that a waiting pod sends when it has accepted the other one.
pub const ACCEPTED: &[u8; 20] = b"transom migration 1\n";
/// The most addresses that are tried.
const MAX_ADDRESSES: usize = 16;
/// Other versions may mean something else with these files.
const FORMAT: u32 = 1;

/// The pod that runs the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    format: u32,
    pub key: tls::PublicKey,
    /// The sizes that its guest knows.
    pub processors: u32,
    pub memory: u64,
}

/// A pod that waits for the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    format: u32,
    pub key: tls::PublicKey,
    pub addresses: Vec<IpAddr>,
    pub port: u16,
}

impl Running {
    pub fn new(key: tls::PublicKey, processors: u32, memory: u64) -> Self {
        Self { format: FORMAT, key, processors, memory }
    }

    /// The pod that runs the machine now.
    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        let found: Self = read(&folder.join(RUNNING))?;
        check(found.format).map(|()| found)
    }

    pub fn write(&self, folder: &Path) -> anyhow::Result<()> {
        write(&folder.join(RUNNING), self)
    }
}

impl Waiting {
    pub fn new(key: tls::PublicKey, mut addresses: Vec<IpAddr>, port: u16) -> Self {
        addresses.truncate(MAX_ADDRESSES);
        Self { format: FORMAT, key, addresses, port }
    }

    /// The pod that waits now, if one does.
    pub fn find(folder: &Path) -> anyhow::Result<Option<Self>> {
        // The file of a pod that was killed stays. Between lock and file there is a moment.
        if !is_taken(&folder.join(WAITING_LOCK))? || !folder.join(WAITING).exists() {
            return Ok(None);
        }
        let found: Self = read(&folder.join(WAITING))?;
        check(found.format)?;
        let count = found.addresses.len();
        ensure!(count <= MAX_ADDRESSES, "the waiting pod has {count} addresses");
        Ok(Some(found))
    }
}

/// The place of the one pod that waits. Dropping it gives the place up.
#[derive(Debug)]
pub struct Place(File);

impl Place {
    /// Takes the place, unless another pod has it.
    pub fn take(folder: &Path, waiting: &Waiting) -> anyhow::Result<Option<Self>> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = files::open_itself(&folder.join(WAITING_LOCK), &mut options)?;
        if !lock::take_again(&file)? {
            return Ok(None);
        }
        write(&folder.join(WAITING), waiting)?;
        Ok(Some(Self(file)))
    }

    /// Removes the file, too.
    pub fn leave(self, folder: &Path) {
        fs::remove_file(folder.join(WAITING)).ok();
        lock::release(&self.0).ok();
    }
}

/// Whether another pod has locked this file. Follows no link.
pub fn is_taken(path: &Path) -> io::Result<bool> {
    match files::open_itself(path, File::options().read(true).write(true)) {
        Ok(file) => Ok(!lock::take_again(&file)?),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes all files of this module.
pub fn clear(folder: &Path) {
    for name in [RUNNING, WAITING, WAITING_LOCK] {
        fs::remove_file(folder.join(name)).ok();
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let shown = || path.display().to_string();
    let text = files::read_itself(path).with_context(shown)?;
    serde_json::from_str(&text).with_context(shown)
}

fn write(path: &Path, content: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string(content)?;
    let written = files::write(path, |file| file.write_all(text.as_bytes()));
    written.with_context(|| path.display().to_string())
}

fn check(format: u32) -> anyhow::Result<()> {
    ensure!(format == FORMAT, "the other pod has another version: use the same image for both");
    Ok(())
}

#[cfg(test)]
mod test;
