//! The pod: prepares the machine that the environment describes, runs it, and ends it. This file is
//! the recipe.

mod arrival;
mod assembly;
pub mod balloon;
pub mod boot_retry;
pub mod child;
pub mod console;
pub mod departure;
pub mod doze;
mod failure;
pub mod fetch;
pub mod freeze;
pub mod guard;
pub mod guest_log;
pub mod hold;
mod idle;
pub mod inquiry;
pub mod kvm;
mod lines;
pub mod machine;
pub mod machine_client;
pub mod network;
pub mod reports;
pub mod runtime_folder;
mod setup;
mod share;
mod smm;
pub mod stop;
mod suspend;
mod thread;
mod tpm;
pub mod usb;
pub mod volume;
mod watch;

use std::fs;
use std::mem;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::runtime::Builder;
use tokio::sync::Mutex;

use self::arrival::{Arriving, Waited};
use self::boot_retry::KeyPrompt;
use self::child::{BootEvents, Child, Options};
use self::departure::Departure;
use self::freeze::Freezer;
use self::guard::Guard;
use self::idle::Counters;
use self::inquiry::EndNotice;
use self::network::{GuestAddress, Network};
use self::runtime_folder::RuntimeFolder;
use self::share::ShareServer;
use self::stop::Signals;
use self::suspend::SuspendFolder;
use self::thread::run_in_thread;
use self::volume::Volume;
use crate::agent::Agent;
use crate::descriptors;
use crate::firmware;
use crate::jail::{self, Capabilities};
use crate::plan::Plan;
use crate::qmp::{self, Monitors};
use crate::settings::environment::{self, Environment};
use crate::settings::host;
use crate::settings::value;
use crate::settings::{Settings, Shutdown};
use crate::snapshots::{self, Shelf};
use crate::source::Source;
use crate::status::{SIGNALS, Status};
use crate::story::{Phase, Story, log_layer};
use crate::suspended;
use crate::web::logins::{Earlier, Logins, SESSIONS_FILE};
use crate::web::{self, WebState};

/// How long the pod's end waits for commands that wait for the end of the machine, on a busy host,
/// too.
const END_NOTICE_TIMEOUT: Duration = Duration::from_secs(3);
/// The last line of a pod that did not fail. Tools wait for it.
pub const SHUT_DOWN: &str = "Shutdown completed!";
/// How long the pod's end waits for viewers and other tasks.
const TASKS_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs the pod until its machine is off, or a signal ends it. Returns the exit status. `ignored`
/// are words of the command line without effect.
pub fn run(environment: &Environment, ignored: &[String]) -> anyhow::Result<u8> {
    descriptors::raise();
    // Only the main thread has rights, and it drops them step by step. Helper threads start without
    // rights.
    let runtime = Builder::new_current_thread()
        .thread_keep_alive(Duration::from_secs(5))
        .thread_name("pod")
        .on_thread_start(jail::serve)
        .enable_all()
        .build()
        .context("threads")?;
    let story = Story::new();
    log_layer::connect(&story);
    let mut port = Port::default();
    let status = runtime.block_on(async {
        let mut signals = Signals::catch()?;
        let outcome = async {
            recover(environment)?;
            let mut plan = Plan::make(environment, Path::new("/"))?;
            plan.warnings.extend(ignored.first().map(|word| words_without_effect(word)));
            run_to_end(plan, environment, &story, &mut signals, &mut port).await
        };
        let outcome = outcome.await;
        hold::hold(outcome, environment, &story, port.is_open, &mut signals).await
    });
    runtime.shutdown_timeout(TASKS_TIMEOUT);
    if let Some(logins) = port.logins {
        logins.keep();
    }
    status
}

/// Finishes what an interrupted `transom snapshot` has left on the volume. The plan reports wrong
/// variables.
fn recover(environment: &Environment) -> anyhow::Result<()> {
    let Ok(input) = environment::read(environment) else { return Ok(()) };
    snapshots::recover(&Shelf::new(&input.settings, Path::new("/")))
}

