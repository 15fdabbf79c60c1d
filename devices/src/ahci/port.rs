//! The port: takes commands from the list, carries them out with the device, and sends its answers
//! (AHCI 1.3.1, 5). It runs on its own thread.
//!
//! Queued commands (NCQ) run at the same time, all others alone. After an error the list is halted
//! until the driver restarts it (6.2.2).
//!
//! Threats: lists, tables and regions change at any time. Each command is copied once and then
//! checked. At most 32 commands are in flight, and together they have at most 65535 regions, which
//! take 1 MiB; further commands wait.

use std::mem;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::Shared;
use super::ata;
use super::drive::{Failure, QueuedError};
use super::fis::{Command, Fis, READY, Reply, SRST};
use super::list::{Header, Regions};
use super::registers::{DHRS, DPS, HBFS, IFS, OFS, PSS, Registers, SDBS, SLOTS, TFES};
use super::target::{self, Target};
use crate::poller::Serve;
use crate::scsi::{BlockTransfer, Cdb, Plan, Sense};
use host::disk::{Channel, Completion, Fault, Operation, Request, wait};
use host::memory::{NoMemory, Piece};

/// Limit of the regions of all commands in flight. One command may have as many.
const MAX_REGIONS: u32 = 0xffff;

/// A command that waits for the medium.
struct Job {
    command: Command,
    header: Header,
    packet: Cdb,
    reply: Reply,
    write: bool,
    /// Bytes that a successful command moves.
    moved: u64,
    /// A region wants an interrupt.
    interrupt: bool,
    /// Further ranges, the last one first.
    more: Option<(Operation, Vec<(u64, u64)>)>,
}

/// Why a command ends early: the device refuses it, or the controller stops with this status.
enum End {
    Failed(Failure),
    Fatal(u32),
}

