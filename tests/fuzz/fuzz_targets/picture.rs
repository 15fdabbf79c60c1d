//! A guest's picture in each encoding and format: what is decoded is the picture.
#![no_main]

#[path = "../../../vmm/tests/hostile_picture/mod.rs"]
mod hostile_picture;

use libfuzzer_sys::fuzz_target;
// The decoder's.
use vmm::rfb;

fuzz_target!(|bytes: &[u8]| {
    let encodings = rfb::encode::Encoding::ALL.len();
    assert!(hostile_picture::run(bytes.iter().copied()) <= 24, "{encodings} encodings");
});
