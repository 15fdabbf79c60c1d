//! A model of usbstor with disk.sys, cdrom.sys and classpnp above it, and tests with it.

use std::fs;
use std::path::PathBuf;

use devices::testutil::Bench;
use devices::testutil::bulk::wrapper;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::machine;
use super::transfers::Ended;
use super::usbhub3::{CONNECT_CHANGE, Device, configure, enumerate, remove, stop, wait_change};
use super::usbxhci::{BOUNDARY, SHORT, STALL, STOPPED, SUCCESS, TRANSACTION, Xhci};

/// Endpoints 0x81 and 0x02.
const IN: u8 = 3;
const OUT: u8 = 4;
/// The first ports of USB 2 and of USB 3.
const USB2: u8 = 1;
const USB3: u8 = 9;
/// The maximum of a transfer of classpnp at USB 2.
const LARGEST: u32 = 0x1_0000;

/// Sense keys and codes.
const NO_MEDIUM: (u8, u8) = (2, 0x3a);
const POWER_ON: (u8, u8) = (6, 0x29);
const CHANGED: (u8, u8) = (6, 0x28);
const PROTECTED: (u8, u8) = (7, 0x27);
const INVALID: (u8, u8) = (5, 0x24);

enum Data<'a> {
    None,
    In(u32),
    Out(&'a [u8]),
}

struct Stor {
    xhci: Xhci,
    device: Device,
    tag: u32,
    /// Data transfers that the device refused.
    stalls: u32,
    /// Buffers for wrappers and for data.
    wrapper: u64,
    data: u64,
}

impl Stor {
    /// Starts usbstor on the device at this port.
    fn start(bench: &Bench, port: u8) -> Self {
        let mut xhci = Xhci::find(bench);
        xhci.start();
        let device = enumerate(&mut xhci, port);
        assert_eq!(device.classes(), [[8, 6, 0x50]]);
        configure(&mut xhci, &device);
        let wrapper = xhci.allocate(512);
        // Data begins in the middle of a page, and crosses several boundaries of 64 KiB.
        let data = xhci.allocate(2 << 20).next_multiple_of(BOUNDARY) + BOUNDARY - 0x5a0;
        let mut it = Self { xhci, device, tag: 0x1000, stalls: 0, wrapper, data };
        // GET_MAX_LUN (3.2). A stall means one unit.
        let mut last = [0xff];
        let asked = it.xhci.control(it.device.slot, [0xa1, 0xfe, 0, 0, 0, 0, 1, 0], &mut last);
        assert!(asked == Err(STALL) || asked == Ok(1) && last == [0], "{asked:?}");
        it
    }

    fn wrap(&mut self, cdb: &[u8], length: u32, inward: bool) -> [u8; 31] {
        self.tag += 0x10;
        wrapper(self.tag, cdb, length, inward)
    }

    fn send(&mut self, bytes: &[u8]) -> Ended {
        self.xhci.write(self.wrapper, bytes);
        let length = u32::try_from(bytes.len()).unwrap();
        let issued = self.xhci.issue((self.device.slot, OUT), self.wrapper, length);
        self.xhci.finish(&issued)
    }

    /// Clears a halt (`URB_FUNCTION_SYNC_RESET_PIPE_AND_CLEAR_STALL`): first in the device, then in
    /// the controller.
    fn clear_halt(&mut self, endpoint: u8) {
        let (slot, address) = (self.device.slot, endpoint >> 1 | (endpoint & 1) << 7);
        assert_eq!(self.xhci.control(slot, [2, 1, 0, 0, address, 0, 0, 0], &mut []), Ok(0));
        self.xhci.recover(slot, endpoint, STALL);
    }

    /// The status and the residue (usb3kd: 13 bytes). After a stall, it is read once more (5.3.3).
    fn status(&mut self) -> (u8, u32) {
        let to = (self.device.slot, IN);
        let issued = self.xhci.issue(to, self.wrapper, 13);
        let mut ended = self.xhci.finish(&issued);
        if ended.code == STALL {
            self.clear_halt(IN);
            let issued = self.xhci.issue(to, self.wrapper, 13);
            ended = self.xhci.finish(&issued);
        }
        assert_eq!(ended, Ended { code: SUCCESS, length: 13 });
        let bytes = self.xhci.read(self.wrapper, 13);
        assert_eq!(bytes[..8], [&b"USBS"[..], &self.tag.to_le_bytes()].concat());
        (bytes[12], u32::from_le_bytes(bytes[8..12].try_into().unwrap()))
    }

