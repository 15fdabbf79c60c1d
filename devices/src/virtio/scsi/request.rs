//! A request queue: commands, and their way to the image and back (VIRTIO 1.3, 5.6.6.1).

use std::collections::VecDeque;
use std::mem;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard};

use super::target::{FAILURE, OK, OVERRUN, Refusal, Target};
use super::{QUEUE_SIZE, Sizes};
use crate::poller::Serve;
use crate::scsi::{self, Cdb, Plan, Sense};
use crate::virtio::{Chain, Queue, length};
use host::disk::{Channel, Done, Fault, Operation, Request, wait};
use host::memory::{Piece, part};

/// Bytes of a request before its command, and of a response before its sense data.
const HEADER: usize = 19;
const RESPONSE: u32 = 12;

/// No command is begun while the channel has this many requests of its queue. An UNMAP has one for
/// each of its ranges, every other command has one.
const REQUESTS: usize = 256;

/// The statuses of a command.
const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;

/// A request as the driver wrote it.
struct Header {
    lun: [u8; 8],
    id: u64,
    cdb: Cdb,
}

/// A command that has not begun, and where its response goes.
struct Offered {
    chain: Chain,
    header: Header,
    response: Vec<Piece>,
}

/// A command that is under way.
struct Job {
    chain: Chain,
    /// By which the driver names it when it wants it to end.
    id: u64,
    /// Where the response goes.
    response: Vec<Piece>,
    /// Bytes that the driver gives or has room for, and those that move if all goes well.
    room: u64,
    moved: u64,
    /// Whether these go to the driver.
    inward: bool,
    /// What is still to come from the channel.
    parts: usize,
    /// The driver wants it to end, and this is what it hears.
    aborted: Option<u8>,
    result: Result<(), Refusal>,
}

/// One queue, and the thread's way to the image.
pub(super) struct Server {
    queue: Queue,
    channel: Box<dyn Channel>,
    target: Arc<Target>,
    sizes: Sizes,
    /// Commands that the channel has no room for yet, in their order.
    offered: VecDeque<Offered>,
    /// By the head of their chain.
    jobs: Vec<Option<Job>>,
    under_way: usize,
    /// Requests that the channel has.
    asked: usize,
    done: Vec<Done>,
}

impl Server {
    pub(super) fn new(queue: Queue, target: Arc<Target>, sizes: Sizes) -> anyhow::Result<Self> {
        let channel = target.drive.image().channel(queue.memory())?;
        let jobs = std::iter::repeat_with(|| None).take(QUEUE_SIZE.into()).collect();
        let (offered, done) = Default::default();
        let (under_way, asked) = (0, 0);
        Ok(Self { queue, channel, target, sizes, offered, jobs, under_way, asked, done })
    }

    /// Takes everything that is offered, and begins as much of it as it may.
    fn take(&mut self) -> bool {
        let mut any = false;
        while let Some(mut chain) = self.queue.pop() {
            any = true;
            let header = self.header(&mut chain);
            let response = chain.take_room(RESPONSE + self.sizes.sense);
            let (Some(header), Some(response)) = (header, response) else {
                self.queue.undo(chain);
                self.queue.fail("a request without a command, or without room for its response");
                break;
            };
            self.offered.push_back(Offered { chain, header, response });
        }
        self.begin_offered();
        any
    }

    /// True when something began.
    fn begin_offered(&mut self) -> bool {
        let mut any = false;
        while self.asked < REQUESTS
            && let Some(offered) = self.offered.pop_front()
        {
            any = true;
            self.begin(offered);
        }
        any
    }

