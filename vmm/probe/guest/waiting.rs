//! How a check waits for a device: it looks all the time, or halts until there is an interrupt.
//!
//! Ring 3 has interrupts off, so that one which comes after the last look ends the halt at once.
//! The timer ends it, too: what was there then without an interrupt is an interrupt that was lost.
use core::hint::spin_loop;

use crate::cpu::Cpu;
use crate::entry::{device_interrupts, halt_once, timer_interrupts};
use crate::report::Finding;
use crate::start::Words;
use crate::timer;

/// What a device lacks that cannot interrupt.
pub(crate) const NO_INTERRUPTS: &str = "MSI-X and a local APIC";

/// `wait=interrupt` or `wait=poll`.
pub(crate) fn by_interrupt(value: &str) -> Option<bool> {
    ["poll", "interrupt"].iter().position(|way| *way == value).map(|way| way == 1)
}

/// Whether any of these words waits so: interrupts are routed before a device runs.
pub(crate) fn waits_by_interrupt(words: Words, key: &str) -> bool {
    words.all(key).any(|word| word.split(',').any(|part| part == "wait=interrupt"))
}

/// So many looks are about a second. They do not count while the machine is paused.
const SECOND: u64 = 1 << 24;
const TICKS: u64 = 10;
const TICK_US: u64 = 1_000_000 / TICKS;

/// A way to wait, and what came of it.
#[derive(Clone, Copy)]
pub(crate) struct Waiting {
    by_interrupt: bool,
    patience_seconds: u64,
    before: u32,
    lost: u64,
}

impl Waiting {
    /// Starts the timer, if need be; [`Waiting::tell`] stops it.
    pub(crate) fn new(by_interrupt: bool, patience_seconds: u64, cpu: &Cpu) -> Self {
        if by_interrupt {
            timer::tick(cpu, TICK_US);
        }
        Self { by_interrupt, patience_seconds, before: device_interrupts(), lost: 0 }
    }

    /// Ends it, and adds how many interrupts there were.
    pub(crate) fn tell(self, finding: Finding) -> Finding {
        if !self.by_interrupt {
            return finding;
        }
        timer::stop();
        let interrupts = device_interrupts().wrapping_sub(self.before);
        let finding = finding.and(self.lost == 0).number("interrupts", interrupts.into());
        finding.number("lost_interrupts", self.lost)
    }

    /// Waits until a look finds something, but not for ever. A look with `true` first asks the
    /// device for an interrupt.
    pub(crate) fn wait<T>(&mut self, mut look: impl FnMut(bool) -> Option<T>) -> Option<T> {
        if self.by_interrupt { self.halt(look) } else { self.poll(|| look(false)) }
    }

    /// Waits without any interrupt for what takes a moment.
    pub(crate) fn poll<T>(&self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        for _ in 0..self.patience_seconds * SECOND {
            if let Some(found) = look() {
                return Some(found);
            }
            spin_loop();
        }
        None
    }

    fn halt<T>(&mut self, mut look: impl FnMut(bool) -> Option<T>) -> Option<T> {
        let mut found = look(true);
        let mut ticks = 0;
        while found.is_none() && ticks < self.patience_seconds * TICKS {
            let (rung, ticked) = sleep();
            ticks += u64::from(ticked);
            if rung {
                found = look(true);
            } else if ticked && ticks % TICKS == 0 {
                found = look(true);
                // Perhaps it was on its way just now.
                self.lost += u64::from(found.is_some() && !sleep().0);
            }
        }
        found
    }
}

/// Halts; tells whether a device and whether the timer ended that.
fn sleep() -> (bool, bool) {
    let before = (device_interrupts(), timer_interrupts());
    halt_once();
    (device_interrupts() != before.0, timer_interrupts() != before.1)
}