    /// Performs a command. Returns the status, the residue, and the data that came.
    fn command(&mut self, cdb: &[u8], data: &Data<'_>) -> (u8, u32, Vec<u8>) {
        let (length, endpoint) = match data {
            Data::None => (0, IN),
            Data::In(length) => (*length, IN),
            Data::Out(bytes) => (u32::try_from(bytes.len()).unwrap(), OUT),
        };
        let wrapper = self.wrap(cdb, length, matches!(data, Data::In(_)));
        assert_eq!(self.send(&wrapper), Ended { code: SUCCESS, length: 31 });
        let mut came = Vec::new();
        if length > 0 {
            if let Data::Out(bytes) = data {
                self.xhci.write(self.data, bytes);
            }
            // Pages that are not contiguous, but for whole TRBs in between.
            self.xhci.part = if self.tag & 0x10 == 0 { 0x1000 } else { LARGEST };
            let issued = self.xhci.issue((self.device.slot, endpoint), self.data, length);
            let ended = self.xhci.finish(&issued);
            match ended.code {
                STALL => {
                    self.stalls += 1;
                    self.clear_halt(endpoint);
                }
                code => assert_eq!(code, if ended.length < length { SHORT } else { SUCCESS }),
            }
            if endpoint == IN && ended.code != STALL {
                came = self.xhci.read(self.data, usize::try_from(ended.length).unwrap());
            }
        }
        let (status, residue) = self.status();
        (status, residue, came)
    }

    fn get(&mut self, cdb: &[u8], length: u32) -> Vec<u8> {
        let (status, residue, data) = self.command(cdb, &Data::In(length));
        let missing = length - u32::try_from(data.len()).unwrap();
        assert_eq!((status, residue), (0, missing), "{cdb:x?}");
        data
    }

    fn ask(&mut self, cdb: &[u8]) -> u8 {
        self.command(cdb, &Data::None).0
    }

    /// Sense key and code, which usbstor reads after each failure.
    fn sense(&mut self) -> (u8, u8) {
        let data = self.get(&[3, 0, 0, 0, 18, 0], 18);
        (data[2], data[12])
    }

    fn fails(&mut self, cdb: &[u8], data: &Data<'_>) -> (u8, u8) {
        assert_eq!(self.command(cdb, data).0, 1, "{cdb:x?}");
        self.sense()
    }

    /// Resets the transport after a phase error or an invalid status (5.3.4): reset, then both
    /// endpoints.
    fn reset(&mut self) {
        let slot = self.device.slot;
        for endpoint in [IN, OUT] {
            if self.xhci.state(slot, endpoint) == 1 {
                stop(&mut self.xhci, slot, endpoint);
            }
        }
        assert_eq!(self.xhci.control(slot, [0x21, 0xff, 0, 0, 0, 0, 0, 0], &mut []), Ok(0));
        for (endpoint, address) in [(IN, 0x81), (OUT, 2)] {
            assert_eq!(self.xhci.control(slot, [2, 1, 0, 0, address, 0, 0, 0], &mut []), Ok(0));
            let halted = self.xhci.state(slot, endpoint) == 2;
            let code = if halted { STALL } else { STOPPED };
            self.xhci.recover(slot, endpoint, code);
        }
    }
}

fn read10(first: u32, count: u16) -> [u8; 10] {
    let ([a, b, c, d], [e, f]) = (first.to_be_bytes(), count.to_be_bytes());
    [0x28, 0, a, b, c, d, 0, e, f, 0]
}

fn write10(first: u32, count: u16) -> [u8; 10] {
    let mut cdb = read10(first, count);
    cdb[0] = 0x2a;
    cdb
}

