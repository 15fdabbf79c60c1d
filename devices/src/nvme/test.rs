//! Tests with a driver that creates queues and checks completions.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::*;
use crate::device::Kind;
use crate::pci::Address;
use crate::testutil::Bench;
use crate::testutil::image::{Double, DoubleState, GO, HOLD, WAIT};
use host::disk::{self, Operation, Request, memory};
use host::testutil::noise::Noise;

const AT: Address = Address::new(4, 0);
const BAR0: u64 = 0xc000_0000;
const BAR2: u64 = 0xd000_0000;
/// INTA of slot 4.
const GSI: u32 = 20;
const RAM: usize = 32 << 20;
const DISK: u64 = 16 << 20;

/// Guest addresses of the driver's queues and data.
const ADMIN_SQ: u64 = 0x1_0000;
const ADMIN_CQ: u64 = 0x2_0000;
const ADMIN_ENTRIES: u32 = 32;
const PAGE: u64 = 0x3_0000;
const QUEUES_AT: u64 = 0x10_0000;
const LISTS: u64 = 0x40_0000;
const DATA: u64 = 0x80_0000;

/// The driver's view of a queue.
#[derive(Clone, Copy, Debug)]
struct Ring {
    id: u16,
    at: u64,
    size: u32,
    index: u32,
    phase: bool,
}

