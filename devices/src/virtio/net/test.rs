//! Tests of `net`.

use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use super::*;
use crate::device::Kind;
use crate::testutil::Bench;
use crate::testutil::driver::{Descriptor, Driver, EVENT_IDX, WRITE};
use host::net::link::Link;
use host::net::{HEADER_LENGTH, Options, TransferError, Wait, length, read_pieces, write_pieces};
use host::testutil::tap::{in_namespace, ip, packet, set_addresses};

const AT: Address = Address::new(3, 0);
const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// A network of datagrams, each a frame behind its header. It records the calls it received.
struct Lab {
    link: Arc<Link>,
    ends: Mutex<Vec<UnixDatagram>>,
    asked: Arc<Mutex<Vec<String>>>,
    offloads: Offloads,
}

impl Lab {
    /// Also returns the far ends of its cables.
    fn new(pairs: usize, offloads: Offloads) -> (Arc<Self>, Vec<UnixDatagram>) {
        let pairs = (0..pairs).map(|_| {
            let (ours, theirs) = UnixDatagram::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            theirs.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            (ours, theirs)
        });
        let (ours, theirs) = pairs.unzip();
        let link = Arc::new(Link::new(Some(1450)));
        let asked = Arc::default();
        (Arc::new(Self { link, ends: Mutex::new(ours), asked, offloads }), theirs)
    }
}

impl Backend for Lab {
    fn offloads(&self) -> Offloads {
        self.offloads
    }
    fn set_offloads(&self, offloads: Offloads) {
        let Offloads { checksum, tso4, tso6, ecn, uso } = offloads;
        let bits = [checksum, tso4, tso6, ecn, uso].map(u8::from);
        self.asked.lock().unwrap().push(format!("leave {bits:?}"));
    }
    fn attach(&self, port: usize, on: bool) {
        self.asked.lock().unwrap().push(format!("attach {port} {on}"));
    }
    fn link(&self) -> &Arc<Link> {
        &self.link
    }
    fn ports(&self) -> Vec<Box<dyn Port>> {
        let ends = std::mem::take(&mut *self.ends.lock().unwrap());
        ends.into_iter().map(|end| Box::new(Cable(end)) as Box<dyn Port>).collect()
    }
}

struct Cable(UnixDatagram);

impl Port for Cable {
    fn receive(
        &mut self,
        memory: &Memory,
        to: &[Piece],
        rest: &mut [u8],
    ) -> Result<usize, TransferError> {
        let mut frame = vec![0; 70_000];
        let count = self.0.recv(&mut frame).map_err(|_| TransferError::WouldBlock)?;
        let done =
            write_pieces(memory, to, 0, &frame[..count]).map_err(|_| TransferError::Refused)?;
        rest[..count - done].copy_from_slice(&frame[done..count]);
        Ok(count)
    }
    fn send(&mut self, memory: &Memory, from: &[Piece]) -> Result<(), TransferError> {
        let mut frame = vec![0; length(from)];
        if frame.len() < HEADER_LENGTH {
            return Err(TransferError::Refused);
        }
        read_pieces(memory, from, 0, &mut frame).map_err(|_| TransferError::Refused)?;
        self.0.send(&frame).map(drop).map_err(|_| TransferError::WouldBlock)
    }
    fn wait(&mut self) -> Wait<'_> {
        Wait { fd: Some(self.0.as_fd()), ..Wait::default() }
    }
}

fn bench(pairs: u16, offloads: Offloads) -> (Bench, Arc<Lab>, Vec<UnixDatagram>) {
    let (lab, ends) = Lab::new(pairs.into(), offloads);
    let mut bench = Bench::new(4 << 20);
    let config =
        Config { pairs, mac: Some(Mac(OWN)), offloads: true, slot: Some(AT), ..Config::default() };
    let backend: Arc<dyn Backend> = lab.clone();
    bench
        .board
        .add("net", |grants| on_pci(Net::new(&config, &backend, Vec::new())?, Some(AT), grants))
        .unwrap();
    bench.board.run(Vec::new()).unwrap();
    (bench, lab, ends)
}

/// A driver that negotiated these features, with its first `queues` queues enabled.
fn driver(bench: &Bench, features: u64, queues: u16) -> Driver<'_> {
    let mut driver = Driver::find(bench, AT);
    assert!(driver.negotiate(features), "{features:#x} of {:#x}", driver.features());
    (0..queues).for_each(|queue| driver.enable(queue, 64));
    driver.start();
    driver
}

