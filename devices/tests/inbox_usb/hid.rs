//! A model of hidusb, hidclass, kbdhid and mouhid, and tests with it.

use std::time::Duration;

use host::input::{Key, Lights, Position};
use serde_json::json;

use super::machine;
use super::transfers::{Ended, Issued};
use super::usbhub3::{Device, resume, started, stop, suspend};
use super::usbxhci::{SHORT, STALL, SUCCESS, Xhci};

/// The lights: Num Lock and Caps Lock.
const NUM: u8 = 1 << 0;
const CAPS: u8 = 1 << 1;

/// Reads that hidclass keeps pending (usb3kd, findowner: two at an interrupt endpoint).
const READS: usize = 2;

/// One HID interface.
struct Hid {
    slot: u8,
    interface: u8,
    endpoint: u8,
    /// The report descriptor.
    report: Vec<u8>,
    /// The length of the longest input report.
    length: u32,
    /// Pending reads, the oldest first, each with its buffer.
    reads: Vec<(Issued, u64)>,
}

impl Hid {
    /// Starts an interface whose longest input report has this length.
    fn start(xhci: &mut Xhci, device: &Device, interface: u8, length: u32) -> Self {
        let slot = device.slot;
        // HID 1.11, 7.1: the HID descriptor follows that of the interface in the configuration.
        let heads = device.configuration.windows(2).enumerate();
        let heads: Vec<usize> = heads.filter(|it| it.1 == [9, 0x21]).map(|it| it.0).collect();
        let head = &device.configuration[heads[usize::from(interface)]..][..9];
        assert_eq!((&head[5..7], head[2..4].to_vec()), (&[1, 0x22][..], vec![0x11, 0x01]));
        let total = u16::from_le_bytes([head[7], head[8]]);
        // hidusb: no repetition. It ignores a stall (HID 1.11, 7.2.4: optional but for keyboards).
        let idle = xhci.control(slot, [0x21, 10, 0, 0, interface, 0, 0, 0], &mut []);
        assert!(idle == Ok(0) || interface > 0 && idle == Err(STALL), "{idle:?}");
        // A trace (cppblog.com/wrhwww/archive/2010/11/26/134727.html): 64 bytes more than exist.
        let [low, high] = (total + 64).to_le_bytes();
        let mut report = vec![0; usize::from(total) + 64];
        let setup = [0x81, 6, 0, 0x22, interface, 0, low, high];
        assert_eq!(xhci.control(slot, setup, &mut report), Ok(total.into()));
        report.truncate(total.into());
        let endpoint = device.pipes()[usize::from(interface)].number;
        let mut it = Self { slot, interface, endpoint, report, length, reads: Vec::new() };
        (0..READS).for_each(|_| it.read(xhci));
        it
    }

    fn read(&mut self, xhci: &mut Xhci) {
        let buffer = xhci.allocate(self.length.into());
        let read = xhci.issue((self.slot, self.endpoint), buffer, self.length);
        self.reads.push((read, buffer));
    }

    /// Waits for the next report, and reads again.
    fn next(&mut self, xhci: &mut Xhci) -> Vec<u8> {
        let (read, buffer) = self.reads.remove(0);
        let Ended { code, length } = xhci.finish(&read);
        assert_eq!(code, if length == self.length { SUCCESS } else { SHORT });
        self.read(xhci);
        xhci.read(buffer, usize::try_from(length).unwrap())
    }

    /// Writes a report at the control endpoint, because there is no endpoint to the device.
    fn write(&self, xhci: &mut Xhci, report: &mut [u8]) -> Result<usize, u32> {
        let length = u8::try_from(report.len()).unwrap();
        xhci.control(self.slot, [0x21, 9, 0, 2, self.interface, 0, length, 0], report)
    }
}

fn press(xhci: &Xhci, code: u16, down: bool) {
    assert!(xhci.shared.input.key(Key::new(code).unwrap(), down));
}

#[test]
fn keys_and_media_keys_arrive_at_their_interfaces() {
    let bench = machine(vec![("usb-keyboard", json!({}))]);
    let (mut xhci, device) = started(&bench, 1);
    let mut keys = Hid::start(&mut xhci, &device, 0, 8);
    let mut media = Hid::start(&mut xhci, &device, 1, 7);
    // The usages that kbdhid and hidserv look for: Keyboard, Consumer Control, System Control.
    assert_eq!(keys.report[..4], [0x05, 0x01, 0x09, 0x06]);
    assert_eq!(media.report[..4], [0x05, 0x0c, 0x09, 0x01]);
    for round in 0..20_u8 {
        // Shift and A.
        for (code, down) in [(0x2a, true), (0x1e, true), (0x1e, false), (0x2a, false)] {
            press(&xhci, code, down);
        }
        let reports: Vec<_> = (0..4).map(|_| keys.next(&mut xhci)).collect();
        let expected: [&[u8]; 4] = [&[2, 0, 0], &[2, 0, 4], &[2, 0, 0], &[0, 0, 0]];
        for (report, expected) in reports.iter().zip(expected) {
            assert_eq!((report.len(), &report[..3]), (8, expected), "round {round}");
        }
        press(&xhci, 0xe020, true);
        press(&xhci, 0xe020, false);
        assert_eq!(media.next(&mut xhci), [1, 0xe2, 0, 0, 0, 0, 0]);
        assert_eq!(media.next(&mut xhci), [1, 0, 0, 0, 0, 0, 0]);
        // Sleep is a report of its own, which is shorter.
        press(&xhci, 0xe05f, true);
        press(&xhci, 0xe05f, false);
        assert_eq!(media.next(&mut xhci), [2, 2]);
        assert_eq!(media.next(&mut xhci), [2, 0]);
    }
    xhci.expect_quiet();
}

