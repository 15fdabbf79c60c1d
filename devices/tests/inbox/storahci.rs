//! storahci.sys. Microsoft has published its source (microsoft/Windows-driver-samples, commit
//! 26a27df8, `storage/miniports/storahci/src`), so the model's steps, limits of time and order of
//! register accesses are from there. The inbox driver may be newer. Conjecture: the packet commands
//! for a CD are those that MMC-5 describes for a host, because cdrom.sys is closed.

mod driver;

use std::sync::Arc;
use std::time::Duration;

use devices::ahci::disk;
use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::ahci::{CR, DATA, FISES, Fis, PXCMD, PXIE, ST};
use devices::testutil::image::{Double, DoubleState, GO, HOLD, WAIT};
use host::disk::Operation;
use host::testutil::noise::Noise;
use serde_json::json;

use self::driver::{End, OWN, PAGE, Storahci, read_log, set_feature};
use crate::eventually;

const AT: Address = Address::new(0x1f, 2);
const RAM: usize = 16 << 20;
const DISK: u64 = 4 << 20;
/// Slots of the queue: all but the driver's own.
const QUEUE: u32 = !1;

const READ_QUEUED: u8 = 0x60;
const WRITE_QUEUED: u8 = 0x61;
const FAILED: fn(u8, u8) -> End =
    |error, status| End::Failed(u32::from(error) << 8 | u32::from(status));

/// A machine with a disk whose requests the test holds.
fn disk() -> (Bench, Arc<DoubleState>) {
    let (image, state) = Double::over(host::disk::memory(DISK));
    let mut bench = Bench::new(RAM);
    let config = host::disk::Config { slot: Some(AT), ..host::disk::Config::new("disk") };
    let attach =
        |grants: &mut dyn devices::grants::Grants| disk::Config(config).attach_image(image, grants);
    bench.board.add("ahci-disk", attach).unwrap();
    bench.board.run(Vec::new()).unwrap();
    (bench, state)
}

/// A queued read or write of eight blocks.
fn queue(driver: &Storahci<'_>, slot: u32, code: u8, block: u64) {
    let tag = u16::try_from(slot).unwrap();
    let regions = [(buffer(slot), 1024), (buffer(slot) + 1024, 3072)];
    driver.put(slot, &Fis::queued(code, block, 8, tag), &[], &regions);
}

fn buffer(slot: u32) -> u64 {
    DATA + 0x1000 * u64::from(slot)
}

fn pattern(seed: u64) -> Vec<u8> {
    Noise::new(seed).take(4096).collect()
}

/// `AtaReportLunsCommand` and `AhciDeviceInitialize`: IDENTIFY, logs, settings.
fn enumerate(driver: &mut Storahci<'_>) -> [u16; 256] {
    let words = driver.identify();
    assert_eq!((words[76] >> 8 & 1, words[75]), (1, 31), "NCQ, 32 commands");
    assert_eq!(words[84] & 1 << 5, 1 << 5, "logs");
    assert_eq!(driver.execute(&read_log(0x00), &[(PAGE, 512)]), End::Good);
    let directory: [u8; 512] = driver.driver.data(PAGE);
    assert_eq!((directory[..2].to_vec(), directory[0x20]), (vec![1, 0], 1), "the log of NCQ");
    // It reads the saved internal status (25h) even if the directory does not have it, and
    // tolerates that the device aborts the command.
    let before = driver.recoveries.0;
    assert_eq!(driver.execute(&read_log(0x25), &[(PAGE, 512)]), FAILED(4, 0x51));
    assert_eq!(driver.recoveries.0, before + 1);
    // Settings stay over a software reset (66h), then the preserved settings.
    for (feature, count) in [(0x66, 0), (0x03, 0x44), (0x02, 0)] {
        assert_eq!(driver.execute(&set_feature(feature, count), &[]), End::Good, "{feature:#x}");
    }
    words
}

