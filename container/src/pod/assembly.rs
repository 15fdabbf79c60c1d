//! The parts of the machine, from the volume and the settings.

use std::fs;
use std::path::{Path, PathBuf};

use vmm::config::{self, Checks, Cloning, Restore};

use super::Pod;
use super::guard::{CERTIFICATE_FILE, Guard};
use super::machine::{self, Cd, Origin, Parts};
use super::setup::{Installation, PluggedDisk};
use super::smm;
use super::suspend::SuspendFolder;
use super::tpm::Tpm;
use super::volume::{Volume, further_disks};
use crate::disks::{self, original};
use crate::media::windows::Media;
use crate::setup_disk::SetupDisk;
use crate::snapshots::{Shelf, restore};
use crate::source::Source;

impl Pod {
    pub(super) fn tpm(&self) -> anyhow::Result<Option<Tpm>> {
        let machine = &self.plan.input.settings.machine;
        let wanted = self.plan.input.settings.has_tpm();
        let Some(volume) = self.volume.as_ref().filter(|_| wanted) else { return Ok(None) };
        // After CLEAR=Y, it is new at each start.
        if !machine.clear {
            volume.compare_tpm(machine.boot);
        }
        let kept = || volume.tpm(machine.boot);
        let memory = match (self.plan.input.settings.disk.ephemeral, machine.clear) {
            (true, true) => volume.ephemeral_tpm(None)?,
            (true, false) => volume.ephemeral_tpm(Some(&kept()?))?,
            (false, _) => kept()?,
        };
        Tpm::start(memory, &self.runtime_folder.tpm()).map(Some)
    }

    /// The set-up disk, after the machine's process has inherited it.
    pub(super) fn plugged(
        &self,
        disk: Option<SetupDisk>,
        config: &config::Config,
    ) -> Option<PluggedDisk> {
        let disk = disk?;
        let name = machine::name_of(config, &disk.path())?;
        let control = self.runtime_folder.control();
        Some(PluggedDisk { memory: disk.close(), name, control })
    }

    /// The parts of the machine, except the network.
    pub(super) fn parts(&self) -> anyhow::Result<Parts> {
        let settings = &self.plan.input.settings;
        let mut parts = Parts {
            control: self.runtime_folder.control(),
            agent: self.runtime_folder.agent(),
            listeners: vec![Guard::screen_socket(settings, &self.runtime_folder)],
            ..Parts::default()
        };
        parts.identity.generation = restore::generation(&Shelf::new(settings, Path::new("/")));
        let clones = self.plan.cloned().map(clone);
        let restore = self.suspended().and_then(SuspendFolder::restore).or(clones);
        parts.origin = restore.map(|restore| {
            let key = settings.pod.snapshot_key.as_ref().map(|key| key.0.clone());
            Origin::Saved(Restore { key, ..restore })
        });
        if self.plan.arrives() {
            parts.origin = Some(Origin::Arrives(self.runtime_folder.incoming()));
        }
        if self.is_continued() {
            parts.control = self.runtime_folder.waking();
        }
        if let Some(volume) = &self.volume {
            self.store(volume, &mut parts)?;
        }
        if parts.setup_disk.is_some() {
            self.warn_of_waiting(&parts);
        }
        Ok(parts)
    }

