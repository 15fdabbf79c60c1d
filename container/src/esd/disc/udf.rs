//! Descriptors of UDF 1.02 (ECMA-167, 2nd edition).

use anyhow::{Context as _, ensure};

use super::{FILE_SET, FIRST_NODE, INTEGRITY, LABEL, MAIN, PARTITION, RESERVE};
use crate::media::udf::crc;
use crate::media::{SECTOR, SECTOR_BYTES};

/// Longest extent (4/14.14.1.1), in whole sectors.
const MAX_EXTENT: u64 = (1 << 30) - SECTOR;
const MAX_EXTENTS: usize = 64;
/// Bytes of a file identifier before its name.
const IDENTIFIER: usize = 38;
const MAX_NAME: usize = 254;
/// Kinds in file entries (4/14.6.6), and characteristics of their identifiers (4/14.4.3).
pub(super) const DIRECTORY: u8 = 4;
pub(super) const REGULAR: u8 = 5;
pub(super) const IS_DIRECTORY: u8 = 2;
pub(super) const IS_PARENT: u8 = 8 | IS_DIRECTORY;
/// Everybody may read and execute.
const PERMISSIONS: u32 = 0x14a5;
/// 2025-01-01, UTC.
const TIME: [u8; 12] = [0, 0x10, 0xe9, 7, 1, 1, 0, 0, 0, 0, 0, 0];
/// Version of UDF in identifiers.
const VERSION: [u8; 2] = [2, 1];
const WRITER: &str = "*Transom";

/// A descriptor with its tag (3/7.2).
pub(super) fn descriptor(tag: u16, location: u32, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    bytes[..2].copy_from_slice(&tag.to_le_bytes());
    bytes[2] = 2;
    bytes[8..10].copy_from_slice(&crc(content).to_le_bytes());
    bytes[10..12].copy_from_slice(&u16::try_from(content.len()).unwrap_or(0).to_le_bytes());
    bytes[12..16].copy_from_slice(&location.to_le_bytes());
    bytes[4] = bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte));
    bytes.extend_from_slice(content);
    bytes
}

/// The content of a descriptor: values at their offsets in the descriptor.
pub(super) fn content(length: usize, fields: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fields.iter().for_each(|(at, value)| bytes[*at..at + value.len()].copy_from_slice(value));
    bytes.split_off(16)
}

/// A sector with the places of the volume descriptor sequences.
pub(super) fn anchor(sector: u32) -> Vec<u8> {
    let [main, reserve] = [MAIN, RESERVE].map(u32::to_le_bytes);
    let length = (16 * 2048_u32).to_le_bytes();
    let fields: [(usize, &[u8]); 4] = [(16, &length), (20, &main), (24, &length), (28, &reserve)];
    let mut bytes = descriptor(2, sector, &content(512, &fields));
    bytes.resize(SECTOR_BYTES, 0);
    bytes
}

/// An identifier of an entity (1/7.4). UDF's have its version.
fn entity(name: &str) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[1..=name.len()].copy_from_slice(name.as_bytes());
    if name.contains("UDF") {
        bytes[24..26].copy_from_slice(&VERSION);
    }
    bytes
}

fn characters() -> [u8; 64] {
    let mut bytes = [0; 64];
    bytes[1..24].copy_from_slice(b"OSTA Compressed Unicode");
    bytes
}

/// The name of the volume in a field of this length (1/7.2.12).
fn label<const LENGTH: usize>() -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    bytes[0] = 8;
    bytes[1..=LABEL.len()].copy_from_slice(LABEL.as_bytes());
    bytes[LENGTH - 1] = u8::try_from(LABEL.len() + 1).unwrap_or(0);
    bytes
}

/// The volume descriptor sequence, for a partition of this length: tags and contents.
pub(super) fn sequence(length: u32) -> Vec<(u16, Vec<u8>)> {
    let one = &1_u32.to_le_bytes()[..];
    let [two, three, four, six, size, logs] = [2, 3, 4, 6, 2048, 4096].map(u32::to_le_bytes);
    let (own, set) = (&entity(WRITER)[..], &characters()[..]);
    let (short, long) = (&label::<32>()[..], &label::<128>()[..]);
    let (start, length) = (&PARTITION.to_le_bytes()[..], &length.to_le_bytes()[..]);
    let (used, nsr, domain) =
        (entity("*UDF LV Info"), entity("+NSR02"), entity("*OSTA UDF Compliant"));
    let (root, logs_at) = (address(FILE_SET, 0), INTEGRITY.to_le_bytes());
    let primary: [(usize, &[u8]); 9] = [
        (24, short),
        (56, &[1, 0, 1, 0, 2, 0, 2, 0]),
        (64, one),
        (68, one),
        (72, long),
        (200, set),
        (264, set),
        (376, &TIME),
        (388, own),
    ];
    let used: [(usize, &[u8]); 5] = [(16, one), (20, &used), (52, set), (116, long), (352, own)];
    let partition: [(usize, &[u8]); 7] =
        [(16, &two), (20, &[1]), (24, &nsr), (184, one), (188, start), (192, length), (196, own)];
    let volume: [(usize, &[u8]); 12] = [
        (16, &three),
        (20, set),
        (84, long),
        (212, &size),
        (216, &domain),
        (248, &root),
        (264, &six),
        (268, one),
        (272, own),
        (432, &logs),
        (436, &logs_at),
        (440, &[1, 6, 1, 0, 0, 0]),
    ];
    vec![
        (1, content(512, &primary)),
        (4, content(512, &used)),
        (5, content(512, &partition)),
        (6, content(446, &volume)),
        (7, content(24, &[(16, &four)])),
        (8, content(512, &[])),
    ]
}

