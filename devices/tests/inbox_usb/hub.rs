//! Tests with the model of usbhub3: enumeration, resets, link power, plugs.

use host::input::{Key, Position};
use serde_json::json;

use super::transfers::Ended;
use super::usbhub3::{
    CONFIGURED, CONNECT_CHANGE, CONNECTED, DISABLED, ENABLED, RESET, RX_DETECT, WARM_RESET,
    configure, enumerate, remove, reset_device, resume, set_link, started, suspend, wait_change,
};
use super::usbxhci::{CONTEXT_STATE, STOP_ENDPOINT, SUCCESS, TRANSACTION, Xhci};
use super::{machine, plug};

/// The first ports of USB 2 and of USB 3.
const USB2: u8 = 1;
const USB3: u8 = 9;
/// The first interrupt endpoint.
const IN: u8 = 3;

fn disk(folder: &tempfile::TempDir) -> serde_json::Value {
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![0x5a; 1 << 20]).unwrap();
    json!({ "path": path })
}

fn press(xhci: &Xhci, down: bool) {
    assert!(xhci.shared.input.key(Key::new(0x1e).unwrap(), down));
}

#[test]
fn a_high_speed_device_is_enumerated() {
    let bench = machine(vec![("usb-keyboard", json!({}))]);
    let mut xhci = Xhci::find(&bench);
    xhci.start();
    let device = enumerate(&mut xhci, USB2);
    assert_eq!(device.speed, 3);
    assert_eq!(device.bos, None, "USB 2.00 has none");
    assert_eq!(device.product, "USB keyboard");
    // The class is that of the interfaces, of which there are several: usbccgp's compatible ID.
    assert_eq!((device.device[4], device.configuration[4]), (0, 2));
    assert_eq!(device.classes(), [[3, 1, 1], [3, 0, 0]]);
    configure(&mut xhci, &device);
    xhci.expect_quiet();
    // The device is self-powered, and does not claim to wake the machine.
    assert_eq!(device.configuration[7], 0xc0);
}

#[test]
fn a_super_speed_device_is_enumerated_and_may_save_power() {
    let folder = tempfile::tempdir().unwrap();
    let bench = machine(vec![("usb-storage", disk(&folder))]);
    let mut xhci = Xhci::find(&bench);
    xhci.start();
    let device = enumerate(&mut xhci, USB3);
    assert_eq!(device.speed, 4);
    let bos = device.bos.as_ref().unwrap();
    // USB 2.0 extension with LPM, and SuperSpeed (USB 3.2, 9.6.2).
    assert_eq!((bos[4], bos[7], bos[8] & 2, bos[14]), (2, 2, 2, 3));
    assert!(device.serial.len() >= 12, "{}", device.serial);
    let status = |xhci: &mut Xhci| {
        let mut status = [0; 2];
        assert_eq!(xhci.control(device.slot, [0x80, 0, 0, 0, 0, 0, 2, 0], &mut status), Ok(2));
        status
    };
    configure(&mut xhci, &device);
    // Self-powered, U1 enabled, U2 enabled (USB 3.2, 9.4.5).
    assert_eq!(status(&mut xhci), [0b1101, 0]);
    assert_eq!(xhci.control(device.slot, [0, 1, 48, 0, 0, 0, 0, 0], &mut []), Ok(0));
    assert_eq!(status(&mut xhci), [0b1001, 0]);
    reset_device(&mut xhci, &device, RESET);
    assert_eq!(status(&mut xhci), [0b1101, 0], "configured again");
    xhci.expect_quiet();
}

#[test]
fn a_configured_device_is_reset_and_works_again() {
    let bench = machine(vec![("usb-keyboard", json!({}))]);
    let (mut xhci, device) = started(&bench, USB2);
    let slot = device.slot;
    let buffer = xhci.allocate(8);
    for _ in 0..3 {
        xhci.issue((slot, IN), buffer, 8);
        reset_device(&mut xhci, &device, RESET);
        let transfer = xhci.issue((slot, IN), buffer, 8);
        press(&xhci, true);
        assert_eq!(xhci.finish(&transfer), Ended { code: SUCCESS, length: 8 });
        assert_eq!(xhci.read(buffer, 3), [0, 0, 4]);
    }
    xhci.expect_quiet();
}

#[test]
fn a_warm_reset_keeps_a_super_speed_device() {
    let folder = tempfile::tempdir().unwrap();
    let bench = machine(vec![("usb-storage", disk(&folder))]);
    let (mut xhci, device) = started(&bench, USB3);
    reset_device(&mut xhci, &device, WARM_RESET);
    assert_eq!(xhci.state(device.slot, 0), CONFIGURED);
    xhci.expect_quiet();
}

