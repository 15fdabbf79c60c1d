//! The install media, made on the host and read in the lab.

use std::path::PathBuf;
use std::process::Command;

use crate::lab;
use anyhow::{Context, ensure};

/// Kinds of media, with the language of each.
const ALL: [(&str, &str); 2] = [("client", "ko-KR"), ("server", "en-US")];

/// Makes all media, unless they are there.
pub fn make() -> anyhow::Result<()> {
    let folder = lab::shared()?;
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for (kind, language) in ALL {
        let mut command = Command::new(lab::repository().join("tests/rehearsal/medium"));
        command.args([&path(kind)?, &lab::vmm()?.with_file_name("rehearsal-windows")]);
        let status = command.args([language, kind]).status().context("tests/rehearsal/medium")?;
        ensure!(status.success(), "tests/rehearsal/medium: {status}");
    }
    let mut command = Command::new(lab::repository().join("tests/rehearsal/bundle"));
    let status = command.arg(bundle()?).status().context("tests/rehearsal/bundle")?;
    ensure!(status.success(), "tests/rehearsal/bundle: {status}");
    Ok(())
}

/// The path of a medium.
pub fn path(kind: &str) -> anyhow::Result<PathBuf> {
    Ok(lab::shared()?.join(format!("{kind}.iso")))
}

/// The path of the ISO with drivers.
pub fn bundle() -> anyhow::Result<PathBuf> {
    Ok(lab::shared()?.join("virtio-win.iso"))
}
