//! Frees leaked clusters: those that count as used but are not referred to, as a kill leaves
//! them.
//!
//! The dirty bit of an image is set from the first change until the image is closed. When an image
//! with this bit is opened, all references in its tables are counted, and refcounts that are too
//! high are lowered. We never write a refcount that is too low, so an image with one is refused and
//! stays unchanged.
//!
//! Threats: an image may count any number of clusters that do not exist. So memory holds only two
//! bytes per cluster of the file, and one refcount block at a time.

use std::io;

use super::super::medium::Medium;
use super::super::raw::Raw;
use super::entry::{COMPRESSED, packed_at};
use super::header::Header;
use super::tables::{Tables, damaged};

/// Flag of a counted cluster: an entry that is not compressed refers to it.
const PLAIN: u16 = 1 << 15;

/// Limit of the clusters to count, whatever length a file claims: 16 TiB with the usual cluster
/// size.
const MAX_CLUSTERS: u64 = 1 << 28;

/// The number of references to each cluster of the file.
struct References {
    counts: Vec<u16>,
    bits: u32,
}

impl References {
    /// Adds a reference to each cluster of a byte range.
    fn add(&mut self, at: u64, length: u64, mark: u16) -> io::Result<()> {
        let end = at.saturating_add(length).div_ceil(1 << self.bits);
        for number in at >> self.bits..end {
            let count = usize::try_from(number).ok().and_then(|it| self.counts.get_mut(it));
            let count = count.ok_or_else(|| damaged("a cluster beyond the end of the file"))?;
            if *count & !PLAIN == !PLAIN {
                return Err(damaged("a cluster with too many references"));
            }
            *count = (*count + 1) | mark;
        }
        Ok(())
    }

    fn get(&self, number: u64) -> (u64, bool) {
        let count = usize::try_from(number).ok().and_then(|it| self.counts.get(it));
        let count = count.copied().unwrap_or_default();
        (u64::from(count & !PLAIN), count & PLAIN != 0)
    }

    /// Whether any cluster of the range is referred to.
    fn any(&self, from: u64, to: u64) -> bool {
        let max = self.counts.len();
        let index = |number: u64| usize::try_from(number).map_or(max, |it| it.min(max));
        self.counts[index(from)..index(to)].iter().any(|count| *count > 0)
    }
}

impl Tables {
    /// Returns the number of freed clusters.
    pub(super) fn free_leaked_clusters(&mut self, raw: &Raw, header: &Header) -> io::Result<usize> {
        let references = self.references(raw, header)?;
        self.check(raw, &references)?;
        let mut excess = 0;
        for block in 0..self.count_blocks().0 {
            excess += self.lower(raw, &references, block)?;
            self.checkpoint_if_full(raw)?;
        }
        if excess > 0 {
            self.checkpoint(raw)?;
        }
        Ok(excess)
    }

    fn references(&mut self, raw: &Raw, header: &Header) -> io::Result<References> {
        let cluster = self.cluster();
        let clusters = self.end.div_ceil(cluster);
        let counted = usize::try_from(clusters).ok().filter(|_| clusters <= MAX_CLUSTERS);
        let clusters = counted.ok_or_else(|| damaged("more clusters than can be counted"))?;
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

    /// Fails if the refcount of any cluster is too low.
    fn check(&mut self, raw: &Raw, references: &References) -> io::Result<()> {
        let (blocks, per_block) = self.count_blocks();
        for block in 0..blocks {
            let first = block * per_block;
            let Some(counts) = self.counts(raw, block)? else {
                if references.any(first, first + per_block) {
                    return Err(damaged("clusters in use without refcounts"));
                }
                continue;
            };
            if (first..).zip(counts).any(|(number, count)| count < references.get(number).0) {
                return Err(damaged("clusters in use whose refcounts are too low"));
            }
        }
        if references.any(blocks * per_block, u64::MAX) {
            return Err(damaged("clusters in use beyond the refcount table"));
        }
        Ok(())
    }

    /// Lowers the refcounts of one block that are too high. Returns how many it lowered.
    fn lower(&mut self, raw: &Raw, references: &References, block: u64) -> io::Result<usize> {
        let (cluster, end) = (self.cluster(), self.end);
        self.change_counts(raw, block, |number, count| {
            let (wanted, plain) = references.get(number);
            // The COPIED flag of the entry would have to change as well.
            if count <= wanted || plain && wanted > 0 {
                return count;
            }
            let at = number * cluster;
            if wanted == 0 && at < end {
                // As where clusters are freed during use.
                raw.discard(at, cluster).ok();
            }
            wanted
        })
    }
}
