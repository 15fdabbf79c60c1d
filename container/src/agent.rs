//! The agent in the guest: QEMU's (`qemu-ga`), behind the named port `org.qemu.guest_agent.0`.
//!
//! The port takes one connection, and this is it, for as long as the machine runs: whoever wants
//! something of the agent asks here, and is answered in turn. A connection is kept while nobody
//! asks, too: an agent whose port has nobody at its other end looks ten times a second whether
//! somebody came.
//!
//! Every question begins with one that carries a random number, and what the agent says before its
//! answer to that is thrown away: it is for somebody who has given up waiting.
//!
//! Threats: the guest answers what it likes, as slowly and as long as it likes. An answer has a
//! limit and a deadline, and is JSON of which [`guest`] takes what it knows.

pub mod guest;
pub mod line;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::time::timeout;

use self::guest::Guest;
use self::line::Hearing;
use crate::log::Few;
use crate::story::Story;

/// The port's name, by which the agent in the guest finds it.
pub const PORT: &str = "org.qemu.guest_agent.0";

/// An agent that is there answers the first question within: a guest may be busy.
const SYNC: Duration = Duration::from_secs(5);
/// And any other.
const ANSWER: Duration = Duration::from_secs(10);
/// What a program has written is long: up to 16 MiB of output, and as much of errors.
const HARVEST: Duration = Duration::from_secs(60);
/// One that shuts the guest down does not say so; one that will not does at once.
const REFUSAL: Duration = Duration::from_secs(1);
/// Answers are no longer, but for what a program has written, in letters of base64.
const SHORT: usize = 1 << 20;
const LONG: usize = 48 << 20;
/// What is read at once.
const PIECE: usize = 16 << 10;
/// So often a minute it is logged that it comes or goes.
const LINES: u32 = 10;
/// Between two looks whether an agent is there, while it is not, and while it is.
const AWAY: Duration = Duration::from_secs(2);
const HERE: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug)]
pub enum Lack {
    /// No agent answers.
    Absent(anyhow::Error),
    /// It will not, and says why.
    Refused(String),
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent(why) => write!(
                f,
                "no agent answers in the guest ({why:#}): install qemu-guest-agent there, and see \
                 that it runs"
            ),
            Self::Refused(why) => write!(f, "the guest's agent: {why}"),
        }
    }
}

impl std::error::Error for Lack {}

/// See the module.
pub struct Agent {
    path: PathBuf,
    line: Mutex<Line>,
    answers: watch::Sender<bool>,
}

/// The connection, if there is one.
#[derive(Default)]
struct Line {
    stream: Option<UnixStream>,
    /// When it was found out that nobody answers.
    missed: Option<Instant>,
    /// The number of the last question.
    last: u64,
}

impl Agent {
    /// Behind this socket.
    pub fn new(path: PathBuf) -> Self {
        Self { path, line: Mutex::default(), answers: watch::Sender::new(false) }
    }

    /// Whether it answered when it was last asked.
    pub fn answers(&self) -> bool {
        *self.answers.borrow()
    }

    /// Asks, in turn with others.
    ///
    /// # Errors
    ///
    /// When nobody answers, or the answer is no.
    pub async fn ask(&self, command: &str, arguments: Value) -> Result<Value, Lack> {
        let mut turn = self.turn().await?;
        let answer = self.question(&mut turn, command, arguments, (ANSWER, SHORT)).await?;
        line::returned(&answer).map_err(Lack::Refused)
    }

    /// How a program is that was started, as the agent writes it.
    ///
    /// # Errors
    ///
    /// When nobody answers, or the answer is no.
    pub async fn outcome(&self, pid: i64) -> Result<Vec<u8>, Lack> {
        let mut turn = self.turn().await?;
        let pid = json!({ "pid": pid });
        let answer = self.question(&mut turn, "guest-exec-status", pid, (HARVEST, LONG)).await?;
        match line::refused(&answer) {
            Some(why) => Err(Lack::Refused(why)),
            None => Ok(answer),
        }
    }

    /// Has it shut the guest down.
    ///
    /// # Errors
    ///
    /// When nobody answers, or it refuses.
    pub async fn shut_down(&self) -> Result<(), Lack> {
        let mut turn = self.turn().await?;
        let powerdown = json!({ "mode": "powerdown" });
        // No news is good news.
        let news = self.talk(&mut turn, "guest-shutdown", powerdown, SHORT);
        match timeout(REFUSAL, news).await {
            Ok(Ok(answer)) => line::refused(&answer).map_or(Ok(()), |why| Err(Lack::Refused(why))),
            Ok(Err(_)) | Err(_) => Ok(()),
        }
    }

    /// What the guest is, as far as its agent says.
    pub async fn guest(&self) -> Guest {
        let system = self.ask("guest-get-osinfo", Value::Null).await.ok();
        let addresses = self.ask("guest-network-get-interfaces", Value::Null).await.ok();
        Guest::new(system.as_ref(), addresses.as_ref())
    }

