//! The HPET table (IA-PC HPET 1.0a, 3.2.4), where there is one.

use anyhow::{Context, Result};
use zerocopy::IntoBytes;

use super::table::{self, Register};
use super::{Node, Platform};

/// The HPET's node.
const HID: &str = "PNP0103";

/// The event timer block's ID, the upper bits of which are those of the capability register: vendor
/// 8086, 64-bit counter, three timers; no legacy replacement, which the timer in the kernel lacks.
const BLOCK_ID: u32 = 0x8086_2201;

/// The table, if a node says that the machine has an HPET.
pub(super) fn hpet(platform: &Platform) -> Result<Option<Vec<u8>>> {
    let Some(node) = platform.node(HID) else { return Ok(None) };
    let address = address(node)?;
    let mut body = BLOCK_ID.to_le_bytes().to_vec();
    body.extend(Register::memory(address, 0).as_bytes());
    // Number 0; no minimum tick; no page protection.
    body.extend([0; 4]);
    table::table(*b"HPET", 1, &body).map(Some)
}

fn address(node: &Node) -> Result<u64> {
    Ok(node.memory.first().with_context(|| format!("{HID} without memory"))?.start)
}
