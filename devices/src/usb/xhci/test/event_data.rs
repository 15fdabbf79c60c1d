//! A driver that uses only Event Data TRBs, as that of Windows does. Each stage or transfer is a
//! chain that ends with an Event Data TRB, which requests the event. The data TRBs request none.

use super::*;
use crate::testutil::bulk::wrapper;
use crate::testutil::xhci::{BULK_IN, BULK_OUT};

/// A time limit that is enough even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

const SUCCESS: u32 = 1;
const STALL: u32 = 6;
const SHORT: u32 = 13;

/// TRB types and flags, shifted to their positions.
const SETUP: u32 = 2 << 10;
const STAGE: u32 = 3 << 10;
const STATUS: u32 = 4 << 10;
const EVENT_DATA: u32 = 7 << 10;
const SHORT_TOO: u32 = 1 << 2;
const IMMEDIATE: u32 = 1 << 6;
const INWARD: u32 = 1 << 16;

/// A transfer event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TransferEvent {
    /// ED: `parameter` is the guest's name of the transfer. Otherwise it is the address of a TRB.
    event_data: bool,
    parameter: u64,
    code: u32,
    length: u32,
    /// The endpoint number (DCI).
    endpoint: u8,
}

struct Guest<'a> {
    driver: Driver<'a>,
    slot: u8,
    cookie: u64,
    /// Data TRBs request an event for short packets.
    short_too: bool,
}

impl<'a> Guest<'a> {
    fn new(driver: Driver<'a>, slot: u8) -> Self {
        // Addresses of the Windows kernel look like this.
        Self { driver, slot, cookie: 0xffff_a08c_1234_5670, short_too: false }
    }

    /// Ends a chain with an Event Data TRB. Returns the event that is expected on success.
    fn end(&mut self, endpoint: u8, length: u32) -> TransferEvent {
        self.cookie += 0x10;
        self.driver.push(self.slot, endpoint, block(self.cookie, 0, EVENT_DATA | COMPLETION));
        TransferEvent { event_data: true, parameter: self.cookie, code: SUCCESS, length, endpoint }
    }

    /// Puts a chain of these parts into a ring, the first of this type. Returns the addresses of
    /// the TRBs.
    fn chain(&mut self, endpoint: u8, first: u32, parts: &[u32]) -> Vec<u64> {
        let (mut at, mut blocks) = (DATA, Vec::new());
        for (number, part) in parts.iter().enumerate() {
            let kind = if number == 0 { first } else { NORMAL };
            let short_too = if self.short_too { SHORT_TOO } else { 0 };
            let words = block(at, *part, kind | CHAIN | short_too);
            blocks.push(self.driver.push(self.slot, endpoint, words));
            at += u64::from(*part);
        }
        blocks
    }

    /// Puts a control transfer into the ring. Returns the addresses of its data and status stages,
    /// and the events of both that are expected on success.
    fn control(&mut self, setup: [u8; 8], parts: &[u32]) -> (Vec<u64>, u64, Vec<TransferEvent>) {
        let setup_at = u64::from_le_bytes(setup);
        self.driver.push(self.slot, 1, block(setup_at, 8, SETUP | IMMEDIATE));
        let (inward, mut expected) = (u32::from(setup[0] >> 7) * INWARD, Vec::new());
        let blocks = self.chain(1, STAGE | inward, parts);
        if !parts.is_empty() {
            expected.push(self.end(1, parts.iter().sum()));
        }
        let back = if parts.is_empty() { INWARD } else { inward ^ INWARD };
        let status = self.driver.push(self.slot, 1, block(0, 0, STATUS | back | CHAIN));
        expected.push(self.end(1, 0));
        self.driver.ring(self.slot, 1);
        (blocks, status, expected)
    }

    /// Puts a transfer into the ring of an endpoint. Returns its TRBs and the expected event.
    fn transfer(&mut self, endpoint: u8, parts: &[u32]) -> (Vec<u64>, TransferEvent) {
        let blocks = self.chain(endpoint, NORMAL, parts);
        let expected = self.end(endpoint, parts.iter().sum());
        self.driver.ring(self.slot, endpoint);
        (blocks, expected)
    }

    fn next(&mut self) -> TransferEvent {
        let [low, high, status, control] = self.driver.wait_event(32);
        let [_, _, endpoint, slot] = control.to_le_bytes();
        assert_eq!(slot, self.slot);
        TransferEvent {
            event_data: control & 4 != 0,
            parameter: u64::from(high) << 32 | u64::from(low),
            code: status >> 24,
            length: status & 0xff_ffff,
            endpoint,
        }
    }

