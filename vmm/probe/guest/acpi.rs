//! Finds ACPI tables (ACPI 6.5, 5.2), if the loader provides their address.
use crate::io::{read_memory, read32};
use crate::start::Start;

/// Bytes of a table's header.
const HEADER: u64 = 36;

/// The address of a table, and its length in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) address: u64,
    pub(crate) length: u64,
}

impl Table {
    pub(crate) fn find(start: &Start, signature: [u8; 4]) -> Option<Self> {
        let rsdp = start.rsdp;
        if rsdp == 0 || read_memory(rsdp, 8) != u64::from_le_bytes(*b"RSD PTR ") {
            return None;
        }
        let extended = read_memory(rsdp + 15, 1) >= 2;
        let (root, width) = if extended {
            (read_memory(rsdp + 24, 8), 8)
        } else {
            (u64::from(read32(rsdp + 16)), 4)
        };
        let root = Self::at(root)?;
        let tables = (HEADER..root.length).step_by(width);
        let addresses = tables.map(|offset| read_memory(root.address + offset, width));
        let signed = |&table: &u64| read32(table) == u32::from_le_bytes(signature);
        Self::at(addresses.filter(|&table| mapped(table)).find(signed)?)
    }

    fn at(address: u64) -> Option<Self> {
        let length = mapped(address).then(|| u64::from(read32(address + 4)))?;
        (HEADER..0x1_0000).contains(&length).then_some(Self { address, length })
    }
}

fn mapped(address: u64) -> bool {
    (1..0xffff_0000).contains(&address)
}
