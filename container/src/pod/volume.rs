//! The files on the volume: by the names that the reference image gives them, so that its volumes
//! start here, and ours there.

use std::cmp::Ordering;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, lchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{self, AtomicBool};

use ::host::disk::qcow2;
use ::host::size::Size;
use ::host::uuid::Uuid;
use anyhow::Context as _;
use rustix::fs::{FallocateFlags, fallocate};

use crate::disks::{self, Disk};
use crate::files;
use crate::firmware::MODE;
use crate::settings::host;
use crate::settings::translate::Bus;
use crate::settings::value::Value as _;
use crate::settings::{Boot, Format, Settings};
use crate::source::Source;
use crate::status::{Failure, Status};
use crate::story::Story;

/// How the memory of a TPM begins (swtpm, `swtpm_nvstore_linear.h`).
pub const TPM_MAGIC: &[u8] = b"nilmptws";

/// The volume.
pub struct Volume {
    folder: PathBuf,
    /// How the names of its files begin.
    app: String,
    /// The mark was seen there: later the pod may have no right to look.
    booted: AtomicBool,
}

impl Volume {
    /// That of the settings, which can be written. One that is full is good enough for a disk that
    /// is there: its guest may be the only one who can make room.
    ///
    /// # Errors
    ///
    /// When there is none, or it cannot be written.
    pub fn open(settings: &Settings, source: &Source) -> anyhow::Result<Self> {
        let folder = settings.storage.folder.clone();
        let trial = folder.join(".transom");
        fs::remove_file(&trial).ok();
        let tried = File::create_new(&trial).and_then(|mut file| file.write_all(b"trial"));
        fs::remove_file(&trial).ok();
        match tried {
            Err(error) if is_full(&error) && matches!(source, Source::Disk(_)) => tracing::warn!(
                "STORAGE={}: it is full: a guest that writes to new places stands still until \
                 there is room: make some on the volume, or in the guest before that",
                folder.display()
            ),
            tried => {
                tried.map_err(|error| refused(&format!("STORAGE={}", folder.display()), &error))?;
            }
        }
        Ok(Self { folder, app: settings.pod.process(), booted: AtomicBool::new(false) })
    }

    /// One that needs no trial.
    fn at(folder: &Path, app: &str) -> Self {
        Self { folder: folder.into(), app: app.into(), booted: AtomicBool::new(false) }
    }

    /// A file of the machine's: `windows.END`.
    pub fn file(&self, end: &str) -> PathBuf {
        self.folder.join(format!("{}.{end}", self.app))
    }

    /// A file of the firmware's, of which each word for a boot mode has its own, whatever APP is:
    /// `windows_secure.END`. Where it has none, that of another word for the same goes on.
    fn of_mode(&self, boot: Boot, end: &str) -> PathBuf {
        let file = |word: Boot| self.folder.join(format!("{}.{end}", word.show()));
        let mut words = [boot].into_iter().chain(boot.same().iter().copied()).map(file);
        words.find(|path| path.exists()).unwrap_or_else(|| file(boot))
    }

    /// The machine's UUID: the one that is kept, or a random one that is kept from now on. None on
    /// a volume that is full: one that changes with each start would be worse.
    ///
    /// # Errors
    ///
    /// When the file has something else in it.
    pub fn uuid(&self) -> anyhow::Result<Option<Uuid>> {
        if let Some(kept) = self.read("uuid").filter(|kept| !kept.is_empty()) {
            let path = self.file("uuid");
            let uuid = Uuid::read(&kept)
                .with_context(|| format!("{}: set UUID, or remove the file", path.display()))?;
            return Ok(Some(uuid));
        }
        let new = Uuid::random()?;
        if let Err(error) = self.write("uuid", &format!("{new}\n")) {
            tracing::warn!("the machine has no UUID of its own yet: {error:#}");
            return Ok(None);
        }
        Ok(Some(new))
    }

