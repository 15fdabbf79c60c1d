//! The image that a machine's first disk is made over (`BASE`), and shares with other machines.
//!
//! Only the changes of a machine are on its volume, in a qcow2 image. Its guest writes that image
//! and could name any file there as the one below, so the settings name it, never the image.

use std::fs::{self, File, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use host::disk::{Config, qcow2};
use vmm::control::snapshot::MACHINE;

use super::{Disk, below};
use crate::files::{self, if_there};
use crate::settings::value::{Value as _, quote};
use crate::settings::{Format, Settings};
use crate::snapshots::MEMORY;
use crate::status::{Failure, Status};

/// Extension of the file that marks a sealed volume, with the identity of the base in it.
pub const SEALED: &str = "sealed";
/// Extension of the file on a volume that tells which base its disk is over.
pub const RECORD: &str = "over";

/// The base. `root` contains the file systems.
pub fn find(settings: &Settings, root: &Path) -> anyhow::Result<Option<Disk>> {
    let Some(named) = &settings.storage.base else { return Ok(None) };
    let path = below(root, named);
    let image = match path.is_dir() {
        true => {
            let name = &settings.storage.name.0;
            let images = ["img", "qcow2"].map(|end| path.join(format!("{name}.{end}")));
            images.into_iter().map(|path| image(&path)).find(|it| it.is_written() && exists(it))
        }
        false => Some(image(&path)).filter(exists),
    };
    let sentence = "no image is there: mount the volume of an installed machine, and give its path";
    let missing = || Failure::new(Status::Missing, format!("BASE={}: {sentence}", named.show()));
    image.ok_or_else(missing).map(Some)
}

fn exists(disk: &Disk) -> bool {
    fs::metadata(&disk.path).is_ok_and(|found| files::check(&found).is_ok())
}

/// The folder of the base, with the state of the machine that made it.
pub fn folder(settings: &Settings, root: &Path) -> anyhow::Result<Option<PathBuf>> {
    let base = find(settings, root)?;
    Ok(base.and_then(|base| base.path.parent().map(Path::to_owned)))
}

/// The memory with which a machine over this base goes on, instead of booting: the base is the
/// folder of a snapshot with memory, and `disk`, the machine's own, has not been written yet.
pub fn memory(settings: &Settings, root: &Path, disk: &Disk) -> anyhow::Result<Option<PathBuf>> {
    let Some(named) = settings.storage.base.as_ref().filter(|_| is_new(settings, disk)) else {
        return Ok(None);
    };
    let memory = below(root, named).join(MEMORY);
    let found = if_there(fs::metadata(memory.join(MACHINE))).map_err(|error| {
        memory_failure(&memory, &format!("{error}: run as the user that took the snapshot"))
    })?;
    Ok(found.is_some_and(|found| found.is_file()).then_some(memory))
}

/// The serial number of a disk over a base with memory, whose guest knows that of its own disk.
pub fn serial(settings: &Settings, root: &Path, base: &Disk) -> Option<String> {
    let memory = below(root, settings.storage.base.as_ref()?).join(MEMORY);
    let name = base.path.file_name().filter(|_| memory.join(MACHINE).is_file())?;
    Config::new(settings.storage.folder.join(name)).serial().ok()
}

/// Whether a machine has not written to its own disk over the base yet.
fn is_new(settings: &Settings, disk: &Disk) -> bool {
    settings.disk.ephemeral || !disk.path.exists() || {
        File::open(&disk.path).and_then(|file| qcow2::is_empty_over(&file)).unwrap_or(false)
    }
}

/// The error about a clone that does not go on.
pub fn memory_failure(memory: &Path, why: &str) -> anyhow::Error {
    let base = quote(&memory.parent().unwrap_or(memory).to_string_lossy());
    let sentence = format!(
        "BASE={base}: its machine cannot go on here: {why}. Start with the image and the settings \
         that it had; or set BASE to the disk in that folder, and the guest boots from it"
    );
    Failure::new(Status::State, sentence)
}

/// The file that marks the pod's own volume as sealed.
pub fn mark(settings: &Settings, root: &Path) -> PathBuf {
    let name = format!("{}.{SEALED}", settings.pod.process());
    below(root, &settings.storage.folder).join(name)
}

/// Fails if the pod's own volume is sealed: its machine would change the disk of others.
pub fn check_seal(settings: &Settings, root: &Path) -> anyhow::Result<()> {
    let mark = mark(settings, root);
    if settings.disk.ephemeral || settings.storage.base.is_some() || !mark.exists() {
        return Ok(());
    }
    let mark = mark.show();
    let sentence = format!(
        "this volume is sealed: mount it for other machines, read-only, and start them with BASE; \
         or set EPHEMERAL=Y; or remove {mark} to start this machine, and others do not start from \
         it any more"
    );
    Err(Failure::new(Status::State, sentence))
}

/// An image in the format that its name means.
pub fn image(path: &Path) -> Disk {
    let qcow2 = path.extension().is_some_and(|it| it.eq_ignore_ascii_case("qcow2"));
    Disk::new(path.to_owned(), if qcow2 { Format::Qcow2 } else { Format::Raw })
}

/// The pod's own disk over the base. A disk that is there must be one: nothing replaces it.
pub fn clone(base: &Disk, there: Option<Disk>, own: [Disk; 2]) -> anyhow::Result<Disk> {
    let made = own.into_iter().find(|it| it.format == Format::Qcow2).expect("one of two formats");
    match there {
        Some(there) if !is_over(&there) => {
            Err(refusal(base, &there.path, "is on the volume, and is not made over it"))
        }
        _ => Ok(Disk::over(base, made.path)),
    }
}

/// Whether an image is over another one.
pub fn is_over(disk: &Disk) -> bool {
    let over = |file| qcow2::is_over(&file).unwrap_or(false);
    disk.format == Format::Qcow2 && disk.open().is_ok_and(over)
}

/// The error about a disk beside the base.
pub fn refusal(base: &Disk, disk: &Path, what: &str) -> anyhow::Error {
    let (base, disk) = (base.path.show(), quote(&disk.to_string_lossy()));
    let out = "leave BASE out, or take that disk away";
    Failure::new(Status::Disk, format!("BASE={base}: the disk {disk} {what}: {out}"))
}

/// The error about a disk with the changes to the base, which an ephemeral machine would not use.
pub fn unused(base: &Disk, disk: &Path) -> anyhow::Error {
    let (base, disk) = (base.path.show(), quote(&disk.to_string_lossy()));
    let sentence = format!(
        "EPHEMERAL=Y starts from BASE={base}, and would not use the disk {disk}: leave EPHEMERAL \
         out, or take that disk away"
    );
    Failure::new(Status::Disk, sentence)
}

/// Checks the record of the base that a disk is over: another one would mix two systems. `None` if
/// there is no record yet.
pub fn check(disk: &Disk, app: &str, record: Option<&str>) -> anyhow::Result<()> {
    let shown = disk.path.show();
    match (disk.base(), record) {
        (Some(base), Some(record)) if record != describe(&base, app)? => {
            let sentence = format!(
                "BASE={}: it is not the image that {shown} was made over, or has changed since: \
                 restore it, or remove {shown} to start from this one",
                base.path.show()
            );
            Err(Failure::new(Status::Disk, sentence))
        }
        (None, Some(_)) if is_over(disk) => {
            let sentence = format!(
                "{shown}: it has only the changes to another image: set BASE, or, if this disk was \
                 put in place of a clone's, remove {app}.{RECORD} beside it"
            );
            Err(Failure::new(Status::Disk, sentence))
        }
        _ => Ok(()),
    }
}

/// Tells a base from another one, and from itself after a change: by the identity that a sealed one
/// has, also in a copy, or else by length and time.
pub fn describe(base: &Disk, app: &str) -> anyhow::Result<String> {
    let mark = base.path.with_file_name(format!("{app}.{SEALED}"));
    match files::read(&mark) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => {
            let sentence = format!("{}: {error}: check the volume of BASE", mark.show());
            return Err(Failure::new(Status::Missing, sentence));
        }
        Ok(text) => return Ok(format!("{SEALED} {}", text.trim())),
    }
    let of =
        |found: Metadata| format!("{} {}.{:09}", found.len(), found.mtime(), found.mtime_nsec());
    let found = fs::metadata(&base.path);
    found.map(of).map_err(|error| {
        Failure::new(Status::Missing, format!("BASE={}: {error}", base.path.show()))
    })
}

