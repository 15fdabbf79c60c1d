//! The guest's messages to the pod's DHCP.
#![no_main]

#[path = "../../../container/tests/hostile_guest/mod.rs"]
mod hostile_guest;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| hostile_guest::dhcp(data));
