//! An NVMe controller under a driver with hostile commands, rings and registers.
#![no_main]

#[path = "../../../devices/tests/hostile_nvme/mod.rs"]
mod hostile_nvme;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|bytes: &[u8]| {
    hostile_nvme::run(FOLDER.path(), bytes.iter().copied());
});