#[cfg(test)]
mod test {
    use std::fs::File;

    use super::*;
    use crate::disks;

    /// Volumes, and a base that has been written.
    fn root() -> (tempfile::TempDir, Settings) {
        let root = tempfile::tempdir().unwrap();
        for folder in ["base", "storage"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        fs::write(root.path().join("base/data.img"), [7; 4096]).unwrap();
        let mut settings = Settings::defaults();
        settings.storage.base = Some("/base".into());
        (root, settings)
    }

    #[test]
    fn a_folder_or_an_image_is_a_base() {
        let (root, mut settings) = root();
        let find = |settings: &Settings| find(settings, root.path());
        let path = root.path().join("base/data.img");
        assert_eq!(find(&settings).unwrap(), Some(image(&path)));
        settings.storage.base = Some("/base/data.img".into());
        assert_eq!(find(&settings).unwrap(), Some(image(&path)));
        for missing in ["/base/data.qcow2", "/other"] {
            settings.storage.base = Some(missing.into());
            let error = find(&settings).unwrap_err();
            assert_eq!(Status::of(&error), Status::Missing, "{error}");
        }
        settings.storage.base = None;
        assert_eq!(find(&settings).unwrap(), None);
    }

    #[test]
    fn only_a_disk_over_the_base_is_its_clone() {
        let (root, settings) = root();
        let own = root.path().join("storage/data.qcow2");
        let found = || disks::find(0, &settings, root.path());
        let first = found().unwrap().unwrap();
        assert!(first.own && first.disk.length() == Some(4096), "{first:?}");
        assert_eq!(
            (&first.disk.path, &first.disk.base),
            (&own, &Some(root.path().join("base/data.img")))
        );
        let file = File::create_new(&own).unwrap();
        qcow2::create(&file, 1 << 20).unwrap();
        assert!(found().unwrap_err().to_string().contains("is not made over it"));
        qcow2::create_over(&file, 1 << 20, Path::new("/etc/shadow"), host::disk::Format::Raw)
            .unwrap();
        assert_eq!(found().unwrap(), Some(first));
        fs::write(root.path().join("storage/data.img"), "x").unwrap();
        fs::remove_file(&own).unwrap();
        assert!(found().unwrap_err().to_string().contains("is not made over it"));
        fs::write(root.path().join("data.img"), "x").unwrap();
        assert!(found().unwrap_err().to_string().contains("is passed to the container"));
    }

    #[test]
    fn a_guest_in_memory_knows_the_serial_number_of_its_own_disk() {
        let (root, settings) = root();
        let serial = || disks::find(0, &settings, root.path()).unwrap().unwrap().disk.serial;
        assert_eq!(serial(), None);
        fs::create_dir(root.path().join("base").join(MEMORY)).unwrap();
        fs::write(root.path().join("base").join(MEMORY).join(MACHINE), "{}").unwrap();
        let own = Config::new(settings.storage.folder.join("data.img")).serial().unwrap();
        assert_eq!(serial(), Some(own));
    }

    #[test]
    fn a_base_that_changed_is_refused() {
        let (root, settings) = root();
        let disk = disks::find(0, &settings, root.path()).unwrap().unwrap().disk;
        let app = "windows";
        let record = describe(&disk.base().unwrap(), app).unwrap();
        check(&disk, app, None).unwrap();
        check(&disk, app, Some(&record)).unwrap();
        fs::write(root.path().join("base/data.img"), [8; 8192]).unwrap();
        let error = check(&disk, app, Some(&record)).unwrap_err().to_string();
        assert!(error.contains("or has changed since"), "{error}");
        let file = File::create_new(&disk.path).unwrap();
        qcow2::create_over(&file, 1 << 20, Path::new("/base"), host::disk::Format::Raw).unwrap();
        let alone = Disk { base: None, ..disk };
        let error = check(&alone, app, Some(&record)).unwrap_err().to_string();
        assert!(error.contains("set BASE"), "{error}");
        // The mark of a sealed base is its identity.
        let disk = Disk { base: Some(root.path().join("base/data.img")), ..alone };
        let mark = root.path().join("base/windows.sealed");
        fs::write(&mark, "one\n").unwrap();
        let record = describe(&disk.base().unwrap(), app).unwrap();
        fs::write(root.path().join("base/data.img"), [9; 4096]).unwrap();
        check(&disk, app, Some(&record)).unwrap();
        fs::write(&mark, "two\n").unwrap();
        check(&disk, app, Some(&record)).unwrap_err();
    }

    #[test]
    fn a_sealed_volume_is_started_by_nobody_but_ephemeral_machines() {
        let (root, mut settings) = root();
        settings.storage.base = None;
        check_seal(&settings, root.path()).unwrap();
        fs::write(mark(&settings, root.path()), "one").unwrap();
        let error = check_seal(&settings, root.path()).unwrap_err();
        assert_eq!(Status::of(&error), Status::State);
        settings.disk.ephemeral = true;
        check_seal(&settings, root.path()).unwrap();
    }
}
