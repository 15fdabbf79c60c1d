//! Slots of offsets and lengths: a symbol is a range of values, and extra bits select one of them.

use super::bits::Bits;

/// Numbers of slots whose ranges have 1, 2, 4, … values.
const OFFSETS: [usize; 21] =
    [9, 0, 9, 7, 10, 15, 15, 20, 20, 30, 33, 40, 42, 45, 60, 73, 80, 85, 95, 105, 6];
const LENGTHS: [usize; 17] = [27, 4, 6, 4, 5, 2, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1];
/// Extra bits of the last slots.
const LAST_LENGTH: u32 = 30;

struct Slot {
    first: usize,
    extra: u32,
}

pub(super) struct Slots(Vec<Slot>);

impl Slots {
    pub(super) fn offsets() -> Self {
        Self::new(&OFFSETS, 20)
    }

    pub(super) fn lengths() -> Self {
        Self::new(&LENGTHS, LAST_LENGTH)
    }

    /// The first value of a slot is that of the one before and the step that led there.
    fn new(counts: &[usize], last: u32) -> Self {
        let mut steps = Vec::new();
        for (step, count) in (0_u32..).zip(counts) {
            steps.extend(std::iter::repeat_n(step, *count));
        }
        let extras = steps.iter().copied().skip(1).chain([last]);
        let mut first = 0;
        let slots = steps.iter().zip(extras).map(|(step, extra)| {
            first += 1 << step;
            Slot { first, extra }
        });
        Self(slots.collect())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Number of slots that offsets within a block of this length have.
    pub(super) fn count(&self, length: usize) -> usize {
        self.0.partition_point(|slot| slot.first < length)
    }

    pub(super) fn value(&self, slot: usize, bits: &mut Bits) -> usize {
        let Slot { first, extra } = self.0[slot];
        first + bits.take(extra)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn slots_cover_all_values_without_gaps() {
        let (offsets, lengths) = (Slots::offsets(), Slots::lengths());
        assert_eq!((offsets.len(), lengths.len()), (799, 54));
        for slots in [offsets, lengths] {
            assert_eq!(slots.0[0].first, 1);
            for pair in slots.0.windows(2) {
                assert_eq!(pair[0].first + (1 << pair[0].extra), pair[1].first);
            }
        }
        let last = Slots::lengths().0.pop().unwrap();
        assert_eq!((last.first, last.extra), (0x108ab, 30));
    }
}
