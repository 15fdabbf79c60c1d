//! What a user writes: options of the command line, and the configuration file.
#![no_main]

#[path = "../../../vmm/tests/hostile_user/mod.rs"]
mod hostile_user;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((option, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    hostile_user::read(usize::from(*option), text);
});
