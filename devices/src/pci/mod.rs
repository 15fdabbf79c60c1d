//! PCI: what a function is, where it sits, and how its registers, BARs and interrupts are granted.
//!
//! Configuration space is an address space like ports and memory: each function claims 4 KiB of it,
//! and the host bridge translates 0xCF8/0xCFC and ECAM accesses into it.

pub mod edu;
mod function;
mod header;
pub mod host;
pub mod lpc;
mod msix;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

pub use self::function::Slot;
pub use self::msix::Msix;

/// Bus 0: device and function number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Address {
    /// 0 to 31.
    pub device: u8,
    /// 0 to 7.
    pub function: u8,
}

impl Address {
    /// Device and function number.
    ///
    /// # Panics
    ///
    /// When there is no such number: these are constants of ours.
    pub const fn new(device: u8, function: u8) -> Self {
        assert!(device < 32 && function < 8);
        Self { device, function }
    }

    /// Where its 4 KiB of configuration space begin.
    pub fn config(self) -> u64 {
        u64::from(self.device) << 15 | u64::from(self.function) << 12
    }

    /// The first device number without functions; 0 and 31 are the chip set's, 1 the display's.
    pub(crate) fn first_free<T>(taken: &BTreeMap<Self, T>) -> Option<Self> {
        let free = |device: &u8| !taken.keys().any(|at| at.device == *device);
        (2..31).find(free).map(|device| Self { device, function: 0 })
    }

    /// The interrupt controller pin of this function's INTx pin (0 is INTA), as `_PRT` tells it.
    pub fn gsi(self, pin: u8) -> u32 {
        let (device, pin) = (u32::from(self.device), u32::from(pin));
        match device {
            0..=24 => 20 + (device + pin) % 4,
            30 => 20 + pin % 4,
            _ => 16 + pin % 4,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}.{}", self.device, self.function)
    }
}

impl From<Address> for String {
    fn from(address: Address) -> Self {
        address.to_string()
    }
}

impl TryFrom<String> for Address {
    type Error = anyhow::Error;

    fn try_from(text: String) -> anyhow::Result<Self> {
        let (device, function) = text.split_once('.').unwrap_or((&text, "0"));
        let device = u8::from_str_radix(device, 16).unwrap_or(u8::MAX);
        let function = function.parse().unwrap_or(u8::MAX);
        ensure!(
            device < 32 && function < 8,
            "`{text}` is not a PCI slot: write the device number in hexadecimal, 00 to 1f, and \
             the function number, as in `04.0`"
        );
        Ok(Self { device, function })
    }
}

/// What a function says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Id {
    /// Who made it.
    pub vendor: u16,
    /// What it is, in the maker's numbers.
    pub device: u16,
    /// Class, subclass, programming interface: 24 bits.
    pub class: u32,
    /// Revision.
    pub revision: u8,
    /// Subsystem vendor and device.
    pub subsystem: (u16, u16),
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:04x} class {:06x}", self.vendor, self.device, self.class)
    }
}

/// A base address register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bar {
    /// Memory below 4 GiB, this many bytes.
    Memory32(u64),
    /// The same, without side effects of reading: memory that may be cached and merged.
    Prefetchable32(u64),
    /// Memory anywhere, prefetchable; takes two registers.
    Memory64(u64),
    /// Ports.
    Port(u64),
}

impl Bar {
    /// Its length.
    pub fn size(self) -> u64 {
        match self {
            Self::Memory32(size)
            | Self::Prefetchable32(size)
            | Self::Memory64(size)
            | Self::Port(size) => size,
        }
    }
}

/// What a device asks for to become a PCI function.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Who it is.
    pub id: Id,
    /// A fixed slot, or the first that is free.
    pub at: Option<Address>,
    /// Its BARs and their register numbers (0 to 5).
    pub bars: Vec<(u8, Bar)>,
    /// MSI-X: the number of vectors, and the BAR number that holds the table.
    pub msix: Option<(u16, u8)>,
    /// INTx: pin 0 is INTA.
    pub pin: Option<u8>,
    /// Capabilities after MSI-X: their ids, and what follows id and next pointer.
    pub capabilities: Vec<(u8, Vec<u8>)>,
    /// Registers that the device answers itself, as ranges of its configuration space.
    pub own: Vec<std::ops::Range<u64>>,
    /// Function 0 of a device with more than one function.
    pub multifunction: bool,
}

impl Identity {
    /// A function without BARs, interrupts and capabilities.
    pub fn new(id: Id) -> Self {
        Self {
            id,
            at: None,
            bars: Vec::new(),
            msix: None,
            pin: None,
            capabilities: Vec::new(),
            own: Vec::new(),
            multifunction: false,
        }
    }
}

/// How a device asks for service: MSI-X once the driver has switched it on, else the wire.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    /// The vectors.
    pub msix: Option<Arc<Msix>>,
    /// The wire.
    pub line: Option<Arc<crate::line::Line>>,
}

impl Interrupt {
    /// Sends a vector; false when the driver uses the wire, which is level-triggered and so needs
    /// a status register of the device's that says when to lower it.
    pub fn message(&self, vector: u16) -> bool {
        self.msix.as_ref().is_some_and(|msix| msix.send(vector))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_slot_is_read_as_it_is_printed() {
        let at = Address::try_from("1f.2".to_owned()).unwrap();
        assert_eq!((at, at.to_string()), (Address::new(31, 2), "1f.2".to_owned()));
        assert_eq!(Address::try_from("4".to_owned()).unwrap(), Address::new(4, 0));
        for bad in ["", "20.0", "1.8", "x", "-1", "1.0.0"] {
            assert!(Address::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn pins_are_routed_as_q35_does() {
        assert_eq!(Address::new(2, 0).gsi(0), 22);
        assert_eq!(Address::new(3, 0).gsi(3), 22);
        assert_eq!(Address::new(31, 2).gsi(0), 16);
        assert_eq!(Address::new(30, 0).gsi(1), 21);
    }
}
