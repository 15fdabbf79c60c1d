//! Tests with the model of usbxhci: start, rings, transfers, stops, resets.

use devices::testutil::xhci::block;
use host::input::{Key, Position};
use serde_json::json;

use super::machine;
use super::transfers::{COMPLETION, EVENT_DATA, Ended};
use super::usbhub3::{configure, enumerate, stop};
use super::usbxhci::{
    CRCR, HALTED, NO_OP, RUN, SEGMENT, SHORT, STALL, SUCCESS, TRANSFER, USBCMD, USBSTS, Xhci,
};

/// The first interrupt endpoint.
const IN: u8 = 3;
/// The length of a keyboard's configuration descriptor in bytes.
const WHOLE: u32 = 59;
/// CRCR: abort, and running.
const ABORT: u32 = 1 << 2;
const RUNNING: u32 = 1 << 3;

fn both() -> devices::testutil::Bench {
    machine(vec![("usb-keyboard", json!({})), ("usb-tablet", json!({}))])
}

fn press(xhci: &Xhci, down: bool) {
    assert!(xhci.shared.input.key(Key::new(0x1e).unwrap(), down));
}

/// A running controller with a configured keyboard. Returns the slot too.
fn keyboard(xhci: &mut Xhci) -> u8 {
    xhci.start();
    let device = enumerate(xhci, 1);
    configure(xhci, &device);
    device.slot
}

#[test]
fn the_controller_starts() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    // Legacy support comes first, and the protocols cover each port once (7.1, 7.2).
    let extended = xhci.extended();
    assert_eq!(extended[0].1, 1);
    let mut ports = Vec::new();
    for (at, _) in extended.into_iter().filter(|it| it.1 == 2) {
        assert_eq!(xhci.capability(at + 4), u32::from_le_bytes(*b"USB "));
        let [first, count, properties, _] = xhci.capability(at + 8).to_le_bytes();
        // HLC above all: without it, the driver does not enable L1 of USB 2 (PORTPMSC.HLE).
        assert_eq!(properties & 0xf, 0, "no properties of the protocol");
        ports.extend(first..first + count);
        assert_eq!(xhci.capability(at + 12), 0, "the slot type of Enable Slot");
    }
    let [slots, interrupters, _, count] = xhci.capability(4).to_le_bytes();
    assert_eq!(ports, (1..=count).collect::<Vec<_>>());
    assert!(slots >= 16 && interrupters >= 4);
    xhci.start();
    assert_eq!(xhci.get(CRCR), 0, "the command ring runs after the first doorbell");
    assert_eq!(xhci.command(block(0, 0, NO_OP)).0, SUCCESS);
    assert_eq!(xhci.get(CRCR), RUNNING);
    assert_eq!(xhci.get(USBSTS) & !(1 << 3 | 1 << 4), 0, "neither halted nor in error");
}

#[test]
fn ports_with_devices_are_reported_when_the_controller_starts() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    for _ in 0..2 {
        xhci.start();
        assert_eq!(xhci.port_events(), [1, 2]);
    }
}

#[test]
fn rings_and_event_segments_wrap_around() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    let slot = keyboard(&mut xhci);
    // More than both segments of the event ring, twice.
    for _ in 0..1200 {
        assert_eq!(xhci.command(block(0, 0, NO_OP)), (SUCCESS, 0));
    }
    let buffer = xhci.allocate(8);
    xhci.part = 3;
    for round in 0..6 * SEGMENT {
        let transfer = xhci.issue((slot, IN), buffer, 8);
        press(&xhci, round % 2 == 0);
        assert_eq!(xhci.finish(&transfer), Ended { code: SUCCESS, length: 8 });
        assert_eq!(xhci.read(buffer, 3)[2], if round % 2 == 0 { 4 } else { 0 });
    }
    xhci.expect_quiet();
}

#[test]
fn many_commands_are_sent_at_once() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    xhci.start();
    for _ in 0..40 {
        let sent: Vec<u64> = (0..20).map(|_| xhci.begin(block(0, 0, NO_OP))).collect();
        for at in sent {
            let event = xhci.wait_event("a command", |it| it.kind() == 33);
            assert_eq!((event.pointer(), event.code()), (at, SUCCESS));
        }
    }
}

