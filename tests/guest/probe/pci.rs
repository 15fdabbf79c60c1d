//! PCI: the functions on bus 0, their BARs, and whether both ways to configuration space agree.
use core::fmt::{self, Display, Formatter};

use crate::Session;
use crate::io::{in8, in16, in32, out8, out16, out32, read32};
use crate::report::Finding;

const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
const COMMAND: u8 = 4;
/// COMMAND: answer to ports and memory.
const DECODE: u32 = 3;
const Q35: u32 = 0x29c0_8086;
const PCIEXBAR: u8 = 0x60;
const LPC: Function = Function { device: 31, function: 0 };
/// ICH9 LPC: where the PM block is, and whether it is there.
const PMBASE: u8 = 0x40;
const ACPI_CNTL: u8 = 0x44;
const USUAL_PMBASE: u16 = 0x600;

/// A function of bus 0.
#[derive(Clone, Copy)]
pub(crate) struct Function {
    device: u32,
    function: u32,
}

impl Function {
    fn select(self, register: u8) {
        let address = 1 << 31 | self.device << 11 | self.function << 8 | u32::from(register & 0xfc);
        out32(ADDRESS, address);
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

    /// Where a BAR of memory is.
    pub(crate) fn memory(self, bar: u8) -> u64 {
        let register = 0x10 + 4 * bar;
        let low = self.read(register);
        let high = if low & 6 == 4 { self.read(register + 4) } else { 0 };
        u64::from(high) << 32 | u64::from(low & !0xf)
    }

    /// Switches it on, without interrupts by its pin: answers to memory, reads and writes memory.
    pub(crate) fn switch_on(self) {
        self.write_command(0x406);
    }

    pub(crate) fn read(self, register: u8) -> u32 {
        self.select(register);
        in32(DATA)
    }

    pub(crate) fn write(self, register: u8, value: u32) {
        self.select(register);
        out32(DATA, value);
    }

    /// COMMAND alone: a write to STATUS beside it would clear bits.
    pub(crate) fn write_command(self, value: u32) {
        self.select(COMMAND);
        out16(DATA, value as u16);
    }

    fn exists(self) -> bool {
        self.read(0) & 0xffff != 0xffff
    }
}

/// I/O base of the ACPI PM block, put in its usual place if nobody did so before.
pub(crate) fn pm_base() -> u16 {
    if LPC.read(0) & 0xffff != 0x8086 || LPC.read(8) >> 16 != 0x0601 {
        return USUAL_PMBASE;
    }
    match LPC.read(PMBASE) as u16 & 0xff80 {
        0 => {
            LPC.write(PMBASE, u32::from(USUAL_PMBASE) | 1);
            LPC.select(ACPI_CNTL);
            out8(DATA, 0x80);
            USUAL_PMBASE
        }
        base => base,
    }
}

pub(crate) fn check(session: &mut Session, pm_base: u16) {
    let ecam = ecam();
    let (mut found, mut compared, mut different) = (0u64, 0u64, 0u64);
    for device in 0..32 {
        let mut functions = 1;
        for function in 0..8 {
            let at = Function { device, function };
            if function >= functions {
                break;
            }
            if at.exists() {
                found += 1;
                let header = at.read(0xc) >> 16;
                functions = if header & 0x80 != 0 { 8 } else { functions };
                describe(session, at, header & 0x7f);
            }
            if let Some(base) = ecam {
                let (more, wrong) = compare(at, base);
                compared += more;
                different += wrong;
            }
        }
    }
    let lanes = byte_lanes();
    session.add(
        Finding::check("pci", found > 0 && different == 0 && lanes)
            .number("functions", found)
            .flag("byte_lanes", lanes)
            .hex("ecam", ecam.unwrap_or(0))
            .number("ecam_compared", compared)
            .number("ecam_different", different)
            .hex("pm_base", pm_base.into()),
    );
}

/// The enhanced configuration window of the Q35 host bridge, where it is switched on.
fn ecam() -> Option<u64> {
    let bridge = Function { device: 0, function: 0 };
    let (low, high) = (bridge.read(PCIEXBAR), bridge.read(PCIEXBAR + 4));
    let usable = bridge.read(0) == Q35 && low & 1 == 1 && high == 0;
    // Bus 0 is all that is looked at, so that the size does not matter.
    usable.then_some(u64::from(low & 0xfc00_0000))
}

/// Dwords compared, dwords that differ: a header, or only its absence.
fn compare(at: Function, base: u64) -> (u64, u64) {
    let window = base + u64::from(at.device << 15 | at.function << 12);
    let dwords = if at.exists() { 16 } else { 1 };
    let registers = (0..dwords).map(|dword| dword * 4);
    let wrong =
        registers.filter(|&at_byte| at.read(at_byte) != read32(window + u64::from(at_byte)));
    (dwords.into(), wrong.count() as u64)
}

/// Bytes and words of the first dword, read through their own ports.
fn byte_lanes() -> bool {
    let id = Function { device: 0, function: 0 }.read(0).to_le_bytes();
    let bytes = [0, 1, 2, 3].map(|lane| in8(DATA + lane));
    bytes == id && in16(DATA + 2).to_le_bytes() == [id[2], id[3]]
}

fn describe(session: &mut Session, at: Function, header: u32) {
    let (id, class) = (at.read(0), at.read(8));
    let mut bars = Bars { list: [Bar::default(); 6], used: 0 };
    bars.size(
        at,
        if header == 0 {
            6
        } else if header == 1 {
            2
        } else {
            0
        },
    );
    let place = session.text(format_args!("00:{:02x}.{}", at.device, at.function));
    let name = session.text(format_args!("{:04x}:{:04x}", id & 0xffff, id >> 16));
    let bars = session.text(format_args!("{bars}"));
    let finding = Finding::info("pci-function").text("bdf", place).text("id", name);
    session.add(finding.hex("class", (class >> 8).into()).text("bars", bars));
}

#[derive(Clone, Copy, Default)]
struct Bar {
    index: u8,
    flags: u32,
    base: u64,
    length: u64,
}

struct Bars {
    list: [Bar; 6],
    used: usize,
}

impl Bars {
    /// Finds sizes by writing ones, with decoding off meanwhile, and puts everything back.
    fn size(&mut self, at: Function, count: u8) {
        let command = at.read(COMMAND);
        at.write_command(command & !DECODE);
        let mut index = 0;
        while index < count {
            let register = 0x10 + index * 4;
            let (old, probed) = probe(at, register);
            let wide = old & 7 == 4 && index + 1 < count;
            let mut bar = Bar { index, flags: old & 0xf, base: 0, length: 0 };
            if old & 1 == 1 {
                bar.base = u64::from(old & !3);
                bar.length = u64::from(!(probed & !3) & 0xffff).wrapping_add(1) & 0xffff;
            } else {
                let (old_high, high) = if wide { probe(at, register + 4) } else { (0, u32::MAX) };
                bar.base = u64::from(old & !0xf) | u64::from(old_high) << 32;
                let mask = u64::from(probed & !0xf) | u64::from(high) << 32;
                bar.length = if probed & !0xf == 0 && !wide { 0 } else { (!mask).wrapping_add(1) };
            }
            if bar.length != 0 {
                self.list[self.used] = bar;
                self.used += 1;
            }
            index += if wide { 2 } else { 1 };
        }
        at.write_command(command);
    }
}

fn probe(at: Function, register: u8) -> (u32, u32) {
    let old = at.read(register);
    at.write(register, u32::MAX);
    let probed = at.read(register);
    at.write(register, old);
    (old, probed)
}

impl Display for Bars {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        for (position, bar) in self.list[..self.used].iter().enumerate() {
            let kind = match bar.flags {
                flags if flags & 1 == 1 => "io",
                flags if flags & 6 == 4 => "mem64",
                _ => "mem32",
            };
            let separator = if position == 0 { "" } else { " " };
            write!(f, "{separator}{}:{kind}@{:#x}+{:#x}", bar.index, bar.base, bar.length)?;
        }
        Ok(())
    }
}
