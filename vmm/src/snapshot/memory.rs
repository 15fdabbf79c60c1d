//! The file with the contents of memory: sparse, with a checksum for each piece that has data.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use host::ram::MmapRegion;
use host::share_blocks::share_blocks;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use vm_memory::VolatileMemory as _;

use super::cipher::{AuthTag, Cipher};
use crate::{ram, signals};

/// The bytes that have a checksum together.
const CHUNK: usize = 1 << 20;
const PAGE: usize = 4096;
/// Bytes that are written before they are made durable, if there is a time limit.
const SYNCED_BYTES: usize = 32 << 20;
/// Bytes of /proc/self/pagemap for a page, and its bits: in memory or swapped out; of a file, which
/// in a private mapping means that it was not written.
const ENTRY: usize = 8;
const PRESENT: u64 = 0b11 << 62;
const OF_FILE: u64 = 1 << 61;

/// A mapping in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub bytes: u64,
    /// That of each mebibyte, or none if it has only zeros and the file has no data there.
    checksums: Vec<Option<Checksum>>,
}

/// Proves that the data of a mebibyte are those that were written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Checksum {
    Crc32(u32),
    Encrypted(Piece),
}

/// An encrypted mebibyte: the pages that are not zero, one after another from its beginning on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Piece {
    /// A bit for each page.
    #[serde(with = "host::hex")]
    pages: Vec<u8>,
    tag: AuthTag,
}

impl Part {
    /// A part whose contents are not in a file.
    pub fn sent(bytes: u64) -> Self {
        Self { bytes, checksums: Vec::new() }
    }
}

impl Piece {
    /// Encrypts and writes the pages that are not zero, if there are any.
    fn write(
        file: &mut Writer<'_>,
        offset: u64,
        chunk: &[u8],
        cipher: &Cipher,
    ) -> anyhow::Result<Option<Self>> {
        let mut pages = vec![0; chunk.len().div_ceil(PAGE).div_ceil(8)];
        let mut data = std::mem::take(&mut file.buffer);
        data.clear();
        for (index, page) in chunk.chunks(PAGE).enumerate() {
            if !is_zero(page) {
                pages[index / 8] |= 1 << (index % 8);
                data.extend_from_slice(page);
            }
        }
        let mut piece = None;
        if !data.is_empty() {
            let tag = cipher.encrypt(offset, &mut data)?;
            file.write(&data, offset)?;
            piece = Some(Self { pages, tag });
        }
        file.buffer = data;
        Ok(piece)
    }

    /// Fills the mebibyte at this offset of the file. Returns whether it is sound.
    fn read(
        &self,
        file: &File,
        offset: u64,
        cipher: &Cipher,
        chunk: &mut [u8],
    ) -> anyhow::Result<bool> {
        let has =
            |page: usize| self.pages.get(page / 8).is_some_and(|it| it >> (page % 8) & 1 == 1);
        let all = chunk.len() / PAGE;
        let pages: Vec<_> = (0..all).filter(|page| has(*page)).collect();
        let data = &mut chunk[..pages.len() * PAGE];
        file.read_exact_at(data, offset).context("reading it")?;
        let sound = cipher.decrypt(offset, data, &self.tag);
        // From the last to the first, so that none is overwritten that has still to move.
        for (from, to) in pages.iter().enumerate().rev() {
            chunk.copy_within(from * PAGE..(from + 1) * PAGE, to * PAGE);
        }
        let empty = (0..all).filter(|page| !has(*page));
        empty.for_each(|page| chunk[page * PAGE..(page + 1) * PAGE].fill(0));
        Ok(sound)
    }
}

/// The offset of each part in the file.
pub fn places(parts: &[Part]) -> impl Iterator<Item = (u64, &Part)> {
    let mut next = 0;
    parts.iter().map(move |part| {
        let at = next;
        next += part.bytes;
        (at, part)
    })
}

/// The contents of a mapping at first.
#[derive(Clone, Copy)]
pub enum Before<'a> {
    Zeros,
    /// The contents of a part of a snapshot, from this offset of its file on.
    Saved(&'a File, u64, &'a Part),
}

/// The list of the process's pages. It tells which pages of a mapping were never written.
pub struct Pages(Option<File>);

impl Pages {
    /// Must be opened before the jail, which hides it.
    pub fn open() -> Self {
        Self(File::open("/proc/self/pagemap").ok())
    }

