//! The changes to the volume with which an installation begins. Each of them is atomic, and after
//! each of them a killed pod finds a volume on which [`super::decide`] continues.

use std::fs;
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use super::{BASE, BOOTED, Base, Found, Next, SETUP, Step, VERSION};
use crate::files;

/// Folder of the volume for former installations, as in the reference image.
pub const BACKUPS: &str = "backups";
/// End of the name of a backup that is not complete.
const PART: &str = ".part";
/// Name of a backup of an unknown installation.
const UNKNOWN: &str = "unknown";
/// Extensions of the screen's passwords, which stay when an installation moves. That of its account
/// moves.
const KEPT: [&str; 2] = ["password", "vnc"];

/// An atomic change to the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    MakeFolder(PathBuf),
    /// Fails if the new name is taken.
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

impl Change {
    /// Makes the change durable before it returns.
    pub fn make(&self) -> io::Result<()> {
        match self {
            Self::MakeFolder(path) => match fs::create_dir(path) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                _ => files::sync_folder(path)?,
            },
            Self::Move { from, to } => {
                match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
                    // Some file systems cannot rename without replacing.
                    Err(Errno::INVAL | Errno::NOSYS) if fs::symlink_metadata(to).is_err() => {
                        fs::rename(from, to)?;
                    }
                    renamed => renamed?,
                }
                files::sync_folder(to)?;
                files::sync_folder(from)?;
            }
            Self::Remove(path) => match fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => files::sync_folder(path)?,
            },
            Self::Write { path, text } => {
                files::write(path, |file| file.write_all(text.as_bytes()))?;
            }
        }
        Ok(())
    }

    /// The path that the change is about.
    pub fn path(&self) -> &Path {
        match self {
            Self::MakeFolder(path) | Self::Remove(path) | Self::Write { path, .. } => path,
            Self::Move { from, .. } => from,
        }
    }
}

/// A volume, as far as changes depend on it.
pub struct Place<'a> {
    pub volume: &'a Path,
    /// Start of the names of state files.
    pub app: &'a str,
    /// Name of the disk's file, without extension.
    pub disk: &'a str,
}

impl Place<'_> {
    fn file(&self, end: &str) -> PathBuf {
        self.volume.join(format!("{}.{end}", self.app))
    }
}

/// The changes before the first start of a step.
pub fn before(next: &Next, place: &Place) -> Vec<Change> {
    let mut changes = Vec::new();
    let base = next.base.as_deref();
    match next.step {
        Step::Boot(_) | Step::ByHand | Step::Live => {
            let part = next.found.backup.as_deref();
            return part.map(|part| undo(part, place)).unwrap_or_default();
        }
        Step::Install => {}
        Step::InstallAgain => {
            changes.extend(next.found.backup.as_deref().map(|part| finish(part, place)));
            // Its boot entries belong to the interrupted installation.
            changes.extend(
                names(place.volume)
                    .into_iter()
                    .filter(|name| is_firmwares(&name.to_lowercase()))
                    .map(|name| Change::Remove(place.volume.join(name))),
            );
        }
        Step::Replace => changes.extend(backup(&next.found, place, base)),
    }
    // First the mark: with it, the new base would be that of an installed disk.
    changes.extend([BOOTED, SETUP].map(|end| Change::Remove(place.file(end))));
    match base {
        Some(base) => changes.extend([
            Change::Write {
                path: place.file(VERSION),
                text: concat!(env!("CARGO_PKG_VERSION"), "\n").into(),
            },
            Change::Write { path: place.file(BASE), text: format!("{base}\n") },
        ]),
        None => changes.extend([VERSION, BASE].map(|end| Change::Remove(place.file(end)))),
    }
    changes
}