    /// The boot mode goes on when nothing is said of it any more; the usual one is not written
    /// down.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn remember(&self, boot: Boot) -> anyhow::Result<()> {
        match boot.is_secure() {
            false => match fs::remove_file(self.file(MODE)) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    Err(refused(&self.file(MODE).display().to_string(), &error))
                }
                _ => Ok(()),
            },
            true if self.read(MODE).as_deref() == Some(&*boot.show()) => Ok(()),
            true => self.write(MODE, &format!("{}\n", boot.show())),
        }
    }

    /// The mark that the guest has started from its disk before, if it has.
    pub fn mark(&self) -> Option<PathBuf> {
        let path = self.file("boot");
        if path.exists() {
            self.booted.store(true, atomic::Ordering::Relaxed);
        }
        self.booted.load(atomic::Ordering::Relaxed).then_some(path)
    }

    /// Whether the guest has started from its disk before.
    pub fn has_booted(&self) -> bool {
        self.mark().is_some()
    }

    /// Remembers that it has. The reference image starts such a disk as it is, unless there is a
    /// `windows.base` that names another medium than it is given: so none is written.
    ///
    /// # Errors
    ///
    /// When it cannot be written down.
    pub fn mark_booted(&self) -> anyhow::Result<()> {
        let path = self.file("boot");
        self.give(&path, files::write(&path, |_| Ok(())))?;
        self.booted.store(true, atomic::Ordering::Relaxed);
        Ok(())
    }

    /// Forgets it: what is on the disk now, or will be, has not.
    ///
    /// # Errors
    ///
    /// When the mark cannot be taken away.
    pub fn forget_booted(&self) -> anyhow::Result<()> {
        let path = self.file("boot");
        self.booted.store(false, atomic::Ordering::Relaxed);
        fs::remove_file(&path).map_err(|error| refused(&path.display().to_string(), &error))
    }

    /// What a small file says, without its line's end.
    pub fn read(&self, end: &str) -> Option<String> {
        files::read(&self.file(end)).ok().map(|text| text.trim().to_owned())
    }

    /// Writes a small file: all of it, or nothing.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write(&self, end: &str, text: &str) -> anyhow::Result<()> {
        let path = self.file(end);
        self.give(&path, files::write(&path, |file| file.write_all(text.as_bytes())))
    }

    /// The firmware's memory: what is there, or a copy of the template.
    ///
    /// # Errors
    ///
    /// When the template cannot be copied.
    pub fn vars(&self, boot: Boot, template: &Path, clear: bool) -> anyhow::Result<PathBuf> {
        let path = self.of_mode(boot, "vars");
        let length = fs::metadata(template).with_context(|| template.display().to_string())?.len();
        let there = fs::metadata(&path).ok().filter(|_| !clear);
        if there.as_ref().is_some_and(|it| it.len() == length) {
            return Ok(path);
        }
        if there.is_some() {
            let old = path.with_extension("vars.old");
            let (shown, old_shown) = (path.display(), old.display());
            tracing::warn!("{shown} is of another firmware: it is {old_shown} from now on");
            fs::rename(&path, &old).with_context(|| path.display().to_string())?;
        }
        let copied = File::open(template).and_then(|mut template| {
            files::write(&path, |file| io::copy(&mut template, file).map(drop))
        });
        self.give(&path, copied)?;
        Ok(path)
    }

    /// The memory of the TPM, empty if there is none yet. What is none is not written over, as
    /// swtpm would do.
    ///
    /// # Errors
    ///
    /// When it cannot be written, or is something else.
    pub fn tpm(&self, boot: Boot, clear: bool) -> anyhow::Result<File> {
        let path = self.of_mode(boot, "tpm");
        if clear {
            fs::remove_file(&path).ok();
        }
        let shown = path.display();
        if let Some(other) = self.other_tpm(&path).filter(|_| !clear) {
            let other = other.display();
            tracing::warn!(
                "{shown}: a new TPM: what {other} knows is of another BOOT_MODE: BitLocker will \
                 ask for its recovery key"
            );
        }
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let opened = files::open_itself(&path, options);
        let file = opened.map_err(|error| refused(&shown.to_string(), &error))?;
        let mut start = Vec::new();
        (&file).take(TPM_MAGIC.len() as u64).read_to_end(&mut start)?;
        if !start.is_empty() && start != TPM_MAGIC {
            let out = "take a copy of it back, or move it away for a new one";
            let sentence = format!("{shown}: this is no memory of a TPM: {out}, or say TPM=N");
            return Err(Failure::new(Status::Boot, sentence));
        }
        Ok(file)
    }

    /// The memory of a TPM that has been used, while that at this place has not.
    fn other_tpm(&self, path: &Path) -> Option<PathBuf> {
        let used = |path: &Path| fs::metadata(path).is_ok_and(|told| told.len() > 0);
        let others = fs::read_dir(&self.folder).ok().filter(|_| !used(path))?;
        let mut others = others.flatten().map(|entry| entry.path());
        others.find(|path| path.extension().is_some_and(|it| it == "tpm") && used(path))
    }

    /// The machine's disk with this number, from 0: one that is lent as it is, the file that is
    /// there, made longer if that was said, or a new one.
    ///
    /// # Errors
    ///
    /// When there is no room, or the volume does not take it.
    pub fn disk(
        &self,
        number: usize,
        size: u64,
        settings: &Settings,
        story: &Story,
    ) -> anyhow::Result<Disk> {
        let [made, _] = disks::own(number, settings, Path::new("/"));
        let mut disk = match disks::find(number, settings, Path::new("/"))? {
            Some(found) if !found.own => return Ok(found.disk),
            Some(found) => found.disk,
            None => made,
        };
        if let Some(wanted) = settings.storage.format.filter(|wanted| *wanted != disk.format) {
            story.tell(&format!(
                "DISK_FMT={}: the disk is {} and stays so: convert it with qemu-img convert",
                wanted.show(),
                disk.format.show()
            ));
        }
        self.provide(&mut disk, size, settings, story)?;
        Ok(disk)
    }

    /// A file of this size for a disk, unless it is there already.
    fn provide(
        &self,
        disk: &mut Disk,
        size: u64,
        settings: &Settings,
        story: &Story,
    ) -> anyhow::Result<()> {
        let fail = |error| Failure::new(Status::Disk, format!("DISK_SIZE: {error:#}"));
        let allocate = settings.disk.allocate && disk.format == Format::Raw;
        if settings.disk.allocate && !allocate {
            story.tell("ALLOCATE=Y: a disk of the format qcow2 takes room as it is written to");
        }
        self.check_room(disk, size, allocate, story).map_err(fail)?;
        let made = match fs::metadata(&disk.path) {
            Ok(told) if disk.format == Format::Raw => grow(&disk.path, told.len(), size, story),
            Ok(_) => longer(disk, size, settings, story),
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Err(_) => {
                story.step(&format!("Creating a disk of {}…", Size(size).show()));
                create(disk, size)
            }
        };
        let taken = made.and_then(|()| if allocate { take_room(&disk.path) } else { Ok(()) });
        self.give(&disk.path, taken).map_err(fail)
    }

    /// Whether the volume has room for all that the guest may write: before anything is taken.
    fn check_room(
        &self,
        disk: &Disk,
        size: u64,
        allocate: bool,
        story: &Story,
    ) -> anyhow::Result<()> {
        let size = size.max(disk.length().unwrap_or(0));
        let needs = size.saturating_sub(disk.taken());
        let folder = disk.path.parent().unwrap_or(&self.folder);
        let Some(free) = host::room(folder).filter(|free| *free < needs) else { return Ok(()) };
        let [needs, free] = [needs, free].map(|bytes| Size(bytes).show());
        let out = "make the volume larger, or DISK_SIZE smaller";
        anyhow::ensure!(!allocate, "ALLOCATE=Y takes {needs} more, and {free} are free: {out}");
        story.warn(&format!(
            "the disk may take {needs} more, and {free} are free on the volume: when that is full, \
             the guest stands still until there is room: {out}"
        ));
        Ok(())
    }

    /// Files belong to whom the folder belongs, where that is possible.
    fn give(&self, path: &Path, done: io::Result<()>) -> anyhow::Result<()> {
        done.map_err(|error| refused(&path.display().to_string(), &error))?;
        let told = fs::metadata(&self.folder)?;
        lchown(path, Some(told.uid()), Some(told.gid())).ok();
        Ok(())
    }
}

