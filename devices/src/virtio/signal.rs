//! Interrupts from a virtio device to its driver, the ISR byte, and the broken state.

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Mutex, Once};

use crate::pci::{Interrupt, Msix};

/// VIRTIO_MSI_NO_VECTOR: no MSI-X message is sent.
pub(super) const NO_VECTOR: u16 = 0xffff;

/// Bits of the ISR status: queue interrupt, configuration change.
const QUEUE: u8 = 1;
const CONFIGURATION: u8 = 2;

/// The interrupts of one device, shared by the transport and the threads that serve the queues.
#[derive(Debug)]
pub struct Signal {
    interrupt: Interrupt,
    name: &'static str,
    /// Changes of the interrupt line happen under this lock as well.
    isr: Mutex<u8>,
    /// Vectors of the configuration (index 0) and of each queue.
    vectors: Vec<AtomicU16>,
    broken: AtomicBool,
    /// Limits the warning to one for each device, however often the guest resets it.
    logged: Once,
}

impl Signal {
    pub(super) fn new(interrupt: Interrupt, name: &'static str, queues: usize) -> Self {
        let vectors = (0..=queues).map(|_| AtomicU16::new(NO_VECTOR)).collect();
        let (isr, broken, logged) = (Mutex::new(0), AtomicBool::new(false), Once::new());
        Self { interrupt, name, isr, vectors, broken, logged }
    }

    /// Interrupts the driver: the configuration changed.
    pub fn configuration(&self) {
        self.raise(CONFIGURATION, 0);
    }

    /// Interrupts the driver: a queue has used buffers.
    pub(super) fn used(&self, queue: u16) {
        self.raise(QUEUE, usize::from(queue) + 1);
    }

    fn raise(&self, bit: u8, vector: usize) {
        let mut isr = self.isr.lock().expect("no device panicked");
        // With MSI-X this byte is optional, but drivers that share one vector read it.
        *isr |= bit;
        let vector = self.vectors.get(vector).map_or(NO_VECTOR, |it| it.load(Ordering::Acquire));
        if !self.interrupt.message(vector)
            && let Some(line) = &self.interrupt.line
        {
            line.set(true);
        }
    }

    /// Reads the ISR byte, which clears it and lowers the interrupt line.
    pub(super) fn acknowledge(&self) -> u8 {
        let mut isr = self.isr.lock().expect("no device panicked");
        if let Some(line) = &self.interrupt.line {
            line.set(false);
        }
        std::mem::take(&mut *isr)
    }

    /// Reads the ISR byte without clearing it.
    pub(super) fn isr(&self) -> u8 {
        *self.isr.lock().expect("no device panicked")
    }

    pub(super) fn restore(&self, isr: u8, broken: bool) {
        let mut now = self.isr.lock().expect("no device panicked");
        *now = isr & (QUEUE | CONFIGURATION);
        if let Some(line) = &self.interrupt.line {
            let replaced = self.interrupt.msix.as_deref().is_some_and(Msix::is_enabled);
            line.set(*now != 0 && !replaced);
        }
        self.broken.store(broken, Ordering::Release);
    }

    /// The vector of the configuration (0) or of a queue (from 1 on).
    pub(super) fn vector(&self, number: usize) -> u16 {
        self.vectors.get(number).map_or(NO_VECTOR, |it| it.load(Ordering::Acquire))
    }

    /// Sets that vector. A vector outside of the table becomes [`NO_VECTOR`].
    pub(super) fn set_vector(&self, number: usize, vector: u16) {
        let vector = if usize::from(vector) < self.vectors.len() { vector } else { NO_VECTOR };
        if let Some(slot) = self.vectors.get(number) {
            slot.store(vector, Ordering::Release);
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Breaks the device until the driver resets it. The reason is logged as a warning only the
    /// first time, because a guest can break and reset a device again and again.
    pub(super) fn fail(&self, queue: u16, why: &str) {
        if !self.broken.swap(true, Ordering::AcqRel) {
            let name = self.name;
            self.logged.call_once(|| {
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
    use host::testutil::count_log_lines;

    #[test]
    fn a_guest_that_keeps_breaking_a_device_does_not_fill_the_log() {
        let signal = Signal::new(Interrupt::default(), "test", 1);
        let logged = count_log_lines(|| {
            for _ in 0..1000 {
                signal.fail(0, "a bad ring");
                assert!(signal.is_broken() && signal.isr() == CONFIGURATION);
                signal.restore(0, false);
            }
        });
        assert_eq!(logged, 1);
    }
}