#[test]
fn starts_enumerates_and_fills_its_queue() {
    for message in [true, false] {
        let (bench, _) = disk();
        let mut driver = Storahci::started(&bench, AT, message);
        let words = enumerate(&mut driver);
        assert_eq!((words[105], words[169] & 1), (8, 1), "TRIM with 8 blocks of ranges");
        let before = driver.recoveries;
        for round in 0..20_u64 {
            for slot in 1..32 {
                driver.driver.fill(buffer(slot), &pattern(round << 8 | u64::from(slot)));
                queue(&driver, slot, WRITE_QUEUED, (round * 31 + u64::from(slot)) * 8);
            }
            driver.issue(QUEUE, true);
            let ended = driver.finish(QUEUE);
            assert_eq!((ended.len(), ended.iter().all(|it| it.1 == End::Good)), (31, true));
            for slot in 1..32 {
                driver.driver.fill(buffer(slot), &[0; 4096]);
                queue(&driver, slot, READ_QUEUED, (round * 31 + u64::from(slot)) * 8);
                // One after the other, while earlier ones are in flight.
                driver.issue(1 << slot, true);
            }
            driver.finish(QUEUE);
            for slot in 1..32 {
                let read: [u8; 4096] = driver.driver.data(buffer(slot));
                assert!(read[..] == pattern(round << 8 | u64::from(slot)), "slot {slot}");
            }
        }
        assert_eq!(driver.recoveries, before, "no error and no reset");
    }
}

#[test]
fn firmware_may_leave_a_running_port() {
    let (bench, _) = disk();
    let firmware = devices::testutil::ahci::Driver::find(&bench, AT);
    firmware.start();
    assert_eq!(firmware.get(PXCMD) & (ST | CR), ST | CR);
    let mut driver = Storahci::started(&bench, AT, true);
    enumerate(&mut driver);
}

/// Commands that programs and the class driver send besides reads and writes.
#[test]
fn flush_trim_verify_smart_and_power_commands_are_accepted() {
    let (bench, disk) = disk();
    let mut driver = Storahci::started(&bench, AT, true);
    enumerate(&mut driver);
    disk.seen();
    let non_data = |code| Fis { device: 0xa0, ..Fis::new(code, 0, 0) };
    assert_eq!(driver.execute(&non_data(0xea), &[]), End::Good, "FLUSH CACHE EXT");
    // `DeviceProcessTrimRequest`: unused entries of a block are zero, bits 5 and 7 of the device
    // register are set.
    let mut ranges = vec![0; 4096];
    for (entry, number) in ranges.chunks_mut(8).zip(0_u64..300) {
        entry.copy_from_slice(&((number * 16) | 8 << 48).to_le_bytes());
    }
    driver.driver.fill(DATA, &ranges);
    let trim = Fis { features: 1, device: 0xe0, ..Fis::new(0x06, 0, 8) };
    assert_eq!(driver.execute(&trim, &[(DATA, 4096)]), End::Good);
    let seen = disk.seen();
    assert_eq!(seen[0], Operation::Flush);
    assert_eq!(seen[1..], vec![Operation::Discard; 300]);
    // `AtaStartStopUnitRequest`: a start is READ VERIFY EXT, a stop is STANDBY IMMEDIATE.
    let verify = Fis { device: 0xe0, ..Fis::new(0x42, 0, 1) };
    assert_eq!(driver.execute(&verify, &[]), End::Good);
    for feature in [0xd8, 0xda] {
        let smart = Fis { features: feature, device: 0xa0, ..Fis::new(0xb0, 0xc2_4f00, 0) };
        assert_eq!(driver.execute(&smart, &[]), End::Good, "SMART {feature:#x}");
    }
    // The result of SMART RETURN STATUS is in the received FIS.
    assert_eq!(driver.driver.data::<7>(FISES + 0x40)[5..], [0x4f, 0xc2]);
    for feature in [0xd0, 0xd1] {
        let smart = Fis { features: feature, device: 0xa0, ..Fis::new(0xb0, 0xc2_4f00, 1) };
        assert_eq!(driver.execute(&smart, &[(PAGE, 512)]), End::Good, "SMART {feature:#x}");
    }
    // FUA of a queued write is bit 7 of the device register.
    let fua = Fis { device: 0xc0, ..Fis::queued(WRITE_QUEUED, 0, 8, 3) };
    driver.put(3, &fua, &[], &[(DATA, 4096)]);
    driver.issue(1 << 3, true);
    assert_eq!(driver.finish(1 << 3), [(3, End::Good)]);
    assert_eq!(disk.seen(), [Operation::Write { durable: true }]);
    // The end of Windows.
    assert_eq!(driver.execute(&non_data(0xea), &[]), End::Good);
    assert_eq!(driver.execute(&non_data(0xe0), &[]), End::Good, "STANDBY IMMEDIATE");
}

