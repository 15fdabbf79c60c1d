//! The header of a qcow2 image (QEMU's docs/interop/qcow2.rst, "Header").
//!
//! Threats: an image may come from a stranger, so no field is trusted. Sizes and offsets are
//! bounded before anything is allocated or added.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, bail, ensure};

use super::super::format::QCOW2;

/// Offsets of the fields.
const VERSION: usize = 4;
/// `backing_file_offset`.
const BACKING: usize = 8;
const BACKING_SIZE: usize = 16;
const CLUSTER_BITS: usize = 20;
pub(super) const SIZE: usize = 24;
const CRYPT: usize = 32;
pub(super) const L1_SIZE: usize = 36;
pub(super) const L1_OFFSET: usize = 40;
const REFTABLE: usize = 48;
const REFTABLE_CLUSTERS: usize = 56;
const SNAPSHOTS: usize = 60;
pub(super) const INCOMPATIBLE: usize = 72;
pub(super) const AUTOCLEAR: usize = 88;
const REFCOUNT_ORDER: usize = 96;
const LENGTH: usize = 100;
const COMPRESSION: usize = 104;
/// All fields up to this offset exist in version 3.
const VERSION_3: usize = 104;
/// Bytes that are read from the file. They must contain the fields, the extensions and the backing
/// file's name.
const HEAD: usize = 4096;

/// Header extensions.
const BACKING_FORMAT: u32 = 0xe279_2aca;
const FEATURE_NAMES: u32 = 0x6803_f857;
/// QEMU's limits of the two tables, in bytes.
const MAX_L1_BYTES: u64 = 32 << 20;
const MAX_REFTABLE_BYTES: u64 = 8 << 20;
/// In bytes.
pub(super) const MAX_NAME_LENGTH: usize = 1023;

pub(super) const REPAIR_ADVICE: &str =
    "repair it with `qemu-img check -r all`, or set `readonly` to read it";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) cluster_bits: u32,
    pub(super) size: u64,
    pub(super) l1_entries: usize,
    pub(super) l1_offset: u64,
    pub(super) reftable_offset: u64,
    pub(super) reftable_entries: usize,
    pub(super) snapshots: u32,
    pub(super) incompatible: u64,
    pub(super) autoclear: u64,
    pub(super) refcount_order: u32,
    pub(super) backing: Option<String>,
    pub(super) backing_format: Option<String>,
    /// The image has unknown extensions, which may own clusters.
    pub(super) extended: bool,
}

/// Bits of `incompatible`.
pub(super) const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

fn number32(head: &[u8], at: usize) -> u32 {
    head.get(at..at + 4).map_or(0, |it| u32::from_be_bytes(it.try_into().expect("four bytes")))
}

fn number64(head: &[u8], at: usize) -> u64 {
    head.get(at..at + 8).map_or(0, |it| u64::from_be_bytes(it.try_into().expect("eight bytes")))
}

impl Header {
    pub(super) fn read(file: &File) -> anyhow::Result<Self> {
        let mut head = vec![0; HEAD];
        let mut length = 0;
        while length < HEAD {
            match file.read_at(&mut head[length..], length as u64).context("its header")? {
                0 => break,
                more => length += more,
            }
        }
        head.truncate(length);
        Self::parse(&head)
    }

