//! The TPM2 table (TCG ACPI Specification 1.3, 8.3), where there is a TPM: how drivers talk to it,
//! and where firmware's log is of what it measured.

use std::mem::offset_of;

use anyhow::{Context, Result};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::script::LOG_LENGTH;
use super::{Node, Platform, table};

/// The TPM's node.
pub const TPM: &str = "MSFT0101";

/// Start method 7: the Command Response Buffer interface.
const COMMAND_RESPONSE_BUFFER: u32 = 7;
/// Where in the registers the control area is (TCG PC Client Platform TPM Profile, 6.5.2).
const CONTROL_AREA: u64 = 0x40;

/// All behind the header.
#[derive(Default, IntoBytes, Immutable)]
#[repr(C, packed)]
struct Tpm2 {
    /// 0: a client, not a server.
    platform_class: U16,
    reserved: U16,
    control_area: U64,
    start_method: U32,
    start_parameters: [u8; 12],
    log_length: U32,
    log_address: U64,
}

/// Where in the table it says how long the log is; its address is behind that.
pub(super) const LOG: usize = table::HEADER + offset_of!(Tpm2, log_length);

/// The table, if a node says that the machine has a TPM.
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
