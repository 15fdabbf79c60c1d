//! How a virtio device reaches its driver: interrupts, the ISR byte, and the news that it is
//! broken.

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Mutex, Once};

use crate::pci::{Interrupt, Msix};

/// No vector: MSI-X stays silent about it.
pub(super) const NO_VECTOR: u16 = 0xffff;

/// ISR status: a queue has something; the configuration changed.
const QUEUE: u8 = 1;
const CONFIGURATION: u8 = 2;

/// Shared by the transport and the threads that serve the queues.
#[derive(Debug)]
pub struct Signal {
    interrupt: Interrupt,
    /// For the log: which device this is.
    name: &'static str,
    /// The lock orders it with the wire.
    isr: Mutex<u8>,
    /// Of the configuration, and of each queue.
    vectors: Vec<AtomicU16>,
    broken: AtomicBool,
    /// For the log, whatever a guest resets.
    told: Once,
}

impl Signal {
    pub(super) fn new(interrupt: Interrupt, name: &'static str, queues: usize) -> Self {
        let vectors = (0..=queues).map(|_| AtomicU16::new(NO_VECTOR)).collect();
        let (isr, broken, told) = (Mutex::new(0), AtomicBool::new(false), Once::new());
        Self { interrupt, name, isr, vectors, broken, told }
    }

    /// The configuration changed.
    pub fn configuration(&self) {
        self.raise(CONFIGURATION, 0);
    }

    /// A queue has used buffers.
    pub(super) fn used(&self, queue: u16) {
        self.raise(QUEUE, usize::from(queue) + 1);
    }

    fn raise(&self, bit: u8, vector: usize) {
        let mut isr = self.isr.lock().expect("no device panicked");
        // With MSI-X nobody has to read this, but drivers that share a vector do.
        *isr |= bit;
        let vector = self.vectors.get(vector).map_or(NO_VECTOR, |it| it.load(Ordering::Acquire));
        if !self.interrupt.message(vector)
            && let Some(line) = &self.interrupt.line
        {
            line.set(true);
        }
    }

    /// Reads the ISR byte, which clears it and lowers the wire.
    pub(super) fn acknowledge(&self) -> u8 {
        let mut isr = self.isr.lock().expect("no device panicked");
        if let Some(line) = &self.interrupt.line {
            line.set(false);
        }
        std::mem::take(&mut *isr)
    }

    /// The ISR byte as it is.
    pub(super) fn isr(&self) -> u8 {
        *self.isr.lock().expect("no device panicked")
    }

    /// Puts back what was saved, or power-on.
    pub(super) fn restore(&self, isr: u8, broken: bool) {
        let mut now = self.isr.lock().expect("no device panicked");
        *now = isr & (QUEUE | CONFIGURATION);
        if let Some(line) = &self.interrupt.line {
            let replaced = self.interrupt.msix.as_deref().is_some_and(Msix::is_enabled);
            line.set(*now != 0 && !replaced);
        }
        self.broken.store(broken, Ordering::Release);
    }

    /// Which vector the configuration (0) or a queue (from 1 on) has.
    pub(super) fn vector(&self, number: usize) -> u16 {
        self.vectors.get(number).map_or(NO_VECTOR, |it| it.load(Ordering::Acquire))
    }

    /// Gives it one; a vector that there is not is none.
    pub(super) fn aim(&self, number: usize, vector: u16) {
        let vector = if usize::from(vector) < self.vectors.len() { vector } else { NO_VECTOR };
        if let Some(place) = self.vectors.get(number) {
            place.store(vector, Ordering::Release);
        }
    }

    /// Whether the driver has to reset the device.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Says that the device cannot go on, and in its life's first case why: a guest can break and
    /// reset it for ever.
    pub(super) fn fail(&self, queue: u16, why: &str) {
        if !self.broken.swap(true, Ordering::AcqRel) {
            let name = self.name;
            self.told.call_once(|| {
                tracing::warn!("{name}: queue {queue} is broken until the guest resets it: {why}");
            });
            tracing::debug!("{name}: queue {queue} is broken: {why}");
            self.configuration();
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use host::testutil::lines;

    #[test]
    fn a_guest_that_breaks_and_resets_a_device_for_ever_does_not_fill_the_log() {
        let signal = Signal::new(Interrupt { msix: None, line: None }, "test", 1);
        let told = lines(|| {
            for _ in 0..1000 {
                signal.fail(0, "a bad ring");
                assert!(signal.is_broken() && signal.isr() == CONFIGURATION);
                signal.restore(0, false);
            }
        });
        assert_eq!(told, 1);
    }
}
