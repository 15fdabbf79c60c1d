//! Disks and CDs at USB, as seen by a driver and by a hostile driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use super::bulk::Phase;
use super::*;
use crate::pci::Address;
use crate::registry;
use crate::testutil::Bench;
use crate::testutil::bulk::wrapper;
use crate::testutil::xhci::{BULK_IN, BULK_OUT, COMPLETION, Driver, NORMAL, block};
use host::disk::{Channel, Fault, Geometry, Image, Operation, Request};
use host::memory::Piece;

const AT: Address = Address::new(4, 0);
/// The addresses of wrappers and data in guest memory.
const WRAPPER: u64 = 0x9_0000;
const STATUS: u64 = 0x9_1000;
const DATA: u64 = 0x20_0000;
/// Completion codes.
const SUCCESS: u32 = 1;
const STALL: u32 = 6;
/// The USB 3 port of the first socket.
const PORT: u8 = 9;

fn add(bench: &mut Bench, kind: &str, fields: Value) -> anyhow::Result<()> {
    let config = registry::Config::of_kind(kind, fields).unwrap()?;
    bench.board.add(kind, |grants| config.build(grants))
}

/// A machine with a device of this configuration.
fn machine(fields: Value) -> Bench {
    let mut bench = Bench::new(8 << 20);
    add(&mut bench, "xhci", json!({ "slot": "04.0" })).unwrap();
    add(&mut bench, "usb-storage", fields).unwrap();
    bench.board.shared.usb.check().unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

/// A file whose blocks all differ.
fn image(folder: &tempfile::TempDir, name: &str, size: usize) -> PathBuf {
    let path = folder.path().join(name);
    let numbers = (0..u32::try_from(size.div_ceil(4)).unwrap()).flat_map(u32::to_le_bytes);
    fs::write(&path, numbers.take(size).collect::<Vec<_>>()).unwrap();
    path
}

/// The data of a command.
enum Data<'a> {
    None,
    In(u32),
    Out(&'a [u8]),
}

/// The end of a command: the status, the residue, and the received data.
#[derive(Debug, PartialEq, Eq)]
struct Ended(u8, u32, Vec<u8>);

/// A mass storage driver of the guest.
struct Host<'a> {
    driver: Driver<'a>,
    slot: u8,
    tag: u32,
}

impl<'a> Host<'a> {
    fn new(bench: &'a Bench) -> Self {
        let mut driver = Driver::find(bench, AT);
        driver.start();
        driver.reset_port(PORT);
        let slot = driver.address(PORT);
        assert_eq!(driver.configure_bulk(slot, 1024), SUCCESS);
        Self { driver, slot, tag: 0 }
    }

    /// A driver of a unit that has reported its power-on condition already.
    fn attended(bench: &'a Bench) -> Self {
        let mut host = Self::new(bench);
        assert_eq!(host.ask(&[0; 6]).0, 1);
        assert_eq!(host.sense(), (6, 0x29, 0));
        host
    }

    fn wrapper(&mut self, cdb: &[u8], length: u32, is_in: bool) -> [u8; 31] {
        self.tag += 1;
        wrapper(self.tag, cdb, length, is_in)
    }

    fn send(&mut self, wrapper: &[u8]) -> u32 {
        self.driver.write(WRAPPER, wrapper);
        let length = u32::try_from(wrapper.len()).unwrap();
        self.driver.transfer(self.slot, BULK_OUT, WRAPPER, length).0
    }

