//! Puts the files of a snapshot back.
//!
//! All files are copied first, beside the present ones. Then a journal is written, durably: from
//! then on the restore is finished whatever happens, by the next command or start of the pod.
//! Without the journal the present files are as they were. Each file is replaced by a rename, and
//! the former one stays until all are in their places.

use std::fs::{self, File, Permissions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use host::lock;
use host::uuid::Uuid;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use vmm::control::snapshot::{MACHINE, MEMORY as CONTENTS, UNFINISHED};

use super::copying::{self, Progress, check_room};
use super::manifest::{Entry, Journal, Kind, Manifest, read};
use super::set::{belongs, is_disk};
use super::{Name, REPLACED, STAGED, Shelf, exists, remove};
use crate::disks::{MAX_DISKS, original, own_files};
use crate::files::{self, if_there};
use crate::status::{Failure, Status};
use crate::suspended;

/// Extension of the file with the VM Generation ID after a restore.
pub const GENERATION: &str = "generation";
/// Extension of the journal.
const JOURNAL: &str = "restoring";
const OUT: &str =
    "restore a backup of the volume, or remove the file to keep the disks as they are";

/// An atomic change to the volume. Each of them may be made again after a kill.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    MakeFolder(PathBuf),
    /// Keeps the present file, and puts the staged one in its place.
    Replace {
        staged: PathBuf,
        path: PathBuf,
        kept: PathBuf,
    },
    Move {
        from: PathBuf,
        to: PathBuf,
    },
    Remove(PathBuf),
    Write {
        path: PathBuf,
        text: String,
    },
}

/// Restores the disks of a machine that is off.
pub fn restore(shelf: Shelf, name: &Name, drop_suspended: bool) -> anyhow::Result<Manifest> {
    let _lock = shelf.lock()?;
    finish(&shelf)?;
    shelf.clean()?;
    let manifest = shelf.find(name)?;
    check(&shelf, &manifest)?;
    check_seal(&shelf)?;
    let _disks = lock_disks(&shelf)?;
    let folder = suspended::folder(shelf.settings, shelf.root);
    let is_suspended =
        folder.join(MACHINE).try_exists()? || folder.join(UNFINISHED).try_exists()?;
    ensure!(
        drop_suspended || !is_suspended,
        "a machine is suspended on the volume, whose memory does not fit the disks of the \
         snapshot: start it and shut it down, or lose it with --drop-suspended"
    );
    let staged = stage(&shelf, &manifest);
    if staged.is_err() {
        shelf.clean().ok();
    }
    // No machine may open the new files before all have their names.
    let _staged = staged?;
    let disks = disks(&shelf)?;
    let journal = Journal { manifest, disks, generation: Uuid::random()?.to_string() };
    write(&shelf, &journal_path(&shelf), &journal.write()?)?;
    complete(&shelf, &journal)?;
    Ok(journal.manifest)
}

fn journal_path(shelf: &Shelf) -> PathBuf {
    shelf.volume(0).join(format!("{}.{JOURNAL}", shelf.settings.pod.process()))
}

/// The restore that has begun.
pub fn journal(shelf: &Shelf) -> anyhow::Result<Option<Journal>> {
    let path = journal_path(shelf);
    let Some(name) = path.file_name() else { return Ok(None) };
    match fs::symlink_metadata(&path) {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(None);
        }
        found => found.map(drop).with_context(|| path.display().to_string())?,
    }
    let journal = read(&shelf.volume(0), Path::new(name)).and_then(|bytes| Journal::read(&bytes));
    let journal = journal.and_then(|journal| {
        check(shelf, &journal.manifest)?;
        Ok(journal)
    });
    let fail = |error| Failure::new(Status::State, format!("{}: {error:#}: {OUT}", path.display()));
    journal.map(Some).map_err(fail)
}

