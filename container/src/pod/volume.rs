//! Files on the volume. Their names are those of the reference image, so that both can use each
//! other's volumes.

mod beginning;
mod clone;
pub mod ephemeral;
mod removal;

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
use rustix::io::Errno;

use crate::disks::{self, Disk, original};
use crate::files::{self, if_there};
use crate::firmware::{self, MODE};
use crate::kept::ADDRESS;
use crate::settings::host;
use crate::settings::translate::Bus;
use crate::settings::value::{Value as _, in_mib};
use crate::settings::{Boot, Format, Settings};
use crate::source::Source;
use crate::state::BOOTED;
use crate::status::{Failure, Status};
use crate::story::Story;

/// First bytes of the memory of a TPM (swtpm, `swtpm_nvstore_linear.h`).
pub const TPM_MAGIC: &[u8] = b"nilmptws";

pub struct Volume {
    folder: PathBuf,
    /// First part of the file names.
    app: String,
    /// The boot mark has been seen. Later the pod may have no right to look.
    booted: AtomicBool,
}

impl Volume {
    /// Opens the configured volume and checks that it is writable. A full volume is accepted if the
    /// source is a disk: only its guest may be able to free space.
    pub fn open(settings: &Settings, source: &Source) -> anyhow::Result<Self> {
        let folder = settings.storage.folder.clone();
        let trial = folder.join(".transom");
        fs::remove_file(&trial).ok();
        // Another pod's trial may be there.
        let mut options = OpenOptions::new();
        let opened = files::open_itself(&trial, options.write(true).create(true).truncate(true));
        let tried = opened.and_then(|mut file| file.write_all(b"trial"));
        fs::remove_file(&trial).ok();
        match tried {
            Err(error) if is_full(&error) && matches!(source, Source::Disk(_)) => tracing::warn!(
                "STORAGE={}: the volume is full: when the disk needs more of it, the guest pauses \
                 until there is free space: delete files there, or in the guest",
                folder.display()
            ),
            tried => {
                tried.map_err(|error| {
                    write_error(&format!("STORAGE={}", folder.display()), &error)
                })?;
            }
        }
        Ok(Self { folder, app: settings.pod.process(), booted: AtomicBool::new(false) })
    }

    /// A volume without the check.
    fn at(folder: &Path, app: &str) -> Self {
        Self { folder: folder.into(), app: app.into(), booted: AtomicBool::new(false) }
    }

    /// Path of a file of the machine: `windows.END`.
    pub fn file(&self, end: &str) -> PathBuf {
        self.folder.join(format!("{}.{end}", self.app))
    }

    /// Path of a file of the firmware: `windows_secure.END`. It is named after the boot mode,
    /// whatever APP is. If it does not exist, a file under another name of the same mode is used.
    pub(super) fn firmware_file(&self, boot: Boot, end: &str) -> PathBuf {
        let file = |word: Boot| self.folder.join(format!("{}.{end}", word.show()));
        let mut words = [boot].into_iter().chain(boot.same().iter().copied()).map(file);
        // One that cannot be looked at is there.
        let is_there = |path: &PathBuf| path.try_exists().unwrap_or(true);
        words.find(is_there).unwrap_or_else(|| file(boot))
    }

    /// The machine's UUID: the one on the volume, or a new random one. `None` on a full volume: a
    /// UUID that changes at each start would be worse.
    pub fn uuid(&self) -> anyhow::Result<Option<Uuid>> {
        if let Some(kept) = self.kept("uuid")?.filter(|kept| !kept.is_empty()) {
            let path = self.file("uuid");
            let uuid = Uuid::read(&kept).ok().with_context(|| {
                format!("{}: it has no UUID: set UUID, or remove the file", path.display())
            })?;
            return Ok(Some(uuid));
        }
        let new = Uuid::random()?;
        if let Err(error) = self.write("uuid", &format!("{new}\n")) {
            tracing::warn!("the machine has no UUID of its own yet: {error:#}");
            return Ok(None);
        }
        Ok(Some(new))
    }

