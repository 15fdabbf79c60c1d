//! Boots a medium again if it booted nothing: install CDs may ask for a key, and no user may be
//! there to press one.
//!
//! Microsoft's media wait for any key for a few seconds, unless their question is avoided
//! (`crate::media::noprompt`). Enter is pressed for them, once per start of the machine, until it
//! has booted from its disk. After a medium gave up, the machine is reset:
//! a few times with growing pauses, and then whenever a viewer opens the screen. Until then it
//! waits and does nothing.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use vmm::control::Command;

use super::console::{BootDevice, BootEvent};
use super::machine_client;
use crate::media::noprompt::Question;
use crate::media::windows::Media;
use crate::medium::is_microsofts;
use crate::source::Source;

/// Number of key presses, and the pause between them. They are sent blindly, as the question is
/// only on the screen.
const PRESSES: u32 = 6;
const PRESS_PAUSE: Duration = Duration::from_millis(250);
/// Resets of the machine before it waits for a viewer.
const MAX_TRIES: u32 = 5;
/// A medium that ran for longer was in use: its question was answered.
const MIN_USE_TIME: Duration = Duration::from_secs(60);
/// Poll interval for new viewers.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Whether a key is pressed when a CD boots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyPrompt {
    /// Never: as far as known, the CD does not ask, and a key would select an entry of its menu.
    #[default]
    Never,
    /// Only once: the CD boots before the disk, and must not start again after each restart.
    Once,
    /// At every start of the machine.
    Always,
}

