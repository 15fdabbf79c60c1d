//! The virtio balloon under a driver with hostile rings.
#![no_main]

#[path = "../../../devices/tests/hostile_virtio/mod.rs"]
mod hostile_virtio;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|bytes: &[u8]| {
    hostile_virtio::run("virtio-balloon", FOLDER.path(), bytes.iter().copied());
});
