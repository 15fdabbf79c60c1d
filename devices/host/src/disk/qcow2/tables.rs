//! Where clusters are: the two levels of tables, and the refcounts of the file's clusters.
//!
//! Changes gather in memory and reach the file in `checkpoint`, in an order in which any point may
//! be the last: refcounts before what refers to the clusters, data and second-level tables before
//! what refers to them, and clusters are given back only when nothing on the disk refers to them.
//! What is left after a kill, or a loss of power, is an image with clusters that nobody refers to
//! (leaks), never the reverse. The next one to open it gives them back: see `mend`.

use std::collections::{BTreeSet, HashMap};
use std::io;

use super::super::medium::{Buffer, Medium};
use super::super::raw::Raw;
use super::entry::{COPIED, OFFSET};
use super::header::Header;

/// How many bytes of tables are kept in memory.
const CACHE: usize = 16 << 20;
/// The unit of writing a part of a table: what every host takes at once.
const PART: usize = 4096;

/// An error of the image itself.
pub(super) fn damaged(what: &str) -> io::Error {
    io::Error::other(format!("the image is damaged ({what}): `qemu-img check` tells more"))
}

/// One cluster of numbers.
struct Table {
    numbers: Box<[u64]>,
    /// Parts that are not in the file yet.
    dirty: BTreeSet<usize>,
    used: u64,
}

/// Tables of one kind, by where they are.
struct Cache {
    tables: HashMap<u64, Table>,
    /// Bytes of a number.
    width: usize,
    cluster: usize,
    clock: u64,
}

impl Cache {
    fn new(width: usize, cluster: usize) -> Self {
        Self { tables: HashMap::new(), width, cluster, clock: 0 }
    }

    fn is_dirty(&self) -> bool {
        self.tables.values().any(|it| !it.dirty.is_empty())
    }

    /// Whether there are as many as may be. Numbers take more room here than in the file.
    fn is_full(&self) -> bool {
        self.tables.len() * (self.cluster / self.width * size_of::<u64>()) >= CACHE
    }

    /// Whether no more fit, and none can go.
    fn is_stuck(&self) -> bool {
        self.is_full() && self.tables.values().all(|it| !it.dirty.is_empty())
    }

    fn part(&self) -> usize {
        PART.min(self.cluster)
    }

    /// Lets some of the oldest go that are in the file. Not one at a time: all are looked at for
    /// it, and of the smallest there are thousands.
    fn make_room(&mut self) {
        if !self.is_full() {
            return;
        }
        let clean = self.tables.iter().filter(|(_, it)| it.dirty.is_empty());
        let mut clean: Vec<_> = clean.map(|(at, it)| (it.used, *at)).collect();
        clean.sort_unstable();
        for (_, at) in &clean[..clean.len().div_ceil(8)] {
            self.tables.remove(at);
        }
    }

    fn load(&mut self, raw: &Raw, at: u64) -> io::Result<&mut Table> {
        self.clock += 1;
        if !self.tables.contains_key(&at) {
            self.make_room();
            let mut buffer = Buffer::default();
            let bytes = buffer.take(self.cluster);
            raw.read(bytes, at)?;
            let number = |it: &[u8]| it.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            let numbers = bytes.chunks_exact(self.width).map(number).collect();
            self.tables.insert(at, Table { numbers, dirty: BTreeSet::new(), used: 0 });
        }
        let table = self.tables.get_mut(&at).expect("it is there, or was put there");
        table.used = self.clock;
        Ok(table)
    }

    /// A table of zeros that is not in the file yet.
    fn insert(&mut self, at: u64) {
        self.make_room();
        let numbers = vec![0; self.cluster / self.width].into();
        let dirty = (0..self.cluster / self.part()).collect();
        self.tables.insert(at, Table { numbers, dirty, used: self.clock });
    }

    fn set(&mut self, raw: &Raw, at: u64, index: usize, number: u64) -> io::Result<()> {
        let part = index * self.width / self.part();
        let table = self.load(raw, at)?;
        table.numbers[index] = number;
        table.dirty.insert(part);
        Ok(())
    }

    fn write(&mut self, raw: &Raw) -> io::Result<()> {
        let (width, part) = (self.width, self.part());
        let mut buffer = Buffer::default();
        for (at, table) in &mut self.tables {
            while let Some(first) = table.dirty.first().copied() {
                let bytes = buffer.take(part);
                let numbers = &table.numbers[first * part / width..][..part / width];
                for (to, number) in bytes.chunks_exact_mut(width).zip(numbers) {
                    to.copy_from_slice(&number.to_be_bytes()[8 - width..]);
                }
                raw.write(bytes, at + (first * part) as u64, false)?;
                table.dirty.remove(&first);
            }
        }
        Ok(())
    }
}

