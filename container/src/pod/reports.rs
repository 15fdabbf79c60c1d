//! Follows the installation of Windows by the lines that its scripts write to the serial port.
//!
//! Threats: the guest writes any lines. Reports are limited by a bucket of their own, lines of
//! Setup's log are kept in a short queue until a failure shows them, and their characters are
//! escaped.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::sleep_until;

use super::console::{BootDevice, BootEvent};
use crate::answer::report::{self, Report};
use crate::log::bucket::{Bucket, GUEST, REPORTS};
use crate::story::Story;
use crate::story::installation::{Installation, Stage};

/// Number of lines of Setup's log that are shown after a failure.
const MAX_LINES: usize = 60;
/// Maximum characters of each.
const MAX_LENGTH: usize = 300;
/// Warn if Windows Setup reports nothing for this time.
const PATIENCE: Duration = Duration::from_secs(60 * 60);

pub struct Reports {
    story: Arc<Story>,
    bucket: Bucket,
    /// Limits the lines of Setup's log.
    lines: Bucket,
    /// The firmware started the disk, not a medium.
    from_disk: bool,
    log: VecDeque<String>,
    /// When to warn that there are no news.
    due: Option<Instant>,
}

impl Reports {
    /// `from_disk`: the guest was started from its disk before.
    pub fn new(story: Arc<Story>, from_disk: bool) -> Self {
        let [bucket, lines] = [REPORTS, GUEST].map(Bucket::new);
        Self { story, bucket, lines, from_disk, log: VecDeque::new(), due: None }
    }

    /// Notes what the firmware started.
    pub fn on_boot(&mut self, event: &BootEvent) {
        let BootEvent::Starts { on: on @ (BootDevice::Disk | BootDevice::Medium), .. } = event
        else {
            return;
        };
        self.from_disk = *on == BootDevice::Disk;
        let Some(now) = self.story.installation() else { return };
        let next = now.after_start(self.from_disk);
        match next.stage == now.stage {
            true => self.story.note(next),
            false => self.enter(next),
        }
    }

    /// Takes a line of the serial port. Returns whether the line is a report.
    pub fn take(&mut self, line: &str) -> bool {
        if let Some(text) = report::log_text(line) {
            self.keep(text);
        } else if let Some(report) = report::read(line) {
            self.handle(report);
        } else if let Some(percent) = report::percent(line) {
            let now = self.story.installation();
            let Some(now) = now.filter(|it| it.stage == Stage::ApplyImage) else { return false };
            if let Some(next) = now.at(percent) {
                self.story.note(next);
                self.story.progress(percent.into(), 100);
            }
        } else {
            return false;
        }
        true
    }

    fn handle(&mut self, report: Report) {
        if report == Report::LogBegins {
            return self.log.clear();
        }
        let now = self.story.installation();
        let Some(next) = Installation::after(now.as_ref(), report, self.from_disk) else { return };
        let Some(before) = self.bucket.take(0, Instant::now()) else { return };
        if before > 0 {
            self.story.warn(&format!("{before} reports of the guest are left out here"));
        }
        match report {
            Report::Failed(_) => self.fail(next),
            Report::InstallEnded(status) => self.end_script(next, status),
            Report::WindowsPe if !self.log.is_empty() || now.is_some() => {
                if now.is_some() {
                    self.story.warn("Windows Setup starts over: its last attempt did not finish");
                }
                self.show_log("an earlier attempt");
                self.enter(next);
            }
            _ => self.enter(next),
        }
    }

    fn enter(&mut self, next: Installation) {
        let waits = next.stage < Stage::LoggedOn;
        self.due = waits.then(|| Instant::now() + PATIENCE);
        self.story.follow(next);
    }

    fn fail(&mut self, next: Installation) {
        self.due = None;
        self.story.follow(next);
        self.show_log("Windows Setup");
    }

    fn end_script(&self, next: Installation, status: i32) {
        self.story.note(next);
        let sentence = format!("install.bat ended with status {status}");
        match status {
            0 => self.story.info(&sentence),
            _ => self
                .story
                .warn(&format!("{sentence}: with LOG=Y its output is in C:\\OEM\\install.log")),
        }
    }

    /// Keeps a line of Setup's log.
    fn keep(&mut self, text: &str) {
        if self.log.len() == MAX_LINES {
            self.log.pop_front();
        }
        let is_plain = |letter: char| letter == ' ' || letter.is_ascii_graphic();
        let shown = |letter: char| is_plain(letter) || letter.is_alphanumeric();
        let letters = text.chars().take(MAX_LENGTH);
        self.log.push_back(letters.map(|it| if shown(it) { it } else { '?' }).collect());
    }

    fn show_log(&mut self, of: &str) {
        if self.log.is_empty() {
            return;
        }
        self.story.warn(&format!("the last lines of the log of {of}:"));
        for line in self.log.drain(..) {
            if self.lines.take(line.len(), Instant::now()).is_some() {
                self.story.warn(&format!("  {line}"));
            }
        }
    }

    /// Waits until Windows has reported nothing for long, and warns.
    pub async fn warn_when_due(&mut self) {
        match self.due {
            Some(due) => sleep_until(due.into()).await,
            None => std::future::pending().await,
        }
        self.due = None;
        let Some(now) = self.story.installation() else { return };
        let minutes = PATIENCE.as_secs() / 60;
        let sentence = now.sentence();
        self.story.warn(&format!("{sentence}, for {minutes} min now: look at the screen"));
    }
}

#[cfg(test)]
mod test;
