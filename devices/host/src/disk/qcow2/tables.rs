//! Cluster allocation: both levels of mapping tables, and the refcounts of the file's clusters.
//!
//! Changes collect in memory and reach the file in `checkpoint`, in an order that may stop at any
//! point: refcounts before references to their clusters, data and L2 tables before references to
//! them. Clusters are freed only after the last reference to them is gone from the file. A kill or
//! a loss of power leaves an image with clusters that nothing refers to (leaks), never the reverse.
//! The next writer that opens the image frees them (see `repair`).

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::{io, mem};

use super::super::medium::{Buffer, Medium};
use super::super::raw::Raw;
use super::entry::{COPIED, OFFSET};
use super::header::Header;

/// Bytes of tables that are kept in memory.
const CACHE: usize = 16 << 20;
/// The unit in which parts of tables are written. Every host accepts this size.
const PART: usize = 4096;

pub(super) fn damaged(what: &str) -> io::Error {
    io::Error::other(format!("the image is damaged ({what}): `qemu-img check` shows details"))
}

/// One cluster of numbers: an L2 table or a refcount block.
struct Table {
    numbers: Box<[u64]>,
    /// Numbers of the parts that are not written yet.
    dirty: BTreeSet<usize>,
    used: u64,
}

/// Cached tables of one kind, by their offset in the file.
struct Cache {
    tables: HashMap<u64, Table>,
    /// Bytes of a number in the file.
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

    /// Whether the cache has reached its limit. Numbers take more space in memory than in the file.
    fn is_full(&self) -> bool {
        self.tables.len() * (self.cluster / self.width * size_of::<u64>()) >= CACHE
    }

    /// Whether the cache is full of dirty tables, which cannot be evicted.
    fn is_stuck(&self) -> bool {
        self.is_full() && self.tables.values().all(|it| !it.dirty.is_empty())
    }

    fn part(&self) -> usize {
        PART.min(self.cluster)
    }

    /// Evicts the oldest eighth of the clean tables. Each eviction scans all tables, and with small
    /// clusters there are thousands, so it does not evict one at a time.
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

    /// Adds a table of zeros that is not in the file yet.
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

/// A table that is entirely in memory: the L1 table or the refcount table.
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

