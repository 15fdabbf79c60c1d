//! The life of a machine that runs: boot events of its firmware, its end, and signals that stop it.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use ::host::size::Size;
use anyhow::Context as _;
use rustix::process::Signal;
use tokio::time::{Instant, sleep, timeout};
use vmm::control::Command;

use super::balloon::Balloon;
use super::boot_retry::BootRetry;
use super::child::{BootEvents, Child};
use super::console::{BootDevice, BootEvent};
use super::departure::{self, Departure, Limits};
use super::doze::{self, Stage};
use super::failure::{killed_error, nothing_boots_error};
use super::idle::{Dozed, Idle, WAKE_PAUSE};
use super::machine_client;
use super::stop::{self, Budget, Outcome, Signals};
use super::suspend;
use super::thread::run_in_thread;
use super::usb;
use super::volume::Volume;
use super::{Pod, started};
use crate::disks::original;
use crate::jail::{self, Capabilities};
use crate::plan::unattended::Unattended;
use crate::settings::Shutdown;
use crate::settings::host::{self, MemoryLoad};
use crate::status::Status;
use crate::story::Phase;
use crate::story::installation::{Installation, Stage as Installed};

/// Warn if the firmware has started nothing after this time.
const BOOT_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a killed machine may take to end.
pub(super) const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the process of a machine that may have moved takes to end.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// Start of the name of Windows' boot entry. Other systems may need their medium for longer.
const WINDOWS: &str = "Windows Boot Manager";

fn warn_of_no_boot() {
    let seconds = BOOT_TIMEOUT.as_secs();
    tracing::warn!("the firmware has booted nothing for {seconds} s: look at the screen");
}

/// The way in which a machine has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    Fresh,
    /// Its guest continues where it was: suspended, in another pod, or in that of its base.
    Continued,
    /// With this exit status of the pod, before its guest ran.
    Ended(u8),
}

/// The result of an attempt to move the machine.
enum Left {
    /// Its process has ended.
    Moved,
    Stays,
    /// A SIGINT is to turn it off at once.
    Interrupted,
}

/// A request to stop the machine.
struct Stop {
    /// Whether the guest can be expected to react.
    os_boots: bool,
    balloon: Option<Balloon>,
    /// How long ago it may have come.
    late: Duration,
}

/// Nothing else on the volume belongs to another user from here on.
fn drop_right_to_mark() {
    if let Err(error) = jail::drop_capabilities(Capabilities::DAC_OVERRIDE) {
        tracing::warn!("the pod keeps the right to write any file: {error:#}");
    }
}

impl Pod {
    /// Watches the machine until it is off, or a signal ends it. Returns the exit status.
    pub(super) async fn watch(
        &self,
        mut child: Child,
        mut events: BootEvents,
        signals: &mut Signals,
    ) -> anyhow::Result<u8> {
        let continues = match self.wake(&mut child, signals).await? {
            Start::Ended(status) => return Ok(status),
            other => other == Start::Continued,
        };
        let mut patience = std::pin::pin!(sleep(BOOT_TIMEOUT));
        // The probe has no firmware that reports booting.
        let mut started = continues || self.volume.is_none();
        let mut from_disk = continues;
        // Whether the guest can be expected to react to a shutdown request.
        let mut os_boots = started;
        self.show_start(continues);
        let mut succeeds = self.plan.arrives();
        // A machine that arrives has nowhere to be saved before.
        let mut idle = if succeeds { None } else { Idle::start(self, &child) };
        let mut succession = std::pin::pin!(self.succeed());
        let mut dozed = Dozed::default();
        let mut boot_retry = BootRetry::new(self.key_prompt, self.runtime_folder.control());
        let settings = &self.plan.input.settings.balloon;
        let mut balloon =
            Balloon::start(settings, self.plan.sizes.memory, &self.runtime_folder.control());
        loop {
            tokio::select! {
                biased;
                status = signals.next() => {
                    drop(boot_retry);
                    let (balloon, late) = (balloon.take(), dozed.hid());
                    let stop = Stop { os_boots, balloon, late };
                    self.stop(&mut child, stop, signals).await;
                    return Ok(status);
                }
                ended = child.end() => return self.exit_status(ended?, child.last_error().await),
                Some((event, last)) = events.recv() => {
                    let waits = boot_retry.handle(&event);
                    match event {
                        BootEvent::Starts { name, on } => {
                            from_disk |= on == BootDevice::Disk;
                            os_boots =
                                on == BootDevice::Disk || os_boots && on == BootDevice::Other;
                            self.on_boot(&name, on, &mut child);
                            started = true;
                        }
                        BootEvent::Nothing if from_disk || waits => os_boots = false,
                        BootEvent::Nothing => {
                            child.kill();
                            return Err(self.nothing_boots(&last));
                        }
                    }
                }
                () = &mut patience, if !started => {
                    started = true;
                    warn_of_no_boot();
                }
                () = &mut succession, if succeeds => {
                    (succeeds, idle) = (false, Idle::start(self, &child));
                }
                event = Idle::next(&mut idle), if os_boots || doze::is_asleep() => {
                    dozed = self.doze(event, &child, &mut idle).await;
                }
            }
        }
    }

