//! The high precision event timers (IA-PC HPET Specification 1.0a) at 0xFED00000: one counter of
//! 100 MHz and three timers of 64 bits, each periodic or one-shot, on IOAPIC pins 16 to 23.
//!
//! The device is optional, because guests that find it prefer it to clocks that need no exit. It
//! does not offer "legacy replacement" (timer 0 instead of the PIT): the kernel implements the PIT,
//! which drives the same pin, and no device can silence it. It does not offer interrupts by FSB
//! messages either.
//!
//! Threats: the guest sets any period, down to 10 ns. A periodic timer fires at most 10 000 times a
//! second, and not at all while its level-triggered interrupt is pending. Every comparator value is
//! a valid time, although possibly one that is never reached.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::alarm::Alarm;
use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Grants};
use crate::line::Line;
use crate::time::Time;

/// `--device hpet`
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        grants.claim(Kind::Memory, 0xfed0_0000..0xfed0_0400)?;
        grants.acpi("PNP0103");
        // The guest chooses one of the pins, so they are not in the `_CRS`.
        let lines = PINS.map(|pin| grants.line(pin)).into_iter().collect::<Result<_, _>>()?;
        let time = grants.shared().time.clone();
        let registers = Registers { state: State::default(), lines, epoch: time.now(), time };
        Ok(Box::new(Hpet { registers: Arc::new(Mutex::new(registers)), timer: None }))
    }
}

/// The pins that QEMU's Q35 offers, without the legacy pins.
const PINS: [u32; 8] = [16, 17, 18, 19, 20, 21, 22, 23];
const ROUTES: u64 = 0x00ff_0000;

/// Nanoseconds per count.
const PERIOD: u64 = 10;
/// Period in femtoseconds, vendor 8086, counter of 64 bits, three timers, revision 1.
const CAPABILITIES: u64 = (PERIOD * 1_000_000) << 32 | 0x8086_2201;

// 2.3.4: offsets of the registers.
const GCAP_ID: u64 = 0x000;
const GEN_CONF: u64 = 0x010;
const GINTR_STA: u64 = 0x020;
const MAIN_CNT: u64 = 0x0f0;
const TIMERS: u64 = 0x100;

/// General configuration: the counter runs, and timers may interrupt.
const ENABLE_CNF: u64 = 1 << 0;

// 2.3.8: timer configuration.
const TN_INT_TYPE_LEVEL: u64 = 1 << 1;
const TN_INT_ENB: u64 = 1 << 2;
const TN_PERIODIC: u64 = 1 << 3;
const TN_PER_INT_CAP: u64 = 1 << 4;
const TN_SIZE_CAP: u64 = 1 << 5;
const TN_VAL_SET: u64 = 1 << 6;
const TN_32MODE: u64 = 1 << 8;
const TN_INT_ROUTE: u64 = 0x1f << 9;
const TN_WRITABLE: u64 = TN_INT_TYPE_LEVEL | TN_INT_ENB | TN_PERIODIC | TN_VAL_SET | TN_32MODE;
const TN_CAPABILITIES: u64 = ROUTES << 32 | TN_PER_INT_CAP | TN_SIZE_CAP;

/// The minimum interval between interrupts of a periodic timer.
const MIN_PERIOD: Duration = Duration::from_micros(100);
/// Timers that are due later are checked again after this time.
const MAX_SLEEP: Duration = Duration::from_secs(3600);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Timer {
    config: u64,
    comparator: u64,
    period: u64,
}

impl Default for Timer {
    fn default() -> Self {
        Self { config: TN_CAPABILITIES, comparator: u64::MAX, period: 0 }
    }
}

impl Timer {
    fn is(&self, bit: u64) -> bool {
        self.config & bit != 0
    }

    fn mask(&self) -> u64 {
        if self.is(TN_32MODE) { u64::from(u32::MAX) } else { u64::MAX }
    }

    /// The number of counts from `from` to the match, minus one: the present count does not match
    /// again.
    fn distance(&self, from: u64) -> u64 {
        self.comparator.wrapping_sub(from).wrapping_sub(1) & self.mask()
    }

    /// Whether there is a match in the `counts` after `from`. Moves the comparator of a periodic
    /// timer to the next match.
    fn passes(&mut self, from: u64, counts: u64) -> bool {
        let distance = self.distance(from);
        if distance >= counts {
            return false;
        }
        let period = self.period & self.mask();
        if self.is(TN_PERIODIC) && period != 0 {
            let matches = (counts - distance - 1) / period + 1;
            let next = self.comparator.wrapping_add(matches.wrapping_mul(period));
            self.comparator = next & self.mask();
        }
        true
    }

