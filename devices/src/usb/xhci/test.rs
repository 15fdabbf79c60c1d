//! The controller as seen by a driver, with a keyboard and a tablet in its ports.

mod event_data;

use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::device::Kind;
use crate::registry;
use crate::testutil::Bench;
use crate::testutil::xhci::{
    BLOCKS, CHAIN, COMPLETION, CRCR, DATA, Driver, INPUT, INTERRUPTER, NORMAL, TABLE, USBCMD,
    USBSTS, block,
};
use host::input::{Key, Lights, Position};

const AT: Address = Address::new(4, 0);
/// INTA of slot 4.
const GSI: u32 = 20;
/// The endpoint number (DCI) of endpoint 0x81.
const IN: u8 = 3;

/// A machine with these devices.
fn machine(kinds: &[&str]) -> Bench {
    let fields = |kind: &&str| if *kind == "xhci" { json!({ "slot": "04.0" }) } else { json!({}) };
    let devices: Vec<_> = kinds.iter().map(|kind| (*kind, fields(kind))).collect();
    machine_of(devices)
}

fn add(bench: &mut Bench, kind: &str, fields: Value) -> anyhow::Result<()> {
    let config = registry::Config::of_kind(kind, fields).unwrap().unwrap();
    bench.board.add(kind, |grants| config.build(grants))
}

