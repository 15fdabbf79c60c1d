//! Writes a WIM archive with XPRESS at a place of a file.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use super::archive::Sha1;
use super::images::Images;
use super::xpress::{CHUNK, Compressor};
use crate::media::wim::header::{self, Resource, flag};

/// From [`header::LENGTH`] on: the header's length, the version, flags (compressed, XPRESS) and the
/// length of chunks.
const FORM: [u32; 4] = [208, 0x1_0d00, 0x2_0002, 32 << 10];

pub(super) struct Writer<'a> {
    file: &'a File,
    /// Where the archive begins, and its length so far.
    base: u64,
    length: u64,
    compressor: Compressor,
    /// The blob table, and the metadata in it.
    table: Vec<u8>,
    metadata: Vec<Resource>,
    /// The resource that is being written.
    open: Option<Open>,
}

struct Open {
    resource: Resource,
    /// Chunks that are written: the end of each.
    ends: Vec<u64>,
    chunk: Vec<u8>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(file: &'a File, base: u64) -> Self {
        Self {
            file,
            base,
            length: header::BYTES as u64,
            compressor: Compressor::new(),
            table: Vec::new(),
            metadata: Vec::new(),
            open: None,
        }
    }

    /// Adds an image.
    pub(super) fn add_metadata(&mut self, content: &[u8]) -> anyhow::Result<()> {
        self.begin(content.len() as u64);
        self.write(content)?;
        self.end(Sha1::of(content), 1, flag::METADATA)
    }

    /// Begins a resource whose content has this length.
    pub(super) fn begin(&mut self, length: u64) {
        let resource = Resource { packed: 0, flags: flag::COMPRESSED, offset: self.length, length };
        // The table of chunks comes first. It has the places of all but the first one.
        self.length += Self::table_length(length);
        self.open = Some(Open { resource, ends: Vec::new(), chunk: Vec::new() });
    }

    fn width(length: u64) -> u64 {
        if length < 1 << 32 { 4 } else { 8 }
    }

    fn table_length(length: u64) -> u64 {
        length.div_ceil(CHUNK as u64).saturating_sub(1) * Self::width(length)
    }

    pub(super) fn write(&mut self, mut content: &[u8]) -> anyhow::Result<()> {
        let Some(open) = &mut self.open else { return Ok(()) };
        while !content.is_empty() {
            let (part, rest) = content.split_at(content.len().min(CHUNK - open.chunk.len()));
            open.chunk.extend_from_slice(part);
            content = rest;
            if open.chunk.len() == CHUNK {
                let packed = self.compressor.compress(&open.chunk).unwrap_or(&open.chunk);
                self.file.write_all_at(packed, self.base + self.length)?;
                self.length += packed.len() as u64;
                open.ends.push(self.length);
                open.chunk.clear();
            }
        }
        Ok(())
    }

    /// Ends the resource, and enters it into the table.
    pub(super) fn end(&mut self, sha1: Sha1, count: u32, flags: u8) -> anyhow::Result<()> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        if !open.chunk.is_empty() {
            let packed = self.compressor.compress(&open.chunk).unwrap_or(&open.chunk);
            self.file.write_all_at(packed, self.base + self.length)?;
            self.length += packed.len() as u64;
            open.ends.push(self.length);
        }
        let mut resource = open.resource;
        let start = resource.offset + Self::table_length(resource.length);
        let width = usize::try_from(Self::width(resource.length))?;
        let ends = open.ends.iter().take(open.ends.len().saturating_sub(1));
        let table: Vec<u8> =
            ends.flat_map(|end| (end - start).to_le_bytes().into_iter().take(width)).collect();
        self.file.write_all_at(&table, self.base + resource.offset)?;
        resource.packed = self.length - resource.offset;
        resource.flags |= flags;
        self.table.extend(resource.write());
        self.table.extend(1_u16.to_le_bytes());
        self.table.extend(count.to_le_bytes());
        self.table.extend(sha1.0);
        if flags & flag::METADATA != 0 {
            self.metadata.push(resource);
        }
        Ok(())
    }

    /// Appends what is not compressed.
    fn append(&mut self, content: &[u8]) -> anyhow::Result<Resource> {
        let (offset, length) = (self.length, content.len() as u64);
        self.file.write_all_at(content, self.base + offset)?;
        self.length += length;
        Ok(Resource { packed: length, flags: flag::METADATA, offset, length })
    }

    /// Writes the header. The last image is the one that boots. Returns the length.
    pub(super) fn finish(mut self, images: &Images) -> anyhow::Result<u64> {
        let table = std::mem::take(&mut self.table);
        let blobs = self.append(&table)?;
        let xml = self.append(&images.xml(self.length))?;
        let mut header = [0; header::BYTES];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, header::MAGIC);
        for (number, value) in FORM.iter().enumerate() {
            put(header::LENGTH + 4 * number, &value.to_le_bytes());
        }
        // The archive's own number is that of its blobs.
        put(header::GUID, &Sha1::of(&table).0[..16]);
        let images = u32::try_from(self.metadata.len())?;
        put(header::PARTS, &[1, 0, 1, 0]);
        put(header::IMAGES, &images.to_le_bytes());
        put(header::BLOBS, &blobs.write());
        put(header::XML, &xml.write());
        if let Some(boots) = self.metadata.last() {
            put(header::BOOT, &boots.write());
            put(header::BOOT + Resource::BYTES, &images.to_le_bytes());
        }
        self.file.write_all_at(&header, self.base)?;
        Ok(self.length)
    }
}