#[test]
fn a_failed_queued_command_is_found_and_the_others_are_repeated() {
    let (bench, _) = disk();
    let mut driver = Storahci::started(&bench, AT, true);
    enumerate(&mut driver);
    for round in 1..32_u32 {
        let before = driver.recoveries;
        for slot in 1..32 {
            let block = if slot == round { DISK / 512 } else { u64::from(slot) * 8 };
            queue(&driver, slot, READ_QUEUED, block);
        }
        driver.issue(QUEUE, true);
        let mut ended = driver.finish(QUEUE);
        ended.sort_by_key(|it| it.0);
        assert_eq!(ended.len(), 31, "each ends once");
        for (slot, end) in ended {
            let expected = if slot == round { FAILED(0x10, 0x51) } else { End::Good };
            assert_eq!(end, expected, "slot {slot} in round {round}");
        }
        let (single, queued, resets) = driver.recoveries;
        assert_eq!((single, queued, resets), (before.0, before.1 + 1, before.2), "no reset");
    }
}

#[test]
fn a_failed_command_is_found_among_others_that_are_not_queued() {
    let (bench, _) = disk();
    let mut driver = Storahci::started(&bench, AT, false);
    for round in 1..8_u32 {
        for slot in 1..8 {
            let block = if slot == round { DISK / 512 } else { u64::from(slot) };
            let read = Fis { device: 0xe0, ..Fis::new(0x25, block, 1) };
            driver.put(slot, &read, &[], &[(buffer(slot), 512)]);
        }
        driver.issue(0xfe, false);
        let mut ended = driver.finish(0xfe);
        ended.sort_by_key(|it| it.0);
        let expected = |slot| if slot == round { FAILED(0x10, 0x51) } else { End::Good };
        assert_eq!(ended, (1..8).map(|slot| (slot, expected(slot))).collect::<Vec<_>>());
    }
}

#[test]
fn an_overflow_resets_the_port() {
    let (bench, _) = disk();
    let mut driver = Storahci::started(&bench, AT, true);
    let read = Fis { device: 0xe0, ..Fis::new(0x25, 0, 8) };
    driver.put(5, &read, &[], &[(DATA, 512)]);
    driver.issue(1 << 5, false);
    assert_eq!(driver.finish(1 << 5), [(5, End::Reset)]);
    assert_eq!(driver.recoveries, (0, 0, 1));
    enumerate(&mut driver);
}

