//! Runs a machine from power-on to the exit status: the main thread's event loop.

mod check;
mod commands;
mod migrate;
mod sleep;
mod transfers;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use devices::grants::{Event, Events};
use host::listen::UnixAddress;
use jail::Restrictions;

use self::check::STOP_TIME;
use self::migrate::{Migration, Prepared};
use self::sleep::Asleep;
use self::transfers::Transfers;
use crate::config::{Cloning, Config, Options};
use crate::control::{Command, Request, Server, Submit};
use crate::kvm::{self, KvmSupport};
use crate::machine::{self, Machine, clone};
use crate::migration::arrival::{self, Arrival};
use crate::migration::departure::Slow;
use crate::needs::confine;
use crate::parent;
use crate::signals;
use crate::snapshot::Snapshot;
use crate::status::{Failure, Status};
use crate::vcpu::{OnStop, Stop};
use crate::viewers::{Listeners, Screen};

/// An event that another thread sends to the main thread.
pub enum Notice {
    /// A device requests a reset, power-off or a pause, or ends a pause.
    Device(Event),
    /// A processor stopped by itself.
    Stopped(Stop),
    /// A signal that ends the machine, such as SIGTERM.
    Signal(i32),
    /// A request from the control socket or from a viewer.
    Control(Request),
    /// The memory of a machine that moves was sent, or that failed.
    Prepared(Box<Prepared>),
    /// The guest waits until the memory is checked of the snapshot from which it continued.
    Waits,
    /// That memory is sound.
    Checked,
    /// That memory is damaged.
    Damaged(anyhow::Error),
    /// A machine that moves writes too fast: its processors stop for a moment.
    Slow(Slow),
}

/// The notices of the main thread, which gives the sender to threads that it starts.
struct Mailbox {
    sender: Sender<Notice>,
    receiver: Receiver<Notice>,
}

/// The supervisor of the process, the signals to it, and the main loop's notices.
struct Outside {
    parent: Option<OwnedFd>,
    signals: signals::Watch,
    notices: Mailbox,
}

fn events(notices: &Sender<Notice>) -> Events {
    let notices = notices.clone();
    Arc::new(move |event| {
        notices.send(Notice::Device(event)).ok();
    })
}

fn on_stop(notices: &Sender<Notice>) -> OnStop {
    let notices = notices.clone();
    Arc::new(move |stop| {
        notices.send(Notice::Stopped(stop)).ok();
    })
}

/// The types of KVM_SYSTEM_EVENT_*.
const SYSTEM_SHUTDOWN: u32 = 1;
const SYSTEM_RESET: u32 = 2;
const SYSTEM_CRASH: u32 = 3;

/// Runs a machine until it is off. Returns the exit status.
pub fn run(config: Config) -> anyhow::Result<u8> {
    if config.restore.is_some() && config.incoming.is_some() {
        let reason = "--restore and --incoming exclude each other: a machine has one origin";
        return Err(Failure::new(Status::Usage, reason));
    }
    let (sender, receiver) = mpsc::channel();
    let notices = Mailbox { sender, receiver };
    let signal_sender = notices.sender.clone();
    let signalled = move |signal| signal_sender.send(Notice::Signal(signal)).is_ok();
    let signals = signals::catch(signalled)?;
    let outside = Outside { parent: config.die_with.open()?, signals, notices };
    let Some(incoming) = config.incoming.clone() else {
        let snapshot = config.restore.as_ref().map(Snapshot::open).transpose()?;
        let config = with_snapshot(config, snapshot.as_ref())?;
        return run_with(config, snapshot, &mut None, outside);
    };
    jail::arrival::enter(&config.jail)?;
    let mut arrival = arrival::wait(&incoming.socket, outside.parent.as_ref())?;
    let Some(found) = &mut arrival else {
        tracing::info!("ended before a machine arrived");
        return Ok(signals::arrived().unwrap_or(Status::Failed as u8));
    };
    let ran = found.receive(config, incoming.options).context("--incoming");
    let ran =
        ran.and_then(|(config, snapshot)| run_with(config, Some(snapshot), &mut arrival, outside));
    if let Some(arrival) = arrival {
        let ended = anyhow::anyhow!("a signal has ended the process");
        arrival.refuse(ran.as_ref().err().unwrap_or(&ended));
    }
    ran
}

