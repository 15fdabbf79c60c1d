//! A device of the host as a driver of the guest sees it.

use std::time::{Duration, Instant};

use host::usb::usbfs::{Ended, Kind, Urb};
use rustix::io::Errno;
use serde_json::json;

use super::*;
use crate::pci::Address;
use crate::registry;
use crate::testutil::Bench;
use crate::testutil::usb_host::{Answer, FakeUsb, ended};
use crate::testutil::xhci::{BULK_IN, BULK_OUT, COMPLETION, DATA, Driver, INPUT, NORMAL, block};

const AT: Address = Address::new(3, 0);
/// The endpoints of the driver's bulk pipes.
const IN: u8 = 0x81;
const OUT: u8 = 0x02;
/// Completion codes.
const SUCCESS: u32 = 1;
const TRANSACTION: u32 = 4;
const STALL: u32 = 6;
const SHORT: u32 = 13;

const GET_DEVICE: [u8; 8] = [0x80, 6, 0, 1, 0, 0, 18, 0];

fn machine(device: &Arc<FakeUsb>) -> Bench {
    let mut bench = Bench::new(4 << 20);
    let config = registry::Config::of_kind("xhci", json!({ "slot": "03.0" })).unwrap().unwrap();
    bench.board.add("xhci", |grants| config.build(grants)).unwrap();
    device.plug(&mut bench, usbfs::Speed::High).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

/// A driver that has configured the device, and its slot.
fn configured(bench: &Bench) -> (Driver<'_>, u8) {
    let mut driver = Driver::find(bench, AT);
    driver.start();
    driver.reset_port(1);
    let slot = driver.address(1);
    assert_eq!(driver.configure_bulk(slot, 512), SUCCESS);
    (driver, slot)
}

fn fake(answer: impl FnMut(&Urb) -> Option<Ended> + Send + 'static) -> Arc<FakeUsb> {
    FakeUsb::new(Box::new(answer) as Answer, Box::new(|_| Ok(())))
}

/// A device that leaves transfers in flight, and answers each control request with its length.
fn silent() -> Arc<FakeUsb> {
    fake(|urb| {
        let length = urb.data.len().saturating_sub(8);
        (urb.endpoint == CONTROL).then(|| ended(urb, Ok(()), &vec![7; length]))
    })
}

fn wait(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10), "not within 10 seconds");
        std::thread::yield_now();
    }
}

#[test]
fn requests_reach_the_device_except_those_of_the_host() {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let seen = requests.clone();
    let device = fake(move |urb| {
        if urb.endpoint != CONTROL {
            return None;
        }
        seen.lock().unwrap().push(urb.data.clone());
        Some(match urb.data[1] {
            6 => ended(urb, Ok(()), b"12345"),
            9 => ended(urb, Err(Errno::PIPE), &[]),
            _ => ended(urb, Ok(()), &[]),
        })
    });
    let bench = machine(&device);
    let (mut driver, slot) = configured(&bench);
    assert_eq!(device.orders(), [Order::Configure(1)], "no reset of a device that is fresh");
    let mut data = [0; 18];
    assert_eq!(driver.control(slot, GET_DEVICE, &mut data), (SUCCESS, 5));
    assert_eq!(&data[..6], b"12345\0");
    // A class request with data for the device, and one that it refuses.
    let out = [0x21, 1, 2, 3, 4, 5, 3, 0];
    assert_eq!(driver.control(slot, out, &mut [9, 8, 7]).0, SUCCESS);
    assert_eq!(requests.lock().unwrap().last().unwrap()[..], [0x21, 1, 2, 3, 4, 5, 3, 0, 9, 8, 7]);
    assert_eq!(driver.control(slot, [0x21, 9, 0, 0, 0, 0, 0, 0], &mut []).0, STALL);
    driver.recover(slot, 1);
    let before = requests.lock().unwrap().len();
    // SET_INTERFACE and CLEAR_FEATURE are the kernel's.
    assert_eq!(driver.control(slot, [1, 11, 2, 0, 1, 0, 0, 0], &mut []).0, SUCCESS);
    assert_eq!(driver.control(slot, [2, 1, 0, 0, IN, 0, 0, 0], &mut []).0, SUCCESS);
    assert_eq!(
        device.orders()[1..],
        [Order::Clear(0x80), Order::Alternate(1, 2), Order::Clear(IN)]
    );
    // Those of the bus, of the link and of tests reach nothing.
    for (setup, code) in [([0, 5, 3, 0, 0, 0, 0, 0], STALL), ([0, 3, 2, 0, 0, 1, 0, 0], STALL)] {
        assert_eq!(driver.control(slot, setup, &mut []).0, code);
        driver.recover(slot, 1);
    }
    for setup in [[0, 3, 48, 0, 0, 0, 0, 0], [1, 3, 0, 0, 0, 1, 0, 0], [0, 49, 9, 0, 0, 0, 0, 0]] {
        assert_eq!(driver.control(slot, setup, &mut []).0, SUCCESS);
    }
    assert_eq!(requests.lock().unwrap().len(), before, "{:x?}", requests.lock().unwrap());
}

