//! Frames that arrive while the guest is asleep. Somebody watches until one comes for which it must
//! wake. The frame waits in the backend, so that the guest gets it first.
//!
//! A tap's kernel queue holds a few hundred frames, and the talk of a network would fill it. So the
//! kernel drops what is not for this guest, by a filter of classic BPF
//! (Documentation/networking/filter.rst of Linux): all that is sent to many receivers, but for the
//! questions for an address, which come before a connection. A frame to one receiver is for this
//! guest, whatever address its driver has set.
#![expect(unsafe_code, reason = "the ioctls of a tap's filter")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use libc::{sock_filter, sock_fprog};

pub trait Arrivals: Send + Sync {
    /// From now on, only frames arrive for which a guest must wake, or all again.
    fn filter(&self, on: bool) -> io::Result<()>;
    /// Each is readable while a frame waits.
    fn files(&self) -> io::Result<Vec<OwnedFd>>;
}

/// linux/if_tun.h.
const TUNATTACHFILTER: u64 = 0x4010_54d5;
const TUNDETACHFILTER: u64 = 0x4010_54d6;

/// Offsets in a frame: its type; the operation of an ARP packet, and the addresses of sender and
/// target; the next header of an IPv6 packet, its source, and the type of an ICMPv6 message.
const TYPE: u32 = 12;
const ARP_OPERATION: u32 = 20;
const ARP_SENDER: u32 = 28;
const ARP_TARGET: u32 = 38;
const NEXT_HEADER: u32 = 20;
const SOURCE: u32 = 22;
const ICMP_TYPE: u32 = 54;

const MULTICAST: u32 = 1;
const ARP: u32 = 0x806;
const ARP_REQUEST: u32 = 1;
const IPV6: u32 = 0x86dd;
const ICMPV6: u32 = 58;
const NEIGHBOR_SOLICITATION: u32 = 135;

/// linux/bpf_common.h.
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF: u16 = 0x28;
const LOAD_WORD: u16 = 0x20;
const TO_INDEX: u16 = 0x07;
const IF_EQUAL: u16 = 0x15;
const IF_INDEX: u16 = 0x1d;
const IF_BITS: u16 = 0x45;
const RETURN: u16 = 0x06;

