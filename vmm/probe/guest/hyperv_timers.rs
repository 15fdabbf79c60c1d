//! Hyper-V's synthetic interrupt controller and timers (TLFS 11 and 12.3): messages, and interrupts
//! without messages (direct mode).
use crate::Session;
use crate::cpu::Cpu;
use crate::entry::{DEVICE_VECTOR, device_interrupts};
use crate::gate::{set_interrupts, try_read_msr, write_msr};
use crate::hyperv::{DIRECT_TIMERS, Interface, SYNIC, TIMERS, skip};
use crate::hyperv_clock::now;
use crate::io::{read32, read64, write32};
use crate::memory::Room;
use crate::report::Finding;

const CONTROL: u32 = 0x4000_0080;
const VERSION: u32 = 0x4000_0081;
const EVENTS: u32 = 0x4000_0082;
const MESSAGES: u32 = 0x4000_0083;
const END_OF_MESSAGE: u32 = 0x4000_0084;
const SOURCES: u32 = 0x4000_0090;
const TIMER_CONFIG: u32 = 0x4000_00b0;
const TIMER_COUNT: u32 = 0x4000_00b1;

/// The synthetic interrupt source of all timers here.
const SOURCE: u32 = 2;
/// Its slot in the page of messages.
const SLOT: u64 = SOURCE as u64 * 256;
const ENABLED: u64 = 1;
const PERIODIC: u64 = 2;
const DIRECT: u64 = 1 << 12;
const EXPIRED: u32 = 0x8000_0010;
const PENDING: u32 = 1 << 8;

/// In units of 100 ns.
const MILLISECOND: u64 = 10_000;
const PERIOD: u64 = 5 * MILLISECOND;
const TIMEOUT_MS: u64 = 2000;

/// The slot of messages, and how to wait.
struct Slot<'a> {
    at: u64,
    cpu: &'a Cpu,
}

struct Message {
    timer: u32,
    due: u64,
    delivered: u64,
}

impl Slot<'_> {
    /// Waits for a message of a timer.
    fn wait(&self) -> Option<Message> {
        self.cpu.wait(TIMEOUT_MS, || read32(self.at) != 0)?;
        let is_timer = read32(self.at) == EXPIRED && read32(self.at + 4) & 0xff == 24;
        is_timer.then(|| Message {
            timer: read32(self.at + 16),
            due: read64(self.at + 24),
            delivered: read64(self.at + 32),
        })
    }

    fn is_full(&self) -> bool {
        read32(self.at) != 0
    }

    fn is_pending(&self) -> bool {
        read32(self.at + 4) & PENDING != 0
    }

    /// Frees the slot, and asks for the message that waited for it.
    fn free(&self) {
        let pending = self.is_pending();
        write32(self.at, 0);
        if pending {
            write_msr(END_OF_MESSAGE, 0);
        }
    }
}

fn arm(timer: u32, config: u64, count: u64) -> bool {
    let source = u64::from(SOURCE) << 16;
    write_msr(TIMER_CONFIG + 2 * timer, 0)
        && write_msr(TIMER_COUNT + 2 * timer, count)
        && write_msr(TIMER_CONFIG + 2 * timer, config | source)
}

fn disarm(timer: u32) {
    write_msr(TIMER_CONFIG + 2 * timer, 0);
}

pub(crate) fn check(session: &mut Session, interface: &Interface, cpu: &Cpu, room: &mut Room) {
    if !interface.may(SYNIC) {
        return skip(session, "hv-synic", "privilege 2");
    }
    let (Some(messages), Some(events)) = (room.take(4096), room.take(4096)) else { return };
    let set = |register, value| write_msr(register, value) && try_read_msr(register) == Some(value);
    let on = set(CONTROL, 1)
        && set(MESSAGES, messages | 1)
        && set(EVENTS, events | 1)
        && set(SOURCES + SOURCE, DEVICE_VECTOR.into());
    let version = try_read_msr(VERSION).unwrap_or(0);
    session.add(Finding::check("hv-synic", on && version == 1).number("version", version));
    if !interface.may(TIMERS) {
        return skip(session, "hv-timers", "privilege 3");
    }
    let slot = Slot { at: messages + SLOT, cpu };
    set_interrupts(true);
    one_shot(session, &slot);
    periodic(session, &slot);
    pending(session, &slot);
    if interface.has(DIRECT_TIMERS) {
        direct(session, &slot);
    } else {
        skip(session, "hv-direct", "feature 19");
    }
    set_interrupts(false);
}

