//! Prepares the volume of a clone, which goes on from the memory of its base.

use std::fs::{self, File};
use std::path::Path;

use ::host::disk::qcow2;
use anyhow::Context as _;

use super::Volume;
use super::beginning::locked;
use crate::disks::{self, Disk, original};
use crate::files::if_there;
use crate::settings::value::Value as _;
use crate::settings::{Boot, Settings};
use crate::status::{Failure, Status};

impl Volume {
    /// Removes what an interrupted start of a clone has left, which may have another size or may
    /// have changed. Fails if its guest has written to its disk, or if another pod uses it.
    pub fn begin_anew(&self, settings: &Settings, root: &Path) -> anyhow::Result<()> {
        let disk = disks::find(0, settings, root)?.map(|found| found.disk);
        let disk = disk.filter(|disk| disk.path.exists());
        if let (true, Some(disk)) = (settings.disk.ephemeral, &disk) {
            let base = disk.base().unwrap_or_else(|| disk.clone());
            return Err(original::unused(&base, &disk.path));
        }
        // No other pod starts with it until it is removed.
        let _locked = disk.as_ref().map(lock_empty).transpose()?;
        if !settings.disk.ephemeral && settings.has_tpm() {
            self.remove_tpm(settings.machine.boot, disk.is_some())?;
        }
        self.remove_firmware_files(settings.machine.boot, "vars")?;
        if let Some(disk) = disk {
            fs::remove_file(&disk.path).with_context(|| disk.path.display().to_string())?;
        }
        Ok(())
    }

    /// Removes the memory of the clone's TPM, which is made after its disk and removed before.
    /// Fails if it is another machine's, whose keys the clone's would replace.
    fn remove_tpm(&self, boot: Boot, is_own: bool) -> anyhow::Result<()> {
        let path = self.firmware_file(boot, "tpm");
        let shown = || path.display().to_string();
        let found = if_there(fs::metadata(&path)).with_context(shown)?;
        if found.is_none_or(|found| found.len() == 0) {
            return Ok(());
        }
        if is_own {
            return fs::remove_file(&path).with_context(shown);
        }
        let sentence = "it is the TPM of a machine whose disk is not here: remove it if you have \
                        removed that disk, else move it, or set STORAGE to another folder";
        Err(Failure::new(Status::State, format!("{}: {sentence}", path.display())))
    }

    /// Takes what the base's volume knows of its machine: the time of change of the variables,
    /// which were copied from there, and whether the guest has booted from its disk. Memory knows
    /// its files by that time.
    pub fn take_over(&self, settings: &Settings, base: &Path, vars: &Path) -> anyhow::Result<()> {
        let there = Self::at(base, &self.app);
        let from = there.kept_vars(settings.machine.boot);
        let changed = fs::metadata(&from).and_then(|it| it.modified());
        let changed = changed
            .with_context(|| format!("{}: set BOOT_MODE as in that machine", from.display()))?;
        let copied = File::options().write(true).open(vars);
        copied
            .and_then(|it| it.set_modified(changed))
            .with_context(|| vars.display().to_string())?;
        match !settings.disk.ephemeral && there.has_booted() && !self.has_booted() {
            true => self.mark_booted(),
            false => Ok(()),
        }
    }
}

/// Locks a disk that nothing was written to.
fn lock_empty(disk: &Disk) -> anyhow::Result<File> {
    let file = locked(&disk.path)?;
    match qcow2::is_empty_over(&file).with_context(|| disk.path.display().to_string())? {
        true => Ok(file),
        false => {
            let sentence = "its guest has written to it just now: start the pod again";
            Err(Failure::new(Status::Disk, format!("{}: {sentence}", disk.path.show())))
        }
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::FileExt as _;

    use host::disk::Format;
    use host::lock;

    use super::*;

    #[test]
    fn a_clone_begins_anew_only_with_an_empty_disk_that_nobody_uses() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for folder in ["base", "storage"] {
            fs::create_dir(at(folder)).unwrap();
        }
        fs::write(at("base/data.img"), [7; 4096]).unwrap();
        let mut settings = Settings::defaults();
        settings.storage.base = Some("/base".into());
        settings.machine.tpm = Some(true);
        let volume = Volume::at(&at("storage"), "windows");
        let (disk, vars) = (at("storage/data.qcow2"), volume.kept_vars(settings.machine.boot));
        let again = |settings: &Settings| volume.begin_anew(settings, root.path());
        let made = || {
            fs::write(&vars, "x").unwrap();
            let mut options = File::options();
            let file = options.read(true).write(true).create_new(true).open(&disk).unwrap();
            qcow2::create_over(&file, 1 << 20, &at("base/data.img"), Format::Raw).unwrap();
            file
        };
        again(&settings).unwrap();
        let tpm = volume.firmware_file(settings.machine.boot, "tpm");
        fs::write(&tpm, "keys").unwrap();
        let error = again(&settings).unwrap_err();
        assert!(error.to_string().contains("the TPM of a machine whose disk is not"), "{error}");
        settings.disk.ephemeral = true;
        again(&settings).unwrap();
        settings.disk.ephemeral = false;
        assert!(tpm.exists());
        // It is the clone's own beside its disk.
        drop(made());
        again(&settings).unwrap();
        again(&settings).unwrap();
        assert!(!tpm.exists());
        drop(made());
        again(&settings).unwrap();
        assert!(!disk.exists() && !vars.exists());
        let used = made();
        lock::exclusive(&used, &disk).unwrap();
        let error = again(&settings).unwrap_err();
        assert!(format!("{error:#}").contains("in use"), "{error:#}");
        drop(used);
        settings.disk.ephemeral = true;
        let error = again(&settings).unwrap_err();
        assert!(error.to_string().contains("EPHEMERAL=Y"), "{error}");
        settings.disk.ephemeral = false;
        File::options().write(true).open(&disk).unwrap().write_all_at(&[1], 3 << 16).unwrap();
        let error = again(&settings).unwrap_err();
        assert!(error.to_string().contains("has written to it just now"), "{error}");
        assert!(disk.exists() && vars.exists());
    }

    #[test]
    fn a_clone_has_booted_if_its_base_has() {
        let root = tempfile::tempdir().unwrap();
        let [base, own] = ["base", "own"].map(|name| root.path().join(name));
        let [there, volume] = [&base, &own].map(|folder| {
            fs::create_dir(folder).unwrap();
            Volume::at(folder, "windows")
        });
        let mut settings = Settings::defaults();
        let vars = volume.kept_vars(settings.machine.boot);
        fs::write(&vars, "x").unwrap();
        let takes = |settings: &Settings| volume.take_over(settings, &base, &vars);
        let error = format!("{:#}", takes(&settings).unwrap_err());
        assert!(error.contains("BOOT_MODE"), "{error}");
        fs::write(there.kept_vars(settings.machine.boot), "x").unwrap();
        takes(&settings).unwrap();
        assert!(!volume.has_booted());
        there.mark_booted().unwrap();
        settings.disk.ephemeral = true;
        takes(&settings).unwrap();
        assert!(!volume.has_booted());
        settings.disk.ephemeral = false;
        takes(&settings).unwrap();
        assert!(volume.has_booted());
    }
}
