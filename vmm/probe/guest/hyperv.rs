//! Hyper-V's interface (Hypervisor Top-Level Functional Specification, TLFS): what it announces,
//! its registers at power-on, and the order of the checks.
//!
//! Each check runs where its privilege (CPUID leaf 0x40000003) is given, and is an `info` with the
//! missing privilege otherwise.
use crate::Session;
use crate::cpu::Cpu;
use crate::entry::{ASSISTED_VECTOR, assist, assisted_interrupts};
use crate::gate::{cpuid, set_interrupts, try_read_msr, write_msr};
use crate::hyperv_calls as calls;
use crate::hyperv_clock as clock;
use crate::hyperv_timers as timers;
use crate::io::write32;
use crate::memory::Room;
use crate::peers::Peer;
use crate::report::Finding;
use crate::start::{Start, Words, number};
use crate::timer::LOCAL_APIC;

pub(crate) const GUEST_OS_ID: u32 = 0x4000_0000;
pub(crate) const HYPERCALL: u32 = 0x4000_0001;
pub(crate) const VP_INDEX: u32 = 0x4000_0002;
const VP_RUNTIME: u32 = 0x4000_0010;
const EOI: u32 = 0x4000_0070;
const ICR: u32 = 0x4000_0071;
const TPR: u32 = 0x4000_0072;
const VP_ASSIST_PAGE: u32 = 0x4000_0073;
const GUEST_IDLE: u32 = 0x4000_00f0;
const CRASH: u32 = 0x4000_0100;
const CRASH_CTL: u32 = 0x4000_0105;
const REENLIGHTENMENT: u32 = 0x4000_0106;
const CRASH_NOTIFY: u64 = 1 << 63;
/// The codes that `hv-crash` reports to the host.
const BUG_CHECK: u64 = 0x7261_6e73_6f6d_0001;

/// Leaf 0x40000003, EAX.
pub(crate) const RUNTIME: u32 = 0;
pub(crate) const COUNTER: u32 = 1;
pub(crate) const SYNIC: u32 = 2;
pub(crate) const TIMERS: u32 = 3;
const APIC: u32 = 4;
const HYPERCALLS: u32 = 5;
const INDEX: u32 = 6;
pub(crate) const REFERENCE_TSC: u32 = 9;
const IDLE: u32 = 10;
pub(crate) const FREQUENCIES: u32 = 11;
const REENLIGHTEN: u32 = 13;
/// Leaf 0x40000003, EDX.
pub(crate) const XMM_INPUT: u32 = 4;
const CRASH_REPORTS: u32 = 10;
pub(crate) const DIRECT_TIMERS: u32 = 19;
/// Leaf 0x40000004, EAX.
pub(crate) const REMOTE_FLUSH: u32 = 2;
pub(crate) const CLUSTER_IPI: u32 = 10;
pub(crate) const EXTENDED_MASKS: u32 = 11;

/// The interface that the hypervisor announces.
#[derive(Clone, Copy)]
pub(crate) struct Interface {
    privileges: u32,
    features: u32,
    hints: u32,
}

impl Interface {
    fn find() -> Option<Self> {
        let [highest, ..] = cpuid(0x4000_0000, 0);
        let signed = (0x4000_0005..0x4001_0000).contains(&highest)
            && cpuid(0x4000_0001, 0)[0].to_le_bytes() == *b"Hv#1";
        let [privileges, _, _, features] = cpuid(0x4000_0003, 0);
        let hints = cpuid(0x4000_0004, 0)[0];
        signed.then_some(Self { privileges, features, hints })
    }

    pub(crate) fn may(&self, privilege: u32) -> bool {
        self.privileges >> privilege & 1 == 1
    }

    pub(crate) fn has(&self, feature: u32) -> bool {
        self.features >> feature & 1 == 1
    }

    pub(crate) fn hints(&self, hint: u32) -> bool {
        self.hints >> hint & 1 == 1
    }
}

/// The report's entry for a check that cannot run here.
pub(crate) fn skip(session: &mut Session, name: &'static str, lacks: &'static str) {
    session.add(Finding::info(name).text("lacks", lacks));
}

/// Runs all checks if the word `hyperv=SECONDS` asks for them.
pub(crate) fn check(session: &mut Session, start: &Start, cpu: &Cpu, words: Words) {
    let Some(seconds) = words.get("hyperv").and_then(number) else { return };
    let Some(interface) = Interface::find() else {
        session.add(Finding::check("hv-interface", false).text("lacks", "leaf 0x40000001"));
        return;
    };
    let mut room = Room::find(start);
    power_on(session, &interface, cpu);
    let Some(page) = room.take(4096).filter(|&page| announce(session, &interface, page)) else {
        return;
    };
    processors(session, cpu);
    clock::check(session, &interface, cpu, (seconds, room.take(4096).unwrap_or(0)));
    clock::frequencies(session, &interface, cpu);
    runtime(session, &interface, cpu);
    timers::check(session, &interface, cpu, &mut room);
    apic(session, &interface, cpu);
    assisted(session, &interface, cpu);
    calls::flush(session, &interface, cpu, &mut room, page);
    calls::interrupt(session, &interface, cpu, &mut room, page);
    calls::connections(session, &interface, &mut room, page);
    other_registers(session, &interface);
    crash(session, &interface);
    leave_traces(&interface, cpu);
}

