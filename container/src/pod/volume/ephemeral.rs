//! `EPHEMERAL=Y`: the guest writes to files without names, which end with the machine, however it
//! ends.

use std::fs::File;
use std::io::{self, Seek as _};
use std::path::{Path, PathBuf};

use ::host::disk::{self, qcow2};
use anyhow::Context as _;
use rustix::io::{FdFlags, fcntl_setfd};

use super::{Volume, further_folder, over};
use crate::disks::{self, Disk, original};
use crate::files;
use crate::settings::settle::Sizes;
use crate::settings::{Format, Settings};

/// Files on the volume without a name. The machine's process inherits them.
#[derive(Debug, Default)]
pub struct Unnamed(Vec<File>);

impl Unnamed {
    /// The path of a new file for the process that inherits it. `fill` writes its content.
    pub fn add(
        &mut self,
        folder: &Path,
        fill: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> anyhow::Result<PathBuf> {
        let made = tempfile::tempfile_in(folder).and_then(|mut file| {
            fill(&mut file)?;
            Ok(file)
        });
        let file = made.with_context(|| format!("EPHEMERAL=Y: {}", folder.display()))?;
        let path = files::path_of(&file);
        self.0.push(file);
        Ok(path)
    }

    /// Lets programs that start from now on inherit the files.
    pub fn bequeath(&self) -> anyhow::Result<()> {
        let inherit = |file| fcntl_setfd(file, FdFlags::empty());
        self.0.iter().try_for_each(inherit).context("EPHEMERAL=Y")
    }
}

impl Volume {
    /// The machine's disks, from the first. `sizes` are those of disks that do not exist yet.
    pub fn ephemeral_disks(
        &self,
        settings: &Settings,
        sizes: &Sizes,
        unnamed: &mut Unnamed,
    ) -> anyhow::Result<Vec<Disk>> {
        let further = (1..).zip(sizes.more);
        let further = further.map(|(at, size)| (at, size.filter(|_| further_folder(at).is_dir())));
        let disks = [(0, Some(sizes.disk))].into_iter().chain(further);
        let made = disks.map(|(number, size)| self.ephemeral_disk(number, size, settings, unnamed));
        made.filter_map(Result::transpose).collect()
    }

    /// A disk in place of the one with this number, from 0, which is only read. `size` is that of a
    /// disk that does not exist yet; `None` if there is to be none.
    fn ephemeral_disk(
        &self,
        number: usize,
        size: Option<u64>,
        settings: &Settings,
        unnamed: &mut Unnamed,
    ) -> anyhow::Result<Option<Disk>> {
        let root = Path::new("/");
        let found = disks::find(number, settings, root)?;
        let known = found.as_ref().and_then(|found| found.disk.serial.clone());
        let (shown, below) = match (found, size) {
            (Some(found), _) => match found.disk.base() {
                Some(base) if found.disk.path.exists() => {
                    return Err(original::unused(&base, &found.disk.path));
                }
                Some(base) => (found.disk.path, Some(base)),
                None => {
                    original::check(
                        &found.disk,
                        &self.app,
                        self.read(original::RECORD).as_deref(),
                    )?;
                    (found.disk.path.clone(), Some(found.disk))
                }
            },
            (None, Some(_)) => {
                let [made, _] = disks::own_files(number, settings, root);
                (made.path, None)
            }
            (None, None) => return Ok(None),
        };
        let there = below.as_ref().and_then(Disk::length).unwrap_or(0);
        let size = size.unwrap_or(0).max(there);
        let path = unnamed.add(&self.folder, |file| match &below {
            Some(below) => over(file, size, below),
            None => qcow2::create(file, size),
        })?;
        // The guest knows its disk by this number.
        let serial = known.map_or_else(|| disk::Config::new(&shown).serial(), Ok)?;
        let base = below.map(|below| below.path);
        Ok(Some(Disk { base, serial: Some(serial), ..Disk::new(path, Format::Qcow2) }))
    }

    /// A copy of the TPM's memory. Without `kept`, that of a new TPM, which is empty.
    pub fn ephemeral_tpm(&self, kept: Option<&File>) -> anyhow::Result<File> {
        let copied = tempfile::tempfile_in(&self.folder).and_then(|mut copy| {
            if let Some(mut kept) = kept {
                kept.rewind()?;
                io::copy(&mut kept, &mut copy)?;
                copy.rewind()?;
            }
            Ok(copy)
        });
        copied.context("EPHEMERAL=Y: the memory of the TPM")
    }

    /// A copy of a file, which the guest may change.
    pub fn ephemeral_copy(&self, path: &Path, unnamed: &mut Unnamed) -> anyhow::Result<PathBuf> {
        let source = files::open(path, File::options().read(true));
        let mut source = source.with_context(|| path.display().to_string())?;
        unnamed.add(&self.folder, |file| io::copy(&mut source, file).map(drop))
    }
}