fn machine_of(devices: Vec<(&str, Value)>) -> Bench {
    let mut bench = Bench::new(1 << 20);
    for (kind, fields) in devices {
        add(&mut bench, kind, fields).unwrap();
    }
    bench.board.shared.usb.check().unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn both() -> Bench {
    machine(&["xhci", "usb-keyboard", "usb-tablet"])
}

/// A started driver, and the slot of the configured device at this port.
fn configured(bench: &Bench, port: u8) -> (Driver<'_>, u8) {
    let mut driver = Driver::find(bench, AT);
    driver.start();
    driver.reset_port(port);
    let slot = driver.address(port);
    assert_eq!(driver.configure(slot, IN), 1);
    (driver, slot)
}

/// Requests a report of eight bytes. Returns the address of the TRB.
fn ask(driver: &mut Driver<'_>, slot: u8) -> u64 {
    let at = driver.push(slot, IN, block(DATA, 8, NORMAL | COMPLETION | 1 << 2));
    driver.ring(slot, IN);
    at
}

/// Waits until the requested transfer at the first port is in progress.
///
/// Port resets and doorbells are taken together, once per round. A doorbell that was rung before
/// the first reset is handled in the same round, which is over when the second reset is complete.
fn wait_until_begun(driver: &Driver<'_>) {
    (0..2).for_each(|_| driver.reset_port(2));
}

fn key(code: u16) -> Key {
    Key::new(code).unwrap()
}

#[test]
fn reports_its_identity() {
    let bench = machine(&["xhci"]);
    let driver = Driver::find(&bench, AT);
    let config = |at| bench.read::<4>(Kind::Config, AT.config() + at);
    assert_eq!(config(0), [0x36, 0x1b, 0x0d, 0x00]);
    assert_eq!(config(8), [1, 0x30, 0x03, 0x0c]);
    assert_eq!(config(0x60)[0], 0x30);
    assert_eq!(bench.read(Kind::Memory, 0xc000_0000), [0x80], "CAPLENGTH");
    assert_eq!(bench.read(Kind::Memory, 0xc000_0002), [0x00, 0x01], "HCIVERSION");
    assert_eq!(driver.get(0x04), 16 << 24 | 16 << 8 | 64);
    assert_eq!(driver.get(0x10) & 0xffff, 1, "AC64 alone");
    // The list of extended capabilities.
    let (mut at, mut found) = (u64::from(driver.get(0x10) >> 16) * 4, Vec::new());
    loop {
        let [id, next, _, major] = driver.get(at).to_le_bytes();
        found.push((id, major, driver.get(at + 8) & 0xffff));
        if next == 0 {
            break;
        }
        at += u64::from(next) * 4;
    }
    assert_eq!(found, [(1, 0, 0), (2, 2, 1 | 8 << 8), (2, 3, 9 | 8 << 8)]);
    assert_eq!(driver.get(USBSTS), 1, "halted");
}

#[test]
fn firmware_hands_over_the_controller() {
    let bench = machine(&["xhci"]);
    let driver = Driver::find(&bench, AT);
    driver.set(0x20, 1 << 16);
    assert_eq!(driver.get(0x20) >> 16, 1, "firmware owns it");
    driver.set(0x20, driver.get(0x20) | 1 << 24);
    assert_eq!(driver.get(0x20) >> 16, 1 << 8);
}

#[test]
fn a_port_reports_its_device_and_a_reset_enables_it() {
    let bench = both();
    let mut driver = Driver::find(&bench, AT);
    let ports: Vec<_> = (1..=16).map(|port| driver.get(Driver::port(port)) & 0x3c01).collect();
    assert_eq!(ports[..3], [0xc01, 0xc01, 0], "two devices of high speed");
    assert!(ports[2..].iter().all(|it| *it == 0));
    driver.start();
    let event = driver.wait_event(34);
    assert_eq!((event[0], event[2]), (1 << 24, 1 << 24));
    driver.reset_port(2);
    let changes = driver.get(Driver::port(2)) >> 17 & 0x7f;
    assert_eq!(changes & 0x10, 0x10, "PRC");
    assert_ne!(driver.get(USBSTS) & 0x10, 0, "PCD");
}

#[test]
fn descriptors_are_read_in_full_and_in_part() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    let mut data = [0; 18];
    assert_eq!(driver.control(slot, [0x80, 6, 0, 1, 0, 0, 18, 0], &mut data), (1, 18));
    assert_eq!(data[8..12], [0x27, 0x06, 0x01, 0x00]);
    let mut data = [0; 255];
    let (code, length) = driver.control(slot, [0x80, 6, 0, 2, 0, 0, 255, 0], &mut data);
    assert_eq!((code, length), (1, usize::from(data[2])), "a short packet");
    assert_eq!(length, 9 + 2 * (9 + 9 + 7), "two interfaces");
    let (code, length) = driver.control(slot, [0x80, 6, 3, 3, 9, 4, 255, 0], &mut data);
    assert_eq!((code, &data[..4]), (1, &[26, 3, b'u', 0][..]), "usb-keyboard, {length}");
    let (code, length) = driver.control(slot, [0x81, 6, 0, 0x22, 0, 0, 255, 0], &mut data);
    assert_eq!((code, length > 60), (1, true), "the report descriptor");
    let mut one = [0; 1];
    assert_eq!(driver.control(slot, [0x80, 8, 0, 0, 0, 0, 1, 0], &mut one), (1, 1));
    assert_eq!(one, [1], "GET_CONFIGURATION");
}

#[test]
fn an_endpoint_works_again_after_a_stall() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    let mut data = [0; 8];
    assert_eq!(driver.control(slot, [0x80, 6, 0, 0x77, 0, 0, 8, 0], &mut data).0, 6);
    assert_eq!(driver.output(slot, 1, 0) & 7, 2, "halted");
    let at = u32::from(slot) << 24 | 1 << 16;
    assert_eq!(driver.command(block(0, 0, 15 << 10 | at)).0, 19, "the endpoint is not running");
    assert_eq!(driver.command(block(0, 0, 14 << 10 | at)).0, 1, "reset endpoint");
    let ring = driver.new_ring(slot, 1);
    assert_eq!(driver.command(block(ring | 1, 0, 16 << 10 | at)).0, 1, "set dequeue pointer");
    assert_eq!(driver.output(slot, 1, 0) & 7, 3, "stopped");
    assert_eq!(driver.control(slot, [0x80, 6, 0, 1, 0, 0, 8, 0], &mut data), (1, 8));
    assert_eq!(driver.output(slot, 1, 0) & 7, 1, "running");
}

