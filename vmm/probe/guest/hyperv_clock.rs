//! Hyper-V's clocks (TLFS 12): the reference counter, its page, and the frequencies.
use core::sync::atomic::{Ordering, compiler_fence};

use crate::Session;
use crate::cpu::Cpu;
use crate::gate::{try_read_msr, write_msr};
use crate::hyperv::{FREQUENCIES, Interface, REFERENCE_TSC, skip};
use crate::io::{read32, read64, tsc};
use crate::peers::Peer;
use crate::report::Finding;
use crate::timer;

const COUNTER: u32 = 0x4000_0020;
pub(crate) const PAGE: u32 = 0x4000_0021;
const TSC_HZ: u32 = 0x4000_0022;
const APIC_HZ: u32 = 0x4000_0023;

/// The reference counter: units of 100 ns.
pub(crate) fn now() -> u64 {
    try_read_msr(COUNTER).unwrap_or(0)
}

/// The time of the page. `None`: the page says to read the counter.
fn from_page(page: u64) -> Option<u64> {
    loop {
        let sequence = read32(page);
        if sequence == 0 {
            return None;
        }
        compiler_fence(Ordering::SeqCst);
        let (scale, offset) = (read64(page + 8), read64(page + 16));
        let counted = tsc();
        compiler_fence(Ordering::SeqCst);
        if read32(page) == sequence {
            let scaled = ((u128::from(counted) * u128::from(scale)) >> 64) as u64;
            return Some(scaled.wrapping_add(offset));
        }
    }
}

#[derive(Default)]
struct Readings {
    taken: u64,
    by_page: u64,
    by_peers: u64,
    /// A page's or another processor's time that is not between two of the counter.
    wrong: u64,
    /// By how much at most, in units of 100 ns.
    worst: u64,
}

impl Readings {
    fn add(&mut self, before: u64, between: u64, after: u64) {
        let early = before.saturating_sub(between);
        let late = between.saturating_sub(after);
        self.worst = self.worst.max(early).max(late);
        self.wrong += u64::from(early + late > 0);
    }
}

/// Compares the page and the counters of all processors with the counter of this one for some
/// seconds, in which the machine may be paused.
pub(crate) fn check(
    session: &mut Session,
    interface: &Interface,
    cpu: &Cpu,
    (seconds, page): (u64, u64),
) {
    let offered = interface.may(REFERENCE_TSC);
    let enabled = offered && write_msr(PAGE, page | 1) && try_read_msr(PAGE) == Some(page | 1);
    let (start, tsc_start) = (now(), tsc());
    let (mut last, mut back, mut all) = (start, 0, Readings::default());
    while cpu.nanoseconds(tsc() - tsc_start) < seconds * 1_000_000_000 {
        let before = now();
        let between = if enabled { from_page(page) } else { None };
        let after = now();
        back += u64::from(before < last) + u64::from(after < before);
        last = after;
        all.taken += 1;
        if let Some(between) = between {
            all.by_page += 1;
            all.add(before, between, after);
        }
        // A processor that is woken costs the time of some hundred readings.
        let due = all.taken % 256 == 1;
        for peer in Peer::all().filter(|_| due) {
            let before = now();
            let between = peer.read_msr(cpu, COUNTER).unwrap_or(0);
            all.by_peers += 1;
            all.add(before, between, now());
        }
    }
    let (elapsed, tsc_elapsed) = (now() - start, tsc() - tsc_start);
    let told = cpu.nanoseconds(tsc_elapsed) / 100;
    // The rate of the TSC was measured for 20 ms only.
    let right = elapsed.abs_diff(told) <= told / 20 && all.taken > 0;
    session.add(
        Finding::check("hv-clock", right && all.wrong == 0 && back == 0)
            .and(enabled == offered)
            .number("readings", all.taken)
            .number("by_page", all.by_page)
            .number("by_peers", all.by_peers)
            .number("wrong", all.wrong)
            .number("worst", all.worst)
            .number("back", back)
            .number("elapsed_us", elapsed / 10)
            .number("tsc_us", told / 10)
            .number("sequence", if enabled { read32(page).into() } else { 0 }),
    );
}

pub(crate) fn frequencies(session: &mut Session, interface: &Interface, cpu: &Cpu) {
    if !interface.may(FREQUENCIES) {
        return skip(session, "hv-frequency", "privilege 11");
    }
    let near = |told: u64, measured: u64| told.abs_diff(measured) <= measured / 20;
    let [tsc_hz, apic_hz] = [TSC_HZ, APIC_HZ].map(|register| try_read_msr(register).unwrap_or(0));
    // A busy host may interrupt a measurement.
    let best = (0..3).map(|_| timer::frequency(cpu)).min_by_key(|hz| hz.abs_diff(apic_hz));
    let measured = best.unwrap_or(0);
    session.add(
        Finding::check("hv-frequency", near(tsc_hz, cpu.tsc_hz) && near(apic_hz, measured))
            .number("tsc_hz", tsc_hz)
            .number("apic_hz", apic_hz)
            .number("measured_apic_hz", measured),
    );
}
