//! The list of devices. To add a device, add its file and a line here.

use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::ensure;
use serde::{Deserialize, Deserializer, Serialize};

use crate::device::Device;
use crate::grants::{Build, Grants, HostSide};
use host::disk::{self, FileId};
use host::net::Network;
use host::stream::Stream;

macro_rules! registry {
    ($($name:literal $kind:ident: $config:path,)*) => {
        /// The configuration of a device, for example `{"kind": "serial", "port": 2}`.
        #[derive(Clone, Debug, Serialize, Deserialize)]
        #[serde(tag = "kind")]
        pub enum Config {
            $(
                #[doc = concat!("`", $name, "`")]
                #[serde(rename = $name)]
                $kind($config),
            )*
        }

        pub const KINDS: &[&str] = &[$($name),*];

        impl Config {
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$kind(_) => $name),* }
            }

            /// Reads the fields of a device of this kind. Returns `None` if there is no such kind.
            ///
            /// For text input, where the type of a field decides how its value is parsed.
            pub fn of_kind<'de, D: Deserializer<'de>>(
                kind: &str,
                fields: D,
            ) -> Option<Result<Self, D::Error>> {
                match kind {
                    $($name => Some(Deserialize::deserialize(fields).map(Self::$kind)),)*
                    _ => None,
                }
            }

            pub fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
                match self { $(Self::$kind(config) => config.build(grants)),* }
            }

            pub fn fill_defaults(&mut self, processors: u16) {
                match self { $(Self::$kind(config) => config.fill_defaults(processors)),* }
            }

            pub fn is_usb(&self) -> bool {
                match self { $(Self::$kind(config) => config.is_usb()),* }
            }

            fn host_side(&self) -> HostSide<'_> {
                match self { $(Self::$kind(config) => config.host_side()),* }
            }

            /// See `Build::expect_file`.
            pub fn expect_file(&mut self, file: FileId) -> anyhow::Result<()> {
                let expects = match self { $(Self::$kind(config) => config.expect_file(file)),* };
                ensure!(expects, "`{}` has no file", self.kind());
                Ok(())
            }

            /// See `Build::take_file`.
            pub fn take_file(&mut self, file: OwnedFd) -> anyhow::Result<()> {
                match self { $(Self::$kind(config) => config.take_file(file)),* }
            }

            /// See `Build::detach_host_side`.
            pub fn detach_host_side(&mut self) {
                match self { $(Self::$kind(config) => config.detach_host_side()),* }
            }
        }
    };
}

registry! {
    "ahci-cdrom" AhciCdrom: crate::ahci::cdrom::Config,
    "ahci-disk" AhciDisk: crate::ahci::disk::Config,
    "debugcon" Debugcon: crate::platform::debugcon::Config,
    "display" Display: crate::display::bochs::Config,
    "e1000e" E1000e: crate::e1000e::Config,
    "edu" Edu: crate::pci::edu::Config,
    "flash" Flash: crate::platform::flash::Config,
    "hda" Hda: crate::hda::Config,
    "host-bridge" HostBridge: crate::pci::host::Config,
    "hpet" Hpet: crate::platform::hpet::Config,
    "i8042" I8042: crate::platform::i8042::Config,
    "lpc" Lpc: crate::pci::lpc::Config,
    "nvme" Nvme: crate::nvme::Config,
    "rtc" Rtc: crate::platform::rtc::Config,
    "serial" Serial: crate::platform::serial::Config,
    "tpm" Tpm: crate::platform::tpm::Config,
    "usb-host" UsbHost: crate::usb::passthrough::Config,
    "usb-keyboard" UsbKeyboard: crate::usb::hid::keyboard::Config,
    "usb-storage" UsbStorage: crate::usb::storage::Config,
    "usb-tablet" UsbTablet: crate::usb::hid::tablet::Config,
    "virtio-balloon" VirtioBalloon: crate::virtio::balloon::Config,
    "virtio-blk" VirtioBlk: crate::virtio::blk::Config,
    "virtio-gpu" VirtioGpu: crate::virtio::gpu::Config,
    "virtio-net" VirtioNet: crate::virtio::net::Config,
    "virtio-rng" VirtioRng: crate::virtio::rng::Config,
    "virtio-scsi" VirtioScsi: crate::virtio::scsi::Config,
    "virtio-serial" VirtioSerial: crate::virtio::console::Config,
    "xhci" Xhci: crate::usb::xhci::Config,
}

/// The name of the `count`th device of this kind, counted from 1: `serial`, then `serial.2`.
pub fn name(kind: &str, count: usize) -> String {
    if count < 2 { kind.to_owned() } else { format!("{kind}.{count}") }
}

impl Config {
    /// The image, if the device is a disk that cannot be removed from the machine.
    pub fn image(&self) -> Option<&Path> {
        if let HostSide::Image(path) = self.host_side() { Some(path) } else { None }
    }