#[test]
fn long_transfers_are_split_and_short_ones_end() {
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let seen = sizes.clone();
    let device = fake(move |urb| {
        if urb.endpoint == CONTROL {
            return Some(ended(urb, Ok(()), &[]));
        }
        assert_eq!(urb.kind, Kind::Bulk);
        seen.lock().unwrap().push((urb.endpoint, urb.data.len()));
        let whole = if urb.endpoint == IN { vec![3; urb.data.len()] } else { urb.data.clone() };
        // The third part for the device comes back short.
        let short = urb.endpoint == IN && seen.lock().unwrap().len() == 3;
        Some(ended(urb, Ok(()), if short { &whole[..100] } else { &whole }))
    });
    let bench = machine(&device);
    let (mut driver, slot) = configured(&bench);
    let (part, length) = (PART as usize, 3 * PART);
    assert_eq!(driver.transfer(slot, BULK_IN, DATA, length), (SHORT, 2 * PART + 100));
    assert_eq!(*sizes.lock().unwrap(), [(IN, part); 3]);
    assert_eq!(driver.read::<2>(DATA + u64::from(2 * PART) + 99), [3, 0]);
    sizes.lock().unwrap().clear();
    assert_eq!(driver.transfer(slot, BULK_OUT, DATA, PART + 7), (SUCCESS, PART + 7));
    assert_eq!(*sizes.lock().unwrap(), [(OUT, part), (OUT, 7)]);
    assert_eq!(driver.transfer(slot, BULK_OUT, DATA, 0), (SUCCESS, 0));
}

#[test]
fn errors_halt_the_endpoint_until_the_guest_clears_it() {
    let device = silent();
    let bench = machine(&device);
    let (mut driver, slot) = configured(&bench);
    for (error, code) in [
        (Errno::PIPE, STALL),
        (Errno::PROTO, TRANSACTION),
        (Errno::OVERFLOW, TRANSACTION),
        (Errno::from_raw_os_error(4095), TRANSACTION),
    ] {
        driver.push(slot, BULK_IN, block(DATA, 64, NORMAL | COMPLETION));
        driver.ring(slot, BULK_IN);
        wait(|| device.end(IN, Err(error), &[]));
        assert_eq!(driver.wait_event(32)[2] >> 24, code, "{error:?}");
        driver.recover(slot, BULK_IN);
    }
    assert_eq!(device.orders().last(), Some(&Order::Clear(IN)));
}

#[test]
fn a_transfer_that_the_guest_stops_is_discarded_and_data_is_kept() {
    let device = silent();
    let bench = machine(&device);
    let (mut driver, slot) = configured(&bench);
    let stop = block(0, 0, 15 << 10 | u32::from(slot) << 24 | u32::from(BULK_IN) << 16);
    driver.push(slot, BULK_IN, block(DATA, 64, NORMAL | COMPLETION));
    driver.ring(slot, BULK_IN);
    wait(|| !device.flying().is_empty());
    driver.begin(stop);
    assert_eq!(driver.wait_event(32)[2] >> 24, 26, "stopped");
    assert_eq!(driver.wait_event(33)[2] >> 24, SUCCESS);
    assert!(device.flying().is_empty());
    // The transfer is still in the ring, and begins again.
    driver.ring(slot, BULK_IN);
    wait(|| device.end(IN, Ok(()), &[1, 2, 3]));
    assert_eq!(driver.wait_event(32)[2], SHORT << 24 | 61);
}