    /// Writes dirty sectors of 512 bytes, each of which a disk writes entirely or not at all. Where
    /// direct I/O needs larger blocks, neighboring sectors are written unchanged.
    fn write(&mut self, raw: &Raw) -> io::Result<()> {
        let part = raw.direct.map_or(512, |it| usize::try_from(it.length).unwrap_or(PART)).max(512);
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

/// Whether two entries refer to the same table. Without this check, an image could repeat a table
/// so often that counting takes hours, or repeat a full refcount block that allocation then
/// searches for as long. Without duplicates the file's length is the bound. The length of L1 is
/// not: it may be longer than the disk needs, as after `qemu-img resize --shrink`.
fn has_twins(entries: &[u64]) -> bool {
    let mut tables: Vec<_> = entries.iter().map(|it| it & OFFSET).filter(|it| *it != 0).collect();
    tables.sort_unstable();
    tables.windows(2).any(|pair| pair[0] == pair[1])
}

pub(super) struct Tables {
    bits: u32,
    l1: Root,
    l2: Cache,
    reftable: Root,
    blocks: Cache,
    /// No cluster below this number is free.
    hint: u64,
    /// Clusters to free when nothing in the file refers to them any more.
    freed: Vec<u64>,
    /// Offset behind the last byte ever written. Everything after it reads as zeros.
    pub(super) end: u64,
}

impl Tables {
    pub(super) fn read(raw: &Raw, header: &Header, end: u64) -> io::Result<Self> {
        let cluster = 1 << header.cluster_bits;
        let within = |offset: u64, entries: usize| offset + entries as u64 * 8 <= end;
        if !within(header.l1_offset, header.l1_entries) {
            return Err(damaged("its L1 table is beyond the end of the file"));
        }
        let l1 = Root::read(raw, header.l1_offset, header.l1_entries)?;
        let reftable = Root::read(raw, header.reftable_offset, header.reftable_entries)?;
        if !raw.geometry().read_only {
            if has_twins(&l1.entries) {
                return Err(damaged("an L2 table that is there twice"));
            }
            if has_twins(&reftable.entries) {
                return Err(damaged("a refcount block that is there twice"));
            }
        }
        let (l2, blocks) = (Cache::new(8, cluster), Cache::new(2, cluster));
        let freed = Vec::new();
        Ok(Self { bits: header.cluster_bits, l1, l2, reftable, blocks, hint: 0, freed, end })
    }

    pub(super) fn cluster(&self) -> u64 {
        1 << self.bits
    }

    /// The L1 and L2 indices of a guest offset.
    fn indices(&self, offset: u64) -> io::Result<(usize, usize)> {
        let number = offset >> self.bits;
        let per_table = self.bits - 3;
        let l1 = usize::try_from(number >> per_table).ok().filter(|it| *it < self.l1.entries.len());
        let l2 = usize::try_from(number & ((1 << per_table) - 1)).ok();
        l1.zip(l2).ok_or_else(|| damaged("no table for a part of the disk"))
    }

    /// Extends L1 within its last cluster. Returns the new number of entries, or `None` if the
    /// cluster has no room.
    pub(super) fn extend(&mut self, raw: &Raw, size: u64) -> io::Result<Option<u32>> {
        let needed = usize::try_from(size.div_ceil(self.cluster() << (self.bits - 3)));
        let cluster = usize::try_from(self.cluster()).unwrap_or(usize::MAX);
        let room = (self.l1.entries.len() * 8).next_multiple_of(cluster) / 8;
        let Some(needed) = needed.ok().filter(|it| *it <= room) else { return Ok(None) };
        while self.l1.entries.len() < needed {
            self.l1.entries.push(0);
            // Overwrites the bytes behind the old end of the table.
            self.l1.set(self.l1.entries.len() - 1, 0);
        }
        self.checkpoint(raw)?;
        Ok(u32::try_from(self.l1.entries.len()).ok())
    }

    /// The offsets and entries of both tables that are entirely in memory.
    pub(super) fn roots(&self) -> [(u64, &[u64]); 2] {
        [&self.l1, &self.reftable].map(|it| (it.offset, it.entries.as_slice()))
    }

    /// Whether nothing is mapped.
    pub(super) fn is_empty(&self) -> bool {
        self.l1.entries.iter().all(|entry| *entry == 0)
    }

    /// The maximum number of L2 tables.
    pub(super) fn l2_tables(&self) -> usize {
        self.l1.entries.len()
    }

    /// The entries of an L2 table. Empty if the table is not allocated.
    pub(super) fn l2_entries(&mut self, raw: &Raw, index: usize) -> io::Result<Vec<u64>> {
        let Some(at) = self.table_at(self.l1.entries[index])? else { return Ok(Vec::new()) };
        Ok(self.l2.load(raw, at)?.numbers.to_vec())
    }

    /// The maximum number of refcount blocks, and how many clusters each one counts.
    pub(super) fn count_blocks(&self) -> (u64, u64) {
        (self.reftable.entries.len() as u64, self.cluster() / 2)
    }

    /// The refcounts of a block, if it is allocated.
    pub(super) fn counts(&mut self, raw: &Raw, block: u64) -> io::Result<Option<Vec<u64>>> {
        let index = usize::try_from(block).unwrap_or(usize::MAX);
        let entry = self.reftable.entries.get(index).copied().unwrap_or_default();
        let Some(at) = self.table_at(entry)? else { return Ok(None) };
        Ok(Some(self.blocks.load(raw, at)?.numbers.to_vec()))
    }

    /// Changes the refcounts of a block, if it is allocated. Returns how many changed.
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

    /// The offset of the table that `entry` refers to, if there is one.
    pub(super) fn table_at(&self, entry: u64) -> io::Result<Option<u64>> {
        let at = entry & OFFSET;
        if at == 0 {
            Ok(None)
        } else if at.is_multiple_of(self.cluster()) && at < self.end {
            Ok(Some(at))
        } else {
            Err(damaged("an invalid table offset"))
        }
    }

    /// The L2 entry of a guest offset. 0 if its table is not allocated.
    pub(super) fn entry(&mut self, raw: &Raw, offset: u64) -> io::Result<u64> {
        let (first, second) = self.indices(offset)?;
        let Some(at) = self.table_at(self.l1.entries[first])? else { return Ok(0) };
        Ok(self.l2.load(raw, at)?.numbers[second])
    }

    /// Where the range of an L2 table ends that is not there.
    pub(super) fn empty_until(&self, offset: u64) -> io::Result<Option<u64>> {
        let (first, _) = self.indices(offset)?;
        if self.table_at(self.l1.entries[first])?.is_some() {
            return Ok(None);
        }
        let range = self.cluster() / 8 * self.cluster();
        Ok(Some(offset - offset % range + range))
    }

    /// The offset of the data cluster that an entry refers to.
    pub(super) fn data_at(&self, entry: u64) -> io::Result<Option<u64>> {
        let at = entry & OFFSET;
        if at.is_multiple_of(self.cluster()) {
            Ok((at > 0).then_some(at))
        } else {
            Err(damaged("an invalid cluster offset"))
        }
    }

    pub(super) fn set_entry(&mut self, raw: &Raw, offset: u64, entry: u64) -> io::Result<()> {
        let (first, second) = self.indices(offset)?;
        let table = self.l1.entries[first];
        let at = match self.table_at(table)? {
            Some(at) if table & COPIED != 0 => at,
            Some(_) => return Err(damaged("a shared table")),
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

    /// Writes a checkpoint if a cache is full of dirty tables, or if many clusters are to be freed.
    pub(super) fn checkpoint_if_full(&mut self, raw: &Raw) -> io::Result<()> {
        let full = self.l2.is_stuck() || self.blocks.is_stuck() || self.freed.len() >= 4096;
        if full { self.checkpoint(raw) } else { Ok(()) }
    }

    /// The cluster counts as used from now on.
    pub(super) fn allocate(&mut self, raw: &Raw) -> io::Result<u64> {
        let per_block = self.cluster() / 2;
        let mut number = self.hint;
        loop {
            let index = usize::try_from(number / per_block).unwrap_or(usize::MAX);
            let Some(entry) = self.reftable.entries.get(index).copied() else {
                return Err(io::Error::other(
                    "the image's refcount table is full: `qemu-img convert` creates a larger one",
                ));
            };
            let at = number << self.bits;
            let Some(block) = self.table_at(entry)? else {
                self.check_free(at)?;
                // The new block occupies the first of the clusters that it counts, and counts
                // itself.
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
            return Err(damaged("clusters in use whose refcounts are 0"));
        }
        Ok(())
    }

    /// Whether the offset is in the header's cluster, in L1 or in the refcount table.
    fn is_root(&self, at: u64) -> bool {
        at == 0
            || [&self.l1, &self.reftable]
                .into_iter()
                .any(|it| (it.offset..it.offset + it.entries.len() as u64 * 8).contains(&at))
    }

    /// Undoes an allocation that nothing refers to, in memory or in the file.
    pub(super) fn undo_allocation(&mut self, raw: &Raw, at: u64) -> io::Result<()> {
        self.count_down(raw, at).map(|_| ())
    }

    /// Frees a cluster after the next checkpoint. An invalid entry may name the header or a root
    /// table, which would let a guest erase them, so those are ignored.
    pub(super) fn release(&mut self, at: u64) {
        if !self.is_root(at) {
            self.freed.push(at);
        }
    }

    /// Returns whether the refcount became 0.
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

    pub(super) fn checkpoint(&mut self, raw: &Raw) -> io::Result<()> {
        // Refcounts come first. They are too high for clusters without references yet: a leak at
        // worst.
        self.blocks.write(raw)?;
        if !self.reftable.dirty.is_empty() {
            raw.flush()?;
            self.reftable.write(raw)?;
        }
        // References to clusters are written after the clusters and their refcounts.
        if self.l2.is_dirty() {
            raw.flush()?;
            self.l2.write(raw)?;
        }
        if !self.l1.dirty.is_empty() {
            raw.flush()?;
            self.l1.write(raw)?;
        }
        raw.flush()?;
        // Nothing in the file refers to these any more. The next checkpoint writes the lower
        // refcounts.
        self.freed.sort_unstable();
        let mut run = 0..0;
        while let Some(at) = self.freed.pop() {
            if !self.count_down(raw, at)? {
                continue;
            }
            let end = at + self.cluster();
            if end == run.start {
                run.start = at;
            } else {
                discard(raw, mem::replace(&mut run, at..end));
            }
        }
        discard(raw, run);
        Ok(())
    }
}

/// Frees the space of clusters. If the host cannot, they are reused all the same.
fn discard(raw: &Raw, range: Range<u64>) {
    if !range.is_empty() {
        raw.discard(range.start, range.end - range.start).ok();
    }
}
