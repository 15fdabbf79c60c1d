//! The devices that work while `moves=ROUNDS` moves their BARs: disks, a network controller and the
//! picture. Requests are in flight during each move, and more follow at the new address.
use crate::Session;
use crate::ahci::Ahci;
use crate::config::Function;
use crate::cpu::Cpu;
use crate::disk::{Disk, Drive, Job, Operation, Request};
use crate::memory::{Room, fill};
use crate::moves::Places;
use crate::net::{self, Wire};
use crate::nvme::Nvme;
use crate::paging::map_device;
use crate::pattern::Pattern;
use crate::report::Finding;
use crate::start::{Start, Words, number};
use crate::timer;
use crate::virtio_blk::VirtioBlk;
use crate::virtio_net::VirtioNet;
use crate::waiting::Waiting;

const TIMEOUT_SECONDS: u64 = 16;
/// The longest BAR of a device here.
const BAR_SIZE: u64 = 0x4000;
/// Requests in flight during a move, by round. The same number follows after it.
const DEPTHS: [u64; 3] = [1, 4, 16];
const DISK: &str = "write,depth=32,block=4K,span=8M";
const NET: &str = "echo,size=700,depth=32";

/// A BAR, and the address at which the probe sees it.
struct Seen {
    at: Function,
    bar: u8,
    linear: u64,
}

impl Seen {
    fn new(at: Function, bar: u8, cpu: &Cpu) -> Option<Self> {
        let linear = map_device(at.memory(bar)?, BAR_SIZE, cpu)?;
        Some(Self { at, bar, linear })
    }

    /// How far the BAR has moved since the last call.
    fn moved(&mut self, places: &Places, cpu: &Cpu) -> Option<u64> {
        let linear = map_device(places.now(self.at, self.bar)?, BAR_SIZE, cpu)?;
        Some(linear.wrapping_sub(core::mem::replace(&mut self.linear, linear)))
    }
}

/// A disk that works.
struct Work<'a> {
    drive: Drive<'a>,
    seen: Seen,
    next: u64,
    /// The first block that was written and is not verified.
    first: u64,
    wrong: u64,
}

impl<'a> Work<'a> {
    fn new(
        disk: &'a mut dyn Disk,
        seen: Seen,
        job: &Job,
        waiting: Waiting,
        room: &mut Room,
    ) -> Option<Self> {
        let drive = Drive::new(disk, job, waiting, room)?;
        Some(Self { drive, seen, next: 0, first: 0, wrong: 0 })
    }

    fn put(&mut self, job: &Job, operation: Operation, block: u64) -> bool {
        let Some((tag, address)) = self.drive.free() else { return false };
        let (offset, length) = (block % job.places() * job.block, job.block as u32);
        match operation {
            Operation::Write => Pattern::new(block).write(offset, address, job.block),
            // Old data must not pass as data that was read.
            _ => fill(address, job.block, 0x5a),
        }
        self.drive.put(tag, Request { operation, offset, address, length });
        true
    }

    fn write(&mut self, job: &Job, count: u64) -> bool {
        let all = (0..count).all(|more| self.put(job, Operation::Write, self.next + more));
        self.next += count;
        self.drive.ring();
        all
    }

    /// Waits for all requests, then reads and compares what was written.
    fn verify(&mut self, job: &Job) -> bool {
        while !self.drive.is_idle() {
            let Some((tag, _)) = self.drive.wait() else { return false };
            self.drive.release(tag);
        }
        for block in core::mem::replace(&mut self.first, self.next)..self.next {
            if !self.put(job, Operation::Read, block) {
                return false;
            }
            self.drive.ring();
            let Some((tag, request)) = self.drive.wait() else { return false };
            let Request { offset, address, .. } = request;
            self.wrong += Pattern::new(block).wrong(offset, address, job.block).count() as u64;
            self.drive.release(tag);
        }
        true
    }
}

