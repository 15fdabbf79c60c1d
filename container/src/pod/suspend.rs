//! Suspends the machine to the volume instead of shutting its guest down, and continues it at the
//! next start.
//!
//! A snapshot continues once: its name is removed, durably, before the guest runs again, because
//! the disks change from then on. Until then nothing has changed, so a pod that is killed while it
//! saves or continues loses nothing that a power cut would not lose.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, lchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ::host::size::Size;
use anyhow::{Context as _, bail, ensure};
use tokio::time::sleep;
use vmm::config::Restore;
use vmm::control::snapshot as files;
use vmm::control::{Client, Command, Then};

use super::child::Child;
use super::machine_client;
use super::thread::run_in_thread;
use crate::agent::{Agent, AgentError};
use crate::disks::below;
use crate::plan::Plan;
use crate::settings::Shutdown;
use crate::settings::host;
use crate::settings::value::Value as _;
use crate::source::Source;
use crate::status::{Failure, Status};
use crate::suspended;

/// Interval at which the machine is asked whether it is there again.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long the guest's agent may take to answer after a suspension.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);
/// The volume's speed is measured by a file that is written in steps, until it has this length or
/// has taken this time.
const STEP: usize = 1 << 20;
const STEPS: usize = 16;
const MEASURING_TIME: Duration = Duration::from_secs(1);
/// The name of that file.
const TRIAL: &str = "speed";
/// Bytes besides the guest's memory: registers, devices, and memory that changes meanwhile.
const OTHERS: u64 = 64 << 20;

/// The folder on the volume for the suspended machine.
#[derive(Clone, Debug)]
pub struct SuspendFolder {
    path: PathBuf,
    /// Bytes of the snapshot from which the machine continued. It reads them when it needs them.
    continued: u64,
}

impl SuspendFolder {
    /// Makes the folder ready, now, because later the pod may have no right to. Fails if a machine
    /// is suspended there that cannot continue with this plan. `None` if this machine cannot be
    /// suspended, or is not to be. `root` contains the file systems.
    pub fn of(plan: &Plan, root: &Path) -> anyhow::Result<Option<Self>> {
        let settings = &plan.input.settings;
        let mut folder = Self { path: suspended::folder(settings, root), continued: 0 };
        let is_volume = below(root, &settings.storage.folder).is_dir();
        let wanted = settings.pod.shutdown == Shutdown::Suspend && is_volume;
        if !wanted && !folder.path.exists() {
            return Ok(None);
        }
        let ready = folder.prepare().with_context(|| folder.path.display().to_string());
        if folder.has_machine() {
            ready?;
            folder.check(plan)?;
            let found = fs::metadata(folder.path.join(files::MEMORY));
            folder.continued = found.map_or(0, |found| found.blocks() * 512);
            return Ok(Some(folder));
        }
        if let Err(error) = ready {
            tracing::warn!("the machine cannot be suspended: {error:#}");
            return Ok(None);
        }
        if wanted && matches!(plan.source, Source::Medium(_)) {
            tracing::info!("the machine is shut down, not suspended, while it has its medium");
        }
        Ok(Some(folder).filter(|_| wanted && !matches!(plan.source, Source::Medium(_))))
    }

    /// Whether a machine is suspended there.
    pub fn has_machine(&self) -> bool {
        self.path.join(files::MACHINE).exists()
    }

    /// The snapshot, if there is one.
    pub fn restore(&self) -> Option<Restore> {
        let dir = self.path.clone();
        self.has_machine().then(|| Restore { dir, paused: true, ..Restore::default() })
    }

