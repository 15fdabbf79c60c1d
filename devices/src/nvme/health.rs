//! Counts of reads and writes, and the errors of the error log (NVMe 1.4, 5.14.1.1 and 5.14.1.2).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::command::Status;

/// Entries of the error log.
pub(super) const ERRORS: usize = 16;

/// Reads or writes since power-on.
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

    /// Commands, and thousands of 512 bytes, begun ones too.
    pub(super) fn totals(&self) -> (u64, u64) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        (self.commands.load(Ordering::Relaxed), bytes.div_ceil(512 * 1000))
    }

    /// As it was saved.
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

/// A command that failed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Mistake {
    pub(super) queue: u16,
    pub(super) id: u16,
    pub(super) status: Status,
    pub(super) block: u64,
}

/// What failed since power-on, and what changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Health {
    /// The newest first, at most `ERRORS`.
    pub(super) mistakes: VecDeque<Mistake>,
    /// All there were.
    pub(super) count: u64,
    /// What the disk could not do.
    pub(super) media: u64,
    /// The guest was not told that the namespace changed.
    pub(super) changed: bool,
}

impl Health {
    pub(super) fn note(&mut self, mistake: Mistake) {
        self.mistakes.truncate(ERRORS - 1);
        self.mistakes.push_front(mistake);
        self.count += 1;
        // Status code type 2: media and data integrity.
        self.media += u64::from(mistake.status.0 >> 8 & 7 == 2);
    }

    /// A saved one may be anything.
    pub(super) fn is_valid(&self) -> bool {
        self.mistakes.len() <= ERRORS && self.count < u64::MAX / 2 && self.media <= self.count
    }
}
