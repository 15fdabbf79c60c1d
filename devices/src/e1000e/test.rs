//! The card under a driver, with a peer at a socket.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::json;

use super::*;
use crate::device::Kind;
use crate::testutil::Bench;
use crate::testutil::e1000e::{Card as Driver, HEAD, ICR, ICS, IMS, RCTL, RDBAL, STATUS, TDBAL};

const AT: Address = Address::new(3, 0);
const OWN: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

fn bench() -> (Bench, UnixStream) {
    let (ours, peer) = UnixStream::pair().unwrap();
    peer.set_nonblocking(true).unwrap();
    let mut bench = Bench::new(1 << 20);
    let fields = json!({
        "to": format!("fd:{}", ours.as_raw_fd()), "slot": "03.0", "mac": Mac(OWN).to_string(),
    });
    let config: Config = serde_json::from_value(fields).unwrap();
    bench.board.add("e1000e", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    (bench, peer)
}

/// Waits until `check` returns something.
fn wait<T>(mut check: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "nothing came");
        sleep(Duration::from_millis(1));
    }
}

/// The next frame that the card sent.
fn next(peer: &mut UnixStream) -> Vec<u8> {
    let mut exact = |length: usize| {
        let (mut bytes, mut done) = (vec![0; length], 0);
        wait(|| {
            match peer.read(&mut bytes[done..]) {
                Ok(count) => done += count,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            (done == length).then_some(())
        });
        bytes
    };
    let length = u32::from_be_bytes(exact(4).try_into().unwrap());
    exact(length as usize)
}

fn arrive(peer: &mut UnixStream, frame: &[u8]) {
    let length = u32::try_from(frame.len()).unwrap().to_be_bytes();
    peer.write_all(&[&length[..], frame].concat()).unwrap();
}

fn frame(to: [u8; 6], length: usize) -> Vec<u8> {
    let mut frame = [&to[..], &[2, 0, 0, 0, 0, 9, 0x88, 0xb5]].concat();
    frame.extend((14..length).map(|at| u8::try_from(at % 256).unwrap()));
    frame
}

#[test]
fn is_found_with_its_identity_and_address_and_a_link() {
    let (bench, _peer) = bench();
    assert_eq!(bench.read(Kind::Config, AT.config()), [0x86, 0x80, 0xd3, 0x10]);
    let driver = Driver::find(&bench, AT);
    assert_eq!(driver.read(0x5400).to_le_bytes(), OWN[..4]);
    assert_eq!(driver.read(0x5404), 0x8000_5634);
    assert_eq!(driver.read(0x40), driver.read(0x5400), "the old offset");
    assert_eq!(driver.read(STATUS) & 0xc3, 0x83, "1000 Mbit/s, full duplex, up");
    driver.write(0x14, 1);
    assert_eq!(driver.read(0x14), 0x5452_0002);
    driver.write(0x20, 0x0822_0000);
    assert_eq!(driver.read(0x20), 0x1822_0141);
    // The same register through the ports.
    bench.write(Kind::Port, 0xc000, &8_u32.to_le_bytes());
    assert_eq!(u32::from_le_bytes(bench.read(Kind::Port, 0xc004)), driver.read(STATUS));
    assert_eq!(bench.read(Kind::Memory, 0x4100_0000), [0xff; 4], "no flash");
}

#[test]
fn frames_go_both_ways() {
    let (bench, mut peer) = bench();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    for length in [60, 61, 1514] {
        let sent = frame([2; 6], length);
        driver.send(&sent, 0, 0);
        assert_eq!(next(&mut peer), sent);
        wait(|| driver.is_done().then_some(()));
        assert_eq!(driver.read(ICR) & 0x40_0001, 0x40_0001, "TXDW, TXQ0");
    }
    driver.send(&frame([2; 6], 20), 0, 0);
    assert_eq!(next(&mut peer).len(), 60, "padded");
    driver.offer(4);
    for length in [60, 1514] {
        arrive(&mut peer, &frame(OWN, length));
        let got = wait(|| driver.take());
        assert_eq!((got.bytes, got.status & 0x87), (frame(OWN, length), 0x87));
    }
    wait(|| (driver.read(ICR) & 0x10_0080 == 0x10_0080).then_some(()));
    // A frame without a buffer waits for one.
    (0..3).for_each(|number| arrive(&mut peer, &frame(OWN, 100 + number)));
    assert_eq!([100, 101].map(|_| wait(|| driver.take()).bytes.len()), [100, 101]);
    assert_eq!(driver.take(), None);
    driver.offer(3);
    assert_eq!(wait(|| driver.take()).bytes.len(), 102);
    assert_eq!([0x4074, 0x4080].map(|it| driver.read(it)), [5, 4], "counted");
    assert_eq!(driver.read(0x4074), 0, "reading clears");
}

#[test]
fn a_long_packet_is_cut_and_a_tag_is_inserted() {
    let (bench, mut peer) = bench();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    driver.write(0, 1 << 30 | 1);
    let mut packet = frame([2; 6], 14);
    packet[12..14].copy_from_slice(&[8, 0]);
    packet.extend([0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet.extend([0, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0x14, 9, 0, 0]);
    packet.extend([7; 2500]);
    // Checksums at 24 and 50, IPv4 and TCP; MSS and header length.
    let context = [14 | 24 << 8 | 33 << 16, 34 | 50 << 8, 0x2700_0000, 1000 << 16 | 54 << 8];
    driver.describe(context);
    driver.send(&packet, 1 << 26 | 1 << 30, 0x300 | 5 << 16);
    for (number, length) in [(0, 1000), (1, 1000), (2, 500)] {
        let frame = next(&mut peer);
        assert_eq!(frame.len(), 58 + length);
        assert_eq!(frame[12..18], [0x81, 0, 0, 5, 8, 0], "{number}");
        let ip = frame::Ip::find(&frame, 0x8100).unwrap();
        assert_eq!(ip.header_is_right(&frame), Some(true));
        assert_eq!(ip.transport_is_right(&frame), Some(true));
    }
    wait(|| driver.is_done().then_some(()));
}

#[test]
fn filters_decide_which_frames_arrive() {
    let (bench, mut peer) = bench();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    driver.offer(16);
    let (group, other) = ([1, 0, 0x5e, 0, 0, 0x12], [2, 0, 0, 0, 0, 7]);
    let mut seen = |driver: &mut Driver, rctl: u32| {
        driver.write(RCTL, rctl);
        for to in [group, other, [0xff; 6], OWN] {
            arrive(&mut peer, &frame(to, 60));
        }
        // The last one always arrives.
        let mut seen = Vec::new();
        while seen.last() != Some(&OWN[5]) {
            seen.push(wait(|| driver.take()).bytes[5]);
        }
        driver.offer(seen.len() as u64);
        seen
    };
    let enabled = 1 << 1 | 1 << 26;
    assert_eq!(seen(&mut driver, enabled), [0x56]);
    assert_eq!(seen(&mut driver, enabled | 1 << 3), [7, 0x56]);
    assert_eq!(seen(&mut driver, enabled | 1 << 4), [0x12, 0xff, 0x56]);
    assert_eq!(seen(&mut driver, enabled | 1 << 15), [0xff, 0x56]);
    // Bits 47:36 of the group's address are 0x120.
    driver.write(0x5200 + 4 * (0x120 >> 5), 1);
    assert_eq!(seen(&mut driver, enabled), [0x12, 0x56]);
    driver.write(RCTL, 0);
    arrive(&mut peer, &frame(OWN, 60));
    sleep(Duration::from_millis(20));
    assert_eq!(driver.take(), None, "reception is off");
}

#[test]
fn a_tag_is_removed_and_a_wrong_checksum_reported() {
    let (bench, mut peer) = bench();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    driver.write(0, 1 << 30 | 1);
    driver.offer(4);
    let mut packet = frame(OWN, 12);
    packet.truncate(12);
    packet.extend([0x81, 0, 0x20, 7, 8, 0]);
    packet.extend([0x45, 0, 0, 30, 0, 0, 0, 0, 64, 17, 0x66, 0xce, 10, 0, 0, 1, 10, 0, 0, 1]);
    packet.extend([0, 1, 0, 2, 0, 10, 0x8a, 0x73, 0x61, 0x62]);
    arrive(&mut peer, &packet);
    let got = wait(|| driver.take());
    assert_eq!((got.tag, got.bytes[12..14].to_vec()), (0x2007, vec![8, 0]));
    assert_eq!(got.status, 0xfb, "VP, UDPCS, TCPCS, IPCS, PIF");
    packet[47] ^= 1;
    arrive(&mut peer, &packet);
    assert_eq!(wait(|| driver.take()).status, 0x2000_00fb, "TCPE");
}

/// Enables MSI-X with all vectors.
fn use_messages(bench: &Bench) {
    for vector in 0..5_u64 {
        bench.write(Kind::Memory, 0x4200_0000 + 16 * vector, &0xfee0_0000_u64.to_le_bytes());
        bench.write(Kind::Memory, 0x4200_0008 + 16 * vector, &(0x40 + vector).to_le_bytes());
    }
    bench.write(Kind::Config, AT.config() + 0x42, &[0, 0x80]);
}

#[test]
fn interrupts_are_masked_cleared_and_throttled() {
    let (bench, _peer) = bench();
    let driver = Driver::find(&bench, AT);
    let sent = || bench.hypervisor.sent.lock().unwrap().len();
    driver.write(ICS, 4);
    assert!(!bench.hypervisor.pins.is_high(23));
    driver.write(IMS, 4);
    assert!(bench.hypervisor.pins.is_high(23));
    assert_eq!(driver.read(ICR), 0x8000_0004);
    assert!(!bench.hypervisor.pins.is_high(23));
    // MSI-X: vector 1 for the first receive queue, with auto-clear and a throttle of 10 ms.
    use_messages(&bench);
    for (register, value) in [(0xe4, 9), (0xdc, 1 << 20), (0xec, 39062), (0xd8, 4)] {
        driver.write(register, value);
    }
    driver.write(IMS, 1 << 20);
    driver.write(ICS, 1 << 20);
    assert_eq!((sent(), driver.read(ICS), driver.read(IMS)), (1, 0, 0));
    driver.write(IMS, 1 << 20);
    let start = Instant::now();
    driver.write(ICS, 1 << 20);
    assert_eq!(sent(), 1, "too early");
    wait(|| (sent() == 2).then_some(()));
    assert!(start.elapsed() >= Duration::from_millis(8));
    assert_eq!(bench.hypervisor.sent.lock().unwrap()[1].data, 0x41);
    // Another cause, at vector 2, is cleared by reading ICR.
    driver.write(0xe4, 10 << 16);
    driver.write(IMS, 1 << 24 | 4);
    driver.write(ICS, 4);
    assert_eq!((sent(), driver.read(ICR), driver.read(ICR)), (3, 0x8100_0004, 0));
    driver.write(IMS, 1 << 24 | 4);
    assert_eq!(sent(), 3, "nothing new");
}

#[test]
fn a_pulled_cable_is_reported_and_loses_frames() {
    let (bench, mut peer) = bench();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    driver.read(ICR);
    let link = bench.board.shared.links.find("e1000e").unwrap();
    link.set_plugged(false);
    assert_eq!((driver.read(STATUS) & 2, driver.read(ICR) & 4), (0, 4));
    driver.send(&frame([2; 6], 60), 0, 0);
    wait(|| driver.is_done().then_some(()));
    link.set_plugged(true);
    assert_eq!((driver.read(STATUS) & 2, driver.read(ICR) & 4), (2, 4));
    driver.send(&frame([2; 6], 61), 0, 0);
    assert_eq!(next(&mut peer).len(), 61);
}

#[test]
fn a_reset_forgets_rings_and_a_parked_card_continues() {
    let (bench, mut peer) = bench();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    driver.offer(2);
    driver.send(&frame([2; 6], 60), 0, 0);
    next(&mut peer);
    wait(|| driver.is_done().then_some(()));
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    arrive(&mut peer, &frame(OWN, 70));
    assert_eq!(wait(|| driver.take()).bytes.len(), 70);
    driver.write(0, 1 << 26);
    assert_eq!([TDBAL, TDBAL + HEAD, RDBAL, RCTL].map(|it| driver.read(it)), [0; 4]);
    assert_eq!(driver.read(0x5404), 0x8000_5634);
}

#[test]
fn a_card_from_elsewhere_is_announced() {
    let (here, mut peer) = bench();
    Driver::find(&here, AT).start();
    let saved = here.board.park();
    here.board.run(saved.clone()).unwrap();
    assert_eq!(peer.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "only a pause");
    let (there, mut peer) = bench();
    there.board.park();
    there.board.run(saved).unwrap();
    let (sent, head) = (next(&mut peer), [&[0xff; 6], &OWN[..], &[0x80, 0x35]].concat());
    assert_eq!((sent.len(), &sent[..14]), (60, &head[..]));
    assert_eq!((&sent[22..28], &sent[32..38]), (&OWN[..], &OWN[..]));
}

/// Headers of IPv4 and UDP without checksums, and two bytes of data.
fn datagram() -> Vec<u8> {
    let mut packet = frame([2; 6], 14);
    packet[12..14].copy_from_slice(&[8, 0]);
    packet.extend([0x45, 0, 0, 30, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    packet.extend([0, 1, 0, 2, 0, 10, 0x14, 0x1e, 0x61, 0x62]);
    packet.resize(60, 0);
    packet
}

#[test]
fn the_context_of_later_packets_outlasts_a_pause_and_a_move() {
    let (here, mut peer) = bench();
    let mut driver = Driver::find(&here, AT);
    driver.start();
    driver.describe([14 | 24 << 8 | 33 << 16, 34 | 40 << 8 | 43 << 16, 0x2600_0000, 42 << 8]);
    let check = |driver: &mut Driver, peer: &mut UnixStream| {
        driver.send(&datagram(), 1 << 29, 0x300);
        let frame = next(peer);
        let ip = frame::Ip::find(&frame, 0x8100).unwrap();
        assert_eq!(ip.header_is_right(&frame), Some(true));
        assert_eq!(ip.transport_is_right(&frame), Some(true));
        wait(|| driver.is_done().then_some(()));
    };
    check(&mut driver, &mut peer);
    let saved = here.board.park();
    here.board.run(saved).unwrap();
    check(&mut driver, &mut peer);
    let (there, mut peer) = bench();
    there.board.park();
    there.board.run(here.board.park()).unwrap();
    assert_eq!(next(&mut peer)[..6], [0xff; 6], "announced");
    check(&mut driver.moved_to(&there), &mut peer);
}

#[test]
fn a_late_interrupt_outlasts_a_pause_and_a_move() {
    let (here, _peer) = bench();
    let (there, _peer) = bench();
    let driver = Driver::find(&here, AT);
    let sent = || [&here, &there].map(|it| it.hypervisor.sent.lock().unwrap().len());
    use_messages(&here);
    // Vector 1 for the first receive queue, with a throttle of 17 ms.
    for (register, value) in [(0xec, 0xffff), (0xe4, 9), (0xdc, 1 << 20)] {
        driver.write(register, value);
    }
    let cause = || {
        driver.write(IMS, 1 << 20);
        driver.write(ICS, 1 << 20);
    };
    cause();
    cause();
    let saved = here.board.park();
    here.board.run(saved).unwrap();
    wait(|| (sent() == [2, 0]).then_some(()));
    cause();
    let saved = here.board.park();
    there.board.park();
    there.board.run(saved).unwrap();
    wait(|| (sent().iter().sum::<usize>() == 3).then_some(()));
}

#[test]
fn a_packet_is_split_into_headers_and_data() {
    let (bench, mut peer) = bench();
    let mut driver = Driver::find(&bench, AT);
    driver.start();
    // Headers of up to 128 bytes, then pieces of 1 KiB, at 0x8000, 0x9000 and so on.
    driver.write(0x2170, 1 | 1 << 8 | 1 << 16 | 1 << 24);
    let buffers = [0x8000, 0x9000, 0xa000, 0xb000_u64].map(u64::to_le_bytes).concat();
    bench.memory.write(0x1000, &buffers).unwrap();
    driver.write(RCTL, 1 << 1 | 1 << 5 | 1 << 10 | 1 << 26);
    // The tail counts 16 bytes, half of a descriptor.
    driver.write(RDBAL + 0x18, 2);
    let mut packet = frame(OWN, 12);
    packet.truncate(12);
    packet.extend([8, 0, 0x45, 0, 7, 0xf8, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 1]);
    packet.extend((0..2020).map(|at| u8::try_from(at % 251).unwrap()));
    arrive(&mut peer, &packet);
    wait(|| (driver.read(RDBAL + HEAD) == 2).then_some(()));
    let mut report = [0; 24];
    bench.memory.read(0x1000, &mut report).unwrap();
    assert_eq!(report[8] & 3, 3);
    let shorts: Vec<_> =
        report[12..].chunks(2).map(|it| u16::from_le_bytes([it[0], it[1]])).collect();
    assert_eq!(shorts, [42, 0, 0x802a, 1024, 988, 0]);
    let mut data = vec![0; 42 + 1024 + 988];
    let (head, rest) = data.split_at_mut(42);
    bench.memory.read(0x8000, head).unwrap();
    bench.memory.read(0x9000, &mut rest[..1024]).unwrap();
    bench.memory.read(0xa000, &mut rest[1024..]).unwrap();
    assert_eq!(data, packet);
}
