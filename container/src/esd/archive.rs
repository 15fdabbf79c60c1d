//! Reads WIM archives with LZMS (ESD): header, blob table, and the content of blobs. Solid
//! resources are sequences of blobs that are compressed together, in independent chunks.
//!
//! Threats: an archive may be anything. Tables must be within the file, chunks have a maximum
//! length and, all solid resources together, a maximum number, and only one of them is in memory at
//! a time.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context as _, bail, ensure};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY};

use super::lzms::Decoder;
use crate::media::wim::header::{self, Resource, flag};
use crate::media::{Image as _, Opened, field, u16_at, u32_at, u64_at};

/// Flags of the header: the compression is LZMS.
const LZMS: u32 = 0x8_0000;
/// The number of LZMS in the header of a solid resource. 0 is no compression.
const SOLID_LZMS: u32 = 3;
/// The length in an entry that describes a solid resource.
const SOLID_LENGTH: u64 = 1 << 32;
pub(super) const ENTRY_BYTES: usize = 50;
/// Offset of the SHA-1 in an entry.
const SHA1: usize = 30;
/// Microsoft's blob tables have some 10 MiB.
const MAX_TABLE: u64 = 32 << 20;
const MAX_XML: u64 = 4 << 20;
const MAX_METADATA: u64 = 128 << 20;
/// Microsoft's solid resources have chunks of 64 MiB.
const MAX_CHUNK: u64 = 128 << 20;
const MIN_CHUNK: u64 = 4 << 10;
/// Chunks of one resource, and of all solid resources together.
const MAX_CHUNKS: u64 = 4 << 20;
/// Bytes of a resource without compression that are read at once.
const PLAIN_CHUNK: u64 = 1 << 20;
const MAX_LENGTH: u64 = 1 << 40;

/// The SHA-1 of a blob, by which files name it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sha1(pub [u8; 20]);

impl Sha1 {
    /// No content: an empty file.
    pub fn is_none(&self) -> bool {
        self.0 == [0; 20]
    }

    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::default();
        hasher.add(bytes);
        hasher.finish()
    }
}

impl fmt::Display for Sha1 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

pub(super) struct Hasher(Context);

impl Default for Hasher {
    fn default() -> Self {
        Self(Context::new(&SHA1_FOR_LEGACY_USE_ONLY))
    }
}

impl Hasher {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub(super) fn finish(self) -> Sha1 {
        let mut bytes = [0; 20];
        bytes.copy_from_slice(self.0.finish().as_ref());
        Sha1(bytes)
    }
}

/// Where the content of a blob is.
#[derive(Clone, Copy, Debug)]
enum Place {
    Own(Resource),
    /// In a solid resource, at this offset.
    Solid(usize, u64),
}

#[derive(Clone, Copy, Debug)]
pub struct Blob {
    pub sha1: Sha1,
    pub length: u64,
    place: Place,
}

impl Blob {
    /// Blobs are read fast in this order.
    pub fn order(&self) -> (usize, u64) {
        match self.place {
            Place::Own(resource) => (usize::MAX, resource.offset),
            Place::Solid(number, offset) => (number, offset),
        }
    }

    /// The place behind the blob.
    pub(super) fn end(&self) -> (usize, u64) {
        let (number, offset) = self.order();
        let length = match self.place {
            Place::Own(resource) => resource.packed,
            Place::Solid(..) => self.length,
        };
        (number, offset.saturating_add(length))
    }
}

/// The chunks of a resource.
#[derive(Clone, Debug)]
struct Chunks {
    /// Bytes of the content, and of a chunk of it.
    length: u64,
    chunk: u64,
    /// Where each packed chunk begins in the file, and the end of the last one.
    starts: Vec<u64>,
}

/// A chunk of content.
#[derive(Default)]
struct Cached {
    /// The place of the packed chunk, which identifies it.
    start: u64,
    content: Vec<u8>,
}

