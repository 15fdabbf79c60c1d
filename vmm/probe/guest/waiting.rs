//! Waits for a device: by polling, or by halting until there is an interrupt.
//!
//! Interrupts are disabled in ring 3, so an interrupt that arrives after the last poll ends the
//! halt at once. The timer also ends it. If the device has an answer then, but sent no interrupt,
//! the interrupt counts as lost.
use core::hint::spin_loop;

use crate::cpu::Cpu;
use crate::entry::{device_interrupts, timer_interrupts};
use crate::gate::halt_once;
use crate::report::Finding;
use crate::start::Words;
use crate::timer;

/// The features that a device lacks if it cannot interrupt.
pub(crate) const NO_INTERRUPTS: &str = "MSI-X and a local APIC";

/// Parses `wait=interrupt` and `wait=poll`.
pub(crate) fn by_interrupt(value: &str) -> Option<bool> {
    ["poll", "interrupt"].iter().position(|it| *it == value).map(|at| at == 1)
}

/// Whether any of these words waits by interrupt. Interrupts are routed before a device runs.
pub(crate) fn waits_by_interrupt(words: Words, key: &str) -> bool {
    words.all(key).any(|word| word.split(',').any(|part| part == "wait=interrupt"))
}

/// Number of polls in about a second. The count stops while the machine is paused.
const POLLS_PER_SECOND: u64 = 1 << 24;
const TICKS_PER_SECOND: u64 = 10;
const TICK_US: u64 = 1_000_000 / TICKS_PER_SECOND;

/// A way to wait, and its statistics.
#[derive(Clone, Copy)]
pub(crate) struct Waiting {
    by_interrupt: bool,
    timeout_seconds: u64,
    before: u32,
    lost: u64,
}

impl Waiting {
    /// Starts the timer if needed. [`Waiting::finish`] stops it.
    pub(crate) fn new(by_interrupt: bool, timeout_seconds: u64, cpu: &Cpu) -> Self {
        if by_interrupt {
            timer::tick(cpu, TICK_US);
        }
        Self { by_interrupt, timeout_seconds, before: device_interrupts(), lost: 0 }
    }

    /// Stops the timer, and adds the number of interrupts to the finding.
    pub(crate) fn finish(self, finding: Finding) -> Finding {
        if !self.by_interrupt {
            return finding;
        }
        timer::stop();
        let interrupts = device_interrupts().wrapping_sub(self.before);
        let finding = finding.and(self.lost == 0).number("interrupts", interrupts.into());
        finding.number("lost_interrupts", self.lost)
    }

    /// The number of answers that came without an interrupt.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// Halts once, if it waits by interrupt. A processor that finds each answer at its first look
    /// never halts, so its interrupts are still pending.
    pub(crate) fn take_interrupts(&self) {
        if self.by_interrupt {
            sleep();
        }
    }

    /// Calls `look` until it returns something, but not longer than the timeout. `look(true)` first
    /// requests an interrupt from the device.
    pub(crate) fn wait<T>(&mut self, mut look: impl FnMut(bool) -> Option<T>) -> Option<T> {
        if self.by_interrupt { self.halt(look) } else { self.poll(|| look(false)) }
    }

    /// Polls, without interrupts, for something that takes a moment.
    pub(crate) fn poll<T>(&self, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        for _ in 0..self.timeout_seconds * POLLS_PER_SECOND {
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
        while found.is_none() && ticks < self.timeout_seconds * TICKS_PER_SECOND {
            let (interrupted, ticked) = sleep();
            ticks += u64::from(ticked);
            if interrupted {
                found = look(true);
            } else if ticked && ticks % TICKS_PER_SECOND == 0 {
                found = look(true);
                // The interrupt may have been on its way at this moment.
                self.lost += u64::from(found.is_some() && !sleep().0);
            }
        }
        found
    }
}

/// Halts. Returns whether a device, and whether the timer, ended the halt.
fn sleep() -> (bool, bool) {
    let before = (device_interrupts(), timer_interrupts());
    halt_once();
    (device_interrupts() != before.0, timer_interrupts() != before.1)
}
