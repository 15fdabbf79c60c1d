//! Memory: prints the memory map, and tests samples of RAM with a pattern.
use core::mem::size_of;

use crate::Session;
use crate::cpu::Cpu;
use crate::entry::image;
use crate::io::{read_memory, write_memory};
use crate::paging::map_ram;
use crate::random::Random;
use crate::report::Finding;
use crate::start::{Range, Start};

const RAM: u32 = 1;
/// The end of the memory that entry.rs maps.
const LOW: u64 = 4 << 30;
/// The size of a sample, in 8-byte words.
const WORDS: usize = 64;
const SAMPLE: u64 = (WORDS * size_of::<u64>()) as u64;
/// Samples per range: few, because each may make the host allocate 2 MiB.
const SAMPLES: u64 = 32;
const MAX_SAMPLES: usize = 128;

pub(crate) fn check(session: &mut Session, start: &Start, cpu: &Cpu) {
    let mut total = 0;
    for range in start.ranges() {
        total += if range.kind == RAM { range.length } else { 0 };
        let finding = Finding::info("memory-range").hex("base", range.base);
        session.add(finding.hex("length", range.length).number("type", range.kind.into()));
    }
    let found = start.valid && total > 0;
    session.add(
        Finding::check("memory-map", found)
            .text("boot", if start.valid { "pvh" } else { "unknown" })
            .number("version", start.version.into())
            .number("ram_bytes", total)
            .hex("rsdp", start.rsdp),
    );
    pattern(session, start, cpu);
}

/// Writes all samples before reading any, which reveals two addresses of the same memory.
fn pattern(session: &mut Session, start: &Start, cpu: &Cpu) {
    let mut samples = Samples { addresses: [0; MAX_SAMPLES], used: 0 };
    let mut unmapped = 0;
    for range in start.ranges().filter(|range| range.kind == RAM) {
        let length = map_ram(range.base, range.length, cpu);
        let mapped = Range { length, ..range };
        unmapped += range.length - length;
        samples.choose(&mapped, start);
    }
    let mut saved = [[0u64; WORDS]; MAX_SAMPLES];
    let words = |address: u64| (0..WORDS as u64).map(move |word| address + word * 8);
    let mut random = Random::new(1);
    for (address, saved) in samples.iter().zip(&mut saved) {
        for (word, saved) in words(address).zip(saved) {
            *saved = read_memory(word, 8);
            write_memory(word, 8, random.next());
        }
    }
    let mut random = Random::new(1);
    let mut errors = 0;
    let mut first_error = 0;
    for word in samples.iter().flat_map(words) {
        if read_memory(word, 8) != random.next() {
            first_error = if errors == 0 { word } else { first_error };
            errors += 1;
        }
    }
    for (address, saved) in samples.iter().zip(&saved) {
        words(address).zip(saved).for_each(|(word, &value)| write_memory(word, 8, value));
    }
    let high = samples.iter().filter(|&address| address >= LOW).count() as u64;
    let tested = samples.used as u64;
    session.add(
        Finding::check("memory-test", errors == 0 && tested > 0)
            .number("tested_bytes", tested * SAMPLE)
            .number("samples", tested)
            .number("samples_above_4g", high)
            .number("errors", errors)
            .hex("first_error", first_error)
            .number("unmapped_bytes", unmapped),
    );
}

struct Samples {
    addresses: [u64; MAX_SAMPLES],
    used: usize,
}

impl Samples {
    fn iter(&self) -> impl Iterator<Item = u64> {
        self.addresses[..self.used].iter().copied()
    }

    /// Adds the first bytes of 2 MiB pages spread over the range, and the last bytes of the range.
    fn choose(&mut self, range: &Range, start: &Start) {
        const PAGE: u64 = 2 << 20;
        let end = range.base + range.length;
        let first = range.base.next_multiple_of(PAGE);
        let pages = end.saturating_sub(first) / PAGE;
        let count = pages.min(SAMPLES);
        for index in 0..count {
            self.add(first + pages * index / count * PAGE, start);
        }
        if end >= PAGE && range.length >= PAGE {
            self.add((end & !7) - SAMPLE, start);
        }
    }

    fn add(&mut self, address: u64, start: &Start) {
        let (image_start, image_end) = image();
        let ours = address < image_end && image_start < address + SAMPLE;
        // The first MiB has tables of the loader, whichever it is.
        if ours || address < 1 << 20 || start.uses(address, SAMPLE) {
            return;
        }
        if let Some(free) = self.addresses.get_mut(self.used) {
            *free = address;
            self.used += 1;
        }
    }
}

/// Free memory for a check: whole pages of RAM that are used for nothing else.
pub(crate) struct Room {
    next: u64,
    end: u64,
}

impl Room {
    /// The largest free range below 4 GiB, after the image and the loader's data.
    pub(crate) fn find(start: &Start) -> Self {
        const FIRST: u64 = 4 << 20;
        let free = |range: &Range| {
            let end = range.base.saturating_add(range.length).min(LOW);
            let mut next = range.base.max(FIRST).next_multiple_of(PAGE);
            while next < end && start.uses(next, end - next) {
                next += FIRST;
            }
            Self { next: next.min(end), end }
        };
        let ranges = start.ranges().filter(|range| range.kind == RAM && range.base < LOW);
        let largest = ranges.map(|range| free(&range)).max_by_key(|room| room.end - room.next);
        largest.unwrap_or(Self { next: 0, end: 0 })
    }

    /// Allocates memory, as whole pages of zeros.
    pub(crate) fn take(&mut self, bytes: u64) -> Option<u64> {
        let end = self.next.checked_add(bytes.next_multiple_of(PAGE))?;
        if end > self.end {
            return None;
        }
        let at = core::mem::replace(&mut self.next, end);
        fill(at, bytes.next_multiple_of(PAGE), 0);
        Some(at)
    }

    /// The free memory, for a check that returns all of it.
    pub(crate) fn rest(&self) -> Self {
        Self { ..*self }
    }
}

const PAGE: u64 = 4096;

/// Sets all bytes of memory from a [`Room`].
pub(crate) fn fill(address: u64, bytes: u64, value: u8) {
    // SAFETY: memory that the loader provided, and that holds no variable.
    unsafe { core::ptr::write_bytes(address as *mut u8, value, bytes as usize) };
}

/// Memory from a [`Room`] as numbers. No device may write to it.
pub(crate) fn numbers(address: u64, count: u64) -> &'static mut [u64] {
    // SAFETY: whole mapped pages, initialized with zeros, and used by one check at a time.
    unsafe { core::slice::from_raw_parts_mut(address as *mut u64, count as usize) }
}
