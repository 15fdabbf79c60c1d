//! fsx of crates.io: a program that writes a file in every way at random, and compares what it
//! reads. It is built when a test needs it, like the server of remote desktops.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::lab;
use crate::program::forget_the_test;

const VERSION: &str = "0.3.2";

/// Builds the program if it is not there, and returns its path.
pub fn build() -> anyhow::Result<PathBuf> {
    let root = lab::temporary()?.join(format!("fsx-{VERSION}"));
    let program = root.join("bin/fsx");
    if program.exists() {
        return Ok(program);
    }
    let mut build = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    forget_the_test(&mut build);
    build.args(["install", "fsx", "--quiet", "--locked", "--version", VERSION, "--root"]);
    build.arg(&root).arg("--target-dir").arg(root.join("target"));
    ensure!(build.status().context("cargo")?.success(), "fsx was not built");
    Ok(program)
}
