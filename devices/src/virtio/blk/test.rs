//! A disk with ordinary drivers, and with hostile ones.

use std::path::Path;

use super::*;
use crate::device::Kind;
use crate::pci::Address;
use crate::testutil::Bench;
use crate::testutil::driver::Driver;
use host::disk::{self, memory};
use host::testutil::noise::Noise;

const AT: Address = Address::new(3, 0);
const SIZE: u64 = 8 << 20;

fn bench(queues: u16) -> Bench {
    let mut bench = Bench::new(4 << 20);
    let serial = "a serial of more than twenty".to_owned();
    let drive = Drive::new("disk", serial, Path::new("memory"), memory(SIZE));
    let disk = Blk::new(Arc::new(drive), queues).unwrap();
    bench.board.add("disk", |grants| on_pci(disk, Some(AT), grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn driver(bench: &Bench, features: u64) -> Driver<'_> {
    let mut driver = Driver::find(bench, AT);
    assert!(driver.negotiate(features));
    for queue in 0..u16::try_from(driver.queues.len()).unwrap() {
        driver.enable(queue, QUEUE_SIZE);
    }
    driver.start();
    driver
}

const ALL: u64 = FLUSH | CONFIG_WCE | MQ | DISCARD | WRITE_ZEROES;

/// A request of the driver.
struct TestRequest {
    queue: u16,
    kind: u32,
    sector: u64,
    /// Address of the data.
    data: u64,
    /// The device writes the data.
    inward: bool,
}

/// Sends a request without waiting. Its data is split into pieces of these lengths. Returns the
/// head and the address of the status byte.
fn begin(driver: &mut Driver<'_>, request: &TestRequest, lengths: &[u32]) -> (u16, u64) {
    let header = driver.allocate(16);
    let mut bytes = request.kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(request.sector.to_le_bytes());
    driver.bench.memory.write(header, &bytes).unwrap();
    let status = driver.allocate(1);
    driver.bench.memory.write(status, &[0xee]).unwrap();
    let mut pieces = vec![(header, 16, false)];
    let mut at = request.data;
    for length in lengths {
        pieces.push((at, *length, request.inward));
        at += u64::from(*length);
    }
    pieces.push((status, 1, true));
    (driver.offer(request.queue, &pieces), status)
}

/// Sends a request and waits for the answer. Returns the status byte and the number of bytes
/// written.
fn ask(driver: &mut Driver<'_>, request: &TestRequest, lengths: &[u32]) -> (u8, u32) {
    let (head, status) = begin(driver, request, lengths);
    driver.kick(request.queue);
    let used = driver.wait(request.queue);
    assert_eq!(used.head, u32::from(head));
    (driver.bytes(status, 1)[0], used.length)
}

fn write(driver: &mut Driver<'_>, sector: u64, bytes: &[u8]) -> u8 {
    let at = driver.allocate(bytes.len() as u64);
    driver.bench.memory.write(at, bytes).unwrap();
    let length = u32::try_from(bytes.len()).unwrap();
    ask(
        driver,
        &TestRequest { queue: 0, kind: TYPE_OUT, sector, data: at, inward: false },
        &[100, length - 100],
    )
    .0
}

fn read(driver: &mut Driver<'_>, sector: u64, length: u32) -> (u8, Vec<u8>) {
    let at = driver.allocate(length.into());
    let (status, _) = ask(
        driver,
        &TestRequest { queue: 0, kind: TYPE_IN, sector, data: at, inward: true },
        &[length - 9, 9],
    );
    (status, driver.bytes(at, length as usize))
}

fn number<const N: usize>(driver: &Driver<'_>, at: u64) -> u64 {
    let mut bytes = [0; 8];
    bytes[..N].copy_from_slice(&driver.device::<N>(at));
    u64::from_le_bytes(bytes)
}

#[test]
fn has_the_configuration_that_the_windows_driver_expects() {
    let bench = bench(4);
    let driver = driver(&bench, ALL);
    assert_eq!(driver.config(0), [0xf4, 0x1a, 0x42, 0x10]);
    assert_eq!(number::<8>(&driver, 0), SIZE / 512);
    assert_eq!(number::<4>(&driver, 8), 0, "SIZE_MAX is not offered");
    assert_eq!(number::<4>(&driver, 12), 254);
    assert_eq!((number::<4>(&driver, 20), number::<2>(&driver, 34)), (512, 4));
    for limit in [36, 40, 48, 52] {
        assert_ne!(number::<4>(&driver, limit), 0, "a limit of 0 makes Windows panic");
    }
    assert_eq!(number::<4>(&driver, 44), 8, "4 KiB");
    assert_eq!(bench.read::<2>(Kind::Config, AT.config() + 0x42), [4, 0], "5 vectors");
}

#[test]
fn a_driver_that_cannot_flush_gets_durable_writes() {
    for (features, writeback) in [(FLUSH | CONFIG_WCE, 1), (CONFIG_WCE, 0), (FLUSH, 1), (0, 0)] {
        let bench = bench(1);
        let driver = driver(&bench, features);
        assert_eq!(number::<1>(&driver, 32), writeback, "{features:#x}");
    }
}

#[test]
fn written_data_is_read_on_every_queue_with_the_right_length() {
    let bench = bench(3);
    let mut driver = driver(&bench, ALL);
    let bytes: Vec<u8> = (0..=250).cycle().take(4096).collect();
    assert_eq!(write(&mut driver, 8, &bytes), OK);
    for queue in 0..3 {
        let at = driver.allocate(2048);
        let request = TestRequest { queue, kind: TYPE_IN, sector: 10, data: at, inward: true };
        assert_eq!(ask(&mut driver, &request, &[1, 1000, 1047]), (OK, 2049));
        assert_eq!(driver.bytes(at, 2048), bytes[1024..3072]);
        assert_eq!(
            ask(
                &mut driver,
                &TestRequest { queue, kind: TYPE_FLUSH, sector: 0, data: 0, inward: false },
                &[]
            ),
            (OK, 1)
        );
    }
}

#[test]
fn the_serial_is_twenty_bytes() {
    let bench = bench(1);
    let mut driver = driver(&bench, ALL);
    let at = driver.allocate(20);
    assert_eq!(
        ask(
            &mut driver,
            &TestRequest { queue: 0, kind: TYPE_GET_ID, sector: 0, data: at, inward: true },
            &[20]
        ),
        (OK, 21)
    );
    assert_eq!(driver.bytes(at, 20), b"a serial of more tha");
}

/// Sends ranges to discard or to zero. Returns the status byte.
fn range(driver: &mut Driver<'_>, kind: u32, ranges: &[(u64, u32, u32)]) -> u8 {
    let mut bytes = Vec::new();
    for (sector, sectors, flags) in ranges {
        bytes.extend(sector.to_le_bytes());
        bytes.extend(sectors.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
    }
    let length = u32::try_from(bytes.len()).unwrap();
    let at = driver.allocate(length.into());
    driver.bench.memory.write(at, &bytes).unwrap();
    ask(driver, &TestRequest { queue: 0, kind, sector: 0, data: at, inward: false }, &[length]).0
}

#[test]
fn zeroes_and_discards_ranges() {
    let bench = bench(1);
    let mut driver = driver(&bench, ALL);
    assert_eq!(write(&mut driver, 0, &[7; 8192]), OK);
    assert_eq!(range(&mut driver, TYPE_WRITE_ZEROES, &[(1, 2, 0)]), OK);
    assert_eq!(range(&mut driver, TYPE_WRITE_ZEROES, &[(8, 8, UNMAP)]), OK);
    let (status, bytes) = read(&mut driver, 0, 8192);
    let zero: Vec<bool> = bytes.chunks(512).map(|it| it.iter().all(|byte| *byte == 0)).collect();
    let expected: Vec<bool> = (0..16).map(|at| matches!(at, 1 | 2 | 8..16)).collect();
    assert_eq!((status, zero), (OK, expected));
    assert_eq!(range(&mut driver, TYPE_DISCARD, &[(0, 8, 0), (16, 8, 0)]), OK);
}

#[test]
fn invalid_requests_are_answered_with_an_error() {
    let bench = bench(1);
    let mut driver = driver(&bench, ALL);
    let at = driver.allocate(4096);
    let end = SIZE / 512;
    for (kind, sector, length, answer) in [
        (TYPE_IN, end, 512, IO_ERROR),
        (TYPE_IN, end - 1, 1024, IO_ERROR),
        (TYPE_IN, u64::MAX, 512, IO_ERROR),
        (TYPE_IN, u64::MAX / 512, 512, IO_ERROR),
        (TYPE_IN, 0, 511, IO_ERROR),
        (TYPE_OUT, end, 512, IO_ERROR),
        (TYPE_OUT, 0, 513, IO_ERROR),
        (TYPE_DISCARD, 0, 15, IO_ERROR),
        (TYPE_DISCARD, 0, 16 * 17, IO_ERROR),
        (TYPE_WRITE_ZEROES, 0, 32, IO_ERROR),
        (2, 0, 512, UNSUPPORTED),
        (u32::MAX, 0, 0, UNSUPPORTED),
    ] {
        let inward = kind == TYPE_IN;
        let (status, _) =
            ask(&mut driver, &TestRequest { queue: 0, kind, sector, data: at, inward }, &[length]);
        assert_eq!(status, answer, "type {kind}, sector {sector:#x}, {length} bytes");
    }
    for (kind, ranges, answer) in [
        (TYPE_DISCARD, (end, 1, 0), IO_ERROR),
        (TYPE_DISCARD, (0, u32::MAX, 0), IO_ERROR),
        (TYPE_DISCARD, (u64::MAX, 1, 0), IO_ERROR),
        (TYPE_DISCARD, (0, 8, 1), UNSUPPORTED),
        (TYPE_WRITE_ZEROES, (0, 8, 2), UNSUPPORTED),
        (TYPE_WRITE_ZEROES, (end - 1, 2, 0), IO_ERROR),
    ] {
        assert_eq!(range(&mut driver, kind, &[ranges]), answer, "type {kind}, {ranges:?}");
    }
    // Data outside of memory.
    assert_eq!(
        ask(
            &mut driver,
            &TestRequest { queue: 0, kind: TYPE_IN, sector: 0, data: 1 << 40, inward: true },
            &[512]
        )
        .0,
        IO_ERROR
    );
    assert_eq!(
        ask(
            &mut driver,
            &TestRequest { queue: 0, kind: TYPE_OUT, sector: 0, data: 1 << 40, inward: false },
            &[512]
        )
        .0,
        IO_ERROR
    );
    assert_eq!(driver.status(), 15, "none of this breaks the device");
}

#[test]
fn an_unanswerable_request_breaks_the_device() {
    let bench = bench(1);
    for pieces in [&[(0x1000_u64, 16_u32, false)][..], &[(0x1000, 15, false), (0x1000, 1, true)]] {
        let mut driver = driver(&bench, ALL);
        driver.offer(0, pieces);
        driver.kick(0);
        let start = std::time::Instant::now();
        while driver.status() & 64 == 0 {
            assert!(start.elapsed().as_secs() < 10);
        }
    }
}

#[test]
fn the_driver_selects_the_cache_mode() {
    let bench = bench(1);
    let driver = driver(&bench, ALL);
    assert_eq!(driver.device::<1>(32), [1]);
    driver.set_device(32, &[0]);
    driver.set_device(0, &[0xff; 8]);
    assert_eq!((driver.device::<1>(32), number::<8>(&driver, 0)), ([0], SIZE / 512));
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    assert_eq!(driver.device::<1>(32), [0]);
    let driver = self::driver(&bench, FLUSH);
    assert_eq!(driver.device::<1>(32), [1], "as new after a reset");
    let driver = self::driver(&bench, 0);
    assert_eq!(driver.device::<1>(32), [0], "a driver that cannot flush");
}

#[test]
fn a_random_driver_reads_its_writes_across_parks_and_resets() {
    let bench = bench(2);
    let mut model = vec![0_u8; usize::try_from(SIZE).unwrap()];
    let mut noise = Noise::new(3);
    for _ in 0..20 {
        let mut driver = driver(&bench, ALL);
        for _ in 0..40 {
            let sector = noise.below(SIZE / 512 - 64);
            let bytes = usize::try_from((1 + noise.below(32)) * 512).unwrap();
            let at = usize::try_from(sector * 512).unwrap();
            match noise.below(4) {
                0 => {
                    let data: Vec<u8> = noise.by_ref().take(bytes).collect();
                    assert_eq!(write(&mut driver, sector, &data), OK);
                    model[at..at + bytes].copy_from_slice(&data);
                }
                1 => {
                    let sectors = u32::try_from(bytes / 512).unwrap();
                    let ranges = [(sector, sectors, UNMAP)];
                    assert_eq!(range(&mut driver, TYPE_WRITE_ZEROES, &ranges), OK);
                    model[at..at + bytes].fill(0);
                }
                2 => {
                    let saved = bench.board.park();
                    bench.board.run(saved).unwrap();
                }
                _ => {
                    let (status, data) = read(&mut driver, sector, u32::try_from(bytes).unwrap());
                    assert_eq!(status, OK);
                    assert_eq!(data, model[at..at + bytes], "sector {sector}");
                }
            }
        }
    }
}

#[test]
fn a_full_queue_is_served_and_parked_midway() {
    let bench = bench(1);
    let mut driver = driver(&bench, ALL);
    let at = driver.allocate(512 * 80);
    for round in 0..10 {
        for request in 0..80 {
            begin(
                &mut driver,
                &TestRequest {
                    queue: 0,
                    kind: TYPE_OUT,
                    sector: request,
                    data: at + 512 * request,
                    inward: false,
                },
                &[512],
            );
        }
        driver.kick(0);
        if round % 2 == 1 {
            let saved = bench.board.park();
            bench.board.run(saved).unwrap();
        }
        for _ in 0..80 {
            assert_eq!(driver.wait(0).length, 1);
        }
        assert_eq!(driver.take(0), None, "each is answered once");
    }
}

#[test]
fn a_growing_disk_raises_a_configuration_interrupt() {
    let mut bench = Bench::new(4 << 20);
    let config = disk::Config::new("memory");
    let add = |grants: &mut dyn Grants| {
        let drive = config.drive(memory(SIZE), grants.name())?;
        grants.shared().disks.add(&drive);
        on_pci(Blk::new(drive, 1)?, Some(AT), grants)
    };
    bench.board.add("virtio-blk", add).unwrap();
    bench.board.run(Vec::new()).unwrap();
    let mut driver = driver(&bench, ALL);
    let sectors = |driver: &Driver<'_>| u64::from_le_bytes(driver.device(0));
    let drive = bench.board.shared.disks.find("virtio-blk").unwrap();
    assert_eq!((driver.isr(), sectors(&driver)), (0, SIZE / SECTOR));
    let before = driver.common::<1>(0x15);
    drive.grow(Some(2 * SIZE)).unwrap();
    assert_eq!((driver.isr(), sectors(&driver)), (2, 2 * SIZE / SECTOR));
    assert_ne!(driver.common::<1>(0x15), before, "another generation");
    assert_eq!(write(&mut driver, SIZE / SECTOR, &[7; 512]), OK, "what grew");
    driver.isr();
    drive.grow(Some(2 * SIZE)).unwrap();
    assert_eq!(driver.isr(), 0, "it is as long as before");
    // It grows while the device is parked.
    let saved = bench.board.park();
    drive.grow(Some(3 * SIZE)).unwrap();
    bench.board.run(saved).unwrap();
    assert_eq!((driver.isr(), sectors(&driver)), (2, 3 * SIZE / SECTOR));
    // A driver that starts reads the size by itself.
    bench.board.park();
    drive.grow(Some(4 * SIZE)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    let again = self::driver(&bench, ALL);
    assert_eq!((again.isr(), sectors(&again)), (0, 4 * SIZE / SECTOR));
}
