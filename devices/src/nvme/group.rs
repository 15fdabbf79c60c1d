//! A completion queue with all its submission queues, and what they have under way.
//!
//! One pass looks at every queue, starts what is new with one `submit`, and tells the guest once of
//! all that is done. The requests under way are bounded for each queue (511: see `queues.rs`), and
//! so is their memory. What is taken back finds its command by its tag.

use std::mem;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::Shared;
use super::command::{Command, Completed, Status};
use super::health::Mistake;
use super::io::{self, RANGES, Work};
use super::queues::{Completion, ENTRIES, Submission, Waker};
use host::disk::{self, Channel, Done, Operation, Request};
use host::memory::{NoMemory, Piece};

/// Piece lists that are kept for the next commands.
const SPARE: usize = 64;

/// A command that is under way.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Pending {
    /// Whose, and what the guest calls it.
    queue: u16,
    id: u16,
    opcode: u8,
    /// The first block, for the error log.
    block: u64,
    /// Requests that are not done yet.
    left: u32,
    /// Requests that its queue counts for it until it ends.
    #[serde(skip)]
    cost: u32,
    /// A flush is to follow.
    flush: bool,
    status: Status,
}

/// A command whose requests wait, and what is left of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Kept {
    pending: Pending,
    requests: Vec<Request>,
}

/// What is saved.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Frozen {
    completion: Completion,
    submissions: Vec<Submission>,
    kept: Vec<Kept>,
}

impl Frozen {
    /// No queue is in two groups, and none is the admin queue.
    pub(super) fn check(groups: &[Self]) -> anyhow::Result<()> {
        let mut completions: Vec<_> = groups.iter().map(|it| it.completion.id).collect();
        let submissions = groups.iter().flat_map(|it| &it.submissions);
        let mut submissions: Vec<_> = submissions.map(|it| it.id).collect();
        for ids in [&mut completions, &mut submissions] {
            ids.sort_unstable();
            let twice = ids.windows(2).find(|pair| pair[0] == pair[1]);
            ensure!(twice.is_none() && ids.first() != Some(&0), "queues that cannot be: {ids:?}");
        }
        Ok(())
    }
}

/// The queues and their commands.
pub(super) struct Group {
    pub(super) completion: Completion,
    pub(super) submissions: Vec<Submission>,
    shared: Arc<Shared>,
    channel: Box<dyn Channel>,
    /// By the lower half of a request's tag; the upper half numbers the requests of a command.
    pending: Vec<Option<Pending>>,
    free: Vec<u32>,
    commands: Vec<Command>,
    done: Vec<Done>,
    spare: Vec<Vec<Piece>>,
    /// Something was pushed since the last `submit`.
    pushed: bool,
    /// Requests that the channel has.
    asked: usize,
}

impl Group {
    pub(super) fn new(shared: Arc<Shared>, completion: Completion) -> anyhow::Result<Self> {
        let channel = shared.image.channel(&shared.memory).context("a channel to the disk")?;
        Ok(Self {
            completion,
            submissions: Vec::new(),
            shared,
            channel,
            pending: Vec::new(),
            free: Vec::new(),
            commands: Vec::new(),
            done: Vec::new(),
            spare: Vec::new(),
            pushed: false,
            asked: 0,
        })
    }

    /// What is readable when a request is done.
    pub(super) fn event(&self) -> RawFd {
        self.channel.event().as_raw_fd()
    }

    /// One request is in flight.
    pub(super) fn awaits(&self) -> bool {
        self.asked == 1
    }

    /// Does what there is to do; true when there was something.
    pub(super) fn pass(&mut self) -> bool {
        let worked = self.reap();
        // Nothing more is done for a guest whose queues are not in its memory.
        if self.shared.is_fatal() {
            return worked;
        }
        let started = self.work().unwrap_or_else(|NoMemory| {
            self.shared.fail();
            false
        });
        worked || started
    }

    fn work(&mut self) -> Result<bool, NoMemory> {
        let shared = self.shared.clone();
        let mut worked = false;
        self.completion.drain(&shared.bells, &shared.memory)?;
        for at in 0..self.submissions.len() {
            if self.completion.is_full() {
                break;
            }
            let queue = &mut self.submissions[at];
            queue.look(&shared.bells, &shared.memory)?;
            queue.fetch(&shared.memory, &mut self.commands)?;
            let id = queue.id;
            let mut commands = mem::take(&mut self.commands);
            for command in commands.drain(..) {
                worked = true;
                self.start(id, &command);
            }
            self.commands = commands;
        }
        if mem::take(&mut self.pushed) {
            self.channel.submit();
            worked |= self.reap();
        }
        self.completion.tell(&shared.bells);
        Ok(worked)
    }