#[test]
fn a_short_packet_ends_a_chain_at_any_of_its_trbs() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    let slot = keyboard(&mut xhci);
    for part in [9, 20, 58, 59, 60, 255] {
        xhci.part = part;
        let stages = xhci.issue_control(slot, [0x80, 6, 0, 2, 0, 0, 255, 0], &[0xee; 255]);
        let [data, status] = &stages[..] else { panic!("two stages") };
        assert_eq!(xhci.finish(&data.0), Ended { code: SHORT, length: WHOLE }, "{part}");
        assert_eq!(xhci.finish(&status.0), Ended { code: SUCCESS, length: 0 });
        let read = xhci.read(data.1, 255);
        let (whole, rest) = read.split_at(59);
        assert_eq!((&whole[..3], whole[58]), (&[9, 2, 59][..], 4));
        assert!(rest.iter().all(|it| *it == 0xee), "nothing behind the packet");
        // The same length in full is no short packet.
        let stages = xhci.issue_control(slot, [0x80, 6, 0, 2, 0, 0, 59, 0], &[0; 59]);
        assert_eq!(xhci.finish(&stages[0].0), Ended { code: SUCCESS, length: WHOLE });
        assert_eq!(xhci.finish(&stages[1].0), Ended { code: SUCCESS, length: 0 });
    }
    xhci.expect_quiet();
}

#[test]
fn a_stall_halts_the_control_endpoint_until_the_driver_resets_it() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    let slot = keyboard(&mut xhci);
    for _ in 0..20 {
        let unknown = [0x80, 6, 0, 0x77, 0, 0, 30, 0];
        let stages = xhci.issue_control(slot, unknown, &[0; 30]);
        assert_eq!(xhci.finish(&stages[0].0), Ended { code: STALL, length: 0 });
        // The status stage is not executed, and a doorbell changes nothing (4.8.3).
        xhci.ring_doorbell(slot, 1);
        xhci.expect_quiet();
        xhci.recover(slot, 1, STALL);
        assert_eq!(xhci.control(slot, [0, 9, 77, 0, 0, 0, 0, 0], &mut []), Err(STALL));
        assert_eq!(xhci.control(slot, [0x80, 8, 0, 0, 0, 0, 1, 0], &mut [0]), Ok(1));
    }
}

/// usbxhci ends a transfer of no length so (conjecture; a descriptor of the specification).
#[test]
fn an_event_data_trb_alone_is_a_transfer() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    let slot = keyboard(&mut xhci);
    for endpoint in [IN, 1, IN] {
        let transfer = xhci.issue((slot, endpoint), 0, 0);
        assert_eq!(xhci.finish(&transfer), Ended { code: SUCCESS, length: 0 });
    }
    xhci.expect_quiet();
}

/// The EDTLA counts the bytes since the Event Data TRB before it, or since the descriptor's start.
#[test]
fn each_event_data_trb_counts_its_own_bytes() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    let slot = keyboard(&mut xhci);
    let (buffer, target) = (xhci.allocate(8), Xhci::target(slot));
    let cookies = [xhci.new_cookie(), xhci.new_cookie()];
    let chain = 1 << 4;
    let trbs = [
        block(buffer, 3 | target, 1 << 10 | chain),
        block(cookies[0], target, EVENT_DATA | chain | COMPLETION),
        block(buffer + 3, 5 | target, 1 << 10 | chain),
        block(cookies[1], target, EVENT_DATA | COMPLETION),
    ];
    xhci.push(slot, IN, &trbs);
    xhci.ring_doorbell(slot, IN);
    press(&xhci, true);
    for (cookie, length) in cookies.into_iter().zip([3, 5]) {
        let event = xhci.wait_event("event data", |it| it.kind() == TRANSFER);
        assert!(event.has_cookie());
        assert_eq!((event.pointer(), event.code(), event.length()), (cookie, SUCCESS, length));
    }
}

#[test]
fn cancelled_transfers_are_stopped_and_skipped() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    let slot = keyboard(&mut xhci);
    let buffer = xhci.allocate(8);
    for down in [true, false, true] {
        // usb3kd (findowner): two reads are pending at an interrupt endpoint.
        let first = xhci.issue((slot, IN), buffer, 8);
        xhci.issue((slot, IN), buffer, 8);
        xhci.expect_quiet();
        assert!(stop(&mut xhci, slot, IN), "the first transfer was at the device");
        assert_eq!(xhci.dequeue(slot, IN) & !0xf, first.trbs[0].0, "and would continue");
        assert_eq!(xhci.set_dequeue(slot, IN), SUCCESS);
        press(&xhci, down);
        xhci.expect_quiet();
        let transfer = xhci.issue((slot, IN), buffer, 8);
        assert_eq!(xhci.finish(&transfer), Ended { code: SUCCESS, length: 8 });
        assert_eq!(xhci.read(buffer, 3)[2], if down { 4 } else { 0 });
    }
}