/// A table that is wholly in memory: L1, and the table of refcount blocks.
struct Root {
    offset: u64,
    entries: Vec<u64>,
    dirty: BTreeSet<usize>,
}

impl Root {
    fn read(raw: &Raw, offset: u64, count: usize) -> io::Result<Self> {
        let mut bytes = vec![0; (count * 8).next_multiple_of(PART)];
        raw.read(&mut bytes, offset)?;
        let (numbers, _) = bytes.as_chunks::<8>();
        let entries = numbers.iter().take(count).map(|it| u64::from_be_bytes(*it)).collect();
        Ok(Self { offset, entries, dirty: BTreeSet::new() })
    }

    fn set(&mut self, index: usize, entry: u64) {
        self.entries[index] = entry;
        self.dirty.insert(index * 8 / 512);
    }

    /// Sectors of 512 bytes, of which a disk writes each wholly or not at all. Where direct I/O
    /// wants more, their neighbours are written as they are.
    fn write(&mut self, raw: &Raw) -> io::Result<()> {
        let part =
            raw.direct().map_or(512, |it| usize::try_from(it.length).unwrap_or(PART)).max(512);
        let mut buffer = Buffer::default();
        while let Some(sector) = self.dirty.first().copied() {
            let bytes = buffer.take(part);
            let first = sector * 512 / part * part / 8;
            bytes.fill(0);
            for (to, entry) in bytes.chunks_exact_mut(8).zip(self.entries.iter().skip(first)) {
                to.copy_from_slice(&entry.to_be_bytes());
            }
            raw.write(bytes, self.offset + first as u64 * 8, false)?;
            self.dirty.retain(|it| it * 512 / part * part / 8 != first);
        }
        Ok(())
    }
}

/// Whether two entries are one table. A table that is everywhere would be counted for hours, and a
/// block that has nothing free would be looked through for as long. Otherwise the file's length is
/// a bound: L1 itself may be longer than the disk needs, as `qemu-img resize --shrink` leaves it.
fn has_twins(entries: &[u64]) -> bool {
    let mut tables: Vec<_> = entries.iter().map(|it| it & OFFSET).filter(|it| *it != 0).collect();
    tables.sort_unstable();
    tables.windows(2).any(|pair| pair[0] == pair[1])
}

/// All of an image's metadata.
pub(super) struct Tables {
    bits: u32,
    l1: Root,
    l2: Cache,
    reftable: Root,
    blocks: Cache,
    /// Below this cluster none is free.
    hint: u64,
    /// Clusters to give back when nothing in the file refers to them any more.
    freed: Vec<u64>,
    /// As far as the file was ever written: behind it are zeros.
    pub(super) end: u64,
}

impl Tables {
    pub(super) fn read(raw: &Raw, header: &Header, end: u64) -> io::Result<Self> {
        let cluster = 1 << header.cluster_bits;
        let within = |offset: u64, entries: usize| offset + entries as u64 * 8 <= end;
        if !within(header.l1_offset, header.l1_entries) {
            return Err(damaged("its first table is behind the end of the file"));
        }
        let l1 = Root::read(raw, header.l1_offset, header.l1_entries)?;
        let reftable = Root::read(raw, header.reftable_offset, header.reftable_entries)?;
        if !raw.geometry().read_only {
            if has_twins(&l1.entries) {
                return Err(damaged("a table of the disk that is there twice"));
            }
            if has_twins(&reftable.entries) {
                return Err(damaged("a refcount block that counts twice"));
            }
        }
        let (l2, blocks) = (Cache::new(8, cluster), Cache::new(2, cluster));
        let freed = Vec::new();
        Ok(Self { bits: header.cluster_bits, l1, l2, reftable, blocks, hint: 0, freed, end })
    }

    pub(super) fn cluster(&self) -> u64 {
        1 << self.bits
    }

    /// Which entries are a guest offset's, in L1 and in L2.
    fn indices(&self, offset: u64) -> io::Result<(usize, usize)> {
        let number = offset >> self.bits;
        let per_table = self.bits - 3;
        let l1 = usize::try_from(number >> per_table).ok().filter(|it| *it < self.l1.entries.len());
        let l2 = usize::try_from(number & ((1 << per_table) - 1)).ok();
        l1.zip(l2).ok_or_else(|| damaged("no table for a part of the disk"))
    }

