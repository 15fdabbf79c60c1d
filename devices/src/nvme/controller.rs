//! The controller: enables, resets and shuts down, and serves the admin queue. It runs on its own
//! thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use super::admin::{self, Outcome, State};
use super::command::{Answer, Command, Completed, Status};
use super::events::{Event, Events};
use super::features::Features;
use super::group;
use super::health::{Counter, ErrorEntry, Health};
use super::io_queues::IoQueues;
use super::queues::{
    CompletionQueue, INVALID_REGISTER, INVALID_VALUE, MAX_ADMIN_ENTRIES, Shadow, SubmissionQueue,
    Waker,
};
use super::{Registers, Shared};
use crate::bus::Window;
use host::disk::{self, Operation, Request};
use host::memory::NoMemory;

/// Fields of CC: enable, command set, arbitration.
pub(super) const ENABLE: u32 = 1 << 0;
const COMMAND_SET: u32 = 7 << 4;
const ARBITRATION: u32 = 7 << 11;
/// Maximum of CC.MPS: pages of 4 KiB to 64 KiB.
pub(super) const MAX_MPS: u32 = 4;
/// CC.SHN, and values of CSTS.SHST: shutdown in progress, and complete.
pub(super) const SHUTDOWN: u32 = 3 << 14;
const IN_PROGRESS: u32 = 1 << 2;
const COMPLETE: u32 = 2 << 2;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Admin {
    submission: SubmissionQueue,
    completion: CompletionQueue,
    /// CC.MPS at the time when the controller was enabled.
    page: u32,
}

#[derive(Default, Serialize, Deserialize)]
pub(super) struct SavedState {
    registers: Registers,
    mask: u32,
    mistakes: u8,
    fatal: bool,
    uncached: bool,
    admin: Option<Admin>,
    groups: Vec<group::SavedState>,
    shadow: Option<Shadow>,
    features: Features,
    events: Events,
    health: Health,
    reads: Counter,
    writes: Counter,
    /// Size of the disk in bytes, or 0 at power-on.
    size: u64,
    flushing: Vec<u16>,
}

/// State of the controller's thread.
pub(super) struct Controller {
    shared: Arc<Shared>,
    state: State,
    waker: Arc<Waker>,
    admin: Option<Admin>,
    commands: Vec<Command>,
    /// Admin commands that wait for a flush. Parking the device interrupted it.
    flushing: Vec<u16>,
}

impl Controller {
    pub(super) fn restore(
        shared: &Arc<Shared>,
        window: &Arc<Window>,
        saved: SavedState,
    ) -> anyhow::Result<Self> {
        saved.check(shared)?;
        let bells = &shared.bells;
        *shared.registers() = saved.registers.clone();
        *shared.health() = saved.health;
        shared.reads.set(&saved.reads);
        shared.writes.set(&saved.writes);
        shared.fatal.store(saved.fatal, Ordering::SeqCst);
        shared.cache.store(!saved.uncached, Ordering::SeqCst);
        let page = saved.admin.as_ref().map_or(0, |admin| admin.page);
        shared.page.store(4096 << page, Ordering::SeqCst);
        let size = if saved.size == 0 { shared.image.geometry().size } else { saved.size };
        shared.size.store(size, Ordering::SeqCst);
        bells.take_guest_errors();
        bells.report_guest_error(saved.mistakes);
        let waker = Arc::new(Waker::new(bells.kick.clone()));
        let state = State {
            shared: shared.clone(),
            features: saved.features,
            events: saved.events,
            queues: IoQueues::new(shared, window, saved.shadow),
        };
        let mut controller = Self {
            shared: shared.clone(),
            state,
            waker,
            admin: saved.admin,
            commands: Vec::new(),
            flushing: saved.flushing,
        };
        if let Some(Admin { submission, completion, .. }) = &controller.admin {
            completion.resume(bells, &controller.waker);
            bells.tail(0).open(submission.size, submission.tail, &controller.waker);
        }
        controller.state.queues.restore(saved.groups)?;
        bells.set_mask(|_| saved.mask);
        // Continues with pending work.
        bells.kick.write(1)?;
        Ok(controller)
    }

    pub(super) fn save(mut self) -> SavedState {
        let shared = self.shared.clone();
        let groups = self.state.queues.save();
        if let Some(Admin { submission, completion, .. }) = &mut self.admin {
            completion.update_head(&shared.bells, &shared.memory);
            submission.read_tail(&shared.bells, &shared.memory).ok();
        }
        self.state.queues.disconnect_all();
        let registers = shared.registers().clone();
        let health = shared.health().clone();
        SavedState {
            registers,
            mask: shared.bells.mask(),
            mistakes: shared.bells.take_guest_errors(),
            fatal: shared.is_fatal(),
            uncached: !shared.caches(),
            admin: self.admin,
            groups,
            shadow: self.state.queues.shadow,
            features: self.state.features,
            events: self.state.events,
            health,
            reads: shared.reads.copy(),
            writes: shared.writes.copy(),
            size: shared.size(),
            flushing: self.flushing,
        }
    }

