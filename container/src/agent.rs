//! Client of QEMU's guest agent (`qemu-ga`), behind the virtio-serial port
//! `org.qemu.guest_agent.0`.
//!
//! The port takes a single connection, which [`Agent`] holds for as long as the machine runs: all
//! requests go through it, one at a time. The connection stays open between requests, because an
//! agent whose port has no peer polls it ten times a second.
//!
//! Each request begins with a `guest-sync-delimited` that carries a random number. Everything that
//! the agent sends before the answer to it is discarded: it answers a request that timed out.
//!
//! Threats: the guest answers anything, as slowly and at any length it likes. Each answer has a
//! maximum length and a deadline, and is JSON from which [`guest`] takes only known fields.

pub mod guest;
pub mod protocol;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::time::timeout;

use self::guest::Guest;
use self::protocol::AnswerReader;
use crate::log::LineLimit;
use crate::pod::doze;
use crate::story::Story;

/// Name of the virtio-serial port that the agent in the guest looks for.
pub const PORT: &str = "org.qemu.guest_agent.0";

/// Timeout of the sync request, which also detects a missing agent. Generous, because a guest may
/// be busy.
const SYNC_TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for the output of a program: up to 16 MiB each from standard output and standard error.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(60);
/// An agent that shuts the guest down sends no answer; one that refuses does so within this time.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum length of an answer in bytes. `MAX_OUTPUT` is for the output of a program, in base64.
const MAX_ANSWER: usize = 1 << 20;
const MAX_OUTPUT: usize = 48 << 20;
const READ_SIZE: usize = 16 << 10;
/// Maximum log lines per minute about the agent coming and going.
const MAX_LINES: u32 = 10;
/// Interval between polls: while no agent answers (`POLL_ABSENT`), and while one does
/// (`POLL_PRESENT`).
const POLL_ABSENT: Duration = Duration::from_secs(2);
const POLL_PRESENT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy)]
struct Limits {
    within: Duration,
    length: usize,
}

#[derive(Debug)]
pub enum AgentError {
    Absent(anyhow::Error),
    Refused(String),
}

impl fmt::Display for AgentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(why) => write!(
                f,
                "no agent answers in the guest ({why:#}): install qemu-guest-agent there, and \
                 check that it runs"
            ),
            Self::Refused(why) => write!(f, "the guest's agent: {why}"),
        }
    }
}

impl std::error::Error for AgentError {}

/// Sends one request at a time.
pub struct Agent {
    path: PathBuf,
    connection: Mutex<Connection>,
    answers: watch::Sender<bool>,
}

#[derive(Default)]
struct Connection {
    stream: Option<UnixStream>,
    /// Time of the last failure.
    missed: Option<Instant>,
    /// Number of the last sync request.
    last: u64,
}

impl Agent {
    /// Connects with the first request.
    pub fn new(path: PathBuf) -> Self {
        Self { path, connection: Mutex::default(), answers: watch::Sender::new(false) }
    }

    /// Whether the agent answered the last request.
    pub fn answers(&self) -> bool {
        *self.answers.borrow()
    }

    /// Concurrent calls wait for one another.
    pub async fn ask(&self, command: &str, arguments: Value) -> Result<Value, AgentError> {
        let mut turn = self.synchronize().await?;
        let limits = Limits { within: ANSWER_TIMEOUT, length: MAX_ANSWER };
        let answer = self.send_command(&mut turn, command, arguments, limits).await?;
        protocol::returned(&answer).map_err(AgentError::Refused)
    }

    /// Queries a program that was started with `guest-exec`. Returns the agent's JSON unparsed.
    pub async fn outcome(&self, pid: i64) -> Result<Vec<u8>, AgentError> {
        let mut turn = self.synchronize().await?;
        let pid = json!({ "pid": pid });
        let limits = Limits { within: OUTPUT_TIMEOUT, length: MAX_OUTPUT };
        let answer = self.send_command(&mut turn, "guest-exec-status", pid, limits).await?;
        match protocol::refused(&answer) {
            Some(why) => Err(AgentError::Refused(why)),
            None => Ok(answer),
        }
    }

