//! Drives with removable media, which can be changed while the machine runs.

use std::path::Path;
use std::sync::Arc;

use super::{Config, Disks, Drive, Expected, FileId, OnFull};

/// A drive from which the operator can eject a medium.
pub trait Tray: Send + Sync {
    /// The name of the drive on the board.
    fn name(&self) -> &str;
    /// Whether the medium can be removed.
    fn is_removable(&self) -> bool;
    /// Whether the guest prevents the removal of the medium.
    fn is_locked(&self) -> bool;
    /// The inserted medium.
    fn medium(&self) -> Option<Arc<Drive>>;
    /// Removes the medium. Its file is closed when this returns.
    ///
    /// # Errors
    ///
    /// When there is no medium, it is not removable, or the guest locks it and `force` is false.
    fn eject(&self, force: bool) -> anyhow::Result<()>;
    /// Inserts the medium at `path`. With `only`, the path must lead to this file.
    ///
    /// # Errors
    ///
    /// When there is a medium already, or it cannot be opened.
    fn insert(&self, path: &Path, only: Option<FileId>) -> anyhow::Result<()>;
}

/// Opens the media of a drive, one after the other, with the configuration of the first.
pub struct MediumOpener {
    config: Config,
    name: String,
    full: OnFull,
    disks: Arc<Disks>,
}

impl MediumOpener {
    /// `name` is the controller's. Opened media are added to `disks`.
    pub fn new(config: Config, name: &str, full: OnFull, disks: Arc<Disks>) -> Self {
        Self { config, name: name.to_owned(), full, disks }
    }

    /// The controller's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens a medium and adds it to the list of disks.
    ///
    /// # Errors
    ///
    /// As for [`super::open`].
    pub fn open(&self, path: &Path, only: Option<FileId>) -> anyhow::Result<Arc<Drive>> {
        let file = only.map_or(Expected::Any, Expected::Only);
        let config = Config { path: path.to_owned(), file, ..self.config.clone() };
        let image = config.open(self.full.clone())?;
        let drive = Arc::new(Drive::new(&self.name, config.serial()?, path, image));
        self.disks.add(&drive);
        Ok(drive)
    }
}
