//! Hot-plugs USB devices, and inserts and ejects media, while the machine runs.
//!
//! Files are opened by their paths inside the jail, which allows the folders of the machine's own
//! files. A USB device of the host is opened by the client of the control socket, which passes it.

use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, ensure};
use host::disk::{FileId, Tray};
use serde_json::{Value, json};

use crate::config::Config;
use crate::machine::Machine;

/// `words` are written like the value of `--device`. `open` is a file that the client passed.
pub fn attach(
    machine: &mut Machine,
    words: &str,
    only: Option<FileId>,
    open: Option<OwnedFd>,
) -> anyhow::Result<Value> {
    let mut config = Config::default();
    config.set("device", words).context("attach")?;
    let mut device = config.device.pop().context("no device")?;
    if let Some(file) = only {
        device.expect_file(file)?;
    }
    if let Some(file) = open {
        device.take_file(file)?;
    }
    let name = machine.attach(device)?;
    tracing::info!("{name} is plugged in");
    Ok(json!({ "name": name }))
}

pub fn detach(machine: &mut Machine, name: &str) -> anyhow::Result<Value> {
    machine.detach(name)?;
    tracing::info!("{name} is unplugged");
    Ok(json!({}))
}

/// `force` ejects the medium even if the guest has locked the drive.
pub fn eject(machine: &Machine, name: &str, force: bool) -> anyhow::Result<Value> {
    let drive = machine.shared().disks.tray(name)?;
    drive.eject(force)?;
    Ok(show(&*drive))
}

pub fn insert(
    machine: &Machine,
    name: &str,
    path: &Path,
    only: Option<FileId>,
) -> anyhow::Result<Value> {
    ensure!(!path.as_os_str().is_empty(), "insert needs a path");
    let drive = machine.shared().disks.tray(name)?;
    drive.insert(path, only)?;
    Ok(show(&*drive))
}

/// All drives with removable media.
pub fn drives(machine: &Machine) -> Vec<Value> {
    machine.shared().disks.trays().iter().map(|drive| show(&**drive)).collect()
}

fn show(drive: &dyn Tray) -> Value {
    let medium = drive.medium().map(|medium| medium.path.display().to_string());
    json!({ "name": drive.name(), "medium": medium, "locked": drive.is_locked() })
}