/// Builds the machine and runs it. `arrival` is none when the machine runs.
fn run_with(
    mut config: Config,
    snapshot: Option<Snapshot>,
    arrival: &mut Option<Arrival>,
    outside: Outside,
) -> anyhow::Result<u8> {
    let Outside { parent, mut signals, notices } = outside;
    config.check()?;
    signals::set_grace(config.grace.0);
    let sender = notices.sender.clone();
    // Bind the control socket first: if it is in use, exit before the guest touches a disk.
    let control =
        config.control.as_ref().map(UnixAddress::listen).transpose().context("--control")?;
    let screen = Listeners::new(&config)?;
    let files = clone::Files::make(&mut config)?;
    let checked = snapshot.as_ref().map_or(Ok(()), |it| it.check(&config.memory));
    let built = checked.and_then(|()| {
        machine::build(config, snapshot.as_ref(), events(&sender), on_stop(&sender))
    });
    // There is no guest yet that could be asked to shut down.
    let mut machine = match built {
        Ok(machine) => machine,
        Err(error) => return ended(error),
    };
    // Everything is open. Enter the jail while no other thread runs.
    if let Some(status) = signals.stop() {
        tracing::info!("ended before the guest ran");
        return Ok(status);
    }
    // In its jail, the process cannot remove them.
    if let Some(files) = files {
        files.keep();
    }
    let transfers = Transfers::open();
    let jail = confine(&machine)?;
    signals.start()?;
    let submit: Submit = Arc::new(move |request| sender.send(Notice::Control(request)).is_ok());
    let quit = submit.clone();
    let quit = move || quit(Request::unanswered(Command::Quit));
    parent.map(|parent| parent::watch(parent, quit)).transpose()?;
    let server = control.map(|bound| Server::new(bound, submit.clone())).transpose()?;
    machine.start()?;
    // Report a bad kernel file before missing hardware support: the file is bad on every host.
    if let Err(error) = machine.begin(snapshot) {
        return ended(error);
    }
    refuse_what_cannot_run(&machine)?;
    // Log only now: a machine that is refused prints one line, the reason.
    log(&machine);
    let screen = screen.map(|screen| screen.open(&machine, submit)).transpose()?;
    if let Some(arrival) = arrival {
        if let Some(status) = signals::arrived() {
            return Ok(status);
        }
        arrival.take_over(!machine.shared().disks.locks().is_empty())?;
        // Its devices may write to its disks only now.
        machine.unpark()?;
        arrival.tell_that_it_runs();
    }
    machine.started();
    *arrival = None;
    let mut main_loop = MainLoop::new(screen, machine, jail, transfers, notices);
    let status = main_loop.check_memory().and_then(|()| main_loop.run());
    if status.is_err() {
        main_loop.machine.shared().disks.gate().shut();
        main_loop.machine.pause();
        // Hand buffered data of devices to the host, unless another machine may have their files.
        if !main_loop.machine.is_parked() {
            main_loop.machine.park();
        }
    }
    drop(main_loop);
    drop(server);
    status
}

/// The exit status after a signal, and otherwise the error.
fn ended(error: anyhow::Error) -> anyhow::Result<u8> {
    let Some(status) = signals::arrived() else { return Err(error) };
    tracing::info!("ended before the guest ran: {error:#}");
    Ok(status)
}

/// Starts the processors, unless they are to wait. Returns whether they do.
fn waits(machine: &Machine) -> bool {
    let waits = machine.waits();
    if !waits {
        machine.resume();
    }
    waits
}

/// The options, and those of the snapshot for options that are not given.
pub fn with_snapshot(config: Config, snapshot: Option<&Snapshot>) -> anyhow::Result<Config> {
    let restore = config.restore.clone().unwrap_or_default();
    let Some(snapshot) = snapshot.filter(|_| restore.options == Options::Saved) else {
        return Ok(config);
    };
    let mut all = config.over(&snapshot.saved.config)?;
    if restore.clone != Cloning::Off {
        // It must not share what the other one writes, and later it starts as another machine.
        (all.serial, all.tpm) = (config.serial, config.tpm);
        all.smbios.uuid = config.smbios.uuid;
    }
    if restore.clone == Cloning::On {
        all.vars = config.vars;
    }
    Ok(all)
}

/// Logs the disks, and a lack of this host's KVM.
fn log(machine: &Machine) {
    if let Some(lack) = machine.lack {
        tracing::warn!("{lack}");
    }
    for disk in machine.shared().disks.all() {
        let (path, geometry) = (disk.path.display(), disk.geometry());
        let (size, readonly) = (geometry.size, geometry.read_only);
        tracing::info!(disk = %path, size, readonly, "{}", disk.name);
    }
}

