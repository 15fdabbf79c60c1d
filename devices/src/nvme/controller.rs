//! The controller behind the registers: it enables, resets and shuts down, and serves the admin
//! queue, on a thread of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use super::admin::{self, Outcome, State};
use super::command::{Answer, Command, Completed, Status};
use super::events::{Event, Events};
use super::features::Features;
use super::group;
use super::health::{Counter, Health, Mistake};
use super::io_queues::IoQueues;
use super::queues::{
    ADMIN_ENTRIES, Completion, INVALID_REGISTER, INVALID_VALUE, Shadow, Submission, Waker,
};
use super::{Registers, Shared};
use crate::bus::Window;
use host::disk::{self, Operation, Request};
use host::memory::NoMemory;

/// CC: enable, command set, page size, arbitration.
pub(super) const ENABLE: u32 = 1 << 0;
const COMMAND_SET: u32 = 7 << 4;
const ARBITRATION: u32 = 7 << 11;
/// CC.MPS: pages of 4 KiB to 64 KiB.
pub(super) const LARGEST_PAGE: u32 = 4;
/// CC.SHN, and CSTS.SHST when it is under way and when it is done.
pub(super) const SHUTDOWN: u32 = 3 << 14;
const UNDER_WAY: u32 = 1 << 2;
const COMPLETE: u32 = 2 << 2;

/// The admin queues.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Admin {
    submission: Submission,
    completion: Completion,
    /// CC.MPS as it was when the controller was enabled.
    page: u32,
}

/// What is saved.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Frozen {
    registers: Registers,
    mask: u32,
    mistakes: u8,
    fatal: bool,
    uncached: bool,
    admin: Option<Admin>,
    groups: Vec<group::Frozen>,
    shadow: Option<Shadow>,
    features: Features,
    events: Events,
    health: Health,
    reads: Counter,
    writes: Counter,
    /// Of the disk, in bytes; 0 at power-on.
    size: u64,
    flushing: Vec<u16>,
}

/// What the controller's thread works on.
pub(super) struct Controller {
    shared: Arc<Shared>,
    state: State,
    waker: Arc<Waker>,
    admin: Option<Admin>,
    commands: Vec<Command>,
    /// Admin commands that wait for a flush, which waited for room when the device was parked.
    flushing: Vec<u16>,
}

impl Controller {
    /// A controller as it was saved, or at power-on.
    pub(super) fn thaw(
        shared: &Arc<Shared>,
        window: &Arc<Window>,
        frozen: Frozen,
    ) -> anyhow::Result<Self> {
        frozen.check(shared)?;
        let bells = &shared.bells;
        *shared.registers() = frozen.registers.clone();
        *shared.health() = frozen.health;
        shared.reads.set(&frozen.reads);
        shared.writes.set(&frozen.writes);
        shared.fatal.store(frozen.fatal, Ordering::SeqCst);
        shared.cache.store(!frozen.uncached, Ordering::SeqCst);
        let page = frozen.admin.as_ref().map_or(0, |admin| admin.page);
        shared.page.store(4096 << page, Ordering::SeqCst);
        let size = if frozen.size == 0 { shared.image.geometry().size } else { frozen.size };
        shared.size.store(size, Ordering::SeqCst);
        bells.take_mistakes();
        bells.mistake(frozen.mistakes);
        let waker = Arc::new(Waker::new(bells.kick.clone()));
        let state = State {
            shared: shared.clone(),
            features: frozen.features,
            events: frozen.events,
            queues: IoQueues::new(shared, window, frozen.shadow),
        };
        let mut controller = Self {
            shared: shared.clone(),
            state,
            waker,
            admin: frozen.admin,
            commands: Vec::new(),
            flushing: frozen.flushing,
        };
        if let Some(Admin { submission, completion, .. }) = &controller.admin {
            completion.resume(bells, &controller.waker);
            bells.tail(0).open(submission.size, submission.tail, &controller.waker);
        }
        controller.state.queues.thaw(frozen.groups)?;
        bells.set_mask(|_| frozen.mask);
        // What was asked for and is not done yet.
        bells.kick.write(1)?;
        Ok(controller)
    }

