//! PCI: the identity and the address of a function, and the grants of its registers, BARs and
//! interrupts.
//!
//! Configuration space is an address space like ports and memory. Each function claims 4 KiB of it,
//! and the host bridge translates accesses to 0xCF8/0xCFC and to ECAM.

pub mod edu;
mod function;
mod header;
pub mod host;
pub mod lpc;
mod msi;
mod msix;

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

pub use ::host::pci::Address;

pub use self::function::Slot;
pub use self::msi::Msi;
pub use self::msix::Msix;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Id {
    pub vendor: u16,
    pub device: u16,
    /// Class, subclass and programming interface: 24 bits.
    pub class: u32,
    pub revision: u8,
    /// The subsystem's vendor ID and device ID.
    pub subsystem: (u16, u16),
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:04x} class {:06x}", self.vendor, self.device, self.class)
    }
}

/// The kind of a base address register, with its size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bar {
    Memory32(u64),
    /// Memory below 4 GiB without side effects of reads, which may be cached and merged.
    Prefetchable32(u64),
    /// Prefetchable memory at any address. It occupies two registers.
    Memory64(u64),
    Port(u64),
}

impl Bar {
    pub fn size(self) -> u64 {
        match self {
            Self::Memory32(size)
            | Self::Prefetchable32(size)
            | Self::Memory64(size)
            | Self::Port(size) => size,
        }
    }
}

/// A device's request for a PCI function.
#[derive(Clone, Debug)]
pub struct Identity {
    pub id: Id,
    /// The address. `None` means the first free slot.
    pub at: Option<Address>,
    /// The BARs, with their register numbers (0 to 5).
    pub bars: Vec<(u8, Bar)>,
    /// MSI-X: the number of vectors, and the register number of the BAR with the table.
    pub msix: Option<(u16, u8)>,
    /// MSI, with one message.
    pub msi: bool,
    /// INTx: the pin, where 0 is INTA.
    pub pin: Option<u8>,
    /// Where the capabilities begin in configuration space.
    pub capabilities_at: u8,
    /// Capabilities after MSI-X and MSI: the ID, and the bytes after the ID and the next pointer.
    pub capabilities: Vec<(u8, Vec<u8>)>,
    /// Ranges of configuration registers that the device implements itself.
    pub own_registers: Vec<std::ops::Range<u64>>,
    /// Whether this is function 0 of a device with more than one function.
    pub multifunction: bool,
}

impl Identity {
    /// An identity without BARs, interrupts and capabilities.
    pub fn new(id: Id) -> Self {
        Self {
            id,
            at: None,
            bars: Vec::new(),
            msix: None,
            msi: false,
            pin: None,
            capabilities_at: 0x40,
            capabilities: Vec::new(),
            own_registers: Vec::new(),
            multifunction: false,
        }
    }
}

/// The interrupt of a function: MSI-X or MSI if the driver has enabled it, otherwise the line.
#[derive(Clone, Debug, Default)]
pub struct Interrupt {
    pub msix: Option<Arc<Msix>>,
    pub msi: Option<Arc<Msi>>,
    pub line: Option<Arc<crate::line::Line>>,
}

impl Interrupt {
    /// Sends a vector, which is 0 for MSI. Returns false if the driver uses the line, which is
    /// level-triggered: the device must set it according to its status register.
    pub fn message(&self, vector: u16) -> bool {
        self.msix.as_ref().is_some_and(|msix| msix.send(vector))
            || self.msi.as_ref().is_some_and(|msi| msi.send())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_slot_reads_back_as_printed() {
        let at = Address::try_from("1f.2".to_owned()).unwrap();
        assert_eq!((at, at.to_string()), (Address::new(31, 2), "1f.2".to_owned()));
        assert_eq!(Address::try_from("4".to_owned()).unwrap(), Address::new(4, 0));
        for bad in ["", "20.0", "1.8", "x", "-1", "1.0.0"] {
            assert!(Address::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn pins_are_routed_like_q35() {
        assert_eq!(Address::new(2, 0).gsi(0), 22);
        assert_eq!(Address::new(3, 0).gsi(3), 22);
        assert_eq!(Address::new(31, 2).gsi(0), 16);
        assert_eq!(Address::new(30, 0).gsi(1), 21);
    }
}