/// A frame to or from the guest, behind its header.
fn frame(seed: u8, length: usize) -> Vec<u8> {
    let payload = (0..length - 14).map(|at| seed.wrapping_add(at.to_le_bytes()[0]));
    [&[0; HEADER_LENGTH][..], &OWN, &[2, 0, 0, 0, 0, seed], &[8, 0]]
        .concat()
        .into_iter()
        .chain(payload)
        .collect()
}

/// The frame in the next used buffers, and their number.
fn content(driver: &mut Driver<'_>, buffers: &[(u64, u32)]) -> (Vec<u8>, usize) {
    let mut bytes = Vec::new();
    let first = driver.wait(0);
    let taken = |driver: &Driver<'_>, used: crate::testutil::driver::Used| {
        let buffer = buffers[usize::try_from(used.head).unwrap() % buffers.len()];
        driver.bytes(buffer.0, used.length as usize)
    };
    bytes.extend(taken(driver, first));
    let count = usize::from(u16::from_le_bytes([bytes[10], bytes[11]]));
    for _ in 1..count {
        // All buffers of a frame are returned at once.
        let used = driver.take(0).expect("a frame comes whole");
        bytes.extend(taken(driver, used));
    }
    (bytes, count)
}

/// Adds buffers of this length to queue 0, each as its own chain.
fn offer(driver: &mut Driver<'_>, count: usize, length: u32) -> Vec<(u64, u32)> {
    let buffers: Vec<_> = (0..count).map(|_| (driver.allocate(length.into()), length)).collect();
    for (at, length) in &buffers {
        driver.offer(0, &[(*at, *length, true)]);
    }
    driver.kick(0);
    buffers
}

fn is_same(got: &[u8], sent: &[u8]) -> bool {
    got.len() == sent.len() && got[..10] == sent[..10] && got[12..] == sent[12..]
}

/// Sends a command and checks that the answer is the one that NetKVM expects.
fn command(driver: &mut Driver<'_>, queue: u16, words: &[u8]) {
    let at = driver.allocate(words.len() as u64 + 16);
    driver.bench.memory.write(at, words).unwrap();
    driver.bench.memory.write(at + words.len() as u64, &[0xee; 2]).unwrap();
    let length = u32::try_from(words.len()).unwrap();
    let cut = length.min(2);
    let answer = at + u64::from(length);
    let all = [(at, cut, false), (at + u64::from(cut), length - cut, false), (answer, 1, true)];
    let pieces: Vec<_> = all.into_iter().filter(|piece| piece.1 > 0).collect();
    driver.offer(queue, &pieces);
    driver.kick(queue);
    assert_eq!(driver.wait(queue).length, 1, "{words:?}");
    assert_eq!(driver.bytes(answer, 2), [OK, 0xee], "{words:?}");
}
use super::control::OK;

fn wait(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what} never came");
        std::thread::yield_now();
    }
}

#[test]
fn offers_the_features_of_its_backend() {
    let (bench, lab, _ends) = bench(2, Offloads::ALL);
    let mut driver = Driver::find(&bench, AT);
    assert_eq!(driver.config(0), [0xf4, 0x1a, 0x41, 0x10]);
    assert_eq!(driver.config(8), [1, 0, 0, 2]);
    let all = 0x8000_0000_0000_0000 | 7 << 54;
    assert_eq!(driver.features() & !0x101_7000_0000 & !(1 << 40), all | 0xff_bbaf);
    assert!(driver.negotiate(all));
    assert_eq!(driver.device(0), OWN);
    assert_eq!(driver.device(6), [1, 0, 2, 0, 0xaa, 5]);
    assert_eq!(driver.device(12), [0x10, 0x27, 0, 0, 1]);
    lab.link.set_mtu(9000).unwrap();
    lab.link.set_plugged(false);
    assert_eq!(driver.device(6), [0, 0, 2, 0, 0x28, 0x23]);
    let (plain, ..) = self::bench(1, Offloads::default());
    let offered = Driver::find(&plain, AT).features();
    assert_eq!(offered & (0x3f87 | 7 << 54 | MQ), 0, "the peer has no offloads");
    assert_eq!(offered & ALWAYS, ALWAYS);
}

