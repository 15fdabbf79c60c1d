//! Finds the machine's disks: block devices that are passed to the container, mounted image files,
//! and files on the volumes, in the order of the reference image. The plan and the machine both
//! search here, so that they find the same disk.

pub mod original;

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use host::disk::qcow2;

use crate::files;
use crate::settings::{Format, Settings};
use crate::status::{Failure, Status};

pub const MAX_DISKS: usize = 6;
/// Bytes that are examined: a partition table and the first file system behind it start within.
const EXAMINED: u64 = 100 << 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// An image file or a block device.
    pub path: PathBuf,
    pub format: Format,
    /// New size in bytes, if the machine is to grow the disk.
    pub longer: Option<u64>,
    /// The image that this one is over, and may have to be created over. It is only read.
    pub base: Option<PathBuf>,
    /// The serial number, if it is not that of the path.
    pub serial: Option<String>,
}

impl Disk {
    /// A disk that keeps its size.
    pub fn new(path: PathBuf, format: Format) -> Self {
        Self { path, format, longer: None, base: None, serial: None }
    }

    /// A disk over `base`.
    pub fn over(base: &Self, path: PathBuf) -> Self {
        let base = Some(base.path.clone());
        Self { base, ..Self::new(path, Format::Qcow2) }
    }

    /// The image that this one is over.
    pub fn base(&self) -> Option<Self> {
        self.base.as_deref().map(original::image)
    }

    /// Whether the disk has been written to, judging by its first 100 KiB, or by the metadata of
    /// qcow2. A disk that cannot be read counts as written.
    pub fn is_written(&self) -> bool {
        let read = self.open().and_then(|file| match self.format {
            Format::Qcow2 => qcow2::is_written(&file),
            Format::Raw => {
                let mut start = Vec::new();
                file.take(EXAMINED).read_to_end(&mut start)?;
                Ok(start.iter().any(|byte| *byte != 0))
            }
        });
        read.unwrap_or(true)
    }

    /// Size in bytes that the guest sees, if it can be read.
    pub fn length(&self) -> Option<u64> {
        let mut file = match (self.open(), self.base()) {
            (Ok(file), _) => file,
            // It will be created over this base.
            (Err(_), base) => return base?.length(),
        };
        match self.format {
            Format::Raw => file.seek(SeekFrom::End(0)).ok(),
            Format::Qcow2 => qcow2::size(&file).ok().map(|(length, _)| length),
        }
    }

    /// For reading only.
    pub fn open(&self) -> io::Result<File> {
        files::open(&self.path, File::options().read(true))
    }

