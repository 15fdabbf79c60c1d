//! How fast a client is: how much may be on its way to it, and how good pictures can be.
//!
//! A client that answers fences tells when an update has arrived; any other tells it by asking for
//! the next. As long as the answers come about as soon as they ever did, more may be on its way;
//! when they come late, what we send only waits in somebody's queue.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// So much is on its way at least, and so much at most.
const WINDOW: std::ops::RangeInclusive<usize> = 64 << 10..=4 << 20;
/// An answer that comes this much later than the fastest is late.
const SLACK: Duration = Duration::from_millis(30);
/// A picture that takes longer than this makes pictures worse.
const SLOW: Duration = Duration::from_millis(150);
/// And one that takes less makes them better again.
const QUICK: Duration = Duration::from_millis(50);
/// Updates below this say nothing about a line.
const SMALL: usize = 16 << 10;
/// So many steps worse at most.
const STEPS: u8 = 8;
/// So many answers are waited for at most.
const MOST: usize = 64;

/// What is known of one client's line.
pub(super) struct Rate {
    sent: VecDeque<Sent>,
    next: u64,
    window: usize,
    fastest: Option<Duration>,
    slow: u8,
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
    /// Whether another update may be sent.
    pub(super) fn is_open(&self) -> bool {
        let bytes: usize = self.sent.iter().map(|it| it.bytes).sum();
        self.sent.len() < MOST && bytes < self.window
    }

    /// How many steps worse than asked for pictures should be.
    pub(super) fn slow(&self) -> u8 {
        self.slow
    }

    /// An update of so many bytes begins; the number is its fence's.
    pub(super) fn sending(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        // Who asks again and again, and never says that anything has arrived, is owed no memory.
        if self.sent.len() >= MOST {
            self.sent.pop_front();
        }
        self.sent.push_back(Sent { number, bytes: 0, at: Instant::now() });
        number
    }

    /// It had so many bytes.
    pub(super) fn sent(&mut self, number: u64, bytes: usize) {
        if let Some(sent) = self.sent.iter_mut().find(|it| it.number == number) {
            sent.bytes = bytes;
        }
    }

    /// An update, and all before it, has arrived.
    pub(super) fn arrived(&mut self, number: u64, now: Instant) {
        while let Some(sent) = self.sent.pop_front_if(|it| it.number <= number) {
            if sent.number == number {
                self.learn(&sent, now);
            }
        }
    }

    /// Everything that was sent has arrived: the client asks for more.
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
            self.slow = (self.slow + 1).min(STEPS);
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
    fn a_line_that_keeps_up_may_have_more_on_its_way() {
        let mut rate = Rate::default();
        (0..100).for_each(|_| round(&mut rate, 100 << 10, 80));
        assert_eq!((rate.window, rate.slow), (*WINDOW.end(), 0), "far away, and fast");
        let number = rate.sending();
        rate.sent(number, 4 << 20);
        assert!(!rate.is_open());
        rate.all_arrived(Instant::now());
        assert!(rate.is_open() && rate.sent.is_empty());
    }

    #[test]
    fn a_line_that_falls_behind_gets_less_and_worse_and_recovers() {
        let mut rate = Rate::default();
        round(&mut rate, 1 << 10, 10);
        (0..20).for_each(|_| round(&mut rate, 100 << 10, 900));
        assert_eq!((rate.window, rate.slow), (*WINDOW.start(), STEPS));
        (0..20).for_each(|_| round(&mut rate, 1 << 10, 12));
        assert_eq!(rate.slow, 0);
    }

    #[test]
    fn answers_that_nobody_waits_for_are_nothing() {
        let mut rate = Rate::default();
        rate.arrived(u64::MAX, Instant::now());
        rate.all_arrived(Instant::now());
        for _ in 0..MOST {
            assert!(rate.is_open());
            rate.sending();
        }
        assert!(!rate.is_open(), "answers that never come");
        for _ in 0..10 * MOST {
            rate.sending();
        }
        assert_eq!(rate.sent.len(), MOST, "however often it asks all the same");
    }
}