    /// Reads the status wrapper, once more after a stall as the specification demands (5.3.3).
    fn status(&mut self) -> (u8, u32) {
        let mut ended = self.driver.transfer(self.slot, BULK_IN, STATUS, 13);
        if ended.0 == STALL {
            self.driver.recover(self.slot, BULK_IN);
            ended = self.driver.transfer(self.slot, BULK_IN, STATUS, 13);
        }
        assert_eq!(ended, (SUCCESS, 13));
        let bytes: [u8; 13] = self.driver.read(STATUS);
        assert_eq!((&bytes[..4], &bytes[4..8]), (&b"USBS"[..], &self.tag.to_le_bytes()[..]));
        (bytes[12], u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]))
    }

    fn command(&mut self, cdb: &[u8], data: &Data<'_>) -> Ended {
        let (length, is_in) = match data {
            Data::None => (0, false),
            Data::In(length) => (*length, true),
            Data::Out(bytes) => (u32::try_from(bytes.len()).unwrap(), false),
        };
        let wrapper = self.wrapper(cdb, length, is_in);
        assert_eq!(self.send(&wrapper), SUCCESS);
        let mut came = Vec::new();
        if length > 0 {
            if let Data::Out(bytes) = data {
                self.driver.write(DATA, bytes);
            }
            let endpoint = if is_in { BULK_IN } else { BULK_OUT };
            let (code, went) = self.driver.transfer(self.slot, endpoint, DATA, length);
            if code == STALL {
                self.driver.recover(self.slot, endpoint);
            } else if is_in {
                came = vec![0; went as usize];
                self.driver.bench.memory.read(DATA, &mut came).unwrap();
            }
        }
        let (status, residue) = self.status();
        Ended(status, residue, came)
    }

    fn ask(&mut self, cdb: &[u8]) -> Ended {
        self.command(cdb, &Data::None)
    }

    fn get(&mut self, cdb: &[u8], length: u32) -> Vec<u8> {
        let Ended(status, residue, data) = self.command(cdb, &Data::In(length));
        assert_eq!((status, residue), (0, length - u32::try_from(data.len()).unwrap()), "{cdb:x?}");
        data
    }

    fn sense(&mut self) -> (u8, u8, u8) {
        let data = self.get(&[3, 0, 0, 0, 18, 0], 18);
        (data[2], data[12], data[13])
    }

    /// Checks that a command fails, and returns the sense data.
    fn refused(&mut self, cdb: &[u8], data: &Data<'_>) -> (u8, u8, u8) {
        assert_eq!(self.command(cdb, data).0, 1, "{cdb:x?}");
        self.sense()
    }
}

fn read10(first: u32, count: u8) -> [u8; 10] {
    let [a, b, c, d] = first.to_be_bytes();
    [0x28, 0, a, b, c, d, 0, 0, count, 0]
}

fn write10(first: u32, count: u8) -> [u8; 10] {
    let mut cdb = read10(first, count);
    cdb[0] = 0x2a;
    cdb
}

#[test]
fn reports_its_identity() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "disk", 1 << 20);
    let bench = machine(json!({ "path": path, "removable": true, "serial": "a stick" }));
    let mut host = Host::new(&bench);
    let mut data = [0; 64];
    let (code, length) = host.driver.control(host.slot, [0x80, 6, 0, 2, 0, 0, 64, 0], &mut data);
    assert_eq!((code, length), (SUCCESS, 9 + 9 + 2 * (7 + 6)));
    assert_eq!(data[14..17], [8, 6, 0x50]);
    let mut most = [9];
    assert_eq!(host.driver.control(host.slot, [0xa1, 0xfe, 0, 0, 0, 0, 1, 0], &mut most).0, 1);
    assert_eq!(most, [0], "one unit");
    // INQUIRY works before the power-on condition is reported.
    let data = host.get(&[0x12, 0, 0, 0, 36, 0], 36);
    assert_eq!((data[0], data[1], data[4], &data[8..16]), (0, 0x80, 31, &b"TRANSOM "[..]));
    assert_eq!(host.refused(&[0; 6], &Data::None), (6, 0x29, 0));
    assert_eq!(host.ask(&[0; 6]).0, 0);
    assert_eq!(host.get(&[0x12, 1, 0, 0, 255, 0], 255)[4..], [0, 0x80, 0x83, 0xb0, 0xb1, 0xb2]);
    assert_eq!(&host.get(&[0x12, 1, 0x80, 0, 255, 0], 255)[4..], b"a stick");
    for page in [0x83, 0xb0, 0xb1, 0xb2] {
        let data = host.get(&[0x12, 1, page, 0, 255, 0], 255);
        assert_eq!((data[1], usize::from(data[3])), (page, data.len() - 4));
    }
    assert_eq!(host.refused(&[0x12, 1, 0x99, 0, 255, 0], &Data::In(255)), (5, 0x24, 0));
    assert_eq!(host.refused(&[0xff; 6], &Data::None), (5, 0x20, 0));
    assert_eq!(host.get(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8), [0, 0, 7, 0xff, 0, 0, 2, 0]);
    let mut long = [0; 16];
    (long[0], long[1], long[13]) = (0x9e, 0x10, 32);
    assert_eq!(host.get(&long, 32)[..16], [0, 0, 0, 0, 0, 0, 7, 0xff, 0, 0, 2, 0, 0, 3, 0x80, 0]);
    assert_eq!(host.get(&[0x1a, 0, 0x3f, 0, 192, 0], 192)[..4], [55, 0, 0x10, 8]);
    assert_eq!(host.get(&[0x1a, 8, 8, 0, 192, 0], 192)[4..7], [8, 18, 4], "a cache");
    assert_eq!(host.get(&[0x23, 0, 0, 0, 0, 0, 0, 0, 12, 0], 12)[3..9], [8, 0, 0, 8, 0, 2]);
}