#[test]
fn keys_arrive_on_request_and_in_order() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    let at = ask(&mut driver, slot);
    std::thread::sleep(Duration::from_millis(20));
    assert!(driver.event().is_none(), "nothing was pressed");
    assert!(bench.board.shared.input.key(key(0x1e), true));
    let event = driver.wait_event(32);
    assert_eq!(u64::from(event[0]), at);
    assert_eq!(event[2], 1 << 24, "all of eight bytes");
    assert_eq!(driver.read(DATA), [0, 0, 4, 0, 0, 0, 0, 0]);
    // Keys that are pressed meanwhile are queued, and none is lost.
    bench.board.shared.input.key(key(0x2a), true);
    bench.board.shared.input.key(key(0x1e), false);
    ask(&mut driver, slot);
    driver.wait_event(32);
    assert_eq!(driver.read(DATA), [2, 0, 4, 0, 0, 0, 0, 0]);
    ask(&mut driver, slot);
    driver.wait_event(32);
    assert_eq!(driver.read(DATA), [2, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn positions_arrive_exactly_and_are_short_packets() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 2);
    let at = |x, y, buttons| Position { x, y, buttons, wheel: -1, pan: 1 };
    for (x, y, buttons) in [(0, 0, 0), (1, 32767, 1), (12345, 6789, 0x1f)] {
        assert!(bench.board.shared.input.position(at(x, y, buttons)));
        ask(&mut driver, slot);
        assert_eq!(driver.wait_event(32)[2], 13 << 24 | 1, "seven of eight bytes");
        let [x0, x1] = x.to_le_bytes();
        let [y0, y1] = y.to_le_bytes();
        assert_eq!(driver.read(DATA), [buttons, x0, x1, y0, y1, 0xff, 1]);
    }
}

#[test]
fn an_unconfigured_keyboard_passes_keys_to_the_next() {
    let bench = machine(&["i8042", "xhci", "usb-keyboard"]);
    assert!(bench.board.shared.input.key(key(0x1e), true), "the PS/2 keyboard handles it");
    assert!(bench.hypervisor.pins.is_high(1));
    bench.read::<1>(Kind::Port, 0x60);
    assert_eq!(bench.board.shared.input.lights(), Some(Lights::default()), "the PS/2 keyboard's");
    let (mut driver, slot) = configured(&bench, 1);
    let mut lights = [0b010];
    assert_eq!(driver.control(slot, [0x21, 9, 0, 2, 0, 0, 1, 0], &mut lights).0, 1);
    let caps = Lights { caps: true, ..Lights::default() };
    assert_eq!(bench.board.shared.input.lights(), Some(caps));
    assert!(
        bench.board.shared.input.key(key(0x1e), false)
            && bench.board.shared.input.key(key(0x30), true)
    );
    let left = [(); 2].map(|()| bench.read::<1>(Kind::Port, 0x60)[0]);
    assert_eq!(left, [0xf0, 0x1c], "a key is released where it was pressed");
    assert!(!bench.hypervisor.pins.is_high(1), "nothing else for the PS/2 keyboard");
    ask(&mut driver, slot);
    driver.wait_event(32);
    assert_eq!(driver.read::<3>(DATA), [0, 0, 5]);
    driver.start();
    assert_eq!(bench.board.shared.input.lights(), Some(Lights::default()), "reset: PS/2 again");
}

