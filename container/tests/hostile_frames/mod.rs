//! A hostile guest of the user-mode network: it sends any frames, and any segments of a connection.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, Instant};

use container::net::dns::LocalNames;
use container::net::relay::Relay;
use container::net::user::lan::{Lan, PodAddresses};
use container::net::user::packet::{ETHERNET, Ends, ICMP, ICMPV6, Payload, TCP, UDP, write_frame};
use container::net::user::quota::Limits;
use container::net::user::router::Router;
use container::net::user::segment::{ACK, FIN, PSH, RST, SYN, Segment, Seq};
use container::net::user::tcp::buffer::Budget;
use container::net::user::tcp::{Parameters, State, Tcp};
use container::settings::Settings;
use host::mac::Mac;
use tokio::runtime::Builder;
use tokio::task::LocalSet;

/// The bytes of a run, followed by zeros.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    fn take(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

fn lan() -> Lan {
    let v6 = Some("2001:db8:77::5".parse().expect("an address"));
    let pod = PodAddresses { v4: Some(Ipv4Addr::new(10, 0, 2, 15)), gateway: None, v6 };
    Lan::new(&Settings::defaults().network, &pod).expect("addresses")
}

/// The minimum of file descriptors for a network, so that all quotas are exhausted quickly.
const FILES: usize = 32;

/// Sends frames to a network: valid ones with single bytes changed, and any bytes, in bursts
/// without a pause, while clients connect from outside. All outside hosts are the loopback of this
/// host, so nothing leaves it. There must never be more tasks than slots.
pub(crate) fn frames(bytes: &[u8]) {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let lan = lan();
    let local = LocalNames {
        gateway: lan.gateway,
        guest: lan.guest,
        default_gateway: None,
        host: "guest".into(),
    };
    let relay = Relay::new(local, Path::new("/nowhere"));
    let router = Router::new(lan, relay, None, FILES);
    let network = &router.network;
    let world = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = world.local_addr().expect("it has one");
    network.diverted.set(Some(address.port()));
    LocalSet::new().block_on(&runtime, async {
        network.plug();
        let mut bytes = Bytes(bytes);
        while !bytes.0.is_empty() {
            match bytes.byte() {
                0..=31 => tokio::task::yield_now().await,
                32 => come(&router, bytes.byte()).await,
                33 => {
                    router.unplug();
                    network.plug();
                }
                34 => drop(world.set_nonblocking(true).and_then(|()| world.accept())),
                _ => router.handle(&frame(&mut bytes, &network.lan)),
            }
            let tasks = Rc::strong_count(network) - 1;
            assert!(tasks <= Limits::of(FILES).sum(), "{tasks} tasks");
            if !network.link.has_room() {
                router.unplug();
                network.plug();
            }
        }
        router.unplug();
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    });
}

/// A client connects from one of some outside hosts.
async fn come(router: &Router, number: u8) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let client = listener.local_addr().and_then(TcpStream::connect).expect("it listens");
    let (server, _) = listener.accept().expect("a client");
    server.set_nonblocking(true).expect("it is a socket");
    let server = tokio::net::TcpStream::from_std(server).expect("a runtime");
    let from = match number % 4 {
        0 => Ipv4Addr::LOCALHOST.into(),
        1 => IpAddr::V6("2001:db8:5::1".parse().expect("an address")),
        _ => Ipv4Addr::new(203, 0, 113, number % 8).into(),
    };
    let from = SocketAddr::new(from, 2000 + u16::from(number / 4));
    router.connections.accept(&router.network, server, from, 3389).await;
    drop(client);
}

