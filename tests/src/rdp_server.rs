//! IronRDP's own server (`tests/rdp_server`). It is built from crates when a test needs it, so its
//! tests are not part of every run.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};

use crate::lab;
use crate::program::forget_the_test;

/// A key and a certificate for two days.
const CERTIFICATE: &str = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=guest \
    -keyout key.pem -out cert.pem";

/// Builds the server once for all tests, in a target folder of its own. Returns its path.
pub fn build() -> Result<PathBuf> {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = lab::temporary()?.join("rdp_server");
    let mut build = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    forget_the_test(&mut build);
    build.args(["build", "--quiet", "--release", "--locked", "--manifest-path"]);
    build.arg(lab::repository().join("tests/rdp_server/Cargo.toml"));
    build.arg("--target-dir").arg(&folder);
    ensure!(build.status().context("cargo")?.success(), "rdp_server was not built");
    Ok(folder.join("release/rdp_server"))
}

/// Makes `key.pem` and `cert.pem` in this folder.
pub fn make_certificate(folder: &Path) -> Result<()> {
    let mut make = Command::new("openssl");
    make.args(CERTIFICATE.split_ascii_whitespace()).current_dir(folder);
    ensure!(make.output().context("openssl")?.status.success(), "openssl");
    Ok(())
}
