//! PCI configuration space of bus 0, by the door that the machine has: ports, or else the enhanced
//! window that ACPI's MCFG or the command line names (PCI Firmware 3.3, 4.1.2).
use core::sync::atomic::{AtomicU64, Ordering};

use crate::acpi::Table;
use crate::io::{
    in8, in16, in32, out8, out16, out32, read8, read16, read32, read64, write8, write16, write32,
};
use crate::start::{Start, Words, number};

const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const ENABLE: u32 = 1 << 31;
/// MCFG: its first entry, which has an address, a segment and two numbers of buses.
const ALLOCATION: u64 = 44;
const ALLOCATION_SIZE: u64 = 16;
/// What bus 0 has in a window; entry.rs maps the first 4 GiB.
const BUS: u64 = 1 << 20;
const MAPPED: u64 = 1 << 32;

/// Of a header of type 0.
pub(crate) const BARS: u8 = 6;
pub(crate) const COMMAND: u8 = 4;

/// The window where there are no ports, else 0.
static WINDOW: AtomicU64 = AtomicU64::new(0);

/// Finds the door; `ecam=ADDRESS` says that it is a window, and where.
pub(crate) fn open(start: &Start, words: Words) {
    let told = words.get("ecam").and_then(number).filter(|&base| usable(base));
    out32(ADDRESS, ENABLE);
    let ports = in32(ADDRESS) == ENABLE;
    let window = told.or_else(|| if ports { None } else { window(start) });
    WINDOW.store(window.unwrap_or(0), Ordering::Relaxed);
}

/// Whether it is the ports.
pub(crate) fn by_ports() -> bool {
    WINDOW.load(Ordering::Relaxed) == 0
}

/// The enhanced window of the first segment, as ACPI tells, where it can be reached.
pub(crate) fn window(start: &Start) -> Option<u64> {
    let mcfg = Table::find(start, *b"MCFG")?;
    if mcfg.length < ALLOCATION + ALLOCATION_SIZE {
        return None;
    }
    let entry = mcfg.address + ALLOCATION;
    let (base, segment_and_first_bus) = (read64(entry), read32(entry + 8) & 0xff_ffff);
    (usable(base) && segment_and_first_bus == 0).then_some(base)
}

fn usable(base: u64) -> bool {
    base != 0 && base % BUS == 0 && base <= MAPPED - BUS
}

/// A function of bus 0.
#[derive(Clone, Copy)]
pub(crate) struct Function {
    pub(crate) device: u32,
    pub(crate) function: u32,
}

/// One register, by ports or in memory.
enum Place {
    Ports,
    Memory(u64),
}

impl Function {
    /// Where its registers are in a window.
    pub(crate) fn within(self, window: u64) -> u64 {
        window + u64::from(self.device << 15 | self.function << 12)
    }

    /// Four bytes, and whatever is read or written of them next.
    fn select(self, register: u8) -> Place {
        match WINDOW.load(Ordering::Relaxed) {
            0 => {
                let function = self.device << 11 | self.function << 8;
                out32(ADDRESS, ENABLE | function | u32::from(register & 0xfc));
                Place::Ports
            }
            window => Place::Memory(self.within(window) + u64::from(register & 0xfc)),
        }
    }

    /// The first functions of the devices on bus 0.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..32).map(|device| Self { device, function: 0 }).filter(|at| at.exists())
    }

    /// The function of bus 0 with this vendor and device.
    pub(crate) fn find(id: u32) -> Option<Self> {
        Self::all().find(|at| at.read(0) == id)
    }

    /// The registers of all capabilities of a kind.
    pub(crate) fn capabilities(self, kind: u8) -> impl Iterator<Item = u8> {
        const LIST: u32 = 1 << 20;
        let next = |pointer: u32| Some(pointer as u8 & 0xfc).filter(|&at| at >= 0x40);
        let first = if self.read(COMMAND) & LIST == 0 { None } else { next(self.read(0x34)) };
        let list = core::iter::successors(first, move |&at| next(self.read(at) >> 8));
        // A list that bites its tail ends, too.
        list.take(48).filter(move |&at| self.read(at) as u8 == kind)
    }

    /// The register of the first capability of a kind.
    pub(crate) fn capability(self, kind: u8) -> Option<u8> {
        self.capabilities(kind).next()
    }

    /// Where a BAR of memory is, if it is one and has been given a place.
    pub(crate) fn memory(self, bar: u8) -> Option<u64> {
        if bar >= BARS {
            return None;
        }
        let register = 0x10 + 4 * bar;
        let low = self.read(register);
        let wide = low & 6 == 4 && bar + 1 < BARS;
        let high = if wide { self.read(register + 4) } else { 0 };
        let place = u64::from(high) << 32 | u64::from(low & !0xf);
        (low & 1 == 0 && place != 0).then_some(place)
    }

    /// Switches it on, without interrupts by its pin: answers to memory, reads and writes memory.
    pub(crate) fn switch_on(self) {
        self.write_command(0x406);
    }

    pub(crate) fn read(self, register: u8) -> u32 {
        match self.select(register) {
            Place::Ports => in32(DATA),
            Place::Memory(at) => read32(at),
        }
    }

    pub(crate) fn write(self, register: u8, value: u32) {
        match self.select(register) {
            Place::Ports => out32(DATA, value),
            Place::Memory(at) => write32(at, value),
        }
    }

    /// The first byte of four alone.
    pub(crate) fn write_byte(self, register: u8, value: u8) {
        match self.select(register) {
            Place::Ports => out8(DATA, value),
            Place::Memory(at) => write8(at, value),
        }
    }

    /// COMMAND alone: a write to STATUS beside it would clear bits.
    pub(crate) fn write_command(self, value: u32) {
        match self.select(COMMAND) {
            Place::Ports => out16(DATA, value as u16),
            Place::Memory(at) => write16(at, value as u16),
        }
    }

    pub(crate) fn exists(self) -> bool {
        self.read(0) & 0xffff != 0xffff
    }

    /// Whether bytes and words of the first dword are what they are in it.
    pub(crate) fn has_byte_lanes(self) -> bool {
        let id = self.read(0).to_le_bytes();
        let (bytes, word) = match self.select(0) {
            Place::Ports => ([0, 1, 2, 3].map(|lane| in8(DATA + lane)), in16(DATA + 2)),
            Place::Memory(at) => ([0, 1, 2, 3].map(|lane| read8(at + lane)), read16(at + 2)),
        };
        bytes == id && word.to_le_bytes() == [id[2], id[3]]
    }
}
