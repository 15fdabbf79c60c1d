//! CPUID leaves, from the guest's /dev/cpu/N/cpuid.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

use super::{Facts, Value};

/// The leaves that the guest's script reads: first leaf, number of leaves, number of subleaves.
/// Subleaves above 0 count only for leaves that have any.
const ASKED: [(u32, u32, u32); 4] =
    [(0, 0x20, 19), (0x4000_0000, 0x10, 1), (0x4000_0100, 2, 1), (0x8000_0000, 0x30, 6)];

const WITH_SUBLEAVES: [u32; 13] =
    [4, 7, 0xb, 0xd, 0xf, 0x10, 0x12, 0x14, 0x17, 0x18, 0x1d, 0x1f, 0x8000_001d];

const REGISTERS: [&str; 4] = ["eax", "ebx", "ecx", "edx"];

/// Registers whose bits have separate meanings: leaf, subleaf, index of the register.
const BITS: &[(u32, u32, usize)] = &[
    (1, 0, 2),
    (1, 0, 3),
    (6, 0, 0),
    (7, 0, 1),
    (7, 0, 2),
    (7, 0, 3),
    (7, 1, 0),
    (0xd, 0, 0),
    (0xd, 1, 0),
    (0x4000_0003, 0, 0),
    (0x4000_0003, 0, 1),
    (0x4000_0003, 0, 3),
    (0x4000_0004, 0, 0),
    (0x4000_0006, 0, 0),
    (0x4000_000a, 0, 0),
    (0x4000_0101, 0, 0),
    (0x4000_0101, 0, 3),
    (0x8000_0001, 0, 2),
    (0x8000_0001, 0, 3),
    (0x8000_0007, 0, 3),
    (0x8000_0008, 0, 1),
    (0x8000_000a, 0, 3),
    (0x8000_0021, 0, 0),
];

/// A processor's registers, by leaf and subleaf.
type Leaves = BTreeMap<(u32, u32), [u32; 4]>;

/// Reads one file for each processor.
pub(super) fn read(folder: &Path, facts: &mut Facts) -> anyhow::Result<()> {
    let mut processors = Vec::new();
    while let Ok(bytes) = fs::read(folder.join(processors.len().to_string())) {
        let what = || format!("CPUID of processor {}", processors.len());
        processors.push(leaves(&bytes).with_context(what)?);
    }
    ensure!(!processors.is_empty(), "{}: no processor", folder.display());
    facts.text("cpuid processors", processors.len().to_string());
    let mut all: Vec<_> = processors.iter().flat_map(BTreeMap::keys).copied().collect();
    all.sort_unstable();
    all.dedup();
    for (leaf, subleaf) in all {
        let each = |at: usize| {
            let of = |leaves: &Leaves| leaves.get(&(leaf, subleaf)).map_or(0, |it| it[at]);
            processors.iter().map(of).collect::<Vec<_>>()
        };
        // A leaf that a processor lacks is zero.
        for (at, register) in REGISTERS.iter().enumerate() {
            let numbers = each(at);
            let bits = BITS.contains(&(leaf, subleaf, at));
            let value = if bits { Value::Bits(numbers) } else { Value::Numbers(numbers) };
            let subleaf = if subleaf == 0 { String::new() } else { format!(".{subleaf}") };
            facts.0.insert(format!("cpuid {leaf:#010x}{subleaf} {register}"), value);
        }
    }
    Ok(())
}

fn leaves(bytes: &[u8]) -> anyhow::Result<Leaves> {
    let expected: u32 = ASKED.iter().map(|(_, leaves, subleaves)| leaves * subleaves * 16).sum();
    ensure!(bytes.len() == expected as usize, "{} bytes, not {expected}", bytes.len());
    let mut answers = bytes.chunks_exact(16).map(|chunk| {
        let word = |at: usize| {
            let bytes = chunk[at * 4..at * 4 + 4].try_into().expect("four bytes");
            u32::from_le_bytes(bytes)
        };
        [word(0), word(1), word(2), word(3)]
    });
    let mut found = Leaves::new();
    for (first, leaves, subleaves) in ASKED {
        for subleaf in 0..subleaves {
            for leaf in first..first + leaves {
                let answer = answers.next().context("too few answers")?;
                if subleaf == 0 || WITH_SUBLEAVES.contains(&leaf) {
                    found.insert((leaf, subleaf), answer);
                }
            }
        }
    }
    trim(&mut found);
    Ok(found)
}

/// Removes leaves above the last of their range, where processors answer anything, and empty ones.
fn trim(leaves: &mut Leaves) {
    let last = |first: u32| leaves.get(&(first, 0)).map_or(first, |it| it[0]);
    // Old versions of KVM report their last leaf as 0.
    let ends = ASKED.map(|(first, ..)| (first, last(first).max(first | 1)));
    leaves.retain(|(leaf, subleaf), answer| {
        let end = ends.iter().rev().find(|(first, _)| first <= leaf).map_or(0, |it| it.1);
        // The level number in ECX is an echo of the subleaf.
        let echo = [0xb, 0x1f].contains(leaf) && answer[2] == *subleaf;
        let empty = answer[0] == 0 && answer[1] == 0 && (echo || answer[2] == 0);
        let topology = [0xb, 0x1f].contains(leaf);
        *leaf <= end && !(empty && (answer[3] == 0 || topology))
    });
}

#[cfg(test)]
mod test {
    use super::*;

    /// A file with the last basic leaf in leaf 0, and with the given leaves.
    fn file(last: u32, given: &[((u32, u32), [u32; 4])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (first, leaves, subleaves) in ASKED {
            for subleaf in 0..subleaves {
                for leaf in first..first + leaves {
                    let own = if leaf == 0 { [last, 0, 0, 0] } else { [0; 4] };
                    let found = given.iter().find(|it| it.0 == (leaf, subleaf));
                    let answer = found.map_or(own, |it| it.1);
                    bytes.extend(answer.iter().flat_map(|word| word.to_le_bytes()));
                }
            }
        }
        bytes
    }

    #[test]
    fn leaves_beyond_the_last_are_omitted() {
        let bytes = file(7, &[((1, 0), [1, 2, 3, 4]), ((8, 0), [9; 4]), ((7, 1), [5, 0, 0, 0])]);
        let found = leaves(&bytes).unwrap();
        let keys: Vec<_> = found.keys().copied().collect();
        assert_eq!(keys, [(0, 0), (1, 0), (7, 1)]);
    }

    #[test]
    fn an_echoed_topology_level_is_ignored() {
        let bytes = file(0xb, &[((0xb, 1), [1, 2, 0x201, 7]), ((0xb, 2), [0, 0, 2, 7])]);
        assert_eq!(leaves(&bytes).unwrap().len(), 2);
    }

    #[test]
    fn refuses_a_truncated_file() {
        assert!(leaves(&file(1, &[])[16..]).is_err());
    }
}