    /// Checks that exactly these events arrive.
    fn expect_events(&mut self, what: &str, wanted: &[TransferEvent]) {
        let heard: Vec<_> = wanted.iter().map(|_| self.next()).collect();
        assert_eq!(heard, wanted, "{what}");
        // The completion of a command comes after all earlier events.
        self.driver.begin(block(0, 0, 23 << 10));
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < LIMIT, "{what}: the command does not end");
            match self.driver.event() {
                Some(event) if event[3] >> 10 & 0x3f == 33 => break,
                Some(event) => panic!("{what}: unexpected event: {event:x?}"),
                None => std::thread::yield_now(),
            }
        }
    }

    /// Restarts a halted endpoint with a new ring.
    fn reset(&mut self, endpoint: u8) {
        let at = u32::from(self.slot) << 24 | u32::from(endpoint) << 16;
        assert_eq!(self.driver.output(self.slot, endpoint, 0) & 7, 2, "halted");
        assert_eq!(self.driver.command(block(0, 0, 14 << 10 | at)).0, 1, "reset endpoint");
        let ring = self.driver.new_ring(self.slot, endpoint);
        assert_eq!(self.driver.command(block(ring | 1, 0, 16 << 10 | at)).0, 1, "set dequeue");
    }
}

/// The event of a TRB that is not an Event Data TRB.
fn of_block(parameter: u64, code: u32, length: u32, endpoint: u8) -> TransferEvent {
    TransferEvent { event_data: false, parameter, code, length, endpoint }
}

const DEVICE: [u8; 8] = [0x80, 6, 0, 1, 0, 0, 18, 0];
const CONFIGURATION: [u8; 8] = [0x80, 6, 0, 2, 0, 0, 255, 0];
const LIGHTS: [u8; 8] = [0x21, 9, 0, 2, 0, 0, 1, 0];
const UNKNOWN: [u8; 8] = [0x80, 6, 0, 0x77, 0, 0, 8, 0];
const UNKNOWN_SETTING: [u8; 8] = [0x00, 9, 77, 0, 0, 0, 0, 0];
/// The length of a keyboard's configuration descriptor in bytes.
const WHOLE: u32 = 9 + 2 * (9 + 9 + 7);

#[test]
fn control_transfers_are_reported_with_event_data() {
    let bench = both();
    let (driver, slot) = configured(&bench, 1);
    let mut guest = Guest::new(driver, slot);
    for short_too in [false, true] {
        guest.short_too = short_too;
        let (_, _, expected) = guest.control([0x21, 10, 0, 0, 0, 0, 0, 0], &[]);
        guest.expect_events("no data", &expected);
        let (_, _, expected) = guest.control(DEVICE, &[18]);
        guest.expect_events("from the device", &expected);
        assert_eq!(guest.driver.read(DATA + 8), [0x27, 0x06, 0x01, 0x00]);
        guest.driver.write(DATA, &[0; 18]);
        let (_, _, expected) = guest.control(DEVICE, &[5, 3, 10]);
        guest.expect_events("in three parts", &expected);
        assert_eq!(guest.driver.read(DATA + 8), [0x27, 0x06, 0x01, 0x00]);
        guest.driver.write(DATA, &[0b010]);
        let (_, _, expected) = guest.control(LIGHTS, &[1]);
        guest.expect_events("to the device", &expected);
        let caps = Lights { caps: true, ..Lights::default() };
        assert_eq!(bench.board.shared.input.lights(), Some(caps));
    }
}

#[test]
fn a_short_control_transfer_is_reported_with_its_length() {
    let bench = both();
    let (driver, slot) = configured(&bench, 1);
    let mut guest = Guest::new(driver, slot);
    for parts in [&[255][..], &[20, 100, 135], &[1, 8, 246], &[WHOLE, 255 - WHOLE]] {
        let (_, _, mut expected) = guest.control(CONFIGURATION, parts);
        (expected[0].code, expected[0].length) = (SHORT, WHOLE);
        guest.expect_events(&format!("{parts:?}"), &expected);
        assert_eq!(guest.driver.read::<2>(DATA + 2), WHOLE.to_le_bytes()[..2]);
    }
    // A driver that also requests an event for the short packet gets both.
    guest.short_too = true;
    let (blocks, _, mut expected) = guest.control(CONFIGURATION, &[20, 100, 135]);
    (expected[0].code, expected[0].length) = (SHORT, WHOLE);
    expected.insert(0, of_block(blocks[1], SHORT, 120 - WHOLE, 1));
    guest.expect_events("both", &expected);
}