    fn header(&self, chain: &mut Chain) -> Option<Header> {
        let memory = self.queue.memory();
        let [l0, l1, l2, l3, l4, l5, l6, l7, i0, i1, i2, i3, i4, i5, i6, i7, ..] =
            chain.take::<HEADER>(memory).ok()?;
        let mut cdb = Cdb::default();
        let known = cdb.len().min(usize::try_from(self.sizes.cdb).ok()?);
        memory.gather(&chain.readable, &mut cdb[..known]).ok()?;
        if length(&chain.readable) < self.sizes.cdb.into() {
            return None;
        }
        chain.skip(self.sizes.cdb);
        let id = u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]);
        Some(Header { lun: [l0, l1, l2, l3, l4, l5, l6, l7], id, cdb })
    }

    fn begin(&mut self, offered: Offered) {
        let Offered { chain, header, response } = offered;
        let (gives, wants) = (length(&chain.readable), length(&chain.writable));
        let mut job = Job::new(chain, header.id, response);
        self.under_way += 1;
        let planned = if gives > 0 && wants > 0 {
            // Both ways at once: that was not offered (INOUT).
            Err(Refusal::Response(FAILURE))
        } else {
            let planned = self.target.plan(header.lun, &header.cdb);
            planned.and_then(|plan| self.requests(plan, &header.cdb, &mut job))
        };
        match planned {
            Ok(requests) if !requests.is_empty() => {
                job.parts = requests.len();
                let head = usize::from(job.chain.head());
                self.jobs[head] = Some(job);
                self.asked += requests.len();
                requests.into_iter().for_each(|request| self.channel.push(request));
            }
            Ok(_) => self.end(job),
            Err(refusal) => self.end(Job { result: Err(refusal), ..job }),
        }
    }

    /// What the channel is asked for a plan; nothing when that is done with.
    fn requests(&self, plan: Plan, cdb: &Cdb, job: &mut Job) -> Result<Vec<Request>, Refusal> {
        let (tag, memory) = (u64::from(job.chain.head()), self.queue.memory());
        let failed = |_| Refusal::Response(FAILURE);
        match plan {
            Plan::Done | Plan::Eject => Ok(Vec::new()),
            Plan::Answer(mut data) => {
                let room = length(&job.chain.writable);
                data.truncate(usize::try_from(room).unwrap_or(usize::MAX));
                memory.scatter(&job.chain.writable, &data).map_err(failed)?;
                job.moved = data.len() as u64;
                Ok(Vec::new())
            }
            Plan::Move(it) => {
                let operation = if it.write {
                    Operation::Write { durable: it.durable }
                } else {
                    Operation::Read
                };
                let pieces = job.data(it.write, it.length)?;
                let (offset, length) = (it.offset, it.length);
                Ok(vec![Request { tag, operation, offset, length, pieces }])
            }
            Plan::Parameters(length) => {
                let pieces = job.data(true, length as u64)?;
                let mut data = vec![0; length];
                memory.gather(&pieces, &mut data).map_err(failed)?;
                let plan = self.target.parameters(cdb, &data)?;
                self.requests(plan, cdb, job)
            }
            Plan::Clear(operation, ranges) => {
                let ranges = (0..).zip(ranges);
                Ok(ranges.map(|(part, it)| plain(tag | part << 16, operation, it)).collect())
            }
            Plan::Flush => Ok(vec![plain(tag, Operation::Flush, (0, 0))]),
        }
    }

    /// Answers what the channel has done.
    fn answer(&mut self) -> bool {
        let mut done = mem::take(&mut self.done);
        self.channel.reap(&mut done);
        let any = !done.is_empty();
        done.drain(..).for_each(|one| self.account(one));
        self.done = done;
        any
    }

    /// A part of a command is over.
    fn account(&mut self, one: Done) {
        self.asked -= 1;
        let head = head(one.tag);
        // Tags are ours, so each has its job.
        let Some(job) = self.jobs.get_mut(head).and_then(Option::as_mut) else { return };
        if let Err(fault) = one.result {
            job.result = Err(Refusal::Sense(match fault {
                // What lies within the medium was checked: it is the guest's memory.
                Fault::Refused if job.moved > 0 => Sense::ABORTED,
                fault => scsi::fault(fault, !job.inward),
            }));
        }
        job.parts -= 1;
        if job.parts == 0
            && let Some(mut job) = self.jobs[head].take()
        {
            // The vector is of use for the next chain.
            job.chain.readable = one.pieces;
            if let Some(response) = job.aborted {
                job.result = Err(Refusal::Response(response));
            }
            self.end(job);
        }
    }

    fn end(&mut self, job: Job) {
        self.under_way -= 1;
        let moved = if job.result.is_ok() { job.moved } else { 0 };
        let (status, response, mut sense) = match job.result {
            Ok(()) => (GOOD, OK, Vec::new()),
            Err(Refusal::Sense(sense)) => (CHECK_CONDITION, OK, sense.data(false)),
            Err(Refusal::Response(response)) => (GOOD, response, Vec::new()),
        };
        sense.truncate(self.sizes.sense as usize);
        let word = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        let (told, left) = (word(sense.len() as u64), word(job.room - moved));
        let mut bytes = [&told[..], &left, &[0, 0, status, response], &sense].concat();
        bytes.resize((RESPONSE + self.sizes.sense) as usize, 0);
        // A response that is not in memory is the guest's loss.
        self.queue.memory().scatter(&job.response, &bytes).ok();
        let written = bytes.len() as u64 + if job.inward { moved } else { 0 };
        self.queue.push(job.chain, u32::try_from(written).unwrap_or(u32::MAX));
    }

    /// Whether a task of this name is under way, or any.
    pub(super) fn has(&mut self, id: Option<u64>) -> bool {
        self.begin_all();
        let offered = self.offered.iter().map(|it| it.header.id);
        let mut ids = offered.chain(self.jobs.iter().flatten().map(|job| job.id));
        ids.any(|it| is(it, id))
    }

    /// Ends a task, or all of them, with this response: nothing of it is under way afterwards.
    pub(super) fn abort(&mut self, id: Option<u64>, response: u8) {
        self.begin_all();
        let offered = mem::take(&mut self.offered).into_iter();
        let (ended, left) = offered.partition::<VecDeque<_>, _>(|it| is(it.header.id, id));
        self.offered = left;
        ended.into_iter().for_each(|it| self.refuse(it, response));
        let meant = self.jobs.iter_mut().flatten().filter(|job| is(job.id, id));
        meant.for_each(|job| job.aborted = Some(response));
        while self.jobs.iter().flatten().any(|job| job.aborted.is_some()) {
            // Each time: what is under way may come to wait for room, or for its turn.
            for request in self.channel.withdraw() {
                let job = self.jobs.get(head(request.tag)).and_then(Option::as_ref);
                if job.is_none_or(|job| job.aborted.is_some()) {
                    let Request { tag, pieces, .. } = request;
                    self.account(Done { tag, result: Ok(()), pieces });
                } else {
                    self.channel.push(request);
                }
            }
            self.channel.submit();
            let over = self.jobs.iter().flatten().all(|job| job.aborted.is_none());
            if !over && !self.answer() {
                wait(self.channel.as_ref());
            }
        }
        self.begin_offered();
        self.channel.submit();
        self.queue.notify();
    }

    /// Ends a command that has not begun.
    fn refuse(&mut self, offered: Offered, response: u8) {
        let Offered { chain, header, response: at } = offered;
        let result = Err(Refusal::Response(response));
        self.under_way += 1;
        self.end(Job { result, ..Job::new(chain, header.id, at) });
    }

    /// What the driver offered before it asked for something else.
    fn begin_all(&mut self) {
        self.take();
        self.channel.submit();
    }

    /// Waits for what is under way, and leaves what waits for room or for its turn in the queue.
    fn finish(mut self) -> Queue {
        // The first one is undone last: it is the first to be taken again.
        mem::take(&mut self.offered).into_iter().rev().for_each(|it| self.queue.undo(it.chain));
        while self.under_way > 0 {
            // Each time: what is under way may come to wait for room too.
            for request in self.channel.withdraw() {
                if let Some(job) = self.jobs.get_mut(head(request.tag)).and_then(Option::take) {
                    self.under_way -= 1;
                    self.queue.undo(job.chain);
                }
            }
            self.channel.submit();
            if self.under_way > 0 && !self.answer() {
                wait(self.channel.as_ref());
            }
        }
        self.queue.notify();
        self.queue
    }
}

