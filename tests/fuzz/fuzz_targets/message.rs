//! Parsers of what a client sends, alone, and so a hundred times as fast as within a session:
//! messages, the extended clipboard, pixel formats, and the numbers of encodings.
#![no_main]

#[path = "../../../vmm/tests/hostile_message/mod.rs"]
mod hostile_message;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    hostile_message::read(bytes);
});