/// Finishes the restore that has begun, if there is one, unless a machine uses or has used the
/// disks meanwhile, whose data would be lost. The caller has the lock.
pub fn finish(shelf: &Shelf) -> anyhow::Result<()> {
    let Some(journal) = journal(shelf)? else { return Ok(()) };
    let fail = |why| {
        let sentence = format!("an interrupted restore of a snapshot cannot be finished: {why}");
        Failure::new(Status::State, sentence)
    };
    let _disks = lock_disks(shelf).map_err(|error| fail(format!("{error:#}")))?;
    if let Some(used) = disks(shelf)?.iter().find(|disk| !journal.disks.contains(disk)) {
        let (disk, path) = (shelf.volume(used.volume).join(&used.file), journal_path(shelf));
        let (disk, path) = (disk.display(), path.display());
        return Err(fail(format!("{disk} has been changed since it began ({path}): {OUT}")));
    }
    if let Some(lost) = lost(shelf, &journal)? {
        let (lost, path) = (lost.display(), journal_path(shelf));
        let sentence = format!(
            "{lost} is not restored, and its copy is gone: attach the volumes of all disks, or \
             remove {} and restore the snapshot again",
            path.display()
        );
        return Err(fail(sentence));
    }
    complete(shelf, &journal)
}

/// A file of the snapshot that is neither in its place nor staged, as if its volume were not
/// attached. The other files would be restored alone.
fn lost(shelf: &Shelf, journal: &Journal) -> anyhow::Result<Option<PathBuf>> {
    let is_there = |path: PathBuf| {
        let found = if_there(shelf.hold(&path)).and_then(|held| held.map_or(Ok(false), exists));
        found.with_context(|| path.display().to_string())
    };
    let disks = disks(shelf)?;
    let Manifest { files, kind, .. } = &journal.manifest;
    for Entry { volume, file, .. } in files {
        let staged = shelf.folder(*volume).join(STAGED).join(file);
        let path = shelf.volume(*volume).join(file);
        // The last of its name was the staged one, as the file system keeps it.
        let mut known = journal.disks.iter().rev();
        let known = known.find(|it| it.volume == *volume && it.file == *file);
        let is_restored = match (is_disk(shelf, *volume, file), known) {
            (true, Some(known)) => disks.contains(known),
            (true, None) => false,
            (false, _) => is_there(path.clone())?,
        };
        if !is_restored && !is_there(staged)? {
            return Ok(Some(path));
        }
    }
    let sleeper = suspended::folder(shelf.settings, shelf.root).join(MACHINE);
    let staged = shelf.folder(0).join(STAGED).join(MACHINE);
    let is_lost = *kind == Kind::Memory && !is_there(staged)? && !is_there(sleeper.clone())?;
    Ok(is_lost.then_some(sleeper))
}

/// The caller has the disks' locks, too.
fn complete(shelf: &Shelf, journal: &Journal) -> anyhow::Result<()> {
    for step in steps(shelf, journal) {
        let out = "the restore continues at the next start";
        step.make(shelf).with_context(|| format!("{}: {out}", step.path().display()))?;
    }
    for number in 0..MAX_DISKS {
        for folder in [STAGED, REPLACED] {
            remove(shelf, &shelf.folder(number).join(folder))?;
        }
    }
    Ok(())
}

/// The machine's VM Generation ID since the last restore.
pub fn generation(shelf: &Shelf) -> Option<Uuid> {
    files::read_itself(&generation_path(shelf)).ok()?.trim().parse().ok()
}

fn generation_path(shelf: &Shelf) -> PathBuf {
    shelf.volume(0).join(format!("{}.{GENERATION}", shelf.settings.pod.process()))
}

