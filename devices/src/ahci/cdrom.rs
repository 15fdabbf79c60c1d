//! A CD-ROM drive at a controller of its own, and the operator's commands for its tray.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::attach;
use super::port::{Port, SharedPort};
use super::target::{State, Target};
use crate::device::{Access, Device, Region, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::pci::Address;
use crate::scsi::{self, Bus, MediaEvent, Profile};
use host::disk::{self, Changes, Direct, Drive, Expected, FileId, Format, MediumOpener, Tray};

/// `--device ahci-cdrom,path=win11.iso`: a SATA CD-ROM drive.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The ISO. Without one, the drive is empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// The format, as for disks: `raw` or `qcow2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Bypasses the host's page cache: `on`, `off`, or `auto`, which is on where the file system
    /// can.
    pub direct: Direct,
    /// Patches of the ISO, as `OFFSET:OLD:NEW+...` with bytes in hexadecimal: the guest reads NEW
    /// where the file has OLD. Another ISO that is inserted later is not patched.
    pub overlay: Changes,
    /// PCI slot of the controller. Defaults to the first free slot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
    /// The serial number: at most 20 ASCII characters. By default, made from the name of the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// The file that is expected at the path.
    #[serde(skip)]
    pub file: Expected,
}

impl Config {
    fn disk(&self) -> disk::Config {
        disk::Config {
            format: self.format,
            readonly: true,
            direct: self.direct,
            overlay: self.overlay.clone(),
            serial: self.serial.clone(),
            queues: Some(1),
            ..disk::Config::new(self.path.clone().unwrap_or_default())
        }
    }
}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        self.overlay.check_cdrom()?;
        let disk = self.disk();
        let serial = if self.path.is_some() || self.serial.is_some() {
            disk.serial()?
        } else {
            grants.name().to_owned()
        };
        let opener = {
            let shared = grants.shared();
            MediumOpener::new(disk, grants.name(), shared.holds(), shared.disks.clone())
        };
        let medium = match &self.path {
            Some(path) if self.file != Expected::Nothing => {
                Some(scsi::open_medium(&opener, path, None, true)?)
            }
            _ => None,
        };
        let profile = Profile { bus: Bus::Sata, cdrom: true, removable: true, serial };
        let target = Target { state: State::cdrom(), profile, medium };
        let (device, port) = attach(target, self.slot, grants)?;
        let tray = Arc::new(CdTray { opener, port });
        grants.shared().disks.add_tray(&(tray.clone() as Arc<dyn Tray>));
        Ok(Box::new(Cdrom { device, _tray: tray }))
    }

    fn host_side(&self) -> HostSide<'_> {
        self.path.as_deref().map_or(HostSide::None, HostSide::Medium)
    }

    fn detach_host_side(&mut self) {
        self.file = Expected::Nothing;
    }
}

/// The device, which keeps its tray for the operator.
struct Cdrom {
    device: Box<dyn Device>,
    _tray: Arc<CdTray>,
}

impl Device for Cdrom {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        self.device.read(region, offset, data)
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        self.device.write(region, offset, data)
    }

    fn park(&mut self) -> Saved {
        self.device.park()
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        self.device.run(saved)
    }
}

struct CdTray {
    opener: MediumOpener,
    port: SharedPort,
}

impl Tray for CdTray {
    fn name(&self) -> &str {
        &self.opener.name
    }

    fn is_removable(&self) -> bool {
        true
    }

    fn is_locked(&self) -> bool {
        is_prevented(&self.port.lock())
    }

    fn medium(&self) -> Option<Arc<Drive>> {
        self.port.lock().target.medium.clone()
    }

    fn eject(&self, force: bool) -> anyhow::Result<()> {
        let name = self.name();
        let mut port = self.port.lock();
        ensure!(port.target.medium.is_some(), "there is no medium in {name}");
        if is_prevented(&port) && !force {
            if let State::Cdrom { conditions, .. } = &mut port.target.state {
                conditions.news = MediaEvent::EjectRequest;
            }
            anyhow::bail!(
                "the guest has locked the medium of {name}, and was asked to release it: use \
                 `force` to remove it anyway"
            );
        }
        port.remove_medium();
        Ok(())
    }

    fn insert(&self, path: &Path, only: Option<FileId>) -> anyhow::Result<()> {
        let name = self.name();
        ensure!(self.medium().is_none(), "there is already a medium in {name}: `eject` it first");
        let drive = scsi::open_medium(&self.opener, path, only, true)?;
        let mut port = self.port.lock();
        port.target.insert(drive);
        if let Err(error) = port.connect() {
            port.remove_medium();
            return Err(error);
        }
        Ok(())
    }
}

fn is_prevented(port: &Port) -> bool {
    matches!(&port.target.state, State::Cdrom { conditions, .. } if conditions.prevented)
}
