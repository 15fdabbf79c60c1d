//! The resources that a machine grants to a device at build time, and those that all devices share.

use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};

use crate::balloon;
use crate::bus::{Spaces, Window};
use crate::device::{Device, Kind};
use crate::hypervisor::Hypervisor;
use crate::pci;
use crate::power::Buttons;
use crate::resources::Resources;
use crate::smi;
use crate::time::Time;
use crate::usb;
use host::disk::{Disks, FileId, Holds, VolumeChange};
use host::display::Screens;
use host::input::Hub;
use host::memory::Memory;
use host::net::Network;
use host::net::link::Links;
use host::stream::Stream;
use host::{clipboard, sound};

/// Grants resources to one device at build time.
pub trait Grants: Resources {
    /// Grants a PCI function, with its configuration space, BARs and interrupts.
    fn pci(&mut self, identity: pci::Identity) -> anyhow::Result<pci::Slot>;
    /// Declares an ACPI device. Its `_CRS` consists of the grants since the previous call. One chip
    /// can thus be two devices (keyboard and mouse). Grants after the last call belong to no ACPI
    /// device. See `Claim::nodes`.
    fn acpi(&mut self, hid: &'static str);
    /// The name of the device: `nvme`, or `nvme.2` for the second one. For display only.
    fn name(&self) -> &str;
    fn shared(&self) -> &Shared;
    /// Whether the machine comes from a snapshot or from another process. Its files for output
    /// then keep what they have.
    fn goes_on(&self) -> bool;
}

/// The configuration of a device, which builds the device. Its fields define the command line flag,
/// the JSON and the reference.
pub trait Build: Serialize + DeserializeOwned {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>>;

    /// Sets fields that the user left open to suit a machine with this number of processors.
    fn fill_defaults(&mut self, _processors: u16) {}

    /// Whether the device is a USB device, which can be plugged into a running machine.
    fn is_usb(&self) -> bool {
        false
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::None
    }

    /// Makes the device open only this file: opening fails if its path leads to another one.
    /// Returns false if the device has no file or cannot be plugged in.
    fn expect_file(&mut self, _file: FileId) -> bool {
        false
    }

    /// Makes the device use this open file, which a client of the control socket passed.
    fn take_file(&mut self, _file: OwnedFd) -> anyhow::Result<()> {
        anyhow::bail!("only `usb-host` takes an open file")
    }

    /// Removes every effect on the host, for `vmm inspect`: building the device then truncates no
    /// log, takes no lock and creates no socket.
    fn detach_host_side(&mut self) {}
}

/// The host resource of a device that the machine must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostSide<'a> {
    None,
    /// The image of a disk that cannot be removed from the machine.
    Image(&'a Path),
    /// The image in a drive, or of a disk that can be removed.
    Medium(&'a Path),
    Network(&'a Network),
    Stream(&'a Stream),
}

#[derive(Clone, Debug)]
pub enum Claim {
    Fixed(Kind, Range<u64>),
    Window(Arc<Window>),
    /// A pin of the interrupt controllers.
    Line(u32),
    Pci(pci::Address, pci::Id),
    /// An ACPI device that owns the claims since the previous `Acpi`.
    Acpi(&'static str),
}

impl Claim {
    /// Returns the ACPI devices in a device's claims: the name, and the claims for its `_CRS`.
    pub fn nodes(claims: &[Self]) -> impl Iterator<Item = (&'static str, &[Self])> {
        claims.split_inclusive(|claim| matches!(claim, Self::Acpi(_))).filter_map(|part| match part
            .split_last()
        {
            Some((Self::Acpi(hid), granted)) => Some((*hid, granted)),
            _ => None,
        })
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(kind, range) => {
                write!(f, "{kind} {:#x}-{:#x}", range.start, range.end - 1)
            }
            Self::Window(window) => write!(f, "{window}"),
            Self::Line(gsi) => write!(f, "gsi {gsi}"),
            Self::Pci(address, id) => write!(f, "pci {address} {id}"),
            Self::Acpi(hid) => write!(f, "acpi {hid}"),
        }
    }
}

/// A request of a device to the machine as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Reset,
    PowerOff,
    /// Stop the processors: a device waits for the host, for example for disk space.
    StopProcessors,
    /// A USB device was unplugged at the host (see `Ports::take_retired`).
    UsbGone,
    /// The wait is over. Each `StopProcessors` is followed by one of these.
    ResumeProcessors,
}

/// Called by devices on any thread. It must not block or call devices.
pub type Events = Arc<dyn Fn(Event) + Send + Sync>;

#[derive(Clone)]
pub struct Shared {
    pub memory: Memory,
    pub hypervisor: Arc<dyn Hypervisor>,
    pub spaces: Arc<Spaces>,
    pub events: Events,
    pub buttons: Arc<Buttons>,
    /// Keyboards and mice register here, and the screen sends its input here.
    pub input: Arc<Hub>,
    /// Displays register here.
    pub screens: Arc<Screens>,
    /// Sound cards play here, and viewers listen here.
    pub sound: Arc<sound::Hub>,
    /// The guest's agent and viewers exchange texts here.
    pub clipboard: Arc<clipboard::Hub>,
    /// Controllers register here, and the operator grows disks here.
    pub disks: Arc<Disks>,
    /// Controllers register here, and the operator connects and disconnects cables here.
    pub links: Arc<Links>,
    /// The device registers here, and the operator sets its size here.
    pub balloon: Arc<balloon::Hub>,
    /// Firmware and the chip set agree here on system-management interrupts.
    pub smi: Arc<smi::Negotiation>,
    /// Controllers add ports, and devices are plugged into them.
    pub usb: Arc<usb::Ports>,
    /// The clocks of the chip set read it.
    pub time: Arc<Time>,
}

impl Shared {
    /// The reasons for requests of a disk to wait. The whole machine waits for space on a volume.
    pub fn holds(&self) -> Holds {
        let events = self.events.clone();
        let full = Arc::new(move |now: VolumeChange| {
            events(if now.full { Event::StopProcessors } else { Event::ResumeProcessors });
        });
        let gate = Some(self.disks.gate()).filter(|gate| !gate.is_open());
        Holds { full, gate }
    }
}
