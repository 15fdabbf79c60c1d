//! The registers of the clock chip (MC146818A data sheet, "Registers A to D").

use std::sync::Arc;
use std::time::{Duration, Instant};

use host::ram::GuestMemoryMmap;
use serde::{Deserialize, Serialize};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use super::calendar::{Format, TIME};
use super::time_source::TimeSource;
use crate::line::Line;

const A: usize = 0x0a;
const B: usize = 0x0b;
const C: usize = 0x0c;
const D: usize = 0x0d;

// Register A.
/// Update in progress.
const UIP: u8 = 0x80;
/// The divider. The clock runs up to the value 0x20, and higher values hold it in reset.
const DIVIDER: u8 = 0x70;
const COUNTS: u8 = 0x20;
const RATE: u8 = 0x0f;
/// A crystal of 32 768 Hz, and 1024 interrupts a second.
const A_POWER_ON: u8 = 0x26;

// Register B.
const SET: u8 = 0x80;
const UIE: u8 = 0x10;
const BINARY: u8 = 0x04;
const HOURS24: u8 = 0x02;

// Register C: the flags PF, AF and UF have the same bits as their enables in B.
const IRQF: u8 = 0x80;
const PF: u8 = 0x40;
const AF: u8 = 0x20;
const UF: u8 = 0x10;
const FLAGS: u8 = PF | AF | UF;

/// Register D: the RAM and the time are valid.
const VRT: u8 = 0x80;

const SECOND: i64 = 1_000_000;
/// The time in microseconds that UIP is set: 244 us before the update, and 1984 us during it.
const UPDATE: i64 = 244 + 1984;
/// The time does not change for this long after a read finds UIP clear. The chip guarantees 244 us,
/// in which drivers read all registers. Here each register costs the driver an exit.
const HOLDS: Duration = Duration::from_millis(10);
/// The host's clock may be changed while the alarm sleeps, so it checks the time again after this.
const MAX_SLEEP: Duration = Duration::from_secs(60);
const TICKS_PER_SECOND: u128 = 32_768;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) index: u8,
    bytes: Vec<u8>,
    /// The offset of the guest's clock from the host's, in microseconds.
    offset: i64,
    /// The second up to which UF and AF were computed.
    seen: Option<i64>,
}

/// Limit of the offset in microseconds: 31 000 years, more than the registers can represent.
const MAX_OFFSET: u64 = 1_000_000_000_000_000_000;

impl State {
    /// The state at power-on, with the sizes of memory in the bytes where firmware expects them.
    pub(super) fn power_on(ram: &GuestMemoryMmap) -> Self {
        let mut bytes = vec![0; 128];
        (bytes[A], bytes[B]) = (A_POWER_ON, HOURS24);
        let four_gib = 4 << 30;
        let (mut low, mut high) = (0_u64, 0_u64);
        for region in ram.iter() {
            let start = region.start_addr().raw_value();
            if start < four_gib {
                low = low.max((start + region.len()).min(four_gib));
            } else {
                high += region.len();
            }
        }
        let mut put = |indices: &[usize], number: u64| {
            for (index, byte) in indices.iter().zip(number.to_le_bytes()) {
                bytes[*index] = byte;
            }
        };
        // In KiB: 640 below 1 MiB, and the memory above it, limited to 16 bits.
        put(&[0x15, 0x16], 640);
        let above_1_mib = (low.saturating_sub(1 << 20) >> 10).min(0xffff);
        put(&[0x17, 0x18], above_1_mib);
        put(&[0x30, 0x31], above_1_mib);
        // In units of 64 KiB: the memory above 16 MiB, and above 4 GiB.
        put(&[0x34, 0x35], (low.saturating_sub(16 << 20) >> 16).min(0xffff));
        put(&[0x5b, 0x5c, 0x5d], (high >> 16).min(0xff_ffff));
        Self { index: 0, bytes, offset: 0, seen: None }
    }
}