#[test]
fn media_keys_have_their_own_interface() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    // The number of endpoint 0x82.
    let media = IN + 2;
    assert_eq!(driver.configure(slot, media), 1);
    let mut data = [0; 255];
    let (code, _) = driver.control(slot, [0x81, 6, 0, 0x22, 1, 0, 255, 0], &mut data);
    assert_eq!((code, &data[..4]), (1, &[0x05, 0x0c, 0x09, 0x01][..]), "the Consumer page");
    ask(&mut driver, slot);
    driver.push(slot, media, block(DATA + 0x100, 8, NORMAL | COMPLETION | 1 << 2));
    driver.ring(slot, media);
    assert!(bench.board.shared.input.key(key(0xe020), true));
    assert_eq!(driver.wait_event(32)[2], 13 << 24 | 1, "seven of eight bytes");
    assert_eq!(driver.read(DATA + 0x100), [1, 0xe2, 0, 0, 0, 0, 0]);
    assert!(bench.board.shared.input.key(key(0x1e), true));
    assert_eq!(driver.wait_event(32)[2], 1 << 24);
    assert_eq!(driver.read(DATA), [0, 0, 4, 0, 0, 0, 0, 0], "letters are on the first interface");
    let report = driver.control(slot, [0xa1, 1, 1, 1, 1, 0, 7, 0], &mut data);
    assert_eq!((report, &data[..3]), ((1, 7), &[1, 0xe2, 0][..]), "GET_REPORT");
    let idle = driver.control(slot, [0x21, 10, 0, 0, 1, 0, 0, 0], &mut []);
    assert_eq!(idle.0, 6, "SET_IDLE is for the boot interface");
}

#[test]
fn an_idle_rate_repeats_the_last_report() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    // 2 steps of 4 ms.
    assert_eq!(driver.control(slot, [0x21, 10, 0, 2, 0, 0, 0, 0], &mut []).0, 1);
    for _ in 0..3 {
        ask(&mut driver, slot);
        driver.wait_event(32);
    }
    assert_eq!(driver.control(slot, [0x21, 10, 0, 0, 0, 0, 0, 0], &mut []).0, 1);
    ask(&mut driver, slot);
    std::thread::sleep(Duration::from_millis(30));
    let late = std::iter::from_fn(|| driver.event()).count();
    assert!(late <= 1, "at most one that was due when repetition was disabled");
}

#[test]
fn msi_and_the_interrupt_line_signal_events() {
    let bench = both();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    driver.command(block(0, 0, 23 << 10));
    assert!(bench.hypervisor.pins.is_high(GSI));
    driver.set(INTERRUPTER, 3);
    while driver.event().is_some() {}
    driver.set(INTERRUPTER, 3);
    assert!(!bench.hypervisor.pins.is_high(GSI), "all events were handled");
    driver.use_messages();
    bench.hypervisor.sent.lock().unwrap().clear();
    driver.command(block(0, 0, 23 << 10));
    assert_eq!(bench.hypervisor.sent.lock().unwrap().last().unwrap().data, 0x40);
    assert!(!bench.hypervisor.pins.is_high(GSI));
    assert_eq!(driver.get(INTERRUPTER) & 1, 0, "a message clears Interrupt Pending");
}

