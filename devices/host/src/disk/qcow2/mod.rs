//! qcow2 images, read and written (QEMU's docs/interop/qcow2.rst, versions 2 and 3).
//!
//! Backing files and compressed clusters (deflate) are supported. Internal snapshots, encryption,
//! external data files and extended L2 entries are not: such images are refused with an error that
//! says what to do.
//!
//! Threats: images come from strangers, and the guests of their owners write them. Every number in
//! the file is checked where it is used, and an invalid one fails only that request. The name of a
//! backing file could make us read any file of the host. It is followed only within the image's own
//! folder, after links are resolved, unless the user sets `backing=on`. It is never followed to the
//! network.
//!
//! Why not a library: imago 0.2.6 is the best maintained one, but it writes an L1 entry before the
//! refcount of the table that the entry refers to. A process that is killed in between leaves an
//! image that `qemu-img check` reports as corrupt, and the next start may allocate that cluster
//! again.

mod empty;
mod entry;
mod header;
mod repair;
mod tables;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use anyhow::{Context, bail, ensure};

use super::format::{Format, choose};
use super::medium::{Buffer, Medium, is_full};
use super::raw::{LockedFile, Raw, check_size, open_locked};
use super::{Config, Direct, Geometry};
use entry::{COMPRESSED, COPIED, ZERO, packed_at};
use header::Header;
use tables::{Tables, damaged};

pub use empty::{create, is_written, size};

/// Maximum length of a backing chain, which may be circular.
const MAX_BACKING_FILES: usize = 32;

/// Turns an open, locked file into a disk, and opens its backing files.
///
/// # Errors
///
/// The reason, without the name of the file.
pub(super) fn open(file: LockedFile, config: &Config) -> anyhow::Result<Qcow2> {
    chain(file, config, MAX_BACKING_FILES)
}

fn chain(opened: LockedFile, config: &Config, more: usize) -> anyhow::Result<Qcow2> {
    let writes = !config.is_read_only();
    let mut header = Header::read(&opened.file)?;
    header.check(writes)?;
    check_size(&config.path, header.size, config.sector.bytes())?;
    let backing = match &header.backing {
        Some(name) => Some(backing(name, &header, config, more)?),
        None => None,
    };
    // With small clusters, tables may be smaller than the alignment of direct I/O.
    let small = header.cluster_bits < 12 && config.direct == Direct::Auto;
    let direct = if small { Direct::Off } else { config.direct };
    let raw = Raw::new(opened, &Config { direct, ..config.clone() })?;
    let end = raw.geometry().size;
    if writes && header.autoclear != 0 {
        // A writer that does not support an autoclear feature must clear its bit.
        set_header(&raw, &[(header::AUTOCLEAR, &[0; 8])])?;
        header.autoclear = 0;
    }
    let mut tables = Tables::read(&raw, &header, end)?;
    let marked = writes && header.incompatible & header::DIRTY != 0;
    if marked {
        match tables.free_leaked_clusters(&raw, &header) {
            Ok(0) => {}
            Ok(clusters) => tracing::debug!(
                disk = %config.path.display(),
                clusters,
                "was not closed: freed its leaked clusters"
            ),
            // No space for it now. Leaked clusters do no harm, so a later start can free them.
            Err(error) if is_full(&error) => {}
            Err(error) => {
                return Err(error).context(format!("it was not closed: {}", header::REPAIR_ADVICE));
            }
        }
    }
    Ok(Qcow2 {
        raw,
        marked: AtomicBool::new(marked),
        size: AtomicU64::new(header.size),
        header,
        backing,
        tables: Mutex::new(tables),
        moves: RwLock::new(()),
        inflated: Mutex::default(),
    })
}

/// Opens the backing file of an image for reading.
fn backing(
    name: &str,
    header: &Header,
    config: &Config,
    more: usize,
) -> anyhow::Result<Arc<dyn Medium>> {
    ensure!(more > 0, "more than {MAX_BACKING_FILES} backing files in a chain");
    let path = backing_path(name, config)?;
    let format = match header.backing_format.as_deref() {
        Some("qcow2") => Some(Format::Qcow2),
        Some("raw" | "file") => Some(Format::Raw),
        None => None,
        Some(other) => {
            bail!("its backing file {name} has the format {other}, which is not supported")
        }
    };
    let below = Config { path, format, readonly: true, overlay: false, ..config.clone() };
    let context = || format!("its backing file {}", below.path.display());
    let opened = open_locked(&below.path, true).with_context(context)?;
    Ok(match choose(format, &below.path, &opened.file).with_context(context)? {
        Format::Raw => Arc::new(Raw::new(opened, &below).with_context(context)?),
        Format::Qcow2 => Arc::new(chain(opened, &below, more - 1).with_context(context)?),
    })
}

/// The resolved path of a backing file, if it is allowed.
fn backing_path(name: &str, config: &Config) -> anyhow::Result<PathBuf> {
    let plain = name.strip_prefix("file:").unwrap_or(name);
    let scheme = plain.split('/').next().is_some_and(|first| first.contains(':'));
    ensure!(!scheme, "its backing file {name} is not a file, and only files are supported");
    let image = config.path.canonicalize().with_context(|| config.path.display().to_string())?;
    let folder = image.parent().unwrap_or(Path::new("/"));
    // An absolute name replaces the folder.
    let wanted = folder.join(plain);
    let context = || format!("its backing file {}", wanted.display());
    let path = wanted.canonicalize().with_context(context)?;
    ensure!(
        config.backing || path.parent() == Some(folder),
        "its backing file {name} is not in its own folder: set `backing=on` if you trust the image"
    );
    Ok(path)
}