    /// Ends all threads and gives back what is to be saved.
    pub(super) fn freeze(mut self) -> Frozen {
        let shared = self.shared.clone();
        let groups = self.state.queues.freeze();
        if let Some(Admin { submission, completion, .. }) = &mut self.admin {
            completion.freeze(&shared.bells, &shared.memory);
            submission.look(&shared.bells, &shared.memory).ok();
        }
        self.state.queues.silence();
        let registers = shared.registers().clone();
        let health = shared.health().clone();
        Frozen {
            registers,
            mask: shared.bells.mask(),
            mistakes: shared.bells.take_mistakes(),
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

    /// Does what the registers, the doorbells and the disk ask for.
    pub(super) fn step(&mut self) {
        self.waker.doze();
        let shared = self.shared.clone();
        if std::mem::take(&mut shared.registers().reset) {
            self.disable();
        }
        let Registers { cc, ready, shutdown, .. } = *shared.registers();
        if cc & ENABLE != 0 && !ready && !shared.is_fatal() {
            self.enable();
        }
        // Also one that was under way when the device was parked.
        if cc & SHUTDOWN != 0 && shutdown != COMPLETE {
            self.shut_down();
        }
        for id in std::mem::take(&mut self.flushing) {
            if let Some(answer) = self.empty_cache(id) {
                self.answer(id, answer);
            }
        }
        self.notice();
        if !shared.is_fatal() && self.serve().is_err() {
            shared.fail();
        }
    }

    /// CC.EN rose: the registers say where the admin queues are.
    fn enable(&mut self) {
        let shared = self.shared.clone();
        let Registers { cc, aqa, asq, acq, .. } = *shared.registers();
        let page = cc >> 7 & 0xf;
        let (submissions, completions) = ((aqa & 0xfff) + 1, (aqa >> 16 & 0xfff) + 1);
        let within = (4096_u64 << page) - 1;
        let aligned = asq & within == 0 && acq & within == 0;
        let known = cc & (COMMAND_SET | ARBITRATION) == 0 && page <= LARGEST_PAGE;
        if !known || !aligned || submissions < 2 || completions < 2 {
            shared.fail();
            return;
        }
        shared.page.store(4096 << page, Ordering::SeqCst);
        let bells = &shared.bells;
        bells.tail(0).open(submissions, 0, &self.waker);
        bells.head(0).open(completions, 0, &self.waker);
        let submission = Submission::new(0, submissions, asq);
        let completion = Completion::new(0, completions, acq, Some(0));
        self.admin = Some(Admin { submission, completion, page });
        let mut registers = shared.registers();
        (registers.ready, registers.shutdown) = (true, 0);
    }

    /// CC.EN fell: back to where nothing is under way. The features are as at power-on.
    fn disable(&mut self) {
        let shared = self.shared.clone();
        let bells = &shared.bells;
        self.state.queues.silence();
        // Waits for what is under way: nothing reaches the guest's memory after this.
        self.state.queues.servers.clear();
        self.admin = None;
        bells.tail(0).close();
        bells.head(0).close();
        bells.take_mistakes();
        bells.set_mask(|_| 0);
        bells.settle();
        (self.state.features, self.state.events, self.state.queues.shadow) = Default::default();
        self.flushing.clear();
        self.commands.clear();
        shared.cache.store(true, Ordering::SeqCst);
        shared.fatal.store(false, Ordering::SeqCst);
        let mut registers = shared.registers();
        (registers.ready, registers.shutdown) = Default::default();
    }

    /// CC.SHN: what was answered must survive.
    fn shut_down(&self) {
        self.shared.registers().shutdown = UNDER_WAY;
        match self.flush() {
            Ok(true) => {}
            // Nothing is said to survive yet: it goes on when the device runs again.
            Ok(false) => return,
            Err(error) => self.shared.told.call_once(|| {
                tracing::error!(
                    "the guest shut its NVMe disk down, which could not be flushed: {error:#}"
                );
            }),
        }
        self.shared.registers().shutdown = COMPLETE;
    }

    /// Flushes, and gives the answer to the command that asked for it: later, if the device is
    /// parked meanwhile.
    fn empty_cache(&mut self, id: u16) -> Option<Answer> {
        match self.flush() {
            Ok(true) => Some(Ok(0)),
            Ok(false) => {
                self.flushing.push(id);
                None
            }
            Err(_) => Some(Err(Status::INTERNAL)),
        }
    }

    /// Writes what is in the cache. False when it is not done: it waits for room, and the device is
    /// to be parked, which does not wait for that.
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
                return fault.map_or(Ok(true), |fault| bail!("the disk is {fault:?}"));
            }
            if shared.parks.load(Ordering::SeqCst) && !channel.withdraw().is_empty() {
                return Ok(false);
            }
            disk::wait(channel.as_ref());
        }
    }

    /// Turns what happened into events.
    fn notice(&mut self) {
        let shared = &self.shared;
        let mistakes = shared.bells.take_mistakes();
        for (mistake, event) in
            [(INVALID_REGISTER, Event::INVALID_REGISTER), (INVALID_VALUE, Event::INVALID_VALUE)]
        {
            // Doorbells without a controller are nobody's.
            if mistakes & mistake != 0 && self.admin.is_some() {
                self.state.events.raise(event);
            }
        }
        let size = shared.image.geometry().size;
        if shared.size.swap(size, Ordering::SeqCst) != size && self.admin.is_some() {
            shared.health().changed = true;
            if self.state.features.tells_of_namespaces() {
                self.state.events.raise(Event::NAMESPACE);
            }
        }
    }

    /// Serves the admin queue as far as there is room for answers.
    fn serve(&mut self) -> Result<(), NoMemory> {
        let shared = self.shared.clone();
        let (bells, memory) = (&shared.bells, &shared.memory);
        loop {
            let Some(admin) = &mut self.admin else { return Ok(()) };
            admin.completion.drain(bells, memory)?;
            if !admin.completion.is_full() {
                admin.submission.look(bells, memory)?;
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
                admin.completion.tell(bells);
                return Ok(());
            }
        }
    }

    /// Executes an admin command, and answers it unless that comes later.
    fn execute(&mut self, command: &Command) {
        let id = command.id();
        let answer = match admin::execute(&mut self.state, command) {
            Outcome::Answered(answer) => answer,
            Outcome::Pending => return,
            Outcome::Flush => match self.empty_cache(id) {
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

    /// What can be told now. One that has no room waits as it is.
    fn next_event(&mut self) -> Option<(u16, Event)> {
        let room = self.admin.as_ref().is_some_and(|admin| !admin.completion.is_full());
        if room { self.state.events.next() } else { None }
    }

    /// Answers a command of the admin queue.
    fn answer(&mut self, id: u16, answer: Answer) {
        let shared = &self.shared;
        let Some(admin) = &mut self.admin else { return };
        admin.submission.answered(1);
        let head = u16::try_from(admin.submission.head).expect("a queue has at most 4096 entries");
        let (result, status) = match answer {
            Ok(result) => (result, Status::SUCCESS),
            Err(status) => {
                shared.health().note(Mistake { queue: 0, id, status, block: 0 });
                (0, status.logged())
            }
        };
        let done = Completed { result, queue: 0, head, id, status };
        if admin.completion.post(done, &shared.bells, &shared.memory).is_err() {
            shared.fail();
        }
    }
}

impl Frozen {
    /// A saved state may be damaged: what it could break is refused.
    fn check(&self, shared: &Shared) -> anyhow::Result<()> {
        let Self { admin, groups, features, events, health, flushing, .. } = self;
        if let Some(Admin { submission, completion, page }) = admin {
            let fits =
                submission.is_valid(0, ADMIN_ENTRIES) && completion.is_valid(0, ADMIN_ENTRIES);
            ensure!(fits, "the admin queues cannot be");
            ensure!(*page <= LARGEST_PAGE, "pages of 2^{} bytes", 12 + u64::from(*page));
        }
        let limited = features.is_valid(shared) && events.is_valid() && health.is_valid();
        ensure!(
            limited && flushing.len() <= ADMIN_ENTRIES as usize,
            "more is kept than there can be"
        );
        let block = u64::from(shared.block);
        ensure!(self.size.is_multiple_of(block), "a disk of {} bytes", self.size);
        if let Some(Shadow { doorbell, event }) = self.shadow {
            let end = doorbell.max(event).checked_add(8 * (u64::from(shared.queues) + 1));
            ensure!(end.is_some(), "shadow doorbells at {doorbell:#x} and {event:#x}");
        }
        ensure!(groups.len() <= usize::from(shared.queues), "{} groups of queues", groups.len());
        group::Frozen::check(groups)
    }
}
