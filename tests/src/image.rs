//! `qemu-img`, the judge of disk images.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};

use crate::lab;

/// Runs it; the answer is what it says. Its asset is `QEMU_IMG`.
///
/// # Errors
///
/// When it fails.
pub fn qemu_img(words: &[&str], image: &Path, more: &[&str]) -> anyhow::Result<String> {
    let tree = lab::asset("QEMU_IMG")?;
    // From its unpacked packages, with its own libraries.
    let mut command = Command::new(tree.join("lib64/ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(tree.join("usr/lib/x86_64-linux-gnu"));
    command.arg(tree.join("usr/bin/qemu-img")).args(words).arg(image).args(more);
    let output = command.output().context("qemu-img")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaints = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "qemu-img {words:?} {}: {}: {said}{complaints}",
        image.display(),
        output.status
    );
    Ok(said)
}
