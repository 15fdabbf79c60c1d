//! The pod: from the environment to a machine that runs, and to its end. This is the recipe.

pub mod child;
pub mod console;
pub mod guard;
pub mod machine;
pub mod network;
pub mod room;
pub mod stop;
pub mod volume;

use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use tokio::runtime::Builder;
use tokio::time::sleep;

use self::child::{Child, Manner, News};
use self::console::Told;
use self::guard::Guard;
use self::machine::Parts;
use self::network::Network;
use self::room::Room;
use self::stop::{Budget, Signals};
use self::volume::{Disk, Volume};
use crate::plan::{Plan, Source};
use crate::settings::Format;
use crate::settings::environment::Environment;
use crate::settings::translate::Serial;
use crate::status::{Failure, Status};
use crate::story::{Phase, Story};
use crate::web::{self, Front};

/// Firmware that has started nothing after so long is worth a look.
const PATIENCE: Duration = Duration::from_secs(60);
/// What viewers and other tasks may still say at the end.
const PARTING: Duration = Duration::from_secs(1);

/// Runs the pod until its machine is off, or it is told to end. The number is the exit status.
///
/// # Errors
///
/// One sentence: what is missing or wrong, and the way out.
pub fn run(environment: &Environment) -> anyhow::Result<u8> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .thread_keep_alive(Duration::from_secs(5))
        .thread_name("pod")
        .enable_all()
        .build()
        .context("threads")?;
    let status = runtime.block_on(live(environment));
    runtime.shutdown_timeout(PARTING);
    status
}

/// A pod that has what it needs.
struct Pod {
    plan: Plan,
    /// None for the probe, which keeps nothing.
    volume: Option<Volume>,
    room: Room,
    guard: Guard,
    story: Arc<Story>,
    /// Where the guest is, once that is known.
    guest: Arc<OnceLock<IpAddr>>,
}

async fn live(environment: &Environment) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    let plan = Plan::make(environment, Path::new("/"))?;
    for warning in &plan.warnings {
        tracing::warn!("{warning}");
    }
    tracing::info!("{}", machine::shown(&plan));
    if let Some(missing) = plan.missing() {
        return Err(missing);
    }
    check_kvm(Path::new("/dev/kvm"))?;
    let room = Room::make()?;
    let volume = match plan.source {
        Source::Probe => None,
        _ => Some(Volume::open(&plan.said.settings)?),
    };
    let guard = Guard::of(&plan, volume.as_ref(), &room)?;
    let (story, guest) = (Story::new(), Arc::<OnceLock<IpAddr>>::default());
    let front = Front::new(story.clone(), room.clone(), &plan, guest.clone());
    let pod = Pod { plan, volume, room, guard, story, guest };
    let served = web::open(&pod.plan.said.settings, &pod.guard, front)?.map(tokio::spawn);
    let status = tokio::select! {
        started = pod.start() => {
            let (child, news, network) = started?;
            let status = pod.watch((child, news), &mut signals).await;
            network.end().await;
            status
        }
        status = signals.next() => Ok(status),
    };
    if let Some(served) = served {
        served.abort();
    }
    status
}

/// Says at once what else is only found out at the end of all preparations.
fn check_kvm(path: &Path) -> anyhow::Result<()> {
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(path);
    let Err(error) = opened else { return Ok(()) };
    let out = match error.kind() {
        ErrorKind::NotFound => "switch virtualization on in the host's firmware, load its module \
                                (kvm_intel or kvm_amd), and lend the device to the container with \
                                --device /dev/kvm"
            .to_owned(),
        ErrorKind::PermissionDenied => {
            let group = std::fs::metadata(path).map_or(0, |it| it.gid());
            format!(
                "lend it to the container with --device /dev/kvm, and let the process into \
                     group {group} (--group-add {group}, or supplementalGroups)"
            )
        }
        _ => "see whether the host's processor can virtualize, and whether this host is a \
              virtual machine itself without nested virtualization"
            .to_owned(),
    };
    Err(Failure::new(Status::NoKvm, format!("{}: {error}: {out}", path.display())))
}

impl Pod {
    /// Makes ready what the machine needs, and starts it.
    async fn start(&self) -> anyhow::Result<(Child, News, Network)> {
        let settings = &self.plan.said.settings;
        self.story.step("Preparing the machine…");
        let mut parts = Parts {
            control: self.room.control(),
            doors: self.guard.doors(settings, &self.room),
            ..Parts::default()
        };
        if let Some(volume) = &self.volume {
            self.store(volume, &mut parts)?;
        }
        let processors = self.plan.sizes.processors;
        let network = Network::make(settings, processors, &self.room, &self.story).await;
        parts.cable = network.cable(settings)?;
        if let Some(guest) = network.guest() {
            self.guest.get_or_init(|| guest);
        }
        let config = machine::config(&self.plan, &parts)?;
        self.story.enter(Phase::Booting, &format!("Starting {}…", settings.pod.app.0));
        let level = match (settings.pod.trace, settings.pod.debug) {
            (true, _) => "trace",
            (_, true) => "debug",
            _ => "info",
        };
        let utc = settings.machine.arguments.as_ref().is_some_and(|it| it.utc);
        let zone = settings.machine.zone.as_ref().map(|zone| zone.0.as_str());
        let manner = Manner {
            level,
            zone: if utc { Some("UTC") } else { zone },
            quiet: settings.machine.serial.is == Serial::None,
        };
        let child = Child::start(&config, self.room.control(), &self.story, manner);
        let (child, news) = child.await?;
        Ok((child, news, network))
    }