    /// The image of a disk, or in a drive.
    pub fn file(&self) -> Option<&Path> {
        match self.host_side() {
            HostSide::Image(path) | HostSide::Medium(path) => Some(path),
            HostSide::None | HostSide::Network(_) | HostSide::Stream(_) => None,
        }
    }

    /// The disk, if it is one that cannot be removed from the machine.
    pub fn disk_mut(&mut self) -> Option<&mut disk::Config> {
        match self {
            Self::AhciDisk(crate::ahci::disk::Config(disk))
            | Self::Nvme(crate::nvme::Config(disk))
            | Self::VirtioBlk(crate::virtio::blk::Config(disk))
            | Self::VirtioScsi(crate::virtio::scsi::Config(disk)) => Some(disk),
            _ => None,
        }
    }

    pub fn network(&self) -> Option<&Network> {
        if let HostSide::Network(network) = self.host_side() { Some(network) } else { None }
    }

    pub fn stream(&self) -> Option<&Stream> {
        if let HostSide::Stream(stream) = self.host_side() { Some(stream) } else { None }
    }
}

#[cfg(test)]
mod test {
    use serde_json::{Value, json};

    use super::*;

    /// A device of this kind with its mandatory fields.
    fn device(kind: &str) -> Config {
        let needed = match kind {
            "ahci-disk" | "ahci-cdrom" | "nvme" | "virtio-blk" | "virtio-scsi" | "usb-storage"
            | "tpm" => {
                json!({ "path": "/a" })
            }
            "flash" => json!({ "code": "/a" }),
            "serial" | "virtio-serial" | "debugcon" => json!({ "to": "socket:/a" }),
            "e1000e" | "virtio-net" => json!({ "to": "tap:a" }),
            _ => json!({}),
        };
        Config::of_kind(kind, needed).unwrap().unwrap()
    }

    fn of(which: impl Fn(&mut Config) -> bool) -> Vec<&'static str> {
        KINDS.iter().copied().filter(|kind| which(&mut device(kind))).collect()
    }

    #[test]
    fn each_device_kind_lists_its_host_resources() {
        let disks = ["ahci-disk", "nvme", "virtio-blk", "virtio-scsi"];
        assert_eq!(of(|it| it.image() == Some(Path::new("/a"))), disks);
        assert_eq!(of(|it| it.image().is_some()), disks);
        assert_eq!(of(|it| it.network().is_some()), ["e1000e", "virtio-net"]);
        assert_eq!(of(|it| it.stream().is_some()), ["debugcon", "serial", "virtio-serial"]);
        assert_eq!(of(|it| it.is_usb()), ["usb-host", "usb-keyboard", "usb-storage", "usb-tablet"]);
        let file = FileId { device: 7, inode: 12 };
        assert_eq!(of(|it| it.expect_file(file).is_ok()), ["usb-storage"]);
        let error = device("nvme").expect_file(file).unwrap_err();
        assert_eq!(error.to_string(), "`nvme` has no file");
    }

    #[test]
    fn detaching_changes_every_kind_with_host_resources() {
        let changed = of(|it| {
            let before = format!("{it:?}");
            it.detach_host_side();
            before != format!("{it:?}")
        });
        let all = [
            "ahci-cdrom",
            "ahci-disk",
            "debugcon",
            "e1000e",
            "flash",
            "nvme",
            "serial",
            "tpm",
            "usb-host",
            "usb-storage",
            "virtio-blk",
            "virtio-net",
            "virtio-scsi",
            "virtio-serial",
        ];
        assert_eq!(changed, all);
        let mut console = device("virtio-serial");
        console.detach_host_side();
        assert_eq!(console.stream(), Some(&Stream::None));
    }

    #[test]
    fn disks_default_to_one_queue_per_processor() {
        let queues = |mut device: Config, processors| {
            device.fill_defaults(processors);
            serde_json::to_value(device).unwrap()["queues"].clone()
        };
        for (processors, count) in [(0, 1), (1, 1), (6, 6), (16, 16), (400, 16)] {
            for kind in KINDS {
                // A SATA disk always has one queue.
                let disk = device(kind).image().is_some() && *kind != "ahci-disk";
                let wanted = if disk { Value::from(count) } else { Value::Null };
                assert_eq!(queues(device(kind), processors), wanted, "{kind}");
            }
        }
        let chosen = Config::of_kind("nvme", json!({ "path": "/a", "queues": 3 }));
        assert_eq!(queues(chosen.unwrap().unwrap(), 8), 3);
    }

    #[test]
    fn further_devices_of_a_kind_are_numbered() {
        let names: Vec<_> = (1..4).map(|count| name("nvme", count)).collect();
        assert_eq!(names, ["nvme", "nvme.2", "nvme.3"]);
    }
}
