//! A completion queue with all its submission queues and their requests in flight.
//!
//! One pass reads every queue, submits all new requests with one `submit`, and notifies the guest
//! once of everything finished. The requests in flight are bounded for each queue (511: see
//! `queues.rs`), and so is their memory. A finished request finds its command by its tag.

use std::mem;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::Shared;
use super::command::{Command, Completed, Status};
use super::health::ErrorEntry;
use super::io::{self, DiskRequests, MAX_RANGES};
use super::queues::{CompletionQueue, MAX_ENTRIES, SubmissionQueue, Waker};
use host::disk::{self, Channel, Completion, Operation, Request};
use host::memory::{NoMemory, Piece};

/// Maximum number of empty piece lists kept for reuse.
const MAX_SPARE: usize = 64;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Pending {
    /// Submission queue, and the guest's identifier.
    queue: u16,
    id: u16,
    opcode: u8,
    /// First block, for the error log.
    block: u64,
    /// Requests that are not finished yet.
    left: u32,
    /// Number of requests that count against the limit of the submission queue.
    #[serde(skip)]
    cost: u32,
    /// A flush follows.
    flush: bool,
    status: Status,
}

/// A command with requests that the channel did not start.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Suspended {
    pending: Pending,
    requests: Vec<Request>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedState {
    completion: CompletionQueue,
    submissions: Vec<SubmissionQueue>,
    kept: Vec<Suspended>,
}

impl SavedState {
    /// Rejects queues that are in two groups, and the admin queue.
    pub(super) fn check(groups: &[Self]) -> anyhow::Result<()> {
        let mut completions: Vec<_> = groups.iter().map(|it| it.completion.id).collect();
        let submissions = groups.iter().flat_map(|it| &it.submissions);
        let mut submissions: Vec<_> = submissions.map(|it| it.id).collect();
        for ids in [&mut completions, &mut submissions] {
            ids.sort_unstable();
            let twice = ids.windows(2).find(|pair| pair[0] == pair[1]);
            ensure!(twice.is_none() && ids.first() != Some(&0), "invalid queue numbers {ids:?}");
        }
        Ok(())
    }
}

pub(super) struct Group {
    pub(super) completion: CompletionQueue,
    pub(super) submissions: Vec<SubmissionQueue>,
    shared: Arc<Shared>,
    channel: Box<dyn Channel>,
    /// Indexed by the lower half of a tag. The upper half numbers the requests of a command.
    pending: Vec<Option<Pending>>,
    free: Vec<u32>,
    commands: Vec<Command>,
    done: Vec<Completion>,
    spare: Vec<Vec<Piece>>,
    /// Requests were pushed since the last `submit`.
    pushed: bool,
    /// Requests that the channel holds.
    asked: usize,
}

