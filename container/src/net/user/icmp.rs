//! ICMP (RFC 792) and ICMPv6 (RFC 4443): errors and echoes.

use std::io;
use std::net::IpAddr;

use rustix::io::Errno;

use super::packet::{ICMP, ICMPV6, Packet, Payload};

/// Bytes of a header.
pub const HEADER: usize = 8;
/// Offset of the checksum in a header.
pub const CHECKSUM: usize = 2;

/// The reason why a packet did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpError {
    NetworkUnreachable,
    HostUnreachable,
    PortUnreachable,
    /// Administratively prohibited.
    Prohibited,
    /// The hop limit is used up.
    TimeExceeded,
}

impl IcmpError {
    /// The reason for a socket error. Nothing if the error has no equivalent in ICMP.
    pub fn of(error: &io::Error) -> Option<Self> {
        match Errno::from_io_error(error)? {
            Errno::NETUNREACH | Errno::NETDOWN => Some(Self::NetworkUnreachable),
            Errno::HOSTUNREACH | Errno::HOSTDOWN => Some(Self::HostUnreachable),
            Errno::CONNREFUSED => Some(Self::PortUnreachable),
            Errno::ACCESS | Errno::PERM => Some(Self::Prohibited),
            _ => None,
        }
    }

    /// Type and code of the message.
    fn numbers(self, v4: bool) -> [u8; 2] {
        match (self, v4) {
            (Self::NetworkUnreachable, true) => [3, 0],
            (Self::HostUnreachable, true) => [3, 1],
            (Self::PortUnreachable, true) => [3, 3],
            (Self::Prohibited, true) => [3, 13],
            (Self::TimeExceeded, true) => [11, 0],
            (Self::NetworkUnreachable, false) => [1, 0],
            (Self::HostUnreachable, false) => [1, 3],
            (Self::PortUnreachable, false) => [1, 4],
            (Self::Prohibited, false) => [1, 1],
            (Self::TimeExceeded, false) => [3, 0],
        }
    }

    /// The error message, with the beginning of the packet. `header` stores its header.
    pub fn payload<'a>(
        self,
        v4: bool,
        header: &'a mut [u8; HEADER],
        quoted: &'a [u8],
    ) -> Payload<'a> {
        *header = [0; HEADER];
        header[..2].copy_from_slice(&self.numbers(v4));
        payload(v4, header, quoted)
    }
}

pub fn payload<'a>(v4: bool, header: &'a [u8; HEADER], data: &'a [u8]) -> Payload<'a> {
    Payload { protocol: if v4 { ICMP } else { ICMPV6 }, header, checksum: CHECKSUM, data }
}

/// An echo request of the guest.
#[derive(Clone, Copy, Debug)]
pub struct Echo<'a> {
    /// Identifier of the program that sends it.
    pub ident: [u8; 2],
    /// The whole message.
    pub message: &'a [u8],
}

/// Types of echo requests and echo replies.
pub fn echo_types(v4: bool) -> (u8, u8) {
    if v4 { (8, 0) } else { (128, 129) }
}

impl<'a> Echo<'a> {
    /// Parses a packet. Nothing if it is not an echo request.
    pub fn read(packet: &Packet<'a>) -> Option<Self> {
        let (v4, message) = (packet.from.is_ipv4(), packet.payload);
        let header = message.first_chunk::<HEADER>()?;
        let mine = packet.protocol == if v4 { ICMP } else { ICMPV6 };
        let asks = mine && header[..2] == [echo_types(v4).0, 0] && is_sound(packet);
        asks.then_some(Self { ident: [header[4], header[5]], message })
    }

    /// The header of the reply, with a checksum of zero.
    pub fn answer(&self, v4: bool) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header.copy_from_slice(&self.message[..HEADER]);
        header[0] = echo_types(v4).1;
        header[CHECKSUM..CHECKSUM + 2].fill(0);
        header
    }

    /// The data after the header, which the reply repeats.
    pub fn data(&self) -> &'a [u8] {
        &self.message[HEADER..]
    }
}

/// Whether the checksum of a message is correct.
pub fn is_sound(packet: &Packet<'_>) -> bool {
    match packet.from {
        IpAddr::V4(_) => {
            let sum = super::checksum::sum(packet.payload);
            super::checksum::finish(sum) == [0, 0]
        }
        IpAddr::V6(_) => packet.is_sound(),
    }
}
