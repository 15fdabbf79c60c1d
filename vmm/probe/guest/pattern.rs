//! The bytes that the probe writes to disks and frames. Each depends on a seed and its offset.
use crate::io::{read64, write64};
use crate::random::{STEP, mix};

/// The pattern for a seed.
pub(crate) struct Pattern(u64);

impl Pattern {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed.wrapping_add(STEP)))
    }

    /// The eight bytes at an offset, which must be a multiple of eight.
    fn word(&self, offset: u64) -> u64 {
        mix(self.0.wrapping_add((offset / 8).wrapping_mul(STEP)))
    }

    /// Writes `length` bytes to memory, rounded up to eight-byte words.
    pub(crate) fn write(&self, offset: u64, address: u64, length: u64) {
        for at in (0..length).step_by(8) {
            write64(address + at, self.word(offset + at));
        }
    }

    /// The offsets of the words in memory that differ from the pattern.
    pub(crate) fn wrong(
        &self,
        offset: u64,
        address: u64,
        length: u64,
    ) -> impl Iterator<Item = u64> {
        let differs = move |at: &u64| {
            let bits = 8 * (length - at).min(8);
            (read64(address + at) ^ self.word(offset + at)) << (64 - bits) != 0
        };
        (0..length).step_by(8).filter(differs).map(move |at| offset + at)
    }
}
