//! The life of a machine: from power-on to the exit status.

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
use crate::control::{Command, Plug, Request, Server, Submit};
use crate::kvm::{self, Situation};
use crate::machine::{self, Machine};
use crate::needs::confine;
use crate::parent;
use crate::plug;
use crate::screenshot::{self, Picture};
use crate::signals;
use crate::status::{Failure, Status};
use crate::vcpu::{OnStop, Stop};
use crate::viewers::{Closed, Screen};
use host::listen::UnixAddress;
use host::size::Size;
use host::uuid::Uuid;
use jail::Held;
use screen::keys::layout::Stroke;
use screen::keys::{Combination, text};

/// What the machine's threads tell the main thread.
pub enum Notice {
    /// A device wants a reset, or power off.
    Device(Event),
    /// A processor cannot go on.
    Stopped(Stop),
    /// A signal that means: end.
    Signal(i32),
    /// A request at the control socket.
    Control(Request),
}

fn events(tell: &Sender<Notice>) -> Events {
    let tell = tell.clone();
    Arc::new(move |event| {
        tell.send(Notice::Device(event)).ok();
    })
}

fn on_stop(tell: &Sender<Notice>) -> OnStop {
    let tell = tell.clone();
    Arc::new(move |stop| {
        tell.send(Notice::Stopped(stop)).ok();
    })
}

/// How long a guest may take to say how its memory is, before the old news are told.
const ANSWER: Duration = Duration::from_millis(250);

/// KVM_SYSTEM_EVENT_*
const SYSTEM_SHUTDOWN: u32 = 1;
const SYSTEM_RESET: u32 = 2;
const SYSTEM_CRASH: u32 = 3;

/// Runs a machine until it is off. The number is the exit status.
///
/// # Errors
///
/// When it cannot be built, or broke.
pub fn run(config: Config) -> anyhow::Result<u8> {
    config.check()?;
    let (tell, notices) = mpsc::channel();
    let told = tell.clone();
    let signalled = move |signal| told.send(Notice::Signal(signal)).is_ok();
    let mut signals = signals::catch(signalled, Duration::from_secs(config.grace.0.into()))?;
    let parent = config.die_with.open()?;
    // First the socket: what is in use there must end us before the guest touches a disk.
    let control =
        config.control.as_ref().map(UnixAddress::listen).transpose().context("--control")?;
    let screen = Closed::new(&config)?;
    let mut machine =
        match (machine::build(config, events(&tell), on_stop(&tell)), signals::arrived()) {
            // There is no guest yet that could be asked.
            (built, Some(status)) => {
                let why = built.err().map_or(String::new(), |error| format!(": {error:#}"));
                tracing::info!("ended before the guest ran{why}");
                return Ok(status);
            }
            (built, None) => built?,
        };
    // All is open, and nobody else runs.
    if let Some(status) = signals.rest() {
        tracing::info!("ended before the guest ran");
        return Ok(status);
    }
    let jail = confine(&machine)?;
    signals.go_on()?;
    let submit: Submit = Arc::new(move |request| tell.send(Notice::Control(request)).is_ok());
    let quit = submit.clone();
    let quit = move || quit(Request::unanswered(Command::Quit));
    parent.map(|parent| parent::watch(parent, quit)).transpose()?;
    let server = control.map(|bound| Server::new(bound, submit.clone())).transpose()?;
    machine.start()?;
    // A file that is wrong is said first: it is wrong on every host.
    machine.prepare()?;
    refuse_what_cannot_run(&machine)?;
    // Not before: what is refused says one line, which is why.
    for disk in machine.disks().all() {
        let (path, geometry) = (disk.path().display(), disk.geometry());
        let (size, readonly) = (geometry.size, geometry.read_only);
        tracing::info!(disk = %path, size, readonly, "{}", disk.name());
    }
    let screen = screen.map(|screen| screen.open(&machine, submit)).transpose()?;
    machine.resume();
    let mut life = Life {
        screen,
        machine,
        jail,
        notices,
        typing: Arc::default(),
        paused: false,
        holds: 0,
        resets: Resets::default(),
        crashes: Quiet::default(),
        end: None,
    };
    let status = life.run();
    if status.is_err() {
        // What devices still hold goes to the host's side, however it ended.
        life.machine.pause();
        life.machine.park();
    }
    drop(life);
    drop(server);
    status
}