/// Changes the header within its first sector.
fn change_header(raw: &Raw, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
    let mut buffer = Buffer::default();
    let length = raw.direct().map_or(512, |it| usize::try_from(it.length).unwrap_or(4096)).max(512);
    let sector = buffer.take(length);
    raw.read(sector, 0)?;
    change(sector);
    raw.write(sector, 0, false)?;
    raw.flush()
}

/// Writes fields of the header.
fn set_header(raw: &Raw, fields: &[(usize, &[u8])]) -> io::Result<()> {
    change_header(raw, |sector| {
        for (at, bytes) in fields {
            sector[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
    })
}

/// An open, locked image.
pub(super) struct Qcow2 {
    raw: Raw,
    header: Header,
    size: AtomicU64,
    backing: Option<Arc<dyn Medium>>,
    tables: Mutex<Tables>,
    /// Held shared while clusters stay in place, and exclusively while their allocation changes.
    /// So a cluster is never reallocated while it is read or written in place.
    moves: RwLock<()>,
    /// Whether the dirty bit is set in the file.
    marked: AtomicBool,
    /// The compressed cluster that was read last: its entry, and its content.
    inflated: Mutex<Option<(u64, Vec<u8>)>>,
}

/// Where the data of a part of one cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    /// In the file, at this offset. `in_place`: nothing else refers to the cluster.
    File { at: u64, in_place: bool },
    /// Nowhere: it reads as zeros.
    Zeros,
    /// In the backing file. Without one, it reads as zeros.
    Below,
    /// In a compressed cluster. The value is its table entry.
    Packed(u64),
}

/// The part of a request that is within one cluster.
#[derive(Clone, Copy)]
struct Part {
    /// Offset on the disk.
    offset: u64,
    /// Offset in the buffer.
    at: usize,
    length: usize,
}

impl Qcow2 {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets or clears the dirty bit in the file.
    fn mark(&self, on: bool) -> io::Result<()> {
        if !self.header.is_marked() || self.marked.load(Ordering::Relaxed) == on {
            return Ok(());
        }
        // The number is big endian: its lowest bits are in the last byte.
        let bit = header::DIRTY.to_be_bytes()[7];
        change_header(&self.raw, |sector| {
            let byte = &mut sector[header::INCOMPATIBLE + 7];
            *byte = if on { *byte | bit } else { *byte & !bit };
        })?;
        self.marked.store(on, Ordering::Relaxed);
        Ok(())
    }

    fn cluster(&self) -> u64 {
        1 << self.header.cluster_bits
    }

    /// Splits a range at cluster boundaries.
    fn parts(&self, offset: u64, length: usize) -> impl Iterator<Item = Part> + use<> {
        let cluster = self.cluster();
        let mut at = 0;
        std::iter::from_fn(move || {
            let here = offset + at as u64;
            let rest = usize::try_from(cluster - here % cluster).unwrap_or(usize::MAX);
            let part = Part { offset: here, at, length: rest.min(length - at) };
            at += part.length;
            (part.length > 0).then_some(part)
        })
    }

    fn locate(&self, tables: &mut Tables, part: Part) -> io::Result<Location> {
        let entry = tables.entry(&self.raw, part.offset)?;
        if entry & COMPRESSED != 0 {
            return Ok(Location::Packed(entry));
        }
        if entry & ZERO != 0 && self.header.version == 3 {
            return Ok(Location::Zeros);
        }
        Ok(match tables.data_at(entry)? {
            Some(at) => {
                let at = at + part.offset % self.cluster();
                Location::File { at, in_place: entry & COPIED != 0 }
            }
            None => Location::Below,
        })
    }

    fn read_part(&self, location: Location, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match location {
            Location::File { at, .. } => self.raw.read(buffer, at),
            Location::Zeros => {
                buffer.fill(0);
                Ok(())
            }
            Location::Below => self.read_below(buffer, offset),
            Location::Packed(entry) => self.read_packed(entry, buffer, offset),
        }
    }

    fn read_below(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let there = self.backing.as_ref().map_or(0, |it| it.geometry().size.saturating_sub(offset));
        let there = usize::try_from(there).map_or(buffer.len(), |it| it.min(buffer.len()));
        let (within, beyond) = buffer.split_at_mut(there);
        beyond.fill(0);
        match &self.backing {
            Some(backing) if !within.is_empty() => backing.read(within, offset),
            _ => Ok(()),
        }
    }

    fn read_packed(&self, entry: u64, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let cluster = usize::try_from(self.cluster()).unwrap_or_default();
        let start = usize::try_from(offset % self.cluster()).unwrap_or_default();
        let mut inflated = self.inflated.lock().unwrap_or_else(PoisonError::into_inner);
        if inflated.as_ref().is_none_or(|(of, _)| *of != entry) {
            let (at, length) = packed_at(entry, self.header.cluster_bits);
            // Direct I/O needs whole blocks around the compressed data.
            let first = at - at % 4096;
            let skip = usize::try_from(at - first).unwrap_or_default();
            let mut packed = Buffer::default();
            let packed = packed.take((skip + length).next_multiple_of(4096));
            self.raw.read(packed, first)?;
            let mut plain = vec![0; cluster];
            let packed = std::iter::once(&packed[skip..skip + length]);
            let count = miniz_oxide::inflate::decompress_slice_iter_to_slice(
                &mut plain, packed, false, true,
            );
            if count != Ok(cluster) {
                return Err(damaged("an invalid compressed cluster"));
            }
            *inflated = Some((entry, plain));
        }
        let Some((_, plain)) = inflated.as_ref() else { return Ok(()) };
        buffer.copy_from_slice(&plain[start..start + buffer.len()]);
        Ok(())
    }

    /// Reads or writes all parts in place. Returns `None` for a write to a cluster that first has
    /// to be allocated.
    fn in_place(
        &self,
        parts: impl Iterator<Item = Part>,
        mut transfer: impl FnMut(Location, Part) -> io::Result<()>,
        writes: bool,
    ) -> io::Result<Option<()>> {
        let _stay = self.moves.read().unwrap_or_else(PoisonError::into_inner);
        let mut run: Option<(Location, Part)> = None;
        let mut runs = Vec::new();
        let mut tables = self.tables();
        for part in parts {
            let location = self.locate(&mut tables, part)?;
            if writes && !matches!(location, Location::File { in_place: true, .. }) {
                return Ok(None);
            }
            match (&mut run, location) {
                (Some((Location::File { at, .. }, first)), Location::File { at: next, .. })
                    if *at + first.length as u64 == next =>
                {
                    first.length += part.length;
                }
                _ => runs.extend(run.replace((location, part))),
            }
        }
        drop(tables);
        runs.extend(run);
        for (location, part) in runs {
            transfer(location, part)?;
        }
        Ok(Some(()))
    }

    /// Writes a part of a cluster, which it allocates first if necessary.
    fn write_anew(&self, tables: &mut Tables, part: Part, bytes: &[u8]) -> io::Result<()> {
        let (cluster, offset) = (self.cluster(), part.offset);
        let location = self.locate(tables, part)?;
        if let Location::File { at, in_place: true } = location {
            return self.raw.write(bytes, at, false);
        }
        self.mark(true)?;
        tables.checkpoint_if_full(&self.raw)?;
        let old = tables.entry(&self.raw, offset)?;
        let at = tables.allocate(&self.raw)?;
        let start = offset - offset % cluster;
        let fresh = at >= tables.end && self.reads_zeros(location);
        // This comes before the write, because a write that fails may have written a part.
        tables.end = tables.end.max(at + cluster);
        let written = if fresh || bytes.len() as u64 == cluster {
            // The rest of the cluster is zeros because the file was never that long, or there is no
            // rest.
            self.raw.write(bytes, at + (offset - start), false)
        } else {
            let mut buffer = Buffer::default();
            let whole = buffer.take(usize::try_from(cluster).unwrap_or_default());
            let location = match location {
                Location::File { at, in_place } => {
                    Location::File { at: at - (offset - start), in_place }
                }
                other => other,
            };
            let inside = usize::try_from(offset - start).unwrap_or_default();
            self.read_part(location, whole, start).and_then(|()| {
                whole[inside..inside + bytes.len()].copy_from_slice(bytes);
                self.raw.write(whole, at, false)
            })
        };
        let mapped = written.and_then(|()| tables.set_entry(&self.raw, offset, at | COPIED));
        if let Err(error) = mapped {
            // Nothing refers to the cluster, so its content does not matter.
            tables.undo_allocation(&self.raw, at)?;
            return Err(error);
        }
        self.release(tables, old)
    }

    fn reads_zeros(&self, location: Location) -> bool {
        location == Location::Zeros || (location == Location::Below && self.backing.is_none())
    }

    /// Frees the clusters of an old entry, which no table in memory contains any more.
    fn release(&self, tables: &mut Tables, entry: u64) -> io::Result<()> {
        if entry & COMPRESSED != 0 {
            let (at, length) = packed_at(entry, self.header.cluster_bits);
            let mut cluster = at - at % self.cluster();
            while cluster < at + length as u64 {
                tables.release(cluster);
                cluster += self.cluster();
            }
            *self.inflated.lock().unwrap_or_else(PoisonError::into_inner) = None;
        } else if let Some(at) = tables.data_at(entry)? {
            tables.release(at);
        }
        Ok(())
    }

    /// The new entry of a cluster that is to read as zeros. `None` if zeros have to be written.
    fn zeroed(&self, entry: u64, keep: bool) -> Option<u64> {
        let plain = entry & COMPRESSED == 0 && entry & COPIED != 0;
        match (self.header.version, &self.backing) {
            (3, _) if keep && plain => Some(entry | ZERO),
            (_, None) => Some(0),
            (3, Some(_)) => Some(ZERO),
            _ => None,
        }
    }

    /// Clears whole clusters. Returns the parts of clusters that still have to be written.
    fn clear(&self, offset: u64, length: u64, keep: bool) -> io::Result<Vec<Part>> {
        let _alone = self.moves.write().unwrap_or_else(PoisonError::into_inner);
        let mut tables = self.tables();
        let (cluster, size) = (self.cluster(), self.size.load(Ordering::Acquire));
        let mut rest = Vec::new();
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let next = (at - at % cluster + cluster).min(end);
            // The disk may end within its last cluster.
            let whole =
                at.is_multiple_of(cluster) && (next.is_multiple_of(cluster) || next == size);
            let part = Part { offset: at, at: 0, length: usize::try_from(next - at).unwrap_or(0) };
            let location = self.locate(&mut tables, part)?;
            let entry = tables.entry(&self.raw, at)?;
            match self.zeroed(entry, keep).filter(|_| whole) {
                _ if self.reads_zeros(location) && (keep || tables.data_at(entry)?.is_none()) => {}
                Some(new) => {
                    self.mark(true)?;
                    tables.checkpoint_if_full(&self.raw)?;
                    tables.set_entry(&self.raw, at, new)?;
                    if new & !(ZERO | COPIED) == 0 {
                        self.release(&mut tables, entry)?;
                    }
                }
                None => rest.push(part),
            }
            at = next;
        }
        Ok(rest)
    }
}

