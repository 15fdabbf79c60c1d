//! Judges a disk by its partition table and its EFI system partitions: whether an installation
//! that was interrupted may begin again on it, or something may be lost.
//!
//! Threats: a guest has written the disk. Every number is checked before its use, and little is
//! read. Anything unknown counts as someone's data.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use anyhow::ensure;
use host::disk::qcow2;

use crate::disks::Disk;
use crate::settings::Format;

/// Content of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing has been written to it.
    Blank,
    /// Windows Setup began to divide it, and has not made it bootable: it has no partition of data,
    /// or all its EFI system partitions are empty.
    Unfinished,
    /// An EFI system partition has files.
    Bootable,
    /// Anything else, or it cannot be read.
    Unknown,
}

/// Bytes before the first partition of a disk that Windows divided.
const START: usize = 1 << 20;
/// Bytes of a sector. The machine's disks have no others.
const SECTOR: u64 = 512;
const SECTOR_BYTES: usize = 512;
/// Offsets of the partitions of an MBR, and of the type in each.
const MBR_PARTITIONS: [usize; 4] = [446, 462, 478, 494];
const MBR_TYPE: usize = 4;
/// Type of the one partition that protects a GPT.
const PROTECTIVE: u8 = 0xee;
const MBR_SIGNATURE: [u8; 2] = [0x55, 0xaa];
/// Start and smallest length of a GPT's header (UEFI 5.3.2), and offsets in it.
const GPT: &[u8] = b"EFI PART";
const GPT_HEADER: usize = 92;
const HEADER_CRC: usize = 16;
const ENTRIES_AT: usize = 72;
const ENTRIES: usize = 80;
const ENTRY_LENGTH: usize = 84;
const ENTRIES_CRC: usize = 88;
/// Maximum bytes of a GPT's partition entries. Windows makes 16 KiB.
const MAX_ENTRIES: usize = 64 << 10;
/// Type of an EFI system partition (UEFI 5.3.3), and those of the partitions that Windows Setup
/// makes beside it: reserved, basic data, recovery.
const EFI: [u8; 16] = guid(0xc12a_7328, 0xf81f, 0x11d2, 0xba4b_00a0_c93e_c93b);
const DATA: [u8; 16] = guid(0xebd0_a0a2, 0xb9e5, 0x4433, 0x87c0_68b6_b726_99c7);
const SETUPS: [[u8; 16]; 3] = [
    guid(0xe3c9_e316, 0x0b5c, 0x4db8, 0x817d_f92d_f002_15ae),
    DATA,
    guid(0xde94_bba4, 0x06d1, 0x4d40, 0xa16a_bfd5_0179_d6ac),
];
/// Offset of the first sector in a partition entry.
const FIRST: usize = 32;
/// Maximum bytes of a FAT's root directory that are read.
const MAX_DIRECTORY: usize = 64 << 10;
const DIRECTORY_ENTRY: usize = 32;
/// Folder that Windows makes on every volume: "System Volume Information".
const WINDOWS_OWN: &[u8] = b"SYSTEM~1   ";

/// Bytes of a GUID on a disk: the first three fields are little-endian.
const fn guid(first: u32, second: u16, third: u16, rest: u64) -> [u8; 16] {
    let (a, b, c, d) =
        (first.to_le_bytes(), second.to_le_bytes(), third.to_le_bytes(), rest.to_be_bytes());
    [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]]
}

/// Judges a disk. Returns quickly, whatever is on it.
pub fn look(disk: &Disk) -> Content {
    if let Some(base) = disk.base() {
        // Its system was installed there.
        return look(&base);
    }
    if !disk.is_written() {
        return Content::Blank;
    }
    disk.open().map_or(Content::Unknown, |file| judge(&Reader { file, format: disk.format }))
}

/// Bytes of a disk.
pub trait Sectors {
    /// Fails beyond the end.
    fn read(&self, length: usize, offset: u64) -> io::Result<Vec<u8>>;
}

impl Sectors for [u8] {
    fn read(&self, length: usize, offset: u64) -> io::Result<Vec<u8>> {
        let start = usize::try_from(offset).ok();
        let bytes = start.and_then(|start| self.get(start..)?.get(..length));
        bytes.map(<[u8]>::to_vec).ok_or(io::ErrorKind::UnexpectedEof.into())
    }
}

struct Reader {
    file: File,
    format: Format,
}

impl Sectors for Reader {
    fn read(&self, length: usize, offset: u64) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        match self.format {
            Format::Raw => self.file.read_exact_at(&mut bytes, offset)?,
            Format::Qcow2 => qcow2::peek(&self.file, &mut bytes, offset)?,
        }
        Ok(bytes)
    }
}

