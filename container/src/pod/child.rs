//! The process of the machine: `vmm run`, with its configuration on standard input.

use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child as Process, ChildStderr, ChildStdin, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::Level;
use vmm::config::Config;
use vmm::control;

use super::asked;
use super::console::{self, Console, Told};
use super::heard::{Heard, Repeats};
use super::lines::line;
use super::tpm::Tpm;
use crate::log::bucket::{Bucket, MARKS, PROGRAM};
use crate::story::Story;
use crate::story::ear::KEPT;

/// Its last words are read within, once it has ended.
const SAID: Duration = Duration::from_secs(1);
/// So much of the firmware's news waits for us. The guest may say as much as it likes.
const NEWS: usize = 64;

/// The process.
pub struct Child {
    process: Process,
    control: PathBuf,
    /// Where it reads what it is to be.
    input: Option<ChildStdin>,
    /// What it needs as long as it lives.
    tpm: Option<Tpm>,
    /// Repeats what it says, to the end.
    said: Option<JoinHandle<()>>,
    last: Last,
}

/// The last mistake that the process told.
type Last = Arc<Mutex<Option<String>>>;

/// How the process goes about its work.
#[derive(Clone, Copy, Debug)]
pub struct Manner<'a> {
    /// What it logs.
    pub level: &'a str,
    /// The zone of the guest's clock; that of the container if it is not said.
    pub zone: Option<&'a str>,
    /// What of the guest's lines at its serial port is repeated.
    pub repeats: Repeats,
}

/// What the firmware of the machine tells, each with the last lines at that moment.
pub type News = mpsc::Receiver<(Told, String)>;

impl Child {
    /// Starts it, to listen at this control socket. It waits to be told what it is to be.
    ///
    /// # Errors
    ///
    /// When there is no `vmm`, or it cannot be started.
    pub fn start(
        control: PathBuf,
        story: &Arc<Story>,
        manner: Manner<'_>,
    ) -> anyhow::Result<(Self, News)> {
        let program = program();
        let mut process = Command::new(&program)
            .args(["run", "--config", "-"])
            // What the environment says is for us, passwords included.
            .env_clear()
            .env("VMM_LOG", manner.level)
            .env("VMM_LOG_FORMAT", "json")
            .envs(manner.zone.map(|zone| ("TZ", zone)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A terminal's Ctrl-C is for us: we ask the guest.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| program.display().to_string())?;
        let input = process.stdin.take();
        let (tell, told) = mpsc::channel(NEWS);
        let output = process.stdout.take().context("no standard output")?;
        let heard = Heard::new(story.clone(), manner.repeats);
        tokio::spawn(listen(output, heard, tell));
        let errors = process.stderr.take().context("no standard error")?;
        let last = Last::default();
        let said = tokio::spawn(repeat(errors, story.clone(), last.clone()));
        Ok((Self { process, control, input, tpm: None, said: Some(said), last }, told))
    }

    /// Tells it what it is to be, once.
    ///
    /// # Errors
    ///
    /// When it has been told.
    pub async fn tell(&mut self, config: &Config) -> anyhow::Result<()> {
        let mut input = self.input.take().context("no standard input")?;
        let text = serde_json::to_string(config)?;
        // Who ends before it has read all says why.
        input.write_all(text.as_bytes()).await.ok();
        Ok(())
    }

    /// Gives it a TPM, for as long as it lives.
    pub fn keep(&mut self, tpm: Option<Tpm>) {
        self.tpm = tpm;
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// When the kernel does not tell.
    pub async fn end(&mut self) -> io::Result<ExitStatus> {
        self.process.wait().await
    }

    /// The last mistake that it told, once it has ended.
    pub async fn mistake(&mut self) -> Option<String> {
        if let Some(said) = self.said.take() {
            // Somebody else may still have its standard error.
            timeout(SAID, said).await.ok();
        }
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Its number, while it lives.
    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }

    /// That number, and that of its TPM.
    pub fn ids(&self) -> Vec<u32> {
        self.id().into_iter().chain(self.tpm.as_ref().and_then(Tpm::id)).collect()
    }

    /// Asks the machine.
    ///
    /// # Errors
    ///
    /// When it says no, or is gone.
    pub async fn ask(&self, command: control::Command) -> anyhow::Result<Value> {
        asked::ask(&self.control, command).await
    }

    /// Tells it to end, before it listens, too.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Ends it at once.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        let pid = self.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(pid) = pid {
            // Who is gone needs none.
            kill_process(pid, signal).ok();
        }
    }
}

/// The program beside ours, or the one that the system finds.
pub fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name("vmm"));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| "vmm".into())
}

