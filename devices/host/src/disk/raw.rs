//! Raw disks: files, sparse or not, and block devices.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Context, bail, ensure};
use rustix::fs::{FallocateFlags, Timespec, Timestamps, fallocate, futimens};
use rustix::io::{Errno, ReadWriteFlags, preadv2, pwritev2};

use super::direct::{self, Alignment};
use super::medium::{Buffer, Medium, is_full};
use super::{Config, Direct, Geometry, LockedFile, device};
use crate::lock;

/// Bytes of the buffer of zeros, for hosts that cannot zero a range by themselves.
const ZEROS: usize = 256 << 10;

/// A file or a block device, open and locked.
pub(super) struct Raw {
    pub(super) file: File,
    lock: Arc<File>,
    path: PathBuf,
    size: AtomicU64,
    logical_block: u32,
    discard: u32,
    read_only: bool,
    pub(super) device: bool,
    /// The required alignment of direct I/O; `None` if the page cache is used.
    pub(super) direct: Option<Alignment>,
    /// Whether another try through the page cache may follow if the host refuses direct I/O that
    /// it seemed to support, as some file systems of virtual machines do. Only without writes: data
    /// of both ways in one page could overwrite each other.
    may_cache: bool,
    /// Whether the host has refused.
    refused: AtomicBool,
    /// Whether discards are supported. Cleared when the host refuses one.
    discards: AtomicBool,
    /// Set when a flush fails. The kernel then drops the pages that it could not write, and its
    /// next flush would succeed. So all later flushes must fail.
    lost: AtomicBool,
    /// Held during a flush.
    flushing: Mutex<()>,
    /// The operations on the file, in order, for tests of power losses.
    #[cfg(test)]
    pub(super) journal: Option<Mutex<Vec<Event>>>,
}

#[cfg(test)]
#[derive(Clone)]
pub(super) enum Event {
    Wrote(u64, Vec<u8>),
    Punched(u64, u64),
    Flushed,
}

/// Opens a file or a block device without looking at its content, and locks it.
pub(super) fn open_locked(path: &Path, read_only: bool) -> anyhow::Result<Opened> {
    let name = path.display();
    // Checked before it is opened, because opening a pipe would block.
    let found = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("{name} does not exist: `truncate -s 64G {name}` creates an empty disk")
        }
        Err(error) => return Err(explain(error, path, read_only)),
        Ok(found) => found,
    };
    let kind = found.file_type();
    ensure!(!kind.is_dir(), "{name} is a folder, not a disk: name a file in it");
    ensure!(
        kind.is_file() || kind.is_block_device(),
        "{name} is neither a file nor a block device"
    );
    let claims = kind.is_block_device() && !read_only;
    let open = |claims: bool| {
        let file = if claims {
            lock::open_exclusive(path)
        } else {
            OpenOptions::new().read(true).write(!read_only).open(path)
        };
        let found = file.and_then(|file| Ok((file.metadata()?, file)));
        found.map_err(|error| explain(error, path, read_only))
    };
    let (held, lock) = open(claims)?;
    if read_only {
        lock::shared(&lock, path)?;
    } else {
        lock::exclusive(&lock, path)?;
    }
    let (found, file) = open(false)?;
    ensure!(
        (held.dev(), held.ino()) == (found.dev(), found.ino()),
        "{name} was replaced while it was opened: try again"
    );
    Ok(Opened { file, found, lock })
}

/// An open file and its lock, which are two open file descriptions. The kernel closes the files of
/// a ring some time after its process has ended. A lock on the ring's own file description would
/// outlive a killed machine and keep its successor from starting.
pub(super) struct Opened {
    pub(super) file: File,
    pub(super) found: fs::Metadata,
    lock: File,
}

fn explain(error: io::Error, path: &Path, read_only: bool) -> anyhow::Error {
    let name = path.display();
    let way_out = if read_only { "" } else { ", or set `readonly`" };
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            let use_ = if read_only { "reading" } else { "writing" };
            let text = format!(
                "no permission to open {name} for {use_}: give the user of this process access\
                 {way_out}"
            );
            io::Error::new(error.kind(), text).into()
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            anyhow::anyhow!("{name} is on a read-only file system: set `readonly`")
        }
        io::ErrorKind::ResourceBusy => anyhow::Error::new(error),
        _ => anyhow::Error::new(error).context(name.to_string()),
    }
}

impl Raw {
    pub(super) fn locked(&self) -> LockedFile {
        LockedFile { file: self.lock.clone(), exclusive: !self.read_only && !self.device }
    }