#[test]
fn blocks_are_written_to_and_read_from_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "disk", 4 << 20);
    let before = fs::read(&path).unwrap();
    let bench = machine(json!({ "path": path }));
    let mut host = Host::attended(&bench);
    assert_eq!(host.get(&read10(3, 5), 5 * 512), before[3 * 512..8 * 512]);
    assert_eq!(host.get(&[8, 0, 0, 4, 0, 0], 256 * 512), before[4 * 512..260 * 512], "256 by 0");
    let mut long = [0; 16];
    (long[0], long[9], long[12]) = (0x88, 1, 16); // 4096 blocks
    assert_eq!(host.get(&long, 2 << 20), before[512..512 + (2 << 20)]);
    let news: Vec<u8> = (0..8192_u32).map(|it| it.to_le_bytes()[0] ^ 0x5a).collect();
    assert_eq!(host.command(&write10(100, 16), &Data::Out(&news)), Ended(0, 0, Vec::new()));
    let mut durable = [0; 12];
    (durable[0], durable[1], durable[5], durable[9]) = (0xaa, 8, 200, 16);
    assert_eq!(host.command(&durable, &Data::Out(&news)).0, 0);
    assert_eq!(host.ask(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]).0, 0, "flush");
    let after = fs::read(&path).unwrap();
    assert_eq!((&after[51200..59392], &after[102_400..110_592]), (&news[..], &news[..]));
    assert_eq!(after[..51200], before[..51200]);
    assert_eq!(host.refused(&read10(8191, 2), &Data::In(1024)), (5, 0x21, 0));
    assert_eq!(host.refused(&write10(u32::MAX, 1), &Data::Out(&[0; 512])), (5, 0x21, 0));
    assert_eq!(host.ask(&[0x2f, 0, 0, 0, 0, 0, 0, 0, 8, 0]).0, 0, "verify");
}

#[test]
fn one_command_spans_several_transfers() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "disk", 4 << 20);
    let before = fs::read(&path).unwrap();
    let bench = machine(json!({ "path": path }));
    let mut host = Host::attended(&bench);
    let wrapper = host.wrapper(&read10(0, 200), 200 * 512, true);
    assert_eq!(host.send(&wrapper), SUCCESS);
    let mut at = 0;
    for length in [512, 65536 - 512, 0, 36864] {
        let went = host.driver.transfer(host.slot, BULK_IN, DATA + at, length);
        assert_eq!(went, (SUCCESS, length));
        at += u64::from(length);
    }
    assert_eq!(host.status(), (0, 0));
    let mut data = vec![0; 200 * 512];
    bench.memory.read(DATA, &mut data).unwrap();
    assert_eq!(data, before[..200 * 512]);
    // Answers can be cut at any byte.
    let wrapper = host.wrapper(&[0x12, 0, 0, 0, 36, 0], 36, true);
    assert_eq!(host.send(&wrapper), SUCCESS);
    assert_eq!(host.driver.transfer(host.slot, BULK_IN, DATA, 5), (SUCCESS, 5));
    assert_eq!(host.driver.transfer(host.slot, BULK_IN, DATA, 31), (SUCCESS, 31));
    assert_eq!(host.status(), (0, 0));
    // Blocks cannot, which would be babble.
    let wrapper = host.wrapper(&read10(0, 2), 1024, true);
    assert_eq!(host.send(&wrapper), SUCCESS);
    assert_eq!(host.driver.transfer(host.slot, BULK_IN, DATA, 100).0, STALL);
    host.driver.recover(host.slot, BULK_IN);
    assert_eq!(host.status().0, 2);
}

/// Number, command, data of the guest, status, residue, received bytes.
type Case<'a> = (u8, &'a [u8], &'a Data<'a>, u8, u32, usize);

