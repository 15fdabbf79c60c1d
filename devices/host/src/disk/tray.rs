//! Drives whose medium can be changed while the machine runs.

use std::path::Path;
use std::sync::Arc;

use super::{Config, Disks, Drive, Expected, FileId, OnFull};

/// What the operator takes media out of.
pub trait Tray: Send + Sync {
    /// As the board calls it.
    fn name(&self) -> &str;
    /// Whether there is anything to be taken out or put in.
    fn is_removable(&self) -> bool;
    /// The guest wants its medium to stay.
    fn is_locked(&self) -> bool;
    /// What is in it.
    fn medium(&self) -> Option<Arc<Drive>>;
    /// Takes the medium out: its file is free when this returns.
    ///
    /// # Errors
    ///
    /// When there is none, it cannot be, or the guest holds it and nobody forces it.
    fn eject(&self, force: bool) -> anyhow::Result<()>;
    /// Puts a medium in: if it is said, this file and no other that has the path.
    ///
    /// # Errors
    ///
    /// When there is one, or it cannot be opened.
    fn insert(&self, path: &Path, only: Option<FileId>) -> anyhow::Result<()>;
}

/// Opens one medium after the other, as the configuration says it of the first.
pub struct Opener {
    config: Config,
    name: String,
    full: OnFull,
    disks: Arc<Disks>,
}

impl Opener {
    /// For the controller with this name, whose drives the operator finds in `disks`.
    pub fn new(config: Config, name: &str, full: OnFull, disks: Arc<Disks>) -> Self {
        Self { config, name: name.to_owned(), full, disks }
    }

    /// The controller's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens a medium, and puts it where the operator finds it for as long as it is there.
    ///
    /// # Errors
    ///
    /// As [`super::open`] does.
    pub fn open(&self, path: &Path, only: Option<FileId>) -> anyhow::Result<Arc<Drive>> {
        let file = only.map_or(Expected::Any, Expected::Only);
        let config = Config { path: path.to_owned(), file, ..self.config.clone() };
        let image = config.open(self.full.clone())?;
        let drive = Arc::new(Drive::new(&self.name, config.serial()?, path, image));
        self.disks.add(&drive);
        Ok(drive)
    }
}
