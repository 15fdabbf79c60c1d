//! stornvme.sys, which is closed. Its steps are from these sources:
//!
//! - Microsoft, `stornvme-command-set-support` and `stornvme-feature-support`
//!   (windows-driver-docs): the commands that it issues by itself. Abort, Write Zeroes and Doorbell
//!   Buffer Config are not among them, and autonomous power states are disabled.
//! - oxidecomputer/propolis pull request 1199: it reads ASQ back, keeps 4 event requests pending,
//!   and repeats a refused one forever.
//! - microsoft/openvmm pull requests 1945 (queues that share a completion queue) and 3886 (the
//!   features, structures and logs that it reads at its start).
//! - spdk/spdk issues 2004, 2007 and 2008: feature 0Ch, and vendors' features and logs, which
//!   devices refuse.
//! - "Understanding Storage Timeouts and Event 129 Errors" (ntdebugging): after a timeout, storport
//!   resets the adapter, and the class driver repeats the requests.
//! - NVM Express 1.4, for the order inside a step.

mod driver;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use devices::testutil::image::{GO, HOLD, WAIT};
use host::disk::Operation;
use host::testutil::noise::Noise;

use self::driver::{
    Buffer, CC, CSTS, DATA, DISK, Done, ENABLED, GSI, INTMC, INTMS, PAGE, Stornvme, command,
    with_data,
};
use crate::{eventually, messages};

fn pattern(seed: u64, length: u64) -> Vec<u8> {
    Noise::new(seed).take(usize::try_from(length).unwrap()).collect()
}

/// Event requests that the driver keeps pending.
const EVENT_REQUESTS: usize = 4;

#[test]
fn starts_on_machines_of_every_size() {
    for processors in [1, 2, 5, 8, 64] {
        let mut driver = Stornvme::started(processors);
        for queue in 1..=processors {
            let before = driver.interrupts(queue);
            let buffer = Buffer::of(DATA, 512);
            let read = driver.transfer(false, queue.into(), &buffer);
            assert_eq!(driver.io(queue, read).status, 0, "queue {queue} of {processors}");
            eventually("the interrupt", || (driver.interrupts(queue) > before).then_some(()));
        }
    }
}