#[test]
fn the_thirteen_error_cases_end_as_specified() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "disk", 1 << 20);
    let bench = machine(json!({ "path": path }));
    let mut host = Host::attended(&bench);
    let (nothing, read, write) = ([0; 6], read10(0, 2), write10(0, 2));
    let out = vec![7; 2048];
    let (none, few, same, many) = (Data::None, Data::In(512), Data::In(1024), Data::In(2048));
    let cases: [Case<'_>; 13] = [
        (1, &nothing, &none, 0, 0, 0),
        (2, &read, &none, 2, 0, 0),
        (3, &write, &none, 2, 0, 0),
        (4, &nothing, &same, 0, 1024, 0),
        (5, &read, &many, 0, 1024, 1024),
        (6, &read, &same, 0, 0, 1024),
        (7, &read, &few, 2, 512, 0),
        (8, &write, &same, 2, 1024, 0),
        (9, &nothing, &Data::Out(&out), 0, 2048, 0),
        (10, &read, &Data::Out(&out), 2, 2048, 0),
        (11, &write, &Data::Out(&out), 0, 1024, 0),
        (12, &write, &Data::Out(&out[..1024]), 0, 0, 0),
        (13, &write, &Data::Out(&out[..512]), 2, 512, 0),
    ];
    for (case, cdb, data, status, residue, came) in cases {
        let ended = host.command(cdb, data);
        assert_eq!((ended.0, ended.1, ended.2.len()), (status, residue, came), "case {case}");
    }
    let after = fs::read(&path).unwrap();
    assert_eq!((after[1023], after[1024]), (7, 0), "no more was written than the command says");
}

#[test]
fn an_invalid_command_block_halts_the_transport_until_a_reset() {
    let folder = tempfile::tempdir().unwrap();
    let bench = machine(json!({ "path": image(&folder, "disk", 1 << 20) }));
    let mut host = Host::attended(&bench);
    let good = host.wrapper(&[0; 6], 0, false);
    let changed = |at: usize, value: u8| {
        let mut bytes = good;
        bytes[at] = value;
        bytes.to_vec()
    };
    let long = [&good[..], &[0]].concat();
    for bad in [
        changed(0, 0),
        changed(12, 1),
        changed(13, 1),
        changed(14, 0),
        changed(14, 17),
        good[..30].to_vec(),
        long,
        vec![0xff; 512],
    ] {
        assert_eq!(host.send(&bad), STALL, "{bad:?}");
        for _ in 0..2 {
            host.driver.recover(host.slot, BULK_OUT);
            assert_eq!(host.send(&good), STALL, "a cleared halt is not enough");
            assert_eq!(host.driver.transfer(host.slot, BULK_IN, STATUS, 13).0, STALL);
            host.driver.recover(host.slot, BULK_IN);
        }
        let reset = host.driver.control(host.slot, [0x21, 0xff, 0, 0, 0, 0, 0, 0], &mut []);
        assert_eq!(reset.0, SUCCESS);
        host.driver.recover(host.slot, BULK_OUT);
        assert_eq!(host.ask(&[0; 6]).0, 0);
    }
    // Wrappers and data outside of memory.
    let far = 1 << 40;
    assert_eq!(host.driver.transfer(host.slot, BULK_OUT, far, 31).0, 2, "data buffer error");
    host.driver.recover(host.slot, BULK_OUT);
    let wrapper = host.wrapper(&read10(0, 1), 512, true);
    assert_eq!(host.send(&wrapper), SUCCESS);
    assert_eq!(host.driver.transfer(host.slot, BULK_IN, far, 512).0, 2);
    host.driver.recover(host.slot, BULK_IN);
    assert_eq!(host.status(), (1, 512));
}