impl Ring {
    fn new(id: u16, at: u64, size: u32) -> Self {
        Self { id, at, size, index: 0, phase: true }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cqe {
    result: u32,
    queue: u16,
    head: u16,
    id: u16,
    status: u16,
}

impl Cqe {
    /// Status code and type.
    fn code(self) -> u16 {
        self.status & 0x7ff
    }
}

type Dwords = [u32; 16];

fn command(opcode: u8, nsid: u32) -> Dwords {
    let mut dwords = [0; 16];
    (dwords[0], dwords[1]) = (opcode.into(), nsid);
    dwords
}

fn with(mut dwords: Dwords, values: &[(usize, u32)]) -> Dwords {
    for (at, value) in values {
        dwords[*at] = *value;
    }
    dwords
}

fn low(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap()
}

fn prp(dwords: Dwords, (one, two): (u64, u64)) -> Dwords {
    with(dwords, &[(6, low(one)), (7, low(one >> 32)), (8, low(two)), (9, low(two >> 32))])
}

fn transfer(opcode: u8, block: u64, blocks: u32, pointers: (u64, u64)) -> Dwords {
    let dwords = [(10, low(block)), (11, low(block >> 32)), (12, blocks - 1)];
    prp(with(command(opcode, 1), &dwords), pointers)
}

struct Driver {
    bench: Bench,
    disk: Arc<DoubleState>,
    image: Arc<dyn Image>,
    sq: Vec<Ring>,
    cq: Vec<Ring>,
    next: u16,
}

impl Driver {
    /// A controller in the state that firmware leaves.
    fn new() -> Self {
        Self::with_queues(8)
    }

    fn with_queues(queues: u16) -> Self {
        let mut bench = Bench::new(RAM);
        let (image, state) = Double::over(memory(DISK));
        let config =
            disk::Config { slot: Some(AT), queues: Some(queues), ..disk::Config::new("disk") };
        let config = Config(config);
        bench.board.add("nvme", |grants| config.attach(image.clone(), grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        let mut driver =
            Self { bench, disk: state, image, sq: Vec::new(), cq: Vec::new(), next: 0 };
        driver.assign_bars();
        driver
    }

    /// A controller with its admin queue enabled.
    fn enabled() -> Self {
        let mut driver = Self::new();
        driver.enable();
        driver
    }

    /// A controller with one pair of I/O queues of `size` entries.
    fn ready(size: u32) -> Self {
        let mut driver = Self::enabled();
        driver.create(1, size);
        driver
    }

    fn assign_bars(&mut self) {
        self.config(0x10, 0xc000_0000);
        self.config(0x18, 0xd000_0000);
        self.config(0x04, 6);
    }

    fn config(&self, at: u64, value: u32) {
        self.bench.write(Kind::Config, AT.config() + at, &value.to_le_bytes());
    }

    fn get(&self, at: u64) -> u32 {
        u32::from_le_bytes(self.bench.read(Kind::Memory, BAR0 + at))
    }

    fn set(&self, at: u64, value: u32) {
        self.bench.write(Kind::Memory, BAR0 + at, &value.to_le_bytes());
    }

    fn wait(&self, what: &str, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            let status = self.get(CSTS);
            assert!(start.elapsed() < Duration::from_secs(20), "{what} never came: {status:#x}");
            std::thread::yield_now();
        }
    }

    fn enable(&mut self) {
        self.bench.memory.write(ADMIN_CQ, &[0; 16 * ADMIN_ENTRIES as usize]).unwrap();
        self.set(AQA, (ADMIN_ENTRIES - 1) * 0x1_0001);
        self.set(ASQ, low(ADMIN_SQ));
        self.set(0x2c, 0);
        self.set(ACQ, low(ADMIN_CQ));
        self.set(0x34, 0);
        self.set(CC, 0x0046_0001);
        self.wait("readiness", || self.get(CSTS) & 1 == 1);
        self.sq = vec![Ring::new(0, ADMIN_SQ, ADMIN_ENTRIES)];
        self.cq = vec![Ring::new(0, ADMIN_CQ, ADMIN_ENTRIES)];
    }

    fn disable(&mut self) {
        self.set(CC, 0x0046_0000);
        self.wait("the end of a reset", || self.get(CSTS) == 0);
    }

    fn messages(&self) {
        for vector in 0..9_u64 {
            let at = BAR2 + 16 * vector;
            self.bench.write(Kind::Memory, at, &0xfee0_0000_u64.to_le_bytes());
            self.bench.write(Kind::Memory, at + 8, &vector.to_le_bytes());
        }
        self.config(0x40, 0x8000_0000);
    }

    fn sent(&self) -> Vec<u32> {
        self.bench.hypervisor.sent.lock().unwrap().iter().map(|message| message.data).collect()
    }

    /// Puts a command into a queue without ringing the doorbell.
    fn put(&mut self, queue: usize, dwords: Dwords) -> u16 {
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        let ring = &mut self.sq[queue];
        let mut dwords = dwords;
        dwords[0] |= u32::from(id) << 16;
        let bytes: Vec<u8> = dwords.iter().flat_map(|it| it.to_le_bytes()).collect();
        self.bench.memory.write(ring.at + 64 * u64::from(ring.index), &bytes).unwrap();
        ring.index = (ring.index + 1) % ring.size;
        id
    }

    fn ring(&self, queue: usize) {
        let ring = self.sq[queue];
        self.set(DOORBELLS + 8 * u64::from(ring.id), ring.index);
    }

    fn submit(&mut self, queue: usize, dwords: Dwords) -> u16 {
        let id = self.put(queue, dwords);
        self.ring(queue);
        id
    }

    /// Takes the next completion, if there is one.
    fn poll(&mut self, queue: usize) -> Option<Cqe> {
        let ring = &mut self.cq[queue];
        let mut bytes = [0; 16];
        self.bench.memory.read(ring.at + 16 * u64::from(ring.index), &mut bytes).unwrap();
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if (word(14) & 1 == 1) != ring.phase {
            return None;
        }
        ring.index = (ring.index + 1) % ring.size;
        ring.phase ^= ring.index == 0;
        let result = u32::from(word(0)) | u32::from(word(2)) << 16;
        let (head, queue, id, status) = (word(8), word(10), word(12), word(14) >> 1);
        Some(Cqe { result, queue, head, id, status })
    }

    /// Writes the head doorbell.
    fn free(&self, queue: usize) {
        let ring = self.cq[queue];
        self.set(DOORBELLS + 8 * u64::from(ring.id) + 4, ring.index);
    }

    fn next(&mut self, queue: usize) -> Cqe {
        let start = Instant::now();
        loop {
            if let Some(cqe) = self.poll(queue) {
                self.free(queue);
                return cqe;
            }
            let status = self.get(CSTS);
            assert!(start.elapsed() < Duration::from_secs(20), "no completion: {status:#x}");
            std::thread::yield_now();
        }
    }

    fn run(&mut self, queue: usize, dwords: Dwords) -> Cqe {
        let id = self.submit(queue, dwords);
        let cqe = self.next(queue);
        assert_eq!((cqe.id, cqe.queue), (id, self.sq[queue].id));
        cqe
    }

    fn admin(&mut self, dwords: Dwords) -> Cqe {
        self.run(0, dwords)
    }

    /// Creates a pair of I/O queues. It becomes the next entry of `sq` and `cq`.
    fn create(&mut self, id: u16, size: u32) {
        let at = QUEUES_AT + u64::from(id) * 0x2_0000;
        let zeros = vec![0; 16 * size as usize];
        self.bench.memory.write(at + 0x1_0000, &zeros).unwrap();
        let queue = u32::from(id) | (size - 1) << 16;
        let cq = with(command(5, 0), &[(10, queue), (11, u32::from(id) << 16 | 3)]);
        let cq =
            if self.sent().is_empty() && !self.uses_messages() { with(cq, &[(11, 3)]) } else { cq };
        assert_eq!(self.admin(prp(cq, (at + 0x1_0000, 0))).status, 0);
        let sq = with(command(1, 0), &[(10, queue), (11, u32::from(id) << 16 | 1)]);
        assert_eq!(self.admin(prp(sq, (at, 0))).status, 0);
        self.sq.push(Ring::new(id, at, size));
        self.cq.push(Ring::new(id, at + 0x1_0000, size));
    }

    fn uses_messages(&self) -> bool {
        let control: [u8; 4] = self.bench.read(Kind::Config, AT.config() + 0x40);
        control[3] & 0x80 != 0
    }

    fn fill(&self, at: u64, data: &[u8]) {
        self.bench.memory.write(at, data).unwrap();
    }

    fn data<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut data = [0; N];
        self.bench.memory.read(at, &mut data).unwrap();
        data
    }

    fn identify(&mut self, structure: u32, nsid: u32) -> [u8; 4096] {
        let cqe = self.admin(prp(with(command(6, nsid), &[(10, structure)]), (PAGE, 0)));
        assert_eq!(cqe.status, 0, "structure {structure}");
        self.data(PAGE)
    }

    fn log(&mut self, page: u32, bytes: u32) -> Vec<u8> {
        let dwords = [(10, page | (bytes / 4 - 1) << 16)];
        let cqe = self.admin(prp(with(command(2, u32::MAX), &dwords), (PAGE, PAGE + 4096)));
        assert_eq!(cqe.status, 0, "log page {page}");
        self.data::<4096>(PAGE)[..bytes as usize].to_vec()
    }

    fn feature(&mut self, feature: u32, value: u32) -> Cqe {
        self.admin(with(command(9, 0), &[(10, feature), (11, value)]))
    }

    fn read_feature(&mut self, feature: u32, argument: u32) -> Cqe {
        self.admin(with(command(10, 0), &[(10, feature), (11, argument)]))
    }

    /// Writes a PRP list that continues wherever a page of it ends. Returns the data pointer.
    fn list(&self, first: u64, pages: &[u64], mut at: u64) -> (u64, u64) {
        match pages {
            [] => return (first, 0),
            [one] => return (first, *one),
            _ => {}
        }
        let start = at;
        let mut left = pages;
        while let [page, rest @ ..] = left {
            if at & 0xff8 == 0xff8 && !rest.is_empty() {
                // The next list is two pages further.
                let next = (at & !0xfff) + 0x2000;
                self.fill(at, &next.to_le_bytes());
                at = next;
                continue;
            }
            self.fill(at, &page.to_le_bytes());
            at += 8;
            left = rest;
        }
        (first, start)
    }
}

/// Random bytes, different for each seed.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    Noise::new(seed).take(length).collect()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap().trim_end()
}

#[test]
fn reports_its_identity() {
    let mut driver = Driver::enabled();
    assert_eq!(driver.bench.read(Kind::Config, AT.config() + 8), [2, 2, 8, 1]);
    assert_eq!((driver.get(CAP), driver.get(4)), (0x3c01_03ff, 0x0040_0020));
    assert_eq!(driver.get(VS), 0x0001_0400);
    let wide = u64::from_le_bytes(driver.bench.read(Kind::Memory, BAR0));
    assert_eq!(wide, 0x0040_0020_3c01_03ff);
    let page = driver.identify(1, 0);
    assert_eq!(text(&page[4..24]), disk::Config::new("disk").serial().unwrap());
    assert_eq!((text(&page[24..64]), text(&page[64..72])), ("Transom NVMe disk", "1.0"));
    assert_eq!((page[77], page[111], page[512], page[513], page[516]), (8, 1, 0x66, 0x44, 1));
    assert!(text(&page[768..836]).starts_with("nqn.2014-08.org.nvmexpress:uuid:"));
    let page = driver.identify(0, 1);
    assert_eq!(page[..8], (DISK / 512).to_le_bytes());
    assert_eq!((page[130], page[33], page[64], page[68]), (9, 8, 7, 7));
    assert_eq!(driver.identify(2, 0)[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(driver.identify(2, 1)[..4], [0; 4]);
    assert_eq!(driver.identify(3, 1)[..4], [3, 16, 0, 0]);
    assert_eq!(driver.identify(6, 0)[..4], [0, 13, 0, 0], "Write Zeroes of 32 MiB");
    assert_eq!(driver.identify(7, 0)[..4], [1, 0, 0, 0]);
    assert_eq!(driver.identify(8, 1)[14], 1);
}

#[test]
fn accesses_of_other_widths_have_no_effect() {
    let driver = Driver::enabled();
    assert_eq!(driver.bench.read(Kind::Memory, BAR0 + VS), [0xff; 2]);
    assert_eq!(driver.bench.read(Kind::Memory, BAR0 + 2), [0xff; 4]);
    assert_eq!(driver.get(0x3ffc), u32::MAX);
    driver.bench.write(Kind::Memory, BAR0 + CC, &[0; 2]);
    driver.bench.write(Kind::Memory, BAR0 + DOORBELLS, &[1; 8]);
    driver.set(NSSR, 0x4e56_4d65);
    assert_eq!((driver.get(CSTS), driver.get(NSSR)), (1, 0));
    assert_eq!(driver.get(0x38), 0, "no memory buffer");
}

#[test]
fn data_moves_through_prp_lists_of_every_shape() {
    let mut driver = Driver::ready(64);
    // Number of blocks, offset in the first page, and offset of the list in its page.
    let shapes = [
        (1, 0, 0),
        (1, 0xe00, 0),
        (8, 0, 0),
        (8, 0x200, 0),
        (16, 0, 0),
        (16, 4, 0),
        (17, 0xffc, 0xff8),
        (64, 0x800, 0xff0),
        (1000, 0xa04, 0x100),
        (2048, 0, 0xfe8),
        (2048, 0x404, 0),
    ];
    for (seed, (blocks, offset, start)) in (0_u64..).zip(shapes) {
        let length = blocks as usize * 512;
        let sent = pattern(seed, length);
        let block = 100 + seed * 2048;
        // Pages in descending order, so that no two are adjacent.
        let count = (offset + length as u64).div_ceil(4096);
        let page = |n: u64, area: u64| area + (count - n) * 0x2000;
        for (opcode, area) in [(1, DATA), (2, DATA + 0x60_0000)] {
            let pages: Vec<u64> = (1..count).map(|n| page(n, area)).collect();
            let pointers = driver.list(page(0, area) + offset, &pages, LISTS + start);
            let places = |at: usize| {
                let at = offset + at as u64;
                page(at / 4096, area) + at % 4096
            };
            if opcode == 1 {
                (0..length).step_by(4).for_each(|at| driver.fill(places(at), &sent[at..at + 4]));
            }
            assert_eq!(driver.run(1, transfer(opcode, block, blocks, pointers)).status, 0);
            if opcode == 2 {
                for at in (0..length).step_by(4) {
                    assert_eq!(driver.data::<4>(places(at)), sent[at..at + 4], "{seed}: {at:#x}");
                }
            }
        }
    }
    assert_eq!(driver.sq.len(), 2);
}

#[test]
fn several_submission_queues_share_a_completion_queue() {
    let mut driver = Driver::enabled();
    driver.messages();
    driver.create(1, 64);
    for id in [2_u16, 3, 4] {
        let at = QUEUES_AT + u64::from(id) * 0x2_0000;
        let queue = u32::from(id) | 15 << 16;
        let sq = with(command(1, 0), &[(10, queue), (11, 1 << 16 | 1)]);
        assert_eq!(driver.admin(prp(sq, (at, 0))).status, 0);
        driver.sq.push(Ring::new(id, at, 16));
    }
    let mut asked = BTreeSet::new();
    for round in 0..10 {
        for queue in 1..5 {
            let id = driver.put(queue, transfer(2, round, 1, (DATA, 0)));
            asked.insert((driver.sq[queue].id, id));
        }
    }
    let before = driver.sent().len();
    (1..5).for_each(|queue| driver.ring(queue));
    let mut heads = BTreeSet::new();
    for _ in 0..40 {
        let cqe = driver.next(1);
        assert_eq!(cqe.status, 0);
        assert!(asked.remove(&(cqe.queue, cqe.id)), "{cqe:?} was not asked for, or twice");
        heads.insert((cqe.queue, cqe.head));
    }
    assert!((1..5).all(|queue| heads.contains(&(queue, 10))), "{heads:?}");
    let sent = driver.sent();
    assert!(sent[before..].iter().all(|vector| *vector == 1), "{sent:?}");
    assert!((1..=40).contains(&(sent.len() - before)));
    // A completion queue can only be deleted after its submission queues.
    let delete = |driver: &mut Driver, opcode, id| {
        driver.admin(with(command(opcode, 0), &[(10, id)])).code()
    };
    assert_eq!(delete(&mut driver, 4, 1), 0x10c);
    for id in 1..5 {
        assert_eq!(delete(&mut driver, 0, id), 0);
        assert_eq!(delete(&mut driver, 0, id), 0x101);
    }
    assert_eq!(delete(&mut driver, 4, 1), 0);
    assert_eq!(delete(&mut driver, 4, 1), 0x101);
    driver.sq.truncate(1);
    driver.cq.truncate(1);
    driver.create(1, 16);
    assert_eq!(driver.run(1, transfer(2, 0, 1, (DATA, 0))).status, 0);
}

/// Invalid commands for an I/O queue, and the expected status of each.
fn io_mistakes() -> Vec<(&'static str, Dwords, u16)> {
    let last = DISK / 512;
    let zeroes = with(command(8, 1), &[(10, low(last)), (12, 0)]);
    vec![
        ("opcode", command(0x7f, 1), 0x01),
        ("compare", command(5, 1), 0x01),
        ("fused", with(transfer(2, 0, 1, (DATA, 0)), &[(0, 0x102)]), 0x02),
        ("scatter lists", with(transfer(2, 0, 1, (DATA, 0)), &[(0, 0x4002)]), 0x02),
        ("namespace 0", with(transfer(2, 0, 1, (DATA, 0)), &[(1, 0)]), 0x0b),
        ("namespace 2", with(transfer(2, 0, 1, (DATA, 0)), &[(1, 2)]), 0x0b),
        ("all namespaces", with(transfer(2, 0, 1, (DATA, 0)), &[(1, u32::MAX)]), 0x0b),
        ("flush of namespace 2", command(0, 2), 0x0b),
        ("beyond the end", transfer(2, last, 1, (DATA, 0)), 0x80),
        ("over the end", transfer(1, last - 1, 2, (DATA, 0)), 0x80),
        ("over the end of numbers", transfer(1, u64::MAX, 2, (DATA, 0)), 0x80),
        ("zeroes beyond the end", zeroes, 0x80),
        ("more than MDTS", transfer(2, 0, 2049, (DATA, LISTS)), 0x02),
        ("protection", with(transfer(2, 0, 1, (DATA, 0)), &[(12, 1 << 26)]), 0x02),
        ("odd address", transfer(2, 0, 1, (DATA + 1, 0)), 0x13),
        ("offset of the second", transfer(2, 0, 16, (DATA, DATA + 8)), 0x13),
        ("no memory", transfer(2, 0, 1, (1 << 40, 0)), 0x04),
        ("no memory, written", transfer(1, 0, 1, (1 << 40, 0)), 0x04),
        ("end of numbers", transfer(1, 0, 1, (!0xfff, 0)), 0x04),
        ("no list", transfer(1, 0, 24, (DATA, 1 << 40)), 0x04),
        ("ranges not in memory", prp(with(command(9, 1), &[(11, 4)]), (1 << 40, 0)), 0x04),
    ]
}

/// Invalid commands for the admin queue, while one pair of I/O queues exists.
fn admin_mistakes() -> Vec<(&'static str, Dwords, u16)> {
    let queue = |id: u32, size: u32| (10, id | (size - 1) << 16);
    let cq = |id, size, flags| prp(with(command(5, 0), &[queue(id, size), (11, flags)]), (PAGE, 0));
    let sq = |id, size, flags| prp(with(command(1, 0), &[queue(id, size), (11, flags)]), (PAGE, 0));
    vec![
        ("opcode", command(0x7f, 0), 0x01),
        ("format", command(0x80, 1), 0x01),
        ("firmware commit", command(0x10, 0), 0x01),
        ("firmware download", command(0x11, 0), 0x01),
        ("namespace management", command(0x0d, 0), 0x01),
        ("fused", with(command(6, 0), &[(0, 0x206)]), 0x02),
        ("completion queue 0", cq(0, 16, 3), 0x101),
        ("completion queue twice", cq(1, 16, 3), 0x101),
        ("completion queue 9 of 8", cq(9, 16, 3), 0x101),
        ("one entry", cq(2, 1, 3), 0x102),
        ("too many entries", cq(2, 1025, 3), 0x102),
        ("not contiguous", cq(2, 16, 2), 0x02),
        ("vector with an interrupt line", cq(2, 16, 1 << 16 | 3), 0x108),
        ("not a page", prp(cq(2, 16, 3), (PAGE + 64, 0)), 0x13),
        ("submission queue 0", sq(0, 16, 1 << 16 | 1), 0x101),
        ("submission queue twice", sq(1, 16, 1 << 16 | 1), 0x101),
        ("submission queue 9 of 8", sq(9, 16, 1 << 16 | 1), 0x101),
        ("one entry", sq(2, 1, 1 << 16 | 1), 0x102),
        ("completes nowhere", sq(2, 16, 2 << 16 | 1), 0x100),
        ("completes to the admin queue", sq(2, 16, 1), 0x101),
        ("completes beyond", sq(2, 16, 9 << 16 | 1), 0x101),
        ("not contiguous", sq(2, 16, 1 << 16), 0x02),
        ("delete 0", command(0, 0), 0x101),
        ("delete 2", with(command(4, 0), &[(10, 2)]), 0x101),
        ("unknown structure", with(command(6, 0), &[(10, 0xfe)]), 0x02),
        ("unknown namespace", with(command(6, 2), &[(10, 0)]), 0x0b),
        ("list after all", with(command(6, u32::MAX), &[(10, 2)]), 0x0b),
        ("other command set", with(command(6, 0), &[(10, 6), (11, 2 << 24)]), 0x02),
        ("identify to nowhere", prp(with(command(6, 0), &[(10, 1)]), (1 << 40, 0)), 0x04),
        ("log page", prp(with(command(2, 0), &[(10, 0xc0)]), (PAGE, 0)), 0x109),
        ("log offset", prp(with(command(2, 0), &[(10, 1), (12, 2)]), (PAGE, 0)), 0x02),
        ("log beyond", prp(with(command(2, 0), &[(10, 1), (13, 1)]), (PAGE, 0)), 0x02),
        ("feature", with(command(9, 0), &[(10, 0x7f)]), 0x02),
        ("feature read", with(command(10, 0), &[(10, 3)]), 0x02),
        ("save", with(command(9, 0), &[(10, 1 << 31 | 6)]), 0x10d),
        ("of a namespace", with(command(9, 1), &[(10, 6)]), 0x10f),
        ("power state 1", with(command(9, 0), &[(10, 2), (11, 1)]), 0x02),
        ("sensor 1", with(command(9, 0), &[(10, 4), (11, 1 << 16)]), 0x02),
        ("vector 9", with(command(9, 0), &[(10, 9), (11, 9)]), 0x02),
        ("queues once they are used", with(command(9, 0), &[(10, 7), (11, 0)]), 0x0c),
        ("shadows with an interrupt line", prp(command(0x7c, 0), (PAGE, PAGE + 4096)), 0x01),
    ]
}

#[test]
fn every_error_has_its_status() {
    let mut driver = Driver::ready(64);
    let (io, admin) = (io_mistakes(), admin_mistakes());
    let count = io.len() + admin.len();
    for (what, dwords, code) in io {
        assert_eq!(driver.run(1, dwords).code(), code, "{what}");
    }
    for (what, dwords, code) in admin {
        assert_eq!(driver.admin(dwords).code(), code, "{what}");
    }
    let health = driver.log(2, 512);
    assert_eq!(health[176..184], (count as u64).to_le_bytes());
    let errors = driver.log(1, 128);
    assert_eq!(errors[..8], (count as u64).to_le_bytes(), "the newest first");
    assert_eq!(errors[64..72], (count as u64 - 1).to_le_bytes());
    assert_eq!(u16::from_le_bytes([errors[12], errors[13]]) >> 1 & 0x7ff, 0x01);
    assert_eq!(driver.run(1, transfer(2, 0, 1, (DATA, 0))).status, 0, "the controller still works");
}

#[test]
fn abort_cancels_only_event_requests() {
    let mut driver = Driver::enabled();
    let request = driver.submit(0, command(0x0c, 0));
    let abort = |id: u16| with(command(8, 0), &[(10, u32::from(id) << 16)]);
    assert_eq!(driver.admin(abort(request + 7)).result, 1);
    let id = driver.submit(0, abort(request));
    let (one, two) = (driver.next(0), driver.next(0));
    assert_eq!((one.id, one.code(), two.id, two.result), (request, 0x07, id, 0));
    assert_eq!(driver.admin(abort(request)).result, 1);
}

#[test]
fn events_are_reported_once_until_their_page_is_read() {
    let mut driver = Driver::ready(16);
    let requests: Vec<u16> = (0..4).map(|_| driver.submit(0, command(0x0c, 0))).collect();
    assert_eq!(driver.admin(command(0x0c, 0)).code(), 0x105);
    // A tail beyond the end of its queue, twice, and a queue that does not exist.
    driver.set(DOORBELLS + 8, 16);
    let cqe = driver.next(0);
    assert_eq!((cqe.id, cqe.result), (requests[0], 0x0001_0100));
    driver.set(DOORBELLS + 8 * 5, 1);
    driver.set(DOORBELLS + 4 + 8, 0xffff_ffff);
    driver.image.grow(Some(DISK * 2)).unwrap();
    driver.read_feature(6, 0);
    // The next completion is an event of another type.
    let cqe = driver.next(0);
    assert_eq!((cqe.id, cqe.result), (requests[1], 0x0004_0002));
    assert_eq!(driver.identify(0, 1)[..8], (DISK / 256).to_le_bytes());
    assert_eq!(driver.log(4, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(driver.log(4, 8), [0; 8]);
    driver.log(1, 64);
    let first = driver.next(0);
    assert_eq!(first.id, requests[2]);
    driver.log(1, 64);
    let second = driver.next(0);
    let results = BTreeSet::from([first.result, second.result]);
    assert_eq!(results, BTreeSet::from([0x0001_0000, 0x0001_0100]));
    assert_eq!(driver.run(1, transfer(2, DISK / 512, 1, (DATA, 0))).status, 0, "the new blocks");
}

#[test]
fn features_persist_until_a_reset() {
    let mut driver = Driver::enabled();
    let set = [(1, 0x0203_0405), (4, 0x190), (5, 7), (8, 0x0102), (9, 0x1_0003), (10, 1), (11, 0)];
    let defaults = [(1, 0), (2, 0), (4, 343), (6, 1), (7, 0x0007_0007), (8, 0), (10, 0), (11, 256)];
    for round in 0..2 {
        for (feature, value) in defaults {
            assert_eq!(driver.read_feature(feature, 0).result, value, "feature {feature}");
        }
        if round == 1 {
            break;
        }
        for (feature, value) in set {
            let nsid = u32::from(feature == 5);
            let dwords = [(10, feature), (11, value)];
            assert_eq!(driver.admin(with(command(9, nsid), &dwords)).status, 0, "{feature}");
            let argument = if feature == 9 { 3 } else { 0 };
            let dwords = [(10, feature), (11, argument)];
            let cqe = driver.admin(with(command(10, nsid), &dwords));
            assert_eq!((cqe.status, cqe.result), (0, value), "{feature}");
            let cqe = driver.admin(with(command(10, nsid), &[(10, 0x300 | feature)]));
            assert_eq!(cqe.result & 4, 4, "{feature} can be changed");
        }
        assert_eq!(driver.feature(7, 0x0001_0001).result, 0x0007_0007);
        assert_eq!(driver.read_feature(0x104, 0).result, 343, "the default");
        driver.disable();
        driver.enable();
    }
}

#[test]
fn logs_count_transfers() {
    let mut driver = Driver::ready(16);
    for _ in 0..3 {
        driver.run(1, transfer(1, 0, 256, (DATA, LISTS)));
    }
    driver.run(1, transfer(2, 0, 8, (DATA, 0)));
    let health = driver.log(2, 512);
    let number = |at: usize| u64::from_le_bytes(*health[at..].first_chunk().unwrap());
    assert_eq!(number(64), 1, "reads");
    assert_eq!(number(32), 1, "thousands of sectors read, begun ones too");
    assert_eq!((number(80), health[1]), (3, 57));
    assert_eq!(driver.log(3, 16)[8..], *b"1.0     ");
    let supported = driver.log(0, 1024);
    assert_eq!(supported.chunks(4).filter(|it| it[0] == 1).count(), 6);
    let effects = driver.log(5, 4096);
    assert_eq!((effects[4 * 6], effects[4 * 0x80], effects[1024 + 4]), (1, 0, 3));
    driver.feature(4, 300);
    assert_eq!(driver.log(2, 512)[0], 2, "warmer than the guest wants");
}

#[test]
fn without_a_cache_every_write_is_durable() {
    let mut driver = Driver::ready(16);
    driver.disk.seen();
    driver.run(1, transfer(1, 0, 1, (DATA, 0)));
    driver.run(1, with(transfer(1, 0, 1, (DATA, 0)), &[(12, 1 << 30)]));
    let write = |durable| Operation::Write { durable };
    assert_eq!(driver.disk.seen(), [write(false), write(true)]);
    assert_eq!(driver.feature(6, 0).status, 0);
    assert_eq!(driver.read_feature(6, 0).result, 0);
    driver.run(1, transfer(1, 0, 1, (DATA, 0)));
    driver.run(1, with(command(8, 1), &[(12, 7)]));
    driver.run(1, command(0, u32::MAX));
    let zeroes = Operation::WriteZeroes { unmap: false };
    let seen = [Operation::Flush, write(true), zeroes, Operation::Flush, Operation::Flush];
    assert_eq!(driver.disk.seen(), seen);
    driver.feature(6, 1);
    driver.run(1, with(command(8, 1), &[(12, 1 << 25 | 7)]));
    assert_eq!(driver.disk.seen(), [Operation::WriteZeroes { unmap: true }]);
}

#[test]
fn zeroes_and_discards_change_only_their_blocks() {
    let mut driver = Driver::ready(16);
    let data = pattern(1, 64 << 10);
    driver.fill(DATA, &data);
    let pages: Vec<u64> = (1..16).map(|page| DATA + page * 4096).collect();
    let pointers = driver.list(DATA, &pages, LISTS);
    assert_eq!(driver.run(1, transfer(1, 0, 128, pointers)).status, 0);
    assert_eq!(driver.run(1, with(command(8, 1), &[(10, 5), (12, 2)])).status, 0);
    // Blocks 16 to 31 and 64 to 71. The second command has an invalid range, so nothing is
    // discarded.
    let range = |first: u64, blocks: u32| {
        [&[0; 4][..], &blocks.to_le_bytes(), &first.to_le_bytes()].concat()
    };
    let ranges = [range(16, 16), range(64, 8), range(3, 0)].concat();
    driver.fill(PAGE, &ranges);
    let dataset = |count: u32| prp(with(command(9, 1), &[(10, count - 1), (11, 4)]), (PAGE, 0));
    assert_eq!(driver.run(1, dataset(3)).status, 0);
    driver.fill(PAGE, &[range(40, 8), range(DISK / 512, 1)].concat());
    assert_eq!(driver.run(1, dataset(2)).code(), 0x80);
    driver.fill(DATA, &vec![7; 64 << 10]);
    assert_eq!(driver.run(1, transfer(2, 0, 128, pointers)).status, 0);
    for block in 0..128 {
        let gone = matches!(block, 5..=7 | 16..=31 | 64..=71);
        let expected = if gone { &[0; 512][..] } else { &data[block * 512..][..512] };
        assert_eq!(driver.data::<512>(DATA + block as u64 * 512), expected, "{block}");
    }
}

#[test]
fn excess_ranges_wait_and_are_completed_or_dropped() {
    const QUEUES: u16 = 16;
    let mut driver = Driver::with_queues(QUEUES);
    let ranges = (0..256_u64)
        .flat_map(|it| [&[0; 4][..], &8_u32.to_le_bytes(), &(it * 8).to_le_bytes()].concat());
    driver.fill(LISTS, &ranges.collect::<Vec<u8>>());
    let deallocate = prp(with(command(9, 1), &[(10, 255), (11, 4)]), (LISTS, 0));
    let start = |driver: &mut Driver| {
        driver.enable();
        for id in 1..=QUEUES {
            driver.create(id, 1024);
            // After 255 commands with one request each, one command with 256 ranges still starts.
            for _ in 0..255 {
                driver.put(id.into(), transfer(2, 0, 1, (DATA, 0)));
            }
            for _ in 0..256 {
                driver.put(id.into(), deallocate);
            }
            driver.ring(id.into());
        }
    };
    let max = usize::from(QUEUES) * 511;
    assert!(max * size_of::<Request>() < 1 << 20, "memory of requests in flight");
    let in_flight = |driver: &Driver| {
        driver.wait("all there is room for", || driver.disk.seen.lock().unwrap().len() >= max);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(driver.disk.seen().len(), max);
    };
    driver.disk.set(WAIT);
    start(&mut driver);
    in_flight(&driver);
    // A pause keeps them, in any order. Deleting a queue ends only its own commands.
    let saved = driver.bench.board.park();
    driver.bench.board.run(saved).unwrap();
    in_flight(&driver);
    assert_eq!(driver.admin(with(command(0, 0), &[(10, 1)])).status, 0);
    for _ in 0..256 {
        assert_eq!(driver.next(1).code(), 0x08);
    }
    assert_eq!(driver.poll(1), None);
    driver.disable();
    driver.disk.seen();
    driver.disk.set(GO);
    start(&mut driver);
    for id in 1..=QUEUES {
        for _ in 0..511 {
            assert_eq!(driver.next(id.into()).status, 0);
        }
        assert_eq!(driver.poll(id.into()), None);
    }
    let discards = driver.disk.seen().into_iter().filter(|it| *it == Operation::Discard);
    assert_eq!(discards.count(), usize::from(QUEUES) * 256 * 256);
}

#[test]
fn a_queue_of_which_a_part_cannot_be_read_is_deleted() {
    let mut driver = Driver::new();
    for _ in 0..20 {
        driver.enable();
        driver.create(1, 1024);
        // Its first 64 entries are in the last page of memory.
        let (id, at) = (2, RAM as u64 - 4096);
        let sq = with(command(1, 0), &[(10, id | 1023 << 16), (11, 1 << 16 | 1)]);
        assert_eq!(driver.admin(prp(sq, (at, 0))).status, 0);
        // In most rounds it fails while the controller is busy, which then deletes it.
        for _ in 0..20 {
            driver.put(0, prp(with(command(6, 1), &[(10, 0)]), (PAGE, 0)));
        }
        driver.put(0, with(command(0, 0), &[(10, id)]));
        driver.ring(0);
        driver.set(DOORBELLS + 8 * u64::from(id), 100);
        driver.disable();
    }
}

#[test]
fn a_failing_disk_gives_error_statuses() {
    let mut driver = Driver::ready(16);
    driver.disk.fails.store(true, Ordering::SeqCst);
    assert_eq!(driver.run(1, transfer(2, 0, 1, (DATA, 0))).code(), 0x281);
    assert_eq!(driver.run(1, transfer(1, 0, 1, (DATA, 0))).code(), 0x280);
    assert_eq!(driver.run(1, command(0, 1)).code(), 0x06);
    driver.disk.fails.store(false, Ordering::SeqCst);
    assert_eq!(driver.log(2, 512)[160], 2, "media errors");
    assert_eq!(driver.run(1, transfer(2, 0, 1, (DATA, 0))).status, 0);
}

#[test]
fn a_full_completion_queue_is_not_overwritten() {
    let mut driver = Driver::enabled();
    driver.create(1, 64);
    // A small completion queue for 64 commands.
    let cq = with(command(5, 0), &[(10, 2 | 3 << 16), (11, 3)]);
    let at = QUEUES_AT + 0x4_0000;
    assert_eq!(driver.admin(prp(cq, (at, 0))).status, 0);
    let sq = with(command(1, 0), &[(10, 2 | 63 << 16), (11, 2 << 16 | 1)]);
    assert_eq!(driver.admin(prp(sq, (at + 0x1_0000, 0))).status, 0);
    driver.sq.push(Ring::new(2, at + 0x1_0000, 64));
    driver.cq.push(Ring::new(2, at, 4));
    let ids: Vec<u16> = (0..40).map(|n| driver.put(2, transfer(2, n, 1, (DATA, 0)))).collect();
    driver.ring(2);
    let mut seen = Vec::new();
    while seen.len() < ids.len() {
        let before = seen.len();
        std::thread::sleep(Duration::from_millis(1));
        while let Some(cqe) = driver.poll(2) {
            seen.push(cqe.id);
        }
        assert!(seen.len() - before <= 3, "four entries hold three");
        driver.free(2);
    }
    assert_eq!(seen, ids);
}

#[test]
fn the_interrupt_line_is_high_while_completions_are_pending() {
    let mut driver = Driver::ready(16);
    let pins = driver.bench.hypervisor.pins.clone();
    driver.wait("the fall", || !pins.is_high(GSI));
    driver.submit(1, transfer(2, 0, 1, (DATA, 0)));
    driver.wait("the interrupt", || pins.is_high(GSI));
    driver.set(INTMS, 1);
    assert!(!pins.is_high(GSI));
    assert_eq!((driver.get(INTMS), driver.get(INTMC)), (1, 1));
    driver.set(INTMC, 1);
    assert!(pins.is_high(GSI));
    driver.next(1);
    assert!(!pins.is_high(GSI), "at once: the guest's next instruction is the end of interrupt");
    driver.submit(1, transfer(2, 0, 1, (DATA, 0)));
    driver.wait("the interrupt", || pins.is_high(GSI));
    driver.disable();
    assert!(!pins.is_high(GSI));
}

#[test]
fn shadow_doorbells_notify_only_on_request() {
    let mut driver = Driver::enabled();
    assert_eq!(driver.identify(1, 0)[257], 0, "not with an interrupt line");
    driver.messages();
    assert_eq!(driver.identify(1, 0)[257], 1);
    driver.create(1, 64);
    assert_eq!(driver.run(1, transfer(2, 0, 1, (DATA, 0))).status, 0);
    for (two, code) in [(PAGE + 8, 0x02), (0, 0x02), (1 << 40, 0x04)] {
        assert_eq!(driver.admin(prp(command(0x7c, 0), (PAGE, two))).code(), code, "{two:#x}");
    }
    let (shadow, event) = (PAGE + 0x1000, PAGE + 0x2000);
    assert_eq!(driver.admin(prp(command(0x7c, 0), (shadow, event))).status, 0);
    assert_eq!(driver.data(shadow + 8), [1, 0, 0, 0], "as the registers were");
    driver.create(2, 64);
    let bells = driver.bench.hypervisor.bells();
    let addresses: Vec<_> = bells.iter().map(|bell| (bell.address - BAR0, bell.length)).collect();
    assert_eq!(addresses, [(0x1008, 4), (0x1010, 4)]);
    let mut rings = 0;
    for round in 0..1000_u64 {
        let pair = 1 + (round % 2) as usize;
        let offset = 8 * pair as u64;
        let old = driver.sq[pair].index;
        let id = driver.put(pair, transfer(2, round % 64, 1, (DATA, 0)));
        let new = driver.sq[pair].index;
        driver.fill(shadow + offset, &new.to_le_bytes());
        std::sync::atomic::fence(Ordering::SeqCst);
        let asked = u32::from_le_bytes(driver.data(event + offset));
        let word = |value: u32| u16::try_from(value & 0xffff).unwrap();
        if word(new.wrapping_sub(asked).wrapping_sub(1)) < word(new.wrapping_sub(old)) {
            rings += 1;
            // The value of the ring does not matter.
            driver.set(DOORBELLS + offset, 0);
        }
        let start = Instant::now();
        let cqe = loop {
            if let Some(cqe) = driver.poll(pair) {
                break cqe;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "round {round} was not heard");
            std::thread::yield_now();
        };
        assert_eq!((cqe.id, cqe.status), (id, 0));
        driver.fill(shadow + offset + 4, &driver.cq[pair].index.to_le_bytes());
    }
    assert!(rings > 0);
    driver.fill(shadow + 8, &64_u32.to_le_bytes());
    let request = driver.submit(0, command(0x0c, 0));
    driver.set(DOORBELLS + 8, 0);
    let cqe = driver.next(0);
    assert_eq!((cqe.id, cqe.result), (request, 0x0001_0100), "a shadow beyond the end");
    driver.disable();
    assert!(driver.bench.hypervisor.bells().is_empty());
}

#[test]
fn a_shutdown_flushes_and_reports_completion() {
    let mut driver = Driver::ready(16);
    driver.disk.seen();
    for request in [1 << 14, 2 << 14] {
        driver.set(CC, 0x0046_0001 | request);
        driver.wait("the shutdown", || driver.get(CSTS) == 0b1001);
        assert_eq!(driver.disk.seen(), [Operation::Flush]);
        driver.disable();
        driver.enable();
    }
}

#[test]
fn an_invalid_enable_is_a_fatal_status_until_the_next_reset() {
    let mut driver = Driver::new();
    let good = (31 * 0x1_0001, low(ADMIN_SQ), 0x0046_0001);
    for (aqa, asq, cc) in [
        (0, good.1, good.2),
        (31, good.1, good.2),
        (good.0, good.1, 0x0046_0011),
        (good.0, good.1, 0x0046_0801),
        (good.0, good.1, 0x0046_0281),
        (good.0, low(ADMIN_SQ) + 0x1000, 0x0046_0081),
    ] {
        driver.set(AQA, aqa);
        driver.set(ASQ, asq);
        driver.set(CC, cc);
        driver.wait("the fatal status", || driver.get(CSTS) == 2);
        driver.disable();
    }
    driver.enable();
    // Queues outside of memory.
    driver.disable();
    driver.set(0x2c, 1);
    driver.set(CC, 0x0046_0001);
    driver.wait("readiness", || driver.get(CSTS) & 1 == 1);
    driver.set(DOORBELLS, 1);
    driver.wait("the fatal status", || driver.get(CSTS) == 3);
    driver.disable();
    // A queue that is partly in memory: commands read from it must not survive the reset.
    driver.set(AQA, 127 * 0x1_0001);
    driver.set(ASQ, low(RAM as u64 - 4096));
    driver.set(0x2c, 0);
    driver.set(CC, 0x0046_0001);
    driver.wait("readiness", || driver.get(CSTS) & 1 == 1);
    driver.set(DOORBELLS, 80);
    driver.wait("the fatal status", || driver.get(CSTS) == 3);
    driver.disable();
    driver.enable();
    driver.create(1, 16);
    // Without bus mastering, the function does not access memory.
    driver.config(0x04, 2);
    driver.submit(1, transfer(2, 0, 1, (DATA, 0)));
    driver.wait("the fatal status", || driver.get(CSTS) == 3);
    driver.config(0x04, 6);
    assert_eq!(driver.poll(1), None);
    driver.disable();
    driver.enable();
}

#[test]
fn pages_may_be_larger() {
    let mut driver = Driver::new();
    driver.set(AQA, 0x001f_001f);
    driver.set(ASQ, low(ADMIN_SQ));
    driver.set(ACQ, low(ADMIN_CQ));
    driver.set(CC, 0x0046_0201);
    driver.wait("readiness", || driver.get(CSTS) == 1);
    driver.sq = vec![Ring::new(0, ADMIN_SQ, 32)];
    driver.cq = vec![Ring::new(0, ADMIN_CQ, 32)];
    driver.create(1, 16);
    driver.fill(DATA, &pattern(3, 0x2_0000));
    assert_eq!(driver.run(1, transfer(1, 0, 256, (DATA, DATA + 0x1_0000))).status, 0);
    let pointers = (DATA + 0x10_0000 + 0x8000, DATA + 0x20_0000);
    assert_eq!(driver.run(1, transfer(2, 0, 128, pointers)).status, 0);
    assert_eq!(driver.data::<4096>(DATA + 0x20_0000), driver.data(DATA + 0x8000));
}

#[test]
fn a_reset_completes_only_after_all_requests_in_flight() {
    let mut driver = Driver::enabled();
    for round in 0..30_u64 {
        driver.create(1, 64);
        driver.create(2, 64);
        driver.fill(DATA, &pattern(round, 4096));
        for n in 0..60 {
            driver.put(1, transfer(1, n * 8, 8, (DATA, 0)));
            driver.put(2, transfer(2, n * 8, 8, (DATA + 0x10_0000 + n * 4096, 0)));
        }
        driver.ring(1);
        driver.ring(2);
        if round % 3 == 0 {
            std::thread::yield_now();
        }
        driver.disable();
        let length = 60 * 4096;
        driver.fill(DATA + 0x10_0000, &vec![0xee; length]);
        std::thread::sleep(Duration::from_micros(200));
        let mut after = vec![0; length];
        driver.bench.memory.read(DATA + 0x10_0000, &mut after).unwrap();
        assert!(after.iter().all(|byte| *byte == 0xee), "round {round}: written after the reset");
        driver.enable();
    }
    // Enabled again before the controller noticed that it was disabled.
    driver.create(1, 64);
    driver.set(CC, 0x0046_0000);
    driver.set(CC, 0x0046_0001);
    driver.wait("readiness", || driver.get(CSTS) == 1);
    driver.disable();
    driver.enable();
}

#[test]
fn a_reset_waits_for_running_requests_and_drops_queued_ones() {
    let mut driver = Driver::ready(16);
    driver.disk.set(WAIT);
    driver.submit(1, transfer(2, 0, 1, (DATA, 0)));
    driver.wait("the request", || !driver.disk.seen.lock().unwrap().is_empty());
    driver.disable();
    driver.disk.set(GO);
    driver.enable();
    driver.create(1, 16);
    assert_eq!(driver.run(1, transfer(2, 0, 1, (DATA, 0))).status, 0);
}

#[test]
fn deleting_a_queue_ends_only_its_commands() {
    let mut driver = Driver::ready(16);
    let at = QUEUES_AT + 0x4_0000;
    let sq = with(command(1, 0), &[(10, 2 | 15 << 16), (11, 1 << 16 | 1)]);
    assert_eq!(driver.admin(prp(sq, (at, 0))).status, 0);
    driver.sq.push(Ring::new(2, at, 16));
    driver.disk.set(WAIT);
    driver.disk.seen();
    let mine = driver.submit(1, transfer(2, 0, 1, (DATA, 0)));
    let others = driver.submit(2, transfer(2, 0, 1, (DATA, 0)));
    driver.wait("the requests", || driver.disk.seen.lock().unwrap().len() == 2);
    assert_eq!(driver.admin(with(command(0, 0), &[(10, 1)])).status, 0);
    let cqe = driver.next(1);
    assert_eq!((cqe.id, cqe.queue, cqe.code()), (mine, 1, 0x08));
    driver.disk.set(GO);
    let cqe = driver.next(1);
    assert_eq!((cqe.id, cqe.queue, cqe.status), (others, 2, 0));
}

#[test]
fn park_and_run_lose_and_repeat_no_command() {
    let mut driver = Driver::enabled();
    driver.messages();
    driver.create(1, 64);
    driver.create(2, 16);
    let event = driver.submit(0, command(0x0c, 0));
    let mut asked = BTreeSet::new();
    let mut noise = Noise::new(5);
    for round in 0..300_u64 {
        for queue in [1, 2] {
            for _ in 0..noise.next().unwrap() % 12 {
                let block = u64::from(noise.next().unwrap()) * 8;
                let opcode = 1 + noise.next().unwrap() % 2;
                let id = driver.put(queue, transfer(opcode, block, 8, (DATA + block * 512, 0)));
                asked.insert(id);
            }
            driver.ring(queue);
        }
        if round % 3 == 0 {
            let saved = driver.bench.board.park();
            let json = serde_json::to_string(&saved).unwrap();
            driver.bench.board.run(serde_json::from_str(&json).unwrap()).unwrap();
        }
        while !asked.is_empty() {
            for queue in [1, 2] {
                if let Some(cqe) = driver.poll(queue) {
                    assert_eq!(cqe.status, 0);
                    assert!(asked.remove(&cqe.id), "{cqe:?} in round {round}");
                    driver.free(queue);
                }
            }
        }
    }
    driver.set(DOORBELLS + 8, 999);
    let cqe = driver.next(0);
    assert_eq!(cqe.id, event, "a request for an event outlives them all");
    assert_eq!((driver.poll(1), driver.poll(2)), (None, None));
}

#[test]
fn a_write_held_for_space_is_parked_and_resubmitted() {
    let mut driver = Driver::ready(16);
    driver.disk.set(WAIT);
    driver.fill(DATA, &pattern(9, 512));
    let write = driver.submit(1, transfer(1, 7, 1, (DATA, 0)));
    driver.wait("the request", || !driver.disk.seen.lock().unwrap().is_empty());
    let saved = driver.bench.board.park();
    driver.bench.board.run(saved.clone()).unwrap();
    assert_eq!(driver.poll(1), None);
    let again = driver.bench.board.park();
    assert_eq!(again, saved, "nothing has happened");
    driver.disk.set(GO);
    driver.bench.board.run(again).unwrap();
    let cqe = driver.next(1);
    assert_eq!((cqe.id, cqe.status), (write, 0));
    driver.run(1, transfer(2, 7, 1, (DATA + 4096, 0)));
    assert_eq!(driver.data::<512>(DATA + 4096), pattern(9, 512)[..]);
}

/// Parks while a flush waits for disk space. The flush may be repeated until then.
fn park_in_flush(driver: &Driver) -> Vec<(String, Saved)> {
    let (disk, board) = (&driver.disk, &driver.bench.board);
    std::thread::scope(|scope| {
        let parking = scope.spawn(|| board.park());
        let start = Instant::now();
        while !parking.is_finished() {
            if start.elapsed() > Duration::from_secs(20) {
                disk.set(GO);
                panic!("parking waits for disk space");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let saved = parking.join().unwrap();
        assert!(disk.seen().iter().all(|it| *it == Operation::Flush));
        saved
    })
}

#[test]
fn a_shutdown_held_for_space_is_parked_and_flushes_later() {
    let mut driver = Driver::ready(16);
    driver.disk.set(WAIT);
    driver.disk.seen();
    driver.set(CC, 0x0046_0001 | 1 << 14);
    driver.wait("the flush", || !driver.disk.seen.lock().unwrap().is_empty());
    let saved = park_in_flush(&driver);
    driver.bench.board.run(saved.clone()).unwrap();
    driver.wait("the flush again", || !driver.disk.seen.lock().unwrap().is_empty());
    assert_eq!(driver.get(CSTS), 0b0101, "the shutdown is not complete");
    let again = park_in_flush(&driver);
    assert_eq!(again, saved, "nothing has happened");
    driver.disk.set(GO);
    driver.bench.board.run(again).unwrap();
    driver.wait("the shutdown", || driver.get(CSTS) == 0b1001);
    assert_eq!(driver.disk.seen(), [Operation::Flush]);
    // A machine reset during a shutdown leads to the power-on state.
    driver.disable();
    driver.enable();
    driver.disk.set(WAIT);
    driver.set(CC, 0x0046_0001 | 1 << 14);
    driver.wait("the flush", || !driver.disk.seen.lock().unwrap().is_empty());
    park_in_flush(&driver);
    driver.bench.board.run(Vec::new()).unwrap();
    driver.assign_bars();
    assert_eq!(driver.get(CSTS), 0);
    driver.disk.set(GO);
    driver.enable();
}

#[test]
fn a_flush_held_for_space_is_parked_and_answered_later() {
    let mut driver = Driver::ready(16);
    driver.disk.set(WAIT);
    driver.disk.seen();
    let asked = driver.submit(0, with(command(9, 0), &[(10, 6)]));
    let after = driver.submit(0, with(command(10, 0), &[(10, 6)]));
    driver.wait("the flush", || !driver.disk.seen.lock().unwrap().is_empty());
    let saved = park_in_flush(&driver);
    let answers: Vec<u16> = std::iter::from_fn(|| driver.poll(0)).map(|it| it.id).collect();
    assert!(!answers.contains(&asked), "nothing is durable yet");
    driver.disk.set(GO);
    driver.bench.board.run(saved).unwrap();
    driver.free(0);
    let mut ids = answers;
    while ids.len() < 2 {
        let cqe = driver.next(0);
        assert_eq!(cqe.status, 0);
        ids.push(cqe.id);
    }
    assert!(ids.contains(&asked) && ids.contains(&after), "{ids:?}");
    assert_eq!(driver.disk.seen(), [Operation::Flush]);
    assert_eq!(driver.read_feature(6, 0).result, 0);
}

#[test]
fn a_growing_disk_is_reported_at_once() {
    let mut driver = Driver::enabled();
    let request = driver.submit(0, command(0x0c, 0));
    let drive = driver.bench.board.shared.disks.find("nvme").unwrap();
    drive.grow(Some(DISK * 2)).unwrap();
    let cqe = driver.next(0);
    assert_eq!((cqe.id, cqe.result), (request, 0x0004_0002));
    assert_eq!(driver.identify(0, 1)[..8], (DISK / 256).to_le_bytes());
}

#[test]
fn growth_while_parked_is_reported() {
    let mut driver = Driver::enabled();
    let request = driver.submit(0, command(0x0c, 0));
    let saved = driver.bench.board.park();
    driver.image.grow(Some(DISK + 4096)).unwrap();
    driver.bench.board.run(saved).unwrap();
    let cqe = driver.next(0);
    assert_eq!((cqe.id, cqe.result), (request, 0x0004_0002));
}

#[test]
fn parking_waits_for_requests_in_flight() {
    let mut driver = Driver::ready(16);
    driver.disk.set(HOLD);
    let id = driver.submit(1, transfer(2, 0, 1, (DATA, 0)));
    driver.wait("the request", || !driver.disk.seen.lock().unwrap().is_empty());
    let disk = driver.disk.clone();
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        disk.set(GO);
    });
    let saved = driver.bench.board.park();
    later.join().unwrap();
    let cqe = driver.poll(1).expect("it was done before the device was parked");
    assert_eq!((cqe.id, cqe.status), (id, 0));
    driver.bench.board.run(saved).unwrap();
    driver.free(1);
    assert_eq!(driver.run(1, transfer(2, 0, 1, (DATA, 0))).status, 0);
}

#[test]
fn a_hostile_driver_does_no_harm() {
    for seed in 0..4 {
        hostile(seed, 25_000);
    }
}

/// Random accesses, most of them nearly valid.
fn hostile(seed: u64, steps: u32) {
    let mut driver = Driver::ready(16);
    driver.create(2, 64);
    let mut noise = Noise::new(seed);
    let mut number = move || u32::from_le_bytes(std::array::from_fn(|_| noise.next().unwrap()));
    for step in 0..steps {
        let value = number();
        let queue = (value >> 8) as usize % driver.sq.len();
        match value % 32 {
            0..=11 => {
                let opcode = [0, 1, 2, 8, 9, 2, 1, 0x7f][(value >> 12 & 7) as usize];
                let block = u64::from(number() % 0x9000);
                let pointers = (u64::from(number() % 0x100_0000) & !3, u64::from(number()) & !7);
                let dwords = transfer(opcode, block, 1 + number() % 64, pointers);
                driver.put(queue.max(1).min(driver.sq.len() - 1), dwords);
            }
            12..=15 => {
                let mut dwords: Dwords = std::array::from_fn(|_| number());
                dwords[0] &= 0xff0f;
                dwords[1] &= 1;
                (dwords[6], dwords[7]) = (dwords[6] & 0xff_f000, 0);
                (dwords[10], dwords[11]) = (dwords[10] & 0xf_000f, dwords[11] & 0xf_000f);
                driver.put(queue, dwords);
            }
            16..=22 => driver.ring(queue),
            23 => driver.set(DOORBELLS + u64::from(number() % 40) * 4, number() % 80),
            24 => driver.set(DOORBELLS + u64::from(number() % 0xc00) * 4, number()),
            25 => driver.set(u64::from(number() % 0x40) & !3, number()),
            26..=28 => {
                for queue in 0..driver.cq.len() {
                    while driver.poll(queue).is_some() {}
                    driver.free(queue);
                }
            }
            29 if value >> 20 < 0x100 => {
                let saved = driver.bench.board.park();
                driver.bench.board.run(saved).unwrap();
            }
            30 if value >> 20 < 0x100 => driver.config(0x04, number() & 6),
            31 if value >> 20 < 0x200 => {
                driver.config(0x04, 6);
                // The result of the last write to CC must not be mistaken for that of the next one:
                // wait until CSTS.RDY matches CC.EN, or for a fatal status.
                let (status, configured) = (|| driver.get(CSTS), || driver.get(CC));
                driver.wait("an end", || status() & 2 != 0 || (status() ^ configured()) & 1 == 0);
                driver.set(CC, 0);
                driver.wait("a reset", || driver.get(CSTS) & 1 == 0);
                driver.enable();
                driver.create(1, 16);
                driver.create(2, 64);
            }
            _ => assert_ne!(driver.get(u64::from(value >> 8 & 0xf) * 4), 0xdead_beef, "{step}"),
        }
    }
    driver.config(0x04, 6);
    driver.bench.board.reset().unwrap();
    driver.assign_bars();
    driver.enable();
    driver.create(1, 16);
    driver.fill(DATA, &pattern(seed, 512));
    assert_eq!(driver.run(1, transfer(1, 0, 1, (DATA, 0))).status, 0, "seed {seed}");
}

#[test]
fn invalid_serial_numbers_and_queue_counts_are_refused() {
    let long = "123456789012345678901";
    let configs = [
        disk::Config { queues: Some(0), ..disk::Config::new("disk") },
        disk::Config { queues: Some(65), ..disk::Config::new("disk") },
        disk::Config { serial: Some(String::new()), ..disk::Config::new("disk") },
        disk::Config { serial: Some(long.to_owned()), ..disk::Config::new("disk") },
        disk::Config { serial: Some("ü".to_owned()), ..disk::Config::new("disk") },
    ];
    for config in configs {
        let mut bench = Bench::new(4096);
        let shown = format!("{config:?}");
        let add = bench.board.add("nvme", |grants| Config(config).attach(memory(4096), grants));
        assert!(add.is_err(), "{shown}");
    }
}