#[test]
fn frames_arrive_whole_in_both_directions_with_interrupts() {
    for features in [MRG_RXBUF | EVENT_IDX, MRG_RXBUF, EVENT_IDX, 0] {
        let (bench, _lab, ends) = bench(1, Offloads::default());
        let mut driver = driver(&bench, features, 2);
        let merge = features & MRG_RXBUF != 0;
        let buffers = offer(&mut driver, 32, if merge { 1526 } else { 10_000 });
        for (seed, length) in [(1, 14), (2, 60), (3, 1514), (4, 1515), (5, 9014), (6, 3038)] {
            let sent = frame(seed, length);
            ends[0].send(&sent).unwrap();
            let (got, count) = content(&mut driver, &buffers);
            assert!(is_same(&got, &sent), "{length} bytes, {features:#x}");
            assert_eq!(count, if merge { sent.len().div_ceil(1526) } else { 1 });
        }
        for (seed, length) in [(1, 14), (2, 1514), (3, 40_000)] {
            let sent = frame(seed, length);
            let at = driver.allocate(sent.len() as u64);
            driver.bench.memory.write(at, &sent).unwrap();
            let whole = u32::try_from(sent.len()).unwrap();
            driver.offer(1, &[(at, 7, false), (at + 7, 9, false), (at + 16, whole - 16, false)]);
            driver.kick(1);
            let mut got = vec![0; 70_000];
            let count = ends[0].recv(&mut got).unwrap();
            assert!(got[..count] == sent, "{length} bytes, {features:#x}");
            assert_eq!(driver.wait(1).length, 0);
        }
        assert_ne!(driver.isr() & 1, 0, "{features:#x}");
    }
}

#[test]
fn a_frame_waits_for_buffers_and_is_dropped_if_too_long() {
    let (bench, _lab, ends) = bench(1, Offloads::default());
    let mut driver = driver(&bench, MRG_RXBUF | EVENT_IDX, 2);
    let sent = [frame(1, 4000), frame(2, 60), frame(3, 70)];
    for sent in &sent {
        ends[0].send(sent).unwrap();
    }
    let mut buffers = offer(&mut driver, 1, 1000);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(driver.take(0), None, "a frame is only delivered complete");
    buffers.extend(offer(&mut driver, 3, 1000));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(driver.take(0), None);
    buffers.extend(offer(&mut driver, 3, 1000));
    let (got, count) = content(&mut driver, &buffers);
    assert!(is_same(&got, &sent[0]) && count == 5);
    for sent in &sent[1..] {
        assert!(is_same(&content(&mut driver, &buffers).0, sent));
    }
    let (bench, _lab, ends) = self::bench(1, Offloads::default());
    let mut driver = self::driver(&bench, 0, 2);
    let buffers = offer(&mut driver, 1, 100);
    ends[0].send(&frame(1, 90)).unwrap();
    ends[0].send(&frame(2, 88)).unwrap();
    assert!(is_same(&content(&mut driver, &buffers).0, &frame(2, 88)));
}

