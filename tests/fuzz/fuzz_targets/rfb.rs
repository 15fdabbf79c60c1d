//! A client of the screen: any bytes, before and after it is in, and within TLS.
#![no_main]

#[path = "../../../vmm/tests/hostile_viewer/mod.rs"]
mod hostile_viewer;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    hostile_viewer::Bench::shared().talk(bytes);
});