impl Group {
    pub(super) fn new(shared: Arc<Shared>, completion: CompletionQueue) -> anyhow::Result<Self> {
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

    /// Readable when a request is finished.
    pub(super) fn event(&self) -> RawFd {
        self.channel.event().as_raw_fd()
    }

    pub(super) fn has_single_request(&self) -> bool {
        self.asked == 1
    }

    /// Returns whether there was work.
    pub(super) fn pass(&mut self) -> bool {
        let worked = self.reap();
        // After a fatal error, nothing more is started.
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
            queue.read_tail(&shared.bells, &shared.memory)?;
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
        self.completion.notify(&shared.bells);
        Ok(worked)
    }

    fn start(&mut self, queue: u16, command: &Command) {
        let mut pieces = self.spare.pop().unwrap_or_default();
        let work = io::plan(&self.shared, command, &mut pieces);
        let status = work.as_ref().err().copied().unwrap_or(Status::SUCCESS);
        let nothing =
            DiskRequests { operation: Operation::Flush, ranges: Vec::new(), flush: false };
        let DiskRequests { operation, ranges, flush } = work.unwrap_or(nothing);
        let left = u32::try_from(ranges.len()).expect("a command has at most 256 ranges");
        let (id, opcode, block) = (command.id(), command.opcode(), command.slba());
        let cost = io::requests(command);
        let pending = Pending { queue, id, opcode, block, left, cost, flush, status };
        if ranges.is_empty() {
            self.recycle(pieces);
            self.end(&pending);
            return;
        }
        let slot = self.insert(pending);
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

    fn insert(&mut self, pending: Pending) -> u32 {
        if let Some(slot) = self.free.pop() {
            self.pending[slot as usize] = Some(pending);
            return slot;
        }
        self.pending.push(Some(pending));
        u32::try_from(self.pending.len() - 1).expect("the commands in flight are bounded")
    }

    fn recycle(&mut self, mut pieces: Vec<Piece>) {
        if self.spare.len() < MAX_SPARE {
            pieces.clear();
            self.spare.push(pieces);
        }
    }

    /// Returns whether any requests had finished.
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

    fn finish(&mut self, done: Completion) {
        let Completion { tag, result, pieces } = done;
        let pending = self.pending_of(tag);
        pending.left -= 1;
        if let (Err(fault), false) = (result, pending.status.is_error()) {
            pending.status = io::status(fault, pending.opcode);
        }
        if pending.left > 0 {
            self.recycle(pieces);
            return;
        }
        let flush = mem::take(&mut pending.flush) && !pending.status.is_error();
        if flush {
            pending.left = 1;
            self.push(Request { tag, operation: Operation::Flush, offset: 0, length: 0, pieces });
            return;
        }
        self.recycle(pieces);
        self.close(tag);
    }

    fn pending_of(&mut self, tag: u64) -> &mut Pending {
        let pending = self.pending.get_mut(slot_of(tag)).and_then(Option::as_mut);
        pending.expect("a channel returns each tag once")
    }

    /// Answers a command that has no requests left.
    fn close(&mut self, tag: u64) {
        let slot = slot_of(tag);
        let ended = self.pending[slot].take().expect("a command ends once");
        self.free.push(u32::try_from(slot).expect("half a tag"));
        self.end(&ended);
    }

    fn end(&mut self, pending: &Pending) {
        let Pending { queue, id, block, cost, mut status, .. } = *pending;
        let from = self.submissions.iter_mut().find(|it| it.id == queue);
        let from = from.expect("a queue with commands in flight is not deleted");
        from.answered(cost);
        let head = u16::try_from(from.head).expect("a queue has at most 1024 entries");
        if status.is_error() {
            status = status.logged();
            self.shared.health().record(ErrorEntry { queue, id, status, block });
        }
        let done = Completed { result: 0, queue, head, id, status };
        let shared = &self.shared;
        if self.completion.post(done, &shared.bells, &shared.memory).is_err() {
            shared.fail();
        }
    }

    /// Called before sleep. Returns true if there is no work and new work will wake the thread.
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
            // The next pass handles queues that cannot be read any more.
            queue.request_ring(&shared.memory).is_ok()
                && queue.read_tail(&shared.bells, &shared.memory).is_ok()
                && !queue.has_more()
        })
    }

    /// Ends all commands of a submission queue: waits for requests in flight, aborts those not
    /// started. Commands that were fetched when the rest could not be read have no requests.
    pub(super) fn abort_queue(&mut self, queue: u16) {
        let mut others = Vec::new();
        let has_commands = |it: &SubmissionQueue| it.id == queue && it.in_flight > 0;
        while self.asked > 0 && self.submissions.iter().any(has_commands) {
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

    /// Takes back requests that the channel has not started.
    fn withdraw(&mut self) -> Vec<Request> {
        let requests = self.channel.withdraw();
        self.asked -= requests.len();
        requests
    }

    /// Handles finished requests. Blocks once if nothing has finished yet.
    fn wait(&mut self) {
        if !self.reap() && self.asked > 0 {
            disk::wait(self.channel.as_ref());
        }
    }

    /// Waits for requests in flight, and returns the state to save.
    pub(super) fn save(mut self) -> SavedState {
        // Indexed by slot, like `pending`.
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
        // Read at the end, because other requests of a command may have finished or failed
        // meanwhile.
        let mut pending =
            |slot: usize| self.pending[slot].take().expect("suspended commands have not ended");
        let kept: Vec<_> =
            kept.map(|(slot, requests)| Suspended { pending: pending(slot), requests }).collect();
        let Self { mut completion, submissions, shared, .. } = self;
        completion.notify(&shared.bells);
        completion.update_head(&shared.bells, &shared.memory);
        let look = |mut queue: SubmissionQueue| {
            // If the shadow doorbell cannot be read, the last known tail is used.
            queue.read_tail(&shared.bells, &shared.memory).ok();
            queue
        };
        let submissions = submissions.into_iter().map(look).collect();
        SavedState { completion, submissions, kept }
    }

    /// The requests of the saved group start again.
    pub(super) fn restore(shared: Arc<Shared>, saved: SavedState) -> anyhow::Result<Self> {
        let SavedState { completion, submissions, kept } = saved;
        let queues = shared.queues;
        ensure!(completion.is_valid(queues, MAX_ENTRIES), "a completion queue is invalid");
        let valid = submissions.iter().all(|it| it.is_valid(queues, MAX_ENTRIES));
        ensure!(valid, "a submission queue is invalid");
        let mut group = Self { submissions, ..Self::new(shared, completion)? };
        for Suspended { mut pending, requests } in kept {
            let queue = group.submissions.iter_mut().find(|it| it.id == pending.queue);
            let queue = queue.context("a command without a queue")?;
            ensure!((1..=MAX_RANGES).contains(&requests.len()), "a command without requests");
            pending.left = u32::try_from(requests.len()).expect("at most 256");
            pending.cost = pending.left;
            queue.in_flight += 1;
            queue.requests += pending.cost;
            let slot = group.insert(pending);
            for (part, request) in (0..).zip(requests) {
                group.push(Request { tag: tag(slot, part), ..request });
            }
        }
        Ok(group)
    }

    pub(super) fn connect(&self, waker: &Arc<Waker>) {
        let bells = &self.shared.bells;
        self.completion.resume(bells, waker);
        for queue in &self.submissions {
            bells.tail(queue.id).open(queue.size, queue.tail, waker);
        }
    }

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