/// Fails unless all files are this machine's.
fn check(shelf: &Shelf, manifest: &Manifest) -> anyhow::Result<()> {
    let files = manifest.files.iter().map(|entry| (entry.volume, &entry.file));
    for (volume, file) in files.chain(manifest.absent.iter().map(|it| (it.0, &it.1))) {
        ensure!(
            belongs(shelf, volume, file),
            "the snapshot has {file}, which is no file of this machine: set APP, STORAGE and \
             DISK_NAME as they were"
        );
    }
    let disk_of = |number: usize| {
        let mut all = manifest.files.iter().filter(|it| it.volume == number);
        all.any(|entry| is_disk(shelf, number, &entry.file))
    };
    let lost = manifest
        .absent
        .iter()
        .find(|(number, file)| is_disk(shelf, *number, file) && !disk_of(*number));
    ensure!(lost.is_none() && disk_of(0), "the snapshot has no disk");
    Ok(())
}

/// Fails if the volume is sealed: other machines read the disks that would be replaced.
fn check_seal(shelf: &Shelf) -> anyhow::Result<()> {
    let mark = original::mark(shelf.settings, shelf.root);
    if !mark.try_exists()? {
        return Ok(());
    }
    let sentence = format!(
        "this volume is sealed: remove {} to restore a snapshot, and machines whose disks are over \
         this one do not start any more",
        mark.display()
    );
    Err(Failure::new(Status::State, sentence))
}

/// Volume, name and path of each disk of the pod that there may be: the present ones, and those
/// that replace them.
fn places(shelf: &Shelf) -> Vec<(usize, String, PathBuf)> {
    let mut all = Vec::new();
    for number in 0..MAX_DISKS {
        for disk in own_files(number, shelf.settings, shelf.root) {
            let name = disk.path.file_name().unwrap_or_default();
            let (staged, name) =
                (shelf.folder(number).join(STAGED).join(name), name.to_string_lossy());
            all.extend([disk.path.clone(), staged].map(|path| (number, name.to_string(), path)));
        }
    }
    all
}

/// Locks the disks of the pod, so that no machine uses them.
fn lock_disks(shelf: &Shelf) -> anyhow::Result<Vec<File>> {
    let mut locked = Vec::new();
    for (_, _, path) in places(shelf) {
        let mut options = File::options();
        let options = options.read(true).write(true);
        let open = if_there(shelf.hold(&path).and_then(|held| files::open_itself(&held, options)));
        if let Some(file) = open.with_context(|| path.display().to_string())? {
            lock::exclusive(&file, &path).context("stop the pod first")?;
            locked.push(file);
        }
    }
    Ok(locked)
}

/// The disks of the pod as they are, by which those are known that a machine has used since.
fn disks(shelf: &Shelf) -> anyhow::Result<Vec<Entry>> {
    let mut all = Vec::new();
    for (volume, file, path) in places(shelf) {
        let found = if_there(shelf.hold(&path).and_then(fs::symlink_metadata));
        if let Some(found) = found.with_context(|| path.display().to_string())? {
            let (bytes, changed) = (found.len(), copying::changed(&found));
            all.push(Entry { volume, file, bytes, changed });
        }
    }
    Ok(all)
}

/// Copies the files of the snapshot beside those that they replace. Returns the disks, locked.
fn stage(shelf: &Shelf, manifest: &Manifest) -> anyhow::Result<Vec<File>> {
    let mut locked = Vec::new();
    let all: Vec<_> = manifest.files.iter().chain(&manifest.memory).collect();
    for (number, file) in &manifest.absent {
        let volume = shelf.volume(*number);
        check_place(&volume, &volume, &volume.join(file))?;
    }
    let sleeper = suspended::folder(shelf.settings, shelf.root);
    if sleeper.exists() {
        check_place(&shelf.volume(0), &sleeper, &sleeper.join(MACHINE))?;
    }
    let mut progress = Progress::new(all.iter().map(|entry| entry.bytes).sum());
    for entry in all {
        let volume = shelf.volume(entry.volume);
        shelf.make_folder(entry.volume)?;
        let folder = shelf.folder(entry.volume).join(STAGED);
        shelf.make(&folder).with_context(|| folder.display().to_string())?;
        shelf.make(&folder.with_file_name(REPLACED)).context(REPLACED)?;
        check_place(&volume, &folder, &volume.join(&entry.file))?;
        let name = Path::new(&entry.file).file_name().unwrap_or_default();
        let copy = stage_one(shelf, manifest, entry, &folder.join(name), &mut progress)
            .with_context(|| folder.join(name).display().to_string())?;
        if is_disk(shelf, entry.volume, &entry.file) {
            lock::exclusive(&copy, &folder.join(name))?;
            locked.push(copy);
        }
    }
    Ok(locked)
}