pub(super) struct Registers {
    pub(super) state: State,
    time_source: TimeSource,
    line: Arc<Line>,
    /// The start of the time grid for periodic interrupts.
    epoch: Instant,
    /// The tick up to which PF was computed.
    ticked: u64,
    /// While the time is held for the reader: the start of the hold, and the second shown.
    held: Option<(Instant, i64)>,
    /// Whether the timer was last set to a due time.
    timed: bool,
    /// Whether the timer's due time may have changed.
    changed: bool,
}

impl Registers {
    pub(super) fn new(state: State, time_source: TimeSource, line: Arc<Line>) -> Self {
        let epoch = Instant::now();
        Self { state, time_source, line, epoch, ticked: 0, held: None, timed: false, changed: true }
    }

    pub(super) fn restore(&mut self, state: State) -> anyhow::Result<()> {
        let length = state.bytes.len();
        anyhow::ensure!(
            length == 128,
            "a saved clock with {length} bytes of memory instead of 128"
        );
        let far = state.offset.unsigned_abs().max(state.seen.unwrap_or(0).unsigned_abs());
        anyhow::ensure!(
            far < MAX_OFFSET,
            "a saved clock with an offset of {} us",
            self.state.offset
        );
        self.state = state;
        (self.epoch, self.ticked, self.held) = (Instant::now(), 0, None);
        self.interrupt();
        Ok(())
    }

    /// Writes port 0x70. Bit 7 masks the NMI, and is not part of the index.
    pub(super) fn select(&mut self, index: u8) {
        self.state.index = index;
    }

    fn selected(&self) -> usize {
        usize::from(self.state.index & 0x7f)
    }

    /// Reads port 0x71.
    pub(super) fn read(&mut self) -> u8 {
        match self.selected() {
            A => self.read_a(),
            C => {
                self.advance();
                let flags = std::mem::take(&mut self.state.bytes[C]);
                self.interrupt();
                flags
            }
            D => VRT,
            index if TIME.contains(&index) && self.runs() => {
                let held = self.held.filter(|(since, _)| since.elapsed() < HOLDS);
                let second = held.map_or_else(|| self.second(), |(_, second)| second);
                self.format().register(second, index)
            }
            index => self.state.bytes[index],
        }
    }

    fn read_a(&mut self) -> u8 {
        let now = self.now();
        let updates = self.runs() && now.rem_euclid(SECOND) >= SECOND - UPDATE;
        self.held = (!updates).then(|| (Instant::now(), now.div_euclid(SECOND)));
        self.state.bytes[A] | if updates { UIP } else { 0 }
    }

    /// Writes port 0x71.
    pub(super) fn write(&mut self, byte: u8) {
        match self.selected() {
            A => self.control(A, byte & !UIP),
            // The clock is not updated while SET is on.
            B => self.control(B, if byte & SET == 0 { byte } else { byte & !UIE }),
            C | D => {}
            index if TIME.contains(&index) && self.runs() => {
                self.stop();
                self.state.bytes[index] = byte;
                self.start(false);
            }
            index => {
                // Process the old alarm first.
                self.advance();
                self.state.bytes[index] = byte;
            }
        }
    }

    /// Writes register A or B, which may stop or start the clock.
    fn control(&mut self, register: usize, byte: u8) {
        self.advance();
        let (ran, counted) = (self.runs(), self.counts());
        if ran {
            self.stop();
        }
        self.state.bytes[register] = byte;
        if self.runs() && !ran {
            self.start(!counted);
        }
        self.held = None;
        self.interrupt();
    }

    /// Stops the clock: copies the time into the registers.
    fn stop(&mut self) {
        let (format, second) = (self.format(), self.second());
        for index in TIME {
            self.state.bytes[index] = format.register(second, index);
        }
    }

    /// Starts the clock from the time in the registers, at the old fraction of the second, or in
    /// the middle of the second if the divider starts to count.
    fn start(&mut self, divider_starts: bool) {
        let second = self.format().seconds(&self.state.bytes);
        let now = self.now();
        let within = if divider_starts { SECOND / 2 } else { now.rem_euclid(SECOND) };
        // Years 0 to 16 665 in microseconds are far from the limits of 64 bits.
        self.state.offset += second * SECOND + within - now;
        self.state.seen = Some(second);
        self.held = None;
        self.changed = true;
    }

