//! The balloon with drivers like those of Linux and Windows, and with hostile ones.

use std::time::Instant;

use super::*;
use crate::testutil::Bench;
use crate::testutil::driver::{Descriptor, Driver, EVENT_IDX, WRITE};
use host::testutil::noise::Noise;

const AT: Address = Address::new(3, 0);
/// INTA of slot 3.
const GSI: u32 = 23;
const RAM: u64 = 1 << 20;
const ALL: u64 = STATS_VQ | DEFLATE_ON_OOM | PAGE_POISON | REPORTING;

fn config(fields: &str) -> Config {
    serde_json::from_str(fields).unwrap()
}

fn bench(fields: &str) -> Bench {
    let mut bench = Bench::new(usize::try_from(RAM).unwrap());
    let config = Config { slot: Some(AT), ..config(fields) };
    bench.board.add("balloon", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

/// Starts a driver with these features and queues.
fn driver<'a>(bench: &'a Bench, features: u64, queues: &[u16]) -> Driver<'a> {
    let mut driver = Driver::find(bench, AT);
    assert!(driver.negotiate(features));
    for queue in queues {
        driver.enable(*queue, 16);
    }
    driver.start();
    assert_eq!(driver.status(), 15);
    driver
}

fn put(driver: &mut Driver<'_>, bytes: &[u8]) -> (u64, u32, bool) {
    let at = driver.allocate(bytes.len() as u64);
    driver.bench.memory.write(at, bytes).unwrap();
    (at, u32::try_from(bytes.len()).unwrap(), false)
}

fn released(bench: &Bench) -> Vec<(u64, u64)> {
    bench
        .hypervisor
        .released
        .lock()
        .unwrap()
        .drain(..)
        .map(|range| (range.start, range.end))
        .collect()
}

/// Sends one request on `queue` and returns the ranges that the host released.
fn give(driver: &mut Driver<'_>, queue: u16, pieces: &[(u64, u32, bool)]) -> Vec<(u64, u64)> {
    driver.offer(queue, pieces);
    driver.kick(queue);
    driver.wait(queue);
    released(driver.bench)
}

fn word(driver: &Driver<'_>, at: u64) -> u32 {
    u32::from_le_bytes(driver.device(at))
}

fn pages(first: u64, last: u64) -> (u64, u64) {
    (first * PAGE, (last + 1) * PAGE)
}

fn report(bench: &Bench) -> Report {
    bench.board.shared.balloon.report(Duration::ZERO).unwrap()
}

#[test]
fn pages_are_released_in_merged_ranges() {
    let bench = bench("{}");
    let mut driver = driver(&bench, ALL, &[0, 1]);
    let numbers = [0x20_u32, 0x22, 0x21, 0x40, 0x21];
    let linux = put(&mut driver, &numbers.map(u32::to_le_bytes).concat());
    let wanted = [pages(0x20, 0x22), pages(0x40, 0x40)];
    assert_eq!(give(&mut driver, 0, &[linux]), wanted);
    let windows = numbers.map(|number| u64::from(number).to_le_bytes());
    let windows = put(&mut driver, &windows.concat());
    assert_eq!(give(&mut driver, 0, &[windows]), wanted);
    // The same list in two pieces, with an incomplete number at the end.
    let (at, length, _) = linux;
    let cut = [(at, 6, false), (at + 6, length - 8, false)];
    assert_eq!(give(&mut driver, 0, &cut), wanted);
    // 4096 bytes, the most that Windows sends: no two pages are adjacent.
    let many: Vec<u8> = (0..512_u64).flat_map(|it| (0x100 + 2 * it).to_le_bytes()).collect();
    let many = put(&mut driver, &many);
    assert_eq!(give(&mut driver, 0, &[many]).len(), 512);
    assert_eq!(give(&mut driver, 1, &[many]), [], "deflation is acknowledged");
}