/// Registers, their values at power-on, and whether they are there.
fn at_power_on(interface: &Interface) -> impl Iterator<Item = (u32, u64)> {
    let synic = interface.may(SYNIC);
    let sources = (0x4000_0090..0x4000_00a0).map(|source| (source, 1 << 16));
    let timers = (0x4000_00b0..0x4000_00b8).map(|timer| (timer, 0));
    let crash = (CRASH..CRASH + 5).map(|parameter| (parameter, 0));
    let pages = [(0x4000_0080, 1), (0x4000_0082, 0), (0x4000_0083, 0)];
    let reference = interface.may(REFERENCE_TSC);
    [(GUEST_OS_ID, 0), (HYPERCALL, 0)]
        .into_iter()
        .chain([(clock::PAGE, 0)].into_iter().filter(move |_| reference))
        .chain(pages.into_iter().chain(sources).filter(move |_| synic))
        .chain(timers.filter(|_| interface.may(TIMERS)))
        .chain([(VP_ASSIST_PAGE, 0)].into_iter().filter(|_| interface.may(APIC)))
        .chain(crash.filter(|_| interface.has(CRASH_REPORTS)))
}

/// Each processor has the values of power-on: before the first use, and after each reset.
fn power_on(session: &mut Session, interface: &Interface, cpu: &Cpu) {
    let (mut registers, mut wrong, mut first, mut found) = (0, 0, 0, 0);
    for (index, expected) in at_power_on(interface) {
        let own = core::iter::once(try_read_msr(index));
        for value in own.chain(Peer::all().map(|peer| peer.read_msr(cpu, index))) {
            registers += 1;
            if value != Some(expected) {
                wrong += 1;
                (first, found) = (index, value.unwrap_or(u64::MAX));
            }
        }
    }
    session.add(
        Finding::check("hv-power-on", wrong == 0 && registers > 0)
            .number("registers", registers)
            .number("wrong", wrong)
            .hex("last", first.into())
            .hex("value", found),
    );
}

/// Names this system and enables the hypercall page. Returns whether hypercalls can be made.
fn announce(session: &mut Session, interface: &Interface, page: u64) -> bool {
    // Without a name, there is no page.
    let early = write_msr(HYPERCALL, page | 1) && try_read_msr(HYPERCALL) == Some(0);
    let name = 0x8100_0000_0000_0001;
    let named = write_msr(GUEST_OS_ID, name) && try_read_msr(GUEST_OS_ID) == Some(name);
    let enabled = write_msr(HYPERCALL, page | 1) && try_read_msr(HYPERCALL) == Some(page | 1);
    let status = if enabled { calls::unknown(page) } else { u64::MAX };
    let offered = interface.may(HYPERCALLS) && interface.may(INDEX) && interface.may(COUNTER);
    session.add(
        Finding::check("hv-interface", named && enabled && offered)
            .and(status == calls::INVALID_CODE)
            .and(early)
            .hex("privileges", interface.privileges.into())
            .hex("features", interface.features.into())
            .hex("hints", interface.hints.into())
            .hex("unknown_call", status)
            .flag("early", early)
            .flag("page", enabled),
    );
    enabled
}

/// Each processor has an index of its own.
fn processors(session: &mut Session, cpu: &Cpu) {
    let own = try_read_msr(VP_INDEX);
    let (mut seen, mut twice) = (1_u64 << own.unwrap_or(0).min(63), 0);
    for peer in Peer::all() {
        match peer.read_msr(cpu, VP_INDEX) {
            Some(index @ 0..64) if seen >> index & 1 == 0 => seen |= 1 << index,
            _ => twice += 1,
        }
    }
    session.add(
        Finding::check("hv-index", own == Some(0) && twice == 0)
            .number("processors", seen.count_ones().into())
            .number("wrong", twice),
    );
}

fn runtime(session: &mut Session, interface: &Interface, cpu: &Cpu) {
    if !interface.may(RUNTIME) {
        return skip(session, "hv-runtime", "privilege 0");
    }
    let before = try_read_msr(VP_RUNTIME);
    let moved = cpu.wait(1000, || try_read_msr(VP_RUNTIME) > before).is_some();
    session.add(Finding::check("hv-runtime", before.is_some() && moved));
}

