//! The socket for commands in the container. Questions and answers are JSON objects, one per line,
//! as at the machine's control socket. `{"ask": "state"}` is answered with `{"ok": …}`, or
//! `{"error": …, "status": …}`.
//!
//! The socket is in the pod's runtime folder, so only the pod's user can open it.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

use super::departure::{Departure, Limits};
use super::freeze::{Freezer, Hold};
use super::{doze, stop, usb};
use crate::agent::AgentError;
use crate::status::{Failure, Status};
use crate::story::Line;
use crate::web::{Health, WebState};

const MAX_CONNECTIONS: usize = 64;
/// Maximum bytes of a question, which may contain a program, its arguments and its input.
pub const MAX_QUESTION: u64 = 3 << 20;
/// Maximum time to wait for new log lines, or for the end of the machine. After it the answer is
/// empty.
pub const MAX_WAIT: Duration = Duration::from_secs(20);
/// Pause after accepting fails, as without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "lowercase", deny_unknown_fields)]
pub enum Question {
    /// The state of the pod, its machine and its guest.
    State,
    Health {
        of: Health,
    },
    Log {
        /// Return lines after this number.
        after: u64,
        /// Wait for new lines if there are none. A client that has waited once gets all lines
        /// before the pod ends.
        wait: bool,
    },
    Shutdown {
        /// The client will wait for the machine's end, and gets the answer before the pod ends.
        #[serde(default)]
        wait: bool,
    },
    /// The exit status of the pod, if the machine is off, or else `null`. Waits for that, up to
    /// [`MAX_WAIT`].
    Off,
    /// The answer is the program's process ID in the guest.
    Start {
        /// Path or name.
        program: String,
        /// Arguments.
        words: Vec<String>,
        /// Standard input in base64.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        input: Option<String>,
    },
    /// USB devices of the host, and those that are configured.
    Usb,
    /// Passes a USB device of the host through to the machine.
    AttachUsb {
        /// In the words of `usb-host`.
        device: String,
    },
    DetachUsb {
        /// The words, or the machine's name of the device.
        device: String,
    },
    /// The state of a started program, as the agent reports it.
    Outcome {
        pid: i64,
    },
    /// Holds the machine still until `Release`, or until the client disconnects. The answer comes
    /// when it stands still.
    Hold {
        /// The guest's agent freezes its file systems before.
        freeze: bool,
        /// The machine goes on after this number of seconds at the latest.
        seconds: u64,
        /// Whether the client will encrypt memory, if it saves that.
        #[serde(default)]
        encrypts: Option<bool>,
    },
    /// The answer is an [`Outcome`](super::freeze::Outcome).
    Release,
    /// The answer comes when the machine is awake.
    Wake,
    /// Moves the machine to another pod. The answer comes when it runs there.
    Migrate {
        /// Wait for the other pod for this number of seconds.
        wait: u64,
        /// The machine stays if that takes longer, in seconds.
        #[serde(default)]
        within: Option<u64>,
    },
}

impl Question {
    /// Whether the machine's guest is needed.
    const fn needs_guest(&self) -> bool {
        matches!(
            self,
            Self::Start { .. }
                | Self::Outcome { .. }
                | Self::Shutdown { .. }
                | Self::AttachUsb { .. }
                | Self::DetachUsb { .. }
                | Self::Wake
                | Self::Migrate { .. }
        )
    }

