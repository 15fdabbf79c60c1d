//! Logs failed connections: about one line per door and minute.
//!
//! Threats: a peer that fails thousands of times per second could fill the log. Suppressed lines
//! are counted, and the next line reports their number. Peers on this host get more lines, because
//! many users may be behind one of these addresses, and people experiment there.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::security::Door;

/// Interval in which a door has one line.
const INTERVAL: Duration = Duration::from_secs(60);
/// Number of lines per interval for a door of this host.
const MAX_LOCAL_LINES: u64 = 32;
/// Maximum doors with a line per interval.
const MAX_DOORS: usize = 64;

/// Rate limiter for log lines of failed connections. See the module.
#[derive(Default)]
pub struct Complaints {
    records: Mutex<HashMap<Door, Record>>,
}

struct Record {
    since: Instant,
    lines: u64,
    /// Lines that were suppressed since.
    suppressed: u64,
}

impl Complaints {
    /// Logs a failure at this door at level info, or at level debug if the limit is reached.
    pub fn log(&self, door: Door, line: &str) {
        match self.count(door, Instant::now()) {
            Some(0) => tracing::info!("{line}"),
            Some(suppressed) => tracing::info!("{line} (and {suppressed} more times before)"),
            None => tracing::debug!("{line}"),
        }
    }

    /// Whether a line may be logged now. Returns the number of lines suppressed since the last one.
    fn count(&self, door: Door, now: Instant) -> Option<u64> {
        let mut all = self.records.lock().expect("no door panicked");
        let old = |record: &Record| now.duration_since(record.since) >= INTERVAL;
        let suppressed = match all.get_mut(&door) {
            Some(record) if !old(record) => {
                let logged = record.lines < if door.is_here() { MAX_LOCAL_LINES } else { 1 };
                record.lines += u64::from(logged);
                record.suppressed += u64::from(!logged);
                return logged.then_some(0);
            }
            Some(record) => record.suppressed,
            None => 0,
        };
        all.retain(|_, record| !old(record));
        if all.len() >= MAX_DOORS {
            return None;
        }
        all.insert(door, Record { since: now, lines: 1, suppressed: 0 });
        Some(suppressed)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_door_has_a_line_a_minute_that_counts_the_others() {
        let complaints = Complaints::default();
        let door = |text: &str| Door::of(text.parse().unwrap());
        let (one, other) = (door("192.0.2.1"), door("192.0.2.2"));
        let start = Instant::now();
        let count = |door, seconds| complaints.count(door, start + Duration::from_secs(seconds));
        assert_eq!(count(one, 0), Some(0));
        assert!((0..1000).all(|second| count(one, second / 20).is_none()));
        assert_eq!((count(other, 59), count(one, 59)), (Some(0), None));
        assert_eq!((count(one, 60), count(one, 61)), (Some(1001), None));
        let ours = (0..1000).filter_map(|_| count(Door::Local, 61)).count();
        assert_eq!(ours as u64, MAX_LOCAL_LINES);
        // Many doors do not make many lines, nor do they use much memory.
        let many = (1..10_000).filter_map(|last| count(Door::Network(last << 64), 62)).count();
        assert_eq!(many, MAX_DOORS - 3);
        assert_eq!(complaints.records.lock().unwrap().len(), MAX_DOORS);
    }
}
