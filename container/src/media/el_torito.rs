//! The boot catalog of a CD ("El Torito" Bootable CD-ROM Format Specification 1.0): the images that
//! firmware starts.
//!
//! Threats: the catalog is anywhere, or nowhere. One sector of it is read: 63 entries.

use super::{Image, SECTOR, sector, u16_at, u32_at};

/// Sector of the boot record volume descriptor (2.0, Figure 7).
const BOOT_RECORD: u64 = 17;
const IDENTIFIER: &[u8] = b"\0CD001\x01EL TORITO SPECIFICATION";
/// Offset of the catalog's sector in the boot record.
const CATALOG: usize = 71;
const ENTRY: usize = 32;
/// Header identifiers: validation entry, section header, and the last section header (2.1, 2.3).
const VALIDATION: u8 = 1;
const SECTION: u8 = 0x90;
const LAST_SECTION: u8 = 0x91;
const KEY: [u8; 2] = [0x55, 0xaa];
/// Boot indicators of section entries; a section entry extension (2.2, 2.4, 2.5).
const BOOTABLE: u8 = 0x88;
const NOT_BOOTABLE: u8 = 0;
const EXTENSION: u8 = 0x44;
/// Platform of images that a BIOS starts, and that UEFI starts (UEFI 13.3.2.1).
pub const BIOS: u8 = 0;
pub const EFI: u8 = 0xef;
/// Offset of the image's sector in an entry.
const LOAD_RBA: usize = 8;

/// A section entry, or the initial one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub platform: u8,
    pub bootable: bool,
    /// Emulated drive: 0 is none.
    pub emulation: u8,
    /// Sectors of 512 bytes that a BIOS loads.
    pub count: u16,
    /// First sector of the image, of 2048 bytes.
    pub sector: u32,
    /// Offset in the CD of the four bytes that hold `sector`, little-endian.
    pub sector_at: u64,
}

/// The entries of the catalog. Empty if there is no valid one.
pub fn entries(image: &(impl Image + ?Sized)) -> anyhow::Result<Vec<Entry>> {
    let record = sector(image, BOOT_RECORD)?.filter(|it| it.starts_with(IDENTIFIER));
    let Some(record) = record else { return Ok(Vec::new()) };
    let number = u64::from(u32_at(&record, CATALOG)?);
    let Some(catalog) = sector(image, number)? else { return Ok(Vec::new()) };
    if !is_valid(&catalog[..ENTRY]) {
        return Ok(Vec::new());
    }
    let at = number * SECTOR;
    let mut entries = Vec::new();
    // The initial entry belongs to the platform of the validation entry.
    let (mut platform, mut rest, mut last) = (catalog[1], 1_u16, false);
    for (index, bytes) in catalog.chunks_exact(ENTRY).enumerate().skip(1) {
        match bytes[0] {
            EXTENSION => {}
            BOOTABLE | NOT_BOOTABLE if rest > 0 => {
                entries.push(entry(bytes, platform, at + (index * ENTRY) as u64)?);
                rest -= 1;
            }
            SECTION | LAST_SECTION if !last => {
                (platform, rest) = (bytes[1], u16_at(bytes, 2)?);
                last = bytes[0] == LAST_SECTION;
            }
            _ => break,
        }
    }
    Ok(entries)
}

fn entry(bytes: &[u8], platform: u8, at: u64) -> anyhow::Result<Entry> {
    Ok(Entry {
        platform,
        bootable: bytes[0] == BOOTABLE,
        emulation: bytes[1] & 0xf,
        count: u16_at(bytes, 6)?,
        sector: u32_at(bytes, LOAD_RBA)?,
        sector_at: at + LOAD_RBA as u64,
    })
}

/// Whether this is a validation entry, whose words add up to 0.
fn is_valid(bytes: &[u8]) -> bool {
    let words = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    bytes[0] == VALIDATION && bytes[30..] == KEY && words.fold(0, u16::wrapping_add) == 0
}