/// Executes `moves=ROUNDS`.
pub(crate) fn run(session: &mut Session, start: &Start, cpu: &Cpu, words: Words) {
    let Some(word) = words.get("moves") else { return };
    let Some(rounds) = number(word) else {
        session.add(Finding::check("moves", false).text("wants", "a number of rounds"));
        return;
    };
    let mut room = Room::find(start);
    let interrupts = timer::switch_on().1;
    let blk = VirtioBlk::find();
    let mut blk = blk.and_then(|at| VirtioBlk::open(at, &mut room, interrupts, cpu));
    let nvme = Nvme::find();
    let mut nvme = nvme.and_then(|at| Nvme::open(at, &mut room, interrupts, cpu));
    let ahci = Ahci::find();
    let mut ahci = ahci.and_then(|at| Ahci::open(at, &mut room, interrupts, cpu));
    let net = VirtioNet::find();
    let mut net = net.and_then(|at| VirtioNet::open(at, &mut room, interrupts, cpu));
    let job = Job::parse(DISK).expect("a valid word");
    let frames = net::Job::parse(NET).expect("a valid word");
    let waiting = Waiting::new(interrupts, TIMEOUT_SECONDS, cpu);
    let disks = [
        blk.as_mut().and_then(|it| {
            let seen = Seen::new(VirtioBlk::find()?, 4, cpu)?;
            Work::new(it, seen, &job, waiting, &mut room)
        }),
        nvme.as_mut().and_then(|it| {
            Work::new(it, Seen::new(Nvme::find()?, 0, cpu)?, &job, waiting, &mut room)
        }),
        ahci.as_mut().and_then(|it| {
            Work::new(it, Seen::new(Ahci::find()?, 5, cpu)?, &job, waiting, &mut room)
        }),
    ];
    let wire = net.as_mut().and_then(|net| Wire::new(net, &frames, waiting, &mut room));
    let seen = VirtioNet::find().and_then(|at| Seen::new(at, 4, cpu));
    let mut all = All { disks, job: &job, wire: wire.zip(seen), waiting, cpu, lost: 0 };
    let finding = all.run(rounds);
    session.add(waiting.finish(finding));
}

/// All devices that work.
struct All<'a> {
    disks: [Option<Work<'a>>; 3],
    job: &'a Job,
    wire: Option<(Wire<'a>, Seen)>,
    waiting: Waiting,
    cpu: &'a Cpu,
    /// The number of requests or frames without an answer: the first ends the run.
    lost: u64,
}

impl All<'_> {
    fn run(&mut self, rounds: u64) -> Finding {
        let mut places = Places::find();
        let (mut wrong, mut wrong_words, mut done) = (0, 0, 0);
        for round in 1..=rounds {
            let depth = DEPTHS[(round % 3) as usize];
            places.draw(round);
            self.begin(depth);
            if round == rounds {
                places.home();
            } else {
                places.rebalance(round, &mut |places| places.look());
            }
            self.follow(&places);
            self.begin(depth);
            if !self.finish() {
                break;
            }
            self.waiting.take_interrupts();
            wrong += places.wrong();
            wrong_words += places.wrong_words(round);
            done = round;
        }
        let disks = || self.disks.iter().flatten();
        let mismatches = disks().map(|it| it.wrong).sum::<u64>();
        let errors = disks().map(|it| it.drive.errors).sum::<u64>();
        let lost_interrupts = disks().map(|it| it.drive.waiting.lost()).sum::<u64>();
        let frames = self.wire.as_ref().map_or([0; 3], |(wire, _)| wire.counts());
        let whole = self.lost == 0 && done == rounds && errors == 0;
        let right = wrong == 0 && wrong_words == 0 && mismatches == 0 && frames[1] == 0;
        Finding::check("moves", whole && right && lost_interrupts + frames[2] == 0)
            .number("rounds", done)
            .number("bars", places.count())
            .number("disks", disks().count() as u64)
            .number("requests", disks().map(|it| it.drive.answered).sum())
            .number("frames", frames[0])
            .number("unanswered", self.lost)
            .number("errors", errors)
            .number("mismatches", mismatches + frames[1])
            .number("wrong_bars", wrong)
            .number("wrong_words", wrong_words)
            .number("late", lost_interrupts + frames[2])
    }

    /// Starts requests and frames on all devices.
    fn begin(&mut self, depth: u64) {
        for it in self.disks.iter_mut().flatten() {
            self.lost += u64::from(!it.write(self.job, depth));
        }
        if let Some((wire, _)) = &mut self.wire {
            self.lost += u64::from(!wire.begin(depth));
        }
    }

    /// Uses the registers at their new addresses.
    fn follow(&mut self, places: &Places) {
        for it in self.disks.iter_mut().flatten() {
            match it.seen.moved(places, self.cpu) {
                Some(by) => it.drive.moved(by),
                None => self.lost += 1,
            }
        }
        if let Some((wire, seen)) = &mut self.wire {
            match seen.moved(places, self.cpu) {
                Some(by) => wire.moved(by),
                None => self.lost += 1,
            }
        }
    }

    fn finish(&mut self) -> bool {
        for it in self.disks.iter_mut().flatten() {
            self.lost += u64::from(!it.verify(self.job));
        }
        if let Some((wire, _)) = &mut self.wire {
            self.lost += u64::from(!wire.finish());
        }
        self.lost == 0
    }
}