#[test]
fn a_stalled_control_transfer_is_reported_with_its_block() {
    let bench = both();
    let (driver, slot) = configured(&bench, 1);
    let mut guest = Guest::new(driver, slot);
    for short_too in [false, true] {
        guest.short_too = short_too;
        let (blocks, ..) = guest.control(UNKNOWN, &[8]);
        guest.expect_events("data stage", &[of_block(blocks[0], STALL, 8, 1)]);
        guest.reset(1);
        let (_, status, _) = guest.control(UNKNOWN_SETTING, &[]);
        guest.expect_events("status stage", &[of_block(status, STALL, 0, 1)]);
        guest.reset(1);
        let (_, _, expected) = guest.control(DEVICE, &[18]);
        guest.expect_events("afterwards", &expected);
    }
}

#[test]
fn interrupt_reports_are_reported_with_event_data() {
    let bench = both();
    let (driver, slot) = configured(&bench, 1);
    let mut guest = Guest::new(driver, slot);
    let (_, first) = guest.transfer(IN, &[8]);
    let (_, second) = guest.transfer(IN, &[3, 5]);
    bench.board.shared.input.key(key(0x1e), true);
    guest.expect_events("a key", &[first]);
    assert_eq!(guest.driver.read(DATA), [0, 0, 4, 0, 0, 0, 0, 0]);
    bench.board.shared.input.key(key(0x1e), false);
    guest.expect_events("in two parts", &[second]);
    assert_eq!(guest.driver.read(DATA), [0; 8]);
    // Two Event Data TRBs in one chain: each counts the bytes since the one before.
    let words = [
        block(DATA, 3, NORMAL | CHAIN),
        block(0x1111, 0, EVENT_DATA | CHAIN | COMPLETION),
        block(DATA + 3, 5, NORMAL | CHAIN),
        block(0x2222, 0, EVENT_DATA | COMPLETION),
    ];
    for it in words {
        guest.driver.push(slot, IN, it);
    }
    guest.driver.ring(slot, IN);
    bench.board.shared.input.key(key(0x1e), true);
    let expected = |parameter, length| TransferEvent {
        event_data: true,
        parameter,
        code: SUCCESS,
        length,
        endpoint: IN,
    };
    guest.expect_events("two of them", &[expected(0x1111, 3), expected(0x2222, 5)]);
}

#[test]
fn a_short_report_is_reported_with_its_length() {
    let bench = both();
    let (driver, slot) = configured(&bench, 2);
    let mut guest = Guest::new(driver, slot);
    for (parts, short_too) in [(&[8][..], false), (&[3, 1, 60], false), (&[8], true)] {
        guest.short_too = short_too;
        let (blocks, expected) = guest.transfer(IN, parts);
        let expected = TransferEvent { code: SHORT, length: 7, ..expected };
        let also = short_too.then(|| of_block(blocks[0], SHORT, 1, IN));
        bench.board.shared.input.position(Position { x: 0x1234, ..Position::default() });
        let all: Vec<_> = also.into_iter().chain([expected]).collect();
        guest.expect_events(&format!("{parts:?}"), &all);
        guest.short_too = false;
        let (_, expected) = guest.transfer(IN, &[7]);
        bench.board.shared.input.position(Position { x: 0x4321, ..Position::default() });
        guest.expect_events("whole", &[expected]);
    }
}

#[test]
fn a_lone_event_data_block_only_causes_its_event() {
    let bench = both();
    let (driver, slot) = configured(&bench, 1);
    let mut guest = Guest::new(driver, slot);
    for endpoint in [IN, 1] {
        let expected = guest.end(endpoint, 0);
        guest.driver.ring(slot, endpoint);
        guest.expect_events("alone", &[expected]);
        assert_eq!(guest.driver.output(slot, endpoint, 0) & 7, 1, "running");
    }
    // A descriptor that requests no event has none, and the next one begins.
    guest.driver.push(slot, IN, block(0x3333, 0, EVENT_DATA));
    let (_, expected) = guest.transfer(IN, &[8]);
    bench.board.shared.input.key(key(0x1e), true);
    guest.expect_events("after a silent one", &[expected]);
    assert_eq!(guest.driver.read(DATA), [0, 0, 4, 0, 0, 0, 0, 0]);
}

