//! Starts the other processors, and compares their number with the MADT.
use core::hint::spin_loop;

use crate::Session;
use crate::acpi::Table;
use crate::cpu::Cpu;
use crate::io::{read_memory, read32, tsc, write_memory, write32};
use crate::peers;
use crate::report::Finding;
use crate::start::Start;
use crate::timer::LOCAL_APIC;
use crate::trampoline::{TRAMPOLINE, started_counter, trampoline_code};

const COMMAND: u64 = LOCAL_APIC + 0x300;
/// To all processors but this one: INIT, level, asserted; and SIPI to the trampoline's page.
const INIT: u32 = 0x000c_4500;
const STARTUP: u32 = 0x000c_4600 | (TRAMPOLINE >> 12) as u32;
const TIMEOUT_US: u64 = 500_000;

pub(crate) fn check(session: &mut Session, start: &Start, cpu: &Cpu) {
    let listed = listed(start);
    let expected = listed.unwrap_or(cpu.logical);
    let (online, milliseconds) = if expected > 1 { bring_up(cpu, expected) } else { (1, 0) };
    // Without a MADT, CPUID reports the maximum number, not the actual one.
    let finding = match listed {
        Some(listed) => Finding::check("processors", online == listed),
        None => Finding::info("processors"),
    };
    session.add(
        finding
            .number("online", online)
            .number("madt", listed.unwrap_or(0))
            .number("cpuid", cpu.logical)
            .number("start_ms", milliseconds),
    );
}

/// The number of running processors, and the milliseconds until they ran.
fn bring_up(cpu: &Cpu, expected: u64) -> (u64, u64) {
    let code = trampoline_code();
    let address = |index: usize| (TRAMPOLINE + index) as u64;
    let mut saved = [0; 256];
    for ((index, byte), saved) in code.iter().enumerate().zip(&mut saved) {
        *saved = read_memory(address(index), 1);
        write_memory(address(index), 1, u64::from(*byte));
    }
    // Both counters.
    write_memory(started_counter() as u64, 8, 0);
    peers::clear();
    let started = || read_memory(started_counter() as u64, 4);
    write32(COMMAND, INIT);
    wait(cpu, 10_000, || false);
    let begin = tsc();
    for _ in 0..2 {
        write32(COMMAND, STARTUP);
        wait(cpu, 200, || started() + 1 >= expected);
    }
    wait(cpu, TIMEOUT_US, || started() + 1 >= expected);
    let milliseconds = cpu.nanoseconds(tsc() - begin) / 1_000_000;
    for ((index, _), saved) in code.iter().enumerate().zip(saved) {
        write_memory(address(index), 1, saved);
    }
    (started() + 1, milliseconds)
}

fn wait(cpu: &Cpu, microseconds: u64, done: impl Fn() -> bool) {
    let start = tsc();
    while tsc() - start < cpu.counts(microseconds) && !done() {
        spin_loop();
    }
}

/// The number of enabled processors in the MADT (ACPI 6.5, 5.2.12), if there is one.
fn listed(start: &Start) -> Option<u64> {
    let madt = Table::find(start, *b"APIC")?;
    let (mut offset, mut count) = (44, 0);
    while offset + 2 <= madt.length {
        let entry = madt.address + offset;
        count += match read_memory(entry, 1) {
            0 => u64::from(read32(entry + 4) & 1),
            9 => u64::from(read32(entry + 8) & 1),
            _ => 0,
        };
        offset += read_memory(entry + 1, 1).max(2);
    }
    Some(count)
}