pub struct Archive {
    file: Opened,
    pub(super) header: [u8; header::BYTES],
    chunk: u64,
    /// The blob table.
    pub(super) table: Vec<u8>,
    pub xml: String,
    blobs: HashMap<Sha1, Blob>,
    /// The metadata of the images, in their order.
    metadata: Vec<Resource>,
    solid: Vec<Rc<Chunks>>,
    /// Their chunks.
    solid_count: u64,
    cached: Cached,
    packed: Vec<u8>,
    decoder: Decoder,
}

impl Archive {
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let file = Opened::open(path)?;
        let mut header = [0; header::BYTES];
        file.read(&mut header, 0)?;
        ensure!(header.starts_with(header::MAGIC), "it is no ESD (no MSWIM at its start)");
        ensure!(u16_at(&header, header::PARTS + 2)? <= 1, "it is a part of an archive");
        let flags = u32_at(&header, header::FLAGS)?;
        ensure!(flags & LZMS != 0, "its compression is not that of an ESD (flags {flags:#x})");
        let mut new = Self {
            file,
            header,
            chunk: u32_at(&header, header::CHUNK)?.into(),
            table: Vec::new(),
            xml: String::new(),
            blobs: HashMap::new(),
            metadata: Vec::new(),
            solid: Vec::new(),
            solid_count: 0,
            cached: Cached::default(),
            packed: Vec::new(),
            decoder: Decoder::default(),
        };
        let xml = new.whole(&Resource::read(&header, header::XML)?, MAX_XML).context("XML data")?;
        new.xml = header::text(&xml)?;
        new.table =
            new.whole(&Resource::read(&header, header::BLOBS)?, MAX_TABLE).context("blob table")?;
        new.read_table().context("blob table")?;
        let images = u32_at(&header, header::IMAGES)?;
        let found = new.metadata.len();
        ensure!(usize::try_from(images)? == found, "{images} images, and metadata of {found}");
        Ok(new)
    }

    /// Bytes of the file.
    pub fn length(&self) -> u64 {
        self.file.length()
    }

    pub fn file(&self) -> &std::fs::File {
        self.file.file()
    }

    pub fn images(&self) -> usize {
        self.metadata.len()
    }

    pub fn blob(&self, sha1: &Sha1) -> Option<&Blob> {
        self.blobs.get(sha1)
    }

    /// The metadata of an image, counted from 0: directories and security descriptors.
    pub fn metadata(&mut self, image: usize) -> anyhow::Result<Vec<u8>> {
        let resource = *self.metadata.get(image).context("no such image")?;
        self.whole(&resource, MAX_METADATA).with_context(|| format!("metadata of image {image}"))
    }

    fn read_table(&mut self) -> anyhow::Result<()> {
        let table = std::mem::take(&mut self.table);
        let mut entries = table.chunks_exact(ENTRY_BYTES).peekable();
        while let Some(entry) = entries.peek() {
            if Resource::read(entry, 0)?.has(flag::SOLID) {
                self.read_run(&mut entries)?;
            } else if let Some(entry) = entries.next() {
                let resource = Resource::read(entry, 0)?;
                ensure!(!resource.has(flag::SPANNED), "a blob is in several files");
                let length = resource.length;
                ensure!(length <= MAX_LENGTH, "{length} bytes are too many");
                match resource.has(flag::METADATA) {
                    true => self.metadata.push(resource),
                    false => self.add(entry, length, Place::Own(resource))?,
                }
            }
        }
        self.table = table;
        Ok(())
    }

    /// Reads successive solid entries. The offsets of blobs count through all their resources.
    fn read_run<'a>(
        &mut self,
        entries: &mut std::iter::Peekable<impl Iterator<Item = &'a [u8]>>,
    ) -> anyhow::Result<()> {
        let (first, mut blobs) = (self.solid.len(), Vec::new());
        // Where each resource ends.
        let (mut ends, mut end) = (Vec::new(), 0);
        while let Some(entry) = entries.peek() {
            let resource = Resource::read(entry, 0)?;
            if !resource.has(flag::SOLID) {
                break;
            }
            match resource.length {
                SOLID_LENGTH => {
                    let chunks = self.solid_chunks(&resource).context("solid resource")?;
                    self.count_chunks(&chunks)?;
                    end += chunks.length;
                    ends.push(end);
                    self.solid.push(Rc::new(chunks));
                }
                _ => blobs.push((*entry, resource)),
            }
            entries.next();
        }
        for (entry, Resource { packed: length, offset, .. }) in blobs {
            let number = ends.partition_point(|end| *end <= offset);
            let end = *ends.get(number).context("a blob beyond its resource")?;
            let fits = offset.checked_add(length).is_some_and(|it| it <= end);
            ensure!(fits, "a blob in two resources");
            let start = end - self.solid[first + number].length;
            self.add(entry, length, Place::Solid(first + number, offset - start))?;
        }
        Ok(())
    }

    /// Checks the number of chunks of all solid resources with a new one.
    fn count_chunks(&mut self, new: &Chunks) -> anyhow::Result<()> {
        self.solid_count += new.starts.len() as u64;
        ensure!(self.solid_count <= MAX_CHUNKS, "its resources have too many chunks");
        Ok(())
    }

    fn add(&mut self, entry: &[u8], length: u64, place: Place) -> anyhow::Result<()> {
        let sha1 = Sha1(field(entry, SHA1)?);
        self.blobs.insert(sha1, Blob { sha1, length, place });
        Ok(())
    }

    /// A solid resource has a header: its length, the length of its chunks and their compression.
    /// The packed length of each chunk follows.
    fn solid_chunks(&self, resource: &Resource) -> anyhow::Result<Chunks> {
        let mut header = [0; 16];
        self.file.read(&mut header, resource.offset)?;
        let (length, chunk) = (u64_at(&header, 0)?, u64::from(u32_at(&header, 8)?));
        let format = u32_at(&header, 12)?;
        ensure!(format == SOLID_LZMS, "its compression (number {format}) is not LZMS");
        check_chunk(length, chunk)?;
        let count = length.div_ceil(chunk);
        let table = self.bytes(resource.offset + 16, count * 4, MAX_TABLE)?;
        let mut start = resource.offset + 16 + count * 4;
        let mut starts = vec![start];
        for entry in table.chunks_exact(4) {
            start += u64::from(u32_at(entry, 0)?);
            starts.push(start);
        }
        ensure!(start <= self.length(), "it ends at {start}, beyond the file");
        Ok(Chunks { length, chunk, starts })
    }

    /// A compressed resource of its own has a table of where each chunk but the first begins.
    fn chunks(&self, resource: &Resource) -> anyhow::Result<Chunks> {
        let Resource { packed, offset, length, .. } = *resource;
        let end = offset.checked_add(packed).filter(|end| *end <= self.length());
        let end = end.context("a resource beyond the file")?;
        if !resource.has(flag::COMPRESSED) {
            ensure!(packed == length, "{packed} bytes for {length} without compression");
            let starts = (0..length.div_ceil(PLAIN_CHUNK)).map(|it| offset + it * PLAIN_CHUNK);
            return Ok(Chunks {
                length,
                chunk: PLAIN_CHUNK,
                starts: starts.chain([end]).collect(),
            });
        }
        check_chunk(length, self.chunk)?;
        let count = length.div_ceil(self.chunk).saturating_sub(1);
        let width = if length < 1 << 32 { 4 } else { 8 };
        let table = self.bytes(offset, count * width, MAX_TABLE)?;
        let data = offset + count * width;
        let mut starts = vec![data];
        for entry in table.chunks_exact(usize::try_from(width)?) {
            let start = if width == 4 { u32_at(entry, 0)?.into() } else { u64_at(entry, 0)? };
            let start = start.checked_add(data).filter(|start| *start <= end);
            starts.push(start.context("a chunk beyond its resource")?);
        }
        starts.push(end);
        Ok(Chunks { length, chunk: self.chunk, starts })
    }

    fn bytes(&self, offset: u64, length: u64, limit: u64) -> anyhow::Result<Vec<u8>> {
        ensure!(length <= limit, "{length} bytes are more than {limit}");
        ensure!(
            offset.checked_add(length).is_some_and(|end| end <= self.length()),
            "it is cut off"
        );
        let mut bytes = vec![0; usize::try_from(length)?];
        self.file.read(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// All content of a resource.
    fn whole(&mut self, resource: &Resource, limit: u64) -> anyhow::Result<Vec<u8>> {
        ensure!(resource.length <= limit, "{} bytes are more than {limit}", resource.length);
        let chunks = self.chunks(resource)?;
        let mut bytes = Vec::new();
        self.each(&chunks, 0, chunks.length, &mut |part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Passes the content of a blob to `take` in parts, and compares its checksum at the end.
    pub fn read(
        &mut self,
        blob: &Blob,
        take: &mut dyn FnMut(&[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (chunks, offset) = match blob.place {
            Place::Own(resource) => (Rc::new(self.chunks(&resource)?), 0),
            Place::Solid(number, offset) => (Rc::clone(&self.solid[number]), offset),
        };
        let mut hasher = Hasher::default();
        self.each(&chunks, offset, blob.length, &mut |part| {
            hasher.add(part);
            take(part)
        })?;
        ensure!(hasher.finish() == blob.sha1, "the content of {} is damaged", blob.sha1);
        Ok(())
    }

    fn each(
        &mut self,
        chunks: &Chunks,
        offset: u64,
        length: u64,
        take: &mut dyn FnMut(&[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let number = usize::try_from(at / chunks.chunk)?;
            self.load(chunks, number)?;
            let from = usize::try_from(at % chunks.chunk)?;
            let rest = usize::try_from(end - at).unwrap_or(usize::MAX);
            let part = self.cached.content.get(from..).context("it is cut off")?;
            let part = &part[..part.len().min(rest)];
            ensure!(!part.is_empty(), "it is cut off");
            take(part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Makes a chunk the cached one.
    fn load(&mut self, chunks: &Chunks, number: usize) -> anyhow::Result<()> {
        let [start, next] = chunks.starts.get(number..number + 2).context("no such chunk")? else {
            bail!("no such chunk");
        };
        let (start, next) = (*start, *next);
        if self.cached.start == start && start != 0 {
            return Ok(());
        }
        self.cached.start = 0;
        let first = number as u64 * chunks.chunk;
        let length = usize::try_from(chunks.chunk.min(chunks.length - first))?;
        let packed = next.checked_sub(start).context("chunks out of order")?;
        let packed = usize::try_from(packed)?;
        ensure!(packed <= length, "a chunk of {packed} bytes for {length}");
        self.cached.content.resize(length, 0);
        if packed == length {
            self.file.read(&mut self.cached.content, start)?;
        } else {
            self.packed.resize(packed, 0);
            self.file.read(&mut self.packed, start)?;
            self.decoder.decode(&self.packed, &mut self.cached.content)?;
        }
        self.cached.start = start;
        Ok(())
    }
}

fn check_chunk(length: u64, chunk: u64) -> anyhow::Result<()> {
    let fits = chunk.is_power_of_two() && (MIN_CHUNK..=MAX_CHUNK).contains(&chunk);
    ensure!(fits, "chunks of {chunk} bytes");
    let fits = length <= MAX_LENGTH && length.div_ceil(chunk) < MAX_CHUNKS;
    ensure!(fits, "{length} bytes are too many");
    Ok(())
}

#[cfg(test)]
mod test;