/// Addresses of a packet, mostly from the guest: to the gateway, to nowhere, or to other hosts.
fn addresses(bytes: &mut Bytes<'_>, lan: &Lan, kind: u8) -> (IpAddr, IpAddr) {
    let v6 = lan.v6.expect("there is one");
    let host = |low| Ipv4Addr::new(192, 0, 2, low);
    let to = bytes.byte();
    let v4_to = [lan.gateway, Ipv4Addr::BROADCAST, Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED];
    if kind & 0x40 == 0 {
        let from = if kind & 0x20 == 0 { lan.guest } else { Ipv4Addr::UNSPECIFIED };
        (from.into(), v4_to.get(usize::from(to % 12)).copied().unwrap_or(host(to % 64)).into())
    } else {
        let guest = (u128::from(v6.prefix) | 0x77).into();
        let all = "ff02::2".parse().expect("an address");
        let v6_to = [v6.gateway, all, "::1".parse().expect("an address"), v6.prefix];
        let host =
            (u128::from(v6.prefix) >> 64 << 64 | 0xff_u128 << 64 | u128::from(to % 64)).into();
        (IpAddr::V6(guest), v6_to.get(usize::from(to % 8)).copied().unwrap_or(host).into())
    }
}

/// An ICMP header: often of an echo, or of a question for neighbors or routers.
fn icmp(bytes: &mut Bytes<'_>) -> [u8; 8] {
    let kinds = [8, 128, 133, 135, 136, bytes.byte()];
    let kind = kinds[usize::from(bytes.byte()) % kinds.len()];
    [kind, 0, 0, 0, bytes.byte(), 0, 0, 1]
}

fn frame(bytes: &mut Bytes<'_>, lan: &Lan) -> Vec<u8> {
    let kind = bytes.byte();
    let mut frame = Vec::new();
    let guest = Mac([2, 0, 0, 0, 0, 0x77]);
    let cards = (guest, if kind & 0x80 == 0 { lan.mac } else { Mac::BROADCAST });
    let addresses = addresses(bytes, lan, kind);
    let ends = Ends { cards, addresses };
    let protocol = [TCP, UDP, ICMP, ICMPV6][usize::from(kind & 3)];
    let (header, checksum) = match kind & 0x1c {
        0 => {
            write_frame(&mut frame, cards, bytes.word(), bytes.take(64));
            return frame.split_off(4);
        }
        4 => {
            let arp = [0, 1, 8, 0, 6, 4, 0, bytes.byte() % 3];
            let rest = bytes.take(20);
            write_frame(&mut frame, cards, 0x0806, &[&arp, rest].concat());
            return frame.split_off(4);
        }
        _ => match protocol {
            TCP => {
                let port = bytes.byte();
                let flags = if port & 0xc != 0 { SYN } else { bytes.byte() };
                let ports =
                    (4000 + u16::from(port & 3), [53, 53, 80, 3389][usize::from(port >> 6)]);
                let mss = (flags & SYN != 0).then(|| bytes.word());
                let segment = Segment { ports, flags, mss, window: 999, ..Segment::default() };
                (segment.header().bytes().to_vec(), 16)
            }
            UDP => {
                let from = bytes.byte() % 64;
                (vec![0, from, 0, [53, 67, 7][usize::from(bytes.byte() % 3)], 0, 0, 0, 0], 6)
            }
            _ => (icmp(bytes).to_vec(), 2),
        },
    };
    let length = usize::from(bytes.byte());
    let mut data = bytes.take(length);
    let mut header = header;
    if protocol == UDP {
        let length = u16::try_from(8 + data.len()).expect("it is short");
        header[4..6].copy_from_slice(&length.to_be_bytes());
    }
    if kind & 0x10 != 0 {
        // Fragmented.
        let mtu = 48 + usize::from(bytes.byte());
        data = bytes.take(512);
        let payload = Payload { protocol, header: &header, checksum, data };
        payload.write_fragments(&mut frame, &ends, mtu, bytes.word());
    } else {
        Payload { protocol, header: &header, checksum, data }.write(&mut frame, &ends);
    }
    let length = usize::try_from(u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]));
    frame.truncate(4 + length.expect("it is short"));
    let mut frame = frame.split_off(4);
    // Often with an error.
    if kind & 8 != 0 {
        let at = ETHERNET + usize::from(bytes.byte()) % (frame.len() - ETHERNET);
        frame[at] = bytes.byte();
    }
    frame
}

/// The byte of a stream at an offset.
fn letter(at: u32) -> u8 {
    at.wrapping_mul(0x9e37).to_be_bytes()[1]
}

