//! Tests of `passt`.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

use crate::ram::GuestMemoryMmap;
use vm_memory::GuestAddress;

use super::*;

const OPTIONS: Options = Options { pairs: 1, mtu: None };

fn memory() -> Memory {
    Memory::new(Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()))
}

fn piece(address: u64, length: u32) -> Piece {
    Piece { address, length }
}

/// A port, and its peer's end.
fn pair() -> (Box<dyn Port>, Arc<Link>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let backend = Passt::from_stream(ours, OPTIONS).unwrap();
    (backend.ports().remove(0), backend.link().clone(), theirs)
}

fn framed(frame: &[u8]) -> Vec<u8> {
    [&u32::try_from(frame.len()).unwrap().to_be_bytes(), frame].concat()
}

#[test]
fn frames_arrive_behind_an_empty_header_for_any_chunking() {
    let (mut port, _, mut peer) = pair();
    let memory = memory();
    memory.write(0x1000, &[0xff; 64]).unwrap();
    let frame: Vec<u8> = (0..60).collect();
    let two = [framed(&frame), framed(&[7; 20])].concat();
    let to = [piece(0x1000, 10), piece(0x2000, 2), piece(0x3000, 30)];
    let mut rest = [0; 100];
    for part in two[..70].chunks(9) {
        assert_eq!(port.receive(&memory, &to, &mut rest), Err(TransferError::WouldBlock));
        peer.write_all(part).unwrap();
    }
    assert_eq!(port.receive(&memory, &to, &mut rest), Ok(72));
    assert_eq!(port.receive(&memory, &to, &mut rest), Err(TransferError::WouldBlock));
    let mut bytes = [1; 72];
    assert_eq!(read_pieces(&memory, &to, 0, &mut bytes), Ok(42));
    bytes[42..].copy_from_slice(&rest[..30]);
    assert_eq!((&bytes[..12], &bytes[12..]), (&[0; 12][..], &frame[..]));
    peer.write_all(&two[70..]).unwrap();
    assert_eq!(port.receive(&memory, &to, &mut rest), Ok(32));
    assert_eq!(
        port.receive(&memory, &[piece(u64::MAX, 99)], &mut rest),
        Err(TransferError::WouldBlock)
    );
    peer.write_all(&framed(&[7; 20])).unwrap();
    assert_eq!(
        port.receive(&memory, &[piece(u64::MAX, 99)], &mut rest),
        Err(TransferError::Refused)
    );
}

#[test]
fn a_frame_is_sent_without_its_header_and_offloads_are_refused() {
    let (mut port, _, mut peer) = pair();
    let memory = memory();
    let from = [piece(0x1000, 5), piece(0x2000, 17), piece(0x3000, 20)];
    write_pieces(&memory, &from, 0, &[0; 12]).unwrap();
    write_pieces(&memory, &from, 12, &[3; 30]).unwrap();
    assert_eq!(port.send(&memory, &from), Ok(()));
    let mut got = [0; 34];
    peer.read_exact(&mut got).unwrap();
    assert_eq!(got[..], framed(&[3; 30]));
    for (at, value) in [(0, 1), (1, 1)] {
        write_pieces(&memory, &from, at, &[value]).unwrap();
        assert_eq!(port.send(&memory, &from), Err(TransferError::Refused));
        write_pieces(&memory, &from, at, &[0]).unwrap();
    }
    for bad in [&from[..1], &from[..2], &[], &[piece(0, 12), piece(0, 80000)]] {
        assert_eq!(port.send(&memory, bad), Err(TransferError::Refused), "{bad:?}");
    }
    let outside = [piece(0x1000, 12), piece(1 << 20, 60)];
    assert_eq!(port.send(&memory, &outside), Err(TransferError::Refused));
    // The maximum number of pieces of a vector, and more.
    let crumbs = |count: usize| [vec![piece(0x1000, 12)], vec![piece(0x2000, 1); count]].concat();
    assert_eq!(port.send(&memory, &crumbs(1021)), Ok(()));
    assert_eq!(port.send(&memory, &crumbs(1500)), Err(TransferError::Refused));
}

#[test]
fn a_stalled_peer_loses_only_whole_frames_after_a_second() {
    let (mut port, link, mut peer) = pair();
    let memory = memory();
    let from = [piece(0x1000, 12), piece(0x2000, 60_000)];
    memory.write(0x2000, &[9; 60_000]).unwrap();
    let mut sent = 0;
    while port.send(&memory, &from) == Ok(()) {
        sent += 1;
        assert!(sent < 1000, "the socket is never full");
    }
    let wait = port.wait();
    assert!(wait.full && wait.due.is_some());
    std::thread::sleep(SEND_TIMEOUT + Duration::from_millis(20));
    assert_eq!(port.send(&memory, &from), Ok(()), "lost");
    assert!(port.wait().due.is_none(), "nothing to wake up for");
    let mut frame = vec![0; 60_004];
    for number in 0..sent {
        peer.read_exact(&mut frame).unwrap();
        assert_eq!(frame, framed(&[9; 60_000]), "frame {number}");
        port.wait();
    }
    assert_eq!(port.send(&memory, &from), Ok(()));
    peer.read_exact(&mut frame).unwrap();
    assert!(link.is_up() && !port.wait().full);
}

