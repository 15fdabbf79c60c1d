//! The small virtio devices under a driver that means no good: entropy, balloon, serial ports.

use std::path::Path;

use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::driver::{Driver, EVENT_IDX};
use serde_json::{Value, json};

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
const ENTRIES: u16 = 32;
/// The features of devices, which each driver may accept or not.
const OWN: u64 = 0xff_ffff;

/// A kind, and what it is given beside its slot.
type Kind = (&'static str, fn(&Path) -> Value);

/// All of them.
pub(crate) const KINDS: &[Kind] = &[
    ("virtio-rng", |_| json!({})),
    ("virtio-balloon", |_| json!({ "size": "512K" })),
    ("virtio-serial", |_| json!({ "to": "none" })),
    ("virtio-serial", port),
];

fn port(folder: &Path) -> Value {
    json!({ "name": "port", "to": format!("socket:{}", folder.join("port").display()) })
}

/// What is done, by bytes.
struct Deeds<B>(B);

impl<B: Iterator<Item = u8>> Deeds<B> {
    fn byte(&mut self) -> Option<u8> {
        self.0.next()
    }

    fn short(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes([self.byte()?, self.byte()?]))
    }

    /// An address: mostly memory, sometimes its end, rarely anything.
    fn address(&mut self) -> Option<u64> {
        let (kind, low) = (self.byte()?, u64::from(self.short()?));
        Some(match kind {
            0..200 => low * 16,
            200..230 => RAM - (low & 0xff),
            230..250 => u64::MAX - low,
            _ => low << 40,
        })
    }

    fn length(&mut self) -> Option<u32> {
        let (kind, low) = (self.byte()?, u32::from(self.short()?));
        Some(match kind {
            0..100 => 8,
            100..200 => low & 0x7ff,
            200..240 => low * 4,
            _ => u32::MAX - low,
        })
    }
}

/// Does to a device of each kind what the bytes say, and then shows that it still serves.
pub(crate) fn run(which: usize, folder: &Path, bytes: impl Iterator<Item = u8>) {
    let (kind, fields) = KINDS[which % KINDS.len()];
    let mut fields = fields(folder);
    let named = fields.get("name").is_some();
    fields["slot"] = json!("03.0");
    let config = Config::of_kind(kind, fields).expect("it is in the registry").expect("its fields");
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    bench.board.add(kind, |place| config.build(place)).expect("the board is empty");
    bench.board.run(Vec::new()).expect("power-on");
    let mut deeds = Deeds(bytes);
    let mut driver = start(&bench, EVENT_IDX | OWN);
    while deed(&mut deeds, &mut driver).is_some() {}
    drop(driver);
    bench.board.reset().expect("power-on again");
    let mut driver = start(&bench, 0);
    assert_eq!(driver.status(), 15);
    // The entropy device gives, a balloon and a console take; without control queues there is no
    // port but a console.
    let (queue, gives) = if kind == "virtio-rng" { (0, true) } else { (1, false) };
    driver.offer(queue, &[(0x8000, 64, gives)]);
    driver.kick(queue);
    if !named {
        driver.wait(queue);
    }
}

fn start(bench: &Bench, features: u64) -> Driver<'_> {
    let mut driver = Driver::find(bench, AT);
    let offered = driver.features();
    assert!(driver.negotiate(features & offered));
    for queue in 0..u16::try_from(driver.queues.len()).expect("a few queues") {
        driver.enable(queue, ENTRIES);
    }
    driver.start();
    driver
}

/// One thing; none when the bytes are used up.
fn deed<'a, B: Iterator<Item = u8>>(deeds: &mut Deeds<B>, driver: &mut Driver<'a>) -> Option<()> {
    let (what, bench) = (deeds.byte()?, driver.bench);
    let queues = u16::try_from(driver.queues.len()).ok()?;
    let queue = u16::from(deeds.byte()?) % queues;
    match what {
        0..90 => {
            let (index, next) = (u16::from(deeds.byte()?), u16::from(deeds.byte()?));
            let piece = (deeds.address()?, deeds.length()?);
            // Most go on to a descriptor that there is, and few are tables.
            let flags = u16::from(deeds.byte()?) & if next < 240 { 3 } else { 7 };
            let next = if next < 250 { next % ENTRIES } else { next };
            driver.describe(queue, index % ENTRIES, piece, (flags, next));
        }
        90..140 => {
            let head = u16::from(deeds.byte()?);
            driver.publish(queue, if head < 250 { head % ENTRIES } else { head });
        }
        140..180 => driver.kick(queue),
        180..200 => {
            // A message of a port as it should be, but for what it says.
            let message = [deeds.byte()? % 3, 0, 0, 0, deeds.byte()? % 9, 0, deeds.byte()? % 2, 0];
            bench.memory.write(0x8000, &message).expect("memory");
            driver.offer(queue, &[(0x8000, 8, false)]);
            driver.kick(queue);
        }
        200..210 => driver.set_device(u64::from(deeds.byte()? % 16), &[deeds.byte()?]),
        210..220 => {
            let saved = bench.board.park();
            bench.board.run(saved).expect("what was just saved");
        }
        220..225 => drop(bench.board.balloon().set(u64::from(deeds.short()?) << 4)),
        225..235 => drop(bench.memory.write(deeds.address()?, &deeds.short()?.to_le_bytes())),
        235..240 => driver.set_status(deeds.byte()?),
        // From the beginning, with fewer or more features.
        _ => *driver = start(bench, u64::from(deeds.short()?) | EVENT_IDX),
    }
    Some(())
}
