//! The local APIC timer: checks its rate, while ring 3 runs and while the processor halts.
use core::hint::spin_loop;

use crate::Session;
use crate::cpu::Cpu;
use crate::entry::{SPURIOUS_VECTOR, TIMER_VECTOR, timer_interrupts};
use crate::gate::{halt_once, read_msr, set_interrupts};
use crate::io::{out8, read32, tsc, write32};
use crate::report::Finding;

/// The address of the local APIC after a reset.
pub(crate) const LOCAL_APIC: u64 = 0xfee0_0000;
const IA32_APIC_BASE: u32 = 0x1b;
const SPURIOUS: u64 = 0xf0;
const LVT_TIMER: u64 = 0x320;
const LVT_LINT0: u64 = 0x350;
const LVT_LINT1: u64 = 0x360;
const INITIAL_COUNT: u64 = 0x380;
const CURRENT_COUNT: u64 = 0x390;
const DIVIDE: u64 = 0x3e0;
const MASKED: u32 = 1 << 16;
const PERIODIC: u32 = 1 << 17;
const DIVIDE_BY_1: u32 = 0xb;

const TICKS: u32 = 10;
/// The periods that are tried, and how often each. A host with more work than processors may give
/// none to the machine for several milliseconds, again and again.
const PERIODS_US: [u64; 2] = [2000, 20_000];
const MAX_ATTEMPTS: u32 = 10;
const TIMEOUT_US: u64 = 1_000_000;

/// Enables the local APIC. Returns false if its address or state is wrong.
pub(crate) fn enable(session: &mut Session) -> bool {
    let (base, usable) = switch_on();
    let [id, version] = if usable { [0x20, 0x30].map(|r| read32(LOCAL_APIC + r)) } else { [0; 2] };
    session.add(
        Finding::check("local-apic", usable)
            .hex("base_msr", base)
            .number("id", (id >> 24).into())
            .hex("version", version.into()),
    );
    usable
}

/// Like `enable`, without a finding. Returns the base register, and whether the local APIC is
/// usable.
pub(crate) fn switch_on() -> (u64, bool) {
    // Mask all interrupts of the 8259s.
    out8(0x21, 0xff);
    out8(0xa1, 0xff);
    let base = read_msr(IA32_APIC_BASE);
    let usable = base & 0xf_ffff_f000 == LOCAL_APIC && base >> 10 & 3 == 2;
    if usable {
        // The task priority is 0 already. QEMU patches code that writes it, so do not.
        for (register, value) in [
            (SPURIOUS, 0x100 | u32::from(SPURIOUS_VECTOR)),
            (LVT_LINT0, MASKED),
            (LVT_LINT1, MASKED),
        ] {
            write32(LOCAL_APIC + register, value);
        }
    }
    (base, usable)
}

pub(crate) fn tick(cpu: &Cpu, period_us: u64) {
    let count = frequency(cpu) * period_us / 1_000_000;
    write32(LOCAL_APIC + LVT_TIMER, PERIODIC | u32::from(TIMER_VECTOR));
    write32(LOCAL_APIC + INITIAL_COUNT, u32::try_from(count).unwrap_or(u32::MAX).max(1));
}

pub(crate) fn stop() {
    write32(LOCAL_APIC + LVT_TIMER, MASKED);
    write32(LOCAL_APIC + INITIAL_COUNT, 0);
}

struct Series {
    period_us: u64,
    ticks: u64,
    elapsed_us: u64,
    running_us: u64,
    /// From the start to the first tick. A busy host only makes it longer.
    first_us: u64,
    /// The shortest time between two ticks for which the processor halted.
    halted_us: u64,
    halts: u32,
}

impl Series {
    /// Whether the ticks are right. A busy host delays ticks, or delivers some of them at once, but
    /// never early. However busy it is, some ticks are in time.
    fn is_right(&self) -> bool {
        let due = self.ticks * self.period_us;
        self.halts == TICKS
            && self.elapsed_us >= due * 85 / 100
            && self.first_us.max(self.halted_us) <= self.period_us * 3 / 2
    }