    /// Keeps the boot mode for starts without BOOT_MODE. The default mode is not written. Fails if
    /// the mode changes and another machine uses the disk, to which it belongs.
    pub fn save_boot_mode(&self, settings: &Settings, root: &Path) -> anyhow::Result<()> {
        let boot = settings.machine.boot;
        let wanted = boot.is_secure().then(|| boot.show());
        if self.kept(MODE)? == wanted {
            return Ok(());
        }
        let _locked = Self::lock_first_disk(settings, root)?;
        let Some(word) = wanted else {
            let removed = if_there(fs::remove_file(self.file(MODE)));
            return removed.map(drop).map_err(|error| self.error(MODE, &error));
        };
        self.write(MODE, &format!("{word}\n"))
    }

    /// The file that marks a disk which has booted before, if it exists.
    pub fn mark(&self) -> Option<PathBuf> {
        let path = self.file(BOOTED);
        if path.is_file() {
            self.booted.store(true, atomic::Ordering::Relaxed);
        }
        self.booted.load(atomic::Ordering::Relaxed).then_some(path)
    }

    pub fn has_booted(&self) -> bool {
        self.mark().is_some()
    }

    /// Marks that the guest has booted from its disk. The reference image starts such a disk as it
    /// is, unless a `windows.base` names another medium than its settings.
    pub fn mark_booted(&self) -> anyhow::Result<()> {
        let path = self.file(BOOTED);
        let done = files::write_for_owner(&path, |_| Ok(()));
        done.map_err(|error| self.error(BOOTED, &error))?;
        self.booted.store(true, atomic::Ordering::Relaxed);
        Ok(())
    }

    /// The contents of a small file without the line feed; `None` if it cannot be read.
    pub fn read(&self, end: &str) -> Option<String> {
        files::read(&self.file(end)).ok().map(|text| text.trim().to_owned())
    }

    /// Like [`Self::read`], for contents that are made anew if the file is not there: one that
    /// cannot be read now is an error, because it would be replaced.
    pub fn kept(&self, end: &str) -> anyhow::Result<Option<String>> {
        let text = if_there(files::read(&self.file(end)));
        let text = text.map_err(|error| self.error(end, &error))?;
        Ok(text.map(|text| text.trim().to_owned()))
    }

    /// The error about a small file.
    pub(super) fn error(&self, end: &str, error: &io::Error) -> anyhow::Error {
        write_error(&self.file(end).display().to_string(), error)
    }

    /// Writes a small file atomically.
    pub fn write(&self, end: &str, text: &str) -> anyhow::Result<()> {
        let path = self.file(end);
        let done = files::write_for_owner(&path, |file| file.write_all(text.as_bytes()));
        done.map_err(|error| self.error(end, &error))
    }

    /// The file with the firmware's variables.
    pub fn kept_vars(&self, boot: Boot) -> PathBuf {
        self.firmware_file(boot, "vars")
    }

    /// The firmware's variables: the file on the volume, or a copy of the template, or of those
    /// that the base's machine left in its folder.
    pub fn vars(
        &self,
        boot: Boot,
        template: &Path,
        base: Option<&Path>,
    ) -> anyhow::Result<PathBuf> {
        let path = self.firmware_file(boot, "vars");
        let length = fs::metadata(template).with_context(|| template.display().to_string())?.len();
        let there = if_there(fs::metadata(&path)).with_context(|| path.display().to_string())?;
        if there.as_ref().is_some_and(|it| it.len() == length) {
            if let Some(sentence) = firmware::old_keys(&path, template) {
                tracing::warn!("{sentence}");
            }
            return Ok(path);
        }
        if there.is_some() {
            let old = path.with_extension("vars.old");
            let (shown, old_shown) = (path.display(), old.display());
            tracing::warn!("{shown}: it belongs to another firmware: renamed to {old_shown}");
            fs::rename(&path, &old).with_context(|| path.display().to_string())?;
        }
        let left = base.map(|folder| Self::at(folder, &self.app).firmware_file(boot, "vars"));
        let fits = |path: &PathBuf| fs::metadata(path).is_ok_and(|it| it.len() == length);
        let first = left.filter(fits).unwrap_or_else(|| template.to_owned());
        let copied = files::open(&first, File::options().read(true)).and_then(|mut template| {
            files::write(&path, |file| io::copy(&mut template, file).map(drop))
        });
        self.set_owner(&path, copied)?;
        Ok(path)
    }