/// A mass storage driver of the guest. Wrapper, data and status are each a chain of their own.
struct Disk<'a> {
    guest: Guest<'a>,
    tag: u32,
}

impl Disk<'_> {
    fn wrap(&mut self, cdb: &[u8], length: u32, inward: bool) {
        self.tag += 1;
        let bytes = wrapper(self.tag, cdb, length, inward);
        self.guest.driver.write(DATA, &bytes);
        let (_, expected) = self.guest.transfer(BULK_OUT, &[31]);
        self.guest.expect_events("wrapper", &[expected]);
    }

    /// The status and the residue.
    fn status(&mut self) -> (u8, u32) {
        let (_, expected) = self.guest.transfer(BULK_IN, &[13]);
        self.guest.expect_events("status", &[expected]);
        let bytes: [u8; 13] = self.guest.driver.read(DATA);
        assert_eq!(bytes[..8], [&b"USBS"[..], &self.tag.to_le_bytes()].concat());
        (bytes[12], u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]))
    }
}

#[test]
fn mass_storage_transfers_are_reported_with_event_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let content: Vec<u8> = (0..0x1_0000_u32).flat_map(|it| it.to_le_bytes()).collect();
    std::fs::write(&path, &content).unwrap();
    let bench = machine_of(vec![
        ("xhci", json!({ "slot": "04.0" })),
        ("usb-storage", json!({ "path": path })),
    ]);
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    driver.reset_port(9);
    let slot = driver.address(9);
    assert_eq!(driver.configure_bulk(slot, 1024), 1);
    let mut disk = Disk { guest: Guest::new(driver, slot), tag: 0 };
    // Not ready: the unit reports its power-on condition first.
    disk.wrap(&[0; 6], 0, true);
    assert_eq!(disk.status(), (1, 0));
    // The sense data is shorter than the buffer.
    disk.wrap(&[3, 0, 0, 0, 252, 0], 252, true);
    let (_, expected) = disk.guest.transfer(BULK_IN, &[10, 242]);
    disk.guest.expect_events("sense", &[TransferEvent { code: SHORT, length: 18, ..expected }]);
    assert_eq!(disk.guest.driver.read::<14>(DATA)[12], 0x29);
    assert_eq!(disk.status(), (0, 252 - 18));
    // Blocks 3 to 10, in three parts.
    disk.wrap(&[0x28, 0, 0, 0, 0, 3, 0, 0, 8, 0], 4096, true);
    let (_, expected) = disk.guest.transfer(BULK_IN, &[1024, 2048, 1024]);
    disk.guest.expect_events("read", &[expected]);
    assert_eq!(disk.guest.driver.read::<4096>(DATA)[..], content[3 * 512..11 * 512]);
    assert_eq!(disk.status(), (0, 0));
    // A write and a read.
    disk.wrap(&[0x2a, 0, 0, 0, 0, 3, 0, 0, 2, 0], 1024, false);
    disk.guest.driver.write(DATA, &[0xa5; 1024]);
    let (_, expected) = disk.guest.transfer(BULK_OUT, &[512, 512]);
    disk.guest.expect_events("write", &[expected]);
    assert_eq!(disk.status(), (0, 0));
    disk.wrap(&[0x28, 0, 0, 0, 0, 3, 0, 0, 2, 0], 1024, true);
    let (_, expected) = disk.guest.transfer(BULK_IN, &[1024]);
    disk.guest.expect_events("read again", &[expected]);
    assert_eq!(disk.guest.driver.read(DATA), [0xa5; 1024]);
    assert_eq!(disk.status(), (0, 0));
    // An unknown command: the endpoint halts, and is cleared.
    disk.wrap(&[0xee; 6], 512, true);
    let (blocks, _) = disk.guest.transfer(BULK_IN, &[512]);
    disk.guest.expect_events("stall", &[of_block(blocks[0], STALL, 512, BULK_IN)]);
    disk.guest.reset(BULK_IN);
    let (_, _, expected) = disk.guest.control([2, 1, 0, 0, 0x81, 0, 0, 0], &[]);
    disk.guest.expect_events("clear feature", &expected);
    assert_eq!(disk.status(), (1, 512));
}