#[test]
fn a_suspended_device_keeps_its_input_until_it_resumes() {
    let bench = machine(vec![("usb-keyboard", json!({}))]);
    let (mut xhci, device) = started(&bench, USB2);
    let slot = device.slot;
    let buffer = xhci.allocate(8);
    let mut transfer = xhci.issue((slot, IN), buffer, 8);
    for down in [true, false, true] {
        suspend(&mut xhci, &device);
        press(&xhci, down);
        xhci.expect_quiet();
        resume(&mut xhci, &device);
        xhci.expect_quiet();
        // The doorbell starts the endpoint again, at the same transfer (4.6.9).
        xhci.ring_doorbell(slot, IN);
        assert_eq!(xhci.finish(&transfer), Ended { code: SUCCESS, length: 8 });
        assert_eq!(xhci.read(buffer, 3), [0, 0, if down { 4 } else { 0 }]);
        transfer = xhci.issue((slot, IN), buffer, 8);
    }
}

#[test]
fn a_super_speed_link_suspends_and_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let bench = machine(vec![("usb-storage", disk(&folder))]);
    let (mut xhci, device) = started(&bench, USB3);
    // Function suspend goes before the link (USB 3.2, 9.4.9): to the first interface.
    assert_eq!(xhci.control(device.slot, [1, 3, 0, 0, 0, 1, 0, 0], &mut []), Ok(0));
    suspend(&mut xhci, &device);
    resume(&mut xhci, &device);
    assert_eq!(xhci.control(device.slot, [1, 3, 0, 0, 0, 0, 0, 0], &mut []), Ok(0));
    xhci.expect_quiet();
}

/// A port that the driver disabled does not detect its device. RxDetect lets it: the link trains
/// again, and the connection is new (Linux, commit "usb: hub: Fix auto-remount of safely removed or
/// ejected USB-3 devices").
#[test]
fn a_disabled_super_speed_port_detects_its_device_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let mut bench = machine(vec![("usb-storage", disk(&folder))]);
    let (mut xhci, device) = started(&bench, USB3);
    remove(&mut xhci, device.slot);
    set_link(&xhci, USB3, DISABLED);
    let status = wait_change(&mut xhci, USB3, CONNECT_CHANGE);
    assert_eq!(status & (CONNECTED | ENABLED), 0, "{status:#x}");
    assert_eq!(xhci.port(USB3) >> 5 & 0xf, DISABLED);
    assert!(xhci.port_events().is_empty());
    set_link(&xhci, USB3, RX_DETECT);
    let device = enumerate(&mut xhci, USB3);
    configure(&mut xhci, &device);
    // A disabled port does not notice that its device is pulled.
    remove(&mut xhci, device.slot);
    set_link(&xhci, USB3, DISABLED);
    wait_change(&mut xhci, USB3, CONNECT_CHANGE);
    bench.board.unplug("usb-storage").unwrap();
    assert!(xhci.port_events().is_empty());
    set_link(&xhci, USB3, RX_DETECT);
    assert!(xhci.port_events().is_empty());
    assert_eq!(xhci.port(USB3) & (CONNECTED | 0xf << 5), RX_DETECT << 5);
}

#[test]
fn an_unplugged_device_ends_its_transfers() {
    let mut bench = machine(vec![("usb-keyboard", json!({}))]);
    let (mut xhci, device) = started(&bench, USB2);
    let slot = device.slot;
    let buffer = xhci.allocate(8);
    let first = xhci.issue((slot, IN), buffer, 8);
    xhci.issue((slot, IN), buffer, 8);
    // Both are in the ring, and the first one is at the device.
    xhci.expect_quiet();
    bench.board.unplug("usb-keyboard").unwrap();
    // The transfer fails, the endpoint halts, and the port reports the change. The driver then
    // clears the endpoint, and gives up the slot.
    assert_eq!(xhci.finish(&first), Ended { code: TRANSACTION, length: 0 });
    let status = wait_change(&mut xhci, USB2, CONNECT_CHANGE);
    assert_eq!(status & (CONNECTED | ENABLED), 0);
    assert_eq!(xhci.endpoint_command(STOP_ENDPOINT, slot, IN), CONTEXT_STATE, "halted");
    xhci.recover(slot, IN, TRANSACTION);
    assert_eq!(xhci.control(slot, [0x80, 6, 0, 1, 0, 0, 18, 0], &mut [0; 18]), Err(TRANSACTION));
    remove(&mut xhci, slot);
    xhci.expect_quiet();
}

#[test]
fn a_port_is_used_again_before_the_old_slot_is_given_up() {
    let mut bench = machine(vec![("usb-keyboard", json!({}))]);
    let mut xhci = Xhci::find(&bench);
    xhci.start();
    let old = enumerate(&mut xhci, USB2);
    configure(&mut xhci, &old);
    bench.board.unplug("usb-keyboard").unwrap();
    wait_change(&mut xhci, USB2, CONNECT_CHANGE);
    plug(&mut bench, "usb-tablet", json!({}));
    let new = enumerate(&mut xhci, USB2);
    assert_ne!(new.slot, old.slot);
    assert_eq!(new.product, "USB tablet");
    configure(&mut xhci, &new);
    remove(&mut xhci, old.slot);
    let buffer = xhci.allocate(8);
    let transfer = xhci.issue((new.slot, IN), buffer, 7);
    xhci.shared.input.position(Position { x: 0x1234, ..Position::default() });
    assert_eq!(xhci.finish(&transfer), Ended { code: SUCCESS, length: 7 });
    xhci.expect_quiet();
}