/// Refuses firmware and kernels on a host that only emulates kernel-mode code, where they cannot
/// make progress. `--accept-emulation` overrides this.
fn refuse_what_cannot_run(machine: &Machine) -> anyhow::Result<()> {
    let config = &machine.config;
    let foreign = config.firmware.is_some() || config.kernel.is_some();
    if foreign && !config.accept_emulation && KvmSupport::of_this_host() == KvmSupport::Paravirtual
    {
        let sentence = format!("{} (--accept-emulation tries anyway)", kvm::PARAVIRTUAL);
        return Err(Failure::new(Status::NoKvm, sentence));
    }
    Ok(())
}

struct MainLoop {
    // Dropped before `machine`, whose display it shows.
    screen: Option<Screen>,
    machine: Machine,
    jail: Restrictions,
    transfers: Transfers,
    notices: Mailbox,
    /// Held by the thread that types a text, so that texts do not mix.
    typing: Arc<Mutex<()>>,
    paused: bool,
    /// Set while the machine is asleep, and paused.
    asleep: Option<Asleep>,
    /// Set while the machine is being moved.
    migration: Option<Migration>,
    /// The number of devices that wait for the host, and keep the processors paused until then.
    holds: u32,
    resets: Resets,
    /// Limits how often guest crashes are logged.
    crashes: RateLimit,
    /// After a request to shut down: when to stop waiting for the guest, and the exit status then.
    end: Option<(Instant, u8)>,
    /// Commands that came while the machine was saved or reset, and the end of a migration.
    deferred: VecDeque<Notice>,
    /// The error of a command that ends the machine.
    failed: Option<anyhow::Error>,
}

/// Limits a log message to one per `INTERVAL`, so that a guest cannot flood the log. Holds the time
/// of the last message.
#[derive(Default)]
struct RateLimit(Option<Instant>);

impl RateLimit {
    const INTERVAL: Duration = Duration::from_secs(10);

