//! A small virtio device, which the first byte chooses, under a driver with hostile rings.
#![no_main]

#[path = "../../../devices/tests/hostile_virtio/mod.rs"]
mod hostile_virtio;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|bytes: &[u8]| {
    let Some((which, bytes)) = bytes.split_first() else { return };
    hostile_virtio::run((*which).into(), FOLDER.path(), bytes.iter().copied());
});