    /// With the times of an earlier series of the same period that were shorter.
    fn best(self, before: &Self) -> Self {
        let first_us = self.first_us.min(before.first_us);
        Self { first_us, halted_us: self.halted_us.min(before.halted_us), ..self }
    }
}

/// Runs the timer, first while ring 3 computes, then while the processor halts. Tries again,
/// because a host may be too busy once, while a broken timer is always wrong.
pub(crate) fn check(session: &mut Session, cpu: &Cpu) {
    let hz = frequency(cpu);
    let mut series = attempt(cpu, hz, PERIODS_US[0]);
    if !series.is_right() {
        series = attempt(cpu, hz, PERIODS_US[1]);
    }
    session.add(
        Finding::check("timer", series.is_right())
            .number("hz", hz)
            .number("period_us", series.period_us)
            .number("ticks", series.ticks)
            .number("elapsed_us", series.elapsed_us)
            .number("running_us", series.running_us)
            .number("first_us", series.first_us)
            .number("halted_us", series.halted_us)
            .number("halts", series.halts.into()),
    );
}

/// The series of this period, with the best times of several attempts.
fn attempt(cpu: &Cpu, hz: u64, period_us: u64) -> Series {
    let mut series = run(cpu, hz, period_us);
    for _ in 1..MAX_ATTEMPTS {
        if !series.is_right() {
            series = run(cpu, hz, period_us).best(&series);
        }
    }
    series
}

fn run(cpu: &Cpu, hz: u64, period_us: u64) -> Series {
    let count = u32::try_from(hz * period_us / 1_000_000).unwrap_or(u32::MAX).max(1);
    let before = timer_interrupts();
    let arrived = || timer_interrupts().wrapping_sub(before);
    write32(LOCAL_APIC + LVT_TIMER, PERIODIC | u32::from(TIMER_VECTOR));
    set_interrupts(true);
    let start = tsc();
    write32(LOCAL_APIC + INITIAL_COUNT, count);
    let (mut first, mut halted) = (None, cpu.counts(TIMEOUT_US));
    while arrived() < TICKS && tsc() - start < cpu.counts(TIMEOUT_US) {
        if arrived() > 0 {
            first.get_or_insert_with(|| tsc() - start);
        }
        spin_loop();
    }
    let running_us = cpu.nanoseconds(tsc() - start) / 1000;
    let ticks = arrived();
    let mut halts = 0;
    // A halt without a working timer would never end.
    let mut last = tsc();
    while ticks >= TICKS && halts < TICKS {
        halt_once();
        let now = tsc();
        // The first halt begins between two ticks.
        if halts > 0 {
            halted = halted.min(now - last);
        }
        last = now;
        halts += 1;
    }
    let ticks = u64::from(arrived());
    let elapsed_us = cpu.nanoseconds(tsc() - start) / 1000;
    set_interrupts(false);
    stop();
    let first = first.unwrap_or(cpu.counts(TIMEOUT_US));
    let [first_us, halted_us] = [first, halted].map(|counts| cpu.nanoseconds(counts) / 1000);
    Series { period_us, ticks, elapsed_us, running_us, first_us, halted_us, halts }
}

pub(crate) fn frequency(cpu: &Cpu) -> u64 {
    write32(LOCAL_APIC + LVT_TIMER, MASKED | u32::from(TIMER_VECTOR));
    write32(LOCAL_APIC + DIVIDE, DIVIDE_BY_1);
    write32(LOCAL_APIC + INITIAL_COUNT, u32::MAX);
    let (start, from) = (tsc(), read32(LOCAL_APIC + CURRENT_COUNT));
    while tsc() - start < cpu.counts(10_000) {
        spin_loop();
    }
    let elapsed = cpu.nanoseconds(tsc() - start).max(1);
    let counted = from.wrapping_sub(read32(LOCAL_APIC + CURRENT_COUNT));
    u64::from(counted) * 1_000_000_000 / elapsed
}
