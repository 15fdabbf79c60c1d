//! Counters of reads and writes, and the error log (NVMe 1.4, 5.14.1.1 and 5.14.1.2).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::command::Status;

pub(super) const MAX_ERRORS: usize = 16;

/// Counts reads or writes since power-on.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Counter {
    commands: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    pub(super) fn count(&self, bytes: u64) {
        self.commands.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Number of commands, and number of bytes in units of 1000 * 512, rounded up.
    pub(super) fn totals(&self) -> (u64, u64) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        (self.commands.load(Ordering::Relaxed), bytes.div_ceil(512 * 1000))
    }

    pub(super) fn set(&self, saved: &Self) {
        self.commands.store(saved.commands.load(Ordering::Relaxed), Ordering::Relaxed);
        self.bytes.store(saved.bytes.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(super) fn copy(&self) -> Self {
        let copy = Self::default();
        copy.set(self);
        copy
    }
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct ErrorEntry {
    pub(super) queue: u16,
    pub(super) id: u16,
    pub(super) status: Status,
    pub(super) block: u64,
}

/// Errors since power-on, and pending changes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Health {
    /// Newest first, at most `MAX_ERRORS`.
    pub(super) mistakes: VecDeque<ErrorEntry>,
    /// Total number of errors.
    pub(super) count: u64,
    /// Number of media errors.
    pub(super) media: u64,
    /// The namespace changed since the guest last read the log page for this.
    pub(super) changed: bool,
}

impl Health {
    pub(super) fn record(&mut self, entry: ErrorEntry) {
        self.mistakes.truncate(MAX_ERRORS - 1);
        self.mistakes.push_front(entry);
        self.count += 1;
        // Status code type 2: media and data integrity.
        self.media += u64::from(entry.status.0 >> 8 & 7 == 2);
    }

    pub(super) fn is_valid(&self) -> bool {
        self.mistakes.len() <= MAX_ERRORS && self.count < u64::MAX / 2 && self.media <= self.count
    }
}
