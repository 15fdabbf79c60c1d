//! A disk behind a SCSI controller under a hostile driver.
#![no_main]

#[path = "../../../devices/tests/hostile_virtio/mod.rs"]
mod hostile_virtio;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|bytes: &[u8]| {
    hostile_virtio::run("virtio-scsi", FOLDER.path(), bytes.iter().copied());
});