impl Drop for Qcow2 {
    /// Not needed for the safety of completed requests. It avoids the leaked clusters that a kill
    /// leaves.
    fn drop(&mut self) {
        // The second flush frees the clusters that the first one released.
        if self.flush().and_then(|()| self.flush()).is_ok() {
            self.mark(false).ok();
        }
    }
}

impl Medium for Qcow2 {
    fn geometry(&self) -> Geometry {
        let raw = self.raw.geometry();
        let unit = u32::try_from(self.cluster()).unwrap_or_default();
        let discard = if raw.discard > 0 { unit.max(raw.logical_block) } else { 0 };
        Geometry { size: self.size.load(Ordering::Acquire), discard, ..raw }
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        // As a backing file, it may be asked for more than its size.
        let size = self.size.load(Ordering::Acquire).saturating_sub(offset);
        let there = usize::try_from(size).map_or(buffer.len(), |it| it.min(buffer.len()));
        buffer[there..].fill(0);
        let read = |location: Location, part: Part| {
            self.read_part(location, &mut buffer[part.at..part.at + part.length], part.offset)
        };
        self.in_place(self.parts(offset, there), read, false).map(|_| ())
    }

    fn write(&self, buffer: &[u8], offset: u64, durable: bool) -> io::Result<()> {
        let write = |location: Location, part: Part| match location {
            Location::File { at, .. } => {
                self.raw.write(&buffer[part.at..part.at + part.length], at, false)
            }
            _ => Err(damaged("a cluster that moved")),
        };
        if self.in_place(self.parts(offset, buffer.len()), write, true)?.is_none() {
            let _alone = self.moves.write().unwrap_or_else(PoisonError::into_inner);
            let mut tables = self.tables();
            for part in self.parts(offset, buffer.len()) {
                let bytes = &buffer[part.at..part.at + part.length];
                self.write_anew(&mut tables, part, bytes)?;
            }
        }
        if durable { self.flush() } else { Ok(()) }
    }

