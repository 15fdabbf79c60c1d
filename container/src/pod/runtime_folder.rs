//! The folder for files that live as long as the pod: sockets, and the password of the screen.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use vmm::control::{Client, Command};

use crate::files;

/// Possible folders, the best first. `transom status` searches them in this order.
const CANDIDATES: [&str; 3] = ["/run/transom", "/dev/shm/transom", "/tmp/transom"];

const CONTROL: &str = "vmm.sock";
/// Its name until a suspended machine may continue.
const WAKING: &str = "vmm.waking.sock";
/// The socket for commands in the container.
const POD: &str = "pod.sock";
/// The file that a running pod keeps locked.
const LOCK: &str = "lock";
/// How long the machine of a killed pod may take to end.
const OLD_MACHINE_TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
pub struct RuntimeFolder {
    folder: PathBuf,
    _lock: Option<Arc<File>>,
}

impl RuntimeFolder {
    /// Creates the folder in the first possible place, and removes all files of a killed pod.
    pub fn create() -> anyhow::Result<Self> {
        let mut why = Vec::new();
        for place in CANDIDATES.map(Path::new) {
            match create_and_lock(place) {
                Ok(Some(lock)) => {
                    end_old_machine(place)?;
                    clear(place).with_context(|| place.display().to_string())?;
                    return Ok(Self { folder: place.into(), _lock: Some(Arc::new(lock)) });
                }
                Ok(None) => anyhow::bail!(
                    "{}: another pod has it: run one pod per container, or wait for its end",
                    place.display()
                ),
                Err(error) => why.push(format!("{}: {error:#}", place.display())),
            }
        }
        let why = why.join(", ");
        anyhow::bail!("no folder for sockets ({why}): mount an emptyDir or a tmpfs at /run")
    }

    /// A folder that does not exist, for a pod that failed early.
    pub fn nonexistent() -> Self {
        Self { folder: "/nonexistent".into(), _lock: None }
    }

    /// Any folder as the runtime folder, for tests and fuzzers.
    pub fn within(folder: &Path) -> Self {
        Self { folder: folder.into(), _lock: None }
    }

    /// The folder of the pod that runs here.
    pub fn find() -> Option<Self> {
        let there = |it: &PathBuf| it.join(POD).exists();
        let folder = CANDIDATES.map(PathBuf::from).into_iter().find(there)?;
        Some(Self { folder, _lock: None })
    }

    pub fn pod(&self) -> PathBuf {
        self.folder.join(POD)
    }

    /// The socket of the serial port of the guest's agent.
    pub fn agent(&self) -> PathBuf {
        self.folder.join("agent.sock")
    }

    pub fn tpm(&self) -> PathBuf {
        self.folder.join("tpm.sock")
    }

    pub fn control(&self) -> PathBuf {
        self.folder.join(CONTROL)
    }

    /// The control socket of a machine that is being restored: nobody else can resume it.
    pub fn waking(&self) -> PathBuf {
        self.folder.join(WAKING)
    }

    /// The socket at which the machine of another pod arrives.
    pub fn incoming(&self) -> PathBuf {
        self.folder.join("incoming.sock")
    }

    /// Lets all others reach the machine that was restored. May be called again.
    pub fn wake(&self) -> anyhow::Result<()> {
        match fs::rename(self.waking(), self.control()) {
            Err(error) if error.kind() == ErrorKind::NotFound && self.control().exists() => Ok(()),
            renamed => renamed.context("the control socket"),
        }
    }

    /// The socket on which the machine shows its screen.
    pub fn screen(&self) -> PathBuf {
        self.folder.join("screen.sock")
    }

    pub fn path(&self) -> &Path {
        &self.folder
    }

    pub fn password(&self) -> PathBuf {
        self.folder.join("password")
    }

    /// The pod writes it only if VNC is enabled.
    pub fn vnc_password(&self) -> PathBuf {
        self.folder.join("password.vnc")
    }

    /// The made password of Windows' account.
    pub fn account_password(&self) -> PathBuf {
        self.folder.join("password.account")
    }

    /// The file with the reason why the screen asks for no password.
    pub fn open(&self) -> PathBuf {
        self.folder.join("open")
    }

    /// Writes a text to a file of this folder that only the pod's user can read.
    pub fn write(&self, path: PathBuf, text: &str) -> anyhow::Result<PathBuf> {
        files::write(&path, |file| file.write_all(text.as_bytes()))
            .with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// Returns `None` if a running pod has locked it.
fn create_and_lock(place: &Path) -> anyhow::Result<Option<File>> {
    match DirBuilder::new().mode(0o700).create(place) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            // The folder must not be a link, nor another user's.
            let found = fs::symlink_metadata(place)?;
            let ours = rustix::process::geteuid().as_raw();
            let owner = std::os::unix::fs::MetadataExt::uid(&found);
            ensure!(found.is_dir() && owner == ours, "it belongs to another user");
            fs::set_permissions(place, Permissions::from_mode(0o700))?;
        }
        Err(error) => return Err(error.into()),
    }
    let mut options = fs::OpenOptions::new();
    let lock = options.write(true).create(true).truncate(false).mode(0o600);
    let lock = lock.open(place.join(LOCK))?;
    Ok(files::try_lock(&lock)?.then_some(lock))
}

/// Ends the machine of a killed pod, which may still use the disks.
fn end_old_machine(place: &Path) -> anyhow::Result<()> {
    let end = Instant::now() + OLD_MACHINE_TIMEOUT;
    let connect = |name| Client::connect_timeout(&place.join(name), OLD_MACHINE_TIMEOUT).ok();
    while let Some(mut machine) = [CONTROL, WAKING].into_iter().find_map(connect) {
        ensure!(
            Instant::now() < end,
            "the machine of a killed pod does not end: kill its process `vmm`"
        );
        machine.ask(&Command::Quit).ok();
        thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

fn clear(place: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        if entry.file_name() != LOCK {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
