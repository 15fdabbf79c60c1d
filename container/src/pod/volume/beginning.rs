//! Prepares the volume for an installation: moves a former one to a backup, and writes the state
//! files with which the next start continues.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt as _, lchown};
use std::path::Path;

use ::host::lock;
use anyhow::{Context as _, ensure};

use super::{Volume, write_error};
use crate::disks;
use crate::files::{self, if_there};
use crate::settings::{Boot, Settings};
use crate::state::changes::{self, Change, Place};
use crate::state::{Found, Next, Step, name};
use crate::story::Story;

impl Volume {
    /// Changes the volume before the first start of a step. A disk that boots, or on which a person
    /// installs, needs no change, except that an interrupted backup of it is undone.
    pub fn begin(
        &self,
        next: &Next,
        settings: &Settings,
        root: &Path,
        story: &Story,
    ) -> anyhow::Result<()> {
        if next.step.keeps() && next.found.backup.is_none() {
            return Ok(());
        }
        // The machine of a killed pod may have been writing when the plan was made.
        let _lock = lock_disk(&next.found)?;
        let disk = disks::find(0, settings, root)?;
        ensure!(
            Found::look(&self.folder, &self.app, disk.as_ref()) == next.found,
            "the volume has changed since this start began: start again"
        );
        match next.step {
            Step::Replace => {
                // The reference's words.
                let custom = next.base.as_deref().is_some_and(name::is_custom);
                let what = if custom { "your custom .iso file" } else { "the VERSION variable" };
                story.info(&format!(
                    "Detected that {what} was changed, a backup of your previous installation \
                     will be saved..."
                ));
            }
            Step::InstallAgain => story.info(&next.step.reason()),
            Step::Boot(_) | Step::ByHand => {
                story.info("a backup of this installation was interrupted: it is undone");
            }
            _ => {}
        }
        for change in self.changes(next, settings) {
            self.make(&change)?;
        }
        Ok(())
    }

    /// Removes the firmware's variables, and the memory of a TPM that is used. Fails if another
    /// machine uses the disk, to which they belong.
    pub fn clear(&self, settings: &Settings, root: &Path) -> anyhow::Result<()> {
        let _locked = Self::lock_first_disk(settings, root)?;
        let boot = settings.machine.boot;
        self.remove_firmware_files(boot, "vars")?;
        match settings.has_tpm() {
            true => self.remove_firmware_files(boot, "tpm"),
            false => Ok(()),
        }
    }

    /// Fails if another machine uses the first disk. The lock lasts as long as the file; there is
    /// none without the disk.
    pub fn lock_first_disk(settings: &Settings, root: &Path) -> anyhow::Result<Option<File>> {
        let disk = disks::find(0, settings, root)?.map(|found| found.disk.path);
        disk.filter(|path| path.exists()).map(|path| locked(&path)).transpose()
    }

    /// Removes a file of the firmware under all names of the boot mode.
    pub(super) fn remove_firmware_files(&self, boot: Boot, end: &str) -> anyhow::Result<()> {
        loop {
            let path = self.firmware_file(boot, end);
            let removed = if_there(fs::remove_file(&path));
            if removed.with_context(|| path.display().to_string())?.is_none() {
                return Ok(());
            }
        }
    }

    fn changes(&self, next: &Next, settings: &Settings) -> Vec<Change> {
        let (volume, app, disk) = (&*self.folder, &*self.app, &*settings.storage.name.0);
        changes::before(next, &Place { volume, app, disk })
    }

    fn make(&self, change: &Change) -> anyhow::Result<()> {
        let path = change.path();
        change.make().map_err(|error| write_error(&path.display().to_string(), &error))?;
        if matches!(change, Change::MakeFolder(_) | Change::Write { .. }) {
            let told = fs::metadata(&self.folder)?;
            lchown(path, Some(told.uid()), Some(told.gid())).ok();
        }
        Ok(())
    }
}

/// Fails if another machine uses the disk. The lock lasts as long as the file.
fn lock_disk(found: &Found) -> anyhow::Result<Option<File>> {
    found.disk.as_deref().filter(|_| found.own).map(locked).transpose()
}

/// Opens and locks a disk, and claims a device as a machine does. Fails if another machine uses it.
pub(super) fn locked(path: &Path) -> anyhow::Result<File> {
    let file = match path.is_file() {
        true => files::open(path, File::options().read(true).write(true)),
        false => lock::open_exclusive(path),
    };
    let file = file.with_context(|| path.display().to_string())?;
    lock::exclusive(&file, path)?;
    Ok(file)
}

#[cfg(test)]
mod test;