    /// Whether the message may be logged now. If so, records it as logged.
    fn allow(&mut self) -> bool {
        let allowed = self.0.is_none_or(|last| last.elapsed() >= Self::INTERVAL);
        if allowed {
            self.0 = Some(Instant::now());
        }
        allowed
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reset {
    ByGuest,
    ByCommand,
}

#[derive(Default)]
struct Resets {
    count: u64,
    /// Those of `count` that a command asked for.
    commanded: u64,
    log_limit: RateLimit,
}

impl Resets {
    /// Counts a reset that began at `start` and has completed.
    fn count(&mut self, by: Reset, start: Instant) {
        self.count += 1;
        self.commanded += u64::from(by == Reset::ByCommand);
        if self.log_limit.allow() {
            tracing::info!("reset {} took {:?}", self.count, start.elapsed());
        }
    }
}

impl MainLoop {
    /// Starts the processors, unless they are to wait.
    fn new(
        screen: Option<Screen>,
        machine: Machine,
        jail: Restrictions,
        transfers: Transfers,
        notices: Mailbox,
    ) -> Self {
        Self {
            paused: waits(&machine),
            screen,
            machine,
            jail,
            transfers,
            notices,
            typing: Arc::default(),
            asleep: None,
            migration: None,
            holds: 0,
            resets: Resets::default(),
            crashes: RateLimit::default(),
            end: None,
            deferred: VecDeque::new(),
            failed: None,
        }
    }

    fn run(&mut self) -> anyhow::Result<u8> {
        loop {
            let notice = match self.end {
                _ if !self.deferred.is_empty() => self.deferred.pop_front(),
                None => self.notices.receiver.recv().ok(),
                Some((at, status)) => {
                    let left = at.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(self.switch_off(status));
                    }
                    match self.notices.receiver.recv_timeout(left) {
                        Ok(notice) => Some(notice),
                        Err(_) => return Ok(self.switch_off(status)),
                    }
                }
            };
            let notice = notice.context("all threads of the machine are gone")?;
            if let Some(status) = self.handle(notice)? {
                return Ok(self.switch_off(status));
            }
        }
    }

    /// Returns the exit status if the machine is to end.
    fn handle(&mut self, notice: Notice) -> anyhow::Result<Option<u8>> {
        match notice {
            Notice::Device(Event::PowerOff) => return Ok(Some(Status::Off as u8)),
            Notice::Device(Event::Reset) => self.reset(Reset::ByGuest)?,
            Notice::Device(Event::StopProcessors) => {
                self.holds += 1;
                // A processor that writes a variable may wait for the check of memory.
                self.machine.pause_within(STOP_TIME);
            }
            Notice::Device(Event::ResumeProcessors) => {
                self.holds = self.holds.saturating_sub(1);
                self.go_on_late();
            }
            Notice::Prepared(prepared) => return self.leave(*prepared),
            Notice::Waits => self.wait_for_check()?,
            Notice::Checked => self.checked()?,
            Notice::Damaged(error) => return Err(error),
            Notice::Slow(slow) => self.slow_down(&slow),
            Notice::Device(Event::UsbGone) => self.machine.remove_retired(),
            Notice::Stopped(stop) => return self.stopped(stop),
            Notice::Signal(signal) => return Ok(self.signal(signal)),
            Notice::Control(request) => {
                let status = self.control(request);
                return self.failed.take().map_or(Ok(status), Err);
            }
        }
        Ok(None)
    }

    fn stopped(&mut self, stop: Stop) -> anyhow::Result<Option<u8>> {
        match stop {
            Stop::TripleFault | Stop::System(SYSTEM_RESET, _) => {
                self.reset(Reset::ByGuest)?;
            }
            Stop::System(SYSTEM_SHUTDOWN, _) => return Ok(Some(Status::Off as u8)),
            Stop::System(SYSTEM_CRASH, codes) => {
                // The guest now writes its crash dump: let it run. It resets or powers off by
                // itself.
                let codes: Vec<_> = codes.iter().map(|code| format!("{code:#x}")).collect();
                // A guest can report crashes endlessly, with resets in between.
                if self.crashes.allow() {
                    tracing::error!("the guest crashed: {}", codes.join(" "));
                }
                self.resume_if_allowed();
            }
            Stop::System(kind, _) => bail!("KVM raised an unknown system event: {kind}"),
            Stop::Broken(report) => {
                self.machine.pause();
                let mut report = report;
                if KvmSupport::of_this_host() == KvmSupport::Paravirtual {
                    report = format!("{report}\n{}", kvm::PARAVIRTUAL);
                }
                return Err(Failure::new(Status::Guest, report));
            }
        }
        Ok(None)
    }

    fn reset(&mut self, by: Reset) -> anyhow::Result<()> {
        let start = Instant::now();
        self.machine.pause();
        // Several processors may have requested this reset: drop the duplicates. Other events are
        // handled afterwards.
        let mut deferred = Vec::new();
        while let Ok(notice) = self.notices.receiver.try_recv() {
            match notice {
                Notice::Device(Event::Reset)
                | Notice::Stopped(Stop::TripleFault | Stop::System(SYSTEM_RESET, _)) => {}
                // A reset may be a part of another command.
                later @ (Notice::Control(_) | Notice::Prepared(_)) => {
                    self.deferred.push_back(later);
                }
                other => deferred.push(other),
            }
        }
        self.machine.prepare()?;
        self.resume_if_allowed();
        self.resets.count(by, start);
        for notice in deferred {
            if let Some(status) = self.handle(notice)? {
                self.end = Some((Instant::now(), status));
            }
        }
        Ok(())
    }

    fn must_stay_paused(&self) -> bool {
        self.paused || self.holds > 0 || self.waits_for_check()
    }

    /// Starts the processors unless they must stay paused. The guest's clocks went on meanwhile.
    fn go_on_late(&self) {
        if !self.must_stay_paused() {
            self.machine.pause();
            self.machine.wake_clocks();
        }
        self.resume_if_allowed();
    }

    fn resume_if_allowed(&self) {
        if !self.must_stay_paused() {
            self.machine.resume();
        }
    }

    fn signal(&mut self, signal: i32) -> Option<u8> {
        let status = u8::try_from(128 + signal).unwrap_or(u8::MAX);
        let grace = self.machine.config.grace.0;
        // A second signal ends the machine at once. So does one while paused: the guest would not
        // see the button.
        if grace == 0 || self.must_stay_paused() || self.end.is_some() {
            return Some(status);
        }
        // Windows' balloon driver returns all pages before the guest shuts down: begin early.
        self.machine.shared().balloon.set(u64::MAX);
        if !self.machine.shared().buttons.press() {
            return Some(status);
        }
        tracing::info!("power button pressed, the guest has {grace} s");
        self.end = Some((Instant::now() + Duration::from_secs(grace.into()), status));
        None
    }

    /// Switches the machine off: pauses the processors and parks the devices.
    fn switch_off(&mut self, status: u8) -> u8 {
        self.wake_up();
        // A processor may wait for it.
        self.machine.shared().disks.gate().shut();
        self.machine.pause();
        // A machine that has moved must not touch its files any more.
        if status != Status::Moved as u8 {
            self.machine.park();
        }
        status
    }
}
