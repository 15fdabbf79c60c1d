//! What happens, as it is told to those who wait: the phase, how far it is, and the last lines.
//!
//! Whatever takes long says so here, and everything that shows it (the log, the page, the probes of
//! an orchestrator) reads it here.

pub mod ear;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::Level;

/// So many lines are kept for those who come late.
const LINES: usize = 2000;
/// A line of a guest may have any length.
const LONGEST: usize = 400;
/// The log is told of progress no more often.
const QUIET: Duration = Duration::from_secs(10);

/// How far the pod is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// What the machine needs is made.
    #[default]
    Preparing,
    /// The machine is on, and its firmware looks for something to start.
    Booting,
    /// What the machine is for runs.
    Running,
    /// It is asked to end.
    Stopping,
}

/// What is to be said at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Scene {
    /// How far it all is.
    pub phase: Phase,
    /// What is done now, in a few words.
    pub doing: String,
    /// How much of that is done, in thousandths, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thousandths: Option<u16>,
    /// Seconds that it will take, if anybody can tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<u64>,
    /// What went wrong: the pod ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
    /// Lines that were said so far, to ask for those after them.
    pub lines: u64,
}

/// A line that was said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Seconds after the pod began.
    pub seconds: f64,
    /// How grave it is, as the log says it.
    pub level: String,
    /// The words.
    pub text: String,
}

/// See the module.
pub struct Story {
    scene: watch::Sender<Scene>,
    told: Mutex<Told>,
    /// When the pod began.
    pub since: Instant,
}

#[derive(Default)]
struct Told {
    lines: VecDeque<Line>,
    /// All that ever were.
    count: u64,
    /// When the present step began, and when the log last heard of it.
    step: Option<(Instant, Instant)>,
}

impl Default for Story {
    fn default() -> Self {
        let scene = watch::Sender::new(Scene::default());
        Self { scene, told: Mutex::default(), since: Instant::now() }
    }
}

impl Story {
    /// A new one, for all who tell of it or listen.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// The present scene, and a way to wait for the next.
    pub fn scene(&self) -> watch::Receiver<Scene> {
        self.scene.subscribe()
    }

    /// The phase.
    pub fn phase(&self) -> Phase {
        self.scene.borrow().phase
    }

    /// A phase begins.
    pub fn enter(&self, phase: Phase, doing: &str) {
        self.scene.send_modify(|scene| {
            *scene = Scene { phase, doing: doing.into(), lines: scene.lines, ..Scene::default() };
        });
        let now = Instant::now();
        self.told().step = Some((now, now));
        self.tell(doing);
    }

    /// A step of the phase begins.
    pub fn step(&self, doing: &str) {
        let phase = self.phase();
        self.enter(phase, doing);
    }

    /// So much of the step is done. How long the rest takes is what the part took, in proportion.
    pub fn progress(&self, done: u64, of: u64) {
        let now = Instant::now();
        let (began, loud) = {
            let mut told = self.told();
            let (began, last) = told.step.unwrap_or((now, now));
            let loud = now.duration_since(last) >= QUIET;
            told.step = Some((began, if loud { now } else { last }));
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
            // Who looks sees it anyway.
            tracing::info!(target: ear::KEPT, "{doing} ({whole}.{tenth} %)");
        }
    }

    /// The pod ends with these sentences, which the log has not yet.
    pub fn fail(&self, sentences: &[String]) {
        sentences.iter().for_each(|why| self.keep(Level::ERROR, why));
        self.failed(&sentences.join("\n"));
    }

    /// The pod ends with this sentence, which the log has already.
    pub fn failed(&self, why: &str) {
        self.scene.send_modify(|scene| scene.failed = Some(why.into()));
    }

    /// Whether it has failed.
    pub fn has_failed(&self) -> bool {
        self.scene.borrow().failed.is_some()
    }

    /// Whether anybody hears of it.
    pub fn is_heard(&self) -> bool {
        self.scene.receiver_count() > 0
    }

    /// A line for the log and for those who look.
    pub fn tell(&self, line: &str) {
        tracing::info!(target: ear::KEPT, "{line}");
        self.keep(Level::INFO, line);
    }

    /// The same of what may go wrong, or is not as it was asked for.
    pub fn warn(&self, line: &str) {
        tracing::warn!(target: ear::KEPT, "{line}");
        self.keep(Level::WARN, line);
    }

    /// A line that the log has already.
    pub fn keep(&self, level: Level, line: &str) {
        // Some of it is the guest's.
        let text = line.chars().filter(|it| !it.is_control()).take(LONGEST).collect();
        let seconds = (self.since.elapsed().as_secs_f64() * 1000.0).round() / 1000.0;
        let line = Line { seconds, level: level.to_string(), text };
        let count = {
            let mut told = self.told();
            if told.lines.len() == LINES {
                told.lines.pop_front();
            }
            told.lines.push_back(line);
            told.count += 1;
            told.count
        };
        self.publish(count);
    }

    /// So many lines were said. Who counted first may come last.
    fn publish(&self, count: u64) {
        self.scene.send_modify(|scene| scene.lines = scene.lines.max(count));
    }

    /// The lines after the first so many, as far as they are kept, and how many there were.
    pub fn lines(&self, after: u64) -> (Vec<Line>, u64) {
        let told = self.told();
        let new = usize::try_from(told.count.saturating_sub(after)).unwrap_or(usize::MAX);
        let skip = told.lines.len().saturating_sub(new);
        (told.lines.iter().skip(skip).cloned().collect(), told.count)
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        // What a thread that panicked left is lines, and whole ones.
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn who_comes_late_hears_the_last_lines() {
        let story = Story::new();
        for number in 0..3000 {
            story.keep(Level::INFO, &format!("{number}\u{1b}"));
        }
        let (lines, count) = story.lines(0);
        assert_eq!((lines.len(), lines[0].text.as_str(), count), (LINES, "1000", 3000));
        let last: Vec<_> = story.lines(2998).0.into_iter().map(|it| it.text).collect();
        assert_eq!(last, ["2998", "2999"]);
        assert_eq!(story.lines(9999), (Vec::new(), 3000));
    }

    #[test]
    fn the_number_of_lines_never_goes_back() {
        let story = Story::new();
        for (count, shown) in [(1, 1), (3, 3), (2, 3), (4, 4)] {
            story.publish(count);
            assert_eq!(story.scene().borrow().lines, shown);
        }
    }

    #[test]
    fn a_step_tells_how_far_it_is_and_the_next_one_begins_anew() {
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