#[test]
fn a_cd_has_one_track_and_blocks_of_2048() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "a.iso", (1 << 20) + 512);
    let before = fs::read(&path).unwrap();
    let bench = machine(json!({ "path": path }));
    let mut host = Host::attended(&bench);
    assert_eq!(host.get(&[0x12, 0, 0, 0, 36, 0], 36)[..2], [5, 0x80]);
    let capacity = host.get(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8);
    assert_eq!(capacity, [0, 0, 1, 0xff, 0, 0, 8, 0], "the incomplete block is left out");
    assert_eq!(host.get(&read10(511, 1), 2048), before[511 * 2048..512 * 2048]);
    assert_eq!(host.refused(&read10(512, 1), &Data::In(2048)), (5, 0x21, 0));
    assert_eq!(host.refused(&write10(0, 1), &Data::Out(&[0; 2048])), (5, 0x20, 0));
    let read_cd = [0xbe, 0, 0, 0, 0, 2, 0, 0, 1, 0x10, 0, 0];
    assert_eq!(host.get(&read_cd, 2048), before[4096..6144]);
    let contents = host.get(&[0x43, 0, 0, 0, 0, 0, 0, 3, 36, 0], 804);
    let tracks = [0, 18, 1, 1, 0, 0x14, 1, 0, 0, 0, 0, 0, 0, 0x14, 0xaa, 0, 0, 0, 2, 0];
    assert_eq!(contents, tracks);
    let by_time = host.get(&[0x43, 2, 0, 0, 0, 0, 0xaa, 0, 12, 0], 12);
    assert_eq!(by_time[8..], [0, 0, 8, 62], "512 + 150 frames");
    assert_eq!(host.get(&[0x43, 0, 1, 0, 0, 0, 0, 0, 12, 0], 12)[..4], [0, 10, 1, 1]);
    let features = host.get(&[0x46, 0, 0, 0, 0, 0, 0, 1, 0, 0], 256);
    assert_eq!(features[..8], [0, 0, 0, 72, 0, 0, 0, 8]);
    let length = u32::from_be_bytes([features[0], features[1], features[2], features[3]]);
    assert_eq!(length as usize + 4, features.len());
    let one = host.get(&[0x46, 2, 0, 0x1f, 0, 0, 0, 0, 64, 0], 64);
    assert_eq!(one[8..12], [0, 0x1f, 4, 4], "the DVD feature is not current");
    assert_eq!(host.get(&[0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8, 0], 8), [0, 6, 4, 0x10, 0, 2, 0, 0]);
    assert_eq!(host.get(&[0x51, 0, 0, 0, 0, 0, 0, 0, 34, 0], 34)[1..4], [32, 0x0e, 1]);
    assert_eq!(host.get(&[0x52, 1, 0, 0, 0, 1, 0, 0, 36, 0], 36)[24..28], [0, 0, 2, 0]);
    assert_eq!(host.get(&[0xbd, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0], 8).len(), 8);
    assert_eq!(host.get(&[0x5a, 0, 0x2a, 0, 0, 0, 0, 0, 128, 0], 128)[8..10], [0x2a, 20]);
    let said = add(&mut Bench::new(4096), "usb-storage", json!({ "path": path, "sector": 4096 }));
    assert!(said.unwrap_err().root_cause().to_string().contains("2048"));
}

#[test]
fn a_medium_is_ejected_and_another_inserted() {
    let folder = tempfile::tempdir().unwrap();
    let (one, two) = (image(&folder, "1.iso", 1 << 20), image(&folder, "2.iso", 2 << 20));
    let bench = machine(json!({ "path": one }));
    let mut host = Host::attended(&bench);
    let tray = bench.board.shared.disks.tray("usb-storage").unwrap();
    assert!(
        bench.board.shared.disks.tray("sda").err().unwrap().to_string().contains("usb-storage")
    );
    assert_eq!(host.ask(&[0x1e, 0, 0, 0, 1, 0]).0, 0, "the guest locks it");
    assert_eq!(host.refused(&[0x1b, 0, 0, 0, 2, 0], &Data::None), (5, 0x53, 2));
    assert!(tray.is_locked() && tray.eject(false).unwrap_err().to_string().contains("force"));
    let events = [0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8, 0];
    assert_eq!(host.get(&events, 8)[4..6], [1, 2], "the guest is asked to release it");
    assert!(tray.insert(&two, None).unwrap_err().to_string().contains("eject"));
    assert_eq!(host.ask(&[0x1e, 0, 0, 0, 0, 0]).0, 0);
    tray.eject(false).unwrap();
    assert!(tray.eject(false).is_err() && bench.board.shared.disks.all().is_empty());
    fs::OpenOptions::new().write(true).open(&one).unwrap().try_lock().unwrap();
    assert_eq!(host.refused(&[0; 6], &Data::None), (2, 0x3a, 0));
    assert_eq!(host.refused(&read10(0, 1), &Data::In(2048)), (2, 0x3a, 0));
    assert_eq!(host.get(&events, 8)[4..6], [3, 0]);
    assert!(tray.insert(&folder.path().join("none"), None).is_err());
    tray.insert(&two, None).unwrap();
    assert_eq!(tray.medium().unwrap().path, two);
    assert_eq!(host.get(&events, 8)[4..6], [2, 2]);
    assert_eq!(host.refused(&[0; 6], &Data::None), (6, 0x28, 0));
    assert_eq!(host.get(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8)[2..4], [3, 0xff]);
    assert_eq!(host.ask(&[0x1b, 0, 0, 0, 2, 0]).0, 0, "the guest ejects");
    assert!(tray.medium().is_none());
    // A removed medium stays removed.
    bench.board.reset().unwrap();
    let mut host = Host::attended(&bench);
    assert_eq!(host.refused(&[0; 6], &Data::None), (2, 0x3a, 0));
    // Another file under the name of the one that was checked.
    let file = FileId::of(&fs::metadata(&two).unwrap());
    let error = tray.insert(&one, Some(file)).unwrap_err().to_string();
    assert!(error.contains("was replaced before it was opened"), "{error}");
    tray.insert(&one, Some(FileId::of(&fs::metadata(&one).unwrap()))).unwrap();
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    assert_eq!(tray.medium().unwrap().path, one);
}

