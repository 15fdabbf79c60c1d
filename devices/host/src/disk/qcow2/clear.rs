//! Discards, and ranges that are to read as zeros.

use std::io;
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use super::entry::{COMPRESSED, COPIED, ZERO};
use super::{Part, Qcow2};

/// Bytes that are cleared at a time: a guest may discard a whole disk by one request.
const TURN: u64 = 256 << 20;
/// The pause after each turn.
const PAUSE: Duration = Duration::from_micros(100);

impl Qcow2 {
    /// The new entry of a cluster that is to read as zeros. `None` if zeros have to be written.
    fn zeroed(&self, entry: u64, keep: bool) -> Option<u64> {
        let plain = entry & COMPRESSED == 0 && entry & COPIED != 0;
        match (self.header.version, &self.backing) {
            (3, _) if keep && plain => Some(entry | ZERO),
            (_, None) => Some(0),
            (3, Some(_)) => Some(ZERO),
            _ => None,
        }
    }

    /// Clears whole clusters, and calls `rest` with the parts that still have to be written. In
    /// between, other requests have their turn.
    pub(super) fn clear(
        &self,
        offset: u64,
        length: u64,
        keep: bool,
        mut rest: impl FnMut(Part),
    ) -> io::Result<()> {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let next = (at - at % TURN + TURN).min(end);
            self.clear_part(at..next, keep, &mut rest)?;
            at = next;
            if at < end {
                // A lock that is released and taken again at once is not given to others.
                sleep(PAUSE);
            }
        }
        Ok(())
    }

    fn clear_part(
        &self,
        range: Range<u64>,
        keep: bool,
        rest: &mut impl FnMut(Part),
    ) -> io::Result<()> {
        let _alone = self.moves.write().unwrap_or_else(PoisonError::into_inner);
        let mut tables = self.tables();
        let (cluster, size) = (self.cluster(), self.size.load(Ordering::Acquire));
        let Range { start: mut at, end } = range;
        while at < end {
            if self.backing.is_none()
                && let Some(next) = tables.empty_until(at)?
            {
                at = next;
                continue;
            }
            let next = (at - at % cluster + cluster).min(end);
            // The disk may end within its last cluster.
            let whole =
                at.is_multiple_of(cluster) && (next.is_multiple_of(cluster) || next == size);
            let part = Part { offset: at, at: 0, length: usize::try_from(next - at).unwrap_or(0) };
            let location = self.locate(&mut tables, part)?;
            let entry = tables.entry(&self.raw, at)?;
            match self.zeroed(entry, keep).filter(|_| whole) {
                _ if self.reads_zeros(location) && (keep || tables.data_at(entry)?.is_none()) => {}
                Some(new) => {
                    self.mark(true)?;
                    tables.checkpoint_if_full(&self.raw)?;
                    tables.set_entry(&self.raw, at, new)?;
                    if new & !(ZERO | COPIED) == 0 {
                        self.release(&mut tables, entry)?;
                    }
                }
                None => rest(part),
            }
            at = next;
        }
        Ok(())
    }
}