    /// The index of the interrupt pin, if the route is valid.
    fn pin(&self) -> Option<usize> {
        let route = usize::try_from((self.config & TN_INT_ROUTE) >> 9).ok()?;
        route.checked_sub(16).filter(|pin| *pin < PINS.len())
    }

    fn configure(&mut self, value: u64) {
        let route = (value & TN_INT_ROUTE) >> 9;
        // A write of an invalid pin keeps the old pin.
        let keep = if ROUTES >> route & 1 == 1 { 0 } else { TN_INT_ROUTE };
        let writable = (TN_WRITABLE | TN_INT_ROUTE) & !keep;
        self.config = self.config & !writable | value & writable;
        self.comparator &= self.mask();
        self.period &= self.mask();
    }

    /// Writes the comparator. 2.3.9.2.2: in periodic mode a write sets the period, and with "set
    /// value" also the comparator.
    fn compare(&mut self, part: Part) {
        let mask = self.mask();
        if !self.is(TN_PERIODIC) || self.is(TN_VAL_SET) {
            self.comparator = part.over(self.comparator) & mask;
        }
        if self.is(TN_PERIODIC) {
            self.period = part.over(self.period) & mask;
        }
        // The bit clears itself. Software that writes two halves writes the low one first.
        self.config &= !TN_VAL_SET;
    }
}

/// A write to a whole register or to one half.
#[derive(Clone, Copy)]
struct Part {
    value: u64,
    mask: u64,
}

impl Part {
    fn of(offset: u64, data: &[u8]) -> Option<Self> {
        match data.len() {
            4 => {
                let value = u64::from(u32::from_le_bytes(data.try_into().ok()?));
                let shift = (offset & 4) * 8;
                Some(Self { value: value << shift, mask: u64::from(u32::MAX) << shift })
            }
            8 => Some(Self { value: u64::from_le_bytes(data.try_into().ok()?), mask: u64::MAX }),
            _ => None,
        }
    }

    fn over(self, old: u64) -> u64 {
        old & !self.mask | self.value
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    config: u64,
    /// Level-triggered interrupts that are not acknowledged, one bit for each timer.
    status: u64,
    /// The counter's value, at `epoch` if it is running.
    count: u64,
    /// The count up to which matches were processed.
    seen: u64,
    timers: [Timer; 3],
}

struct Registers {
    state: State,
    lines: Vec<Arc<Line>>,
    time: Arc<Time>,
    epoch: Instant,
}

impl Registers {
    fn counts(&self) -> bool {
        self.state.config & ENABLE_CNF != 0
    }

    fn count(&self) -> u64 {
        if !self.counts() {
            return self.state.count;
        }
        let passed =
            self.time.now().saturating_duration_since(self.epoch).as_nanos() / u128::from(PERIOD);
        self.state.count.wrapping_add(u64::try_from(passed).unwrap_or(u64::MAX))
    }

    /// Sets the counter, whether it is running or not.
    fn set_count(&mut self, count: u64) {
        (self.state.count, self.state.seen, self.epoch) = (count, count, self.time.now());
    }

    fn read(&mut self, register: u64) -> u64 {
        match register {
            GCAP_ID => CAPABILITIES,
            GEN_CONF => self.state.config,
            GINTR_STA => {
                self.advance();
                self.state.status
            }
            MAIN_CNT => self.count(),
            _ => {
                self.advance();
                let timer = timer_of(register).map(|(number, of)| (&self.state.timers[number], of));
                match timer {
                    Some((timer, 0x00)) => timer.config,
                    Some((timer, 0x08)) => timer.comparator,
                    _ => 0,
                }
            }
        }
    }

    fn write(&mut self, register: u64, part: Part) {
        self.advance();
        match register {
            GEN_CONF => {
                self.state.config = part.over(self.state.config) & ENABLE_CNF;
                // Continue at the count up to which matches were processed, so that none is
                // skipped.
                self.set_count(self.state.seen);
            }
            GINTR_STA => self.state.status &= !part.value,
            MAIN_CNT => self.set_count(part.over(self.count())),
            _ => {
                if let Some((number, of)) = timer_of(register) {
                    let timer = &mut self.state.timers[number];
                    match of {
                        0x00 => timer.configure(part.over(timer.config)),
                        0x08 => timer.compare(part),
                        _ => {}
                    }
                }
            }
        }
        self.drive();
    }

