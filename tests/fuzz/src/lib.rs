//! Fuzz targets: functions that take any bytes, and that nothing may break.
//!
//! What a target does is in `hostile_*` beside the tests of its crate, or here. `./test` runs each
//! for a while in a process of its own, with inputs of a new seed; what breaks a target becomes a
//! file in `tests/fuzz/found/TARGET`, and each run begins with these. `TRANSOM_FUZZ_SEED` repeats a
//! run, `TRANSOM_FUZZ_SECONDS` sets how long each target runs, and `TRANSOM_FUZZ_FOUND` names
//! another folder for what is found. `libfuzzer/` runs the same targets with the guidance of
//! libFuzzer, by hand.
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
mod msix;
mod pod;
pub mod runner;
mod swtpm;
mod targets;
mod words;

use std::path::{Path, PathBuf};

use anyhow::Context;
// The decoder of pictures is a part of that crate's tests, and finds what it needs there.
use screen::rfb;

pub use self::targets::TARGETS;

/// A function that takes any bytes.
pub struct Target {
    /// As `--list` shows it, and its folder in `found`.
    pub name: &'static str,
    /// Panics, hangs, or takes too much, where something is wrong.
    pub run: fn(&[u8]),
    /// Inputs are not longer.
    pub longest: usize,
    /// Where inputs come from.
    pub make: input::Make,
}

impl Target {
    /// The target of this name.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        TARGETS.iter().chain(targets::BROKEN).find(|it| it.name == name)
    }
}

/// Inputs that broke a target before, a folder for each: `tests/fuzz/found`, or another one.
#[must_use]
pub fn found_folder() -> PathBuf {
    let other = std::env::var_os("TRANSOM_FUZZ_FOUND").map(PathBuf::from);
    other.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("found"))
}

/// Those of a target, in the order of their names.
///
/// # Errors
///
/// When a file cannot be read.
pub fn found(target: &str) -> anyhow::Result<Vec<Vec<u8>>> {
    let Ok(folder) = found_folder().join(target).read_dir() else { return Ok(Vec::new()) };
    let mut paths = folder.map(|it| Ok(it?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    paths.sort();
    let read = |path: PathBuf| std::fs::read(&path).with_context(|| format!("{}", path.display()));
    paths.into_iter().map(read).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn all_that_was_found_belongs_to_a_target() {
        for folder in found_folder().read_dir().into_iter().flatten() {
            let name = folder.unwrap().file_name().into_string().unwrap();
            assert!(name == "README.md" || Target::find(&name).is_some(), "{name}");
        }
        let mut names: Vec<_> = TARGETS.iter().map(|it| it.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TARGETS.len());
    }
}
