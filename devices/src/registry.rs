//! The list of devices. Adding one is adding its file, and its line here.

use anyhow::bail;
use serde::{Deserialize, Deserializer, Serialize};

use crate::device::Device;
use crate::grants::{Build, Grants};
use host::disk::{Expected, FileId};
use host::net::Network;
use host::stream::Stream;

macro_rules! registry {
    ($($name:literal $kind:ident: $config:path,)*) => {
        /// A device as the configuration names it: `{"kind": "serial", "port": 2}`.
        #[derive(Clone, Debug, Serialize, Deserialize)]
        #[serde(tag = "kind")]
        pub enum Config {
            $(
                #[doc = concat!("`", $name, "`")]
                #[serde(rename = $name)]
                $kind($config),
            )*
        }

        /// The kinds, in the words of the configuration.
        pub const KINDS: &[&str] = &[$($name),*];

        impl Config {
            /// The word that names this kind.
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$kind(_) => $name),* }
            }

            /// Reads the fields of a device of this kind; none when there is no such kind.
            ///
            /// This is the door for text, where a field's type decides what a word means.
            ///
            /// # Errors
            ///
            /// When the fields do not fit the kind.
            pub fn of_kind<'de, D: Deserializer<'de>>(
                kind: &str,
                fields: D,
            ) -> Option<Result<Self, D::Error>> {
                match kind {
                    $($name => Some(Deserialize::deserialize(fields).map(Self::$kind)),)*
                    _ => None,
                }
            }

            /// Builds the device.
            ///
            /// # Errors
            ///
            /// When it cannot have what it needs.
            pub fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
                match self { $(Self::$kind(config) => config.build(grants)),* }
            }
        }
    };
}

registry! {
    "debugcon" Debugcon: crate::platform::debugcon::Config,
    "display" Display: crate::display::bochs::Config,
    "edu" Edu: crate::pci::edu::Config,
    "flash" Flash: crate::platform::flash::Config,
    "host-bridge" HostBridge: crate::pci::host::Config,
    "hpet" Hpet: crate::platform::hpet::Config,
    "i8042" I8042: crate::platform::i8042::Config,
    "lpc" Lpc: crate::pci::lpc::Config,
    "nvme" Nvme: crate::nvme::Config,
    "rtc" Rtc: crate::platform::rtc::Config,
    "serial" Serial: crate::platform::serial::Config,
    "tpm" Tpm: crate::platform::tpm::Config,
    "usb-keyboard" UsbKeyboard: crate::usb::hid::keyboard::Config,
    "usb-storage" UsbStorage: crate::usb::storage::Config,
    "usb-tablet" UsbTablet: crate::usb::hid::tablet::Config,
    "virtio-balloon" VirtioBalloon: crate::virtio::balloon::Config,
    "virtio-blk" VirtioBlk: crate::virtio::blk::Config,
    "virtio-net" VirtioNet: crate::virtio::net::Config,
    "virtio-rng" VirtioRng: crate::virtio::rng::Config,
    "virtio-scsi" VirtioScsi: crate::virtio::scsi::Config,
    "virtio-serial" VirtioSerial: crate::virtio::console::Config,
    "xhci" Xhci: crate::usb::xhci::Config,
}

/// The name of the device of this kind that is built as the `count`th, from 1: `serial`, then
/// `serial.2`.
#[must_use]
pub fn name(kind: &str, count: usize) -> String {
    if count < 2 { kind.to_owned() } else { format!("{kind}.{count}") }
}

/// The most queues of a disk that nobody chose: more serve no guest better.
const QUEUES: u16 = 16;

impl Config {
    /// Chooses what a machine with so many processors wants, where it was not said.
    pub fn suit(&mut self, processors: u16) {
        if let Self::Nvme(crate::nvme::Config(disk))
        | Self::VirtioBlk(crate::virtio::blk::Config(disk))
        | Self::VirtioScsi(crate::virtio::scsi::Config(disk)) = self
        {
            disk.queues.get_or_insert(processors.clamp(1, QUEUES));
        }
    }

    /// Whether it can be plugged into a machine that runs.
    #[must_use]
    pub fn is_usb(&self) -> bool {
        matches!(self, Self::UsbKeyboard(_) | Self::UsbStorage(_) | Self::UsbTablet(_))
    }

    /// The image of a disk that stays in the machine.
    #[must_use]
    pub fn image(&self) -> Option<&std::path::Path> {
        match self {
            Self::Nvme(crate::nvme::Config(disk))
            | Self::VirtioBlk(crate::virtio::blk::Config(disk))
            | Self::VirtioScsi(crate::virtio::scsi::Config(disk)) => Some(&disk.path),
            _ => None,
        }
    }

    /// The network that it is connected to.
    #[must_use]
    pub fn network(&self) -> Option<&Network> {
        match self {
            Self::VirtioNet(net) => Some(&net.to),
            _ => None,
        }
    }

    /// Where its bytes go to and come from.
    #[must_use]
    pub fn stream(&self) -> Option<&Stream> {
        match self {
            Self::Serial(serial) => Some(&serial.to),
            Self::VirtioSerial(serial) => Some(&serial.to),
            Self::Debugcon(debugcon) => Some(&debugcon.to),
            _ => None,
        }
    }

    /// Whatever lies at its path, only this file is opened.
    ///
    /// # Errors
    ///
    /// When it has none that can be plugged in.
    pub fn expect(&mut self, file: FileId) -> anyhow::Result<()> {
        let Self::UsbStorage(disk) = self else { bail!("`{}` has no file", self.kind()) };
        disk.file = Expected::Only(file);
        Ok(())
    }

    /// Takes away what changes the host: a machine that is only looked at truncates no log, takes
    /// no lock and makes no socket.
    pub fn leave_host_alone(&mut self) {
        match self {
            Self::Serial(serial) => serial.to = Stream::None,
            Self::VirtioSerial(serial) => serial.to = Stream::None,
            Self::Debugcon(debugcon) => debugcon.to = Stream::None,
            Self::Flash(flash) => flash.readonly = true,
            Self::Nvme(disk) => disk.0.file = Expected::Nothing,
            Self::VirtioNet(net) => net.to = Network::None,
            Self::VirtioBlk(disk) => disk.0.file = Expected::Nothing,
            Self::VirtioScsi(disk) => disk.0.file = Expected::Nothing,
            Self::UsbStorage(disk) => disk.file = Expected::Nothing,
            Self::Tpm(tpm) => tpm.absent = true,
            _ => {}
        }
    }
}
