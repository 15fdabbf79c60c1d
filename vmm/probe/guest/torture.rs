//! `torture=SEED,COUNT`: pseudo-random accesses to everything that a machine emulates.
//!
//! Accesses that end the run by design are left out: reset and power-off registers, SMIs, moving or
//! disabling the PM block, and interrupts with a delivery mode other than fixed.
use core::fmt::Write;

use crate::Session;
use crate::cpu::Cpu;
use crate::io::{in8, in16, in32, out8, out16, out32, read_memory, tsc, write_memory};
use crate::random::Random;
use crate::report::Finding;

const IO_APIC: u64 = 0xfec0_0000;
const HPET: u64 = 0xfed0_0000;
/// The LPC bridge's PMBASE and ACPI_CNTL, which are adjacent: address and enable bit of the PM
/// block.
const LPC_PM: u32 = 31 << 11 | 0x40;

/// Runs the accesses. A word that does not parse is a failed check.
pub(crate) fn run(session: &mut Session, cpu: &Cpu, pm_base: u16, words: &str) {
    let parsed = words
        .split_once(',')
        .and_then(|(seed, count)| Some((seed.parse::<u64>().ok()?, count.parse::<u64>().ok()?)));
    let Some((seed, count)) = parsed else {
        session.add(Finding::check("torture", false).text("wants", "SEED,COUNT"));
        return;
    };
    let mut torture = Torture { random: Random::new(seed), pm_base, done: [0; 3], digest: 0 };
    let start = tsc();
    // Print progress for each tenth, if it is large enough.
    let tenth = (count / 10).max(1000);
    for access in 0..count {
        if access > 0 && access % tenth == 0 {
            writeln!(session.console, "torture {access}").ok();
        }
        torture.access();
    }
    let [ports, memory, config] = torture.done;
    session.add(
        Finding::check("torture", true)
            .hex("seed", seed)
            .number("count", count)
            .number("ports", ports)
            .number("memory", memory)
            .number("config", config)
            .hex("digest", torture.digest)
            .number("milliseconds", cpu.nanoseconds(tsc() - start) / 1_000_000),
    );
}

struct Torture {
    random: Random,
    pm_base: u16,
    /// The number of accesses to ports, memory and PCI configuration space.
    done: [u64; 3],
    /// A digest of all values read, for comparing two runs.
    digest: u64,
}

impl Torture {
    fn access(&mut self) {
        let kind = self.random.below(10);
        let value = match kind {
            0..4 => self.port(),
            4..7 => self.memory(),
            _ => self.config(),
        };
        self.done[[0, 0, 0, 0, 1, 1, 1, 2, 2, 2][kind as usize]] += 1;
        self.digest = self.digest.rotate_left(7) ^ value;
    }

    fn port(&mut self) -> u64 {
        // Most of the port space is empty: half of the accesses go to the range of devices.
        let port = if self.random.below(2) == 0 {
            self.random.below(0x1_0000) as u16
        } else {
            self.random.below(0x1000) as u16
        };
        let width = 1 << self.random.below(3);
        // An access beyond the last port raises an exception, because the I/O bitmap ends there.
        let port = port.min(0u16.wrapping_sub(width));
        let value = self.random.next() as u32;
        if self.random.below(2) == 0 {
            return read_port(port, width);
        }
        if !self.ends_the_run(port, width, value) {
            match width {
                1 => out8(port, value as u8),
                2 => out16(port, value as u16),
                _ => out32(port, value),
            }
        }
        0
    }

    fn ends_the_run(&self, port: u16, width: u16, value: u32) -> bool {
        let at = |register: u16| register.wrapping_sub(port) < width;
        let byte = |register: u16| (value >> (8 * register.wrapping_sub(port))) as u8;
        // The keyboard controller: pulse reset, and set the output port, whose bit 0 is reset.
        let keyboard = at(0x64) && (byte(0x64) & 0xf1 == 0xf0 || byte(0x64) == 0xd1);
        let reset_control = at(0xcf9) && !(port == 0xcf8 && width == 4);
        let sleep = at(self.pm_base + 4) || at(self.pm_base + 5);
        // The address latch holds the last address of config(), which may be PMBASE.
        let config_data = (0xcfc..=0xcff).any(at);
        // Bytes sent to COM1 would become part of the report.
        let serial = (0x3f8..=0x3ff).any(at);
        serial || keyboard || reset_control || sleep || at(0x92) || at(0xb2) || config_data
    }

    fn memory(&mut self) -> u64 {
        let width = 1 << self.random.below(4);
        let address = match self.random.below(8) {
            0 => IO_APIC + self.random.below(0x1000),
            1 => HPET + self.random.below(0x400),
            2..4 => 0xffc0_0000 + self.random.below(0x3f_fff8),
            _ => 0xc000_0000 + self.random.below(IO_APIC - 0xc000_0000 - 8),
        };
        let value = self.random.next();
        if self.random.below(2) == 0 {
            return read_memory(address, width);
        }
        // The delivery mode of a redirection entry may be INIT or SMI: write only fixed ones.
        let fixed =
            if address >> 12 == IO_APIC >> 12 { value & !0x0700_0700_0700_0700 } else { value };
        write_memory(address, width, fixed);
        0
    }

    fn config(&mut self) -> u64 {
        let random = &mut self.random;
        let bus = if random.below(8) == 0 { random.below(256) } else { 0 };
        let function = random.below(256);
        // The devices of a `vmm` machine are at both ends of the bus.
        let function = if random.below(2) == 0 { function & 0x3f } else { function | 0xf8 };
        let register = random.below(64) << 2;
        let address = (1 << 31 | bus << 16 | function << 8 | register) as u32;
        let width = 1 << random.below(3);
        let port = 0xcfc + (random.below(4) as u16 & !(width - 1));
        let value = random.next() as u32;
        let write = random.below(2) == 1;
        out32(0xcf8, address);
        if !write {
            return read_port(port, width);
        }
        if address & 0xff_fff8 != LPC_PM {
            match width {
                1 => out8(port, value as u8),
                2 => out16(port, value as u16),
                _ => out32(port, value),
            }
        }
        0
    }
}

fn read_port(port: u16, width: u16) -> u64 {
    match width {
        1 => in8(port).into(),
        2 => in16(port).into(),
        _ => in32(port).into(),
    }
}