    pub(super) fn new(opened: Opened, config: &Config) -> anyhow::Result<Self> {
        let Opened { mut file, found, lock } = opened;
        let (path, name) = (config.path.clone(), config.path.display());
        let device = found.file_type().is_block_device();
        let size = file.seek(SeekFrom::End(0)).with_context(|| name.to_string())?;
        let empty = device && size == 0;
        ensure!(!empty, "{name} is a device of 0 bytes: it has no disk attached");
        let read_only = config.is_read_only();
        let direct = direct::switch(&file, config)?;
        let discard = if config.discard && !read_only { discard(&file, &found, size) } else { 0 };
        tracing::debug!(
            disk = %name,
            size,
            direct = direct.is_some(),
            discard,
            read_only,
            "open"
        );
        Ok(Self {
            file,
            lock: Arc::new(lock),
            path,
            size: AtomicU64::new(size),
            logical_block: config.sector.bytes(),
            discard,
            read_only,
            device,
            direct,
            may_cache: read_only && config.direct == Direct::Auto,
            refused: AtomicBool::new(false),
            discards: AtomicBool::new(discard > 0),
            lost: AtomicBool::new(false),
            flushing: Mutex::default(),
            #[cfg(test)]
            journal: None,
        })
    }

    pub(super) fn discards(&self) -> bool {
        self.discards.load(Ordering::Relaxed)
    }

    pub(super) fn has_failed_flush(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Handles a failed flush and returns the error for the guest. A full volume is a temporary
    /// error only with direct I/O: there each write had its own answer, and the flush of the file
    /// system's metadata can be tried again. The page cache, in contrast, drops the data that found
    /// no room.
    pub(super) fn flush_failed(&self, error: io::Error) -> io::Error {
        if self.direct.is_some() && is_full(&error) {
            return error;
        }
        self.lost.store(true, Ordering::Release);
        io::Error::other(format!("earlier writes are lost: {error}"))
    }

    /// Makes everything durable, with the times of the file.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.flush()?;
        if self.read_only { Ok(()) } else { self.file.sync_all() }
    }

    /// Whether the buffer's address is invalid for direct I/O.
    fn misaligned(&self, buffer: &[u8]) -> bool {
        let address = buffer.as_ptr().addr() as u64;
        self.direct.is_some_and(|need| !address.is_multiple_of(need.memory))
    }

    /// Whether the host has refused direct I/O with a disk that may be read through the page cache.
    pub(super) fn is_refused(&self) -> bool {
        self.refused.load(Ordering::Relaxed)
    }

    /// The file for another try through the page cache, after an error of a read from this file.
    /// The locked file is never used directly.
    fn cached(&self, file: &File, error: Errno) -> io::Result<&File> {
        let direct = self.direct.is_some() && !std::ptr::eq(file, &*self.lock);
        if !(self.may_cache && direct && error == Errno::INVAL) {
            return Err(error.into());
        }
        if !self.refused.swap(true, Ordering::Relaxed) {
            let disk = self.path.display();
            tracing::warn!(%disk, "the host refuses direct I/O: reading through the page cache");
        }
        Ok(&self.lock)
    }

    #[cfg(test)]
    fn note(&self, event: impl FnOnce() -> Event) {
        if let Some(journal) = &self.journal {
            journal.lock().unwrap().push(event());
        }
    }

    fn write_zeros(&self, mut offset: u64, mut length: u64) -> io::Result<()> {
        let mut buffer = Buffer::default();
        let zeros = buffer.take(ZEROS);
        while length > 0 {
            let part = usize::try_from(length).map_or(ZEROS, |it| it.min(ZEROS));
            self.write(&zeros[..part], offset, false)?;
            (offset, length) = (offset + part as u64, length - part as u64);
        }
        Ok(())
    }
}

/// Checks that a disk has at least one sector and no partial one.
pub(super) fn check_size(path: &Path, size: u64, sector: u32) -> anyhow::Result<()> {
    let name = path.display();
    ensure!(size > 0, "{name} has 0 bytes: `truncate -s 64G {name}` makes it an empty disk");
    ensure!(
        size.is_multiple_of(u64::from(sector)),
        "{name} has {size} bytes, which are not whole sectors of {sector}: it is incomplete, or \
         not a disk; `truncate -s %{sector} {name}` fills the last sector with zeros"
    );
    Ok(())
}

