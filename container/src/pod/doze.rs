//! Whether the machine is asleep, for all who need it: viewers, commands, and the guest's agent. A
//! pod has one machine, so there is one state.

use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

/// The longest time that somebody waits for a machine that is asleep.
const WAKE_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Awake,
    /// It is being saved.
    Falling,
    Asleep,
    /// Somebody needs it.
    Waking,
}

/// The state of the pod's machine.
#[derive(Default)]
struct Doze {
    stage: watch::Sender<Stage>,
    /// When somebody last needed the machine.
    needed: Mutex<Option<Instant>>,
    /// When a machine that falls asleep is saved, at the latest. It cannot wake before.
    saved_by: Mutex<Option<Instant>>,
}

static DOZE: LazyLock<Doze> = LazyLock::new(Doze::default);
static REPORT: Mutex<Option<Report>> = Mutex::new(None);

impl Doze {
    async fn wake(&self) -> anyhow::Result<()> {
        let now = Instant::now();
        *lock(&self.needed) = Some(now);
        self.stage.send_if_modified(|stage| {
            let asleep = matches!(stage, Stage::Falling | Stage::Asleep);
            if asleep {
                *stage = Stage::Waking;
            }
            asleep
        });
        let awake = timeout(self.patience(now), self.reaches(Stage::Awake)).await;
        awake.context("the machine is asleep, and does not wake: see the log")
    }

    /// How long somebody waits who needs the machine now.
    fn patience(&self, now: Instant) -> Duration {
        let saved_by = lock(&self.saved_by).unwrap_or(now);
        saved_by.saturating_duration_since(now) + WAKE_TIMEOUT
    }

    fn falls(&self, limit: Duration) {
        *lock(&self.saved_by) = Some(Instant::now() + limit);
        self.stage.send_replace(Stage::Falling);
    }

    async fn reaches(&self, wanted: Stage) {
        // The sender is never dropped.
        self.stage.subscribe().wait_for(|stage| *stage == wanted).await.ok();
    }

