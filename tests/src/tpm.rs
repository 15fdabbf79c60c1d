//! A TPM for a guest: a new, empty swtpm.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tempfile::TempDir;

/// A swtpm process. Dropping it kills the process if its machine has not ended it.
pub struct Swtpm {
    child: Child,
    folder: TempDir,
}

impl Swtpm {
    /// A machine can connect at once.
    pub fn start() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("a folder for a TPM")?;
        // It gets a listening socket, because a socket of its own would exist before it listens.
        let listener = UnixListener::bind(folder.path().join("control")).context("a socket")?;
        let mut command = Command::new("swtpm");
        command.args(["socket", "--tpm2", "--tpmstate"]);
        command.arg(format!("dir={}", folder.path().display()));
        command.args(["--ctrl", "type=unixio,fd=1"]);
        command.stdin(Stdio::null()).stdout(OwnedFd::from(listener));
        Ok(Self { child: command.spawn().context("swtpm")?, folder })
    }

    /// The control socket.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    /// Waits for the end of swtpm, which ends when its machine closes the connection.
    pub fn ends(&mut self, within: Duration) -> anyhow::Result<()> {
        let end = Instant::now() + within;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > end {
                bail!("swtpm still runs without its machine");
            }
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Swtpm {
    fn drop(&mut self) {
        // It may have ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
