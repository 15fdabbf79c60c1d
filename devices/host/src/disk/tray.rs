//! Drives with removable media, which can be changed while the machine runs.

use std::path::Path;
use std::sync::Arc;

use super::{Changes, Config, Disks, Drive, Expected, FileId, Holds};

/// A drive from which the operator can eject a medium.
pub trait Tray: Send + Sync {
    fn name(&self) -> &str;
    fn is_removable(&self) -> bool;
    /// Whether the guest prevents the removal of the medium.
    fn is_locked(&self) -> bool;
    fn medium(&self) -> Option<Arc<Drive>>;
    /// The medium's file is closed when this returns. Fails if the guest locks the medium and
    /// `force` is false.
    fn eject(&self, force: bool) -> anyhow::Result<()>;
    /// Fails if there is a medium already. With `only`, the path must lead to this file.
    fn insert(&self, path: &Path, only: Option<FileId>) -> anyhow::Result<()>;
}

/// Opens the media of a drive, one after the other, with the configuration of the first.
pub struct MediumOpener {
    config: Config,
    pub name: String,
    holds: Holds,
    disks: Arc<Disks>,
}

impl MediumOpener {
    /// `name` is the controller's. Opened media are added to `disks`.
    pub fn new(config: Config, name: &str, holds: Holds, disks: Arc<Disks>) -> Self {
        Self { config, name: name.to_owned(), holds, disks }
    }

    /// Adds the medium to the list of disks.
    pub fn open(&self, path: &Path, only: Option<FileId>) -> anyhow::Result<Arc<Drive>> {
        let file = only.map_or(Expected::Any, Expected::Only);
        let mut config = Config { path: path.to_owned(), file, ..self.config.clone() };
        // Patches are for the first medium alone.
        if matches!(config.overlay, Changes::Patches(_)) && *path != self.config.path {
            config.overlay = Changes::None;
        }
        let image = config.open(self.holds.clone())?;
        let drive = Arc::new(Drive::new(&self.name, config.serial()?, path, image));
        self.disks.add(&drive);
        Ok(drive)
    }
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::super::Patch;
    use super::super::driver::Driver;
    use super::*;

    #[test]
    fn patches_are_for_the_first_medium_alone() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["first.iso", "second.iso"].map(|name| folder.path().join(name));
        for path in [&first, &second] {
            fs::write(path, [7; 4096]).unwrap();
        }
        let patch = Patch { offset: 5, old: vec![7], new: vec![8] };
        let overlay = Changes::Patches(vec![patch]);
        let config = Config { readonly: true, overlay, ..Config::new(&first) };
        let holds = Holds { full: Arc::new(|_| {}), gate: None };
        let opener = MediumOpener::new(config, "cd", holds, Arc::default());
        let byte = |path: &Path| {
            let drive = opener.open(path, None).unwrap();
            Driver::new(&drive.image).read(0, 512).unwrap()[5]
        };
        assert_eq!([&first, &second, &first].map(|path| byte(path)), [8, 7, 8]);
    }
}