    /// Whether the client must get an answer before the pod ends.
    const fn awaits(&self) -> bool {
        matches!(
            self,
            Self::Off
                | Self::Log { wait: true, .. }
                | Self::Shutdown { wait: true }
                | Self::Migrate { .. }
        )
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub struct LogLines {
    /// Lines after those that the client knows, as far as they are kept.
    pub lines: Vec<Line>,
    /// Total number of lines so far.
    pub count: u64,
    /// The pod ends, and these are the last lines.
    pub last: bool,
}

/// The parts of the pod that answer.
#[derive(Clone)]
pub struct Parts {
    pub web: Arc<WebState>,
    pub end_notice: EndNotice,
    pub freezer: Freezer,
    /// Set if the machine can move to another pod.
    pub departure: Arc<OnceLock<Departure>>,
}

/// The future answers clients while it is polled.
pub fn open(path: &Path, parts: Parts) -> anyhow::Result<impl Future<Output = ()> + use<>> {
    let bind = || {
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok::<_, std::io::Error>(listener)
    };
    let listener = bind().with_context(|| path.display().to_string())?;
    Ok(async move {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(place) = places.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let parts = parts.clone();
                    tokio::spawn(async move {
                        // A client that disconnects needs no answer.
                        serve(stream, &parts).await.ok();
                        drop(place);
                    });
                }
                Err(_) => sleep(ACCEPT_PAUSE).await,
            }
        }
    })
}

async fn serve(stream: UnixStream, parts: &Parts) -> std::io::Result<()> {
    let Parts { web, end_notice, freezer, departure } = parts;
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read);
    // Set by the first question that waits, until the client disconnects.
    let mut off = None;
    // It ends with the connection.
    let mut hold = None;
    loop {
        let mut line = Vec::new();
        let count = (&mut lines).take(MAX_QUESTION).read_until(b'\n', &mut line).await?;
        if count == 0 {
            return Ok(());
        }
        let question = serde_json::from_slice(&line).context("no question");
        if question.as_ref().is_ok_and(Question::awaits) {
            off.get_or_insert_with(|| end_notice.0.subscribe());
        }
        let answer = match (question, &mut off) {
            (Ok(Question::Off), Some(off)) => is_off(off).await,
            (Ok(Question::Log { after, wait: true }), Some(off)) => {
                wait_for_lines(web, after, off).await
            }
            (Ok(Question::Hold { freeze, seconds, encrypts }), _) => {
                let limit = Duration::from_secs(seconds);
                start_hold(&mut hold, freezer, (freeze, limit, encrypts)).await
            }
            (Ok(Question::Release), _) => end_hold(hold.take()).await,
            (Ok(Question::Migrate { wait, within }), _) => {
                migrate(departure.get(), freezer, (wait, within)).await
            }
            (Ok(question), _) => answer(web, question).await,
            (Err(error), _) => Err(error),
        };
        let mut bytes = match answer {
            Ok(value) => [b"{\"ok\":", &value[..], b"}"].concat(),
            Err(error) => {
                let status = Status::of(&error).code();
                json!({ "error": format!("{error:#}"), "status": status }).to_string().into_bytes()
            }
        };
        bytes.push(b'\n');
        write.write_all(&bytes).await?;
    }
}

async fn start_hold(
    hold: &mut Option<Hold>,
    freezer: &Freezer,
    (freeze, limit, encrypts): (bool, Duration, Option<bool>),
) -> anyhow::Result<Vec<u8>> {
    freezer.check_key(encrypts)?;
    *hold = Some(freezer.hold(freeze, limit).await?);
    Ok(b"null".to_vec())
}

async fn end_hold(hold: Option<Hold>) -> anyhow::Result<Vec<u8>> {
    let outcome = hold.context("the machine is not held")?.release().await?;
    Ok(serde_json::to_vec(&outcome)?)
}

async fn migrate(
    departure: Option<&Departure>,
    freezer: &Freezer,
    (wait, within): (u64, Option<u64>),
) -> anyhow::Result<Vec<u8>> {
    let departure = departure.context(
        "the machine cannot move: run this in the pod that runs the machine, and start both with \
         SHUTDOWN=migrate; the log says if it cannot move in spite of that",
    )?;
    // The file systems of a guest that was frozen would not be thawed in the other pod.
    let held = "the machine is held still, as for a snapshot: try again when that has ended";
    // A machine that is falling asleep has the turn.
    doze::wake().await?;
    let _turn = freezer.exclude().context(held)?;
    let limits =
        Limits { wait: Duration::from_secs(wait), within: within.map(Duration::from_secs) };
    Ok(serde_json::to_vec(&departure.command(limits).await?)?)
}

