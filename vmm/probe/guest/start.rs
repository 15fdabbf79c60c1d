//! The PVH start info, which the loader provides: command line and memory map.
use crate::io::{read_memory, read32};

/// XEN_HVM_START_MAGIC_VALUE
const MAGIC: u32 = 0x336e_c578;
/// The end of the memory that entry.rs maps. The loader's data is below it.
const MAPPED: u64 = 1 << 32;
const MAX_COMMAND_LINE_BYTES: u64 = 1024;
const MAX_RANGES: u64 = 32;

/// `struct hvm_start_info` at `address`.
pub(crate) struct Start {
    address: u64,
    pub(crate) valid: bool,
    pub(crate) version: u32,
    pub(crate) rsdp: u64,
    map: u64,
    ranges: u64,
    command_line: u64,
    /// The address of the list of modules, and their number.
    modules: (u64, u64),
}

/// `struct hvm_memmap_table_entry`
#[derive(Clone, Copy)]
pub(crate) struct Range {
    pub(crate) base: u64,
    pub(crate) length: u64,
    /// The type of the range as in e820: 1 is RAM.
    pub(crate) kind: u32,
}

impl Start {
    pub(crate) fn read(address: u64) -> Self {
        let field = |offset| read_memory(address + offset, 8);
        let valid = read32(address) == MAGIC;
        let version = read32(address + 4);
        let below = |address| if valid && address < MAPPED - 4096 { address } else { 0 };
        let with_map = valid && version >= 1 && below(field(40)) != 0;
        Self {
            address,
            valid,
            version,
            rsdp: below(field(32)),
            map: field(40),
            ranges: if with_map { u64::from(read32(address + 48)).min(MAX_RANGES) } else { 0 },
            command_line: below(field(24)),
            modules: (below(field(16)), read32(address + 12).into()),
        }
    }

    /// Copies the command line. Must run before anything else writes to memory.
    pub(crate) fn command_line(&self, to: &'static mut [u8]) -> &'static str {
        if self.command_line == 0 {
            return "";
        }
        let mut length = 0;
        for (index, byte) in to.iter_mut().enumerate().take(MAX_COMMAND_LINE_BYTES as usize) {
            *byte = read_memory(self.command_line + index as u64, 1) as u8;
            if *byte == 0 || !byte.is_ascii() {
                break;
            }
            length = index + 1;
        }
        core::str::from_utf8(&to[..length]).unwrap_or("")
    }

    /// Address and size of the first module, also called the initial RAM disk.
    pub(crate) fn module(&self) -> Option<(u64, u64)> {
        let (list, count) = self.modules;
        if list == 0 || count == 0 {
            return None;
        }
        let [at, size] = [0, 8].map(|field| read_memory(list + field, 8));
        (at != 0 && at.checked_add(size)? <= MAPPED).then_some((at, size))
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range> {
        let map = self.map;
        (0..self.ranges).map(move |index| {
            let entry = map + index * 24;
            let [base, length] = [0, 8].map(|offset| read_memory(entry + offset, 8));
            Range { base, length, kind: read32(entry + 16) }
        })
    }

    /// Whether the range overlaps data of the loader.
    pub(crate) fn uses(&self, address: u64, length: u64) -> bool {
        [
            (self.address, 64),
            (self.map, self.ranges * 24),
            (self.command_line, MAX_COMMAND_LINE_BYTES),
            (self.rsdp, 36),
        ]
        .iter()
        .any(|&(base, size)| base < address + length && address < base + size)
    }
}

/// The command line: words of the form `key=value`.
#[derive(Clone, Copy)]
pub(crate) struct Words(pub(crate) &'static str);

impl Words {
    /// The value of the first word with this key.
    pub(crate) fn get(self, key: &str) -> Option<&'static str> {
        self.all(key).next()
    }

    pub(crate) fn all(self, key: &str) -> impl Iterator<Item = &'static str> {
        self.0.split_ascii_whitespace().filter_map(move |word| {
            let (name, value) = word.split_once('=')?;
            (name == key).then_some(value)
        })
    }
}

/// Parses a number with an optional suffix K, M, G or T.
pub(crate) fn number(text: &str) -> Option<u64> {
    let units = [("K", 10), ("M", 20), ("G", 30), ("T", 40)];
    let unit = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, *shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}