    /// Keeps the connection, and tells when an agent comes and goes, for as long as it is polled.
    pub async fn keep(self: Arc<Self>, story: Arc<Story>) {
        // What was told: others may find out first.
        let (mut was, mut changes) = (false, self.answers.subscribe());
        let mut lines = Few::new(LINES);
        loop {
            let is = self.turn().await.is_ok();
            // An agent may come and go as it likes.
            let news = is != was && lines.take(Instant::now());
            if news && is {
                let system = self.guest().await.system;
                let system = system.map_or(String::new(), |name| format!(": it is {name}"));
                story.tell(&format!("the guest's agent answers{system}"));
            } else if news {
                story.tell("the guest's agent answers no more");
            }
            was = is;
            changes.mark_unchanged();
            timeout(if is { HERE } else { AWAY }, changes.changed()).await.ok();
        }
    }

    /// Waits for our turn; the agent hears us then.
    async fn turn(&self) -> Result<MutexGuard<'_, Line>, Lack> {
        let asked = Instant::now();
        let mut turn = self.line.lock().await;
        // Who was before us has just found out.
        if turn.missed.is_some_and(|missed| missed >= asked) {
            return Err(Lack::Absent(anyhow!("it did not answer others")));
        }
        let heard = timeout(SYNC, self.sync(&mut turn)).await;
        let heard = heard.unwrap_or_else(|_| Err(anyhow!("not within {} s", SYNC.as_secs())));
        match heard {
            Ok(()) => {
                self.answers.send_if_modified(|it| !std::mem::replace(it, true));
                Ok(turn)
            }
            Err(error) => {
                self.lose(&mut turn).await;
                Err(Lack::Absent(error))
            }
        }
    }

    /// Asks the question that shows that the agent hears, and hears us.
    async fn sync(&self, line: &mut Line) -> anyhow::Result<()> {
        if line.stream.is_none() {
            line.stream = Some(UnixStream::connect(&self.path).await.context("no machine")?);
        }
        // Another each time, so that no answer is taken for another's.
        line.last = number(line.last);
        let id = line.last;
        let stream = line.stream.as_mut().context("no connection")?;
        stream.write_all(&line::sync(id)).await?;
        hear(stream, Hearing::sync(id)).await.map(drop)
    }

    /// Asks within a time, for an answer of this length; who does not answer is left.
    async fn question(
        &self,
        line: &mut Line,
        command: &str,
        arguments: Value,
        (within, limit): (Duration, usize),
    ) -> Result<Vec<u8>, Lack> {
        let answer = timeout(within, self.talk(line, command, arguments, limit)).await;
        let late = || Err(anyhow!("{command}: no answer within {} s", within.as_secs()));
        match answer.unwrap_or_else(|_| late()) {
            Ok(answer) => Ok(answer),
            Err(error) => {
                self.lose(line).await;
                Err(Lack::Absent(error))
            }
        }
    }

    async fn talk(
        &self,
        line: &mut Line,
        command: &str,
        arguments: Value,
        limit: usize,
    ) -> anyhow::Result<Vec<u8>> {
        let stream = line.stream.as_mut().context("no connection")?;
        stream.write_all(&line::command(command, arguments)).await?;
        hear(stream, Hearing::answer(limit)).await
    }

    /// Nobody answers. What was said and not heard is taken back by leaving; then we wait there.
    async fn lose(&self, line: &mut Line) {
        self.answers.send_if_modified(|it| std::mem::replace(it, false));
        line.stream =
            timeout(ANSWER, UnixStream::connect(&self.path)).await.ok().and_then(Result::ok);
        line.missed = Some(Instant::now());
    }
}

/// Reads until there is what was waited for.
async fn hear(stream: &mut UnixStream, mut hearing: Hearing) -> anyhow::Result<Vec<u8>> {
    let mut bytes = vec![0; PIECE];
    loop {
        let count = stream.read(&mut bytes).await?;
        anyhow::ensure!(count > 0, "it left");
        if let Some(heard) = hearing.take(&bytes[..count])? {
            return Ok(heard);
        }
    }
}

/// A number that nobody in the guest guesses; QEMU's integers have a sign.
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

    /// An agent that knows no command but the first.
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
    async fn what_others_found_out_first_is_told_too() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let served = tokio::spawn(serve(UnixListener::bind(&socket).unwrap()));
        let (agent, story) = (Arc::new(Agent::new(socket)), Story::new());
        agent.ask("guest-ping", Value::Null).await.unwrap_err();
        assert!(agent.answers());
        let kept = tokio::spawn(agent.clone().keep(story.clone()));
        let told = async |count: u64| {
            let mut scene = story.scene();
            timeout(4 * HERE, scene.wait_for(|it| it.lines >= count)).await.unwrap().unwrap();
            story.lines(count - 1).0[0].text.clone()
        };
        assert_eq!(told(1).await, "the guest's agent answers");
        served.abort();
        assert!(served.await.unwrap_err().is_cancelled());
        agent.ask("guest-ping", Value::Null).await.unwrap_err();
        assert!(!agent.answers());
        assert_eq!(told(2).await, "the guest's agent answers no more");
        kept.abort();
    }
}