/// An interrupt that this processor sends to itself through Hyper-V's registers.
fn apic(session: &mut Session, interface: &Interface, cpu: &Cpu) {
    if !interface.may(APIC) {
        return skip(session, "hv-apic", "privilege 4");
    }
    let (before, _) = assisted_interrupts();
    set_interrupts(true);
    let sent = write_msr(ICR, SELF | u64::from(ASSISTED_VECTOR));
    let arrived = cpu.wait(1000, || assisted_interrupts().0 != before).is_some();
    set_interrupts(false);
    let priority = write_msr(TPR, 0x20) && try_read_msr(TPR) == Some(0x20) && write_msr(TPR, 0);
    session.add(
        Finding::check("hv-apic", sent && arrived)
            .and(priority)
            .and(write_msr(EOI, 0))
            .flag("interrupt", arrived)
            .flag("priority", priority),
    );
}

/// The destination of an interrupt command: the sender.
const SELF: u64 = 0x4_4000;

/// With an assist page, each interrupt is acknowledged once: by the page, or by the local APIC.
fn assisted(session: &mut Session, interface: &Interface, cpu: &Cpu) {
    const ROUNDS: u32 = 100;
    if !interface.may(APIC) {
        return skip(session, "hv-assist", "privilege 4");
    }
    let enabled = write_msr(VP_ASSIST_PAGE, assist() | 1);
    let read_back = try_read_msr(VP_ASSIST_PAGE) == Some(assist() | 1);
    let (before, ended) = assisted_interrupts();
    set_interrupts(true);
    for round in 1..=ROUNDS {
        write32(LOCAL_APIC + 0x300, SELF as u32 | u32::from(ASSISTED_VECTOR));
        if cpu.wait(1000, || assisted_interrupts().0 - before == round).is_none() {
            break;
        }
    }
    set_interrupts(false);
    let (after, ended_after) = assisted_interrupts();
    session.add(
        Finding::check("hv-assist", enabled && read_back && after - before == ROUNDS)
            .number("interrupts", (after - before).into())
            .number("assisted", (after - before - (ended_after - ended)).into()),
    );
}

/// Registers that this machine does not offer: idle, and notice of a new clock.
fn other_registers(session: &mut Session, interface: &Interface) {
    let checks = [
        ("hv-idle", IDLE, GUEST_IDLE, "privilege 10"),
        ("hv-reenlighten", REENLIGHTEN, REENLIGHTENMENT, "privilege 13"),
    ];
    for (name, privilege, register, lacks) in checks {
        if !interface.may(privilege) {
            skip(session, name, lacks);
        } else if privilege == REENLIGHTEN {
            let kept = write_msr(register, 0x45) && try_read_msr(register) == Some(0x45);
            session.add(Finding::check(name, kept && write_msr(register, 0)));
        } else {
            // Reading it halts the processor until an interrupt, which is pending already.
            set_interrupts(true);
            write32(LOCAL_APIC + 0x300, SELF as u32 | u32::from(ASSISTED_VECTOR));
            let read = try_read_msr(register).is_some();
            set_interrupts(false);
            session.add(Finding::check(name, read));
        }
    }
}

fn crash(session: &mut Session, interface: &Interface) {
    if !interface.has(CRASH_REPORTS) {
        return skip(session, "hv-crash", "feature 10");
    }
    let offered = try_read_msr(CRASH_CTL).is_some_and(|control| control & CRASH_NOTIFY != 0);
    let codes = (0..5).map(|parameter| (CRASH + parameter, BUG_CHECK + u64::from(parameter)));
    let written = codes.clone().all(|(register, code)| write_msr(register, code));
    let kept = codes.clone().all(|(register, code)| try_read_msr(register) == Some(code));
    let reported = write_msr(CRASH_CTL, CRASH_NOTIFY);
    session.add(
        Finding::check("hv-crash", offered && written && kept && reported)
            .flag("offered", offered)
            .flag("kept", kept),
    );
}

/// Leaves registers of each processor changed, without effects, for the reset that may follow.
fn leave_traces(interface: &Interface, cpu: &Cpu) {
    let synic = [(0x4000_0095, 0x1_0045), (0x4000_0082, 0x5000)];
    let timer = [(0x4000_00b7, 0x1234)];
    let assist = [(VP_ASSIST_PAGE, 0x5000)];
    let traces = synic
        .into_iter()
        .filter(|_| interface.may(SYNIC))
        .chain(timer.into_iter().filter(|_| interface.may(TIMERS)))
        .chain(assist.into_iter().filter(|_| interface.may(APIC)));
    for (register, value) in traces {
        write_msr(register, value);
        for peer in Peer::all() {
            peer.write_msr(cpu, register, value);
        }
    }
}
