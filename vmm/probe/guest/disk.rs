//! `disk=MODE,KEY=NUMBER,…`: drives the first disk of the machine, and verifies its data.
use crate::Session;
use crate::ahci::Ahci;
use crate::cpu::Cpu;
use crate::io::tsc;
use crate::memory::{Room, fill, numbers};
use crate::nvme::Nvme;
use crate::pattern::Pattern;
use crate::random::Random;
use crate::records;
use crate::report::Finding;
use crate::start::{Start, Words, number};
use crate::timer;
use crate::virtio_blk::VirtioBlk;
use crate::waiting::{NO_INTERRUPTS, Waiting, by_interrupt, waits_by_interrupt};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
    Flush,
}

/// Offset and length are in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) operation: Operation,
    pub(crate) offset: u64,
    pub(crate) address: u64,
    pub(crate) length: u32,
}

impl Request {
    pub(crate) const FLUSH: Self =
        Self { operation: Operation::Flush, offset: 0, address: 0, length: 0 };
}

pub(crate) struct Shape {
    pub(crate) kind: &'static str,
    pub(crate) bytes: u64,
    /// Requests are multiples of this number of bytes.
    pub(crate) sector: u64,
    /// Maximum number of requests in flight.
    pub(crate) depth: usize,
    pub(crate) interrupts: bool,
}

/// A disk driver. Requests have tags, from 0 to the depth of the disk.
pub(crate) trait Disk {
    fn shape(&self) -> Shape;
    /// Adds `by` to the addresses of the registers, after their BAR moved.
    fn moved(&mut self, by: u64);
    /// Sets whether each write must be durable when it completes. Returns false if the disk does
    /// not support this.
    fn write_through(&mut self, on: bool) -> bool;
    /// Queues a request under a free tag. The disk may ignore it until [`Disk::ring`].
    fn put(&mut self, tag: usize, request: &Request);
    fn ring(&mut self);
    /// Requests an interrupt for the next answer.
    fn request_interrupt(&mut self);
    /// The tag of a completed request, and whether it succeeded.
    fn done(&mut self) -> Option<(usize, bool)>;
}

/// Maximum number of requests in flight.
pub(crate) const DEPTH: usize = 64;
/// A disk that completes nothing for this long is considered dead.
const TIMEOUT_SECONDS: u64 = 16;
/// Number of latencies that are kept.
const LATENCIES: u64 = 1 << 16;

/// A parsed value of `disk=`.
pub(crate) struct Job {
    mode: &'static str,
    pub(crate) seed: u64,
    pub(crate) depth: u64,
    pub(crate) block: u64,
    pub(crate) span: u64,
    requests: u64,
    pub(crate) every: u64,
    pub(crate) durable: u64,
    pub(crate) through: u64,
    by_interrupt: bool,
    seconds: u64,
}

impl Job {
    pub(crate) fn parse(words: &'static str) -> Option<Self> {
        let mut words = words.split(',');
        let mode = words.next()?;
        let mut job = Self {
            mode,
            seed: 1,
            depth: 1,
            block: 4096,
            span: 16 << 20,
            requests: 0,
            every: 8,
            durable: 0,
            through: 0,
            by_interrupt: false,
            seconds: 0,
        };
        for word in words {
            let (key, value) = word.split_once('=')?;
            let field = match key {
                "seed" => &mut job.seed,
                "depth" => &mut job.depth,
                "block" => &mut job.block,
                "span" => &mut job.span,
                "requests" => &mut job.requests,
                "every" => &mut job.every,
                "durable" => &mut job.durable,
                "through" => &mut job.through,
                "seconds" => &mut job.seconds,
                "wait" => {
                    job.by_interrupt = by_interrupt(value)?;
                    continue;
                }
                _ => return None,
            };
            *field = number(value)?;
        }
        let fits = job.block % 512 == 0 && (512..=1 << 20).contains(&job.block);
        let some = job.span == 0 || job.span >= job.block;
        (fits && some && job.every > 0).then_some(job)
    }

    pub(crate) fn places(&self) -> u64 {
        self.span / self.block
    }
}

/// Executes all `disk=` words in order.
pub(crate) fn run(session: &mut Session, start: &Start, cpu: &Cpu, words: Words) {
    if words.get("disk").is_none() {
        return;
    }
    let mut room = Room::find(start);
    let interrupts = waits_by_interrupt(words, "disk") && timer::switch_on().1;
    if let Some(at) = VirtioBlk::find()
        && let Some(mut disk) = VirtioBlk::open(at, &mut room, interrupts, cpu)
    {
        return all(session, &mut disk, words, cpu, &room);
    }
    if let Some(at) = Nvme::find()
        && let Some(mut disk) = Nvme::open(at, &mut room, interrupts, cpu)
    {
        return all(session, &mut disk, words, cpu, &room);
    }
    if let Some(at) = Ahci::find()
        && let Some(mut disk) = Ahci::open(at, &mut room, interrupts, cpu)
    {
        return all(session, &mut disk, words, cpu, &room);
    }
    session.add(Finding::check("disk", false).text("kind", "none that works"));
}

