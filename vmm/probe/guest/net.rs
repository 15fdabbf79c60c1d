//! `net=MODE,KEY=NUMBER,…`: drives the first network controller of the machine, and verifies the
//! frames that come back.
use crate::Session;
use crate::cpu::Cpu;
use crate::io::{read8, read16, read64, tsc, write8, write16, write64};
use crate::memory::{Room, numbers};
use crate::pattern::Pattern;
use crate::report::Finding;
use crate::start::{Start, Words, number};
use crate::timer;
use crate::virtio_net::{Arrival, BUFFER, HEADER, VirtioNet};
use crate::waiting::{NO_INTERRUPTS, Waiting, by_interrupt, waits_by_interrupt};

/// EtherTypes of IEEE 802 for local experiments. A peer sends back frames of the first type, and
/// drops those of the second.
const EXPERIMENT: u16 = 0x88b5;
const ONE_WAY: u16 = 0x88b6;
const ARP: u16 = 0x0806;
/// An address that bridges do not forward (IEEE 802.1Q, 8.6.3).
const NEAREST: [u8; 6] = [1, 0x80, 0xc2, 0, 0, 1];
const BROADCAST: [u8; 6] = [0xff; 6];

/// Offsets in a frame: EtherType, the frame's number, and the pattern.
const KIND: u64 = 12;
const NUMBER: u64 = 14;
const FILLED: u64 = 22;
/// ARP (RFC 826), offsets including the Ethernet header: operation, addresses of sender and target,
/// and the end.
const ARP_OPERATION: u64 = 20;
const ARP_REPLY: u16 = 2;
const ARP_SENDER: u64 = 22;
const ARP_TARGET: u64 = 32;
const ARP_LENGTH: u64 = 42;

/// Maximum number of frames in flight.
const DEPTH: usize = 256;
/// After this many foreign frames, the controller counts as silent.
const MAX_FOREIGN_FRAMES: u32 = 1024;
/// Number of round trips that are kept.
const LATENCIES: u64 = 1 << 16;
const NO_FRAME: u64 = u64::MAX;

/// A parsed value of `net=`.
pub(crate) struct Job {
    mode: &'static str,
    seed: u64,
    depth: u64,
    size: u64,
    count: u64,
    timeout: u64,
    peer: [u8; 6],
    /// An IPv4 address.
    host: [u8; 4],
    by_interrupt: bool,
}

impl Job {
    pub(crate) fn parse(words: &'static str) -> Option<Self> {
        let mut words = words.split(',');
        let mode = words.next().filter(|mode| ["send", "echo", "arp"].contains(mode))?;
        let peer = if mode == "arp" { BROADCAST } else { NEAREST };
        let mut job = Self {
            mode,
            seed: 1,
            depth: 1,
            size: 64,
            count: 1000,
            timeout: 10,
            peer,
            host: [0; 4],
            by_interrupt: false,
        };
        for word in words {
            let (key, value) = word.split_once('=')?;
            let field = match key {
                "seed" => &mut job.seed,
                "depth" => &mut job.depth,
                "size" => &mut job.size,
                "count" => &mut job.count,
                "patience" => &mut job.timeout,
                "peer" => {
                    job.peer = bytes(value, ':', 16)?;
                    continue;
                }
                "host" => {
                    job.host = bytes(value, '.', 10)?;
                    continue;
                }
                "wait" => {
                    job.by_interrupt = by_interrupt(value)?;
                    continue;
                }
                _ => return None,
            };
            *field = number(value)?;
        }
        let min_size = if mode == "arp" { ARP_LENGTH } else { FILLED };
        let fits = (min_size..=BUFFER - HEADER - 8).contains(&job.size) && job.count > 0;
        let asks = mode != "arp" || (job.depth == 1 && job.host != [0; 4]);
        (fits && asks && job.timeout <= 3600).then_some(job)
    }
}

/// Parses `COUNT` numbers separated by `mark`.
fn bytes<const COUNT: usize>(text: &str, mark: char, radix: u32) -> Option<[u8; COUNT]> {
    let mut parts = text.split(mark);
    let mut bytes = [0; COUNT];
    for byte in &mut bytes {
        *byte = u8::from_str_radix(parts.next()?, radix).ok()?;
    }
    parts.next().is_none().then_some(bytes)
}