/// The parts of a pod that exist before its medium does.
struct Outside {
    runtime_folder: RuntimeFolder,
    guard: Guard,
    story: Arc<Story>,
    guest: Arc<OnceLock<GuestAddress>>,
    agent: Arc<Agent>,
    web: Arc<WebState>,
    monitors: Arc<Monitors>,
    freezer: Freezer,
    departure: Arc<OnceLock<Departure>>,
}

/// A pod after the first preparations.
struct Pod {
    plan: Arc<Plan>,
    /// `None` for the probe, which keeps nothing.
    volume: Option<Volume>,
    continuity: Continuity,
    runtime_folder: RuntimeFolder,
    guard: Guard,
    web: Arc<WebState>,
    /// Whether the CD asks for a key. Determined early: later the pod may have no right to read it.
    key_prompt: KeyPrompt,
    story: Arc<Story>,
    guest: Arc<OnceLock<GuestAddress>>,
    agent: Arc<Agent>,
    monitors: Arc<Monitors>,
    freezer: Freezer,
    /// Set with the network.
    counters: OnceLock<Arc<Counters>>,
    /// Number of processes of our control group that the kernel had killed for lack of memory when
    /// the pod began.
    oom_kills: u64,
}

/// The means by which the machine goes on without a boot.
struct Continuity {
    /// Not set if the machine cannot be suspended, is not to be, or has just arrived.
    suspend_folder: OnceLock<SuspendFolder>,
    /// Set if the machine can move to another pod.
    departure: Arc<OnceLock<Departure>>,
    /// The connection through which the machine comes from another pod.
    arriving: Arriving,
}

/// The web port of a pod.
#[derive(Default)]
struct Port {
    is_open: bool,
    logins: Option<Logins>,
}

/// Runs the pod until it ends or fails. Fills `port` when the web port is open; it is served until
/// the runtime ends.
async fn run_to_end(
    plan: Plan,
    environment: &Environment,
    story: &Arc<Story>,
    signals: &mut Signals,
    port: &mut Port,
) -> anyhow::Result<u8> {
    announce(&plan)?;
    let plan = Arc::new(plan);
    let planned = plan.clone();
    let (runtime_folder, volume) = tokio::select! {
        both = run_in_thread("folders", move || prepare_folders(&planned)) => both?,
        status = signals.peek() => return Ok(status),
    };
    // Meanwhile, the machine of a killed pod may have ended with its snapshot, or have written.
    let suspended = suspended::find(&suspended::folder(&plan.input.settings, Path::new("/")))?;
    let plan = match suspended.is_some() == plan.is_suspended() && plan.cloned().is_none() {
        true => plan,
        false => Arc::new(Plan::make(environment, Path::new("/"))?),
    };
    // The probe has no volume of its own, but disks on it can be attached to the probe.
    let storage = Some(plan.input.settings.storage.folder.as_path()).filter(|it| it.is_dir());
    let own: Vec<_> = [Some(runtime_folder.path()), storage].into_iter().flatten().collect();
    let settings = &plan.input.settings;
    jail::build(&[&own[..], &Monitors::folders(settings)].concat());
    let devices = settings.machine.arguments.as_ref().map(|it| &it.usb[..]).unwrap_or_default();
    usb::start(runtime_folder.control(), devices)?;
    let monitors = Monitors::new(runtime_folder.control(), plan.name(), &own);
    let guard = Guard::of(&plan, volume.as_ref(), &runtime_folder)?;
    let guest = Arc::<OnceLock<GuestAddress>>::default();
    let agent = Arc::new(Agent::new(runtime_folder.agent()));
    let web =
        WebState::new(story.clone(), runtime_folder.clone(), &plan, guest.clone(), agent.clone());
    let web = Arc::new(web);
    let earlier = tokio::select! {
        earlier = earlier_logins(settings, &guard, volume.as_ref()) => earlier,
        status = signals.peek() => return Ok(status),
    };
    let opened = web::open(settings, &guard, &web)?;
    port.logins = earlier.zip(opened.sessions).map(|(earlier, it)| earlier.resume(it));
    opened.served.map(tokio::spawn);
    qmp::open(settings, &monitors)?.map(tokio::spawn);
    port.is_open = true;
    if let Some(line) = web::line(&plan.input, &guard) {
        story.info(&line);
    }
    let end_notice = EndNotice::default();
    let encrypts = settings.pod.snapshot_key.is_some();
    let freezer = Freezer::new(runtime_folder.control(), agent.clone(), encrypts);
    let departure = Arc::<OnceLock<Departure>>::default();
    let parts = inquiry::Parts {
        web: web.clone(),
        end_notice: end_notice.clone(),
        freezer: freezer.clone(),
        departure: departure.clone(),
    };
    inquiry::open(&runtime_folder.pod(), parts).map(tokio::spawn)?;
    let story = story.clone();
    let outside =
        Outside { runtime_folder, guard, story, guest, agent, web, monitors, freezer, departure };
    let status = fetch_and_run(plan, environment, volume, outside, signals).await;
    // Other statuses are failures of the machine.
    if status.as_ref().is_ok_and(|status| *status == 0 || *status > SIGNALS) {
        tracing::info!("{SHUT_DOWN}");
    }
    let ended = status.as_ref().map_or_else(|error| Status::of(error).code(), |status| *status);
    end_notice.send(ended, END_NOTICE_TIMEOUT).await;
    status
}