    /// Bytes that the file occupies on the volume.
    pub fn taken(&self) -> u64 {
        fs::metadata(&self.path).map_or(0, |told| told.blocks() * 512)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDisk {
    pub disk: Disk,
    /// Whether the disk is the pod's own file on its volume. Such a disk follows the settings; all
    /// others stay unchanged.
    pub own: bool,
}

/// Disk `number`, counted from 0, on the host whose file systems are below `root`. `None` if the
/// disk has to be created.
///
/// Fails if it is unknown whether a file exists: a new disk must not replace one that cannot be
/// examined.
pub fn find(number: usize, settings: &Settings, root: &Path) -> anyhow::Result<Option<FoundDisk>> {
    if settings.disk.disable {
        return Ok(None);
    }
    let base = match number {
        0 => original::find(settings, root)?,
        _ => None,
    };
    let passed = match device(number, settings, root)? {
        Some(path) => Some(Disk::new(path, Format::Raw)),
        None => image(number, root),
    };
    if let Some(disk) = passed {
        if let Some(base) = base {
            return Err(original::refusal(&base, &disk.path, "is passed to the container"));
        }
        return Ok(Some(FoundDisk { disk, own: false }));
    }
    let mut there = Vec::new();
    for disk in own_files(number, settings, root) {
        if exists(&disk.path)? {
            there.push(disk);
        }
    }
    // A blank disk beside a written one was created by mistake.
    let disk = there.iter().find(|disk| disk.is_written()).or(there.first()).cloned();
    let disk = match base {
        Some(base) => {
            let own = original::clone(&base, disk, own_files(number, settings, root))?;
            Some(Disk { serial: original::serial(settings, root, &base), ..own })
        }
        None => disk,
    };
    Ok(disk.map(|disk| FoundDisk { disk, own: true }))
}

/// All disks that exist.
pub fn all(settings: &Settings, root: &Path) -> anyhow::Result<Vec<Disk>> {
    let found = (0..MAX_DISKS).map(|number| find(number, settings, root));
    found.filter_map(|found| Some(found.transpose()?.map(|found| found.disk))).collect()
}

/// A broken link, or anything but a file or a block device, is an error.
fn exists(path: &Path) -> anyhow::Result<bool> {
    let looked = match fs::symlink_metadata(path) {
        // The volume itself is checked later.
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            return Ok(false);
        }
        Err(error) => Err(error),
        Ok(_) => fs::metadata(path).and_then(|told| files::check(&told)),
    };
    let out = "check the volume: a new disk is created only if nothing has this name";
    let fail = |error| Failure::new(Status::Disk, format!("{}: {error}: {out}", path.display()));
    looked.map(|()| true).map_err(fail)
}

/// Paths of the pod's own file for a disk. The first one is created if neither exists.
pub fn own_files(number: usize, settings: &Settings, root: &Path) -> [Disk; 2] {
    let (folder, name) = match number {
        0 => (settings.storage.folder.clone(), settings.storage.name.0.clone()),
        _ => {
            let number = number + 1;
            let name = format!("{}{number}", settings.storage.name.0);
            (PathBuf::from(format!("/storage{number}")), name)
        }
    };
    let folder = below(root, &folder);
    let order = match settings.storage.format {
        Some(Format::Qcow2) => [Format::Qcow2, Format::Raw],
        _ => [Format::Raw, Format::Qcow2],
    };
    order.map(|format| Disk::new(folder.join(format!("{name}.{}", end_of(format))), format))
}

/// The same format, in the words of `vmm`.
pub fn image_format(format: Format) -> host::disk::Format {
    match format {
        Format::Raw => host::disk::Format::Raw,
        Format::Qcow2 => host::disk::Format::Qcow2,
    }
}

fn end_of(format: Format) -> &'static str {
    match format {
        Format::Raw => "img",
        Format::Qcow2 => "qcow2",
    }
}

/// The configured block device, or the one that is passed to the container.
fn device(number: usize, settings: &Settings, root: &Path) -> anyhow::Result<Option<PathBuf>> {
    let is_block =
        |path: &Path| fs::metadata(path).is_ok_and(|it| it.file_type().is_block_device());
    if let Some(named) = settings.storage.devices.get(number).and_then(Option::as_deref) {
        let path = below(root, named);
        if !is_block(&path) {
            let at = if number == 0 { String::new() } else { (number + 1).to_string() };
            let sentence = "it is no block device: pass it to the container with --device";
            let sentence = format!("DEVICE{at}={}: {sentence}", named.display());
            return Err(Failure::new(Status::Missing, sentence));
        }
        return Ok(Some(path));
    }
    let names = [names(number, "disk"), names(number, "dev/disk")].concat();
    Ok(names.into_iter().map(|name| root.join(name)).find(|path| is_block(path)))
}

/// The image file that is mounted into the container's root.
fn image(number: usize, root: &Path) -> Option<Disk> {
    let names = [names(number, "data"), names(number, "disk")].concat();
    for name in names {
        for (end, format) in [("img", Format::Raw), ("raw", Format::Raw), ("qcow2", Format::Qcow2)]
        {
            let path = root.join(format!("{name}.{end}"));
            if path.is_file() {
                return Some(Disk::new(path, format));
            }
        }
    }
    None
}

/// The name of the first disk may omit the number.
fn names(number: usize, name: &str) -> Vec<String> {
    let numbered = format!("{name}{}", number + 1);
    match number {
        0 => vec![name.to_owned(), numbered],
        _ => vec![numbered],
    }
}

