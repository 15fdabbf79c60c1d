//! The plan: settings, sizes and source of the machine, from the environment and the host.

pub mod answers;
pub mod drivers;
mod goes_on;
mod media;
mod notes;
pub mod unattended;
mod windows;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::answer::xml::Secrets;
use crate::disks::{self, Disk, FoundDisk, below, original};
use crate::download;
use crate::firmware;
use crate::kept;
use crate::media::wim::{Architecture, Entry};
use crate::media::windows::Media;
use crate::medium;
use crate::migration::Running;
use crate::pod::{kvm, machine};
use crate::settings::environment::{self, Environment, ParsedEnvironment};
use crate::settings::host::Host;
use crate::settings::list;
use crate::settings::settle::{Sizes, settle};
use crate::settings::value::{self, Value as _, in_mib};
use crate::settings::version::Version;
use crate::settings::{Compat, Settings};
use crate::setup_disk::drivers::Drivers;
use crate::setup_disk::{self, UsersFiles};
use crate::source::Source;
use crate::state::{self, Found, Next, Step, Wanted, name};
use crate::status::{self, Failure, Status};
use crate::suspended;

use self::goes_on::GoesOn;
use self::unattended::Unattended;

/// Names of the user's medium, in the container's root or on the volume.
const CUSTOM: [&str; 2] = ["custom.iso", "boot.iso"];

/// Everything that is decided before the machine is prepared.
#[derive(Debug)]
pub struct Plan {
    pub input: ParsedEnvironment,
    pub sizes: Sizes,
    /// `None` if the machine boots.
    pub goes_on: Option<GoesOn>,
    pub source: Source,
    /// The state of the volume, and the next step. `None` for the probe, which needs no volume.
    pub next: Option<Next>,
    /// The Windows on the medium of the source.
    pub media: Option<Media>,
    pub unattended: Option<Unattended>,
    /// One sentence each.
    pub warnings: Vec<String>,
}

impl Plan {
    /// Makes the plan from the environment and from the host below `root`.
    pub fn make(environment: &Environment, root: &Path) -> anyhow::Result<Self> {
        Self::with(environment, root, None)
    }

    /// The plan for the machine of another pod, which moves here.
    pub fn for_arrival(
        environment: &Environment,
        root: &Path,
        running: &Running,
    ) -> anyhow::Result<Self> {
        Self::with(environment, root, Some(running))
    }

    fn with(
        environment: &Environment,
        root: &Path,
        running: Option<&Running>,
    ) -> anyhow::Result<Self> {
        let mut input = environment::read(environment)?;
        let volume = below(root, &input.settings.storage.folder);
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
        let decided = match input.settings.windows.version {
            Version::Probe => Ok(None),
            _ => decide(&input, root, disk.as_ref()).map(Some),
        };
        let ((mut sizes, notes), decided) = match (settled, decided) {
            (Ok(settled), Ok(decided)) => (settled, decided),
            (settled, decided) => {
                let mistakes = settled.err().into_iter().chain(decided.err());
                return Err(status::all(mistakes.collect()).expect_err("at least one failed"));
            }
        };
        let (mut next, source) = match decided {
            Some((next, source)) => (Some(next), source),
            None => (None, Source::Probe),
        };
        // A new installation keeps nothing of a former one.
        if let Some(next) = next.as_ref().filter(|next| next.step.keeps()) {
            recall(&mut input, next, root)?;
        }
        check_media(&source, root, &volume)?;
        let media = windows::read(&source, &mut input)?;
        // A medium without Windows may be a live system.
        if let (Some(next), Source::Medium(_), None) = (&mut next, &source, &media) {
            next.base = None;
        }
        let is_new = next.as_ref().is_some_and(|next| !next.step.keeps());
        firmware::adjust_boot_mode(&mut input, &source, media.as_ref(), is_new);
        let goes_on = match running {
            Some(running) => Some(goes_on::arrive(&mut input, &mut sizes, running, root)),
            None => goes_on::find(&mut input, &mut sizes, &source, &disk, root)?,
        };
        let mut warnings = input.warnings.clone();
        warnings.extend(next.as_ref().and_then(Next::warning));
        warnings.extend(notes);
        let unattended = Unattended::of(&input, &source, media.as_ref(), root)
            .map_err(|error| status::with(Status::Setup, error))?
            .map(|unattended| Unattended { is_new, ..unattended });
        warnings.extend(notes::notes(&input, &source, media.as_ref(), unattended.as_ref(), root));
        if let (Some(goes_on), Some(why)) = (&goes_on, obstacle(&input.settings, &source, is_new)) {
            goes_on.check(why, &suspended::folder(&input.settings, root))?;
        }
        let mut plan = Self { input, sizes, goes_on, source, next, media, unattended, warnings };
        plan.check_answers(root).map_err(|error| status::with(Status::Setup, error))?;
        plan.check_ephemeral()?;
        machine::check(&plan.input.settings, &plan.sizes, &plan.source)?;
        Ok(plan)
    }

