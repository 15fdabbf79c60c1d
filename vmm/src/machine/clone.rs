//! Clones: machines that go on from the snapshot of another one, each with files of its own.
//!
//! A clone has an empty qcow2 image over each disk that its guest can write. Nothing writes to the
//! disks of the snapshot, so that any number of clones can go on from it.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use devices::registry;
use host::disk::{self, BackingFile, Format, qcow2};
use host::sync_folder::sync_folder;
use host::uuid::Uuid;
use rustix::process::geteuid;

use super::Machine;
use super::saved::portable;
use crate::config::{Cloning, Config};
use crate::snapshot::Mark;

/// The files of the new folder, besides its disks.
const VARS: &str = "vars.fd";
const CONFIG: &str = "config.json";

/// The new files of a clone, which are removed if it does not start.
pub struct Files {
    folder: PathBuf,
    /// The folder is new, too.
    is_new: bool,
    made: Vec<PathBuf>,
}

impl Files {
    /// Makes the files of a machine that is a clone, if it is to have new ones. The machine then
    /// has these.
    pub fn make(config: &mut Config) -> anyhow::Result<Option<Self>> {
        let Some(Cloning::In(folder)) = config.restore.as_ref().map(|it| &it.clone) else {
            return Ok(None);
        };
        let name = format!("clone={}", folder.display());
        let made = Self::new(folder).and_then(|mut files| {
            files.fill(config)?;
            Ok(files)
        });
        made.map(Some).context(name)
    }

    fn new(folder: &Path) -> anyhow::Result<Self> {
        let folder = std::path::absolute(folder)?;
        let is_new = match DirBuilder::new().mode(0o700).create(&folder) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            other => other.map(|()| true)?,
        };
        let found = fs::symlink_metadata(&folder)?;
        let ours = found.is_dir() && found.uid() == geteuid().as_raw() && found.mode() & 0o022 == 0;
        ensure!(ours, "it is not a folder that you alone can write");
        ensure!(
            !folder.join(CONFIG).exists(),
            "there is a clone already: `vmm run --config {}` boots it; each other one needs a \
             folder of its own",
            folder.join(CONFIG).display()
        );
        let empty = fs::read_dir(&folder)?.next().is_none();
        ensure!(empty, "there are files in it already, and each clone needs an empty folder");
        Ok(Self { folder, is_new, made: Vec::new() })
    }

    fn fill(&mut self, config: &mut Config) -> anyhow::Result<()> {
        for (name, disk) in writable_disks(config) {
            self.make_over(&name, disk).with_context(|| disk.path.display().to_string())?;
        }
        if let Some(vars) = &mut config.vars {
            let name = vars.display().to_string();
            *vars = self.copy(vars).with_context(|| name)?;
        }
        if config.smbios.uuid.is_empty() {
            // Its guest reads it at its next boot.
            config.smbios.uuid = Uuid::random()?.to_string();
        }
        let text = serde_json::to_string_pretty(&portable(config))?;
        let mut file = self.create(CONFIG)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).context(CONFIG)?;
        let above = self.folder.parent().unwrap_or(&self.folder);
        for folder in [&self.folder, above] {
            sync_folder(folder).context("it cannot be made durable")?;
        }
        Ok(())
    }

    fn create(&mut self, name: &str) -> anyhow::Result<File> {
        let path = self.folder.join(name);
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        self.made.push(path);
        Ok(file)
    }

    /// An empty image over a disk, which its guest takes for that disk.
    fn make_over(&mut self, name: &str, disk: &mut disk::Config) -> anyhow::Result<()> {
        ensure!(
            !matches!(disk.backing, BackingFile::This(_)),
            "it is itself over another disk (`backing=`), which is not possible yet for clones"
        );
        disk.size = None;
        let opened = disk::open(&disk::Config { readonly: true, ..disk.clone() }, None)?;
        let size = opened.geometry().size;
        drop(opened);
        let (below, format) = (std::path::absolute(&disk.path)?, disk.format());
        ensure!(
            format == disk::Config::new(&below).format(),
            "its name says that it has another format: a disk of clones has the ending .qcow2 if \
             it is a qcow2 image, and another one if it is not"
        );
        let name = format!("{name}.qcow2");
        let file = self.create(&name)?;
        qcow2::create_over(&file, size, &below, format)?;
        file.sync_all()?;
        disk.serial = Some(disk.serial()?);
        disk.path = self.folder.join(name);
        disk.format = Some(Format::Qcow2);
        if disk.backing != BackingFile::Anywhere {
            disk.backing = BackingFile::This(below);
        }
        Ok(())
    }

    /// A copy of a file, with its time of change.
    fn copy(&mut self, path: &Path) -> anyhow::Result<PathBuf> {
        ensure!(fs::metadata(path)?.is_file(), "it is not a file");
        let mut from = File::open(path)?;
        let changed = from.metadata()?.modified()?;
        let mut to = self.create(VARS)?;
        std::io::copy(&mut from, &mut to)?;
        ensure!(from.metadata()?.modified()? == changed, "it changed while it was copied");
        to.set_modified(changed)?;
        to.sync_all()?;
        Ok(self.folder.join(VARS))
    }

    /// The machine has them from now on.
    pub fn keep(mut self) {
        self.made.clear();
        self.is_new = false;
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for path in &self.made {
            fs::remove_file(path).ok();
        }
        if self.is_new {
            // It fails if the folder has files.
            fs::remove_dir(&self.folder).ok();
        }
    }
}

/// The disks that a guest can write, each with the name of its device.
fn writable_disks(config: &mut Config) -> Vec<(String, &mut disk::Config)> {
    let mut counts = BTreeMap::<_, usize>::new();
    let mut name = |kind| {
        let count = counts.entry(kind).or_default();
        *count += 1;
        registry::name(kind, *count)
    };
    // The controller of `--disk`.
    let mut all: Vec<_> = config.disk.iter_mut().map(|disk| (name("nvme"), disk)).collect();
    for device in &mut config.device {
        let name = name(device.kind());
        all.extend(device.disk_mut().map(|disk| (name, disk)));
    }
    all.retain(|(_, disk)| !disk.is_read_only());
    all
}

impl Machine {
    /// The files of a clone as those of its snapshot: what an empty image is over counts as the
    /// disk itself.
    pub(super) fn marks_of_clone(&self, mut marks: Vec<Mark>) -> anyhow::Result<Vec<Mark>> {
        let writes_flash = self.config.device.iter().any(|device| match device {
            registry::Config::Flash(flash) => flash.vars.is_some() && !flash.readonly,
            _ => false,
        });
        ensure!(!writes_flash, "`flash` has variables that a clone would write: use `--vars`");
        for disk in self.board.shared.disks.all() {
            let below = disk.image.below().with_context(|| disk.path.display().to_string())?;
            let is_own = !disk.geometry().read_only && disk.image.keeps_writes();
            ensure!(
                !is_own || below.untouched,
                "{} would write to {}, and no clone may change the disks of the snapshot: give it \
                 `readonly` or `overlay=on`, or an empty qcow2 image of the same size over that \
                 disk (`clone=FOLDER` makes these, but not for USB)",
                disk.name,
                disk.path.display()
            );
            if is_own {
                marks.retain(|mark| mark.name != disk.name);
            }
            marks.extend(Mark::below(&disk.name, &below.files, usize::from(!is_own)));
        }
        Ok(marks)
    }
}