/// On a host that only emulates kernel-mode code, an operating system gets nowhere; say so now.
fn refuse_what_cannot_run(machine: &Machine) -> anyhow::Result<()> {
    let config = machine.config();
    let foreign = config.firmware.is_some() || config.kernel.is_some();
    if foreign && !config.accept_emulation && Situation::of_this_host() == Situation::Paravirtual {
        let sentence = format!("{} (--accept-emulation tries all the same)", kvm::PARAVIRTUAL);
        return Err(Failure::new(Status::NoKvm, sentence));
    }
    Ok(())
}

struct Life {
    // Before the machine, whose display it shows.
    screen: Option<Screen>,
    machine: Machine,
    jail: Held,
    notices: Receiver<Notice>,
    /// Whose text is typed.
    typing: Arc<Mutex<()>>,
    paused: bool,
    /// Devices that wait for something of the host's.
    holds: u32,
    resets: Resets,
    /// Crashes are told.
    crashes: Quiet,
    /// The guest was asked to switch off: when we stop waiting, and the status then.
    end: Option<(Instant, u8)>,
}

/// When something was told: a guest that does it all the time must not fill the log.
#[derive(Default)]
struct Quiet(Option<Instant>);

impl Quiet {
    const TIME: Duration = Duration::from_secs(10);

    /// Whether it may be told now, which is noted.
    fn is_over(&mut self) -> bool {
        let over = self.0.is_none_or(|told| told.elapsed() >= Self::TIME);
        if over {
            self.0 = Some(Instant::now());
        }
        over
    }
}

/// Counts resets, and tells of them.
#[derive(Default)]
struct Resets {
    count: u64,
    told: Quiet,
}

impl Resets {
    /// One more, which began at `start` and is done.
    fn count(&mut self, start: Instant) {
        self.count += 1;
        if self.told.is_over() {
            tracing::info!("reset {} took {:?}", self.count, start.elapsed());
        }
    }
}