#[test]
fn a_device_is_plugged_and_pulled_while_the_machine_runs() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "disk", 1 << 20);
    let mut bench = machine(json!({ "path": path }));
    bench.board.unplug("usb-storage").unwrap();
    assert!(bench.board.unplug("usb-storage").is_err() && bench.board.unplug("xhci").is_err());
    fs::OpenOptions::new().write(true).open(&path).unwrap().try_lock().unwrap();
    for removable in [false, true, false, true] {
        let fields = json!({ "path": path, "removable": removable, "speed": "high" });
        add(&mut bench, "usb-storage", fields).unwrap();
        assert_eq!(bench.board.shared.usb.names(), ["usb-storage"]);
        assert_eq!(bench.board.shared.disks.tray("usb-storage").is_ok(), removable);
        {
            let mut driver = Driver::find(&bench, AT);
            driver.start();
            driver.wait(Driver::port(1), 1, 1);
            driver.reset_port(1);
            let slot = driver.address(1);
            assert_eq!(driver.configure_bulk(slot, 512), SUCCESS);
            let mut host = Host { driver, slot, tag: 0 };
            // The device is pulled while the guest waits for data.
            let wrapper = host.wrapper(&read10(0, 2), 1024, true);
            assert_eq!(host.send(&wrapper), SUCCESS);
        }
        bench.board.unplug("usb-storage").unwrap();
        assert!(bench.board.shared.disks.all().is_empty(), "its file is free");
        let driver = Driver::find(&bench, AT);
        driver.wait(Driver::port(1), 1, 0);
    }
    let nothing = add(&mut bench, "usb-storage", json!({}));
    assert!(nothing.unwrap_err().root_cause().to_string().contains("path"));
    add(&mut bench, "usb-storage", json!({ "cdrom": true })).unwrap();
    add(&mut bench, "usb-keyboard", json!({})).unwrap();
    bench.board.unplug("usb-keyboard").unwrap();
    bench.board.reset().unwrap();
}

#[test]
fn a_read_only_disk_reports_write_protection() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "disk", 1 << 20);
    let bench = machine(json!({ "path": path, "readonly": true }));
    let mut host = Host::attended(&bench);
    assert_eq!(host.get(&[0x1a, 0, 0x3f, 0, 192, 0], 192)[2], 0x90);
    assert_eq!(host.refused(&write10(0, 1), &Data::Out(&[0; 512])), (7, 0x27, 0));
    assert_eq!(
        host.refused(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &Data::Out(&[0; 24])),
        (5, 0x20, 0)
    );
}