    fn flush(&self) -> io::Result<()> {
        if self.raw.geometry().read_only {
            return Ok(());
        }
        let _alone = self.moves.write().unwrap_or_else(PoisonError::into_inner);
        self.tables().checkpoint(&self.raw)
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        if self.raw.geometry().discard > 0 {
            // Partial clusters keep their content.
            self.clear(offset, length, false)?;
        }
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
        let keep = !unmap || self.raw.geometry().discard == 0;
        let rest = self.clear(offset, length, keep)?;
        let mut buffer = Buffer::default();
        for part in rest {
            let zeros = buffer.take(part.length);
            zeros.fill(0);
            self.write(zeros, part.offset, false)?;
        }
        Ok(())
    }

    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        let size = size.context("a qcow2 image does not grow with its file: give a size")?;
        let now = self.size.load(Ordering::Acquire);
        ensure!(size >= now, "the disk has {now} bytes and cannot shrink to {size}");
        check_size(Path::new("the disk"), size, self.raw.geometry().logical_block)?;
        ensure!(!self.raw.geometry().read_only, "the disk is opened read-only");
        let below = self.backing.as_ref().map_or(0, |it| it.geometry().size);
        ensure!(
            below <= now,
            "its backing file is larger and would show: `qemu-img resize` the image while no \
             machine uses it"
        );
        let _alone = self.moves.write().unwrap_or_else(PoisonError::into_inner);
        let mut tables = self.tables();
        let entries = tables.extend(&self.raw, size).context("a longer L1 table")?.context(
            "its L1 table has no room for this size: `qemu-img resize` it while no machine uses it",
        )?;
        let fields: [(usize, &[u8]); 2] =
            [(header::SIZE, &size.to_be_bytes()), (header::L1_SIZE, &entries.to_be_bytes())];
        set_header(&self.raw, &fields).context("its header")?;
        self.size.fetch_max(size, Ordering::AcqRel);
        Ok(())
    }
}

