//! qcow2 images, read and written (QEMU's docs/interop/qcow2.rst, versions 2 and 3).
//!
//! With backing files and compressed clusters (deflate). Not with internal snapshots, encryption,
//! external data files, extended L2 entries: those are refused with a word on what to do.
//!
//! Threats: images come from strangers, and their owners' guests write them. Every number of the
//! file is checked where it is used; what is wrong is an error of that request. The name of a
//! backing file is a wish to read any file of this host: it is followed within the image's own
//! folder only, links resolved, unless the user says `backing=on`; and never to the network.
//!
//! Why not a library: of those that are there, imago 0.2.6 is the best kept, and writes an L1 entry
//! before the refcount of the table that it refers to. A process that is killed then leaves an
//! image that `qemu-img check` calls corrupt, and the next start may hand that cluster out again.

mod header;
mod tables;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use anyhow::{Context, bail, ensure};

use super::format::{Format, choose};
use super::medium::{Buffer, Medium};
use super::raw::{Opened, Raw, check_size, open_locked};
use super::{Config, Direct, Geometry};
use header::Header;
use tables::{COMPRESSED, COPIED, Tables, ZERO, damaged};

/// A chain is no longer: it may be a ring.
const MOST_BACKING: usize = 32;

/// Makes a disk of a file that is open and locked, and opens what it stands on.
///
/// # Errors
///
/// What is wrong with it, without its name.
pub(super) fn open(file: Opened, config: &Config) -> anyhow::Result<Qcow2> {
    chain(file, config, MOST_BACKING)
}

fn chain(opened: Opened, config: &Config, more: usize) -> anyhow::Result<Qcow2> {
    let writes = !config.is_read_only();
    let mut header = Header::read(&opened.file)?;
    header.check(writes)?;
    check_size(&config.path, header.size, config.sector.bytes())?;
    let backing = match &header.backing {
        Some(name) => Some(backing(name, &header, config, more)?),
        None => None,
    };
    // Tables of such an image are smaller than what direct I/O may want.
    let small = header.cluster_bits < 12 && config.direct == Direct::Auto;
    let direct = if small { Direct::Off } else { config.direct };
    let raw = Raw::new(opened, &Config { direct, ..config.clone() })?;
    let end = raw.geometry().size;
    if writes && header.autoclear != 0 {
        // Such features are of those who know them: a writer who does not says so.
        set_header(&raw, &[(header::AUTOCLEAR, &[0; 8])])?;
        header.autoclear = 0;
    }
    let tables = Tables::read(&raw, &header, end)?;
    Ok(Qcow2 {
        raw,
        size: AtomicU64::new(header.size),
        header,
        backing,
        tables: Mutex::new(tables),
        moves: RwLock::new(()),
        inflated: Mutex::default(),
    })
}

/// Opens what an image stands on, for reading.
fn backing(
    name: &str,
    header: &Header,
    config: &Config,
    more: usize,
) -> anyhow::Result<Arc<dyn Medium>> {
    ensure!(more > 0, "more than {MOST_BACKING} backing files, one on another");
    let path = place(name, config)?;
    let format = match header.backing_format.as_deref() {
        Some("qcow2") => Some(Format::Qcow2),
        Some("raw" | "file") => Some(Format::Raw),
        None => None,
        Some(other) => bail!("its backing file {name} has the format {other}, not read here"),
    };
    let below = Config { path, format, readonly: true, overlay: false, ..config.clone() };
    let context = || format!("its backing file {}", below.path.display());
    let opened = open_locked(&below.path, true).with_context(context)?;
    Ok(match choose(format, &below.path, &opened.file).with_context(context)? {
        Format::Raw => Arc::new(Raw::new(opened, &below).with_context(context)?),
        Format::Qcow2 => Arc::new(chain(opened, &below, more - 1).with_context(context)?),
    })
}

/// Where a backing file is, if it may be there.
fn place(name: &str, config: &Config) -> anyhow::Result<PathBuf> {
    let plain = name.strip_prefix("file:").unwrap_or(name);
    let scheme = plain.split('/').next().is_some_and(|first| first.contains(':'));
    ensure!(!scheme, "its backing file {name} is not a file, and nothing else is read here");
    let image = config.path.canonicalize().with_context(|| config.path.display().to_string())?;
    let folder = image.parent().unwrap_or(Path::new("/"));
    // An absolute name replaces the folder.
    let wanted = folder.join(plain);
    let context = || format!("its backing file {}", wanted.display());
    let path = wanted.canonicalize().with_context(context)?;
    ensure!(
        config.backing || path.parent() == Some(folder),
        "its backing file {name} is not in its own folder: say `backing=on` if you trust the image"
    );
    Ok(path)
}

