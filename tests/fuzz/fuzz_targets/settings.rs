//! The environment of the container: variables in their own words and in QEMU's.
#![no_main]

#[path = "../../../container/tests/hostile_environment/mod.rs"]
mod hostile_environment;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((variable, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    hostile_environment::set(usize::from(*variable), text);
});
