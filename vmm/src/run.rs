//! Runs a machine from power-on to the exit status: the main thread's event loop.

use std::collections::BTreeMap;
use std::str::FromStr as _;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::Builder;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use devices::grants::{Event, Events};
use devices::power::Buttons;
use host::disk::Drive;
use host::display::Scanout;
use host::input::Position;
use host::net::link::Link;
use serde_json::{Value, json};

use crate::config::Config;
use crate::control::{Command, LinkState, Request, Server, Submit};
use crate::kvm::{self, KvmSupport};
use crate::machine::{self, Machine};
use crate::needs::confine;
use crate::parent;
use crate::plug;
use crate::screenshot::{self, Picture};
use crate::signals;
use crate::status::{Failure, Status};
use crate::vcpu::{OnStop, Stop};
use crate::viewers::{Listeners, Screen};
use host::listen::UnixAddress;
use host::size::Size;
use host::uuid::Uuid;
use jail::Restrictions;
use screen::keys::layout::Stroke;
use screen::keys::{Combination, text};

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

/// How long `vmm ctl balloon` waits for new statistics from the guest. After that it reports the
/// previous ones.
const BALLOON_TIMEOUT: Duration = Duration::from_millis(250);

/// The types of KVM_SYSTEM_EVENT_*.
const SYSTEM_SHUTDOWN: u32 = 1;
const SYSTEM_RESET: u32 = 2;
const SYSTEM_CRASH: u32 = 3;

