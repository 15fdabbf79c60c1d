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
const QUIET: Duration = Duration::from_secs(60);
/// Number of lines per interval for a door of this host.
const OURS: u64 = 32;
/// Maximum doors with a line per interval.
const MOST: usize = 64;

/// Rate limiter for log lines of failed connections. See the module.
#[derive(Default)]
pub struct Complaints {
    heard: Mutex<HashMap<Door, Heard>>,
}

struct Heard {
    since: Instant,
    lines: u64,
    /// Lines that were suppressed since.
    more: u64,
}

impl Complaints {
    /// Logs a failure at this door at level info, or at level debug if the limit is reached.
    pub fn log(&self, door: Door, line: &str) {
        match self.hear(door, Instant::now()) {
            Some(0) => tracing::info!("{line}"),
            Some(more) => tracing::info!("{line} (and {more} times more before)"),
            None => tracing::debug!("{line}"),
        }
    }

    /// Whether a line may be logged now. Returns the number of lines suppressed since the last one.
    fn hear(&self, door: Door, now: Instant) -> Option<u64> {
        let mut all = self.heard.lock().expect("no door panicked");
        let old = |heard: &Heard| now.duration_since(heard.since) >= QUIET;
        let more = match all.get_mut(&door) {
            Some(heard) if !old(heard) => {
                let told = heard.lines < if door.is_here() { OURS } else { 1 };
                heard.lines += u64::from(told);
                heard.more += u64::from(!told);
                return told.then_some(0);
            }
            Some(heard) => heard.more,
            None => 0,
        };
        all.retain(|_, heard| !old(heard));
        if all.len() >= MOST {
            return None;
        }
        all.insert(door, Heard { since: now, lines: 1, more: 0 });
        Some(more)
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
        let hear = |door, seconds| complaints.hear(door, start + Duration::from_secs(seconds));
        assert_eq!(hear(one, 0), Some(0));
        assert!((0..1000).all(|second| hear(one, second / 20).is_none()));
        assert_eq!((hear(other, 59), hear(one, 59)), (Some(0), None));
        assert_eq!((hear(one, 60), hear(one, 61)), (Some(1001), None));
        let ours = (0..1000).filter_map(|_| hear(Door::Local, 61)).count();
        assert_eq!(ours as u64, OURS);
        // Many doors do not make many lines, nor do they use much memory.
        let many = (1..10_000).filter_map(|last| hear(Door::Network(last << 64), 62)).count();
        assert_eq!(many, MOST - 3);
        assert_eq!(complaints.heard.lock().unwrap().len(), MOST);
    }
}
