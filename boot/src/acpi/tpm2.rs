//! The TPM2 table (TCG ACPI Specification 1.3, 8.3): the interface of the TPM, and the location of
//! the firmware's event log. Machines without a TPM have none.

use std::mem::offset_of;

use anyhow::{Context, Result};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::script::LOG_LENGTH;
use super::{Node, Platform, table};

/// `_HID` of the TPM's node.
pub const TPM: &str = "MSFT0101";

/// Start method 7: the Command Response Buffer interface.
const COMMAND_RESPONSE_BUFFER: u32 = 7;
/// Offset of the control area in the registers (TCG PC Client Platform TPM Profile, 6.5.2).
const CONTROL_AREA: u64 = 0x40;

/// The fields after the header.
#[derive(Default, IntoBytes, Immutable)]
#[repr(C, packed)]
struct Tpm2 {
    /// 0: client, 1: server.
    platform_class: U16,
    reserved: U16,
    control_area: U64,
    start_method: U32,
    start_parameters: [u8; 12],
    log_length: U32,
    log_address: U64,
}

/// Offset in the table of the length of the event log. The log's address follows.
pub(super) const LOG: usize = table::HEADER + offset_of!(Tpm2, log_length);

/// Returns the table if the platform has a TPM node.
pub(super) fn tpm2(platform: &Platform) -> Result<Option<Vec<u8>>> {
    let Some(node) = platform.node(TPM) else { return Ok(None) };
    let body = Tpm2 {
        control_area: (address(node)? + CONTROL_AREA).into(),
        start_method: COMMAND_RESPONSE_BUFFER.into(),
        log_length: LOG_LENGTH.into(),
        ..Tpm2::default()
    };
    table::table(*b"TPM2", 4, body.as_bytes()).map(Some)
}

fn address(node: &Node) -> Result<u64> {
    Ok(node.memory.first().with_context(|| format!("{TPM} without memory"))?.start)
}