/// The granularity of discards in bytes; 0 if they are not supported.
fn discard(file: &File, found: &fs::Metadata, size: u64) -> u32 {
    if found.file_type().is_block_device() {
        let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
        let queue = |name: &str| -> Option<u64> {
            let device = format!("/sys/dev/block/{major}:{minor}");
            // A partition has no queue of its own; its disk has.
            let text = fs::read_to_string(format!("{device}/queue/{name}"))
                .or_else(|_| fs::read_to_string(format!("{device}/../queue/{name}")));
            text.ok()?.trim().parse().ok()
        };
        let unit = queue("discard_granularity").unwrap_or_default();
        return if queue("discard_max_bytes").unwrap_or_default() == 0 {
            0
        } else {
            u32::try_from(unit).unwrap_or_default()
        };
    }
    // The trial is beyond the end of the file, where there is no data to lose.
    let unit = u32::try_from(found.blksize()).ok().filter(|it| it.is_power_of_two());
    let unit = unit.unwrap_or(4096).clamp(4096, 1 << 20);
    let behind = size.next_multiple_of(u64::from(unit));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // Some file systems need room to free room, so a full volume does not mean no support.
    let tried = fallocate(file, punch, behind, u64::from(unit)).map_err(io::Error::from);
    // A snapshot compares the time of the last change with that of its disk.
    keep_time(file, found);
    let works = tried.is_ok() || tried.is_err_and(|error| is_full(&error));
    if works { unit } else { 0 }
}

/// Sets the time of the last change to what it was. Only the owner of the file may do that.
fn keep_time(file: &File, found: &fs::Metadata) {
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let last_modification = Timespec { tv_sec: found.mtime(), tv_nsec: found.mtime_nsec() };
    let times = Timestamps { last_access: omit, last_modification };
    if let Err(error) = futimens(file, &times) {
        tracing::debug!("the time of a disk's last change: {error}");
    }
}

/// The flags of `fallocate` that zero a range, freeing its room if `unmap`.
pub(super) fn zeroing(unmap: bool) -> FallocateFlags {
    let mode = if unmap { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
    mode | FallocateFlags::KEEP_SIZE
}

impl Medium for Raw {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size.load(Ordering::Acquire),
            logical_block: self.logical_block,
            physical_block: 4096,
            discard: self.discard,
            read_only: self.read_only,
        }
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if self.misaligned(buffer) {
            let mut copy = Buffer::default();
            let copy = copy.take(buffer.len());
            self.read(copy, offset)?;
            buffer.copy_from_slice(copy);
            return Ok(());
        }
        let block = self.logical_block as usize;
        let mut file = if self.is_refused() { &*self.lock } else { &self.file };
        let mut done = 0;
        while done < buffer.len() {
            let mut part = [IoSliceMut::new(&mut buffer[done..])];
            match preadv2(file, &mut part, offset + done as u64, ReadWriteFlags::empty()) {
                Ok(length) if length > 0 && length.is_multiple_of(block) => done += length,
                // The file was truncated while it was open. The missing bytes read as zeros.
                Ok(length) => {
                    buffer[done + length..].fill(0);
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                Err(error) => file = self.cached(file, error)?,
            }
        }
        Ok(())
    }

    fn write(&self, buffer: &[u8], offset: u64, durable: bool) -> io::Result<()> {
        if self.misaligned(buffer) {
            let mut copy = Buffer::default();
            let copy = copy.take(buffer.len());
            copy.copy_from_slice(buffer);
            return self.write(copy, offset, durable);
        }
        #[cfg(test)]
        self.note(|| Event::Wrote(offset, buffer.to_vec()));
        let block = self.logical_block as usize;
        let at_once = durable && self.direct.is_some();
        let flags = if at_once { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
        let mut done = 0;
        while done < buffer.len() {
            let part = [IoSlice::new(&buffer[done..])];
            match pwritev2(&self.file, &part, offset + done as u64, flags) {
                Ok(length) if length < block => return Err(io::ErrorKind::WriteZero.into()),
                // A partly written block is written again, as a whole.
                Ok(length) => done += length - length % block,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if durable && !at_once { self.flush() } else { Ok(()) }
    }

    fn flush(&self) -> io::Result<()> {
        // Only one of several simultaneous flushes gets the error that data was lost.
        let _flushing = self.flushing.lock().expect("a panic ends the process");
        if self.has_failed_flush() {
            return Err(io::Error::other("an earlier flush failed"));
        }
        // There is nothing to flush, and on NFS it may not be allowed.
        if self.read_only {
            return Ok(());
        }
        #[cfg(test)]
        self.note(|| Event::Flushed);
        rustix::fs::fdatasync(&self.file).map_err(|error| self.flush_failed(error.into()))
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        if !self.discards() {
            return Ok(());
        }
        #[cfg(test)]
        self.note(|| Event::Punched(offset, length));
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let done = if self.device {
            device::discard(&self.file, offset, length)
        } else {
            fallocate(&self.file, punch, offset, length).map_err(io::Error::from)
        };
        match done {
            // A discard is a hint: the range may keep its room and its content.
            Err(error) if unsupported(&error) => {
                // Another range may do.
                if Errno::from_io_error(&error) != Some(Errno::INVAL) {
                    self.discards.store(false, Ordering::Relaxed);
                }
                Ok(())
            }
            // Not reported as full: waiting for room in order to free room would never end.
            Err(error) if is_full(&error) => Ok(()),
            other => other,
        }
    }

    fn zero(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
        // With `discard=off` the disk must keep all of its room.
        let first = unmap && self.discards();
        for unmap in [first, false] {
            match fallocate(&self.file, zeroing(unmap), offset, length).map_err(io::Error::from) {
                Err(error) if unsupported(&error) => {}
                other => return other,
            }
        }
        self.write_zeros(offset, length)
    }

    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        let now = self.size.load(Ordering::Acquire);
        let name = self.path.display();
        let there = (&self.file).seek(SeekFrom::End(0)).with_context(|| name.to_string())?;
        let size = size.unwrap_or(there);
        ensure!(size >= now, "{name} has {now} bytes and cannot shrink to {size}");
        check_size(&self.path, size, self.logical_block)?;
        if there < size {
            ensure!(!self.device, "{name} is a device of {there} bytes: enlarge the device first");
            ensure!(
                !self.read_only,
                "{name} has {there} bytes and is opened read-only: enlarge the file first"
            );
            self.file.set_len(size).with_context(|| format!("{name}: {size} bytes"))?;
        }
        self.size.fetch_max(size, Ordering::AcqRel);
        Ok(())
    }
}

/// Whether the file system or device does not support the operation, or not for this range.
fn unsupported(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL))
}

