//! IDENTIFY DEVICE and IDENTIFY PACKET DEVICE (ACS-2, 7.12 and 7.13).

use super::drive::{Disk, MAX_LIST, MAX_MULTIPLE, State};
use host::fnv;

const WORDS: usize = 256;
const FIRMWARE: &str = "1.00";

/// Always set in words 50, 83, 84, 87, 106, 119, 120 and 209.
const VALID: u16 = 1 << 14;
/// The geometry of every large disk (cylinders, heads, sectors), and its number of sectors.
const GEOMETRY: [u16; 3] = [16383, 16, 63];
/// Sectors that commands with 28 bits reach.
const MAX_SHORT: u64 = 0x0fff_ffff;

/// Feature sets (words 82 to 84): SMART, PACKET, power management, write cache, look-ahead, device
/// reset.
const SMART: u16 = 1 << 0;
const POWER: u16 = 1 << 3;
const PACKET: u16 = 1 << 4;
const WRITE_CACHE: u16 = 1 << 5;
const LOOK_AHEAD: u16 = 1 << 6;
const DEVICE_RESET: u16 = 1 << 9;
/// LBA with 48 bits, FLUSH CACHE, FLUSH CACHE EXT.
const LARGE: u16 = 1 << 10 | 1 << 12 | 1 << 13;
/// Logs, WRITE DMA FUA EXT, a world wide name.
const LOGS: u16 = 1 << 5 | 1 << 6 | 1 << 8;

struct Page([u16; WORDS]);

impl Page {
    fn text(&mut self, first: usize, words: usize, text: &str) {
        let bytes = text.bytes().chain(std::iter::repeat(b' '));
        let bytes: Vec<u8> = bytes.take(2 * words).collect();
        for (word, pair) in self.0[first..first + words].iter_mut().zip(bytes.as_chunks::<2>().0) {
            // The first character is in the upper half.
            *word = u16::from_be_bytes(*pair);
        }
    }

    /// The lowest word first.
    fn number(&mut self, first: usize, words: usize, value: u64) {
        for (at, word) in self.0[first..first + words].iter_mut().enumerate() {
            *word = u16::try_from(value >> (16 * at) & 0xffff).unwrap_or(0);
        }
    }

    /// Fields of all serial ATA devices. `mode` is the transfer mode.
    fn serial_ata(&mut self, mode: u8) {
        let selected = |kind: u8, modes: u8| -> u16 {
            let number = mode.checked_sub(kind).filter(|number| *number < modes);
            number.map_or(0, |number| 1 << (8 + number))
        };
        self.0[49] = 0x0b00;
        // Words 64 to 70 and 88 are valid.
        self.0[53] = 6;
        self.0[63] = 0x07 | selected(0x20, 3);
        // PIO modes 3 and 4, and the cycle times in nanoseconds.
        self.0[64] = 3;
        self.0[65..69].fill(120);
        // 1.5 and 3 Gb/s. The speed now is 3 Gb/s.
        self.0[76] = 1 << 1 | 1 << 2;
        self.0[77] = 2 << 1;
        // ATA-4 to ACS-2; serial ATA to 3.0.
        self.0[80] = 0x03f0;
        self.0[88] = 0x7f | selected(0x40, 7);
        self.0[222] = 0x107f;
    }

    /// The bytes, with the integrity word.
    fn finish(mut self) -> Vec<u8> {
        self.0[255] = 0x00a5;
        let mut bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        let sum = bytes.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        bytes[511] = 0_u8.wrapping_sub(sum);
        bytes
    }
}

pub(super) fn disk(disk: &Disk<'_>) -> Vec<u8> {
    let (state, geometry) = (&*disk.state, disk.geometry);
    let sectors = geometry.size / u64::from(geometry.logical_block);
    let mut page = Page([0; WORDS]);
    page.serial_ata(state.mode);
    page.0[0] = 0x0040;
    let [cylinders, heads, per_track] = GEOMETRY;
    (page.0[1], page.0[3], page.0[6]) = (cylinders, heads, per_track);
    page.text(10, 10, disk.serial);
    page.text(23, 4, FIRMWARE);
    page.text(27, 20, "Transom SATA disk");
    page.0[47] = 0x8000 | u16::from(MAX_MULTIPLE);
    // Standby timers, IORDY, LBA, DMA.
    page.0[49] = 0x2f00;
    page.0[50] = VALID;
    page.0[53] |= 1;
    page.0[54..57].copy_from_slice(&GEOMETRY);
    page.number(57, 2, GEOMETRY.iter().map(|it| u64::from(*it)).product());
    page.0[59] = if state.multiple > 0 { 0x100 | u16::from(state.multiple) } else { 0 };
    page.number(60, 2, sectors.min(MAX_SHORT));
    // NCQ, with 32 commands.
    page.0[75] = 31;
    page.0[76] |= 1 << 8;
    // Software settings preservation.
    (page.0[78], page.0[79]) = (1 << 6, 1 << 6);
    feature_sets(&mut page, state);
    page.number(100, 4, sectors);
    sector_sizes(&mut page, disk);
    let name = fnv::hash(disk.serial.as_bytes(), 0) & !(0xf << 60) | 3 << 60;
    for (at, word) in page.0[108..112].iter_mut().enumerate() {
        *word = u16::try_from(name >> (48 - 16 * at) & 0xffff).unwrap_or(0);
    }
    if disk.discards() {
        (page.0[105], page.0[169]) = (MAX_LIST, 1);
    }
    // Non-rotating.
    page.0[217] = 1;
    page.finish()
}

/// Words 82 to 87, 119 and 120: supported, then enabled.
fn feature_sets(page: &mut Page, state: &State) {
    page.0[82] = SMART | POWER | WRITE_CACHE | LOOK_AHEAD;
    page.0[83] = VALID | LARGE;
    page.0[84] = VALID | LOGS;
    let flag = |on: bool, bit: u16| if on { bit } else { 0 };
    page.0[85] = POWER
        | flag(state.smart, SMART)
        | flag(state.write_cache, WRITE_CACHE)
        | flag(state.look_ahead, LOOK_AHEAD);
    // Words 119 and 120 are valid.
    page.0[86] = LARGE | 1 << 15;
    page.0[87] = VALID | LOGS;
    (page.0[119], page.0[120]) = (VALID, VALID);
}

fn sector_sizes(page: &mut Page, disk: &Disk<'_>) {
    let (logical, physical) = (disk.geometry.logical_block, disk.geometry.physical_block);
    let ratio = (physical / logical.max(1)).max(1).ilog2();
    page.0[106] = VALID;
    if ratio > 0 {
        page.0[106] |= 1 << 13 | u16::try_from(ratio & 0xf).unwrap_or(0);
    }
    if logical > 512 {
        page.0[106] |= 1 << 12;
        page.number(117, 2, u64::from(logical / 2));
    }
    // The first physical sector begins with the first logical one.
    page.0[209] = VALID;
}

pub(super) fn cdrom(serial: &str, mode: u8) -> Vec<u8> {
    let mut page = Page([0; WORDS]);
    page.serial_ata(mode);
    // ATAPI, a CD-ROM drive, removable, DRQ within 50 us, commands of 12 bytes.
    page.0[0] = 0x85c0;
    page.text(10, 10, serial);
    page.text(23, 4, FIRMWARE);
    page.text(27, 20, "Transom SATA CD-ROM");
    page.0[82] = POWER | PACKET | DEVICE_RESET;
    (page.0[83], page.0[84], page.0[87]) = (VALID, VALID, VALID);
    page.0[85] = POWER | PACKET | DEVICE_RESET;
    page.finish()
}
