//! A TPM for a guest: a swtpm of its own, new and empty.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tempfile::TempDir;

/// A process, which goes with this value if its machine has not ended it.
pub struct Swtpm {
    child: Child,
    folder: TempDir,
}

impl Swtpm {
    /// Starts it; a machine can connect.
    ///
    /// # Errors
    ///
    /// When it is not installed.
    pub fn start() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("a folder for a TPM")?;
        // It is given a socket that listens: one of its own is there before it can be connected to.
        let listener = UnixListener::bind(folder.path().join("control")).context("a socket")?;
        let mut command = Command::new("swtpm");
        command.args(["socket", "--tpm2", "--tpmstate"]);
        command.arg(format!("dir={}", folder.path().display()));
        command.args(["--ctrl", "type=unixio,fd=1"]);
        command.stdin(Stdio::null()).stdout(OwnedFd::from(listener));
        Ok(Self { child: command.spawn().context("swtpm")?, folder })
    }

    /// Its control socket.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    /// Waits for its end, which its machine's is.
    ///
    /// # Errors
    ///
    /// When it goes on.
    pub fn ends(&mut self, within: Duration) -> anyhow::Result<()> {
        let end = Instant::now() + within;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > end {
                bail!("swtpm goes on without its machine");
            }
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Swtpm {
    fn drop(&mut self) {
        // That it is gone already is fine.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