impl Job {
    fn new(chain: Chain, id: u64, response: Vec<Piece>) -> Self {
        let (gives, wants) = (length(&chain.readable), length(&chain.writable));
        Self {
            chain,
            id,
            response,
            room: gives.max(wants),
            moved: 0,
            inward: gives == 0,
            parts: 0,
            aborted: None,
            result: Ok(()),
        }
    }

    /// Takes the pieces of what moves. The driver may have more of them, but not fewer.
    fn data(&mut self, write: bool, wanted: u64) -> Result<Vec<Piece>, Refusal> {
        let pieces = if write { &mut self.chain.readable } else { &mut self.chain.writable };
        let there = length(pieces);
        if there < wanted {
            return Err(Refusal::Response(OVERRUN));
        }
        self.moved = wanted;
        Ok(if there > wanted { part(pieces, 0, wanted) } else { mem::take(pieces) })
    }
}

/// Whether a task is meant by this name, or by none.
fn is(task: u64, id: Option<u64>) -> bool {
    id.is_none_or(|id| id == task)
}

fn head(tag: u64) -> usize {
    usize::try_from(tag & 0xffff).unwrap_or(usize::MAX)
}

fn plain(tag: u64, operation: Operation, (offset, length): (u64, u64)) -> Request {
    Request { tag, operation, offset, length, pieces: Vec::new() }
}

/// A server that its own thread runs, and in which another one ends tasks.
pub(super) struct Locked(pub(super) Arc<Mutex<Server>>);

impl Locked {
    fn server(&self) -> MutexGuard<'_, Server> {
        self.0.lock().expect("no device panicked")
    }

    pub(super) fn finish(self) -> Queue {
        let server = Arc::into_inner(self.0).expect("the other one was stopped before");
        server.into_inner().expect("no device panicked").finish()
    }
}

impl Serve for Locked {
    fn serve(&mut self) -> bool {
        let mut server = self.server();
        let taken = server.take();
        if taken {
            server.channel.submit();
        }
        let answered = server.answer();
        if answered && server.begin_offered() {
            server.channel.submit();
        }
        server.queue.notify();
        taken || answered
    }

    fn awaits(&self) -> bool {
        self.server().under_way == 1
    }

    fn listen(&mut self) -> bool {
        self.server().queue.listen()
    }

    fn quiet(&mut self) {
        self.server().queue.quiet();
    }

    fn events(&self) -> Vec<RawFd> {
        let server = self.server();
        vec![server.queue.bell().as_raw_fd(), server.channel.event().as_raw_fd()]
    }

    fn heard(&mut self) {
        self.server().queue.bell().read().ok();
    }
}