#[test]
fn commands_in_the_wrong_state_fail() {
    let bench = both();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    let on = |slot: u32, endpoint: u32| slot << 24 | endpoint << 16;
    for (kind, code) in [(10, 11), (11, 11), (12, 11), (13, 11), (14, 11), (15, 11), (17, 11)] {
        assert_eq!(driver.command(block(INPUT, 0, kind << 10 | on(1, 1))).0, code, "{kind}");
    }
    assert_eq!(driver.command(block(0, 0, 21 << 10)).0, 5, "bandwidth commands are not supported");
    let (code, slot) = driver.command(block(0, 0, 9 << 10));
    assert_eq!((code, slot), (1, 1));
    driver.write_input_context(3, [0, 1 << 16], 1, [0, 4 << 3, 0x9001, 0]);
    assert_eq!(driver.command(block(INPUT, 0, 11 << 10 | on(1, 0))).0, 4, "not enabled yet");
    driver.write_input_context(3, [0, 17 << 16], 1, [0, 4 << 3, 0x9001, 0]);
    assert_eq!(driver.command(block(INPUT, 0, 11 << 10 | on(1, 0))).0, 17, "no such port");
    assert_eq!(driver.command(block(u64::MAX, 0, 11 << 10 | on(1, 0))).0, 17, "no memory");
    assert_eq!(driver.command(block(INPUT, 0, 17 << 10 | on(1, 0))).0, 19, "reset before address");
    assert_eq!(driver.command(block(0, 0, 10 << 10 | on(1, 0))).0, 1);
    driver.reset_port(1);
    let slot = driver.address(1);
    let base = on(slot.into(), 0);
    assert_eq!(driver.command(block(INPUT, 0, 11 << 10 | base)).0, 19, "it has an address already");
    assert_eq!(driver.command(block(0, 0, 15 << 10 | base | 3 << 16)).0, 12, "no such endpoint");
    for kind in [1, 2, 4] {
        driver.write_input_context(1 | 1 << IN, [0, 0], IN, [0, kind << 3, 0x9001, 0]);
        assert_eq!(driver.command(block(INPUT, 0, 12 << 10 | base)).0, 17, "type {kind}");
    }
    for _ in 2..=64 {
        assert_eq!(driver.command(block(0, 0, 9 << 10)).0, 1);
    }
    assert_eq!(driver.command(block(0, 0, 9 << 10)).0, 9, "no slot is left");
}

#[test]
fn a_stopped_endpoint_returns_its_transfer_and_resumes_it() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    let at = ask(&mut driver, slot);
    wait_until_begun(&driver);
    let command = block(0, 0, 15 << 10 | u32::from(slot) << 24 | u32::from(IN) << 16);
    driver.begin(command);
    let event = driver.wait_event(32);
    assert_eq!((u64::from(event[0]), event[2]), (at, 26 << 24 | 8), "stopped, with all bytes left");
    assert_eq!(driver.wait_event(33)[2] >> 24, 1);
    assert_eq!(u64::from(driver.output(slot, IN, 2)), at | 1, "the position to continue at");
    bench.board.shared.input.key(key(0x1e), true);
    std::thread::sleep(Duration::from_millis(20));
    assert!(driver.event().is_none(), "it is stopped");
    driver.ring(slot, IN);
    assert_eq!(u64::from(driver.wait_event(32)[0]), at);
}

#[test]
fn chained_event_and_immediate_data_are_processed() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 2);
    bench.board.shared.input.position(Position { x: 0x1234, y: 0x5678, ..Position::default() });
    driver.push(slot, IN, block(DATA, 3, NORMAL | CHAIN));
    driver.push(slot, IN, block(DATA + 0x100, 13, NORMAL | CHAIN));
    driver.push(slot, IN, block(0xabcd_ef01, 0, 7 << 10 | COMPLETION));
    driver.ring(slot, IN);
    let event = driver.wait_event(32);
    assert_eq!(event[0], 0xabcd_ef01);
    assert_eq!(event[2], 13 << 24 | 7, "a short packet, seven bytes in all");
    assert_eq!(event[3] & 4, 4, "event data");
    assert_eq!(driver.read(DATA), [0, 0x34, 0x12]);
    assert_eq!(driver.read(DATA + 0x100), [0x78, 0x56, 0, 0]);
    // SET_REPORT has no effect on a keyboard here. The test checks the data stage.
    driver.push(slot, 1, block(u64::from_le_bytes([0x21, 9, 0, 2, 0, 0, 2, 0]), 8, 2 << 10 | 0x40));
    driver.push(slot, 1, block(0x0201, 2, 3 << 10 | COMPLETION | 0x40));
    driver.push(slot, 1, block(0, 0, 4 << 10 | 1 << 16 | COMPLETION));
    driver.ring(slot, 1);
    assert_eq!(driver.wait_event(32)[2], 1 << 24);
    assert_eq!(driver.wait_event(32)[2], 1 << 24);
}

