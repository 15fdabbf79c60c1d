//! Repeatable pseudo-random numbers: splitmix64 for the seed, xorshift64* for the rest.

/// The increment of splitmix64. Numbers that differ by it are mixed well.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The mixing function of splitmix64: each bit of the result depends on all of `z`.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A generator. Equal seeds give equal sequences.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        // Zero is the one state that xorshift cannot leave.
        Self(mix(seed.wrapping_add(STEP)).max(1))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `limit`, which must not be 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        ((self.next() >> 32) * limit) >> 32
    }
}
