//! A controller with ordinary drivers, and with hostile ones.

use std::fs::File;
use std::mem;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use super::*;
use crate::device::Kind;
use crate::pci::Address;
use crate::registry;
use crate::testutil::Bench;
use crate::testutil::driver::Driver;
use host::disk::{Channel, Completion, Geometry, Image, Request, memory};
use host::memory::Memory;
use host::testutil::noise::Noise;

const AT: Address = Address::new(3, 0);
const SIZE: u64 = 8 << 20;
const UNIT: [u8; 8] = [1, 0, 0x40, 0, 0, 0, 0, 0];
/// The first request queue.
const FIRST: u16 = REQUESTS;
const CHECK: u8 = 2;
const POWER_ON: (u8, u8, u8) = (6, 0x29, 0);
const GREW: (u8, u8, u8) = (6, 0x2a, 9);

fn bench(queues: u16) -> Bench {
    bench_with(queues, memory(SIZE))
}

fn bench_with(queues: u16, image: Arc<dyn Image>) -> Bench {
    let mut bench = Bench::new(8 << 20);
    let add = |grants: &mut dyn Grants| {
        let config = host::disk::Config { serial: Some("a disk".into()), ..config() };
        let drive = config.drive(image, grants.name())?;
        grants.shared().disks.add(&drive);
        on_pci(Scsi::new(drive, queues)?, Some(AT), grants)
    };
    bench.board.add("virtio-scsi", add).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

/// A disk that counts its requests. While `held` is set, it starts none of them.
struct Counted {
    below: Arc<dyn Image>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    held: AtomicBool,
    has: AtomicUsize,
    max: AtomicUsize,
}

struct CountedChannel {
    below: Box<dyn Channel>,
    state: Arc<State>,
    pending: Vec<Request>,
}

impl Image for Counted {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }
    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        let (below, state) = (self.below.channel(memory)?, self.state.clone());
        Ok(Box::new(CountedChannel { below, state, pending: Vec::new() }))
    }
    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        self.below.grow(size)
    }
}

impl Channel for CountedChannel {
    fn push(&mut self, request: Request) {
        let has = self.state.has.fetch_add(1, Ordering::SeqCst) + 1;
        self.state.max.fetch_max(has, Ordering::SeqCst);
        self.pending.push(request);
    }
    fn submit(&mut self) {
        if !self.state.held.load(Ordering::SeqCst) {
            self.pending.drain(..).for_each(|request| self.below.push(request));
            self.below.submit();
        }
    }
    fn reap(&mut self, done: &mut Vec<Completion>) {
        self.submit();
        let before = done.len();
        self.below.reap(done);
        self.state.has.fetch_sub(done.len() - before, Ordering::SeqCst);
    }
    fn event(&self) -> BorrowedFd<'_> {
        self.below.event()
    }
    fn withdraw(&mut self) -> Vec<Request> {
        self.state.has.fetch_sub(self.pending.len(), Ordering::SeqCst);
        mem::take(&mut self.pending)
    }
}

fn config() -> host::disk::Config {
    host::disk::Config::new("memory")
}

fn driver(bench: &Bench) -> Driver<'_> {
    let mut driver = Driver::find(bench, AT);
    assert!(driver.negotiate(HOTPLUG | CHANGE));
    for queue in 0..u16::try_from(driver.queues.len()).unwrap() {
        driver.enable(queue, QUEUE_SIZE);
    }
    driver.start();
    driver
}

/// Starts a driver and consumes its power-on unit attention.
fn attended(bench: &Bench) -> Driver<'_> {
    let mut driver = driver(bench);
    assert_eq!(ask(&mut driver, &[0; 6], &Data::None).sense(), POWER_ON);
    driver
}

/// The data of a command: to the device, or from the device.
enum Data<'a> {
    None,
    Out(&'a [u8]),
    In(u32),
}

/// The result of a command.
#[derive(Debug)]
struct Ended {
    response: u8,
    status: u8,
    sense: Vec<u8>,
    residual: u32,
    used: u32,
    data: Vec<u8>,
}

impl Ended {
    fn sense(&self) -> (u8, u8, u8) {
        assert_eq!((self.response, self.status), (OK, CHECK), "{self:?}");
        (self.sense[2] & 0xf, self.sense[12], self.sense[13])
    }

