//! The process that serves the shared folders, beside the machine's. It ends with the machine.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context as _;
use tokio::io::{AsyncRead, BufReader};
use tokio::process::Child;
use tokio::task::JoinHandle;

use super::guard;
use super::lines::line;
use super::volume::Volume;
use crate::log::{LineLimit, printable};
use crate::plan::Plan;
use crate::shared_folder::{self, Config, Connector, Shares, keeper};
use crate::story::Story;

/// Maximum lines per minute.
const MAX_LINES: u32 = 10;

/// Dropping this ends the process.
pub struct ShareServer {
    process: Child,
    messages: JoinHandle<()>,
    starts: JoinHandle<()>,
    connector: Connector,
}

impl ShareServer {
    /// The server of the folders that the pod shares, if any. The machine runs without, too.
    pub fn of(plan: &Plan, volume: Option<&Volume>, story: &Arc<Story>) -> Option<Self> {
        let settings = &plan.input.settings;
        let folders = Shares::of(settings, Path::new("/")).folders;
        if folders.is_empty() {
            return None;
        }
        for folder in &folders {
            story.info(&format!("{} is shared as {}", folder.path.display(), folder.shown()));
        }
        let set = plan.input.names.contains("PASSWORD");
        let (password, made) = guard::share_password(settings, volume);
        if !set && !made {
            story.warn(
                "the shared folder has the well-known password `admin`: set PASSWORD to that of \
                 the account in Windows",
            );
        }
        let config = Config {
            user: settings.account.user.0.clone(),
            password: password.0,
            read_only: settings.shares.read_only,
            folders,
            debug: settings.pod.debug || settings.pod.trace,
        };
        match Self::start(&config, story) {
            Ok(server) => Some(server),
            Err(error) => {
                story.warn(&format!("no folder is shared: {error:#}"));
                None
            }
        }
    }

    fn start(config: &Config, story: &Arc<Story>) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("this program")?;
        let (mut command, connector) = shared_folder::command(&program, config)?;
        command.stdout(Stdio::piped());
        let mut process = spawn(command).with_context(|| program.display().to_string())?;
        let errors = process.stderr.take().context("no standard error")?;
        let output = process.stdout.take().context("no standard output")?;
        let messages = tokio::spawn(repeat(errors));
        let starts = tokio::spawn(count_starts(output, story.clone()));
        Ok(Self { process, messages, starts, connector })
    }

    pub fn id(&self) -> Option<u32> {
        self.process.id()
    }

    pub fn connector(&self) -> Connector {
        self.connector.clone()
    }
}

impl Drop for ShareServer {
    fn drop(&mut self) {
        // The process ends now, as it should.
        self.messages.abort();
        self.starts.abort();
    }
}

fn spawn(command: Command) -> std::io::Result<Child> {
    tokio::process::Command::from(command).kill_on_drop(true).spawn()
}

/// Counts how often the server was started again.
async fn count_starts(output: impl AsyncRead + Unpin, story: Arc<Story>) {
    let mut output = BufReader::new(output);
    while let Ok(Some(line)) = line(&mut output).await {
        if line == keeper::AGAIN {
            story.share_started_again();
        }
    }
}

/// Logs its messages until its end. The guest may cause some of them, or may have taken over the
/// process.
async fn repeat(errors: impl AsyncRead + Unpin) {
    let (mut errors, mut limit) = (BufReader::new(errors), LineLimit::new(MAX_LINES));
    while let Ok(Some(message)) = line(&mut errors).await {
        let message = printable(&message);
        let message = message.trim();
        if let Some(message) = message.strip_prefix("DEBUG ") {
            tracing::debug!("shared folder: {message}");
        } else if limit.take(Instant::now()) {
            let message = message.strip_prefix("WARN ").unwrap_or(message);
            tracing::warn!("shared folder: {message}");
        } else {
            tracing::debug!("shared folder: {message}");
        }
    }
    tracing::warn!("the server of the shared folders has ended: restart the container for them");
}
