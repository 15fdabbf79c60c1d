//! What the agent in the guest says to the pod.
#![no_main]

#[path = "../../../container/tests/hostile_agent/mod.rs"]
mod hostile_agent;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| hostile_agent::says(bytes));