    /// Keeps the address of the guest, for a start in another pod. The volume may be full.
    pub fn keep_address(&self, address: &str) {
        if self.read(ADDRESS).as_deref() != Some(address)
            && let Err(error) = self.write(ADDRESS, &format!("{address}\n"))
        {
            tracing::warn!("the guest's address is not kept: {error:#}");
        }
    }

    /// The guest is in another network than that of user mode.
    pub fn forget_address(&self) {
        fs::remove_file(self.file(ADDRESS)).ok();
    }

    /// The memory of the TPM, empty if it is new. A file with other contents is refused: swtpm
    /// would overwrite it.
    pub fn tpm(&self, boot: Boot) -> anyhow::Result<File> {
        let path = self.firmware_file(boot, "tpm");
        let shown = path.display();
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let opened = files::open_itself(&path, options);
        let file = opened.map_err(|error| write_error(&shown.to_string(), &error))?;
        let mut start = Vec::new();
        (&file).take(TPM_MAGIC.len() as u64).read_to_end(&mut start)?;
        if !start.is_empty() && start != TPM_MAGIC {
            let out = "restore a backup, or remove it for a new TPM";
            let sentence = format!("{shown}: it is not the memory of a TPM: {out}, or set TPM=N");
            return Err(Failure::new(Status::Boot, sentence));
        }
        Ok(file)
    }

    /// Warns of a TPM that is new, though there is one of another boot mode.
    pub fn compare_tpm(&self, boot: Boot) {
        let path = self.firmware_file(boot, "tpm");
        if let Some(other) = self.other_tpm(&path) {
            let (shown, other) = (path.display(), other.display());
            tracing::warn!(
                "{shown}: a new TPM: the keys in {other} belong to another BOOT_MODE: BitLocker \
                 will ask for its recovery key"
            );
        }
    }

    /// Memory of another TPM that has been used, if the one at this path has not.
    fn other_tpm(&self, path: &Path) -> Option<PathBuf> {
        let used = |path: &Path| fs::metadata(path).is_ok_and(|found| found.len() > 0);
        let others = fs::read_dir(&self.folder).ok().filter(|_| !used(path))?;
        let mut others = others.flatten().map(|entry| entry.path());
        others.find(|path| path.extension().is_some_and(|it| it == "tpm") && used(path))
    }

    /// The machine's disk with this number, from 0: a passed-through one, the file on the volume,
    /// enlarged if configured, or a new file.
    pub fn disk(
        &self,
        number: usize,
        size: u64,
        settings: &Settings,
        story: &Story,
    ) -> anyhow::Result<Disk> {
        let [made, _] = disks::own_files(number, settings, Path::new("/"));
        let mut disk = match disks::find(number, settings, Path::new("/"))? {
            Some(found) if !found.own => return Ok(found.disk),
            Some(found) => found.disk,
            None => made,
        };
        if let Some(wanted) = settings.storage.format.filter(|wanted| *wanted != disk.format) {
            story.info(&format!(
                "DISK_FMT={}: the disk is {} and is not converted: use qemu-img convert",
                wanted.show(),
                disk.format.show()
            ));
        }
        self.keep_base(&disk)?;
        self.create_or_enlarge(&mut disk, size, settings, story)?;
        Ok(disk)
    }