/// The logins of the pod before. `None` if nobody logs in, or if no start comes after this one.
async fn earlier_logins(
    settings: &Settings,
    guard: &Guard,
    volume: Option<&Volume>,
) -> Option<Earlier> {
    let guarded = settings.screen.web && matches!(guard, Guard::Password { .. });
    let path = volume.filter(|_| guarded && !settings.disk.ephemeral)?.file(SESSIONS_FILE);
    let taken = run_in_thread("sessions", move || Ok(Earlier::take(&path)?)).await;
    let refused = |error| {
        tracing::warn!("web: browsers must log in again after a new start: {error:#}");
    };
    taken.map_err(refused).ok()
}

/// Logs what the pod is going to do, unless it cannot start.
fn announce(plan: &Plan) -> anyhow::Result<()> {
    // Warnings would hide the error of a pod that cannot start.
    if let Some(error) = plan.download_error().or_else(|| plan.drivers_error()) {
        return Err(error);
    }
    if let Source::Download(_) = plan.source {
        firmware::check_before_download(&plan.input, Path::new("/"))?;
    }
    plan.check_kvm(Path::new("/dev/kvm"))?;
    for warning in &plan.warnings {
        tracing::warn!("{warning}");
    }
    tracing::info!("{}", plan.summary());
    if let Some(next) = &plan.next {
        tracing::info!("the next step is {}: {}", next.step.name(), next.step.reason());
    }
    if let Some(media) = &plan.media {
        tracing::info!("the medium has {media}");
    }
    Ok(())
}

/// The warning about a command line that the reference image's entry point ignores. Only its first
/// word is shown, because others may be secret.
fn words_without_effect(first: &str) -> String {
    format!(
        "the command {} has no effect, because the container always runs its machine: leave it \
         out, or use `transom exec` in the running container to run a program in the guest",
        value::quote(first)
    )
}

/// Gets what the plan lacks, and runs the machine. Returns the exit status of the machine, or of
/// the signal that ended the pod before.
async fn fetch_and_run(
    plan: Arc<Plan>,
    environment: &Environment,
    volume: Option<Volume>,
    outside: Outside,
    signals: &mut Signals,
) -> anyhow::Result<u8> {
    let (plan, arriving) = match arrival::wait(plan, environment, &outside.story, signals).await? {
        Waited::Arrives(plan, arriving) => (plan, arriving),
        Waited::Alone(plan) => {
            match fetch::fetch(plan, environment, &outside.story, signals).await? {
                Ok(plan) => (plan, Arriving::default()),
                Err(status) => return Ok(status),
            }
        }
        Waited::Ended(status) => return Ok(status),
    };
    run_machine(&Arc::new(Pod::new(plan, volume, outside, arriving)?), signals).await
}

