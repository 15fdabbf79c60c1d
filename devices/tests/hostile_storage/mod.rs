//! A USB disk and a USB CD-ROM drive with a hostile driver, while an operator changes the media.

use std::path::Path;

use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::xhci::{BULK_IN, BULK_OUT, COMPLETION, DATA, Driver, NORMAL, block};
use serde_json::{Value, json};

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
const DISK: u64 = 256 << 10;
/// The USB 3 ports of the first two sockets.
const PORTS: [u8; 2] = [9, 10];
/// Guest address of status wrappers.
const STATUS: u64 = DATA + 0x1_0000;

/// Operation codes of commands. Some occur more than once to be used more often.
const OPCODES: [u8; 43] = [
    0x00, 0x03, 0x08, 0x0a, 0x12, 0x1a, 0x1b, 0x1e, 0x23, 0x25, 0x28, 0x28, 0x28, 0x2a, 0x2a, 0x2a,
    0x2b, 0x2f, 0x35, 0x41, 0x42, 0x42, 0x43, 0x46, 0x4a, 0x51, 0x52, 0x5a, 0x88, 0x8a, 0x8f, 0x91,
    0x93, 0x9e, 0xa0, 0xa3, 0xa8, 0xaa, 0xad, 0xaf, 0xbb, 0xbd, 0xbe,
];

/// The source of actions: a stream of bytes.
struct Actions<B>(B);

impl<B: Iterator<Item = u8>> Actions<B> {
    fn byte(&mut self) -> Option<u8> {
        self.0.next()
    }

    fn word(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes([self.byte()?, self.byte()?, self.byte()?, self.byte()?]))
    }

    /// A length, mostly a plausible one.
    fn length(&mut self) -> Option<u32> {
        let value = u32::from(self.byte()?);
        Some(match self.byte()? {
            0..100 => 512 * (value & 0xf),
            100..150 => 2048 * (value & 7),
            150..180 => value,
            180..200 => 13,
            200..220 => 31,
            _ => self.word()? & 0xffff,
        })
    }

    /// A command in its wrapper.
    fn wrapper(&mut self) -> Option<[u8; 31]> {
        let mut bytes = [0; 31];
        bytes[..4].copy_from_slice(b"USBC");
        let length = self.length()?;
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes[12] = self.byte()? & 0x80;
        (bytes[14], bytes[15]) = (16, OPCODES[usize::from(self.byte()?) % OPCODES.len()]);
        // Only a few bytes are set, because small block numbers exist on the medium.
        for _ in 0..self.byte()? & 7 {
            let at = usize::from(self.byte()? & 0xf);
            bytes[15 + at.max(1)] = self.byte()?;
        }
        if self.byte()? & 3 == 0 {
            let blocks = length / if self.byte()? & 1 == 0 { 512 } else { 2048 };
            bytes[22..24].copy_from_slice(&blocks.to_be_bytes()[2..]);
        }
        if self.byte()? > 250 {
            bytes[usize::from(self.byte()?) % 31] = self.byte()?;
        }
        Some(bytes)
    }
}

fn add(bench: &mut Bench, kind: &str, fields: Value) {
    let config = Config::of_kind(kind, fields).expect("it is in the registry").expect("its fields");
    bench.board.add(kind, |grants| config.build(grants)).expect("there is room");
}

/// Runs the actions that the bytes describe, then checks that the devices still work.
pub(crate) fn run(bytes: impl Iterator<Item = u8>) {
    let folder = tempfile::tempdir().expect("a folder");
    let [disk, cd] = ["disk", "cd.iso"].map(|name| folder.path().join(name));
    for path in [&disk, &cd] {
        let file = std::fs::File::create(path).expect("a file");
        file.set_len(DISK).expect("its length");
    }
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    add(&mut bench, "xhci", json!({ "slot": "03.0" }));
    add(&mut bench, "usb-storage", json!({ "path": disk, "removable": true, "overlay": true }));
    add(&mut bench, "usb-storage", json!({ "path": cd }));
    bench.board.run(Vec::new()).expect("power-on");
    let mut driver = Driver::find(&bench, AT);
    let slots = begin(&mut driver);
    let mut actions = Actions(bytes);
    while step(&mut actions, &mut driver, slots, [&disk, &cd]).is_some() {}
    for (name, path) in [("usb-storage", &disk), ("usb-storage.2", &cd)] {
        let tray = bench.board.shared.disks.tray(name).expect("it was built");
        if tray.medium().is_none() {
            tray.insert(path, None).expect("the file is free");
        }
    }
    bench.board.reset().expect("power-on again");
    let mut driver = Driver::find(&bench, AT);
    // One block of a CD is as long as four blocks of the disk.
    for (slot, blocks) in begin(&mut driver).into_iter().zip([4, 1]) {
        reads(&mut driver, slot, blocks);
    }
}