    /// Refuses a disk that is over another base than the one which it was made over.
    fn keep_base(&self, disk: &Disk) -> anyhow::Result<()> {
        let record = self.kept(original::RECORD)?;
        // A disk that is not there yet may be over any base.
        let record = record.as_deref().filter(|_| disk.path.exists());
        original::check(disk, &self.app, record)?;
        match (disk.base(), record) {
            (Some(base), None) => {
                let base = original::describe(&base, &self.app)?;
                self.write(original::RECORD, &format!("{base}\n"))
            }
            _ => Ok(()),
        }
    }

    fn create_or_enlarge(
        &self,
        disk: &mut Disk,
        size: u64,
        settings: &Settings,
        story: &Story,
    ) -> anyhow::Result<()> {
        let fail = |error| Failure::new(Status::Disk, format!("DISK_SIZE: {error:#}"));
        let allocate = settings.disk.allocate && disk.format == Format::Raw;
        if settings.disk.allocate && !allocate {
            story.info("ALLOCATE=Y has no effect on qcow2 disks: they grow as the guest writes");
        }
        self.check_space(disk, size, allocate, story).map_err(fail)?;
        let made = match fs::metadata(&disk.path) {
            // A link to a block device.
            Ok(told) if disk.format == Format::Raw && !told.is_file() => Ok(()),
            Ok(told) if disk.format == Format::Raw => {
                let grows = size > told.len();
                let locked = grows.then(|| beginning::locked(&disk.path)).transpose();
                let grown = locked.map_err(fail)?.map_or(Ok(()), |file| grow(&file, size));
                grown.inspect(|()| report_size(told.len(), size, story))
            }
            Ok(_) => enlarge_qcow2(disk, size, settings, story),
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            Err(_) => {
                story.step(&format!("Creating a disk of {}…", Size(size).show()));
                create(disk, size.max(disk.length().unwrap_or(0)))
            }
        };
        let taken = made.and_then(|()| if allocate { allocate_blocks(&disk.path) } else { Ok(()) });
        self.set_owner(&disk.path, taken).map_err(fail)
    }

    /// Checks, before anything is created, that the volume has room for all that the guest may
    /// write.
    fn check_space(
        &self,
        disk: &Disk,
        size: u64,
        allocate: bool,
        story: &Story,
    ) -> anyhow::Result<()> {
        let size = size.max(disk.length().unwrap_or(0));
        let needs = size.saturating_sub(disk.taken());
        let folder = disk.path.parent().unwrap_or(&self.folder);
        let Some(free) = host::free_space(folder).filter(|free| *free < needs) else {
            return Ok(());
        };
        let [needs, free] = [needs, free].map(in_mib);
        let out = "enlarge the volume, or lower DISK_SIZE";
        anyhow::ensure!(!allocate, "ALLOCATE=Y needs {needs} more, but {free} are free: {out}");
        story.warn(&format!(
            "the disk may need {needs} more, but {free} are free on the volume: when it is full, \
             the guest pauses until there is free space: {out}"
        ));
        Ok(())
    }

    /// Gives a file the owner of the folder, if possible.
    fn set_owner(&self, path: &Path, done: io::Result<()>) -> anyhow::Result<()> {
        done.map_err(|error| write_error(&path.display().to_string(), &error))?;
        let told = fs::metadata(&self.folder)?;
        lchown(path, Some(told.uid()), Some(told.gid())).ok();
        Ok(())
    }
}

/// Further disks: passed-through ones, and files on /storage2 and so on.
pub fn further_disks(
    settings: &Settings,
    sizes: &[Option<u64>; disks::MAX_DISKS - 1],
    story: &Story,
) -> anyhow::Result<Vec<Disk>> {
    let mut all = Vec::new();
    for (number, size) in (1..).zip(sizes) {
        let folder = further_folder(number);
        let size = size.filter(|_| folder.is_dir());
        if size.is_none() && disks::find(number, settings, Path::new("/"))?.is_none() {
            continue;
        }
        let volume = Volume::at(&folder, "");
        all.push(volume.disk(number, size.unwrap_or(0), settings, story)?);
    }
    Ok(all)
}