    /// Processes the matches since the last call, and raises their interrupts.
    fn advance(&mut self) {
        let now = self.count();
        let (from, counts) = (self.state.seen, now.wrapping_sub(self.state.seen));
        for (number, timer) in self.state.timers.iter_mut().enumerate() {
            if !timer.passes(from, counts) {
                continue;
            }
            if timer.is(TN_INT_TYPE_LEVEL) {
                self.state.status |= 1 << number;
            } else if timer.is(TN_INT_ENB)
                && let Some(pin) = timer.pin()
            {
                self.lines[pin].pulse();
            }
        }
        self.state.seen = now;
        self.drive();
    }

    /// Sets the lines according to the level-triggered timers.
    fn drive(&self) {
        for (pin, line) in self.lines.iter().enumerate() {
            let asks = |(number, timer): (usize, &Timer)| {
                self.state.status >> number & 1 == 1
                    && timer.is(TN_INT_TYPE_LEVEL)
                    && timer.is(TN_INT_ENB)
                    && timer.pin() == Some(pin)
            };
            line.set(self.counts() && self.state.timers.iter().enumerate().any(asks));
        }
    }

    /// The time of the next interrupt, if one can happen.
    fn due(&self) -> Option<Instant> {
        let after = |(number, timer): (usize, &Timer)| {
            let waits = timer.is(TN_INT_TYPE_LEVEL) && self.state.status >> number & 1 == 1;
            if !timer.is(TN_INT_ENB) || timer.pin().is_none() || waits {
                return None;
            }
            let counts = timer.distance(self.state.seen).saturating_add(1);
            let after = Duration::from_nanos(counts.saturating_mul(PERIOD));
            let shortest = if timer.is(TN_PERIODIC) { MIN_PERIOD } else { Duration::ZERO };
            Some(after.clamp(shortest, MAX_SLEEP))
        };
        let soonest = self.state.timers.iter().enumerate().filter_map(after).min()?;
        self.counts().then(|| Instant::now() + soonest)
    }
}

/// The number of the timer that a register belongs to, and the register's offset in it.
fn timer_of(register: u64) -> Option<(usize, u64)> {
    let offset = register.checked_sub(TIMERS)?;
    let number = usize::try_from(offset / 0x20).ok().filter(|number| *number < 3)?;
    Some((number, offset % 0x20))
}

struct Hpet {
    registers: Arc<Mutex<Registers>>,
    timer: Option<Alarm>,
}

impl Device for Hpet {
    fn read(&mut self, _: Region, offset: u64, data: &mut [u8]) -> Access {
        if !is_register(offset, data.len()) {
            return Access::Ignored;
        }
        let value = self.registers.lock().expect("no device panicked").read(offset & !7);
        let start = if offset & 4 == 0 { 0 } else { 4 };
        data.copy_from_slice(&value.to_le_bytes()[start..][..data.len()]);
        Access::Done
    }