#[test]
fn page_0_and_requests_outside_of_memory_release_nothing() {
    let bench = bench("{}");
    let mut driver = driver(&bench, STATS_VQ, &[0]);
    let zeros = put(&mut driver, &[0; 64]);
    assert_eq!(give(&mut driver, 0, &[zeros]), []);
    assert_eq!(give(&mut driver, 0, &[(RAM - 8, 16, false)]), []);
    assert_eq!(give(&mut driver, 0, &[(zeros.0, 64, true)]), [], "nothing to read");
    let last = put(&mut driver, &[0xff; 4]);
    // The device does not check whether such memory exists: the host does.
    assert_eq!(give(&mut driver, 0, &[last]), [pages(0xffff_ffff, 0xffff_ffff)]);
    // All of RAM, read as numbers: only the beginning is read.
    let flood = [(0, u32::try_from(RAM).unwrap(), false); 15];
    assert!(give(&mut driver, 0, &flood).len() as u64 <= MAX_FRAME_BYTES / 4);
}

#[test]
fn reported_pages_are_released_without_page_poison() {
    // The specification gives the reporting queue number 4. Linux counts without gaps.
    for (features, queues, reports) in [
        (REPORTING, [0, 1, 4].as_slice(), 4),
        (REPORTING | STATS_VQ, &[0, 1, 2, 4], 4),
        (REPORTING | STATS_VQ, &[0, 1, 2, 3], 3),
        (REPORTING, &[0, 1, 2], 2),
        (REPORTING | PAGE_POISON | EVENT_IDX, &[0, 1, 3], 3),
    ] {
        let bench = bench("{}");
        let mut driver = driver(&bench, features, queues);
        let room = [(0x40000, 0x8000, true), (0x20000, 0x10000, true), (0x30000, 0x10000, true)];
        assert_eq!(give(&mut driver, reports, &room), [(0x20000, 0x48000)], "{queues:?}");
        driver.set_device(12, &[0xaa; 4]);
        let wanted = if features & PAGE_POISON == 0 { 1 } else { 0 };
        assert_eq!(give(&mut driver, reports, &room).len(), wanted, "{queues:?}");
        driver.set_device(12, &[0; 4]);
        assert_eq!(give(&mut driver, reports, &room).len(), 1, "{queues:?}");
    }
}