    /// Processes changes of registers, doorbells and the disk.
    pub(super) fn step(&mut self) {
        self.waker.prepare_sleep();
        let shared = self.shared.clone();
        if std::mem::take(&mut shared.registers().reset) {
            self.disable();
        }
        let Registers { cc, ready, shutdown, .. } = *shared.registers();
        if cc & ENABLE != 0 && !ready && !shared.is_fatal() {
            self.enable();
        }
        // Repeats a shutdown that parking interrupted.
        if cc & SHUTDOWN != 0 && shutdown != COMPLETE {
            self.shut_down();
        }
        for id in std::mem::take(&mut self.flushing) {
            if let Some(answer) = self.flush_for(id) {
                self.answer(id, answer);
            }
        }
        self.raise_events();
        if !shared.is_fatal() && self.serve().is_err() {
            shared.fail();
        }
    }

    /// CC.EN was set: opens the admin queues that the registers describe.
    fn enable(&mut self) {
        let shared = self.shared.clone();
        let Registers { cc, aqa, asq, acq, .. } = *shared.registers();
        let page = cc >> 7 & 0xf;
        let (submissions, completions) = ((aqa & 0xfff) + 1, (aqa >> 16 & 0xfff) + 1);
        let within = (4096_u64 << page) - 1;
        let aligned = asq & within == 0 && acq & within == 0;
        let known = cc & (COMMAND_SET | ARBITRATION) == 0 && page <= MAX_MPS;
        if !known || !aligned || submissions < 2 || completions < 2 {
            shared.fail();
            return;
        }
        shared.page.store(4096 << page, Ordering::SeqCst);
        let bells = &shared.bells;
        bells.tail(0).open(submissions, 0, &self.waker);
        bells.head(0).open(completions, 0, &self.waker);
        let submission = SubmissionQueue::new(0, submissions, asq);
        let completion = CompletionQueue::new(0, completions, acq, Some(0));
        self.admin = Some(Admin { submission, completion, page });
        let mut registers = shared.registers();
        (registers.ready, registers.shutdown) = (true, 0);
    }

    /// CC.EN was cleared: ends all requests and restores the default features.
    fn disable(&mut self) {
        let shared = self.shared.clone();
        let bells = &shared.bells;
        self.state.queues.disconnect_all();
        // Waits for requests in flight: nothing reaches guest memory after this.
        self.state.queues.servers.clear();
        self.admin = None;
        bells.tail(0).close();
        bells.head(0).close();
        bells.take_guest_errors();
        bells.set_mask(|_| 0);
        bells.update_line();
        (self.state.features, self.state.events, self.state.queues.shadow) = Default::default();
        self.flushing.clear();
        self.commands.clear();
        shared.cache.store(true, Ordering::SeqCst);
        shared.fatal.store(false, Ordering::SeqCst);
        let mut registers = shared.registers();
        (registers.ready, registers.shutdown) = Default::default();
    }

    /// CC.SHN was set: makes all acknowledged writes durable.
    fn shut_down(&self) {
        self.shared.registers().shutdown = IN_PROGRESS;
        match self.flush() {
            Ok(true) => {}
            // The shutdown stays in progress. It continues when the device runs again.
            Ok(false) => return,
            Err(error) => self.shared.logged.call_once(|| {
                tracing::error!(
                    "NVMe: the guest shut its disk down, but the flush failed: {error:#}"
                );
            }),
        }
        self.shared.registers().shutdown = COMPLETE;
    }

    /// Flushes, and returns the answer for the command that asked for it. Returns None if parking
    /// interrupts the flush: the command is answered later.
    fn flush_for(&mut self, id: u16) -> Option<Answer> {
        match self.flush() {
            Ok(true) => Some(Ok(0)),
            Ok(false) => {
                self.flushing.push(id);
                None
            }
            Err(_) => Some(Err(Status::INTERNAL)),
        }
    }

    /// Returns false if the flush waits for disk space and the device is about to be parked.
    fn flush(&self) -> anyhow::Result<bool> {
        let shared = &self.shared;
        if shared.read_only {
            return Ok(true);
        }
        let mut channel = shared.image.channel(&shared.memory).context("a channel to the disk")?;
        let (operation, pieces) = (Operation::Flush, Vec::new());
        channel.push(Request { tag: 0, operation, offset: 0, length: 0, pieces });
        channel.submit();
        let mut done = Vec::new();
        loop {
            channel.reap(&mut done);
            if let Some(done) = done.pop() {
                let fault = done.result.err();
                return fault.map_or(Ok(true), |fault| bail!("the disk reports {fault:?}"));
            }
            if shared.parking.load(Ordering::SeqCst) && !channel.withdraw().is_empty() {
                return Ok(false);
            }
            disk::wait(channel.as_ref());
        }
    }