    /// Adds disks, media and the firmware's memory to the parts.
    fn store(&self, volume: &Volume, parts: &mut Parts) -> anyhow::Result<()> {
        let settings = &self.plan.input.settings;
        let boot = settings.machine.boot;
        if let Some(next) = self.plan.next.as_ref().filter(|_| !settings.disk.disable) {
            volume.begin(next, settings, Path::new("/"), &self.story)?;
        }
        let password = self.guard.account_password(&self.plan, volume, &self.runtime_folder)?;
        if let Some(made) = self.guard.shown_password(&self.runtime_folder) {
            self.web.show_account(&settings.account.user.0, &made);
        }
        self.prepare_desktop(volume);
        parts.identity.uuid = volume.uuid()?;
        let found = smm::firmware(boot)?;
        let base = original::folder(settings, Path::new("/"))?;
        if self.plan.cloned().is_some() {
            volume.begin_anew(settings, Path::new("/"))?;
        }
        let vars = self.variables(volume, &found.template, base.as_deref())?;
        let vars = match settings.disk.ephemeral {
            true => volume.ephemeral_copy(&vars, &mut parts.unnamed)?,
            false => vars,
        };
        if let (Some(_), Some(base)) = (self.plan.cloned(), &base) {
            volume.take_over(settings, base, &vars)?;
        }
        if !settings.disk.ephemeral && !settings.disk.disable {
            volume.save_boot_mode(settings, Path::new("/"))?;
        }
        (parts.firmware, parts.smm) = (Some((found.code, vars)), found.smm);
        let (root, folder) = (Path::new("/"), &settings.storage.folder);
        parts.rescue = machine::rescue(root, folder);
        if let Source::Medium(medium) = &self.plan.source {
            let patch = self.plan.media.as_ref().and_then(Media::patch).cloned();
            parts.media.push(Cd { path: medium.clone(), patch });
        }
        let unattended = self.plan.unattended.as_ref();
        let bundle = unattended.and_then(|it| it.bundle.as_deref());
        if let Some(installation) = Installation::of(&self.plan, bundle)? {
            installation.keep_hardware(volume)?;
            parts.hardware = installation.hardware();
            parts.setup_disk = Some(installation.disk(&password, root, &self.story)?);
        }
        parts.media.extend(machine::further_media(root, folder).into_iter().map(Cd::from));
        if settings.disk.disable {
            return Ok(());
        }
        if self.is_unchanged() {
            parts.disks = disks::all(settings, root)?;
            return Ok(());
        }
        if settings.disk.ephemeral {
            parts.disks = volume.ephemeral_disks(settings, &self.plan.sizes, &mut parts.unnamed)?;
            return Ok(());
        }
        parts.disks.push(volume.disk(0, self.plan.sizes.disk, settings, &self.story)?);
        parts.disks.extend(further_disks(settings, &self.plan.sizes.more, &self.story)?);
        Ok(())
    }

    /// Names the disks and devices that an installation must not see.
    fn warn_of_waiting(&self, parts: &Parts) {
        let arguments = &self.plan.input.settings.machine.arguments;
        let drives = arguments.iter().flat_map(|it| &it.drives);
        let drives = drives.filter(|it| machine::waits(it, parts)).map(|it| &it.path);
        let disks = parts.disks.iter().skip(machine::present(parts).len()).map(|it| &it.path);
        for path in disks.chain(drives) {
            self.story.warn(&format!(
                "{} is not attached while Windows is being installed, because Setup erases a disk \
                 by its number: start the container again afterwards",
                path.display()
            ));
        }
        let Some(arguments) = arguments else { return };
        if !arguments.usb.is_empty() {
            self.story.info(
                "ARGUMENTS: USB devices of the host are attached when Windows first starts from \
                 its own disk",
            );
        }
    }

    /// The firmware's variables.
    fn variables(
        &self,
        volume: &Volume,
        template: &Path,
        base: Option<&Path>,
    ) -> anyhow::Result<PathBuf> {
        let settings = &self.plan.input.settings;
        let boot = settings.machine.boot;
        if self.is_unchanged() {
            return Ok(volume.kept_vars(boot));
        }
        match (settings.machine.clear, settings.disk.ephemeral) {
            // Those of the volume are neither used nor changed.
            (true, true) => return Ok(template.to_owned()),
            (true, false) => volume.clear(settings, Path::new("/"))?,
            (false, _) => {}
        }
        volume.vars(boot, template, base.filter(|_| !settings.machine.clear))
    }

    /// Prepares the page of the remote desktop.
    fn prepare_desktop(&self, volume: &Volume) {
        let settings = &self.plan.input.settings;
        let certificate = volume.file(CERTIFICATE_FILE);
        if self.plan.next.as_ref().is_some_and(|next| !next.step.keeps()) {
            // That of an earlier installation.
            fs::remove_file(&certificate).ok();
        }
        self.web.desktop.keep_certificate(certificate);
        if let Some(password) = self.guard.desktop_password(settings, volume) {
            self.web.desktop.set_login(&settings.account.user.0, password);
        }
    }
}

/// A clone of the machine in this folder. Its disks are over those of that machine.
fn clone(memory: &Path) -> Restore {
    let (dir, options, clone) = (memory.to_owned(), config::Options::Given, Cloning::On);
    Restore { dir, options, clone, check: Checks::First, paused: true, ..Restore::default() }
}