    fn write(&mut self, _: Region, offset: u64, data: &[u8]) -> Access {
        let (true, Some(part)) = (is_register(offset, data.len()), Part::of(offset, data)) else {
            return Access::Ignored;
        };
        let mut registers = self.registers.lock().expect("no device panicked");
        registers.write(offset & !7, part);
        if let Some(timer) = &self.timer {
            timer.set(registers.due());
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        // The thread may need the lock on the registers to end.
        drop(self.timer.take());
        let mut registers = self.registers.lock().expect("no device panicked");
        registers.advance();
        // The counter stops while the guest is parked.
        let seen = registers.state.seen;
        registers.set_count(seen);
        Saved::of(&registers.state)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let mut registers = self.registers.lock().expect("no device panicked");
        registers.state = saved.take()?;
        registers.epoch = registers.time.now();
        registers.drive();
        let due = registers.due();
        drop(registers);
        let registers = self.registers.clone();
        let timer = Alarm::spawn("hpet", move || {
            let mut registers = registers.lock().expect("no device panicked");
            registers.advance();
            registers.due()
        })?;
        timer.set(due);
        self.timer = Some(timer);
        Ok(())
    }
}

/// 2.3.1: registers are accessed as a whole or in halves.
fn is_register(offset: u64, length: usize) -> bool {
    matches!((length, offset % 8), (8, 0) | (4, 0 | 4))
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::testutil::Bench;

    const BASE: u64 = 0xfed0_0000;
    const TIMER0: u64 = BASE + TIMERS;
    const ROUTE_20: u64 = 20 << 9;

    fn bench() -> Bench {
        let mut bench = Bench::new(4096);
        bench.board.add("hpet", |grants| Config::default().build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        bench
    }

    fn read(bench: &Bench, address: u64) -> u64 {
        u64::from_le_bytes(bench.read(Kind::Memory, address))
    }

    fn write(bench: &Bench, address: u64, value: u64) {
        bench.write(Kind::Memory, address, &value.to_le_bytes());
    }

    fn write32(bench: &Bench, address: u64, value: u32) {
        bench.write(Kind::Memory, address, &value.to_le_bytes());
    }

    fn wait(bench: &Bench, edges: u32, began: Instant) -> Duration {
        while bench.hypervisor.pins.edges(20) < edges {
            assert!(began.elapsed() < Duration::from_secs(5), "no interrupt came");
            std::thread::sleep(Duration::from_micros(200));
        }
        began.elapsed()
    }

    #[test]
    fn reports_its_identity_and_accepts_whole_and_half_registers() {
        let bench = bench();
        assert_eq!(read(&bench, BASE), 0x0098_9680_8086_2201);
        assert_eq!(bench.read(Kind::Memory, BASE + 4), 0x0098_9680_u32.to_le_bytes());
        assert_eq!(read(&bench, TIMER0), 0x00ff_0000_0000_0030);
        assert_eq!(read(&bench, TIMER0 + 8), u64::MAX);
        for length in [1, 2, 3] {
            let mut data = [0; 3];
            bench.board.shared.spaces.memory.read(BASE, &mut data[..length]);
            assert!(data[..length].iter().all(|byte| *byte == 0xff), "{length}");
        }
        assert_eq!(bench.read(Kind::Memory, BASE + 2), [0xff; 4]);
        write(&bench, TIMER0, 2 << 9 | u64::from(u32::MAX) & !TN_INT_ROUTE);
        assert_eq!(read(&bench, TIMER0), 0x00ff_0000_0000_017e, "pin 2 is not offered");
        write32(&bench, BASE + MAIN_CNT + 4, 7);
        write32(&bench, BASE + MAIN_CNT, 9);
        assert_eq!(read(&bench, BASE + MAIN_CNT), 7 << 32 | 9, "the counter is stopped");
        write(&bench, BASE + GEN_CONF, u64::MAX);
        assert_eq!(read(&bench, BASE + GEN_CONF), ENABLE_CNF, "no legacy replacement");
    }

    #[test]
    fn the_counter_runs_at_100_mhz_while_enabled() {
        let bench = bench();
        let began = Instant::now();
        write(&bench, BASE + GEN_CONF, ENABLE_CNF);
        let inside = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        let least = inside.elapsed().as_nanos() / 10;
        let count = u128::from(read(&bench, BASE + MAIN_CNT));
        let max = began.elapsed().as_nanos() / 10;
        assert!((least..=max).contains(&count), "{least} {count} {max}");
        write(&bench, BASE + GEN_CONF, 0);
        let halted = read(&bench, BASE + MAIN_CNT);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(read(&bench, BASE + MAIN_CNT), halted);
    }

    #[test]
    fn a_one_shot_timer_fires_once_on_time() {
        let bench = bench();
        write(&bench, TIMER0, ROUTE_20 | TN_INT_ENB);
        write(&bench, TIMER0 + 8, 2_000_000);
        let began = Instant::now();
        write(&bench, BASE + GEN_CONF, ENABLE_CNF);
        let took = wait(&bench, 1, began);
        assert!(took >= Duration::from_millis(20), "{took:?}");
        std::thread::sleep(Duration::from_millis(30));
        assert_eq!(bench.hypervisor.pins.edges(20), 1);
        assert_eq!(read(&bench, BASE + GINTR_STA), 0, "edges leave no status");
    }

    #[test]
    fn linux_programs_a_periodic_timer() {
        let bench = bench();
        let config = ROUTE_20 | TN_INT_ENB | TN_PERIODIC | TN_VAL_SET | TN_32MODE;
        write(&bench, BASE + GEN_CONF, ENABLE_CNF);
        write32(&bench, TIMER0, u32::try_from(config).unwrap());
        let now: u32 = u32::from_le_bytes(bench.read(Kind::Memory, BASE + MAIN_CNT));
        let began = Instant::now();
        // 5 ms.
        write32(&bench, TIMER0 + 8, now + 500_000);
        write32(&bench, TIMER0 + 8, 500_000);
        assert_eq!(read(&bench, TIMER0) & TN_VAL_SET, 0);
        let took = wait(&bench, 10, began);
        assert!(took > Duration::from_millis(40), "{took:?}");
        write32(&bench, TIMER0, 0);
        let edges = bench.hypervisor.pins.edges(20);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(bench.hypervisor.pins.edges(20), edges);
    }

    #[test]
    fn a_level_interrupt_lasts_until_acknowledged_or_disabled() {
        let bench = bench();
        let timer2 = BASE + TIMERS + 0x40;
        write(&bench, timer2, ROUTE_20 | TN_INT_ENB | TN_INT_TYPE_LEVEL);
        write(&bench, timer2 + 8, 1000);
        write(&bench, BASE + GEN_CONF, ENABLE_CNF);
        wait(&bench, 1, Instant::now());
        assert!(bench.hypervisor.pins.is_high(20));
        assert_eq!(read(&bench, BASE + GINTR_STA), 4);
        write(&bench, timer2, ROUTE_20 | TN_INT_TYPE_LEVEL);
        assert!(!bench.hypervisor.pins.is_high(20));
        write(&bench, timer2, ROUTE_20 | TN_INT_ENB | TN_INT_TYPE_LEVEL);
        assert!(bench.hypervisor.pins.is_high(20));
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        write(&bench, BASE + GINTR_STA, 3);
        assert!(bench.hypervisor.pins.is_high(20), "only other bits were cleared");
        write32(&bench, BASE + GINTR_STA, 4);
        assert!(!bench.hypervisor.pins.is_high(20) && read(&bench, BASE + GINTR_STA) == 0);
    }

    #[test]
    fn the_shortest_period_does_not_keep_the_host_busy() {
        let bench = bench();
        write(&bench, TIMER0, ROUTE_20 | TN_INT_ENB | TN_PERIODIC | TN_VAL_SET);
        write(&bench, TIMER0 + 8, 1);
        write(&bench, BASE + GEN_CONF, ENABLE_CNF);
        let began = Instant::now();
        wait(&bench, 1, began);
        std::thread::sleep(Duration::from_millis(50));
        let edges = u128::from(bench.hypervisor.pins.edges(20));
        let max = began.elapsed().as_micros() / 100 + 10;
        assert!(edges > 0 && edges <= max, "{edges} edges, at most {max}");
    }

    #[test]
    fn comparators_match_once_per_wrap() {
        let mut timer = Timer { comparator: 5, ..Timer::default() };
        assert_eq!(timer.distance(4), 0);
        assert_eq!(timer.distance(5), u64::MAX, "not the same count again");
        timer.configure(TN_32MODE);
        assert_eq!(timer.distance(5), u64::from(u32::MAX));
        assert_eq!(timer.distance(0x7_ffff_ffff), 5);
        timer.configure(TN_32MODE | TN_PERIODIC);
        timer.period = 10;
        assert!(timer.passes(0, 26));
        assert_eq!(timer.comparator, 35, "5, 15 and 25 are over");
        assert!(!timer.passes(26, 8));
    }

    #[test]
    fn park_stops_the_counter_and_reset_restores_power_on_state() {
        let bench = bench();
        let fresh = bench.board.park();
        bench.board.run(fresh.clone()).unwrap();
        write(&bench, TIMER0, ROUTE_20 | TN_INT_ENB);
        // 200 ms.
        write(&bench, TIMER0 + 8, 20_000_000);
        write(&bench, BASE + GEN_CONF, ENABLE_CNF);
        let (began, before) = (Instant::now(), read(&bench, BASE + MAIN_CNT));
        let saved = bench.board.park();
        let nap = Duration::from_millis(250);
        std::thread::sleep(nap);
        assert_eq!(bench.hypervisor.pins.edges(20), 0, "parked");
        bench.board.run(saved).unwrap();
        let counted = Duration::from_nanos(10 * (read(&bench, BASE + MAIN_CNT) - before));
        assert!(counted + nap <= began.elapsed(), "{counted:?} without the nap");
        wait(&bench, 1, Instant::now());
        bench.board.reset().unwrap();
        assert_eq!(bench.board.park(), fresh);
    }

    #[test]
    fn survives_random_accesses() {
        let bench = bench();
        let mut seed = 1_u64;
        for _ in 0..50_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let address = BASE + (seed >> 40 & 0x17c);
            if seed >> 60 & 1 == 0 {
                write(&bench, address, seed.rotate_left(7));
            } else {
                write32(&bench, address, u32::try_from(seed >> 33).unwrap());
            }
            read(&bench, address);
        }
        bench.board.reset().unwrap();
        assert_eq!(read(&bench, BASE + MAIN_CNT), 0);
    }
}