    /// Raises events for doorbell mistakes and for a changed disk size.
    fn raise_events(&mut self) {
        let shared = &self.shared;
        let mistakes = shared.bells.take_guest_errors();
        for (mistake, event) in
            [(INVALID_REGISTER, Event::INVALID_REGISTER), (INVALID_VALUE, Event::INVALID_VALUE)]
        {
            // Doorbell mistakes while the controller is disabled raise no event.
            if mistakes & mistake != 0 && self.admin.is_some() {
                self.state.events.raise(event);
            }
        }
        let size = shared.image.geometry().size;
        if shared.size.swap(size, Ordering::SeqCst) != size && self.admin.is_some() {
            shared.health().changed = true;
            if self.state.features.reports_namespace_changes() {
                self.state.events.raise(Event::NAMESPACE);
            }
        }
    }

    /// Serves the admin queue until it is empty, or until the completion queue is full.
    fn serve(&mut self) -> Result<(), NoMemory> {
        let shared = self.shared.clone();
        let (bells, memory) = (&shared.bells, &shared.memory);
        loop {
            let Some(admin) = &mut self.admin else { return Ok(()) };
            admin.completion.drain(bells, memory)?;
            if !admin.completion.is_full() {
                admin.submission.read_tail(bells, memory)?;
                admin.submission.fetch(memory, &mut self.commands)?;
            }
            let mut commands = std::mem::take(&mut self.commands);
            let worked = !commands.is_empty();
            for command in commands.drain(..) {
                self.execute(&command);
            }
            self.commands = commands;
            while let Some((id, event)) = self.next_event() {
                self.answer(id, Ok(event.result()));
            }
            let Some(admin) = &mut self.admin else { return Ok(()) };
            if !worked && !admin.completion.has_room(bells, memory) {
                admin.completion.notify(bells);
                return Ok(());
            }
        }
    }

    fn execute(&mut self, command: &Command) {
        let id = command.id();
        let answer = match admin::execute(&mut self.state, command) {
            Outcome::Answered(answer) => answer,
            Outcome::Pending => return,
            Outcome::Flush => match self.flush_for(id) {
                Some(answer) => answer,
                None => return,
            },
            Outcome::Aborted(request) => {
                self.answer(request, Err(Status::ABORTED));
                Ok(0)
            }
        };
        self.answer(id, answer);
    }

    /// Events wait while the completion queue is full.
    fn next_event(&mut self) -> Option<(u16, Event)> {
        let room = self.admin.as_ref().is_some_and(|admin| !admin.completion.is_full());
        if room { self.state.events.next() } else { None }
    }

    fn answer(&mut self, id: u16, answer: Answer) {
        let shared = &self.shared;
        let Some(admin) = &mut self.admin else { return };
        admin.submission.answered(1);
        let head = u16::try_from(admin.submission.head).expect("a queue has at most 4096 entries");
        let (result, status) = match answer {
            Ok(result) => (result, Status::SUCCESS),
            Err(status) => {
                shared.health().record(ErrorEntry { queue: 0, id, status, block: 0 });
                (0, status.logged())
            }
        };
        let done = Completed { result, queue: 0, head, id, status };
        if admin.completion.post(done, &shared.bells, &shared.memory).is_err() {
            shared.fail();
        }
    }
}

impl SavedState {
    fn check(&self, shared: &Shared) -> anyhow::Result<()> {
        let Self { admin, groups, features, events, health, flushing, .. } = self;
        if let Some(Admin { submission, completion, page }) = admin {
            let fits = submission.is_valid(0, MAX_ADMIN_ENTRIES)
                && completion.is_valid(0, MAX_ADMIN_ENTRIES);
            ensure!(fits, "the admin queues are invalid");
            ensure!(*page <= MAX_MPS, "pages of 2^{} bytes", 12 + u64::from(*page));
        }
        let limited = features.is_valid(shared) && events.is_valid() && health.is_valid();
        ensure!(
            limited && flushing.len() <= MAX_ADMIN_ENTRIES as usize,
            "features, events or counters are out of range"
        );
        let block = u64::from(shared.block);
        ensure!(self.size.is_multiple_of(block), "a disk of {} bytes", self.size);
        if let Some(Shadow { doorbell, event }) = self.shadow {
            let end = doorbell.max(event).checked_add(8 * (u64::from(shared.queues) + 1));
            ensure!(end.is_some(), "shadow doorbells at {doorbell:#x} and {event:#x}");
        }
        ensure!(groups.len() <= usize::from(shared.queues), "{} groups of queues", groups.len());
        group::SavedState::check(groups)
    }
}
