//! A TPM for a guest: a swtpm of its own, new and empty.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

/// Programs start slowly in the lab.
const START: Duration = Duration::from_secs(60);

/// A process, which goes with this value if its machine has not ended it.
pub struct Swtpm {
    child: Child,
    folder: TempDir,
}

impl Swtpm {
    /// Starts it, and waits until a machine can connect.
    ///
    /// # Errors
    ///
    /// When it is not installed, or makes no socket.
    pub fn start() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("a folder for a TPM")?;
        let mut command = Command::new("swtpm");
        command.args(["socket", "--tpm2", "--tpmstate"]);
        command.arg(format!("dir={}", folder.path().display()));
        command.arg("--ctrl").arg(format!("type=unixio,path={}/control", folder.path().display()));
        let child = command.stdin(Stdio::null()).spawn().context("swtpm")?;
        let mut swtpm = Self { child, folder };
        let end = Instant::now() + START;
        while !swtpm.path().exists() {
            let ended = swtpm.child.try_wait()?;
            ensure!(ended.is_none(), "swtpm ended: {ended:?}");
            ensure!(Instant::now() < end, "swtpm makes no socket");
            sleep(Duration::from_millis(10));
        }
        Ok(swtpm)
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
