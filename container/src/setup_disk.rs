//! The set-up disk: a removable disk in memory, from which Windows' setup takes its answers,
//! drivers and files of the user. It is never on the volume: the answers have the password.
//!
//! Threats: names and links in the user's folder may be anything. A link never leads out of the
//! folder, and what FAT or Windows cannot have is refused before anything is written.

mod content;
pub mod drivers;
mod fat;
mod folder;
mod names;
mod text;
mod tree;
mod walk;

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};

use self::content::Copier;
use self::folder::Folder;
use self::tree::Tree;
use crate::files;

pub use self::content::Content;
pub use self::fat::Layout;
pub use self::tree::Item;

/// Windows' setup looks for its answers under this name.
pub const ANSWERS: &str = "Autounattend.xml";
/// Windows' setup copies this folder to C:\OEM.
const OEM: &str = "$OEM$/$1/OEM/";
const OEM_FOLDERS: [&str; 2] = ["oem", "OEM"];
const CUSTOM_ANSWERS: &str = "custom.xml";
const MAX_ANSWERS: u64 = 1 << 20;

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
        path(&self.readable)
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
    Tree::of(items).and_then(fat::lay_out).context("the set-up disk")
}

fn write(layout: &Layout) -> anyhow::Result<SetupDisk> {
    let fd = memfd_create("setup-disk", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let file = File::from(fd);
    file.set_len(layout.size)?;
    let mut copier = Copier::new(&file);
    for (at, content) in &layout.extents {
        copier.copy(content, *at)?;
    }
    // It may still be made shorter: that frees it.
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SEAL)?;
    let readable = OwnedFd::from(File::open(path(&file))?);
    Ok(SetupDisk { memory: DiskMemory(file), readable })
}

/// The path of an open file, for this process and for those that inherit it.
fn path(file: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The user's files for the set-up disk: an answer file, and a folder for C:\OEM. They are mounted
/// below `root`, or on the volume.
pub fn users_items(root: &Path, volume: &Path) -> anyhow::Result<Vec<Item>> {
    let mut items = Vec::new();
    let answers = [root.join(CUSTOM_ANSWERS), volume.join(CUSTOM_ANSWERS)];
    if let Some(path) = answers.iter().find(|path| path.exists()) {
        items.push(answers_of(path).with_context(|| path.display().to_string())?);
    }
    let folders = [root, volume].into_iter().flat_map(|at| OEM_FOLDERS.map(|name| at.join(name)));
    if let Some(path) = folder::find(&folders.collect::<Vec<_>>())? {
        items.extend(walk::items(Folder::open(&path)?, OEM)?);
    }
    Ok(items)
}

fn answers_of(path: &Path) -> anyhow::Result<Item> {
    ensure!(
        !path.is_dir(),
        "it is a folder: container engines create one if the file to mount does not exist: check \
         the path of the mount"
    );
    let file = files::open(path, File::options().read(true))?;
    let modified = file.metadata()?.modified()?;
    let mut bytes = Vec::new();
    file.take(MAX_ANSWERS + 1).read_to_end(&mut bytes)?;
    ensure!(
        bytes.len() as u64 <= MAX_ANSWERS,
        "it has more than 1 MiB, which no answer file has: check the path of the mount"
    );
    Ok(Item { path: ANSWERS.to_owned(), content: Some(Content::Bytes(bytes)), modified })
}

#[cfg(test)]
mod test;
