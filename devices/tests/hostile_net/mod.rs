//! A network controller between a hostile driver and a hostile peer.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use devices::grants::Build as _;
use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::driver::{Driver, EVENT_IDX};
use devices::testutil::hostile::Actions;
use serde_json::json;

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
/// Receive, transmit and control queues, and the number of entries of each.
const QUEUES: u16 = 3;
const ENTRIES: u16 = 32;
/// CTRL_VQ, and the features that depend on it.
const CONTROL: u64 = 0xbf << 16 | 1 << 5;
/// With MRG_RXBUF and EVENT_IDX.
const OFFERED: u64 = CONTROL | 1 << 15 | EVENT_IDX;
/// Guest addresses of a command, a frame to send with its header, and a receive buffer.
const COMMAND: u64 = 0x8000;
const FRAME: u64 = 0xa000;
const BUFFER: u64 = 0x2_0000;
const HEADER: u32 = 12;
/// A bit of the device status.
const NEEDS_RESET: u8 = 64;

/// Runs the actions that the bytes describe, then checks that an ordinary driver is served. Returns
/// how often a frame arrived at the peer and at the guest.
pub(crate) fn run(bytes: impl Iterator<Item = u8>) -> [u32; 2] {
    run_with(bytes, None)
}

/// The same with a simulated kernel that serves the rings at times. The first bytes seed its
/// behavior.
pub(crate) fn run_with_vhost(mut bytes: impl Iterator<Item = u8>) {
    let seed = [(); 8].map(|()| bytes.next().unwrap_or(0));
    run_with(bytes, Some(u64::from_le_bytes(seed)));
}

fn run_with(bytes: impl Iterator<Item = u8>, simulated_vhost: Option<u64>) -> [u32; 2] {
    let mut actions = Actions::new(bytes, RAM);
    let (ours, mut peer) = UnixStream::pair().expect("two sockets");
    peer.set_nonblocking(true).expect("a socket");
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    let fields = json!({ "to": format!("fd:{}", ours.as_raw_fd()), "slot": "03.0" });
    let config = Config::of_kind("virtio-net", fields).expect("it is in the registry");
    let Ok(Config::VirtioNet(mut config)) = config else { panic!("its fields are right") };
    config.simulated_vhost = simulated_vhost;
    bench.board.add("net", |grants| config.build(grants)).expect("the board is empty");
    drop(ours);
    bench.board.run(Vec::new()).expect("power-on");
    let mut driver = start(&bench, OFFERED);
    let mut seen = [0; 2];
    while step(&mut actions, &mut driver, &mut peer, &mut seen).is_some() {}
    drop(driver);
    // Unplugged, the kernel does not serve the rings. Its errors would not be the driver's.
    if simulated_vhost.is_some() {
        bench.board.shared.links.find("net").expect("it has a link").set_plugged(false);
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

/// Runs one action. Returns None at the end of the bytes.
fn step<'a, B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    driver: &mut Driver<'a>,
    peer: &mut UnixStream,
    seen: &mut [u32; 2],
) -> Option<()> {
    let (what, bench) = (actions.byte()?, driver.bench);
    let queue = u16::from(actions.byte()?) % QUEUES;
    // A broken device ignores everything until it is reset.
    if what < 200 && driver.status() & NEEDS_RESET != 0 {
        *driver = start(bench, if queue == 0 { CONTROL } else { OFFERED });
    }
    match what {
        0..90 => actions.corrupt_queue(driver, queue, ENTRIES)?,
        90..130 => {
            let length = u32::from(actions.short()?) % 3000;
            driver.offer(0, &[(BUFFER, HEADER, true), (BUFFER + 0x1000, length, true)]);
            driver.kick(0);
        }
        130..165 => {
            // Mostly a header without offloads.
            let asks = [actions.byte()?, actions.byte()?].map(|it| if it < 250 { 0 } else { it });
            bench.memory.write(FRAME, &asks).expect("memory");
            let length = u32::from(actions.short()?) % 2000;
            driver.offer(1, &[(FRAME, HEADER, false), (FRAME + 0x1000, length, false)]);
            driver.kick(1);
        }
        165..190 => {
            let length = actions.short()?;
            let length = usize::from(if length < 0xf000 { 14 + length % 3000 } else { length });
            let prefix = u32::try_from(length).ok()?.to_be_bytes();
            peer.write_all(&[&prefix[..], &vec![0xff; length]].concat()).ok();
        }
        // An invalid frame, which ends the stream. Therefore rare.
        190..200 if queue == 0 && actions.byte()? > 200 => {
            drop(peer.write(&[actions.byte()?, actions.byte()?]));
        }
        190..215 => {
            seen[0] += u32::from(peer.read(&mut [0; 5000]).is_ok());
            seen[1] += u32::from(driver.take(0).is_some_and(|it| it.length > HEADER));
        }
        215..222 => bench.board.shared.links.find("net").ok()?.set_plugged(queue == 0),
        222..244 => {
            // A well-formed command with random contents.
            let command =
                [actions.byte()? % 8, actions.byte()? % 8, actions.byte()?, actions.byte()?];
            bench.memory.write(COMMAND, &command).expect("memory");
            let length = u32::from(actions.byte()?) % 32;
            driver.offer(2, &[(COMMAND, length, false), (COMMAND + 0x100, 1, true)]);
            driver.kick(2);
        }
        // A new driver, with fewer or more features.
        _ => *driver = start(bench, if queue == 0 { CONTROL } else { OFFERED }),
    }
    Some(())
}
