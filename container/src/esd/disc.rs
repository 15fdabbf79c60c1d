//! Writes the descriptors of a CD as Microsoft's have them: UDF 1.02 (ECMA-167) with the files, an
//! ISO 9660 (ECMA-119) that only says so, and a boot catalog (El Torito). Files are elsewhere
//! behind them.

mod udf;

use anyhow::{Context as _, ensure};

use crate::media::{SECTOR, SECTOR_BYTES};

/// Sectors of the volume descriptors of both file systems, and what ISO 9660 has.
const DESCRIPTORS: u32 = 16;
const BRIDGE: u32 = 19;
const CATALOG: u32 = 22;
const PATHS: [u32; 2] = [23, 24];
const ROOT: u32 = 25;
const README: u32 = 26;
const MAIN: u32 = 32;
const RESERVE: u32 = 48;
const INTEGRITY: u32 = 64;
const ANCHOR: u32 = 256;
const PARTITION: u32 = 257;
/// Blocks of the partition that come before directories.
const FILE_SET: u32 = 0;
const FIRST_NODE: u32 = 2;
const LABEL: &str = "ESD_ISO";
const TEXT: &str =
    "This disc has a UDF file system and needs an operating system that reads it.\r\n";

/// A file. Its place counts sectors behind the descriptors.
#[derive(Clone, Debug)]
pub(super) struct File {
    pub name: String,
    pub place: u64,
    pub length: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Directory {
    pub name: String,
    pub directories: Vec<Self>,
    pub files: Vec<File>,
}

impl Directory {
    /// Sectors of the directory's descriptors and of all in it.
    fn sectors(&self) -> anyhow::Result<u64> {
        let mut sectors = 1 + sectors(self.length()? as u64) + self.files.len() as u64;
        for directory in &self.directories {
            sectors += directory.sectors()?;
        }
        Ok(sectors)
    }

    /// Bytes of the directory's identifiers.
    fn length(&self) -> anyhow::Result<usize> {
        let directories = self.directories.iter().map(|it| &it.name);
        let names = directories.chain(self.files.iter().map(|it| &it.name));
        let mut length = udf::identifier_length(&[]);
        for name in names {
            length += udf::identifier_length(&udf::encode(name)?);
        }
        Ok(length)
    }

    /// Numbers of files and directories.
    fn count(&self) -> (usize, usize) {
        let own = (self.files.len(), 1);
        let inner = self.directories.iter().map(Self::count);
        inner.fold(own, |one, two| (one.0 + two.0, one.1 + two.1))
    }