fn all(session: &mut Session, disk: &mut dyn Disk, words: Words, cpu: &Cpu, room: &Room) {
    for word in words.all("disk") {
        let Some(mut job) = Job::parse(word) else {
            session.add(Finding::check("disk", false).text("wants", "MODE,KEY=NUMBER,..."));
            return;
        };
        if job.span == 0 {
            let bytes = disk.shape().bytes;
            job.span = bytes - bytes % job.block;
        }
        let mut room = room.rest();
        let kind = disk.shape().kind;
        if job.by_interrupt && !disk.shape().interrupts {
            session.add(Finding::check("disk", false).text("wants", NO_INTERRUPTS));
            return;
        }
        let waiting = Waiting::new(job.by_interrupt, TIMEOUT_SECONDS, cpu);
        let finding = match Drive::new(disk, &job, waiting, &mut room) {
            Some(mut drive) => {
                let finding = run_job(session, &mut drive, &job, cpu, &mut room);
                drive.waiting.finish(finding)
            }
            None => Finding::check("disk", false)
                .text("wants", "a span, depth and block that fit the disk and the memory"),
        };
        session.add(finding.text("mode", job.mode).text("kind", kind));
    }
}

fn run_job(
    session: &mut Session,
    drive: &mut Drive,
    job: &Job,
    cpu: &Cpu,
    room: &mut Room,
) -> Finding {
    match job.mode {
        "write" | "verify" | "read" | "fill" => transfer(drive, job, cpu),
        "record" => records::write(session, drive, job),
        "recall" => records::check(drive, job, room),
        _ => Finding::check("disk", false).text("wants", "a mode that there is"),
    }
}

/// A disk, with a buffer for each request in flight.
pub(crate) struct Drive<'a> {
    disk: &'a mut dyn Disk,
    buffers: u64,
    /// Bytes from one buffer to the next.
    stride: u64,
    free: [usize; DEPTH],
    left: usize,
    depth: usize,
    latencies: &'static mut [u64],
    /// The request of each tag, and when it was made.
    asked: [(Request, u64); DEPTH],
    pub(crate) answered: u64,
    pub(crate) errors: u64,
    pub(crate) waiting: Waiting,
}

impl<'a> Drive<'a> {
    pub(crate) fn new(
        disk: &'a mut dyn Disk,
        job: &Job,
        waiting: Waiting,
        room: &mut Room,
    ) -> Option<Self> {
        let depth = usize::try_from(job.depth).ok()?;
        let shape = disk.shape();
        let fits = (1..=shape.depth.min(DEPTH)).contains(&depth)
            && (job.block..=shape.bytes).contains(&job.span)
            && job.block % shape.sector.max(512) == 0;
        if !fits || !disk.write_through(job.through != 0) {
            return None;
        }
        let stride = job.block.next_multiple_of(4096);
        Some(Self {
            buffers: room.take(stride * job.depth)?,
            stride,
            free: core::array::from_fn(|index| index),
            left: depth,
            depth,
            latencies: numbers(room.take(LATENCIES * 8)?, LATENCIES),
            asked: [(Request::FLUSH, 0); DEPTH],
            answered: 0,
            errors: 0,
            waiting,
            disk,
        })
    }

    /// Takes a free tag and its buffer for a new request.
    pub(crate) fn free(&mut self) -> Option<(usize, u64)> {
        self.left = self.left.checked_sub(1)?;
        let tag = self.free[self.left];
        Some((tag, self.buffers + self.stride * tag as u64))
    }

    pub(crate) fn moved(&mut self, by: u64) {
        self.disk.moved(by);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.left == self.depth
    }

    pub(crate) fn put(&mut self, tag: usize, request: Request) {
        self.asked[tag] = (request, tsc());
        self.disk.put(tag, &request);
    }

    pub(crate) fn ring(&mut self) {
        self.disk.ring();
    }

    /// A completed request. Its tag stays in use until [`Drive::release`].
    pub(crate) fn done(&mut self) -> Option<(usize, Request)> {
        let (tag, right) = self.disk.done()?;
        let (request, since) = self.asked[tag];
        self.latencies[(self.answered % LATENCIES) as usize] = tsc() - since;
        self.answered += 1;
        self.errors += u64::from(!right);
        Some((tag, request))
    }