    /// Turns a command into requests, or answers it.
    fn start(&mut self, queue: u16, command: &Command) {
        let mut pieces = self.spare.pop().unwrap_or_default();
        let work = io::understand(&self.shared, command, &mut pieces);
        let status = work.as_ref().err().copied().unwrap_or(Status::SUCCESS);
        let nothing = Work { operation: Operation::Flush, ranges: Vec::new(), flush: false };
        let Work { operation, ranges, flush } = work.unwrap_or(nothing);
        let left = u32::try_from(ranges.len()).expect("a command has at most 256 ranges");
        let (id, opcode, block) = (command.id(), command.opcode(), command.slba());
        let cost = io::requests(command);
        let pending = Pending { queue, id, opcode, block, left, cost, flush, status };
        if ranges.is_empty() {
            self.keep(pieces);
            self.end(&pending);
            return;
        }
        let slot = self.slot(pending);
        for (part, (offset, length)) in (0..).zip(ranges) {
            let pieces = mem::take(&mut pieces);
            self.push(Request { tag: tag(slot, part), operation, offset, length, pieces });
        }
    }

    fn push(&mut self, request: Request) {
        self.channel.push(request);
        self.pushed = true;
        self.asked += 1;
    }

    fn slot(&mut self, pending: Pending) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.pending[slot as usize] = Some(pending);
            return slot;
        }
        self.pending.push(Some(pending));
        u32::try_from(self.pending.len() - 1).expect("the commands under way are bounded")
    }

    fn keep(&mut self, mut pieces: Vec<Piece>) {
        if self.spare.len() < SPARE {
            pieces.clear();
            self.spare.push(pieces);
        }
    }

    /// Finishes what is done; true when something was.
    fn reap(&mut self) -> bool {
        let mut done = mem::take(&mut self.done);
        self.channel.reap(&mut done);
        let worked = !done.is_empty();
        self.asked -= done.len();
        for done in done.drain(..) {
            self.finish(done);
        }
        self.done = done;
        if mem::take(&mut self.pushed) {
            self.channel.submit();
        }
        worked
    }

    fn finish(&mut self, done: Done) {
        let Done { tag, result, pieces } = done;
        let pending = self.pending_of(tag);
        pending.left -= 1;
        if let (Err(fault), false) = (result, pending.status.is_error()) {
            pending.status = io::status(fault, pending.opcode);
        }
        if pending.left > 0 {
            self.keep(pieces);
            return;
        }
        let flush = mem::take(&mut pending.flush) && !pending.status.is_error();
        if flush {
            pending.left = 1;
            self.push(Request { tag, operation: Operation::Flush, offset: 0, length: 0, pieces });
            return;
        }
        self.keep(pieces);
        self.close(tag);
    }

    fn pending_of(&mut self, tag: u64) -> &mut Pending {
        let pending = self.pending.get_mut(slot_of(tag)).and_then(Option::as_mut);
        pending.expect("a channel gives back each of our tags once")
    }

    /// Answers a command that has nothing under way any more.
    fn close(&mut self, tag: u64) {
        let slot = slot_of(tag);
        let ended = self.pending[slot].take().expect("a command ends once");
        self.free.push(u32::try_from(slot).expect("half a tag"));
        self.end(&ended);
    }

    fn end(&mut self, pending: &Pending) {
        let Pending { queue, id, block, cost, mut status, .. } = *pending;
        let from = self.submissions.iter_mut().find(|it| it.id == queue);
        let from = from.expect("a queue with commands under way is not deleted");
        from.answered(cost);
        let head = u16::try_from(from.head).expect("a queue has at most 1024 entries");
        if status.is_error() {
            status = status.logged();
            self.shared.health().note(Mistake { queue, id, status, block });
        }
        let done = Completed { result: 0, queue, head, id, status };
        let shared = &self.shared;
        if self.completion.post(done, &shared.bells, &shared.memory).is_err() {
            shared.fail();
        }
    }

    /// Before sleep: true when there is nothing to do, and whatever comes rings.
    pub(super) fn is_idle(&mut self) -> bool {
        let Self { completion, submissions, shared, .. } = self;
        if shared.is_fatal() {
            return true;
        }
        let has_room = completion.has_room(&shared.bells, &shared.memory);
        if completion.is_full() {
            return !has_room;
        }
        submissions.iter_mut().all(|queue| {
            // A queue that cannot be looked at any more is found out by the next pass.
            queue.ask(&shared.memory).is_ok()
                && queue.look(&shared.bells, &shared.memory).is_ok()
                && !queue.has_more()
        })
    }

    /// Ends the commands of a queue: what is under way is waited for, what waits is aborted.
    pub(super) fn abandon(&mut self, queue: u16) {
        let mut others = Vec::new();
        while self.submissions.iter().any(|it| it.id == queue && it.under_way > 0) {
            for request in self.withdraw() {
                let pending = self.pending_of(request.tag);
                if pending.queue != queue {
                    others.push(request);
                    continue;
                }
                pending.left -= 1;
                pending.status = Status::QUEUE_DELETED;
                if pending.left == 0 {
                    self.close(request.tag);
                }
            }
            self.wait();
        }
        for request in others {
            self.push(request);
        }
        self.channel.submit();
        self.pushed = false;
    }

    /// Takes back what is not under way.
    fn withdraw(&mut self) -> Vec<Request> {
        let requests = self.channel.withdraw();
        self.asked -= requests.len();
        requests
    }

    /// Reaps once, waiting for something if there is nothing but there may be.
    fn wait(&mut self) {
        if !self.reap() && self.asked > 0 {
            disk::wait(self.channel.as_ref());
        }
    }

    /// Ends what is under way, and gives back what is to be saved.
    pub(super) fn freeze(mut self) -> Frozen {
        // By slot, as `pending`.
        let mut kept: Vec<Vec<Request>> = Vec::new();
        while self.asked > 0 {
            for request in self.withdraw() {
                let slot = slot_of(request.tag);
                if kept.len() <= slot {
                    kept.resize_with(slot + 1, Vec::new);
                }
                kept[slot].push(request);
            }
            self.wait();
        }
        let kept = kept.into_iter().enumerate().filter(|(_, requests)| !requests.is_empty());
        // As they are now: other parts of a command may have ended, or failed.
        let mut pending =
            |slot: usize| self.pending[slot].take().expect("what is kept has not ended");
        let kept: Vec<_> =
            kept.map(|(slot, requests)| Kept { pending: pending(slot), requests }).collect();
        let Self { mut completion, submissions, shared, .. } = self;
        completion.tell(&shared.bells);
        completion.freeze(&shared.bells, &shared.memory);
        let look = |mut queue: Submission| {
            // Without memory its last tail is as good as any.
            queue.look(&shared.bells, &shared.memory).ok();
            queue
        };
        let submissions = submissions.into_iter().map(look).collect();
        Frozen { completion, submissions, kept }
    }

    /// What `freeze` gave back, on the way again.
    pub(super) fn thaw(shared: Arc<Shared>, frozen: Frozen) -> anyhow::Result<Self> {
        let Frozen { completion, submissions, kept } = frozen;
        let queues = shared.queues;
        ensure!(completion.is_valid(queues, ENTRIES), "a completion queue cannot be");
        let valid = submissions.iter().all(|it| it.is_valid(queues, ENTRIES));
        ensure!(valid, "a submission queue cannot be");
        let mut group = Self { submissions, ..Self::new(shared, completion)? };
        for Kept { mut pending, requests } in kept {
            let queue = group.submissions.iter_mut().find(|it| it.id == pending.queue);
            let queue = queue.context("a command of no queue")?;
            ensure!((1..=RANGES).contains(&requests.len()), "a command without requests");
            pending.left = u32::try_from(requests.len()).expect("at most 256");
            pending.cost = pending.left;
            queue.under_way += 1;
            queue.requests += pending.cost;
            let slot = group.slot(pending);
            for (part, request) in (0..).zip(requests) {
                group.push(Request { tag: tag(slot, part), ..request });
            }
        }
        Ok(group)
    }

    /// Connects its doorbells.
    pub(super) fn connect(&self, waker: &Arc<Waker>) {
        let bells = &self.shared.bells;
        self.completion.resume(bells, waker);
        for queue in &self.submissions {
            bells.tail(queue.id).open(queue.size, queue.tail, waker);
        }
    }

    /// Disconnects them.
    pub(super) fn disconnect(&self) {
        let bells = &self.shared.bells;
        bells.head(self.completion.id).close();
        for queue in &self.submissions {
            bells.tail(queue.id).close();
        }
    }
}

fn tag(slot: u32, part: u64) -> u64 {
    u64::from(slot) | part << 32
}

fn slot_of(tag: u64) -> usize {
    let [a, b, c, d, ..] = tag.to_le_bytes();
    u32::from_le_bytes([a, b, c, d]) as usize
}