#[test]
fn every_probe_at_its_start_is_answered() {
    let mut driver = Stornvme::started(4);
    // Structures (openvmm 3886; 5 to 8 are of version 2.0).
    let controller = driver.identify(1, 0);
    assert_eq!(controller[77], 8, "transfers of at most 1 MiB");
    let word = |at: usize| u16::from_le_bytes([controller[at], controller[at + 1]]);
    assert_eq!((word(520) & 1 << 2, controller[525] & 1), (1 << 2, 1), "TRIM, and a write cache");
    assert_eq!(usize::from(controller[259]) + 1, EVENT_REQUESTS, "event requests");
    assert_eq!(controller[272..276], [0; 4], "no host memory buffer to provide");
    assert_eq!(driver.identify(2, 0)[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    let namespace = driver.identify(0, 1);
    assert_eq!(namespace[..8], (DISK / 512).to_le_bytes());
    assert_eq!((namespace[26] & 0xf, namespace[130]), (0, 9), "blocks of 512 bytes");
    let descriptors = driver.identify(3, 1);
    assert_eq!(descriptors[..2], [3, 16], "a UUID");
    for structure in [6, 8] {
        driver.identify(structure, u32::from(structure == 8));
    }
    // Features that an I/O controller must have (openvmm 3886).
    for feature in [0x01, 0x02, 0x04, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b] {
        let done = driver.admin(command(0x0a, 0, &[(10, feature)]));
        assert_eq!(done.status, 0, "feature {feature:#x}");
    }
    assert_eq!(driver.admin(command(0x0a, 1, &[(10, 0x05)])).status, 0, "error recovery");
    for (feature, value) in [(0x02, 0), (0x06, 1), (0x08, 0x0101), (0x0b, 0x0000_0100)] {
        let done = driver.admin(command(0x09, 0, &[(10, feature), (11, value)]));
        assert_eq!(done.status, 0, "feature {feature:#x}");
    }
    // Logs: supported, errors, health, firmware, commands.
    for (log, bytes) in [(0x00, 1024), (0x01, 64), (0x02, 512), (0x03, 512), (0x05, 4096)] {
        assert_eq!(driver.log(log, bytes).status, 0, "log {log:#x}");
    }
}

#[test]
fn refused_probes_are_harmless() {
    let mut driver = Stornvme::started(2);
    let mut refused = 0;
    let mut refuse = |driver: &mut Stornvme, what: &str, dwords, code| {
        let done = driver.admin(dwords);
        assert_eq!((done.code(), done.status >> 14), (code, 1), "{what}: not to be repeated");
        refused += 1;
    };
    // Autonomous power states and a vendor's feature (spdk 2004, 2007); a vendor's log (2008).
    for (what, feature) in [("power states", 0x0c), ("a vendor's feature", 0xd0)] {
        let get = with_data(command(0x0a, 0, &[(10, feature)]), PAGE, 0);
        refuse(&mut driver, what, get, 0x02);
    }
    for log in [0xc1, 0xc0, 0x07, 0x0d] {
        let get = command(0x02, u32::MAX, &[(10, 0x007f_0000 | log)]);
        refuse(&mut driver, "a log", with_data(get, PAGE, 0), 0x109);
    }
    // Conjecture: the timestamp, thermal management, and the host's behavior.
    for (what, feature) in [("time", 0x0e), ("heat", 0x10), ("behavior", 0x16)] {
        let set = with_data(command(0x09, 0, &[(10, feature)]), PAGE, 0);
        refuse(&mut driver, what, set, 0x02);
    }
    // Format, sanitize, security, directives, firmware, self-test: on request of programs.
    for opcode in [0x80, 0x84, 0x81, 0x82, 0x19, 0x1a, 0x10, 0x11, 0x14] {
        refuse(&mut driver, "an optional command", command(opcode, 1, &[]), 0x01);
    }
    assert_eq!(driver.log(0x02, 512).status, 0);
    assert_eq!(
        driver.data::<8>(PAGE + 176),
        u64::to_le_bytes(refused),
        "counted in the health log"
    );
    let read = driver.transfer(false, 0, &Buffer::of(DATA, 512));
    assert_eq!(driver.io(1, read).status, 0);
    // Pages of the effects log that programs ask for: no vendor's command is supported.
    assert_eq!(driver.log(0x05, 4096).status, 0);
    assert_eq!(driver.data::<4>(PAGE + 4 * 0xc0), [0; 4]);
}

fn request_events(driver: &mut Stornvme) -> Vec<u16> {
    (0..EVENT_REQUESTS).map(|_| driver.submit(0, command(0x0c, 0, &[]))).collect()
}

#[test]
fn event_requests_stay_pending_until_the_disk_grows() {
    let mut driver = Stornvme::started(2);
    let mut requests = request_events(&mut driver);
    for _ in 0..50 {
        let read = driver.transfer(false, 0, &Buffer::of(DATA, 4096));
        assert_eq!(driver.io(2, read).status, 0);
    }
    assert_eq!(driver.poll(0), None, "no event, and no refused request");
    for factor in 2..4 {
        let drive = driver.bench.board.shared.disks.find("nvme").unwrap();
        drive.grow(Some(DISK * factor)).unwrap();
        let done = driver.next(0);
        assert_eq!((done.id, done.result), (requests.remove(0), 0x0004_0002));
        // The driver reads the log, which enables the event again, then the new size.
        assert_eq!(driver.log(0x04, 4096).status, 0);
        assert_eq!(driver.data(PAGE), [1, 0, 0, 0]);
        assert_eq!(driver.identify(0, 1)[..8], (DISK * factor / 512).to_le_bytes());
        requests.push(driver.submit(0, command(0x0c, 0, &[])));
    }
    let last = driver.transfer(true, DISK * 3 / 512 - 8, &Buffer::of(DATA, 4096));
    assert_eq!(driver.io(1, last).status, 0, "the new blocks");
    // A reset ends the requests without an answer.
    driver.reset();
    driver.start();
    assert_eq!(driver.poll(0), None);
    request_events(&mut driver);
    driver.identify(1, 0);
}

#[test]
fn submission_queues_share_completion_queues_when_vectors_are_few() {
    for vectors in [0, 2, 3, 4] {
        let mut driver = Stornvme::new(8, vectors);
        driver.start();
        let groups = vectors.saturating_sub(1).max(1);
        let mut asked = BTreeSet::new();
        for round in 0..8 {
            for queue in 1..=8 {
                let buffer = Buffer::of(DATA + u64::from(queue) * 0x4000, 4096);
                let read = driver.transfer(false, round * 8, &buffer);
                asked.insert((queue, driver.submit(queue, read)));
            }
        }
        while !asked.is_empty() {
            let done = eventually("a completion", || (1..=groups).find_map(|it| driver.poll(it)));
            assert_eq!(done.status, 0);
            assert!(asked.remove(&(done.queue, done.id)), "{done:?} twice, or never asked");
        }
        let known = |it: &u32| *it <= u32::from(groups);
        assert!(messages(&driver.bench).iter().all(known), "{vectors} vectors");
    }
}

/// Conjecture, as the specification has it (NVMe 1.4, 7.5.1.1): with the interrupt line, the
/// interrupt routine masks it, and its deferred part unmasks it.
#[test]
fn the_interrupt_line_is_masked_while_completions_are_taken() {
    let mut driver = Stornvme::new(2, 0);
    driver.start();
    let is_high = |driver: &Stornvme| driver.bench.hypervisor.pins.is_high(GSI);
    assert!(!is_high(&driver));
    for block in 0..20 {
        let read = driver.transfer(false, block, &Buffer::of(DATA, 512));
        let ids = [driver.submit(1, read), driver.submit(2, read)];
        eventually("the interrupt", || is_high(&driver).then_some(()));
        driver.set(INTMS, 1);
        assert!(!is_high(&driver), "masked");
        let ended = [driver.next(1), driver.next(1)].map(|done| done.id);
        assert_eq!(BTreeSet::from(ended), BTreeSet::from(ids));
        driver.set(INTMC, 1);
        assert!(!is_high(&driver), "nothing is left");
    }
}

#[test]
fn transfers_of_every_shape_move_the_right_bytes() {
    let mut driver = Stornvme::started(2);
    // Length, offset in the first page (aligned to 4), offset of the list in its page.
    let shapes = [
        (512, 0, 0),
        (512, 0xe04, 0),
        (4096, 0x200, 0),
        (8192, 0, 0),
        (8192, 0xffc, 0xff0),
        (0x1_0000, 0x10, 0x120),
        (0x1_1000, 0, 0xff8),
        (0x2_0000, 0x804, 0xfe8),
        (0x10_0000, 0, 0),
        (0x10_0000, 0, 0xfc0),
        (0x10_0000, 0x7fc, 0x808),
    ];
    for (seed, (length, offset, list)) in (0..).zip(shapes) {
        let block = seed * 2048;
        let sent = pattern(seed, length);
        let from = Buffer { at: DATA, offset, length, list };
        let to =
            Buffer { at: DATA + 0x100_0000, offset: 0x1000 - 512 - offset % 512, length, list };
        from.write(&driver, &sent);
        let write = driver.transfer(true, block, &from);
        assert_eq!(driver.io(1, write).status, 0, "{length:#x} at {offset:#x}");
        let read = driver.transfer(false, block, &to);
        assert_eq!(driver.io(2, read).status, 0, "{length:#x} at {offset:#x}");
        assert!(to.read(&driver) == sent, "{length:#x} at {offset:#x}, list at {list:#x}");
    }
}

/// UNMAP, SYNCHRONIZE CACHE and FUA. Microsoft: Dataset Management serves only TRIM.
#[test]
fn unmap_flush_and_fua_reach_the_disk() {
    let mut driver = Stornvme::started(1);
    driver.disk.seen();
    for count in [1_u32, 2, 255, 256] {
        let range = |it: u32| {
            let block = u64::from(it) * 16;
            [&[0; 4][..], &8_u32.to_le_bytes(), &block.to_le_bytes()].concat()
        };
        let ranges: Vec<u8> = (0..count).flat_map(range).collect();
        driver.fill(PAGE, &ranges);
        let unmap = command(0x09, 1, &[(10, count - 1), (11, 1 << 2)]);
        assert_eq!(driver.io(1, with_data(unmap, PAGE, 0)).status, 0);
        assert_eq!(driver.disk.seen(), vec![Operation::Discard; count as usize]);
    }
    let mut write = driver.transfer(true, 0, &Buffer::of(DATA, 4096));
    assert_eq!(driver.io(1, write).status, 0);
    write[12] |= 1 << 30;
    assert_eq!(driver.io(1, write).status, 0);
    assert_eq!(driver.io(1, command(0x00, 1, &[])).status, 0);
    let write = |durable| Operation::Write { durable };
    assert_eq!(driver.disk.seen(), [write(false), write(true), Operation::Flush]);
}

/// Writes that are in flight.
struct Outstanding {
    /// The queue and the number of a command, with its block and the seed of its data.
    commands: BTreeMap<(u16, u16), (u64, u64)>,
}

/// Starts writes in each queue, with data that differs for each round.
fn start_writes(driver: &mut Stornvme, queues: u16, round: u64) -> Outstanding {
    let mut commands = BTreeMap::new();
    for queue in 1..=queues {
        for n in 0..8 {
            let (block, seed) = (u64::from(queue) * 512 + n * 8, round << 16 | n << 8);
            let buffer = Buffer::of(DATA + (u64::from(queue) * 8 + n) * 0x4000, 4096);
            buffer.write(driver, &pattern(seed + u64::from(queue), 4096));
            let write = driver.transfer(true, block, &buffer);
            commands.insert((queue, driver.submit(queue, write)), (block, seed));
        }
    }
    Outstanding { commands }
}

fn finish(driver: &mut Stornvme, queues: u16, outstanding: &Outstanding) {
    let mut left: BTreeSet<_> = outstanding.commands.keys().copied().collect();
    while !left.is_empty() {
        let done = eventually("a completion", || (1..=queues).find_map(|it| driver.poll(it)));
        assert_eq!(done.status, 0);
        assert!(left.remove(&(done.queue, done.id)), "{done:?} was not outstanding");
    }
    assert!((1..=queues).all(|queue| driver.poll(queue).is_none()), "a stale completion");
    for ((queue, _), (block, seed)) in &outstanding.commands {
        let buffer = Buffer::of(DATA + 0x200_0000, 4096);
        let read = driver.transfer(false, *block, &buffer);
        assert_eq!(driver.io(*queue, read).status, 0);
        assert!(buffer.read(driver) == pattern(seed + u64::from(*queue), 4096), "block {block}");
    }
}

#[test]
fn a_reset_after_a_timeout_loses_and_doubles_nothing() {
    const QUEUES: u16 = 4;
    let mut driver = Stornvme::started(QUEUES);
    for (round, mode) in (0..).zip([HOLD, WAIT, HOLD]) {
        request_events(&mut driver);
        driver.disk.seen();
        driver.disk.set(mode);
        let outstanding = start_writes(&mut driver, QUEUES, round);
        Stornvme::wait("the requests", || driver.disk.seen.lock().unwrap().len() == 32);
        // There is no Abort (Microsoft's table): the first step after a timeout is the reset.
        driver.set(CC, ENABLED & !1);
        std::thread::sleep(Duration::from_millis(20));
        if mode == HOLD {
            assert_eq!(driver.get(CSTS) & 1, 1, "requests in flight still write");
        }
        // The class driver keeps the buffers, because it repeats the requests later.
        driver.disk.set(GO);
        driver.reset();
        let sent = messages(&driver.bench).len();
        driver.disk.seen();
        driver.start();
        let again = start_writes(&mut driver, QUEUES, round);
        assert_eq!(again.commands.len(), outstanding.commands.len());
        finish(&mut driver, QUEUES, &again);
        let writes = driver.disk.seen().into_iter().filter(|it| it.is_write()).count();
        assert_eq!(writes, 32, "each request is repeated once");
        let late = &messages(&driver.bench)[sent..];
        assert!(!late.is_empty() && late.iter().all(|it| *it <= u32::from(QUEUES)));
    }
}

#[test]
fn reads_write_no_memory_after_a_reset() {
    let mut driver = Stornvme::started(2);
    for round in 0..20 {
        driver.disk.set(if round % 2 == 0 { HOLD } else { GO });
        for n in 0..16_u16 {
            let buffer = Buffer::of(DATA + u64::from(n) * 0x4000, 4096);
            let read = driver.transfer(false, u64::from(n) * 8, &buffer);
            driver.submit(n % 2 + 1, read);
        }
        driver.set(CC, ENABLED & !1);
        driver.disk.set(GO);
        driver.reset();
        // The memory manager has given the pages to somebody else.
        let poison = vec![0xee; 16 * 0x4000];
        driver.fill(DATA, &poison);
        std::thread::sleep(Duration::from_millis(1));
        let mut now = vec![0; poison.len()];
        driver.bench.memory.read(DATA, &mut now).unwrap();
        assert!(now == poison, "round {round}");
        driver.start();
    }
}

/// CC.SHN and CSTS.SHST (NVMe 1.4, 7.6.2), before D3 and at the end of Windows.
#[test]
fn shuts_down_before_d3_and_starts_again_in_d0() {
    const NORMAL: u32 = 1 << 14;
    const ABRUPT: u32 = 2 << 14;
    let mut driver = Stornvme::started(2);
    for (round, kind) in (0..).zip([NORMAL, ABRUPT, NORMAL]) {
        let outstanding = start_writes(&mut driver, 2, round);
        finish(&mut driver, 2, &outstanding);
        // The queues are deleted first (7.6.2), the submission queue before its completion queue.
        if kind == NORMAL {
            for id in [2, 1] {
                assert_eq!(driver.admin(command(0x00, 0, &[(10, id)])).status, 0);
                assert_eq!(driver.admin(command(0x04, 0, &[(10, id)])).status, 0);
            }
        }
        driver.disk.seen();
        driver.set(CC, ENABLED | kind);
        Stornvme::wait("the end of the shutdown", || driver.get(CSTS) >> 2 & 3 == 2);
        assert_eq!(driver.disk.seen(), [Operation::Flush], "written data is durable");
        driver.pci.power_down(&driver.bench);
        assert_eq!(driver.get(CSTS), u32::MAX, "no decoding");
        driver.pci.power_up(&driver.bench);
        assert_eq!(driver.get(CSTS) & 2, 0, "no fatal status");
        driver.start();
        assert_eq!(driver.get(CSTS), 1, "no shutdown");
    }
}

/// The crash dump: a second copy of the driver resets the controller while the first one's requests
/// are in flight, and polls one queue without interrupts. Conjecture: the number of queues.
#[test]
fn the_dump_driver_polls_while_old_requests_are_in_flight() {
    let mut driver = Stornvme::started(4);
    driver.disk.set(HOLD);
    driver.disk.seen();
    start_writes(&mut driver, 4, 7);
    Stornvme::wait("the requests", || driver.disk.seen.lock().unwrap().len() == 32);
    driver.set(CC, ENABLED & !1);
    driver.disk.set(GO);
    driver.reset();
    driver.enable();
    driver.create_completion(1, 0, false);
    driver.create_submission(1, 1);
    let before = messages(&driver.bench).len();
    for (seed, block) in (0..20).map(|n| (n, n * 128)) {
        let buffer = Buffer { at: DATA, offset: 0, length: 0x1_0000, list: 0x10 };
        buffer.write(&driver, &pattern(seed, 0x1_0000));
        let write = driver.transfer(true, block, &buffer);
        let Done { status, .. } = driver.io(1, write);
        assert_eq!(status, 0);
    }
    assert_eq!(driver.io(1, command(0x00, 1, &[])).status, 0);
    assert_eq!(messages(&driver.bench).len(), before, "the queue has no interrupts");
}
