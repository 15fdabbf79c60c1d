//! The Windows ACPI Emulated Devices Table: workarounds for hardware bugs that Windows can skip
//! because the devices are emulated.

use anyhow::Result;

use super::table;

/// One read of the PM timer is reliable: Windows need not repeat it until two reads agree.
const PM_TIMER_GOOD: u32 = 1 << 1;

pub(super) fn waet() -> Result<Vec<u8>> {
    table::table(*b"WAET", 1, &PM_TIMER_GOOD.to_le_bytes())
}
