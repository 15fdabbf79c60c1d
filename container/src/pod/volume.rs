//! The files on the volume: by the names that the reference image gives them, so that its volumes
//! start here, and ours there.

mod qcow2;

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, chown};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::fs::{FallocateFlags, fallocate};

use crate::settings::value::{Size, Value as _};
use crate::settings::{Format, Settings};
use crate::status::{Failure, Status};
use crate::story::Story;

/// The volume.
pub struct Volume {
    folder: PathBuf,
    /// How the names of its files begin.
    app: String,
}

/// A disk of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its file, or a block device.
    pub path: PathBuf,
    /// What is in it.
    pub format: Format,
}

impl Volume {
    /// That of the settings, which can be written.
    ///
    /// # Errors
    ///
    /// When there is none, or it cannot be written.
    pub fn open(settings: &Settings) -> anyhow::Result<Self> {
        let folder = settings.storage.folder.clone();
        let trial = folder.join(".transom");
        let tried = File::create(&trial).and_then(|mut file| file.write_all(b"trial"));
        fs::remove_file(&trial).ok();
        tried.map_err(|error| {
            let shown = folder.display();
            let out = match error.kind() {
                ErrorKind::NotFound => "mount a volume there, as in -v ./windows:/storage",
                ErrorKind::StorageFull => "it is full: delete something there, or make it larger",
                ErrorKind::ReadOnlyFilesystem => "it is mounted read-only: mount it for writing",
                ErrorKind::PermissionDenied => {
                    "its owner is another: set fsGroup, or change the owner of the folder"
                }
                _ => "look at the volume",
            };
            Failure::new(Status::Storage, format!("STORAGE={shown}: {error}: {out}"))
        })?;
        Ok(Self { folder, app: settings.pod.app.0.to_lowercase() })
    }

    /// A file of the machine's: `windows.END`.
    pub fn file(&self, end: &str) -> PathBuf {
        self.folder.join(format!("{}.{end}", self.app))
    }

    /// Whether a file lies on it.
    pub fn is_own(&self, path: &Path) -> bool {
        path.starts_with(&self.folder)
    }

    /// Whether the guest has started from its disk before.
    pub fn has_booted(&self) -> bool {
        self.file("boot").exists()
    }

    /// Remembers that it has.
    ///
    /// # Errors
    ///
    /// When it cannot be written down.
    pub fn mark_booted(&self) -> anyhow::Result<()> {
        let path = self.file("boot");
        self.give(&path, File::create(&path)?.sync_all())
    }

    /// What a small file says, without its line's end.
    pub fn read(&self, end: &str) -> Option<String> {
        fs::read_to_string(self.file(end)).ok().map(|text| text.trim().to_owned())
    }

    /// Writes a small file: all of it, or nothing.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write(&self, end: &str, text: &str) -> anyhow::Result<()> {
        let path = self.file(end);
        self.give(&path, super::room::write_secret(&path, text))
    }

    /// The firmware's memory: what is there, or a copy of the template.
    ///
    /// # Errors
    ///
    /// When the template cannot be copied.
    pub fn vars(&self, template: &Path, clear: bool) -> anyhow::Result<PathBuf> {
        let path = self.file("vars");
        let length = fs::metadata(template).with_context(|| template.display().to_string())?.len();
        let there = fs::metadata(&path).ok().filter(|_| !clear);
        if there.as_ref().is_some_and(|it| it.len() == length) {
            return Ok(path);
        }
        if there.is_some() {
            let old = self.file("vars.old");
            let (shown, old_shown) = (path.display(), old.display());
            tracing::warn!("{shown} is of another firmware: it is {old_shown} from now on");
            fs::rename(&path, &old).with_context(|| path.display().to_string())?;
        }
        let beside = self.file("vars.new");
        let copied = fs::copy(template, &beside)
            .and_then(|_| File::open(&beside)?.sync_all())
            .and_then(|()| fs::rename(&beside, &path));
        self.give(&path, copied)?;
        Ok(path)
    }

    /// The system disk: the one that is there, made longer if that was said, or a new one.
    ///
    /// # Errors
    ///
    /// When there is no room, or the volume does not take it.
    pub fn disk(&self, settings: &Settings, size: u64, story: &Story) -> anyhow::Result<Disk> {
        let name = &settings.storage.name.0;
        let at = |format| self.folder.join(format!("{name}.{}", end_of(format)));
        let wanted = settings.storage.format;
        let order = match wanted {
            Some(Format::Qcow2) => [Format::Qcow2, Format::Raw],
            _ => [Format::Raw, Format::Qcow2],
        };
        let there = order.into_iter().find(|format| at(*format).exists());
        let format = there.or(wanted).unwrap_or_default();
        if let (Some(there), Some(wanted)) = (there, wanted)
            && there != wanted
        {
            story.tell(&format!(
                "DISK_FMT={}: the disk is {} and stays so: convert it with qemu-img convert",
                wanted.show(),
                there.show()
            ));
        }
        let disk = Disk { path: at(format), format };
        self.provide(&disk, size, settings, story)?;
        Ok(disk)
    }

    /// A file of this size for a disk, unless it is there already.
    fn provide(
        &self,
        disk: &Disk,
        size: u64,
        settings: &Settings,
        story: &Story,
    ) -> anyhow::Result<()> {
        let shown = disk.path.display();
        let made = match fs::metadata(&disk.path) {
            Ok(told) if disk.format == Format::Raw => grow(&disk.path, told.len(), size, story),
            Ok(_) => Ok(()),
            Err(_) => {
                story.step(&format!("Creating a disk of {}…", Size(size).show()));
                create(disk, size)
            }
        };
        let taken =
            made.and_then(|()| match settings.disk.allocate && disk.format == Format::Raw {
                true => allocate(&disk.path),
                false => Ok(()),
            });
        let owned = self.give(&disk.path, taken);
        owned.map_err(|error| {
            Failure::new(Status::Disk, format!("DISK_SIZE: {shown}: {error:#}: make room there"))
        })
    }

    /// Files belong to whom the folder belongs, where that is possible.
    fn give(&self, path: &Path, done: io::Result<()>) -> anyhow::Result<()> {
        done.with_context(|| path.display().to_string())?;
        let told = fs::metadata(&self.folder)?;
        chown(path, Some(told.uid()), Some(told.gid())).ok();
        Ok(())
    }
}