/// A doorbell comes before the command that is sent after it: an endpoint that was started is not
/// in the wrong state for a stop.
#[test]
fn a_doorbell_takes_effect_before_a_later_stop() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    let slot = keyboard(&mut xhci);
    let buffer = xhci.allocate(8);
    for _ in 0..1000 {
        xhci.issue((slot, IN), buffer, 8);
        stop(&mut xhci, slot, IN);
        assert_eq!(xhci.set_dequeue(slot, IN), SUCCESS);
    }
    xhci.expect_quiet();
}

/// UCX (EVT_UCX_CONTROLLER_RESET): if the controller does not answer, the driver aborts the command
/// ring, resets the controller, and enumerates all devices again.
#[test]
fn the_controller_is_reset_with_transfers_under_way() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    for _ in 0..3 {
        let slot = keyboard(&mut xhci);
        let tablet = enumerate(&mut xhci, 2);
        configure(&mut xhci, &tablet);
        let buffer = xhci.allocate(8);
        let transfer = xhci.issue((slot, IN), buffer, 8);
        press(&xhci, true);
        assert_eq!(xhci.finish(&transfer), Ended { code: SUCCESS, length: 8 });
        xhci.issue((slot, IN), buffer, 8);
        let movement = xhci.issue((tablet.slot, IN), buffer, 7);
        xhci.shared.input.position(Position { x: 1, ..Position::default() });
        assert_eq!(xhci.finish(&movement), Ended { code: SUCCESS, length: 7 });
        xhci.set_wide(CRCR, ABORT.into());
        xhci.wait_until("the command ring stops", |it| it.get(CRCR) & RUNNING == 0);
        let stopped = xhci.wait_event("command ring stopped", |it| it.kind() == 33);
        assert_eq!(stopped.code(), 24);
    }
}

#[test]
fn a_halted_controller_continues_where_it_was() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    let slot = keyboard(&mut xhci);
    let buffer = xhci.allocate(8);
    let transfer = xhci.issue((slot, IN), buffer, 8);
    for _ in 0..3 {
        xhci.set(USBCMD, xhci.get(USBCMD) & !RUN);
        xhci.wait_until("halted", |it| it.get(USBSTS) & HALTED != 0);
        assert_eq!(xhci.get(CRCR) & RUNNING, 0, "5.4.5");
        xhci.set(USBCMD, xhci.get(USBCMD) | RUN);
        xhci.wait_until("running", |it| it.get(USBSTS) & HALTED == 0);
        assert_eq!(xhci.command(block(0, 0, NO_OP)).0, SUCCESS);
    }
    press(&xhci, true);
    assert_eq!(xhci.finish(&transfer), Ended { code: SUCCESS, length: 8 });
}

/// Before the machine sleeps, the driver saves the controller's state (spec, 4.23.2). Afterwards,
/// the power was off: restoring fails, and the driver starts anew.
#[test]
fn a_failed_restore_makes_the_driver_start_anew() {
    let bench = both();
    let mut xhci = Xhci::find(&bench);
    keyboard(&mut xhci);
    xhci.set(USBCMD, xhci.get(USBCMD) & !RUN);
    xhci.wait_until("halted", |it| it.get(USBSTS) & HALTED != 0);
    xhci.set(USBCMD, xhci.get(USBCMD) | 1 << 8);
    xhci.wait_until("saved", |it| it.get(USBSTS) & 1 << 8 == 0);
    assert_eq!(xhci.get(USBSTS) & 1 << 10, 0, "no error");
    bench.board.park();
    bench.board.run(Vec::new()).unwrap();
    let mut xhci = Xhci::find(&bench);
    xhci.set(USBCMD, 1 << 9);
    xhci.wait_until("restored", |it| it.get(USBSTS) & 1 << 9 == 0);
    assert_ne!(xhci.get(USBSTS) & 1 << 10, 0, "Save/Restore Error");
    let slot = keyboard(&mut xhci);
    let buffer = xhci.allocate(8);
    let transfer = xhci.issue((slot, IN), buffer, 8);
    press(&xhci, true);
    assert_eq!(xhci.finish(&transfer), Ended { code: SUCCESS, length: 8 });
}