/// The volume of a further disk.
fn further_folder(number: usize) -> PathBuf {
    PathBuf::from(format!("/storage{}", number + 1))
}

/// Creates a disk. It gets its name when it is complete, unless another pod has created one
/// meanwhile.
fn create(disk: &Disk, size: u64) -> io::Result<()> {
    files::make(&disk.path, |file| match (disk.format, disk.base()) {
        (Format::Raw, _) => file.set_len(size),
        (Format::Qcow2, None) => qcow2::create(file, size),
        (Format::Qcow2, Some(base)) => over(file, size, &base),
    })
}

/// Fills the file of a disk over a base.
fn over(file: &File, size: u64, base: &Disk) -> io::Result<()> {
    qcow2::create_over(file, size, &base.path, disks::image_format(base.format))
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

fn write_error(what: &str, error: &io::Error) -> anyhow::Error {
    let out = match error.kind() {
        ErrorKind::NotFound => "mount a volume there, as in -v windows:/storage",
        ErrorKind::NotADirectory => "it is not a folder: mount a volume there",
        ErrorKind::IsADirectory => "it is a folder, but must be a file: remove it",
        _ if is_full(error) => "it is full: delete something there, or make it larger",
        ErrorKind::ReadOnlyFilesystem => "it is mounted read-only: mount it for writing",
        // Root can write whatever the owner, so the reason is mostly an SELinux label.
        ErrorKind::PermissionDenied if rustix::process::geteuid().is_root() => {
            "it belongs to another user: set fsGroup, or change the owner of the folder, or, \
             with SELinux, mount it with :Z"
        }
        ErrorKind::PermissionDenied => {
            "it belongs to another user: set fsGroup, or change the owner of the folder"
        }
        _ => "check the volume",
    };
    Failure::new(Status::Storage, format!("{what}: {error}: {out}"))
}

/// Enlarges a disk that is locked. It is never made smaller: data would be lost. Another pod may
/// have enlarged it before.
fn grow(file: &File, size: u64) -> io::Result<()> {
    if size > file.metadata()?.len() {
        file.set_len(size)?;
        file.sync_all()?;
    }
    Ok(())
}

/// The machine enlarges the image when it starts, since it knows the image's tables.
fn enlarge_qcow2(disk: &mut Disk, size: u64, settings: &Settings, story: &Story) -> io::Result<()> {
    let (now, can) = qcow2::size(&disk.open()?)?;
    if size > now && (!can || settings.disk.controller.value == Bus::Usb) {
        story.info(&format!(
            "DISK_SIZE={}: the disk is {}: enlarge it with qemu-img resize",
            Size(size).show(),
            Size(now).show()
        ));
        return Ok(());
    }
    disk.longer = (size > now).then_some(size);
    report_size(now, size, story);
    Ok(())
}

/// Reports a changed size, or a smaller DISK_SIZE that is ignored.
fn report_size(now: u64, size: u64, story: &Story) {
    let [old, new] = [now, size].map(|bytes| Size(bytes).show());
    match size.cmp(&now) {
        Ordering::Greater => story.info(&format!(
            "the disk is {new} now, and was {old}: enlarge its partition in the guest"
        )),
        Ordering::Less => {
            story.info(&format!("DISK_SIZE={new}: the disk has {old} and cannot shrink"));
        }
        Ordering::Equal => {}
    }
}

fn allocate_blocks(path: &Path) -> io::Result<()> {
    let file = files::open(path, File::options().write(true))?;
    let length = file.metadata()?.len();
    match fallocate(&file, FallocateFlags::KEEP_SIZE, 0, length) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            tracing::warn!(
                "ALLOCATE=Y: the file system of {} cannot reserve space: the disk grows as the \
                 guest writes",
                path.display()
            );
            Ok(())
        }
        allocated => Ok(allocated?),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn write_errors_have_advice() {
        let of = |kind: ErrorKind| format!("{:#}", write_error("STORAGE=/storage", &kind.into()));
        let denied = of(ErrorKind::PermissionDenied);
        assert!(denied.contains("set fsGroup"), "{denied}");
        // A host folder for `-v` would have to exist before.
        assert!(of(ErrorKind::NotFound).contains("-v windows:/storage"));
        // Other users get fewer proposals.
        assert_eq!(denied.contains(":Z"), rustix::process::geteuid().is_root(), "{denied}");
    }

    #[test]
    fn a_file_that_is_not_tpm_state_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "windows");
        let path = folder.path().join("windows_secure.tpm");
        assert_eq!(volume.tpm(Boot::Secure).unwrap().metadata().unwrap().len(), 0);
        fs::write(&path, b"nilmptws and more").unwrap();
        assert!(volume.tpm(Boot::Secure).is_ok());
        fs::write(&path, b"damaged").unwrap();
        let error = volume.tpm(Boot::Secure).unwrap_err();
        assert_eq!(Status::of(&error), Status::Boot);
        assert_eq!(fs::read(&path).unwrap(), b"damaged");
        assert!(!folder.path().join("windows.tpm").exists());
    }

    #[test]
    fn each_boot_mode_finds_its_own_files_for_any_machine_name() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "my-pc");
        let of = |boot, end| {
            volume.firmware_file(boot, end).strip_prefix(folder.path()).unwrap().to_owned()
        };
        for boot in [Boot::Uefi, Boot::Secure].iter().flat_map(|it| it.same()) {
            assert_eq!(of(*boot, "vars"), Path::new(&format!("{}.vars", boot.show())));
        }
        // A machine with files under another name of the same mode keeps them.
        fs::write(folder.path().join("uefi.vars"), "x").unwrap();
        assert_eq!(of(Boot::Uefi, "vars"), Path::new("uefi.vars"));
        assert_eq!(of(Boot::Secure, "vars"), Path::new("windows_secure.vars"));
        fs::write(folder.path().join("windows.vars"), "x").unwrap();
        assert_eq!(of(Boot::Uefi, "vars"), Path::new("windows.vars"));
        assert_eq!(volume.file("mac"), folder.path().join("my-pc.mac"));
        let mut settings = Settings::defaults();
        for (boot, kept) in [(Boot::SecureBase, Some("secure")), (Boot::Uefi, None)] {
            settings.machine.boot = boot;
            volume.save_boot_mode(&settings, folder.path()).unwrap();
            assert_eq!(volume.read(MODE).as_deref(), kept);
        }
    }

    #[test]
    fn the_boot_mark_is_the_only_file_written() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "windows");
        volume.mark_booted().unwrap();
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["windows.boot"]);
        assert!(volume.has_booted());
    }

    #[test]
    fn each_volume_has_its_own_stable_uuid() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let volume = |at: usize| Volume::at(folders[at].path(), "windows");
        let first = volume(0).uuid().unwrap().unwrap();
        assert_eq!(volume(0).uuid().unwrap().unwrap(), first);
        assert_ne!(volume(1).uuid().unwrap().unwrap(), first);
        fs::write(volume(1).file("uuid"), "no UUID").unwrap();
        let error = format!("{:#}", volume(1).uuid().unwrap_err());
        assert!(
            error.contains("windows.uuid: it has no UUID: set UUID, or remove the file"),
            "{error}"
        );
    }

    #[test]
    fn an_additional_tpm_state_file_is_reported() {
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
    fn warns_that_a_full_volume_pauses_the_guest() {
        let folder = tempfile::tempdir().unwrap();
        let volume = Volume::at(folder.path(), "windows");
        let disk = Disk::new(folder.path().join("data.img"), Format::Raw);
        let story = Story::new();
        volume.check_space(&disk, 1 << 60, false, &story).unwrap();
        let said = &story.lines(0).0[0].text;
        assert!(said.contains("the guest pauses until there is free space"), "{said}");
    }
}