/// Judges a disk that has been written to.
pub fn judge(disk: &(impl Sectors + ?Sized)) -> Content {
    read(disk).unwrap_or(Content::Unknown)
}

fn read(disk: &(impl Sectors + ?Sized)) -> anyhow::Result<Content> {
    let start = disk.read(START, 0)?;
    let (mbr, behind) = start.split_at(SECTOR_BYTES);
    let is_gpts = |at: usize| matches!(mbr[at + MBR_TYPE], 0 | PROTECTIVE);
    let divided = mbr.ends_with(&MBR_SIGNATURE) && MBR_PARTITIONS.into_iter().all(is_gpts);
    if !divided {
        return Ok(Content::Unknown);
    }
    if !behind.starts_with(GPT) {
        // Windows writes the MBR first.
        let is_clear = behind.iter().all(|byte| *byte == 0);
        return Ok(if is_clear { Content::Unfinished } else { Content::Unknown });
    }
    let partitions = partitions(disk, &behind[..SECTOR_BYTES])?;
    let has = |wanted| partitions.iter().any(|(kind, _)| *kind == wanted);
    // Setup makes the EFI system partition before that of Windows.
    let is_setups = has(EFI) || !has(DATA);
    let mut content = if is_setups { Content::Unfinished } else { Content::Unknown };
    for (kind, first) in partitions {
        match kind {
            EFI if !is_empty(disk, first)? => return Ok(Content::Bootable),
            EFI => {}
            kind if SETUPS.contains(&kind) => {}
            _ => content = Content::Unknown,
        }
    }
    Ok(content)
}

/// Type and first byte of each partition. A table that an interrupted write has damaged is an
/// error.
fn partitions(
    disk: &(impl Sectors + ?Sized),
    header: &[u8],
) -> anyhow::Result<Vec<([u8; 16], u64)>> {
    let mut unsigned = header[..GPT_HEADER].to_vec();
    unsigned[HEADER_CRC..HEADER_CRC + 4].fill(0);
    ensure!(crc32fast::hash(&unsigned) == number(header, HEADER_CRC), "a damaged GPT");
    let [count, length] = [ENTRIES, ENTRY_LENGTH].map(|at| number(header, at));
    let (count, length) = (usize::try_from(count)?, usize::try_from(length)?);
    let bytes = count.checked_mul(length).filter(|bytes| *bytes <= MAX_ENTRIES);
    let Some(bytes) = bytes.filter(|_| length >= 128) else { anyhow::bail!("a strange GPT") };
    let table = disk.read(bytes, byte_of(long(header, ENTRIES_AT))?)?;
    ensure!(crc32fast::hash(&table) == number(header, ENTRIES_CRC), "a damaged GPT");
    let mut found = Vec::new();
    for entry in table.chunks_exact(length) {
        let mut kind = [0; 16];
        kind.copy_from_slice(&entry[..16]);
        if kind != [0; 16] {
            found.push((kind, byte_of(long(entry, FIRST))?));
        }
    }
    Ok(found)
}

/// Whether a partition is blank, or a FAT without files. Fails if it is neither.
fn is_empty(disk: &(impl Sectors + ?Sized), at: u64) -> anyhow::Result<bool> {
    let boot = disk.read(SECTOR_BYTES, at)?;
    if boot.iter().all(|byte| *byte == 0) {
        return Ok(true);
    }
    ensure!(boot.ends_with(&MBR_SIGNATURE), "it has no FAT");
    let half = |at: usize| u64::from(u16::from_le_bytes([boot[at], boot[at + 1]]));
    let (sector, cluster, reserved) = (half(11), u64::from(boot[13]), half(14));
    let (tables, entries, short) = (u64::from(boot[16]), half(17), half(22));
    let known = sector == SECTOR && cluster.is_power_of_two() && (1..=2).contains(&tables);
    ensure!(known && reserved > 0, "it has no FAT");
    let behind_tables = |length: u64| reserved + tables * length;
    let (first, length) = if short > 0 {
        (behind_tables(short), usize::try_from(entries)? * DIRECTORY_ENTRY)
    } else {
        // FAT32: the root directory is a chain of clusters, of which the first one is enough.
        let root = u64::from(number(&boot, 44));
        ensure!(root >= 2, "it has no root directory");
        let data = behind_tables(u64::from(number(&boot, 36)));
        (data + (root - 2) * cluster, usize::try_from(cluster * SECTOR)?)
    };
    ensure!(length > 0, "it has no root directory");
    let start = at.saturating_add(byte_of(first)?);
    let directory = disk.read(length.min(MAX_DIRECTORY), start)?;
    Ok(has_no_files(&directory))
}