/// Writes fields of the header, all in its first sector.
fn set_header(raw: &Raw, fields: &[(usize, &[u8])]) -> io::Result<()> {
    let mut buffer = Buffer::default();
    let length = raw.direct().map_or(512, |it| usize::try_from(it.length).unwrap_or(4096)).max(512);
    let sector = buffer.take(length);
    raw.read(sector, 0)?;
    for (at, bytes) in fields {
        sector[*at..*at + bytes.len()].copy_from_slice(bytes);
    }
    raw.write(sector, 0, false)?;
    raw.flush()
}

/// An image, open and locked.
pub(super) struct Qcow2 {
    raw: Raw,
    header: Header,
    size: AtomicU64,
    backing: Option<Arc<dyn Medium>>,
    tables: Mutex<Tables>,
    /// Shared while clusters stay where they are, alone while they change places: a cluster that
    /// is read or written in place is not given to another.
    moves: RwLock<()>,
    /// The compressed cluster that was read last.
    inflated: Mutex<Option<(u64, Vec<u8>)>>,
}

/// Where the bytes of a part of one cluster are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the file. In place: nobody else refers to it.
    File { at: u64, in_place: bool },
    /// Nowhere: zeros.
    Zeros,
    /// In what is below, or zeros if there is nothing.
    Below,
    /// Compressed, by this entry.
    Packed(u64),
}

/// A part of a request within one cluster.
#[derive(Clone, Copy)]
struct Part {
    /// On the disk.
    offset: u64,
    /// In the buffer.
    at: usize,
    length: usize,
}

impl Qcow2 {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cluster(&self) -> u64 {
        1 << self.header.cluster_bits
    }

    /// Cuts at the clusters' borders.
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

    fn place(&self, tables: &mut Tables, part: Part) -> io::Result<Place> {
        let entry = tables.entry(&self.raw, part.offset)?;
        if entry & COMPRESSED != 0 {
            return Ok(Place::Packed(entry));
        }
        if entry & ZERO != 0 && self.header.version == 3 {
            return Ok(Place::Zeros);
        }
        Ok(match tables.data_at(entry)? {
            Some(at) => {
                let at = at + part.offset % self.cluster();
                Place::File { at, in_place: entry & COPIED != 0 }
            }
            None => Place::Below,
        })
    }