#[test]
fn every_control_command_gets_a_one_byte_answer() {
    let features = CTRL_VQ | CTRL_RX | CTRL_VLAN | CTRL_MAC_ADDR | CTRL_GUEST_OFFLOADS;
    let checks = GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ANNOUNCE;
    for (more, queue) in [(MQ, 8), (0, 2)] {
        let (bench, lab, _ends) = bench(4, Offloads::ALL);
        let mut driver = driver(&bench, features | checks | more, 9);
        let mut ask = |words: &[u8]| command(&mut driver, queue, words);
        ask(&[4, 0, 4, 0]);
        ask(&[4, 1, 0, 0, 0, 0]);
        ask(&[5, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        ask(&[1, 1, 2, 3, 4, 5, 6, 7]);
        (0..6).for_each(|mode| ask(&[0, mode, 0]));
        ask(&[1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 2, 3, 4, 5, 6]);
        (0..10).for_each(|number| ask(&[2, 0, number, 0]));
        ask(&[2, 1, 5, 0]);
        ask(&[3, 0]);
        for odd in [&[6, 0, 1][..], &[0xff, 0xff], &[1, 0], &[4, 0, 0, 0], &[4, 0, 9, 9], &[0]] {
            ask(odd);
        }
        assert_eq!(driver.device(0), [2, 3, 4, 5, 6, 7]);
        let asked = lab.asked.lock().unwrap().clone();
        assert_eq!(asked.iter().any(|it| it == "attach 3 true"), more != 0);
        assert_eq!(asked[0], "leave [1, 1, 1, 0, 0]");
        assert!(asked.iter().any(|it| it == "leave [1, 0, 0, 0, 0]"));
        // A command without room for the answer, and one without readable bytes.
        let (none, room) = (driver.allocate(16), driver.allocate(16));
        driver.offer(queue, &[(none, 2, false)]);
        driver.offer(queue, &[(room, 4, true)]);
        driver.kick(queue);
        assert_eq!([driver.wait(queue).length, driver.wait(queue).length], [0, 1]);
    }
}

#[test]
fn frames_arrive_on_the_configured_queue_pairs() {
    let (bench, lab, ends) = bench(2, Offloads::default());
    let mut driver = driver(&bench, CTRL_VQ | MQ, 5);
    let buffer = driver.allocate(2000);
    driver.offer(2, &[(buffer, 2000, true)]);
    driver.kick(2);
    ends[1].send(&frame(7, 60)).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(driver.take(2), None, "one pair is in use");
    command(&mut driver, 4, &[4, 0, 2, 0]);
    assert_eq!(driver.wait(2).length, 72);
    let sent = frame(8, 60);
    bench.memory.write(buffer, &sent).unwrap();
    driver.offer(3, &[(buffer, 72, false)]);
    driver.kick(3);
    let mut got = [0; 100];
    assert_eq!((ends[1].recv(&mut got).unwrap(), &got[..72]), (72, &sent[..]));
    assert_eq!(
        lab.asked.lock().unwrap()[1..],
        ["attach 0 true", "attach 1 false", "attach 0 true", "attach 1 true"]
    );
}

#[test]
fn cable_changes_are_reported_to_the_guest() {
    let (bench, lab, ends) = bench(1, Offloads::default());
    let mut driver = driver(&bench, CTRL_VQ | STATUS | GUEST_ANNOUNCE | MRG_RXBUF, 3);
    let buffers = offer(&mut driver, 4, 2000);
    driver.isr();
    lab.link.set_plugged(false);
    assert_eq!((driver.isr() & 2, driver.device(6)), (2, [0, 0]));
    ends[0].send(&frame(1, 60)).unwrap();
    let at = driver.allocate(100);
    driver.offer(1, &[(at, 72, false)]);
    driver.kick(1);
    assert_eq!(driver.wait(1).length, 0, "sent, but lost");
    std::thread::sleep(Duration::from_millis(20));
    lab.link.set_plugged(true);
    assert_eq!(
        (driver.isr() & 2, driver.device(6)),
        (2, [3, 0]),
        "link up, and a request to announce"
    );
    command(&mut driver, 2, &[3, 0]);
    assert_eq!(driver.device(6), [1, 0]);
    // There may be no room yet: a socket wakes its sender only when most of it is read, and the
    // guest has four buffers.
    ends[0].set_nonblocking(true).unwrap();
    wait("the old frame's end", || {
        ends[0].send(&frame(2, 61)).ok();
        driver.bytes(buffers[0].0 + 12, 6) == OWN
    });
    assert!(
        is_same(&content(&mut driver, &buffers).0, &frame(2, 61)),
        "frames from before are lost"
    );
    assert!(ends[0].recv(&mut [0; 100]).is_err());
    bench.board.reset().unwrap();
    lab.link.set_mtu(1400).unwrap();
    assert!(lab.link.is_up());
}

#[test]
fn a_guest_from_another_process_is_asked_to_announce_itself() {
    let (here, _lab, _ends) = bench(1, Offloads::default());
    let driver = driver(&here, CTRL_VQ | STATUS | GUEST_ANNOUNCE, 3);
    assert_eq!((driver.isr() & 2, driver.device(6)), (0, [1, 0]));
    let saved = here.board.park();
    here.board.run(saved.clone()).unwrap();
    assert_eq!((driver.isr() & 2, driver.device(6)), (0, [1, 0]), "it was only paused");
    let (there, _lab, _ends) = bench(1, Offloads::default());
    there.board.park();
    there.board.run(saved).unwrap();
    let driver = Driver::find(&there, AT);
    assert_eq!((driver.isr() & 2, driver.device(6)), (2, [3, 0]));
}

#[test]
fn parking_loses_and_duplicates_no_frame() {
    let (bench, _lab, ends) = bench(1, Offloads::default());
    let features = MRG_RXBUF | EVENT_IDX | CTRL_VQ | CTRL_RX;
    let mut driver = driver(&bench, features, 3);
    command(&mut driver, 2, &[0, 0, 0]);
    let buffers = offer(&mut driver, 63, 200);
    let room = driver.allocate(63 * 100);
    for round in 0..200_u8 {
        let (sent, at) = (frame(round, 60), room + 100 * u64::from(round % 63));
        bench.memory.write(at, &sent).unwrap();
        driver.offer(1, &[(at, 72, false)]);
        driver.kick(1);
        ends[0].send(&sent).unwrap();
        if round % 3 == 0 {
            let saved = bench.board.park();
            bench.board.run(saved.clone()).unwrap();
        }
        let mut got = [0; 100];
        assert_eq!(ends[0].recv(&mut got).unwrap(), 72);
        assert!(got[..72] == sent, "round {round}");
        driver.wait(1);
        let used = driver.wait(0);
        let buffer = buffers[used.head as usize];
        assert!(is_same(&driver.bytes(buffer.0, used.length as usize), &sent), "round {round}");
        let (address, length) = buffer;
        let descriptor = Descriptor { address, length, flags: WRITE, next: 0 };
        driver.write_descriptor(0, u16::try_from(used.head).unwrap(), descriptor);
        driver.publish(0, u16::try_from(used.head).unwrap());
        driver.kick(0);
    }
    let one = bench.board.park();
    bench.board.run(one.clone()).unwrap();
    assert_eq!(bench.board.park(), one);
}

#[test]
fn the_device_works_after_a_reset_at_any_moment() {
    let (bench, _lab, ends) = bench(2, Offloads::ALL);
    ends[0].set_nonblocking(true).unwrap();
    for round in 0..25_u8 {
        let mut driver = driver(&bench, MRG_RXBUF | CTRL_VQ | MQ | GUEST_CSUM, 5);
        let buffers = offer(&mut driver, 20, 300);
        // Frames in flight in both directions.
        for _ in 0..20 {
            let at = driver.allocate(80);
            driver.bench.memory.write(at, &frame(round, 60)).unwrap();
            driver.offer(1, &[(at, 72, false)]);
        }
        driver.kick(1);
        for _ in 0..2 {
            ends[0].send(&frame(round, 500)).unwrap();
        }
        std::thread::sleep(Duration::from_micros(u64::from(round) * 50));
        driver.set_status(0);
        assert_eq!(driver.status(), 0);
        let index = |driver: &Driver<'_>| [0, 1].map(|it| driver.bytes(driver.queues[it].at[2], 4));
        let before = (index(&driver), driver.bytes(buffers[0].0, 300));
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!((index(&driver), driver.bytes(buffers[0].0, 300)), before);
        while ends[0].recv(&mut [0; 1000]).is_ok() {}
    }
    let mut driver = driver(&bench, MRG_RXBUF, 2);
    let buffers = offer(&mut driver, 60, 1000);
    // Frames from before the reset come first.
    let mut frames = 0;
    loop {
        ends[0].send(&frame(99, 77)).ok();
        frames += 1;
        if is_same(&content(&mut driver, &buffers).0, &frame(99, 77)) {
            break;
        }
        assert!(frames < 60, "an endless run of old frames");
    }
}

#[test]
fn invalid_buffers_and_frames_are_returned_empty() {
    let (bench, _lab, ends) = bench(1, Offloads::default());
    let mut driver = driver(&bench, MRG_RXBUF, 2);
    let at = driver.allocate(4000);
    driver.offer(0, &[(at, 11, true)]);
    driver.offer(0, &[(at, 100, false)]);
    driver.offer(0, &[(4 << 20, 2000, true)]);
    driver.offer(0, &[(at, 2000, true)]);
    driver.kick(0);
    ends[0].send(&frame(1, 60)).unwrap();
    // The valid buffer is returned together with the one outside of memory.
    assert_eq!([(); 4].map(|()| driver.wait(0).length), [0; 4]);
    driver.offer(0, &[(at, 2000, true)]);
    driver.kick(0);
    ends[0].send(&frame(2, 60)).unwrap();
    assert_eq!(driver.wait(0).length, 72);
    for pieces in
        [&[(at, 0, false)][..], &[(at, 11, false)], &[(at, 50, true)], &[(9 << 20, 90, false)]]
    {
        driver.offer(1, pieces);
        driver.kick(1);
        assert_eq!(driver.wait(1).length, 0, "{pieces:?}");
    }
    let crumbs: Vec<_> = (0..50).map(|piece| (at + piece, 1, false)).collect();
    driver.offer(1, &crumbs);
    driver.kick(1);
    assert_eq!(driver.wait(1).length, 0);
    assert_eq!(ends[0].recv(&mut [0; 100]).unwrap(), 50);
    assert_eq!(driver.status() & 64, 0);
}

#[test]
fn a_derived_mac_address_is_stable() {
    let on = |to: &str| {
        let config = Config { to: Network::try_from(to.to_owned()).unwrap(), ..Config::default() };
        let backend = net::open(&Network::None, Options { pairs: 1, mtu: None }).unwrap();
        Net::new(&Config { pairs: 1, ..config }, &backend, Vec::new()).unwrap()
    };
    let (one, mut other) = (on("tap:vm0"), on("tap:vm1"));
    assert_eq!(one.nic.mac.to_string(), "02:4e:a3:44:0f:9f");
    assert_ne!(one.nic.mac, other.nic.mac);
    // A guest that goes on there keeps its address.
    other.restore(one.save()).unwrap();
    assert_eq!(other.config()[..6], one.nic.mac.0);
    assert_eq!(other.nic.filter().1, one.nic.mac.0);
}

/// A driver of a controller on `vm0` with these features, and its receive buffers.
fn on_tap(bench: &Bench, features: u64) -> (Driver<'_>, Vec<(u64, u32)>) {
    let mut driver = Driver::find(bench, AT);
    assert!(driver.negotiate(features | EVENT_IDX | CTRL_VQ));
    (0..3).for_each(|queue| driver.enable(queue, 64));
    driver.start();
    assert_eq!(driver.device(10), 1500_u16.to_le_bytes());
    // The host notices a plugged cable a moment later.
    wait("the carrier", || ip("-o link show vm0").contains(" state UP "));
    let buffers = offer(&mut driver, 60, 3000);
    (driver, buffers)
}

fn tap_bench(offloads: bool, vhost: Mode) -> Bench {
    let mut bench = Bench::new(8 << 20);
    let to = Network::try_from("tap:vm0".to_owned()).unwrap();
    let slot = Some(AT);
    let config = Config { to, pairs: 1, offloads, vhost, slot, ..Config::default() };
    bench.board.add("net", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn host() -> UdpSocket {
    let socket = UdpSocket::bind("10.9.0.1:7").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket
}

/// Sends one datagram from the host to the guest. Returns its frame.
fn to_guest(
    driver: &mut Driver<'_>,
    buffers: &[(u64, u32)],
    socket: &UdpSocket,
    byte: u8,
) -> Vec<u8> {
    socket.send_to(&[byte; 1400], "10.9.0.2:9").unwrap();
    loop {
        let frame = content(driver, buffers).0;
        // The host also sends neighbor discovery frames.
        if frame.len() == HEADER_LENGTH + 42 + 1400 {
            assert_eq!(frame[HEADER_LENGTH + 42..], [byte; 1400]);
            return frame;
        }
    }
}

/// Offers one datagram for sending.
fn send(driver: &mut Driver<'_>, byte: u8) {
    let sent = packet(&[byte; 999], None);
    let at = driver.allocate(sent.len() as u64);
    driver.bench.memory.write(at, &sent).unwrap();
    driver.offer(1, &[(at, u32::try_from(sent.len()).unwrap(), false)]);
    driver.kick(1);
}

/// Sends one datagram from the guest to the host.
fn to_host(driver: &mut Driver<'_>, socket: &UdpSocket, byte: u8) {
    send(driver, byte);
    let mut got = [0; 2000];
    assert_eq!(socket.recv(&mut got).unwrap(), 999);
    assert_eq!(got[..999], [byte; 999]);
    driver.wait(1);
}

/// Values of `vhost` that this host supports.
fn choices() -> &'static [Mode] {
    if std::path::Path::new("/dev/vhost-net").exists() {
        return &[Mode::Off, Mode::On];
    }
    let test = std::thread::current().name().unwrap_or_default().to_owned();
    skip::not_run_in_part(&format!("{test} through vhost-net"), "there is no /dev/vhost-net");
    &[Mode::Off]
}

#[test]
fn a_tap_carries_datagrams_both_ways_with_and_without_offloads() {
    in_namespace(skip::not_run, || {
        ip("tuntap add vm0 mode tap multi_queue");
        set_addresses();
        for vhost in choices() {
            for (offloads, merge) in [(true, MRG_RXBUF), (true, 0), (false, MRG_RXBUF)] {
                let bench = tap_bench(offloads, *vhost);
                let agreed = if offloads { CSUM | GUEST_CSUM | GUEST_TSO4 } else { 0 };
                let (mut driver, buffers) = on_tap(&bench, merge | agreed);
                let socket = host();
                for round in 0..20_u8 {
                    let frame = to_guest(&mut driver, &buffers, &socket, round);
                    let partial = u8::from(offloads);
                    assert_eq!(frame[0] & 1, partial, "the checksum is left to the receiver");
                    to_host(&mut driver, &socket, round);
                }
            }
        }
    });
}

#[test]
fn vhost_runs_the_rings_while_allowed_and_returns_them() {
    in_namespace(skip::not_run, || {
        if choices().len() == 1 {
            return;
        }
        ip("tuntap add vm0 mode tap multi_queue");
        set_addresses();
        let bench = tap_bench(true, Mode::On);
        let link = bench.board.shared.links.find("net").unwrap();
        let (mut driver, buffers) = on_tap(&bench, MRG_RXBUF | CSUM | GUEST_CSUM);
        let socket = host();
        let wait_for_kernel = |count| wait("the rings", || link.kernel_pairs() == count);
        let master = |on: u8| bench.write(Kind::Config, AT.config() + 4, &[2 | on << 2, 0, 0, 0]);
        for round in 0..5_u8 {
            wait_for_kernel(1);
            to_guest(&mut driver, &buffers, &socket, round);
            to_host(&mut driver, &socket, round);
            // Frames are lost in both directions while the cable is unplugged.
            link.set_plugged(false);
            wait_for_kernel(0);
            send(&mut driver, 0xee);
            driver.wait(1);
            socket.send_to(&[0xdd; 1400], "10.9.0.2:9").unwrap();
            link.set_plugged(true);
            wait_for_kernel(1);
            to_host(&mut driver, &socket, round + 100);
            to_guest(&mut driver, &buffers, &socket, round + 100);
            master(0);
            wait_for_kernel(0);
            master(1);
            wait_for_kernel(1);
            let saved = bench.board.park();
            assert_eq!(link.kernel_pairs(), 0);
            bench.board.run(saved).unwrap();
        }
        wait_for_kernel(1);
        // An invalid descriptor index breaks the device, whether the kernel or the thread reads
        // it.
        driver.publish(1, 999);
        driver.kick(1);
        wait("the device to break", || driver.status() & 64 != 0);
        assert_eq!(link.kernel_pairs(), 0);
        driver.set_status(0);
        assert_eq!(driver.status(), 0);
        let (mut driver, buffers) = on_tap(&bench, MRG_RXBUF);
        wait_for_kernel(1);
        to_guest(&mut driver, &buffers, &socket, 7);
        driver.set_status(0);
        assert_eq!(link.kernel_pairs(), 0, "nothing is in flight after a reset");
    });
}

#[test]
fn vhost_is_for_taps_only() {
    let refused = |choice, to: &str| {
        let to = Network::try_from(to.to_owned()).unwrap();
        let config = Config { to, pairs: 1, vhost: choice, ..Config::default() };
        let mut bench = Bench::new(1 << 20);
        bench.board.add("net", |grants| config.build(grants)).err().map(|it| format!("{it:#}"))
    };
    assert!(refused(Mode::On, "none").unwrap().contains("not a tap"));
    assert_eq!(refused(Mode::Auto, "none"), None);
}
