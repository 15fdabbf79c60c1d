//! `./try`: its installation from a fake Microsoft, up to the first start from the disk.

use std::process::Command;

use anyhow::{Context, ensure};
use transom_tests::lab;
use transom_tests::program::said;

use super::medium;
use super::steps::CLIENT;

/// Lines of the log, in this order, and of the status. Scripts that were written for the reference
/// image look for those of the download, the boot entry, the start and the end.
const LINES: [&str; 11] = [
    "the next step is install: nothing is installed yet",
    "Requesting Windows 11 from the Microsoft servers…",
    "Downloading Windows 11… 100% at ",
    "the medium has Windows 11 ",
    "Windows Setup runs",
    "BdsDxe: starting Boot0004 \"Windows Boot Manager\"",
    "Windows is on its disk and starts from there",
    "Windows started successfully, visit http://127.0.0.1:8006/ to view the screen...",
    "Windows adapts itself to the machine",
    "installation  specialize",
    "Shutdown completed!",
];

pub(crate) fn installs() -> anyhow::Result<()> {
    let programs = lab::vmm()?;
    let programs = programs.parent().context("a file has a folder")?;
    let mut command = Command::new("./try");
    command.current_dir(lab::repository()).arg("--installation").arg(programs);
    let text = said(command.arg(medium::path(CLIENT.medium)?).arg("8006"))?;
    let mut rest = text.as_str();
    for line in LINES {
        let found = rest.split_once(line).with_context(|| format!("no {line:?} in: {text}"))?;
        rest = found.1;
    }
    ensure!(!text.contains("WARN Microsoft"), "a source refused the medium: {text}");
    Ok(())
}