/// An image that records its writes, for tests of power loss.
#[cfg(test)]
pub(super) fn journaled(
    path: &Path,
) -> (Arc<dyn super::Image>, impl Fn() -> Vec<super::raw::Event>) {
    let config = Config { direct: Direct::Off, ..Config::new(path) };
    let mut image = open(open_locked(path, false).unwrap(), &config).unwrap();
    image.raw.journal = Some(Mutex::default());
    let image = Arc::new(image);
    let noted = image.clone();
    let journal = move || noted.raw.journal.as_ref().unwrap().lock().unwrap().clone();
    (Arc::new(super::threads::Threaded::new("qcow2", image, 1)), journal)
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::super::driver::Driver;
    use super::super::rehearsal::{check, create, qemu_img, retry_while_locked};
    use super::super::{Fault, Image, Operation, open as open_disk};
    use super::*;
    use crate::size::Size;
    use crate::testutil::noise::Noise;

    fn refusal(path: &Path) -> String {
        let Err(error) = open_disk(&Config::new(path), None) else { panic!("{path:?} was opened") };
        format!("{error:#}")
    }

    #[test]
    fn follows_backing_files_in_its_own_folder_only_unless_told_to() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("follows_backing_files_in_its_own_folder_only_unless_told_to") {
            return;
        }
        let (inner, secret) = (folder.path().join("images"), folder.path().join("secret.raw"));
        fs::create_dir(&inner).unwrap();
        fs::write(&secret, [0x55; 4096]).unwrap();
        let image = inner.join("disk.qcow2");
        std::os::unix::fs::symlink(&secret, inner.join("link.raw")).unwrap();
        let absolute = secret.to_str().unwrap().to_owned();
        for name in [absolute.as_str(), "../secret.raw", "link.raw"] {
            create(&image, &["-u", "-b", name, "-F", "raw"], "1M");
            let said = refusal(&image);
            assert!(said.contains("is not in its own folder: set `backing=on`"), "{said}");
            let config = Config { backing: true, ..Config::new(&image) };
            let disk = open_disk(&config, None).unwrap();
            assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [0x55; 512]);
        }
        fs::write(inner.join("near.raw"), [0x66; 4096]).unwrap();
        for name in ["near.raw", "./near.raw", inner.join("near.raw").to_str().unwrap()] {
            create(&image, &["-u", "-b", name, "-F", "raw"], "1M");
            let disk = open_disk(&Config::new(&image), None).unwrap();
            let mut driver = Driver::new(&disk);
            assert_eq!(driver.read(0, 512).unwrap(), [0x66; 512]);
            // A writer to the backing file would change the disk above it.
            let said = refusal(&inner.join("near.raw"));
            assert!(said.contains("is in use by"), "{said}");
            driver.write(0, &[1; 512]).unwrap();
            assert_eq!(fs::read(inner.join("near.raw")).unwrap(), [0x66; 4096]);
        }
        for name in ["nbd://10.0.0.1/x", "json:{}", "https://example.org/x.qcow2"] {
            create(&image, &["-u", "-b", name, "-F", "raw"], "1M");
            assert!(refusal(&image).contains("is not a file"), "{}", refusal(&image));
        }
        create(&image, &["-u", "-b", "gone.raw", "-F", "raw"], "1M");
        assert!(refusal(&image).contains("gone.raw"), "{}", refusal(&image));
        // Without a format, the name decides that it is raw. Bytes that its guest wrote cannot make
        // it qcow2.
        create(&image, &["-u", "-b", "near.raw", "-F", "raw"], "1M");
        let mut bytes = fs::read(&image).unwrap();
        let format = [0xe2, 0x79, 0x2a, 0xca];
        let at = bytes.windows(4).position(|it| it == format).unwrap();
        // An extension of unknown type.
        bytes[at] = 0x01;
        fs::write(&image, bytes).unwrap();
        fs::write(inner.join("near.raw"), b"QFI\xfb\0\0\0\x03").unwrap();
        assert!(refusal(&image).contains("begins like a qcow2 image"), "{}", refusal(&image));
    }

    #[test]
    fn a_ring_of_backing_files_ends() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("a_ring_of_backing_files_ends") {
            return;
        }
        let (one, two) = (folder.path().join("one.qcow2"), folder.path().join("two.qcow2"));
        create(&one, &["-u", "-b", "two.qcow2", "-F", "qcow2"], "1M");
        create(&two, &["-u", "-b", "one.qcow2", "-F", "qcow2"], "1M");
        assert!(refusal(&one).contains("in use by"), "{}", refusal(&one));
        let config = Config { readonly: true, ..Config::new(&one) };
        let said = format!("{:#}", open_disk(&config, None).err().unwrap());
        assert!(said.contains("more than 32 backing files"), "{said}");
    }

    #[test]
    fn refuses_what_it_does_not_know_and_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("refuses_what_it_does_not_know_and_says_what_to_do") {
            return;
        }
        let image = folder.path().join("disk.qcow2");
        for (options, said) in [
            ("extended_l2=on", "extended L2"),
            ("data_file=other.raw", "its data is in another file"),
            ("compression_type=zstd", "zstd"),
            ("refcount_bits=64", "have 64 bits"),
        ] {
            let mut command = std::process::Command::new("qemu-img");
            command.args(["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", "1M"]);
            assert!(retry_while_locked(command.current_dir(folder.path())).status.success());
            assert!(refusal(&image).contains(said), "{options}: {}", refusal(&image));
        }
        create(&image, &[], "1M");
        let snapshot = ["snapshot", "-c", "one"];
        let mut command = std::process::Command::new("qemu-img");
        assert!(retry_while_locked(command.args(snapshot).arg(&image)).status.success());
        assert!(refusal(&image).contains("has 1 snapshots"), "{}", refusal(&image));
        open_disk(&Config { readonly: true, ..Config::new(&image) }, None).unwrap();
        // Marked dirty with refcounts that are too low (lazy refcounts), or marked corrupt.
        create(&image, &[], "1M");
        let mut bytes = fs::read(&image).unwrap();
        let number = |bytes: &[u8], at| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        let table = usize::try_from(number(&bytes, 48)).unwrap();
        let block = usize::try_from(number(&bytes, table)).unwrap();
        bytes[block..block + 2].fill(0);
        for bit in [1, 2] {
            bytes[79] = bit;
            fs::write(&image, &bytes).unwrap();
            assert!(refusal(&image).contains("`qemu-img check -r all`"), "{}", refusal(&image));
            assert!(fs::read(&image).unwrap() == bytes, "it was changed");
        }
        fs::write(&image, &bytes[..60]).unwrap();
        assert!(refusal(&image).contains("is cut off"), "{}", refusal(&image));
    }

    #[test]
    fn what_a_kill_left_to_nobody_is_free_again() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("what_a_kill_left_to_nobody_is_free_again") {
            return;
        }
        let (path, killed) = (folder.path().join("disk.qcow2"), folder.path().join("killed.qcow2"));
        create(&path, &["-o", "cluster_size=4096"], "8M");
        let disk = open_disk(&Config::new(&path), None).unwrap();
        let mut driver = Driver::new(&disk);
        driver.write(0, &[1; 64 << 10]).unwrap();
        driver.flush().unwrap();
        driver.execute(Operation::Discard, 0, 32 << 10, &[]).unwrap();
        // Released clusters stay counted until the second flush.
        driver.flush().unwrap();
        fs::copy(&path, &killed).unwrap();
        assert!(check(&killed).contains("8 leaked clusters"), "{}", check(&killed));
        drop((driver, disk));
        let marked = |path: &Path| fs::read(path).unwrap()[79] & 1 == 1;
        assert!(marked(&killed) && !marked(&path));
        let reader = open_disk(&Config { readonly: true, ..Config::new(&killed) }, None).unwrap();
        assert_eq!(Driver::new(&reader).read(32 << 10, 512).unwrap(), [1; 512]);
        drop(reader);
        assert!(marked(&killed), "a reader changes nothing");
        drop(open_disk(&Config::new(&killed), None).unwrap());
        assert!(!marked(&killed) && !check(&killed).contains("leaked"), "{}", check(&killed));
        let disk = open_disk(&Config::new(&killed), None).unwrap();
        let mut driver = Driver::new(&disk);
        assert_eq!(driver.read(32 << 10, 512).unwrap(), [1; 512]);
        driver.write(1 << 20, &[2; 4096]).unwrap();
        drop((driver, disk));
        assert!(!marked(&killed) && !check(&killed).contains("leaked"), "{}", check(&killed));
    }

    #[test]
    fn grows_within_its_table_while_it_is_used() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("grows_within_its_table_while_it_is_used") {
            return;
        }
        let path = folder.path().join("disk.qcow2");
        create(&path, &["-o", "cluster_size=4096"], "1M");
        let disk = open_disk(&Config::new(&path), None).unwrap();
        let mut driver = Driver::new(&disk);
        driver.write((1 << 20) - 512, &[1; 512]).unwrap();
        assert_eq!(driver.read(1 << 20, 512), Err(Fault::Refused));
        assert!(disk.grow(None).is_err(), "the file is not as long as the disk");
        disk.grow(Some(9 << 20)).unwrap();
        assert_eq!(disk.geometry().size, 9 << 20);
        assert_eq!(driver.read(1 << 20, 4096).unwrap(), [0; 4096]);
        driver.write((9 << 20) - 512, &[2; 512]).unwrap();
        assert!(disk.grow(Some(1 << 20)).is_err() && disk.grow(Some((9 << 20) + 1)).is_err());
        drop((driver, disk));
        check(&path);
        let disk = open_disk(&Config::new(&path), None).unwrap();
        assert_eq!(disk.geometry().size, 9 << 20);
        assert_eq!(Driver::new(&disk).read((9 << 20) - 512, 512).unwrap(), [2; 512]);
        drop(disk);
        // It also grows at start, and a larger image keeps its size.
        for (said, is) in [(10 << 20, 10 << 20), (1 << 20, 10 << 20)] {
            let config = Config { size: Some(Size(said)), ..Config::new(&path) };
            assert_eq!(open_disk(&config, None).unwrap().geometry().size, is);
        }
        check(&path);
        create(&path, &["-o", "cluster_size=512"], "1M");
        let disk = open_disk(&Config::new(&path), None).unwrap();
        let said = format!("{:#}", disk.grow(Some(9 << 20)).unwrap_err());
        assert!(said.contains("`qemu-img resize`"), "{said}");
        drop(disk);
        let below = folder.path().join("below.raw");
        fs::write(below, vec![3; 2 << 20]).unwrap();
        create(&path, &["-b", "below.raw", "-F", "raw"], "1M");
        let disk = open_disk(&Config::new(&path), None).unwrap();
        let said = disk.grow(Some(9 << 20)).unwrap_err().to_string();
        assert!(said.contains("its backing file is larger"), "{said}");
    }

    /// Every request on an invalid image must end with an answer. Returns whether it could be
    /// opened.
    fn torment(path: &Path) -> bool {
        let Ok(disk) = open_disk(&Config { discard: false, ..Config::new(path) }, None) else {
            return false;
        };
        let size = disk.geometry().size;
        let mut driver = Driver::new(&disk);
        let zero = Operation::WriteZeroes { unmap: true };
        let end = (size - 512).min(3 << 20) / 512 * 512;
        for at in [0, 65536, 1 << 20, end] {
            if at + 512 > size {
                continue;
            }
            let found = [
                driver.read(at, 512).map(|_| ()),
                driver.write(at, &[3; 512]),
                driver.execute(zero, at, 512, &[]),
                driver.flush(),
            ];
            for answer in found {
                assert!(matches!(answer, Ok(()) | Err(Fault::Broken)), "{answer:?}");
            }
        }
        true
    }

    #[test]
    fn torn_and_hostile_images_never_panic() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("torn_and_hostile_images_never_panic") {
            return;
        }
        let source = folder.path().join("source.raw");
        let noise: Vec<u8> = (0..4_u32 << 20).map(|it| (it / 700).to_le_bytes()[0]).collect();
        fs::write(&source, noise).unwrap();
        let mut opened = 0;
        for (kind, options) in [("", "cluster_size=4096"), ("-c", "cluster_size=65536")] {
            let whole = folder.path().join("whole.qcow2");
            let mut convert = std::process::Command::new("qemu-img");
            convert.args(["convert", "-f", "raw", "-O", "qcow2", "-o", options]);
            convert.args(Some(kind).filter(|it| !it.is_empty())).arg(&source).arg(&whole);
            assert!(convert.status().unwrap().success());
            let bytes = fs::read(&whole).unwrap();
            let victim = folder.path().join("victim.qcow2");
            let mut dice = Noise::new(11);
            for _ in 0..250 {
                let mut torn = bytes.clone();
                // Damages the header, the tables behind it, or any place: a bit, a byte, or a
                // number.
                for _ in 0..=dice.below(4) {
                    let within = [112, 112, 300_000, torn.len() as u64];
                    let within = within[usize::try_from(dice.below(4)).unwrap()];
                    let at = usize::try_from(dice.below(within)).unwrap().min(torn.len() - 8);
                    match dice.below(4) {
                        0 => torn[at] ^= 1 << dice.below(8),
                        1 => torn[at] = dice.below(256).to_le_bytes()[0],
                        2 => torn[at..at + 8].fill(0xff),
                        _ => {
                            let length = usize::try_from(dice.below(torn.len() as u64)).unwrap();
                            torn.truncate(length.max(4096));
                        }
                    }
                }
                fs::write(&victim, &torn).unwrap();
                opened += usize::from(torment(&victim));
            }
        }
        assert!(opened > 100, "{opened}");
    }

    #[test]
    fn tables_that_lie_about_places_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("tables_that_lie_about_places_are_errors") {
            return;
        }
        let path = folder.path().join("disk.qcow2");
        create(&path, &[], "1M");
        let disk = open_disk(&Config::new(&path), None).unwrap();
        Driver::new(&disk).write(0, &[1; 512]).unwrap();
        drop(disk);
        check(&path);
        let bytes = fs::read(&path).unwrap();
        let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        let l1 = usize::try_from(number(header::L1_OFFSET)).unwrap();
        let l2 = usize::try_from(number(l1) & !COPIED).unwrap();
        for (at, entry) in [
            // Behind the end of the file, not aligned to a cluster, and compressed data that is
            // invalid.
            (l1, COPIED | 1 << 50),
            (l1, COPIED | 0x200),
            (l2, COPIED | 0x200),
            (l2, COMPRESSED | 1 << 40),
            (l2, COMPRESSED | 0x50000),
        ] {
            let mut lies = bytes.clone();
            lies[at..at + 8].copy_from_slice(&entry.to_be_bytes());
            fs::write(&path, lies).unwrap();
            let disk: Arc<dyn Image> = open_disk(&Config::new(&path), None).unwrap();
            assert_eq!(Driver::new(&disk).read(0, 512), Err(Fault::Broken), "{entry:#x}");
        }
        // All refcounts are zero: the next cluster to be allocated would be the header.
        let block = usize::try_from(number(usize::try_from(number(48)).unwrap())).unwrap();
        let mut lies = bytes.clone();
        lies[block..block + 64].fill(0);
        fs::write(&path, lies).unwrap();
        let disk: Arc<dyn Image> = open_disk(&Config::new(&path), None).unwrap();
        assert_eq!(Driver::new(&disk).write(65536, &[1; 512]), Err(Fault::Broken));
        assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [1; 512]);
    }

    /// An image with one L2 table and one data cluster. Returns its bytes, and a function that
    /// reads a number at an offset.
    fn written(path: &Path) -> (Vec<u8>, impl Fn(usize) -> u64 + use<>) {
        create(path, &[], "1M");
        let disk = open_disk(&Config::new(path), None).unwrap();
        Driver::new(&disk).write(0, &[1; 512]).unwrap();
        drop(disk);
        let bytes = fs::read(path).unwrap();
        let copy = bytes.clone();
        (bytes, move |at| u64::from_be_bytes(copy[at..at + 8].try_into().unwrap()))
    }

    #[test]
    fn no_entry_makes_a_guest_erase_or_write_the_header() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("no_entry_makes_a_guest_erase_or_write_the_header") {
            return;
        }
        let path = folder.path().join("disk.qcow2");
        let (bytes, number) = written(&path);
        let reftable = usize::try_from(number(48)).unwrap();
        let l1 = usize::try_from(number(header::L1_OFFSET)).unwrap();
        let l2 = usize::try_from(number(l1) & !COPIED).unwrap();
        // First, the header as a compressed cluster, which would be freed when the guest overwrites
        // it. Second, no refcount block for the first clusters, which would be created in the
        // header's place.
        for (at, entry, answer) in [(l2, COMPRESSED, Ok(())), (reftable, 0, Err(Fault::Broken))] {
            let mut lies = bytes.clone();
            lies[at..at + 8].copy_from_slice(&entry.to_be_bytes());
            fs::write(&path, lies).unwrap();
            let disk: Arc<dyn Image> = open_disk(&Config::new(&path), None).unwrap();
            let mut driver = Driver::new(&disk);
            assert_eq!(driver.write(0, &[2; 65536]).and(driver.write(65536, &[2; 512])), answer);
            (0..2).for_each(|_| driver.flush().unwrap());
            drop((driver, disk));
            assert!(fs::read(&path).unwrap()[..512] == bytes[..512], "{entry:#x} at {at:#x}");
        }
    }

    #[test]
    fn refuses_to_count_one_table_again_and_again() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("refuses_to_count_one_table_again_and_again") {
            return;
        }
        let path = folder.path().join("disk.qcow2");
        // With a clean image, and with one whose references are counted because it is marked dirty.
        for mark in [0, 1] {
            let (mut bytes, number) = written(&path);
            bytes[79] = mark;
            let l1 = usize::try_from(number(header::L1_OFFSET)).unwrap();
            // The table's cluster has room for three entries.
            bytes[header::L1_SIZE..][..4].copy_from_slice(&3_u32.to_be_bytes());
            bytes.copy_within(l1..l1 + 8, l1 + 16);
            fs::write(&path, bytes).unwrap();
            assert!(refusal(&path).contains("is there twice"), "{}", refusal(&path));
            let config = Config { readonly: true, ..Config::new(&path) };
            let disk = open_disk(&config, None).unwrap();
            assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [1; 512]);
        }
    }

    #[test]
    fn takes_tables_that_are_longer_than_the_disk_needs() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("takes_tables_that_are_longer_than_the_disk_needs") {
            return;
        }
        let path = folder.path().join("disk.qcow2");
        let run = |words: &[&str]| {
            let mut command = std::process::Command::new("qemu-img");
            let done = retry_while_locked(command.args(words).current_dir(folder.path()));
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        };
        for went_back in [false, true] {
            // Neither shrinking nor reverting to a snapshot makes the table shorter.
            create(&path, &["-o", "cluster_size=512"], if went_back { "1M" } else { "16M" });
            if went_back {
                run(&["snapshot", "-c", "one", "disk.qcow2"]);
                run(&["resize", "-q", "disk.qcow2", "16M"]);
                run(&["snapshot", "-a", "one", "disk.qcow2"]);
                run(&["snapshot", "-d", "one", "disk.qcow2"]);
            } else {
                run(&["resize", "-q", "--shrink", "disk.qcow2", "1M"]);
            }
            let mut bytes = fs::read(&path).unwrap();
            let entries = u32::from_be_bytes(bytes[header::L1_SIZE..][..4].try_into().unwrap());
            assert_eq!(entries, 16 << 20 >> 15, "went back: {went_back}");
            bytes[79] = 1;
            fs::write(&path, bytes).unwrap();
            let disk = open_disk(&Config::new(&path), None).unwrap();
            assert_eq!(disk.geometry().size, 1 << 20);
            Driver::new(&disk).write((1 << 20) - 512, &[1; 512]).unwrap();
            drop(disk);
            assert!(!check(&path).contains("leaked"), "{}", check(&path));
        }
    }

    /// The variable that names the image which the child process of a test opens.
    const CHILD: &str = "TRANSOM_TEST_COUNTS";

    /// Peak memory of this process, in bytes.
    fn peak() -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|it| it.strip_prefix("VmHWM:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    #[test]
    fn counts_of_what_is_not_there_cost_no_memory() {
        let test = "counts_of_what_is_not_there_cost_no_memory";
        if let Some(path) = std::env::var_os(CHILD) {
            let before = peak();
            drop(open_disk(&Config::new(PathBuf::from(path)), None).unwrap());
            let more = peak() - before;
            assert!(more < 64 << 20, "{more} bytes more");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img(test) {
            return;
        }
        let path = folder.path().join("disk.qcow2");
        let (mut bytes, number) = written(&path);
        bytes[79] = 1;
        // Refcount blocks that count each cluster of 2 TiB once, although the file has only a few
        // of them.
        let blocks = 1 << 10;
        let reftable = usize::try_from(number(48)).unwrap();
        let first = usize::try_from(number(reftable)).unwrap();
        for block in 1..blocks {
            let at = bytes.len().next_multiple_of(1 << 16);
            bytes[reftable + 8 * block..][..8].copy_from_slice(&(at as u64).to_be_bytes());
            bytes.resize(at, 0);
            bytes.extend([0, 1].repeat(1 << 15));
        }
        bytes[first..first + (1 << 16)].copy_from_slice(&[0, 1].repeat(1 << 15));
        fs::write(&path, bytes).unwrap();
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", &format!("disk::qcow2::test::{test}")]);
        let ended = child.env(CHILD, &path).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
        assert!(!check(&path).contains("leaked"), "{}", check(&path));
        let disk = open_disk(&Config::new(&path), None).unwrap();
        assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [1; 512]);
        Driver::new(&disk).write(65536, &[2; 65536]).unwrap();
        drop(disk);
        assert!(!check(&path).contains("leaked"), "{}", check(&path));
        assert!(
            fs::metadata(&path).unwrap().len() < 1 << 28,
            "the lowest free clusters are used first"
        );
    }

    #[test]
    fn refuses_to_search_one_refcount_block_again_and_again() {
        let folder = tempfile::tempdir().unwrap();
        if !qemu_img("refuses_to_search_one_refcount_block_again_and_again") {
            return;
        }
        let path = folder.path().join("disk.qcow2");
        let (mut bytes, number) = written(&path);
        let reftable = usize::try_from(number(48)).unwrap();
        bytes.copy_within(reftable..reftable + 8, reftable + 80);
        fs::write(&path, bytes).unwrap();
        assert!(
            refusal(&path).contains("refcount block that is there twice"),
            "{}",
            refusal(&path)
        );
        let config = Config { readonly: true, ..Config::new(&path) };
        let disk = open_disk(&config, None).unwrap();
        assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [1; 512]);
    }
}
