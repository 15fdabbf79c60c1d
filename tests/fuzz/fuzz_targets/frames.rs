//! What a guest sends to the user-mode network: frames, and segments of a connection.
#![no_main]

#[path = "../../../container/tests/hostile_frames/mod.rs"]
mod hostile_frames;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match bytes.split_first() {
        Some((0..128, rest)) => hostile_frames::segments(rest),
        Some((_, rest)) => hostile_frames::frames(rest),
        None => {}
    }
});
