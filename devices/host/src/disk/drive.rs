//! The list of a machine's disks, for the operator: their names, paths and sizes.
//!
//! Controllers register their disk here when they are built, with a callback for changes of size.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use anyhow::bail;

use super::{Geometry, Image, Tray};
use crate::gate::Gate;

/// Called after a disk has grown, on the thread that made it grow. Notifies the guest.
pub type Watch = Box<dyn Fn() + Send>;

/// A disk and its controller.
pub struct Drive {
    pub name: String,
    pub serial: String,
    pub path: PathBuf,
    pub image: Arc<dyn Image>,
    watch: Mutex<Option<Watch>>,
}

impl Drive {
    /// `name` is the name of its controller on the board.
    pub fn new(name: &str, serial: String, path: &Path, image: Arc<dyn Image>) -> Self {
        let (name, path) = (name.to_owned(), path.to_owned());
        Self { name, serial, path, image, watch: Mutex::default() }
    }

    /// The controller's kind, as in the configuration: `nvme`.
    pub fn kind(&self) -> &str {
        self.name.split('.').next().unwrap_or_default()
    }

    pub fn geometry(&self) -> Geometry {
        self.image.geometry()
    }

    /// Grows the disk to `size`, or without one to the current size of its file or device. Notifies
    /// the guest.
    pub fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        // Held until the guest is notified, so that notifications keep the order of changes and the
        // guest never ends up with an old size.
        let watch = self.watching();
        let before = self.geometry().size;
        self.image.grow(size)?;
        if let Some(watch) = watch.as_ref().filter(|_| self.geometry().size != before) {
            watch();
        }
        Ok(())
    }

    /// Calls `watch` after each growth from now on, instead of the previous one. It must not keep
    /// the disk alive.
    pub fn watch(&self, watch: Option<Watch>) {
        *self.watching() = watch;
    }

    fn watching(&self) -> MutexGuard<'_, Option<Watch>> {
        self.watch.lock().expect("no device panicked")
    }
}

/// The disks of a machine, in the order of their controllers. A disk disappears with its
/// controller.
#[derive(Default)]
pub struct Disks {
    drives: Mutex<Vec<Weak<Drive>>>,
    trays: Mutex<Vec<Weak<dyn Tray>>>,
    /// Files besides disks with a lock that excludes other machines.
    locked: Mutex<Vec<Weak<File>>>,
    gate: Arc<Gate>,
}

impl Disks {
    /// Disks that are written only while this gate is open.
    pub fn behind(gate: Arc<Gate>) -> Self {
        Self { gate, ..Self::default() }
    }

    /// In front of the disks, and of other files with the machine's state.
    pub fn gate(&self) -> Arc<Gate> {
        self.gate.clone()
    }

    pub fn add(&self, drive: &Arc<Drive>) {
        let mut drives = self.drives.lock().expect("no device panicked");
        // Ejected media are gone.
        drives.retain(|it| it.strong_count() > 0);
        drives.push(Arc::downgrade(drive));
    }

    pub fn add_tray(&self, tray: &Arc<dyn Tray>) {
        let mut trays = self.trays.lock().expect("no device panicked");
        trays.retain(|it| it.strong_count() > 0);
        trays.push(Arc::downgrade(tray));
    }

    pub fn add_locked(&self, file: &Arc<File>) {
        self.locked.lock().expect("no device panicked").push(Arc::downgrade(file));
    }

    /// All open files with a lock that excludes other machines.
    pub fn locks(&self) -> Vec<Arc<File>> {
        let all = self.all();
        let found = all.iter().filter_map(|it| it.image.file()).filter(|it| it.exclusive);
        let mut locks: Vec<_> = found.map(|it| it.file).collect();
        let others = self.locked.lock().expect("no device panicked");
        locks.extend(others.iter().filter_map(Weak::upgrade));
        locks
    }

    /// The machine goes on from its snapshot, which must not fit its disks any more. The caller
    /// holds all other writes.
    pub fn disown_snapshot(&self) {
        if let Err(error) = self.mark_changed() {
            tracing::warn!(
                "a disk cannot be marked as changed ({error}): after a loss of power, do not use \
                 the machine's snapshot"
            );
        }
    }

