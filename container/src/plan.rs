//! The plan: settings, sizes and source of the machine, from the environment and the host.

pub mod answers;
mod media;
mod notes;
mod windows;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use host::size::Size;
use serde_json::{Map, Value, json};

use crate::disks::{self, Disk, FoundDisk, below};
use crate::download;
use crate::firmware;
use crate::media::wim::{Architecture, Entry};
use crate::media::windows::Media;
use crate::medium;
use crate::pod::{kvm, machine};
use crate::settings::Settings;
use crate::settings::environment::{self, Environment, ParsedEnvironment};
use crate::settings::host::Host;
use crate::settings::list;
use crate::settings::settle::{Sizes, settle};
use crate::settings::value::{self, MIB, Value as _};
use crate::settings::version::Version;
use crate::source::Source;
use crate::status::{self, Failure, Status};

/// Everything that is decided before the machine is prepared.
#[derive(Debug)]
pub struct Plan {
    pub input: ParsedEnvironment,
    pub sizes: Sizes,
    pub source: Source,
    /// The Windows on the medium of the source.
    pub media: Option<Media>,
    /// One sentence each.
    pub warnings: Vec<String>,
}

impl Plan {
    /// Makes the plan from the environment and from the host below `root`.
    pub fn make(environment: &Environment, root: &Path) -> anyhow::Result<Self> {
        let mut input = environment::read(environment)?;
        let volume = below(root, &input.settings.storage.folder);
        firmware::recall(&mut input, &volume)?;
        let disk = disks::find(0, &input.settings, root)?;
        let mut host = Host::read(root, &volume);
        if let Some(found) = &disk {
            let own = found.own.then_some(&found.disk);
            host.disk = Some(own.and_then(Disk::length).unwrap_or(0));
            host.free_space = host.free_space.map(|space| space + own.map_or(0, Disk::taken));
        }
        for (number, space) in (1..).zip(&mut host.further_space) {
            let found = disks::find(number, &input.settings, root)?.filter(|found| found.own);
            *space = space.map(|space| space + found.map_or(0, |found| found.disk.taken()));
        }
        let settled = settle(&input, &host);
        let source = source(&input.settings, root, disk);
        let ((sizes, notes), source) = match (settled, source) {
            (Ok(settled), Ok(source)) => (settled, source),
            (settled, source) => {
                let mistakes = settled.err().into_iter().chain(source.err());
                return Err(status::all(mistakes.collect()).expect_err("at least one failed"));
            }
        };
        check_media(&source, root, &volume)?;
        let media = windows::read(&source, &mut input)?;
        firmware::adjust_boot_mode(&mut input, &source, media.as_ref());
        let mut warnings = input.warnings.clone();
        warnings.extend(notes);
        warnings.extend(notes::notes(&input, &source, media.as_ref(), root));
        let plan = Self { input, sizes, source, media, warnings };
        machine::check(&plan.input.settings, &plan.sizes, &plan.source)?;
        Ok(plan)
    }

    /// Name of the guest for people: APP, or "the probe" if that runs and APP is not set.
    pub fn name(&self) -> String {
        match self.source {
            Source::Probe if !self.input.names.contains("APP") => "the probe".to_owned(),
            _ => self.input.settings.pod.app.0.clone(),
        }
    }

    pub fn description(&self) -> String {
        match &self.source {
            Source::Probe => "the probe".into(),
            Source::Disk(path) => {
                // An installed disk is booted whatever VERSION is set to.
                let is_set = self.input.names.contains("VERSION");
                let whatever = if is_set { ", whatever VERSION says" } else { "" };
                format!("the disk {}{whatever}", path.show())
            }
            Source::Medium(path) => format!("the medium {}", path.show()),
            Source::Download(version) => format!("{}, after a download", version.name()),
        }
    }

    /// The source and the size of the machine in words, for the log.
    pub fn summary(&self) -> String {
        let memory = Size(self.sizes.memory >> 20 << 20).show();
        let what = self.description();
        match self.sizes.processors {
            1 => format!("{what}: 1 processor, {memory} of memory"),
            count => format!("{what}: {count} processors, {memory} of memory"),
        }
    }

    /// Why this host's KVM cannot run the machine. Without the device the check is skipped.
    pub fn kvm_error(&self, device: &Path) -> Option<anyhow::Error> {
        device.exists().then(|| kvm::check(device, &self.source).err()).flatten()
    }

    /// The error for a source that cannot be downloaded.
    pub fn download_error(&self) -> Option<anyhow::Error> {
        let Source::Download(version) = &self.source else { return None };
        download::refusal(version)
    }
}

/// Checks that all CDs of the machine are ISO images, before anything is created.
fn check_media(source: &Source, root: &Path, volume: &Path) -> anyhow::Result<()> {
    if *source == Source::Probe {
        return Ok(());
    }
    let first = if let Source::Medium(medium) = source { Some(medium.clone()) } else { None };
    let further = machine::further_media(root, volume).into_iter();
    let all = first.into_iter().chain(machine::rescue(root, volume)).chain(further);
    status::all(all.filter_map(|medium| medium::check(&medium).err()).collect())
}