/// A file whose words all differ.
fn image(folder: &TempDir, name: &str, size: u32) -> (PathBuf, Vec<u8>) {
    let path = folder.path().join(name);
    let content: Vec<u8> = (0..size / 4).flat_map(u32::to_le_bytes).collect();
    fs::write(&path, &content).unwrap();
    (path, content)
}

fn with(fields: Value) -> Bench {
    machine(vec![("usb-storage", fields)])
}

/// The start of a disk, after a trace of Windows 10 (libopencm3, pull request 1334). It waits for a
/// minute where READ FORMAT CAPACITIES fails, and where the page of the serial number does.
fn start_disk(stor: &mut Stor, removable: bool) {
    let inquiry = stor.get(&[0x12, 0, 0, 0, 36, 0], 36);
    assert_eq!((inquiry.len(), inquiry[0], inquiry[1] >> 7), (36, 0, u8::from(removable)));
    // The serial number and the designators (storage stack: `StorageDeviceIdProperty`).
    let pages = stor.get(&[0x12, 1, 0, 0, 255, 0], 255);
    for page in [0x80, 0x83] {
        assert!(pages[4..].contains(&page));
        let data = stor.get(&[0x12, 1, page, 0, 255, 0], 255);
        assert_eq!((data[1], usize::from(data[3])), (page, data.len() - 4));
        assert!(data.len() > 4);
    }
    // The first command that needs the unit reports power-on; usbstor reads the sense data.
    assert_eq!(stor.fails(&[0; 6], &Data::None), POWER_ON);
    let formats = stor.get(&[0x23, 0, 0, 0, 0, 0, 0, 0, 252, 0], 252);
    assert_eq!((formats[3] % 8, formats[8] & 3), (0, 2), "formatted");
    let capacity = stor.get(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8);
    let blocks = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
    assert_eq!(blocks(&formats[4..8]), blocks(&capacity[..4]) + 1);
    // disk.sys: caching and the write protection, with 192 bytes each.
    let all = stor.get(&[0x1a, 0, 0x3f, 0, 192, 0], 192);
    assert_eq!(usize::from(all[0]) + 1, all.len());
    let cache = stor.get(&[0x1a, 0, 8, 0, 192, 0], 192);
    assert_eq!(cache[usize::from(cache[3]) + 4] & 0x3f, 8);
    let exceptions = stor.command(&[0x1a, 0, 0x1c, 0, 192, 0], &Data::In(192));
    if exceptions.0 != 0 {
        assert_eq!(stor.sense(), INVALID);
    }
    assert_eq!(stor.ask(&[0; 6]), 0);
}