/// Further disks: the block devices that were named or lent, and files on /storage2 and so on.
///
/// # Errors
///
/// When a device is none, or a file cannot be made.
pub fn more(
    settings: &Settings,
    sizes: &[Option<u64>; 5],
    story: &Story,
) -> anyhow::Result<Vec<Disk>> {
    let mut disks = Vec::new();
    for (at, size) in sizes.iter().enumerate() {
        let number = at + 2;
        let lent = [format!("/disk{number}"), format!("/dev/disk{number}")];
        if let Some(disk) = device(settings.storage.devices[at + 1].as_deref(), &lent)? {
            disks.push(disk);
            continue;
        }
        let folder = PathBuf::from(format!("/storage{number}"));
        let Some(size) = size.filter(|_| folder.is_dir()) else { continue };
        let volume = Volume { folder, app: String::new() };
        let name = format!("{}{number}", settings.storage.name.0);
        let mut settings = settings.clone();
        settings.storage.name.0 = name;
        disks.push(volume.disk(&settings, size, story)?);
    }
    Ok(disks)
}

/// The block device that is the first disk, if one was named or lent.
///
/// # Errors
///
/// When what was named is none.
pub fn first_device(settings: &Settings) -> anyhow::Result<Option<Disk>> {
    let lent = ["/disk".into(), "/disk1".into(), "/dev/disk1".into()];
    device(settings.storage.devices[0].as_deref(), &lent)
}

fn device(named: Option<&Path>, lent: &[String]) -> anyhow::Result<Option<Disk>> {
    let is_block =
        |path: &Path| fs::metadata(path).is_ok_and(|it| it.file_type().is_block_device());
    let found = match named {
        Some(path) if !is_block(path) => {
            let shown = path.display();
            let sentence = "is no block device: lend it to the container with --device";
            return Err(Failure::new(Status::Missing, format!("DEVICE={shown}: {sentence}")));
        }
        Some(path) => Some(path.to_owned()),
        None => lent.iter().map(PathBuf::from).find(|path| is_block(path)),
    };
    Ok(found.map(|path| Disk { path, format: Format::Raw }))
}

fn end_of(format: Format) -> &'static str {
    match format {
        Format::Raw => "img",
        Format::Qcow2 => "qcow2",
    }
}

/// Makes a disk; a half one never has its name.
fn create(disk: &Disk, size: u64) -> io::Result<()> {
    let beside = disk.path.with_extension("new");
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    let written = match disk.format {
        Format::Raw => file.set_len(size),
        Format::Qcow2 => qcow2::write(&file, size),
    };
    written.and_then(|()| file.sync_all()).and_then(|()| fs::rename(&beside, &disk.path))
}

/// Makes a disk longer. It is never made shorter: what is there would be lost.
fn grow(path: &Path, now: u64, size: u64, story: &Story) -> io::Result<()> {
    let shown = |bytes| Size(bytes).show();
    if size > now {
        let file = OpenOptions::new().write(true).open(path)?;
        file.set_len(size)?;
        file.sync_all()?;
        story.tell(&format!(
            "the disk is {} now, and was {}: enlarge its partition in the guest",
            shown(size),
            shown(now)
        ));
    } else if size < now {
        story.tell(&format!(
            "DISK_SIZE={}: the disk is {} and is never made smaller",
            shown(size),
            shown(now)
        ));
    }
    Ok(())
}

/// Takes the room of a disk at once.
fn allocate(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let length = file.metadata()?.len();
    Ok(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, length)?)
}

/// The firmware of the image: code, and the template of its memory.
///
/// # Errors
///
/// When it is not there.
pub fn firmware() -> anyhow::Result<(PathBuf, PathBuf)> {
    const FOLDERS: [&str; 2] = ["/usr/share/OVMF", "/usr/share/edk2/ovmf"];
    for folder in FOLDERS.map(Path::new) {
        let both = ["OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"].map(|name| folder.join(name));
        if both.iter().all(|path| path.is_file()) {
            let [code, vars] = both;
            return Ok((code, vars));
        }
    }
    bail!(
        "no firmware is at {}: take the image as it is, or mount Debian's package ovmf",
        FOLDERS[0]
    )
}
