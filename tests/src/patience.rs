//! How long a test waits. Time in which the whole host stood still (a virtual machine that is
//! saved, or gets no processor) does not count, because the guest stood still too.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::say;

/// Waiters look at least this often.
pub const INTERVAL: Duration = Duration::from_millis(200);
/// A longer time between two looks means that the host stood still.
const STANDSTILL: Duration = Duration::from_secs(3);

/// The time that is left for something to happen.
#[derive(Debug)]
pub struct Patience {
    left: Duration,
    looked: Instant,
}

impl Patience {
    pub fn new(left: Duration) -> Self {
        Self { left, looked: Instant::now() }
    }

    /// The time until the next look. It is zero at the end.
    pub fn until_next_look(&mut self) -> Duration {
        let now = Instant::now();
        self.spend(now.duration_since(self.looked));
        self.looked = now;
        self.left.min(INTERVAL)
    }

    /// Sleeps until the next look. False at the end.
    pub fn rest(&mut self) -> bool {
        let time = self.until_next_look();
        sleep(time);
        !time.is_zero()
    }

    fn spend(&mut self, time: Duration) {
        if time > STANDSTILL {
            say!("the host stood still for {:.1} s", time.as_secs_f64());
        }
        self.left = self.left.saturating_sub(if time > STANDSTILL { INTERVAL } else { time });
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_host_that_stands_still_takes_no_time_from_a_guest() {
        let mut patience = Patience::new(Duration::from_secs(60));
        patience.spend(Duration::from_secs(90));
        assert_eq!(patience.left, Duration::from_secs(60) - INTERVAL);
        patience.spend(Duration::from_secs(2));
        assert_eq!(patience.left, Duration::from_secs(58) - INTERVAL);
    }

    #[test]
    fn patience_ends() {
        let mut patience = Patience::new(Duration::from_millis(50));
        assert!(patience.rest());
        assert!(!patience.rest());
    }
}
