//! Suspends the machine to the volume instead of shutting its guest down, and continues it at the
//! next start. A machine that is asleep (`idle.rs`) is saved in the same way.
//!
//! A snapshot continues once: its name is removed, durably, before the guest runs again, because
//! the disks change from then on. Until then nothing has changed, so a pod that is killed while it
//! saves or continues loses nothing that a power cut would not lose.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, lchown,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ::host::lock;
use ::host::sync_folder::sync_folder;
use anyhow::{Context as _, bail, ensure};
use tokio::time::sleep;
use vmm::config::{Checks, Options, Restore};
use vmm::control::snapshot::{self as files, Secret};
use vmm::control::{Client, Command, Then};

use super::child::Child;
use super::thread::run_in_thread;
use crate::agent::{Agent, AgentError};
use crate::disks::below;
use crate::migration;
use crate::plan::Plan;
use crate::settings::Shutdown;
use crate::settings::host;
use crate::settings::value::{Value as _, in_mib};
use crate::source::Source;
use crate::status::{Failure, Status};
use crate::suspended;

/// How long the guest's agent may take to answer after a suspension.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);
/// A file is written to measure the volume's speed: a part first, and the rest if that was fast.
const SPEED_FILE: &str = "speed";
const FIRST_BYTES: usize = 1 << 20;
const SPEED_BYTES: usize = 16 << 20;
const FAST: Duration = Duration::from_millis(250);
/// A running pod with such a folder keeps it locked.
pub(super) const LOCK_FILE: &str = "lock";
/// A shorter time is left to the shutdown.
const SHORTEST: Duration = Duration::from_secs(3);
/// Bytes besides the guest's memory: registers, devices, and memory that changes meanwhile.
const OTHER_BYTES: u64 = 64 << 20;

/// The folder on the volume for the suspended machine.
#[derive(Clone, Debug)]
pub struct SuspendFolder {
    path: PathBuf,
    /// Whether a machine is suspended there, which continues now.
    pub continues: bool,
    /// Whether the machine can be suspended. If not, the folder only keeps other pods away.
    pub saves: bool,
    /// Bytes of the snapshot from which the machine continues. It reads them when it needs them.
    continued_bytes: Arc<AtomicU64>,
    /// Read at the start, because later the pod may have no right to.
    secret: Option<Arc<Secret>>,
    /// Keeps pods of other containers away.
    _lock: Arc<File>,
}

impl SuspendFolder {
    /// Makes the folder ready, now, because later the pod may have no right to. `None` if this
    /// machine is not to be suspended. `root` contains the file systems.
    pub fn prepare(plan: &Plan, root: &Path) -> anyhow::Result<Option<Self>> {
        let settings = &plan.input.settings;
        let path = suspended::folder(settings, root);
        let is_volume = below(root, &settings.storage.folder).is_dir();
        let shutdown = settings.pod.shutdown;
        let suspends = shutdown.keeps_running_state();
        let wanted = (suspends || settings.pod.idle.is_some()) && is_volume;
        if !wanted && path.try_exists().is_ok_and(|there| !there) {
            return Ok(None);
        }
        let secret = suspended::secret(settings, root)?.map(Arc::new);
        let opened = Self::open(&path).map(|folder| Self { secret, ..folder });
        let obstacle = match (&opened, &plan.source) {
            (Ok(folder), _) if folder.continues != plan.is_suspended() => {
                return Err(in_use(&path));
            }
            (Ok(folder), _) if folder.continues => return opened.map(Some),
            (Err(error), _) if Status::of(error) == Status::State => return opened.map(Some),
            (Err(error), _) if plan.is_suspended() => {
                return Err(suspended::failure(&path, &format!("{error:#}")));
            }
            _ if !wanted => {
                // It goes with the setting.
                migration::clear(&path);
                fs::remove_file(path.join(LOCK_FILE)).ok();
                fs::remove_dir(&path).ok();
                return Ok(None);
            }
            (Err(error), _) => format!("{}: {error:#}", path.display()),
            (_, Source::Medium(_)) => "its ISO is attached".to_owned(),
            _ if settings.machine.clear => "CLEAR=Y resets its firmware at each start".to_owned(),
            _ if settings.disk.ephemeral => "EPHEMERAL=Y keeps nothing".to_owned(),
            (Ok(_), _) => return opened.map(Some),
        };
        if suspends {
            let shown = shutdown.show();
            tracing::warn!("SHUTDOWN={shown}: the guest is shut down, not suspended: {obstacle}");
        }
        if settings.pod.idle.is_some() {
            tracing::warn!("IDLE: the machine cannot be saved: {obstacle}");
        }
        // Ephemeral machines share a volume.
        let keeps = shutdown == Shutdown::Migrate && !settings.disk.ephemeral;
        Ok(opened.ok().filter(|_| keeps).map(|folder| Self { saves: false, ..folder }))
    }

