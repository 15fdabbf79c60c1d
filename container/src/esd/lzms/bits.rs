//! The two streams of a block: bits that are range coded with adaptive probabilities, forwards from
//! the start, and plain bits, backwards from the end. Both have units of 16 bits, and zeros beyond
//! their ends.

const UNIT: usize = 2;
const UNIT_BITS: u32 = 16;
/// A probability is a number of 64ths.
const PARTS_LOG2: u32 = 6;
const PARTS: u32 = 1 << PARTS_LOG2;
/// The range is at least this before a bit is decoded.
const MIN_RANGE: u32 = 1 << 16;

/// How often a bit was 0, in its last 64 values.
#[derive(Clone, Copy)]
struct Probability {
    zeros: u32,
    values: u64,
}

/// The model of a bit. It depends on the values of the same kind before.
pub(super) struct Choice<const STATES: usize> {
    state: usize,
    probabilities: [Probability; STATES],
}

impl<const STATES: usize> Choice<STATES> {
    pub(super) fn new() -> Self {
        let first = Probability { zeros: 48, values: 0x5555_5555 };
        Self { state: 0, probabilities: [first; STATES] }
    }
}

/// The range decoder.
pub(super) struct Ranges<'a> {
    rest: &'a [u8],
    range: u32,
    code: u32,
}

impl<'a> Ranges<'a> {
    pub(super) fn new(block: &'a [u8]) -> Self {
        let mut ranges = Self { rest: block, range: u32::MAX, code: 0 };
        ranges.shift();
        ranges.shift();
        ranges
    }

    fn shift(&mut self) {
        self.code <<= UNIT_BITS;
        if let Some((unit, rest)) = self.rest.split_first_chunk::<UNIT>() {
            self.code |= u32::from(u16::from_le_bytes(*unit));
            self.rest = rest;
        }
    }

    pub(super) fn bit<const STATES: usize>(&mut self, choice: &mut Choice<STATES>) -> bool {
        let model = &mut choice.probabilities[choice.state % STATES];
        if self.range < MIN_RANGE {
            self.range <<= UNIT_BITS;
            self.shift();
        }
        let bound = (self.range >> PARTS_LOG2) * model.zeros.clamp(1, PARTS - 1);
        let bit = self.code >= bound;
        if bit {
            self.range -= bound;
            self.code -= bound;
        } else {
            self.range = bound;
        }
        let oldest = model.values >> 63 != 0;
        model.zeros = model.zeros + u32::from(oldest) - u32::from(bit);
        model.values = model.values << 1 | u64::from(bit);
        choice.state = choice.state << 1 & (STATES - 1) | usize::from(bit);
        bit
    }
}

/// The plain bits. The first ones are the high bits of `buffer`.
pub(super) struct Bits<'a> {
    rest: &'a [u8],
    buffer: usize,
    count: u32,
}

impl<'a> Bits<'a> {
    pub(super) fn new(block: &'a [u8]) -> Self {
        Self { rest: block, buffer: 0, count: 0 }
    }

    /// Fills the buffer to at least 48 bits.
    fn fill(&mut self) {
        while self.count <= usize::BITS - UNIT_BITS {
            if let Some((rest, unit)) = self.rest.split_last_chunk::<UNIT>() {
                let unit = usize::from(u16::from_le_bytes(*unit));
                self.buffer |= unit << (usize::BITS - UNIT_BITS - self.count);
                self.rest = rest;
            }
            self.count += UNIT_BITS;
        }
    }

    /// The next bits, at most 48 and at least 1, which stay.
    pub(super) fn peek(&mut self, count: u32) -> usize {
        if self.count < count {
            self.fill();
        }
        self.buffer >> (usize::BITS - count)
    }

    /// Skips bits that were peeked at.
    pub(super) fn skip(&mut self, count: u32) {
        self.buffer <<= count;
        self.count -= count;
    }

    pub(super) fn take(&mut self, count: u32) -> usize {
        if count == 0 {
            return 0;
        }
        let bits = self.peek(count);
        self.skip(count);
        bits
    }
}