#[test]
fn an_invalid_frame_length_ends_the_connection() {
    for bad in [0_u32, 13, 65554, u32::MAX] {
        let (mut port, link, mut peer) = pair();
        peer.write_all(&bad.to_be_bytes()).unwrap();
        let memory = memory();
        assert_eq!(port.receive(&memory, &[], &mut []), Err(TransferError::WouldBlock));
        assert!(!link.is_up(), "{bad}");
        assert_eq!(peer.read(&mut [0]).unwrap(), 0);
        let wait = port.wait();
        assert!(wait.fd.is_none() && wait.due.is_none(), "the inherited socket is gone");
        assert_eq!(port.send(&memory, &[piece(0, 12), piece(0, 60)]), Ok(()));
    }
}

#[test]
fn a_restarted_peer_is_reconnected_with_a_clean_stream() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("passt");
    let memory = memory();
    let backend = Passt::new(&path, OPTIONS).unwrap();
    let mut port = backend.ports().remove(0);
    assert!(!backend.link().is_up());
    for round in 0..2 {
        let listener = UnixListener::bind(&path).unwrap();
        let start = Instant::now();
        while !backend.link().is_up() {
            let due = port.wait().due.unwrap_or_else(Instant::now);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            assert!(start.elapsed() < Duration::from_secs(10), "round {round}");
        }
        let mut peer = listener.accept().unwrap().0;
        peer.write_all(&framed(&[round; 14])).unwrap();
        peer.write_all(&[0, 0]).unwrap();
        let to = [piece(0x1000, 100)];
        assert_eq!(port.receive(&memory, &to, &mut []), Ok(26));
        drop((peer, listener));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(port.receive(&memory, &to, &mut []), Err(TransferError::WouldBlock));
        assert!(!backend.link().is_up());
    }
    assert!(Passt::new(&path, Options { pairs: 2, mtu: None }).is_err());
}

/// The Internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|it| u32::from(it[0]) << 8 | u32::from(it[1]));
    let sum: u32 = words.sum();
    !u16::try_from((sum & 0xffff) + (sum >> 16)).unwrap()
}

/// A DHCPDISCOVER (RFC 2131) of a machine that has just started, after a `virtio_net_hdr`.
fn discover() -> Vec<u8> {
    let mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
    let mut bootp = vec![1, 1, 6, 0, 0xca, 0xfe, 0xba, 0xbe];
    bootp.resize(28, 0);
    bootp.extend(mac);
    bootp.resize(236, 0);
    bootp.extend([99, 130, 83, 99, 53, 1, 1, 255]);
    bootp.resize(300, 0);
    let mut ip = [0x45, 0, 1, 72, 0, 0, 0, 0, 64, 17, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255];
    let sum = checksum(&ip).to_be_bytes();
    ip[10..12].copy_from_slice(&sum);
    let udp = [0, 68, 0, 67, 1, 52, 0, 0];
    [&[0; HEADER_LENGTH][..], &[0xff; 6], &mac, &[8, 0], &ip, &udp, &bootp].concat()
}

/// A passt process. Dropping this kills it.
struct Program(std::process::Child);

impl Drop for Program {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn passt(path: &Path) -> io::Result<Program> {
    let mut command = std::process::Command::new("passt");
    command.arg("--foreground").arg("--socket").arg(path);
    let quiet = || std::process::Stdio::null();
    Ok(Program(command.stdin(quiet()).stdout(quiet()).stderr(quiet()).spawn()?))
}

#[test]
fn passt_offers_an_address_again_after_a_restart() {
    use std::os::unix::fs::PermissionsExt;

    const TEST: &str = "passt_offers_an_address_again_after_a_restart";

    let folder = tempfile::tempdir().unwrap();
    // passt changes its user before it creates its socket.
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let path = folder.path().join("passt");
    let (memory, backend) = (memory(), Passt::new(&path, OPTIONS).unwrap());
    let mut port = backend.ports().remove(0);
    let (from, to) = ([piece(0x1000, 354)], [piece(0x4000, 2000)]);
    let sent = discover();
    assert_eq!(sent.len(), 354);
    memory.write(0x1000, &sent).unwrap();
    for round in 0..2 {
        let mut program = match passt(&path) {
            Ok(program) => program,
            Err(error) => return skip::not_run(TEST, &error.to_string()),
        };
        let start = Instant::now();
        let offer = loop {
            if let Some(status) = program.0.try_wait().unwrap() {
                assert_eq!(round, 0, "it ran a moment ago");
                return skip::not_run(TEST, &format!("it ends at once, with {status}"));
            }
            assert!(start.elapsed() < Duration::from_secs(20), "no offer in round {round}");
            port.wait();
            assert_eq!(port.send(&memory, &from), Ok(()));
            std::thread::sleep(Duration::from_millis(20));
            let Ok(length) = port.receive(&memory, &to, &mut []) else { continue };
            let mut frame = vec![0; length];
            memory.read(0x4000, &mut frame).unwrap();
            // From port 67, a reply to our number.
            if frame.len() > 300 && frame[HEADER_LENGTH + 34..HEADER_LENGTH + 38] == [0, 67, 0, 68]
            {
                break frame;
            }
        };
        assert_eq!(
            offer[HEADER_LENGTH + 42..HEADER_LENGTH + 50],
            [2, 1, 6, 0, 0xca, 0xfe, 0xba, 0xbe]
        );
        assert_ne!(offer[HEADER_LENGTH + 58..HEADER_LENGTH + 62], [0; 4], "yiaddr");
        drop(program);
        while port.receive(&memory, &to, &mut []).is_ok() {}
        assert!(!backend.link().is_up(), "it is gone");
    }
}