    /// Creates the folder, and removes what an interrupted pod has left.
    fn open(path: &Path) -> anyhow::Result<Self> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            other => other?,
        }
        let found = fs::symlink_metadata(path)?;
        ensure!(found.is_dir(), "it is not a folder: remove it");
        let us = rustix::process::geteuid().as_raw();
        if found.uid() != us {
            // The pod was another user.
            lchown(path, Some(us), None)?;
        }
        // Kubernetes gives the group of a volume access to everything in it.
        let mode = Permissions::from_mode(0o700);
        crate::files::open_folder(path)?.set_permissions(mode)?;
        let lock = path.join(LOCK_FILE);
        let mut options = File::options();
        options.write(true).create(true).truncate(false).mode(0o600);
        let file = crate::files::open_itself(&lock, &mut options)?;
        // The other one may be suspending its machine.
        let locked = lock::exclusive(&file, &lock);
        // An error of the system is no lock.
        locked.map_err(|error| if error.is::<io::Error>() { error } else { in_use(path) })?;
        files::finish_interrupted(path)?;
        let continues = path.join(files::MACHINE).try_exists()?;
        let (path, lock) = (path.to_owned(), Arc::new(file));
        let (continued_bytes, secret) = (Arc::default(), None);
        let folder = Self { path, continues, saves: true, continued_bytes, secret, _lock: lock };
        if !continues {
            folder.remove_contents();
            return Ok(folder);
        }
        for name in [files::MACHINE, files::MEMORY] {
            let path = folder.path.join(name);
            let found = fs::symlink_metadata(&path).with_context(|| name.to_owned())?;
            ensure!(found.is_file(), "{name} is not a file");
            if found.uid() != us {
                // `transom snapshot restore` gives them to the owner of the volume.
                lchown(&path, Some(us), None).with_context(|| name.to_owned())?;
            }
            let file = crate::files::open_itself(&path, File::options().read(true))?;
            file.set_permissions(Permissions::from_mode(0o600))?;
            folder.continued_bytes.fetch_add(found.blocks() * 512, Ordering::Relaxed);
        }
        Ok(folder)
    }

    /// Counts the memory that a clone reads from this folder when it needs it.
    pub fn count_memory(&self, folder: &Path) {
        let bytes = fs::metadata(folder.join(files::MEMORY)).map_or(0, |it| it.blocks() * 512);
        self.continued_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The snapshot, if there is one. No option comes from it: its guest may have taken over the
    /// machine that wrote it. It is removed when its guest runs, so all of it is checked before.
    pub fn restore(&self) -> Option<Restore> {
        let (dir, options, check) = (self.path.clone(), Options::Given, Checks::First);
        self.continues.then(|| Restore { dir, options, check, paused: true, ..Restore::default() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The error about a machine that does not continue.
    pub fn failure(&self, why: &str) -> anyhow::Error {
        suspended::failure(&self.path, why)
    }

    /// Removes the snapshot, before its guest runs: durably, because the disks change from then on.
    /// The machine that was restored from it has its files open.
    pub fn remove(&self) -> anyhow::Result<()> {
        // The name of a snapshot that was not finished would be given to it at the next start.
        for name in [files::UNFINISHED, files::MACHINE] {
            let path = self.path.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                other => other.with_context(|| path.display().to_string())?,
            }
        }
        // Nothing can continue from it now. If the name came back, the disks would be others.
        if let Err(error) = sync_folder(&self.path) {
            tracing::warn!("{}: {error}", self.path.display());
        }
        self.remove_contents();
        Ok(())
    }

    /// Removes all but the file that makes it a snapshot.
    fn remove_contents(&self) {
        for name in [files::UNFINISHED, files::MEMORY, SPEED_FILE] {
            let path = self.path.join(name);
            if let Err(error) = fs::remove_file(&path)
                && error.kind() != ErrorKind::NotFound
            {
                tracing::warn!("{}: {error}", path.display());
            }
        }
    }

    /// Saves the machine, which ends or sleeps then, or continues after an error. Fails at once if
    /// the volume has no room for it, or is too slow for `limit`.
    pub async fn save(&self, child: &Child, limit: Duration, then: Then) -> anyhow::Result<()> {
        ensure!(limit >= SHORTEST, "TIMEOUT leaves {} s for it: raise it", limit.as_secs());
        let bytes = self.estimate(child).await?;
        let folder = self.clone();
        let end = Instant::now() + limit;
        let control = child.control().to_owned();
        let save = move || {
            folder.remove()?;
            folder.check_volume(bytes, limit)?;
            let key = folder.secret.as_ref().map(|secret| secret.for_snapshot()).transpose()?;
            let left = end.saturating_duration_since(Instant::now());
            let within = u16::try_from(left.as_secs()).unwrap_or(u16::MAX);
            let mut client = Client::connect_timeout(&control, left + limit)?;
            files::save_with_key(&mut client, &folder.path, then, Some(within), key.as_ref())?;
            // The machine has ended, or sleeps, whatever is known of its file.
            let bytes = fs::metadata(folder.path.join(files::MEMORY)).map(|it| it.blocks() * 512);
            folder.continued_bytes.store(bytes.unwrap_or_default(), Ordering::Relaxed);
            Ok(())
        };
        run_in_thread("suspend", save).await
    }

    /// The most bytes that a snapshot of the machine has.
    async fn estimate(&self, child: &Child) -> anyhow::Result<u64> {
        let status = child.ask(Command::Status).await?;
        let all = status["memory"].as_u64().context("the machine does not report its memory")?;
        let continued = match self.secret {
            // An encrypted snapshot was read as a whole.
            Some(_) => 0,
            None => self.continued_bytes.load(Ordering::Relaxed),
        };
        let used = child.id().and_then(memory_of).map(|bytes| bytes + continued);
        Ok(all.min(used.unwrap_or(all)).saturating_add(OTHER_BYTES))
    }

    fn check_volume(&self, bytes: u64, limit: Duration) -> anyhow::Result<()> {
        let needs = in_mib(bytes);
        if let Some(free) = host::free_space(&self.path).filter(|free| *free < bytes) {
            let free = in_mib(free);
            bail!("it needs {needs} on the volume, but {free} are free: enlarge the volume");
        }
        let (written, time) = self.measure()?;
        let time = time.mul_f64(bytes as f64 / written as f64);
        ensure!(
            time < limit,
            "writing {needs} to the volume would take {} s, but only {} s are available: raise \
             TIMEOUT, and the grace period of the container",
            time.as_secs(),
            limit.as_secs()
        );
        Ok(())
    }

    /// Writes a file. Returns the number of bytes and the time.
    fn measure(&self) -> anyhow::Result<(u64, Duration)> {
        let path = self.path.join(SPEED_FILE);
        // Some file systems do not write zeros.
        let bytes: Vec<u8> = (0..=250).cycle().take(SPEED_BYTES).collect();
        let (first, rest) = bytes.split_at(FIRST_BYTES);
        fs::remove_file(&path).ok();
        let measured = File::create_new(&path).and_then(|mut file| {
            let mut write = |part: &[u8]| {
                let start = Instant::now();
                file.write_all(part)?;
                file.sync_data()?;
                io::Result::Ok((part.len() as u64, start.elapsed()))
            };
            let slow = write(first)?;
            if slow.1 > FAST { Ok(slow) } else { write(rest) }
        });
        fs::remove_file(&path).ok();
        measured.with_context(|| path.display().to_string())
    }
}

/// The error about another pod on the same volume.
fn in_use(path: &Path) -> anyhow::Error {
    let path = path.display();
    let sentence = format!("{path}: another container uses it: wait for its end, and start again");
    Failure::new(Status::State, sentence)
}

/// Bytes of memory that a process has, also those that are swapped out.
fn memory_of(id: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1 << 10)
    };
    bytes("VmRSS:")?.checked_add(bytes("VmSwap:")?)
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
    tracing::info!("no agent sets the guest's clock: it is late until the guest corrects it");
}
