//! `net=MODE,KEY=NUMBER,…`: drives the first network controller there is, and verifies the bytes
//! that come back.
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

/// IEEE 802: for experiments of one's own. A peer sends the first kind back, and loses the other.
const EXPERIMENT: u16 = 0x88b5;
const ONE_WAY: u16 = 0x88b6;
const ARP: u16 = 0x0806;
/// An address that no bridge passes on (IEEE 802.1Q, 8.6.3).
const NEAREST: [u8; 6] = [1, 0x80, 0xc2, 0, 0, 1];
const BROADCAST: [u8; 6] = [0xff; 6];

/// Where things are in a frame: kind, its name, and the pattern.
const KIND: u64 = 12;
const NAME: u64 = 14;
const FILLED: u64 = 22;
/// ARP (RFC 826): the operation, addresses of both, and all of it with the Ethernet header.
const ARP_OPERATION: u64 = 20;
const ARP_REPLY: u16 = 2;
const ARP_SENDER: u64 = 22;
const ARP_TARGET: u64 = 32;
const ARP_LENGTH: u64 = 42;

/// The most frames at once.
const DEPTH: usize = 256;
/// So many frames of somebody else, and it is as if there had been none.
const STRANGERS: u32 = 1024;
/// So many round trips are kept.
const LATENCIES: u64 = 1 << 16;
/// The name of no frame.
const NOBODY: u64 = u64::MAX;

/// The words of a command.
struct Job {
    mode: &'static str,
    seed: u64,
    depth: u64,
    size: u64,
    count: u64,
    patience: u64,
    peer: [u8; 6],
    /// An IPv4 address.
    host: [u8; 4],
    by_interrupt: bool,
}

impl Job {
    fn parse(words: &'static str) -> Option<Self> {
        let mut words = words.split(',');
        let mode = words.next().filter(|mode| ["send", "echo", "arp"].contains(mode))?;
        let peer = if mode == "arp" { BROADCAST } else { NEAREST };
        let mut job = Self {
            mode,
            seed: 1,
            depth: 1,
            size: 64,
            count: 1000,
            patience: 10,
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
                "patience" => &mut job.patience,
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
        let least = if mode == "arp" { ARP_LENGTH } else { FILLED };
        let fits = (least..=BUFFER - HEADER - 8).contains(&job.size) && job.count > 0;
        let asks = mode != "arp" || (job.depth == 1 && job.host != [0; 4]);
        (fits && asks && job.patience <= 3600).then_some(job)
    }
}

/// So many numbers between marks.
fn bytes<const COUNT: usize>(text: &str, mark: char, radix: u32) -> Option<[u8; COUNT]> {
    let mut parts = text.split(mark);
    let mut bytes = [0; COUNT];
    for byte in &mut bytes {
        *byte = u8::from_str_radix(parts.next()?, radix).ok()?;
    }
    parts.next().is_none().then_some(bytes)
}

/// Does what the words say, in their order.
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
        let waiting = Waiting::new(job.by_interrupt, job.patience, cpu);
        let finding = match Wire::new(&mut net, &job, (waiting, &mut room)) {
            Some(mut wire) => {
                let finding = wire.obey(cpu);
                wire.waiting.tell(finding)
            }
            None => Finding::check("net", false)
                .text("wants", "a depth that fits the controller and the memory"),
        };
        session.add(finding.text("mode", job.mode).text("kind", "virtio-net"));
    }
}

/// A controller with a buffer for each frame that leaves.
struct Wire<'a> {
    net: &'a mut VirtioNet,
    job: &'a Job,
    pattern: Pattern,
    buffers: u64,
    free: [usize; DEPTH],
    left: usize,
    /// The frame that is out under each number, and since when.
    asked: [(u64, u64); DEPTH],
    /// Whether the controller has it still.
    leaving: [bool; DEPTH],
    latencies: &'static mut [u64],
    tally: Tally,
    waiting: Waiting,
}

#[derive(Default)]
struct Tally {
    sent: u64,
    received: u64,
    /// Frames that are not what was sent, and where in the first of them.
    mismatches: u64,
    first_bad: u64,
    /// Frames of somebody else.
    others: u64,
}

