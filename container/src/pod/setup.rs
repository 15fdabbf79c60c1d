//! The set-up disk of a machine. It is pulled out when Windows first boots from its own disk: by
//! then its setup has copied everything.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, ensure};
use vmm::control::Command;

use super::machine::Hardware;
use super::machine_client;
use super::volume::Volume;
use crate::answer::xml::Secrets;
use crate::disks::below;
use crate::kept::{ADAPTER, TYPE};
use crate::plan::Plan;
use crate::plan::drivers;
use crate::plan::unattended::Unattended;
use crate::settings::Settings;
use crate::settings::host::MemoryLoad;
use crate::settings::translate::{Adapter, Bus};
use crate::settings::value::{Secret, Value as _, in_mib};
use crate::setup_disk::drivers::Drivers;
use crate::setup_disk::{self, Content, DiskMemory, Item, SetupDisk, UsersFiles};
use crate::source::Source;
use crate::status::{self, Status};
use crate::story::Story;

/// An unattended installation from a medium.
pub(super) struct Installation<'a> {
    plan: &'a Plan,
    unattended: &'a Unattended,
    drivers: Drivers,
    /// The controller of the disks.
    pub bus: Bus,
    /// The model of the network card.
    pub adapter: Adapter,
}

impl<'a> Installation<'a> {
    /// `bundle` is the ISO image with Windows' drivers. `None` if nothing is installed, or by hand.
    ///
    /// # Errors
    ///
    /// If the bundle does not have the driver for the disks, and DISK_TYPE asks for them.
    pub(super) fn of(plan: &'a Plan, bundle: Option<&Path>) -> anyhow::Result<Option<Self>> {
        let Some(unattended) = &plan.unattended else { return Ok(None) };
        if !matches!(plan.source, Source::Medium(_)) {
            return Ok(None);
        }
        let drivers = drivers::read(bundle, unattended.target.release)?;
        let bus = drivers::controller(&plan.input, &drivers.missing, unattended.is_new)?;
        let adapter = drivers::adapter(&plan.input, &drivers.missing, unattended.is_new);
        tracing::info!("installing {unattended}");
        if let Some(path) = bundle {
            let path = path.display();
            match drivers.missing.join(", ") {
                none if none.is_empty() => tracing::info!("Windows' drivers are those of {path}"),
                missing => tracing::info!("{path} has no {missing} that this Windows takes"),
            }
        }
        Ok(Some(Self { plan, unattended, drivers, bus, adapter }))
    }

    /// The controller and the card of the machine.
    pub(super) fn hardware(&self) -> Hardware {
        Hardware { controller: Some(self.bus), adapter: Some(self.adapter) }
    }

    /// Keeps the controller of a new disk and the network card for later starts, unless they are
    /// the usual ones.
    pub(super) fn keep_hardware(&self, volume: &Volume) -> anyhow::Result<()> {
        if !self.unattended.is_new {
            return Ok(());
        }
        let usual = Settings::defaults();
        let bus = (self.bus != usual.disk.controller.value).then(|| self.bus.show());
        let adapter = self.adapter;
        let adapter = (adapter != usual.network.adapter.value).then(|| adapter.show());
        keep(volume, TYPE, bus.as_deref())?;
        keep(volume, ADAPTER, adapter.as_deref())
    }

    /// The disk with the answers, the drivers and the user's files below `root`. `password` is that
    /// of Windows' account.
    pub(super) fn disk(
        self,
        password: &Secret,
        root: &Path,
        story: &Story,
    ) -> anyhow::Result<SetupDisk> {
        let memory = self.plan.sizes.memory;
        let layout = self.items(password, root).and_then(setup_disk::lay_out);
        let layout = layout.map_err(|error| status::with(Status::Setup, error))?;
        if let Some(load) = MemoryLoad::read(root) {
            check_memory(layout.bytes(), memory, &load, story)?;
        }
        SetupDisk::write(&layout)
    }

    fn items(self, password: &Secret, root: &Path) -> anyhow::Result<Vec<Item>> {
        let Self { plan, unattended, drivers, bus, .. } = self;
        let settings = &plan.input.settings;
        let users = UsersFiles::read(root, &below(root, &settings.storage.folder))?;
        let (mut answers, _) = unattended.answers(settings, &plan.sizes, bus);
        answers.account.password = password.clone();
        let files = unattended.files(&answers, users.install_bat.as_deref(), Secrets::Shown)?;
        let modified = SystemTime::now();
        let items = files.into_iter().map(|file| Item {
            path: file.path.to_owned(),
            content: Some(Content::Bytes(file.bytes)),
            modified,
        });
        Ok(items.chain(drivers.items).chain(users.items).collect())
    }
}

/// Writes a file of the volume, or removes it.
fn keep(volume: &Volume, extension: &str, choice: Option<&str>) -> anyhow::Result<()> {
    if let Some(choice) = choice {
        return volume.write(extension, &format!("{choice}\n"));
    }
    let path = volume.file(extension);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| path.display().to_string())
        }
        _ => Ok(()),
    }
}

/// Fails if the disk alone does not fit into memory, and warns if it does not beside the machine.
fn check_memory(disk: u64, machine: u64, load: &MemoryLoad, story: &Story) -> anyhow::Result<()> {
    let free = load.group.map_or(load.free, |(_, free)| free.min(load.free));
    let [shown, has, left] = [disk, machine, free].map(in_mib);
    ensure!(
        disk < free,
        "the set-up disk takes {shown} of memory until Windows is installed, and {left} are free: \
         raise the container's memory limit, or take large files out of /oem"
    );
    if machine <= free && disk > free - machine {
        story.warn(&format!(
            "the set-up disk takes {shown} of memory until Windows is installed, the machine \
             {has}, and {left} are free: raise the container's memory limit, or lower RAM_SIZE"
        ));
    }
    Ok(())
}

/// The disk in the machine. Its memory is the pod's.
pub struct PluggedDisk {
    pub memory: DiskMemory,
    /// The device's name.
    pub name: String,
    pub control: PathBuf,
}

impl PluggedDisk {
    /// Frees the disk's memory when the machine has released it.
    pub async fn unplug(self) {
        let Self { memory, name, control } = self;
        let detached = machine_client::ask(&control, Command::Detach { name }).await;
        match detached.and_then(|_| memory.free()) {
            Ok(()) => tracing::info!("the set-up disk is pulled out: Windows has copied it"),
            Err(error) => tracing::warn!("the set-up disk stays in the machine: {error:#}"),
        }
    }
}

#[cfg(test)]
mod test;