#[test]
fn unmapped_blocks_are_freed_on_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "disk", 1 << 20);
    let bench = machine(json!({ "path": path }));
    let mut host = Host::attended(&bench);
    let list = |ranges: &[(u64, u32)]| {
        let length = u16::try_from(16 * ranges.len()).unwrap();
        let mut data = (length + 6).to_be_bytes().to_vec();
        data.extend(length.to_be_bytes());
        data.extend([0; 4]);
        for (first, count) in ranges {
            data.extend(first.to_be_bytes());
            data.extend(count.to_be_bytes());
            data.extend([0; 4]);
        }
        data
    };
    let unmap = |length: usize| [0x42, 0, 0, 0, 0, 0, 0, 0, u8::try_from(length).unwrap(), 0];
    let data = list(&[(8, 8), (0, 0), (24, 16)]);
    assert_eq!(host.command(&unmap(data.len()), &Data::Out(&data)), Ended(0, 0, Vec::new()));
    let after = fs::read(&path).unwrap();
    assert!(after[4096..8192].iter().chain(&after[12288..20480]).all(|it| *it == 0));
    assert_eq!(after[8192..8196], 2048_u32.to_le_bytes());
    let beyond = list(&[(2047, 2)]);
    assert_eq!(host.refused(&unmap(beyond.len()), &Data::Out(&beyond)), (5, 0x21, 0));
    let mut liar = list(&[(8, 8)]);
    liar[3] = 32;
    assert_eq!(host.refused(&unmap(liar.len()), &Data::Out(&liar)), (5, 0x26, 0));
}

#[test]
fn a_growing_disk_reports_its_new_capacity() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "disk", 1 << 20);
    let bench = machine(json!({ "path": path, "sector": 4096 }));
    let mut host = Host::attended(&bench);
    assert_eq!(host.get(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8), [0, 0, 0, 0xff, 0, 0, 16, 0]);
    bench.board.shared.disks.find("usb-storage").unwrap().grow(Some(2 << 20)).unwrap();
    assert_eq!(host.refused(&[0; 6], &Data::None), (6, 0x2a, 9));
    assert_eq!(host.get(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8)[2..4], [1, 0xff]);
}

#[test]
fn a_waiting_transfer_is_withdrawn_and_completed_on_retry() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder, "disk", 1 << 20);
    let before = fs::read(&path).unwrap();
    // The first second is not limited. Later requests wait.
    let bench = machine(json!({ "path": path, "bandwidth": "64K" }));
    let mut host = Host::attended(&bench);
    let wrapper = host.wrapper(&read10(0, 128), 65536, true);
    assert_eq!(host.send(&wrapper), SUCCESS);
    assert_eq!(host.driver.transfer(host.slot, BULK_IN, DATA, 65536), (SUCCESS, 65536));
    assert_eq!(host.status(), (0, 0));
    let wrapper = host.wrapper(&read10(128, 128), 65536, true);
    assert_eq!(host.send(&wrapper), SUCCESS);
    bench.memory.write(DATA, &[0xee; 65536]).unwrap();
    let slot = host.slot;
    host.driver.push(slot, BULK_IN, block(DATA, 65536, NORMAL | COMPLETION));
    host.driver.ring(slot, BULK_IN);
    let at = u32::from(slot) << 24 | u32::from(BULK_IN) << 16;
    assert_eq!(host.driver.command(block(0, 0, 15 << 10 | at)).0, 1, "stop endpoint");
    let mut data = vec![0; 65536];
    bench.memory.read(DATA, &mut data).unwrap();
    assert!(data.iter().all(|it| *it == 0xee), "no data has arrived yet");
    host.driver.ring(slot, BULK_IN);
    // The same with a pause of the machine.
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    assert_eq!(host.driver.wait_event(32)[2], 1 << 24);
    assert_eq!(host.status(), (0, 0));
    bench.memory.read(DATA, &mut data).unwrap();
    assert_eq!(data, before[65536..131_072]);
}

/// An image whose host is faulty.
struct Sick(Fault);

struct SickChannel(Fault, Vec<disk::Completion>, OwnedFd);

impl Image for Sick {
    fn geometry(&self) -> Geometry {
        let (logical_block, physical_block, discard) = (512, 512, 512);
        Geometry { size: 1 << 20, logical_block, physical_block, discard, read_only: false }
    }
    fn channel(&self, _: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        let event = eventfd(1, EventfdFlags::NONBLOCK)?;
        Ok(Box::new(SickChannel(self.0, Vec::new(), event)))
    }
    fn grow(&self, _: Option<u64>) -> anyhow::Result<()> {
        Ok(())
    }
}

