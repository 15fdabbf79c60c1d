//! The power management block of the ICH9: fixed events, timer, general-purpose events, SMI enables
//! and TCO (I/O Controller Hub 9 datasheet 316972, 13.8.3 and 13.9; ACPI 6.5, 4.8).
//!
//! Threats: the guest may read the timer in a loop, so a read never sleeps, allocates or logs. The
//! timer's overflow wakes a thread only while the guest has enabled that event, less than once in
//! two seconds. The guest may switch the machine off. Sleep states are not offered. Saved states
//! are masked like a guest's writes.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::alarm::Alarm;
use crate::device::Access;
use crate::grants::{Event, Events, Shared};
use crate::line::Line;
use crate::time::Time;

/// Size of the block in bytes. PMBASE is aligned to it.
pub(crate) const SIZE: u64 = 128;

// Offsets of the first and of the last byte of each register. Writes are split into bytes, except
// those to the timer: each field with a side effect lies within one byte, so that accesses of all
// widths work.
const PM1_STS: u64 = 0x00;
const PM1_STS_END: u64 = 0x01;
const PM1_EN: u64 = 0x02;
const PM1_EN_END: u64 = 0x03;
const PM1_CNT: u64 = 0x04;
const PM1_CNT_END: u64 = 0x05;
/// The reserved upper half of PM1_CNT, which has 32 bits here and 16 in the FADT.
const PM1_CNT_UPPER: u64 = 0x06;
const PM1_CNT_UPPER_END: u64 = 0x07;
const PM1_TMR: u64 = 0x08;
const PM1_TMR_END: u64 = 0x0b;
const GPE0_STS: u64 = 0x20;
const GPE0_STS_END: u64 = 0x27;
const GPE0_EN: u64 = 0x28;
const GPE0_EN_END: u64 = 0x2f;
const SMI_EN: u64 = 0x30;
const SMI_EN_END: u64 = 0x33;
const SMI_STS: u64 = 0x34;
const SMI_STS_END: u64 = 0x37;
/// The watchdog. It is always halted.
const TCO: u64 = 0x60;
const TCO_END: u64 = 0x7f;
const TCO1_CNT_UPPER: u64 = 0x69;
/// TCO_TMR_HLT of TCO1_CNT, in its upper byte.
const TCO_TMR_HLT: u8 = 1 << 3;

// PM1_STS and PM1_EN: timer overflow, global lock, power button, real-time clock.
const TMROF: u16 = 1 << 0;
const PWRBTN: u16 = 1 << 8;
const PM1_EVENTS: u16 = TMROF | 1 << 5 | PWRBTN | 1 << 10;
/// The writable bits of PM1_EN: the events, and "PCI Express wake disable".
const PM1_EN_KEPT: u16 = PM1_EVENTS | 1 << 14;
// PM1_CNT: SCI instead of SMI, and the writable bits. SLP_EN and GBL_RLS read as zero.
const SCI_EN: u16 = 1 << 0;
const PM1_CNT_KEPT: u16 = SCI_EN | 1 << 1 | 7 << 10;
// SLP_TYP and SLP_EN, in the upper byte of PM1_CNT. Type 0 is S5, because firmware that does not
// read the `_S5` package writes 0.
const SLP_TYP: u8 = 7 << 2;
const SLP_EN: u8 = 1 << 5;
// SMI_EN: SMIs are enabled globally, and writes to APM_CNT cause an SMI.
const GBL_SMI_EN: u32 = 1 << 0;
const APMC_EN: u32 = 1 << 5;
/// SMI_STS: APM_CNT was written.
const APM_STS: u32 = 1 << 5;

/// The rate of ACPI's 24-bit timer. It overflows whenever its highest bit changes.
const HERTZ: u32 = 3_579_545;
const TIMER_MASK: u32 = 0xff_ffff;
const OVERFLOW: u64 = 1 << 23;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    /// PM1_STS without TMROF.
    status: u16,
    enable: u16,
    control: u16,
    timer: u32,
    /// TMROF.
    overflow: bool,
    gpe_status: [u8; 8],
    gpe_enable: [u8; 8],
    /// SMI_EN. At power-on, it depends on the machine.
    smi_enable: Option<u32>,
    smi_status: u32,
}

