//! Takes a snapshot: of a machine that is off, or of one that is held still meanwhile.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};

use super::copying::{self, Progress, check_room};
use super::manifest::{Entry, Kind, MANIFEST, Manifest, memory_files};
use super::set::Set;
use super::{MEMORY, Name, Shelf, restore};
use crate::files;
use crate::settings::value::in_mib;
use crate::status::{Failure, Status};
use crate::suspended;

/// How long a machine stands still at most, if nobody allowed more.
const STILL: Duration = Duration::from_secs(10);
/// For its memory.
const STILL_WITH_MEMORY: Duration = Duration::from_secs(120);
/// With `--pause`.
const STILL_FOR_COPY: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// Save the memory, too.
    pub memory: bool,
    /// The machine may stand still while its disks are copied.
    pub pause: bool,
}

/// A machine that runs.
pub struct Running {
    /// The files of its disks.
    pub disks: Vec<PathBuf>,
    /// The most bytes that its memory takes.
    pub memory: u64,
}

/// The pod that runs a machine.
pub trait Pod {
    fn machine(&mut self) -> anyhow::Result<Running>;
    /// Returns when the machine stands still, for at most `limit`.
    fn hold(&mut self, freeze: bool, limit: Duration) -> anyhow::Result<()>;
    /// Saves the machine that stands still to a new folder.
    fn save(&mut self, folder: &Path, within: Duration) -> anyhow::Result<()>;
    /// Fails if the machine did not stand still until now.
    fn release(&mut self) -> anyhow::Result<Held>;
}

/// The machine stood still.
#[derive(Debug)]
pub struct Held {
    /// The guest had frozen its file systems. The error is the reason why it had not.
    pub frozen: Result<(), String>,
    pub seconds: f64,
}

/// A new snapshot.
#[derive(Debug)]
pub struct Made {
    pub manifest: Manifest,
    /// `None` if the machine is off.
    pub held: Option<Held>,
}

/// Takes a snapshot. Nothing is left of one that fails.
pub fn create(
    shelf: Shelf,
    name: &Name,
    wish: Wish,
    mut pod: Option<&mut dyn Pod>,
) -> anyhow::Result<Made> {
    if pod.is_some() && shelf.settings.disk.ephemeral {
        let sentence = "there is nothing to take a snapshot of: EPHEMERAL=Y throws away what its \
                        guest writes";
        return Err(Failure::new(Status::Disk, sentence));
    }
    let _lock = shelf.lock()?;
    match pod {
        None => restore::finish(&shelf)?,
        Some(_) => ensure!(restore::journal(&shelf)?.is_none(), "a restore is not finished"),
    }
    shelf.clean()?;
    let taken = fs::symlink_metadata(shelf.of(0, name)).is_ok();
    ensure!(!taken, "there is a snapshot {} already: choose another name", name.as_str());
    // A deleted one may have left files on a volume that was not mounted then.
    shelf.discard(name)?;
    let machine = pod.as_mut().map(|pod| pod.machine()).transpose()?;
    if machine.is_none() {
        check_off(shelf, wish)?;
    }
    let set = Set::open(&shelf, machine.is_none())?;
    if let Some(machine) = &machine {
        check_disks(&set, machine)?;
    }
    let part = Part::make(shelf, name, set)?;
    let trial = part.try_clones();
    let memory = machine.filter(|_| wish.memory).map(|machine| machine.memory);
    let mut needs = 0;
    for number in part.volumes() {
        let bytes = if trial.is_some() { 0 } else { part.bytes_on(number) };
        let memory = memory.filter(|_| number == 0).unwrap_or(0);
        check_room(&shelf.volume(number), bytes.saturating_add(memory))?;
        needs += bytes;
    }
    let mut progress = Progress::new(needs);
    let held = match pod {
        None => {
            part.copy(trial.is_some(), &mut progress)?;
            None
        }
        Some(pod) => {
            let limit = limit(trial, wish, needs)?;
            pod.hold(!wish.memory, limit)?;
            // An error ends the hold as well, when its connection is dropped.
            if wish.memory {
                pod.save(&part.folder(0).join(MEMORY), limit)?;
            }
            part.copy(trial.is_some(), &mut progress)?;
            Some(pod.release()?)
        }
    };
    let kind = match &held {
        _ if memory.is_some() => Kind::Memory,
        None => Kind::Off,
        Some(held) if held.frozen.is_ok() => Kind::Frozen,
        Some(_) => Kind::PowerCut,
    };
    let manifest = part.finish(kind)?;
    Ok(Made { manifest, held })
}