    /// Returns false if somebody changed the stage meanwhile.
    fn change(&self, from: Stage, to: Stage) -> bool {
        self.stage.send_if_modified(|stage| {
            let is = *stage == from;
            if is {
                *stage = to;
            }
            is
        })
    }
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that somebody needs the machine, and waits until it is awake, if it is asleep.
pub async fn wake() -> anyhow::Result<()> {
    DOZE.wake().await
}

/// Waits until the machine is awake, without waking it.
pub async fn awake() {
    DOZE.reaches(Stage::Awake).await;
}

/// Whether the guest does not run now because nobody needs it.
pub fn is_asleep() -> bool {
    stage() != Stage::Awake
}

pub(super) fn stage() -> Stage {
    *DOZE.stage.borrow()
}

pub(super) fn set(stage: Stage) {
    DOZE.stage.send_replace(stage);
}

/// The machine is being saved, which takes this time at most.
pub(super) fn falls_asleep(limit: Duration) {
    DOZE.falls(limit);
}

/// The machine is saved. It wakes at once if somebody needed it meanwhile.
pub(super) fn fell_asleep() {
    DOZE.change(Stage::Falling, Stage::Asleep);
}

/// Waits until somebody needs a machine that is asleep.
pub(super) async fn requested() {
    DOZE.reaches(Stage::Waking).await;
}

pub(super) fn last_needed() -> Option<Instant> {
    *lock(&DOZE.needed)
}

/// The idle time and its reasons, for `transom status` and for programs.
#[derive(Clone, Debug)]
pub(super) struct Report {
    /// The machine falls asleep after this time.
    pub limit: Duration,
    pub since: Instant,
    /// All that is measured, each with its value, and whether that keeps the machine awake.
    pub measures: Vec<Measure>,
    /// The reason why it cannot sleep.
    pub obstacle: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Measure {
    pub text: String,
    pub keeps_awake: bool,
}

pub(super) fn report(report: Report) {
    *lock(&REPORT) = Some(report);
}

/// `null` without IDLE.
pub fn state() -> Value {
    let report = lock(&REPORT).clone();
    let Some(report) = report else { return Value::Null };
    let texts = |which: bool| {
        let measures = report.measures.iter().filter(|it| it.keeps_awake == which);
        measures.map(|it| it.text.clone()).collect::<Vec<_>>()
    };
    json!({
        "asleep": is_asleep(),
        "after_seconds": report.limit.as_secs(),
        "idle_seconds": report.since.elapsed().as_secs(),
        "keeps_awake": texts(true),
        "quiet": texts(false),
        "obstacle": report.obstacle,
    })
}

/// The state in a line, for people. Empty without IDLE.
pub fn line(state: &Value) -> String {
    let list = |key: &str| {
        let texts = state[key].as_array().into_iter().flatten().filter_map(Value::as_str);
        texts.collect::<Vec<_>>().join(", ")
    };
    let (awake, quiet) = (list("keeps_awake"), list("quiet"));
    let time = |key: &str| span(state[key].as_u64().unwrap_or_default());
    match state["obstacle"].as_str() {
        _ if !state.is_object() => String::new(),
        Some(why) => format!("never: {why}"),
        None if state["asleep"] == true => {
            "asleep: a connection, a viewer or a command wakes it".into()
        }
        None if !awake.is_empty() => format!("not now; keeps it awake: {awake} (and: {quiet})"),
        None => format!(
            "since {}, sleeps after {} ({quiet})",
            time("idle_seconds"),
            time("after_seconds")
        ),
    }
}

/// As in `12 min`.
fn span(seconds: u64) -> String {
    if seconds < 120 { format!("{seconds} s") } else { format!("{} min", seconds / 60) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test]
    async fn a_machine_that_is_needed_while_it_falls_asleep_wakes() {
        let doze = std::sync::Arc::new(Doze::default());
        doze.wake().await.unwrap();
        assert!(doze.needed.lock().unwrap().is_some());
        doze.stage.send_replace(Stage::Falling);
        let sleeper = doze.clone();
        let waits = tokio::spawn(async move { sleeper.wake().await.unwrap() });
        doze.reaches(Stage::Waking).await;
        assert!(!doze.change(Stage::Falling, Stage::Asleep), "somebody needs it");
        assert!(!waits.is_finished());
        doze.stage.send_replace(Stage::Awake);
        waits.await.unwrap();
        doze.stage.send_replace(Stage::Falling);
        assert!(doze.change(Stage::Falling, Stage::Asleep));
    }

    #[test]
    fn who_needs_a_machine_that_is_being_saved_waits_for_that_too() {
        let (doze, now) = (Doze::default(), Instant::now());
        assert_eq!(doze.patience(now), WAKE_TIMEOUT);
        let limit = Duration::from_secs(100);
        doze.falls(limit);
        assert!(doze.patience(now) >= limit + WAKE_TIMEOUT);
        assert_eq!(doze.patience(now + 2 * limit), WAKE_TIMEOUT);
    }

    #[test]
    fn people_read_what_keeps_the_machine_awake() {
        let state = |keeps_awake: &[&str], obstacle: Option<&str>, asleep| {
            json!({ "asleep": asleep, "after_seconds": 1800, "idle_seconds": 720,
                "keeps_awake": keeps_awake, "quiet": ["connections 0"], "obstacle": obstacle })
        };
        for (state, text) in [
            (Value::Null, ""),
            (state(&[], None, false), "since 12 min, sleeps after 30 min (connections 0)"),
            (
                state(&["viewers 1", "processors 35 %"], None, false),
                "not now; keeps it awake: viewers 1, processors 35 % (and: connections 0)",
            ),
            (state(&[], Some("no volume"), false), "never: no volume"),
            (state(&[], None, true), "asleep: a connection, a viewer or a command wakes it"),
        ] {
            assert_eq!(line(&state), text);
        }
    }
}
