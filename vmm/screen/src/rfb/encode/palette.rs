//! Collects the colors of an area.

/// Slots of the hash table: twice the maximum number of colors.
const SLOTS: usize = 512;

pub(super) const MAX_COLOURS: usize = 256;

/// Pixels that are compared at once, because mostly all are equal.
const CHUNK: usize = 16;

/// Whether all words equal this one. It does not stop early, which is faster.
fn is_all(words: &[u32], word: u32) -> bool {
    words.iter().fold(0, |all, it| all | (it ^ word)) == 0
}

/// A slot of the hash table. It is empty unless it has the current age.
#[derive(Clone, Copy, Default)]
struct Slot {
    age: u32,
    word: u32,
    index: u8,
}

/// Colors in the order in which they were added.
pub(super) struct Palette {
    slots: Box<[Slot; SLOTS]>,
    age: u32,
    pub(super) words: Vec<u32>,
}

impl Default for Palette {
    fn default() -> Self {
        let slots = Box::new([Slot::default(); SLOTS]);
        Self { slots, age: 1, words: Vec::with_capacity(MAX_COLOURS) }
    }
}

impl Palette {
    pub(super) fn clear(&mut self) {
        self.words.clear();
        self.age = self.age.wrapping_add(1);
        if self.age == 0 {
            *self = Self::default();
        }
    }

    /// The slot of a color, or the empty slot where it belongs.
    fn slot(&self, word: u32) -> usize {
        let mut at = (word.wrapping_mul(0x9e37_79b1) >> 23) as usize % SLOTS;
        while self.slots[at].age == self.age && self.slots[at].word != word {
            at = (at + 1) % SLOTS;
        }
        at
    }

    /// The index of a color, which must be in the palette.
    pub(super) fn index(&self, word: u32) -> u8 {
        self.slots[self.slot(word)].index
    }

    /// Adds a color, unless the palette has `limit` colors. Returns whether it contains the color
    /// now.
    pub(super) fn add(&mut self, word: u32, limit: usize) -> bool {
        let at = self.slot(word);
        if self.slots[at].age == self.age {
            return true;
        }
        let Ok(index) = u8::try_from(self.words.len()) else { return false };
        if self.words.len() >= limit {
            return false;
        }
        self.slots[at] = Slot { age: self.age, word, index };
        self.words.push(word);
        true
    }

    /// Adds the colors of words, which probably have runs, until the palette has `limit` colors.
    /// Returns whether it contains all of them now.
    pub(super) fn add_all(&mut self, words: &[u32], limit: usize) -> bool {
        let Some(mut last) = words.first().copied() else { return true };
        self.add(last, limit)
            && words.chunks(CHUNK).all(|chunk| {
                is_all(chunk, last)
                    || chunk.iter().all(|word| {
                        let known = last == *word || self.add(*word, limit);
                        last = *word;
                        known
                    })
            })
    }

    pub(super) fn truncate(&mut self, length: usize) {
        // Remove the last color first: then no search has to pass a slot that became empty.
        while self.words.len() > length {
            let Some(word) = self.words.pop() else { return };
            let at = self.slot(word);
            self.slots[at].age = self.age.wrapping_sub(1);
        }
    }

    /// Appends the indices of a row, with 1, 2, 4 or 8 bits each, the first one highest. All its
    /// colors must be in the palette.
    pub(super) fn indices(&self, row: &[u32], bits: usize, out: &mut Vec<u8>) {
        let mut last = (row[0], self.index(row[0]));
        let mut index = |word: u32| {
            if word != last.0 {
                last = (word, self.index(word));
            }
            last.1
        };
        if bits == 8 {
            for chunk in row.chunks(CHUNK) {
                let first = index(chunk[0]);
                if is_all(chunk, chunk[0]) {
                    out.extend(std::iter::repeat_n(first, chunk.len()));
                } else {
                    out.extend(chunk.iter().map(|word| index(*word)));
                }
            }
            return;
        }
        for group in row.chunks(8 / bits) {
            let byte = group.iter().fold(0, |byte, word| byte << bits | index(*word));
            out.push(byte << (8 - bits * group.len()));
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn colours_keep_their_index_until_cleared() {
        let mut palette = Palette::default();
        for round in 0..3_u32 {
            palette.clear();
            let words: Vec<u32> = (0..256).map(|it| (it * 0x0001_0307) ^ round).collect();
            assert!(palette.add_all(&words, MAX_COLOURS));
            assert_eq!(palette.words, words);
            assert!(!palette.add(0xffff_ffff, MAX_COLOURS));
            palette.truncate(100);
            for (index, word) in words.iter().enumerate() {
                let kept = palette.words.get(index) == Some(word);
                assert_eq!(kept, index < 100);
                assert!(!kept || usize::from(palette.index(*word)) == index);
                assert_eq!(palette.add(*word, 100), kept);
            }
            assert!(palette.add_all(&words[100..], MAX_COLOURS));
            assert_eq!(palette.index(words[255]), 255);
        }
    }

    #[test]
    fn a_palette_keeps_its_colour_limit() {
        let mut palette = Palette::default();
        assert!(!palette.add_all(&[1, 1, 2, 2, 3], 2));
        assert_eq!(palette.words, [1, 2]);
        assert!(palette.add(2, 2));
    }
}