/// `AhciHwResetBus`, after a timeout of storport. The driver waits 500 ms for the list, resets the
/// link, gives up the memory of all commands, and waits 30 ms for the device.
#[test]
fn a_reset_after_a_timeout_keeps_the_disk_and_the_memory() {
    let (bench, disk) = disk();
    let mut driver = Storahci::started(&bench, AT, true);
    enumerate(&mut driver);
    for mode in [HOLD, WAIT] {
        disk.seen();
        disk.set(mode);
        for slot in 1..32 {
            queue(&driver, slot, READ_QUEUED, u64::from(slot) * 8);
        }
        driver.issue(QUEUE, true);
        eventually("the requests", || (disk.seen.lock().unwrap().len() == 31).then_some(()));
        // The host is slow: it answers after twice the 530 ms that the driver waits.
        let slow = disk.clone();
        let answer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(1500));
            slow.set(GO);
        });
        assert!(driver.reset_port(), "the disk is gone");
        // The memory manager has given the pages to somebody else.
        let poison = vec![0xee; 31 * 4096];
        driver.driver.fill(buffer(1), &poison);
        answer.join().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        let mut now = vec![0; poison.len()];
        bench.memory.read(buffer(1), &mut now).unwrap();
        assert!(now == poison, "a read from before the reset");
        let ended = std::mem::take(&mut driver.ended);
        assert_eq!((ended.len(), ended.iter().all(|it| it.1 == End::Reset)), (31, true));
        // The class driver repeats all of them.
        for slot in 1..32 {
            queue(&driver, slot, READ_QUEUED, u64::from(slot) * 8);
        }
        driver.issue(QUEUE, true);
        let ended = driver.finish(QUEUE);
        assert_eq!((ended.len(), ended.iter().all(|it| it.1 == End::Good)), (31, true));
    }
}

/// The crash dump finds the adapter once more, while requests of Windows are in flight.
#[test]
fn the_dump_driver_resets_the_adapter_within_a_second() {
    let (bench, disk) = disk();
    let mut driver = Storahci::started(&bench, AT, true);
    disk.set(HOLD);
    for slot in 1..32 {
        queue(&driver, slot, READ_QUEUED, 0);
    }
    driver.issue(QUEUE, true);
    let slow = disk.clone();
    let answer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(1500));
        slow.set(GO);
    });
    driver.find_adapter();
    driver.initialize_port();
    assert!(driver.run_port());
    answer.join().unwrap();
    // Without interrupts: it polls.
    driver.driver.set(PXIE, 0);
    let write = Fis { device: 0xe0, ..Fis::new(0x35, 64, 8) };
    driver.put(OWN, &write, &[], &[(DATA, 4096)]);
    driver.driver.issue(1 << OWN);
    assert!(driver.driver.finish(1 << OWN).is_good());
}

/// `AhciPortPowerDown`, `AhciAdapterPowerDown`, `AhciAdapterPowerUp`, `AhciPortPowerUp`: the port
/// keeps running, and its addresses are written again.
#[test]
fn the_port_still_runs_after_d3() {
    let (bench, _) = disk();
    let mut driver = Storahci::started(&bench, AT, true);
    enumerate(&mut driver);
    for _ in 0..3 {
        assert_eq!(driver.execute(&Fis { device: 0xa0, ..Fis::new(0xe0, 0, 0) }, &[]), End::Good);
        driver.driver.set(4, driver.driver.get(4) & !2);
        driver.pci.power_down(&bench);
        driver.pci.power_up(&bench);
        driver.driver.set(4, driver.driver.get(4) | 2);
        driver.initialize_port();
        assert!(driver.run_port());
        for feature in [(0x66, 0), (0x02, 0)] {
            assert_eq!(driver.execute(&set_feature(feature.0, feature.1), &[]), End::Good);
        }
        queue(&driver, 9, READ_QUEUED, 0);
        driver.issue(1 << 9, true);
        assert_eq!(driver.finish(1 << 9), [(9, End::Good)]);
    }
}

/// A packet command of cdrom.sys, by DMA. A failed one is followed by REQUEST SENSE
/// (`BuildRequestSenseSrb`). Returns the sense key, code and qualifier, or zeros.
fn packet(driver: &mut Storahci<'_>, command: &[u8], length: u32) -> [u8; 3] {
    let fis = Fis { features: 1, device: 0xa0, ..Fis::new(0xa0, 0, 0) };
    let mut packet = command.to_vec();
    packet.resize(12, 0);
    let regions = [(DATA, length)];
    driver.put(1, &fis, &packet, if length > 0 { &regions } else { &[] });
    driver.issue(1 << 1, false);
    if driver.finish(1 << 1) == [(1, End::Good)] {
        return [0; 3];
    }
    driver.put(2, &fis, &[3, 0, 0, 0, 18, 0, 0, 0, 0, 0, 0, 0], &[(PAGE, 18)]);
    driver.issue(1 << 2, false);
    assert_eq!(driver.finish(1 << 2), [(2, End::Good)]);
    let sense: [u8; 18] = driver.driver.data(PAGE);
    [sense[2], sense[12], sense[13]]
}

