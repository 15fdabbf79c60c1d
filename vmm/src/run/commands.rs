//! Carries out the commands of the control socket and of viewers.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::str::FromStr as _;
use std::thread::Builder;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use devices::power::Buttons;
use host::disk::Drive;
use host::display::Scanout;
use host::input::Position;
use host::net::link::Link;
use host::size::Size;
use host::uuid::Uuid;
use screen::keys::layout::Stroke;
use screen::keys::{Combination, text};
use serde_json::{Value, json};

use super::{MainLoop, Notice, Reset};
use crate::control::{Command, LinkState, Request, Then};
use crate::plug;
use crate::screenshot::{self, Picture};
use crate::snapshot::Target;
use crate::snapshot::cipher::Cipher;
use crate::snapshot::memory::Limit;
use crate::status::Status;
use crate::viewers::Screen;

/// How long `vmm ctl balloon` waits for new statistics from the guest. After that it reports the
/// previous ones.
const BALLOON_TIMEOUT: Duration = Duration::from_millis(250);

impl MainLoop {
    pub(super) fn control(&mut self, mut request: Request) -> Option<u8> {
        let mut status = None;
        if let Some(why) = self.refuses(&request.command) {
            request.answer(Err(anyhow::anyhow!(why)));
            return None;
        }
        let mut files = std::mem::take(&mut request.files);
        let answer = match &request.command {
            Command::Status => Ok(self.status()),
            Command::Pause => self.stay_paused(),
            Command::Settle => self.stand_still(),
            Command::Resume => self.resume(),
            Command::Snapshot { then, within, key, .. } => {
                let then = then.unwrap_or_default();
                let saved = self.save(&files, then, *within, key.is_some());
                status = (saved.is_ok() && then == Then::Quit).then_some(Status::Off as u8);
                saved
            }
            Command::MigrateCancel => self.cancel_migration(),
            Command::Reset => {
                let reset = self.reset(Reset::ByCommand).map(|()| json!({}));
                reset.map_err(|error| self.fail(error))
            }
            Command::PowerButton => press(&self.machine.shared().buttons),
            Command::Nmi => self.nmi(),
            Command::Registers => Ok(json!({ "registers": self.registers() })),
            Command::Balloon { size } => self.balloon(*size),
            Command::Grow { name, size } => self.grow(name, *size),
            Command::Vmgenid { id } => self.renew(id.as_deref()),
            Command::Link { name, state, mtu } => self.link(name, *state, *mtu),
            Command::Attach { device, only } => {
                plug::attach(&mut self.machine, device, *only, files.pop())
                    .map_err(|error| self.jail.explain(error))
            }
            Command::Detach { name } => plug::detach(&mut self.machine, name),
            Command::Eject { name, force } => plug::eject(&self.machine, name, force.is_some()),
            Command::Insert { name, path, only } => plug::insert(&self.machine, name, path, *only)
                .map_err(|error| self.jail.explain(error)),
            Command::Key { keys } => self.key(keys),
            Command::Pointer { x, y, buttons, wheel } => {
                let (buttons, wheel) = (buttons.unwrap_or(0), wheel.unwrap_or(0));
                self.point(Position { x: *x, y: *y, wheel, pan: 0, buttons })
            }
            Command::Quit => {
                status = Some(Status::Off as u8);
                Ok(json!({}))
            }
            Command::Await
            | Command::Migrate { .. }
            | Command::Screenshot
            | Command::Type { .. } => return self.answer_by_itself(request, files),
        };
        request.answer(answer);
        status
    }

    /// Commands that take time, or whose answer is no line.
    fn answer_by_itself(&mut self, request: Request, files: Vec<OwnedFd>) -> Option<u8> {
        match &request.command {
            Command::Await => self.await_frame(request),
            Command::Migrate { pause, within, .. } => {
                let (pause, within) = (*pause, *within);
                self.depart(request, files, pause, within);
            }
            Command::Screenshot => request.answer_picture(self.screenshot()),
            Command::Type { text } => match self.strokes(text) {
                Ok(strokes) => self.type_strokes(strokes, request),
                Err(error) => request.answer(Err(error)),
            },
            _ => unreachable!("the caller carries out all others"),
        }
        None
    }