impl KeyPrompt {
    pub fn of(source: &Source, media: Option<&Media>, rescue: Option<&Path>) -> Self {
        let asks = media.is_none_or(|media| media.question == Question::Asked);
        match (rescue, source) {
            (Some(rescue), _) if is_microsofts(rescue) => Self::Once,
            (None, Source::Medium(_)) if !asks => Self::Never,
            (None, Source::Medium(medium)) if is_microsofts(medium) => Self::Always,
            _ => Self::Never,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Action {
    /// Do nothing, and stop what was going on.
    Nothing,
    PressKey,
    /// The medium of this name gave up: reset the machine after this time, or when a viewer comes.
    Reset(String, Option<Duration>),
}

/// The devices that the firmware booted since the pod began.
#[derive(Debug, Default)]
struct BootState {
    key_prompt: KeyPrompt,
    /// The key was pressed since the machine started.
    pressed: bool,
    /// The medium that booted last, and when.
    medium: Option<(String, Instant)>,
    /// Number of times that this medium gave up.
    tries: u32,
}

impl BootState {
    fn on_boot(&mut self, name: &str, on: BootDevice, now: Instant) -> Action {
        match on {
            BootDevice::Disk => (self.key_prompt, self.medium) = (KeyPrompt::Never, None),
            BootDevice::Medium => {
                self.medium = Some((name.trim().to_owned(), now));
                if self.key_prompt != KeyPrompt::Never && !self.pressed {
                    self.pressed = true;
                    return Action::PressKey;
                }
            }
            BootDevice::Other => {}
        }
        Action::Nothing
    }

    /// Returns `None` if no medium has booted before.
    fn on_nothing_to_boot(&mut self, now: Instant) -> Option<Action> {
        let (name, since) = self.medium.clone()?;
        if now - since > MIN_USE_TIME {
            self.tries = 0;
        }
        self.pressed = self.key_prompt == KeyPrompt::Once;
        self.tries += 1;
        let pause = (self.tries <= MAX_TRIES).then(|| Duration::from_secs(1 << self.tries));
        if pause.is_none() {
            self.tries = 0;
        }
        Some(Action::Reset(name, pause))
    }
}

pub struct BootRetry {
    state: BootState,
    control: PathBuf,
    task: Option<JoinHandle<()>>,
}

impl BootRetry {
    pub fn new(key_prompt: KeyPrompt, control: PathBuf) -> Self {
        Self { state: BootState { key_prompt, ..BootState::default() }, control, task: None }
    }

    /// Returns whether the machine is kept running.
    pub fn handle(&mut self, event: &BootEvent) -> bool {
        let now = Instant::now();
        let action = match event {
            BootEvent::Starts { name, on } => Some(self.state.on_boot(name, *on, now)),
            BootEvent::Nothing => self.state.on_nothing_to_boot(now),
        };
        self.cancel();
        let first = self.state.tries == 1;
        let control = self.control.clone();
        self.task = match action {
            None => return false,
            Some(Action::Nothing) => None,
            Some(Action::PressKey) => Some(tokio::spawn(press(control))),
            Some(Action::Reset(name, pause)) => {
                log_retry(&name, pause, first);
                Some(tokio::spawn(reset(control, pause)))
            }
        };
        true
    }

    fn cancel(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl Drop for BootRetry {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Logs the first try and the last. The others are debug messages.
fn log_retry(name: &str, pause: Option<Duration>, first: bool) {
    let gave_up = format!("{name} was started, but booted nothing: it may wait for a key");
    match pause {
        None => tracing::warn!("{gave_up}: open or reload the screen to start it again"),
        Some(_) if first => {
            tracing::warn!("{gave_up}: press a key at the screen when it starts again");
        }
        Some(pause) => tracing::debug!("{gave_up}: it is started again after {pause:?}"),
    }
}

/// Presses Enter a few times.
async fn press(control: PathBuf) {
    tracing::info!("pressing Enter for the medium, which asks for a key");
    let words = ["key", "enter"].map(str::to_owned);
    for _ in 0..PRESSES {
        sleep(PRESS_PAUSE).await;
        let pressed = async { machine_client::ask(&control, Command::read(&words)?).await };
        if let Err(error) = pressed.await {
            tracing::warn!("no key can be pressed: {error:#}");
            return;
        }
    }
}

/// Resets the machine, after this time or when a viewer comes.
async fn reset(control: PathBuf, pause: Option<Duration>) {
    match pause {
        Some(pause) => sleep(pause).await,
        None => wait_for_viewer(&control).await,
    }
    if let Err(error) = machine_client::ask(&control, Command::Reset).await {
        tracing::warn!("the machine cannot be reset: {error:#}");
    }
}

/// Waits for a viewer that connects from now on.
async fn wait_for_viewer(control: &Path) {
    let since = Instant::now();
    loop {
        sleep(POLL_INTERVAL).await;
        let Ok(status) = machine_client::ask(control, Command::Status).await else { continue };
        if has_new_viewer(&status, since.elapsed()) {
            return;
        }
    }
}

fn has_new_viewer(status: &Value, within: Duration) -> bool {
    let came = |viewer: &Value| viewer["seconds"].as_u64().is_some_and(|it| it <= within.as_secs());
    status["viewers"].as_array().is_some_and(|viewers| viewers.iter().any(came))
}

#[cfg(test)]
mod test {
    use std::fs;

    use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};

    use super::*;
    use crate::media::testutil::{Layout, install_cd, windows_11};
    use crate::media::windows::analyze;
    use crate::medium;

    fn state(key_prompt: KeyPrompt) -> BootState {
        BootState { key_prompt, ..BootState::default() }
    }

    #[test]
    fn only_a_microsoft_cd_at_first_boot_gets_a_key() {
        let folder = tempfile::tempdir().unwrap();
        let [theirs, other] = ["theirs.iso", "other.iso"].map(|name| folder.path().join(name));
        fs::write(&theirs, medium::of_microsoft()).unwrap();
        fs::write(&other, [0; 1 << 16]).unwrap();
        let source = |path: &Path| Source::Medium(path.to_owned());
        let of = |source: &Source, rescue: Option<&Path>| KeyPrompt::of(source, None, rescue);
        assert_eq!(of(&source(&theirs), None), KeyPrompt::Always);
        assert_eq!(of(&source(&other), None), KeyPrompt::Never);
        assert_eq!(of(&source(&theirs), Some(&other)), KeyPrompt::Never);
        assert_eq!(of(&Source::Disk(other.clone()), Some(&theirs)), KeyPrompt::Once);
        assert_eq!(of(&Source::Disk(theirs.clone()), None), KeyPrompt::Never);
        // A question that is avoided needs no answer.
        let cd = install_cd(Layout::Bridge, &windows_11(9));
        let mut media = analyze(&cd[..]).unwrap().unwrap();
        assert!(matches!(media.question, Question::Avoided(_)));
        let of = |media: &Media| KeyPrompt::of(&source(&theirs), Some(media), None);
        assert_eq!(of(&media), KeyPrompt::Never);
        media.question = Question::Never;
        assert_eq!(of(&media), KeyPrompt::Never);
        media.question = Question::Asked;
        assert_eq!(of(&media), KeyPrompt::Always);
    }

    #[test]
    fn the_key_prompt_is_answered_once_per_start() {
        let now = Instant::now();
        let mut always = state(KeyPrompt::Always);
        let mut starts = |name: &str, on| always.on_boot(name, on, now);
        assert_eq!(starts("CD", BootDevice::Medium), Action::PressKey);
        assert_eq!(starts("CD", BootDevice::Medium), Action::Nothing);
        assert!(always.on_nothing_to_boot(now).is_some());
        let mut starts = |name: &str, on| always.on_boot(name, on, now);
        assert_eq!(starts("Menu", BootDevice::Other), Action::Nothing);
        assert_eq!(starts("CD", BootDevice::Medium), Action::PressKey);
        assert!(always.on_nothing_to_boot(now).is_some());
        let mut starts = |name: &str, on| always.on_boot(name, on, now);
        assert_eq!(starts("Windows Boot Manager", BootDevice::Disk), Action::Nothing);
        assert_eq!(always.on_nothing_to_boot(now), None);
        assert_eq!(always.on_boot("CD", BootDevice::Medium, now), Action::Nothing);

        let mut once = state(KeyPrompt::Once);
        assert_eq!(once.on_boot("CD", BootDevice::Medium, now), Action::PressKey);
        assert!(once.on_nothing_to_boot(now).is_some());
        assert_eq!(once.on_boot("CD", BootDevice::Medium, now), Action::Nothing);
        assert_eq!(state(KeyPrompt::Never).on_boot("CD", BootDevice::Medium, now), Action::Nothing);
    }

    #[test]
    fn a_failed_medium_is_retried_with_backoff_or_for_a_new_viewer() {
        let now = Instant::now();
        let mut state = state(KeyPrompt::Never);
        assert_eq!(state.on_nothing_to_boot(now), None);
        state.on_boot("PXE", BootDevice::Other, now);
        assert_eq!(state.on_nothing_to_boot(now), None);
        let mut round = |after: Duration, seconds: Option<u64>| {
            state.on_boot(" CD ", BootDevice::Medium, now);
            let pause = seconds.map(Duration::from_secs);
            assert_eq!(
                state.on_nothing_to_boot(now + after),
                Some(Action::Reset("CD".into(), pause))
            );
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
        // The medium was used.
        round(2 * MIN_USE_TIME, Some(2));
    }

    #[test]
    fn only_recent_viewers_count_as_new() {
        let viewers = |seconds: &[u64]| -> Value {
            let viewers = seconds.iter().map(|it| serde_json::json!({ "seconds": it }));
            serde_json::json!({ "viewers": viewers.collect::<Vec<_>>() })
        };
        let within = Duration::from_secs(600);
        assert!(
            !has_new_viewer(&viewers(&[]), within)
                && !has_new_viewer(&viewers(&[601, 7000]), within)
        );
        assert!(has_new_viewer(&viewers(&[7000, 1]), within));
        assert!(!has_new_viewer(&Value::Null, within));
    }

    #[tokio::test]
    async fn sends_keys_and_resets_to_the_machine() {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("vmm.sock");
        let listener = tokio::net::UnixListener::bind(&control).unwrap();
        let starts = BootEvent::Starts { name: "CD".into(), on: BootDevice::Medium };
        let mut again = BootRetry::new(KeyPrompt::Always, control);
        assert!(!again.handle(&BootEvent::Nothing), "nothing was ever started");
        assert!(again.handle(&starts));
        for _ in 0..PRESSES {
            assert_eq!(asked_of(&listener).await, r#"{"command":"key","keys":"enter"}"#);
        }
        assert!(again.handle(&BootEvent::Nothing));
        assert_eq!(asked_of(&listener).await, r#"{"command":"reset"}"#);
    }

    /// Accepts and answers the next question, and returns it.
    async fn asked_of(listener: &tokio::net::UnixListener) -> String {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        stream.write_all(b"{\"ok\":{}}\n").await.unwrap();
        line.trim_end().to_owned()
    }
}
