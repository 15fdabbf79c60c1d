//! The client's side of `vmm ctl snapshot`: the machine may not create files, so the client creates
//! them and passes them on.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufReader, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use host::sync_folder::sync_folder;
use serde_json::Value;

use super::{Client, Command, Then};
pub use crate::snapshot::cipher::{Secret, SnapshotKey};
use crate::snapshot::open;
pub use crate::snapshot::{Header, MACHINE, MEMORY, UNFINISHED};

/// How often a client asks whether memory is checked.
const INTERVAL: Duration = Duration::from_millis(20);

impl Client {
    /// Waits until the machine's memory is checked, if it continued from a snapshot just now.
    /// Returns what is left of `within`, in seconds, and fails if that is nothing.
    pub fn await_check(&mut self, within: Option<u16>) -> anyhow::Result<Option<u16>> {
        let start = Instant::now();
        while self.ask(&Command::Status)?["unchecked"] == true {
            let late = within.is_some_and(|it| start.elapsed() >= Duration::from_secs(it.into()));
            ensure!(!late, "the memory of the machine's own snapshot is still being checked");
            sleep(INTERVAL);
        }
        let taken = u16::try_from(start.elapsed().as_secs()).unwrap_or(u16::MAX);
        Ok(within.map(|seconds| seconds.saturating_sub(taken)))
    }
}

/// Saves the machine in a folder, which is created if necessary. Fails if the machine needs more
/// than the seconds `within`; it then continues. Nothing is left of a snapshot that fails.
pub fn save(
    client: &mut Client,
    dir: &Path,
    then: Then,
    within: Option<u16>,
) -> anyhow::Result<Value> {
    save_with_key(client, dir, then, within, None)
}

/// Like [`save`], and encrypts the snapshot.
pub fn save_with_key(
    client: &mut Client,
    dir: &Path,
    then: Then,
    within: Option<u16>,
    key: Option<&SnapshotKey>,
) -> anyhow::Result<Value> {
    let within = client.await_check(within)?;
    let folder = Folder::new(dir).with_context(|| dir.display().to_string())?;
    let (machine, memory) = (folder.file(UNFINISHED)?, folder.file(MEMORY)?);
    let path = key.map(|key| key.path.clone());
    let command = Command::Snapshot { dir: dir.to_owned(), then: Some(then), within, key: path };
    let files = [&machine, &memory].into_iter().chain(key.map(|key| &key.file));
    let answer = client.pass(&command, &files.map(AsFd::as_fd).collect::<Vec<_>>())?;
    folder.finish().with_context(|| dir.display().to_string())?;
    Ok(answer)
}

/// Gives the snapshot of a machine that ended with it its name, if the client was interrupted at
/// the end.
pub fn finish_interrupted(dir: &Path) -> anyhow::Result<()> {
    let is_named = dir.join(MACHINE).try_exists()?;
    if !is_named && unfinished(dir)?.is_some_and(|header| header.then == Then::Quit) {
        name(dir).with_context(|| dir.display().to_string())?;
    }
    Ok(())
}

/// The header of the snapshot in this folder, if its machine can continue: it ended with the
/// snapshot, or was paused while its disks were copied.
pub fn find(dir: &Path) -> anyhow::Result<Option<Header>> {
    match open(&dir.join(MACHINE)) {
        Ok(file) => {
            let header = Header::read(&mut BufReader::new(file))?;
            Ok(Some(header).filter(|header| header.then != Then::Resume))
        }
        Err(error) if is_absent(&error) => {
            Ok(unfinished(dir)?.filter(|header| header.then == Then::Quit))
        }
        Err(error) => Err(error.into()),
    }
}

/// The header of the snapshot that is complete but for its name.
fn unfinished(dir: &Path) -> anyhow::Result<Option<Header>> {
    let checked = match open(&dir.join(UNFINISHED)) {
        Err(error) if is_absent(&error) => return Ok(None),
        opened => opened.map_err(Into::into).and_then(|file| Header::check(&file)),
    };
    match checked {
        Ok(header) => Ok(Some(header)),
        // It is unknown whether it is complete.
        Err(error) if error.is::<io::Error>() => Err(error),
        Err(_) => Ok(None),
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

fn name(dir: &Path) -> anyhow::Result<()> {
    fs::rename(dir.join(UNFINISHED), dir.join(MACHINE))?;
    Ok(sync_folder(dir)?)
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
                // Other files may be there: NFS keeps removed ones that are still open.
                let taken = path.join(MACHINE).try_exists()?;
                ensure!(!taken, "it has a snapshot: save the machine in another folder");
            }
            other => other?,
        }
        Ok(Self { path: path.to_owned(), new, finished: false })
    }

    fn file(&self, name: &str) -> anyhow::Result<File> {
        let path = self.path.join(name);
        let mut options = OpenOptions::new();
        // A machine that is asleep reads its memory here.
        let opened = options.read(true).write(true).create_new(true).mode(0o600).open(&path);
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
        if !self.finished && unfinished(&self.path).is_ok_and(|found| found.is_none()) {
            for name in [UNFINISHED, MEMORY] {
                fs::remove_file(self.path.join(name)).ok();
            }
            if self.new {
                fs::remove_dir(&self.path).ok();
            }
        }
    }
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_pipe_in_place_of_a_snapshot_blocks_nobody() {
        for name in [MACHINE, UNFINISHED] {
            let folder = tempfile::tempdir().unwrap();
            let made = Command::new("mkfifo").arg(folder.path().join(name)).status().unwrap();
            assert!(made.success());
            let said = find(folder.path()).unwrap_err().to_string();
            assert!(said.contains("not a file"), "{said}");
        }
    }
}
