//! The set-up disk: a removable disk in memory, from which Windows' setup takes its answers,
//! drivers and files of the user. It is never on the volume: the answers have the password.
//!
//! Threats: names and links in the user's folder may be anything. A link never leads out of the
//! folder, and what FAT or Windows cannot have is refused before anything is written.

mod content;
pub mod drivers;
pub mod fat;
mod folder;
pub mod iso;
mod names;
pub(crate) mod text;
mod tree;
mod walk;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};

use self::content::Copier;
use self::folder::Folder;
use self::tree::Tree;
use crate::files;

pub use self::content::Content;
pub use self::fat::Layout;
pub use self::tree::Item;

/// Windows' setup copies this folder to C:\OEM.
const OEM: &str = "$OEM$/$1/OEM/";
const OEM_FOLDERS: [&str; 2] = ["oem", "OEM"];
const INSTALL: &str = "install.bat";

/// The disk, which programs can inherit.
#[derive(Debug)]
pub struct SetupDisk {
    memory: DiskMemory,
    /// Open for reading only.
    readable: OwnedFd,
}

/// The memory of the disk. Dropping it frees nothing that another process has inherited.
#[derive(Debug)]
pub struct DiskMemory(File);

impl SetupDisk {
    /// Reads all contents into memory.
    pub fn write(layout: &Layout) -> anyhow::Result<Self> {
        write(layout).context("the set-up disk")
    }

    /// The path of the disk in programs that inherit it.
    pub fn path(&self) -> PathBuf {
        files::path_of(&self.readable)
    }

    /// Lets programs that start from now on inherit the disk.
    pub fn bequeath(&self) -> anyhow::Result<()> {
        fcntl_setfd(&self.readable, FdFlags::empty()).context("the set-up disk")
    }

    /// Keeps further programs from inheriting the disk.
    pub fn close(self) -> DiskMemory {
        self.memory
    }
}

impl DiskMemory {
    /// Frees the memory, also where a process has inherited it.
    pub fn free(self) -> anyhow::Result<()> {
        self.0.set_len(0).context("the memory of the set-up disk")
    }
}

/// The place of each file on the disk. Nothing is read.
pub fn lay_out(items: Vec<Item>) -> anyhow::Result<Layout> {
    // Users know their files by another path.
    let shown = |error: anyhow::Error| anyhow::anyhow!(format!("{error:#}").replace(OEM, "/oem/"));
    Tree::of(items).and_then(fat::lay_out).map_err(shown)
}

fn write(layout: &Layout) -> anyhow::Result<SetupDisk> {
    let fd = memfd_create("setup-disk", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let file = File::from(fd);
    file.set_len(layout.size)?;
    layout.extents.iter().for_each(|(_, content)| content.read_ahead());
    let mut copier = Copier::new(&file);
    for (at, content) in &layout.extents {
        copier.copy(content, *at)?;
    }
    // It may still be made shorter: that frees it.
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SEAL)?;
    let readable = OwnedFd::from(File::open(files::path_of(&file))?);
    Ok(SetupDisk { memory: DiskMemory(file), readable })
}

/// The user's files for C:\OEM, whose folder is mounted below `root`, or is on the volume.
#[derive(Debug, Default)]
pub struct UsersFiles {
    /// Without the script.
    pub items: Vec<Item>,
    /// The text of `install.bat`.
    pub install_bat: Option<Vec<u8>>,
}

impl UsersFiles {
    pub fn read(root: &Path, volume: &Path) -> anyhow::Result<Self> {
        let folders = [root, volume].into_iter();
        let folders = folders.flat_map(|at| OEM_FOLDERS.map(|name| at.join(name)));
        let Some(path) = folder::find(&folders.collect::<Vec<_>>())? else {
            return Ok(Self::default());
        };
        folder::check_inside(volume, &path)?;
        let items = walk::items(Folder::open(&path)?, OEM)?;
        let is_script = |item: &Item| {
            item.path.strip_prefix(OEM).is_some_and(|it| it.eq_ignore_ascii_case(INSTALL))
        };
        let (scripts, items): (Vec<_>, _) = items.into_iter().partition(is_script);
        ensure!(scripts.len() < 2, "{}: it has {INSTALL} in several spellings", path.display());
        let install_bat = match scripts.into_iter().next().map(|script| script.content) {
            None => None,
            Some(Some(Content::Bytes(bytes))) => Some(bytes),
            Some(_) => bail!(
                "{}/{INSTALL}: it is no text of at most 1 MiB: make it shorter",
                path.display()
            ),
        };
        Ok(Self { items, install_bat })
    }
}

#[cfg(test)]
mod test;
#[cfg(test)]
pub(crate) mod testutil;
