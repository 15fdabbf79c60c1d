//! An xHCI controller with a keyboard and a tablet, and a hostile driver.

use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::xhci::{Block, DATA, Driver, INPUT, USBCMD, block};
use host::input::{Key, Position};
use serde_json::json;

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
/// The interrupt endpoint of both devices.
const IN: u8 = 3;

/// The source of actions: a stream of bytes.
struct Actions<B>(B);

impl<B: Iterator<Item = u8>> Actions<B> {
    fn byte(&mut self) -> Option<u8> {
        self.0.next()
    }

    fn word(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes([self.byte()?, self.byte()?, self.byte()?, self.byte()?]))
    }

    /// An address: mostly used memory, sometimes the end of memory, rarely a random one.
    fn address(&mut self) -> Option<u64> {
        let (kind, low) = (self.byte()?, u64::from(self.word()?));
        Some(match kind {
            0..120 => DATA + (low & 0xffff),
            120..200 => (low % RAM) & !0xf,
            200..230 => RAM - (low & 0xff),
            230..250 => u64::MAX - (low & 0xfff),
            _ => low << 32,
        })
    }

    /// A transfer request block, mostly of a valid type.
    fn block(&mut self) -> Option<Block> {
        let (kind, flags) = (u32::from(self.byte()?), u32::from(self.byte()?));
        let kind = if kind < 230 { kind % 9 } else { kind & 0x3f };
        let length = self.word()?;
        let length = if flags & 0x80 == 0 { length & 0x1f } else { length };
        Some(block(self.address()?, length, kind << 10 | flags & 0x7f))
    }
}

/// Runs the actions that the bytes describe, then checks that the controller still works.
pub(crate) fn run(bytes: impl Iterator<Item = u8>) {
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    for (kind, fields) in [
        ("xhci", json!({ "slot": "03.0" })),
        ("usb-keyboard", json!({})),
        ("usb-tablet", json!({})),
    ] {
        let config = Config::of_kind(kind, fields).expect("it is in the registry");
        let config = config.expect("its fields");
        bench.board.add(kind, |grants| config.build(grants)).expect("there is room");
    }
    bench.board.run(Vec::new()).expect("power-on");
    let mut driver = Driver::find(&bench, AT);
    let slots = begin(&mut driver);
    let mut actions = Actions(bytes);
    while step(&mut actions, &mut driver, slots).is_some() {}
    bench.board.reset().expect("power-on again");
    let mut driver = Driver::find(&bench, AT);
    let [slot, _] = begin(&mut driver);
    assert!(bench.board.shared.input.key(Key::PAUSE, true), "the keyboard is configured");
    driver.push(slot, IN, block(DATA, 8, 1 << 10 | 1 << 5));
    driver.ring(slot, IN);
    driver.wait_event(32);
    assert_eq!(driver.read(DATA), [0, 0, 0x48, 0, 0, 0, 0, 0]);
}

/// Configures both devices and returns their slots.
fn begin(driver: &mut Driver<'_>) -> [u8; 2] {
    driver.start();
    [1, 2].map(|port| {
        driver.reset_port(port);
        let slot = driver.address(port);
        assert_eq!(driver.configure(slot, IN), 1);
        slot
    })
}

/// Runs one action. Returns None at the end of the bytes.
fn step<B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    driver: &mut Driver<'_>,
    slots: [u8; 2],
) -> Option<()> {
    let (what, bench) = (actions.byte()?, driver.bench);
    let slot = slots[usize::from(actions.byte()? & 1)];
    let endpoint = if actions.byte()? & 1 == 0 { 1 } else { IN };
    match what {
        0..70 => {
            let block = actions.block()?;
            driver.push(slot, endpoint, block);
            driver.ring(slot, endpoint);
        }
        70..100 => {
            // A well-formed control transfer with random contents.
            let mut setup = [0; 8];
            for byte in &mut setup {
                *byte = actions.byte()?;
            }
            setup[0] &= 0xa3;
            setup[1] &= 0xf;
            setup[7] = 0;
            let setup = u64::from_le_bytes(setup);
            driver.push(slot, 1, block(setup, 8, 2 << 10 | 1 << 6));
            let status = actions.block()?;
            driver.push(slot, 1, status);
            driver.push(slot, 1, block(0, 0, 4 << 10));
            driver.ring(slot, 1);
        }
        100..150 => {
            let (kind, flags) = (u32::from(actions.byte()?), u32::from(actions.byte()?));
            let place = u32::from(slot) << 24 | u32::from(endpoint) << 16;
            let at = if flags & 1 == 0 { INPUT } else { actions.address()? };
            driver.begin(block(at, 0, (9 + kind % 16) << 10 | place | (flags & 2) << 8));
        }
        150..165 => drop(bench.memory.write(actions.address()?, &actions.word()?.to_le_bytes())),
        165..180 => {
            let at = INPUT + u64::from(actions.word()? & 0x7c);
            bench.memory.write(at, &actions.word()?.to_le_bytes()).ok();
        }
        180..200 => drop(driver.event()),
        200..210 => driver.set(u64::from(actions.word()? & 0x3ffc), actions.word()?),
        210..220 => driver.set(Driver::port(actions.byte()? & 0xf | 1), actions.word()?),
        220..230 => {
            if let Some(key) = Key::new(u16::from(actions.byte()?)) {
                bench.board.shared.input.key(key, what & 1 == 0);
            }
            let x = u16::from(actions.byte()?) << 7;
            bench.board.shared.input.position(Position { x, ..Position::default() });
        }
        230..240 => {
            let saved = bench.board.park();
            bench.board.run(saved).expect("what was just saved");
        }
        240..248 => driver.set(USBCMD, 4 | u32::from(actions.byte()? & 3)),
        _ => driver.set(USBCMD, 5),
    }
    Some(())
}
