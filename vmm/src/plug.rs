//! What is plugged and pulled at USB while the machine runs, and what is put into drives.
//!
//! Files are opened by their paths here: the jail lets through what lies beside the machine's own.

use std::path::Path;

use anyhow::{Context, ensure};
use host::disk::{FileId, Tray};
use serde_json::{Value, json};

use crate::config::Config;
use crate::machine::Machine;

/// Plugs in a device, in the words of `--device`.
///
/// # Errors
///
/// When it is no device, or cannot be plugged in.
pub fn attach(machine: &mut Machine, words: &str, only: Option<FileId>) -> anyhow::Result<Value> {
    let mut config = Config::default();
    config.set("device", words).context("attach")?;
    let mut device = config.device.pop().context("no device")?;
    if let Some(file) = only {
        device.expect(file)?;
    }
    let name = machine.attach(device)?;
    tracing::info!("{name} is plugged in");
    Ok(json!({ "name": name }))
}

/// Pulls a device out.
///
/// # Errors
///
/// When there is none of this name.
pub fn detach(machine: &mut Machine, name: &str) -> anyhow::Result<Value> {
    machine.detach(name)?;
    tracing::info!("{name} is pulled out");
    Ok(json!({}))
}

/// Takes a medium out.
///
/// # Errors
///
/// When there is none, or the guest holds it.
pub fn eject(machine: &Machine, name: &str, force: bool) -> anyhow::Result<Value> {
    let drive = machine.disks().tray(name)?;
    drive.eject(force)?;
    Ok(show(&*drive))
}

/// Puts a medium in.
///
/// # Errors
///
/// When there is one, or it cannot be opened.
pub fn insert(
    machine: &Machine,
    name: &str,
    path: &Path,
    only: Option<FileId>,
) -> anyhow::Result<Value> {
    ensure!(!path.as_os_str().is_empty(), "insert needs a path");
    let drive = machine.disks().tray(name)?;
    drive.insert(path, only)?;
    Ok(show(&*drive))
}

/// All drives whose media can be changed.
pub fn drives(machine: &Machine) -> Vec<Value> {
    machine.disks().trays().iter().map(|drive| show(&**drive)).collect()
}

/// A drive, and what is in it.
fn show(drive: &dyn Tray) -> Value {
    let medium = drive.medium().map(|medium| medium.path().display().to_string());
    json!({ "name": drive.name(), "medium": medium, "locked": drive.is_locked() })
}