#[test]
fn lights_are_set_by_the_control_endpoint() {
    let bench = machine(vec![("usb-keyboard", json!({}))]);
    let (mut xhci, device) = started(&bench, 1);
    let keys = Hid::start(&mut xhci, &device, 0, 8);
    for bits in [NUM, CAPS, NUM | CAPS, 0] {
        assert_eq!(keys.write(&mut xhci, &mut [bits]), Ok(1));
        let lights = Lights { num: bits & NUM != 0, caps: bits & CAPS != 0, scroll: false };
        assert_eq!(xhci.shared.input.lights(), Some(lights));
    }
    // No report comes by itself: the idle rate is infinite.
    std::thread::sleep(Duration::from_millis(30));
    xhci.expect_quiet();
}

#[test]
fn a_tablet_reports_absolute_positions() {
    let bench = machine(vec![("usb-tablet", json!({}))]);
    let (mut xhci, device) = started(&bench, 1);
    assert_eq!(device.classes(), [[3, 0, 0]]);
    let mut tablet = Hid::start(&mut xhci, &device, 0, 7);
    // mouhid's usages: Mouse, Pointer. X and Y are absolute (0x81, 0x02) up to 0x7fff.
    assert_eq!(tablet.report[..10], [5, 1, 9, 2, 0xa1, 1, 9, 1, 0xa1, 0]);
    for round in 0..100_u16 {
        let (x, buttons) = (round * 300, u8::from(round % 2 == 0));
        let position = Position { x, y: 0x7fff - x, wheel: 1, buttons, ..Position::default() };
        xhci.shared.input.position(position);
        let report = tablet.next(&mut xhci);
        let ([a, b], [c, d]) = (x.to_le_bytes(), (0x7fff - x).to_le_bytes());
        assert_eq!(report, [buttons, a, b, c, d, 1, 0]);
    }
    xhci.expect_quiet();
}

/// usbccgp selects each interface by itself (conjecture: SET_INTERFACE also without alternates).
/// The other interface is used meanwhile.
#[test]
fn selecting_an_interface_does_not_disturb_the_other() {
    let bench = machine(vec![("usb-keyboard", json!({}))]);
    let (mut xhci, device) = started(&bench, 1);
    let mut keys = Hid::start(&mut xhci, &device, 0, 8);
    xhci.expect_quiet();
    assert_eq!(xhci.control(device.slot, [1, 11, 0, 0, 1, 0, 0, 0], &mut []), Ok(0));
    xhci.expect_quiet();
    press(&xhci, 0x1e, true);
    assert_eq!(keys.next(&mut xhci)[2], 4);
    let mut media = Hid::start(&mut xhci, &device, 1, 7);
    press(&xhci, 0xe020, true);
    assert_eq!(media.next(&mut xhci)[1], 0xe2);
    // The selected interface itself has no transfers at that time.
    stop(&mut xhci, device.slot, keys.endpoint);
    assert_eq!(xhci.set_dequeue(device.slot, keys.endpoint), SUCCESS);
    assert_eq!(xhci.control(device.slot, [1, 11, 0, 0, 0, 0, 0, 0], &mut []), Ok(0));
    press(&xhci, 0xe020, false);
    assert_eq!(media.next(&mut xhci)[1], 0);
    xhci.expect_quiet();
}

/// An idle device is suspended: hidclass cancels its reads, and sends them again after the resume.
#[test]
fn reads_are_cancelled_for_a_suspend() {
    let bench = machine(vec![("usb-tablet", json!({}))]);
    let (mut xhci, device) = started(&bench, 1);
    let mut tablet = Hid::start(&mut xhci, &device, 0, 7);
    for x in 1..10 {
        suspend(&mut xhci, &device);
        assert_eq!(xhci.set_dequeue(device.slot, tablet.endpoint), SUCCESS);
        tablet.reads.clear();
        xhci.shared.input.position(Position { x, ..Position::default() });
        xhci.expect_quiet();
        resume(&mut xhci, &device);
        (0..READS).for_each(|_| tablet.read(&mut xhci));
        assert_eq!(tablet.next(&mut xhci)[1], x.to_le_bytes()[0]);
    }
}