impl Life {
    fn run(&mut self) -> anyhow::Result<u8> {
        loop {
            let notice = match self.end {
                None => self.notices.recv().ok(),
                Some((at, status)) => {
                    let left = at.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(self.off(status));
                    }
                    match self.notices.recv_timeout(left) {
                        Ok(notice) => Some(notice),
                        Err(_) => return Ok(self.off(status)),
                    }
                }
            };
            let notice = notice.context("all threads of the machine are gone")?;
            if let Some(status) = self.heed(notice)? {
                return Ok(self.off(status));
            }
        }
    }

    /// Does what a notice says; a number is the end.
    fn heed(&mut self, notice: Notice) -> anyhow::Result<Option<u8>> {
        match notice {
            Notice::Device(Event::PowerOff) => return Ok(Some(Status::Off as u8)),
            Notice::Device(Event::Reset) => self.reset()?,
            Notice::Device(Event::Hold) => {
                self.holds += 1;
                self.machine.pause();
            }
            Notice::Device(Event::Release) => {
                self.holds = self.holds.saturating_sub(1);
                if !self.is_still() {
                    self.machine.wake_clocks();
                }
                self.go_on();
            }
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
                // The guest writes its dump now: it goes on, and ends by itself.
                let codes: Vec<_> = codes.iter().map(|code| format!("{code:#x}")).collect();
                // A guest can say so for ever, and reset the machine in between.
                if self.crashes.is_over() {
                    tracing::error!("the guest crashed: {}", codes.join(" "));
                }
                self.go_on();
            }
            Stop::System(kind, _) => bail!("KVM raised system event {kind}, which is unknown"),
            Stop::Broken(report) => {
                self.machine.pause();
                let mut report = report;
                if Situation::of_this_host() == Situation::Paravirtual {
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
        // Several processors may have asked, and the guest of before has nothing to say any more.
        let mut kept = Vec::new();
        while let Ok(notice) = self.notices.try_recv() {
            match notice {
                Notice::Device(Event::Reset)
                | Notice::Stopped(Stop::TripleFault | Stop::System(SYSTEM_RESET, _)) => {}
                other => kept.push(other),
            }
        }
        self.machine.prepare()?;
        self.go_on();
        self.resets.count(start);
        for notice in kept {
            if let Some(status) = self.heed(notice)? {
                self.end = Some((Instant::now(), status));
            }
        }
        Ok(())
    }

    /// Whether the processors are to stay where they are.
    fn is_still(&self) -> bool {
        self.paused || self.holds > 0
    }

    /// Lets the processors run, unless somebody paused them or a device waits.
    fn go_on(&self) {
        if !self.is_still() {
            self.machine.resume();
        }
    }

    fn signal(&mut self, signal: i32) -> Option<u8> {
        let status = u8::try_from(128 + signal).unwrap_or(u8::MAX);
        let grace = self.machine.config().grace.0;
        // A second signal does not wait, and a paused guest would not see the button.
        if grace == 0 || self.is_still() || self.end.is_some() {
            return Some(status);
        }
        // Windows' driver frees what it gave away before it ends: the sooner the better.
        self.machine.balloon().set(u64::MAX);
        if !self.machine.buttons().press() {
            return Some(status);
        }
        tracing::info!("power button pressed, the guest has {grace} s");
        self.end = Some((Instant::now() + Duration::from_secs(grace.into()), status));
        None
    }

    fn control(&mut self, request: Request) -> Option<u8> {
        let mut status = None;
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
                self.go_on();
                Ok(json!({}))
            }
            Command::Reset => self.reset().map(|()| json!({})),
            Command::PowerButton => press(self.machine.buttons()),
            Command::Nmi => {
                let sent = self.machine.nmi();
                self.go_on();
                sent.map(|()| json!({}))
            }
            Command::Registers => Ok(json!({ "registers": self.registers() })),
            Command::Balloon { size } => self.balloon(*size),
            Command::Grow { name, size } => self.grow(name, *size),
            Command::Vmgenid { id } => self.renew(id.as_deref()),
            Command::Link { name, state, mtu } => self.link(name, *state, *mtu),
            Command::Attach { device, only } => plug::attach(&mut self.machine, device, *only)
                .map_err(|error| self.jail.explain(error)),
            Command::Detach { name } => plug::detach(&mut self.machine, name),
            Command::Eject { name, force } => plug::eject(&self.machine, name, force.is_some()),
            Command::Insert { name, path, only } => plug::insert(&self.machine, name, path, *only)
                .map_err(|error| self.jail.explain(error)),
            Command::Screenshot => {
                request.show(self.screenshot());
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
        let disks = self.machine.disks().all();
        let links = self.machine.links().all();
        json!({
            "state": self.state(),
            "resets": self.resets.count,
            "processors": self.machine.config().cpus.count,
            "memory": self.machine.config().memory.size.0,
            "pid": std::process::id(),
            "uuid": self.machine.config().smbios.uuid,
            "vmgenid": self.machine.generation().show(),
            "jail": self.jail.status(),
            "display": self.machine.screens().first().map(|display| show_display(&*display)),
            "viewers": self.screen.as_ref().map(Screen::status).unwrap_or_default(),
            "disks": disks.iter().map(|disk| show_disk(disk)).collect::<Vec<_>>(),
            "drives": plug::drives(&self.machine),
            "usb": self.machine.usb(),
            "lights": self.machine.input().lights(),
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

    /// Sets the balloon, and tells of it.
    fn balloon(&self, size: Option<Size>) -> anyhow::Result<Value> {
        let (balloon, memory) = (self.machine.balloon(), self.machine.config().memory.size);
        if let Some(size) = size {
            balloon.ask_for(size, memory)?;
        }
        // A guest that is paused says nothing, and what it shall have takes it a while.
        let asks = size.is_none() && !self.is_still();
        let report = balloon.report(if asks { ANSWER } else { Duration::ZERO })?;
        let statistics = report.statistics.into_iter().map(|(name, value)| (name, value.into()));
        Ok(json!({
            "target": report.target,
            "actual": report.actual,
            "statistics": statistics.collect::<BTreeMap<_, Value>>(),
            "age": report.age.map(|age| age.as_secs_f64()),
        }))
    }

    fn screenshot(&self) -> anyhow::Result<(Picture, Vec<u8>)> {
        let display = self.machine.screens().first();
        screenshot::take(&*display.context("this machine has no display")?)
    }

    /// Makes a disk longer, and tells of it.
    fn grow(&self, name: &str, size: Option<Size>) -> anyhow::Result<Value> {
        let disk = self.machine.disks().find(name)?;
        disk.grow(size.map(|size| size.0))?;
        Ok(show_disk(&disk))
    }

    /// Changes the VM Generation ID, and shows it.
    fn renew(&self, id: Option<&str>) -> anyhow::Result<Value> {
        self.machine.renew(id.map_or_else(Uuid::random, Uuid::from_str)?)?;
        Ok(json!({ "vmgenid": self.machine.generation().show() }))
    }

    /// Pulls a cable or plugs it in, and tells of it.
    fn link(&self, name: &str, state: Option<Plug>, mtu: Option<u16>) -> anyhow::Result<Value> {
        let link = self.machine.links().find(name)?;
        if let Some(mtu) = mtu {
            link.resize(mtu)?;
        }
        if let Some(state) = state {
            link.plug(state == Plug::Up);
        }
        Ok(show_link(name, &link))
    }

    /// Presses keys in this order, and lets them go in the other.
    fn key(&self, keys: &Combination) -> anyhow::Result<Value> {
        let input = self.machine.input();
        ensure!(
            input.has_room(),
            "{keys}: nothing was pressed: the guest has not read thousands of keys; try again when \
             it runs, or reset it"
        );
        let taken = keys.0.iter().filter(|key| input.key(**key, true)).count();
        for key in keys.0.iter().rev() {
            input.key(*key, false);
        }
        ensure!(
            taken == keys.0.len(),
            "{keys}: the guest listens to no keyboard that has all of these keys"
        );
        Ok(json!({}))
    }

    /// What a text is on the machine's keyboard.
    fn strokes(&self, text: &str) -> anyhow::Result<Vec<Stroke>> {
        text::plan(&*self.machine.config().keyboard.layout()?, text)
    }

    /// Types, in a thread of its own: the guest takes its time.
    fn type_strokes(&self, strokes: Vec<Stroke>, request: Request) {
        let (hub, turn) = (self.machine.input().clone(), self.typing.clone());
        let body = move || {
            // One text after the other.
            let _turn = turn.lock().expect("a panic ends the process");
            request.answer(text::send(&hub, &strokes).map(|()| json!({})));
        };
        // Without a thread the request is dropped, which its client is told.
        Builder::new().name("typist".into()).spawn(body).ok();
    }

    fn point(&self, position: Position) -> anyhow::Result<Value> {
        let most = Position::MOST;
        ensure!(position.x.max(position.y) <= most, "a place on the screen is from 0 to {most}");
        let taken = self.machine.input().position(position);
        ensure!(
            taken,
            "the guest listens to no pointer that has a place: it needs --device xhci and --device \
             usb-tablet, and its driver"
        );
        Ok(json!({}))
    }

    /// The registers of all processors, which stop for it.
    fn registers(&self) -> Vec<String> {
        self.machine.pause();
        let registers = self.machine.registers();
        self.go_on();
        registers
    }

    /// Switches off: from here on nothing of the guest's runs.
    fn off(&mut self, status: u8) -> u8 {
        self.machine.pause();
        self.machine.park();
        status
    }
}

/// Its size, or nothing while it is off.
fn show_display(display: &dyn Scanout) -> Value {
    let mode = display.mode().map(|mode| format!("{}x{}", mode.width, mode.height));
    json!({ "mode": mode })
}

fn show_disk(disk: &Drive) -> Value {
    let geometry = disk.geometry();
    json!({
        "name": disk.name(),
        "kind": disk.kind(),
        "serial": disk.serial(),
        "path": disk.path().display().to_string(),
        "size": geometry.size,
        "readonly": geometry.read_only,
    })
}

/// `up` is whether frames go through: plugged in, and with another end that is there.
fn show_link(name: &str, link: &Link) -> Value {
    json!({
        "name": name,
        "up": link.is_up(),
        "plugged": link.is_plugged(),
        "mtu": link.mtu(),
        "vhost": link.in_kernel(),
    })
}

fn press(buttons: &Buttons) -> anyhow::Result<Value> {
    anyhow::ensure!(buttons.press(), "this machine has no power button");
    Ok(json!({}))
}
