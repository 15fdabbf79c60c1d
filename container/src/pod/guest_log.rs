//! Logs the guest's lines at its serial port, with a limit.

use std::sync::Arc;
use std::time::Instant;

use tokio::time::sleep_until;
use tracing::Level;

use crate::log::bucket::{Bucket, GUEST};
use crate::story::Story;
use crate::story::log_layer::RECORDED;

/// Start of the probe's report (`vmm/probe/guest/README.md`).
const REPORT: &str = "{\"probe\":1,\"ok\":";

/// Lines of the guest's serial port to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoggedLines {
    Lines,
    /// Failed checks of the probe and a summary. The rest is on its screen, and in the log with
    /// `DEBUG=Y`.
    Probe,
    Nothing,
}

pub struct GuestLog {
    story: Arc<Story>,
    logged: LoggedLines,
    bucket: Bucket,
    /// Number of the probe's checks that passed.
    passed: u32,
}

impl GuestLog {
    pub fn new(story: Arc<Story>, logged: LoggedLines) -> Self {
        Self { story, logged, bucket: Bucket::new(GUEST), passed: 0 }
    }

    pub fn handle(&mut self, line: &str) {
        match self.logged {
            LoggedLines::Nothing => {}
            LoggedLines::Lines => self.log(level(line), &format!("guest: {line}")),
            LoggedLines::Probe => match self.summary(line) {
                Some((level, text)) => self.log(level, &text),
                None => self.log(Level::DEBUG, &format!("guest: {line}")),
            },
        }
    }

    /// The level and text of a probe's line, if it is worth logging.
    fn summary(&mut self, line: &str) -> Option<(Level, String)> {
        if line.starts_with("pass ") {
            self.passed += 1;
        }
        if line.starts_with("fail ") {
            return Some((Level::WARN, format!("guest: {line}")));
        }
        let fine = line.strip_prefix(REPORT)?.starts_with("true");
        let passed = self.passed;
        Some(match fine {
            true => (Level::INFO, format!("the probe found nothing wrong: {passed} checks passed")),
            false => (Level::WARN, format!("the probe found errors: {passed} checks passed")),
        })
    }

    fn log(&mut self, level: Level, text: &str) {
        let Some(before) = self.bucket.take(text.len(), Instant::now()) else { return };
        self.report_missing(before);
        match level {
            Level::WARN => tracing::warn!(target: RECORDED, "{text}"),
            Level::INFO => tracing::info!(target: RECORDED, "{text}"),
            _ => return tracing::debug!(target: RECORDED, "{text}"),
        }
        self.story.record(level, text);
    }

    /// Waits until dropped lines can be reported, and reports them.
    pub async fn report_when_due(&mut self) {
        match self.bucket.due() {
            Some(due) => sleep_until(due.into()).await,
            None => std::future::pending().await,
        }
        self.end();
    }

    /// Reports the lines dropped so far.
    pub fn end(&mut self) {
        let before = self.bucket.missing();
        self.report_missing(before);
    }

    fn report_missing(&self, lines: u64) {
        if lines > 0 {
            self.story.warn(&format!("{lines} lines of the guest are left out here"));
        }
    }
}

/// Firmware passes over an empty disk. Tools take its word "failed" in the log for a broken pod.
fn level(line: &str) -> Level {
    let passed = line.starts_with("BdsDxe: failed to load Boot") && line.ends_with(": Not Found");
    if passed { Level::DEBUG } else { Level::INFO }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_probe_is_logged_as_a_summary_and_its_failures() {
        let story = Story::new();
        let mut log = GuestLog::new(story.clone(), LoggedLines::Probe);
        for line in [
            "transom probe",
            "info  cpu           vendor=AuthenticAMD",
            "pass  tsc           clock=pm-timer",
            "fail  timer         hz=1",
            "pass  nmi           count=0",
            "{\"probe\":1,\"ok\":false,\"dropped\":0,\"findings\":[",
            "\"pass  \"}]}",
        ] {
            log.handle(line);
        }
        let said: Vec<_> = story.lines(0).0.into_iter().map(|it| it.text).collect();
        let is = ["guest: fail  timer         hz=1", "the probe found errors: 2 checks passed"];
        assert_eq!(said, is);
    }

    #[test]
    fn guest_output_is_logged_only_if_configured() {
        let story = Story::new();
        GuestLog::new(story.clone(), LoggedLines::Nothing).handle("hello");
        assert_eq!(story.lines(0).1, 0);
        GuestLog::new(story.clone(), LoggedLines::Lines).handle("hello");
        assert_eq!(story.lines(0).0[0].text, "guest: hello");
    }

    #[test]
    fn an_empty_disk_is_not_reported_as_a_failure() {
        let story = Story::new();
        let mut log = GuestLog::new(story.clone(), LoggedLines::Lines);
        let disk = "BdsDxe: failed to load Boot0002 \"UEFI TRANSOM NVME DISK\" from \
                    PciRoot(0x0)/Pci(0x3,0x0)/NVMe(0x1,00-00-00-00-00-00-00-00): ";
        log.handle(&format!("{disk}Not Found"));
        assert_eq!(story.lines(0).1, 0);
        log.handle(&format!("{disk}Access Denied"));
        assert_eq!(story.lines(0).1, 1);
    }
}