    /// Whether all pages at this address are as they were at first, so that reading them, which
    /// makes the host allocate them, is not necessary.
    pub fn unchanged(&self, address: usize, bytes: usize) -> bool {
        let Some(file) = &self.0 else { return false };
        let mut entries = vec![0; bytes.div_ceil(PAGE) * ENTRY];
        let read = file.read_exact_at(&mut entries, (address / PAGE * ENTRY) as u64);
        let words = entries.chunks_exact(ENTRY).filter_map(|it| it.try_into().ok());
        let mut entries = words.map(u64::from_ne_bytes);
        read.is_ok() && entries.all(|entry| entry & PRESENT == 0 || entry & OF_FILE != 0)
    }
}

/// When a snapshot must be complete.
#[derive(Clone, Copy)]
pub struct Limit(Option<(Instant, u16)>);

impl Limit {
    pub fn new(seconds: Option<u16>) -> Self {
        let of = |seconds| (Instant::now() + Duration::from_secs(u64::from(seconds)), seconds);
        Self(seconds.map(of))
    }

    pub fn check(self) -> anyhow::Result<()> {
        match self.0 {
            Some((end, seconds)) if Instant::now() >= end => {
                bail!("it is not complete after {seconds} s: give it more time")
            }
            _ => Ok(()),
        }
    }
}

/// The file that is written, within a limit.
pub struct Writer<'a> {
    file: &'a File,
    cipher: Option<&'a Cipher>,
    limit: Limit,
    unsynced: usize,
    /// For data that are encrypted.
    buffer: Vec<u8>,
    /// Whether the file may be able to share blocks with the one before.
    shares: bool,
}

impl<'a> Writer<'a> {
    /// With a cipher, everything is encrypted.
    pub fn new(file: &'a File, cipher: Option<&'a Cipher>, limit: Limit) -> Self {
        let shares = cipher.is_none();
        Self { file, cipher, limit, unsynced: 0, buffer: Vec::new(), shares }
    }

    /// Lets the file have the contents of a range of another one at this offset, without writing
    /// them. Returns whether its file system can do that.
    fn share(&mut self, other: &File, range: Range<u64>, offset: u64) -> anyhow::Result<bool> {
        if self.shares {
            // Whatever the reason of an error, the contents can be read and written.
            self.shares = share_blocks(other, range, self.file, offset).is_ok();
            self.limit.check()?;
        }
        Ok(self.shares)
    }

    fn write(&mut self, bytes: &[u8], offset: u64) -> anyhow::Result<()> {
        self.file.write_all_at(bytes, offset)?;
        self.unsynced += bytes.len();
        // Without this, all the time would pass in the last sync, which cannot be interrupted.
        if self.limit.0.is_some() && self.unsynced >= SYNCED_BYTES {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        self.limit.check()
    }

    /// Gives the file its length, and makes it durable.
    pub fn finish(self, length: u64) -> anyhow::Result<()> {
        self.file.set_len(length)?;
        self.file.sync_all()?;
        self.limit.check()
    }
}

/// Writes a mapping to the file, from this offset on.
pub fn write(
    file: &mut Writer<'_>,
    offset: u64,
    region: &MmapRegion,
    pages: &Pages,
    before: Before<'_>,
) -> anyhow::Result<Part> {
    let bytes = region.size();
    let mut checksums = Vec::with_capacity(bytes.div_ceil(CHUNK));
    let mut buffer = vec![0; CHUNK];
    for start in (0..bytes).step_by(CHUNK) {
        let buffer = &mut buffer[..CHUNK.min(bytes - start)];
        let address = region.as_ptr().addr() + start;
        // A shared mapping is a file, whose pages tell nothing.
        let unchanged = region.file_offset().is_none() && pages.unchanged(address, buffer.len());
        let unchanged = unchanged && !ram::is_replaced(address..address + buffer.len());
        let zeros = match before {
            Before::Zeros => true,
            Before::Saved(.., part) => part.checksums[start / CHUNK].is_none(),
        };
        if unchanged && zeros {
            checksums.push(None);
            continue;
        }
        let at = offset + start as u64;
        match before {
            Before::Saved(old, from, part) if unchanged => {
                let from = from + start as u64;
                if let Some(checksum @ Checksum::Crc32(_)) = &part.checksums[start / CHUNK]
                    && file.share(old, from..from + buffer.len() as u64, at)?
                {
                    // The old checksum finds damage of the old file, too.
                    checksums.push(Some(checksum.clone()));
                    continue;
                }
                old.read_exact_at(buffer, from).context("the snapshot before")?;
            }
            Before::Zeros | Before::Saved(..) => {
                region.as_volatile_slice().subslice(start, buffer.len())?.copy_to(buffer);
            }
        }
        checksums.push(match file.cipher {
            Some(cipher) => Piece::write(file, at, buffer, cipher)?.map(Checksum::Encrypted),
            None => {
                let written = write_chunk(file, at, buffer)?;
                written.then(|| Checksum::Crc32(crc32fast::hash(buffer)))
            }
        });
    }
    Ok(Part { bytes: bytes as u64, checksums })
}

/// Writes the pages that are not zero. Returns whether there are any.
fn write_chunk(file: &mut Writer<'_>, offset: u64, chunk: &[u8]) -> anyhow::Result<bool> {
    let mut at = 0;
    let mut written = false;
    // Pages that follow each other are one write.
    let pages: Vec<_> = chunk.chunks(PAGE).collect();
    for run in pages.chunk_by(|one, next| is_zero(one) == is_zero(next)) {
        let length: usize = run.iter().map(|page| page.len()).sum();
        if !is_zero(run[0]) {
            written = true;
            file.write(&chunk[at..at + length], offset + at as u64)?;
        }
        at += length;
    }
    Ok(written)
}

pub fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(PAGE).all(|page| page == &[0; PAGE][..page.len()])
}