    fn read_part(&self, place: Place, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        match place {
            Place::File { at, .. } => self.raw.read(buffer, at),
            Place::Zeros => {
                buffer.fill(0);
                Ok(())
            }
            Place::Below => self.read_below(buffer, offset),
            Place::Packed(entry) => self.read_packed(entry, buffer, offset),
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

    /// "Compressed Clusters Descriptor": the offset, and the number of sectors after the first.
    fn read_packed(&self, entry: u64, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let cluster = usize::try_from(self.cluster()).unwrap_or_default();
        let start = usize::try_from(offset % self.cluster()).unwrap_or_default();
        let mut inflated = self.inflated.lock().unwrap_or_else(PoisonError::into_inner);
        if inflated.as_ref().is_none_or(|(of, _)| *of != entry) {
            let (at, length) = self.packed_at(entry);
            // Direct I/O wants whole blocks around it.
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
                return Err(damaged("a compressed cluster that is none"));
            }
            *inflated = Some((entry, plain));
        }
        let Some((_, plain)) = inflated.as_ref() else { return Ok(()) };
        buffer.copy_from_slice(&plain[start..start + buffer.len()]);
        Ok(())
    }

    fn packed_at(&self, entry: u64) -> (u64, usize) {
        let shift = 62 - (self.header.cluster_bits - 8);
        let at = entry & ((1 << shift) - 1);
        let sectors = (entry & (COMPRESSED - 1)) >> shift;
        let length = (sectors + 1) * 512 - at % 512;
        (at, usize::try_from(length).unwrap_or_default())
    }

    /// Reads or writes all parts where they are. None when one of a write has no place of its own.
    fn in_place(
        &self,
        parts: impl Iterator<Item = Part>,
        mut transfer: impl FnMut(Place, Part) -> io::Result<()>,
        writes: bool,
    ) -> io::Result<Option<()>> {
        let _stay = self.moves.read().unwrap_or_else(PoisonError::into_inner);
        let mut run: Option<(Place, Part)> = None;
        let mut runs = Vec::new();
        let mut tables = self.tables();
        for part in parts {
            let place = self.place(&mut tables, part)?;
            if writes && !matches!(place, Place::File { in_place: true, .. }) {
                return Ok(None);
            }
            match (&mut run, place) {
                (Some((Place::File { at, .. }, first)), Place::File { at: next, .. })
                    if *at + first.length as u64 == next =>
                {
                    first.length += part.length;
                }
                _ => runs.extend(run.replace((place, part))),
            }
        }
        drop(tables);
        runs.extend(run);
        for (place, part) in runs {
            transfer(place, part)?;
        }
        Ok(Some(()))
    }

    /// Writes a part of a cluster that has no place of its own yet.
    fn write_anew(&self, tables: &mut Tables, part: Part, bytes: &[u8]) -> io::Result<()> {
        let (cluster, offset) = (self.cluster(), part.offset);
        let place = self.place(tables, part)?;
        if let Place::File { at, in_place: true } = place {
            return self.raw.write(bytes, at, false);
        }
        tables.relieve(&self.raw)?;
        let old = tables.entry(&self.raw, offset)?;
        let at = tables.allocate(&self.raw)?;
        let start = offset - offset % cluster;
        let fresh = at >= tables.end && self.reads_zeros(place);
        // Before it is written: what fails may have been written in part.
        tables.end = tables.end.max(at + cluster);
        let written = if fresh || bytes.len() as u64 == cluster {
            // Around it are zeros, because the file was never that long; or there is no around.
            self.raw.write(bytes, at + (offset - start), false)
        } else {
            let mut buffer = Buffer::default();
            let whole = buffer.take(usize::try_from(cluster).unwrap_or_default());
            let place = match place {
                Place::File { at, in_place } => Place::File { at: at - (offset - start), in_place },
                other => other,
            };
            let inside = usize::try_from(offset - start).unwrap_or_default();
            self.read_part(place, whole, start).and_then(|()| {
                whole[inside..inside + bytes.len()].copy_from_slice(bytes);
                self.raw.write(whole, at, false)
            })
        };
        let mapped = written.and_then(|()| tables.set_entry(&self.raw, offset, at | COPIED));
        if let Err(error) = mapped {
            // The cluster is not referred to: what was written does not matter.
            tables.forget(&self.raw, at)?;
            return Err(error);
        }
        self.release(tables, old)
    }

    fn reads_zeros(&self, place: Place) -> bool {
        place == Place::Zeros || (place == Place::Below && self.backing.is_none())
    }

    /// Gives back what an entry referred to, which no table in memory does any more.
    fn release(&self, tables: &mut Tables, entry: u64) -> io::Result<()> {
        if entry & COMPRESSED != 0 {
            let (at, length) = self.packed_at(entry);
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

    /// What an entry becomes when its cluster is to read as zeros; none when that needs writing.
    fn zeroed(&self, entry: u64, keep: bool) -> Option<u64> {
        let plain = entry & COMPRESSED == 0 && entry & COPIED != 0;
        match (self.header.version, &self.backing) {
            (3, _) if keep && plain => Some(entry | ZERO),
            (_, None) => Some(0),
            (3, Some(_)) => Some(ZERO),
            _ => None,
        }
    }

    /// Whole clusters become zeros, and return what was not done: the rest of partial ones.
    fn clear(&self, offset: u64, length: u64, keep: bool) -> io::Result<Vec<Part>> {
        let _alone = self.moves.write().unwrap_or_else(PoisonError::into_inner);
        let mut tables = self.tables();
        let (cluster, size) = (self.cluster(), self.size.load(Ordering::Acquire));
        let mut rest = Vec::new();
        let end = offset + length;
        let mut at = offset;
        while at < end {
            let next = (at - at % cluster + cluster).min(end);
            // The last cluster of a disk may be used in part only.
            let whole =
                at.is_multiple_of(cluster) && (next.is_multiple_of(cluster) || next == size);
            let part = Part { offset: at, at: 0, length: usize::try_from(next - at).unwrap_or(0) };
            let place = self.place(&mut tables, part)?;
            let entry = tables.entry(&self.raw, at)?;
            match self.zeroed(entry, keep).filter(|_| whole) {
                _ if self.reads_zeros(place) && (keep || tables.data_at(entry)?.is_none()) => {}
                Some(new) => {
                    tables.relieve(&self.raw)?;
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
    /// Nothing that was completed needs this; it spares the image the leaks of a kill.
    fn drop(&mut self) {
        // The second one is for the clusters that the first one gave back.
        if self.flush().is_ok() {
            self.flush().ok();
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
        // As what another image stands on it may be asked for more than it has.
        let size = self.size.load(Ordering::Acquire).saturating_sub(offset);
        let there = usize::try_from(size).map_or(buffer.len(), |it| it.min(buffer.len()));
        buffer[there..].fill(0);
        let read = |place: Place, part: Part| {
            self.read_part(place, &mut buffer[part.at..part.at + part.length], part.offset)
        };
        self.in_place(self.parts(offset, there), read, false).map(|_| ())
    }

    fn write(&self, buffer: &[u8], offset: u64, durable: bool) -> io::Result<()> {
        let write = |place: Place, part: Part| match place {
            Place::File { at, .. } => {
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
            // Parts of clusters stay as they are.
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

    fn grow(&self, size: u64) -> anyhow::Result<()> {
        let now = self.size.load(Ordering::Acquire);
        ensure!(size >= now, "the disk has {now} bytes and cannot shrink to {size}");
        ensure!(
            size == now,
            "a qcow2 image does not grow while a machine uses it: `qemu-img resize` it before"
        );
        Ok(())
    }
}

/// An image whose writes are noted, for tests that cut the power.
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