fn check_off(shelf: Shelf, wish: Wish) -> anyhow::Result<()> {
    ensure!(!wish.memory, "the machine is off, so that it has no memory: leave out --memory");
    let folder = suspended::folder(shelf.settings, shelf.root);
    let is_suspended = suspended::find(&folder)?.is_some();
    ensure!(
        !is_suspended,
        "the machine is suspended, and its disks are not whole without its memory: start it, and \
         take the snapshot while it runs"
    );
    Ok(())
}

/// Fails if the machine has a disk that would not be in the snapshot.
fn check_disks(set: &Set, machine: &Running) -> anyhow::Result<()> {
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let own: Vec<_> = set.disks().filter_map(|disk| identity(&disk.path)).collect();
    for path in &machine.disks {
        let is_own = identity(path).is_some_and(|found| own.contains(&found));
        let path = path.display();
        ensure!(
            is_own,
            "{path}: this disk of the machine is not on the pod's volume, or is the one of \
             Windows' setup: a snapshot would not have it"
        );
    }
    Ok(())
}

/// How long the machine may stand still.
fn limit(trial: Option<Duration>, wish: Wish, needs: u64) -> anyhow::Result<Duration> {
    let usual = if wish.memory { STILL_WITH_MEMORY } else { STILL };
    let shown = in_mib(needs);
    match trial {
        _ if wish.pause => Ok(STILL_FOR_COPY),
        Some(trial) if trial < usual / 2 => Ok(usual),
        Some(trial) => bail!(
            "the guest would stand still for {} s while its disks are cloned: allow it with \
             --pause, or take the snapshot while the machine is off",
            trial.as_secs()
        ),
        None => bail!(
            "the volume cannot clone files, so the guest would stand still while {shown} are \
             copied: allow it with --pause, take the snapshot while the machine is off, or use a \
             volume with Btrfs or XFS"
        ),
    }
}

fn taken_bytes(file: &File) -> u64 {
    file.metadata().map_or(0, |found| found.blocks() * 512)
}

/// An unfinished snapshot. Dropping it removes it.
struct Part<'a> {
    shelf: Shelf<'a>,
    name: Name,
    set: Set,
    /// A copy of each file of the set.
    copies: Vec<File>,
    finished: bool,
}

impl<'a> Part<'a> {
    fn make(shelf: Shelf<'a>, name: &Name, set: Set) -> anyhow::Result<Self> {
        let (name, copies) = (name.clone(), Vec::new());
        let mut part = Self { shelf, name, set, copies, finished: false };
        // First the folder by which the rest is found after a kill.
        for number in part.volumes() {
            shelf.make_folder(number)?;
            let folder = part.folder(number);
            shelf.make(&folder).with_context(|| folder.display().to_string())?;
        }
        for member in &part.set.members {
            let path = part.folder(member.volume).join(&member.file);
            let mut options = File::options();
            let options = options.read(true).write(true).create_new(true).mode(0o600);
            let copy = shelf.hold(&path).and_then(|held| options.open(held));
            part.copies.push(copy.with_context(|| path.display().to_string())?);
        }
        Ok(part)
    }

    fn folder(&self, number: usize) -> PathBuf {
        self.shelf.part(number, &self.name)
    }