pub fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod test {
    use tempfile::TempDir;

    use super::*;
    use crate::settings::value::Value;

    fn root(files: &[(&str, &[u8])]) -> (TempDir, Settings) {
        let root = tempfile::tempdir().unwrap();
        for folder in ["storage", "storage2"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        for (name, bytes) in files {
            fs::write(root.path().join(name), bytes).unwrap();
        }
        (root, Settings::defaults())
    }

    fn found(number: usize, settings: &Settings, root: &TempDir) -> Option<(String, bool)> {
        let found = find(number, settings, root.path()).unwrap()?;
        let name = found.disk.path.strip_prefix(root.path()).unwrap();
        Some((name.to_str().unwrap().to_owned(), found.own))
    }

    #[test]
    fn a_mounted_image_wins_over_a_file_on_the_volume() {
        let own: &[(&str, &[u8])] = &[("storage/data.img", b"x"), ("storage2/data2.qcow2", b"x")];
        let (root, settings) = root(own);
        assert_eq!(found(0, &settings, &root), Some(("storage/data.img".into(), true)));
        assert_eq!(found(1, &settings, &root), Some(("storage2/data2.qcow2".into(), true)));
        assert_eq!(found(2, &settings, &root), None);
        for name in ["disk1.raw", "disk.img", "data1.qcow2", "data.img"] {
            fs::write(root.path().join(name), b"x").unwrap();
            assert_eq!(found(0, &settings, &root), Some((name.into(), false)));
        }
        let mut settings = settings;
        settings.storage.devices[1] = Some("/data.img".into());
        let error = find(1, &settings, root.path()).unwrap_err();
        assert!(error.to_string().starts_with("DEVICE2=/data.img: "), "{error}");
        settings.disk.disable = true;
        assert_eq!(found(0, &settings, &root), None);
    }

    #[test]
    fn disk_files_have_the_configured_names() {
        let own: &[(&str, &[u8])] = &[("storage/data.img", b"x"), ("storage2/system2.img", b"x")];
        let (root, mut settings) = root(own);
        settings.storage.name = Value::read("system").unwrap();
        assert_eq!(found(0, &settings, &root), None);
        assert_eq!(found(1, &settings, &root), Some(("storage2/system2.img".into(), true)));
        let made = own_files(0, &settings, root.path()).map(|it| it.path);
        assert_eq!(
            made,
            ["img", "qcow2"].map(|it| root.path().join(format!("storage/system.{it}")))
        );
    }

    #[test]
    fn an_unreadable_disk_is_not_taken_for_missing() {
        let (root, settings) = root(&[]);
        let path = root.path().join("storage/data.img");
        std::os::unix::fs::symlink(root.path().join("share/data.img"), &path).unwrap();
        let error = find(0, &settings, root.path()).unwrap_err();
        assert_eq!(Status::of(&error), Status::Disk);
        assert!(error.to_string().contains("a new disk is created only if nothing"), "{error}");
        fs::create_dir(root.path().join("share")).unwrap();
        fs::write(root.path().join("share/data.img"), "x").unwrap();
        assert_eq!(found(0, &settings, &root), Some(("storage/data.img".into(), true)));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        find(0, &settings, root.path()).unwrap_err();
    }

    #[test]
    fn the_written_disk_wins_if_two_formats_exist() {
        let (root, mut settings) = root(&[("storage/data.img", &[0; 4096])]);
        let image = File::create_new(root.path().join("storage/data.qcow2")).unwrap();
        qcow2::create(&image, 1 << 30).unwrap();
        let name = |end: &str| Some((format!("storage/data.{end}"), true));
        assert_eq!(found(0, &settings, &root), name("img"));
        settings.storage.format = Some(Format::Qcow2);
        assert_eq!(found(0, &settings, &root), name("qcow2"));
        fs::write(root.path().join("storage/data.img"), b"x").unwrap();
        assert_eq!(found(0, &settings, &root), name("img"));
    }
}
