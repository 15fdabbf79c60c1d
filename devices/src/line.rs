//! Level-triggered interrupt wires. Several devices may share one: the pin is the OR of their
//! lines.

use std::fmt;
use std::sync::{Arc, Mutex};

use crate::hypervisor::Pin;

/// A pin, and the number of its lines that are high.
pub(crate) struct Wire {
    pin: Box<dyn Pin>,
    /// The lock also orders changes of the pin, so that its level always matches the count.
    high: Mutex<u32>,
}

impl Wire {
    pub(crate) fn new(pin: Box<dyn Pin>) -> Self {
        Self { pin, high: Mutex::new(0) }
    }

    fn count(&self, up: bool) {
        let mut high = self.high.lock().expect("no device panicked");
        *high = if up { *high + 1 } else { *high - 1 };
        if *high == u32::from(up) {
            self.pin.set(up);
        }
    }
}

/// One device's end of a wire.
pub struct Line {
    wire: Arc<Wire>,
    state: Mutex<Level>,
}

#[derive(Default, Clone, Copy)]
struct Level {
    wanted: bool,
    /// PCI's "interrupt disable" bit.
    gated: bool,
}

impl Level {
    fn out(self) -> bool {
        self.wanted && !self.gated
    }
}

impl Line {
    pub(crate) fn new(wire: Arc<Wire>) -> Self {
        Self { wire, state: Mutex::default() }
    }

    pub fn set(&self, high: bool) {
        self.change(|level| level.wanted = high);
    }

    /// Raises and lowers the line: one edge, for pins that count edges.
    pub fn pulse(&self) {
        self.set(true);
        self.set(false);
    }

    /// Whether the device has raised its line, even if the line is gated.
    pub fn is_set(&self) -> bool {
        self.state.lock().expect("no device panicked").wanted
    }

    /// Disconnects the device from the wire, or connects it again.
    pub(crate) fn gate(&self, gated: bool) {
        self.change(|level| level.gated = gated);
    }

    fn change(&self, how: impl FnOnce(&mut Level)) {
        let mut level = self.state.lock().expect("no device panicked");
        let before = level.out();
        how(&mut level);
        if level.out() != before {
            self.wire.count(level.out());
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.set(false);
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Line({})", if self.is_set() { "high" } else { "low" })
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::hypervisor::fake::{Levels, Pins};

    #[test]
    fn a_shared_wire_is_the_or_of_its_lines() {
        let pins = Pins::default();
        let wire = Arc::new(Wire::new(Box::new(Levels::new(&pins, 9))));
        let (one, two) = (Line::new(wire.clone()), Line::new(wire));
        one.set(true);
        one.set(true);
        two.set(true);
        one.set(false);
        assert!(pins.is_high(9));
        two.set(false);
        assert!(!pins.is_high(9));
        assert_eq!(pins.edges(9), 1, "raised once for both");
    }

    #[test]
    fn a_gated_line_is_low_until_ungated() {
        let pins = Pins::default();
        let line = Line::new(Arc::new(Wire::new(Box::new(Levels::new(&pins, 3)))));
        line.set(true);
        line.gate(true);
        assert!(!pins.is_high(3) && line.is_set());
        line.gate(false);
        assert!(pins.is_high(3));
        drop(line);
        assert!(!pins.is_high(3), "a dropped line is low");
    }
}
