//! Inputs: random bytes, words in a random order, inputs that a target makes itself, and mutations
//! of inputs that broke a target before.

use host::testutil::noise::Noise;

use crate::Target;

/// The source of a target's inputs, besides random bytes and mutations.
pub enum Make {
    /// Every byte is an action of a peer or a guest, so random bytes reach everything.
    Bytes,
    /// Words of a language, in a random order.
    Words(fn() -> Vec<Vec<u8>>),
    /// Like `Words`, after a byte that selects the parser or the action.
    Choice(fn() -> Vec<Vec<u8>>),
    /// Nearly valid inputs, made by the target.
    Own(fn(&mut Noise) -> Vec<u8>),
}

/// All inputs of one run of a target. The same seed makes the same inputs.
pub struct Inputs {
    noise: Noise,
    target: &'static Target,
    words: Vec<Vec<u8>>,
    /// Inputs that mutations begin with.
    found: Vec<Vec<u8>>,
}

impl Inputs {
    /// `found` has inputs that broke the target before.
    pub fn new(target: &'static Target, seed: u64, found: Vec<Vec<u8>>) -> Self {
        // Each target gets its own inputs.
        let name = target.name.bytes();
        let own =
            name.fold(seed, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        let words = match target.make {
            Make::Words(words) | Make::Choice(words) => words(),
            Make::Bytes | Make::Own(_) => Vec::new(),
        };
        Self { noise: Noise::new(own), target, words, found }
    }

    fn below(&mut self, limit: usize) -> usize {
        let number = self.noise.below(limit.max(1) as u64);
        usize::try_from(number).expect("it is below a length")
    }

    fn bytes(&mut self, max_length: usize) -> Vec<u8> {
        // Also make short inputs.
        let max_length = if self.below(4) == 0 { max_length.min(64) } else { max_length };
        let length = 1 + self.below(max_length);
        self.noise.by_ref().take(length).collect()
    }

    pub fn make(&mut self) -> Vec<u8> {
        let mut input = match self.below(8) {
            0 => self.bytes(self.target.max_length),
            1 | 2 if !self.found.is_empty() => {
                let chosen = self.below(self.found.len());
                let found = self.found[chosen].clone();
                self.mutate(found)
            }
            _ => self.fresh(),
        };
        if self.below(8) == 0 {
            input = self.mutate(input);
        }
        input.truncate(self.target.max_length);
        input
    }

    fn fresh(&mut self) -> Vec<u8> {
        match self.target.make {
            Make::Bytes => self.bytes(self.target.max_length),
            Make::Own(make) => make(&mut self.noise),
            Make::Words(_) | Make::Choice(_) => {
                let choice = matches!(self.target.make, Make::Choice(_));
                let mut input: Vec<u8> = self.noise.by_ref().take(usize::from(choice)).collect();
                for _ in 0..self.below(24) {
                    let chosen = self.below(self.words.len());
                    input.extend_from_slice(&self.words[chosen]);
                    if self.below(12) == 0 {
                        let more = self.bytes(8);
                        input.extend(more);
                    }
                }
                input
            }
        }
    }

    /// Changes bits, bytes and lengths in a few places.
    fn mutate(&mut self, mut input: Vec<u8>) -> Vec<u8> {
        for _ in 0..=self.below(6) {
            let at = self.below(input.len() + 1);
            let count = 1 + self.below(8);
            let end = (at + count).min(input.len());
            match self.below(7) {
                0 => input.truncate(at),
                1 => drop(input.drain(at..end)),
                2 => {
                    let again = input[at..end].repeat(1 + count);
                    input.splice(at..at, again).for_each(drop);
                }
                3 => {
                    let more = self.bytes(count);
                    input.splice(at..end, more).for_each(drop);
                }
                4 if !self.words.is_empty() => {
                    let chosen = self.below(self.words.len());
                    let word = self.words[chosen].clone();
                    input.splice(at..at, word).for_each(drop);
                }
                5 => input[at..end].fill([0, 1, 0x7f, 0x80, 0xff][count % 5]),
                _ => {
                    let bit = 1 << self.below(8);
                    input.get_mut(at).into_iter().for_each(|byte| *byte ^= bit);
                }
            }
        }
        input
    }
}