#[test]
fn transfers_wait_for_orders_and_a_slow_device_blocks_only_itself() {
    let (go, gate) = std::sync::mpsc::channel::<()>();
    let obey = Box::new(move |order| {
        if order == Order::Alternate(0, 1) {
            gate.recv().unwrap();
        }
        Ok(())
    });
    let answer = |urb: &Urb| (urb.endpoint != IN).then(|| ended(urb, Ok(()), &[]));
    let device = FakeUsb::new(Box::new(answer), obey);
    let bench = machine(&device);
    let (mut driver, slot) = configured(&bench);
    driver.push(slot, BULK_IN, block(DATA, 64, NORMAL | COMPLETION));
    driver.ring(slot, BULK_IN);
    wait(|| !device.flying().is_empty());
    driver.push(slot, 1, block(u64::from_le_bytes([1, 11, 1, 0, 0, 0, 0, 0]), 8, 2 << 10 | 1 << 6));
    driver.push(slot, 1, block(0, 0, 4 << 10 | COMPLETION));
    driver.ring(slot, 1);
    wait(|| device.orders().contains(&Order::Alternate(0, 1)));
    // The controller still answers commands, while a transfer ends and another is withdrawn.
    assert_eq!(driver.command(block(0, 0, 23 << 10)).0, SUCCESS);
    assert!(device.end(IN, Ok(()), &[1]));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(driver.command(block(0, 0, 23 << 10)).0, SUCCESS);
    let stop = block(0, 0, 15 << 10 | u32::from(slot) << 24 | u32::from(BULK_IN) << 16);
    driver.begin(stop);
    assert_eq!(driver.wait_event(32)[2] >> 24, 26, "stopped");
    assert_eq!(driver.wait_event(33)[2] >> 24, SUCCESS);
    driver.push(slot, BULK_OUT, block(DATA, 64, NORMAL | COMPLETION));
    driver.ring(slot, BULK_OUT);
    assert_eq!(driver.command(block(0, 0, 23 << 10)).0, SUCCESS);
    assert!(driver.event().is_none(), "nothing has ended");
    go.send(()).unwrap();
    assert_eq!(driver.wait_event(32)[2] >> 24, SUCCESS);
    assert_eq!(driver.wait_event(32)[2] >> 24, SHORT);
}

#[test]
fn a_device_that_is_unplugged_at_the_host_leaves_its_port() {
    let device = silent();
    let mut bench = machine(&device);
    let (mut driver, slot) = configured(&bench);
    driver.push(slot, BULK_IN, block(DATA, 64, NORMAL | COMPLETION));
    driver.ring(slot, BULK_IN);
    wait(|| !device.flying().is_empty());
    device.unplug();
    assert_eq!(driver.wait_event(32)[2] >> 24, TRANSACTION);
    driver.wait(Driver::port(1), 1, 0);
    wait(|| bench.events.lock().unwrap().contains(&Event::UsbGone));
    assert_eq!(bench.board.shared.usb.names(), [""; 0]);
    assert_eq!(bench.board.remove_retired(), ["usb-host"]);
    assert!(!device.orders().contains(&Order::Release), "a device that is gone gets no orders");
    // The name is free again.
    let device = silent();
    device.plug(&mut bench, usbfs::Speed::High).unwrap();
    assert_eq!(bench.board.shared.usb.names(), ["usb-host"]);
    bench.board.unplug("usb-host").unwrap();
    assert_eq!(device.orders(), [Order::Release]);
}

#[test]
fn a_reset_of_the_machine_resets_a_device_that_was_used() {
    let device = silent();
    let bench = machine(&device);
    let (mut driver, slot) = configured(&bench);
    driver.push(slot, BULK_IN, block(DATA, 64, NORMAL | COMPLETION));
    driver.ring(slot, BULK_IN);
    wait(|| !device.flying().is_empty());
    bench.board.reset().unwrap();
    assert!(device.flying().is_empty());
    let (mut driver, slot) = configured(&bench);
    assert_eq!(device.orders(), [Order::Configure(1), Order::Reset, Order::Configure(1)]);
    let mut data = [0; 18];
    assert_eq!(driver.control(slot, GET_DEVICE, &mut data), (SUCCESS, 18));
}

/// The index of an isochronous endpoint of the device, with its type.
fn configure_isochronous(driver: &mut Driver<'_>, slot: u8, endpoint: u8, kind: u32) {
    let [low, high, ..] = block(driver.new_ring(slot, endpoint) | 1, 0, 0);
    let context = [0, kind << 3 | 192 << 16, low, high];
    driver.write_input_context(1 | 1 << endpoint, [0, 0], endpoint, context);
    let configure = block(INPUT, 0, 12 << 10 | u32::from(slot) << 24);
    assert_eq!(driver.command(configure).0, SUCCESS);
}

const ISOCH: u32 = 5 << 10;

