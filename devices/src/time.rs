//! The time of the chip set's clocks. It stops while a machine is saved and restored, so that these
//! clocks stop and go on at the same moment as those of the processors.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// The host's clock, or a moment at which it stands still.
#[derive(Default)]
pub struct Time {
    stopped: AtomicBool,
    at: Mutex<Option<Instant>>,
}

impl Time {
    pub fn now(&self) -> Instant {
        if !self.stopped.load(Ordering::Acquire) {
            return Instant::now();
        }
        self.at.lock().expect("no device panicked").unwrap_or_else(Instant::now)
    }

    /// Stops at this moment, or goes on if it is none.
    pub fn stop(&self, at: Option<Instant>) {
        *self.at.lock().expect("no device panicked") = at;
        self.stopped.store(at.is_some(), Ordering::Release);
    }
}

#[cfg(test)]
mod test {
    use std::thread::sleep;
    use std::time::Duration;

    use super::*;

    #[test]
    fn it_stands_still_and_goes_on() {
        let time = Time::default();
        let before = Instant::now();
        assert!(time.now() >= before);
        time.stop(Some(before));
        sleep(Duration::from_millis(1));
        assert_eq!(time.now(), before);
        time.stop(None);
        assert!(time.now() > before);
    }
}
