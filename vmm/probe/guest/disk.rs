//! `disk=MODE,KEY=NUMBER,…`: drives the first disk there is, by polling, and verifies its bytes.
use crate::Session;
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

/// What a disk is told to do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
    Flush,
}

/// One thing for it to do.
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

/// What a disk is.
pub(crate) struct Shape {
    pub(crate) kind: &'static str,
    pub(crate) bytes: u64,
    /// Requests are multiples of this.
    pub(crate) sector: u64,
    /// How many requests it takes at once.
    pub(crate) depth: usize,
    /// It interrupts where it is asked to.
    pub(crate) interrupts: bool,
}

/// A disk that is asked by numbers below its depth, and looked at for answers.
pub(crate) trait Disk {
    fn shape(&self) -> Shape;
    /// Whether a write is durable when it is done. False: it cannot be had so.
    fn write_through(&mut self, on: bool) -> bool;
    /// Gives it a request, under a number that is free. It need not look before [`Disk::ring`].
    fn put(&mut self, tag: usize, request: &Request);
    fn ring(&mut self);
    /// Asks for an interrupt with the next answer.
    fn listen(&mut self);
    /// A request that is done, and whether it went well.
    fn done(&mut self) -> Option<(usize, bool)>;
}

/// The most requests at once.
pub(crate) const DEPTH: usize = 64;
/// A disk that does nothing for so long will not any more.
const PATIENCE_SECONDS: u64 = 16;
/// So many latencies are kept.
const LATENCIES: u64 = 1 << 16;

/// The words of a command.
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
    fn parse(words: &'static str) -> Option<Self> {
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

/// Does what the words say, in their order.
pub(crate) fn run(session: &mut Session, start: &Start, cpu: &Cpu, words: Words) {
    if words.get("disk").is_none() {
        return;
    }
    let mut room = Room::find(start);
    let interrupts = waits_by_interrupt(words, "disk") && timer::switch_on().1;
    if let Some(at) = VirtioBlk::find()
        && let Some(mut disk) = VirtioBlk::open(at, &mut room, interrupts, cpu)
    {
        return all(session, &mut disk, words, (cpu, &room));
    }
    if let Some(at) = Nvme::find()
        && let Some(mut disk) = Nvme::open(at, &mut room, interrupts, cpu)
    {
        return all(session, &mut disk, words, (cpu, &room));
    }
    session.add(Finding::check("disk", false).text("kind", "none that works"));
}

fn all(session: &mut Session, disk: &mut dyn Disk, words: Words, (cpu, room): (&Cpu, &Room)) {
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
        let waiting = Waiting::new(job.by_interrupt, PATIENCE_SECONDS, cpu);
        let finding = match Drive::new(disk, &job, (waiting, &mut room)) {
            Some(mut drive) => {
                let finding = obey(session, &mut drive, &job, (cpu, &mut room));
                drive.waiting.tell(finding)
            }
            None => Finding::check("disk", false)
                .text("wants", "a span, depth and block that fit the disk and the memory"),
        };
        session.add(finding.text("mode", job.mode).text("kind", kind));
    }
}

fn obey(
    session: &mut Session,
    drive: &mut Drive,
    job: &Job,
    (cpu, room): (&Cpu, &mut Room),
) -> Finding {
    match job.mode {
        "write" | "verify" | "read" | "fill" => transfer(drive, job, cpu),
        "record" => records::write(session, drive, job),
        "recall" => records::check(drive, job, room),
        _ => Finding::check("disk", false).text("wants", "a mode that there is"),
    }
}

/// A disk with a buffer for each request.
pub(crate) struct Drive<'a> {
    disk: &'a mut dyn Disk,
    buffers: u64,
    /// From one buffer to the next.
    stride: u64,
    free: [usize; DEPTH],
    left: usize,
    depth: usize,
    latencies: &'static mut [u64],
    /// What each request was, and when.
    asked: [(Request, u64); DEPTH],
    pub(crate) answered: u64,
    pub(crate) errors: u64,
    waiting: Waiting,
}

impl<'a> Drive<'a> {
    fn new(
        disk: &'a mut dyn Disk,
        job: &Job,
        (waiting, room): (Waiting, &mut Room),
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

    /// The number and the buffer of a request that may be made now.
    pub(crate) fn free(&mut self) -> Option<(usize, u64)> {
        self.left = self.left.checked_sub(1)?;
        let tag = self.free[self.left];
        Some((tag, self.buffers + self.stride * tag as u64))
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

    /// What is done by now: its number stays taken until [`Drive::release`].
    pub(crate) fn done(&mut self) -> Option<(usize, Request)> {
        let (tag, right) = self.disk.done()?;
        let (request, since) = self.asked[tag];
        self.latencies[(self.answered % LATENCIES) as usize] = tsc() - since;
        self.answered += 1;
        self.errors += u64::from(!right);
        Some((tag, request))
    }

    /// What is done, waited for; `None` where nothing comes any more.
    pub(crate) fn wait(&mut self) -> Option<(usize, Request)> {
        let mut waiting = self.waiting;
        let found = waiting.wait(|ask| {
            if ask {
                self.disk.listen();
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

    /// Flushes, with nothing else under way.
    fn flush(&mut self) -> bool {
        let Some((tag, _)) = self.free() else { return false };
        self.put(tag, Request::FLUSH);
        self.ring();
        let done = self.wait().is_some();
        self.release(tag);
        done
    }
}

/// All blocks in an order that jumps about, each of them once.
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

/// The greatest that divides both.
fn divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { divisor(b, a % b) }
}

/// What came of a run.
struct Outcome {
    /// Words of eight bytes, and the first of them.
    mismatches: u64,
    first_bad: u64,
    /// It went to its end.
    whole: bool,
}

/// Writes or reads as many blocks as the span has, or as was said, and flushes after writes.
fn transfer(drive: &mut Drive, job: &Job, cpu: &Cpu) -> Finding {
    let count = if job.requests == 0 { job.places() } else { job.requests };
    let start = tsc();
    let end = start.saturating_add(cpu.counts(job.seconds.min(1 << 20) * 1_000_000));
    let mut outcome = blocks(drive, job, (count, if job.seconds == 0 { u64::MAX } else { end }));
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

/// So many of them, or as many as are begun before the time stamp counter is there.
fn blocks(drive: &mut Drive, job: &Job, (mut count, end): (u64, u64)) -> Outcome {
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
                // What was there before must not pass for what was read.
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