/// Counts ticks since power-on. It stops while the machine is parked.
#[derive(Clone, Copy, Default)]
struct Clock {
    base: u64,
    since: Option<Instant>,
}

impl Clock {
    fn ticks(self, now: Instant) -> u64 {
        let passed = self.since.map_or(Duration::ZERO, |it| now.saturating_duration_since(it));
        let (hertz, nanos) = (u64::from(HERTZ), u64::from(passed.subsec_nanos()));
        self.base + passed.as_secs() * hertz + nanos * hertz / 1_000_000_000
    }

    /// The time at which the clock reaches `ticks`.
    fn at(self, ticks: u64) -> Option<Instant> {
        let (left, hertz) = (ticks.saturating_sub(self.base), u64::from(HERTZ));
        let nanos = (left % hertz * 1_000_000_000).div_ceil(hertz);
        let wait = Duration::from_secs(left / hertz) + Duration::from_nanos(nanos);
        self.since?.checked_add(wait)
    }
}

/// The registers, shared with the timer's thread and the operator's.
struct Registers {
    state: State,
    time: Arc<Time>,
    clock: Clock,
    /// The tick at which TMROF is set. It may be in the past, because TMROF is computed when it is
    /// needed.
    overflow_at: u64,
    /// SMI_LOCK: GBL_SMI_EN is read-only.
    smi_locked: bool,
    /// Whether the button was pressed while the machine was parked.
    pressed: bool,
    /// Whether a request for an unsupported sleep state was logged.
    logged_sleep: bool,
    /// SMI_EN at power-on.
    smi_enable: u32,
    line: Arc<Line>,
    events: Events,
}

impl Registers {
    fn smi_enable(&self) -> u32 {
        self.state.smi_enable.unwrap_or(self.smi_enable)
    }

    fn status(&self, ticks: u64) -> u16 {
        self.state.status | if ticks >= self.overflow_at { TMROF } else { 0 }
    }

    fn byte(&self, at: u64, ticks: u64) -> Option<u8> {
        let state = &self.state;
        let of_word = |word: u16| word.to_le_bytes()[usize::from(at & 1 == 1)];
        Some(match at {
            PM1_STS..=PM1_STS_END => of_word(self.status(ticks)),
            PM1_EN..=PM1_EN_END => of_word(state.enable),
            PM1_CNT..=PM1_CNT_END => of_word(state.control),
            PM1_TMR..=PM1_TMR_END => (ticks & u64::from(TIMER_MASK)).to_le_bytes()[lane(at, 4)],
            GPE0_STS..=GPE0_STS_END => state.gpe_status[lane(at, 8)],
            GPE0_EN..=GPE0_EN_END => state.gpe_enable[lane(at, 8)],
            SMI_EN..=SMI_EN_END => self.smi_enable().to_le_bytes()[lane(at, 4)],
            SMI_STS..=SMI_STS_END => state.smi_status.to_le_bytes()[lane(at, 4)],
            TCO1_CNT_UPPER => TCO_TMR_HLT,
            PM1_CNT_UPPER..=PM1_CNT_UPPER_END | TCO..=TCO_END => 0,
            _ => return None,
        })
    }