/// Hears the serial port. What the firmware tells is looked for in every line, whether it is
/// repeated or not; more marks than firmware makes are somebody else's.
async fn listen(
    mut output: impl AsyncRead + Unpin,
    mut heard: Heard,
    tell: mpsc::Sender<(Told, String)>,
) {
    let (mut console, mut marks) = (Console::default(), Bucket::new(MARKS));
    let mut bytes = vec![0; 4096];
    loop {
        let count = tokio::select! {
            read = output.read(&mut bytes) => read.unwrap_or(0),
            () = heard.resumes() => continue,
        };
        if count == 0 {
            break;
        }
        for line in console.take(&bytes[..count]) {
            heard.hear(&line);
            if let Some(told) = console::told(&line)
                && marks.take(line.len(), Instant::now()).is_some()
            {
                // Nobody listens any more once the machine ends; what finds no room is of no use.
                tell.try_send((told, console.last())).ok();
            }
        }
    }
    heard.end();
}

/// Repeats what the process says itself, as it says it: a burst, and then at a rate, since a guest
/// may cause some of it, or have taken the process over.
async fn repeat(errors: ChildStderr, story: Arc<Story>, last: Last) {
    let mut errors = BufReader::new(errors);
    let [mut mistakes, mut others] = [(); 2].map(|()| Bucket::new(PROGRAM));
    while let Ok(Some(line)) = line(&mut errors).await {
        let (level, text) = event(&line).unwrap_or((Level::ERROR, line));
        if level == Level::ERROR {
            *last.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.clone());
        }
        let bucket = if level == Level::ERROR { &mut mistakes } else { &mut others };
        let Some(before) = bucket.take(text.len(), Instant::now()) else { continue };
        if before > 0 {
            tracing::warn!("{before} lines of the machine's process are left out here");
        }
        match level {
            Level::ERROR => tracing::error!(target: KEPT, "{text}"),
            Level::WARN => tracing::warn!(target: KEPT, "{text}"),
            Level::INFO => tracing::info!(target: KEPT, "{text}"),
            Level::DEBUG => tracing::debug!(target: KEPT, "{text}"),
            _ => tracing::trace!(target: KEPT, "{text}"),
        }
        if level <= Level::INFO {
            story.keep(level, &text);
        }
    }
    let missing = mistakes.missing() + others.missing();
    if missing > 0 {
        tracing::warn!("{missing} lines of the machine's process are left out here");
    }
}

/// An event of the process' log: how grave it is, and its words. What is none is its last sentence.
fn event(line: &str) -> Option<(Level, String)> {
    let event: Value = serde_json::from_str(line).ok()?;
    let level = event["level"].as_str()?.parse().ok()?;
    let mut text = event["fields"]["message"].as_str()?.to_owned();
    for (name, value) in event["fields"].as_object()?.iter().filter(|(name, _)| *name != "message")
    {
        match value.as_str() {
            Some(value) => write!(text, " {name}={value}").ok()?,
            None => write!(text, " {name}={value}").ok()?,
        }
    }
    Some((level, text))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_the_process_says_keeps_its_weight() {
        let line = r#"{"level":"WARN","fields":{"message":"nvme","size":5,"disk":"/a b"}}"#;
        assert_eq!(event(line), Some((Level::WARN, "nvme disk=/a b size=5".into())));
        assert_eq!(event("vmm: --disk x: no such file"), None);
        assert_eq!(event("{}"), None);
    }

    #[tokio::test]
    async fn news_that_nobody_reads_does_not_pile_up() {
        let said = "BdsDxe: starting Boot0001 \"x\" from PciRoot(0x0)\r\n".repeat(10 * NEWS);
        let (tell, mut told) = mpsc::channel(NEWS);
        listen(said.as_bytes(), Heard::new(Story::new(), Repeats::Nothing), tell).await;
        let mut count = 0;
        while let Some((Told::Starts { .. }, _)) = told.recv().await {
            count += 1;
        }
        assert_eq!(count, NEWS);
    }

    #[tokio::test]
    async fn a_guest_that_floods_its_serial_port_hides_no_mark_of_the_firmware() {
        let story = Story::new();
        let line = "x".repeat(99);
        let flood = format!("{line}\n").repeat(500_000);
        let said = format!("{flood}BdsDxe: No bootable option or device was found.\n{flood}");
        let (tell, mut told) = mpsc::channel(NEWS);
        let heard = Heard::new(story.clone(), Repeats::Lines);
        listen(said.as_bytes(), heard, tell).await;
        assert!(matches!(told.recv().await, Some((Told::Nothing, _))));
        let (lines, count) = story.lines(0);
        assert!(count < 2600, "{count} of a million lines");
        let last = &lines.last().unwrap().text;
        assert!(last.ends_with(" lines of the guest are left out here"), "{last}");
    }
}