#[test]
fn a_full_event_ring_loses_no_event() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    // More events than the ring has entries, while the guest handles none.
    let (transfers, commands) = (BLOCKS - 14, 30);
    for _ in 0..transfers {
        driver.push(slot, IN, block(0, 0, 8 << 10 | COMPLETION));
    }
    driver.ring(slot, IN);
    (0..commands).for_each(|_| driver.begin(block(0, 0, 23 << 10)));
    let (mut seen, mut full) = ([0, 0], 0);
    let start = Instant::now();
    while !driver.holds(37) {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "no event reports that the ring is full"
        );
        std::thread::yield_now();
    }
    while seen != [transfers, commands] {
        assert!(start.elapsed() < Duration::from_secs(10), "{seen:?} events");
        match driver.event().map(|event| (event[3] >> 10 & 0x3f, event[2] >> 24)) {
            Some((32, 1)) => seen[0] += 1,
            Some((33, 1)) => seen[1] += 1,
            Some((37, 21)) => full += 1,
            Some(other) => panic!("unexpected event: {other:?}"),
            None => std::thread::yield_now(),
        }
    }
    assert!(full >= 1, "an event reports that the ring is full");
}

#[test]
fn rings_with_loops_or_bad_addresses_do_no_harm() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    let ring = driver.new_ring(slot, IN);
    let at = u32::from(slot) << 24 | u32::from(IN) << 16;
    // A link to itself, a chain that never ends, and a ring outside of memory.
    driver.put(ring, block(ring, 0, 6 << 10 | 1));
    assert_eq!(driver.command(block(0, 0, 15 << 10 | at)).0, 1);
    assert_eq!(driver.command(block(ring | 1, 0, 16 << 10 | at)).0, 1);
    driver.ring(slot, IN);
    assert_eq!(driver.command(block(0, 0, 23 << 10)).0, 1, "it still executes commands");
    driver.put(ring, block(DATA, 1, NORMAL | CHAIN | 1));
    driver.put(ring + 16, block(ring, 0, 6 << 10 | 1));
    driver.ring(slot, IN);
    assert_eq!(driver.wait_event(32)[2] >> 24, 5, "a TRB error");
    assert_eq!(driver.output(slot, IN, 0) & 7, 4, "the error state");
    assert_eq!(driver.command(block(1 << 40 | 1, 0, 16 << 10 | at)).0, 1);
    driver.ring(slot, IN);
    assert_eq!(driver.wait_event(32)[2] >> 24, 5);
    driver.write(TABLE, &u64::MAX.to_le_bytes());
    driver.set_wide(INTERRUPTER + 0x10, TABLE);
    // It sleeps, and is woken only once.
    std::thread::sleep(Duration::from_millis(20));
    driver.begin(block(0, 0, 23 << 10));
    driver.wait(USBSTS, 5, 5);
    driver.start();
    assert_eq!(driver.command(block(0, 0, 23 << 10)).0, 1, "a reset repairs it");
}

#[test]
fn the_controller_halts_on_request_and_continues_when_started() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    ask(&mut driver, slot);
    driver.set(USBCMD, 4);
    driver.wait(USBSTS, 1, 1);
    bench.board.shared.input.key(key(0x1e), true);
    std::thread::sleep(Duration::from_millis(20));
    assert!(driver.event().is_none());
    assert_eq!(driver.read(DATA), [0; 8], "no guest memory changes");
    driver.set(USBCMD, 5);
    driver.wait_event(32);
    assert_eq!(driver.read(DATA), [0, 0, 4, 0, 0, 0, 0, 0]);
}

