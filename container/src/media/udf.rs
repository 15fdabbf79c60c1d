//! UDF (ECMA-167 with OSTA UDF 1.02 to 2.60), as far as files on read-only media need it: physical
//! and metadata partitions, file entries of strategy 4, and file identifiers.
//!
//! Threats: partitions, extents and directories point anywhere, and to one another. Every
//! descriptor needs its checksums. Chains have a maximum length, a search descends once for each
//! part of its path, and all that is read of a volume is counted.

use std::cell::Cell;

use anyhow::{Context as _, bail, ensure};

use super::tree::{Node, Tree};
use super::{Content, Extent, Image, SECTOR, SECTOR_BYTES, field, sector, u16_at, u32_at, u64_at};

/// Tag identifiers (ECMA-167 3/7.2.1 and 4/7.2.1).
mod tag {
    pub(super) const PRIMARY_VOLUME: u16 = 1;
    pub(super) const ANCHOR: u16 = 2;
    pub(super) const POINTER: u16 = 3;
    pub(super) const PARTITION: u16 = 5;
    pub(super) const LOGICAL_VOLUME: u16 = 6;
    pub(super) const TERMINATING: u16 = 8;
    pub(super) const FILE_SET: u16 = 256;
    pub(super) const FILE_IDENTIFIER: u16 = 257;
    pub(super) const ALLOCATION_EXTENT: u16 = 258;
    pub(super) const FILE_ENTRY: u16 = 261;
    pub(super) const EXTENDED_FILE_ENTRY: u16 = 266;
}

/// Sector of the anchor. Others may be at the end of the volume (3/8.4.2.1).
const ANCHOR: u64 = 256;
/// Maximum number of sectors of a descriptor sequence, with those of its continuations.
const MAX_SEQUENCE: u32 = 256;
/// Maximum number of partitions, and of partition maps.
const MAX_PARTITIONS: usize = 8;
/// Maximum number of allocation extent descriptors of a file.
const MAX_CONTINUATIONS: usize = 64;
/// Maximum number of blocks and extents that a volume is asked for in all: entries of a directory
/// can have their extents in common, so that little on the image is much to read.
const MAX_WORK: u32 = 1 << 16;
/// Kinds of allocation descriptors in a file entry's flags (4/14.6.8).
const SHORT: u16 = 0;
const LONG: u16 = 1;
const EMBEDDED: u16 = 3;
/// The two upper bits of an extent's length: its type (4/14.14.1.1).
const LENGTH: u32 = 0x3fff_ffff;
const RECORDED: u32 = 0;
const CONTINUATION: u32 = 3;
/// File characteristics: deleted, and the parent directory (4/14.4.3).
const DELETED_OR_PARENT: u8 = 0x04 | 0x08;
/// File type of directories (4/14.6.6).
const DIRECTORY: u8 = 4;

/// A logical volume.
pub struct Volume {
    /// By partition reference number, which is the number of the partition map.
    partitions: Vec<Partition>,
    root: Address,
    name: String,
    /// Blocks and extents so far.
    work: Cell<u32>,
}

enum Partition {
    Physical(Extent),
    /// The metadata file of a partition has its blocks (UDF 2.2.10).
    Metadata(Content),
}

/// The start of an extent in a partition (`lb_addr`, 4/7.1).
#[derive(Clone, Copy)]
pub struct Address {
    block: u32,
    partition: u16,
}

/// The descriptors of a volume descriptor sequence that count: those with the highest number.
#[derive(Default)]
struct Sequence {
    logical: Option<(u32, [u8; SECTOR_BYTES])>,
    /// Partition numbers and their ranges.
    partitions: Vec<(u32, u16, Extent)>,
    name: String,
}

impl Volume {
    /// `None` if the image has no UDF.
    pub fn open(image: &(impl Image + ?Sized)) -> anyhow::Result<Option<Self>> {
        let last = (image.length() / SECTOR).saturating_sub(1);
        let mut found = None;
        for number in [ANCHOR, last, last.saturating_sub(ANCHOR)] {
            let bytes = sector(image, number)?;
            found = found.or(bytes.filter(|bytes| check_tag(bytes) == Some(tag::ANCHOR)));
        }
        let Some(anchor) = found else { return Ok(None) };
        // The main sequence, or else the reserve one.
        let main = Sequence::read(image, extent_ad(&anchor, 16)?);
        let sequence = match main {
            Ok(sequence) if sequence.logical.is_some() => sequence,
            _ => Sequence::read(image, extent_ad(&anchor, 24)?)?,
        };
        sequence.mount(image).context("UDF").map(Some)
    }