/// An instruction, and how many to skip if its condition is true or false.
const fn step(code: u16, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// A frame that is too short for a load is dropped.
const PROGRAM: [sock_filter; 20] = [
    step(LOAD_BYTE, 0, 0, 0),
    step(IF_BITS, MULTICAST, 0, 16),
    step(LOAD_HALF, TYPE, 0, 0),
    step(IF_EQUAL, ARP, 0, 7),
    step(LOAD_HALF, ARP_OPERATION, 0, 0),
    step(IF_EQUAL, ARP_REQUEST, 0, 13),
    step(LOAD_WORD, ARP_SENDER, 0, 0),
    // A host that asks whether its own address is free, or shows it.
    step(IF_EQUAL, 0, 11, 0),
    step(TO_INDEX, 0, 0, 0),
    step(LOAD_WORD, ARP_TARGET, 0, 0),
    step(IF_INDEX, 0, 8, 7),
    step(IF_EQUAL, IPV6, 0, 7),
    step(LOAD_WORD, SOURCE, 0, 0),
    step(IF_EQUAL, 0, 5, 0),
    step(LOAD_BYTE, NEXT_HEADER, 0, 0),
    step(IF_EQUAL, ICMPV6, 0, 3),
    step(LOAD_BYTE, ICMP_TYPE, 0, 0),
    step(IF_EQUAL, NEIGHBOR_SOLICITATION, 0, 1),
    step(RETURN, u32::MAX, 0, 0),
    step(RETURN, 0, 0, 0),
];

/// Sets or removes the filter of a tap, with one of its queues.
pub(super) fn filter(queue: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    let mut program = PROGRAM;
    let length = u16::try_from(program.len()).map_err(io::Error::other)?;
    let argument = sock_fprog { len: length, filter: program.as_mut_ptr() };
    let code = if on { TUNATTACHFILTER } else { TUNDETACHFILTER };
    // SAFETY: the kernel reads the argument and the program, which live during the call.
    let result = unsafe { libc::ioctl(queue.as_raw_fd(), code, &raw const argument) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod test {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    /// A pair of sockets, of which the second receives by the filter.
    fn filtered() -> (UnixDatagram, UnixDatagram) {
        let (from, to) = UnixDatagram::pair().unwrap();
        let mut program = PROGRAM;
        let length = u16::try_from(program.len()).unwrap();
        let argument = sock_fprog { len: length, filter: program.as_mut_ptr() };
        // SAFETY: the kernel reads the argument and the program, which live during the call.
        let result = unsafe {
            libc::setsockopt(
                to.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_FILTER,
                (&raw const argument).cast(),
                libc::socklen_t::try_from(size_of_val(&argument)).unwrap(),
            )
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        to.set_nonblocking(true).unwrap();
        (from, to)
    }

    const EVERYBODY: [u8; 6] = [0xff; 6];
    const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 9];
    const SOLICITED: [u8; 6] = [0x33, 0x33, 0xff, 0, 0, 9];

    fn frame(to: [u8; 6], kind: u16, packet: &[u8]) -> Vec<u8> {
        [&to[..], &[2, 0, 0, 0, 0, 1], &kind.to_be_bytes(), packet].concat()
    }

    fn arp(operation: u8, sender: u8, target: u8) -> Vec<u8> {
        let mut packet = vec![0, 1, 8, 0, 6, 4, 0, operation];
        packet.extend([2, 0, 0, 0, 0, 1, 10, 0, 0, sender, 0, 0, 0, 0, 0, 0, 10, 0, 0, target]);
        packet
    }

    fn ipv6(next: u8, first: u8) -> Vec<u8> {
        let mut packet = vec![0x60, 0, 0, 0, 0, 8, next, 255];
        packet.resize(40, 0xfe);
        packet.extend([first, 0, 0, 0, 0, 0, 0, 0]);
        packet
    }

    #[test]
    fn only_frames_for_the_guest_and_questions_for_an_address_arrive() {
        let (from, to) = filtered();
        let arrives = |frame: &[u8]| {
            from.send(frame).unwrap();
            to.recv(&mut [0; 2048]).is_ok()
        };
        let (mut unnamed, mut unspecified) = (arp(1, 7, 9), ipv6(58, 135));
        unnamed[14..18].fill(0);
        unspecified[8..24].fill(0);
        let ip = [&[0x45][..], &[0; 60]].concat();
        for (wakes, what, frame) in [
            (true, "a packet for the guest", frame(GUEST, 0x800, &ip)),
            (true, "a short frame for the guest", frame(GUEST, 0x88cc, &[])),
            (true, "a question", frame(EVERYBODY, 0x806, &arp(1, 1, 9))),
            (true, "a question to the guest alone", frame(GUEST, 0x806, &arp(1, 1, 9))),
            (false, "an answer to all", frame(EVERYBODY, 0x806, &arp(2, 1, 9))),
            (false, "a host that shows its address", frame(EVERYBODY, 0x806, &arp(1, 7, 7))),
            (false, "a host without an address", frame(EVERYBODY, 0x806, &unnamed)),
            (false, "half a question", frame(EVERYBODY, 0x806, &arp(1, 1, 9)[..20])),
            (true, "a neighbour solicitation", frame(SOLICITED, 0x86dd, &ipv6(58, 135))),
            (false, "the same without an address", frame(SOLICITED, 0x86dd, &unspecified)),
            (false, "a router advertisement", frame(SOLICITED, 0x86dd, &ipv6(58, 134))),
            (false, "a name of mDNS", frame(SOLICITED, 0x86dd, &ipv6(17, 135))),
            (false, "half a solicitation", frame(SOLICITED, 0x86dd, &ipv6(58, 135)[..40])),
            (false, "a broadcast", frame(EVERYBODY, 0x800, &ip)),
            (false, "a multicast", frame([1, 0, 0x5e, 0, 0, 0xfb], 0x800, &ip)),
            (false, "a bridge's protocol", frame([1, 0x80, 0xc2, 0, 0, 0], 0x26, &[0x42; 40])),
            (false, "half a header", EVERYBODY.to_vec()),
        ] {
            assert_eq!(arrives(&frame), wakes, "{what}");
        }
    }
}
