//! A USB controller with a keyboard and a tablet under a driver with hostile rings.
#![no_main]

#[path = "../../../devices/tests/hostile_xhci/mod.rs"]
mod hostile_xhci;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| hostile_xhci::run(bytes.iter().copied()));