impl From<Failure> for End {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<NoMemory> for End {
    fn from(NoMemory: NoMemory) -> Self {
        Self::Fatal(HBFS)
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct SavedState {
    registers: Registers,
    target: target::State,
    /// Slots with commands to start again, because their requests were not started.
    restart: u32,
    resetting: bool,
}

pub(super) struct Port {
    shared: Arc<Shared>,
    pub(super) target: Target,
    /// `None` while parked or without a medium.
    channel: Option<Box<dyn Channel>>,
    jobs: [Option<Job>; SLOTS as usize],
    restart: u32,
    /// The driver has set SRST.
    resetting: bool,
    /// The slot after the last one that was started.
    next: u32,
    done: Vec<Completion>,
    pushed: bool,
    running: bool,
}

impl Port {
    pub(super) fn new(shared: Arc<Shared>, target: Target) -> Self {
        Self {
            shared,
            target,
            channel: None,
            jobs: [const { None }; SLOTS as usize],
            restart: 0,
            resetting: false,
            next: 0,
            done: Vec::new(),
            pushed: false,
            running: false,
        }
    }

    /// Returns whether there was work.
    fn serve(&mut self) -> bool {
        let obeyed = self.obey();
        let reaped = self.reap(true);
        let started = self.start();
        obeyed || reaped || started
    }

    /// Carries out resets and stops.
    fn obey(&mut self) -> bool {
        let requests = self.shared.registers().requests;
        let any = requests.hba_reset || requests.link_reset || requests.stop;
        if any {
            self.cancel();
            if requests.hba_reset || requests.link_reset {
                self.resetting = false;
                self.target.reset();
            }
            self.shared.update(|registers| {
                if requests.stop {
                    registers.stopped();
                }
                if requests.link_reset {
                    registers.link_was_reset();
                }
                if requests.hba_reset {
                    registers.was_reset();
                }
            });
            self.shared.was_reset.notify_all();
        }
        let wants_signature = self.shared.registers().wants_signature();
        if wants_signature {
            self.sign();
        }
        any || wants_signature
    }

    /// Sends the signature, as after every reset.
    fn sign(&mut self) {
        let reply = self.target.signature();
        let shared = self.shared.clone();
        shared.update(|registers| {
            registers.sign(reply.signature());
            registers.set_task_file(reply.status, reply.error);
            shared.post(registers, &Fis::register(&reply, false));
        });
    }

    /// Starts as many commands as allowed.
    fn start(&mut self) -> bool {
        let mut any = false;
        // The guest may issue commands as fast as they end.
        for _ in 0..SLOTS {
            let Some(slot) = self.next_slot().filter(|slot| self.issue(*slot)) else { break };
            any = true;
            self.next = (slot + 1) % SLOTS;
        }
        self.submit();
        any
    }

    fn submit(&mut self) {
        if mem::take(&mut self.pushed)
            && let Some(channel) = &mut self.channel
        {
            channel.submit();
        }
    }

    fn next_slot(&self) -> Option<u32> {
        let alone = |job: &Job| !self.target.is_queued(&job.command);
        if self.jobs.iter().flatten().any(alone) {
            return None;
        }
        let registers = self.shared.registers();
        let again = if registers.runs() { self.restart } else { 0 };
        let issued = registers.issued() | again;
        drop(registers);
        let free = |slot: &u32| issued >> slot & 1 == 1 && self.jobs[*slot as usize].is_none();
        (self.next..SLOTS).chain(0..self.next).find(free)
    }

    /// Returns false if the command must wait for others.
    fn issue(&mut self, slot: u32) -> bool {
        let shared = self.shared.clone();
        let list = shared.registers().list();
        let found = Header::read(&shared.memory, list, slot);
        let found = found.and_then(|header| Ok((header, header.head(&shared.memory)?)));
        let Ok((header, head)) = found else {
            self.stop(HBFS);
            return true;
        };
        let regions: u32 = self.jobs.iter().flatten().map(|job| job.header.entries()).sum();
        if regions > 0 && regions + header.entries() > MAX_REGIONS {
            return false;
        }
        self.restart &= !(1 << slot);
        match Command::read(&head.fis) {
            Some(command) if !command.is_command => self.control(slot, &header, &command),
            Some(command) if !self.resetting => {
                let reply = Reply::to(&command);
                let (write, moved, interrupt, more) = (false, 0, false, None);
                let packet = head.packet;
                self.begin(
                    slot,
                    Job { command, header, packet, reply, write, moved, interrupt, more },
                );
            }
            // Another FIS, or a command during a reset.
            _ => self.stop(IFS),
        }
        true
    }

    /// Writes the device control register: a reset begins, and ends.
    fn control(&mut self, slot: u32, header: &Header, command: &Command) {
        let starts = command.control & SRST != 0;
        let ends = mem::replace(&mut self.resetting, starts) && !starts;
        if starts {
            self.cancel();
            self.target.reset();
        }
        let shared = self.shared.clone();
        shared.update(|registers| {
            registers.end(slot);
            if starts && !header.clears_busy() {
                registers.begin(slot);
            }
        });
        if ends {
            self.sign();
        }
    }

    fn begin(&mut self, slot: u32, mut job: Job) {
        let queued = self.target.is_queued(&job.command);
        let shared = self.shared.clone();
        shared.update(|registers| {
            registers.begin(slot);
            if queued {
                // The device accepts the command, and is ready for the next.
                registers.set_task_file(READY, 0);
                registers.end(slot);
                shared.post(registers, &Fis::register(&job.reply, false));
            }
        });
        let mixed = !queued && self.jobs.iter().any(Option::is_some);
        let wrong_tag = queued && u32::from(ata::tag(&job.command)) != slot;
        let ended = if mixed || wrong_tag {
            Err(End::Failed(Failure::ABORTED))
        } else {
            let planned = self.target.plan(&job.command, &job.packet, &mut job.reply);
            planned.map_err(End::from).and_then(|plan| self.request(slot, &mut job, plan))
        };
        match ended {
            Ok(Some(request)) => self.push(slot, job, request),
            Ok(None) => self.succeed(slot, &job),
            Err(End::Failed(failure)) => self.fail(slot, &job, failure),
            Err(End::Fatal(status)) => self.stop(status),
        }
    }

    fn push(&mut self, slot: u32, job: Job, request: Request) {
        let Some(channel) = &mut self.channel else {
            let failure = self.target.check_condition(Sense::NO_MEDIUM);
            return self.fail(slot, &job, failure);
        };
        channel.push(request);
        self.pushed = true;
        self.jobs[slot as usize] = Some(job);
    }

    /// The request to the medium. `None` if the command is complete without one.
    fn request(&mut self, slot: u32, job: &mut Job, plan: Plan) -> Result<Option<Request>, End> {
        let shared = self.shared.clone();
        match plan {
            Plan::Done => Ok(None),
            Plan::Eject => {
                self.remove_medium();
                Ok(None)
            }
            Plan::Flush => {
                job.write = true;
                Ok(Some(plain(slot, Operation::Flush, (0, 0))))
            }
            Plan::Clear(operation, mut ranges) => {
                job.write = true;
                let range = ranges.pop();
                job.more = Some((operation, ranges));
                Ok(range.map(|range| plain(slot, operation, range)))
            }
            Plan::Answer(mut data) => {
                let regions = job.header.regions(&shared.memory, data.len() as u64)?;
                if self.target.is_packet(&job.command) {
                    data.truncate(usize::try_from(regions.length).unwrap_or(usize::MAX));
                }
                let pieces = job.take(regions, data.len() as u64)?;
                shared.memory.scatter(&pieces, &data)?;
                Ok(None)
            }
            Plan::Parameters(length) => {
                let regions = job.header.regions(&shared.memory, length as u64)?;
                job.write = true;
                let pieces = job.take(regions, length as u64)?;
                let mut data = vec![0; length];
                shared.memory.gather(&pieces, &mut data)?;
                let plan = self.target.parameters(&job.packet, &data)?;
                self.request(slot, job, plan)
            }
            Plan::Transfer(it) => self.transfer(slot, job, it).map(Some),
        }
    }

    fn transfer(&self, slot: u32, job: &mut Job, it: BlockTransfer) -> Result<Request, End> {
        let BlockTransfer { write, durable, offset, length } = it;
        let regions = job.header.regions(&self.shared.memory, length)?;
        job.write = write;
        let pieces = job.take(regions, length)?;
        if self.target.is_queued(&job.command) {
            let length = u32::try_from(length).unwrap_or(u32::MAX);
            let fis = Fis::dma_setup(ata::tag(&job.command), length, !write);
            self.shared.update(|registers| self.shared.post(registers, &fis));
        }
        let operation = if write { Operation::Write { durable } } else { Operation::Read };
        Ok(Request { tag: slot.into(), operation, offset, length, pieces })
    }

    fn succeed(&self, slot: u32, job: &Job) {
        let Job { command, header, reply, moved, .. } = job;
        let shared = &self.shared;
        let pio = *moved > 0 && !self.target.is_dma(command);
        shared.update(|registers| {
            if job.interrupt {
                registers.raise(DPS);
            }
            if self.target.is_queued(command) {
                let slots = 1 << slot;
                registers.set_device_bits(READY, 0, slots);
                registers.raise(SDBS);
                return shared.post(registers, &Fis::device_bits(READY, 0, slots));
            }
            if header.set_count(&shared.memory, *moved).is_err() {
                return registers.halt(HBFS);
            }
            registers.set_task_file(reply.status, reply.error);
            registers.end(slot);
            if pio {
                shared.post(registers, &Fis::pio_setup(reply, *moved, !job.write));
                registers.raise(if job.write { 0 } else { PSS });
            }
            // Without a packet, the ending status of PIO to the host is in its setup.
            if !pio || job.write || self.target.is_packet(command) {
                shared.post(registers, &Fis::register(reply, true));
                registers.raise(DHRS);
            }
        });
    }

    fn fail(&mut self, slot: u32, job: &Job, failure: Failure) {
        let Failure { status, error } = failure;
        let reply = Reply { status, error, ..job.reply };
        let queued = self.target.is_queued(&job.command);
        if queued || self.jobs.iter().any(Option::is_some) {
            let tag = u8::try_from(slot).ok().filter(|_| queued);
            self.target.log_queued(QueuedError::new(tag, &reply));
        }
        let shared = &self.shared;
        shared.update(|registers| {
            if queued {
                registers.set_device_bits(status, error, 0);
                shared.post(registers, &Fis::device_bits(status, error, 0));
                return registers.halt(SDBS | TFES);
            }
            registers.set_task_file(status, error);
            shared.post(registers, &Fis::register(&reply, true));
            registers.halt(DHRS | TFES);
        });
    }

    /// A fatal error of the controller.
    fn stop(&self, status: u32) {
        self.shared.update(|registers| registers.halt(status));
    }

    /// Returns whether any requests had finished. Without `answer`, their commands are dropped.
    fn reap(&mut self, answer: bool) -> bool {
        let mut done = mem::take(&mut self.done);
        if let Some(channel) = &mut self.channel {
            channel.reap(&mut done);
        }
        let any = !done.is_empty();
        for Completion { tag, result, .. } in done.drain(..) {
            let Some((slot, job)) = self.take_job(tag) else { continue };
            // After an error, the device has aborted all other commands.
            if answer && !self.shared.registers().halted {
                self.finish(slot, job, result);
            }
        }
        self.done = done;
        self.submit();
        any
    }

    fn take_job(&mut self, tag: u64) -> Option<(u32, Job)> {
        let slot = u32::try_from(tag).ok()?;
        Some((slot, self.jobs.get_mut(slot as usize)?.take()?))
    }

    fn finish(&mut self, slot: u32, mut job: Job, result: Result<(), Fault>) {
        match result {
            // The range was checked before, so the guest's memory is at fault.
            Err(Fault::Refused) if job.more.is_none() => return self.stop(HBFS),
            // A hint that cannot be followed is not an error.
            Err(Fault::Unsupported) if job.more.is_some() => {}
            Err(fault) => {
                let failure = self.target.failure(fault, job.write);
                return self.fail(slot, &job, failure);
            }
            Ok(()) => {}
        }
        let next = job.more.as_mut().and_then(|(operation, ranges)| {
            let range = ranges.pop()?;
            Some(plain(slot, *operation, range))
        });
        match next {
            Some(request) => self.push(slot, job, request),
            None => self.succeed(slot, &job),
        }
    }

    /// Waits until the channel has no request. Returns the commands that it had not started.
    fn quiesce(&mut self, answer: bool) -> Vec<(u32, Job)> {
        let mut back = Vec::new();
        self.submit();
        while self.jobs.iter().any(Option::is_some) {
            let Some(channel) = &mut self.channel else { break };
            // Repeated, because a request in flight may begin to wait for space or for its turn.
            let withdrawn = channel.withdraw();
            channel.submit();
            for request in withdrawn {
                back.extend(self.take_job(request.tag));
            }
            if self.jobs.iter().any(Option::is_some)
                && !self.reap(answer)
                && let Some(channel) = &self.channel
            {
                wait(channel.as_ref());
            }
        }
        back
    }

    /// Ends all commands without an answer.
    fn cancel(&mut self) {
        self.quiesce(false);
        self.restart = 0;
    }

    /// Attaches the channel of the medium, while the device runs.
    pub(super) fn connect(&mut self) -> anyhow::Result<()> {
        let Some(medium) = self.target.medium.as_ref().filter(|_| self.running) else {
            return Ok(());
        };
        let channel = medium.image.channel(&self.shared.memory)?;
        self.shared.watch(channel.event())?;
        self.channel = Some(channel);
        Ok(())
    }

    /// A command that needs the medium fails.
    pub(super) fn remove_medium(&mut self) {
        for (slot, job) in self.quiesce(true) {
            let failure = self.target.check_condition(Sense::NO_MEDIUM);
            self.fail(slot, &job, failure);
        }
        self.channel = None;
        self.target.remove_medium();
    }

    /// Commands in flight are answered, or start again later.
    pub(super) fn park(&mut self) -> SavedState {
        for (slot, _) in self.quiesce(true) {
            self.restart |= 1 << slot;
        }
        (self.channel, self.running) = (None, false);
        let registers = self.shared.registers().clone();
        let (restart, resetting) = (self.restart, self.resetting);
        SavedState { registers, target: self.target.state.clone(), restart, resetting }
    }

    /// `None` is power-on.
    pub(super) fn run(&mut self, saved: Option<SavedState>) -> anyhow::Result<()> {
        let (mut registers, mut state) = (Registers::default(), self.target.power_on());
        (self.restart, self.resetting, self.next) = (0, false, 0);
        if let Some(saved) = saved {
            ensure!(saved.target.is_like(&state), "saved state: another kind of drive");
            (registers, state) = (saved.registers, saved.target);
            (self.restart, self.resetting) = (saved.restart, saved.resetting);
        }
        registers.sanitize();
        self.target.restore(state);
        self.shared.restore(registers);
        self.running = true;
        self.connect()
    }
}

impl Job {
    /// Takes the pieces for `wanted` bytes. Without enough, the controller stops.
    fn take(&mut self, regions: Regions, wanted: u64) -> Result<Vec<Piece>, End> {
        if regions.length < wanted {
            return Err(End::Fatal(OFS));
        }
        (self.moved, self.interrupt) = (wanted, regions.interrupt);
        Ok(regions.pieces)
    }
}

fn plain(slot: u32, operation: Operation, (offset, length): (u64, u64)) -> Request {
    Request { tag: slot.into(), operation, offset, length, pieces: Vec::new() }
}

/// A port that its own thread runs, and in which the operator changes the medium.
#[derive(Clone)]
pub(super) struct SharedPort(pub(super) Arc<Mutex<Port>>);

impl SharedPort {
    pub(super) fn lock(&self) -> MutexGuard<'_, Port> {
        self.0.lock().expect("no device panicked")
    }
}

impl Serve for SharedPort {
    fn serve(&mut self) -> bool {
        self.lock().serve()
    }

    fn has_single_request(&self) -> bool {
        self.lock().jobs.iter().flatten().count() == 1
    }

    fn enable_doorbells(&mut self) -> bool {
        // Doorbells are always enabled: writes to PxCI reach the device in any case.
        false
    }

    fn disable_doorbells(&mut self) {}

    fn events(&self) -> Vec<RawFd> {
        vec![self.lock().shared.events()]
    }

    fn clear_events(&mut self) {
        self.lock().shared.clear_kick();
    }
}
