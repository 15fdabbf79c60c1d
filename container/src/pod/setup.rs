//! The set-up disk of a running machine. It is pulled out when Windows first boots from its own
//! disk: by then its setup has copied everything.

use std::path::PathBuf;

use vmm::control::Command;

use super::machine_client;
use crate::setup_disk::DiskMemory;

pub struct PluggedDisk {
    pub memory: DiskMemory,
    /// The device's name.
    pub name: String,
    pub control: PathBuf,
}

impl PluggedDisk {
    /// Frees the disk's memory when the machine has released it.
    pub async fn unplug(self) {
        let Self { memory, name, control } = self;
        let detached = machine_client::ask(&control, Command::Detach { name }).await;
        match detached.and_then(|_| memory.free()) {
            Ok(()) => tracing::info!("the set-up disk is pulled out: Windows has copied it"),
            Err(error) => tracing::warn!("the set-up disk stays in the machine: {error:#}"),
        }
    }
}