    fn status(&self) -> Value {
        let disks = self.machine.shared().disks.all();
        let links = self.machine.shared().links.all();
        let clipboard = &self.machine.shared().clipboard;
        json!({
            "state": self.state(),
            // How often it went on after it had stood still.
            "continued": self.machine.shared().time.continued(),
            "resets": self.resets.count,
            "commanded_resets": self.resets.commanded,
            "processors": self.machine.config.cpus.count,
            "memory": self.machine.config.memory.size.0,
            "pid": std::process::id(),
            "uuid": self.machine.config.smbios.uuid,
            "vmgenid": self.machine.generation.show(),
            "jail": self.jail.status(),
            // Until the memory of a snapshot is checked, and a guest that is to wait is resumed.
            "writes_wait": self.machine.shared().disks.gate().is_closed(),
            "unchecked": self.is_unchecked(),
            // null unless the machine is being moved.
            "migration": self.show_migration(),
            "display": self.machine.shared().screens.first().map(|display| show_display(&*display)),
            "viewers": self.screen.as_ref().map(Screen::status).unwrap_or_default(),
            // null if the kernel does not count them.
            "storage_bytes": self.transfers.bytes(),
            "disks": disks.iter().map(|disk| show_disk(disk)).collect::<Vec<_>>(),
            "drives": plug::drives(&self.machine),
            "usb": self.machine.usb(),
            // null without a port for the agent.
            "clipboard": clipboard.has_port().then(|| clipboard.has_agent()),
            "lights": self.machine.shared().input.lights(),
            "links": links.iter().map(|(name, link)| show_link(name, link)).collect::<Vec<_>>(),
        })
    }

    /// Why the machine does not carry out the command now.
    fn refuses(&self, command: &Command) -> Option<&'static str> {
        // Its snapshot would continue a machine that was reset since.
        let asleep = self.asleep.as_ref().map(|_| ASLEEP);
        let parked = !works_while_parked(command) && self.machine.is_parked();
        match command {
            Command::Reset => asleep,
            // The checksums of a snapshot must be those of sound memory.
            _ if command.saves() && self.is_unchecked() => Some(UNCHECKED),
            _ if self.migration.is_some() && changes_machine(command) => Some(MOVING),
            _ if parked && self.waits_for_check() => Some(UNCHECKED),
            _ => parked.then_some(asleep.unwrap_or(PARKED)),
        }
    }

    fn stay_paused(&mut self) -> anyhow::Result<Value> {
        self.machine.pause();
        self.paused = true;
        Ok(json!({}))
    }

    fn nmi(&self) -> anyhow::Result<Value> {
        let sent = self.machine.nmi();
        self.resume_if_allowed();
        sent.map(|()| json!({}))
    }

    fn resume(&mut self) -> anyhow::Result<Value> {
        // A guest that waits for the check goes on after it.
        if self.machine.is_parked() && !self.waits_for_check() {
            self.wake_up();
            self.unpark()?;
        } else if self.paused {
            // Those of running processors could not be reached.
            self.machine.wake_clocks();
        }
        self.paused = false;
        self.machine.shared().disks.gate().resumed();
        self.resume_if_allowed();
        Ok(json!({}))
    }

    /// Lets the devices continue after a snapshot. A machine whose devices do not is at its end.
    pub(super) fn unpark(&mut self) -> anyhow::Result<()> {
        let ran = self.machine.unpark();
        ran.map_err(|error| self.fail(error))
    }

    /// Ends the machine with this error, and returns it for the client, too.
    fn fail(&mut self, error: anyhow::Error) -> anyhow::Error {
        let copy = anyhow::anyhow!("{error:#}");
        self.failed = Some(error);
        copy
    }

    /// Saves the machine to the files that the client passed: for `machine.json`, for `memory`, and
    /// one with the key if it is to be `encrypted`.
    fn save(
        &mut self,
        files: &[OwnedFd],
        then: Then,
        within: Option<u16>,
        encrypted: bool,
    ) -> anyhow::Result<Value> {
        let (machine, memory, key) = match (files, encrypted) {
            ([machine, memory], false) => (machine, memory, None),
            ([machine, memory, key], true) => (machine, memory, Some(key)),
            _ => bail!(
                "a snapshot needs two open files, and with `key` a third: use `vmm ctl snapshot`"
            ),
        };
        ensure!(
            key.is_none() || then != Then::Sleep,
            "a machine that is asleep reads its memory from the snapshot, which cannot be \
             encrypted then: leave `key` out, or let the machine end (`then quit`)"
        );
        let copy = |file: &OwnedFd| file.try_clone().map(File::from).context("its files");
        let (machine, memory) = (copy(machine)?, copy(memory)?);
        let cipher = key.map(|key| Cipher::from_file(&copy(key)?)).transpose();
        let cipher = cipher.context("the file of the key")?;
        let start = Instant::now();
        let limit = Limit::new(within);
        // Frames that arrive from now on are for a machine that is asleep.
        let sleeps = then == Then::Sleep && self.asleep.is_none();
        let frames = sleeps.then(|| self.watch_frames()).transpose()?;
        let target = Target { machine: &machine, memory: &memory, cipher: cipher.as_ref() };
        match (self.save_and(then, target, limit), frames) {
            (Ok(()), Some(frames)) => self.fall_asleep(frames),
            (Err(error), Some(_)) => {
                self.filter_frames(false)?;
                return Err(error);
            }
            (saved, None) => saved?,
        }
        tracing::info!("saved in {:?}", start.elapsed());
        Ok(json!({ "seconds": start.elapsed().as_secs_f64() }))
    }

    fn save_and(&mut self, then: Then, target: Target<'_>, limit: Limit) -> anyhow::Result<()> {
        if then == Then::Quit {
            self.machine.shared().input.release_all();
        }
        self.settle(limit)?;
        let was_parked = self.machine.is_parked();
        let saved = self.machine.save(target, then, limit);
        let saved = saved.and_then(|parts| match then {
            Then::Sleep => self.machine.sleep(target.memory.try_clone()?, parts),
            Then::Resume | Then::Pause | Then::Quit => Ok(()),
        });
        if saved.is_err() {
            // The machine continues here: nobody may continue from what was written.
            target.machine.set_len(0).and_then(|()| target.machine.sync_all()).ok();
        }
        // A machine that was parked before stays so: its disks may be being copied.
        if !was_parked && (saved.is_err() || then == Then::Resume) {
            self.unpark()?;
            self.resume_if_allowed();
        }
        self.paused |= saved.is_ok() && matches!(then, Then::Pause | Then::Sleep);
        saved
    }

    /// Parks the devices, and makes the disks durable.
    fn stand_still(&mut self) -> anyhow::Result<Value> {
        let start = Instant::now();
        self.settle(Limit::new(None))?;
        let was_parked = self.machine.is_parked();
        let still = self.machine.stand_still();
        if !was_parked && still.is_err() {
            self.unpark()?;
            self.resume_if_allowed();
        }
        still?;
        self.paused = true;
        let continued = self.machine.shared().time.continued();
        Ok(json!({ "seconds": start.elapsed().as_secs_f64(), "continued": continued }))
    }

    /// Pauses the processors for a state that can be saved. If there is none, they go on.
    pub(super) fn settle(&mut self, limit: Limit) -> anyhow::Result<()> {
        self.catch_up(limit)?;
        let refused = match (self.end.is_some(), self.holds) {
            (true, _) => "the machine is being shut down",
            (false, 0) => return Ok(()),
            (false, _) => {
                "the machine waits for the host: free space on its volume if that is full, and try \
                 again"
            }
        };
        self.resume_if_allowed();
        bail!(refused)
    }

    /// Pauses the processors, and handles all that they and the devices requested before. Other
    /// commands wait.
    fn catch_up(&mut self, limit: Limit) -> anyhow::Result<()> {
        loop {
            if let Err(error) = limit.check() {
                self.resume_if_allowed();
                return Err(error);
            }
            self.machine.pause();
            let ended = match self.notices.receiver.try_recv() {
                Err(_) => return Ok(()),
                Ok(Notice::Control(request)) => {
                    self.deferred.push_back(Notice::Control(request));
                    None
                }
                Ok(notice) => self.handle(notice).map_err(|error| self.fail(error))?,
            };
            if let Some(status) = ended {
                self.end = Some((Instant::now(), status));
                bail!("the machine was switched off meanwhile");
            }
        }
    }

    fn state(&self) -> &'static str {
        match self.must_stay_paused() {
            _ if self.asleep.is_some() => "asleep",
            _ if self.paused => "paused",
            true => "waiting for the host",
            false => "running",
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
}

