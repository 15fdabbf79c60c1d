//! The layout of guest-physical memory.
//!
//! The machine is a Q35, and stock firmware of different ages programs that chip set differently.
//! The constants here hold for all versions. Addresses that the firmware chooses (PCIEXBAR, BARs)
//! are arguments.

use std::ops::Range;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// The maximum end of low RAM. The rest of the RAM goes to [`HIGH_RAM`].
///
/// 2 GiB, because firmware of 2022 puts PCIEXBAR at 0xB000_0000 with PCI memory behind it, and
/// firmware of 2025 uses everything from 0x8000_0000 on for PCI. 3 GiB would break the first.
pub const LOW_RAM_END_MAX: u64 = 2 * GIB;

/// The address of the RAM that does not fit below [`LOW_RAM_END_MAX`].
pub const HIGH_RAM: u64 = 4 * GIB;

/// The size of PCIEXBAR: 256 buses of 1 MiB.
pub const PCIEXBAR_SIZE: u64 = 256 * MIB;

/// PCIEXBAR when no firmware programs it (direct boot): the address that firmware of 2025 uses.
pub const PCIEXBAR: Range<u64> = 0xE000_0000..0xE000_0000 + PCIEXBAR_SIZE;

/// The end of the 32-bit PCI windows. The I/O APIC and all fixed devices lie above.
pub const PCI_MEMORY_END: u64 = IOAPIC.start;

/// The VGA window. The display decodes it. It is never RAM.
pub const VGA: Range<u64> = 0xA_0000..0xC_0000;

pub const IOAPIC: Range<u64> = 0xFEC0_0000..0xFEC0_1000;

pub const HPET: Range<u64> = 0xFED0_0000..0xFED0_0400;

/// The local APICs, and the addresses that message signalled interrupts are written to.
pub const LAPIC: Range<u64> = 0xFEE0_0000..0xFEF0_0000;

/// Memory that the hypervisor needs on processors that cannot run real mode natively: an
/// identity-mapped page table, and three pages of task state. It is reserved in every memory map.
pub const IDENTITY_MAP: Range<u64> = 0xFEFF_C000..0xFF00_0000;

/// The guest's RAM, split between low and high memory as the chip set requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ram {
    /// Size in bytes of the part that starts at address 0.
    pub low: u64,
    /// Size in bytes of the part that starts at [`HIGH_RAM`].
    pub high: u64,
}

impl Ram {
    pub fn new(total: u64) -> Self {
        let low = total.min(LOW_RAM_END_MAX);
        Self { low, high: total - low }
    }

    /// The address after the last byte of RAM.
    pub fn end(self) -> u64 {
        if self.high == 0 { self.low } else { HIGH_RAM.saturating_add(self.high) }
    }

    /// The one or two ranges, sorted by address.
    pub fn ranges(self) -> Vec<Range<u64>> {
        let high = HIGH_RAM..HIGH_RAM.saturating_add(self.high);
        [0..self.low, high].into_iter().filter(|range| !range.is_empty()).collect()
    }
}

/// Returns the windows for 32-bit BARs: from the end of low RAM to [`PCI_MEMORY_END`], except
/// PCIEXBAR.
///
/// The result covers both sides of PCIEXBAR, because firmware of 2022 uses the upper and firmware
/// of 2025 the lower side.
pub fn pci_windows(ram: Ram, pciexbar: &Range<u64>) -> Vec<Range<u64>> {
    let below = ram.low..pciexbar.start.clamp(ram.low, PCI_MEMORY_END);
    let above = pciexbar.end.clamp(ram.low, PCI_MEMORY_END)..PCI_MEMORY_END;
    [below, above].into_iter().filter(|window| !window.is_empty()).collect()
}

/// Returns the window for 64-bit BARs: all addresses of the processor above RAM.
///
/// Firmware uses the top eighth of that space, but supports at most 47 address bits, so a larger
/// window would never be used. `None` if RAM leaves no room.
pub fn pci_window64(ram: Ram, physical_bits: u8) -> Option<Range<u64>> {
    let end = 1u64 << physical_bits.min(47);
    let start = ram.end().max(HIGH_RAM).checked_next_multiple_of(GIB)?;
    (start < end).then_some(start..end)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn keeps_all_ram_low_up_to_two_gib() {
        assert_eq!(Ram::new(256 * MIB), Ram { low: 256 * MIB, high: 0 });
        assert_eq!(Ram::new(2 * GIB), Ram { low: 2 * GIB, high: 0 });
        let odd = Ram::new(2 * GIB + MIB);
        assert_eq!(odd, Ram { low: 2 * GIB, high: MIB });
        assert_eq!(odd.ranges(), [0..2 * GIB, 4 * GIB..4 * GIB + MIB]);
        assert_eq!(odd.end(), 4 * GIB + MIB);
        assert_eq!(Ram::new(256 * MIB).end(), 256 * MIB);
    }

    #[test]
    fn puts_pci_windows_around_any_pciexbar() {
        let ram = Ram::new(5 * GIB);
        assert_eq!(
            pci_windows(ram, &(0xB000_0000..0xC000_0000)),
            [0x8000_0000..0xB000_0000, 0xC000_0000..0xFEC0_0000]
        );
        assert_eq!(
            pci_windows(Ram::new(256 * MIB), &PCIEXBAR),
            [0x1000_0000..0xE000_0000, 0xF000_0000..0xFEC0_0000]
        );
        // A base as a confused guest might choose it.
        for pciexbar in [0..0x1000_0000, 5 * GIB..6 * GIB] {
            assert_eq!(pci_windows(ram, &pciexbar), vec![0x8000_0000..0xFEC0_0000; 1]);
        }
    }

    #[test]
    fn puts_64_bit_bars_above_ram() {
        assert_eq!(pci_window64(Ram::new(MIB), 39), Some(4 * GIB..1 << 39));
        assert_eq!(pci_window64(Ram::new(5 * GIB + MIB), 52), Some(8 * GIB..1 << 47));
        assert_eq!(pci_window64(Ram::new(64 * GIB), 36), None);
        assert_eq!(pci_window64(Ram::new(u64::MAX), 47), None);
    }
}
