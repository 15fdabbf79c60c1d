//! Snapshots of the pod's disks: a folder on each volume, `windows.snapshots`, with a folder for
//! each of them.
//!
//! A snapshot exists if its folder on the first volume has its name, which it gets last. Until
//! then, and from the first moment of its removal, the folder is `.part-NAME`; the next command or
//! start of the pod removes it, with what other volumes have of it.
//!
//! Threats: others may write to the volume. No link in these folders is followed, manifests are
//! read with limits, and only files of this machine are replaced.

pub mod copying;
pub mod create;
pub mod manifest;
pub mod restore;
pub mod set;
pub mod show;
#[cfg(test)]
mod test;

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use ::host::lock;
use ::host::uuid::Uuid;
use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use self::manifest::Manifest;
use crate::disks::{MAX_DISKS, below};
use crate::files::{self, Held, if_there};
use crate::settings::Settings;
use crate::status::{Failure, Status};

/// The end of the name of the folder on a volume.
pub const FOLDER: &str = "snapshots";
const LOCK: &str = ".lock";
const PART: &str = ".part-";
/// Folders of a restore: for new files, and for those that they replace.
const STAGED: &str = ".staged";
const REPLACED: &str = ".replaced";
/// The folder of the machine's memory in a snapshot.
pub const MEMORY: &str = "memory";
const MAX_NAME: usize = 40;
/// Maximum number of snapshots that are listed.
const MAX_LISTED: usize = 1000;

/// The name of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Name(String);