    fn set_byte(&mut self, at: u64, byte: u8) {
        let shift = if at & 1 == 1 { 8 } else { 0 };
        let (word, mask) = (u16::from(byte) << shift, 0xff_u16 << shift);
        let smi_enable = self.smi_enable();
        let state = &mut self.state;
        match at {
            PM1_STS..=PM1_STS_END => {
                state.status &= !word;
                if word & TMROF != 0 {
                    let ticks = self.clock.ticks(self.time.now());
                    if ticks >= self.overflow_at {
                        self.overflow_at = next_overflow(ticks);
                    }
                }
            }
            PM1_EN..=PM1_EN_END => {
                state.enable = (state.enable & !mask | word) & PM1_EN_KEPT;
            }
            PM1_CNT..=PM1_CNT_END => {
                state.control = (state.control & !mask | word) & PM1_CNT_KEPT;
                if at == PM1_CNT_END && byte & SLP_EN != 0 {
                    self.sleep(byte & SLP_TYP);
                }
            }
            GPE0_STS..=GPE0_STS_END => state.gpe_status[lane(at, 8)] &= !byte,
            GPE0_EN..=GPE0_EN_END => state.gpe_enable[lane(at, 8)] = byte,
            SMI_EN..=SMI_EN_END => {
                let mut bytes = smi_enable.to_le_bytes();
                bytes[lane(at, 4)] = byte;
                let locked = if self.smi_locked { GBL_SMI_EN } else { 0 };
                let new = u32::from_le_bytes(bytes);
                state.smi_enable = Some(smi_enable & locked | new & !locked);
            }
            SMI_STS => state.smi_status &= !u32::from(byte),
            _ => {}
        }
    }

    fn sleep(&mut self, kind: u8) {
        if kind == 0 {
            (self.events)(Event::PowerOff);
        } else if !self.logged_sleep {
            self.logged_sleep = true;
            tracing::info!("the guest requested sleep type {}, which is not supported", kind >> 2);
        }
    }

    /// Drives the line, and returns the time at which the timer will change it.
    fn settle(&self) -> Option<Instant> {
        let state = &self.state;
        let sci = state.control & SCI_EN != 0;
        let fixed = self.status(self.clock.ticks(self.time.now())) & state.enable & PM1_EVENTS;
        let general = state.gpe_status.iter().zip(&state.gpe_enable).any(|(it, on)| it & on != 0);
        self.line.set(sci && (fixed != 0 || general));
        let waits = sci && state.enable & TMROF != 0 && fixed & TMROF == 0;
        waits.then(|| self.clock.at(self.overflow_at)).flatten()
    }

    /// Sets a status bit of GPE0, which the guest clears. An event while the machine is parked is
    /// lost: the guest discovers its cause at power-on.
    fn raise(&mut self, event: u8) {
        let (at, bit) = (usize::from(event / 8), event % 8);
        if let Some(byte) = self.state.gpe_status.get_mut(at) {
            *byte |= 1 << bit;
            self.settle();
        }
    }

    fn press(&mut self) {
        if self.clock.since.is_some() {
            self.state.status |= PWRBTN;
            self.settle();
        } else {
            self.pressed = true;
        }
    }
}

/// The index of the byte at `at` in an aligned register of `width` bytes.
fn lane(at: u64, width: u64) -> usize {
    usize::try_from(at % width).expect("less than eight")
}

fn next_overflow(ticks: u64) -> u64 {
    (ticks / OVERFLOW + 1) * OVERFLOW
}

/// The registers, and the thread that raises timer overflows while they are enabled.
pub(crate) struct Block {
    registers: Arc<Mutex<Registers>>,
    alarm: Option<Alarm>,
    /// Whether the host refused a thread for the alarm, which was logged.
    refused: bool,
}