#[test]
fn intervals_for_the_device_are_sent_together_and_end_in_order() {
    let device = silent();
    let bench = machine(&device);
    let (mut driver, slot) = configured(&bench);
    configure_isochronous(&mut driver, slot, 8, 1);
    for number in 0..40_u8 {
        let at = DATA + 192 * u64::from(number);
        driver.write(at, &[number; 192]);
        driver.push(slot, 8, block(at, 192, ISOCH | COMPLETION));
    }
    driver.ring(slot, 8);
    wait(|| device.flying().iter().map(|urb| urb.packets.len()).sum::<usize>() == 40);
    let urbs = device.flying();
    assert_eq!(urbs.iter().map(|urb| urb.packets.len()).collect::<Vec<_>>(), [32, 8]);
    assert_eq!((urbs[0].kind, urbs[0].data.len()), (Kind::Isochronous, 32 * 192));
    assert_eq!((urbs[1].data[0], urbs[1].data[7 * 192]), (32, 39));
    // One packet of the first URB fails, which does not stop the others.
    let mut first = ended(&urbs[0], Ok(()), &[]);
    first.packets = vec![Ok(192); 32];
    first.packets[3] = Err(Errno::XDEV);
    device.inject(first);
    for number in 0..32 {
        let code = driver.wait_event(32)[2] >> 24;
        assert_eq!(code, if number == 3 { TRANSACTION } else { SUCCESS }, "{number}");
    }
    // The guest stops the endpoint: the rest is discarded, and begins again.
    let stop = block(0, 0, 15 << 10 | u32::from(slot) << 24 | 8 << 16);
    driver.begin(stop);
    assert_eq!(driver.wait_event(32)[2] >> 24, 26, "stopped");
    assert_eq!(driver.wait_event(33)[2] >> 24, SUCCESS);
    wait(|| device.flying().iter().all(|urb| urb.tag == urbs[0].tag));
    driver.ring(slot, 8);
    wait(|| device.flying().iter().any(|urb| urb.packets.len() == 8));
}

#[test]
fn intervals_from_the_device_are_cut_to_their_room() {
    let device = silent();
    let bench = machine(&device);
    let (mut driver, slot) = configured(&bench);
    configure_isochronous(&mut driver, slot, 7, 5);
    driver.write(DATA, &[0xee; 600]);
    for number in 0..3 {
        driver.push(slot, 7, block(DATA + 192 * number, 192, ISOCH | COMPLETION | 1 << 2));
    }
    driver.ring(slot, 7);
    wait(|| device.flying().iter().any(|urb| urb.packets == [192; 3]));
    let urb = device.flying().remove(0);
    let mut all = ended(&urb, Ok(()), &vec![0x11; 3 * 192]);
    all.packets = vec![Ok(100), Ok(0), Ok(4000)];
    device.inject(all);
    let events = [(); 3].map(|()| driver.wait_event(32)[2]);
    assert_eq!(events, [SHORT << 24 | 92, SHORT << 24 | 192, SUCCESS << 24]);
    let byte = |at| driver.read::<1>(DATA + at)[0];
    assert_eq!([0, 99, 100, 192, 383].map(byte), [0x11, 0x11, 0xee, 0xee, 0xee]);
    assert_eq!([384, 575, 576].map(byte), [0x11, 0x11, 0xee]);
    // More than the hardware has in an interval.
    driver.push(slot, 7, block(DATA, 0x1_ffff, ISOCH | COMPLETION));
    driver.ring(slot, 7);
    assert_eq!(driver.wait_event(32)[2] >> 24, 5, "TRB error");
}

/// How a request without data begins.
fn begins(kind: u8, request: u8, value: u16) -> Result<Start, Stall> {
    request::start(Setup { kind, request, value, index: 0, length: 0 }, &[], 1)
}

#[test]
fn address_link_and_test_modes_are_out_of_reach() {
    // Without data, a device takes each direction, and it may ignore the recipient.
    for direction in [0, 0x80] {
        for target in 0..=0x1f {
            let kind = direction | target;
            assert!(begins(kind, 5, 3).is_err(), "SET_ADDRESS {kind:#x}");
            assert!(begins(kind, 3, 2).is_err(), "TEST_MODE {kind:#x}");
            let configure = begins(kind, 9, 1);
            match target {
                0 => assert!(matches!(configure, Ok(Start::Order(_))), "{kind:#x}"),
                _ => assert!(configure.is_err(), "SET_CONFIGURATION {kind:#x}"),
            }
        }
        for feature in 48..=50 {
            let link = begins(direction, 3, feature);
            assert!(matches!(link, Ok(Start::Nothing)), "feature {feature}");
        }
        // Requests of a class or a vendor mean something else.
        for kind in [0x20, 0x40, 0x41] {
            let own = begins(direction | kind, 5, 3);
            assert!(matches!(own, Ok(Start::Urb(_))), "{kind:#x}");
        }
    }
}