/// Returns the exit status of the machine, or of the signal that ended its start.
async fn run_machine(pod: &Arc<Pod>, signals: &mut Signals) -> anyhow::Result<u8> {
    let network = Mutex::new(Network::None);
    let status = tokio::select! {
        started = pod.start(&network) => match started {
            Ok((child, events)) => {
                let monitor = tokio::spawn(pod.agent.clone().monitor(pod.story.clone()));
                let mut watched = pin!(pod.watch(child, events, signals));
                let status = tokio::select! {
                    status = &mut watched => status,
                    () = pod.set_up() => watched.await,
                };
                monitor.abort();
                pod.monitors.end(&status).await;
                status
            }
            Err(error) => Err(error),
        },
        status = async {
            // If the machine starts before the lock is taken, `watch` handles the signal.
            let status = signals.peek().await;
            // Wait for the lock: a half-made network could not be removed.
            drop(network.lock().await);
            status
        } => Ok(status),
    };
    network.into_inner().end().await;
    status
}

/// This may take a while: the machine of a killed pod may still be ending, and the volume may be
/// slow.
fn prepare_folders(plan: &Plan) -> anyhow::Result<(RuntimeFolder, Option<Volume>)> {
    let settings = &plan.input.settings;
    let runtime_folder = RuntimeFolder::create()?;
    let has_volume = !matches!(plan.source, Source::Probe);
    let volume = has_volume.then(|| Volume::open(settings, &plan.source)).transpose()?;
    Ok((runtime_folder, volume))
}

impl Pod {
    fn new(
        plan: Arc<Plan>,
        volume: Option<Volume>,
        outside: Outside,
        arriving: Arriving,
    ) -> anyhow::Result<Self> {
        let Outside { runtime_folder, guard, story, guest, agent, web, monitors, .. } = outside;
        let (freezer, departure) = (outside.freezer, outside.departure);
        // Fetching may have taken hours.
        snapshots::check(&Shelf::new(&plan.input.settings, Path::new("/")))?;
        let rescue = machine::rescue(Path::new("/"), &plan.input.settings.storage.folder);
        let key_prompt = KeyPrompt::of(&plan.source, plan.media.as_ref(), rescue.as_deref());
        // The other pod has the folder of a machine that arrives.
        let folder = match plan.arrives() {
            true => None,
            false => SuspendFolder::prepare(&plan, Path::new("/"))?,
        };
        if let (Some(folder), Some(memory)) = (&folder, plan.cloned()) {
            folder.count_memory(memory);
        }
        let pod = Self {
            continuity: Continuity { suspend_folder: OnceLock::new(), departure, arriving },
            plan,
            volume,
            runtime_folder,
            guard,
            web,
            key_prompt,
            story,
            guest,
            agent,
            monitors,
            freezer,
            counters: OnceLock::new(),
            oom_kills: host::oom_kills(Path::new("/")),
        };
        if let Err(error) = pod.keep(folder) {
            tracing::warn!("SHUTDOWN=migrate: the machine does not move: {error:#}");
        }
        Ok(pod)
    }

    /// Lets the machine be suspended there, and move to other pods.
    fn keep(&self, folder: Option<SuspendFolder>) -> anyhow::Result<()> {
        let Some(folder) = folder else { return Ok(()) };
        let folder = self.continuity.suspend_folder.get_or_init(|| folder);
        let settings = &self.plan.input.settings;
        if settings.pod.shutdown != Shutdown::Migrate || !folder.saves {
            return Ok(());
        }
        ensure!(
            !settings.network.dhcp,
            "with DHCP=Y, two cards with its address would be on the network"
        );
        let (control, story) = (self.runtime_folder.control(), self.story.clone());
        let departure = Departure::announce(&self.plan, folder.path(), control, story)?;
        self.continuity.departure.get_or_init(|| departure);
        Ok(())
    }

    /// `None` if the machine cannot be suspended, or is not to be.
    fn suspend_folder(&self) -> Option<&SuspendFolder> {
        self.continuity.suspend_folder.get().filter(|folder| folder.saves)
    }

