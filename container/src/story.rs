//! The pod's progress, for all who watch it: phase, current step, and the last log lines.
//!
//! Everything that takes long reports to the [`Story`]. The log, the status page and the health
//! probes of an orchestrator read it.

pub mod installation;
pub mod log_layer;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::Level;

use self::installation::Installation;

/// Number of log lines kept for late readers.
const MAX_LINES: usize = 2000;
/// Maximum characters of a line. A guest may send lines of any length.
const MAX_LENGTH: usize = 400;
/// Minimum interval between progress lines in the log.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    #[default]
    Preparing,
    /// The machine runs, and its firmware looks for something to boot.
    Booting,
    /// The operating system, or the probe, has been started.
    Running,
    /// Nobody needs the machine: it is saved, and wakes when somebody does.
    Asleep,
    Stopping,
}

/// A snapshot of the pod's progress.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Scene {
    pub phase: Phase,
    /// The current step in a few words.
    pub doing: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thousandths: Option<u16>,
    /// Estimated remaining seconds of the step, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<u64>,
    /// The download of the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer: Option<Transfer>,
    /// The error that ends the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// The installation of Windows, if the guest reports one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub installation: Option<Installation>,
    /// How often the server of the shared folders was started again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_restarts: Option<u32>,
    /// Total number of log lines so far. Readers use it to request later ones.
    pub lines: u64,
}

/// How far a download is, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Transfer {
    pub bytes: u64,
    pub of: u64,
    pub bytes_per_second: u64,
}

impl Transfer {
    pub fn seconds_left(&self) -> Option<u64> {
        self.of.saturating_sub(self.bytes).checked_div(self.bytes_per_second)
    }

    pub fn percent(&self) -> u64 {
        let percent = u128::from(self.bytes) * 100 / u128::from(self.of.max(1));
        u64::try_from(percent).unwrap_or(100).min(100)
    }

