//! Decompresses blocks of LZMS, the compression of solid WIM resources (ESD).
//!
//! A block is a chain of literals, LZ matches and delta matches. Its kinds of items are range coded
//! from the start of the block forwards, and all numbers are Huffman coded from its end backwards.
//! Both codes adapt to what was decoded. At last the targets of x86 instructions are made relative.
//!
//! Threats: a block may be anything. Each match is checked against what was decoded before it, both
//! streams continue with zeros at their ends, and each item adds at least a byte, so that the work
//! is bounded by the length of the output.

mod bits;
mod filter;
mod huffman;
mod slots;

use anyhow::{Context as _, ensure};

use self::bits::{Bits, Choice, Ranges};
use self::huffman::Huffman;
use self::slots::Slots;

const LITERALS: usize = 256;
const POWERS: usize = 8;
/// Symbols between two adaptions of a Huffman code.
const OFTEN: u32 = 512;
const SELDOM: u32 = 1024;
/// Matches that an item can repeat, and the one that is not yet among them.
const RECENT: usize = 4;

/// A delta match: bytes continue a sequence of differences. Its numbers are `1 << power` bytes
/// apart, and its distance is a multiple of that.
#[derive(Clone, Copy)]
struct Delta {
    power: usize,
    offset: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Item {
    Literal,
    Match,
    Delta,
}

/// The models of the kinds of items.
struct Kinds {
    is_match: Choice<16>,
    is_delta: Choice<32>,
    repeats: Choice<64>,
    repeated: [Choice<64>; 2],
    delta_repeats: Choice<64>,
    delta_repeated: [Choice<64>; 2],
}

struct Codes {
    literals: Huffman,
    offsets: Huffman,
    lengths: Huffman,
    delta_offsets: Huffman,
    delta_powers: Huffman,
}

/// Decompresses blocks one after the other.
pub struct Decoder {
    offsets: Slots,
    lengths: Slots,
    filter: filter::Filter,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { offsets: Slots::offsets(), lengths: Slots::lengths(), filter: filter::Filter::new() }
    }
}

impl Decoder {
    /// Fills `out` from a block.
    pub fn decode(&mut self, block: &[u8], out: &mut [u8]) -> anyhow::Result<()> {
        ensure!(block.len().is_multiple_of(2) && block.len() >= 4, "an odd block");
        let slots = self.offsets.count(out.len());
        let mut decoding = Decoding {
            offsets: &self.offsets,
            lengths: &self.lengths,
            ranges: Ranges::new(block),
            bits: Bits::new(block),
            kinds: Kinds::new(),
            codes: Codes::new(slots, self.lengths.len()),
            recent: [1, 2, 3, 4],
            deltas: [1, 2, 3, 4].map(|offset| Delta { power: 0, offset }),
            last: Item::Literal,
        };
        let mut at = 0;
        while at < out.len() {
            at += decoding.item(out, at)?;
        }
        self.filter.undo(out);
        Ok(())
    }
}

impl Kinds {
    fn new() -> Self {
        Self {
            is_match: Choice::new(),
            is_delta: Choice::new(),
            repeats: Choice::new(),
            repeated: [Choice::new(), Choice::new()],
            delta_repeats: Choice::new(),
            delta_repeated: [Choice::new(), Choice::new()],
        }
    }
}

impl Codes {
    fn new(offsets: usize, lengths: usize) -> Self {
        Self {
            literals: Huffman::new(LITERALS, SELDOM),
            offsets: Huffman::new(offsets, SELDOM),
            lengths: Huffman::new(lengths, OFTEN),
            delta_offsets: Huffman::new(offsets, SELDOM),
            delta_powers: Huffman::new(POWERS, OFTEN),
        }
    }
}

/// The state within a block.
struct Decoding<'a> {
    offsets: &'a Slots,
    lengths: &'a Slots,
    ranges: Ranges<'a>,
    bits: Bits<'a>,
    kinds: Kinds,
    codes: Codes,
    recent: [usize; RECENT],
    deltas: [Delta; RECENT],
    last: Item,
}