#[test]
fn a_transfer_continues_after_a_park_and_a_reset_ends_it() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    bench.board.shared.input.key(key(0x2a), true);
    ask(&mut driver, slot);
    driver.wait_event(32);
    ask(&mut driver, slot);
    wait_until_begun(&driver);
    let saved = bench.board.park();
    assert!(!bench.board.shared.input.key(key(0x1e), true), "a parked keyboard takes no input");
    bench.board.run(saved).unwrap();
    assert!(bench.board.shared.input.key(key(0x1e), true));
    driver.wait_event(32);
    assert_eq!(driver.read(DATA), [2, 0, 4, 0, 0, 0, 0, 0], "Shift is still down");
    bench.board.reset().unwrap();
    assert!(!bench.board.shared.input.key(key(0x1e), false), "not configured");
    let (mut driver, slot) = configured(&bench, 1);
    bench.board.shared.input.key(key(0x30), true);
    ask(&mut driver, slot);
    driver.wait_event(32);
    assert_eq!(driver.read(DATA), [0, 0, 5, 0, 0, 0, 0, 0]);
}

#[test]
fn unplugging_fails_the_transfer_and_empties_the_port() {
    let bench = both();
    let (mut driver, slot) = configured(&bench, 1);
    ask(&mut driver, slot);
    wait_until_begun(&driver);
    bench.board.shared.usb.unplug("usb-keyboard").unwrap();
    assert!(
        bench.board.shared.usb.unplug("usb-keyboard").unwrap_err().to_string().contains("tablet")
    );
    assert_eq!(driver.wait_event(32)[2] >> 24, 4, "a transaction error");
    driver.wait(Driver::port(1), 1, 0);
    let mut data = [0; 8];
    assert_eq!(driver.control(slot, [0x80, 6, 0, 1, 0, 0, 8, 0], &mut data).0, 4);
    assert!(!bench.board.shared.input.key(key(0x1e), true));
}

#[test]
fn a_replugged_device_is_addressed_while_the_old_slot_exists() {
    for park in [false, true] {
        let mut bench = both();
        let (driver, old) = configured(&bench, 1);
        bench.board.shared.usb.unplug("usb-keyboard").unwrap();
        driver.wait(Driver::port(1), 1, 0);
        let progress = driver.progress();
        if park {
            let saved = bench.board.park();
            bench.board.run(saved).unwrap();
        }
        add(&mut bench, "usb-keyboard", json!({})).unwrap();
        let mut driver = Driver::find(&bench, AT);
        driver.resume(progress);
        driver.wait(Driver::port(1), 1, 1);
        driver.reset_port(1);
        let slot = driver.address(1);
        assert_ne!(slot, old);
        assert_eq!(driver.configure(slot, IN), 1);
        bench.board.shared.input.key(key(0x1e), true);
        ask(&mut driver, slot);
        driver.wait_event(32);
        assert_eq!(driver.read(DATA), [0, 0, 4, 0, 0, 0, 0, 0]);
        let disable = block(0, 0, 10 << 10 | u32::from(old) << 24);
        assert_eq!(driver.command(disable).0, 1);
        assert_eq!(driver.output(old, 0, 3) >> 27, 0, "the old slot is disabled");
        bench.board.shared.input.key(key(0x1e), false);
        ask(&mut driver, slot);
        driver.wait_event(32);
        assert_eq!(driver.read(DATA), [0; 8], "the new one is not");
    }
}

#[test]
fn the_command_ring_stops_and_can_be_replaced() {
    let bench = both();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    assert_eq!(driver.get(CRCR), 0);
    assert_eq!(driver.command(block(0, 0, 23 << 10)).0, 1);
    assert_eq!(driver.get(CRCR), 8, "CRR");
    driver.set_wide(CRCR, INPUT | 1);
    driver.set(USBCMD, 4);
    driver.wait(USBSTS, 1, 1);
    assert_eq!(driver.get(CRCR), 0);
    driver.set(USBCMD, 5);
    driver.wait(USBSTS, 1, 0);
    assert_eq!(driver.get(CRCR), 0, "stopped until the doorbell is rung");
    assert_eq!(driver.command(block(0, 0, 23 << 10)).0, 1, "it continues at its position");
    driver.set(USBCMD, 4);
    driver.wait(USBSTS, 1, 1);
    driver.new_commands(INPUT);
    driver.set(USBCMD, 5);
    driver.wait(USBSTS, 1, 0);
    driver.begin(block(0, 0, 23 << 10));
    let event = driver.wait_event(33);
    assert_eq!((u64::from(event[0]), event[2] >> 24), (INPUT, 1), "in the new ring");
}