/// Waits until the machine is off, up to [`MAX_WAIT`].
async fn is_off(off: &mut watch::Receiver<Option<u8>>) -> anyhow::Result<Vec<u8>> {
    let status = timeout(MAX_WAIT, off.wait_for(Option::is_some)).await;
    let status = status.ok().and_then(Result::ok).and_then(|status| *status);
    Ok(serde_json::to_vec(&status)?)
}

/// Lines after this number. Waits until there are some or the machine is off, up to [`MAX_WAIT`].
async fn wait_for_lines(
    web: &WebState,
    after: u64,
    off: &mut watch::Receiver<Option<u8>>,
) -> anyhow::Result<Vec<u8>> {
    let mut scene = web.story.scene();
    let last = tokio::select! {
        biased;
        _ = off.wait_for(Option::is_some) => true,
        _ = timeout(MAX_WAIT, scene.wait_for(|it| it.lines > after)) => false,
    };
    let (lines, count) = web.story.lines(after);
    Ok(serde_json::to_vec(&LogLines { lines, count, last })?)
}

/// Reports the end of the machine to waiting clients before the pod ends.
#[derive(Clone, Default)]
pub struct EndNotice(Arc<watch::Sender<Option<u8>>>);

impl EndNotice {
    /// Reports that the machine is off, with the pod's exit status, and waits until the clients
    /// disconnect, at most `patience`.
    pub async fn send(&self, status: u8, patience: Duration) {
        self.0.send_replace(Some(status));
        timeout(patience, self.0.closed()).await.ok();
    }
}

/// Returns the answer's JSON.
async fn answer(web: &WebState, question: Question) -> anyhow::Result<Vec<u8>> {
    if question.needs_guest() {
        doze::wake().await?;
    }
    let value = match question {
        Question::State => web.state().await,
        Question::Health { of } => match web.health(of).await {
            (true, words) => words.into(),
            (false, words) => return Err(Failure::new(Status::Failed, words.trim_end())),
        },
        Question::Usb => usb::ask(usb::Request::List).await?,
        Question::AttachUsb { device } => usb::ask(usb::Request::Attach(device)).await?,
        Question::DetachUsb { device } => usb::ask(usb::Request::Detach(device)).await?,
        Question::Log { after, .. } => {
            let (lines, count) = web.story.lines(after);
            serde_json::to_value(LogLines { lines, count, last: false })?
        }
        // Only a client that asks this itself gets another answer, in `serve`.
        Question::Off => Value::Null,
        // These are for the connection, too.
        Question::Hold { .. } | Question::Release | Question::Migrate { .. } => Value::Null,
        Question::Wake => Value::Null,
        Question::Shutdown { .. } => stop::ask(&web.control(), &web.agent).await?,
        Question::Start { program, words, input } => {
            let mut call = json!({ "path": program, "arg": words, "capture-output": true });
            if let Some(input) = input {
                call["input-data"] = input.into();
            }
            let started = web.agent.ask("guest-exec", call).await;
            started.map_err(|error| failure(&error))?
        }
        Question::Outcome { pid } => {
            return web.agent.outcome(pid).await.map_err(|error| failure(&error));
        }
    };
    Ok(serde_json::to_vec(&value)?)
}

/// The exit status of such a failure in shells: no agent, not found, or not executable.
fn failure(error: &AgentError) -> anyhow::Error {
    let status = match error {
        AgentError::Absent(_) => Status::Agent,
        AgentError::Refused(why) if why.contains("No such file") => Status::NotFound,
        AgentError::Refused(_) => Status::NotRun,
    };
    Failure::new(status, error.to_string())
}
