//! A network controller between a driver and a peer of whom neither means well.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::driver::{Driver, EVENT_IDX};
use serde_json::json;

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
/// Receiving, sending, control: of this many entries.
const QUEUES: u16 = 3;
const ENTRIES: u16 = 32;
/// CTRL_VQ, with all that is behind it.
const CONTROL: u64 = 0xbf << 16 | 1 << 5;
const MRG_RXBUF: u64 = 1 << 15;

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
            0..150 => low & 0x7ff,
            150..200 => low & 0x1f,
            200..240 => low * 4,
            _ => u32::MAX - low,
        })
    }
}

/// Does what the bytes say, and then shows that a well-meaning driver is served.
pub(crate) fn run(bytes: impl Iterator<Item = u8>) {
    let mut deeds = Deeds(bytes);
    let (ours, mut peer) = UnixStream::pair().expect("two sockets");
    peer.set_nonblocking(true).expect("a socket");
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    let fields = json!({ "to": format!("fd:{}", ours.as_raw_fd()), "slot": "03.0" });
    let config =
        Config::of_kind("virtio-net", fields).expect("it is in the registry").expect("a network");
    bench.board.add("net", |place| config.build(place)).expect("the board is empty");
    drop(ours);
    bench.board.run(Vec::new()).expect("power-on");
    let mut driver = start(&bench, CONTROL | MRG_RXBUF | EVENT_IDX);
    while deed(&mut deeds, &mut driver, &mut peer).is_some() {}
    drop(driver);
    bench.board.reset().expect("power-on again");
    let mut driver = start(&bench, CONTROL);
    assert_eq!(driver.status(), 15);
    let words = driver.allocate(16);
    bench.memory.write(words, &[0, 0, 1, 0xff]).expect("memory");
    driver.offer(2, &[(words, 3, false), (words + 3, 1, true)]);
    driver.kick(2);
    assert_eq!(driver.wait(2).length, 1);
    assert_eq!(driver.bytes(words + 3, 1), [0]);
}

fn start(bench: &Bench, features: u64) -> Driver<'_> {
    let mut driver = Driver::find(bench, AT);
    let offered = driver.features();
    assert!(driver.negotiate(features & offered));
    (0..QUEUES).for_each(|queue| driver.enable(queue, ENTRIES));
    driver.start();
    driver
}

/// One thing; none when the bytes are used up.
fn deed<'a, B: Iterator<Item = u8>>(
    deeds: &mut Deeds<B>,
    driver: &mut Driver<'a>,
    peer: &mut UnixStream,
) -> Option<()> {
    let (what, bench) = (deeds.byte()?, driver.bench);
    let queue = u16::from(deeds.byte()?) % QUEUES;
    match what {
        0..100 => {
            let (index, next) = (u16::from(deeds.byte()?), u16::from(deeds.byte()?));
            let piece = (deeds.address()?, deeds.length()?);
            // Most go on to a descriptor that there is, and few are tables.
            let flags = u16::from(deeds.byte()?) & if next < 240 { 3 } else { 7 };
            let next = if next < 250 { next % ENTRIES } else { next };
            driver.describe(queue, index % ENTRIES, piece, (flags, next));
        }
        100..140 => {
            let head = u16::from(deeds.byte()?);
            driver.publish(queue, if head < 250 { head % ENTRIES } else { head });
        }
        140..170 => driver.kick(queue),
        170..190 => {
            let length = deeds.short()?;
            let length = usize::from(if length < 0xf000 { 14 + length % 3000 } else { length });
            let prefix = u32::try_from(length).ok()?.to_be_bytes();
            peer.write_all(&[&prefix[..], &vec![0xa5; length]].concat()).ok();
        }
        190..195 => drop(peer.write(&[deeds.byte()?, deeds.byte()?])),
        195..210 => drop(peer.read(&mut [0; 5000])),
        210..220 => {
            let saved = bench.board.park();
            bench.board.run(saved).expect("what was just saved");
        }
        220..225 => bench.board.links().find("net").ok()?.plug(queue == 0),
        225..230 => drop(bench.memory.write(deeds.address()?, &deeds.short()?.to_le_bytes())),
        230..240 => {
            // A command as it should be, but for what it says.
            let words = [deeds.byte()? % 8, deeds.byte()? % 8, deeds.byte()?, deeds.byte()?];
            bench.memory.write(0x8000, &words).expect("memory");
            driver.offer(2, &[(0x8000, 4, false), (0x8010, 1, true)]);
            driver.kick(2);
        }
        240..243 => driver.set_status(deeds.byte()?),
        // From the beginning, with fewer or more features.
        _ => *driver = start(bench, if queue == 0 { CONTROL } else { CONTROL | MRG_RXBUF }),
    }
    Some(())
}