/// Executes all `net=` words in order.
pub(crate) fn run(session: &mut Session, start: &Start, cpu: &Cpu, words: Words) {
    if words.get("net").is_none() {
        return;
    }
    let mut room = Room::find(start);
    let interrupts = waits_by_interrupt(words, "net") && timer::switch_on().1;
    let found = VirtioNet::find();
    let found = found.and_then(|at| VirtioNet::open(at, &mut room, interrupts, cpu));
    let Some(mut net) = found else {
        session.add(Finding::check("net", false).text("kind", "none that works"));
        return;
    };
    for word in words.all("net") {
        let Some(job) = Job::parse(word) else {
            session.add(Finding::check("net", false).text("wants", "MODE,KEY=NUMBER,..."));
            return;
        };
        if job.by_interrupt && !net.interrupts {
            session.add(Finding::check("net", false).text("wants", NO_INTERRUPTS));
            return;
        }
        let mut room = room.rest();
        let waiting = Waiting::new(job.by_interrupt, job.timeout, cpu);
        let finding = match Wire::new(&mut net, &job, waiting, &mut room) {
            Some(mut wire) => {
                let finding = wire.run_job(cpu);
                wire.waiting.finish(finding)
            }
            None => Finding::check("net", false)
                .text("wants", "a depth that fits the controller and the memory"),
        };
        session.add(finding.text("mode", job.mode).text("kind", "virtio-net"));
    }
}

/// A controller, with a buffer for each frame in flight.
pub(crate) struct Wire<'a> {
    net: &'a mut VirtioNet,
    job: &'a Job,
    pattern: Pattern,
    buffers: u64,
    free: [usize; DEPTH],
    left: usize,
    /// The number of the next frame of [`Wire::begin`].
    next: u64,
    /// The frame in flight under each tag, and when it was sent.
    asked: [(u64, u64); DEPTH],
    /// Whether the controller still has the frame.
    in_device: [bool; DEPTH],
    latencies: &'static mut [u64],
    tally: Tally,
    waiting: Waiting,
}

#[derive(Default)]
struct Tally {
    sent: u64,
    received: u64,
    /// The number of wrong frames, and the offset of the first error.
    mismatches: u64,
    first_bad: u64,
    /// Frames of other senders.
    others: u64,
}

impl<'a> Wire<'a> {
    pub(crate) fn new(
        net: &'a mut VirtioNet,
        job: &'a Job,
        waiting: Waiting,
        room: &mut Room,
    ) -> Option<Self> {
        let depth = usize::try_from(job.depth).ok()?;
        if !(1..=net.depth().min(DEPTH)).contains(&depth) {
            return None;
        }
        Some(Self {
            buffers: room.take(BUFFER * job.depth)?,
            pattern: Pattern::new(job.seed),
            free: core::array::from_fn(|index| index),
            left: depth,
            next: 0,
            asked: [(NO_FRAME, 0); DEPTH],
            in_device: [false; DEPTH],
            latencies: numbers(room.take(LATENCIES * 8)?, LATENCIES),
            tally: Tally::default(),
            waiting,
            net,
            job,
        })
    }

    fn run_job(&mut self, cpu: &Cpu) -> Finding {
        let start = tsc();
        let whole = match self.job.mode {
            "send" => self.send(),
            _ => self.exchange(),
        };
        let took = cpu.nanoseconds(tsc() - start) / 1000;
        while self.sent().is_some() {}
        let Tally { sent, received, mismatches, first_bad, others } = self.tally;
        let kept = received.min(LATENCIES) as usize;
        let latencies = &mut self.latencies[..kept];
        latencies.sort_unstable();
        let nanoseconds = |hundredths| match kept {
            0 => 0,
            _ => cpu.nanoseconds(latencies[(kept - 1) * hundredths / 100]),
        };
        Finding::check("net", whole && mismatches == 0)
            .number("depth", self.job.depth)
            .number("size", self.job.size)
            .number("sent", sent)
            .number("received", received)
            .number("microseconds", took)
            .number("mismatches", mismatches)
            .hex("first_bad", first_bad)
            .number("others", others)
            .number("median_ns", nanoseconds(50))
            .number("p99_ns", nanoseconds(99))
    }

