//! `bench=exits`: measures the time to leave the guest and come back.
use core::arch::x86_64::__cpuid_count;

use crate::Session;
use crate::cpu::Cpu;
use crate::io::{in8, read32, tsc, write32};
use crate::report::Finding;
use crate::timer::LOCAL_APIC;

const ROUNDS: usize = 4000;
const WARM_UP: usize = 100;
/// No device is here on a PC without a TPM. Reads return ones, from whatever part of the machine
/// handles unassigned addresses.
const UNASSIGNED: u64 = 0xfed4_0000;
/// End of interrupt. Without an interrupt in service, a write has no effect.
const EOI: u64 = 0xb0;

pub(crate) fn measure(session: &mut Session, cpu: &Cpu) {
    exit(session, cpu, "exit-port", || {
        in8(0x80);
    });
    exit(session, cpu, "exit-mmio", || {
        read32(UNASSIGNED);
    });
    exit(session, cpu, "exit-cpuid", || {
        __cpuid_count(0, 0);
    });
    // With APICv or AVIC, the processor completes this write without an exit.
    if session.interruptible {
        exit(session, cpu, "exit-eoi", || write32(LOCAL_APIC + EOI, 0));
    }
    exit(session, cpu, "exit-none", || {});
}

fn exit(session: &mut Session, cpu: &Cpu, name: &'static str, action: impl Fn()) {
    let mut costs = [0u64; ROUNDS];
    (0..WARM_UP).for_each(|_| action());
    for cost in &mut costs {
        let start = tsc();
        action();
        *cost = tsc() - start;
    }
    costs.sort_unstable();
    let (min, median) = (costs[0], costs[ROUNDS / 2]);
    session.add(
        Finding::info(name)
            .number("rounds", ROUNDS as u64)
            .number("min_cycles", min)
            .number("median_cycles", median)
            .number("min_ns", cpu.nanoseconds(min))
            .number("median_ns", cpu.nanoseconds(median)),
    );
}
