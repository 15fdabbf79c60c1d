//! Limits log lines that others can cause: a token bucket of lines and bytes.
//!
//! Threats: an engine may keep logs forever, so a guest that writes to its serial port as fast as
//! it can would fill the host's disk. A burst, such as the messages of a booting kernel, passes as
//! a whole. After that the rate is small, and dropped lines are counted.

use std::time::{Duration, Instant};

/// How long an empty bucket stays closed. Without this, lines and gaps would alternate.
const CLOSED_TIME: Duration = Duration::from_secs(10);
/// Bytes added to each line besides its text: level, name, or the JSON around it.
const LINE_OVERHEAD: u64 = 64;
/// Tokens per line or byte. Tokens are thousandths, since time is counted in milliseconds.
const TOKENS_PER_UNIT: u64 = 1000;

#[derive(Clone, Copy, Debug)]
pub struct Amount {
    pub lines: u64,
    /// Including 64 for each line.
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Rate {
    pub burst: Amount,
    pub per_second: Amount,
}

/// The guest's serial port: at most 22 MiB a day after the burst.
pub const GUEST: Rate = Rate {
    burst: Amount { lines: 2000, bytes: 256 << 10 },
    per_second: Amount { lines: 2, bytes: 256 },
};
/// Guest lines that look like boot messages of the firmware. Each of them causes
/// log lines of ours, and may restart the machine.
pub const BOOT_MESSAGES: Rate = Rate {
    burst: Amount { lines: 64, bytes: 16 << 10 },
    per_second: Amount { lines: 1, bytes: 64 },
};
/// Reports of the guest about its installation. A whole one makes about 20. Each can cause 60 lines
/// of Setup's log.
pub const REPORTS: Rate = Rate {
    burst: Amount { lines: 64, bytes: 16 << 10 },
    per_second: Amount { lines: 1, bytes: 64 },
};
/// One of our own programs, or of one level of our log: at most 180 MiB a day
/// after the burst.
pub const PROGRAM: Rate = Rate {
    burst: Amount { lines: 20_000, bytes: 4 << 20 },
    per_second: Amount { lines: 20, bytes: 2 << 10 },
};

pub struct Bucket {
    rate: Rate,
    /// Tokens left, in thousandths.
    left: Amount,
    /// Time of the last refill.
    filled: Option<Instant>,
    /// No line passes before this time.
    closed: Option<Instant>,
    lost: u64,
}

impl Bucket {
    /// A full bucket.
    pub fn new(rate: Rate) -> Self {
        let burst = rate.burst;
        let left =
            Amount { lines: burst.lines * TOKENS_PER_UNIT, bytes: burst.bytes * TOKENS_PER_UNIT };
        Self { rate, left, filled: None, closed: None, lost: 0 }
    }

    /// Returns the number of lines dropped before this one, or `None` if this one is dropped, too.
    pub fn take(&mut self, length: usize, now: Instant) -> Option<u64> {
        self.fill(now);
        let cost = u64::try_from(length).unwrap_or(u64::MAX).saturating_add(LINE_OVERHEAD);
        let cost = cost.saturating_mul(TOKENS_PER_UNIT);
        let open = self.closed.is_none_or(|until| now >= until);
        if !open || self.left.lines < TOKENS_PER_UNIT || self.left.bytes < cost {
            if open {
                self.closed = Some(now + CLOSED_TIME);
            }
            self.lost += 1;
            return None;
        }
        self.left.lines -= TOKENS_PER_UNIT;
        self.left.bytes -= cost;
        Some(self.missing())
    }

    /// When dropped lines can be reported, if there are any.
    pub fn due(&self) -> Option<Instant> {
        self.closed.filter(|_| self.lost > 0)
    }

    /// Takes the number of lines dropped since the last report.
    pub fn missing(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    fn fill(&mut self, now: Instant) {
        let since = self.filled.replace(now).map_or(Duration::ZERO, |it| now.duration_since(it));
        let thousandths = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let filled = |left: u64, per_second: u64, burst: u64| {
            left.saturating_add(per_second.saturating_mul(thousandths)).min(burst * TOKENS_PER_UNIT)
        };
        let Rate { burst, per_second } = self.rate;
        self.left.lines = filled(self.left.lines, per_second.lines, burst.lines);
        self.left.bytes = filled(self.left.bytes, per_second.bytes, burst.bytes);
        if thousandths == 0 {
            // Keep fractions of a millisecond for the next refill.
            self.filled = self.filled.and(Some(now.checked_sub(since).unwrap_or(now)));
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_flood_is_limited_to_a_burst_and_a_rate() {
        let (mut bucket, start) = (Bucket::new(GUEST), Instant::now());
        let (mut passed, mut bytes, mut lost) = (0, 0, 0);
        // One day, with 100 lines per second.
        let all = 24 * 3600 * 100_u32;
        for number in 0..all {
            let now = start + Duration::from_millis(10) * number;
            if let Some(before) = bucket.take(100, now) {
                (passed, bytes, lost) = (passed + 1, bytes + 100 + LINE_OVERHEAD, lost + before);
            }
        }
        lost += bucket.missing();
        assert_eq!(passed + lost, u64::from(all));
        assert!(bytes <= (23 << 20), "{bytes} bytes");
        assert!((10_000..200_000).contains(&passed), "{passed} lines");
    }

    #[test]
    fn a_burst_passes_and_dropped_lines_are_reported_once() {
        let (mut bucket, start) = (Bucket::new(GUEST), Instant::now());
        assert!((0..1500).all(|_| bucket.take(60, start) == Some(0)));
        assert_eq!(bucket.due(), None);
        let left = (0..5000).filter(|_| bucket.take(60, start).is_none()).count();
        assert!(left >= 4500, "{left}");
        let due = bucket.due().unwrap();
        assert_eq!(bucket.take(60, due - Duration::from_millis(1)), None);
        let lost = u64::try_from(left).unwrap() + 1;
        assert_eq!(bucket.take(60, due), Some(lost));
        assert_eq!((bucket.take(60, due), bucket.due()), (Some(0), None));
    }

    #[test]
    fn a_line_longer_than_the_bucket_never_passes() {
        let (mut bucket, now) = (Bucket::new(GUEST), Instant::now());
        assert_eq!(bucket.take(usize::MAX, now), None);
    }
}
