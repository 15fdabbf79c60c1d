//! The Windows ACPI Emulated Devices Table: what Windows need not do because the hardware is not
//! real.

use anyhow::Result;

use super::table;

/// One read of the PM timer is good: no reading it again until two reads agree.
const PM_TIMER_GOOD: u32 = 1 << 1;

/// The table.
pub(super) fn waet() -> Result<Vec<u8>> {
    table::table(*b"WAET", 1, &PM_TIMER_GOOD.to_le_bytes())
}
