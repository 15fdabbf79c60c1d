//! A disk and a CD-ROM drive at USB under a driver with hostile commands.
#![no_main]

#[path = "../../../devices/tests/hostile_storage/mod.rs"]
mod hostile_storage;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| hostile_storage::run(bytes.iter().copied()));
