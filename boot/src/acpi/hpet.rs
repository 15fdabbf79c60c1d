//! The HPET table (IA-PC HPET 1.0a, 3.2.4). Machines without an HPET have none.

use anyhow::{Context, Result};
use zerocopy::IntoBytes;

use super::table::{self, Register};
use super::{Node, Platform};

/// `_HID` of the node that makes the table necessary.
const HID: &str = "PNP0103";

/// Event timer block ID. Its bits match the low half of the HPET's capability register: vendor
/// 8086, 64-bit counter, three timers. There is no legacy replacement, because the timer in the
/// kernel lacks it.
const BLOCK_ID: u32 = 0x8086_2201;

/// Returns the table if the platform has an HPET node.
pub(super) fn hpet(platform: &Platform) -> Result<Option<Vec<u8>>> {
    let Some(node) = platform.node(HID) else { return Ok(None) };
    let address = address(node)?;
    let mut body = BLOCK_ID.to_le_bytes().to_vec();
    body.extend(Register::memory(address, 0).as_bytes());
    // HPET number 0, no minimum tick, no page protection.
    body.extend([0; 4]);
    table::table(*b"HPET", 1, &body).map(Some)
}

fn address(node: &Node) -> Result<u64> {
    Ok(node.memory.first().with_context(|| format!("{HID} without memory"))?.start)
}