#[test]
fn a_disk_starts_and_keeps_its_data_at_both_speeds() {
    let folder = tempfile::tempdir().unwrap();
    for (speed, port) in [("high", USB2), ("super", USB3)] {
        let (path, before) = image(&folder, speed, 4 << 20);
        let bench = with(json!({ "path": path, "speed": speed }));
        let mut stor = Stor::start(&bench, port);
        start_disk(&mut stor, false);
        // The partition table, then all in the largest pieces.
        assert_eq!(stor.get(&read10(0, 1), 512), before[..512]);
        for first in (0..8192).step_by(128) {
            let at = first * 512;
            let data = stor.get(&read10(u32::try_from(first).unwrap(), 128), LARGEST);
            assert_eq!(data, before[at..at + 0x1_0000]);
        }
        let news: Vec<u8> = (0..96 * 512_u32).map(|it| it.to_le_bytes()[0] ^ 0x5a).collect();
        let (status, residue, _) = stor.command(&write10(33, 96), &Data::Out(&news));
        assert_eq!((status, residue), (0, 0));
        assert_eq!(stor.get(&read10(33, 96), 96 * 512), news);
        assert_eq!(stor.ask(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 0, "SYNCHRONIZE CACHE");
        assert_eq!(fs::read(&path).unwrap()[33 * 512..129 * 512], news);
        stor.xhci.expect_quiet();
    }
}

/// SuperSpeed disks get transfers of up to 2 MiB, with a TRB for each page: more than a ring has.
#[test]
fn a_long_transfer_has_more_trbs_than_a_segment() {
    let folder = tempfile::tempdir().unwrap();
    let (path, before) = image(&folder, "disk", 1 << 20);
    let bench = with(json!({ "path": path }));
    let mut stor = Stor::start(&bench, USB3);
    start_disk(&mut stor, false);
    for _ in 0..5 {
        let data = stor.get(&read10(1, 360), 360 * 512);
        assert_eq!(data, before[512..361 * 512]);
    }
    stor.xhci.expect_quiet();
}

#[test]
fn both_directions_stall_and_recover() {
    let folder = tempfile::tempdir().unwrap();
    let (path, before) = image(&folder, "disk", 1 << 20);
    let bench = with(json!({ "path": path, "readonly": true }));
    let mut stor = Stor::start(&bench, USB3);
    start_disk(&mut stor, false);
    let before_all = stor.stalls;
    for round in 1..=10 {
        assert_eq!(stor.fails(&write10(0, 2), &Data::Out(&[0; 1024])), PROTECTED);
        assert_eq!(stor.fails(&[0x12, 1, 0xee, 0, 64, 0], &Data::In(64)), INVALID);
        let (status, residue, _) = stor.command(&[0xff; 12], &Data::In(512));
        assert_eq!((status, residue), (1, 512), "unknown, from the device");
        assert_eq!(stor.sense(), (5, 0x20));
        assert_eq!(stor.stalls, before_all + 3 * round, "no data: the device stalls (6.7)");
        assert_eq!(stor.get(&read10(7, 1), 512), before[7 * 512..8 * 512]);
    }
    // The writer sees the protection in the mode parameters.
    assert_eq!(stor.get(&[0x1a, 0, 0x3f, 0, 192, 0], 192)[2] & 0x80, 0x80);
}

#[test]
fn an_invalid_wrapper_is_recovered_by_a_reset() {
    let folder = tempfile::tempdir().unwrap();
    let (path, before) = image(&folder, "disk", 1 << 20);
    let bench = with(json!({ "path": path }));
    let mut stor = Stor::start(&bench, USB3);
    start_disk(&mut stor, false);
    for pending in [false, true] {
        let mut wrapper = stor.wrap(&read10(0, 1), 512, true);
        wrapper[0] = b'X';
        assert_eq!(stor.send(&wrapper).code, STALL);
        if pending {
            let to = (stor.device.slot, IN);
            let read = stor.xhci.issue(to, stor.data, 512);
            assert_eq!(stor.xhci.finish(&read).code, STALL);
        }
        stor.reset();
        assert_eq!(stor.get(&read10(9, 1), 512), before[9 * 512..10 * 512]);
        // A command that the driver gives up after a time: its data was never read.
        let wrapper = stor.wrap(&read10(0, 8), 4096, true);
        assert_eq!(stor.send(&wrapper).code, SUCCESS);
        stor.reset();
        assert_eq!(stor.get(&read10(9, 1), 512), before[9 * 512..10 * 512]);
    }
    stor.xhci.expect_quiet();
}

/// classpnp polls removable media every second (ChibiOS-Contrib, pull request 131: a trace).
#[test]
fn a_removable_medium_is_polled_locked_and_ejected() {
    let folder = tempfile::tempdir().unwrap();
    let (path, before) = image(&folder, "disk", 1 << 20);
    let bench = with(json!({ "path": path, "removable": true }));
    let mut stor = Stor::start(&bench, USB3);
    start_disk(&mut stor, true);
    assert_eq!(stor.ask(&[0x1e, 0, 0, 0, 1, 0]), 0, "PREVENT");
    let tray = stor.xhci.shared.disks.tray("usb-storage").unwrap();
    assert!(tray.eject(false).is_err(), "locked");
    assert_eq!(stor.ask(&[0x1e, 0, 0, 0, 0, 0]), 0, "ALLOW");
    // "Safely Remove": START STOP UNIT with LoEj.
    assert_eq!(stor.ask(&[0x1b, 0, 0, 0, 2, 0]), 0);
    for _ in 0..3 {
        assert_eq!(stor.fails(&[0; 6], &Data::None), NO_MEDIUM);
    }
    assert_eq!(stor.fails(&read10(0, 1), &Data::In(512)), NO_MEDIUM);
    tray.insert(&path, None).unwrap();
    assert_eq!(stor.fails(&[0; 6], &Data::None), CHANGED);
    assert_eq!(stor.ask(&[0; 6]), 0);
    assert_eq!(stor.get(&read10(3, 1), 512), before[3 * 512..4 * 512]);
}

#[test]
fn a_disk_is_pulled_with_requests_under_way() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = image(&folder, "disk", 1 << 20);
    for with_command in [false, true] {
        let mut bench = with(json!({ "path": path }));
        let mut stor = Stor::start(&bench, USB3);
        start_disk(&mut stor, false);
        let slot = stor.device.slot;
        if with_command {
            let wrapper = stor.wrap(&write10(0, 8), 4096, false);
            assert_eq!(stor.send(&wrapper).code, SUCCESS);
        }
        // The status is read before there is one (conjecture).
        let read = stor.xhci.issue((slot, IN), stor.wrapper, 13);
        stor.xhci.expect_quiet();
        bench.board.unplug("usb-storage").unwrap();
        assert_eq!(stor.xhci.finish(&read), Ended { code: TRANSACTION, length: 0 });
        let status = wait_change(&mut stor.xhci, USB3, CONNECT_CHANGE);
        assert_eq!(status & 1, 0);
        stor.xhci.recover(slot, IN, TRANSACTION);
        assert_eq!(stor.send(&[0; 31]).code, TRANSACTION);
        remove(&mut stor.xhci, slot);
        stor.xhci.expect_quiet();
    }
}

