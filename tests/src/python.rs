//! Runs third-party programs in Python.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::program::finish;

/// Debian's Python, which finds Debian's modules.
pub const PYTHON: &str = "/usr/bin/python3";

/// Installs the modules of a list with checksums into a folder, unless this list is installed
/// already. Concurrent callers wait for the first one.
pub fn fetch(list: &Path, folder: &Path) -> Result<()> {
    // Tests run concurrently, as threads and as processes. Closing the file releases the lock.
    let turn = File::create(folder.with_extension("lock"))?;
    turn.lock()?;
    let (wanted, stamp) = (fs::read(list)?, folder.join("installed"));
    if fs::read(&stamp).is_ok_and(|it| it == wanted) {
        return Ok(());
    }
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let mut pip = Command::new(PYTHON);
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]);
    pip.args(["--disable-pip-version-check", "--root-user-action=ignore", "--only-binary=:all:"]);
    let ended = finish(pip.arg("--target").arg(folder).arg("--requirement").arg(list))?;
    ensure!(ended.status == 0, "{}", ended.stderr);
    fs::write(&stamp, wanted)?;
    Ok(())
}