    /// Makes L1 longer, within its last cluster, and tells how many entries it has then.
    pub(super) fn extend(&mut self, raw: &Raw, size: u64) -> io::Result<Option<u32>> {
        let needed = usize::try_from(size.div_ceil(self.cluster() << (self.bits - 3)));
        let cluster = usize::try_from(self.cluster()).unwrap_or(usize::MAX);
        let room = (self.l1.entries.len() * 8).next_multiple_of(cluster) / 8;
        let Some(needed) = needed.ok().filter(|it| *it <= room) else { return Ok(None) };
        while self.l1.entries.len() < needed {
            self.l1.entries.push(0);
            // Whatever stood behind the end of the table.
            self.l1.set(self.l1.entries.len() - 1, 0);
        }
        self.checkpoint(raw)?;
        Ok(u32::try_from(self.l1.entries.len()).ok())
    }

    /// Both tables that are wholly in memory: where they are, and what is in them.
    pub(super) fn roots(&self) -> [(u64, &[u64]); 2] {
        [&self.l1, &self.reftable].map(|it| (it.offset, it.entries.as_slice()))
    }

    /// How many tables of the second level there may be.
    pub(super) fn l2_tables(&self) -> usize {
        self.l1.entries.len()
    }

    /// The entries of one of them: none if it is not there.
    pub(super) fn l2_entries(&mut self, raw: &Raw, index: usize) -> io::Result<Vec<u64>> {
        let Some(at) = self.table_at(self.l1.entries[index])? else { return Ok(Vec::new()) };
        Ok(self.l2.load(raw, at)?.numbers.to_vec())
    }

    /// How many blocks of counts there may be, and of how many clusters each is.
    pub(super) fn count_blocks(&self) -> (u64, u64) {
        (self.reftable.entries.len() as u64, self.cluster() / 2)
    }

    /// The counts of one of them, if it is there.
    pub(super) fn counts(&mut self, raw: &Raw, block: u64) -> io::Result<Option<Vec<u64>>> {
        let index = usize::try_from(block).unwrap_or(usize::MAX);
        let entry = self.reftable.entries.get(index).copied().unwrap_or_default();
        let Some(at) = self.table_at(entry)? else { return Ok(None) };
        Ok(Some(self.blocks.load(raw, at)?.numbers.to_vec()))
    }

    /// Changes the counts of a block, if it is there: how many became others.
    pub(super) fn change_counts(
        &mut self,
        raw: &Raw,
        block: u64,
        change: impl Fn(u64, u64) -> u64,
    ) -> io::Result<usize> {
        let first = block * (self.cluster() / 2);
        let index = usize::try_from(block).unwrap_or(usize::MAX);
        let entry = self.reftable.entries.get(index).copied().unwrap_or_default();
        let Some(at) = self.table_at(entry)? else { return Ok(0) };
        let per_part = self.blocks.part() / self.blocks.width;
        let table = self.blocks.load(raw, at)?;
        let mut changed = 0;
        for (slot, count) in table.numbers.iter_mut().enumerate() {
            let new = change(first + slot as u64, *count);
            if new != *count {
                *count = new;
                table.dirty.insert(slot / per_part);
                changed += 1;
            }
        }
        Ok(changed)
    }

    /// Where a table is that `entry` refers to.
    pub(super) fn table_at(&self, entry: u64) -> io::Result<Option<u64>> {
        let at = entry & OFFSET;
        if at == 0 {
            Ok(None)
        } else if at.is_multiple_of(self.cluster()) && at < self.end {
            Ok(Some(at))
        } else {
            Err(damaged("a table that is nowhere"))
        }
    }

    /// The entry of a guest offset; 0 where there is none.
    pub(super) fn entry(&mut self, raw: &Raw, offset: u64) -> io::Result<u64> {
        let (first, second) = self.indices(offset)?;
        let Some(at) = self.table_at(self.l1.entries[first])? else { return Ok(0) };
        Ok(self.l2.load(raw, at)?.numbers[second])
    }

    /// The data cluster that an entry refers to.
    pub(super) fn data_at(&self, entry: u64) -> io::Result<Option<u64>> {
        let at = entry & OFFSET;
        if at.is_multiple_of(self.cluster()) {
            Ok((at > 0).then_some(at))
        } else {
            Err(damaged("a cluster that is nowhere"))
        }
    }

    /// Changes the entry of a guest offset.
    pub(super) fn set_entry(&mut self, raw: &Raw, offset: u64, entry: u64) -> io::Result<()> {
        let (first, second) = self.indices(offset)?;
        let table = self.l1.entries[first];
        let at = match self.table_at(table)? {
            Some(at) if table & COPIED != 0 => at,
            Some(_) => return Err(damaged("a table that is shared")),
            None => {
                let at = self.allocate(raw)?;
                self.end = self.end.max(at + self.cluster());
                self.l2.insert(at);
                self.l1.set(first, at | COPIED);
                at
            }
        };
        self.l2.set(raw, at, second, entry)
    }

