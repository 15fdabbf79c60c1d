//! Tests of `tap`.

use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::ram::GuestMemoryMmap;
use vm_memory::GuestAddress;

use super::super::inherited::{Inherited, inherit};
use super::super::{read_pieces, write_pieces};
use super::*;
use crate::testutil::tap::{GUEST, checksum, in_namespace, ip, packet, set_addresses};

const NAME: &str = "vm0";
const ONE: Options = Options { pairs: 1, mtu: None };

fn memory() -> Memory {
    Memory::new(Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()))
}

/// Buffers that split headers in odd places.
const TO: [Piece; 4] = [
    Piece { address: 0x1000, length: 3 },
    Piece { address: 0x3000, length: 40 },
    Piece { address: 0x2000, length: 1 },
    Piece { address: 0x1_0000, length: 70_000 },
];

/// The next IPv4 frame for the guest, with its header.
fn next(port: &mut dyn Port, memory: &Memory) -> Vec<u8> {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < Duration::from_secs(10), "no frame comes");
        let Ok(length) = port.receive(memory, &TO, &mut [0; 16]) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let mut frame = vec![0; length];
        assert_eq!(read_pieces(memory, &TO, 0, &mut frame), Ok(length));
        if frame[HEADER_LENGTH + 12..HEADER_LENGTH + 14] == [8, 0]
            && frame[HEADER_LENGTH + 23] == 17
        {
            return frame;
        }
    }
}

#[test]
fn frames_go_both_ways_with_the_negotiated_offloads() {
    in_namespace(skip::not_run, || {
        let tap = Tap::open(NAME, Options { pairs: 1, mtu: Some(1450) }).unwrap();
        set_addresses();
        assert_eq!(tap.link().mtu(), Some(1450));
        assert!(tap.offloads().tso4 && tap.mac().is_none());
        let memory = memory();
        let mut port = tap.ports().remove(0);
        let socket = UdpSocket::bind("10.9.0.1:7").unwrap();
        for (offloads, partial) in [(Offloads::default(), 0), (Offloads::ALL, 1)] {
            tap.set_offloads(offloads);
            socket.send_to(&[5; 999], "10.9.0.2:9").unwrap();
            let frame = next(&mut *port, &memory);
            assert_eq!((frame.len(), frame[0] & 1), (HEADER_LENGTH + 14 + 28 + 999, partial));
            assert_eq!((&frame[12..18], &frame[54..]), (&GUEST[..], &[5; 999][..]));
            let udp = &frame[HEADER_LENGTH + 34..];
            let pseudo =
                [&frame[HEADER_LENGTH + 26..HEADER_LENGTH + 34], &[0, 17], &udp[4..6]].concat();
            assert_eq!(
                checksum(&[&pseudo, udp]) == 0xffff,
                partial == 0,
                "a checksum that is done"
            );
        }
        let (sent, mut got) = (packet(b"to the host", None), [0; 2000]);
        write_pieces(&memory, &TO, 0, &sent).unwrap();
        let from = cut(sent.len());
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(port.send(&memory, &from), Ok(()));
        let count = socket.recv(&mut got).unwrap();
        assert_eq!(&got[..count], b"to the host");
        if tap.offloads().uso {
            let sent = packet(&[6; 2500], Some(1000));
            write_pieces(&memory, &TO, 0, &sent).unwrap();
            assert_eq!(port.send(&memory, &cut(sent.len())), Ok(()));
            let counts = [(); 3].map(|()| socket.recv(&mut got).unwrap());
            assert_eq!(counts, [1000, 1000, 500]);
        }
    });
}

/// The pieces of the first `length` bytes of `TO`.
fn cut(length: usize) -> Vec<Piece> {
    let mut left = length;
    let mut cut = TO.to_vec();
    for piece in &mut cut {
        let now = left.min(piece.length as usize);
        left -= now;
        piece.length = u32::try_from(now).unwrap();
    }
    cut
}