    /// Whether a machine is suspended on the volume, and continues.
    pub fn is_suspended(&self) -> bool {
        self.goes_on == Some(GoesOn::Suspended)
    }

    /// Whether the machine of another pod moves here.
    pub fn arrives(&self) -> bool {
        self.goes_on == Some(GoesOn::Arriving)
    }

    /// The folder with the memory of the machine of which this one is a clone.
    pub fn cloned(&self) -> Option<&Path> {
        match &self.goes_on {
            Some(GoesOn::Clone(memory)) => Some(memory),
            _ => None,
        }
    }

    /// An installation of an ephemeral machine would be lost.
    fn check_ephemeral(&self) -> anyhow::Result<()> {
        let settings = &self.input.settings;
        let installs = self.next.as_ref().is_some_and(|next| !next.step.boots());
        if !settings.disk.ephemeral || settings.disk.disable || !installs {
            return Ok(());
        }
        let sentence = "EPHEMERAL=Y: nothing is installed on the volume: install without it first, \
                        or set BASE to an image that is installed";
        Err(Failure::new(Status::State, sentence))
    }

    /// Makes all answers once, and looks at the user's files, so that mistakes in them are found
    /// before anything is created or downloaded.
    fn check_answers(&mut self, root: &Path) -> anyhow::Result<()> {
        let Some(unattended) = &self.unattended else { return Ok(()) };
        let settings = &self.input.settings;
        let users = UsersFiles::read(root, &below(root, &settings.storage.folder))?;
        let bus = settings.disk.controller.value;
        let (answers, warnings) = unattended.answers(settings, &self.sizes, bus);
        unattended.files(&answers, users.install_bat.as_deref(), Secrets::Masked)?;
        setup_disk::lay_out(users.items)?;
        if !unattended.is_finished() {
            self.warnings.extend(warnings);
        }
        Ok(())
    }

    /// The error if Windows' drivers for the disk are missing.
    pub fn drivers_error(&self) -> Option<anyhow::Error> {
        self.unattended.as_ref()?.controller(&self.input).err()
    }

