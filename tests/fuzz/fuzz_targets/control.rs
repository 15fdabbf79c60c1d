//! What comes in at the control socket, and what is typed after `vmm ctl`.
#![no_main]

#[path = "../../../vmm/tests/hostile_client/mod.rs"]
mod hostile_client;

use std::sync::LazyLock;

use hostile_client::Machine;
use libfuzzer_sys::fuzz_target;

static MACHINE: LazyLock<Machine> = LazyLock::new(Machine::new);

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        hostile_client::typed(text);
    }
    MACHINE.serve(bytes);
});
