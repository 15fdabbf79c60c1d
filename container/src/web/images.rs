//! Opens files that the API attaches to the machine: ISO and disk images on the volume.
//!
//! Threats: callers choose the path, on an open pod everybody does, and the volume also has the
//! pod's own files: passwords, the memory of firmware and TPM, disks. An attached file must have
//! the name and the first bytes of an image, must lie in the folder itself (no link is followed),
//! and must not be one of the pod's own files under another name. The pod keeps it open until the
//! machine has opened it, and the machine checks that it opened the same file.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use vmm::control::FileId;

use crate::disks;
use crate::files::open_within;
use crate::settings::Settings;
use crate::snapshots;
use crate::state::changes::BACKUPS;
use crate::suspended;

/// Offset of volume descriptors: ECMA-119 6.2.1, ECMA-167 part 2 8.3.1.
const DESCRIPTORS: u64 = 16 * 2048;
/// Standard identifiers of an ISO 9660 and of a UDF file system.
const CD: [&[u8]; 2] = [b"CD001", b"BEA01"];
/// Magic number of qcow2.
const QCOW2: &[u8] = b"QFI\xfb";
/// Offsets in the header of a qcow2 image: name of the backing file, and incompatible features.
const BACKING: usize = 8;
const FEATURES: usize = 72;
/// Incompatible feature: the data is in another file.
const EXTERNAL: u64 = 1 << 2;
const HEADER: usize = 80;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An ISO image, which is always read-only.
    Cd,
    Disk,
}

/// A file that may be attached, held open.
pub(super) struct Image {
    pub(super) path: PathBuf,
    pub(super) kind: Kind,
    file: File,
}

impl Image {
    /// Identifies the file even if its name is reused.
    pub(super) fn id(&self) -> anyhow::Result<FileId> {
        Ok(FileId::of(&self.file.metadata()?))
    }
}

/// Opens attachable files, and refuses all others.
pub(super) struct Images {
    volume: PathBuf,
    /// The pod's disks, which are never attached.
    disks: Vec<PathBuf>,
}

impl Images {
    pub(super) fn new(settings: &Settings) -> Self {
        let disks =
            (0..disks::MAX_DISKS).flat_map(|it| disks::own_files(it, settings, Path::new("/")));
        let disks = disks.map(|disk| disk.path).collect();
        Self { volume: settings.storage.folder.clone(), disks }
    }

    pub(super) fn open(&self, path: &Path) -> anyhow::Result<Image> {
        let named = || path.display().to_string();
        let (kind, qcow2) = kind_of(path).with_context(|| {
            format!("{}: only files named .iso, .img, .raw or .qcow2 can be attached", named())
        })?;
        let inner =
            if path.is_absolute() { path.strip_prefix(&self.volume).ok() } else { Some(path) };
        let inner = inner.with_context(|| {
            let volume = self.volume.display();
            format!("{}: only files on the volume, in {volume}, can be attached", named())
        })?;
        let file = open_within(&self.volume, inner).with_context(named)?;
        let found = file.metadata().with_context(named)?;
        ensure!(found.is_file(), "{}: it is not a regular file", named());
        ensure!(
            !self.is_own(&found) && !is_in_own_folder(inner),
            "{}: it is a file of the pod's own, which is never attached",
            named()
        );
        check(kind, qcow2, path, &file).with_context(named)?;
        Ok(Image { path: self.volume.join(inner), kind, file })
    }

    /// Whether it is one of the pod's own files, under any name.
    fn is_own(&self, found: &Metadata) -> bool {
        let id = FileId::of(found);
        let is = |path: &Path| fs::metadata(path).is_ok_and(|own| FileId::of(&own) == id);
        let others = fs::read_dir(&self.volume).into_iter().flatten().flatten();
        let mut others = others.map(|it| it.path()).filter(|path| kind_of(path).is_none());
        self.disks.iter().any(|path| is(path)) || others.any(|path| is(&path))
    }
}

/// Whether it belongs to snapshots, a suspended machine or a former installation.
fn is_in_own_folder(inner: &Path) -> bool {
    let mut parts = inner.components().map(|it| Path::new(it.as_os_str()));
    let Some(folder) = parts.next().filter(|_| parts.next().is_some()) else { return false };
    let is_own = |end: &OsStr| end == snapshots::FOLDER || end == suspended::FOLDER;
    folder == BACKUPS || folder.extension().is_some_and(is_own)
}

/// The kind that a file's name means, and whether it is qcow2; `None` if such a file cannot be
/// attached. Hidden files are excluded: they are incomplete or private.
fn kind_of(path: &Path) -> Option<(Kind, bool)> {
    let hidden = path.file_name().is_none_or(|name| name.as_bytes().starts_with(b"."));
    let end = path.extension().and_then(OsStr::to_str).filter(|_| !hidden)?.to_ascii_lowercase();
    match &*end {
        "iso" => Some((Kind::Cd, false)),
        "img" | "raw" => Some((Kind::Disk, false)),
        "qcow2" => Some((Kind::Disk, true)),
        _ => None,
    }
}