impl<'a> Wire<'a> {
    fn new(
        net: &'a mut VirtioNet,
        job: &'a Job,
        (waiting, room): (Waiting, &mut Room),
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
            asked: [(NOBODY, 0); DEPTH],
            leaving: [false; DEPTH],
            latencies: numbers(room.take(LATENCIES * 8)?, LATENCIES),
            tally: Tally::default(),
            waiting,
            net,
            job,
        })
    }

    fn obey(&mut self, cpu: &Cpu) -> Finding {
        let start = tsc();
        let whole = match self.job.mode {
            "send" => self.send(),
            _ => self.converse(),
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

    /// A number that is free, for the next frame. Both together are its name.
    fn take(&mut self, next: u64) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let tag = self.free[self.left];
        self.asked[tag].0 = next << 8 | tag as u64;
        Some(tag)
    }

    fn put(&mut self, tag: usize) {
        self.leaving[tag] = true;
        self.asked[tag].1 = tsc();
        self.net.put(tag, self.buffer(tag), self.job.size);
    }

    fn release(&mut self, tag: usize) {
        self.asked[tag].0 = NOBODY;
        self.free[self.left] = tag;
        self.left += 1;
    }

    /// What the controller has sent by now.
    fn sent(&mut self) -> Option<usize> {
        let tag = self.net.sent()?;
        self.leaving[tag] = false;
        self.tally.sent += 1;
        Some(tag)
    }

    /// Waits for what a look finds, which asks for an interrupt if it is told to.
    fn wait<T>(&mut self, look: impl Fn(&mut Self, bool) -> Option<T>) -> Option<T> {
        let mut waiting = self.waiting;
        let found = waiting.wait(|ask| look(self, ask));
        self.waiting = waiting;
        found
    }

    /// Only sends, as fast as frames are taken: each has a number, and the rest is as it was.
    fn send(&mut self) -> bool {
        (0..self.left).for_each(|tag| self.write(tag));
        let (mut next, mut done) = (0, 0);
        while done < self.job.count {
            while next < self.job.count
                && let Some(tag) = self.take(next)
            {
                write64(self.frame(tag) + NAME, next);
                self.put(tag);
                next += 1;
            }
            self.net.ring();
            let mut sent = self.wait(|wire, ask| {
                if ask {
                    wire.net.listen(true);
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

    /// Sends, and compares what comes back.
    fn converse(&mut self) -> bool {
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
                // It came back; that the controller has let go of it may show later.
                if !self.let_go(tag) {
                    return false;
                }
                self.release(tag);
                done += 1;
                answered = self.answer(false);
            }
        }
        true
    }

    /// The number of a frame that is answered by what has arrived. Asks for an interrupt before
    /// each look, if at all: the one asked for is gone with what is taken.
    fn answer(&mut self, ask: bool) -> Option<usize> {
        for _ in 0..STRANGERS {
            if ask {
                self.net.listen(false);
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

    /// Writes a frame of the name that this number has.
    fn write(&self, tag: usize) {
        let (frame, job, name) = (self.frame(tag), self.job, self.asked[tag].0);
        put(frame, &job.peer);
        put(frame + 6, &self.net.mac);
        if job.mode == "arp" {
            // Ethernet and IPv4, a question; of one who has no IPv4 address yet (RFC 5227).
            put(frame + KIND, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
            put(frame + ARP_SENDER, &self.net.mac);
            put(frame + ARP_TARGET + 6, &job.host);
            return;
        }
        let kind = if job.mode == "send" { ONE_WAY } else { EXPERIMENT };
        write16(frame + KIND, kind.to_be());
        write64(frame + NAME, name);
        self.pattern.write(name << 12, frame + FILLED, job.size - FILLED);
    }

    /// The number of the frame that this one is an answer to, if it is one.
    fn answers(&mut self, arrival: &Arrival) -> Option<usize> {
        let (now, frame) = (tsc(), arrival.address);
        let (kind, long) = (u16::from_be(read16(frame + KIND)), arrival.length);
        let mine = match self.job.mode {
            "arp" if kind != ARP || long < ARP_LENGTH => None,
            "arp" => holds(frame + ARP_SENDER + 6, &self.job.host).then_some(0),
            _ if kind != EXPERIMENT || long < FILLED => None,
            _ => Some(read64(frame + NAME) as usize % DEPTH),
        };
        let Some(tag) = mine else {
            self.tally.others += 1;
            return None;
        };
        let (name, since) = self.asked[tag];
        let wrong = match self.job.mode {
            "arp" => self.wrong_answer(frame),
            // Nobody asked for it, or it came twice.
            _ if read64(frame + NAME) != name => Some(NAME),
            _ => self.wrong_echo(frame, (long, name)),
        };
        if let Some(at) = wrong {
            let first = self.tally.mismatches == 0;
            self.tally.first_bad = if first { at } else { self.tally.first_bad };
            self.tally.mismatches += 1;
        }
        if wrong == Some(NAME) || name == NOBODY {
            return None;
        }
        self.latencies[(self.tally.received % LATENCIES) as usize] = now - since;
        self.tally.received += 1;
        Some(tag)
    }

    /// Where a frame that came back differs from what was sent.
    fn wrong_echo(&self, frame: u64, (length, name): (u64, u64)) -> Option<u64> {
        let base = name << 12;
        if !holds(frame, &self.net.mac) || !holds(frame + 6, &self.job.peer) {
            return Some(0);
        }
        if length != self.job.size {
            return Some(length);
        }
        let first = self.pattern.wrong(base, frame + FILLED, length - FILLED).next();
        first.map(|offset| FILLED + offset - base)
    }

    /// Where an answer is none: it goes to us, for us.
    fn wrong_answer(&self, frame: u64) -> Option<u64> {
        if read16(frame + ARP_OPERATION) != ARP_REPLY.to_be() {
            return Some(ARP_OPERATION);
        }
        [0, ARP_TARGET].into_iter().find(|at| !holds(frame + at, &self.net.mac))
    }

    fn let_go(&mut self, tag: usize) -> bool {
        let waiting = self.waiting;
        let gone = || {
            while self.sent().is_some() {}
            (!self.leaving[tag]).then_some(())
        };
        waiting.poll(gone).is_some()
    }
}

/// Writes bytes.
fn put(address: u64, bytes: &[u8]) {
    bytes.iter().zip(address..).for_each(|(byte, at)| write8(at, *byte));
}

/// Whether these bytes are there.
fn holds(address: u64, bytes: &[u8]) -> bool {
    bytes.iter().zip(address..).all(|(byte, at)| read8(at) == *byte)
}