/// Checks the length of the file, and that its parts are complete.
pub fn check_length(file: &File, parts: &[Part], encrypted: bool) -> anyhow::Result<()> {
    let whole = |part: &Part| part.bytes.div_ceil(CHUNK as u64) == part.checksums.len() as u64;
    ensure!(parts.iter().all(whole), "it does not have a checksum for each part");
    let mut checksums = parts.iter().flat_map(|part| part.checksums.iter().flatten());
    let right = checksums.all(|it| matches!(it, Checksum::Encrypted(_)) == encrypted);
    ensure!(right, "its checksums are those of another format");
    let bytes = parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add);
    let length = file.metadata()?.len();
    ensure!(length == bytes, "it has {length} bytes, and the machine has {bytes}");
    Ok(())
}

/// Checks all contents of a snapshot that is not encrypted, and calls `step` after each mebibyte
/// that has data.
pub fn check<'a>(
    file: &File,
    places: impl Iterator<Item = (u64, &'a Part)>,
    mut step: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for (at, part) in places {
        each_chunk((file, None), at, part, |_, _| step())?;
    }
    Ok(())
}

/// Copies a part from the file to memory that has only zeros.
pub fn read(
    file: (&File, Option<&Cipher>),
    offset: u64,
    part: &Part,
    region: &MmapRegion,
) -> anyhow::Result<()> {
    let bytes = region.size();
    ensure!(bytes as u64 == part.bytes, "it has {} bytes, and the machine {bytes}", part.bytes);
    each_chunk(file, offset, part, |start, chunk| {
        region.as_volatile_slice().subslice(start, chunk.len())?.copy_from(chunk);
        no_signal()
    })
}

/// Fails when a signal has arrived that ends the process, so that long work ends.
pub fn no_signal() -> anyhow::Result<()> {
    ensure!(signals::arrived().is_none(), "a signal ends the process");
    Ok(())
}

/// Calls `take` with the position and the contents of each mebibyte that has data, after checking
/// it.
fn each_chunk(
    (file, cipher): (&File, Option<&Cipher>),
    offset: u64,
    part: &Part,
    mut take: impl FnMut(usize, &[u8]) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut buffer = vec![0; CHUNK];
    let bytes = usize::try_from(part.bytes)?;
    for (start, checksum) in (0..bytes).step_by(CHUNK).zip(&part.checksums) {
        let buffer = &mut buffer[..CHUNK.min(bytes - start)];
        let at = offset + start as u64;
        let end = at + buffer.len() as u64;
        if checksum.is_none() && !has_data(file, at..end)? {
            continue;
        }
        let sound = match (checksum, cipher) {
            (Some(Checksum::Encrypted(piece)), Some(cipher)) => {
                piece.read(file, at, cipher, buffer)?
            }
            (Some(Checksum::Encrypted(_)), None) => false,
            (plain, _) => {
                file.read_exact_at(buffer, at).context("reading it")?;
                let found = (!is_zero(buffer)).then(|| Checksum::Crc32(crc32fast::hash(buffer)));
                found == *plain
            }
        };
        ensure!(sound, "it is damaged between the bytes {at} and {end}");
        take(start, buffer)?;
    }
    Ok(())
}