impl Name {
    pub fn read(text: &str) -> anyhow::Result<Self> {
        let is_allowed = |it: char| it.is_ascii_alphanumeric() || "-_.".contains(it);
        let allowed = text.chars().all(is_allowed) && (1..=MAX_NAME).contains(&text.len());
        ensure!(
            allowed && text.starts_with(|it: char| it.is_ascii_alphanumeric()),
            "{}: the name of a snapshot has 1 to {MAX_NAME} letters, digits, `-`, `_` and `.`, and \
             begins with a letter or a digit",
            text.escape_debug()
        );
        Ok(Self(text.to_owned()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Name {
    type Error = anyhow::Error;

    fn try_from(text: String) -> anyhow::Result<Self> {
        Self::read(&text)
    }
}

/// A snapshot as it is listed.
#[derive(Debug)]
pub struct Listed {
    pub name: Name,
    /// The error is a sentence about a damaged one.
    pub manifest: Result<Manifest, String>,
    /// Bytes that its files occupy, with those that clones share with other files.
    pub taken: u64,
}

/// The snapshots of a machine. `root` contains the file systems.
#[derive(Clone, Copy)]
pub struct Shelf<'a> {
    pub settings: &'a Settings,
    pub root: &'a Path,
}

impl<'a> Shelf<'a> {
    pub fn new(settings: &'a Settings, root: &'a Path) -> Self {
        Self { settings, root }
    }

    /// The folder of the disk with this number.
    pub fn volume(&self, number: usize) -> PathBuf {
        match number {
            0 => below(self.root, &self.settings.storage.folder),
            _ => self.root.join(format!("storage{}", number + 1)),
        }
    }

    pub fn folder(&self, number: usize) -> PathBuf {
        self.volume(number).join(format!("{}.{FOLDER}", self.settings.pod.process()))
    }

    fn of(&self, number: usize, name: &Name) -> PathBuf {
        self.folder(number).join(name.as_str())
    }

    fn part(&self, number: usize, name: &Name) -> PathBuf {
        self.folder(number).join(format!("{PART}{}", name.as_str()))
    }

    /// Makes the folder, for its owner alone, who is that of the volume.
    fn make_folder(&self, number: usize) -> anyhow::Result<()> {
        let folder = self.folder(number);
        self.make(&folder).with_context(|| folder.display().to_string())
    }

    /// Holds a path on one of the volumes.
    fn hold(&self, path: &Path) -> io::Result<Held> {
        for volume in (0..MAX_DISKS).map(|number| self.volume(number)) {
            if let Ok(rest) = path.strip_prefix(&volume) {
                return Held::new(&volume, rest);
            }
        }
        Err(ErrorKind::InvalidInput.into())
    }

    /// Opens a file of a snapshot.
    fn open(&self, number: usize, path: &Path) -> anyhow::Result<File> {
        let (volume, path) = (self.volume(number), self.folder(number).join(path));
        files::open_within(&volume, path.strip_prefix(&volume)?)
    }

    fn make(&self, folder: &Path) -> anyhow::Result<()> {
        let folder = self.hold(folder)?;
        match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            other => other?,
        }
        ensure!(is_folder(&folder)?, "it is not a folder: remove it");
        let open = files::open_folder(&folder)?;
        if open.metadata()?.mode() & 0o777 != 0o700 {
            // Root may lack the right to change the mode of another's.
            fchown(&open, Some(rustix::process::geteuid().as_raw()), None).ok();
            open.set_permissions(Permissions::from_mode(0o700))?;
        }
        self.give(&open)?;
        Ok(files::sync_folder(&folder)?)
    }

    /// Gives a file or folder to the owner of the volume, whose pod must be able to use it even if
    /// root has made it.
    fn give(&self, file: &File) -> io::Result<()> {
        let owner = fs::metadata(self.volume(0))?;
        // Only root may give it away.
        fchown(file, Some(owner.uid()), Some(owner.gid())).ok();
        Ok(())
    }

    /// Keeps other commands away until the file is dropped.
    pub fn lock(&self) -> anyhow::Result<File> {
        self.make_folder(0)?;
        let path = self.folder(0).join(LOCK);
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(false);
        let file = self.hold(&path).and_then(|held| files::open_itself(&held, options));
        let file = file.with_context(|| path.display().to_string())?;
        self.give(&file)?;
        lock::exclusive(&file, &path).context("another snapshot is being taken or restored")?;
        Ok(file)
    }

    /// The snapshots, sorted by name.
    pub fn list(&self) -> anyhow::Result<Vec<Listed>> {
        let mut names = Vec::new();
        for entry in entries(self)? {
            names.extend(entry.and_then(|text| Name::read(&text).ok()));
        }
        names.sort();
        names.truncate(MAX_LISTED);
        Ok(names.into_iter().map(|name| self.look(name)).collect())
    }

    fn manifest(&self, name: &Name) -> anyhow::Result<Manifest> {
        let held = self.hold(&self.of(0, name))?;
        Manifest::of(held.parent().unwrap_or(&held), name)
    }

    fn look(&self, name: Name) -> Listed {
        let read = || {
            let manifest = self.manifest(&name)?;
            let taken = self.taken(&manifest)?;
            anyhow::Ok((manifest, taken))
        };
        match read() {
            Ok((manifest, taken)) => Listed { name, manifest: Ok(manifest), taken },
            Err(error) => Listed { name, manifest: Err(format!("{error:#}")), taken: 0 },
        }
    }

    /// Fails if a file is missing, or has another length.
    fn taken(&self, manifest: &Manifest) -> anyhow::Result<u64> {
        let mut taken = 0;
        for entry in manifest.files.iter().chain(&manifest.memory) {
            let folder = self.volume(entry.volume);
            ensure!(
                folder.is_dir(),
                "a part of it is on {}, which is not here: mount that volume, too",
                folder.display()
            );
            let path = Path::new(manifest.name.as_str()).join(&entry.file);
            let open = self.open(entry.volume, &path);
            let found = open.with_context(|| entry.file.clone())?.metadata()?;
            let whole = found.is_file() && found.len() == entry.bytes;
            ensure!(whole, "{} does not have {} bytes", entry.file, entry.bytes);
            taken += found.blocks() * 512;
        }
        Ok(taken)
    }

    /// The snapshot of this name, whole.
    pub fn find(&self, name: &Name) -> anyhow::Result<Manifest> {
        let known = is_there(self, &self.of(0, name))?;
        ensure!(known, "there is no snapshot {}: `transom snapshot list` shows all", name.as_str());
        let manifest = self.look(name.clone()).manifest;
        let name = name.as_str();
        manifest.map_err(|why| anyhow::anyhow!("the snapshot {name} cannot be used: {why}"))
    }

    pub fn delete(&self, name: &Name) -> anyhow::Result<()> {
        let _lock = self.lock()?;
        self.clean()?;
        ensure!(
            is_there(self, &self.of(0, name))?,
            "there is no snapshot {}: `transom snapshot list` shows all",
            name.as_str()
        );
        let unused = self.lock_files(name)?;
        self.rename(&self.of(0, name), &self.part(0, name))?;
        drop(unused);
        self.discard(name)
    }

    /// Keeps machines away whose disk would be over one of this snapshot. Fails if one runs. A
    /// damaged snapshot can be deleted: what cannot be read or opened is not locked.
    fn lock_files(&self, name: &Name) -> anyhow::Result<Vec<File>> {
        let mut locked = Vec::new();
        for entry in self.manifest(name).map_or_else(|_| Vec::new(), |it| it.files) {
            let path = self.of(entry.volume, name).join(&entry.file);
            let mut options = File::options();
            let options = options.read(true).write(true);
            let open = self.hold(&path).and_then(|held| files::open_itself(&held, options));
            if let Ok(file) = open {
                lock::exclusive(&file, &path).with_context(|| {
                    let name = name.as_str();
                    format!("a running machine's disk is over the snapshot {name}: remove it first")
                })?;
                locked.push(file);
            }
        }
        Ok(locked)
    }

    fn rename(&self, from: &Path, to: &Path) -> anyhow::Result<()> {
        let rename = || {
            let (from, to) = (self.hold(from)?, self.hold(to)?);
            fs::rename(&from, &to)?;
            files::sync_folder(&to)
        };
        rename().with_context(|| to.display().to_string())
    }

    /// Removes what is unfinished, except a restore that must be finished. The caller has the lock.
    pub fn clean(&self) -> anyhow::Result<()> {
        for entry in entries(self)? {
            let name = entry.and_then(|text| Name::read(text.strip_prefix(PART)?).ok());
            if let Some(name) = name {
                self.discard(&name)?;
            }
        }
        if restore::journal(self)?.is_none() {
            for number in 0..MAX_DISKS {
                for folder in [STAGED, REPLACED] {
                    remove(self, &self.folder(number).join(folder))?;
                }
            }
        }
        Ok(())
    }

    /// Removes an unfinished snapshot: from the first volume last.
    fn discard(&self, name: &Name) -> anyhow::Result<()> {
        let is_whole = is_there(self, &self.of(0, name))?;
        for number in (0..MAX_DISKS).rev() {
            remove(self, &self.part(number, name))?;
            if number > 0 && !is_whole {
                remove(self, &self.of(number, name))?;
            }
        }
        Ok(())
    }
}

/// Whether a volume has this folder, without a link in its path.
fn is_there(shelf: &Shelf, folder: &Path) -> anyhow::Result<bool> {
    let held = if_there(shelf.hold(folder)).with_context(|| folder.display().to_string())?;
    held.map_or(Ok(false), |held| is_folder(&held))
}

/// Whether this is a folder, and no link to one.
fn is_folder(path: &Path) -> anyhow::Result<bool> {
    let found = if_there(fs::symlink_metadata(path));
    let found = found.with_context(|| path.display().to_string())?;
    Ok(found.is_some_and(|it| it.is_dir()))
}

/// Whether a file, or a link, has this name.
fn exists(path: impl AsRef<Path>) -> io::Result<bool> {
    Ok(if_there(fs::symlink_metadata(path))?.is_some())
}

/// Names in the folder on the first volume. There are none if it is no folder.
fn entries(shelf: &Shelf) -> anyhow::Result<Vec<Option<String>>> {
    let folder = shelf.folder(0);
    let read = || {
        let Some(held) = if_there(shelf.hold(&folder.join(LOCK)))? else { return Ok(None) };
        fs::read_dir(held.parent().unwrap_or(&held)).map(Some)
    };
    let entries = read().with_context(|| folder.display().to_string())?.into_iter().flatten();
    Ok(entries.flatten().map(|entry| entry.file_name().into_string().ok()).collect())
}

/// Removes a folder in one of ours, with all that is in it. Links in it are not followed.
fn remove(shelf: &Shelf, path: &Path) -> anyhow::Result<()> {
    let held = if_there(shelf.hold(path)).with_context(|| path.display().to_string())?;
    let Some(held) = held else { return Ok(()) };
    match fs::remove_dir_all(&held) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            bail!("{}: remove it", path.display())
        }
        other => other.with_context(|| path.display().to_string()),
    }
}