/// Fails if a file could not be replaced by a rename.
fn check_place(volume: &Path, folder: &Path, path: &Path) -> anyhow::Result<()> {
    let (one, two) = (fs::metadata(volume)?.dev(), fs::metadata(folder)?.dev());
    ensure!(one == two, "{}: it is another file system than the volume", folder.display());
    let found = match fs::symlink_metadata(path) {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(());
        }
        found => found.with_context(|| path.display().to_string())?,
    };
    let mounted = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty());
    let mounted = mounted.is_ok_and(|it| it.stx_attributes.contains(StatxAttributes::MOUNT_ROOT));
    let path = path.display();
    ensure!(found.is_file() && !mounted, "{path}: it is not a file of the volume itself");
    Ok(())
}

fn stage_one(
    shelf: &Shelf,
    manifest: &Manifest,
    entry: &Entry,
    to: &Path,
    progress: &mut Progress,
) -> anyhow::Result<File> {
    let path = Path::new(manifest.name.as_str()).join(&entry.file);
    let from = shelf.open(entry.volume, &path)?;
    ensure!(from.metadata()?.is_file(), "it is not a file");
    let mut options = File::options();
    let to = shelf.hold(to)?;
    let copy = options.read(true).write(true).create_new(true).mode(0o600).open(&to)?;
    if copying::clone(&from, &copy).is_err() {
        copy.set_len(0)?;
        check_room(&shelf.volume(entry.volume), from.metadata()?.blocks() * 512)?;
        copying::copy(&from, &copy, progress)?;
    }
    // Owner and mode are those of the file that is replaced.
    let volume = shelf.volume(entry.volume);
    let present = fs::symlink_metadata(volume.join(&entry.file)).ok();
    let mode = present.as_ref().map_or(0o600, |it| it.mode() & 0o777);
    let owner = present.map_or_else(|| fs::metadata(&volume), Ok)?;
    copy.set_permissions(Permissions::from_mode(mode))?;
    copying::set_time(&copy, entry.changed)?;
    // Last: root may lack the rights to change another's.
    fchown(&copy, Some(owner.uid()), Some(owner.gid())).ok();
    copy.sync_all()?;
    files::sync_folder(&to)?;
    Ok(copy)
}

/// The changes that put the staged files in their places. The journal is removed last.
fn steps(shelf: &Shelf, journal: &Journal) -> Vec<Step> {
    let staged = |number: usize| shelf.folder(number).join(STAGED);
    let kept = |number: usize| shelf.folder(number).join(REPLACED);
    let sleeper = suspended::folder(shelf.settings, shelf.root);
    let has_memory = journal.manifest.kind == Kind::Memory;
    let mut steps = Vec::new();
    // Its memory does not fit the disks from here on. Later it is that of the snapshot.
    if !has_memory || staged(0).join(MACHINE).exists() {
        steps.extend([MACHINE, UNFINISHED].map(|name| Step::Remove(sleeper.join(name))));
    }
    for Entry { volume, file, .. } in &journal.manifest.files {
        steps.push(Step::Replace {
            staged: staged(*volume).join(file),
            path: shelf.volume(*volume).join(file),
            kept: kept(*volume).join(file),
        });
    }
    for (volume, file) in &journal.manifest.absent {
        let from = shelf.volume(*volume).join(file);
        steps.push(Step::Move { from, to: kept(*volume).join(file) });
    }
    if has_memory {
        steps.push(Step::MakeFolder(sleeper.clone()));
        for name in [CONTENTS, MACHINE] {
            steps.push(Step::Move { from: staged(0).join(name), to: sleeper.join(name) });
        }
    }
    steps.push(Step::Write {
        path: generation_path(shelf),
        text: format!("{}\n", journal.generation),
    });
    steps.push(Step::Remove(journal_path(shelf)));
    steps
}