    /// Encodes the header of a version 3 image, with the name and format of its backing file.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut head = vec![0; VERSION_3];
        let (mut name_at, mut name_length) = (0, 0);
        if let Some(name) = &self.backing {
            if let Some(format) = &self.backing_format {
                head.extend(BACKING_FORMAT.to_be_bytes());
                head.extend(short(format.len()).to_be_bytes());
                head.extend(format.bytes());
                head.resize(head.len().next_multiple_of(8), 0);
            }
            // The end of the extensions.
            head.extend([0; 8]);
            (name_at, name_length) = (head.len() as u64, short(name.len()));
            head.extend(name.bytes());
        }
        let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
        put(BACKING, &name_at.to_be_bytes());
        put(BACKING_SIZE, &name_length.to_be_bytes());
        put(0, QCOW2);
        put(VERSION, &self.version.to_be_bytes());
        put(CLUSTER_BITS, &self.cluster_bits.to_be_bytes());
        put(SIZE, &self.size.to_be_bytes());
        put(L1_SIZE, &short(self.l1_entries).to_be_bytes());
        put(L1_OFFSET, &self.l1_offset.to_be_bytes());
        put(REFTABLE, &self.reftable_offset.to_be_bytes());
        let clusters = short(self.reftable_entries * 8) >> self.cluster_bits;
        put(REFTABLE_CLUSTERS, &clusters.to_be_bytes());
        put(REFCOUNT_ORDER, &self.refcount_order.to_be_bytes());
        put(LENGTH, &short(VERSION_3).to_be_bytes());
        head
    }

    pub(super) fn parse(head: &[u8]) -> anyhow::Result<Self> {
        ensure!(head.len() >= 72, "its header is cut off after {} bytes", head.len());
        let version = number32(head, VERSION);
        ensure!(matches!(version, 2 | 3), "version {version} of qcow2 is not supported");
        let cluster_bits = number32(head, CLUSTER_BITS);
        ensure!((9..=21).contains(&cluster_bits), "invalid clusters of 2^{cluster_bits} bytes");
        let cluster = 1_u64 << cluster_bits;
        ensure!(
            number32(head, CRYPT) == 0,
            "it is encrypted, which is not supported: `qemu-img convert` it"
        );
        let size = number64(head, SIZE);
        ensure!(size > 0 && size.is_multiple_of(512), "an invalid disk size of {size} bytes");
        let covered = cluster * (cluster / 8);
        let needed = size.div_ceil(covered);
        let entries = u64::from(number32(head, L1_SIZE));
        ensure!(entries >= needed, "an L1 table of {entries} entries, but {needed} are needed");
        ensure!(entries * 8 <= MAX_L1_BYTES, "an L1 table of {entries} entries, which is too long");
        let clusters = u64::from(number32(head, REFTABLE_CLUSTERS));
        let reftable = clusters.checked_mul(cluster).filter(|it| *it <= MAX_REFTABLE_BYTES);
        let reftable = reftable.with_context(|| {
            format!("a refcount table of {clusters} clusters, which is too long")
        })?;
        let mut header = Self {
            version,
            cluster_bits,
            size,
            l1_entries: usize::try_from(entries)?,
            l1_offset: aligned(head, L1_OFFSET, cluster)?,
            reftable_offset: aligned(head, REFTABLE, cluster)?,
            reftable_entries: usize::try_from(reftable / 8)?,
            snapshots: number32(head, SNAPSHOTS),
            incompatible: 0,
            autoclear: 0,
            refcount_order: 4,
            backing: None,
            backing_format: None,
            extended: false,
        };
        header.read_extensions(head, cluster)?;
        header.backing = backing(head)?;
        Ok(header)
    }

    fn read_extensions(&mut self, head: &[u8], cluster: u64) -> anyhow::Result<()> {
        let mut at = 72;
        if self.version == 3 {
            ensure!(head.len() >= VERSION_3, "its header is cut off after {} bytes", head.len());
            self.incompatible = number64(head, INCOMPATIBLE);
            self.autoclear = number64(head, AUTOCLEAR);
            self.refcount_order = number32(head, REFCOUNT_ORDER);
            ensure!(
                self.refcount_order <= 6,
                "invalid refcounts of 2^{} bits",
                self.refcount_order
            );
            at = usize::try_from(number32(head, LENGTH))?;
            let max = usize::try_from(cluster)?.min(HEAD);
            ensure!((VERSION_3..=max).contains(&at), "an invalid header length of {at} bytes");
            let compression = if at > COMPRESSION { head.get(COMPRESSION) } else { None };
            if let (Some(kind), true) = (compression, self.incompatible & COMPRESSION_TYPE != 0) {
                ensure!(*kind == 0, "it is compressed with zstd: `qemu-img convert` it");
                self.incompatible &= !COMPRESSION_TYPE;
            }
        }
        // Unknown extensions are ignored. A chain that exceeds the bytes read ends there.
        while let Some(data) = head.get(at + 8..) {
            let (kind, length) = (number32(head, at), number32(head, at + 4) as usize);
            let Some(data) = data.get(..length).filter(|_| kind != 0) else { break };
            match kind {
                BACKING_FORMAT => self.backing_format = Some(text(data)?),
                FEATURE_NAMES => {}
                _ => self.extended = true,
            }
            at += 8 + length.next_multiple_of(8);
        }
        Ok(())
    }

    /// Whether writers set the dirty bit, so that the next one looks for clusters that a kill has
    /// leaked.
    pub(super) fn is_marked(&self) -> bool {
        self.version == 3 && !self.extended
    }

    /// Fails if this image cannot be read here, or cannot be written if `writes` is set.
    pub(super) fn check(&self, writes: bool) -> anyhow::Result<()> {
        let bits = self.incompatible;
        ensure!(bits & DATA_FILE == 0, "its data is in another file: `qemu-img convert` it");
        ensure!(bits & EXTENDED_L2 == 0, "it has extended L2 entries: `qemu-img convert` it");
        let unknown = bits & !(DIRTY | CORRUPT);
        ensure!(unknown == 0, "it has unknown features {unknown:#x}: `qemu-img convert` it");
        if !writes {
            return Ok(());
        }
        ensure!(bits & CORRUPT == 0, "it is damaged: {REPAIR_ADVICE}");
        ensure!(bits == 0 || !self.extended, "it was not closed: {REPAIR_ADVICE}");
        ensure!(
            self.snapshots == 0,
            "it has internal snapshots ({}): delete them with `qemu-img snapshot -d`, or set \
             `readonly`",
            self.snapshots
        );
        ensure!(
            self.refcount_order == 4,
            "its refcounts have {} bits, not 16: `qemu-img convert` it, or set `readonly`",
            1 << self.refcount_order
        );
        Ok(())
    }
}

fn short(number: usize) -> u32 {
    u32::try_from(number).expect("tables and names have limits")
}

fn aligned(head: &[u8], at: usize, cluster: u64) -> anyhow::Result<u64> {
    let offset = number64(head, at);
    // Offsets have 56 bits.
    let sound = offset > 0 && offset.is_multiple_of(cluster) && offset < 1 << 56;
    ensure!(sound, "an invalid table offset {offset:#x}");
    Ok(offset)
}

fn backing(head: &[u8]) -> anyhow::Result<Option<String>> {
    let (at, length) = (number64(head, BACKING), number32(head, BACKING_SIZE) as usize);
    if at == 0 || length == 0 {
        return Ok(None);
    }
    let at = usize::try_from(at)?;
    let name = at.checked_add(length).filter(|_| length <= MAX_NAME_LENGTH);
    let Some(name) = name.and_then(|end| head.get(at..end)) else {
        bail!("its backing file's name has an invalid position: {length} bytes at {at:#x}");
    };
    Ok(Some(text(name)?))
}

fn text(bytes: &[u8]) -> anyhow::Result<String> {
    let text = String::from_utf8(bytes.to_vec()).context("a name that is not UTF-8")?;
    ensure!(!text.chars().any(char::is_control), "a name with control characters: {text:?}");
    Ok(text)
}