/// Checks that a file begins as its name promises.
fn check(kind: Kind, qcow2: bool, path: &Path, file: &File) -> anyhow::Result<()> {
    if kind == Kind::Cd {
        let mut start = [0; 6];
        file.read_exact_at(&mut start, DESCRIPTORS).ok();
        let known = CD.iter().any(|it| start[1..].starts_with(it));
        ensure!(known, "it is not an ISO image (neither ISO 9660 nor UDF): download it again");
        return Ok(());
    }
    let mut start = [0; HEADER];
    let whole = file.read_exact_at(&mut start, 0).is_ok();
    let number = |at: usize| {
        let bytes = start[at..at + 8].try_into().expect("the header has it");
        u64::from_be_bytes(bytes)
    };
    match (qcow2, start.starts_with(QCOW2)) {
        (false, false) => Ok(()),
        (true, true) => {
            let alone = whole && number(BACKING) == 0 && number(FEATURES) & EXTERNAL == 0;
            ensure!(
                alone,
                "it needs another file: make it self-contained with qemu-img convert -O qcow2"
            );
            Ok(())
        }
        (true, false) => bail!("it is not a qcow2 image"),
        (false, true) => bail!("it is a qcow2 image: rename it to {}.qcow2", path.display()),
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A volume with these files, and the images on it.
    fn volume(files: &[(&str, &[u8])]) -> (tempfile::TempDir, Images) {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = Settings::defaults();
        settings.storage.folder = folder.path().to_owned();
        fs::create_dir(folder.path().join("more")).unwrap();
        for (name, bytes) in files {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        (folder, Images::new(&settings))
    }

    fn iso() -> Vec<u8> {
        let mut iso = vec![0; 40 << 10];
        iso[0x8001..0x8006].copy_from_slice(b"CD001");
        iso
    }

    fn qcow2() -> Vec<u8> {
        let mut image = vec![0; 1 << 10];
        image[..4].copy_from_slice(QCOW2);
        image
    }

    #[test]
    fn images_on_the_volume_are_attached() {
        let (iso, qcow2) = (iso(), qcow2());
        let files = [
            ("good.iso", &iso[..]),
            ("more/Good.ISO", &iso),
            ("stick.img", b"anything"),
            ("disk.qcow2", &qcow2),
        ];
        let (folder, images) = volume(&files);
        let kinds = [Kind::Cd, Kind::Cd, Kind::Disk, Kind::Disk];
        for ((name, _), kind) in files.iter().zip(kinds) {
            let whole = folder.path().join(name);
            for path in [&whole, Path::new(name)] {
                let image = images.open(path).unwrap();
                assert_eq!((&image.path, image.kind), (&whole, kind));
                assert_eq!(image.id().unwrap(), FileId::of(&fs::metadata(&whole).unwrap()));
            }
        }
    }

    /// Checks the reason for which a file is refused.
    fn refused(images: &Images, path: &Path, why: &str) {
        let error = format!("{:#}", images.open(path).map(|it| it.kind).unwrap_err());
        assert!(error.contains(why) && !error.contains('\n'), "{path:?}: {error}");
    }

    #[test]
    fn private_files_and_files_outside_the_volume_are_refused() {
        let far = tempfile::tempdir().unwrap();
        fs::write(far.path().join("far.iso"), iso()).unwrap();
        let (folder, images) = volume(&[
            ("good.iso", &iso()),
            (".half.img", b"half"),
            ("windows.tpm", b"nilmptws"),
            ("windows.vars", b"vars"),
            ("windows.password", b"hush"),
            ("data.img", b"system"),
        ]);
        let at = |name: &str| folder.path().join(name);
        symlink(far.path().join("far.iso"), at("link.iso")).unwrap();
        symlink(at("windows.tpm"), at("near.img")).unwrap();
        symlink(far.path(), at("way")).unwrap();
        fs::hard_link(at("windows.tpm"), at("second.img")).unwrap();
        fs::hard_link(at("data.img"), at("third.raw")).unwrap();
        for own in ["windows.snapshots/one", "backups/win11x64"] {
            fs::create_dir_all(at(own)).unwrap();
            fs::write(at(own).join("data.img"), b"system").unwrap();
        }
        for (path, why) in [
            (at("windows.snapshots/one/data.img"), "of the pod's own"),
            ("backups/win11x64/data.img".into(), "of the pod's own"),
            (at("windows.tpm"), "only files named .iso"),
            (at("windows.vars"), "only files named .iso"),
            (at("windows.password"), "only files named .iso"),
            (at(".half.img"), "only files named .iso"),
            (at("data.img"), "of the pod's own"),
            (at("second.img"), "of the pod's own"),
            (at("third.raw"), "of the pod's own"),
            (at("link.iso"), "a symbolic link"),
            (at("near.img"), "a symbolic link"),
            (at("way/far.iso"), "Not a directory"),
            (at("more/../good.iso"), "`..`"),
            (at("../far.iso"), "`..`"),
            ("/dev/zero.img".into(), "only files on the volume"),
            (far.path().join("far.iso"), "only files on the volume"),
            (at("none.iso"), "No such file"),
            (PathBuf::new(), "only files named"),
        ] {
            refused(&images, &path, why);
        }
    }

    #[test]
    fn images_with_a_wrong_extension_are_refused() {
        let mut backed = qcow2();
        backed[15] = 0x70;
        let (_folder, images) = volume(&[
            ("backed.qcow2", &backed),
            ("wrong.iso", b"<html>"),
            ("short.qcow2", b"QFI"),
            ("hidden.raw", &qcow2()),
        ]);
        for (name, why) in [
            ("backed.qcow2", "it needs another file"),
            ("short.qcow2", "not a qcow2 image"),
            ("wrong.iso", "not an ISO image"),
            ("hidden.raw", "it is a qcow2 image"),
        ] {
            refused(&images, Path::new(name), why);
        }
    }
}
