//! The time of the chip set's clocks. It stops while a machine is saved and restored, so that these
//! clocks stop and go on at the same moment as those of the processors.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// The host's clock, or a moment at which it stands still.
#[derive(Default)]
pub struct Time {
    stopped: AtomicBool,
    at: Mutex<Option<Instant>>,
    /// How often it went on.
    continued: AtomicU64,
}

impl Time {
    pub fn now(&self) -> Instant {
        if !self.stopped.load(Ordering::Acquire) {
            return Instant::now();
        }
        self.at.lock().expect("no device panicked").unwrap_or_else(Instant::now)
    }

    pub fn stop(&self, at: Instant) {
        *self.at.lock().expect("no device panicked") = Some(at);
        self.stopped.store(true, Ordering::Release);
    }

    pub fn go_on(&self) {
        self.continued.fetch_add(1, Ordering::Relaxed);
        self.stopped.store(false, Ordering::Release);
    }

    /// How often it went on until now.
    pub fn continued(&self) -> u64 {
        self.continued.load(Ordering::Relaxed)
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
        time.stop(before);
        sleep(Duration::from_millis(1));
        assert_eq!(time.now(), before);
        assert_eq!(time.continued(), 0);
        time.go_on();
        assert!(time.now() > before);
        assert_eq!(time.continued(), 1);
    }
}
