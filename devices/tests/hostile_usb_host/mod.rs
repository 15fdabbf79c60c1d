//! A USB device of the host that lies, between a kernel that passes its lies on and a guest that
//! makes every mistake.

use std::sync::{Arc, Mutex};

use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::usb_host::FakeUsb;
use devices::testutil::xhci::{BULK_IN, BULK_OUT, Block, DATA, Driver, block};
use host::usb::usbfs::{Descriptors, Ended, Speed, Urb};
use rustix::io::Errno;
use serde_json::json;

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
/// The indexes of isochronous endpoints 0x83 and 0x04.
const ISOCH_IN: u8 = 7;
const ISOCH_OUT: u8 = 8;

/// The source of lies and actions: a stream of bytes, which both sides take from.
#[derive(Clone)]
struct Bytes(Arc<Mutex<std::vec::IntoIter<u8>>>);

impl Bytes {
    fn next(&self) -> Option<u8> {
        self.0.lock().expect("nothing panicked").next()
    }

    fn word(&self) -> Option<u32> {
        Some(u32::from_le_bytes([self.next()?, self.next()?, self.next()?, self.next()?]))
    }

    fn error(&self) -> Option<Result<(), Errno>> {
        let error = i32::from(self.next()?);
        Some(if error < 100 { Ok(()) } else { Err(Errno::from_raw_os_error(error - 99)) })
    }

    /// A completion, perhaps of a transfer that does not exist, with more or less data than there
    /// is room for.
    fn lie(&self, tag: u64, room: usize) -> Option<Ended> {
        let (kind, result) = (self.next()?, self.error()?);
        let tag = if kind & 1 == 0 { tag } else { u64::from(self.next()?) };
        let data = if kind & 2 == 0 { room } else { usize::from(self.next()?) };
        let moved = if kind & 4 == 0 { data } else { self.word()? as usize };
        let packets = (0..kind >> 5).map(|it| Ok(u32::from(it) << (kind & 31))).collect();
        Some(Ended { tag, result, data: vec![kind; data], moved, packets })
    }
}

/// Runs the actions that the bytes describe, then checks that a device still works.
pub(crate) fn run(bytes: impl Iterator<Item = u8>) {
    let all: Vec<u8> = bytes.collect();
    // The descriptors that usbfs reads are the device's.
    Descriptors::read(&all);
    let bytes = Bytes(Arc::new(Mutex::new(all.into_iter())));
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    let config = Config::of_kind("xhci", json!({ "slot": "03.0" })).expect("a kind");
    let config = config.expect("its fields");
    bench.board.add("xhci", |grants| config.build(grants)).expect("there is room");
    let (lies, obeys) = (bytes.clone(), bytes.clone());
    let answer = move |urb: &Urb| match lies.next()? {
        0..100 => None,
        _ => lies.lie(urb.tag, urb.data.len()),
    };
    let device = FakeUsb::new(Box::new(answer), Box::new(move |_| obeys.error().unwrap_or(Ok(()))));
    device.plug(&mut bench, Speed::High).expect("a free port");
    bench.board.run(Vec::new()).expect("power-on");
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    driver.reset_port(1);
    let slot = driver.address(1);
    for (endpoint, kind) in [(BULK_IN, 6), (BULK_OUT, 2), (ISOCH_IN, 5), (ISOCH_OUT, 1)] {
        let ring = driver.new_ring(slot, endpoint);
        let [low, high, ..] = block(ring | 1, 0, 0);
        let context = [0, kind << 3 | 512 << 16, low, high];
        driver.write_input_context(1 | 1 << endpoint, [0, 0], endpoint, context);
        let configure = block(devices::testutil::xhci::INPUT, 0, 12 << 10 | u32::from(slot) << 24);
        driver.command(configure);
    }
    while step(&bytes, &mut driver, slot, &device).is_some() {}
    bench.board.reset().expect("power-on again");
    // Whatever happened, the machine takes another device.
    bench.board.remove_retired();
    bench.board.unplug("usb-host").ok();
    let good = FakeUsb::new(
        Box::new(|urb| Some(devices::testutil::usb_host::ended(urb, Ok(()), &[1]))),
        Box::new(|_| Ok(())),
    );
    good.plug(&mut bench, Speed::High).expect("a free port");
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    driver.wait(Driver::port(1), 1, 1);
    driver.reset_port(1);
    let slot = driver.address(1);
    assert_eq!(driver.control(slot, [0xc0, 1, 0, 0, 0, 0, 1, 0], &mut [0]), (1, 1));
}

/// Runs one action. Returns None at the end of the bytes.
fn step(bytes: &Bytes, driver: &mut Driver<'_>, slot: u8, device: &FakeUsb) -> Option<()> {
    let endpoints = [1, BULK_IN, BULK_OUT, ISOCH_IN, ISOCH_OUT];
    let endpoint = endpoints[usize::from(bytes.next()?) % endpoints.len()];
    let place = u32::from(slot) << 24 | u32::from(endpoint) << 16;
    match bytes.next()? {
        0..60 => {
            let kind = if endpoint < ISOCH_IN || bytes.next()? < 20 { 1 } else { 5 };
            let words = transfer(bytes, kind)?;
            driver.push(slot, endpoint, words);
            driver.ring(slot, endpoint);
        }
        60..130 => {
            let mut setup = [0; 8];
            for byte in &mut setup {
                *byte = bytes.next()?;
            }
            setup[0] &= 0xe3;
            setup[7] &= 1;
            let is_in = u32::from(setup[0] >> 7);
            driver.push(slot, 1, block(u64::from_le_bytes(setup), 8, 2 << 10 | 1 << 6));
            driver.push(slot, 1, block(DATA, u32::from(setup[6]), 3 << 10 | is_in << 16 | 0x20));
            driver.push(slot, 1, block(0, 0, 4 << 10 | 0x20));
            driver.ring(slot, 1);
        }
        // Stop and reset an endpoint.
        130..150 => drop(driver.command(block(0, 0, 15 << 10 | place))),
        150..165 => drop(driver.command(block(0, 0, 14 << 10 | place))),
        165..180 => {
            let ring = driver.new_ring(slot, endpoint);
            driver.command(block(ring | 1, 0, 16 << 10 | place));
        }
        180..190 => driver.set(Driver::port(1), 1 << 4),
        190..225 => {
            let endpoint = [0x80, 0x81, 0x02, 0x83, 0x04][usize::from(bytes.next()? % 5)];
            let (result, moved) = (bytes.error()?, usize::from(bytes.next()?));
            device.end(endpoint, result, &vec![5; moved]);
        }
        225..253 => device.inject(bytes.lie(u64::from(bytes.next()?), 64)?),
        253 => driver.set(devices::testutil::xhci::USBCMD, 5),
        254.. => device.unplug(),
    }
    while driver.event().is_some() {}
    Some(())
}

fn transfer(bytes: &Bytes, kind: u32) -> Option<Block> {
    let (at, length, flags) = (u64::from(bytes.word()?), bytes.word()?, u32::from(bytes.next()?));
    let at = if flags & 0x80 == 0 { DATA + (at & 0xffff) } else { at };
    let length = if flags & 8 == 0 { length & 0xfff } else { length & 0x1_ffff };
    Some(block(at, length, kind << 10 | flags & 0x34))
}
