//! The client's side of `vmm ctl snapshot`: the machine may not create files, so the client creates
//! them and passes them on.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::{Client, Command, Then};
use crate::config::Config;
use crate::snapshot::Saved;
pub use crate::snapshot::{MACHINE, MEMORY, UNFINISHED};

/// Saves the machine in a folder, which must be new or empty. Nothing is left of a snapshot that
/// fails.
pub fn save(client: &mut Client, dir: &Path, then: Then) -> anyhow::Result<Value> {
    save_within(client, dir, then, None)
}

/// Like [`save`], but fails if the machine needs more than these seconds; it then continues.
pub fn save_within(
    client: &mut Client,
    dir: &Path,
    then: Then,
    within: Option<u16>,
) -> anyhow::Result<Value> {
    let folder = Folder::new(dir).with_context(|| dir.display().to_string())?;
    let (machine, memory) = (folder.file(UNFINISHED)?, folder.file(MEMORY)?);
    let command = Command::Snapshot { dir: dir.to_owned(), then: Some(then), within };
    let answer = client.ask_with(&command, &[machine.as_fd(), memory.as_fd()])?;
    folder.finish().with_context(|| dir.display().to_string())?;
    Ok(answer)
}

/// Whether the folder holds the snapshot of a machine that ended with it. If its client was
/// interrupted at the end, the snapshot gets its name here.
pub fn complete(dir: &Path) -> anyhow::Result<bool> {
    if !dir.join(MACHINE).exists() {
        if unfinished(dir).is_none_or(|saved| saved.then != Then::Quit) {
            return Ok(false);
        }
        name(dir).with_context(|| dir.display().to_string())?;
    }
    Ok(true)
}

/// The configuration of the machine that ended with the snapshot in this folder, if there is one.
pub fn config(dir: &Path) -> anyhow::Result<Option<Config>> {
    let saved = match File::open(dir.join(MACHINE)) {
        Ok(file) => Some(Saved::read(file)?),
        Err(error) if error.kind() == ErrorKind::NotFound => unfinished(dir),
        Err(error) => return Err(error.into()),
    };
    Ok(saved.filter(|saved| saved.then == Then::Quit).map(|saved| saved.config))
}

/// The snapshot that is complete but for its name.
fn unfinished(dir: &Path) -> Option<Saved> {
    File::open(dir.join(UNFINISHED)).ok().and_then(|file| Saved::read(file).ok())
}

fn name(dir: &Path) -> anyhow::Result<()> {
    fs::rename(dir.join(UNFINISHED), dir.join(MACHINE))?;
    Ok(File::open(dir)?.sync_all()?)
}

/// The folder of a snapshot, whose files are removed unless it is finished.
struct Folder {
    path: PathBuf,
    /// Whether it was created here.
    new: bool,
    finished: bool,
}

impl Folder {
    fn new(path: &Path) -> anyhow::Result<Self> {
        let mut new = true;
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                new = false;
                let empty = fs::read_dir(path)?.next().is_none();
                ensure!(empty, "it is not empty: save the machine in a new folder");
            }
            other => other?,
        }
        Ok(Self { path: path.to_owned(), new, finished: false })
    }

    fn file(&self, name: &str) -> anyhow::Result<File> {
        let path = self.path.join(name);
        let mut options = OpenOptions::new();
        let opened = options.write(true).create_new(true).mode(0o600).open(&path);
        opened.with_context(|| path.display().to_string())
    }

    fn finish(mut self) -> anyhow::Result<()> {
        // The machine may have ended with these files: they stay, even if this fails.
        self.finished = true;
        name(&self.path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The machine may have ended with this snapshot, and not have answered any more.
        if !self.finished && unfinished(&self.path).is_none() {
            for name in [UNFINISHED, MEMORY] {
                fs::remove_file(self.path.join(name)).ok();
            }
            if self.new {
                fs::remove_dir(&self.path).ok();
            }
        }
    }
}