    /// The volume identifier.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counts a block or an extent.
    fn count(&self) -> anyhow::Result<()> {
        self.work.set(self.work.get() + 1);
        ensure!(self.work.get() <= MAX_WORK, "more than {MAX_WORK} descriptors are read");
        Ok(())
    }

    /// The range of blocks in the image. The part of a metadata partition that contains them must
    /// be in one piece.
    fn place(&self, address: Address, length: u64) -> anyhow::Result<Extent> {
        let partition = self.partitions.get(usize::from(address.partition));
        let partition = partition.with_context(|| format!("no partition {}", address.partition))?;
        let offset = u64::from(address.block) * SECTOR;
        let place = |range: &Extent, offset: u64| {
            let fits = offset.checked_add(length).is_some_and(|end| end <= range.length);
            fits.then_some(Extent { start: range.start + offset, length })
        };
        let found = match partition {
            Partition::Physical(range) => place(range, offset),
            Partition::Metadata(content) => {
                let mut rest = Some(offset);
                content.extents().iter().find_map(|range| {
                    let here = rest.and_then(|offset| place(range, offset));
                    rest = rest.and_then(|offset| offset.checked_sub(range.length));
                    here
                })
            }
        };
        found.with_context(|| format!("block {} is not in its partition", address.block))
    }

    fn block(
        &self,
        image: &(impl Image + ?Sized),
        address: Address,
    ) -> anyhow::Result<(Extent, [u8; SECTOR_BYTES])> {
        self.count()?;
        let place = self.place(address, SECTOR)?;
        let mut bytes = [0; SECTOR_BYTES];
        image.read(&mut bytes, place.start)?;
        Ok((place, bytes))
    }

    /// Appends the extents of allocation descriptors, and of those in further blocks.
    fn gather(
        &self,
        image: &(impl Image + ?Sized),
        mut descriptors: Allocations,
        content: &mut Content,
    ) -> anyhow::Result<()> {
        for _ in 0..MAX_CONTINUATIONS {
            let mut next = None;
            for (length, address) in descriptors.read()? {
                self.count()?;
                match length >> 30 {
                    _ if length & LENGTH == 0 => break,
                    RECORDED => content.push(self.place(address, (length & LENGTH).into())?)?,
                    CONTINUATION => {
                        next = Some(address);
                        break;
                    }
                    _ => bail!("a file with holes"),
                }
            }
            let Some(address) = next else { return Ok(()) };
            let (_, bytes) = self.block(image, address)?;
            ensure!(check_tag(&bytes) == Some(tag::ALLOCATION_EXTENT), "no allocation extent");
            let count = usize::try_from(u32_at(&bytes, 20)?)?;
            let end = count.checked_add(24).filter(|end| *end <= SECTOR_BYTES);
            descriptors.bytes = bytes[24..end.context("a long allocation extent")?].to_vec();
        }
        bail!("a file of more than {MAX_CONTINUATIONS} allocation extents")
    }
}

/// Short or long allocation descriptors (4/14.14).
struct Allocations {
    bytes: Vec<u8>,
    kind: u16,
    /// The partition of short ones: that of their file entry.
    partition: u16,
}

impl Allocations {
    /// Lengths with types, and addresses.
    fn read(&self) -> anyhow::Result<Vec<(u32, Address)>> {
        let each = |bytes: &[u8]| {
            let (length, block) = (u32_at(bytes, 0)?, u32_at(bytes, 4)?);
            let partition = if self.kind == LONG { u16_at(bytes, 8)? } else { self.partition };
            Ok((length, Address { block, partition }))
        };
        match self.kind {
            SHORT => self.bytes.chunks_exact(8).map(each).collect(),
            LONG => self.bytes.chunks_exact(16).map(each).collect(),
            other => bail!("allocation descriptors of kind {other}"),
        }
    }
}

impl Sequence {
    /// Reads a volume descriptor sequence (3/8.4.2).
    fn read(image: &(impl Image + ?Sized), extent: (u32, u32)) -> anyhow::Result<Self> {
        let mut sequence = Self::default();
        let (mut length, mut location) = extent;
        let mut rest = MAX_SEQUENCE;
        while length >= 2048 && rest > 0 {
            let Some(bytes) = sector(image, location.into())? else { break };
            (length, location, rest) = (length - 2048, location.saturating_add(1), rest - 1);
            match check_tag(&bytes) {
                Some(tag::TERMINATING) | None => break,
                Some(tag::POINTER) => (length, location) = extent_ad(&bytes, 20)?,
                Some(kind) => sequence.add(kind, &bytes)?,
            }
        }
        Ok(sequence)
    }

