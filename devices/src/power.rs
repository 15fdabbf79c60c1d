//! The buttons on the case: the operator presses, the device that has the button's wire takes it.

use std::fmt;
use std::sync::Mutex;

/// What a press does; false when the device that asked for it is gone.
type Press = Box<dyn Fn() -> bool + Send>;

/// The buttons of one machine.
#[derive(Default)]
pub struct Buttons {
    power: Mutex<Option<Press>>,
}

impl Buttons {
    /// Presses the power button. False when no device of this machine has one.
    pub fn press(&self) -> bool {
        self.power.lock().expect("no device panicked").as_ref().is_some_and(|press| press())
    }

    /// Leads the power button to a device. It may be pressed on any thread, at any time, and must
    /// not keep the device alive.
    pub(crate) fn connect(&self, press: impl Fn() -> bool + Send + 'static) {
        *self.power.lock().expect("no device panicked") = Some(Box::new(press));
    }
}

impl fmt::Debug for Buttons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Buttons")
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_button_without_a_wire_does_nothing_and_says_so() {
        let buttons = Buttons::default();
        assert!(!buttons.press());
        buttons.connect(|| true);
        assert!(buttons.press());
    }
}
