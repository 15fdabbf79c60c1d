//! The buttons of the case, which the operator presses and a device reports to the guest. ACPI's
//! general-purpose events reach the guest through the same device.

use std::fmt;
use std::sync::Mutex;

/// Reports a press to the device. Returns false if the device is gone.
type Press = Box<dyn Fn() -> bool + Send>;

/// Sets a status bit of GPE0. Returns false if the device with the register is gone.
type Raise = Box<dyn Fn(u8) -> bool + Send>;

/// The buttons of one machine, and its general-purpose events.
#[derive(Default)]
pub struct Buttons {
    power: Mutex<Option<Press>>,
    event: Mutex<Option<Raise>>,
}

impl Buttons {
    /// Presses the power button. Returns false if no device of this machine has one.
    pub fn press(&self) -> bool {
        self.power.lock().expect("no device panicked").as_ref().is_some_and(|press| press())
    }

    /// Raises a general-purpose event (ACPI 6.5, 4.8.5.1): the guest runs its `_Exx` method.
    /// Returns false if no device of this machine has the register.
    pub fn raise(&self, event: u8) -> bool {
        self.event.lock().expect("no device panicked").as_ref().is_some_and(|raise| raise(event))
    }

    /// Sets the device that receives general-purpose events. The rules of `connect` apply.
    pub(crate) fn connect_events(&self, raise: impl Fn(u8) -> bool + Send + 'static) {
        *self.event.lock().expect("no device panicked") = Some(Box::new(raise));
    }

    /// Sets the device that receives the power button. `press` is called on any thread at any time,
    /// and must not keep the device alive.
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
    fn a_press_without_a_handler_returns_false() {
        let buttons = Buttons::default();
        assert!(!buttons.press());
        assert!(!buttons.raise(5));
        buttons.connect(|| true);
        buttons.connect_events(|event| event == 5);
        assert!(buttons.press());
        assert!(buttons.raise(5));
    }
}
