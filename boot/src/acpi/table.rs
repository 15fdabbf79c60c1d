//! The header and the address structure that the tables share (ACPI 6.5, 5.2.6).

use anyhow::{Context, Result};
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{Immutable, IntoBytes};

pub(super) const HEADER: usize = 36;
pub(super) const CHECKSUM: u32 = 9;

pub(super) const OEM_ID: [u8; 6] = *b"TRNSOM";

/// The header of every table except the FACS.
#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
struct Header {
    signature: [u8; 4],
    length: U32,
    revision: u8,
    checksum: u8,
    oem_id: [u8; 6],
    oem_table_id: [u8; 8],
    oem_revision: U32,
    creator_id: [u8; 4],
    creator_revision: U32,
}

/// Builds a table with our header. The checksum stays 0, as the loader script requires.
pub(super) fn table(signature: [u8; 4], revision: u8, body: &[u8]) -> Result<Vec<u8>> {
    let length = u32::try_from(HEADER + body.len())
        .with_context(|| format!("an ACPI table with {} bytes", body.len()))?;
    let header = Header {
        signature,
        length: length.into(),
        revision,
        checksum: 0,
        oem_id: OEM_ID,
        oem_table_id: *b"TRANSOM ",
        oem_revision: 1.into(),
        creator_id: *b"TRSM",
        creator_revision: 1.into(),
    };
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(body);
    Ok(bytes)
}

/// The sum that a checksum byte brings to 0.
pub(super) fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte))
}

/// The location of a register (Generic Address Structure, ACPI 6.5, 5.2.3.2).
#[derive(Clone, Copy, Default, IntoBytes, Immutable)]
#[repr(C, packed)]
pub(super) struct Register {
    space: u8,
    bits: u8,
    bit_offset: u8,
    access: u8,
    address: [u8; 8],
}

impl Register {
    /// A register of `bits` bits at an I/O port, accessed `1 << (access - 1)` bytes at a time.
    pub(super) fn port(port: u16, bits: u8, access: u8) -> Self {
        Self { space: 1, bits, access, bit_offset: 0, address: u64::from(port).to_le_bytes() }
    }

    /// A 64-bit register in memory, with an undefined access size.
    pub(super) fn memory(address: u64, bits: u8) -> Self {
        Self { space: 0, bits, access: 0, bit_offset: 0, address: address.to_le_bytes() }
    }
}
