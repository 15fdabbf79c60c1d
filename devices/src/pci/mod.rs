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

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

pub use ::host::pci::Address;

pub use self::function::Slot;
pub use self::msix::Msix;

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