/// Each timer expires once, not early, with one message and one interrupt.
fn one_shot(session: &mut Session, slot: &Slot) {
    let (mut right, mut latest) = (0, 0);
    for timer in 0..4 {
        let (before, due) = (device_interrupts(), now() + 10 * MILLISECOND);
        let armed = arm(timer, ENABLED, due);
        let message = slot.wait();
        let came = slot.cpu.wait(TIMEOUT_MS, || device_interrupts() != before).is_some();
        let one = device_interrupts() - before == 1;
        slot.free();
        // It disables itself.
        let over = try_read_msr(TIMER_CONFIG + 2 * timer).is_some_and(|it| it & ENABLED == 0);
        if let Some(it) = message.filter(|it| it.timer == timer && it.due == due) {
            latest = latest.max(it.delivered.saturating_sub(due) / 10);
            let timely = it.delivered >= due && now() >= due;
            right += u64::from(armed && timely && came && one && over);
        }
    }
    session.add(
        Finding::check("hv-one-shot", right == 4).number("right", right).number("late_us", latest),
    );
}

/// The messages of a period are due one period after the other, until the timer is disabled.
fn periodic(session: &mut Session, slot: &Slot) {
    const TICKS: u64 = 10;
    let (start, before) = (now(), device_interrupts());
    let armed = arm(0, ENABLED | PERIODIC, PERIOD);
    let (mut ticks, mut uneven, mut last) = (0, 0, None);
    while ticks < TICKS {
        let Some(message) = slot.wait() else { break };
        slot.free();
        ticks += 1;
        // A busy host may skip periods, but not parts of one.
        let gap = last.map_or(PERIOD, |last| message.due.wrapping_sub(last));
        uneven += u64::from(gap == 0 || gap % PERIOD != 0 || message.timer != 0);
        last = Some(message.due);
    }
    let elapsed = now() - start;
    disarm(0);
    slot.free();
    let stopped = slot.cpu.wait(4 * PERIOD / MILLISECOND, || slot.is_full()).is_none();
    session.add(
        Finding::check("hv-periodic", armed && ticks == TICKS && uneven == 0 && stopped)
            .and(elapsed >= (TICKS - 1) * PERIOD)
            .and(u64::from(device_interrupts() - before) >= TICKS)
            .number("ticks", ticks)
            .number("uneven", uneven)
            .flag("stopped", stopped)
            .number("elapsed_us", elapsed / 10),
    );
}

/// A message for a full slot is announced there, and comes when the slot is freed.
fn pending(session: &mut Session, slot: &Slot) {
    let due = now() + 5 * MILLISECOND;
    let armed = arm(0, ENABLED, due) && arm(1, ENABLED, due + 5 * MILLISECOND);
    let first = slot.wait().map(|message| message.timer);
    let announced = slot.cpu.wait(TIMEOUT_MS, || slot.is_pending()).is_some();
    let kept = slot.wait().map(|message| message.timer) == first;
    slot.free();
    let second = slot.wait().map(|message| message.timer);
    slot.free();
    session.add(
        Finding::check("hv-pending", armed && announced && kept)
            .and((first, second) == (Some(0), Some(1)))
            .flag("announced", announced),
    );
}

/// An interrupt without a message, once and periodically.
fn direct(session: &mut Session, slot: &Slot) {
    const TICKS: u32 = 5;
    let config = ENABLED | DIRECT | u64::from(DEVICE_VECTOR) << 4;
    let (before, due) = (device_interrupts(), now() + 5 * MILLISECOND);
    let armed = arm(3, config, due);
    let came = slot.cpu.wait(TIMEOUT_MS, || device_interrupts() != before).is_some();
    let timely = now() >= due;
    let before = device_interrupts();
    let periodic = arm(3, config | PERIODIC, PERIOD);
    let many = slot.cpu.wait(TIMEOUT_MS, || device_interrupts() - before >= TICKS).is_some();
    disarm(3);
    session.add(
        Finding::check("hv-direct", armed && came && timely && periodic && many)
            .and(!slot.is_full())
            .number("ticks", (device_interrupts() - before).into()),
    );
}
