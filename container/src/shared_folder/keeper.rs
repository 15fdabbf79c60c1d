//! The process that keeps the shared folders served. It starts the server's process, and starts it
//! again if a signal ended it: a crash, or the kernel's OOM killer. It gets the configuration and
//! the open folders from the pod, which cannot start programs once it is in its jail.
//!
//! Threats: the guest makes the server crash again and again. Each start waits longer, up to a
//! minute. This process reads nothing of the guest; connections wait in the pod's socket.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::{Config, pair, process, receive_config, send};
use crate::status::Status;

/// The only argument of the process.
pub const WORD: &str = "keep-shared-folders";
/// The line that reports a start after the first one.
pub const AGAIN: &str = "again";
const MIN_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Keeps the folders served until the pod has ended.
pub fn main() -> ExitCode {
    match keep() {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            writeln!(io::stderr(), "{error:#}").ok();
            ExitCode::from(Status::Failed.code())
        }
    }
}

/// Returns the status of a server that ended by itself.
fn keep() -> anyhow::Result<u8> {
    jail::watch::protect_memory()?;
    let (config, folders) = receive_config()?;
    let (mut pause, mut reported) = (MIN_PAUSE, false);
    loop {
        let start = Instant::now();
        let started = server(&config, &folders);
        let status = match started.and_then(|mut child| child.wait().context("the server")) {
            Ok(status) => status,
            // The host may lack memory or processes for a while.
            Err(error) if reported => {
                writeln!(io::stderr(), "WARN the server of the shared folders: {error:#}").ok();
                sleep(MAX_PAUSE);
                continue;
            }
            Err(error) => return Err(error),
        };
        let Some(signal) = status.signal() else {
            return Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
        };
        if start.elapsed() > MAX_PAUSE {
            pause = MIN_PAUSE;
        }
        if !reported {
            let sentence = format!(
                "the server of the shared folders was ended by signal {signal}, and is started \
                 again; `transom status` counts the restarts"
            );
            writeln!(io::stderr(), "WARN {sentence}").ok();
            reported = true;
        }
        sleep(pause);
        pause = (2 * pause).min(MAX_PAUSE);
        writeln!(io::stdout(), "{AGAIN}").ok();
    }
}

/// Starts the server. Our standard input is the socket of its connections.
fn server(config: &Config, folders: &[OwnedFd]) -> anyhow::Result<Child> {
    let (ours, theirs) = pair()?;
    let mut descriptors: Vec<_> = folders.iter().map(|it| it.as_fd()).collect();
    descriptors.push(rustix::stdio::stdin());
    send(&ours, &serde_json::to_vec(config)?, &descriptors).context("the configuration")?;
    let program = std::env::current_exe().context("this program")?;
    let mut command = Command::new(&program);
    command.arg(process::WORD).env_clear().stdin(theirs).stdout(Stdio::null());
    command.spawn().with_context(|| program.display().to_string())
}