/// A connection with any segments. The output must be the bytes that the guest sent, in order, and
/// no more may be buffered than there is room for.
pub(crate) fn segments(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let (mut now, first) = (Instant::now(), Seq(u32::MAX - 1000));
    let (mss, budget) = (1400, Budget::default());
    let start = Parameters { ports: (80, 4000), first, mss, budget, now };
    let guest = Seq(u32::MAX - 300);
    let asks = bytes.byte() & 1 != 0;
    let syn = Segment {
        seq: guest,
        flags: SYN,
        mss: Some(bytes.word()),
        scale: Some(bytes.byte()),
        ..Segment::default()
    };
    let mut tcp = if asks { Tcp::from_guest(&start, &syn) } else { Tcp::to_guest(&start) };
    tcp.connected();
    let (mut taken, mut put) = (0_u32, 0_u32);
    let mut numbers = Numbers { initial: guest, next: guest.plus(1), received: first };
    while !bytes.0.is_empty() && tcp.state != State::Closed {
        match bytes.byte() % 8 {
            0 => {
                now += Duration::from_millis(u64::from(bytes.word()));
                tcp.tick(now);
            }
            1 => {
                let room = tcp.space().min(usize::from(bytes.word()));
                let fresh: Vec<u8> = (0..room)
                    .map(|_| {
                        put = put.wrapping_add(1);
                        letter(put)
                    })
                    .collect();
                tcp.fill(room, |buffer| buffer.extend(fresh));
            }
            2 => {
                let data = tcp.data();
                assert!(data.len() <= 1 << 20, "{} bytes wait", data.len());
                let count = data.len().min(usize::from(bytes.word()));
                for byte in &data[..count] {
                    assert_eq!(*byte, letter(taken), "byte {taken}");
                    taken = taken.wrapping_add(1);
                }
                tcp.take(count);
            }
            3 if bytes.byte() == 0 => tcp.finish(),
            _ => handle(&mut tcp, &mut bytes, numbers, now),
        }
        let full = bytes.byte() == 7;
        tcp.emit(now, &mut |segment| {
            assert!(segment.data.len() <= usize::from(mss));
            if segment.flags & ACK != 0 {
                numbers.next = segment.ack;
            }
            numbers.received = segment.seq.plus(segment.length());
            !full
        });
    }
}

/// Sequence numbers of the guest's end of a connection.
#[derive(Clone, Copy)]
struct Numbers {
    initial: Seq,
    /// The next one to send. The pod has acknowledged all before it.
    next: Seq,
    /// The next one to receive from the pod.
    received: Seq,
}

/// A segment, mostly valid.
fn handle(tcp: &mut Tcp, bytes: &mut Bytes<'_>, numbers: Numbers, now: Instant) {
    let near = |seq: Seq, by: u8| match by {
        0..=199 => seq,
        200..=229 => seq.plus(usize::from(by)),
        _ => Seq(seq.0.wrapping_sub(u32::from(by))),
    };
    let seq = near(numbers.next, bytes.byte());
    let ack = near(numbers.received, bytes.byte());
    let mut flags = ACK | PSH;
    let odd = bytes.byte();
    if odd > 230 {
        flags = [ACK | FIN, RST, RST | ACK, SYN, SYN | ACK, FIN, 0, 0xff][usize::from(odd % 8)];
    }
    // The start of the stream is announced only once.
    let seq = if flags & SYN == 0 { seq } else { numbers.initial };
    let offset = seq.0.wrapping_sub(numbers.initial.0).wrapping_sub(1);
    let length = u32::from(bytes.word() % 3000);
    let data: Vec<u8> = (0..length).map(|it| letter(offset.wrapping_add(it))).collect();
    let scale = Some(bytes.byte() % 15).filter(|_| flags & SYN != 0);
    // Data of a SYN are not part of the stream.
    let data = if flags & SYN == 0 { data } else { Vec::new() };
    let window = bytes.word();
    let (ports, mss) = ((4000, 80), None);
    let segment = Segment { ports, seq, ack, flags, window, mss, scale, data: &data };
    tcp.handle(&segment, now);
}