    /// Gives one of the machine's files a new time of change, durably: a write of the guest may be
    /// durable before its time is, so a loss of power could hide it. One file is enough, because a
    /// snapshot compares all. A byte that is written again needs only the open file, while nobody
    /// but the owner of a file may set its time.
    fn mark_changed(&self) -> io::Result<()> {
        let locks = self.locks();
        let is_file = |file: &&Arc<File>| file.metadata().is_ok_and(|it| it.is_file());
        let Some(file) = locks.iter().find(is_file) else { return Ok(()) };
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0)?;
        file.write_all_at(&byte, 0)?;
        file.sync_all()
    }

    /// The drives whose medium can be removed.
    pub fn trays(&self) -> Vec<Arc<dyn Tray>> {
        let trays = self.trays.lock().expect("no device panicked");
        trays.iter().filter_map(Weak::upgrade).filter(|it| it.is_removable()).collect()
    }

    pub fn tray(&self, name: &str) -> anyhow::Result<Arc<dyn Tray>> {
        let all = self.trays();
        if let Some(tray) = all.iter().find(|it| it.name() == name) {
            return Ok(tray.clone());
        }
        let names: Vec<_> = all.iter().map(|it| it.name()).collect();
        if names.is_empty() {
            bail!(
                "this machine has no drive with removable media: start it with `--device \
                 ahci-cdrom`, or attach `usb-storage,cdrom` or `usb-storage,path=FILE,removable`"
            );
        }
        bail!(
            "there is no drive `{name}` with removable media: this machine has {}",
            names.join(", ")
        )
    }

    /// All disks, including inserted media.
    pub fn all(&self) -> Vec<Arc<Drive>> {
        let drives = self.drives.lock().expect("no device panicked");
        drives.iter().filter_map(Weak::upgrade).collect()
    }

    /// The disk whose controller has this name, or else the disk with this serial number. Fails if
    /// several disks have that number.
    pub fn find(&self, name: &str) -> anyhow::Result<Arc<Drive>> {
        let all = self.all();
        if let Some(drive) = all.iter().find(|drive| drive.name == name) {
            return Ok(drive.clone());
        }
        let mut same = all.iter().filter(|drive| drive.serial == name);
        match (same.next(), same.next()) {
            (Some(drive), None) => Ok(drive.clone()),
            (Some(one), Some(two)) => bail!(
                "{} and {} both have the serial number {name}: use one of these names",
                one.name,
                two.name
            ),
            (None, _) if all.is_empty() => {
                bail!("this machine has no disk: start it with --disk PATH")
            }
            (None, _) => {
                let show = |it: &Arc<Drive>| {
                    format!("{} (serial {}, {})", it.name, it.serial, it.path.display())
                };
                let list: Vec<_> = all.iter().map(show).collect();
                bail!("there is no disk `{name}`: this machine has {}", list.join(", "))
            }
        }
    }
}

#[cfg(test)]
mod test {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::super::memory;
    use super::*;

    fn drive(name: &str, serial: &str) -> Arc<Drive> {
        Arc::new(Drive::new(name, serial.into(), Path::new("a.img"), memory(4096)))
    }

    #[test]
    fn only_growth_is_reported() {
        let (drive, notified) = (drive("nvme", "x"), Arc::new(AtomicU32::new(0)));
        let count = notified.clone();
        drive.grow(Some(8192)).unwrap();
        drive.watch(Some(Box::new(move || {
            count.fetch_add(1, Ordering::Relaxed);
        })));
        drive.grow(Some(8192)).unwrap();
        assert!(drive.grow(Some(4096)).is_err());
        assert_eq!(notified.load(Ordering::Relaxed), 0);
        drive.grow(Some(16384)).unwrap();
        assert_eq!((notified.load(Ordering::Relaxed), drive.geometry().size), (1, 16384));
        drive.watch(None);
        drive.grow(Some(32768)).unwrap();
        assert_eq!(notified.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_disk_is_found_by_name_or_serial_number_until_removed() {
        let disks = Disks::default();
        let said = |name| disks.find(name).err().unwrap().to_string();
        assert!(said("nvme").contains("--disk PATH"));
        let without_trays = disks.tray("nvme").err().unwrap().to_string();
        assert!(["ahci-cdrom", "usb-storage"].iter().all(|it| without_trays.contains(it)));
        let (one, two) = (drive("nvme", "first"), drive("virtio-blk.2", "nvme"));
        disks.add(&one);
        disks.add(&two);
        for (name, found) in [("nvme", "nvme"), ("first", "nvme"), ("virtio-blk.2", "virtio-blk.2")]
        {
            assert_eq!(disks.find(name).unwrap().name, found);
        }
        assert_eq!(two.kind(), "virtio-blk");
        let there = said("sda");
        for word in ["`sda`", "nvme (serial first, a.img)", "virtio-blk.2 (serial nvme, a.img)"] {
            assert!(there.contains(word), "{there}");
        }
        let three = drive("nvme.2", "first");
        disks.add(&three);
        assert!(said("first").contains("nvme and nvme.2"));
        drop(one);
        assert_eq!(disks.find("first").unwrap().name, "nvme.2");
        drop((two, three));
        assert!(disks.all().is_empty());
    }
}