/// Finishes a restore that was interrupted, and removes unfinished snapshots, before the pod looks
/// at the volume. Only the first must succeed.
pub fn recover(shelf: &Shelf) -> anyhow::Result<()> {
    let Some(restores) = restores(shelf)? else { return Ok(()) };
    match tidy(shelf, restores) {
        Err(error) if !restores => {
            tracing::warn!("the rest of an interrupted snapshot is not removed: {error:#}");
            Ok(())
        }
        other => other,
    }
}

/// Fails if a restore has begun in another container since [`recover`]: the disks may be those of
/// two machines.
pub fn check(shelf: &Shelf) -> anyhow::Result<()> {
    if restores(shelf)? != Some(true) {
        return Ok(());
    }
    let sentence = "a restore of a snapshot has begun in another container since this start began: \
                    start again, which finishes the restore";
    Err(Failure::new(Status::State, sentence))
}

/// Fails also if a restore has ended since this was the generation: it has replaced files that are
/// open already.
pub fn check_since(shelf: &Shelf, generation: Option<Uuid>) -> anyhow::Result<()> {
    check(shelf)?;
    if restore::generation(shelf) == generation {
        return Ok(());
    }
    let sentence = "a snapshot has been restored in another container since this start began: \
                    start again";
    Err(Failure::new(Status::State, sentence))
}

/// Whether a restore must be finished. `None` for a volume that the pod may not enter, which the
/// plan reports.
fn restores(shelf: &Shelf) -> anyhow::Result<Option<bool>> {
    let denied = |error: &io::Error| error.kind() == ErrorKind::PermissionDenied;
    match restore::journal(shelf) {
        Err(error) if error.downcast_ref().is_some_and(denied) => Ok(None),
        found => Ok(Some(found?.is_some())),
    }
}

fn tidy(shelf: &Shelf, restores: bool) -> anyhow::Result<()> {
    let left = |name: &String| name.starts_with(PART) || [STAGED, REPLACED].contains(&&**name);
    if !restores && !entries(shelf)?.iter().flatten().any(left) {
        return Ok(());
    }
    let _lock = match shelf.lock() {
        // A snapshot is being taken now.
        Err(_) if !restores => return Ok(()),
        other => other?,
    };
    if restores {
        restore::finish(shelf)?;
        tracing::info!("an interrupted restore of a snapshot is finished");
    }
    shelf.clean()
}