#[cfg(test)]
mod test {
    use std::sync::Arc;

    use super::super::driver::Driver;
    use super::super::rehearsal::sparse;
    use super::super::{Direct, Fault, Image, Operation, config, open};
    use super::*;

    /// Opens the disk with io_uring, if the host supports it, and with threads.
    fn both(config: &Config) -> [Box<dyn Fn() -> Arc<dyn Image> + '_>; 2] {
        let rings = || open(config, None).unwrap();
        let threads = || config::File::by_threads(config).unwrap();
        [Box::new(rings), Box::new(threads)]
    }

    #[test]
    fn a_disk_that_is_only_read_goes_on_without_direct_io() {
        let folder = tempfile::tempdir().unwrap();
        let path = sparse(&folder, "disk", 64 << 10);
        fs::write(&path, vec![7; 64 << 10]).unwrap();
        for (readonly, direct) in [(true, Direct::Auto), (false, Direct::Auto), (true, Direct::Off)]
        {
            let config = Config { readonly, direct, ..Config::new(&path) };
            let mut raw = Raw::new(open_locked(&path, readonly).unwrap(), &config).unwrap();
            raw.direct = Some(Alignment { memory: 512, length: 512 });
            let goes_on = readonly && direct == Direct::Auto;
            assert!(raw.cached(&raw.file, Errno::IO).is_err(), "another error");
            assert_eq!(raw.cached(&raw.file, Errno::INVAL).is_ok(), goes_on);
            assert_eq!(raw.is_refused(), goes_on);
            assert!(raw.cached(&raw.lock, Errno::INVAL).is_err(), "no third way");
            let mut buffer = Buffer::default();
            let buffer = buffer.take(4096);
            raw.read(buffer, 4096).unwrap();
            assert!(buffer.iter().all(|it| *it == 7));
        }
    }

    #[test]
    fn a_truncated_file_reads_as_zeros_beyond_its_end() {
        let folder = tempfile::tempdir().unwrap();
        for direct in [Direct::Auto, Direct::Off] {
            let path = sparse(&folder, "disk", 64 << 10);
            let config = Config { direct, ..Config::new(&path) };
            for image in both(&config) {
                fs::write(&path, vec![7; 64 << 10]).unwrap();
                let image = image();
                let mut driver = Driver::new(&image);
                File::options().write(true).open(&path).unwrap().set_len(10_000).unwrap();
                let read = driver.read(0, 32 << 10).unwrap();
                assert!(read[..10_000].iter().all(|it| *it == 7));
                assert!(read[10_000..].iter().all(|it| *it == 0));
                assert_eq!(driver.read(40 << 10, 4096).unwrap(), vec![0; 4096]);
            }
        }
    }

