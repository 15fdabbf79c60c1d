//! The MCFG table: the address of PCI configuration space in memory (PCI Firmware 3.3, 4.1.2).

use anyhow::Result;

use super::{Platform, table};

/// The table describes one PCI segment.
pub(super) fn mcfg(platform: &Platform) -> Result<Vec<u8>> {
    let buses = (platform.pcie.end - platform.pcie.start) >> 20;
    let last = u8::try_from(buses - 1)?;
    let mut body = vec![0; 8];
    body.extend(platform.pcie.start.to_le_bytes());
    body.extend([0, 0, 0, last, 0, 0, 0, 0]);
    table::table(*b"MCFG", 1, &body)
}