    fn add(&mut self, kind: u16, bytes: &[u8; SECTOR_BYTES]) -> anyhow::Result<()> {
        let number = u32_at(bytes, 16)?;
        match kind {
            tag::PRIMARY_VOLUME => self.name = dstring(&bytes[24..56]),
            tag::LOGICAL_VOLUME if self.logical.as_ref().is_none_or(|it| it.0 <= number) => {
                self.logical = Some((number, *bytes));
            }
            tag::PARTITION => {
                let own = u16_at(bytes, 22)?;
                let start = u64::from(u32_at(bytes, 188)?) * SECTOR;
                let range = Extent { start, length: u64::from(u32_at(bytes, 192)?) * SECTOR };
                let newer = self.partitions.iter().any(|it| it.1 == own && it.0 > number);
                if !newer {
                    self.partitions.retain(|it| it.1 != own);
                    self.partitions.push((number, own, range));
                }
                ensure!(self.partitions.len() <= MAX_PARTITIONS, "too many partitions");
            }
            _ => {}
        }
        Ok(())
    }

    /// Finds the partitions and the root directory of the logical volume (3/10.6, 4/14.1).
    fn mount(self, image: &(impl Image + ?Sized)) -> anyhow::Result<Volume> {
        let (_, logical) = self.logical.as_ref().context("no logical volume descriptor")?;
        let block = u32_at(logical, 212)?;
        ensure!(u64::from(block) == SECTOR, "blocks of {block} bytes: only 2048 are supported");
        let root = Address { block: 0, partition: 0 };
        let name = self.name.clone();
        let mut volume = Volume { partitions: Vec::new(), root, name, work: Cell::default() };
        let length = usize::try_from(u32_at(logical, 264)?)?;
        let end = length.checked_add(440).filter(|end| *end <= SECTOR_BYTES);
        let mut maps = &logical[440..end.context("long partition maps")?];
        while let [_, length, ..] = maps {
            let length = usize::from(*length);
            ensure!((6..=maps.len()).contains(&length), "a partition map of {length} bytes");
            let (map, rest) = maps.split_at(length);
            let partition = self.partition(image, map)?;
            volume.partitions.push(partition);
            ensure!(volume.partitions.len() <= MAX_PARTITIONS, "too many partition maps");
            maps = rest;
        }
        let (_, set) = long_ad(logical, 248)?;
        let (_, set) = volume.block(image, set).context("file set")?;
        ensure!(check_tag(&set) == Some(tag::FILE_SET), "no file set descriptor");
        (_, volume.root) = long_ad(&set, 400)?;
        Ok(volume)
    }

    /// The partition of a map (3/10.7, UDF 2.2.8 to 2.2.10).
    fn partition(&self, image: &(impl Image + ?Sized), map: &[u8]) -> anyhow::Result<Partition> {
        let range = |number: u16| {
            let found = self.partitions.iter().find(|it| it.1 == number).map(|it| it.2);
            found.with_context(|| format!("no descriptor of partition {number}"))
        };
        if map[0] == 1 {
            return Ok(Partition::Physical(range(u16_at(map, 4)?)?));
        }
        let kind: [u8; 23] = field(map, 5)?;
        let kind = String::from_utf8_lossy(kind.trim_ascii_end()).replace('\0', "");
        ensure!(
            kind == "*UDF Metadata Partition",
            "a partition of kind `{}` is for writable media",
            kind.escape_default()
        );
        let physical = Partition::Physical(range(u16_at(map, 38)?)?);
        let none = Address { block: 0, partition: 0 };
        let (partitions, name) = (vec![physical], String::new());
        let below = Volume { partitions, root: none, name, work: Cell::default() };
        // The mirror serves if the metadata file is damaged.
        let file = |at: usize| below.node(image, Address { block: u32_at(map, at)?, partition: 0 });
        let node = file(40).or_else(|error| file(44).map_err(|_| error)).context("metadata")?;
        Ok(Partition::Metadata(node.content))
    }
}

/// Length and location of an `extent_ad` (3/7.1).
fn extent_ad(bytes: &[u8], at: usize) -> anyhow::Result<(u32, u32)> {
    Ok((u32_at(bytes, at)?, u32_at(bytes, at + 4)?))
}