    fn counts(&self) -> bool {
        self.state.bytes[A] & DIVIDER <= COUNTS
    }

    fn runs(&self) -> bool {
        self.counts() && self.state.bytes[B] & SET == 0
    }

    fn format(&self) -> Format {
        let b = self.state.bytes[B];
        Format { binary: b & BINARY != 0, hours24: b & HOURS24 != 0 }
    }

    fn now(&self) -> i64 {
        self.time_source.micros().saturating_add(self.state.offset)
    }

    fn second(&self) -> i64 {
        self.now().div_euclid(SECOND)
    }

    /// Ticks of the 32 768 Hz crystal between periodic interrupts.
    fn period(&self) -> Option<u64> {
        let rate = match self.state.bytes[A] & RATE {
            0 => return None,
            // The two rates that would be too fast are the slow ones at the end of the 4 MHz range.
            fast @ (1 | 2) => fast + 7,
            rate => rate,
        };
        self.counts().then(|| 1 << (rate - 1))
    }

    fn ticks(&self) -> u64 {
        let ticks = self.epoch.elapsed().as_nanos() * TICKS_PER_SECOND / 1_000_000_000;
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }

    /// Sets the flags of all events since the last call.
    fn advance(&mut self) {
        let tick = self.ticks();
        if let Some(period) = self.period()
            && tick / period != self.ticked / period
        {
            self.state.bytes[C] |= PF;
        }
        self.ticked = tick;
        if self.runs() {
            let second = self.second();
            let seen = self.state.seen.unwrap_or(second);
            if second != seen {
                self.state.bytes[C] |= UF;
            }
            let alarm = self.format().next_alarm(&self.state.bytes, seen);
            if alarm.is_some_and(|alarm| alarm <= second) {
                self.state.bytes[C] |= AF;
            }
            self.state.seen = Some(second);
        }
        self.interrupt();
    }

    /// Sets IRQF and the line if a flag is set whose interrupt is enabled.
    fn interrupt(&mut self) {
        let flags = self.state.bytes[C] & FLAGS;
        let asks = flags & self.state.bytes[B] != 0;
        self.state.bytes[C] = flags | if asks { IRQF } else { 0 };
        self.line.set(asks);
        self.changed = true;
    }

    /// Called when the timer is due. Returns the next due time.
    pub(super) fn ring(&mut self) -> Option<Instant> {
        self.advance();
        self.due()
    }

    /// Whether the timer must be set again.
    pub(super) fn has_new_due(&mut self) -> bool {
        let before = self.timed;
        self.timed = self.state.bytes[B] & FLAGS != 0;
        std::mem::take(&mut self.changed) && (before || self.timed)
    }

    /// The time at which the next flag that is enabled and clear will be set.
    pub(super) fn due(&self) -> Option<Instant> {
        let wanted = self.state.bytes[B] & FLAGS & !self.state.bytes[C];
        let mut after = Vec::with_capacity(3);
        if wanted & PF != 0
            && let Some(period) = self.period()
        {
            let tick = u128::from((self.ticks() / period + 1) * period);
            let at = (tick * 1_000_000_000).div_ceil(TICKS_PER_SECOND);
            let at = Duration::from_nanos(u64::try_from(at).unwrap_or(u64::MAX));
            after.push(at.saturating_sub(self.epoch.elapsed()));
        }
        if self.runs() {
            let now = self.now();
            let until = |second: i64| {
                Duration::from_micros(u64::try_from(second * SECOND - now).unwrap_or(0))
            };
            if wanted & UF != 0 {
                after.push(until(now.div_euclid(SECOND) + 1));
            }
            if wanted & AF != 0 {
                let second = self.format().next_alarm(
                    &self.state.bytes,
                    self.state.seen.unwrap_or(now.div_euclid(SECOND)),
                );
                after.extend(second.map(until));
            }
        }
        let soonest = after.into_iter().min()?.min(MAX_SLEEP);
        Some(Instant::now() + soonest)
    }
}