    pub async fn shut_down(&self) -> Result<(), AgentError> {
        let mut turn = self.synchronize().await?;
        let powerdown = json!({ "mode": "powerdown" });
        // A successful shutdown has no answer: silence and a lost connection are success.
        let news = self.exchange(&mut turn, "guest-shutdown", powerdown, MAX_ANSWER);
        match timeout(REFUSAL_TIMEOUT, news).await {
            Ok(Ok(answer)) => {
                protocol::refused(&answer).map_or(Ok(()), |why| Err(AgentError::Refused(why)))
            }
            Ok(Err(_)) | Err(_) => Ok(()),
        }
    }

    /// Sets the guest's clock to this host's.
    pub async fn set_time(&self) -> Result<(), AgentError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let time = u64::try_from(now).unwrap_or(u64::MAX);
        self.ask("guest-set-time", json!({ "time": time })).await.map(drop)
    }

    /// Empty where the agent does not answer.
    pub async fn guest(&self) -> Guest {
        let system = self.ask("guest-get-osinfo", Value::Null).await.ok();
        let addresses = self.ask("guest-network-get-interfaces", Value::Null).await.ok();
        Guest::new(system.as_ref(), addresses.as_ref())
    }

    /// Logs when an agent comes and goes, and keeps the connection open, while polled.
    pub async fn monitor(self: Arc<Self>, story: Arc<Story>) {
        // `was` is the last state that was logged: a request of another task may notice a change
        // first.
        let (mut was, mut changes) = (false, self.answers.subscribe());
        let mut lines = LineLimit::new(MAX_LINES);
        loop {
            // A guest that sleeps is not asked, and so its agent is not gone.
            doze::awake().await;
            let is = self.synchronize().await.is_ok();
            // The guest controls how often its agent comes and goes, so these lines are limited.
            let changed = is != was && lines.take(Instant::now());
            if changed && is {
                let system = self.guest().await.system;
                let system = system.map_or(String::new(), |name| format!(": it is {name}"));
                story.info(&format!("the guest's agent answers{system}"));
            } else if changed {
                story.info("the guest's agent does not answer any more");
            }
            was = is;
            changes.mark_unchanged();
            timeout(if is { POLL_PRESENT } else { POLL_ABSENT }, changes.changed()).await.ok();
        }
    }

    /// Locks the connection and synchronizes with the agent, so that it is ready for a command.
    async fn synchronize(&self) -> Result<MutexGuard<'_, Connection>, AgentError> {
        let asked = Instant::now();
        let mut turn = self.connection.lock().await;
        // The previous holder of the lock found, while we waited, that no agent answers.
        if turn.missed.is_some_and(|missed| missed >= asked) {
            return Err(AgentError::Absent(anyhow!("it did not answer an earlier request")));
        }
        let answer = timeout(SYNC_TIMEOUT, self.sync(&mut turn)).await;
        let late = || anyhow!("no answer within {} s", SYNC_TIMEOUT.as_secs());
        let answer = answer.unwrap_or_else(|_| Err(late()));
        match answer {
            Ok(()) => {
                self.answers.send_if_modified(|it| !std::mem::replace(it, true));
                Ok(turn)
            }
            Err(error) => {
                self.reset_connection(&mut turn).await;
                Err(AgentError::Absent(error))
            }
        }
    }

    /// Sends the sync request: its answer shows that the agent reads from this connection.
    async fn sync(&self, connection: &mut Connection) -> anyhow::Result<()> {
        if connection.stream.is_none() {
            connection.stream = Some(UnixStream::connect(&self.path).await.context("no machine")?);
        }
        // A new number each time, so that a late answer to an earlier request is not mistaken for
        // this one.
        connection.last = number(connection.last);
        let id = connection.last;
        let stream = connection.stream.as_mut().context("no connection")?;
        stream.write_all(&protocol::sync(id)).await?;
        read_answer(stream, AnswerReader::sync(id)).await.map(drop)
    }

    /// Resets the connection if there is no answer.
    async fn send_command(
        &self,
        connection: &mut Connection,
        command: &str,
        arguments: Value,
        limits: Limits,
    ) -> Result<Vec<u8>, AgentError> {
        let Limits { within, length } = limits;
        let answer = timeout(within, self.exchange(connection, command, arguments, length)).await;
        let late = || Err(anyhow!("{command}: no answer within {} s", within.as_secs()));
        match answer.unwrap_or_else(|_| late()) {
            Ok(answer) => Ok(answer),
            Err(error) => {
                self.reset_connection(connection).await;
                Err(AgentError::Absent(error))
            }
        }
    }

    async fn exchange(
        &self,
        connection: &mut Connection,
        command: &str,
        arguments: Value,
        limit: usize,
    ) -> anyhow::Result<Vec<u8>> {
        let stream = connection.stream.as_mut().context("no connection")?;
        stream.write_all(&protocol::command(command, arguments)).await?;
        read_answer(stream, AnswerReader::answer(limit)).await
    }

    /// Reconnecting discards what was sent and not read; the new connection stays open for an agent
    /// that comes later.
    async fn reset_connection(&self, connection: &mut Connection) {
        self.answers.send_if_modified(|it| std::mem::replace(it, false));
        connection.stream = timeout(ANSWER_TIMEOUT, UnixStream::connect(&self.path))
            .await
            .ok()
            .and_then(Result::ok);
        connection.missed = Some(Instant::now());
    }
}