/// Length and address of a `long_ad` (4/14.14.2).
fn long_ad(bytes: &[u8], at: usize) -> anyhow::Result<(u32, Address)> {
    let address = Address { block: u32_at(bytes, at + 4)?, partition: u16_at(bytes, at + 8)? };
    Ok((u32_at(bytes, at)? & LENGTH, address))
}

/// The identifier of a descriptor whose checksums fit (3/7.2).
fn check_tag(bytes: &[u8]) -> Option<u16> {
    let head = bytes.get(..16)?;
    let sum = head.iter().enumerate().filter(|(at, _)| *at != 4);
    let sum = sum.fold(0_u8, |sum, (_, byte)| sum.wrapping_add(*byte));
    let length = usize::from(u16_at(head, 10).ok()?);
    let body = bytes.get(16..16 + length)?;
    let fits = sum == head[4] && crc(body) == u16_at(head, 8).ok()?;
    fits.then(|| u16_at(head, 0).ok()).flatten()
}

/// CRC-ITU-T of a descriptor's body (3/7.2.6).
pub fn crc(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
        })
    })
}

impl Tree for Volume {
    type Entry = Address;

    fn root(&self) -> Address {
        self.root
    }

    /// Reads a file entry or an extended one (4/14.9, 4/14.17).
    fn node(&self, image: &(impl Image + ?Sized), address: Address) -> anyhow::Result<Node> {
        let (place, bytes) = self.block(image, address)?;
        let lengths = match check_tag(&bytes) {
            Some(tag::FILE_ENTRY) => 168,
            Some(tag::EXTENDED_FILE_ENTRY) => 208,
            other => bail!("block {} has no file entry (tag {other:?})", address.block),
        };
        let strategy = u16_at(&bytes, 20)?;
        ensure!(strategy == 4, "strategy {strategy} is for media that are written once");
        let (is_directory, flags) = (bytes[27] == DIRECTORY, u16_at(&bytes, 34)?);
        let size = u64_at(&bytes, 56)?;
        let attributes = usize::try_from(u32_at(&bytes, lengths)?)?;
        let count = usize::try_from(u32_at(&bytes, lengths + 4)?)?;
        let start = attributes.checked_add(lengths + 8).context("attributes")?;
        let end = start.checked_add(count).filter(|end| *end <= SECTOR_BYTES);
        let descriptors = &bytes[start..end.context("a file entry longer than its block")?];
        let mut content = Content::default();
        match flags & 7 {
            EMBEDDED => {
                content.push(Extent { start: place.start + start as u64, length: count as u64 })?;
            }
            kind => {
                let (bytes, partition) = (descriptors.to_vec(), address.partition);
                self.gather(image, Allocations { bytes, kind, partition }, &mut content)?;
            }
        }
        content.truncate(size)?;
        Ok(Node { content, is_directory })
    }

    /// File identifier descriptors (4/14.4).
    fn each(
        &self,
        directory: &[u8],
        mut take: impl FnMut(String, Address) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let mut rest = directory;
        while rest.len() >= 38 {
            let kind = u16_at(rest, 0)?;
            ensure!(kind == tag::FILE_IDENTIFIER, "a directory has a descriptor of tag {kind}");
            let (characteristics, length) = (rest[18], usize::from(rest[19]));
            let start = 38 + usize::from(u16_at(rest, 36)?);
            let name = rest.get(start..start + length).context("a name beyond its directory")?;
            let deleted = characteristics & DELETED_OR_PARENT != 0;
            if !deleted && !take(compressed_unicode(name), long_ad(rest, 20)?.1)? {
                return Ok(());
            }
            let next = (start + length).next_multiple_of(4);
            rest = rest.get(next..).unwrap_or_default();
        }
        Ok(())
    }
}

/// OSTA compressed Unicode (UDF 2.1.1): 8 or 16 bits for each character.
fn compressed_unicode(bytes: &[u8]) -> String {
    match bytes.split_first() {
        Some((8 | 254, name)) => name.iter().map(|byte| char::from(*byte)).collect(),
        Some((16 | 255, name)) => {
            let units = name.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
            char::decode_utf16(units).map(|it| it.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
        }
        _ => String::new(),
    }
}

/// A `dstring`: its last byte is the length of what is used (1/7.2.12).
fn dstring(bytes: &[u8]) -> String {
    let length = bytes.last().map_or(0, |it| usize::from(*it).min(bytes.len() - 1));
    compressed_unicode(&bytes[..length])
}