impl Channel for SickChannel {
    fn push(&mut self, request: Request) {
        let Request { tag, pieces, operation, .. } = request;
        let result = if operation == Operation::Flush { Ok(()) } else { Err(self.0) };
        self.1.push(disk::Completion { tag, result, pieces });
    }
    fn submit(&mut self) {}
    fn reap(&mut self, done: &mut Vec<disk::Completion>) {
        done.append(&mut self.1);
    }
    fn event(&self) -> BorrowedFd<'_> {
        self.2.as_fd()
    }
}

/// A transport with a faulty medium, and its memory.
fn alone(fault: Fault) -> (Transport, Memory) {
    let drive = Drive::new("disk", "x".into(), Path::new("sick"), Arc::new(Sick(fault)));
    let (bus, serial) = (Bus::Usb, "x".into());
    let profile = Profile { bus, cdrom: false, removable: true, serial };
    let mut transport = Transport::new(profile, Some(Arc::new(drive)));
    let memory = Bench::new(1 << 20).memory;
    transport.channel = Some(Sick(fault).channel(&memory).unwrap());
    transport.memory = Some(memory.clone());
    (transport, memory)
}

fn moved(transport: &mut Transport, endpoint: u8, length: u32) -> Vec<TransferEnd> {
    let pieces = vec![Piece { address: 0x1000, length }];
    transport.begin(Transfer { endpoint, pieces, length, is_isochronous: false });
    let mut done = Vec::new();
    for _ in 0..4 {
        transport.reap(&mut done);
    }
    done
}

#[test]
fn host_errors_become_sense_data() {
    let stall = |endpoint| TransferEnd { endpoint, result: Err(crate::usb::Fault::Stall) };
    for (fault, opcode, key) in [
        (Fault::Broken, 0x28, [3, 0x11, 0]),
        (Fault::Broken, 0x2a, [3, 0x0c, 0]),
        (Fault::Full, 0x2a, [7, 0x27, 7]),
    ] {
        let (mut transport, memory) = alone(fault);
        transport.state.conditions = serde_json::from_value(json!({
            "sense": null, "attentions": [], "prevented": false, "news": "None"
        }))
        .unwrap();
        let is_in = opcode == 0x28;
        let endpoint = if is_in { IN } else { OUT };
        let mut wrapper = *b"USBC\x01\0\0\0\0\x02\0\0\0\0\x0a\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0";
        (wrapper[12], wrapper[15]) = (u8::from(is_in) << 7, opcode);
        memory.write(0x1000, &wrapper).unwrap();
        assert_eq!(moved(&mut transport, OUT, 31), [TransferEnd { endpoint: OUT, result: Ok(31) }]);
        assert_eq!(moved(&mut transport, endpoint, 512), [stall(endpoint)]);
        assert_eq!(moved(&mut transport, IN, 13), [TransferEnd { endpoint: IN, result: Ok(13) }]);
        let mut status = [0; 13];
        memory.read(0x1000, &mut status).unwrap();
        assert_eq!(status, *b"USBS\x01\0\0\0\0\x02\0\0\x01");
        let saved = serde_json::to_value(&transport.state.conditions).unwrap();
        let [sense, code, qualifier] = key;
        let wanted = json!({ "key": sense, "code": code, "qualifier": qualifier });
        assert_eq!(saved["sense"], wanted);
        assert_eq!(transport.state.phase, Phase::Ready);
    }
}

#[test]
fn refuses_a_damaged_state() {
    let folder = tempfile::tempdir().unwrap();
    let bench = machine(json!({ "path": image(&folder, "disk", 1 << 20) }));
    let mut host = Host::attended(&bench);
    let wrapper = host.wrapper(&write10(0, 2), 1024, false);
    assert_eq!(host.send(&wrapper), SUCCESS);
    let saved = serde_json::to_string(&bench.board.park()).unwrap();
    assert!(saved.contains("\"offset\":0"), "{saved}");
    for worse in ["\"offset\":18446744073709551615", "\"offset\":1048000", "\"offset\":-1"] {
        let worse = saved.replace("\"offset\":0", worse);
        assert!(bench.board.run(serde_json::from_str(&worse).unwrap()).is_err());
        bench.board.park();
    }
    bench.board.run(serde_json::from_str(&saved).unwrap()).unwrap();
    bench.memory.write(DATA, &[3; 1024]).unwrap();
    assert_eq!(host.driver.transfer(host.slot, BULK_OUT, DATA, 1024), (SUCCESS, 1024));
    assert_eq!(host.status(), (0, 0));
}
