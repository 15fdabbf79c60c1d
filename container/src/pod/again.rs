//! CDs that give up: what a person starts may ask for a key, and nobody may be there to press one.
//!
//! Microsoft's media ask for any key, for a few seconds. They are answered, once for each start of
//! the machine, until it has started from its disk. A medium that gave up is started again, soon a
//! few times, and then when somebody comes to look: until then the machine waits and does nothing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use vmm::control::Command;

use super::asked;
use super::console::{On, Told};
use crate::medium::is_microsofts;
use crate::source::Source;

/// How often Enter is pressed, and how far apart: blindly, as the question is on the screen alone.
const PRESSES: u32 = 6;
const PAUSE: Duration = Duration::from_millis(250);
/// How often a medium is started again before that waits for somebody to look.
const TRIES: u32 = 5;
/// Who used a medium for longer did not overlook its question.
const LONG: Duration = Duration::from_secs(60);
/// How often it is looked whether somebody looks.
const LOOK: Duration = Duration::from_secs(2);

/// Whether a key is pressed when a CD starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Asks {
    /// It asks for none, as far as we know, and a key chooses something in its menu.
    #[default]
    Never,
    /// Once: it goes before the disk, and is not to be started again after each restart.
    Once,
    /// At every start.
    Always,
}

impl Asks {
    /// Of a machine with this rescue CD, if there is one.
    pub fn of(source: &Source, rescue: Option<&Path>) -> Self {
        match (rescue, source) {
            (Some(rescue), _) if is_microsofts(rescue) => Self::Once,
            (None, Source::Medium(medium)) if is_microsofts(medium) => Self::Always,
            _ => Self::Never,
        }
    }
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
enum Act {
    /// Nothing, and what was under way is at an end.
    Rest,
    /// The question is answered.
    Press,
    /// The medium of this name gave up: the machine is started again after so long, or when
    /// somebody looks.
    Again(String, Option<Duration>),
}

/// What the firmware has started, and what comes of it.
#[derive(Debug, Default)]
struct Course {
    asks: Asks,
    /// The question was answered since the machine started.
    pressed: bool,
    /// The medium that was started last, and when.
    medium: Option<(String, Instant)>,
    /// How often it gave up.
    tries: u32,
}

impl Course {
    fn starts(&mut self, name: &str, on: On, now: Instant) -> Act {
        match on {
            On::Disk => (self.asks, self.medium) = (Asks::Never, None),
            On::Medium => {
                self.medium = Some((name.trim().to_owned(), now));
                if self.asks != Asks::Never && !self.pressed {
                    self.pressed = true;
                    return Act::Press;
                }
            }
            On::Other => {}
        }
        Act::Rest
    }

    /// Nothing is left to start; none if nothing ever was.
    fn ends(&mut self, now: Instant) -> Option<Act> {
        let (name, since) = self.medium.clone()?;
        if now - since > LONG {
            self.tries = 0;
        }
        self.pressed = self.asks == Asks::Once;
        self.tries += 1;
        let pause = (self.tries <= TRIES).then(|| Duration::from_secs(1 << self.tries));
        if pause.is_none() {
            self.tries = 0;
        }
        Some(Act::Again(name, pause))
    }
}

/// What is done about it, at the control socket of the machine.
pub struct Again {
    course: Course,
    control: PathBuf,
    task: Option<JoinHandle<()>>,
}

impl Again {
    /// Nothing was started yet.
    pub fn new(asks: Asks, control: PathBuf) -> Self {
        Self { course: Course { asks, ..Course::default() }, control, task: None }
    }

    /// The firmware told this. Whether there is still something to wait for.
    pub fn hear(&mut self, told: &Told) -> bool {
        let now = Instant::now();
        let act = match told {
            Told::Starts { name, on } => Some(self.course.starts(name, *on, now)),
            Told::Nothing => self.course.ends(now),
        };
        self.rest();
        let first = self.course.tries == 1;
        let control = self.control.clone();
        self.task = match act {
            None => return false,
            Some(Act::Rest) => None,
            Some(Act::Press) => Some(tokio::spawn(press(control))),
            Some(Act::Again(name, pause)) => {
                tell(&name, pause, first);
                Some(tokio::spawn(again(control, pause)))
            }
        };
        true
    }

    fn rest(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        self.rest();
    }
}

/// The log is told of the first try and of the last, and no more until somebody looks.
fn tell(name: &str, pause: Option<Duration>, first: bool) {
    let gave_up = format!("{name} was started and gave up: it may wait for a key");
    match pause {
        None => tracing::warn!(
            "{gave_up}: open the screen, or open it anew, and it is started again for you"
        ),
        Some(_) if first => {
            tracing::warn!("{gave_up}: press one at the screen, it is started again");
        }
        Some(pause) => tracing::debug!("{gave_up}: it is started again after {pause:?}"),
    }
}

/// Answers a medium that asks for any key.
async fn press(control: PathBuf) {
    tracing::info!("Enter is pressed for the medium, which asks for a key");
    let words = ["key", "enter"].map(str::to_owned);
    for _ in 0..PRESSES {
        sleep(PAUSE).await;
        let pressed = async { asked::ask(&control, Command::read(&words)?).await };
        if let Err(error) = pressed.await {
            tracing::warn!("no key can be pressed: {error:#}");
            return;
        }
    }
}

/// Starts the machine again, after so long or when somebody looks.
async fn again(control: PathBuf, pause: Option<Duration>) {
    match pause {
        Some(pause) => sleep(pause).await,
        None => seen(&control).await,
    }
    if let Err(error) = asked::ask(&control, Command::Reset).await {
        tracing::warn!("the machine cannot be reset: {error:#}");
    }
}

/// Waits for a viewer that comes from now on.
async fn seen(control: &Path) {
    let since = Instant::now();
    loop {
        sleep(LOOK).await;
        let Ok(told) = asked::ask(control, Command::Status).await else { continue };
        if has_come(&told, since.elapsed()) {
            return;
        }
    }
}

/// Whether the machine's status tells of a viewer that has come within this time.
fn has_come(told: &Value, within: Duration) -> bool {
    let came = |viewer: &Value| viewer["seconds"].as_u64().is_some_and(|it| it <= within.as_secs());
    told["viewers"].as_array().is_some_and(|viewers| viewers.iter().any(came))
}

#[cfg(test)]
mod test {
    use std::fs;

    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

