//! The Firmware ACPI Control Structure (ACPI 6.5, 5.2.10): the global lock. There is no waking
//! vector, because the machine has no sleep states to wake from.

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{Immutable, IntoBytes};

#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
struct Facs {
    signature: [u8; 4],
    length: U32,
    hardware_signature: U32,
    waking_vector: U32,
    global_lock: U32,
    flags: U32,
    x_waking_vector: U64,
    version: u8,
    reserved: [u8; 31],
}

/// The FACS has no standard header and no checksum.
pub(super) fn facs() -> Vec<u8> {
    let facs = Facs {
        signature: *b"FACS",
        length: 64.into(),
        hardware_signature: 0.into(),
        waking_vector: 0.into(),
        global_lock: 0.into(),
        flags: 0.into(),
        x_waking_vector: 0.into(),
        version: 1,
        reserved: [0; 31],
    };
    facs.as_bytes().to_vec()
}
