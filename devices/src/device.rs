//! The whole vocabulary: what a device is, what it may ask for, and nothing else.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::board::Shared;
use crate::bus::Window;
use crate::line::Line;
use crate::pci;

/// Registers that a guest can touch, and a state that can be taken out and put back.
///
/// A device never learns its absolute address, the calling vCPU or the VM. It is told which of its
/// own regions was hit, and where. The bus holds one lock per device around every call.
pub trait Device: Send {
    /// Fills `data`. What is left `Ignored` reads as all-ones.
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access;
    /// Takes `data`. What is `Ignored` is dropped.
    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access;
    /// Goes quiet: after this no thread of ours runs and no guest memory changes.
    fn park(&mut self) -> Saved;
    /// Runs on from `saved`; `Saved::default()` is power-on. vCPUs are stopped during both.
    ///
    /// These two are reset, pause, resume, snapshot and restore: one path, so one path to test.
    fn run(&mut self, saved: Saved) -> anyhow::Result<()>;
}

/// `Ignored` is the guest's mistake (no such register, bad width). The bus logs it once.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The register took the access.
    Done,
    /// There is no such register, or not of that width.
    Ignored,
}

/// Which of a device's own grants was hit; devices compare it with the ones they were given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region(pub(crate) u16);

/// The address spaces of a PC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// `in` and `out`.
    Port,
    /// Guest-physical addresses that are not RAM.
    Memory,
    /// PCI configuration: bus, device, function in bits 27:12, the register below.
    Config,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Port => "ports",
            Self::Memory => "memory",
            Self::Config => "config",
        })
    }
}

/// A device's state between `park` and `run`. Nothing saved means power-on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Saved(Option<serde_json::Value>);

impl Saved {
    /// Takes a copy of `state`.
    pub fn of<T: Serialize>(state: &T) -> Self {
        // Our own plain structs: no map with other keys than strings, so this cannot fail.
        Self(Some(serde_json::to_value(state).expect("device states are plain data")))
    }

    /// The state that was saved, or power-on.
    ///
    /// # Errors
    ///
    /// When the state is of another version of the device, or damaged.
    pub fn take<T: DeserializeOwned + Default>(self) -> anyhow::Result<T> {
        self.0.map_or_else(|| Ok(T::default()), |value| Ok(serde_json::from_value(value)?))
    }
}

/// What the machine grants at build time: numbers go in, handles come out, and only those are kept.
///
/// Every grant is recorded: bus map, ACPI `_CRS` and `vmm inspect` are printed from that one list.
pub trait Place {
    /// A fixed range that no other device has.
    ///
    /// # Errors
    ///
    /// When another device holds a part of it.
    fn claim(&mut self, kind: Kind, range: Range<u64>) -> anyhow::Result<Region>;
    /// A range that moves as the guest programs it; it starts out nowhere.
    fn window(&mut self, kind: Kind, size: u64) -> Arc<Window>;
    /// A wire to an interrupt controller pin. Devices share wires: the pin is the OR of all.
    ///
    /// # Errors
    ///
    /// When the host cannot connect the pin.
    fn line(&mut self, gsi: u32) -> anyhow::Result<Arc<Line>>;
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
    fn build(self, place: &mut dyn Place) -> anyhow::Result<Box<dyn Device>>;
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
