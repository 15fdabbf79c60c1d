//! Interrupts as a host sees them: messages and the line, and the throttle (82574 datasheet, 7.4.4)
//! that keeps a minimum time between two messages of a vector.

use std::time::{Duration, Instant};

use crate::alarm::Alarm;
use crate::pci::Interrupt;

pub(super) const VECTORS: u16 = 5;

#[derive(Clone, Copy, Default)]
struct Vector {
    /// No message is sent before this.
    quiet_until: Option<Instant>,
    /// A message is due then.
    late: bool,
}

pub(super) struct Signals {
    interrupt: Interrupt,
    vectors: [Vector; VECTORS as usize],
    /// Rings when the first late message is due.
    alarm: Option<Alarm>,
}

impl Signals {
    pub(super) fn new(interrupt: Interrupt) -> Self {
        Self { interrupt, vectors: Default::default(), alarm: None }
    }

    /// Without an alarm, messages are not throttled. Returns the previous one.
    pub(super) fn set_alarm(&mut self, alarm: Option<Alarm>) -> Option<Alarm> {
        let previous = std::mem::replace(&mut self.alarm, alarm);
        self.set_due();
        previous
    }

    /// The vectors with a late message.
    pub(super) fn late(&self) -> Vec<u16> {
        (0..).zip(&self.vectors).filter(|(_, it)| it.late).map(|(number, _)| number).collect()
    }

    /// Makes a message of each of these vectors due.
    pub(super) fn restore(&mut self, late: &[u16]) {
        for (number, vector) in (0..).zip(&mut self.vectors) {
            let late = late.contains(&number);
            *vector = Vector { quiet_until: late.then(Instant::now), late };
        }
    }

    /// Forgets late messages.
    pub(super) fn reset(&mut self) {
        self.vectors = Default::default();
    }

    pub(super) fn has_msix(&self) -> bool {
        self.interrupt.msix.as_ref().is_some_and(|msix| msix.is_enabled())
    }

    /// The function disconnects the line while messages are enabled.
    pub(super) fn set_line(&self, high: bool) {
        if let Some(line) = &self.interrupt.line {
            line.set(high);
        }
    }

    /// Sends a message now, or when `interval` has passed since the previous one.
    pub(super) fn send(&mut self, number: u16, interval: Duration) {
        let now = Instant::now();
        let Some(vector) = self.vectors.get_mut(usize::from(number)) else { return };
        if self.alarm.is_some() && vector.quiet_until.is_some_and(|it| it > now) {
            vector.late = true;
            self.set_due();
            return;
        }
        vector.quiet_until = now.checked_add(interval).filter(|_| !interval.is_zero());
        self.interrupt.message(number);
    }

    fn next_due(&self) -> Option<Instant> {
        self.vectors.iter().filter(|it| it.late).filter_map(|it| it.quiet_until).min()
    }

    fn set_due(&self) {
        if let Some(alarm) = &self.alarm {
            alarm.set(self.next_due());
        }
    }

    /// Sends the messages that are due. `interval` returns that of a vector. Returns when the next
    /// one is due.
    pub(super) fn send_due(&mut self, interval: impl Fn(u16) -> Duration) -> Option<Instant> {
        let now = Instant::now();
        for number in 0..VECTORS {
            let vector = &mut self.vectors[usize::from(number)];
            if vector.late && vector.quiet_until.is_none_or(|it| it <= now) {
                *vector = Vector::default();
                self.send(number, interval(number));
            }
        }
        self.next_due()
    }
}
