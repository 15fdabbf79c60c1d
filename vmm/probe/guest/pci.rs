//! PCI: lists the functions on bus 0 with their BARs, and compares the two ways to access
//! configuration space.
use core::fmt::{self, Display, Formatter};

use crate::Session;
use crate::config::{self, BARS, COMMAND, Function};
use crate::io::read32;
use crate::report::Finding;
use crate::start::{Start, Words, number};

/// COMMAND: I/O and memory decoding.
pub(crate) const DECODE: u32 = 3;
const Q35: u32 = 0x29c0_8086;
const PCIEXBAR: u8 = 0x60;
const HOST_BRIDGE: Function = Function { device: 0, function: 0 };
const LPC: Function = Function { device: 31, function: 0 };
/// ICH9 LPC bridge: the address of the PM block, and its enable bit.
const PMBASE: u8 = 0x40;
const ACPI_CNTL: u8 = 0x44;
const USUAL_PMBASE: u16 = 0x600;

/// The I/O base of the ACPI PM block. Sets the usual address if it is not set.
pub(crate) fn pm_base() -> u16 {
    if LPC.read(0) & 0xffff != 0x8086 || LPC.read(8) >> 16 != 0x0601 {
        return USUAL_PMBASE;
    }
    match LPC.read(PMBASE) as u16 & 0xff80 {
        0 => {
            LPC.write(PMBASE, u32::from(USUAL_PMBASE) | 1);
            LPC.write_byte(ACPI_CNTL, 0x80);
            USUAL_PMBASE
        }
        base => base,
    }
}

pub(crate) fn check(session: &mut Session, start: &Start, pm_base: u16) {
    let ecam = ecam(start);
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
    let lanes = HOST_BRIDGE.has_byte_lanes();
    session.add(
        Finding::check("pci", found > 0 && different == 0 && lanes)
            .number("functions", found)
            .text("door", if config::by_ports() { "ports" } else { "ecam" })
            .flag("byte_lanes", lanes)
            .hex("ecam", ecam.unwrap_or(0))
            .number("ecam_compared", compared)
            .number("ecam_different", different)
            .hex("pm_base", pm_base.into()),
    );
}

/// `bars=ADDRESS`: moves all 64-bit BARs to addresses from there on, like firmware that places them
/// above 4 GiB.
pub(crate) fn move_bars(session: &mut Session, words: Words) {
    let Some(word) = words.get("bars") else { return };
    let mut next = number(word).filter(|&first| first >= 1 << 32);
    let (mut moved, mut wrong) = (0, 0);
    for at in Function::all().filter(|at| at.read(0xc) >> 16 & 0x7f == 0) {
        let mut bars = Bars::default();
        bars.size(at, BARS);
        let command = at.read(COMMAND);
        at.write_command(command & !DECODE);
        for bar in bars.list().filter(|bar| bar.flags & 7 == 4) {
            let Some(address) = next.and_then(|it| it.checked_next_multiple_of(bar.length)) else {
                break;
            };
            let register = 0x10 + 4 * bar.index;
            at.write(register, address as u32);
            at.write(register + 4, (address >> 32) as u32);
            moved += 1;
            wrong += u64::from(at.memory(bar.index) != Some(address));
            next = address.checked_add(bar.length);
        }
        at.write_command(command);
    }
    session.add(
        Finding::check("bars", moved > 0 && wrong == 0 && next.is_some())
            .number("moved", moved)
            .number("wrong", wrong),
    );
}

/// The enhanced configuration window: of the Q35 host bridge if it is enabled, or else according to
/// ACPI.
fn ecam(start: &Start) -> Option<u64> {
    if HOST_BRIDGE.read(0) != Q35 {
        return config::window(start);
    }
    let (low, high) = (HOST_BRIDGE.read(PCIEXBAR), HOST_BRIDGE.read(PCIEXBAR + 4));
    // Only bus 0 is accessed, so the size of the window does not matter.
    (low & 1 == 1 && high == 0).then_some(u64::from(low & 0xfc00_0000))
}

/// Compares a header, or only the ID if the function does not exist. Returns the number of dwords,
/// and how many of them differ.
fn compare(at: Function, base: u64) -> (u64, u64) {
    let window = at.within(base);
    let dwords = if at.exists() { 16 } else { 1 };
    let registers = (0..dwords).map(|dword| dword * 4);
    let wrong =
        registers.filter(|&at_byte| at.read(at_byte) != read32(window + u64::from(at_byte)));
    (dwords.into(), wrong.count() as u64)
}

fn describe(session: &mut Session, at: Function, header: u32) {
    let (id, class) = (at.read(0), at.read(8));
    let mut bars = Bars::default();
    bars.size(
        at,
        if header == 0 {
            BARS
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
pub(crate) struct Bar {
    pub(crate) index: u8,
    pub(crate) flags: u32,
    pub(crate) base: u64,
    pub(crate) length: u64,
}

#[derive(Default)]
pub(crate) struct Bars {
    list: [Bar; BARS as usize],
    used: usize,
}

impl Bars {
    pub(crate) fn list(&self) -> impl Iterator<Item = &Bar> {
        self.list[..self.used].iter()
    }

    /// Determines the sizes of BARs by writing ones, with decoding disabled, and restores them.
    pub(crate) fn size(&mut self, at: Function, count: u8) {
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
