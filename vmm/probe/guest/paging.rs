//! Page tables for addresses above the first 4 GiB, which entry.rs maps.
//!
//! RAM is identity-mapped, with 1 GiB pages if the processor supports them. Registers of devices
//! may have any physical address, and there are more physical than linear addresses. Devices are
//! therefore mapped through windows of 2 MiB, uncached, in a GiB that is reserved for them.
use crate::cpu::Cpu;
use crate::entry::page_tables;
use crate::io::{read64, write64};
use crate::memory::Room;

const GIB: u64 = 1 << 30;
/// The end of the memory that entry.rs maps.
const LOW: u64 = 4 * GIB;
const PAGE: u64 = 2 << 20;
const ENTRIES: u64 = 512;
/// PRESENT, WRITABLE and USER: a table.
const TABLE: u64 = 7;
/// `TABLE`, and PAGE SIZE.
const LARGE_PAGE: u64 = 0x87;
/// Write-through, and cache disable.
const UNCACHED: u64 = 0x18;
/// The GiB of the windows: the last entry of the pointer table in entry.rs.
const WINDOWS: u64 = ENTRIES - 1;

#[repr(align(4096))]
#[derive(Clone, Copy)]
struct Directory {
    _entries: [u64; ENTRIES as usize],
}

/// Directories for RAM, if there are no 1 GiB pages.
const DIRECTORIES: usize = 8;
static mut HIGH: [Directory; DIRECTORIES] = [Directory { _entries: [0; 512] }; DIRECTORIES];
static mut DEVICES: Directory = Directory { _entries: [0; 512] };

/// Maps RAM at its own address, as far as the tables reach. Returns the number of bytes mapped.
pub(crate) fn map_ram(base: u64, length: u64, cpu: &Cpu) -> u64 {
    let reach = if cpu.gib_pages { WINDOWS * GIB } else { LOW + DIRECTORIES as u64 * GIB };
    let end = base.saturating_add(length).min(reach.min(reach_of(cpu))).max(base);
    for gib in base.max(LOW) / GIB..end.max(LOW).div_ceil(GIB) {
        map_gib(gib, cpu.gib_pages);
    }
    end - base
}

/// Maps a device's registers and returns their linear address. Returns `None` if the address is 0
/// or beyond the processor's physical addresses, or if there are not enough windows.
pub(crate) fn map_device(address: u64, length: u64, cpu: &Cpu) -> Option<u64> {
    let end = address.checked_add(length)?;
    if address == 0 || end > reach_of(cpu) {
        return None;
    }
    if end <= LOW {
        return Some(address);
    }
    let first = address / PAGE * PAGE;
    let window = windows(first, end.div_ceil(PAGE) - address / PAGE)?;
    Some(WINDOWS * GIB + window * PAGE + (address - first))
}

/// The first of `count` consecutive windows that already map these pages, or are free.
fn windows(first: u64, count: u64) -> Option<u64> {
    let directory = &raw const DEVICES as u64;
    let entry = |window: u64| directory + window * 8;
    let shows = |page: u64| (first + page * PAGE) | LARGE_PAGE | UNCACHED;
    // The processor sets bits in an entry when it uses it.
    let fits = |window: u64, page: u64| {
        let is = read64(entry(window + page)) & !ACCESSED;
        is == 0 || is == shows(page)
    };
    let last = ENTRIES.checked_sub(count)?;
    let found = (0..=last).find(|&window| (0..count).all(|page| fits(window, page)))?;
    for page in 0..count {
        write64(entry(found + page), shows(page));
    }
    write64(pointer(WINDOWS), directory | TABLE);
    Some(found)
}

/// An address that shows one of two pages of RAM, each of which holds its own address.
pub(crate) struct Remapped {
    pub(crate) address: u64,
    pages: [u64; 2],
    shown: usize,
}

impl Remapped {
    /// Uses the last window.
    pub(crate) fn new(room: &mut Room) -> Option<Self> {
        let first = room.take(3 * PAGE)?.next_multiple_of(PAGE);
        let pages = [first, first + PAGE];
        pages.iter().for_each(|&page| write64(page, page));
        let mut it = Self { address: WINDOWS * GIB + (ENTRIES - 1) * PAGE, pages, shown: 0 };
        it.swap();
        write64(pointer(WINDOWS), &raw const DEVICES as u64 | TABLE);
        Some(it)
    }

    /// Shows the other page, and returns its content. Processors may still know the old one.
    pub(crate) fn swap(&mut self) -> u64 {
        self.shown ^= 1;
        let page = self.pages[self.shown];
        write64(&raw const DEVICES as u64 + (ENTRIES - 1) * 8, page | LARGE_PAGE);
        page
    }
}

/// ACCESSED and DIRTY.
const ACCESSED: u64 = 0x60;

/// The end of physical addresses.
fn reach_of(cpu: &Cpu) -> u64 {
    1 << cpu.physical_bits.clamp(32, 52)
}

fn map_gib(gib: u64, gib_pages: bool) {
    let entry = if gib_pages {
        (gib * GIB) | LARGE_PAGE
    } else {
        let directory = (&raw mut HIGH).cast::<Directory>().wrapping_add(gib as usize - 4) as u64;
        for page in 0..ENTRIES {
            write64(directory + page * 8, (gib * GIB + page * PAGE) | LARGE_PAGE);
        }
        directory | TABLE
    };
    write64(pointer(gib), entry);
}

/// The entry of a GiB. The pointer table follows the top-level table.
fn pointer(gib: u64) -> u64 {
    page_tables() as u64 + 4096 + gib * 8
}