#[test]
fn a_frame_larger_than_the_guests_buffers_is_held() {
    in_namespace(skip::not_run, || {
        let tap = Tap::open(NAME, ONE).unwrap();
        set_addresses();
        let (memory, mut port) = (memory(), tap.ports().remove(0));
        let socket = UdpSocket::bind("10.9.0.1:7").unwrap();
        let to = [Piece { address: 0x1000, length: 60 }];
        let mut rest = vec![0; MAX_FRAME];
        for outside in
            [Piece { address: 1 << 20, length: 9 }, Piece { address: u64::MAX, length: 9 }]
        {
            let refused = port.receive(&memory, &[TO[0], outside], &mut rest);
            assert_eq!(refused, Err(TransferError::Refused));
        }
        socket.send_to(&[5; 999], "10.9.0.2:9").unwrap();
        let length = loop {
            match port.receive(&memory, &to, &mut rest) {
                Ok(length) if length > 1000 => break length,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!((length, &rest[..length - 60]), (HEADER_LENGTH + 42 + 999, &[5; 993][..]));
    });
}

#[test]
fn invalid_frames_are_refused_and_frames_the_kernel_rejects_lost() {
    in_namespace(skip::not_run, || {
        let tap = Tap::open(NAME, ONE).unwrap();
        let (memory, mut port) = (memory(), tap.ports().remove(0));
        for length in [0, 11, 12, 25, HEADER_LENGTH + MAX_FRAME + 1, 70_044] {
            assert_eq!(port.send(&memory, &cut(length)), Err(TransferError::Refused), "{length}");
        }
        let crumbs = vec![Piece { address: 0, length: 1 }; 1500];
        assert_eq!(port.send(&memory, &crumbs), Err(TransferError::Refused));
        let outside = [TO[1], Piece { address: (1 << 20) - 4, length: 5 }];
        assert_eq!(port.send(&memory, &outside), Err(TransferError::Refused));
        write_pieces(&memory, &TO, 0, &[0xff; 200]).unwrap();
        assert_eq!(port.send(&memory, &cut(200)), Ok(()), "a header of nonsense");
    });
}

#[test]
fn detached_queues_are_silent_and_a_removed_interface_is_down() {
    in_namespace(skip::not_run, || {
        let tap = Tap::open(NAME, Options { pairs: 2, mtu: None }).unwrap();
        set_addresses();
        let (memory, mut ports) = (memory(), tap.ports());
        tap.attach(0, false);
        assert!(ports[0].wait().fd.is_none());
        assert_eq!(ports[0].receive(&memory, &TO, &mut []), Err(TransferError::WouldBlock));
        assert_eq!(ports[0].send(&memory, &cut(100)), Ok(()));
        for port in 0..20 {
            let socket = UdpSocket::bind("10.9.0.1:0").unwrap();
            socket.send_to(&[port; 20], "10.9.0.2:9").unwrap();
            assert_eq!(next(&mut *ports[1], &memory)[54..], [port; 20]);
        }
        tap.attach(0, true);
        tap.attach(1, false);
        UdpSocket::bind("10.9.0.1:0").unwrap().send_to(&[1; 20], "10.9.0.2:9").unwrap();
        assert_eq!(next(&mut *ports[0], &memory)[54..], [1; 20]);
        assert!(tap.link().is_up());
        ip("link del vm0");
        assert_eq!(ports[0].receive(&memory, &TO, &mut []), Err(TransferError::WouldBlock));
        assert!(!tap.link().is_up() && ports[0].wait().fd.is_none());
    });
}

#[test]
fn an_existing_interface_is_used_unchanged_and_kept() {
    in_namespace(skip::not_run, || {
        let refused = |options: Options| format!("{:#}", Tap::open(NAME, options).err().unwrap());
        ip("tuntap add vm0 mode tap");
        let two = Options { pairs: 2, mtu: None };
        assert!(refused(two).contains("`multi_queue`"), "{}", refused(two));
        let first = Tap::open(NAME, Options { pairs: 1, mtu: Some(9000) }).unwrap();
        assert!(refused(ONE).contains("in use"), "{}", refused(ONE));
        assert_eq!(first.link().mtu(), Some(9000), "the requested MTU");
        drop(first);
        ip("link set vm0 mtu 1400");
        assert_eq!(Tap::open(NAME, ONE).unwrap().link().mtu(), Some(1400));
        ip("link del vm0");
        ip("tuntap add vm0 mode tap multi_queue");
        assert_eq!(Tap::open(NAME, ONE).unwrap().ports().len(), 1);
        assert_eq!(Tap::open(NAME, two).unwrap().ports().len(), 2);
        ip("link del vm0");
        ip("tuntap add vm0 mode tun");
        assert!(refused(ONE).contains("not a tap"), "{}", refused(ONE));
    });
}

#[test]
fn a_macvtap_is_opened_by_path_and_requires_its_mac_address() {
    const TEST: &str = "a_macvtap_is_opened_by_path_and_requires_its_mac_address";
    in_namespace(skip::not_run, || {
        ip("link add up0 type veth peer name up1");
        ip("link set up0 up");
        let made = "link add link up0 name vm0 address 02:00:00:00:00:02 type macvtap mode bridge";
        let made = Command::new("ip").args(made.split(' ')).output().unwrap();
        if !made.status.success() {
            skip::not_run(TEST, "the kernel has none");
            return;
        }
        ip("link set vm0 up");
        let index = ip("-o link show vm0");
        let device = format!("/dev/tap{}", index.split(':').next().unwrap());
        if !Path::new(&device).exists() {
            skip::not_run(TEST, &format!("there is no {device}"));
            return;
        }
        let tap = Tap::open_device(Path::new(&device), Options { pairs: 2, mtu: None }).unwrap();
        assert_eq!((tap.mac(), tap.ports().len()), (Some(Mac(GUEST)), 2));
    });
}

#[test]
fn inherited_descriptors_are_identified_and_others_refused() {
    let refused = |fd: &dyn AsFd| match inherit(&[fd.as_fd().as_raw_fd()]) {
        Err(error) => format!("{error:#}"),
        Ok(_) => panic!("it is taken"),
    };
    let file = tempfile::tempfile().unwrap();
    assert!(refused(&file).contains("neither"));
    let datagrams = std::os::unix::net::UnixDatagram::unbound().unwrap();
    assert!(refused(&datagrams).contains("not a stream socket"));
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let alone = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    assert!(refused(&alone.unwrap()).contains("not connected"));
    let ends = UnixStream::pair().unwrap();
    let fd = ends.0.as_raw_fd();
    assert!(matches!(inherit(&[fd]), Ok(Inherited::Stream(_))));
    assert!(inherit(&[fd, fd]).is_err());
    assert!(inherit(&[1 << 20]).is_err());
    let Ok(Inherited::Taps(null)) = inherit(&[File::open("/dev/null").unwrap().as_raw_fd()]) else {
        panic!("a character device may be a tap")
    };
    assert!(Tap::from_queues(null, ONE).is_err());
    in_namespace(skip::not_run, || {
        let queue = OwnedFd::from(character(Path::new("/dev/net/tun")).unwrap());
        let fresh = inherit(&[queue.as_raw_fd()]).unwrap();
        let Inherited::Taps(fresh) = fresh else { panic!("it is no socket") };
        assert!(Tap::from_queues(fresh, ONE).is_err(), "without an interface");
        attach(&queue, NAME, false).unwrap();
        let Ok(Inherited::Taps(tap)) = inherit(&[queue.as_raw_fd()]) else { panic!() };
        assert!(Tap::from_queues(tap, ONE).unwrap().offloads().checksum);
    });
}
