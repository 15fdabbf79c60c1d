//! The process of the machine: `vmm run`, with its configuration on standard input.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child as Process, ChildStderr, ChildStdout, Command};
use tokio::sync::mpsc;
use tracing::Level;
use vmm::config::Config;
use vmm::control::{self, Client};

use super::console::{self, Console, Told};
use crate::story::Story;

/// The process.
pub struct Child {
    process: Process,
    control: PathBuf,
}

/// How the process goes about its work.
#[derive(Clone, Copy, Debug)]
pub struct Manner<'a> {
    /// What it logs.
    pub level: &'a str,
    /// The zone of the guest's clock; that of the container if it is not said.
    pub zone: Option<&'a str>,
    /// What the guest says at its serial port is not repeated.
    pub quiet: bool,
}

/// What the firmware of the machine tells, each with the last lines at that moment.
pub type News = mpsc::UnboundedReceiver<(Told, String)>;

impl Child {
    /// Starts it, to listen at this control socket.
    ///
    /// # Errors
    ///
    /// When there is no `vmm`, or it cannot be started.
    pub async fn start(
        config: &Config,
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
        let mut input = process.stdin.take().context("no standard input")?;
        let text = serde_json::to_string(config)?;
        // Who ends before it has read all says why.
        input.write_all(text.as_bytes()).await.ok();
        drop(input);
        let (tell, told) = mpsc::unbounded_channel();
        let output = process.stdout.take().context("no standard output")?;
        tokio::spawn(listen(output, story.clone(), tell, manner.quiet));
        let errors = process.stderr.take().context("no standard error")?;
        tokio::spawn(repeat(errors, story.clone()));
        Ok((Self { process, control }, told))
    }

    /// Waits for its end.
    ///
    /// # Errors
    ///
    /// When the kernel does not tell.
    pub async fn end(&mut self) -> io::Result<ExitStatus> {
        self.process.wait().await
    }

    /// Its number, while it lives.
    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }

    /// Asks the machine.
    ///
    /// # Errors
    ///
    /// When it says no, or is gone.
    pub async fn ask(&self, command: control::Command) -> anyhow::Result<Value> {
        ask(&self.control, command).await
    }

    /// Ends it at once.
    pub fn kill(&self) {
        let pid = self.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        if let Some(pid) = pid {
            kill_process(pid, Signal::KILL).ok();
        }
    }
}

/// Asks the machine behind a control socket.
///
/// # Errors
///
/// When it says no, or is gone.
pub async fn ask(control: &Path, command: control::Command) -> anyhow::Result<Value> {
    let control = control.to_owned();
    tokio::task::spawn_blocking(move || Client::connect(&control)?.ask(&command)).await?
}

/// The program beside ours, or the one that the system finds.
pub fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name("vmm"));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| "vmm".into())
}

/// Hears the serial port.
async fn listen(
    mut output: ChildStdout,
    story: Arc<Story>,
    tell: mpsc::UnboundedSender<(Told, String)>,
    quiet: bool,
) {
    let mut console = Console::default();
    let mut bytes = vec![0; 4096];
    while let Ok(count @ 1..) = output.read(&mut bytes).await {
        for line in console.take(&bytes[..count]) {
            if !quiet {
                tracing::info!("guest: {line}");
                story.keep(&line);
            }
            if let Some(told) = console::told(&line) {
                // Nobody listens any more once the machine ends.
                tell.send((told, console.last())).ok();
            }
        }
    }
}

/// Repeats what the process says itself, as it says it.
async fn repeat(errors: ChildStderr, story: Arc<Story>) {
    let mut lines = BufReader::new(errors).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let (level, text) = event(&line).unwrap_or((Level::ERROR, line));
        match level {
            Level::ERROR => tracing::error!("{text}"),
            Level::WARN => tracing::warn!("{text}"),
            Level::INFO => tracing::info!("{text}"),
            Level::DEBUG => tracing::debug!("{text}"),
            _ => tracing::trace!("{text}"),
        }
        if level <= Level::INFO {
            story.keep(&text);
        }
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
}