    pub(super) fn find(&self, path: &str) -> Option<&File> {
        match path.split_once('/') {
            Some((first, rest)) => {
                let fits = |it: &&Self| it.name.eq_ignore_ascii_case(first);
                self.directories.iter().find(fits)?.find(rest)
            }
            None => self.files.iter().find(|it| it.name.eq_ignore_ascii_case(path)),
        }
    }
}

pub(super) fn sectors(bytes: u64) -> u64 {
    bytes.div_ceil(SECTOR)
}

/// The first sector behind the descriptors of these files.
pub(super) fn first_sector(root: &Directory) -> anyhow::Result<u64> {
    Ok(u64::from(PARTITION + FIRST_NODE) + root.sectors()?)
}

/// The images that firmware starts: their places.
pub(super) struct Boot {
    pub bios: Option<u64>,
    pub efi: u64,
}

/// The descriptors of a disc with this last sector: the sectors at its start, and the last one.
pub(super) fn descriptors(
    root: &Directory,
    boot: &Boot,
    end: u64,
) -> anyhow::Result<(Vec<u8>, Vec<u8>)> {
    let first = first_sector(root)?;
    let front = usize::try_from(first * SECTOR)?;
    let end = u32::try_from(end).context("a CD that is too long")?;
    let mut disc = Disc { bytes: vec![0; front], first, next: FIRST_NODE, end };
    disc.iso();
    disc.boot(boot)?;
    disc.udf(root)?;
    disc.put(ANCHOR, &udf::anchor(ANCHOR));
    Ok((disc.bytes, udf::anchor(end)))
}

struct Disc {
    bytes: Vec<u8>,
    /// The first sector of files.
    first: u64,
    /// The next free block of the partition.
    next: u32,
    /// The last sector, which has an anchor.
    end: u32,
}

impl Disc {
    fn put(&mut self, sector: u32, bytes: &[u8]) {
        let at = sector as usize * SECTOR_BYTES;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Puts a descriptor into a block of the partition.
    fn put_block(&mut self, tag: u16, block: u32, content: &[u8]) {
        self.put(PARTITION + block, &udf::descriptor(tag, block, content));
    }

    fn take(&mut self, count: u64) -> anyhow::Result<u32> {
        let block = self.next;
        self.next += u32::try_from(count)?;
        Ok(block)
    }

    fn iso(&mut self) {
        let text = TEXT.as_bytes();
        self.put(README, text);
        let records = [
            record(b"\0", 2, ROOT, SECTOR_BYTES),
            record(b"\x01", 2, ROOT, SECTOR_BYTES),
            record(b"README.TXT;1", 0, README, text.len()),
        ];
        self.put(ROOT, &records.concat());
        let [low, high] = PATHS;
        self.put(low, &[&[1, 0][..], &ROOT.to_le_bytes(), &[1, 0, 0, 0]].concat());
        self.put(high, &[&[1, 0][..], &ROOT.to_be_bytes(), &[0, 1, 0, 0]].concat());
        let mut primary = vec![b' '; SECTOR_BYTES];
        let both = |number: u32| [number.to_le_bytes(), number.to_be_bytes()].concat();
        let fields: [(usize, &[u8]); 17] = [
            (0, b"\x01CD001\x01\0"),
            (40, LABEL.as_bytes()),
            (72, &[0; 8]),
            (80, &both(self.end + 1)),
            (88, &[0; 32]),
            (120, &[1, 0, 0, 1]),
            (124, &[1, 0, 0, 1]),
            (128, &[0, 8, 8, 0]),
            (132, &both(10)),
            (140, &low.to_le_bytes()),
            (144, &[0; 4]),
            (148, &high.to_be_bytes()),
            (152, &[0; 4]),
            (156, &records[0]),
            (574, b"TRANSOM"),
            (813, b"2025010100000000\x002025010100000000\0"),
            (847, b"0000000000000000\x000000000000000000\0\x01\0"),
        ];
        fields.iter().for_each(|(at, value)| primary[*at..at + value.len()].copy_from_slice(value));
        primary[883..].fill(0);
        self.put(DESCRIPTORS, &primary);
        self.put(DESCRIPTORS + 2, b"\xffCD001\x01");
        for (sector, name) in (BRIDGE..).zip([b"\0BEA01\x01", b"\0NSR02\x01", b"\0TEA01\x01"]) {
            self.put(sector, name);
        }
    }

    fn boot(&mut self, boot: &Boot) -> anyhow::Result<()> {
        let mut record = b"\0CD001\x01EL TORITO SPECIFICATION".to_vec();
        record.resize(71, 0);
        record.extend(CATALOG.to_le_bytes());
        self.put(DESCRIPTORS + 1, &record);
        let entry = |place: u64, count: u16| -> anyhow::Result<Vec<u8>> {
            let mut bytes = vec![0; 32];
            bytes[0] = 0x88;
            bytes[6..8].copy_from_slice(&count.to_le_bytes());
            bytes[8..12].copy_from_slice(&u32::try_from(self.first + place)?.to_le_bytes());
            Ok(bytes)
        };
        let platform = if boot.bios.is_some() { 0_u8 } else { 0xef };
        let mut first = vec![0; 32];
        first[..2].copy_from_slice(&[1, platform]);
        first[30..].copy_from_slice(&[0x55, 0xaa]);
        // Its words add up to 0.
        let word = u16::from_le_bytes([1, platform]).wrapping_add(0xaa55);
        first[28..30].copy_from_slice(&word.wrapping_neg().to_le_bytes());
        let efi = entry(boot.efi, 1)?;
        let section = [&[0x91, 0xef, 1, 0][..], &[0; 28]].concat();
        let catalog = match boot.bios {
            Some(bios) => [first, entry(bios, 8)?, section, efi].concat(),
            None => [first, efi].concat(),
        };
        self.put(CATALOG, &catalog);
        Ok(())
    }

    fn udf(&mut self, root: &Directory) -> anyhow::Result<()> {
        let length = self.end - PARTITION;
        for first in [MAIN, RESERVE] {
            for (sector, (tag, content)) in (first..).zip(udf::sequence(length)) {
                self.put(sector, &udf::descriptor(tag, sector, &content));
            }
        }
        let entry = self.directory(root, None)?;
        let fits = u64::from(PARTITION + self.next) == self.first;
        ensure!(fits, "descriptors of another size");
        self.put_block(256, FILE_SET, &udf::file_set(entry));
        self.put_block(8, FILE_SET + 1, &udf::content(512, &[]));
        let (files, directories) = root.count();
        let counts = [u32::try_from(files)?, u32::try_from(directories)?];
        let integrity = udf::integrity(length, self.next, counts);
        self.put(INTEGRITY, &udf::descriptor(9, INTEGRITY, &integrity));
        self.put(INTEGRITY + 1, &udf::descriptor(8, INTEGRITY + 1, &udf::content(512, &[])));
        Ok(())
    }

    /// Writes a directory and all in it. Returns the block of its file entry.
    fn directory(&mut self, directory: &Directory, parent: Option<u32>) -> anyhow::Result<u32> {
        let length = directory.length()?;
        let entry = self.take(1)?;
        let start = self.take(sectors(length as u64))?;
        let mut names = vec![(Vec::new(), udf::IS_PARENT, parent.unwrap_or(entry))];
        for inner in &directory.directories {
            let inner_entry = self.directory(inner, Some(entry))?;
            names.push((udf::encode(&inner.name)?, udf::IS_DIRECTORY, inner_entry));
        }
        for file in &directory.files {
            let block = self.take(1)?;
            let first = self.first - u64::from(PARTITION) + file.place;
            let extents = udf::Extents::new(first, file.length)?;
            self.put_block(261, block, &udf::file_entry(udf::REGULAR, block, &extents, 1));
            names.push((udf::encode(&file.name)?, 0, block));
        }
        let mut content = Vec::with_capacity(length);
        for (name, kind, block) in names {
            let place = start + u32::try_from(content.len() / SECTOR_BYTES)?;
            content.extend(udf::identifier(&name, kind, block, place));
        }
        self.put(PARTITION + start, &content);
        let links = u16::try_from(1 + directory.directories.len())?;
        let extents = udf::Extents::new(start.into(), content.len() as u64)?;
        self.put_block(261, entry, &udf::file_entry(udf::DIRECTORY, entry, &extents, links));
        Ok(entry)
    }
}

/// A directory record of ISO 9660.
fn record(name: &[u8], flags: u8, sector: u32, length: usize) -> Vec<u8> {
    let length = u32::try_from(length).unwrap_or(0);
    let mut bytes = vec![0; (33 + name.len()).next_multiple_of(2)];
    bytes[0] = u8::try_from(bytes.len()).unwrap_or(0);
    bytes[2..6].copy_from_slice(&sector.to_le_bytes());
    bytes[6..10].copy_from_slice(&sector.to_be_bytes());
    bytes[10..14].copy_from_slice(&length.to_le_bytes());
    bytes[14..18].copy_from_slice(&length.to_be_bytes());
    bytes[18..25].copy_from_slice(&[125, 1, 1, 0, 0, 0, 0]);
    bytes[25] = flags;
    bytes[28..32].copy_from_slice(&[1, 0, 0, 1]);
    bytes[32] = u8::try_from(name.len()).unwrap_or(0);
    bytes[33..33 + name.len()].copy_from_slice(name);
    bytes
}