    fn data(self) -> Vec<u8> {
        assert_eq!((self.response, self.status), (OK, 0), "{self:?}");
        self.data
    }
}

use self::target::{ABORTED, BAD_TARGET, FAILURE, INCORRECT_LUN, OK, OVERRUN, REJECTED, RESET};

/// A command in flight: its head, and addresses of its response and data with the data's length.
struct Begun(u16, u64, u64, u32);

/// The queue, the logical unit and the identifier of a task.
#[derive(Clone, Copy)]
struct Task {
    queue: u16,
    lun: [u8; 8],
    id: u64,
}

fn unit_task(id: u64) -> Task {
    Task { queue: FIRST, lun: UNIT, id }
}

fn begin(driver: &mut Driver<'_>, task: Task, cdb: &[u8], data: &Data<'_>) -> Begun {
    let Task { queue, lun, id } = task;
    let mut bytes = [&lun[..], &id.to_le_bytes(), &[0, 0, 0], cdb].concat();
    bytes.resize(51, 0);
    let (header, response) = (driver.allocate(51), driver.allocate(108));
    driver.bench.memory.write(header, &bytes).unwrap();
    driver.bench.memory.write(response, &[0xee; 108]).unwrap();
    // The header in two pieces.
    let mut chain = vec![(header, 20, false), (header + 20, 31, false)];
    let (at, length) = match data {
        Data::None => (0, 0),
        Data::Out(bytes) => {
            let length = u32::try_from(bytes.len()).unwrap();
            let at = driver.allocate(length.into());
            driver.bench.memory.write(at, bytes).unwrap();
            chain.extend([(at, 7, false), (at + 7, length - 7, false)]);
            (at, length)
        }
        Data::In(length) => (driver.allocate((*length).into()), *length),
    };
    chain.push((response, 108, true));
    if let Data::In(length @ 8..) = data {
        chain.extend([(at, 7, true), (at + 7, length - 7, true)]);
    }
    Begun(driver.offer(queue, &chain), response, at, length)
}

fn end(driver: &Driver<'_>, begun: &Begun, used: u32) -> Ended {
    let bytes = driver.bytes(begun.1, 108);
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    Ended {
        response: bytes[11],
        status: bytes[10],
        sense: bytes[12..12 + word(0) as usize].to_vec(),
        residual: word(4),
        used,
        data: driver.bytes(begun.2, begun.3 as usize),
    }
}

fn ask_of(driver: &mut Driver<'_>, task: Task, cdb: &[u8], data: &Data<'_>) -> Ended {
    let begun = begin(driver, task, cdb, data);
    driver.kick(task.queue);
    let used = driver.wait(task.queue);
    assert_eq!(used.head, u32::from(begun.0));
    end(driver, &begun, used.length)
}

fn ask(driver: &mut Driver<'_>, cdb: &[u8], data: &Data<'_>) -> Ended {
    ask_of(driver, unit_task(7), cdb, data)
}