/// cdrom.sys (Microsoft/Windows-driver-samples, storage/class/cdrom is its source): the commands of
/// its start, its polls, and cdfs' and udfs' first reads.
#[test]
fn a_cd_rom_drive_starts_and_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (path, before) = image(&folder, "win.iso", 2 << 20);
    for (speed, port) in [("high", USB2), ("super", USB3)] {
        let bench = with(json!({ "path": path, "speed": speed }));
        let mut stor = Stor::start(&bench, port);
        let inquiry = stor.get(&[0x12, 0, 0, 0, 36, 0], 36);
        assert_eq!((inquiry[0], inquiry[1]), (5, 0x80));
        assert_eq!(stor.fails(&[0; 6], &Data::None), POWER_ON);
        // GET CONFIGURATION: the head of the features, then all of them.
        let head = stor.get(&[0x46, 0, 0, 0, 0, 0, 0, 0, 8, 0], 8);
        let total = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) + 4;
        let [_, _, high, low] = total.to_be_bytes();
        let all = stor.get(&[0x46, 0, 0, 0, 0, 0, 0, high, low, 0], total);
        assert_eq!((all.len(), &all[..8]), (usize::try_from(total).unwrap(), &head[..]));
        // MODE SENSE (10) of the capabilities page, or (6) where a drive lacks it.
        let page = stor.get(&[0x5a, 0, 0x2a, 0, 0, 0, 0, 0, 192, 0], 192);
        assert_eq!(page[8] & 0x3f, 0x2a);
        // Polls: GET EVENT STATUS NOTIFICATION of the media class.
        let event = stor.get(&[0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8, 0], 8);
        assert_eq!((event[2] & 7, event[5] & 2), (4, 2), "a medium is present");
        let capacity = stor.get(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8);
        assert_eq!(capacity, [0, 0, 3, 0xff, 0, 0, 8, 0]);
        let contents = stor.get(&[0x43, 0, 0, 0, 0, 0, 0, 3, 36, 0], 804);
        assert_eq!(contents[2..4], [1, 1]);
        assert_eq!(stor.get(&[0x51, 0, 0, 0, 0, 0, 0, 0, 34, 0], 34)[2] & 3, 2, "finalized");
        for (first, count) in [(16, 1), (256, 1), (32, 32), (992, 32)] {
            let (at, length) = (first as usize * 2048, usize::from(count) * 2048);
            let data = stor.get(&read10(first, count), u32::try_from(length).unwrap());
            assert_eq!(data, before[at..at + length], "block {first}");
        }
        stor.xhci.expect_quiet();
    }
}