    /// Waits until a suspended machine or a clone is restored, and lets its guest continue. Waits
    /// for the probe until it runs.
    async fn wake(&self, child: &mut Child, signals: &mut Signals) -> anyhow::Result<Start> {
        if self.plan.arrives() {
            return self.arrive(child, signals).await;
        }
        let (suspended, continues) = (self.suspended(), self.is_continued());
        if !continues && self.volume.is_some() {
            return Ok(Start::Fresh);
        }
        if let Some(status) = self.until_ready(child, signals, continues).await? {
            return Ok(Start::Ended(status));
        }
        if !continues {
            return Ok(Start::Fresh);
        }
        if let Some(used) = suspended.cloned() {
            let removed = run_in_thread("suspend", move || used.remove()).await;
            removed.context("the suspended machine does not continue")?;
        }
        while let Err(error) = self.resume(child).await {
            // A clone can begin again. The snapshot of a suspended machine is gone, so it must go
            // on, however busy the host is.
            if suspended.is_none() {
                return Err(error);
            }
            tracing::warn!("{} does not wake: {error:#}", self.plan.name());
            tokio::select! {
                ended = child.end() => {
                    let why = child.last_error().await;
                    return Ok(Start::Ended(self.exit_status(ended?, why)?));
                }
                // The machine is stopped by the rules for one that runs.
                _ = signals.peek() => return Ok(Start::Continued),
                () = sleep(WAKE_PAUSE) => {}
            }
        }
        self.take_control(child).await;
        Ok(Start::Continued)
    }

    /// Takes control of a machine that goes on.
    pub(super) async fn take_control(&self, child: &Child) {
        // Its balloon is as it was, and the pod's control of it begins anew.
        let size = Some(Size(self.plan.sizes.memory));
        child.ask(Command::Balloon { size }).await.ok();
        let agent = self.agent.clone();
        tokio::spawn(async move { suspend::set_clock(&agent).await });
    }

    /// Waits until the machine answers. Returns the exit status if it ends before.
    async fn until_ready(
        &self,
        child: &mut Child,
        signals: &mut Signals,
        continues: bool,
    ) -> anyhow::Result<Option<u8>> {
        let folder = &self.runtime_folder;
        let control = if continues { folder.waking() } else { folder.control() };
        let ended = tokio::select! {
            () = machine_client::until_ready(&control) => return Ok(None),
            ended = child.end() => ended?,
            status = signals.next() => {
                // The guest has not run: its snapshot stays as it is.
                child.kill();
                // A process that cannot be killed ends with the pod.
                timeout(KILL_TIMEOUT, child.end()).await.ok();
                return Ok(Some(status));
            }
        };
        let why = child.last_error().await;
        let status = self.exit_status(ended, why.clone())?;
        // The machine's status for a snapshot that does not fit is the same.
        match why.filter(|_| continues && status == Status::State.code()) {
            Some(why) => Err(self.does_not_continue(&why)),
            None => Ok(Some(status)),
        }
    }

