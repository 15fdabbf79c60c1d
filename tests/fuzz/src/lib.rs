//! Fuzz targets: functions that accept any bytes, and that no input may break.
//!
//! The code of a target is in `hostile_*` beside the tests of its crate, or here. `./test` runs
//! each target for a while in its own process, with inputs of a new seed. An input that breaks a
//! target becomes a file in `tests/fuzz/found/TARGET`; each run begins with these files.
//! `TRANSOM_FUZZ_SEED` repeats a run, `TRANSOM_FUZZ_SECONDS` sets the time for each target, and
//! `TRANSOM_FUZZ_FOUND` sets another folder for these files. `libfuzzer/` runs the same targets
//! with libFuzzer, by hand.
#![forbid(unsafe_code)]

pub mod child;
mod chips;
#[path = "../../../devices/tests/every_kind/mod.rs"]
mod every_kind;
mod fw_cfg;
mod guest;
pub mod input;
mod kernel;
mod lan;
mod medium;
mod migration;
mod moving;
mod msix;
mod pod;
pub mod runner;
mod snapshot;
mod state;
mod swtpm;
mod targets;
mod words;

use std::path::{Path, PathBuf};

use anyhow::Context;
// The decoder of pictures is part of that crate's tests, which find `rfb` at this path.
use screen::rfb;

pub use self::targets::TARGETS;

pub struct Target {
    /// The name in `--list`, and of the folder in `found`.
    pub name: &'static str,
    /// Panics, hangs, or takes too much memory if something is wrong.
    pub run: fn(&[u8]),
    pub max_length: usize,
    pub make: input::Make,
}

impl Target {
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        TARGETS.iter().chain(targets::BROKEN).find(|it| it.name == name)
    }
}

/// `tests/fuzz/found`, or the folder that is set: one folder for each target, with inputs that
/// broke it before.
#[must_use]
pub fn found_folder() -> PathBuf {
    let other = std::env::var_os("TRANSOM_FUZZ_FOUND").map(PathBuf::from);
    other.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("found"))
}

/// The inputs that broke a target before, sorted by file name.
pub fn found(target: &str) -> anyhow::Result<Vec<Vec<u8>>> {
    let Ok(folder) = found_folder().join(target).read_dir() else { return Ok(Vec::new()) };
    let mut paths = folder.map(|it| Ok(it?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    paths.sort();
    let read = |path: PathBuf| std::fs::read(&path).with_context(|| format!("{}", path.display()));
    paths.into_iter().map(read).collect()
}
