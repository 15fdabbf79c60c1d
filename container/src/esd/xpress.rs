//! Compresses chunks with XPRESS and its Huffman code (MS-XCA 2.1), which the boot manager of
//! Windows can read. A chunk begins with the lengths of its codes.

use super::code::{LENGTHS, Tree};

pub(super) const CHUNK: usize = 32 << 10;
const SYMBOLS: usize = 512;
const TABLE: usize = SYMBOLS / 2;
/// Symbols from here on are matches. The first one ends a chunk, too.
const MATCHES: usize = 256;
const MIN_MATCH: usize = 3;
/// Matches that are longer by this much, and by this much more, have further bytes.
const LONG: usize = 15;
const LONGER: usize = 255;
const HASH_BITS: u32 = 14;
/// Earlier places that are tried for a match.
const TRIES: usize = 24;
/// Matches of this length are not improved.
const GOOD: usize = 64;
const UNIT_BITS: u32 = 16;

#[derive(Clone, Copy)]
enum Item {
    Literal(u8),
    Match { offset: usize, length: usize },
}

impl Item {
    fn symbol(self) -> usize {
        match self {
            Self::Literal(byte) => byte.into(),
            Self::Match { offset, length } => {
                MATCHES + (log2(offset) as usize * 16) + (length - MIN_MATCH).min(LONG)
            }
        }
    }
}

fn log2(number: usize) -> u32 {
    number.checked_ilog2().unwrap_or(0)
}

pub(super) struct Compressor {
    /// The last place with a hash, and the place before with the same hash. Both count from 1.
    heads: Vec<u16>,
    before: Vec<u16>,
    items: Vec<Item>,
    tree: Tree,
    out: Vec<u8>,
}

impl Compressor {
    pub(super) fn new() -> Self {
        let (heads, before) = (vec![0; 1 << HASH_BITS], vec![0; CHUNK]);
        Self { heads, before, items: Vec::new(), tree: Tree::default(), out: Vec::new() }
    }

    /// Compresses at most [`CHUNK`] bytes. `None` if that does not make them shorter.
    pub(super) fn compress(&mut self, chunk: &[u8]) -> Option<&[u8]> {
        self.find_items(chunk);
        let mut counts = [0; SYMBOLS];
        self.items.iter().for_each(|item| counts[item.symbol()] += 1);
        counts[MATCHES] += 1;
        let lengths = self.tree.make(&counts);
        let codes = codes(&lengths, self.tree.by_symbol());
        self.out.clear();
        self.out.extend(self.tree.by_symbol().chunks_exact(2).map(|it| it[0] | it[1] << 4));
        debug_assert_eq!(self.out.len(), TABLE);
        let mut writer = Writer::new(&mut self.out);
        for item in &self.items {
            writer.code(codes[item.symbol()]);
            if let Item::Match { offset, length } = *item {
                writer.length(length - MIN_MATCH);
                let bits = log2(offset);
                writer.bits(offset - (1 << bits), bits);
            }
        }
        writer.code(codes[MATCHES]);
        writer.end();
        Some(&self.out[..]).filter(|out| out.len() < chunk.len())
    }

    fn find_items(&mut self, chunk: &[u8]) {
        self.heads.fill(0);
        self.items.clear();
        let mut at = 0;
        while at < chunk.len() {
            let (mut offset, mut length) = self.find(chunk, at);
            self.enter(chunk, at);
            // A longer match at the next place is better.
            while (MIN_MATCH..GOOD).contains(&length) && at + 1 < chunk.len() {
                let next = self.find(chunk, at + 1);
                if next.1 <= length {
                    break;
                }
                self.items.push(Item::Literal(chunk[at]));
                at += 1;
                self.enter(chunk, at);
                (offset, length) = next;
            }
            if length < MIN_MATCH {
                self.items.push(Item::Literal(chunk[at]));
                at += 1;
                continue;
            }
            self.items.push(Item::Match { offset, length });
            (at + 1..at + length).for_each(|place| self.enter(chunk, place));
            at += length;
        }
    }