/// The refusals of other commands while the devices are parked.
const PARKED: &str =
    "the machine was saved or settled, and is paused: resume it first (`vmm ctl resume`)";
const ASLEEP: &str = "the machine is asleep: wake it first (`vmm ctl resume`)";
/// It is checked whether a client waits for this; others try again.
const UNCHECKED: &str = "the memory of the snapshot is still being checked, from which the machine \
                         continued: try again in a moment (`unchecked` in `status`)";
const MOVING: &str = "the machine is being moved: wait until it runs at the other end, or let it \
                      stay (`vmm ctl migrate-cancel`)";

/// Whether the machine would not be the one that is being moved any more.
fn changes_machine(command: &Command) -> bool {
    matches!(
        command,
        Command::Settle
            | Command::Snapshot { .. }
            | Command::Attach { .. }
            | Command::Detach { .. }
            | Command::Eject { .. }
            | Command::Insert { .. }
            | Command::Grow { .. }
            | Command::Vmgenid { .. }
            | Command::Migrate { .. }
    )
}

/// Whether the command needs no running device.
fn works_while_parked(command: &Command) -> bool {
    matches!(
        command,
        Command::Status
            | Command::Pause
            | Command::Settle
            | Command::Resume
            | Command::Await
            | Command::Reset
            | Command::Registers
            | Command::Screenshot
            | Command::Snapshot { .. }
            | Command::Quit
    )
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