/// Whether the file has data in this range. A file system without holes has data everywhere.
fn has_data(file: &File, range: Range<u64>) -> anyhow::Result<bool> {
    match seek(file, SeekFrom::Data(range.start)) {
        Ok(at) => Ok(at < range.end),
        Err(Errno::NXIO) => Ok(false),
        Err(Errno::INVAL) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod test {
    use super::super::cipher::test::cipher;
    use super::*;

    /// Three mebibytes and a page: data, zeros, a page of data, and a last page.
    fn mapping() -> MmapRegion {
        let region = MmapRegion::new(3 * CHUNK + PAGE).unwrap();
        let whole = region.as_volatile_slice();
        for (at, length) in [(0, CHUNK), (2 * CHUNK + 5 * PAGE, PAGE), (3 * CHUNK, PAGE)] {
            let noise: Vec<u8> = (1..=251).cycle().take(length).collect();
            whole.subslice(at, length).unwrap().copy_from(&noise);
        }
        region
    }

    fn contents(region: &MmapRegion) -> Vec<u8> {
        let mut bytes = vec![0; region.size()];
        region.as_volatile_slice().copy_to(&mut bytes);
        bytes
    }

    #[test]
    fn memory_is_written_without_its_zeros_and_read_back() {
        use std::os::unix::fs::MetadataExt as _;

        for pages in [Pages::open(), Pages(None)] {
            let (region, file) = (mapping(), tempfile::tempfile().unwrap());
            let mut writer = Writer::new(&file, None, Limit::new(None));
            let part = write(&mut writer, CHUNK as u64, &region, &pages, Before::Zeros).unwrap();
            let found: Vec<_> = part.checksums.iter().map(Option::is_some).collect();
            assert_eq!(found, [true, false, true, true]);
            assert!(file.metadata().unwrap().blocks() * 512 <= (CHUNK + 4 * PAGE) as u64);
            let again = MmapRegion::new(region.size()).unwrap();
            read((&file, None), CHUNK as u64, &part, &again).unwrap();
            assert!(contents(&region) == contents(&again));
            let small = MmapRegion::new(CHUNK).unwrap();
            read((&file, None), CHUNK as u64, &part, &small).unwrap_err();
        }
    }

    #[test]
    fn encrypted_memory_has_its_holes_and_is_read_back_with_its_cipher_alone() {
        use std::os::unix::fs::MetadataExt as _;

        let (region, file) = (mapping(), tempfile::tempfile().unwrap());
        let [cipher, other] = [0xfe, 0xff].map(cipher);
        let mut writer = Writer::new(&file, Some(&cipher), Limit::new(None));
        let part = write(&mut writer, CHUNK as u64, &region, &Pages::open(), Before::Zeros);
        let part = part.unwrap();
        writer.finish((4 * CHUNK + PAGE) as u64).unwrap();
        let found: Vec<_> = part.checksums.iter().map(Option::is_some).collect();
        assert_eq!(found, [true, false, true, true]);
        assert!(file.metadata().unwrap().blocks() * 512 <= (CHUNK + 4 * PAGE) as u64);
        let again = MmapRegion::new(region.size()).unwrap();
        read((&file, Some(&cipher)), CHUNK as u64, &part, &again).unwrap();
        assert!(contents(&region) == contents(&again));
        let fails = |file: &File, cipher, at| read((file, cipher), at, &part, &again).is_err();
        assert!(fails(&file, Some(&other), CHUNK as u64));
        assert!(fails(&file, None, CHUNK as u64));
        // The pieces of another place.
        assert!(fails(&file, Some(&cipher), 0));
        // Data where there was none, and another byte.
        for at in [2 * CHUNK + 1, 3 * CHUNK + 1] {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at as u64).unwrap();
            file.write_all_at(&[!byte[0]], at as u64).unwrap();
            assert!(fails(&file, Some(&cipher), CHUNK as u64), "{at}");
            file.write_all_at(&byte, at as u64).unwrap();
        }
        let file = tempfile::tempfile().unwrap();
        file.set_len(part.bytes).unwrap();
        check_length(&file, std::slice::from_ref(&part), true).unwrap();
        check_length(&file, &[part], false).unwrap_err();
    }

    #[test]
    fn memory_that_did_not_change_is_that_of_the_snapshot_before() {
        let (region, [old, new]) = (mapping(), [(); 2].map(|()| tempfile::tempfile().unwrap()));
        let pages = Pages::open();
        let mut writer = Writer::new(&old, None, Limit::new(None));
        let part = write(&mut writer, PAGE as u64, &region, &pages, Before::Zeros).unwrap();
        let before = Before::Saved(&old, PAGE as u64, &part);
        // Nobody has touched its pages, but for one.
        let again = MmapRegion::new(region.size()).unwrap();
        let changed = [9; PAGE];
        again.as_volatile_slice().subslice(0, PAGE).unwrap().copy_from(&changed);
        let mut writer = Writer::new(&new, None, Limit::new(None));
        let written = write(&mut writer, 0, &again, &pages, before).unwrap();
        assert_eq!(written.checksums[1..], part.checksums[1..]);
        let found = MmapRegion::new(region.size()).unwrap();
        read((&new, None), 0, &written, &found).unwrap();
        let mut wanted = contents(&region);
        wanted[..CHUNK].fill(0);
        wanted[..PAGE].copy_from_slice(&changed);
        assert!(contents(&found) == wanted);
        // A file that has become shorter is refused while the machine still runs.
        old.set_len((3 * CHUNK) as u64).unwrap();
        let mut writer = Writer::new(&new, None, Limit::new(None));
        let error = write(&mut writer, 0, &again, &pages, before).unwrap_err();
        assert_eq!(error.to_string(), "the snapshot before");
    }

    #[test]
    fn memory_that_is_a_file_is_written_whole() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; PAGE], 0).unwrap();
        file.set_len(CHUNK as u64).unwrap();
        let offset = vm_memory::FileOffset::new(file, 0);
        let region = MmapRegion::from_file(offset, CHUNK).unwrap();
        let to = tempfile::tempfile().unwrap();
        let mut writer = Writer::new(&to, None, Limit::new(None));
        let part = write(&mut writer, 0, &region, &Pages::open(), Before::Zeros).unwrap();
        assert_ne!(part.checksums, [None], "pages that nobody has touched yet");
        let mut first = [0; PAGE];
        to.read_exact_at(&mut first, 0).unwrap();
        assert_eq!(first, [7; PAGE]);
    }

    #[test]
    fn a_snapshot_ends_at_its_limit() {
        let (region, file) = (mapping(), tempfile::tempfile().unwrap());
        for (seconds, complete) in [(60, true), (0, false)] {
            let mut writer = Writer::new(&file, None, Limit::new(Some(seconds)));
            let written = write(&mut writer, 0, &region, &Pages::open(), Before::Zeros);
            assert_eq!(written.is_ok(), complete, "{seconds}");
            assert_eq!(writer.finish(4 << 20).is_ok(), complete, "{seconds}");
        }
    }

    #[test]
    fn damage_is_found_in_data_and_in_holes() {
        let (region, file) = (mapping(), tempfile::tempfile().unwrap());
        let mut writer = Writer::new(&file, None, Limit::new(None));
        let parts = [write(&mut writer, 0, &region, &Pages::open(), Before::Zeros).unwrap()];
        let damaged = || check(&file, places(&parts), || Ok(())).err().map(|it| it.to_string());
        assert_eq!(damaged(), None);
        for at in [7, CHUNK + 9, 2 * CHUNK, 3 * CHUNK + PAGE - 1] {
            let mut old = [0];
            file.read_exact_at(&mut old, at as u64).unwrap();
            file.write_all_at(&[old[0] ^ 4], at as u64).unwrap();
            let found = damaged().expect("damage");
            assert!(found.contains("damaged between"), "{at}: {found}");
            file.write_all_at(&old, at as u64).unwrap();
        }
        assert_eq!(damaged(), None);
        check_length(&file, &parts, false).unwrap();
        file.set_len(region.size() as u64 - 1).unwrap();
        let found = check_length(&file, &parts, false).unwrap_err().to_string();
        assert!(found.contains("3149823 bytes"), "{found}");
        let mut less = parts.to_vec();
        less[0].checksums.pop();
        check_length(&file, &less, false).unwrap_err();
    }
}