/// Runs a machine until it is off. Returns the exit status.
pub fn run(config: Config) -> anyhow::Result<u8> {
    config.check()?;
    let (sender, notices) = mpsc::channel();
    let signal_sender = sender.clone();
    let signalled = move |signal| signal_sender.send(Notice::Signal(signal)).is_ok();
    let mut signals = signals::catch(signalled, Duration::from_secs(config.grace.0.into()))?;
    let parent = config.die_with.open()?;
    // Bind the control socket first: if it is in use, exit before the guest touches a disk.
    let control =
        config.control.as_ref().map(UnixAddress::listen).transpose().context("--control")?;
    let screen = Listeners::new(&config)?;
    let mut machine =
        match (machine::build(config, events(&sender), on_stop(&sender)), signals::arrived()) {
            // There is no guest yet that could be asked to shut down.
            (built, Some(status)) => {
                let why = built.err().map_or(String::new(), |error| format!(": {error:#}"));
                tracing::info!("ended before the guest ran{why}");
                return Ok(status);
            }
            (built, None) => built?,
        };
    // Everything is open. Enter the jail while no other thread runs.
    if let Some(status) = signals.stop() {
        tracing::info!("ended before the guest ran");
        return Ok(status);
    }
    let jail = confine(&machine)?;
    signals.start()?;
    let submit: Submit = Arc::new(move |request| sender.send(Notice::Control(request)).is_ok());
    let quit = submit.clone();
    let quit = move || quit(Request::unanswered(Command::Quit));
    parent.map(|parent| parent::watch(parent, quit)).transpose()?;
    let server = control.map(|bound| Server::new(bound, submit.clone())).transpose()?;
    machine.start()?;
    // Report a bad kernel file before missing hardware support: the file is bad on every host.
    machine.prepare()?;
    refuse_what_cannot_run(&machine)?;
    // Log only now: a machine that is refused prints one line, the reason.
    log(&machine);
    let screen = screen.map(|screen| screen.open(&machine, submit)).transpose()?;
    machine.resume();
    let mut main_loop = MainLoop {
        screen,
        machine,
        jail,
        notices,
        typing: Arc::default(),
        paused: false,
        holds: 0,
        resets: Resets::default(),
        crashes: RateLimit::default(),
        end: None,
    };
    let status = main_loop.run();
    if status.is_err() {
        // Hand buffered data of devices to the host, whatever the reason of the failure.
        main_loop.machine.pause();
        main_loop.machine.park();
    }
    drop(main_loop);
    drop(server);
    status
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
    notices: Receiver<Notice>,
    /// Held by the thread that types a text, so that texts do not mix.
    typing: Arc<Mutex<()>>,
    paused: bool,
    /// The number of devices that wait for the host, and keep the processors paused until then.
    holds: u32,
    resets: Resets,
    /// Limits how often guest crashes are logged.
    crashes: RateLimit,
    /// After a request to shut down: when to stop waiting for the guest, and the exit status then.
    end: Option<(Instant, u8)>,
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

#[derive(Default)]
struct Resets {
    count: u64,
    log_limit: RateLimit,
}

impl Resets {
    /// Counts a reset that began at `start` and has completed.
    fn count(&mut self, start: Instant) {
        self.count += 1;
        if self.log_limit.allow() {
            tracing::info!("reset {} took {:?}", self.count, start.elapsed());
        }
    }
}

impl MainLoop {
    fn run(&mut self) -> anyhow::Result<u8> {
        loop {
            let notice = match self.end {
                None => self.notices.recv().ok(),
                Some((at, status)) => {
                    let left = at.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(self.switch_off(status));
                    }
                    match self.notices.recv_timeout(left) {
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
            Notice::Device(Event::Reset) => self.reset()?,
            Notice::Device(Event::StopProcessors) => {
                self.holds += 1;
                self.machine.pause();
            }
            Notice::Device(Event::ResumeProcessors) => {
                self.holds = self.holds.saturating_sub(1);
                if !self.must_stay_paused() {
                    self.machine.wake_clocks();
                }
                self.resume_if_allowed();
            }
            Notice::Device(Event::UsbGone) => self.machine.remove_retired(),
            Notice::Stopped(stop) => return self.stopped(stop),
            Notice::Signal(signal) => return Ok(self.signal(signal)),
            Notice::Control(request) => return Ok(self.control(request)),
        }
        Ok(None)
    }

    fn stopped(&mut self, stop: Stop) -> anyhow::Result<Option<u8>> {
        match stop {
            Stop::TripleFault | Stop::System(SYSTEM_RESET, _) => self.reset()?,
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

    fn reset(&mut self) -> anyhow::Result<()> {
        let start = Instant::now();
        self.machine.pause();
        // Several processors may have requested this reset: drop the duplicates. Other events are
        // handled afterwards.
        let mut deferred = Vec::new();
        while let Ok(notice) = self.notices.try_recv() {
            match notice {
                Notice::Device(Event::Reset)
                | Notice::Stopped(Stop::TripleFault | Stop::System(SYSTEM_RESET, _)) => {}
                other => deferred.push(other),
            }
        }
        self.machine.prepare()?;
        self.resume_if_allowed();
        self.resets.count(start);
        for notice in deferred {
            if let Some(status) = self.handle(notice)? {
                self.end = Some((Instant::now(), status));
            }
        }
        Ok(())
    }

    fn must_stay_paused(&self) -> bool {
        self.paused || self.holds > 0
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

    fn control(&mut self, mut request: Request) -> Option<u8> {
        let mut status = None;
        let file = request.file.take();
        let answer = match &request.command {
            Command::Status => Ok(self.status()),
            Command::Pause => {
                self.machine.pause();
                self.paused = true;
                Ok(json!({}))
            }
            Command::Resume => {
                self.paused = false;
                self.machine.wake_clocks();
                self.resume_if_allowed();
                Ok(json!({}))
            }
            Command::Reset => self.reset().map(|()| json!({})),
            Command::PowerButton => press(&self.machine.shared().buttons),
            Command::Nmi => {
                let sent = self.machine.nmi();
                self.resume_if_allowed();
                sent.map(|()| json!({}))
            }
            Command::Registers => Ok(json!({ "registers": self.registers() })),
            Command::Balloon { size } => self.balloon(*size),
            Command::Grow { name, size } => self.grow(name, *size),
            Command::Vmgenid { id } => self.renew(id.as_deref()),
            Command::Link { name, state, mtu } => self.link(name, *state, *mtu),
            Command::Attach { device, only } => {
                plug::attach(&mut self.machine, device, *only, file)
                    .map_err(|error| self.jail.explain(error))
            }
            Command::Detach { name } => plug::detach(&mut self.machine, name),
            Command::Eject { name, force } => plug::eject(&self.machine, name, force.is_some()),
            Command::Insert { name, path, only } => plug::insert(&self.machine, name, path, *only)
                .map_err(|error| self.jail.explain(error)),
            Command::Screenshot => {
                request.answer_picture(self.screenshot());
                return None;
            }
            Command::Key { keys } => self.key(keys),
            Command::Type { text } => {
                match self.strokes(text) {
                    Ok(strokes) => self.type_strokes(strokes, request),
                    Err(error) => request.answer(Err(error)),
                }
                return None;
            }
            Command::Pointer { x, y, buttons, wheel } => {
                let (buttons, wheel) = (buttons.unwrap_or(0), wheel.unwrap_or(0));
                self.point(Position { x: *x, y: *y, wheel, pan: 0, buttons })
            }
            Command::Quit => {
                status = Some(Status::Off as u8);
                Ok(json!({}))
            }
        };
        request.answer(answer);
        status
    }

    fn status(&self) -> Value {
        let disks = self.machine.shared().disks.all();
        let links = self.machine.shared().links.all();
        let clipboard = &self.machine.shared().clipboard;
        json!({
            "state": self.state(),
            "resets": self.resets.count,
            "processors": self.machine.config.cpus.count,
            "memory": self.machine.config.memory.size.0,
            "pid": std::process::id(),
            "uuid": self.machine.config.smbios.uuid,
            "vmgenid": self.machine.generation.show(),
            "jail": self.jail.status(),
            "display": self.machine.shared().screens.first().map(|display| show_display(&*display)),
            "viewers": self.screen.as_ref().map(Screen::status).unwrap_or_default(),
            "disks": disks.iter().map(|disk| show_disk(disk)).collect::<Vec<_>>(),
            "drives": plug::drives(&self.machine),
            "usb": self.machine.usb(),
            // null without a port for the agent.
            "clipboard": clipboard.has_port().then(|| clipboard.has_agent()),
            "lights": self.machine.shared().input.lights(),
            "links": links.iter().map(|(name, link)| show_link(name, link)).collect::<Vec<_>>(),
        })
    }

    fn state(&self) -> &'static str {
        match (self.paused, self.holds) {
            (true, _) => "paused",
            (false, 0) => "running",
            (false, _) => "waiting for the host",
        }
    }

    /// Sets the balloon's target if a size is given, and reports the balloon's state.
    fn balloon(&self, size: Option<Size>) -> anyhow::Result<Value> {
        let (balloon, memory) = (&self.machine.shared().balloon, self.machine.config.memory.size);
        if let Some(size) = size {
            balloon.resize(size, memory)?;
        }
        // A paused guest does not answer, and a new target takes time to reach.
        let waits = size.is_none() && !self.must_stay_paused();
        let report = balloon.report(if waits { BALLOON_TIMEOUT } else { Duration::ZERO })?;
        let statistics = report.statistics.into_iter().map(|(name, value)| (name, value.into()));
        Ok(json!({
            "target": report.target,
            "actual": report.actual,
            "statistics": statistics.collect::<BTreeMap<_, Value>>(),
            "age": report.age.map(|age| age.as_secs_f64()),
        }))
    }

    fn screenshot(&self) -> anyhow::Result<(Picture, Vec<u8>)> {
        let display = self.machine.shared().screens.first();
        screenshot::take(&*display.context("this machine has no display")?)
    }

    /// Extends a disk, and reports its new size.
    fn grow(&self, name: &str, size: Option<Size>) -> anyhow::Result<Value> {
        let disk = self.machine.shared().disks.find(name)?;
        disk.grow(size.map(|size| size.0))?;
        Ok(show_disk(&disk))
    }

    /// Changes the VM Generation ID, and reports the new one.
    fn renew(&self, id: Option<&str>) -> anyhow::Result<Value> {
        self.machine.renew(id.map_or_else(Uuid::random, Uuid::from_str)?)?;
        Ok(json!({ "vmgenid": self.machine.generation.show() }))
    }

    /// Sets the link state and the MTU of a network device, and reports both.
    fn link(
        &self,
        name: &str,
        state: Option<LinkState>,
        mtu: Option<u16>,
    ) -> anyhow::Result<Value> {
        let link = self.machine.shared().links.find(name)?;
        if let Some(mtu) = mtu {
            link.set_mtu(mtu)?;
        }
        if let Some(state) = state {
            link.set_plugged(state == LinkState::Up);
        }
        Ok(show_link(name, &link))
    }

    /// Presses keys in this order, and releases them in reverse order.
    fn key(&self, keys: &Combination) -> anyhow::Result<Value> {
        let input = &self.machine.shared().input;
        ensure!(
            input.has_room(),
            "{keys}: not pressed: the guest has thousands of unread keys: try again when it reads \
             them, or reset it"
        );
        let taken = keys.0.iter().filter(|key| input.key(**key, true)).count();
        for key in keys.0.iter().rev() {
            input.key(*key, false);
        }
        ensure!(
            taken == keys.0.len(),
            "{keys}: no keyboard that the guest uses has all of these keys"
        );
        Ok(json!({}))
    }

    /// The keystrokes that produce a text on the machine's keyboard.
    fn strokes(&self, text: &str) -> anyhow::Result<Vec<Stroke>> {
        text::plan(&*self.machine.config.keyboard.layout()?, text)
    }

    /// Types in a separate thread, because the guest may read keys slowly.
    fn type_strokes(&self, strokes: Vec<Stroke>, request: Request) {
        let (hub, turn) = (self.machine.shared().input.clone(), self.typing.clone());
        let body = move || {
            // Wait until the previous text is typed.
            let _turn = turn.lock().expect("a panic ends the process");
            request.answer(text::send(&hub, &strokes).map(|()| json!({})));
        };
        // If no thread can be created, the request is dropped and its client gets an error.
        Builder::new().name("typist".into()).spawn(body).ok();
    }

    fn point(&self, position: Position) -> anyhow::Result<Value> {
        let limit = Position::MAX;
        ensure!(position.x.max(position.y) <= limit, "coordinates are from 0 to {limit}");
        let taken = self.machine.shared().input.position(position);
        ensure!(
            taken,
            "the guest uses no pointing device with absolute positions: it needs --device xhci, \
             --device usb-tablet and a driver"
        );
        Ok(json!({}))
    }

    /// The registers of all processors, which are paused to read them.
    fn registers(&self) -> Vec<String> {
        self.machine.pause();
        let registers = self.machine.registers();
        self.resume_if_allowed();
        registers
    }

    /// Switches the machine off: pauses the processors and parks the devices.
    fn switch_off(&mut self, status: u8) -> u8 {
        self.machine.pause();
        self.machine.park();
        status
    }
}

/// The display's resolution, or null while it is off.
fn show_display(display: &dyn Scanout) -> Value {
    let mode = display.mode().map(|mode| format!("{}x{}", mode.width, mode.height));
    json!({ "mode": mode })
}

fn show_disk(disk: &Drive) -> Value {
    let geometry = disk.geometry();
    json!({
        "name": disk.name,
        "kind": disk.kind(),
        "serial": disk.serial,
        "path": disk.path.display().to_string(),
        "size": geometry.size,
        "readonly": geometry.read_only,
    })
}

/// Shows a network device. `up` means that frames pass: it is plugged in and its peer is connected.
fn show_link(name: &str, link: &Link) -> Value {
    json!({
        "name": name,
        "up": link.is_up(),
        "plugged": link.is_plugged(),
        "mtu": link.mtu(),
        "vhost": link.kernel_pairs(),
    })
}

fn press(buttons: &Buttons) -> anyhow::Result<Value> {
    anyhow::ensure!(buttons.press(), "this machine has no power button");
    Ok(json!({}))
}
