//! What commands in the container ask the pod: a JSON object a line, each way, as at the machine's
//! control socket. `{"ask": "state"}` is answered `{"ok": …}`, or `{"error": …, "status": …}`.
//!
//! Only who may open the socket may ask: it lies in the pod's room, which is its user's alone.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

use super::stop;
use crate::agent::Lack;
use crate::status::{Failure, Status};
use crate::story::Line;
use crate::web::{Front, Health};

/// Who asks at once.
const MOST: usize = 64;
/// A program, its words and what it reads are no longer.
pub const LONGEST: u64 = 3 << 20;
/// Nobody waits longer for news of the log: then there is none.
pub const NEWS: Duration = Duration::from_secs(20);
/// Out of file descriptors, for a while.
const REST: Duration = Duration::from_millis(100);

/// What can be asked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "lowercase", deny_unknown_fields)]
pub enum Question {
    /// How the pod is, its machine and its guest.
    State,
    /// Whether all is well.
    Health {
        /// Of what.
        of: Health,
    },
    /// What was said.
    Log {
        /// After so many lines.
        after: u64,
        /// If there is nothing, it is waited for. Whoever waits once hears all before the pod ends.
        wait: bool,
    },
    /// To shut the guest down.
    Shutdown {
        /// Whoever asks will ask whether it is off, and hears that before the pod ends.
        #[serde(default)]
        wait: bool,
    },
    /// Whether the machine is off: it is waited for, but not for long.
    Off,
    /// To start a program in the guest. The answer is its number there.
    Start {
        /// Where it is, or its name.
        program: String,
        /// What follows.
        words: Vec<String>,
        /// What it reads at standard input, in letters of base64.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        input: Option<String>,
    },
    /// How a program is that was started. The answer is the agent's own.
    Outcome {
        /// Its number.
        pid: i64,
    },
}

impl Question {
    /// Whoever asks this hears of the end of the machine before the pod ends.
    const fn awaits(&self) -> bool {
        matches!(self, Self::Off | Self::Log { wait: true, .. } | Self::Shutdown { wait: true })
    }
}

/// Lines of the log.
#[derive(Debug, Serialize, Deserialize)]
pub struct News {
    /// All that is kept and was not known.
    pub lines: Vec<Line>,
    /// How many there ever were.
    pub count: u64,
    /// The pod ends: these were the last.
    pub last: bool,
}

/// Listens; what comes back answers for as long as it is polled.
///
/// # Errors
///
/// When the socket cannot be made.
pub fn open(
    path: &Path,
    front: Arc<Front>,
    farewell: Farewell,
) -> anyhow::Result<impl Future<Output = ()> + use<>> {
    let bind = || {
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok::<_, std::io::Error>(listener)
    };
    let listener = bind().with_context(|| path.display().to_string())?;
    Ok(async move {
        let places = Arc::new(Semaphore::new(MOST));
        loop {
            let Ok(place) = places.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (front, farewell) = (front.clone(), farewell.clone());
                    tokio::spawn(async move {
                        // Whoever leaves in between needs no answer.
                        serve(stream, &front, &farewell).await.ok();
                        drop(place);
                    });
                }
                Err(_) => sleep(REST).await,
            }
        }
    })
}

/// Answers one who asks, until they leave.
async fn serve(stream: UnixStream, front: &Front, farewell: &Farewell) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read);
    // From the first question about what is to come until they have left.
    let mut off = None;
    loop {
        let mut line = Vec::new();
        let count = (&mut lines).take(LONGEST).read_until(b'\n', &mut line).await?;
        if count == 0 {
            return Ok(());
        }
        let question = serde_json::from_slice(&line).context("no question");
        if question.as_ref().is_ok_and(Question::awaits) {
            off.get_or_insert_with(|| farewell.0.subscribe());
        }
        let answer = match (question, &mut off) {
            (Ok(Question::Off), Some(off)) => is_off(off).await,
            (Ok(Question::Log { after, wait: true }), Some(off)) => news(front, after, off).await,
            (Ok(question), _) => answer(front, question).await,
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

/// Waits a while for the machine to be off.
async fn is_off(off: &mut watch::Receiver<bool>) -> anyhow::Result<Vec<u8>> {
    let is_off = timeout(NEWS, off.wait_for(|off| *off)).await.is_ok();
    Ok(serde_json::to_vec(&is_off)?)
}

/// Lines after so many, once there are any or the machine is off; nobody waits long.
async fn news(
    front: &Front,
    after: u64,
    off: &mut watch::Receiver<bool>,
) -> anyhow::Result<Vec<u8>> {
    let mut scene = front.story().scene();
    let last = tokio::select! {
        biased;
        _ = off.wait_for(|off| *off) => true,
        _ = timeout(NEWS, scene.wait_for(|it| it.lines > after)) => false,
    };
    let (lines, count) = front.story().lines(after);
    Ok(serde_json::to_vec(&News { lines, count, last })?)
}

/// Tells those who wait for the end of the machine, before the pod's own end takes them along.
#[derive(Clone, Default)]
pub struct Farewell(Arc<watch::Sender<bool>>);

impl Farewell {
    /// The machine is off. Whoever waits for that hears it, and leaves; if not, not for long.
    pub async fn say(&self, patience: Duration) {
        self.0.send_replace(true);
        timeout(patience, self.0.closed()).await.ok();
    }
}

/// An answer, in JSON.
async fn answer(front: &Front, question: Question) -> anyhow::Result<Vec<u8>> {
    let value = match question {
        Question::State => front.state().await,
        Question::Health { of } => match front.health(of).await {
            (true, words) => words.into(),
            (false, words) => return Err(Failure::new(Status::Failed, words.trim_end())),
        },
        Question::Log { after, .. } => {
            let (lines, count) = front.story().lines(after);
            serde_json::to_value(News { lines, count, last: false })?
        }
        // That is about who asks, not about the pod.
        Question::Off => false.into(),
        Question::Shutdown { .. } => stop::ask(&front.control(), front.agent()).await?,
        Question::Start { program, words, input } => {
            let mut call = json!({ "path": program, "arg": words, "capture-output": true });
            if let Some(input) = input {
                call["input-data"] = input.into();
            }
            let started = front.agent().ask("guest-exec", call).await;
            started.map_err(|lack| failure(&lack))?
        }
        Question::Outcome { pid } => {
            return front.agent().outcome(pid).await.map_err(|lack| failure(&lack));
        }
    };
    Ok(serde_json::to_vec(&value)?)
}

/// As commands of the kind end: no way, not found, or not to be run.
fn failure(lack: &Lack) -> anyhow::Error {
    let status = match lack {
        Lack::Absent(_) => Status::Agent,
        Lack::Refused(why) if why.contains("No such file") => Status::NotFound,
        Lack::Refused(_) => Status::NotRun,
    };
    Failure::new(status, lack.to_string())
}
