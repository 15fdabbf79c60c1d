//! Tests of `rtc`.

use std::time::{Duration, Instant};

use super::*;
use crate::testutil::Bench;

fn bench(start: &str) -> Bench {
    let mut bench = Bench::new(64 << 20);
    let config = Config { base: Base::Utc, start: Some(start.into()) };
    bench.board.add("rtc", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn read(bench: &Bench, index: u8) -> u8 {
    bench.write(Kind::Port, 0x70, &[index]);
    bench.read::<1>(Kind::Port, 0x71)[0]
}

fn write(bench: &Bench, index: u8, byte: u8) {
    bench.write(Kind::Port, 0x70, &[index]);
    bench.write(Kind::Port, 0x71, &[byte]);
}

fn time(bench: &Bench) -> [u8; 7] {
    [0x32, 9, 8, 7, 4, 2, 0].map(|index| read(bench, index))
}

/// Waits for edges of the clock's pin.
fn wait(bench: &Bench, edges: u32) {
    let began = Instant::now();
    while bench.hypervisor.pins.edges(8) < edges {
        assert!(began.elapsed() < Duration::from_secs(5), "no interrupt came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn firmware_reads_the_time_with_the_nmi_bit_in_the_index() {
    let bench = bench("2026-03-29T23:58:07Z");
    assert_eq!(read(&bench, 0x8d), 0x80, "the battery is good");
    assert_eq!(bench.read(Kind::Port, 0x70), [0x8d]);
    write(&bench, 0x8a, 0x26);
    write(&bench, 0x8b, 0x02);
    assert_eq!(read(&bench, 0x0b), 0x02);
    // The clock continues in the meantime.
    let [date @ .., second] = time(&bench);
    assert_eq!(date, [0x20, 0x26, 0x03, 0x29, 0x23, 0x58]);
    assert!(second >= 0x07, "{second:#x}");
    assert_eq!(read(&bench, 6), 1, "a Sunday");
    write(&bench, 0x0b, 0x04);
    let [date @ .., second] = time(&bench);
    assert_eq!(date, [20, 26, 3, 29, 0x80 | 11, 58], "binary, 12 hours");
    assert!(second >= 7, "{second}");
    assert_eq!(bench.read(Kind::Port, 0x71), [0xff, 0xff]);
    assert_eq!(read(&bench, 0x8a) & 0x7f, 0x26);
}

#[test]
fn the_guest_sets_the_clock_like_linux_and_it_runs_on() {
    let bench = bench("2026-03-29T23:58:07Z");
    write(&bench, 0x0b, 0x82);
    write(&bench, 0x0a, 0x76);
    for (index, byte) in [(0x32, 0x19), (9, 0x99), (8, 0x12), (7, 0x31), (4, 0x23)] {
        write(&bench, index, byte);
    }
    write(&bench, 2, 0x59);
    write(&bench, 0, 0x59);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(read(&bench, 0), 0x59, "the clock is stopped");
    write(&bench, 0x0b, 0x02);
    let before = Instant::now();
    write(&bench, 0x0a, 0x26);
    let released = Instant::now();
    // The first second after the divider starts lasts half a second.
    let shown = time(&bench);
    let is_over = before.elapsed() >= Duration::from_millis(500);
    assert!(is_over || shown == [0x19, 0x99, 0x12, 0x31, 0x23, 0x59, 0x59], "{shown:x?}");
    assert_eq!(bench.hypervisor.pins.edges(8), 0);
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    std::thread::sleep(Duration::from_millis(510).saturating_sub(released.elapsed()));
    assert_eq!(time(&bench)[..6], [0x20, 0x00, 0x01, 0x01, 0x00, 0x00]);
    bench.board.reset().unwrap();
    assert_eq!(time(&bench)[..4], [0x20, 0x26, 0x03, 0x29], "power-on is the host's time");
}

#[test]
fn a_read_before_an_announced_update_is_consistent() {
    let ms = Duration::from_millis;
    let on_time = |_| {
        let began = Instant::now();
        let bench = bench("2026-12-31T23:59:59.992Z");
        let first = read(&bench, 0x0a);
        let asked = Instant::now();
        std::thread::sleep(ms(9));
        let held = time(&bench);
        // A busy host may delay the reads beyond the limits of this test. Then try again.
        let on_time = asked - began < ms(3) && asked.elapsed() < ms(10);
        on_time.then_some((bench, first, held))
    };
    let (bench, first, held) = (0..100).find_map(on_time).expect("a quiet moment");
    assert_eq!(first, 0x26, "no update for 244 us");
    assert_eq!(held, [0x20, 0x26, 0x12, 0x31, 0x23, 0x59, 0x59]);
    assert_eq!(read(&bench, 0x0a), 0x26);
    assert_eq!(time(&bench)[..6], [0x20, 0x27, 0x01, 0x01, 0x00, 0x00]);
}

#[test]
fn an_update_sets_its_flags() {
    let bench = bench("2026-01-01T00:00:00.9Z");
    let update = |_| {
        let updating = || read(&bench, 0x0a) & 0x80 != 0;
        while !updating() {}
        read(&bench, 0x0c);
        let before = read(&bench, 0);
        // A busy host may miss the update.
        updating().then(|| {
            while updating() {}
            (before, read(&bench, 0), read(&bench, 0x0c), read(&bench, 0x0c))
        })
    };
    let (before, after, flags, cleared) = (0..10).find_map(update).expect("an update");
    assert_ne!(before, after);
    assert_eq!((flags & 0x90, cleared & 0x90), (0x10, 0));
    assert_eq!(bench.hypervisor.pins.edges(8), 0, "no interrupt was enabled");
}

#[test]
fn alarm_and_update_interrupts_fire() {
    let began = Instant::now();
    let bench = bench("2026-01-01T11:59:59.900Z");
    for (index, byte) in [(1, 0x00), (3, 0x00), (5, 0x12), (0x0b, 0x22)] {
        write(&bench, index, byte);
    }
    wait(&bench, 1);
    assert!(bench.hypervisor.pins.is_high(8));
    assert_eq!(read(&bench, 0x0c) & 0xb0, 0xb0, "IRQF, AF and UF");
    assert!(!bench.hypervisor.pins.is_high(8));
    write(&bench, 0x0b, 0x12);
    wait(&bench, 2);
    // An update is one or more seconds after the alarm.
    assert!(began.elapsed() > Duration::from_millis(1100), "{:?}", began.elapsed());
    assert_eq!(read(&bench, 0x0c) & 0xb0, 0x90);
}

#[test]
fn the_periodic_interrupt_has_its_rate_and_stops_if_unread() {
    let bench = bench("2026-01-01T00:00:00Z");
    // 256 a second.
    write(&bench, 0x0a, 0x28);
    write(&bench, 0x0b, 0x42);
    let began = Instant::now();
    for edge in 1..=64 {
        wait(&bench, edge);
        assert_eq!(read(&bench, 0x0c) & 0xc0, 0xc0);
    }
    // Interrupts stay on a fixed grid: delays of single ones do not add up, unless a delay is
    // longer than a period.
    let took = began.elapsed();
    assert!(took > Duration::from_millis(240), "{took:?}");
    wait(&bench, 65);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(bench.hypervisor.pins.edges(8), 65, "it waits to be acknowledged");
    write(&bench, 0x0b, 0x02);
    read(&bench, 0x0c);
    let edges = bench.hypervisor.pins.edges(8);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(bench.hypervisor.pins.edges(8), edges);
}

#[test]
fn reports_the_memory_size_and_keeps_bytes_until_reset() {
    let bench = bench("2026-01-01T00:00:00Z");
    // 64 MiB: 768 units of 64 KiB above 16 MiB; 63 MiB above 1 MiB.
    let registers = [0x34, 0x35, 0x5b, 0x5c, 0x5d, 0x15, 0x16, 0x17, 0x18, 0x30, 0x31];
    let sizes = registers.map(|index| read(&bench, index));
    assert_eq!(sizes, [0x00, 0x03, 0, 0, 0, 0x80, 0x02, 0x00, 0xfc, 0x00, 0xfc]);
    write(&bench, 0x0f, 0xfe);
    write(&bench, 0x7f, 0x5a);
    write(&bench, 0x0c, 0xff);
    write(&bench, 0x0d, 0x00);
    let saved = bench.board.park();
    bench.board.run(saved.clone()).unwrap();
    assert_eq!(bench.read::<1>(Kind::Port, 0x70), [0x0d], "the index too");
    assert_eq!((read(&bench, 0x0f), read(&bench, 0xff)), (0xfe, 0x5a));
    assert_eq!((read(&bench, 0x0c), read(&bench, 0x0d)), (0, 0x80), "they are read-only");
    bench.board.reset().unwrap();
    assert_eq!((read(&bench, 0x0f), read(&bench, 0x7f)), (0, 0));
    let damaged = serde_json::json!({"index": 0, "bytes": [1], "offset": 0, "seen": 0});
    let damaged: Saved = serde_json::from_value(damaged).unwrap();
    bench.board.park();
    assert!(bench.board.run(vec![("rtc".into(), damaged)]).is_err());
}

#[test]
fn refuses_an_invalid_start_time() {
    let mut bench = Bench::new(4096);
    let config = Config { base: Base::Utc, start: Some("yesterday".into()) };
    let error = bench.board.add("rtc", |grants| config.build(grants)).unwrap_err();
    assert!(format!("{error:#}").contains("`yesterday`"), "{error:#}");
}

#[test]
fn survives_random_accesses() {
    let bench = bench("2026-01-01T00:00:00Z");
    let mut seed = 1_u64;
    for _ in 0..100_000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let [index, byte, what, ..] = seed.rotate_left(24).to_le_bytes();
        if what & 1 == 0 {
            write(&bench, index & 0x3f, byte);
        } else {
            read(&bench, index & 0x3f);
        }
    }
    let saved = bench.board.park();
    bench.board.run(saved.clone()).unwrap();
    bench.board.reset().unwrap();
    assert_eq!(read(&bench, 0x0b), 0x02);
}