/// Further disks: those that are lent, and files on /storage2 and so on.
///
/// # Errors
///
/// When a device is none, or a file cannot be made.
pub fn more(
    settings: &Settings,
    sizes: &[Option<u64>; disks::MOST - 1],
    story: &Story,
) -> anyhow::Result<Vec<Disk>> {
    let mut all = Vec::new();
    for (at, size) in sizes.iter().enumerate() {
        let number = at + 1;
        let folder = PathBuf::from(format!("/storage{}", number + 1));
        let size = size.filter(|_| folder.is_dir());
        if size.is_none() && disks::find(number, settings, Path::new("/"))?.is_none() {
            continue;
        }
        let volume = Volume::at(&folder, "");
        all.push(volume.disk(number, size.unwrap_or(0), settings, story)?);
    }
    Ok(all)
}

/// Makes a disk; a half one never has its name, and another pod's that came meanwhile keeps it.
fn create(disk: &Disk, size: u64) -> io::Result<()> {
    files::make(&disk.path, |file| match disk.format {
        Format::Raw => file.set_len(size),
        Format::Qcow2 => qcow2::create(file, size),
    })
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// Why something cannot be written, and the way out.
fn refused(what: &str, error: &io::Error) -> anyhow::Error {
    let out = match error.kind() {
        ErrorKind::NotFound => "mount a volume there, as in -v windows:/storage",
        _ if is_full(error) => "it is full: delete something there, or make it larger",
        ErrorKind::ReadOnlyFilesystem => "it is mounted read-only: mount it for writing",
        // To root the owner is mostly nothing: then it is a label.
        ErrorKind::PermissionDenied if rustix::process::geteuid().is_root() => {
            "its owner is another: set fsGroup, or change the owner of the folder, or, where \
             SELinux is on, mount it with :Z"
        }
        ErrorKind::PermissionDenied => {
            "its owner is another: set fsGroup, or change the owner of the folder"
        }
        _ => "look at the volume",
    };
    Failure::new(Status::Storage, format!("{what}: {error}: {out}"))
}

/// Makes a disk longer. It is never made shorter: what is there would be lost.
fn grow(path: &Path, now: u64, size: u64, story: &Story) -> io::Result<()> {
    if size > now {
        let file = files::open(path, File::options().write(true))?;
        file.set_len(size)?;
        file.sync_all()?;
    }
    tell(now, size, story);
    Ok(())
}

/// The machine makes an image in QEMU's format longer, which knows its tables.
fn longer(disk: &mut Disk, size: u64, settings: &Settings, story: &Story) -> io::Result<()> {
    let (now, can) = qcow2::size(&disk.open()?)?;
    if size > now && (!can || settings.disk.controller.is == Bus::Usb) {
        story.tell(&format!(
            "DISK_SIZE={}: the disk is {}: enlarge it with qemu-img resize",
            Size(size).show(),
            Size(now).show()
        ));
        return Ok(());
    }
    disk.longer = (size > now).then_some(size);
    tell(now, size, story);
    Ok(())
}

/// Says what becomes of a disk of this size.
fn tell(now: u64, size: u64, story: &Story) {
    let [old, new] = [now, size].map(|bytes| Size(bytes).show());
    match size.cmp(&now) {
        Ordering::Greater => story.tell(&format!(
            "the disk is {new} now, and was {old}: enlarge its partition in the guest"
        )),
        Ordering::Less => {
            story.tell(&format!("DISK_SIZE={new}: the disk is {old} and is never made smaller"));
        }
        Ordering::Equal => {}
    }
}

/// Takes the room of a disk at once.
fn take_room(path: &Path) -> io::Result<()> {
    let file = files::open(path, File::options().write(true))?;
    let length = file.metadata()?.len();
    Ok(fallocate(&file, FallocateFlags::KEEP_SIZE, 0, length)?)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_keeps_from_writing_is_said_with_a_way_out() {
        let of = |kind: ErrorKind| format!("{:#}", refused("STORAGE=/storage", &kind.into()));
        let denied = of(ErrorKind::PermissionDenied);
        assert!(denied.contains("set fsGroup"), "{denied}");
        // A folder here would have to be there before.
        assert!(of(ErrorKind::NotFound).contains("-v windows:/storage"));
        // Others have less to ask for.
        assert_eq!(denied.contains(":Z"), rustix::process::geteuid().is_root(), "{denied}");
    }

    #[test]
    fn what_is_no_memory_of_a_tpm_is_not_given_to_one() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "windows");
        let path = folder.path().join("windows_secure.tpm");
        assert_eq!(volume.tpm(Boot::Secure, false).unwrap().metadata().unwrap().len(), 0);
        fs::write(&path, b"nilmptws and more").unwrap();
        assert!(volume.tpm(Boot::Secure, false).is_ok());
        fs::write(&path, b"damaged").unwrap();
        let error = volume.tpm(Boot::Secure, false).unwrap_err();
        assert_eq!(Status::of(&error), Status::Boot);
        assert_eq!(fs::read(&path).unwrap(), b"damaged");
        assert!(volume.tpm(Boot::Secure, true).is_ok() && fs::read(&path).unwrap().is_empty());
        assert!(!folder.path().join("windows.tpm").exists());
    }

    #[test]
    fn the_firmware_forgets_its_settings_if_that_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "windows");
        let template = folder.path().join("template");
        fs::write(&template, "blank").unwrap();
        let mut settings = Settings::unsaid();
        for (clear, kept) in [(settings.machine.clear, "known"), (true, "blank")] {
            settings.machine.clear = clear;
            fs::write(folder.path().join("windows.vars"), "known").unwrap();
            let vars = volume.vars(Boot::Uefi, &template, settings.machine.clear).unwrap();
            assert_eq!(fs::read_to_string(&vars).unwrap(), kept);
            assert_eq!(vars, folder.path().join("windows.vars"));
        }
    }

    #[test]
    fn each_boot_mode_finds_its_own_files_whatever_the_machine_is_called() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "my-pc");
        let of =
            |boot, end| volume.of_mode(boot, end).strip_prefix(folder.path()).unwrap().to_owned();
        for boot in [Boot::Uefi, Boot::Secure].iter().flat_map(|it| it.same()) {
            assert_eq!(of(*boot, "vars"), Path::new(&format!("{}.vars", boot.show())));
        }
        // A machine that had another word for the same goes on.
        fs::write(folder.path().join("uefi.vars"), "x").unwrap();
        assert_eq!(of(Boot::Uefi, "vars"), Path::new("uefi.vars"));
        assert_eq!(of(Boot::Secure, "vars"), Path::new("windows_secure.vars"));
        fs::write(folder.path().join("windows.vars"), "x").unwrap();
        assert_eq!(of(Boot::Uefi, "vars"), Path::new("windows.vars"));
        assert_eq!(volume.file("mac"), folder.path().join("my-pc.mac"));
        volume.remember(Boot::SecureBase).unwrap();
        assert_eq!(volume.read(MODE).as_deref(), Some("secure"));
    }

    #[test]
    fn the_mark_of_a_disk_that_starts_is_alone() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "windows");
        volume.mark_booted().unwrap();
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["windows.boot"]);
        assert!(volume.has_booted());
    }

    #[test]
    fn a_volume_has_one_uuid_and_another_volume_another() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let volume = |at: usize| Volume::at(folders[at].path(), "windows");
        let first = volume(0).uuid().unwrap().unwrap();
        assert_eq!(volume(0).uuid().unwrap().unwrap(), first);
        assert_ne!(volume(1).uuid().unwrap().unwrap(), first);
        fs::write(volume(1).file("uuid"), "no UUID").unwrap();
        let error = format!("{:#}", volume(1).uuid().unwrap_err());
        assert!(error.contains("windows.uuid: set UUID, or remove the file"), "{error}");
    }

    #[test]
    fn a_new_tpm_beside_another_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "windows");
        let [plain, secure] =
            ["windows", "windows_secure"].map(|it| volume.folder.join(format!("{it}.tpm")));
        fs::write(&secure, "").unwrap();
        assert_eq!(volume.other_tpm(&plain), None);
        fs::write(&secure, TPM_MAGIC).unwrap();
        assert_eq!(volume.other_tpm(&plain), Some(secure.clone()));
        assert_eq!(volume.other_tpm(&secure), None);
        fs::write(&plain, TPM_MAGIC).unwrap();
        assert_eq!(volume.other_tpm(&plain), None);
    }

    #[test]
    fn a_volume_that_may_become_full_is_said_to_stop_the_guest() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "windows");
        let disk = Disk::new(folder.path().join("data.img"), Format::Raw);
        let story = Story::new();
        volume.check_room(&disk, 1 << 60, false, &story).unwrap();
        let said = &story.lines(0).0[0].text;
        assert!(said.contains("the guest stands still until there is room"), "{said}");
    }
}