    use super::*;
    use crate::medium;

    fn course(asks: Asks) -> Course {
        Course { asks, ..Course::default() }
    }

    #[test]
    fn only_a_cd_of_microsofts_that_goes_first_is_answered() {
        let folder = tempfile::tempdir().unwrap();
        let [theirs, other] = ["theirs.iso", "other.iso"].map(|name| folder.path().join(name));
        fs::write(&theirs, medium::of_microsoft()).unwrap();
        fs::write(&other, [0; 1 << 16]).unwrap();
        let source = |path: &Path| Source::Medium(path.to_owned());
        assert_eq!(Asks::of(&source(&theirs), None), Asks::Always);
        assert_eq!(Asks::of(&source(&other), None), Asks::Never);
        assert_eq!(Asks::of(&source(&theirs), Some(&other)), Asks::Never);
        assert_eq!(Asks::of(&Source::Disk(other.clone()), Some(&theirs)), Asks::Once);
        assert_eq!(Asks::of(&Source::Disk(theirs), None), Asks::Never);
    }

    #[test]
    fn the_question_is_answered_once_a_start_until_the_disk_starts() {
        let now = Instant::now();
        let mut always = course(Asks::Always);
        let mut starts = |name: &str, on| always.starts(name, on, now);
        assert_eq!(starts("CD", On::Medium), Act::Press);
        assert_eq!(starts("CD", On::Medium), Act::Rest);
        assert!(always.ends(now).is_some());
        let mut starts = |name: &str, on| always.starts(name, on, now);
        assert_eq!(starts("Menu", On::Other), Act::Rest);
        assert_eq!(starts("CD", On::Medium), Act::Press);
        assert!(always.ends(now).is_some());
        let mut starts = |name: &str, on| always.starts(name, on, now);
        assert_eq!(starts("Windows Boot Manager", On::Disk), Act::Rest);
        assert_eq!(always.ends(now), None);
        assert_eq!(always.starts("CD", On::Medium, now), Act::Rest);

        let mut once = course(Asks::Once);
        assert_eq!(once.starts("CD", On::Medium, now), Act::Press);
        assert!(once.ends(now).is_some());
        assert_eq!(once.starts("CD", On::Medium, now), Act::Rest);
        assert_eq!(course(Asks::Never).starts("CD", On::Medium, now), Act::Rest);
    }

    #[test]
    fn a_medium_that_gave_up_is_tried_again_with_growing_pauses_and_then_for_who_looks() {
        let now = Instant::now();
        let mut course = course(Asks::Never);
        assert_eq!(course.ends(now), None);
        course.starts("PXE", On::Other, now);
        assert_eq!(course.ends(now), None);
        let mut round = |after: Duration, seconds: Option<u64>| {
            course.starts(" CD ", On::Medium, now);
            let pause = seconds.map(Duration::from_secs);
            assert_eq!(course.ends(now + after), Some(Act::Again("CD".into(), pause)));
        };
        let soon = Duration::from_secs(5);
        for _ in 0..2 {
            for seconds in [2, 4, 8, 16, 32] {
                round(soon, Some(seconds));
            }
            round(soon, None);
        }
        round(soon, Some(2));
        round(soon, Some(4));
        // It was used.
        round(2 * LONG, Some(2));
    }

    #[test]
    fn only_who_comes_later_is_waited_for() {
        let viewers = |seconds: &[u64]| -> Value {
            let viewers = seconds.iter().map(|it| serde_json::json!({ "seconds": it }));
            serde_json::json!({ "viewers": viewers.collect::<Vec<_>>() })
        };
        let within = Duration::from_secs(600);
        assert!(!has_come(&viewers(&[]), within) && !has_come(&viewers(&[601, 7000]), within));
        assert!(has_come(&viewers(&[7000, 1]), within));
        assert!(!has_come(&Value::Null, within));
    }

    #[tokio::test]
    async fn keys_and_resets_are_asked_of_the_machine() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("vmm.sock");
        let listener = tokio::net::UnixListener::bind(&control).unwrap();
        let starts = Told::Starts { name: "CD".into(), on: On::Medium };
        let mut again = Again::new(Asks::Always, control);
        assert!(!again.hear(&Told::Nothing), "nothing was ever started");
        assert!(again.hear(&starts));
        for _ in 0..PRESSES {
            assert_eq!(asked_of(&listener).await, r#"{"command":"key","keys":"enter"}"#);
        }
        assert!(again.hear(&Told::Nothing));
        assert_eq!(asked_of(&listener).await, r#"{"command":"reset"}"#);
    }

    /// The next question, which is answered.
    async fn asked_of(listener: &tokio::net::UnixListener) -> String {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        stream.write_all(b"{\"ok\":{}}\n").await.unwrap();
        line.trim_end().to_owned()
    }
}