impl Decoding<'_> {
    /// Decodes an item at a place of the output. Returns the number of its bytes.
    fn item(&mut self, out: &mut [u8], at: usize) -> anyhow::Result<usize> {
        if !self.ranges.bit(&mut self.kinds.is_match) {
            let byte = self.codes.literals.symbol(&mut self.bits);
            out[at] = u8::try_from(byte)?;
            self.last = Item::Literal;
            return Ok(1);
        }
        if self.ranges.bit(&mut self.kinds.is_delta) {
            let delta = self.delta();
            let length = self.length();
            copy_delta(out, at, delta, length)?;
            self.last = Item::Delta;
            return Ok(length);
        }
        let offset = self.offset();
        let length = self.length();
        copy(out, at, offset, length)?;
        self.last = Item::Match;
        Ok(length)
    }

    fn length(&mut self) -> usize {
        let slot = self.codes.lengths.symbol(&mut self.bits);
        self.lengths.value(slot, &mut self.bits)
    }

    fn offset(&mut self) -> usize {
        // A match cannot repeat the one directly before it.
        let skipped = usize::from(self.last == Item::Match);
        if !self.ranges.bit(&mut self.kinds.repeats) {
            let slot = self.codes.offsets.symbol(&mut self.bits);
            let offset = self.offsets.value(slot, &mut self.bits);
            return push(&mut self.recent, RECENT - 1, offset);
        }
        let which = which(&mut self.ranges, &mut self.kinds.repeated);
        let offset = self.recent[which + skipped];
        push(&mut self.recent, which + skipped, offset)
    }

    fn delta(&mut self) -> Delta {
        let skipped = usize::from(self.last == Item::Delta);
        if !self.ranges.bit(&mut self.kinds.delta_repeats) {
            let power = self.codes.delta_powers.symbol(&mut self.bits);
            let slot = self.codes.delta_offsets.symbol(&mut self.bits);
            let offset = self.offsets.value(slot, &mut self.bits);
            return push(&mut self.deltas, RECENT - 1, Delta { power, offset });
        }
        let which = which(&mut self.ranges, &mut self.kinds.delta_repeated);
        let delta = self.deltas[which + skipped];
        push(&mut self.deltas, which + skipped, delta)
    }
}

/// Which of three recent matches is repeated.
fn which(ranges: &mut Ranges, choices: &mut [Choice<64>; 2]) -> usize {
    let [first, second] = choices;
    match (ranges.bit(first), second) {
        (false, _) => 0,
        (true, second) => 1 + usize::from(ranges.bit(second)),
    }
}

/// Puts an item before all others. The one at `from` leaves its place.
fn push<T: Copy>(queue: &mut [T; RECENT], from: usize, item: T) -> T {
    queue.copy_within(..from, 1);
    queue[0] = item;
    item
}

fn copy(out: &mut [u8], at: usize, offset: usize, length: usize) -> anyhow::Result<()> {
    ensure!(offset <= at, "a match before the start");
    ensure!(length <= out.len() - at, "a match beyond the end");
    if offset >= length {
        out.copy_within(at - offset..at - offset + length, at);
    } else {
        for place in at..at + length {
            out[place] = out[place - offset];
        }
    }
    Ok(())
}

fn copy_delta(out: &mut [u8], at: usize, delta: Delta, length: usize) -> anyhow::Result<()> {
    let span = 1 << delta.power;
    let offset = delta.offset << delta.power;
    let back = offset.checked_add(span).filter(|back| *back <= at);
    let back = back.context("a delta match before the start")?;
    ensure!(length <= out.len() - at, "a delta match beyond the end");
    for place in at..at + length {
        let change = out[place - span].wrapping_sub(out[place - back]);
        out[place] = out[place - offset].wrapping_add(change);
    }
    Ok(())
}