#[test]
fn a_cd_is_enumerated_polled_and_changed() {
    let folder = tempfile::tempdir().unwrap();
    let iso = folder.path().join("a.iso");
    std::fs::write(&iso, vec![7; 4 << 20]).unwrap();
    let fields = json!({ "path": iso, "slot": "1f.2" });
    let config = Config::of_kind("ahci-cdrom", fields).unwrap().unwrap();
    let mut bench = Bench::new(RAM);
    bench.board.add("ahci-cdrom", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    let mut driver = Storahci::started(&bench, AT, true);
    let words = driver.identify();
    assert_eq!((words[0] >> 14, words[0] >> 8 & 0x1f, words[0] & 3), (2, 5, 0), "ATAPI, a CD");
    // `AhciDeviceInitialize`: the same for all devices, and Ultra DMA 2 for ATAPI.
    for (feature, count) in [(0x66, 0), (0x03, 0x42)] {
        assert_eq!(driver.execute(&set_feature(feature, count), &[]), End::Good, "{feature:#x}");
    }
    let ready = [0; 12];
    assert_eq!(packet(&mut driver, &[0x12, 0, 0, 0, 36], 36), [0; 3]);
    assert_eq!(packet(&mut driver, &ready, 0), [6, 0x29, 0], "it was reset");
    assert_eq!(packet(&mut driver, &ready, 0), [0; 3]);
    let gets = [
        ("GET CONFIGURATION", vec![0x46, 0, 0, 0, 0, 0, 0, 0, 8], 8),
        ("MODE SENSE 2Ah", vec![0x5a, 8, 0x2a, 0, 0, 0, 0, 0, 30], 30),
        ("READ CAPACITY", vec![0x25], 8),
        ("READ TOC", vec![0x43, 2, 0, 0, 0, 0, 0, 0x03, 0x24], 804),
        ("READ DISC INFORMATION", vec![0x51, 0, 0, 0, 0, 0, 0, 0, 34], 34),
        ("READ", vec![0x28, 0, 0, 0, 0, 16, 0, 0, 1], 2048),
    ];
    for (what, command, length) in gets {
        assert_eq!(packet(&mut driver, &command, length), [0; 3], "{what}");
    }
    assert_eq!(driver.driver.data::<2048>(DATA), [7; 2048]);
    let events = [0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8];
    let lock = |on| [0x1e, 0, 0, 0, on];
    assert_eq!(packet(&mut driver, &events, 8), [0; 3]);
    assert_eq!(packet(&mut driver, &lock(1), 0), [0; 3]);
    let tray = bench.board.shared.disks.tray("ahci-cdrom").unwrap();
    assert!(tray.eject(false).is_err(), "the medium is locked");
    assert_eq!(packet(&mut driver, &events, 8), [0; 3]);
    assert_eq!(driver.driver.data::<6>(DATA)[4..], [1, 2], "an eject request");
    assert_eq!(packet(&mut driver, &lock(0), 0), [0; 3]);
    assert_eq!(packet(&mut driver, &[0x1b, 0, 0, 0, 2], 0), [0; 3]);
    assert_eq!(packet(&mut driver, &ready, 0), [2, 0x3a, 0], "no medium");
    tray.insert(&iso, None).unwrap();
    assert_eq!(packet(&mut driver, &events, 8), [0; 3]);
    assert_eq!(driver.driver.data::<6>(DATA)[4..], [2, 2], "a new medium");
    assert_eq!(packet(&mut driver, &ready, 0), [6, 0x28, 0]);
    assert_eq!(packet(&mut driver, &ready, 0), [0; 3]);
}
