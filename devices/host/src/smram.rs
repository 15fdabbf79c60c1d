//! System-management RAM (SMRAM) of a Q35: RAM that only processors in system-management mode (SMM)
//! access. The chip set hides it from other processors, and from devices.

use std::ops::Range;

use crate::ram::GuestMemoryMmap;
use vm_memory::{Address as _, GuestMemoryBackend, GuestMemoryRegion};

/// Segment A: the RAM behind the VGA window.
pub const SEGMENT_A: Range<u64> = 0xa_0000..0xc_0000;
/// The sizes of TSEG that the chip set offers, in MiB. The last one is QEMU's extension.
pub const TSEG_MIB: [u16; 4] = [1, 2, 8, 16];
/// Low RAM in bytes that a machine needs, so that TSEG and the firmware fit.
pub const MIN_LOW_RAM: u64 = 64 << 20;

/// Which processors access the RAM of segment A. Others find the VGA window there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SegmentA {
    #[default]
    Nobody,
    InSmm,
    Everybody,
}

/// The SMRAM that the guest has configured. None at power-on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Smram {
    pub segment_a: SegmentA,
    /// The size of TSEG, which is at the end of low RAM: one of [`TSEG_MIB`], or 0.
    pub tseg_mib: u16,
}

impl Smram {
    /// Whether processors access the RAM in `part`, which [`parts`] returned, in or outside of SMM.
    pub fn shows(self, part: &Range<u64>, low_ram: u64, in_smm: bool) -> bool {
        if *part == SEGMENT_A {
            return match self.segment_a {
                SegmentA::Nobody => false,
                SegmentA::InSmm => in_smm,
                SegmentA::Everybody => true,
            };
        }
        let tseg = low_ram.saturating_sub(u64::from(self.tseg_mib) << 20)..low_ram;
        in_smm || !(tseg.start <= part.start && part.end <= tseg.end)
    }
}

/// Splits low RAM, from 0 to `low_ram`, where SMRAM may begin or end.
pub fn parts(low_ram: u64) -> Vec<Range<u64>> {
    let tseg = TSEG_MIB.iter().rev().map(|mib| low_ram.saturating_sub(u64::from(*mib) << 20));
    let mut ends = vec![SEGMENT_A.start, SEGMENT_A.end];
    ends.extend(tseg.chain([low_ram]));
    let starts = [0].into_iter().chain(ends.clone());
    starts.zip(ends).map(|(start, end)| start..end).collect()
}

/// The end of the RAM below 4 GiB.
pub fn low_ram(ram: &GuestMemoryMmap) -> u64 {
    let ends = ram.iter().map(range).filter(|range| range.start < 1 << 32).map(|range| range.end);
    ends.max().unwrap_or(0)
}

pub fn range(region: &impl GuestMemoryRegion) -> Range<u64> {
    let start = region.start_addr().raw_value();
    start..start.saturating_add(region.len())
}

/// The RAM that devices access: never segment A, where they find the VGA window, nor this TSEG.
pub(crate) fn for_devices(ram: &GuestMemoryMmap, tseg_mib: u16) -> GuestMemoryMmap {
    let (smram, low) = (Smram { tseg_mib, ..Smram::default() }, low_ram(ram));
    let mut left = ram.clone();
    for region in ram.iter().filter(|region| !smram.shows(&range(*region), low, false)) {
        if let Ok((rest, _)) = left.remove_region(region.start_addr(), region.len()) {
            left = rest;
        }
    }
    left
}

#[cfg(test)]
mod test {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn parts_cover_low_ram_without_gaps() {
        let parts = parts(64 * MIB);
        assert_eq!(parts[1], SEGMENT_A);
        assert_eq!(parts[3], 48 * MIB..56 * MIB);
        assert_eq!((parts[0].start, parts.last().unwrap().end), (0, 64 * MIB));
        assert!(parts.iter().zip(&parts[1..]).all(|(one, next)| one.end == next.start));
        assert!(parts.iter().all(|part| part.start < part.end), "{parts:x?}");
    }

    #[test]
    fn each_tseg_is_visible_in_smm_alone() {
        for mib in TSEG_MIB {
            let smram = Smram { tseg_mib: mib, ..Smram::default() };
            let start = (64 - u64::from(mib)) * MIB;
            for part in parts(64 * MIB).iter().filter(|part| **part != SEGMENT_A) {
                assert!(smram.shows(part, 64 * MIB, true));
                assert_eq!(smram.shows(part, 64 * MIB, false), part.end <= start, "{part:x?}");
            }
            assert!(smram.shows(&(1 << 32..2 << 32), 64 * MIB, false), "high RAM");
        }
        assert!(parts(64 * MIB).iter().skip(2).all(|it| Smram::default().shows(
            it,
            64 * MIB,
            false
        )));
    }

    #[test]
    fn segment_a_is_closed_for_smm_or_open() {
        for (segment_a, seen) in [
            (SegmentA::Nobody, [false, false]),
            (SegmentA::InSmm, [false, true]),
            (SegmentA::Everybody, [true, true]),
        ] {
            let smram = Smram { segment_a, tseg_mib: 1 };
            assert_eq!([false, true].map(|smm| smram.shows(&SEGMENT_A, 64 * MIB, smm)), seen);
        }
    }
}
