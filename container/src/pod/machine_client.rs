//! Asks the machine at its control socket, in bounded time and space, whatever state its process is
//! in.
//!
//! Threats: a guest that took over its `vmm` may not answer, or answer endlessly. No thread blocks
//! on it, no answer is longer than [`MAX_ANSWER_BYTES`], and however many clients ask for its
//! status, only one question is sent at a time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};
use vmm::control::{self, Command, MAX_ANSWER_BYTES};

use super::doze;

/// Timeout of commands that the machine answers immediately.
pub const QUICK: Duration = Duration::from_secs(5);
/// Timeout of commands that wait for disks, or open files.
const SLOW: Duration = Duration::from_secs(60);
/// Timeout of typing: a guest may read a long text slowly.
const TYPING: Duration = Duration::from_secs(900);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const GONE: &str = "the machine is gone";

/// Wakes the machine first, if it is asleep and the command needs its guest.
pub async fn ask(control: &Path, command: Command) -> anyhow::Result<Value> {
    if needs_guest(&command) {
        doze::wake().await?;
    }
    ask_now(control, command).await
}

fn needs_guest(command: &Command) -> bool {
    !matches!(command, Command::Status | Command::Balloon { .. } | Command::Screenshot)
}

/// Waits until the machine answers, which it does as soon as its guest can run.
pub async fn until_ready(control: &Path) {
    while ask_now(control, Command::Status).await.is_err() {
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits until a frame arrives for a machine that is asleep. Returns false if somebody has woken
/// it, or waits, too.
pub async fn wait_for_frame(control: &Path) -> anyhow::Result<bool> {
    let answer = answer(control, &Command::Await).await?;
    answer["frame"].as_bool().context("an answer without `frame`")
}

/// Asks the machine as it is, asleep or not.
pub async fn ask_now(control: &Path, command: Command) -> anyhow::Result<Value> {
    let time = match command {
        Command::Status
        | Command::Balloon { .. }
        | Command::PowerButton
        | Command::Resume
        | Command::Quit => QUICK,
        Command::Type { .. } => TYPING,
        _ => SLOW,
    };
    ask_within(control, &command, time).await
}

pub async fn ask_within(
    control: &Path,
    command: &Command,
    time: Duration,
) -> anyhow::Result<Value> {
    let answer = timeout(time, answer(control, command)).await;
    answer.with_context(|| format!("the machine did not answer within {time:?}"))?
}

async fn answer(control: &Path, command: &Command) -> anyhow::Result<Value> {
    let stream = UnixStream::connect(control).await;
    let mut stream = stream.context("the machine does not listen: it is starting, or has ended")?;
    let question = format!("{}\n", serde_json::to_string(command)?);
    stream.write_all(question.as_bytes()).await.context(GONE)?;
    let mut line = Vec::new();
    let mut answer = BufReader::new(stream).take(MAX_ANSWER_BYTES);
    answer.read_until(b'\n', &mut line).await.context(GONE)?;
    control::parse_answer(&line)
}

/// The last answer, and when its question was sent.
type LastAnswer = Option<(Instant, Option<Value>)>;

/// The machine's status, shared by many clients.
#[derive(Clone)]
pub struct Status {
    control: PathBuf,
    last: Arc<Mutex<LastAnswer>>,
}

impl Status {
    pub fn new(control: PathBuf) -> Self {
        Self { control, last: Arc::default() }
    }

    /// `None` without an answer.
    pub async fn get(&self) -> Option<Value> {
        self.get_within(QUICK).await
    }

    async fn get_within(&self, time: Duration) -> Option<Value> {
        let came = Instant::now();
        let mut last = self.last.clone().lock_owned().await;
        if let Some((asked, value)) = &*last
            && *asked >= came
        {
            return value.clone();
        }
        let control = self.control.clone();
        // A task of its own: if this client disconnects, the next one uses the answer.
        let asked = tokio::spawn(async move {
            let asked = Instant::now();
            let value = ask_within(&control, &Command::Status, time).await.ok();
            *last = Some((asked, value.clone()));
            value
        });
        asked.await.ok().flatten()
    }
}

#[cfg(test)]
mod test {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc::{self, Receiver};
    use std::thread;

    use super::*;

    const SHORT: Duration = Duration::from_secs(1);

    /// A machine that sends `says` as often as `times` after each question, and notifies the
    /// receiver of each question.
    fn machine(says: Vec<u8>, times: usize) -> (tempfile::TempDir, PathBuf, Receiver<()>) {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("vmm.sock");
        let listener = UnixListener::bind(&control).unwrap();
        let (tell, asked) = mpsc::channel();
        thread::spawn(move || {
            // Keep unanswered connections open.
            let mut kept = Vec::new();
            while let Ok((stream, _)) = listener.accept() {
                BufReader::new(&stream).read_line(&mut String::new()).unwrap();
                tell.send(()).ok();
                for _ in 0..times {
                    if (&stream).write_all(&says).is_err() {
                        break;
                    }
                }
                kept.push(stream);
            }
        });
        (folder, control, asked)
    }

    #[tokio::test]
    async fn a_silent_or_endless_answer_times_out() {
        let (_folder, control, _) = machine(Vec::new(), 0);
        let error = ask_within(&control, &Command::Status, SHORT).await.unwrap_err();
        assert!(error.to_string().contains("did not answer within"), "{error:#}");
        let (_folder, control, _) = machine(vec![b'x'; 1 << 16], usize::MAX);
        let error = ask(&control, Command::Status).await.unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error:#}");
        let (_folder, control, _) = machine(b"{\"ok\":{\"state\":\"running\"}}\n".to_vec(), 1);
        assert_eq!(ask(&control, Command::Status).await.unwrap()["state"], "running");
        let (_folder, control, _) = machine(b"{\"error\":\"no\"}\n".to_vec(), 1);
        assert_eq!(ask(&control, Command::Nmi).await.unwrap_err().to_string(), "no");
    }

    #[tokio::test]
    async fn concurrent_status_requests_share_one_query() {
        let (_folder, control, asked) = machine(Vec::new(), 0);
        let status = Status::new(control);
        let left = timeout(SHORT / 10, status.get_within(SHORT)).await;
        assert!(left.is_err(), "{left:?}");
        let all = (0..40).map(|_| status.get_within(SHORT));
        let all = futures_util::future::join_all(all).await;
        assert!(all.iter().all(Option::is_none));
        // One question of the client that left, and one for all others.
        (0..2).for_each(|_| asked.recv_timeout(SLOW).unwrap());
        assert!(asked.recv_timeout(SHORT).is_err(), "a third question");
        let (_folder, control, asked) = machine(b"{\"ok\":{\"state\":\"running\"}}\n".to_vec(), 1);
        let status = Status::new(control);
        for _ in 1..4 {
            assert_eq!(status.get().await.unwrap()["state"], "running");
            assert_eq!(asked.try_iter().count(), 1, "no answer is an old one");
        }
    }
}