    #[test]
    fn refuses_writes_to_a_read_only_disk() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config { readonly: true, ..Config::new(sparse(&folder, "disk", 4096)) };
        for image in both(&config) {
            let mut driver = Driver::new(&image());
            assert_eq!(driver.write(0, &[1; 512]), Err(Fault::Refused));
            let zeroes = Operation::WriteZeroes { unmap: true };
            for operation in [Operation::Discard, zeroes] {
                assert_eq!(driver.execute(operation, 0, 512, &[]), Err(Fault::Refused));
            }
            assert_eq!(driver.read(0, 512).unwrap(), vec![0; 512]);
            driver.flush().unwrap();
        }
    }

    #[test]
    fn discards_and_zeroes_free_space_unless_disabled() {
        let folder = tempfile::tempdir().unwrap();
        let path = sparse(&folder, "disk", 4 << 20);
        for discard in [true, false] {
            let config = Config { discard, ..Config::new(&path) };
            for image in both(&config) {
                for operation in [Operation::Discard, Operation::WriteZeroes { unmap: true }] {
                    let mut driver = Driver::new(&image());
                    driver.write(0, &vec![1; 4 << 20]).unwrap();
                    driver.flush().unwrap();
                    let before = path.metadata().unwrap().blocks();
                    assert!(before >= 8192, "{before}");
                    driver.execute(operation, 1 << 20, 2 << 20, &[]).unwrap();
                    let after = path.metadata().unwrap().blocks();
                    assert_eq!(after <= before - 4000, discard, "{operation:?}: {before} {after}");
                    assert_eq!(driver.read(0, 512).unwrap(), vec![1; 512]);
                }
            }
        }
    }

    #[test]
    fn grows_with_the_file_or_extends_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = sparse(&folder, "disk", 1 << 20);
        let image = open(&Config::new(&path), None).unwrap();
        let mut driver = Driver::new(&image);
        assert_eq!(driver.write(1 << 20, &[5; 512]), Err(Fault::Refused));
        image.grow(Some(2 << 20)).unwrap();
        driver.write(1 << 20, &[5; 512]).unwrap();
        assert_eq!(path.metadata().unwrap().len(), 2 << 20);
        // Another process enlarges the file.
        File::options().write(true).open(&path).unwrap().set_len(3 << 20).unwrap();
        image.grow(None).unwrap();
        assert_eq!(image.geometry().size, 3 << 20);
        let said = image.grow(Some(1 << 20)).unwrap_err().to_string();
        assert!(said.contains("cannot shrink"), "{said}");
        assert!(image.grow(Some((3 << 20) + 100)).is_err());
    }

    #[test]
    fn write_errors_have_advice() {
        let said = |errno: Errno, read_only| {
            explain(errno.into(), Path::new("a.img"), read_only).to_string()
        };
        assert_eq!(
            said(Errno::ACCESS, false),
            "no permission to open a.img for writing: give the user of this process access, or \
             set `readonly`"
        );
        let reading = "for reading: give the user of this process access";
        assert!(said(Errno::ACCESS, true).ends_with(reading));
        assert_eq!(said(Errno::ROFS, false), "a.img is on a read-only file system: set `readonly`");
        assert_eq!(said(Errno::NAMETOOLONG, false), "a.img");
    }

    #[test]
    fn no_flush_succeeds_after_a_failed_one() {
        let folder = tempfile::tempdir().unwrap();
        let config = Config::new(sparse(&folder, "disk", 4096));
        let raw = Raw::new(open_locked(&config.path, false).unwrap(), &config).unwrap();
        raw.flush().unwrap();
        let error = raw.flush_failed(Errno::IO.into());
        assert_eq!(Errno::from_io_error(&error), None);
        raw.flush().unwrap_err();
        raw.flush().unwrap_err();
    }

    #[test]
    fn a_flush_without_space_waits_only_if_the_host_keeps_the_data() {
        let folder = tempfile::tempdir().unwrap();
        for errno in [Errno::NOSPC, Errno::DQUOT] {
            for direct in [Direct::Auto, Direct::Off] {
                let config = Config { direct, ..Config::new(sparse(&folder, "disk", 4096)) };
                let raw = Raw::new(open_locked(&config.path, false).unwrap(), &config).unwrap();
                let around = raw.direct.is_some();
                let error = raw.flush_failed(errno.into());
                assert_eq!(Errno::from_io_error(&error), around.then_some(errno));
                assert_eq!(raw.flush().is_ok(), around);
            }
        }
    }
}
