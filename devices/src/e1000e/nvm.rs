//! The NVM (82574 datasheet, chapter 6): 64 words with the MAC address and a checksum, which
//! drivers read by EERD and write by EEWR.

use serde::{Deserialize, Serialize};

pub(super) const WORDS: usize = 64;
/// The sum of all words.
const SUM: u16 = 0xbaba;
const CHECKSUM: usize = 0x3f;

/// Words with a meaning for drivers: compatibility, image version, the controller's settings at
/// power-on, identity, and features for network boot.
const CONTENT: [(usize, u16); 20] = [
    (0x03, 0x0420),
    (0x05, 0x2010),
    (0x08, 0x0000),
    (0x09, 0x0000),
    (0x0a, 0x026b),
    (0x0b, 0x0000),
    (0x0c, 0x8086),
    (0x0d, 0x10d3),
    (0x0f, 0x8058),
    (0x14, 0x1000),
    (0x15, 0x00c8),
    (0x16, 0x0000),
    (0x18, 0x6cc9),
    (0x19, 0x3150),
    (0x1a, 0x070e),
    (0x1e, 0x0000),
    (0x24, 0x4f01),
    (0x30, 0x0100),
    (0x31, 0xc000),
    (0x3d, 0x0120),
];

/// Fields of EERD and EEWR (10.2.2.4).
const START: u32 = 1 << 0;
const DONE: u32 = 1 << 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Nvm(Vec<u16>);

impl Nvm {
    pub(super) fn new(address: [u8; 6]) -> Self {
        let mut words = vec![0xffff; WORDS];
        for (word, bytes) in words.iter_mut().zip(address.chunks_exact(2)) {
            *word = u16::from_le_bytes([bytes[0], bytes[1]]);
        }
        for (at, word) in CONTENT {
            words[at] = word;
        }
        let sum = words[..CHECKSUM].iter().fold(0_u16, |sum, word| sum.wrapping_add(*word));
        words[CHECKSUM] = SUM.wrapping_sub(sum);
        Self(words)
    }

    pub(super) fn address(&self) -> [u8; 6] {
        let byte = |at: usize| self.0[at / 2].to_le_bytes()[at % 2];
        [byte(0), byte(1), byte(2), byte(3), byte(4), byte(5)]
    }

    pub(super) fn is_valid(&self) -> bool {
        self.0.len() == WORDS
    }

    /// Executes a command in EERD, or in EEWR if `write`. Returns the register's new value. A
    /// command without its start bit, or for a word that does not exist, is never done.
    pub(super) fn execute(&mut self, command: u32, write: bool) -> u32 {
        let at = command >> 2 & 0x3fff;
        let word = self.0.get_mut(at as usize).filter(|_| command & START != 0);
        let Some(word) = word else { return at << 2 };
        if write {
            *word = (command >> 16) as u16;
        }
        DONE | at << 2 | u32::from(*word) << 16
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn has_the_address_and_a_right_checksum() {
        let mut nvm = Nvm::new([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
        let word = |nvm: &mut Nvm, at: u32| nvm.execute(at << 2 | START, false) >> 16;
        assert_eq!([0, 1, 2].map(|at| word(&mut nvm, at)), [0x5452, 0x1200, 0x5634]);
        let sum = (0..64).fold(0_u32, |sum, at| sum + word(&mut nvm, at));
        assert_eq!(sum & 0xffff, u32::from(SUM));
        assert_eq!(nvm.address(), [0x52, 0x54, 0, 0x12, 0x34, 0x56]);
    }

    #[test]
    fn a_command_outside_of_the_nvm_or_without_start_is_not_done() {
        let mut nvm = Nvm::new([2; 6]);
        let before = nvm.clone();
        for command in [64 << 2 | START, 0xffff_fffd, 3 << 2] {
            assert_eq!(nvm.execute(command, true) & DONE, 0, "{command:#x}");
        }
        assert_eq!(nvm, before);
        assert_eq!(nvm.execute(0xabcd_0000 | 7 << 2 | START, true), 0xabcd_0000 | 7 << 2 | DONE);
    }
}