#[test]
fn the_operator_sets_the_target_and_the_guest_its_progress() {
    let bench = bench(r#"{"size": "768K"}"#);
    let mut driver = driver(&bench, ALL, &[0, 1, 2]);
    assert_eq!([0, 4, 8, 12].map(|at| word(&driver, at)), [64, 0, 0, 0]);
    driver.set_device(4, &10_u32.to_le_bytes());
    // The driver can write only these two fields.
    driver.set_device(0, &7_u32.to_le_bytes());
    driver.set_device(8, &7_u32.to_le_bytes());
    assert_eq!([0, 4, 8, 12].map(|at| word(&driver, at)), [64, 10, 0, 0]);
    let current = report(&bench);
    assert_eq!((current.target, current.actual), (768 << 10, RAM - 10 * PAGE));
    let generation = driver.common::<1>(21);
    assert!(!bench.hypervisor.pins.is_high(GSI));
    let (memory, balloon) = (Size(RAM), &bench.board.shared.balloon);
    balloon.resize(Size(256 << 10), memory).unwrap();
    // The Windows driver uses only the interrupt line and reads the ISR byte.
    assert!(bench.hypervisor.pins.is_high(GSI));
    assert_eq!((driver.isr(), driver.isr()), (2, 0));
    assert_eq!(word(&driver, 0), 192);
    assert_ne!(driver.common::<1>(21), generation);
    assert!(balloon.resize(Size(RAM + 1), memory).is_err());
    assert_eq!(word(&driver, 0), 192);
    // Setting the same target again causes no interrupt. Setting all memory turns the balloon off.
    balloon.resize(Size(256 << 10), memory).unwrap();
    assert_eq!(driver.isr(), 0);
    assert!(balloon.set(u64::MAX));
    assert_eq!((driver.isr(), word(&driver, 0)), (2, 0));
    let page = put(&mut driver, &0x20_u32.to_le_bytes());
    give(&mut driver, 0, &[page]);
    // The interrupt follows the used ring.
    let start = Instant::now();
    while !bench.hypervisor.pins.is_high(GSI) {
        assert!(start.elapsed() < Duration::from_secs(10), "no interrupt");
        std::thread::yield_now();
    }
    assert_eq!(driver.isr(), 1, "acknowledged by the interrupt line");
}

#[test]
fn a_reset_clears_the_guests_state_and_keeps_the_target() {
    let bench = bench("{}");
    let driver = driver(&bench, ALL, &[0, 1, 2]);
    bench.board.shared.balloon.set(512 << 10);
    driver.set_device(4, &10_u32.to_le_bytes());
    driver.set_device(12, &10_u32.to_le_bytes());
    driver.set_status(0);
    assert_eq!([0, 4, 12].map(|at| word(&driver, at)), [128, 0, 0]);
    driver.set_device(4, &9_u32.to_le_bytes());
    bench.board.reset().unwrap();
    let driver = Driver::find(&bench, AT);
    assert_eq!([0, 4].map(|at| word(&driver, at)), [128, 0]);
}

#[test]
fn a_target_changed_while_parked_is_announced_on_run() {
    let old = bench("{}");
    let driver_of_old = driver(&old, ALL, &[0, 1, 2]);
    driver_of_old.set_device(4, &10_u32.to_le_bytes());
    old.board.shared.balloon.set(512 << 10);
    assert_eq!(driver_of_old.isr(), 2);
    let saved = old.board.park();
    old.board.shared.balloon.set(256 << 10);
    old.board.run(saved.clone()).unwrap();
    // The target set in this process overrides the saved one.
    assert_eq!([0, 4].map(|at| word(&driver_of_old, at)), [192, 10]);
    assert_eq!(driver_of_old.isr(), 2);
    // In a new process the saved target overrides the configured one.
    let new = bench(r#"{"size": "128K"}"#);
    new.board.park();
    new.board.run(saved).unwrap();
    let current = report(&new);
    assert_eq!((current.target, current.actual), (512 << 10, RAM - 10 * PAGE));
}

/// Statistics as Linux writes them.
fn statistics(entries: &[(u16, u64)]) -> Vec<u8> {
    let entry = |(number, value): &(u16, u64)| {
        [number.to_le_bytes().as_slice(), &value.to_le_bytes()].concat()
    };
    entries.iter().flat_map(entry).collect()
}

/// Waits until the device has received statistics.
fn wait_for_statistics(bench: &Bench) -> Report {
    let start = Instant::now();
    loop {
        let current = report(bench);
        if !current.statistics.is_empty() {
            return current;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{current:?}");
        std::thread::yield_now();
    }
}

#[test]
fn the_guest_reports_statistics_on_each_request() {
    let bench = bench("{}");
    let mut driver = driver(&bench, STATS_VQ, &[0, 1, 2]);
    let waited = Instant::now();
    assert_eq!(report(&bench).age, None);
    let (at, length, _) = put(
        &mut driver,
        &statistics(&[(4, 1000), (5, 5000), (0, u64::MAX), (99, 1), (15, 7), (5, 6000)]),
    );
    driver.offer(2, &[(at, length, false)]);
    driver.kick(2);
    let current = wait_for_statistics(&bench).statistics;
    assert_eq!(current, [("free-memory", 1000), ("total-memory", 6000), ("direct-reclaims", 7)]);
    assert_eq!(driver.take(2), None, "the device keeps the buffer until the next request");
    std::thread::scope(|scope| {
        let hub = bench.board.shared.balloon.clone();
        let answer = scope.spawn(move || hub.report(Duration::from_secs(60)).unwrap());
        assert_eq!(driver.wait(2).length, 0);
        bench.memory.write(at, &statistics(&[(4, 2000)])).unwrap();
        driver.offer(2, &[(at, length, false)]);
        driver.kick(2);
        let current = answer.join().unwrap();
        assert_eq!(current.statistics[0], ("free-memory", 2000));
        assert!(current.age.unwrap() < waited.elapsed());
    });
    // The statistics arrive again after a park, because the buffer is still queued.
    let saved = bench.board.park();
    let silent = bench.board.shared.balloon.report(Duration::from_secs(60)).unwrap();
    assert_eq!(silent.statistics[0].1, 2000, "a parked guest is not waited for");
    bench.board.run(saved).unwrap();
    assert_eq!(wait_for_statistics(&bench).statistics[0], ("free-memory", 2000));
    // A second buffer returns the first, and a reset drops both.
    driver.offer(2, &[(at, length, false)]);
    driver.kick(2);
    driver.wait(2);
    driver.set_status(0);
    assert_eq!(report(&bench).statistics, []);
}

#[test]
fn a_driver_with_event_idx_is_asked_for_notifications() {
    let bench = bench("{}");
    let mut driver = driver(&bench, EVENT_IDX, &[0]);
    let page = put(&mut driver, &0x20_u32.to_le_bytes());
    let used = driver.queues[0].at[2];
    for count in 1..4_u16 {
        give(&mut driver, 0, &[page]);
        let start = Instant::now();
        // The device writes the index at which it wants a notification, after the used ring.
        while driver.bytes(used + 4 + 8 * 16, 2) != count.to_le_bytes() {
            assert!(start.elapsed() < Duration::from_secs(10), "after {count}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_second_balloon_and_invalid_sizes_are_refused() {
    let mut bench = bench("{}");
    let add = |bench: &mut Bench, fields: &str| {
        let config = config(fields);
        let error = bench.board.add("balloon", |grants| config.build(grants)).unwrap_err();
        format!("{error:#}")
    };
    assert!(add(&mut bench, "{}").contains("already has a balloon"));
    let mut small = Bench::new(4096);
    let error = add(&mut small, r#"{"size": "1G"}"#);
    assert!(error.contains("size=1G") && error.contains("4K"), "{error}");
    let off = config(r#"{"deflate-on-oom": false, "reporting": false}"#);
    let build = |grants: &mut dyn Grants| Config { slot: Some(AT), ..off }.build(grants);
    small.board.add("balloon", build).unwrap();
    small.board.run(Vec::new()).unwrap();
    let driver = Driver::find(&small, AT);
    assert_eq!(driver.features() & 0xff, STATS_VQ);
    assert_eq!(driver.number(18), 3, "no queue for reports");
}

/// Requests of random bytes, in any direction, on any queue, with resets and parks in between.
#[test]
fn survives_a_hostile_driver() {
    for seed in 0..8 {
        let bench = bench("{}");
        let mut noise = Noise::new(seed);
        for round in 0..20_u32 {
            let mut driver =
                driver(&bench, if round % 2 == 0 { ALL } else { EVENT_IDX | ALL }, &[0, 1, 2, 4]);
            let room = driver.allocate(0x4000);
            let bytes: Vec<u8> = noise.by_ref().take(0x4000).collect();
            bench.memory.write(room, &bytes).unwrap();
            for _ in 0..64 {
                let mut byte = || noise.next().unwrap();
                let queue = [0, 1, 2, 4][usize::from(byte() & 3)];
                let address = match byte() & 7 {
                    0 => u64::MAX - u64::from(byte()),
                    1 => RAM - u64::from(byte()),
                    _ => room + u64::from(byte()) * 16,
                };
                let length = u32::from(byte()) << (byte() & 15);
                let flags = u16::from(byte()) & (WRITE | 1);
                driver.write_descriptor(
                    queue,
                    u16::from(byte() & 15),
                    Descriptor { address, length, flags, next: 3 },
                );
                driver.publish(queue, u16::from(byte() & 31));
                driver.kick(queue);
                driver.set_device(u64::from(byte() & 15), &[byte()]);
                if byte() == 0 {
                    bench.board.shared.balloon.set(u64::from(byte()) << 12);
                    bench.board.shared.balloon.report(Duration::from_millis(1)).unwrap();
                }
                if byte() & 31 == 0 {
                    let saved = bench.board.park();
                    bench.board.run(saved).unwrap();
                }
            }
            driver.set_status(0);
            assert_eq!(driver.status(), 0);
            bench.hypervisor.released.lock().unwrap().clear();
        }
        // The device still works.
        let mut driver = driver(&bench, ALL, &[0, 1]);
        let page = put(&mut driver, &0x20_u32.to_le_bytes());
        assert_eq!(give(&mut driver, 0, &[page]), [pages(0x20, 0x20)]);
    }
}
