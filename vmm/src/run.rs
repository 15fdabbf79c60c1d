//! The life of a machine: from power-on to the exit status.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Once, OnceLock};
use std::thread::Builder;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use devices::backend::disk::Drive;
use devices::backend::net::link::Link;
use devices::board::Event;
use devices::power::Buttons;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use serde_json::{Value, json};
use vmm_sys_util::signal::{block_signal, register_signal_handler, unblock_signal};

use crate::config::Config;
use crate::control::{Command, Plug, Request, Server};
use crate::kvm::{self, Situation};
use crate::machine::{self, Machine};
use crate::screen::{Closed, Screen};
use crate::size::Size;
use crate::status::{Failure, Status};
use crate::vcpu::Stop;

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
    catch_signals(tell.clone(), Duration::from_secs(config.grace.0.into()))?;
    // First the socket: what is in use there must end us before the guest touches a disk.
    let control = config.control.clone();
    let server = control.map(|path| Server::new(&path, tell.clone())).transpose()?;
    let screen = Closed::new(&config)?;
    let mut machine = machine::build(config, tell.clone())?;
    // A file that is wrong is said first: it is wrong on every host.
    machine.prepare()?;
    refuse_what_cannot_run(&machine)?;
    // Not before: what is refused says one line, which is why.
    for disk in machine.disks().all() {
        let (path, geometry) = (disk.path().display(), disk.geometry());
        let (size, readonly) = (geometry.size, geometry.read_only);
        tracing::info!(disk = %path, size, readonly, "{}", disk.name());
    }
    let screen = screen.map(|screen| screen.open(&machine, tell)).transpose()?;
    machine.resume();
    let mut life = Life {
        screen,
        machine,
        notices,
        paused: false,
        holds: 0,
        resets: Resets::default(),
        crashed: None,
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
    notices: Receiver<Notice>,
    paused: bool,
    /// Devices that wait for something of the host's.
    holds: u32,
    resets: Resets,
    /// After which reset a crash was told.
    crashed: Option<u64>,
    /// The guest was asked to switch off: when we stop waiting, and the status then.
    end: Option<(Instant, u8)>,
}

/// Counts resets, and tells of them: a guest that resets all the time must not fill the log.
#[derive(Default)]
struct Resets {
    count: u64,
    told: Option<Instant>,
}

impl Resets {
    const QUIET: Duration = Duration::from_secs(10);

    /// One more, which began at `start` and is done.
    fn count(&mut self, start: Instant) {
        self.count += 1;
        if self.told.is_none_or(|told| told.elapsed() >= Self::QUIET) {
            self.told = Some(start);
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
                // Once until the next reset: a guest can say so for ever.
                if self.crashed.replace(self.resets.count) != Some(self.resets.count) {
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
            Command::Link { name, state, mtu } => self.link(name, *state, *mtu),
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
            "viewers": self.screen.as_ref().map(Screen::status).unwrap_or_default(),
            "disks": disks.iter().map(|disk| show_disk(disk)).collect::<Vec<_>>(),
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

    /// Makes a disk longer, and tells of it.
    fn grow(&self, name: &str, size: Option<Size>) -> anyhow::Result<Value> {
        let disk = self.machine.disks().find(name)?;
        disk.grow(size.map(|size| size.0))?;
        Ok(show_disk(&disk))
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
    json!({ "name": name, "up": link.is_up(), "plugged": link.is_plugged(), "mtu": link.mtu() })
}

fn press(buttons: &Buttons) -> anyhow::Result<Value> {
    anyhow::ensure!(buttons.press(), "this machine has no power button");
    Ok(json!({}))
}

static SIGNALS: OnceLock<OwnedFd> = OnceLock::new();

extern "C" fn on_signal(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if let Some(event) = SIGNALS.get() {
        // One write of a number: what a signal handler may do. Signals of one moment add up, so
        // each has a byte of its own.
        let number = 1_u64 << (8 * slot(signal));
        rustix::io::write(event, &number.to_ne_bytes()).ok();
    }
}

const ENDING: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

fn slot(signal: i32) -> u32 {
    (0..).zip(ENDING).find(|it| it.1 == signal).map_or(0, |it| it.0)
}

/// Turns the signals that mean "end" into notices.
fn catch_signals(tell: Sender<Notice>, grace: Duration) -> anyhow::Result<()> {
    let event = eventfd(0, EventfdFlags::CLOEXEC).context("an event for signals")?;
    let event = SIGNALS.get_or_init(|| event);
    // They come to the one thread that waits for them: elsewhere they would interrupt system calls
    // half way, KVM_CREATE_VM among them.
    for signal in ENDING {
        // Whoever started us may have blocked it already.
        block_signal(signal).ok();
        register_signal_handler(signal, on_signal).context("signal handlers")?;
    }
    let body = move || {
        for signal in ENDING {
            unblock_signal(signal).ok();
        }
        let mut number = [0; 8];
        loop {
            match rustix::io::read(event, &mut number) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(_) => return,
            }
            let which = u64::from_ne_bytes(number).trailing_zeros() / 8;
            let signal = ENDING.get(which as usize).copied().unwrap_or(libc::SIGTERM);
            if tell.send(Notice::Signal(signal)).is_err() {
                return;
            }
            end_at_last(signal, grace);
        }
    };
    Builder::new().name("signals".into()).spawn(body).context("a thread for signals")?;
    Ok(())
}

/// How long stopping may take, once the guest's time is over.
const AT_LAST: Duration = Duration::from_secs(10);

/// Ends the process whatever holds it up: a terminal or a pipe that nobody reads, a disk that does
/// not answer. What the guest was told is durable is with the kernel by then.
fn end_at_last(signal: i32, grace: Duration) {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        let body = move || {
            std::thread::sleep(grace + AT_LAST);
            devices::backend::stream::restore_terminal();
            leave(u8::try_from(128 + signal).unwrap_or(u8::MAX));
        };
        // Without a thread there is nobody to watch; the orderly way is still there.
        Builder::new().name("watchdog".into()).spawn(body).ok();
    });
}

#[expect(clippy::exit, reason = "the one that should return from main does not come back")]
fn leave(status: u8) {
    std::process::exit(status.into());
}
