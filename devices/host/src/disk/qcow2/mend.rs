//! What a kill may leave in an image: clusters that count as used, and belong to nobody.
//!
//! An image says that it is being written (the dirty bit) from its first change until it is closed.
//! Who opens one that says so counts what its tables refer to. Counts that are too high go down.
//! One that is too low is not of our doing: such an image is refused, and nothing is changed.
//!
//! Threats: an image may count clusters that are not there, as many as it likes. All that is in
//! memory is two bytes for each cluster of the file, and one block of counts after another.

use std::io;

use super::super::medium::Medium;
use super::super::raw::Raw;
use super::entry::{COMPRESSED, packed_at};
use super::header::Header;
use super::tables::{Tables, damaged};

/// Of a counted cluster: a table entry that is not compressed refers to it.
const PLAIN: u16 = 1 << 15;

/// Most clusters to count, whatever length a file claims: 16 TiB of the usual size.
const MOST: u64 = 1 << 28;

/// How often each cluster of the file is referred to.
struct References {
    counts: Vec<u16>,
    bits: u32,
}

impl References {
    /// Counts one to each cluster of a range.
    fn add(&mut self, at: u64, length: u64, mark: u16) -> io::Result<()> {
        let end = at.saturating_add(length).div_ceil(1 << self.bits);
        for number in at >> self.bits..end {
            let count = usize::try_from(number).ok().and_then(|it| self.counts.get_mut(it));
            let count = count.ok_or_else(|| damaged("a cluster behind the end of the file"))?;
            if *count & !PLAIN == !PLAIN {
                return Err(damaged("a cluster that too much refers to"));
            }
            *count = (*count + 1) | mark;
        }
        Ok(())
    }

    fn of(&self, number: u64) -> (u64, bool) {
        let count = usize::try_from(number).ok().and_then(|it| self.counts.get(it));
        let count = count.copied().unwrap_or_default();
        (u64::from(count & !PLAIN), count & PLAIN != 0)
    }

    /// Whether any of these clusters is referred to.
    fn any(&self, from: u64, to: u64) -> bool {
        let most = self.counts.len();
        let index = |number: u64| usize::try_from(number).map_or(most, |it| it.min(most));
        self.counts[index(from)..index(to)].iter().any(|count| *count > 0)
    }
}

impl Tables {
    /// Gives back what nobody refers to: how many clusters that were.
    pub(super) fn mend(&mut self, raw: &Raw, header: &Header) -> io::Result<usize> {
        let references = self.references(raw, header)?;
        self.check(raw, &references)?;
        let mut excess = 0;
        for block in 0..self.count_blocks().0 {
            excess += self.lower(raw, &references, block)?;
            self.relieve(raw)?;
        }
        if excess > 0 {
            self.checkpoint(raw)?;
        }
        Ok(excess)
    }

    fn references(&mut self, raw: &Raw, header: &Header) -> io::Result<References> {
        let cluster = self.cluster();
        let clusters = self.end.div_ceil(cluster);
        let counted = usize::try_from(clusters).ok().filter(|_| clusters <= MOST);
        let clusters = counted.ok_or_else(|| damaged("more clusters than can be counted here"))?;
        let mut found = References { counts: vec![0; clusters], bits: header.cluster_bits };
        found.add(0, cluster, PLAIN)?;
        for (offset, entries) in self.roots() {
            found.add(offset, entries.len() as u64 * 8, PLAIN)?;
            for entry in entries {
                if let Some(at) = self.table_at(*entry)? {
                    found.add(at, cluster, PLAIN)?;
                }
            }
        }
        for table in 0..self.l2_tables() {
            for entry in self.l2_entries(raw, table)? {
                if entry & COMPRESSED != 0 {
                    let (at, length) = packed_at(entry, header.cluster_bits);
                    found.add(at, length as u64, 0)?;
                } else if let Some(at) = self.data_at(entry)? {
                    found.add(at, cluster, PLAIN)?;
                }
            }
        }
        Ok(found)
    }

    /// Looks whether any cluster counts too low.
    fn check(&mut self, raw: &Raw, references: &References) -> io::Result<()> {
        let (blocks, per_block) = self.count_blocks();
        for block in 0..blocks {
            let first = block * per_block;
            let Some(counts) = self.counts(raw, block)? else {
                if references.any(first, first + per_block) {
                    return Err(damaged("clusters in use that are not counted"));
                }
                continue;
            };
            if (first..).zip(counts).any(|(number, count)| count < references.of(number).0) {
                return Err(damaged("clusters in use that count as free"));
            }
        }
        if references.any(blocks * per_block, u64::MAX) {
            return Err(damaged("clusters in use that cannot be counted"));
        }
        Ok(())
    }

    /// Lowers the counts of one block that are too high: how many those were.
    fn lower(&mut self, raw: &Raw, references: &References, block: u64) -> io::Result<usize> {
        let (cluster, end) = (self.cluster(), self.end);
        self.change_counts(raw, block, |number, count| {
            let (wanted, plain) = references.of(number);
            // An entry says whether its cluster is its own: that would have to change as well.
            if count <= wanted || plain && wanted > 0 {
                return count;
            }
            let at = number * cluster;
            if wanted == 0 && at < end {
                // As where clusters are given back otherwise.
                raw.discard(at, cluster).ok();
            }
            wanted
        })
    }
}