    /// Waits for a request to complete. `None` if none completes in time.
    pub(crate) fn wait(&mut self) -> Option<(usize, Request)> {
        let mut waiting = self.waiting;
        let found = waiting.wait(|ask| {
            if ask {
                self.disk.request_interrupt();
            }
            self.done()
        });
        self.waiting = waiting;
        found
    }

    pub(crate) fn release(&mut self, tag: usize) {
        self.free[self.left] = tag;
        self.left += 1;
    }

    /// Flushes, with no other request in flight.
    fn flush(&mut self) -> bool {
        let Some((tag, _)) = self.free() else { return false };
        self.put(tag, Request::FLUSH);
        self.ring();
        let done = self.wait().is_some();
        self.release(tag);
        done
    }
}

/// All blocks in a scattered order, each of them once.
struct Order {
    first: u64,
    step: u64,
    count: u64,
}

impl Order {
    fn new(seed: u64, count: u64) -> Self {
        let mut random = Random::new(seed);
        let mut step = 1 + random.below(count);
        while divisor(step, count) != 1 {
            step += 1;
        }
        Self { first: random.below(count), step, count }
    }

    fn place(&self, index: u64) -> u64 {
        (self.first + index % self.count * self.step) % self.count
    }
}

/// The greatest common divisor.
fn divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { divisor(b, a % b) }
}

struct Outcome {
    /// The number of wrong eight-byte words, and the offset of the first.
    mismatches: u64,
    first_bad: u64,
    /// Whether all requests completed.
    whole: bool,
}

/// Reads or writes the blocks of the span, or the configured number of requests. Flushes after
/// writes.
fn transfer(drive: &mut Drive, job: &Job, cpu: &Cpu) -> Finding {
    let count = if job.requests == 0 { job.places() } else { job.requests };
    let start = tsc();
    let end = start.saturating_add(cpu.counts(job.seconds.min(1 << 20) * 1_000_000));
    let mut outcome = blocks(drive, job, count, if job.seconds == 0 { u64::MAX } else { end });
    let requests = drive.answered;
    let kept = requests.min(LATENCIES) as usize;
    if matches!(job.mode, "write" | "fill") {
        outcome.whole = outcome.whole && drive.flush();
    }
    let took = cpu.nanoseconds(tsc() - start) / 1000;
    let latencies = &mut drive.latencies[..kept];
    latencies.sort_unstable();
    let nanoseconds = |tenths| match kept {
        0 => 0,
        _ => cpu.nanoseconds(latencies[(kept - 1) * tenths / 100]),
    };
    let (median, worst) = (nanoseconds(50), nanoseconds(99));
    Finding::check("disk", outcome.whole && outcome.mismatches == 0 && drive.errors == 0)
        .number("depth", job.depth)
        .number("block", job.block)
        .number("requests", requests)
        .number("bytes", requests * job.block)
        .number("microseconds", took)
        .number("mismatches", outcome.mismatches)
        .hex("first_bad", outcome.first_bad)
        .number("errors", drive.errors)
        .number("median_ns", median)
        .number("p99_ns", worst)
}

/// Transfers `count` blocks. Starts none once the time stamp counter has reached `end`.
fn blocks(drive: &mut Drive, job: &Job, mut count: u64, end: u64) -> Outcome {
    let (pattern, order) = (Pattern::new(job.seed), Order::new(job.seed, job.places()));
    let operation = match job.mode {
        "write" | "fill" => Operation::Write,
        _ => Operation::Read,
    };
    let mut outcome = Outcome { mismatches: 0, first_bad: 0, whole: false };
    let mut next = 0;
    while drive.answered < count {
        let before = next;
        count = if tsc() < end { count } else { next };
        while next < count
            && let Some((tag, address)) = drive.free()
        {
            let (offset, length) = (order.place(next) * job.block, job.block as u32);
            let request = Request { operation, offset, address, length };
            match job.mode {
                "write" => pattern.write(offset, address, job.block),
                // Overwrite the buffer, so that old data cannot pass as data that was read.
                "verify" => fill(address, job.block, 0x5a),
                _ => {}
            }
            drive.put(tag, request);
            next += 1;
        }
        if next > before {
            drive.ring();
        } else if drive.is_idle() {
            break;
        }
        let Some((tag, request)) = drive.wait() else { return outcome };
        let mut done = Some((tag, request));
        while let Some((tag, request)) = done {
            if job.mode == "verify" {
                let Request { offset, address, .. } = request;
                for offset in pattern.wrong(offset, address, job.block) {
                    let first = outcome.mismatches == 0 || offset < outcome.first_bad;
                    outcome.first_bad = if first { offset } else { outcome.first_bad };
                    outcome.mismatches += 1;
                }
            }
            drive.release(tag);
            done = drive.done();
        }
    }
    outcome.whole = true;
    outcome
}