/// The logical volume integrity descriptor: numbers of files and directories.
pub(super) fn integrity(length: u32, next: u32, counts: [u32; 2]) -> Vec<u8> {
    let [files, directories] = counts.map(u32::to_le_bytes);
    let unique = (u64::from(next) + 16).to_le_bytes();
    let fields: [(usize, &[u8]); 10] = [
        (16, &TIME),
        (28, &[1]),
        (40, &unique),
        (72, &[1]),
        (76, &[46]),
        (84, &length.to_le_bytes()),
        (88, &entity(WRITER)),
        (120, &files),
        (124, &directories),
        (128, &[2, 1, 2, 1, 2, 1]),
    ];
    content(134, &fields)
}

pub(super) fn file_set(root: u32) -> Vec<u8> {
    let set = characters();
    let fields: [(usize, &[u8]); 10] = [
        (16, &TIME),
        (28, &[3, 0, 3, 0]),
        (32, &[1]),
        (36, &[1]),
        (48, &set),
        (112, &label::<128>()),
        (240, &set),
        (304, &label::<32>()),
        (400, &address(root, 0)),
        (416, &entity("*OSTA UDF Compliant")),
    ];
    content(512, &fields)
}

/// A `long_ad` to a descriptor, with the unique number of a file.
fn address(block: u32, unique: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&2048_u32.to_le_bytes());
    bytes[4..8].copy_from_slice(&block.to_le_bytes());
    bytes[12..].copy_from_slice(&unique.to_le_bytes());
    bytes
}

/// The unique number of a file, which follows from the block of its entry. The root has 0.
fn unique(block: u32) -> u32 {
    if block == FIRST_NODE { 0 } else { block + 16 }
}

/// The blocks of a file: a `short_ad` for each extent.
pub(super) struct Extents {
    bytes: Vec<u8>,
    length: u64,
}

impl Extents {
    pub(super) fn new(mut block: u64, length: u64) -> anyhow::Result<Self> {
        let (mut bytes, mut rest) = (Vec::new(), length);
        while rest > 0 && bytes.len() < MAX_EXTENTS * 8 {
            let part = rest.min(MAX_EXTENT);
            bytes.extend(u32::try_from(part)?.to_le_bytes());
            bytes.extend(u32::try_from(block).context("a CD that is too long")?.to_le_bytes());
            block += super::sectors(part);
            rest -= part;
        }
        ensure!(rest == 0, "a file of {length} bytes is too long");
        Ok(Self { bytes, length })
    }
}

pub(super) fn file_entry(kind: u8, block: u32, extents: &Extents, links: u16) -> Vec<u8> {
    let count = u32::try_from(extents.bytes.len()).unwrap_or(0).to_le_bytes();
    let fields: [(usize, &[u8]); 16] = [
        (20, &[4, 0]),
        (24, &[1, 0]),
        (27, &[kind]),
        (36, &[0xff; 8]),
        (44, &PERMISSIONS.to_le_bytes()),
        (48, &links.to_le_bytes()),
        (56, &extents.length.to_le_bytes()),
        (64, &super::sectors(extents.length).to_le_bytes()),
        (72, &TIME),
        (84, &TIME),
        (96, &TIME),
        (108, &[1]),
        (128, &entity(WRITER)),
        (160, &unique(block).to_le_bytes()),
        (172, &count),
        (176, &extents.bytes),
    ];
    content(176 + extents.bytes.len(), &fields)
}

/// A name in OSTA compressed Unicode (UDF 2.1.1).
pub(super) fn encode(name: &str) -> anyhow::Result<Vec<u8>> {
    let narrow: Result<Vec<u8>, _> = name.chars().map(|it| u8::try_from(u32::from(it))).collect();
    let wide = || name.encode_utf16().flat_map(u16::to_be_bytes);
    let bytes: Vec<u8> = match narrow {
        Ok(bytes) => std::iter::once(8).chain(bytes).collect(),
        Err(_) => std::iter::once(16).chain(wide()).collect(),
    };
    ensure!((2..=MAX_NAME).contains(&bytes.len()), "a name of {} bytes", bytes.len());
    Ok(bytes)
}

pub(super) fn identifier_length(name: &[u8]) -> usize {
    (IDENTIFIER + name.len()).next_multiple_of(4)
}

/// A file identifier descriptor in a block of a directory. The parent directory has no name.
pub(super) fn identifier(name: &[u8], kind: u8, entry: u32, place: u32) -> Vec<u8> {
    let length = u8::try_from(name.len()).unwrap_or(0);
    let target = address(entry, unique(entry));
    let fields: [(usize, &[u8]); 5] =
        [(16, &[1, 0]), (18, &[kind]), (19, &[length]), (20, &target), (IDENTIFIER, name)];
    descriptor(257, place, &content(identifier_length(name), &fields))
}
