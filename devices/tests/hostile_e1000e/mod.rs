//! The 82574 between a hostile driver and a hostile peer.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use devices::device::Kind;
use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::e1000e::{CTRL, Card, ENTRIES, IMS, RCTL, RDBAL, RESET, TAIL, TCTL, TDBAL};
use serde_json::json;

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
/// Short, since most frames of a hostile driver never arrive.
const PATIENCE: Duration = Duration::from_micros(200);
/// Registers that matter most: rings, control, interrupts, offloads, the PHY and the NVM.
const AIMS: [u64; 24] = [
    CTRL, 0x14, 0x18, 0x20, 0xc0, 0xc4, 0xc8, IMS, 0xd8, 0xdc, 0xe0, 0xe4, 0xe8, RCTL, TCTL,
    0x102c, 0x2170, RDBAL, TDBAL, 0x3840, 0x5000, 0x5008, 0x5400, 0x5818,
];

/// Runs the actions that the bytes describe, then checks that an ordinary driver is served. Returns
/// how often a frame arrived at the peer and at the guest.
pub(crate) fn run(mut bytes: impl Iterator<Item = u8>) -> [u32; 2] {
    let (ours, mut peer) = UnixStream::pair().expect("two sockets");
    peer.set_nonblocking(true).expect("a socket");
    let mut bench = Bench::new(usize::try_from(RAM).expect("a megabyte"));
    let fields = json!({ "to": format!("fd:{}", ours.as_raw_fd()), "slot": "03.0" });
    let config = Config::of_kind("e1000e", fields).expect("it is in the registry");
    let config = config.expect("its fields are right");
    bench.board.add("e1000e", |grants| config.build(grants)).expect("the board is empty");
    drop(ours);
    bench.board.run(Vec::new()).expect("power-on");
    let mut seen = [0; 2];
    let mut card = Card::find(&bench, AT);
    card.start();
    while step(&mut bytes, &mut card, &mut peer, &mut seen).is_some() {}
    // The driver's last ring may be served still, so the card is reset first.
    bench.board.shared.links.find("e1000e").expect("it has a link").set_plugged(false);
    bench.board.reset().expect("power-on again");
    let mut card = Card::find(&bench, AT);
    card.start();
    card.send(&[0xff; 64], 0, 0);
    let start = Instant::now();
    while !card.is_done() {
        assert!(start.elapsed() < Duration::from_secs(2), "the card is stuck");
        std::thread::yield_now();
    }
    seen
}

fn take<const N: usize>(bytes: &mut impl Iterator<Item = u8>) -> Option<[u8; N]> {
    let mut taken = [0; N];
    for byte in &mut taken {
        *byte = bytes.next()?;
    }
    Some(taken)
}

fn word(bytes: &mut impl Iterator<Item = u8>) -> Option<u32> {
    take(bytes).map(u32::from_le_bytes)
}

fn short(bytes: &mut impl Iterator<Item = u8>) -> Option<u16> {
    take(bytes).map(u16::from_le_bytes)
}

/// A frame of the peer: random bytes, or IPv4 or IPv6 with random headers.
fn frame(bytes: &mut impl Iterator<Item = u8>, which: u64) -> Option<Vec<u8>> {
    let length = short(bytes)?;
    let length = usize::from(if length < 0xf000 { 14 + length % 3000 } else { length });
    let mut frame = vec![bytes.next()?; length];
    if which & 1 != 0 {
        frame[12..14].copy_from_slice(if which & 2 != 0 { &[8, 0] } else { &[0x86, 0xdd] });
        let header: [u8; 24] = take(bytes)?;
        frame.iter_mut().skip(14).zip(header).for_each(|(to, from)| *to = from);
    }
    Some(frame)
}

/// Whether a frame arrives soon. The card's thread may have to wait for a processor.
fn arrives(mut ready: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if ready() {
            return true;
        }
        if start.elapsed() > PATIENCE {
            return false;
        }
        std::thread::yield_now();
    }
}

/// Runs one action. Returns `None` at the end of the bytes.
fn step(
    bytes: &mut impl Iterator<Item = u8>,
    card: &mut Card<'_>,
    peer: &mut UnixStream,
    seen: &mut [u32; 2],
) -> Option<()> {
    let (what, which) = (bytes.next()?, u64::from(bytes.next()?));
    match what {
        // A register: an important one, one of a ring, or any.
        0..30 => card.write(AIMS[usize::try_from(which).ok()? % AIMS.len()], word(bytes)?),
        30..50 => {
            let ring = if which & 1 == 0 { RDBAL } else { TDBAL };
            let offset = (which >> 1 & 0xf) * 4 + (which >> 5 & 1) * 0x100;
            card.write(ring + offset, word(bytes)? & 0xffff);
        }
        50..60 => {
            let register = u64::from(short(bytes)?) * 4 % 0x2_0000;
            card.write(register, word(bytes)?);
            card.read(register);
        }
        // A transmit descriptor, of any kind or nearly right.
        60..90 => {
            let words = [word(bytes)?, 0, word(bytes)?, word(bytes)?];
            let kinds = [0x2000_0000, 0x2010_0000, 0, 0x2410_0000];
            let kind = kinds[usize::try_from(which & 3).ok()?];
            let command = words[2] & 0xcf00_ffff | kind;
            let any = which & 0x80 != 0;
            card.describe([words[0] & 0xf_ffff, 0, if any { words[2] } else { command }, words[3]]);
            card.kick();
        }
        90..120 => {
            let length = usize::from(short(bytes)? % 3000).max(14);
            card.send(&vec![bytes.next()?; length], 0, word(bytes)?);
        }
        // A context for TCP, and a long packet.
        120..135 => {
            let v4 = which & 1 != 0;
            let (tcp, kind) = if v4 { (34, 0x2700_0000) } else { (54, 0x2500_0000) };
            let mss = u32::from(short(bytes)? % 2000);
            let header = (tcp + 20) << 8 | u32::from(bytes.next()? & 3) << 8;
            card.describe([14 | 24 << 8, tcp | (tcp + 16) << 8, kind, mss << 16 | header]);
            card.send(&vec![bytes.next()?; 4000], 1 << 26, 0x300);
        }
        135..165 => card.offer(which % ENTRIES),
        165..195 => {
            let frame = frame(bytes, which)?;
            let prefix = u32::try_from(frame.len()).ok()?.to_be_bytes();
            peer.write_all(&[&prefix[..], &frame].concat()).ok();
        }
        195..215 => {
            seen[0] += u32::from(arrives(|| peer.read(&mut [0; 5000]).is_ok()));
            seen[1] += u32::from(arrives(|| card.take().is_some()));
        }
        215..225 => card.bench.board.shared.links.find("e1000e").ok()?.set_plugged(which & 1 == 0),
        225..235 => {
            // Bus mastering, MSI-X and MSI.
            let (register, value) =
                [(4, 3), (4, 7), (0x42, which), (0x4e, which)][usize::try_from(which & 3).ok()?];
            let value = [u8::try_from(value).ok()?, u8::try_from(which).ok()? & 0xc0];
            card.bench.write(Kind::Config, AT.config() + register, &value);
        }
        235..240 => card.write(CTRL, RESET),
        _ => {
            *card = Card::find(card.bench, AT);
            card.start();
            card.write(IMS, word(bytes)?);
            card.read(TDBAL + TAIL);
        }
    }
    Some(())
}