/// Selects the source: the probe, a disk with Windows, an ISO image, or a download.
fn source(settings: &Settings, root: &Path, disk: Option<FoundDisk>) -> anyhow::Result<Source> {
    if settings.windows.version == Version::Probe {
        return Ok(Source::Probe);
    }
    let volume = below(root, &settings.storage.folder);
    // An ISO image of the user goes first, but not before a disk that already has Windows.
    let app = settings.pod.process();
    let disk = disk.map(|found| found.disk).filter(Disk::is_written).map(|disk| disk.path);
    if let Some(disk) = disk.clone().filter(|_| volume.join(format!("{app}.boot")).exists()) {
        return Ok(Source::Disk(disk));
    }
    let mut media: Vec<PathBuf> = Vec::new();
    for folder in [root, volume.as_path()] {
        for name in ["custom.iso", "boot.iso"] {
            media.extend(named(folder, name));
        }
    }
    if let Some(folder) = media.iter().find(|path| path.is_dir()) {
        let sentence = "is a folder: container engines create one if the file to mount does \
                        not exist: check the path of the mount";
        return Err(Failure::new(Status::Iso, format!("{} {sentence}", folder.display())));
    }
    if let Some(medium) = media.into_iter().next() {
        return Ok(Source::Medium(medium));
    }
    // A written disk belongs to the user. It is never installed over.
    if let Some(disk) = disk {
        return Ok(Source::Disk(disk));
    }
    match &settings.windows.version {
        Version::File(name) => {
            let path = volume.join(name);
            if !path.is_file() {
                let shown = value::quote(name);
                let sentence = format!("VERSION={shown}: the volume has no such file");
                let out = "copy it there, or mount it as /custom.iso";
                return Err(Failure::new(Status::Version, format!("{sentence}: {out}")));
            }
            Ok(Source::Medium(path))
        }
        version => Ok(match media::on_volume(&volume, settings)? {
            Some(medium) => Source::Medium(medium),
            None => Source::Download(version.clone()),
        }),
    }
}

/// The entry of a folder with this name, ignoring case.
fn named(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let mut fitting: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().eq_ignore_ascii_case(name))
        .map(|entry| entry.path())
        .collect();
    // The order of a folder's entries is undefined.
    fitting.sort();
    fitting.into_iter().next_back()
}

/// Names and values of settings that differ from the defaults. Secrets show as `***`.
fn changed(input: &ParsedEnvironment) -> Vec<(&'static str, String)> {
    let defaults = Settings::defaults();
    let mut changed = Vec::new();
    for variable in list::all() {
        let Some(slot) = &variable.slot else { continue };
        if !(slot.same)(&input.settings, &defaults) {
            let hidden = input.files.contains(variable.name);
            let shown = if hidden { "***".into() } else { (slot.show)(&input.settings) };
            changed.push((variable.name, shown));
        }
    }
    changed
}

/// Errors are reported elsewhere, so their text is empty.
pub fn text(plan: &anyhow::Result<Plan>) -> String {
    let Ok(plan) = plan else { return String::new() };
    let mut text = String::new();
    for (name, shown) in changed(&plan.input) {
        writeln!(text, "{name}={shown}").expect("a string takes all");
    }
    let Sizes { processors, memory, disk, .. } = plan.sizes;
    let of = |bytes: u64| Size(bytes / MIB * MIB).show();
    let processors = match processors {
        1 => "1 processor".to_owned(),
        processors => format!("{processors} processors"),
    };
    let (memory, disk) = (of(memory), if disk == 0 { "no".into() } else { of(disk) });
    writeln!(text, "machine: {processors}, {memory} of memory, {disk} disk")
        .expect("a string takes all");
    writeln!(text, "runs: {}", plan.description()).expect("a string takes all");
    if let Some(media) = &plan.media {
        writeln!(text, "medium: {media}").expect("a string takes all");
    }
    for warning in &plan.warnings {
        writeln!(text, "warning: {warning}").expect("a string takes all");
    }
    text
}

fn medium_json(media: &Media) -> Value {
    let edition = |edition: &Entry| json!({ "index": edition.index, "name": edition.shown(), "id": edition.edition_id });
    json!({
        "product": media.product(),
        "build": media.build(),
        "architecture": Architecture::Amd64.name(),
        "language": media.language(),
        "server": media.is_server(),
        "evaluation": media.is_evaluation(),
        "editions": media.editions.iter().map(edition).collect::<Vec<_>>(),
    })
}

/// The plan as JSON, with what is missing to run it; or the error.
pub fn json(plan: &anyhow::Result<Plan>, kvm: &Path) -> String {
    let value = match plan {
        Ok(plan) => {
            let changed = changed(&plan.input).into_iter();
            let settings: Map<String, Value> =
                changed.map(|(name, shown)| (name.to_owned(), shown.into())).collect();
            let kind = match &plan.source {
                Source::Probe => "probe",
                Source::Disk(_) => "disk",
                Source::Medium(_) => "medium",
                Source::Download(_) => "download",
            };
            let missing = plan
                .download_error()
                .or_else(|| plan.kvm_error(kvm))
                .map(|error| format!("{error:#}"));
            json!({
                "settings": settings,
                "processors": plan.sizes.processors,
                "memory": plan.sizes.memory,
                "disk": plan.sizes.disk,
                "more_disks": plan.sizes.more,
                "source": { "kind": kind, "is": plan.description() },
                "medium": plan.media.as_ref().map(medium_json),
                "warnings": plan.warnings,
                "missing": missing,
            })
        }
        Err(error) => json!({
            "error": format!("{error:#}"),
            "errors": status::sentences(error),
            "status": Status::of(error).code(),
        }),
    };
    format!("{value:#}\n")
}

#[cfg(test)]
mod test;