    async fn resume(&self, child: &Child) -> anyhow::Result<()> {
        self.runtime_folder.wake()?;
        child.ask(Command::Resume).await.map(drop)
    }

    fn show_start(&self, continues: bool) {
        if continues {
            self.runs(&self.continues_where());
        } else if self.volume.is_none() {
            self.story.enter(Phase::Running, "The probe runs");
        }
    }

    fn continues_where(&self) -> String {
        let app = self.plan.name();
        match self.plan.cloned() {
            Some(_) => format!("{app} continues where the machine of BASE was"),
            None if self.plan.arrives() => format!("{app} has arrived from another pod"),
            None => format!("{app} continues where it was suspended"),
        }
    }

    fn does_not_continue(&self, why: &str) -> anyhow::Error {
        match (self.suspended(), self.plan.cloned()) {
            (Some(folder), _) => folder.failure(why),
            (None, Some(memory)) => original::memory_failure(memory, why),
            (None, None) => anyhow::anyhow!("{why}"),
        }
    }

    /// Suspends the machine, or asks its guest to shut down, or switches it off.
    async fn stop(&self, child: &mut Child, stop: Stop, signals: &mut Signals) {
        let Stop { os_boots, balloon, late } = stop;
        let (app, pod) = (self.plan.name(), &self.plan.input.settings.pod);
        let start = Instant::now();
        let mut budget = Budget::of(pod.timeout.0);
        if let Some(departure) = self.continuity.departure.get()
            && departure.end_commands(child, budget.ask / 2).await
        {
            return;
        }
        // Nobody would thaw the file systems of a guest that continues.
        let thawed = self.freezer.end(budget.off).await;
        let mut asks = pod.shutdown != Shutdown::Off && os_boots;
        let suspends = pod.shutdown.keeps_running_state() && thawed;
        // It is saved, and nothing has resumed it.
        if doze::stage() == Stage::Asleep && suspends {
            self.story.enter(Phase::Stopping, &format!("Stopping {app}…"));
            stop::stop(child, budget, None, signals).await;
            return tracing::info!("{app} is suspended: the next start continues it");
        }
        // After a failure there is a pause.
        while doze::is_asleep() && late + start.elapsed() < budget.ask {
            self.wake_up(child, "it is to stop").await;
        }
        budget.ask = budget.ask.saturating_sub(late + start.elapsed());
        if suspends && let Some(departure) = self.continuity.departure.get() {
            let start = Instant::now();
            match self.leave(child, departure, budget, signals).await {
                Left::Moved => return,
                Left::Interrupted => asks = false,
                Left::Stays => {}
            }
            budget.ask = budget.ask.saturating_sub(start.elapsed());
        }
        if let (true, Some(folder)) = (asks, self.suspend_folder())
            && suspends
        {
            self.story.enter(Phase::Stopping, &format!("Suspending {app}…"));
            let start = Instant::now();
            match stop::suspend(child, folder, budget, signals).await {
                Outcome::Suspended => {
                    return tracing::info!("{app} is suspended: the next start continues it");
                }
                Outcome::Interrupted => asks = false,
                Outcome::Failed(why) => {
                    self.story.warn(&format!("{app} is shut down, not suspended: {why:#}"));
                }
            }
            budget.ask = budget.ask.saturating_sub(start.elapsed());
        }
        self.story.enter(Phase::Stopping, &format!("Stopping {app}…"));
        if let Some(balloon) = balloon {
            balloon.give_back();
        }
        let agent = asks.then_some(&*self.agent);
        if asks {
            self.monitors.report_powerdown();
        }
        stop::stop(child, budget, agent, signals).await;
    }

