//! The folder for what lives as long as the pod: sockets, and the password of the screen.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use vmm::control::{Client, Command};

use crate::files;

/// Where it may be, the best first: whoever runs `transom status` looks in this order.
const PLACES: [&str; 3] = ["/run/transom", "/dev/shm/transom", "/tmp/transom"];

/// The control socket of the machine.
const CONTROL: &str = "vmm.sock";
/// Where the pod itself is asked.
const POD: &str = "pod.sock";
/// The file in it that is locked by the pod that has it.
const LOCK: &str = "lock";
/// So long the machine of a pod that was killed may take to end.
const LEFT: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(50);

/// The folder.
#[derive(Clone, Debug)]
pub struct Room {
    folder: PathBuf,
    /// It is ours as long as this is open.
    _lock: Option<Arc<File>>,
}

impl Room {
    /// Makes it where that is possible, with nothing in it that a killed pod left.
    ///
    /// # Errors
    ///
    /// When no place can be written, or another pod has it.
    pub fn make() -> anyhow::Result<Self> {
        let mut why = Vec::new();
        for place in PLACES.map(Path::new) {
            match make(place) {
                Ok(Some(lock)) => {
                    end_left(place)?;
                    clear(place).with_context(|| place.display().to_string())?;
                    return Ok(Self { folder: place.into(), _lock: Some(Arc::new(lock)) });
                }
                Ok(None) => anyhow::bail!(
                    "{}: another pod has it: give each a container of its own, or wait for its end",
                    place.display()
                ),
                Err(error) => why.push(format!("{}: {error:#}", place.display())),
            }
        }
        let why = why.join(", ");
        anyhow::bail!("no folder for sockets ({why}): mount an emptyDir or a tmpfs at /run")
    }

    /// None, of a pod that never had one: nothing is behind its sockets.
    pub fn nowhere() -> Self {
        Self { folder: "/nonexistent".into(), _lock: None }
    }

    /// One in any folder, for tests and fuzzers.
    pub fn within(folder: &Path) -> Self {
        Self { folder: folder.into(), _lock: None }
    }

    /// That of the pod that runs here.
    pub fn find() -> Option<Self> {
        let there = |it: &PathBuf| it.join(POD).exists();
        let folder = PLACES.map(PathBuf::from).into_iter().find(there)?;
        Some(Self { folder, _lock: None })
    }

    /// Where the pod answers the commands of those who are in its container.
    pub fn pod(&self) -> PathBuf {
        self.folder.join(POD)
    }

    /// The other end of the port of the guest's agent.
    pub fn agent(&self) -> PathBuf {
        self.folder.join("agent.sock")
    }

    /// Where the TPM is asked.
    pub fn tpm(&self) -> PathBuf {
        self.folder.join("tpm.sock")
    }

    /// The control socket of the machine.
    pub fn control(&self) -> PathBuf {
        self.folder.join(CONTROL)
    }

    /// Where the machine shows its screen.
    pub fn screen(&self) -> PathBuf {
        self.folder.join("screen.sock")
    }

    /// The folder itself.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The password of the screen.
    pub fn password(&self) -> PathBuf {
        self.folder.join("password")
    }

    /// The password of VNC viewers, where the pod listens for them.
    pub fn vnc_password(&self) -> PathBuf {
        self.folder.join("password.vnc")
    }

    /// Why the screen asks for no password.
    pub fn open(&self) -> PathBuf {
        self.folder.join("open")
    }

    /// Keeps a text in a file of this folder, for ourselves alone.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn keep(&self, path: PathBuf, text: &str) -> anyhow::Result<PathBuf> {
        files::write(&path, |file| file.write_all(text.as_bytes()))
            .with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// Makes it ours; nothing if it is another's who lives.
fn make(place: &Path) -> anyhow::Result<Option<File>> {
    match DirBuilder::new().mode(0o700).create(place) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            // Nobody else may have put it there.
            let told = fs::symlink_metadata(place)?;
            let ours = rustix::process::geteuid().as_raw();
            let owner = std::os::unix::fs::MetadataExt::uid(&told);
            ensure!(told.is_dir() && owner == ours, "somebody else's");
            fs::set_permissions(place, Permissions::from_mode(0o700))?;
        }
        Err(error) => return Err(error.into()),
    }
    let mut options = fs::OpenOptions::new();
    let lock = options.write(true).create(true).truncate(false).mode(0o600);
    let lock = lock.open(place.join(LOCK))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(lock)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Ends the machine of a pod that was killed, which still has its disks.
fn end_left(place: &Path) -> anyhow::Result<()> {
    let control = place.join(CONTROL);
    let end = Instant::now() + LEFT;
    while let Ok(mut machine) = Client::connect_within(&control, LEFT) {
        ensure!(
            Instant::now() < end,
            "the machine of a pod that was killed does not end: end its process `vmm`"
        );
        machine.ask(&Command::Quit).ok();
        thread::sleep(LOOK);
    }
    Ok(())
}

/// Removes what a pod that was killed has left.
fn clear(place: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(place)? {
        let entry = entry?;
        if entry.file_name() != LOCK {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
