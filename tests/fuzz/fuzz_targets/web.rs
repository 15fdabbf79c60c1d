//! A browser at the web door: any request, form, cookie, origin, and frames of a WebSocket.
#![no_main]

#[path = "../../../vmm/tests/hostile_browser/mod.rs"]
mod hostile_browser;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    hostile_browser::Bench::shared().talk(bytes);
});
