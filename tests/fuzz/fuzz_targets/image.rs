//! A qcow2 image that anybody may have made, opened and written: a sound one keeps what it got.
#![no_main]

#[path = "../../../devices/tests/hostile_image/mod.rs"]
mod hostile_image;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|bytes: &[u8]| hostile_image::run(FOLDER.path(), bytes.iter().copied()));
