//! The progress of a download: its rate, the time left, and when to report which.

use std::time::{Duration, Instant};

use crate::story::{Story, Transfer};

/// Interval of reports to viewers, and of lines in the log.
const SHOWN: Duration = Duration::from_millis(500);
const LOGGED: Duration = Duration::from_secs(10);
/// The rate is that of the last seconds.
const WINDOW: Duration = Duration::from_secs(10);

pub struct Meter<'a> {
    story: &'a Story,
    doing: String,
    /// The bytes at moments of the last seconds, the oldest first.
    moments: Vec<(Instant, u64)>,
    logged: Option<(Instant, u64)>,
}

impl<'a> Meter<'a> {
    /// Begins the step of downloading `name`.
    pub fn begin(story: &'a Story, name: &str) -> Self {
        Self::of(story, format!("Downloading {name}…"))
    }

    /// Begins a step.
    pub(super) fn of(story: &'a Story, doing: String) -> Self {
        story.step(&doing);
        Self { story, doing, moments: Vec::new(), logged: None }
    }

    pub(super) fn story(&self) -> &'a Story {
        self.story
    }

    /// Reports, unless that was done a moment ago.
    pub fn update(&mut self, bytes: u64, of: u64) {
        self.update_at(Instant::now(), bytes, of);
    }

    fn update_at(&mut self, now: Instant, bytes: u64, of: u64) {
        let last = self.moments.last().map(|(at, _)| *at);
        let done = bytes == of;
        if !done && last.is_some_and(|last| now.duration_since(last) < SHOWN) {
            return;
        }
        self.moments.retain(|(at, _)| now.duration_since(*at) < WINDOW);
        self.moments.push((now, bytes));
        let transfer = Transfer { bytes, of, bytes_per_second: self.rate() };
        self.story.transfer(transfer);
        let percent = transfer.percent();
        let due = self.logged.is_none_or(|(at, before)| {
            percent != before && (now.duration_since(at) >= LOGGED || done)
        });
        if due && (percent > 0 || bytes > 0) {
            self.logged = Some((now, percent));
            self.story.info(&format!("{} {}", self.doing, transfer.line()));
        }
    }

    fn rate(&self) -> u64 {
        let (Some((from, first)), Some((to, last))) = (self.moments.first(), self.moments.last())
        else {
            return 0;
        };
        let millis = to.duration_since(*from).as_millis().max(1);
        // A download that starts again has fewer bytes than before.
        let bytes = u128::from(last.saturating_sub(*first));
        u64::try_from(bytes * 1000 / millis).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_line_has_percent_rate_and_time_left() {
        let of = |bytes, rate| Transfer { bytes, of: 8_000_000_000, bytes_per_second: rate }.line();
        assert_eq!(of(1_000_000_000, 45_600_000), "12% at 45.6MB/s, 3 min left");
        assert_eq!(of(7_999_000_000, 100_000), "99% at 0.1MB/s, 10 s left");
        assert_eq!(of(0, 0), "0% at 0.0MB/s");
        assert_eq!(of(8_000_000_000, 5), "100% at 0.0MB/s");
        assert_eq!(Transfer { bytes: u64::MAX, of: 0, bytes_per_second: 1 }.percent(), 100);
    }

    #[test]
    fn viewers_see_each_half_second_and_the_log_a_line_each_ten() {
        let story = Story::new();
        let mut meter = Meter::begin(&story, "Windows 11");
        let start = Instant::now();
        for tenth in 0_u64..=600 {
            meter.update_at(
                start + Duration::from_millis(100 * tenth),
                tenth * 1_000_000,
                600_000_000,
            );
        }
        let (lines, _) = story.lines(0);
        let lines: Vec<_> = lines.into_iter().map(|line| line.text).collect();
        assert!((7..=9).contains(&lines.len()), "{lines:?}");
        assert_eq!(lines.last().unwrap(), "Downloading Windows 11… 100% at 10.0MB/s");
        let scene = story.scene().borrow().clone();
        assert_eq!(scene.transfer.unwrap().bytes_per_second, 10_000_000);
        assert_eq!((scene.thousandths, scene.seconds_left), (Some(1000), None));
    }

    #[test]
    fn a_download_that_starts_again_has_no_rate_below_zero() {
        let story = Story::new();
        let mut meter = Meter::begin(&story, "x");
        let start = Instant::now();
        meter.update_at(start, 500, 1000);
        meter.update_at(start + Duration::from_secs(1), 10, 1000);
        assert_eq!(story.scene().borrow().transfer.unwrap().bytes_per_second, 0);
    }
}