    /// The volumes with files of the set, the first one first.
    fn volumes(&self) -> Vec<usize> {
        let mut all: Vec<_> = self.set.members.iter().map(|member| member.volume).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The bytes that its disks on this volume take.
    fn bytes_on(&self, number: usize) -> u64 {
        let there = self.set.disks().filter(|disk| disk.volume == number);
        there.map(|disk| taken_bytes(&disk.open)).sum()
    }

    /// Clones all disks, which may change meanwhile. Returns how long it took, and `None` if the
    /// volume cannot.
    fn try_clones(&self) -> Option<Duration> {
        let start = Instant::now();
        let disks = || self.set.members.iter().zip(&self.copies).filter(|(it, _)| it.is_disk);
        let done = disks().all(|(disk, copy)| copying::clone(&disk.open, copy).is_ok());
        let time = start.elapsed();
        let emptied = disks().all(|(_, copy)| copy.set_len(0).is_ok());
        (done && emptied).then_some(time)
    }

    /// Copies all files as they are now.
    fn copy(&self, clones: bool, progress: &mut Progress) -> anyhow::Result<()> {
        for (member, copy) in self.set.members.iter().zip(&self.copies) {
            let done = match clones && member.is_disk {
                true => copying::clone(&member.open, copy),
                false => copying::copy(&member.open, copy, progress),
            };
            done.with_context(|| member.path.display().to_string())?;
            // Only here it is known when the file was changed last.
            let changed = copying::changed(&member.open.metadata()?);
            copying::set_time(copy, changed).with_context(|| member.path.display().to_string())?;
        }
        Ok(())
    }

    /// The files of the memory that was saved.
    fn memory(&self) -> anyhow::Result<Vec<Entry>> {
        let part = self.folder(0);
        let open = |path: &str| files::open_within(&part, Path::new(path)).context("its memory");
        self.shelf.give(&open(MEMORY)?)?;
        let entry = |file: String| {
            let open = open(&file)?;
            self.shelf.give(&open)?;
            let found = open.metadata()?;
            let (bytes, changed) = (found.len(), copying::changed(&found));
            Ok(Entry { volume: 0, file, bytes, changed })
        };
        memory_files().into_iter().map(entry).collect()
    }

    /// Makes the snapshot durable, and gives it its name.
    fn finish(mut self, kind: Kind) -> anyhow::Result<Manifest> {
        let mut files = Vec::new();
        for (member, copy) in self.set.members.iter().zip(&self.copies) {
            let found = copy.metadata()?;
            copy.sync_all().with_context(|| member.file.clone())?;
            self.shelf.give(copy)?;
            let (volume, file) = (member.volume, member.file.clone());
            let changed = copying::changed(&found);
            files.push(Entry { volume, file, bytes: found.len(), changed });
        }
        let memory = if kind == Kind::Memory { self.memory()? } else { Vec::new() };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let absent = std::mem::take(&mut self.set.absent);
        let name = self.name.clone();
        let manifest = Manifest { name, created, kind, files, memory, absent };
        let text = manifest.write()?;
        let path = self.folder(0).join(MANIFEST);
        let held = self.shelf.hold(&path);
        held.and_then(|held| {
            files::write(&held, |file| {
                file.set_permissions(Permissions::from_mode(0o600))?;
                self.shelf.give(file)?;
                std::io::Write::write_all(file, &text)
            })
        })
        .with_context(|| path.display().to_string())?;
        // On the first volume last: with its name there, it exists.
        for number in self.volumes().into_iter().rev() {
            self.shelf.rename(&self.folder(number), &self.shelf.of(number, &self.name))?;
        }
        self.finished = true;
        Ok(manifest)
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if !self.finished
            && let Err(error) = self.shelf.discard(&self.name)
        {
            tracing::warn!("an unfinished snapshot is left: {error:#}");
        }
    }
}