/// Configures both devices and returns their slots.
fn begin(driver: &mut Driver<'_>) -> [u8; 2] {
    driver.start();
    PORTS.map(|port| {
        driver.reset_port(port);
        let slot = driver.address(port);
        assert_eq!(driver.configure_bulk(slot, 1024), 1);
        slot
    })
}

/// Reads the first blocks, after the power-on unit attention.
fn reads(driver: &mut Driver<'_>, slot: u8, blocks: u8) {
    let mut wrapper = [0; 31];
    wrapper[..4].copy_from_slice(b"USBC");
    (wrapper[14], wrapper[15]) = (6, 0);
    for status in [1, 0] {
        driver.write(DATA, &wrapper);
        assert_eq!(driver.transfer(slot, BULK_OUT, DATA, 31), (1, 31));
        assert_eq!(driver.transfer(slot, BULK_IN, STATUS, 13), (1, 13));
        assert_eq!(driver.read::<13>(STATUS)[12], status, "ready");
    }
    (wrapper[9], wrapper[12], wrapper[14], wrapper[15]) = (8, 0x80, 10, 0x28);
    wrapper[23] = blocks;
    driver.write(DATA, &wrapper);
    assert_eq!(driver.transfer(slot, BULK_OUT, DATA, 31), (1, 31));
    assert_eq!(driver.transfer(slot, BULK_IN, DATA, 2048), (1, 2048));
    assert_eq!(driver.transfer(slot, BULK_IN, STATUS, 13), (1, 13));
    assert_eq!(driver.read::<13>(STATUS)[8..], [0; 5]);
}

/// Runs one action. Returns None at the end of the bytes.
fn step<B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    driver: &mut Driver<'_>,
    slots: [u8; 2],
    paths: [&Path; 2],
) -> Option<()> {
    let (what, bench) = (actions.byte()?, driver.bench);
    let which = usize::from(actions.byte()? & 1);
    let slot = slots[which];
    let endpoint = if actions.byte()? & 1 == 0 { BULK_IN } else { BULK_OUT };
    match what {
        0..100 => {
            let wrapper = actions.wrapper()?;
            let at = DATA + 0x40 * u64::from(actions.byte()? & 0xf);
            driver.write(at, &wrapper);
            driver.push(slot, BULK_OUT, block(at, 31, NORMAL | COMPLETION));
            driver.ring(slot, BULK_OUT);
        }
        100..170 => {
            let (length, at) = (actions.length()?, DATA + u64::from(actions.word()? & 0xffff));
            // Some of the buffer is beyond the end of memory.
            let at = if actions.byte()? > 240 { RAM - 512 } else { at };
            driver.push(slot, endpoint, block(at, length, NORMAL | COMPLETION | 1 << 2));
            driver.ring(slot, endpoint);
        }
        170..185 => {
            driver.push(slot, BULK_IN, block(STATUS, 13, NORMAL | COMPLETION | 1 << 2));
            driver.ring(slot, BULK_IN);
        }
        185..205 => {
            // Stop Endpoint, Reset Endpoint, or Set TR Dequeue Pointer.
            let place = u32::from(slot) << 24 | u32::from(endpoint) << 16;
            let kind = u32::from(actions.byte()?) % 3;
            let ring = if kind == 2 { driver.new_ring(slot, endpoint) | 1 } else { 0 };
            driver.begin(block(ring, 0, (14 + kind) << 10 | place));
        }
        205..215 => {
            let reset = if what < 210 {
                [0x21, 0xff, 0, 0, 0, 0, 0, 0]
            } else {
                [2, 1, 0, 0, 0x81, 0, 0, 0]
            };
            driver.push(slot, 1, block(u64::from_le_bytes(reset), 8, 2 << 10 | 1 << 6));
            driver.push(slot, 1, block(0, 0, 4 << 10));
            driver.ring(slot, 1);
        }
        215..230 => drop(driver.event()),
        230..240 => {
            let name = ["usb-storage", "usb-storage.2"][which];
            let tray = bench.board.shared.disks.tray(name).expect("it was built");
            if tray.medium().is_some() {
                tray.eject(actions.byte()? & 1 == 0).ok();
            } else {
                tray.insert(paths[which], None).expect("the file is free");
            }
        }
        240..250 => {
            let saved = bench.board.park();
            bench.board.run(saved).expect("what was just saved");
        }
        _ => drop(bench.memory.write(DATA, &actions.word()?.to_le_bytes())),
    }
    Some(())
}
