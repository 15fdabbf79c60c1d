//! The folder for what lives as long as the pod: sockets, and the password of the screen.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

/// Where it may be, the best first: whoever runs `transom status` looks in this order.
const PLACES: [&str; 3] = ["/run/transom", "/dev/shm/transom", "/tmp/transom"];

/// The folder.
#[derive(Clone, Debug)]
pub struct Room(PathBuf);

impl Room {
    /// Makes it where that is possible, with nothing in it that a killed pod left.
    ///
    /// # Errors
    ///
    /// When no place can be written.
    pub fn make() -> anyhow::Result<Self> {
        let mut why = Vec::new();
        for place in PLACES.map(Path::new) {
            match make(place) {
                Ok(()) => return Ok(Self(place.into())),
                Err(error) => why.push(format!("{}: {error:#}", place.display())),
            }
        }
        let why = why.join(", ");
        anyhow::bail!("no folder for sockets ({why}): mount an emptyDir or a tmpfs at /run")
    }

    /// That of the pod that runs here.
    pub fn find() -> Option<Self> {
        PLACES.map(PathBuf::from).into_iter().find(|it| it.join("vmm.sock").exists()).map(Self)
    }

    /// The control socket of the machine.
    pub fn control(&self) -> PathBuf {
        self.0.join("vmm.sock")
    }

    /// Where the machine shows its screen.
    pub fn screen(&self) -> PathBuf {
        self.0.join("screen.sock")
    }

    /// The folder itself.
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// The password of the screen.
    pub fn password(&self) -> PathBuf {
        self.0.join("password")
    }

    /// Keeps the password of the screen, for ourselves alone.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn keep_password(&self, text: &str) -> anyhow::Result<PathBuf> {
        let path = self.password();
        write_secret(&path, text).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// Writes a file that only its owner may read, which is there wholly or not at all.
///
/// # Errors
///
/// When it cannot be written.
pub fn write_secret(path: &Path, text: &str) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    fs::remove_file(&beside).or_else(|error| match error.kind() {
        ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })?;
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, path)
}

fn make(place: &Path) -> anyhow::Result<()> {
    match DirBuilder::new().mode(0o700).create(place) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            // Nobody else may have put it there.
            let told = fs::symlink_metadata(place)?;
            let ours = rustix::process::geteuid().as_raw();
            let owner = std::os::unix::fs::MetadataExt::uid(&told);
            ensure!(told.is_dir() && owner == ours, "somebody else's");
            fs::set_permissions(place, Permissions::from_mode(0o700))?;
            for entry in fs::read_dir(place)? {
                fs::remove_file(entry?.path())?;
            }
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}