#[test]
fn endless_rings_do_not_block_stops_and_other_endpoints() {
    let mut devices = vec![("xhci", json!({ "slot": "04.0", "ports": 15 }))];
    devices.extend((0..15).map(|_| ("usb-keyboard", json!({}))));
    let bench = machine_of(devices);
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    // A descriptor with the maximum number of TRBs, which do nothing, in an endless ring.
    let ring = DATA + 0x2_0000;
    for at in 0..4096_u64 {
        let words = match at {
            4094 => block(0, 0, 8 << 10 | 1),
            4095 => block(ring, 0, 6 << 10 | 1),
            _ => block(0, 0, 8 << 10 | CHAIN | 1),
        };
        driver.put(ring + 16 * at, words);
    }
    let [low, high, ..] = block(ring | 1, 0, 0);
    let mut slots = Vec::new();
    for port in 1..=15 {
        driver.reset_port(port);
        let slot = driver.address(port);
        assert_eq!(driver.configure(slot, IN), 1);
        slots.push(slot);
        for endpoint in (2..32_u8).filter(|it| *it != IN) {
            let kind = if endpoint % 2 == 1 { 7 } else { 3 };
            let context = [0, kind << 3 | 8 << 16, low, high];
            let device = [u32::from(endpoint) << 27, 0];
            driver.write_input_context(1 | 1 << endpoint, device, endpoint, context);
            assert_eq!(driver.command(block(INPUT, 0, 12 << 10 | u32::from(slot) << 24)).0, 1);
        }
    }
    let busy = |slots: &[u8]| {
        for slot in slots {
            (2..32).filter(|it| *it != IN).for_each(|it| driver.ring(*slot, it));
        }
    };
    busy(&slots);
    // All of them together have work for much more than ten seconds if nothing ends a round.
    let soon = |what: &str, done: &mut dyn FnMut()| {
        std::thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        done();
        assert!(start.elapsed() < Duration::from_secs(10), "{what}: {:?}", start.elapsed());
    };
    let mut saved = Vec::new();
    soon("a pause", &mut || saved = bench.board.park());
    bench.board.run(saved).unwrap();
    let last = slots[14];
    soon("another endpoint", &mut || {
        ask(&mut driver, last);
        bench.board.shared.input.key(key(0x1e), true);
        driver.wait_event(32);
    });
    assert_eq!(driver.read(DATA), [0, 0, 4, 0, 0, 0, 0, 0]);
    soon("a stop", &mut || {
        driver.set(USBCMD, 4);
        driver.wait(USBSTS, 1, 1);
    });
    driver.set(USBCMD, 5);
    soon("a reset", &mut || driver.start());
}

#[test]
fn a_device_without_a_port_is_reported() {
    let mut bench = Bench::new(1 << 20);
    let add = |bench: &mut Bench, kind: &str| add(bench, kind, json!({}));
    add(&mut bench, "usb-tablet").unwrap();
    let error = bench.board.shared.usb.check().unwrap_err().to_string();
    assert_eq!(error, "`usb-tablet` has no USB port: add --device xhci");
    add(&mut bench, "xhci").unwrap();
    bench.board.shared.usb.check().unwrap();
    for _ in 1..8 {
        add(&mut bench, "usb-tablet").unwrap();
    }
    let error = format!("{:#}", add(&mut bench, "usb-keyboard").unwrap_err());
    assert!(error.contains("all USB ports are taken"), "{error}");
}
