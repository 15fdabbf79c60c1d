//! A network controller between a driver with hostile rings and a peer that sends anything.
#![no_main]

#[path = "../../../devices/tests/hostile_net/mod.rs"]
mod hostile_net;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    hostile_net::run(bytes.iter().copied());
});