fn transfer(code: u8, block: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = code;
    cdb[2..10].copy_from_slice(&block.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

fn write(driver: &mut Driver<'_>, block: u64, bytes: &[u8]) {
    let blocks = u32::try_from(bytes.len() / 512).unwrap();
    let ended = ask(driver, &transfer(0x8a, block, blocks), &Data::Out(bytes));
    assert_eq!((ended.response, ended.status, ended.residual, ended.used), (OK, 0, 0, 108));
}

fn read(driver: &mut Driver<'_>, block: u64, blocks: u32) -> Vec<u8> {
    ask(driver, &transfer(0x88, block, blocks), &Data::In(blocks * 512)).data()
}

/// Sends a task management request. Returns the response code.
fn manage(driver: &mut Driver<'_>, function: u32, lun: [u8; 8], id: u64) -> u8 {
    let function = function.to_le_bytes();
    let bytes = [&[0; 4][..], &function, &lun, &id.to_le_bytes()].concat();
    control(driver, &bytes, 1)[0]
}

fn control(driver: &mut Driver<'_>, bytes: &[u8], room: u32) -> Vec<u8> {
    let (request, response) = (driver.allocate(64), driver.allocate(8));
    driver.bench.memory.write(request, bytes).unwrap();
    let length = u32::try_from(bytes.len()).unwrap();
    driver.offer(CONTROL, &[(request, length, false), (response, room, true)]);
    driver.kick(CONTROL);
    assert_eq!(driver.wait(CONTROL).length, room);
    driver.bytes(response, room as usize)
}

#[test]
fn has_the_configuration_that_the_windows_driver_expects() {
    let bench = bench(4);
    let driver = driver(&bench);
    assert_eq!(driver.config(0), [0xf4, 0x1a, 0x48, 0x10]);
    assert_eq!(driver.config::<4>(8)[1..], [0, 0, 1], "a SCSI controller");
    let word = |at: u64| u32::from_le_bytes(driver.device(at));
    assert_eq!([0, 4, 8, 12, 16, 20, 24].map(word), [4, 254, 0xffff, 128, 16, 96, 32]);
    assert_eq!((driver.device(28), driver.device(30), word(32)), ([0, 0], [255, 0], 16383));
    assert_eq!(bench.read::<2>(Kind::Config, AT.config() + 0x42), [6, 0], "7 vectors");
}

#[test]
fn written_data_is_read_on_every_queue() {
    let bench = bench(3);
    let mut driver = attended(&bench);
    let bytes: Vec<u8> = (0..=250).cycle().take(4096).collect();
    write(&mut driver, 8, &bytes);
    for queue in REQUESTS..REQUESTS + 3 {
        let task = Task { queue, lun: UNIT, id: 1 };
        let ended = ask_of(&mut driver, task, &transfer(0x88, 10, 4), &Data::In(2048));
        assert_eq!(ended.used, 108 + 2048);
        assert_eq!(ended.data(), bytes[1024..3072]);
        let mut flush = [0; 10];
        flush[0] = 0x35;
        assert_eq!(ask_of(&mut driver, task, &flush, &Data::None).data().len(), 0);
    }
}

#[test]
fn a_short_read_has_a_residual_and_a_small_buffer_gets_no_data() {
    let bench = bench(1);
    let mut driver = attended(&bench);
    let ended = ask(&mut driver, &transfer(0x88, 0, 1), &Data::In(1000));
    assert_eq!((ended.response, ended.residual, ended.used), (OK, 488, 108 + 512));
    let inquiry = [0x12, 0, 0, 0, 255, 0];
    let ended = ask(&mut driver, &inquiry, &Data::In(255));
    assert_eq!((ended.residual, ended.used), (255 - 36, 108 + 36));
    assert_eq!((ended.data[7], &ended.data[8..30]), (2, &b"TRANSOM SCSI disk     "[..]));
    assert_eq!(ask(&mut driver, &inquiry, &Data::In(20)).residual, 0, "cut");
    for (cdb, data) in [
        (transfer(0x88, 0, 2), Data::In(1023)),
        (transfer(0x88, 0, 1), Data::Out(&[0; 512])),
        (transfer(0x8a, 0, 2), Data::Out(&[0; 1023])),
        (transfer(0x8a, 0, 1), Data::In(512)),
        (transfer(0x88, 0, 1), Data::None),
    ] {
        let ended = ask(&mut driver, &cdb, &data);
        assert_eq!((ended.response, ended.used), (OVERRUN, 108), "{cdb:x?}");
    }
    // A bidirectional command.
    let begun = begin(&mut driver, unit_task(1), &[0; 6], &Data::Out(&[0; 512]));
    driver.kick(FIRST);
    driver.wait(FIRST);
    let header = driver.allocate(51);
    let chain = [(header, 51, false), (header, 20, false), (begun.1, 108, true), (header, 9, true)];
    driver.offer(FIRST, &chain);
    driver.kick(FIRST);
    driver.wait(FIRST);
    assert_eq!(end(&driver, &begun, 0).response, FAILURE);
    assert_eq!(driver.status(), 15, "none of this breaks the device");
}

#[test]
fn other_units_and_targets_do_not_exist() {
    let bench = bench(1);
    let mut driver = attended(&bench);
    let lun = |target, unit: u16| {
        let [high, low] = unit.to_be_bytes();
        [1, target, high | 0x40, low, 0, 0, 0, 0]
    };
    let inquiry = [0x12, 0, 0, 0, 36, 0];
    for (lun, response) in [
        ([1, 0, 0, 0, 0, 0, 0, 0], OK),
        (lun(1, 0), BAD_TARGET),
        (lun(255, 1), BAD_TARGET),
        ([0; 8], BAD_TARGET),
        ([1, 0, 0x80, 0, 0, 0, 0, 0], BAD_TARGET),
        ([0xc1, 1, 0, 0, 0, 0, 0, 0], BAD_TARGET),
    ] {
        let ended = ask_of(&mut driver, Task { queue: FIRST, lun, id: 1 }, &inquiry, &Data::In(36));
        assert_eq!(ended.response, response, "{lun:x?}");
    }
    for unit in [1, 0x3fff] {
        let task = Task { queue: FIRST, lun: lun(0, unit), id: 1 };
        assert_eq!(ask_of(&mut driver, task, &inquiry, &Data::In(36)).data()[0], 0x7f);
        let report = [0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0];
        let units = ask_of(&mut driver, task, &report, &Data::In(16)).data();
        assert_eq!(units, [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(ask_of(&mut driver, task, &[0; 6], &Data::None).sense(), (5, 0x25, 0));
        let sense = ask_of(&mut driver, task, &[3, 0, 0, 0, 18, 0], &Data::In(18)).data();
        assert_eq!((sense[2], sense[12]), (5, 0x25));
    }
}

#[test]
fn bad_lengths_and_lists_are_refused_and_good_lists_unmap() {
    let bench = bench(1);
    let mut driver = attended(&bench);
    write(&mut driver, 0, &[7; 16384]);
    // UNMAP of two ranges, whose contents may stay.
    let mut list = [&[0, 38, 0, 32][..], &[0; 4]].concat();
    for block in [0_u64, 8] {
        list.extend([&block.to_be_bytes()[..], &8_u32.to_be_bytes(), &[0; 4]].concat());
    }
    let unmap = [0x42, 0, 0, 0, 0, 0, 0, 0, 40, 0];
    assert_eq!(ask(&mut driver, &unmap, &Data::Out(&list)).data(), list);
    let mut same = transfer(0x93, 16, 8);
    assert_eq!(ask(&mut driver, &same, &Data::Out(&[0; 512])).status, 0);
    same[1] = 9;
    same[9] = 24;
    assert_eq!(ask(&mut driver, &same, &Data::None).status, 0, "no data, and room is given back");
    assert_eq!(read(&mut driver, 16, 16), [0; 8192]);
    let after = SIZE / 512;
    for (cdb, data, sense) in [
        (transfer(0x93, 0, 1), &[1; 512][..], (5, 0x26, 0)),
        (transfer(0x93, 0, 0), &[0; 512], (5, 0x24, 0)),
        (transfer(0x93, after, 1), &[0; 512], (5, 0x21, 0)),
        (transfer(0x8a, after, 1), &[0; 512], (5, 0x21, 0)),
        (transfer(0x8a, u64::MAX, 1), &[0; 512], (5, 0x21, 0)),
        (transfer(0x8a, u64::MAX / 512, 1), &[0; 512], (5, 0x21, 0)),
        (transfer(0x7f, 0, 0), &[0; 512], (5, 0x20, 0)),
    ] {
        assert_eq!(ask(&mut driver, &cdb, &Data::Out(data)).sense(), sense, "{cdb:x?}");
    }
    list[16] = 0x80;
    assert_eq!(ask(&mut driver, &unmap, &Data::Out(&list)).sense(), (5, 0x21, 0));
    // A data buffer outside of memory, which does not break the device.
    let begun = begin(&mut driver, unit_task(1), &[0; 6], &Data::None);
    driver.kick(FIRST);
    driver.wait(FIRST);
    let header = driver.allocate(51);
    let bytes = [&UNIT[..], &[0; 11], &transfer(0x88, 0, 1)].concat();
    bench.memory.write(header, &bytes).unwrap();
    driver.offer(FIRST, &[(header, 51, false), (begun.1, 108, true), (1 << 40, 512, true)]);
    driver.kick(FIRST);
    driver.wait(FIRST);
    assert_eq!(end(&driver, &begun, 0).sense(), (0xb, 0, 0));
}

#[test]
fn an_unanswerable_request_breaks_the_device() {
    let bench = bench(1);
    let at = 0x20_0000;
    for (queue, pieces) in [
        (FIRST, &[(at, 51, false)][..]),
        (FIRST, &[(at, 51, false), (at, 107, true)]),
        (FIRST, &[(at, 50, false), (at, 200, true)]),
        (CONTROL, &[(at, 24, false)]),
        (CONTROL, &[(at, 23, false), (at, 1, true)]),
    ] {
        let mut driver = driver(&bench);
        driver.offer(queue, pieces);
        driver.kick(queue);
        let start = Instant::now();
        while driver.status() & 64 == 0 {
            assert!(start.elapsed() < Duration::from_secs(10), "{pieces:?}");
        }
    }
}

#[test]
fn the_driver_sets_the_request_sizes() {
    let bench = bench(1);
    let driver = driver(&bench);
    for (at, size) in [(20, 20_u32), (24, 16), (20, 253), (24, 261), (0, 9), (21, 1)] {
        driver.set_device(at, &size.to_le_bytes());
    }
    driver.set_device(20, &[1, 0]);
    let mut driver = driver;
    let sizes = |driver: &Driver<'_>| (driver.device::<4>(20), driver.device::<4>(24));
    assert_eq!(sizes(&driver), ([20, 0, 0, 0], [16, 0, 0, 0]));
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    let (header, response) = (driver.allocate(35), driver.allocate(32));
    bench.memory.write(header, &UNIT).unwrap();
    driver.offer(FIRST, &[(header, 35, false), (response, 32, true)]);
    driver.kick(FIRST);
    assert_eq!(driver.wait(FIRST).length, 32);
    let bytes = driver.bytes(response, 32);
    assert_eq!((bytes[0], bytes[10], bytes[12], bytes[24]), (18, CHECK, 0x70, 0x29));
    assert_eq!(sizes(&self::driver(&bench)), ([96, 0, 0, 0], [32, 0, 0, 0]), "as new");
}

#[test]
fn a_growing_disk_is_reported_by_event_and_unit_attention() {
    let bench = bench(1);
    let mut driver = attended(&bench);
    let drive = bench.board.shared.disks.find("virtio-scsi").unwrap();
    let event = driver.allocate(16);
    let grown_size = |driver: &mut Driver<'_>| {
        assert_eq!(driver.wait(EVENTS).length, 16);
        assert_eq!(driver.bytes(event, 16), [3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x2a, 9, 0, 0]);
        assert_eq!(ask(driver, &[0; 6], &Data::None).sense(), GREW);
        assert_eq!(ask(driver, &[0; 6], &Data::None).status, 0);
        let capacity = ask(driver, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &Data::In(8)).data();
        let last = u32::from_be_bytes(capacity[..4].try_into().unwrap());
        (u64::from(last) + 1) * 512
    };
    driver.offer(EVENTS, &[(event, 16, true)]);
    drive.grow(Some(2 * SIZE)).unwrap();
    assert_eq!(grown_size(&mut driver), 2 * SIZE);
    write(&mut driver, SIZE / 512, &[7; 512]);
    // The event buffer comes later.
    drive.grow(Some(3 * SIZE)).unwrap();
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    driver.offer(EVENTS, &[(event, 16, true)]);
    driver.kick(EVENTS);
    assert_eq!(grown_size(&mut driver), 3 * SIZE);
    // The disk grows while the device is parked, with an event buffer offered before.
    driver.offer(EVENTS, &[(event, 16, true)]);
    let saved = bench.board.park();
    drive.grow(Some(4 * SIZE)).unwrap();
    bench.board.run(saved).unwrap();
    assert_eq!(grown_size(&mut driver), 4 * SIZE);
    assert_eq!(driver.take(EVENTS), None, "each growth once");
    // A driver that starts reads the size by itself.
    bench.board.park();
    drive.grow(Some(5 * SIZE)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    let mut again = attended(&bench);
    assert_eq!(ask(&mut again, &[0; 6], &Data::None).status, 0);
}

#[test]
fn pending_tasks_are_aborted_and_others_continue() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    File::create(&path).and_then(|it| it.set_len(SIZE)).unwrap();
    let mut bench = Bench::new(8 << 20);
    let fields = json!({ "path": path, "slot": "03.0", "queues": 2, "bandwidth": "1" });
    let config = registry::Config::of_kind("virtio-scsi", fields).unwrap().unwrap();
    bench.board.add("virtio-scsi", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    let mut driver = attended(&bench);
    let tasks: Vec<_> = (0..12_u16)
        .map(|id| {
            let queue = FIRST + id % 2;
            let task = Task { queue, lun: UNIT, id: id.into() };
            (queue, begin(&mut driver, task, &transfer(0x88, id.into(), 1), &Data::In(512)))
        })
        .collect();
    driver.kick(FIRST);
    driver.kick(FIRST + 1);
    let [abort, query, query_all, reset] = [0, 6, 7, 5];
    assert_eq!(manage(&mut driver, query, UNIT, 11), 10, "it is there");
    assert_eq!(manage(&mut driver, abort, UNIT, 11), OK);
    let (queue, last) = &tasks[11];
    let mut used = Vec::new();
    while let Some(it) = driver.take(*queue) {
        used.push(it.head);
    }
    assert!(used.contains(&last.0.into()), "it is over before the answer is: {used:?}");
    assert_eq!(end(&driver, last, 0).response, ABORTED);
    assert_eq!(manage(&mut driver, query, UNIT, 11), OK, "it is not there");
    assert_eq!(manage(&mut driver, query_all, UNIT, 0), 10, "others are");
    assert_eq!(manage(&mut driver, reset, UNIT, 0), OK);
    let ended: Vec<_> = tasks.iter().map(|(_, it)| end(&driver, it, 0).response).collect();
    assert!(ended[..11].iter().all(|it| matches!(*it, OK | RESET)), "{ended:?}");
    assert!(ended[..11].iter().filter(|it| **it == RESET).count() >= 6, "{ended:?}");
    assert_eq!(manage(&mut driver, query_all, UNIT, 0), OK, "none is left");
    for queue in [FIRST, FIRST + 1] {
        while driver.take(queue).is_some() {}
    }
    assert_eq!(ask(&mut driver, &[0; 6], &Data::None).sense(), POWER_ON);
}

#[test]
fn control_requests_for_others_are_refused() {
    let bench = bench(1);
    let mut driver = driver(&bench);
    for (function, lun, response) in [
        (0, UNIT, OK),
        (2, UNIT, REJECTED),
        (99, UNIT, REJECTED),
        (5, [1, 0, 0, 1, 0, 0, 0, 0], INCORRECT_LUN),
        (4, [1, 0, 0, 1, 0, 0, 0, 0], OK),
        (5, [1, 1, 0, 0, 0, 0, 0, 0], BAD_TARGET),
    ] {
        assert_eq!(manage(&mut driver, function, lun, 1), response, "{function} of {lun:?}");
    }
    for kind in [1_u32, 2] {
        let bytes = [&kind.to_le_bytes()[..], &UNIT, &[0xff; 4]].concat();
        assert_eq!(control(&mut driver, &bytes, 5), [0, 0, 0, 0, OK], "no events of media");
    }
}

#[test]
fn a_driver_may_use_a_single_request_queue() {
    let bench = bench(2);
    let mut driver = Driver::find(&bench, AT);
    assert!(driver.negotiate(0));
    driver.enable(FIRST, 4);
    driver.start();
    assert_eq!(ask(&mut driver, &[0; 6], &Data::None).sense(), POWER_ON);
    bench.board.shared.disks.find("virtio-scsi").unwrap().grow(Some(2 * SIZE)).unwrap();
    assert_eq!(ask(&mut driver, &[0; 6], &Data::None).sense(), GREW);
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    assert_eq!(ask(&mut driver, &[0; 6], &Data::None).sense(), GREW, "it may have missed it");
    assert_eq!(ask(&mut driver, &[0; 6], &Data::None).status, 0);
}

#[test]
fn a_random_driver_reads_its_writes_across_parks_and_resets() {
    let bench = bench(2);
    let mut model = vec![0_u8; usize::try_from(SIZE).unwrap()];
    let mut noise = Noise::new(3);
    for _ in 0..20 {
        let mut driver = attended(&bench);
        for _ in 0..40 {
            let block = noise.below(SIZE / 512 - 64);
            let blocks = u32::try_from(1 + noise.below(32)).unwrap();
            let at = usize::try_from(block * 512).unwrap();
            let range = at..at + blocks as usize * 512;
            match noise.below(5) {
                0 => {
                    let data: Vec<u8> = noise.by_ref().take(range.len()).collect();
                    write(&mut driver, block, &data);
                    model[range].copy_from_slice(&data);
                }
                1 => {
                    let same = transfer(0x93, block, blocks);
                    let ended = ask(&mut driver, &same, &Data::Out(&[0; 512]));
                    assert_eq!((ended.response, ended.status), (OK, 0));
                    model[range].fill(0);
                }
                2 => {
                    let saved = bench.board.park();
                    bench.board.run(saved).unwrap();
                }
                3 => assert_eq!(manage(&mut driver, 0, UNIT, 7), OK),
                _ => assert_eq!(read(&mut driver, block, blocks), model[range], "block {block}"),
            }
        }
    }
}

#[test]
fn a_full_queue_is_served_and_parked_midway() {
    let bench = bench(1);
    let mut driver = attended(&bench);
    for round in 0..10 {
        for task in 0..40 {
            let cdb = transfer(0x8a, task, 1);
            begin(&mut driver, unit_task(task), &cdb, &Data::Out(&[5; 512]));
        }
        driver.kick(FIRST);
        if round % 2 == 1 {
            let saved = bench.board.park();
            bench.board.run(saved).unwrap();
        }
        for _ in 0..40 {
            assert_eq!(driver.wait(FIRST).length, 108);
        }
        assert_eq!(driver.take(FIRST), None, "each is answered once");
    }
}

#[test]
fn excess_ranges_wait_and_are_completed_or_aborted() {
    let state = Arc::<State>::default();
    let bench = bench_with(1, Arc::new(Counted { below: memory(SIZE), state: state.clone() }));
    let mut driver = attended(&bench);
    let mut list = [&[16, 6, 16, 0][..], &[0; 4]].concat();
    for block in 0..256_u64 {
        list.extend([&block.to_be_bytes()[..], &1_u32.to_be_bytes(), &[0; 4]].concat());
    }
    let unmap = [0x42, 0, 0, 0, 0, 0, 0, 16, 8, 0];
    let all = |driver: &mut Driver<'_>| {
        state.held.store(true, Ordering::SeqCst);
        state.max.store(0, Ordering::SeqCst);
        let begun: Vec<_> =
            (0..40).map(|task| begin(driver, unit_task(task), &unmap, &Data::Out(&list))).collect();
        driver.kick(FIRST);
        begun
    };
    let ends = |driver: &mut Driver<'_>, begun: &[Begun], response: u8| {
        for _ in begun {
            driver.wait(FIRST);
        }
        assert_eq!(driver.take(FIRST), None, "each is answered once");
        for it in begun {
            let ended = end(driver, it, 0);
            assert_eq!((ended.response, ended.status), (response, 0));
        }
    };
    // All tasks are known, started or not. The last one is aborted.
    let mut begun = all(&mut driver);
    assert_eq!(manage(&mut driver, 6, UNIT, 39), 10, "it is there");
    assert_eq!(manage(&mut driver, 0, UNIT, 39), OK);
    ends(&mut driver, &begun.split_off(39), ABORTED);
    assert_eq!(manage(&mut driver, 6, UNIT, 39), OK, "it is not there");
    // A park keeps the others, which finish afterwards.
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    state.held.store(false, Ordering::SeqCst);
    driver.kick(FIRST);
    ends(&mut driver, &begun, OK);
    assert!(state.max.load(Ordering::SeqCst) < 512, "{state:?}");
    let begun = all(&mut driver);
    assert_eq!(manage(&mut driver, 1, UNIT, 0), OK);
    ends(&mut driver, &begun, ABORTED);
    assert!((256..512).contains(&state.max.load(Ordering::SeqCst)), "{state:?}");
}

#[test]
fn zero_queues_and_too_many_are_refused() {
    for queues in [0, 65] {
        let drive = Drive::new("disk", "a disk".into(), Path::new("memory"), memory(SIZE));
        let error = Scsi::new(Arc::new(drive), queues).err().unwrap().to_string();
        assert!(error.contains("1 to 64"), "{error}");
    }
}
