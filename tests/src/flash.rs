//! Flash images for tests that need no real firmware.

use std::fs;
use std::path::Path;

/// Writes minimal firmware, an endless loop, and an empty variable store.
pub fn write(folder: &Path) {
    let mut code = vec![0xf4; 64 << 10];
    // A jump to itself at the reset vector.
    code[0xfff0..0xfff2].copy_from_slice(&[0xeb, 0xfe]);
    fs::write(folder.join("code.fd"), code).expect("the folder takes a file");
    let mut vars = vec![0xff; 16 << 10];
    vars[..0x10].fill(0);
    // gEfiSystemNvDataFvGuid
    vars[0x10..0x20].copy_from_slice(b"\x8d\x2b\xf1\xff\x96\x76\x8b\x4c\xa9\x85\x27\x47\x07[OP");
    vars[0x20..0x28].copy_from_slice(&(16_u64 << 10).to_le_bytes());
    vars[0x28..0x2c].copy_from_slice(b"_FVH");
    fs::write(folder.join("vars.fd"), vars).expect("the folder takes a file");
}