    /// Moves the machine to another pod, if there is one.
    async fn leave(
        &self,
        child: &mut Child,
        departure: &Departure,
        budget: Budget,
        signals: &mut Signals,
    ) -> Left {
        let app = self.plan.name();
        self.story.enter(Phase::Stopping, &format!("Moving {app} to another pod…"));
        let limits = Limits { wait: budget.ask / 4, within: Some(budget.ask / 2) };
        let moved = match child.has_setup_disk() {
            true => Err(anyhow::anyhow!("it is being installed")),
            false => tokio::select! {
                moved = departure.leave(limits) => moved,
                () = stop::wait_for_sigint(signals) => return Left::Interrupted,
            },
        };
        match moved {
            Ok(moved) => {
                tracing::info!("{app} has {}", departure::sentence(&moved));
                stop::end(child, Instant::now() + budget.off, budget.off).await;
                Left::Moved
            }
            Err(error) => {
                self.story.warn(&format!("{app} does not move to another pod: {error:#}"));
                // It may end because it may run there.
                let ended = timeout(END_TIMEOUT, child.end()).await.is_ok();
                if ended { Left::Moved } else { Left::Stays }
            }
        }
    }

    fn nothing_boots(&self, last: &str) -> anyhow::Error {
        let boot = self.plan.input.settings.machine.boot;
        let mark = self.volume.as_ref().and_then(Volume::mark);
        nothing_boots_error(&self.plan.source, boot, mark.as_deref(), last)
    }

    /// The volume, unless the machine is ephemeral, which leaves no marks.
    fn marked_volume(&self) -> Option<&Volume> {
        self.volume.as_ref().filter(|_| !self.plan.input.settings.disk.ephemeral)
    }

    fn on_boot(&self, name: &str, on: BootDevice, child: &mut Child) {
        let disk = on == BootDevice::Disk;
        if disk {
            child.unplug_setup_disk();
            tokio::spawn(usb::attach_configured());
        }
        let settings = &self.plan.input.settings;
        let app = &settings.pod.app.0;
        if disk && let Some(volume) = self.marked_volume().filter(|it| !it.has_booted()) {
            let reports = self.plan.unattended.as_ref().is_some_and(Unattended::reports);
            let begun = if reports { volume.begin_setup(&self.plan) } else { Ok(()) };
            match volume.mark_booted().and(begun) {
                Ok(()) => {
                    tracing::info!("{app} starts from its disk for the first time");
                    if !reports && settings.media.remove && name.contains(WINDOWS) {
                        volume.remove_media(&self.plan, &self.story);
                    }
                }
                Err(error) => {
                    tracing::warn!("the first boot of {app} cannot be marked: {error:#}");
                }
            }
            if !volume.is_being_set_up() {
                drop_right_to_mark();
            }
        }
        self.runs(&format!("{} starts", name.trim()));
    }

    /// Waits until Windows reports that it is set up, and removes what only an installation needs.
    pub(super) async fn set_up(&self) {
        let is_set_up = |it: &Installation| it.stage >= Installed::SetupComplete;
        let mut scene = self.story.scene();
        // The sender is this pod's.
        scene.wait_for(|it| it.installation.as_ref().is_some_and(is_set_up)).await.ok();
        if let Some(volume) = self.marked_volume() {
            volume.end_setup(self.plan.input.settings.media.remove, &self.story);
            drop_right_to_mark();
        }
    }

    /// Reports that the guest runs.
    fn runs(&self, doing: &str) {
        self.story.enter(Phase::Running, doing);
        let settings = &self.plan.input.settings;
        let web_port = settings.screen.web.then_some(settings.screen.web_port.0);
        tracing::info!("{}", started(&settings.pod.app.0, web_port));
    }

    fn exit_status(&self, ended: ExitStatus, mistake: Option<String>) -> anyhow::Result<u8> {
        let app = &self.plan.name();
        if let Some(signal) = ended.signal() {
            let root = Path::new("/");
            let starved = signal == Signal::KILL.as_raw() && host::oom_kills(root) > self.oom_kills;
            let limited = MemoryLoad::read(root).is_some_and(|load| load.group.is_some());
            return Err(killed_error(app, signal, starved.then_some(limited)));
        }
        if ended.code() == Some(::vmm::control::Status::Moved as i32) {
            tracing::info!("{app} runs in another pod");
            return Ok(0);
        }
        let code = ended.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX);
        match mistake {
            _ if code == 0 => tracing::info!("{app} is off"),
            // The error is in the log already.
            Some(mistake) => self.story.failed(&mistake),
            None => self.story.fail(&[format!("the machine ended with status {code}")]),
        }
        Ok(code)
    }
}
