//! PCI configuration space of bus 0, through ports, or else through the enhanced window that ACPI's
//! MCFG or the command line provides (PCI Firmware 3.3, 4.1.2).
use core::sync::atomic::{AtomicU64, Ordering};

use crate::acpi::Table;
use crate::io::{
    in8, in16, in32, out8, out16, out32, read8, read16, read32, read64, write8, write16, write32,
};
use crate::start::{Start, Words, number};

const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const ENABLE: u32 = 1 << 31;
/// The first entry of the MCFG: address, segment, first and last bus.
const ALLOCATION: u64 = 44;
const ALLOCATION_SIZE: u64 = 16;
/// The size of bus 0 in a window. entry.rs maps the first 4 GiB.
const BUS: u64 = 1 << 20;
const MAPPED: u64 = 1 << 32;

/// The number of BARs in a header of type 0.
pub(crate) const BARS: u8 = 6;
pub(crate) const COMMAND: u8 = 4;

/// The address of the window, or 0 if ports are used.
static WINDOW: AtomicU64 = AtomicU64::new(0);

/// Selects ports or a window. `ecam=ADDRESS` sets the address of the window.
pub(crate) fn open(start: &Start, words: Words) {
    let configured = words.get("ecam").and_then(number).filter(|&base| usable(base));
    out32(ADDRESS, ENABLE);
    let ports = in32(ADDRESS) == ENABLE;
    let window = configured.or_else(|| if ports { None } else { window(start) });
    WINDOW.store(window.unwrap_or(0), Ordering::Relaxed);
}

pub(crate) fn by_ports() -> bool {
    WINDOW.load(Ordering::Relaxed) == 0
}

/// The enhanced window of the first segment according to ACPI, if it is mapped.
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

enum Access {
    Ports,
    Memory(u64),
}

impl Function {
    /// The address of the function's registers in a window.
    pub(crate) fn within(self, window: u64) -> u64 {
        window + u64::from(self.device << 15 | self.function << 12)
    }

    /// Selects a register of four bytes for the next access.
    fn select(self, register: u8) -> Access {
        match WINDOW.load(Ordering::Relaxed) {
            0 => {
                let function = self.device << 11 | self.function << 8;
                out32(ADDRESS, ENABLE | function | u32::from(register & 0xfc));
                Access::Ports
            }
            window => Access::Memory(self.within(window) + u64::from(register & 0xfc)),
        }
    }

    /// Function 0 of each device on bus 0.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..32).map(|device| Self { device, function: 0 }).filter(|at| at.exists())
    }

    /// The function 0 with this vendor and device ID.
    pub(crate) fn find(id: u32) -> Option<Self> {
        Self::all().find(|at| at.read(0) == id)
    }

    /// The offsets of all capabilities with this ID.
    pub(crate) fn capabilities(self, kind: u8) -> impl Iterator<Item = u8> {
        const LIST: u32 = 1 << 20;
        let next = |pointer: u32| Some(pointer as u8 & 0xfc).filter(|&at| at >= 0x40);
        let first = if self.read(COMMAND) & LIST == 0 { None } else { next(self.read(0x34)) };
        let list = core::iter::successors(first, move |&at| next(self.read(at) >> 8));
        // Ends a circular list, too.
        list.take(48).filter(move |&at| self.read(at) as u8 == kind)
    }

    pub(crate) fn capability(self, kind: u8) -> Option<u8> {
        self.capabilities(kind).next()
    }

    /// The address of a memory BAR. `None` if it is not a memory BAR or has no address.
    pub(crate) fn memory(self, bar: u8) -> Option<u64> {
        if bar >= BARS {
            return None;
        }
        let register = 0x10 + 4 * bar;
        let low = self.read(register);
        let wide = low & 6 == 4 && bar + 1 < BARS;
        let high = if wide { self.read(register + 4) } else { 0 };
        let address = u64::from(high) << 32 | u64::from(low & !0xf);
        (low & 1 == 0 && address != 0).then_some(address)
    }

    /// Enables memory decoding and bus mastering, and disables interrupts by pin.
    pub(crate) fn switch_on(self) {
        self.write_command(0x406);
    }

    pub(crate) fn read(self, register: u8) -> u32 {
        match self.select(register) {
            Access::Ports => in32(DATA),
            Access::Memory(at) => read32(at),
        }
    }

    pub(crate) fn write(self, register: u8, value: u32) {
        match self.select(register) {
            Access::Ports => out32(DATA, value),
            Access::Memory(at) => write32(at, value),
        }
    }

    /// Writes only the first byte of four.
    pub(crate) fn write_byte(self, register: u8, value: u8) {
        match self.select(register) {
            Access::Ports => out8(DATA, value),
            Access::Memory(at) => write8(at, value),
        }
    }

    /// Writes only COMMAND: writing the adjacent STATUS would clear bits.
    pub(crate) fn write_command(self, value: u32) {
        match self.select(COMMAND) {
            Access::Ports => out16(DATA, value as u16),
            Access::Memory(at) => write16(at, value as u16),
        }
    }

    pub(crate) fn exists(self) -> bool {
        self.read(0) & 0xffff != 0xffff
    }

    /// Whether bytes and words of the first dword match the dword.
    pub(crate) fn has_byte_lanes(self) -> bool {
        let id = self.read(0).to_le_bytes();
        let (bytes, word) = match self.select(0) {
            Access::Ports => ([0, 1, 2, 3].map(|lane| in8(DATA + lane)), in16(DATA + 2)),
            Access::Memory(at) => ([0, 1, 2, 3].map(|lane| read8(at + lane)), read16(at + 2)),
        };
        bytes == id && word.to_le_bytes() == [id[2], id[3]]
    }
}
