//! A request queue: takes commands, passes them to the image, and answers them (VIRTIO 1.3,
//! 5.6.6.1).

use std::collections::VecDeque;
use std::mem;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard};

use super::target::{FAILURE, OK, OVERRUN, Refusal, Target};
use super::{QUEUE_SIZE, Sizes};
use crate::poller::Serve;
use crate::scsi::{self, Cdb, Plan, Sense};
use crate::virtio::{Chain, Queue, length};
use host::disk::{Channel, Completion, Fault, Operation, Request, wait};
use host::memory::{Piece, subrange};

/// Bytes of a request before its command, and of a response before its sense data.
const HEADER_SIZE: usize = 19;
const RESPONSE_SIZE: u32 = 12;

/// No command is started while the channel has this many requests of one queue. An UNMAP has a
/// request for each of its ranges, every other command has at most one.
const MAX_REQUESTS: usize = 256;

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;

struct Header {
    lun: [u8; 8],
    id: u64,
    cdb: Cdb,
}

/// A command that has not been started, and the buffer for its response.
struct Offered {
    chain: Chain,
    header: Header,
    response: Vec<Piece>,
}

struct Job {
    chain: Chain,
    /// The driver's tag, which task management refers to.
    id: u64,
    response: Vec<Piece>,
    /// Length of the driver's data buffer, and number of bytes that a successful command moves.
    room: u64,
    moved: u64,
    /// Data moves to the driver.
    inward: bool,
    /// Channel requests that are not finished yet.
    parts: usize,
    /// The response to send, if the driver aborted the command.
    aborted: Option<u8>,
    result: Result<(), Refusal>,
}

/// State of the thread that serves one queue.
pub(super) struct Server {
    queue: Queue,
    channel: Box<dyn Channel>,
    target: Arc<Target>,
    sizes: Sizes,
    /// Commands that wait for the channel, in order.
    offered: VecDeque<Offered>,
    /// Commands in flight, indexed by the head of their chain.
    jobs: Vec<Option<Job>>,
    in_flight: usize,
    /// Number of requests that the channel holds.
    asked: usize,
    done: Vec<Completion>,
}

impl Server {
    pub(super) fn new(queue: Queue, target: Arc<Target>, sizes: Sizes) -> anyhow::Result<Self> {
        let channel = target.drive.image.channel(&queue.memory)?;
        let jobs = std::iter::repeat_with(|| None).take(QUEUE_SIZE.into()).collect();
        let (offered, done) = Default::default();
        let (in_flight, asked) = (0, 0);
        Ok(Self { queue, channel, target, sizes, offered, jobs, in_flight, asked, done })
    }

    /// Starts as many commands as allowed. Returns whether the driver offered any.
    fn take(&mut self) -> bool {
        let mut any = false;
        while let Some(mut chain) = self.queue.pop() {
            any = true;
            let header = self.header(&mut chain);
            let response = chain.take_writable(RESPONSE_SIZE + self.sizes.sense);
            let (Some(header), Some(response)) = (header, response) else {
                self.queue.return_chain(chain);
                self.queue.fail("a request without a command, or without room for its response");
                break;
            };
            self.offered.push_back(Offered { chain, header, response });
        }
        self.start_offered();
        any
    }

    /// Returns whether a command was started.
    fn start_offered(&mut self) -> bool {
        let mut any = false;
        while self.asked < MAX_REQUESTS
            && let Some(offered) = self.offered.pop_front()
        {
            any = true;
            self.start(offered);
        }
        any
    }

