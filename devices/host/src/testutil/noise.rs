//! Pseudorandom bytes that can be reproduced.

/// An endless sequence of pseudorandom bytes, the same for the same seed (splitmix64).
#[derive(Clone, Debug)]
pub struct Noise {
    state: u64,
    left: u64,
    count: u8,
}

impl Noise {
    pub fn new(seed: u64) -> Self {
        Self { state: seed, left: 0, count: 0 }
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        let bytes = [(); 8].map(|()| self.next().unwrap_or(0));
        u64::from_le_bytes(bytes) % limit
    }

    pub fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        let number = self.below(choices.len() as u64);
        choices[usize::try_from(number).expect("it is below a length")]
    }
}

impl Iterator for Noise {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        if self.count == 0 {
            self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = self.state;
            mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            self.left = mixed ^ mixed >> 31;
            self.count = 8;
        }
        let byte = self.left.to_le_bytes()[0];
        self.left >>= 8;
        self.count -= 1;
        Some(byte)
    }
}