    /// Disks, media and the firmware's memory.
    fn store(&self, volume: &Volume, parts: &mut Parts) -> anyhow::Result<()> {
        let settings = &self.plan.said.settings;
        let (code, template) = volume::firmware()?;
        let vars = volume.vars(&template, settings.machine.clear)?;
        parts.firmware = Some((code, vars));
        let (root, folder) = (Path::new("/"), &settings.storage.folder);
        parts.media.extend(machine::rescue(root, folder));
        if let Source::Medium(medium) = &self.plan.source {
            parts.media.push(medium.clone());
        }
        parts.media.extend(machine::further_media(root, folder));
        if settings.disk.disable {
            return Ok(());
        }
        let first = match (volume::first_device(settings)?, &self.plan.source) {
            (Some(device), _) => device,
            (None, Source::Disk(path)) if !volume.is_own(path) => {
                let qcow2 = path.extension().is_some_and(|end| end == "qcow2");
                let format = if qcow2 { Format::Qcow2 } else { Format::Raw };
                Disk { path: path.clone(), format }
            }
            _ => volume.disk(settings, self.plan.sizes.disk, &self.story)?,
        };
        parts.disks.push(first);
        parts.disks.extend(volume::more(settings, &self.plan.sizes.more, &self.story)?);
        Ok(())
    }

    /// Looks after the machine until it is off.
    async fn watch(
        &self,
        (mut child, mut news): (Child, News),
        signals: &mut Signals,
    ) -> anyhow::Result<u8> {
        let app = &self.plan.said.settings.pod.app.0;
        let mut patience = std::pin::pin!(sleep(PATIENCE));
        // The probe has no firmware that would tell.
        let mut started = self.volume.is_none();
        let mut from_disk = false;
        if started {
            self.story.enter(Phase::Running, "The probe runs");
        }
        loop {
            tokio::select! {
                ended = child.end() => return self.ended(ended?),
                Some((told, last)) = news.recv() => match told {
                    Told::Starts { name, disk } => {
                        from_disk |= disk;
                        self.starts(&name, disk);
                        started = true;
                    }
                    Told::Nothing if from_disk => {}
                    Told::Nothing => {
                        child.kill();
                        return Err(nothing_starts(&self.plan.source, &last));
                    }
                },
                () = &mut patience, if !started => {
                    started = true;
                    let seconds = PATIENCE.as_secs();
                    tracing::warn!(
                        "the firmware has started nothing for {seconds} s: look at the screen"
                    );
                }
                status = signals.next() => {
                    self.story.enter(Phase::Stopping, &format!("Stopping {app}…"));
                    let asks = self.plan.said.settings.pod.shutdown
                        && (from_disk || self.volume.is_none());
                    let budget = Budget::of(self.plan.said.settings.pod.timeout.0);
                    stop::stop(&mut child, budget, asks, signals).await;
                    return Ok(status);
                }
            }
        }
    }

    /// The firmware hands over.
    fn starts(&self, name: &str, disk: bool) {
        let app = &self.plan.said.settings.pod.app.0;
        if disk && let Some(volume) = self.volume.as_ref().filter(|it| !it.has_booted()) {
            match volume.mark_booted() {
                Ok(()) => tracing::info!("{app} starts from its disk for the first time"),
                Err(error) => {
                    tracing::warn!("it cannot be remembered that {app} started: {error:#}");
                }
            }
        }
        self.story.enter(Phase::Running, &format!("{} starts", name.trim()));
        let settings = &self.plan.said.settings;
        if settings.screen.web {
            // Tools wait for this line of the reference image.
            tracing::info!(
                "{app} started successfully, visit http://127.0.0.1:{}/ to view the screen...",
                settings.screen.web_port.0
            );
        }
    }

    /// The machine is off: an exit status for it.
    fn ended(&self, ended: ExitStatus) -> anyhow::Result<u8> {
        let app = &self.plan.said.settings.pod.app.0;
        if let Some(signal) = ended.signal() {
            let sentence = format!(
                "{app} was ended by signal {signal}: nothing on the disk that \
                                    was acknowledged is lost; start it again"
            );
            return Err(Failure::new(Status::Failed, sentence));
        }
        let code = ended.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX);
        if code == 0 {
            tracing::info!("{app} is off");
        }
        Ok(code)
    }
}

/// The firmware gave up, and why that may be.
fn nothing_starts(source: &Source, last: &str) -> anyhow::Error {
    let out = match source {
        Source::Medium(path) => {
            format!("{} is not one that UEFI can start: try another medium", path.display())
        }
        _ => "the disk has nothing that UEFI can start: mount an ISO as /custom.iso".to_owned(),
    };
    Failure::new(
        Status::Failed,
        format!("the firmware found nothing to start: {out}; it said:\n{last}"),
    )
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn without_kvm_the_way_out_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let error = check_kvm(&folder.path().join("kvm")).unwrap_err();
        assert_eq!(Failure::status(&error), Status::NoKvm);
        assert!(format!("{error:#}").contains("--device /dev/kvm"));
        assert!(check_kvm(Path::new("/dev/null")).is_ok());
    }
}