    fn header(&self, chain: &mut Chain) -> Option<Header> {
        let memory = &self.queue.memory;
        let [l0, l1, l2, l3, l4, l5, l6, l7, i0, i1, i2, i3, i4, i5, i6, i7, ..] =
            chain.take::<HEADER_SIZE>(memory).ok()?;
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

    fn start(&mut self, offered: Offered) {
        let Offered { chain, header, response } = offered;
        let (readable, writable) = (length(&chain.readable), length(&chain.writable));
        let mut job = Job::new(chain, header.id, response);
        self.in_flight += 1;
        let planned = if readable > 0 && writable > 0 {
            // Bidirectional commands need INOUT, which is not offered.
            Err(Refusal::Response(FAILURE))
        } else {
            let planned = self.target.plan(header.lun, &header.cdb);
            planned.and_then(|plan| self.requests(plan, &header.cdb, &mut job))
        };
        match planned {
            Ok(requests) if !requests.is_empty() => {
                job.parts = requests.len();
                let head = usize::from(job.chain.head);
                self.jobs[head] = Some(job);
                self.asked += requests.len();
                requests.into_iter().for_each(|request| self.channel.push(request));
            }
            Ok(_) => self.end(job),
            Err(refusal) => self.end(Job { result: Err(refusal), ..job }),
        }
    }

    /// Empty if the plan is complete without the channel.
    fn requests(&self, plan: Plan, cdb: &Cdb, job: &mut Job) -> Result<Vec<Request>, Refusal> {
        let (tag, memory) = (u64::from(job.chain.head), &self.queue.memory);
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
            Plan::Transfer(it) => {
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

    /// Returns whether the channel had finished any requests.
    fn answer(&mut self) -> bool {
        let mut done = mem::take(&mut self.done);
        self.channel.reap(&mut done);
        let any = !done.is_empty();
        done.drain(..).for_each(|one| self.account(one));
        self.done = done;
        any
    }

    fn account(&mut self, one: Completion) {
        self.asked -= 1;
        let head = head(one.tag);
        // The tags come from this file, so each has its job.
        let Some(job) = self.jobs.get_mut(head).and_then(Option::as_mut) else { return };
        if let Err(fault) = one.result {
            job.result = Err(Refusal::Sense(match fault {
                // The range was checked against the disk, so the guest's memory is at fault.
                Fault::Refused if job.moved > 0 => Sense::ABORTED,
                fault => scsi::sense_for(fault, !job.inward),
            }));
        }
        job.parts -= 1;
        if job.parts == 0
            && let Some(mut job) = self.jobs[head].take()
        {
            // Reuses the vector for the next chain.
            job.chain.readable = one.pieces;
            if let Some(response) = job.aborted {
                job.result = Err(Refusal::Response(response));
            }
            self.end(job);
        }
    }

    fn end(&mut self, job: Job) {
        self.in_flight -= 1;
        let moved = if job.result.is_ok() { job.moved } else { 0 };
        let (status, response, mut sense) = match job.result {
            Ok(()) => (GOOD, OK, Vec::new()),
            Err(Refusal::Sense(sense)) => (CHECK_CONDITION, OK, sense.data(false)),
            Err(Refusal::Response(response)) => (GOOD, response, Vec::new()),
        };
        sense.truncate(self.sizes.sense as usize);
        let word = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        let (sense_length, left) = (word(sense.len() as u64), word(job.room - moved));
        let mut bytes = [&sense_length[..], &left, &[0, 0, status, response], &sense].concat();
        bytes.resize((RESPONSE_SIZE + self.sizes.sense) as usize, 0);
        // A response buffer outside of memory is ignored: only the guest misses the response.
        self.queue.memory.scatter(&job.response, &bytes).ok();
        let written = bytes.len() as u64 + if job.inward { moved } else { 0 };
        self.queue.push(job.chain, u32::try_from(written).unwrap_or(u32::MAX));
    }

    /// Whether a task with this tag is in flight. None stands for any task.
    pub(super) fn has(&mut self, id: Option<u64>) -> bool {
        self.start_all();
        let offered = self.offered.iter().map(|it| it.header.id);
        let mut ids = offered.chain(self.jobs.iter().flatten().map(|job| job.id));
        ids.any(|it| matches(it, id))
    }

    /// Ends the task with this tag, or all tasks, with this response. Returns when no such task is
    /// in flight.
    pub(super) fn abort(&mut self, id: Option<u64>, response: u8) {
        self.start_all();
        let offered = mem::take(&mut self.offered).into_iter();
        let (ended, left) = offered.partition::<VecDeque<_>, _>(|it| matches(it.header.id, id));
        self.offered = left;
        ended.into_iter().for_each(|it| self.refuse(it, response));
        let selected = self.jobs.iter_mut().flatten().filter(|job| matches(job.id, id));
        selected.for_each(|job| job.aborted = Some(response));
        while self.jobs.iter().flatten().any(|job| job.aborted.is_some()) {
            // Repeated on each pass: a request in flight may start to wait for space or for its
            // turn.
            for request in self.channel.withdraw() {
                let job = self.jobs.get(head(request.tag)).and_then(Option::as_ref);
                if job.is_none_or(|job| job.aborted.is_some()) {
                    let Request { tag, pieces, .. } = request;
                    self.account(Completion { tag, result: Ok(()), pieces });
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
        self.start_offered();
        self.channel.submit();
        self.queue.notify();
    }

    /// Ends a command that has not been started.
    fn refuse(&mut self, offered: Offered, response: u8) {
        let Offered { chain, header, response: at } = offered;
        let result = Err(Refusal::Response(response));
        self.in_flight += 1;
        self.end(Job { result, ..Job::new(chain, header.id, at) });
    }

    /// Starts the commands that were offered before a control request.
    fn start_all(&mut self) {
        self.take();
        self.channel.submit();
    }

    /// Waits for commands in flight. Commands that the channel has not started stay in the queue.
    fn finish(mut self) -> Queue {
        // The first command is undone last, so that it is taken first again.
        mem::take(&mut self.offered)
            .into_iter()
            .rev()
            .for_each(|it| self.queue.return_chain(it.chain));
        while self.in_flight > 0 {
            // Repeated on each pass: a request in flight may start to wait for space.
            for request in self.channel.withdraw() {
                if let Some(job) = self.jobs.get_mut(head(request.tag)).and_then(Option::take) {
                    self.in_flight -= 1;
                    self.queue.return_chain(job.chain);
                }
            }
            self.channel.submit();
            if self.in_flight > 0 && !self.answer() {
                wait(self.channel.as_ref());
            }
        }
        self.queue.notify();
        self.queue
    }
}

impl Job {
    fn new(chain: Chain, id: u64, response: Vec<Piece>) -> Self {
        let (readable, writable) = (length(&chain.readable), length(&chain.writable));
        Self {
            chain,
            id,
            response,
            room: readable.max(writable),
            moved: 0,
            inward: readable == 0,
            parts: 0,
            aborted: None,
            result: Ok(()),
        }
    }

    /// Takes the data buffer, cut to `wanted` bytes. Fails if it is shorter.
    fn data(&mut self, write: bool, wanted: u64) -> Result<Vec<Piece>, Refusal> {
        let pieces = if write { &mut self.chain.readable } else { &mut self.chain.writable };
        let there = length(pieces);
        if there < wanted {
            return Err(Refusal::Response(OVERRUN));
        }
        self.moved = wanted;
        Ok(if there > wanted { subrange(pieces, 0, wanted) } else { mem::take(pieces) })
    }
}

fn matches(task: u64, id: Option<u64>) -> bool {
    id.is_none_or(|id| id == task)
}

fn head(tag: u64) -> usize {
    usize::try_from(tag & 0xffff).unwrap_or(usize::MAX)
}

fn plain(tag: u64, operation: Operation, (offset, length): (u64, u64)) -> Request {
    Request { tag, operation, offset, length, pieces: Vec::new() }
}

/// A server that its own thread runs, and in which the control thread aborts tasks.
pub(super) struct SharedServer(pub(super) Arc<Mutex<Server>>);

impl SharedServer {
    fn server(&self) -> MutexGuard<'_, Server> {
        self.0.lock().expect("no device panicked")
    }

    pub(super) fn finish(self) -> Queue {
        let server = Arc::into_inner(self.0).expect("the other one was stopped before");
        server.into_inner().expect("no device panicked").finish()
    }
}

impl Serve for SharedServer {
    fn serve(&mut self) -> bool {
        let mut server = self.server();
        let taken = server.take();
        if taken {
            server.channel.submit();
        }
        let answered = server.answer();
        if answered && server.start_offered() {
            server.channel.submit();
        }
        server.queue.notify();
        taken || answered
    }

    fn has_single_request(&self) -> bool {
        self.server().in_flight == 1
    }

    fn enable_doorbells(&mut self) -> bool {
        self.server().queue.enable_doorbell()
    }

    fn disable_doorbells(&mut self) {
        self.server().queue.disable_doorbell();
    }

    fn events(&self) -> Vec<RawFd> {
        let server = self.server();
        vec![server.queue.bell.as_raw_fd(), server.channel.event().as_raw_fd()]
    }

    fn clear_events(&mut self) {
        self.server().queue.bell.read().ok();
    }
}
