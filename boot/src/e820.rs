//! The memory map that a PC's firmware passes to the system (ACPI 6.5, 15.1 and 15.2).

use std::ops::Range;

use crate::layout::{IDENTITY_MAP, Ram, VGA};

/// The end of conventional memory: the last KiB below 640 KiB is the extended BIOS data area.
pub const CONVENTIONAL_END: u64 = 0x9_FC00;

/// The start of the area up to [`LEGACY_END`] that holds the firmware's tables: here ACPI and
/// SMBIOS.
pub const LEGACY_TABLES: u64 = 0xE_0000;

/// Between [`CONVENTIONAL_END`] and this address the guest has no RAM of its own to use.
pub const LEGACY_END: u64 = 0x10_0000;

/// The type of a range (ACPI 6.5, table 15.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Ram,
    Reserved,
}

impl Kind {
    /// The type's number in every form of the map.
    pub fn number(self) -> u32 {
        match self {
            Self::Ram => 1,
            Self::Reserved => 2,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub base: u64,
    pub length: u64,
    pub kind: Kind,
}

impl Entry {
    fn new(range: &Range<u64>, kind: Kind) -> Self {
        Self { base: range.start, length: range.end - range.start, kind }
    }
}

/// The map for firmware: all RAM, without the hole at 640 KiB, which the firmware adds itself.
pub fn for_firmware(ram: Ram) -> Vec<Entry> {
    let mut map: Vec<_> = ram.ranges().iter().map(|r| Entry::new(r, Kind::Ram)).collect();
    map.push(Entry::new(&IDENTITY_MAP, Kind::Reserved));
    map
}

/// The map for a kernel that boots without firmware, sorted by address.
///
/// PCIEXBAR is reserved: Linux uses an announced PCIEXBAR that is not reserved only after a
/// warning. The area between conventional memory and the tables is left out of the map: the VGA
/// window belongs to PCI, and Linux withholds reserved ranges from PCI.
pub fn for_direct_boot(ram: Ram, pciexbar: &Range<u64>) -> Vec<Entry> {
    let low = LEGACY_END..ram.low.max(LEGACY_END);
    let mut map = vec![
        Entry::new(&(0..CONVENTIONAL_END.min(ram.low)), Kind::Ram),
        Entry::new(&(CONVENTIONAL_END..VGA.start), Kind::Reserved),
        Entry::new(&(LEGACY_TABLES..LEGACY_END), Kind::Reserved),
        Entry::new(&low, Kind::Ram),
        Entry::new(pciexbar, Kind::Reserved),
        Entry::new(&IDENTITY_MAP, Kind::Reserved),
    ];
    map.extend(ram.ranges().iter().skip(1).map(|range| Entry::new(range, Kind::Ram)));
    map.retain(|entry| entry.length > 0);
    map
}

/// Encodes the map for the file `etc/e820` and for the zero page: 20 bytes for each entry.
pub fn bytes(map: &[Entry]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(map.len() * 20);
    for entry in map {
        bytes.extend(entry.base.to_le_bytes());
        bytes.extend(entry.length.to_le_bytes());
        bytes.extend(entry.kind.number().to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::layout::PCIEXBAR;

    const MIB: u64 = 1 << 20;

    fn ram_of(map: &[Entry]) -> u64 {
        map.iter().filter(|entry| entry.kind == Kind::Ram).map(|entry| entry.length).sum()
    }

    #[test]
    fn gives_firmware_one_low_entry_from_zero() {
        let map = for_firmware(Ram::new(256 * MIB));
        assert_eq!(map[0], Entry { base: 0, length: 256 * MIB, kind: Kind::Ram });
        assert_eq!(map[1], Entry { base: 0xFEFF_C000, length: 0x4000, kind: Kind::Reserved });
        assert_eq!(map.len(), 2);
        let bytes = bytes(&map);
        assert_eq!(bytes.len(), 40);
        assert_eq!(bytes[..20], *b"\0\0\0\0\0\0\0\0\0\0\0\x10\0\0\0\0\x01\0\0\0");
    }

    #[test]
    fn gives_firmware_every_byte_of_ram() {
        for total in [1, 128, 2047, 2048, 2049, 5 * 1024, 1 << 20] {
            assert_eq!(ram_of(&for_firmware(Ram::new(total * MIB))), total * MIB);
        }
    }

    #[test]
    fn leaves_out_only_the_legacy_area_in_direct_boot() {
        for total in [16, 256, 2048, 3 * 1024, 5 * 1024] {
            let map = for_direct_boot(Ram::new(total * MIB), &PCIEXBAR);
            assert_eq!(ram_of(&map), total * MIB - (LEGACY_END - CONVENTIONAL_END));
            for pair in map.windows(2) {
                assert!(pair[0].base + pair[0].length <= pair[1].base, "{pair:x?}");
            }
            let end = |entry: &Entry| entry.base + entry.length;
            let hides_vga = |entry: &&Entry| entry.base < VGA.end && end(entry) > VGA.start;
            assert_eq!(map.iter().find(hides_vga), None);
        }
    }

    #[test]
    fn never_lists_missing_ram() {
        for total in [0, 0x1000, 0x9_FC00, 0xA_0000, 0x10_0000] {
            let map = for_direct_boot(Ram::new(total), &PCIEXBAR);
            assert_eq!(ram_of(&map), total.min(CONVENTIONAL_END), "{total:#x}");
        }
    }
}