    /// Makes room for more changes.
    pub(super) fn relieve(&mut self, raw: &Raw) -> io::Result<()> {
        let full = self.l2.is_stuck() || self.blocks.is_stuck() || self.freed.len() >= 4096;
        if full { self.checkpoint(raw) } else { Ok(()) }
    }

    /// A cluster that nobody uses, which counts as used from now on.
    pub(super) fn allocate(&mut self, raw: &Raw) -> io::Result<u64> {
        let per_block = self.cluster() / 2;
        let mut number = self.hint;
        loop {
            let index = usize::try_from(number / per_block).unwrap_or(usize::MAX);
            let Some(entry) = self.reftable.entries.get(index).copied() else {
                return Err(io::Error::other(
                    "the image's refcount table is full: `qemu-img convert` makes a larger one",
                ));
            };
            let at = number << self.bits;
            let Some(block) = self.table_at(entry)? else {
                self.check_free(at)?;
                // The block counts itself, in the first of the clusters that it is for.
                self.blocks.insert(at);
                self.end = self.end.max(at + self.cluster());
                let slot = usize::try_from(number % per_block).unwrap_or_default();
                self.blocks.set(raw, at, slot, 1)?;
                self.reftable.set(index, at);
                number += 1;
                continue;
            };
            let counts = &self.blocks.load(raw, block)?.numbers;
            let first = usize::try_from(number % per_block).unwrap_or_default();
            if let Some(free) = counts[first..].iter().position(|count| *count == 0) {
                let at = (number + free as u64) << self.bits;
                self.check_free(at)?;
                self.blocks.set(raw, block, first + free, 1)?;
                self.hint = number + free as u64 + 1;
                return Ok(at);
            }
            number = (number / per_block + 1) * per_block;
            self.hint = number;
        }
    }

    fn check_free(&self, at: u64) -> io::Result<()> {
        if self.is_root(at) {
            return Err(damaged("clusters in use that count as free"));
        }
        Ok(())
    }

    /// Whether it is the header's cluster, or one of the two tables that begin everything.
    fn is_root(&self, at: u64) -> bool {
        at == 0
            || [&self.l1, &self.reftable]
                .into_iter()
                .any(|it| (it.offset..it.offset + it.entries.len() as u64 * 8).contains(&at))
    }

    /// Takes back an allocation to which nothing refers, in memory or in the file.
    pub(super) fn forget(&mut self, raw: &Raw, at: u64) -> io::Result<()> {
        self.count_down(raw, at).map(|_| ())
    }

    /// Gives a cluster back, after the next checkpoint. An entry may name the header or a root, and
    /// so make a guest erase it: those stay.
    pub(super) fn release(&mut self, at: u64) {
        if !self.is_root(at) {
            self.freed.push(at);
        }
    }

    /// Returns whether nobody uses it any more.
    fn count_down(&mut self, raw: &Raw, at: u64) -> io::Result<bool> {
        let (number, per_block) = (at >> self.bits, self.cluster() / 2);
        let index = usize::try_from(number / per_block).unwrap_or(usize::MAX);
        let entry = self.reftable.entries.get(index).copied().unwrap_or_default();
        let slot = usize::try_from(number % per_block).unwrap_or_default();
        let Some(block) = self.table_at(entry)? else { return Ok(false) };
        let count = self.blocks.load(raw, block)?.numbers[slot];
        if count == 0 {
            return Ok(false);
        }
        self.blocks.set(raw, block, slot, count - 1)?;
        if count == 1 {
            self.hint = self.hint.min(number);
        }
        Ok(count == 1)
    }

    /// Brings all changes to the disk.
    pub(super) fn checkpoint(&mut self, raw: &Raw) -> io::Result<()> {
        // The counts: too high for what is not referred to yet, which is a leak at worst.
        self.blocks.write(raw)?;
        if !self.reftable.dirty.is_empty() {
            raw.flush()?;
            self.reftable.write(raw)?;
        }
        // What refers to clusters comes after the clusters and their counts.
        if self.l2.is_dirty() {
            raw.flush()?;
            self.l2.write(raw)?;
        }
        if !self.l1.dirty.is_empty() {
            raw.flush()?;
            self.l1.write(raw)?;
        }
        raw.flush()?;
        // Nothing in the file refers to these now. Their counts go down with the next checkpoint.
        while let Some(at) = self.freed.pop() {
            if self.count_down(raw, at)? {
                // Room that the host does not take back is used again.
                raw.discard(at, self.cluster()).ok();
            }
        }
        Ok(())
    }
}
