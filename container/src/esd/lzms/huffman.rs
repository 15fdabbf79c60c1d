//! Adaptive Huffman codes: both sides count symbols, and make the same new code from the counts
//! from time to time.

use super::bits::Bits;
use crate::esd::code::{LENGTHS, MAX_BITS, Tree};

/// Codes of at most this many bits are found by one look into a table.
const QUICK: u32 = 10;

/// Codes of one length: the end of them, as a code of [`MAX_BITS`] bits, and what to subtract from
/// a code of this length to get its place in `sorted`.
#[derive(Clone, Copy, Default)]
struct Group {
    end: usize,
    first: usize,
    place: usize,
}

pub(super) struct Huffman {
    counts: Vec<u32>,
    /// Symbols until the code is made anew.
    rest: u32,
    interval: u32,
    /// Symbols by the lengths of their codes.
    sorted: Vec<u16>,
    groups: [Group; LENGTHS],
    /// A symbol and the length of its code. Length 0 means that it is longer.
    quick: Vec<(u16, u8)>,
    scratch: Tree,
}

impl Huffman {
    pub(super) fn new(symbols: usize, interval: u32) -> Self {
        let mut new = Self {
            counts: vec![1; symbols],
            rest: interval,
            interval,
            sorted: Vec::with_capacity(symbols),
            groups: [Group::default(); LENGTHS],
            quick: vec![(0, 0); 1 << QUICK],
            scratch: Tree::default(),
        };
        new.make();
        new
    }

    pub(super) fn symbol(&mut self, bits: &mut Bits) -> usize {
        let code = bits.peek(MAX_BITS);
        let (symbol, length) = match self.quick[code >> (MAX_BITS - QUICK)] {
            (_, 0) => self.long(code),
            (symbol, length) => (symbol, u32::from(length)),
        };
        bits.skip(length);
        let symbol = usize::from(symbol);
        if let Some(count) = self.counts.get_mut(symbol) {
            *count += 1;
        }
        self.rest -= 1;
        if self.rest == 0 {
            self.make();
            self.counts.iter_mut().for_each(|count| *count = (*count >> 1) + 1);
            self.rest = self.interval;
        }
        symbol
    }

    /// A symbol whose code is not in the table.
    fn long(&self, code: usize) -> (u16, u32) {
        for length in QUICK + 1..=MAX_BITS {
            let group = self.groups[length as usize];
            if code < group.end {
                let place = (code >> (MAX_BITS - length)) - group.first + group.place;
                return (self.sorted[place], length);
            }
        }
        // Codes are complete, unless there are fewer than two symbols.
        (0, 1)
    }

    /// Makes the code for the counts.
    fn make(&mut self) {
        let lengths = self.scratch.make(&self.counts);
        let mut places = [0; LENGTHS];
        let (mut code, mut place) = (0, 0);
        for (length, count) in lengths.iter().enumerate().skip(1) {
            places[length] = place;
            let shift = LENGTHS - 1 - length;
            let end = code + (count << shift);
            self.groups[length] = Group { end, first: code >> shift, place };
            place += count;
            code = end;
        }
        self.sorted.clear();
        self.sorted.resize(self.counts.len(), 0);
        for (symbol, length) in (0_u16..).zip(self.scratch.by_symbol()) {
            let place = &mut places[usize::from(*length)];
            self.sorted[*place] = symbol;
            *place += 1;
        }
        self.fill(&lengths);
    }

    fn fill(&mut self, lengths: &[usize; LENGTHS]) {
        let (mut at, mut place) = (0, 0);
        for (length, count) in (0_u8..).zip(lengths).skip(1).take(QUICK as usize) {
            let width = 1 << (QUICK - u32::from(length));
            for symbol in &self.sorted[place..place + count] {
                self.quick[at..at + width].fill((*symbol, length));
                at += width;
            }
            place += count;
        }
        self.quick[at..].fill((0, 0));
    }
}
