//! Measures the speed of a client's connection. It limits the data in flight, and lowers the
//! quality of pictures on slow connections.
//!
//! Clients that support fences confirm each update. For others, the next request is the
//! confirmation. While confirmations arrive about as fast as they ever did, the limit grows. When
//! they are late, more data would only wait in the queues of the network, and the limit shrinks.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Limits of the bytes in flight.
const WINDOW: std::ops::RangeInclusive<usize> = 64 << 10..=4 << 20;
/// Margin in comparisons with the fastest confirmation.
const SLACK: Duration = Duration::from_millis(30);
/// If a confirmation takes this much longer than the fastest, the quality is lowered.
const SLOW: Duration = Duration::from_millis(150);
/// If a confirmation is at most this much slower than the fastest, the quality is raised again.
const QUICK: Duration = Duration::from_millis(50);
/// Updates of at most this many bytes never lower the quality.
const SMALL: usize = 16 << 10;
/// Maximum steps by which the quality is lowered.
const MAX_STEPS: u8 = 8;
const MAX_IN_FLIGHT: usize = 64;

pub(super) struct Rate {
    sent: VecDeque<Sent>,
    next: u64,
    window: usize,
    fastest: Option<Duration>,
    pub(super) slow: u8,
}

struct Sent {
    number: u64,
    bytes: usize,
    at: Instant,
}

impl Default for Rate {
    fn default() -> Self {
        Self { sent: VecDeque::new(), next: 1, window: 256 << 10, fastest: None, slow: 0 }
    }
}

impl Rate {
    pub(super) fn is_open(&self) -> bool {
        let bytes: usize = self.sent.iter().map(|it| it.bytes).sum();
        self.sent.len() < MAX_IN_FLIGHT && bytes < self.window
    }

    /// Records the start of an update. Returns its number, which its fence carries.
    pub(super) fn sending(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        // A client that requests updates without confirming any must not make the list grow.
        if self.sent.len() >= MAX_IN_FLIGHT {
            self.sent.pop_front();
        }
        self.sent.push_back(Sent { number, bytes: 0, at: Instant::now() });
        number
    }

    pub(super) fn sent(&mut self, number: u64, bytes: usize) {
        if let Some(sent) = self.sent.iter_mut().find(|it| it.number == number) {
            sent.bytes = bytes;
        }
    }

    /// Records that an update has arrived, and all updates before it.
    pub(super) fn arrived(&mut self, number: u64, now: Instant) {
        while let Some(sent) = self.sent.pop_front_if(|it| it.number <= number) {
            if sent.number == number {
                self.learn(&sent, now);
            }
        }
    }

    /// Records that all updates have arrived, because the client requests another.
    pub(super) fn all_arrived(&mut self, now: Instant) {
        if let Some(last) = self.sent.back().map(|it| it.number) {
            self.arrived(last, now);
        }
    }

    fn learn(&mut self, sent: &Sent, now: Instant) {
        let took = now.saturating_duration_since(sent.at);
        let fastest = self.fastest.map_or(took, |it| it.min(took));
        self.fastest = Some(fastest);
        let (least, most) = WINDOW.into_inner();
        if took > 4 * fastest + 4 * SLACK {
            self.window = (self.window / 2).max(least);
        } else if took < 2 * fastest + SLACK {
            self.window = (self.window + sent.bytes).min(most);
        }
        if took > fastest + SLOW && sent.bytes > SMALL {
            self.slow = (self.slow + 1).min(MAX_STEPS);
        } else if took < fastest + QUICK {
            self.slow = self.slow.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn round(rate: &mut Rate, bytes: usize, took: u64) {
        let number = rate.sending();
        rate.sent(number, bytes);
        let at = rate.sent.back().unwrap().at;
        rate.arrived(number, at + Duration::from_millis(took));
    }

    #[test]
    fn a_fast_line_gets_a_larger_window() {
        let mut rate = Rate::default();
        (0..100).for_each(|_| round(&mut rate, 100 << 10, 80));
        assert_eq!((rate.window, rate.slow), (*WINDOW.end(), 0), "long delay, high bandwidth");
        let number = rate.sending();
        rate.sent(number, 4 << 20);
        assert!(!rate.is_open());
        rate.all_arrived(Instant::now());
        assert!(rate.is_open() && rate.sent.is_empty());
    }

    #[test]
    fn a_slow_line_gets_less_data_in_lower_quality_and_recovers() {
        let mut rate = Rate::default();
        round(&mut rate, 1 << 10, 10);
        (0..20).for_each(|_| round(&mut rate, 100 << 10, 900));
        assert_eq!((rate.window, rate.slow), (*WINDOW.start(), MAX_STEPS));
        (0..20).for_each(|_| round(&mut rate, 1 << 10, 12));
        assert_eq!(rate.slow, 0);
    }

    #[test]
    fn unexpected_confirmations_are_ignored() {
        let mut rate = Rate::default();
        rate.arrived(u64::MAX, Instant::now());
        rate.all_arrived(Instant::now());
        for _ in 0..MAX_IN_FLIGHT {
            assert!(rate.is_open());
            rate.sending();
        }
        assert!(!rate.is_open(), "too many updates are unconfirmed");
        for _ in 0..10 * MAX_IN_FLIGHT {
            rate.sending();
        }
        assert_eq!(rate.sent.len(), MAX_IN_FLIGHT, "the list does not grow");
    }
}
