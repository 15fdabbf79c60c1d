//! The Multiple APIC Description Table (ACPI 6.5, 5.2.12): the processors, the I/O APIC, and the
//! routing of the ISA lines to it.

use anyhow::Result;

use super::{Platform, SCI, table};
use crate::layout;

/// The highest APIC ID and UID of an 8-bit entry: 255 means all processors.
const UID_MAX: u8 = 254;

/// Dual-8259 compatibility: PICs are present too, and must be masked before APIC mode is used.
const PCAT_COMPAT: u32 = 1;

const ENABLED: u32 = 1;

/// Active high, level triggered (ACPI 6.5, table 5.26).
const LEVEL_HIGH: u16 = 0x000D;

/// ISA line 0 (the timer) is wired to input 2. The SCI and the lines that firmware assigns to PCI
/// devices are level triggered, unlike the other ISA lines.
const OVERRIDES: [(u8, u32, u16); 5] = [
    (0, 2, 0),
    (5, 5, LEVEL_HIGH),
    (SCI, SCI as u32, LEVEL_HIGH),
    (10, 10, LEVEL_HIGH),
    (11, 11, LEVEL_HIGH),
];

/// Revision 1 while that revision defines all entries, and 3 if x2APIC entries are needed.
pub(super) fn madt(platform: &Platform) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    body.extend(u32::try_from(layout::LAPIC.start)?.to_le_bytes());
    body.extend(PCAT_COMPAT.to_le_bytes());
    let mut wide = false;
    for (uid, cpu) in (0u32..).zip(&platform.cpus) {
        match (u8::try_from(uid), u8::try_from(cpu.apic_id)) {
            (Ok(uid @ ..=UID_MAX), Ok(id @ ..=UID_MAX)) => {
                body.extend([0, 8, uid, id]);
                body.extend(ENABLED.to_le_bytes());
            }
            _ => {
                wide = true;
                body.extend([9, 16, 0, 0]);
                body.extend([cpu.apic_id, ENABLED, uid].iter().flat_map(|v| v.to_le_bytes()));
            }
        }
    }
    body.extend([1, 12, 0, 0]);
    body.extend(u32::try_from(layout::IOAPIC.start)?.to_le_bytes());
    body.extend(0u32.to_le_bytes());
    for (source, line, flags) in OVERRIDES {
        body.extend([2, 10, 0, source]);
        body.extend(line.to_le_bytes());
        body.extend(flags.to_le_bytes());
    }
    // The NMI is wired to LINT1 of every processor.
    body.extend([4, 6, 0xFF, 0, 0, 1]);
    if wide {
        body.extend([10, 12, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 1, 0, 0, 0]);
    }
    table::table(*b"APIC", if wide { 3 } else { 1 }, &body)
}