impl Step {
    fn make(&self, shelf: &Shelf) -> anyhow::Result<()> {
        match self {
            Self::MakeFolder(path) => shelf.make(path)?,
            Self::Replace { staged, path, kept } => {
                let Some(staged) = if_there(shelf.hold(staged))? else { return Ok(()) };
                if !exists(&staged)? {
                    return Ok(());
                }
                let (path, kept) = (shelf.hold(path)?, shelf.hold(kept)?);
                if !exists(&kept)? && exists(&path)? {
                    keep(&path, &kept)?;
                }
                rename(&staged, &path)?;
            }
            Self::Move { from, to } => {
                let Some(from) = if_there(shelf.hold(from))? else { return Ok(()) };
                if exists(&from)? {
                    rename(&from, &shelf.hold(to)?)?;
                }
            }
            Self::Remove(path) => {
                let Some(path) = if_there(shelf.hold(path))? else { return Ok(()) };
                match fs::remove_file(&path) {
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    other => other?,
                }
                sync(&path)?;
            }
            Self::Write { path, text } => write(shelf, path, text.as_bytes())?,
        }
        Ok(())
    }

    fn path(&self) -> &Path {
        match self {
            Self::MakeFolder(path) | Self::Remove(path) | Self::Write { path, .. } => path,
            Self::Replace { path, .. } => path,
            Self::Move { from, .. } => from,
        }
    }
}

/// Gives a file a second name. A file system without such names leaves it with that alone.
fn keep(path: &Path, kept: &Path) -> anyhow::Result<()> {
    if fs::hard_link(path, kept).is_err() {
        fs::rename(path, kept)?;
    }
    sync(kept)?;
    sync(path)
}

fn rename(from: &Path, to: &Path) -> anyhow::Result<()> {
    fs::rename(from, to)?;
    sync(to)?;
    sync(from)
}

/// Makes a name durable. Fails if that is unknown, because the next step relies on it.
fn sync(path: &Path) -> anyhow::Result<()> {
    // There may be no folder to remove from.
    if_there(files::sync_folder(path))?;
    Ok(())
}

fn write(shelf: &Shelf, path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let written = files::write(path, |file| {
        shelf.give(file)?;
        file.write_all(bytes)
    });
    written.with_context(|| path.display().to_string())
}

#[cfg(test)]
pub mod test {
    use super::*;

    /// A restore that is killed after this number of changes: those that stage each file, the
    /// journal, and the steps. Returns false if there are fewer.
    pub fn killed(shelf: Shelf, name: &Name, cut: usize) -> bool {
        let _lock = shelf.lock().unwrap();
        let manifest = shelf.find(name).unwrap();
        let staged = manifest.files.len();
        if cut < staged {
            let mut part = manifest;
            part.files.truncate(cut);
            part.kind = Kind::Off;
            part.memory.clear();
            stage(&shelf, &part).unwrap();
            return true;
        }
        stage(&shelf, &manifest).unwrap();
        if cut == staged {
            return true;
        }
        let disks = disks(&shelf).unwrap();
        let generation = Uuid::random().unwrap().to_string();
        let journal = Journal { manifest, disks, generation };
        write(&shelf, &journal_path(&shelf), &journal.write().unwrap()).unwrap();
        let steps = steps(&shelf, &journal);
        let count = cut - staged - 1;
        for (number, step) in steps.iter().take(count / 2).enumerate() {
            step.make(&shelf).unwrap();
            // A kill in the middle of a replacement.
            if let (true, Some(Step::Replace { path, kept, .. })) =
                (count % 2 == 1 && number + 1 == count / 2, steps.get(number + 1))
                && path.exists()
            {
                keep(path, kept).unwrap();
            }
        }
        count / 2 <= steps.len()
    }
}