    /// The offset and the length of the longest match.
    fn find(&self, chunk: &[u8], at: usize) -> (usize, usize) {
        let Some(hash) = hash(chunk, at) else { return (0, 0) };
        let (mut best, mut place) = ((0, MIN_MATCH - 1), usize::from(self.heads[hash]));
        let rest = &chunk[at..];
        for _ in 0..TRIES {
            let Some(start) = place.checked_sub(1) else { break };
            // A match that is no longer than the best one differs here.
            if rest.get(best.1).is_none_or(|byte| *byte == chunk[start + best.1]) {
                let same = rest.iter().zip(&chunk[start..]).take_while(|(one, two)| one == two);
                let length = same.count();
                if length > best.1 {
                    best = (at - start, length);
                }
            }
            if best.1 >= GOOD {
                break;
            }
            place = usize::from(self.before[start]);
        }
        best
    }

    fn enter(&mut self, chunk: &[u8], at: usize) {
        if let (Some(hash), Ok(place)) = (hash(chunk, at), u16::try_from(at + 1)) {
            self.before[at] = std::mem::replace(&mut self.heads[hash], place);
        }
    }
}

fn hash(chunk: &[u8], at: usize) -> Option<usize> {
    let [one, two, three] = *chunk.get(at..)?.first_chunk::<MIN_MATCH>()?;
    let bytes = u32::from_le_bytes([one, two, three, 0]);
    Some((bytes.wrapping_mul(0x9e37_79b1) >> (u32::BITS - HASH_BITS)) as usize)
}

/// The code of each symbol and its length. Codes are in the order of lengths and symbols.
fn codes(lengths: &[usize; LENGTHS], by_symbol: &[u8]) -> [(usize, u32); SYMBOLS] {
    let mut next = [0; LENGTHS];
    for length in 1..LENGTHS {
        next[length] = (next[length - 1] + if length > 1 { lengths[length - 1] } else { 0 }) << 1;
    }
    let mut codes = [(0, 0); SYMBOLS];
    for (code, length) in codes.iter_mut().zip(by_symbol) {
        let next = &mut next[usize::from(*length)];
        *code = (*next, u32::from(*length));
        *next += 1;
    }
    codes
}

/// Writes bits in units of 16. Bytes come behind the two units that a reader has read ahead.
struct Writer<'a> {
    out: &'a mut Vec<u8>,
    /// Places of the next two units.
    units: [usize; 2],
    bits: usize,
    count: u32,
}

impl<'a> Writer<'a> {
    fn new(out: &'a mut Vec<u8>) -> Self {
        let start = out.len();
        out.extend([0; 4]);
        Self { out, units: [start, start + 2], bits: 0, count: 0 }
    }

    fn code(&mut self, (code, length): (usize, u32)) {
        self.bits(code, length);
    }

    fn bits(&mut self, bits: usize, count: u32) {
        self.bits = self.bits << count | bits;
        self.count += count;
        if self.count > UNIT_BITS {
            self.count -= UNIT_BITS;
            let unit = self.bits >> self.count;
            self.put(unit);
            self.bits &= (1 << self.count) - 1;
            self.units = [self.units[1], self.out.len()];
            self.out.extend([0; 2]);
        }
    }

    fn put(&mut self, unit: usize) {
        let [low, high, ..] = unit.to_le_bytes();
        let at = self.units[0];
        self.out[at..at + 2].copy_from_slice(&[low, high]);
    }

    fn length(&mut self, length: usize) {
        let Some(more) = length.checked_sub(LONG) else { return };
        let [low, high, ..] = length.to_le_bytes();
        match u8::try_from(more) {
            Ok(byte) if more < LONGER => self.out.push(byte),
            _ => self.out.extend([u8::MAX, low, high]),
        }
    }

    fn end(&mut self) {
        let unit = self.bits << (UNIT_BITS - self.count);
        self.put(unit);
    }
}