/// Whether a directory of a FAT ends before its first file or folder.
fn has_no_files(directory: &[u8]) -> bool {
    for entry in directory.chunks_exact(DIRECTORY_ENTRY) {
        // A deleted entry; the name of the volume, or a part of a long name.
        let is_file = entry[0] != 0xe5 && entry[11] & 8 == 0;
        match entry[0] {
            0 => return true,
            _ if is_file && !entry.starts_with(WINDOWS_OWN) => return false,
            _ => {}
        }
    }
    // It goes on elsewhere.
    false
}

/// The first byte of a sector.
fn byte_of(sector: u64) -> anyhow::Result<u64> {
    sector.checked_mul(SECTOR).ok_or_else(|| anyhow::anyhow!("a sector beyond all disks"))
}

fn number(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(number(bytes, at)) | u64::from(number(bytes, at + 4)) << 32
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::process::Command;

    use super::super::testutil::{Esp, HEADER, disk, seal};
    use super::*;

    fn judged(bytes: &[u8]) -> Content {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.img");
        fs::write(&path, bytes).unwrap();
        look(&Disk::new(path, Format::Raw))
    }

    #[test]
    fn only_a_disk_without_a_boot_loader_is_unfinished() {
        assert_eq!(judged(&disk(Esp::Empty)), Content::Unfinished);
        assert_eq!(judged(&disk(Esp::Unformatted)), Content::Unfinished);
        assert_eq!(judged(&disk(Esp::None)), Content::Unfinished);
        assert_eq!(judged(&disk(Esp::Files)), Content::Bootable);
        assert_eq!(judged(&[0; 1 << 21]), Content::Blank);
        assert_eq!(judged(b"x"), Content::Unknown);
        // Windows' MBR, before the GPT is there.
        let mut mbr = vec![0; 2 << 20];
        mbr[..SECTOR_BYTES].copy_from_slice(&disk(Esp::Empty)[..SECTOR_BYTES]);
        assert_eq!(judged(&mbr), Content::Unfinished);
        mbr[4096] = 1;
        assert_eq!(judged(&mbr), Content::Unknown);
    }

    #[test]
    fn what_is_not_understood_is_kept() {
        let with = |at: usize, byte: u8, sealed: bool| {
            let mut disk = disk(Esp::Empty);
            disk[at] = byte;
            if sealed {
                seal(&mut disk);
            }
            judged(&disk)
        };
        assert_eq!(with(0, 1, false), Content::Unfinished);
        for (at, byte, sealed) in [
            // An MBR with a partition, or without a signature.
            (MBR_PARTITIONS[1] + MBR_TYPE, 7, true),
            (510, 0, true),
            // A damaged header or entry, strange lengths and places, a partition of another system.
            (HEADER + 40, 1, false),
            (2 * SECTOR_BYTES + 40, 1, false),
            (HEADER + ENTRIES + 3, 1, true),
            (HEADER + ENTRY_LENGTH, 64, true),
            (HEADER + ENTRIES_AT + 7, 0xff, true),
            (2 * SECTOR_BYTES + 128, 9, true),
            (2 * SECTOR_BYTES + FIRST + 7, 0xff, true),
            // A partition with something else than a FAT.
            ((1 << 20) + 11, 1, true),
            ((1 << 20) + 13, 3, true),
            ((1 << 20) + 44, 1, true),
            ((1 << 20) + 511, 1, true),
        ] {
            assert_eq!(with(at, byte, sealed), Content::Unknown, "{at}");
        }
        // Someone's data, without an EFI system partition.
        let mut data = disk(Esp::Empty);
        data[2 * SECTOR_BYTES..][..16].fill(0);
        seal(&mut data);
        assert_eq!(judged(&data), Content::Unknown);
        let mut short = disk(Esp::Empty);
        short.truncate((1 << 20) + 100);
        assert_eq!(judged(&short), Content::Unknown);
    }

    #[test]
    fn a_qcow2_image_is_judged_by_its_content() {
        let folder = tempfile::tempdir().unwrap();
        let [raw, made] = ["raw", "data.qcow2"].map(|name| folder.path().join(name));
        for (esp, content) in [(Esp::Empty, Content::Unfinished), (Esp::Files, Content::Bootable)] {
            fs::write(&raw, disk(esp)).unwrap();
            let convert = |more: &[&str]| {
                let mut run = Command::new("qemu-img");
                run.args(["convert", "-f", "raw", "-O", "qcow2"]).args(more).args([&raw, &made]);
                assert!(run.output().unwrap().status.success());
                look(&Disk::new(made.clone(), Format::Qcow2))
            };
            assert_eq!(convert(&[]), content);
            // Nothing is unpacked to judge it.
            assert_eq!(convert(&["-c"]), Content::Unknown);
        }
    }
}