    fn buffer(&self, tag: usize) -> u64 {
        self.buffers + BUFFER * tag as u64
    }

    /// Takes a free tag for the next frame. The index and the tag are the frame's number.
    fn take(&mut self, next: u64) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let tag = self.free[self.left];
        self.asked[tag].0 = next << 8 | tag as u64;
        Some(tag)
    }

    fn put(&mut self, tag: usize) {
        self.in_device[tag] = true;
        self.asked[tag].1 = tsc();
        self.net.put(tag, self.buffer(tag), self.job.size);
    }

    fn release(&mut self, tag: usize) {
        self.asked[tag].0 = NO_FRAME;
        self.free[self.left] = tag;
        self.left += 1;
    }

    /// A frame that the controller has sent.
    fn sent(&mut self) -> Option<usize> {
        let tag = self.net.sent()?;
        self.in_device[tag] = false;
        self.tally.sent += 1;
        Some(tag)
    }

    /// Waits until `look` returns something. Its argument tells it to request an interrupt.
    fn wait<T>(&mut self, look: impl Fn(&mut Self, bool) -> Option<T>) -> Option<T> {
        let mut waiting = self.waiting;
        let found = waiting.wait(|ask| look(self, ask));
        self.waiting = waiting;
        found
    }

    /// Only sends, as fast as the controller takes frames. Only the number in each frame changes.
    fn send(&mut self) -> bool {
        (0..self.left).for_each(|tag| self.write(tag));
        let (mut next, mut done) = (0, 0);
        while done < self.job.count {
            while next < self.job.count
                && let Some(tag) = self.take(next)
            {
                write64(self.frame(tag) + NUMBER, next);
                self.put(tag);
                next += 1;
            }
            self.net.ring();
            let mut sent = self.wait(|wire, ask| {
                if ask {
                    wire.net.request_interrupt(true);
                }
                wire.sent()
            });
            if sent.is_none() {
                return false;
            }
            while let Some(tag) = sent {
                self.release(tag);
                done += 1;
                sent = self.sent();
            }
        }
        true
    }

    /// Sends frames, and compares the answers.
    fn exchange(&mut self) -> bool {
        let (mut next, mut done) = (0, 0);
        while done < self.job.count {
            while next < self.job.count
                && let Some(tag) = self.take(next)
            {
                self.write(tag);
                self.put(tag);
                next += 1;
            }
            self.net.ring();
            let mut answered = self.wait(Self::answer);
            if answered.is_none() {
                return false;
            }
            while let Some(tag) = answered {
                // The answer may arrive before the controller reports that the frame was sent.
                if !self.wait_until_sent(tag) {
                    return false;
                }
                self.release(tag);
                done += 1;
                answered = self.answer(false);
            }
        }
        true
    }

    /// Sends `count` frames. Returns false if too many are in flight.
    pub(crate) fn begin(&mut self, count: u64) -> bool {
        for _ in 0..count {
            let Some(tag) = self.take(self.next) else { return false };
            self.next += 1;
            self.write(tag);
            self.put(tag);
        }
        self.net.ring();
        true
    }

    /// Waits until all frames are answered, and compares the answers.
    pub(crate) fn finish(&mut self) -> bool {
        while self.left < self.job.depth as usize {
            let Some(tag) = self.wait(Self::answer) else { return false };
            if !self.wait_until_sent(tag) {
                return false;
            }
            self.release(tag);
        }
        true
    }

    pub(crate) fn moved(&mut self, by: u64) {
        self.net.moved(by);
    }

    /// The numbers of answers, of wrong answers, and of answers without an interrupt.
    pub(crate) fn counts(&self) -> [u64; 3] {
        [self.tally.received, self.tally.mismatches, self.waiting.lost()]
    }

    /// The tag of a frame for which an answer has arrived. With `ask`, requests an interrupt before
    /// each look, because a foreign frame uses up the previous request.
    fn answer(&mut self, ask: bool) -> Option<usize> {
        for _ in 0..MAX_FOREIGN_FRAMES {
            if ask {
                self.net.request_interrupt(false);
            }
            let arrival = self.net.received()?;
            let answered = self.answers(&arrival);
            self.net.give_back(arrival);
            if answered.is_some() {
                return answered;
            }
        }
        None
    }

    fn frame(&self, tag: usize) -> u64 {
        self.buffer(tag) + HEADER
    }

    /// Writes the frame with the number of this tag.
    fn write(&self, tag: usize) {
        let (frame, job, number) = (self.frame(tag), self.job, self.asked[tag].0);
        put(frame, &job.peer);
        put(frame + 6, &self.net.mac);
        if job.mode == "arp" {
            // An ARP request for IPv4 over Ethernet, from a sender without an IPv4 address (RFC
            // 5227).
            put(frame + KIND, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
            put(frame + ARP_SENDER, &self.net.mac);
            put(frame + ARP_TARGET + 6, &job.host);
            return;
        }
        let kind = if job.mode == "send" { ONE_WAY } else { EXPERIMENT };
        write16(frame + KIND, kind.to_be());
        write64(frame + NUMBER, number);
        self.pattern.write(number << 12, frame + FILLED, job.size - FILLED);
    }

    /// The tag of the frame that this one answers, if it is an answer.
    fn answers(&mut self, arrival: &Arrival) -> Option<usize> {
        let (now, frame) = (tsc(), arrival.address);
        let (kind, long) = (u16::from_be(read16(frame + KIND)), arrival.length);
        let mine = match self.job.mode {
            "arp" if kind != ARP || long < ARP_LENGTH => None,
            "arp" => holds(frame + ARP_SENDER + 6, &self.job.host).then_some(0),
            _ if kind != EXPERIMENT || long < FILLED => None,
            _ => Some(read64(frame + NUMBER) as usize % DEPTH),
        };
        let Some(tag) = mine else {
            self.tally.others += 1;
            return None;
        };
        let (number, since) = self.asked[tag];
        let wrong = match self.job.mode {
            "arp" => self.error_in_answer(frame),
            // Not sent by this run, or received twice.
            _ if read64(frame + NUMBER) != number => Some(NUMBER),
            _ => self.error_in_echo(frame, long, number),
        };
        if let Some(at) = wrong {
            let first = self.tally.mismatches == 0;
            self.tally.first_bad = if first { at } else { self.tally.first_bad };
            self.tally.mismatches += 1;
        }
        if wrong == Some(NUMBER) || number == NO_FRAME {
            return None;
        }
        self.latencies[(self.tally.received % LATENCIES) as usize] = now - since;
        self.tally.received += 1;
        Some(tag)
    }

    /// The offset of the first difference between an echo and the frame that was sent.
    fn error_in_echo(&self, frame: u64, length: u64, number: u64) -> Option<u64> {
        let base = number << 12;
        if !holds(frame, &self.net.mac) || !holds(frame + 6, &self.job.peer) {
            return Some(0);
        }
        if length != self.job.size {
            return Some(length);
        }
        let first = self.pattern.wrong(base, frame + FILLED, length - FILLED).next();
        first.map(|offset| FILLED + offset - base)
    }

    /// The offset of an error in an ARP answer, which must be a reply to this controller.
    fn error_in_answer(&self, frame: u64) -> Option<u64> {
        if read16(frame + ARP_OPERATION) != ARP_REPLY.to_be() {
            return Some(ARP_OPERATION);
        }
        [0, ARP_TARGET].into_iter().find(|at| !holds(frame + at, &self.net.mac))
    }

    fn wait_until_sent(&mut self, tag: usize) -> bool {
        let waiting = self.waiting;
        let gone = || {
            while self.sent().is_some() {}
            (!self.in_device[tag]).then_some(())
        };
        waiting.poll(gone).is_some()
    }
}

fn put(address: u64, bytes: &[u8]) {
    bytes.iter().zip(address..).for_each(|(byte, at)| write8(at, *byte));
}

fn holds(address: u64, bytes: &[u8]) -> bool {
    bytes.iter().zip(address..).all(|(byte, at)| read8(at) == *byte)
}