    /// Goes on without Windows' drivers, which could not be downloaded.
    pub fn do_without_drivers(&mut self) -> anyhow::Result<()> {
        let Some(unattended) = &mut self.unattended else { return Ok(()) };
        unattended.remote = None;
        unattended.missing = Drivers::none().missing;
        if unattended.is_new {
            let bus = unattended.controller(&self.input)?;
            self.warnings.extend(drivers::lack(&self.input, &unattended.missing, bus));
        }
        Ok(())
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
            Source::Download(version) => format!("{}, after a download", download::title(version)),
        }
    }

    /// The source and the size of the machine in words, for the log.
    pub fn summary(&self) -> String {
        let memory = in_mib(self.sizes.memory);
        let what = self.description();
        match self.sizes.processors {
            1 => format!("{what}: 1 processor, {memory} of memory"),
            count => format!("{what}: {count} processors, {memory} of memory"),
        }
    }

    /// Why this host's KVM cannot run the machine. Without the device the check is skipped.
    pub fn kvm_error(&self, device: &Path) -> Option<anyhow::Error> {
        device.exists().then(|| self.check_kvm(device).err()).flatten()
    }

    /// Checks that this host's KVM can run the machine.
    pub fn check_kvm(&self, device: &Path) -> anyhow::Result<()> {
        kvm::check(device, &self.source).map_err(|error| match self.input.settings.processor.kvm {
            true => error,
            false => Failure::new(
                Status::NoKvm,
                format!("KVM=N: emulation is not supported: the machine needs KVM: {error:#}"),
            ),
        })
    }

    /// The error for a source that cannot be downloaded, or not with these settings.
    pub fn download_error(&self) -> Option<anyhow::Error> {
        let Source::Download(version) = &self.source else { return None };
        let settings = &self.input.settings;
        let job = || download::Job::new(settings, &settings.storage.folder);
        download::refusal(version).or_else(|| job().and_then(|it| it.check_allowed()).err())
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

/// Takes over what former starts have left on the volume, and what the machine of a base has.
fn recall(input: &mut ParsedEnvironment, next: &Next, root: &Path) -> anyhow::Result<()> {
    let base = original::folder(&input.settings, root)?;
    let volume = below(root, &input.settings.storage.folder);
    // Some files may be in a backup that was interrupted.
    for folder in base.iter().chain(&next.found.backup).chain([&volume]) {
        firmware::recall(input, folder)?;
        kept::recall(input, folder);
    }
    Ok(())
}

/// Decides what to do with the volume, and what then runs.
fn decide(
    input: &ParsedEnvironment,
    root: &Path,
    disk: Option<&FoundDisk>,
) -> anyhow::Result<(Next, Source)> {
    let settings = &input.settings;
    original::check_seal(settings, root)?;
    let volume = below(root, &settings.storage.folder);
    let candidate = candidate(settings, root);
    let base = candidate.as_ref().ok().and_then(|source| base(source, settings));
    let found = Found::look(&volume, &settings.pod.process(), disk);
    let dockur = settings.pod.compat == Compat::Dockur;
    // Defaults ask for nothing, except as in the reference image.
    let asks = ["VERSION", "LANGUAGE"].iter().any(|name| input.names.contains(*name));
    let asks = dockur || asks || base.as_deref().is_some_and(name::is_custom);
    let wanted = Wanted {
        name: base.clone().filter(|_| asks),
        here: matches!(candidate, Ok(Source::Medium(_))),
        manual: settings.windows.manual,
        dockur,
    };
    let step = match settings.disk.disable {
        true => Step::Live,
        false => state::decide(&found, &wanted)?,
    };
    let source = match (step.boots(), disk) {
        (true, Some(found)) => Source::Disk(found.disk.path.clone()),
        _ => candidate?,
    };
    Ok((Next { found, step, base }, source))
}

/// The name of a source in `windows.base`. An image on the volume is in place of the download,
/// except one that the user names.
fn base(source: &Source, settings: &Settings) -> Option<String> {
    let windows = &settings.windows;
    let downloaded = name::of(&windows.version, windows.language.0);
    match source {
        Source::Probe | Source::Disk(_) => None,
        Source::Download(_) => downloaded,
        Source::Medium(path) => downloaded
            .filter(|_| !is_custom(path))
            .or_else(|| std::fs::metadata(path).ok().map(|told| name::of_custom(told.len()))),
    }
}

fn is_custom(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    CUSTOM.iter().any(|custom| name.eq_ignore_ascii_case(custom))
}

/// The medium to install from: an ISO image of the user, one on the volume, or a download.
fn candidate(settings: &Settings, root: &Path) -> anyhow::Result<Source> {
    let volume = below(root, &settings.storage.folder);
    let mut media: Vec<PathBuf> = Vec::new();
    for folder in [root, volume.as_path()] {
        for name in CUSTOM {
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

/// Why the settings do not fit to a machine that goes on.
fn obstacle(settings: &Settings, source: &Source, is_new: bool) -> Option<&'static str> {
    Some(match source {
        _ if is_new => "the settings install the guest anew",
        Source::Medium(_) | Source::Download(_) => "the settings boot from an ISO",
        _ if settings.machine.clear => "CLEAR=Y resets its firmware",
        _ if settings.disk.ephemeral => "EPHEMERAL=Y keeps nothing",
        _ => return None,
    })
}

/// Errors are reported elsewhere, so their text is empty.
pub fn text(plan: &anyhow::Result<Plan>) -> String {
    let Ok(plan) = plan else { return String::new() };
    let mut text = String::new();
    for (name, shown) in changed(&plan.input) {
        writeln!(text, "{name}={shown}").expect("a string takes all");
    }
    let Sizes { processors, memory, disk, .. } = plan.sizes;
    let processors = match processors {
        1 => "1 processor".to_owned(),
        processors => format!("{processors} processors"),
    };
    let (memory, disk) = (in_mib(memory), if disk == 0 { "no".into() } else { in_mib(disk) });
    writeln!(text, "machine: {processors}, {memory} of memory, {disk} disk")
        .expect("a string takes all");
    writeln!(text, "runs: {}", plan.description()).expect("a string takes all");
    if let Some(goes_on) = &plan.goes_on {
        let machine = match goes_on {
            GoesOn::Suspended => "the machine is suspended",
            GoesOn::Arriving => "the machine of another pod",
            GoesOn::Clone(_) => "the machine of BASE",
        };
        writeln!(text, "continues: {machine}").expect("a string takes all");
    }
    if let Some(next) = &plan.next {
        writeln!(text, "because: {}", next.step.reason()).expect("a string takes all");
    }
    if let Some(media) = &plan.media {
        writeln!(text, "medium: {media}").expect("a string takes all");
    }
    if let Some(unattended) = &plan.unattended {
        writeln!(text, "installs: {unattended}").expect("a string takes all");
        writeln!(text, "drivers: {}", unattended.drivers()).expect("a string takes all");
    }
    for warning in &plan.warnings {
        writeln!(text, "warning: {warning}").expect("a string takes all");
    }
    text
}

fn medium_json(media: &Media) -> Value {
    let edition =
        |it: &Entry| json!({ "index": it.index, "name": it.shown(), "id": it.edition_id });
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
                .or_else(|| plan.drivers_error())
                .or_else(|| plan.kvm_error(kvm))
                .map(|error| format!("{error:#}"));
            json!({
                "settings": settings,
                "processors": plan.sizes.processors,
                "memory": plan.sizes.memory,
                "disk": plan.sizes.disk,
                "more_disks": plan.sizes.more,
                "suspended": plan.is_suspended(),
                "clones": plan.cloned(),
                "source": { "kind": kind, "is": plan.description() },
                "step": plan.next.as_ref().map(|next| next.step.json()),
                "medium": plan.media.as_ref().map(medium_json),
                "installs": plan.unattended.as_ref().map(|it| it.to_string()),
                "drivers": plan.unattended.as_ref().map(Unattended::drivers),
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