    /// Creates the folder, and removes what an interrupted pod has left.
    fn prepare(&self) -> anyhow::Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            other => other?,
        }
        let found = fs::symlink_metadata(&self.path)?;
        ensure!(found.is_dir(), "it is not a folder: remove it");
        let us = rustix::process::geteuid().as_raw();
        if found.uid() != us {
            // The pod was another user.
            lchown(&self.path, Some(us), None)?;
        }
        if files::complete(&self.path)? { Ok(()) } else { self.remove() }
    }

    /// Removes the snapshot. A machine that was restored from it has its files open.
    pub fn remove(&self) -> anyhow::Result<()> {
        for name in [files::MACHINE, files::UNFINISHED, files::MEMORY, TRIAL] {
            let path = self.path.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                other => other.with_context(|| path.display().to_string())?,
            }
            // The name of the snapshot must be gone before its contents are, and before the guest
            // runs.
            File::open(&self.path)?.sync_all()?;
        }
        Ok(())
    }

    /// Fails if the plan does not fit to the suspended machine.
    fn check(&self, plan: &Plan) -> anyhow::Result<()> {
        let installs = plan.next.as_ref().is_some_and(|next| !next.step.keeps());
        let obstacle = match (&plan.source, plan.input.settings.machine.clear) {
            _ if installs => "the settings install the guest anew",
            (Source::Medium(_), _) => "the settings start a medium",
            (_, true) => "CLEAR=Y resets its firmware",
            _ => return Ok(()),
        };
        Err(self.failure(&format!("a machine is suspended, and {obstacle}")))
    }

    /// The error about a machine that does not continue.
    pub fn failure(&self, why: &str) -> anyhow::Error {
        let folder = self.path.display();
        let sentence = format!(
            "{why}. To continue it, use the image and the settings that it had; or remove {folder} \
             to start it from its disk, as after a power cut"
        );
        Failure::new(Status::State, sentence)
    }

    /// Saves the machine, which ends with that, or continues after an error. Fails at once if the
    /// volume has no room for it, or is too slow for `limit`.
    pub async fn save(&self, child: &Child, limit: Duration) -> anyhow::Result<()> {
        let bytes = self.estimate(child).await?;
        let folder = self.clone();
        let end = Instant::now() + limit;
        let control = child.control().to_owned();
        let save = move || {
            folder.remove()?;
            folder.check_volume(bytes, limit)?;
            let left = end.saturating_duration_since(Instant::now());
            let within = u16::try_from(left.as_secs()).unwrap_or(u16::MAX);
            let mut client = Client::connect_timeout(&control, left + limit)?;
            let saved = files::save_within(&mut client, &folder.path, Then::Quit, Some(within));
            saved.map(drop)
        };
        run_in_thread("suspend", save).await
    }

    /// The most bytes that a snapshot of the machine has.
    async fn estimate(&self, child: &Child) -> anyhow::Result<u64> {
        let status = child.ask(Command::Status).await?;
        let all = status["memory"].as_u64().context("the machine does not report its memory")?;
        let used = child.id().and_then(resident).map(|bytes| bytes + self.continued);
        Ok(all.min(used.unwrap_or(all)) + OTHERS)
    }

    fn check_volume(&self, bytes: u64, limit: Duration) -> anyhow::Result<()> {
        let needs = Size(bytes >> 20 << 20).show();
        if let Some(free) = host::free_space(&self.path).filter(|free| *free < bytes) {
            let free = Size(free >> 20 << 20).show();
            bail!("it needs {needs} on the volume, where {free} are free: enlarge the volume");
        }
        let (written, time) = self.measure()?;
        let time = time.mul_f64(bytes as f64 / written as f64);
        ensure!(
            time < limit,
            "the volume needs {} s for {needs}, and has {} s: raise TIMEOUT, and the grace period \
             of the container",
            time.as_secs(),
            limit.as_secs()
        );
        Ok(())
    }

    /// Writes a file. Returns the number of bytes and the time.
    fn measure(&self) -> anyhow::Result<(u64, Duration)> {
        let path = self.path.join(TRIAL);
        let measured = (|| {
            let mut file = File::create(&path)?;
            // Some file systems do not write zeros.
            let bytes: Vec<u8> = (0..=250).cycle().take(STEP).collect();
            let start = Instant::now();
            let mut written = 0;
            while written < STEPS * STEP && start.elapsed() < MEASURING_TIME {
                file.write_all(&bytes)?;
                file.sync_data()?;
                written += STEP;
            }
            io::Result::Ok((written as u64, start.elapsed()))
        })();
        fs::remove_file(&path).ok();
        measured.with_context(|| path.display().to_string())
    }
}

/// Bytes of memory that a process has.
fn resident(id: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1 << 10)
}

/// Returns when the machine is restored, and waits.
pub(super) async fn restored(control: &Path) {
    while machine_client::ask(control, Command::Status).await.is_err() {
        sleep(POLL_INTERVAL).await;
    }
}

/// Sets the guest's clock, which stood still, if it has an agent that can do so.
pub(super) async fn set_clock(agent: &Agent) {
    let end = Instant::now() + AGENT_TIMEOUT;
    while Instant::now() < end {
        match agent.set_time().await {
            Ok(()) => return tracing::info!("the guest's agent has set its clock"),
            Err(AgentError::Refused(why)) => {
                return tracing::info!("the guest's agent does not set its clock: {why}");
            }
            Err(AgentError::Absent(_)) => sleep(Duration::from_secs(1)).await,
        }
    }
}
