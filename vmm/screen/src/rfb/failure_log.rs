//! Logs failed connections: about one line per network and minute.
//!
//! Threats: a peer that fails thousands of times per second could fill the log. Suppressed lines
//! are counted, and the next line reports their number. Peers on this host get more lines, because
//! many users may share one of these addresses.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::security::PeerNetwork;

/// Interval in which a network has one line.
const INTERVAL: Duration = Duration::from_secs(60);
/// Number of lines per interval for a network of this host.
const MAX_LOCAL_LINES: u64 = 32;
/// Maximum networks with a line per interval.
const MAX_NETWORKS: usize = 64;

#[derive(Default)]
pub struct FailureLog {
    records: Mutex<HashMap<PeerNetwork, Record>>,
}

struct Record {
    since: Instant,
    lines: u64,
    /// Lines that were suppressed since.
    suppressed: u64,
}

impl FailureLog {
    /// Logs a failure at this network at level info, or at level debug if the limit is reached.
    pub fn log(&self, network: PeerNetwork, line: &str) {
        match self.count(network, Instant::now()) {
            Some(0) => tracing::info!("{line}"),
            Some(suppressed) => tracing::info!("{line} (and {suppressed} more times before)"),
            None => tracing::debug!("{line}"),
        }
    }

    /// Whether a line may be logged now. Returns the number of lines suppressed since the last one.
    fn count(&self, network: PeerNetwork, now: Instant) -> Option<u64> {
        let mut all = self.records.lock().expect("no network panicked");
        let old = |record: &Record| now.duration_since(record.since) >= INTERVAL;
        let suppressed = match all.get_mut(&network) {
            Some(record) if !old(record) => {
                let logged = record.lines < if network.is_local() { MAX_LOCAL_LINES } else { 1 };
                record.lines += u64::from(logged);
                record.suppressed += u64::from(!logged);
                return logged.then_some(0);
            }
            Some(record) => record.suppressed,
            None => 0,
        };
        all.retain(|_, record| !old(record));
        if all.len() >= MAX_NETWORKS {
            return None;
        }
        all.insert(network, Record { since: now, lines: 1, suppressed: 0 });
        Some(suppressed)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn failures_are_logged_once_a_minute_with_a_count() {
        let log = FailureLog::default();
        let network = |text: &str| PeerNetwork::of(text.parse().unwrap());
        let (one, other) = (network("192.0.2.1"), network("192.0.2.2"));
        let start = Instant::now();
        let count = |network, seconds| log.count(network, start + Duration::from_secs(seconds));
        assert_eq!(count(one, 0), Some(0));
        assert!((0..1000).all(|second| count(one, second / 20).is_none()));
        assert_eq!((count(other, 59), count(one, 59)), (Some(0), None));
        assert_eq!((count(one, 60), count(one, 61)), (Some(1001), None));
        let ours = (0..1000).filter_map(|_| count(PeerNetwork::Local, 61)).count();
        assert_eq!(ours as u64, MAX_LOCAL_LINES);
        // Many networks do not make many lines, nor do they use much memory.
        let many =
            (1..10_000).filter_map(|last| count(PeerNetwork::Remote(last << 64), 62)).count();
        assert_eq!(many, MAX_NETWORKS - 3);
        assert_eq!(log.records.lock().unwrap().len(), MAX_NETWORKS);
    }
}