/// Moves an installation to a backup. Until its last file is there, the folder has a name of its
/// own, by which a killed pod finds it and continues.
fn backup(found: &Found, place: &Place, wanted: Option<&str>) -> Vec<Change> {
    let folder = place.volume.join(BACKUPS);
    let mut changes = Vec::new();
    let stem = match (&found.backup, &found.base) {
        (Some(part), _) => stem_of(part),
        (None, Base::Name(base)) => base.strip_suffix(".iso").unwrap_or(base).to_owned(),
        (None, _) => UNKNOWN.to_owned(),
    };
    let begun = found.backup.is_some();
    let whole = free(&stem, |name| {
        let part = folder.join(format!("{name}{PART}"));
        folder.join(name).exists() || !begun && part.exists()
    });
    let part = found.backup.clone().unwrap_or_else(|| folder.join(format!("{whole}{PART}")));
    if !begun {
        changes.extend([Change::MakeFolder(folder.clone()), Change::MakeFolder(part.clone())]);
    }
    for name in moved(found, place, wanted) {
        let to = free(&name, |name| part.join(name).exists());
        changes.push(Change::Move { from: place.volume.join(&name), to: part.join(to) });
    }
    changes.push(Change::Move { from: part, to: folder.join(whole) });
    changes
}

/// Moves the files of an interrupted backup back, because the disk of the installation is still
/// on the volume and starts there. A file that is on the volume again stays.
fn undo(part: &Path, place: &Place) -> Vec<Change> {
    let missing = names(part).into_iter().filter(|name| !place.volume.join(name).exists());
    let back =
        missing.map(|name| Change::Move { from: part.join(&name), to: place.volume.join(name) });
    back.chain([finish(part, place)]).collect()
}

/// Gives an interrupted backup its final name.
fn finish(part: &Path, place: &Place) -> Change {
    let folder = place.volume.join(BACKUPS);
    let whole = free(&stem_of(part), |name| folder.join(name).exists());
    Change::Move { from: part.to_owned(), to: folder.join(whole) }
}

fn stem_of(part: &Path) -> String {
    let name = part.file_name().unwrap_or_default().to_string_lossy().into_owned();
    name.strip_suffix(PART).unwrap_or(&name).to_owned()
}

/// Names of the installation's files, in the order in which they move: the disk, and then the files
/// that say what it is, come last.
fn moved(found: &Found, place: &Place, wanted: Option<&str>) -> Vec<String> {
    let own = [place.app, "windows"];
    let disks = [place.disk, "data"];
    let begins = |name: &str, words: &[&str]| {
        words.iter().any(|word| {
            name.strip_prefix(&word.to_lowercase()).is_some_and(|rest| rest.starts_with('.'))
        })
    };
    let rank = |name: &String| {
        let small = name.to_lowercase();
        let end = small.rsplit('.').next().unwrap_or_default();
        let is_former = |base: &str| small == base.to_lowercase() && wanted != Some(base);
        let former = matches!(&found.base, Base::Name(base) if is_former(base));
        match () {
            () if former => Some(0),
            () if end == "iso" || KEPT.contains(&end) => None,
            () if begins(&small, &own) && end == BOOTED => Some(2),
            () if begins(&small, &own) && end == BASE => Some(3),
            () if begins(&small, &disks) => Some(1),
            () if begins(&small, &own) || is_firmwares(&small) || end == "tpm" => Some(0),
            () => None,
        }
    };
    let mut ranked: Vec<_> =
        names(place.volume).into_iter().filter_map(|name| Some((rank(&name)?, name))).collect();
    ranked.sort();
    ranked.into_iter().map(|(_, name)| name).collect()
}

fn is_firmwares(small: &str) -> bool {
    [".rom", ".vars", ".vars.old"].iter().any(|end| small.ends_with(end))
}

/// The name, or the first of `NAME.2`, `NAME.3` and so on that is not taken.
fn free(name: &str, is_taken: impl Fn(&str) -> bool) -> String {
    let numbered = (2_u64..).map(|number| format!("{name}.{number}"));
    let mut all = std::iter::once(name.to_owned()).chain(numbered);
    all.find(|name| !is_taken(name)).unwrap_or_default()
}

/// Names of the files in a folder, without links and folders, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    let mut names: Vec<_> =
        files.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The folder of a backup that was interrupted.
pub(super) fn interrupted(volume: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(volume.join(BACKUPS)).ok()?.flatten();
    let is_folder = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let is_part =
        |entry: &fs::DirEntry| entry.file_name().to_str().is_some_and(|name| name.ends_with(PART));
    entries.filter(|entry| is_folder(entry) && is_part(entry)).map(|entry| entry.path()).min()
}
