//! qcow2 images, read and written (QEMU's docs/interop/qcow2.rst, versions 2 and 3).
//!
//! Backing files and compressed clusters (deflate) are supported. Internal snapshots, encryption,
//! external data files and extended L2 entries are not: such images are refused with an error that
//! says what to do.
//!
//! Threats: images come from strangers, and the guests of their owners write them. Every number in
//! the file is checked where it is used, and an invalid one fails only that request. The name of a
//! backing file is followed by the rules of [`BackingFile`].
//!
//! Why not a library: imago 0.2.6 is the best maintained one, but it writes an L1 entry before the
//! refcount of the table that the entry refers to. A process that is killed in between leaves an
//! image that `qemu-img check` reports as corrupt, and the next start may allocate that cluster
//! again.

mod clear;
mod empty;
mod entry;
mod header;
mod peek;
mod repair;
mod tables;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use anyhow::{Context, ensure};

use super::backing::BackingFile;
use super::format::{Format, choose};
use super::medium::{Buffer, Medium, is_full};
use super::raw::{Opened, Raw, check_size, open_locked};
use super::{Below, Changes, Channel, Config, Direct, Geometry, Image, LockedFile};
use crate::memory::Memory;
use entry::{COMPRESSED, COPIED, ZERO, packed_at};
use header::Header;
use tables::{Tables, damaged};

pub use empty::{create, create_over, is_empty_over, is_over, is_written, size};
pub use peek::peek;

/// Maximum length of a backing chain, which may be circular.
const MAX_BACKING_FILES: usize = 32;

/// Also opens the backing files. Errors do not name the file.
pub(super) fn open(file: Opened, config: &Config) -> anyhow::Result<Qcow2> {
    chain(file, config, MAX_BACKING_FILES)
}

fn chain(opened: Opened, config: &Config, more: usize) -> anyhow::Result<Qcow2> {
    let writes = !config.is_read_only();
    let mut header = Header::read(&opened.file)?;
    header.check(writes)?;
    check_size(&config.path, header.size, config.sector.bytes())?;
    let (backing, files) = match &header.backing {
        Some(name) => backing(name, &header, config, more).map(|it| (Some(it.0), it.1))?,
        None => {
            let named = matches!(config.backing, BackingFile::This(_));
            ensure!(!named, "it has no backing file, but `backing` names one: leave that out");
            (None, Vec::new())
        }
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
        backing_files: files,
        tables: Mutex::new(tables),
        moves: RwLock::new(()),
        inflated: Mutex::default(),
    })
}

/// Opens the backing file of an image for reading. Returns all files of the chain.
fn backing(
    name: &str,
    header: &Header,
    config: &Config,
    more: usize,
) -> anyhow::Result<(Arc<dyn Medium>, Vec<File>)> {
    ensure!(more > 0, "more than {MAX_BACKING_FILES} backing files in a chain");
    let format = header.backing_format.as_deref();
    let (path, format) = config.backing.find(&config.path, name, format)?;
    let below = Config {
        path,
        format,
        readonly: true,
        overlay: Changes::None,
        backing: config.backing.below(),
        ..config.clone()
    };
    let context = || format!("its backing file {}", below.path.display());
    let opened = open_locked(&below.path, true).with_context(context)?;
    let mut files = vec![opened.file.try_clone().with_context(context)?];
    Ok(match choose(format, &below.path, &opened.file).with_context(context)? {
        Format::Raw => (Arc::new(Raw::new(opened, &below).with_context(context)?), files),
        Format::Qcow2 => {
            let mut image = chain(opened, &below, more - 1).with_context(context)?;
            files.append(&mut image.backing_files);
            (Arc::new(image), files)
        }
    })
}

/// Changes the header within its first sector.
fn change_header(raw: &Raw, change: impl FnOnce(&mut [u8])) -> io::Result<()> {
    let mut buffer = Buffer::default();
    let length = raw.direct.map_or(512, |it| usize::try_from(it.length).unwrap_or(4096)).max(512);
    let sector = buffer.take(length);
    raw.read(sector, 0)?;
    change(sector);
    raw.write(sector, 0, false)?;
    raw.flush()
}

fn set_header(raw: &Raw, fields: &[(usize, &[u8])]) -> io::Result<()> {
    change_header(raw, |sector| {
        for (at, bytes) in fields {
            sector[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
    })
}

pub(super) struct Qcow2 {
    raw: Raw,
    header: Header,
    size: AtomicU64,
    backing: Option<Arc<dyn Medium>>,
    /// The backing files of the whole chain, the nearest first.
    backing_files: Vec<File>,
    tables: Mutex<Tables>,
    /// Held shared while clusters stay in place, and exclusively while their allocation changes.
    /// So a cluster is never reallocated while it is read or written in place.
    moves: RwLock<()>,
    /// Whether the dirty bit is set in the file.
    marked: AtomicBool,
    /// The compressed cluster that was read last: its entry, and its content.
    inflated: Mutex<Option<(u64, Vec<u8>)>>,
}

/// A qcow2 image, below the layer that has its channels.
pub(super) struct Disk {
    pub(super) image: Arc<Qcow2>,
    pub(super) above: Arc<dyn Image>,
}

impl Image for Disk {
    fn geometry(&self) -> Geometry {
        self.above.geometry()
    }

    fn keeps_writes(&self) -> bool {
        self.above.keeps_writes()
    }

    fn complete(&self) -> io::Result<()> {
        self.image.complete()
    }

    fn file(&self) -> Option<LockedFile> {
        Some(self.image.raw.locked())
    }

    fn below(&self) -> io::Result<Below> {
        let files = &self.image.backing_files;
        let size = self.image.backing.as_ref().map(|it| it.geometry().size);
        let same = size == Some(self.image.size.load(Ordering::Relaxed));
        let untouched = same && self.image.tables().is_empty();
        Ok(Below { files: files.iter().map(File::metadata).collect::<io::Result<_>>()?, untouched })
    }

    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        self.above.channel(memory)
    }

    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        self.above.grow(size)
    }
}

/// Where the data of a part of one cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    /// In the file, at this offset. `in_place`: nothing else refers to the cluster.
    File { at: u64, in_place: bool },
    /// Nowhere in the file.
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

    /// Writes all tables, and clears the dirty bit. The file does not change until the guest writes
    /// again: a snapshot knows an unchanged image by its time.
    fn complete(&self) -> io::Result<()> {
        // The second flush frees the clusters that the first one released.
        self.flush()?;
        self.flush()?;
        self.mark(false)?;
        self.raw.sync()
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
}

impl Drop for Qcow2 {
    /// Not needed for the safety of completed requests. It avoids the leaked clusters that a kill
    /// leaves.
    fn drop(&mut self) {
        self.complete().ok();
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
            self.clear(offset, length, false, |_| {})?;
        }
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
        let keep = !unmap || self.raw.geometry().discard == 0;
        let mut rest = Vec::new();
        self.clear(offset, length, keep, |part| rest.push(part))?;
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
pub(super) fn journaled(path: &Path) -> (Arc<dyn Image>, impl Fn() -> Vec<super::raw::Event>) {
    let config = Config { direct: Direct::Off, ..Config::new(path) };
    let mut image = open(open_locked(path, false).unwrap(), &config).unwrap();
    image.raw.journal = Some(Mutex::default());
    let image = Arc::new(image);
    let noted = image.clone();
    let journal = move || noted.raw.journal.as_ref().unwrap().lock().unwrap().clone();
    (Arc::new(super::threads::Threaded::new("qcow2", image, 1)), journal)
}

#[cfg(test)]
mod test;