impl Block {
    /// `smm`: whether the machine has system-management mode.
    pub(crate) fn new(line: Arc<Line>, shared: &Shared, smm: bool) -> Self {
        let (events, buttons) = (shared.events.clone(), &shared.buttons);
        // The bit tells firmware that SMM is in use already, so that it does not try to use SMM
        // where there is none.
        let smi_enable = if smm { 0 } else { APMC_EN };
        let registers = Arc::new(Mutex::new(Registers {
            state: State::default(),
            time: shared.time.clone(),
            clock: Clock::default(),
            overflow_at: OVERFLOW,
            smi_locked: false,
            pressed: false,
            logged_sleep: false,
            smi_enable,
            line,
            events,
        }));
        let button = Arc::downgrade(&registers);
        buttons.connect(move || {
            let registers = button.upgrade();
            registers.map(|it| it.lock().expect("no device panicked").press()).is_some()
        });
        let events = Arc::downgrade(&registers);
        buttons.connect_events(move |event| {
            let registers = events.upgrade();
            registers.map(|it| it.lock().expect("no device panicked").raise(event)).is_some()
        });
        Self { registers, alarm: None, refused: false }
    }

    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) -> Access {
        if !matches!(data.len(), 1 | 2 | 4) {
            return Access::Ignored;
        }
        let registers = self.registers.lock().expect("no device panicked");
        let ticks = registers.clock.ticks(registers.time.now());
        for (at, to) in (offset..).zip(data) {
            let Some(byte) = registers.byte(at, ticks) else { return Access::Ignored };
            *to = byte;
        }
        Access::Done
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> Access {
        if !matches!(data.len(), 1 | 2 | 4) {
            return Access::Ignored;
        }
        let mut registers = self.registers.lock().expect("no device panicked");
        let bytes = || (offset..).zip(data);
        if bytes().any(|(at, _)| registers.byte(at, 0).is_none()) {
            return Access::Ignored;
        }
        bytes().for_each(|(at, byte)| registers.set_byte(at, *byte));
        let due = registers.settle();
        drop(registers);
        if let Err(error) = self.arm(due)
            && !self.refused
        {
            self.refused = true;
            tracing::warn!("PM timer overflows will be late: {error:#}");
        }
        Access::Done
    }

    /// Sets the alarm, and starts its thread when it is needed for the first time.
    fn arm(&mut self, due: Option<Instant>) -> anyhow::Result<()> {
        if self.alarm.is_none() && due.is_some() {
            let registers = self.registers.clone();
            let ring = move || registers.lock().expect("no device panicked").settle();
            self.alarm = Some(Alarm::spawn("pm-timer", ring)?);
        }
        if let Some(alarm) = &self.alarm {
            alarm.set(due);
        }
        Ok(())
    }

    /// Makes GBL_SMI_EN read-only until the next power-on.
    pub(crate) fn lock_smi(&self) {
        self.registers.lock().expect("no device panicked").smi_locked = true;
    }

    /// Records a write to APM_CNT. Returns whether it causes an SMI.
    pub(crate) fn apm_written(&self) -> bool {
        let mut registers = self.registers.lock().expect("no device panicked");
        let both = GBL_SMI_EN | APMC_EN;
        let enabled = registers.smi_enable() & both == both;
        if enabled {
            registers.state.smi_status |= APM_STS;
        }
        enabled
    }

    pub(crate) fn park(&mut self) -> State {
        self.alarm = None;
        let mut registers = self.registers.lock().expect("no device panicked");
        let ticks = registers.clock.ticks(registers.time.now());
        registers.clock = Clock { base: ticks, since: None };
        State {
            timer: u32::try_from(ticks & u64::from(TIMER_MASK)).expect("24 bits"),
            overflow: ticks >= registers.overflow_at,
            smi_enable: Some(registers.smi_enable()),
            ..registers.state.clone()
        }
    }

    pub(crate) fn run(&mut self, state: &State, smi_locked: bool) -> anyhow::Result<()> {
        let mut registers = self.registers.lock().expect("no device panicked");
        let base = u64::from(state.timer & TIMER_MASK);
        registers.clock = Clock { base, since: Some(registers.time.now()) };
        registers.overflow_at = if state.overflow { 0 } else { next_overflow(base) };
        registers.smi_locked = smi_locked;
        registers.state = State {
            status: state.status & PM1_EVENTS & !TMROF,
            enable: state.enable & PM1_EN_KEPT,
            control: state.control & PM1_CNT_KEPT,
            timer: 0,
            overflow: false,
            smi_status: state.smi_status & APM_STS,
            ..state.clone()
        };
        if std::mem::take(&mut registers.pressed) {
            registers.state.status |= PWRBTN;
        }
        let due = registers.settle();
        drop(registers);
        self.arm(due)
    }
}

#[cfg(test)]
mod test;