async fn read_answer(stream: &mut UnixStream, mut reader: AnswerReader) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![0; READ_SIZE];
    loop {
        let count = stream.read(&mut bytes).await?;
        anyhow::ensure!(count > 0, "the agent disconnected");
        if let Some(answer) = reader.take(&bytes[..count])? {
            return Ok(answer);
        }
    }
}

/// Random number that the guest cannot guess. 62 bits, because QEMU's integers are signed.
fn number(last: u64) -> u64 {
    let mut bytes = [0; 8];
    let filled = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    match filled {
        Ok(8) => u64::from_le_bytes(bytes) >> 2,
        _ => last + 1,
    }
}

#[cfg(test)]
pub(crate) mod test {
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    use tokio::net::UnixListener;

    use super::*;

    /// Serves as an agent that knows no command except the sync request.
    pub(crate) async fn serve(listener: UnixListener) {
        let (stream, _) = listener.accept().await.unwrap();
        let (read, mut write) = stream.into_split();
        let mut lines = BufReader::new(read);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).await.unwrap() > 0 {
            let start = usize::from(line[0] == 0xff);
            let question: Value = serde_json::from_slice(&line[start..]).unwrap();
            let answer = match question["arguments"]["id"].as_u64() {
                Some(id) => format!("{}\n", json!({ "return": id })),
                None => format!("{}\n", json!({ "error": { "desc": "what?" } })),
            };
            write.write_all(&[&line[..start], answer.as_bytes()].concat()).await.unwrap();
            line.clear();
        }
    }

    #[tokio::test]
    async fn an_agent_found_by_a_request_is_logged_too() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let served = tokio::spawn(serve(UnixListener::bind(&socket).unwrap()));
        let (agent, story) = (Arc::new(Agent::new(socket)), Story::new());
        agent.ask("guest-ping", Value::Null).await.unwrap_err();
        assert!(agent.answers());
        let kept = tokio::spawn(agent.clone().monitor(story.clone()));
        let told = async |count: u64| {
            let mut scene = story.scene();
            timeout(4 * POLL_PRESENT, scene.wait_for(|it| it.lines >= count))
                .await
                .unwrap()
                .unwrap();
            story.lines(count - 1).0[0].text.clone()
        };
        assert_eq!(told(1).await, "the guest's agent answers");
        served.abort();
        assert!(served.await.unwrap_err().is_cancelled());
        agent.ask("guest-ping", Value::Null).await.unwrap_err();
        assert!(!agent.answers());
        assert_eq!(told(2).await, "the guest's agent does not answer any more");
        kept.abort();
    }
}