    /// The caller ends the network, also after an error.
    async fn start(self: &Arc<Self>, slot: &Mutex<Network>) -> anyhow::Result<(Child, BootEvents)> {
        let settings = &self.plan.input.settings;
        self.story.step("Preparing the machine…");
        let pod = self.clone();
        let mut parts = run_in_thread("volume", move || pod.parts()).await?;
        let pairs = parts.pairs(settings, self.plan.sizes.processors);
        // Start programs before the network's queues exist, since programs inherit them.
        let tpm = self.tpm()?;
        let share = ShareServer::of(&self.plan, self.volume.as_ref(), &self.story);
        let connector = share.as_ref().map(ShareServer::connector);
        parts.tpm = tpm.is_some().then(|| self.runtime_folder.tpm());
        let mut network = slot.lock().await;
        let (input, folder) = (&self.plan.input, &self.runtime_folder);
        *network = Network::make(input, pairs, folder, &self.story, connector).await?;
        parts.card = network.card(settings)?;
        match (&*network, &self.volume) {
            (Network::User(user), Some(volume)) => volume.keep_address(&user.address),
            (_, Some(volume)) => volume.forget_address(),
            (_, None) => {}
        }
        self.counters.get_or_init(|| Arc::new(Counters::of(&network)));
        if let Some(guest) = network.guest() {
            self.guest.get_or_init(|| guest);
        }
        // The network's programs must not inherit the set-up disk.
        if let Some(disk) = &parts.setup_disk {
            disk.bequeath()?;
        }
        parts.unnamed.bequeath()?;
        let config = machine::config(settings, &self.plan.sizes, &parts)?;
        let does = if self.is_continued() { "Continuing" } else { "Starting" };
        self.story.enter(Phase::Booting, &format!("{does} {}…", self.plan.name()));
        let options = Options::of(settings, &self.plan.source, self.is_continued());
        let (mut child, events) =
            Child::start(self.runtime_folder.control(), &self.story, options)?;
        network.close_queues();
        child.attach_tpm(tpm);
        child.attach_share(share);
        // The process has inherited them.
        drop(mem::take(&mut parts.unnamed));
        child.attach_setup_disk(self.plugged(parts.setup_disk, &config));
        // The machine locks the disks now, and later the pod may have no right to look.
        let shelf = Shelf::new(settings, Path::new("/"));
        snapshots::check_since(&shelf, parts.identity.generation)?;
        jail::close(self.rights(), &child.ids())?;
        child.configure(&config).await?;
        if !child.has_setup_disk() {
            usb::attach_configured().await;
        }
        // Keep the lock until the process exists: from then on `watch` handles signals.
        drop(network);
        Ok((child, events))
    }

    /// The rights that the rest of the pod's life needs: those for its end, and, until Windows is
    /// set up, the right to mark that on another user's volume.
    fn rights(&self) -> Capabilities {
        let us = rustix::process::geteuid();
        let mut rights = Capabilities::empty();
        // The machine runs as another user if the pod is root.
        rights.set(Capabilities::KILL, us.is_root());
        let settings = &self.plan.input.settings;
        // A card on the pod's own network exists until it is deleted.
        rights.set(Capabilities::NET_ADMIN, settings.network.dhcp);
        let folder = &settings.storage.folder;
        let foreign = |found: fs::Metadata| found.uid() != us.as_raw();
        let foreign = fs::metadata(folder).is_ok_and(foreign);
        let is_new = |volume: &Volume| !volume.has_booted() || volume.is_being_set_up();
        let marks = self.volume.as_ref().is_some_and(is_new) && !settings.disk.ephemeral;
        rights.set(Capabilities::DAC_OVERRIDE, us.is_root() && marks && foreign);
        rights
    }

    /// The suspended machine, if there is one, which continues.
    fn suspended(&self) -> Option<&SuspendFolder> {
        self.suspend_folder().filter(|folder| folder.continues)
    }

    /// Whether the guest does not boot, but goes on.
    fn is_continued(&self) -> bool {
        self.plan.goes_on.is_some()
    }

    /// Whether its disks and the firmware's variables must stay as they are.
    fn is_unchanged(&self) -> bool {
        self.suspended().is_some() || self.plan.arrives()
    }
}

/// The line that tools wait for, in the reference image's words.
pub fn started(app: &str, web_port: Option<u32>) -> String {
    match web_port {
        Some(port) => format!(
            "{app} started successfully, visit http://127.0.0.1:{port}/ to view the screen..."
        ),
        None => format!("{app} started successfully"),
    }
}
