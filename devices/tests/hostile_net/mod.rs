//! A network controller between a driver and a peer of whom neither means well.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use devices::grants::Build as _;
use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::driver::{Driver, EVENT_IDX};
use devices::testutil::hostile::Deeds;
use serde_json::json;

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
/// Receiving, sending, control: of this many entries.
const QUEUES: u16 = 3;
const ENTRIES: u16 = 32;
/// CTRL_VQ, with all that is behind it.
const CONTROL: u64 = 0xbf << 16 | 1 << 5;
/// With MRG_RXBUF and EVENT_IDX.
const OFFERED: u64 = CONTROL | 1 << 15 | EVENT_IDX;
/// Where a command is put together, and a frame behind its header, and where one may arrive.
const COMMAND: u64 = 0x8000;
const FRAME: u64 = 0xa000;
const BUFFER: u64 = 0x2_0000;
const HEADER: u32 = 12;
/// The bit of the status.
const NEEDS_RESET: u8 = 64;

/// Does what the bytes say, and then shows that a well-meaning driver is served. Tells how often
/// frames came out on either side.
pub(crate) fn run(bytes: impl Iterator<Item = u8>) -> [u32; 2] {
    live(bytes, None)
}

/// The same where a kernel has the rings now and then, and what it does is as these bytes begin.
pub(crate) fn lent(mut bytes: impl Iterator<Item = u8>) {
    let seed = [(); 8].map(|()| bytes.next().unwrap_or(0));
    live(bytes, Some(u64::from_le_bytes(seed)));
}

fn live(bytes: impl Iterator<Item = u8>, rehearsed: Option<u64>) -> [u32; 2] {
    let mut deeds = Deeds::new(bytes, RAM);
    let (ours, mut peer) = UnixStream::pair().expect("two sockets");
    peer.set_nonblocking(true).expect("a socket");
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    let fields = json!({ "to": format!("fd:{}", ours.as_raw_fd()), "slot": "03.0" });
    let config = Config::of_kind("virtio-net", fields).expect("it is in the registry");
    let Ok(Config::VirtioNet(config)) = config else { panic!("its fields are right") };
    let config = rehearsed.into_iter().fold(config, |config, seed| config.rehearse(seed));
    bench.board.add("net", |grants| config.build(grants)).expect("the board is empty");
    drop(ours);
    bench.board.run(Vec::new()).expect("power-on");
    let mut driver = start(&bench, OFFERED);
    let mut seen = [0; 2];
    while deed(&mut deeds, &mut driver, (&mut peer, &mut seen)).is_some() {}
    drop(driver);
    // The kernel has no rings then, and what it says of rings is not the driver's fault.
    if rehearsed.is_some() {
        bench.board.links().find("net").expect("it has a link").plug(false);
    }
    bench.board.reset().expect("power-on again");
    let mut driver = start(&bench, CONTROL);
    assert_eq!(driver.status(), 15);
    let words = driver.allocate(16);
    bench.memory.write(words, &[0, 0, 1, 0xff]).expect("memory");
    driver.offer(2, &[(words, 3, false), (words + 3, 1, true)]);
    driver.kick(2);
    assert_eq!(driver.wait(2).length, 1);
    assert_eq!(driver.bytes(words + 3, 1), [0]);
    seen
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
    (peer, seen): (&mut UnixStream, &mut [u32; 2]),
) -> Option<()> {
    let (what, bench) = (deeds.byte()?, driver.bench);
    let queue = u16::from(deeds.byte()?) % QUEUES;
    // A device that was broken does nothing until it is reset.
    if what < 200 && driver.status() & NEEDS_RESET != 0 {
        *driver = start(bench, if queue == 0 { CONTROL } else { OFFERED });
    }
    match what {
        0..90 => deeds.disturb(driver, queue, ENTRIES)?,
        90..130 => {
            let length = u32::from(deeds.short()?) % 3000;
            driver.offer(0, &[(BUFFER, HEADER, true), (BUFFER + 0x1000, length, true)]);
            driver.kick(0);
        }
        130..165 => {
            // Mostly a header that asks for nothing.
            let asks = [deeds.byte()?, deeds.byte()?].map(|it| if it < 250 { 0 } else { it });
            bench.memory.write(FRAME, &asks).expect("memory");
            let length = u32::from(deeds.short()?) % 2000;
            driver.offer(1, &[(FRAME, HEADER, false), (FRAME + 0x1000, length, false)]);
            driver.kick(1);
        }
        165..190 => {
            let length = deeds.short()?;
            let length = usize::from(if length < 0xf000 { 14 + length % 3000 } else { length });
            let prefix = u32::try_from(length).ok()?.to_be_bytes();
            peer.write_all(&[&prefix[..], &vec![0xff; length]].concat()).ok();
        }
        // What is no frame, after which no other comes: seldom.
        190..200 if queue == 0 && deeds.byte()? > 200 => {
            drop(peer.write(&[deeds.byte()?, deeds.byte()?]));
        }
        190..215 => {
            seen[0] += u32::from(peer.read(&mut [0; 5000]).is_ok());
            seen[1] += u32::from(driver.take(0).is_some_and(|it| it.length > HEADER));
        }
        215..222 => bench.board.links().find("net").ok()?.plug(queue == 0),
        222..244 => {
            // A command as it should be, but for what it says.
            let command = [deeds.byte()? % 8, deeds.byte()? % 8, deeds.byte()?, deeds.byte()?];
            bench.memory.write(COMMAND, &command).expect("memory");
            let length = u32::from(deeds.byte()?) % 32;
            driver.offer(2, &[(COMMAND, length, false), (COMMAND + 0x100, 1, true)]);
            driver.kick(2);
        }
        // From the beginning, with fewer or more features.
        _ => *driver = start(bench, if queue == 0 { CONTROL } else { OFFERED }),
    }
    Some(())
}
