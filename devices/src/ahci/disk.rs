//! A disk at a controller of its own.

use std::sync::Arc;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::attach;
use super::target::{State, Target};
use crate::device::Device;
use crate::grants::{Build, Grants, HostSide};
use crate::scsi::{Bus, Profile};
use host::disk::{Expected, Image};

/// `--device ahci-disk,path=disk.img`: a SATA disk. Every system has a driver for it, also old
/// ones.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Config(pub host::disk::Config);

impl Build for Config {
    fn build(mut self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let queues = self.0.queues.get_or_insert(1);
        ensure!(*queues == 1, "queues={queues}: a SATA disk has one queue: leave it out");
        let image = self.0.open(grants.shared().holds())?;
        self.attach_image(image, grants)
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::Image(&self.0.path)
    }

    fn detach_host_side(&mut self) {
        self.0.file = Expected::Nothing;
    }
}

impl Config {
    /// Creates a controller for an image that is already open.
    pub fn attach_image(
        self,
        image: Arc<dyn Image>,
        grants: &mut dyn Grants,
    ) -> anyhow::Result<Box<dyn Device>> {
        let drive = self.0.drive(image, grants.name())?;
        grants.shared().disks.add(&drive);
        let serial = drive.serial.clone();
        let profile = Profile { bus: Bus::Sata, cdrom: false, removable: false, serial };
        let target = Target { state: State::disk(), profile, medium: Some(drive) };
        Ok(attach(target, self.0.slot, grants)?.0)
    }
}
