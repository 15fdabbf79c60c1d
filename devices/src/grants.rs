//! What a machine grants to a device while it is built, and what all devices of a machine share.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use serde::{Serialize, de::DeserializeOwned};

use crate::balloon;
use crate::bus::{Spaces, Window};
use crate::device::{Device, Kind};
use crate::hypervisor::Host;
use crate::pci;
use crate::power::Buttons;
use crate::resources::Resources;
use crate::usb;
use host::disk::{Disks, FileId, Full, OnFull};
use host::display::Screens;
use host::input::Hub;
use host::memory::Memory;
use host::net::Network;
use host::net::link::Links;
use host::stream::Stream;

/// Everything that a machine grants to one device at build time.
pub trait Grants: Resources {
    /// A PCI function, with its configuration space, BARs and interrupts.
    ///
    /// # Errors
    ///
    /// When the slot is taken, or the host runs out of interrupt routes.
    fn pci(&mut self, identity: pci::Identity) -> anyhow::Result<pci::Slot>;
    /// Tells ACPI of a device: what was granted since the last call of this is its `_CRS`. So one
    /// chip can be two devices (keyboard and mouse), and what is claimed after the last call is
    /// nobody's; see `Claim::nodes`.
    fn acpi(&mut self, hid: &'static str);
    /// What the board calls the device: `nvme`, and `nvme.2` for the second. For people alone.
    fn name(&self) -> &str;
    /// What all devices of the machine share.
    fn shared(&self) -> &Shared;
}

/// One device is one file with one of these. Its fields are the flag, the JSON and the reference.
pub trait Build: Serialize + DeserializeOwned {
    /// Asks for what the device needs, and makes it.
    ///
    /// # Errors
    ///
    /// When something that it needs is not to be had.
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>>;

    /// Chooses what suits a machine with this many processors, where the user chose nothing.
    fn suit(&mut self, _processors: u16) {}

    /// Whether the device can be plugged into a running machine.
    fn is_usb(&self) -> bool {
        false
    }

    /// The part of the host that the device uses and the machine must know of.
    fn host_side(&self) -> HostSide<'_> {
        HostSide::None
    }

    /// Has the device open this file alone, whatever lies at its path. False if the device has no
    /// file or cannot be plugged in.
    fn expect(&mut self, _file: FileId) -> bool {
        false
    }

    /// Removes what changes the host: `vmm inspect` truncates no log, takes no lock and makes no
    /// socket.
    fn leave_host_alone(&mut self) {}
}

/// The part of the host that a device uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostSide<'a> {
    /// None that the machine must know of.
    None,
    /// The image of a disk that stays in the machine.
    Image(&'a Path),
    /// The network that the device is connected to.
    Network(&'a Network),
    /// Where its bytes go to and come from.
    Stream(&'a Stream),
}

/// One thing that was granted to one device.
#[derive(Clone, Debug)]
pub enum Claim {
    /// A fixed range of an address space.
    Fixed(Kind, Range<u64>),
    /// A range that the guest places.
    Window(Arc<Window>),
    /// An interrupt controller pin.
    Line(u32),
    /// A PCI function: where, and as what.
    Pci(pci::Address, pci::Id),
    /// A name in the ACPI namespace, for the claims between the last such and this.
    Acpi(&'static str),
}

impl Claim {
    /// The ACPI devices in one device's claims: name, and what belongs into its `_CRS`.
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

/// What a device asks of the machine as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Start again from power-on.
    Reset,
    /// Switch off.
    PowerOff,
    /// Stop the processors: a device waits for something of the host's, like room for its disk.
    Hold,
    /// What it waited for is there. There is one of these for each `Hold`.
    Release,
}

/// Called by devices, on whatever thread they are; it must not block or call devices.
pub type Events = Arc<dyn Fn(Event) + Send + Sync>;

/// What all devices of a machine share.
#[derive(Clone)]
pub struct Shared {
    /// Guest RAM.
    pub memory: Memory,
    /// The hypervisor.
    pub host: Arc<dyn Host>,
    /// The address spaces.
    pub spaces: Arc<Spaces>,
    /// How to reset, and how to switch off.
    pub events: Events,
    /// The buttons on the case.
    pub buttons: Arc<Buttons>,
    /// Keyboards and mice: devices register here, the screen pushes here.
    pub input: Arc<Hub>,
    /// What people look at: displays register here.
    pub screens: Arc<Screens>,
    /// Disks: controllers register here, the operator makes them longer here.
    pub disks: Arc<Disks>,
    /// Network cables: controllers register here, the operator plugs and pulls.
    pub links: Arc<Links>,
    /// The balloon: the device registers here, the operator sets it here.
    pub balloon: Arc<balloon::Hub>,
    /// USB ports: controllers bring them, devices are plugged into them.
    pub usb: Arc<usb::Hub>,
}

impl Shared {
    /// Holds the machine while the volume of a disk is full.
    pub fn on_full(&self) -> OnFull {
        let events = self.events.clone();
        Arc::new(move |now: Full| events(if now.full { Event::Hold } else { Event::Release }))
    }
}
