//! The files that make a machine, and belong to one moment: its disks, the firmware's variables,
//! the memory of its TPM, and the small files that say what is on the disk.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use host::lock;

use super::manifest::MAX_FILES;
use super::{Shelf, exists};
use crate::disks::original::{RECORD, SEALED};
use crate::disks::{self, MAX_DISKS};
use crate::files;
use crate::firmware::MODE;
use crate::kept::{ADAPTER, ADDRESS, TYPE};
use crate::settings::Settings;
use crate::state::{BASE, BOOTED, SETUP, VERSION};

/// Extensions of files of the firmware, which are named after the boot mode.
const FIRMWARE: [&str; 2] = ["vars", "tpm"];
/// Extensions of the files that describe the disk.
const STATE: [&str; 10] =
    [BASE, BOOTED, SETUP, VERSION, MODE, TYPE, ADAPTER, ADDRESS, RECORD, SEALED];
/// Maximum bytes of a file that is no disk.
const MAX_SMALL: u64 = 16 << 20;

/// A file of the machine.
pub struct Member {
    pub volume: usize,
    pub file: String,
    pub path: PathBuf,
    pub open: File,
    pub is_disk: bool,
}

impl Member {
    fn open(volume: usize, path: PathBuf, is_disk: bool, writable: bool) -> anyhow::Result<Self> {
        let name = path.file_name().and_then(|name| name.to_str());
        let file = name.context("its name is not text")?.to_owned();
        let opened = files::open_itself(&path, File::options().read(true).write(writable));
        let opened = opened.with_context(|| {
            format!("{}: only files of the volume itself are in a snapshot", path.display())
        })?;
        let found = opened.metadata()?;
        let shown = path.display();
        ensure!(found.is_file(), "{shown}: it is not a file of the volume");
        ensure!(is_disk || found.len() <= MAX_SMALL, "{shown}: it is too long");
        Ok(Self { volume, file, path, open: opened, is_disk })
    }
}

pub struct Set {
    /// The disks come first.
    pub members: Vec<Member>,
    /// Files, by volume and name, that do not exist, and would mean another machine.
    pub absent: Vec<(usize, String)>,
}

impl Set {
    /// Opens the files. With `lock`, no machine can use the disks until the set is dropped.
    pub fn open(shelf: &Shelf, lock: bool) -> anyhow::Result<Self> {
        let (settings, root) = (shelf.settings, shelf.root);
        let mut set = Self { members: Vec::new(), absent: Vec::new() };
        for number in 0..MAX_DISKS {
            let Some(found) = disks::find(number, settings, root)? else { continue };
            let path = found.disk.path;
            // A disk over BASE is made by the first start.
            if found.own && !exists(&path)? {
                continue;
            }
            if !found.own {
                let path = path.display();
                bail!(
                    "{path}: a block device or a mounted image is not on the pod's volume, so it \
                     is not in a snapshot: take one where it is stored"
                );
            }
            let disk = Member::open(number, path, true, lock)?;
            if lock {
                lock::exclusive(&disk.open, &disk.path)?;
            }
            let [one, two] = own_names(number, settings, root);
            set.absent.push((number, if one == disk.file { two } else { one }));
            set.members.push(disk);
        }
        ensure!(set.members.iter().any(|it| it.volume == 0), "there is no disk on the volume yet");
        set.add_small(shelf)?;
        ensure!(set.members.len() <= MAX_FILES, "the volume has too many files of the firmware");
        set.absent.retain(|(volume, file)| {
            fs::symlink_metadata(shelf.volume(*volume).join(file)).is_err()
        });
        Ok(set)
    }

    fn add_small(&mut self, shelf: &Shelf) -> anyhow::Result<()> {
        let (process, volume) = (shelf.settings.pod.process(), shelf.volume(0));
        let mut names = Vec::new();
        for entry in fs::read_dir(&volume).with_context(|| volume.display().to_string())? {
            names.extend(entry?.file_name().into_string().ok().filter(|it| is_firmwares(it)));
        }
        names.sort();
        names.truncate(MAX_FILES);
        for end in STATE {
            let file = format!("{process}.{end}");
            match fs::symlink_metadata(volume.join(&file)) {
                Err(error) if error.kind() == ErrorKind::NotFound => self.absent.push((0, file)),
                _ => names.push(file),
            }
        }
        for name in names {
            self.members.push(Member::open(0, volume.join(name), false, false)?);
        }
        Ok(())
    }

    pub fn disks(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.is_disk)
    }
}

fn own_names(number: usize, settings: &Settings, root: &Path) -> [String; 2] {
    disks::own_files(number, settings, root)
        .map(|disk| disk.path.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

fn is_firmwares(name: &str) -> bool {
    let parts =
        name.rsplit_once('.').filter(|(stem, _)| !stem.is_empty() && !stem.starts_with('.'));
    parts.is_some_and(|(_, end)| FIRMWARE.contains(&end))
}

/// Whether a file is one of this machine: only such files may be replaced or removed.
pub fn belongs(shelf: &Shelf, volume: usize, file: &str) -> bool {
    let process = shelf.settings.pod.process();
    let is_state = || STATE.iter().any(|end| file == format!("{process}.{end}"));
    is_disk(shelf, volume, file) || volume == 0 && (is_state() || is_firmwares(file))
}

/// Whether a file is a disk of this machine.
pub fn is_disk(shelf: &Shelf, volume: usize, file: &str) -> bool {
    own_names(volume, shelf.settings, shelf.root).iter().any(|own| own == file)
}