    /// As in ` 45% at 12.3MB/s, 2 min left`. Programs look for the percent and for the rate in the
    /// reference image's log.
    pub fn line(&self) -> String {
        let mega = self.bytes_per_second / 100_000;
        let rate = format!("{}% at {}.{}MB/s", self.percent(), mega / 10, mega % 10);
        match self.seconds_left() {
            Some(left) if left >= 90 => format!("{rate}, {} min left", left.div_ceil(60)),
            Some(left) if left > 0 => format!("{rate}, {left} s left"),
            _ => rate,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Seconds since the start of the pod.
    pub seconds: f64,
    pub level: String,
    /// The text of the line, without control characters.
    pub text: String,
}

pub struct Story {
    scene: watch::Sender<Scene>,
    history: Mutex<History>,
    /// The start of the pod.
    pub since: Instant,
}

#[derive(Default)]
struct History {
    lines: VecDeque<Line>,
    /// Number of all lines so far, including dropped ones.
    count: u64,
    /// When the current step began, and when its progress was last logged.
    step: Option<(Instant, Instant)>,
}

impl Default for Story {
    fn default() -> Self {
        let scene = watch::Sender::new(Scene::default());
        Self { scene, history: Mutex::default(), since: Instant::now() }
    }
}

impl Story {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    pub fn scene(&self) -> watch::Receiver<Scene> {
        self.scene.subscribe()
    }

    pub fn phase(&self) -> Phase {
        self.scene.borrow().phase
    }

    /// Enters a phase, and logs its first step.
    pub fn enter(&self, phase: Phase, doing: &str) {
        self.begin(phase, doing);
        self.info(doing);
    }

    fn begin(&self, phase: Phase, doing: &str) {
        self.scene.send_modify(|scene| {
            let (lines, installation) = (scene.lines, scene.installation.take());
            let doing = doing.into();
            *scene = Scene { phase, doing, installation, lines, ..Scene::default() };
        });
        let now = Instant::now();
        self.history().step = Some((now, now));
    }

    pub fn step(&self, doing: &str) {
        let phase = self.phase();
        self.enter(phase, doing);
    }

    /// Publishes the state of the installation, and logs its step. Once the pod stops, that is not
    /// the pod's step.
    pub fn follow(&self, installation: Installation) {
        let (sentence, failed) = (installation.sentence(), installation.failed.is_some());
        self.note(installation);
        match self.phase() {
            Phase::Stopping => {}
            phase => self.begin(phase, &sentence),
        }
        if failed { self.warn(&sentence) } else { self.info(&sentence) }
    }

    pub fn installation(&self) -> Option<Installation> {
        self.scene.borrow().installation.clone()
    }

    /// Publishes the state of the installation.
    pub fn note(&self, installation: Installation) {
        self.scene.send_modify(|scene| scene.installation = Some(installation));
    }

    /// Reports `done` of `of` units of the step. The remaining time is extrapolated from the time
    /// so far.
    pub fn progress(&self, done: u64, of: u64) {
        let now = Instant::now();
        let (began, loud) = {
            let mut history = self.history();
            let (began, last) = history.step.unwrap_or((now, now));
            let loud = now.duration_since(last) >= PROGRESS_INTERVAL;
            history.step = Some((began, if loud { now } else { last }));
            (began, loud)
        };
        let part = (u128::from(done) * 1000).checked_div(u128::from(of)).unwrap_or(0).min(1000);
        let thousandths = u16::try_from(part).unwrap_or(1000);
        let took = now.duration_since(began).as_secs();
        let left = u64::from(thousandths > 10 && took > 1)
            * (took * u64::from(1000 - thousandths)).checked_div(thousandths.into()).unwrap_or(0);
        self.scene.send_modify(|scene| {
            scene.thousandths = Some(thousandths);
            scene.seconds_left = (left > 0).then_some(left);
        });
        if loud {
            let doing = self.scene.borrow().doing.clone();
            let (whole, tenth) = (thousandths / 10, thousandths % 10);
            // The page shows every change, so this goes to the log only now and then.
            tracing::info!(target: log_layer::RECORDED, "{doing} ({whole}.{tenth} %)");
        }
    }

    /// Reports how far the download of the step is. The caller logs it.
    pub fn transfer(&self, transfer: Transfer) {
        let part = u128::from(transfer.bytes) * 1000 / u128::from(transfer.of.max(1));
        self.scene.send_modify(|scene| {
            scene.thousandths = Some(u16::try_from(part.min(1000)).unwrap_or(1000));
            scene.seconds_left = transfer.seconds_left().filter(|left| *left > 0);
            scene.transfer = Some(transfer);
        });
    }

    /// The pod fails with these sentences. They are not in the log yet.
    pub fn fail(&self, sentences: &[String]) {
        sentences.iter().for_each(|why| self.record(Level::ERROR, why));
        self.failed(&sentences.join("\n"));
    }

    /// The pod fails with this sentence, which is in the log already.
    pub fn failed(&self, why: &str) {
        self.scene.send_modify(|scene| scene.failed = Some(why.into()));
    }

    pub fn share_started_again(&self) {
        self.scene.send_modify(|scene| {
            scene.share_restarts = Some(scene.share_restarts.unwrap_or(0).saturating_add(1));
        });
    }

    pub fn has_failed(&self) -> bool {
        self.scene.borrow().failed.is_some()
    }

    pub fn is_watched(&self) -> bool {
        self.scene.receiver_count() > 0
    }

    /// Logs a line, and keeps it for readers.
    pub fn info(&self, line: &str) {
        tracing::info!(target: log_layer::RECORDED, "{line}");
        self.record(Level::INFO, line);
    }

    pub fn warn(&self, line: &str) {
        tracing::warn!(target: log_layer::RECORDED, "{line}");
        self.record(Level::WARN, line);
    }

    /// Keeps a line that is in the log already.
    pub fn record(&self, level: Level, line: &str) {
        // The guest controls part of the text.
        let text = line.chars().filter(|it| !it.is_control()).take(MAX_LENGTH).collect();
        let seconds = (self.since.elapsed().as_secs_f64() * 1000.0).round() / 1000.0;
        let line = Line { seconds, level: level.to_string(), text };
        let count = {
            let mut history = self.history();
            if history.lines.len() == MAX_LINES {
                history.lines.pop_front();
            }
            history.lines.push_back(line);
            history.count += 1;
            history.count
        };
        self.publish(count);
    }

    /// Threads may arrive here in another order than they counted.
    fn publish(&self, count: u64) {
        self.scene.send_modify(|scene| scene.lines = scene.lines.max(count));
    }

    /// Lines after the first `after`, as far as they are kept, and the total number.
    pub fn lines(&self, after: u64) -> (Vec<Line>, u64) {
        let history = self.history();
        let new = usize::try_from(history.count.saturating_sub(after)).unwrap_or(usize::MAX);
        let skip = history.lines.len().saturating_sub(new);
        (history.lines.iter().skip(skip).cloned().collect(), history.count)
    }

    fn history(&self) -> std::sync::MutexGuard<'_, History> {
        // Threads add whole lines, so the history is valid even after a panic.
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_late_reader_gets_the_last_lines() {
        let story = Story::new();
        for number in 0..3000 {
            story.record(Level::INFO, &format!("{number}\u{1b}"));
        }
        let (lines, count) = story.lines(0);
        assert_eq!((lines.len(), lines[0].text.as_str(), count), (MAX_LINES, "1000", 3000));
        let last: Vec<_> = story.lines(2998).0.into_iter().map(|it| it.text).collect();
        assert_eq!(last, ["2998", "2999"]);
        assert_eq!(story.lines(9999), (Vec::new(), 3000));
    }

    #[test]
    fn the_line_count_never_decreases() {
        let story = Story::new();
        for (count, shown) in [(1, 1), (3, 3), (2, 3), (4, 4)] {
            story.publish(count);
            assert_eq!(story.scene().borrow().lines, shown);
        }
    }

    #[test]
    fn a_step_reports_its_progress_and_the_next_one_starts_at_zero() {
        let story = Story::new();
        let scene = story.scene();
        story.step("copying");
        story.progress(1, 3);
        assert_eq!(scene.borrow().thousandths, Some(333));
        story.progress(u64::MAX, 1);
        assert_eq!(scene.borrow().thousandths, Some(1000));
        story.progress(1, 0);
        assert_eq!(scene.borrow().thousandths, Some(0));
        story.enter(Phase::Running, "running");
        let now = scene.borrow().clone();
        assert_eq!(
            (now.phase, now.thousandths, now.doing.as_str()),
            (Phase::Running, None, "running")
        );
        assert_eq!(now.lines, 2);
    }
}
