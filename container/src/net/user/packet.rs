//! What travels on the link to the guest: Ethernet frames with ARP, IPv4 and IPv6 in them, read and
//! written.
//!
//! Threats: the guest writes every byte of what is read here. A length is never believed before it
//! was compared with what is there, and a checksum that is wrong is a frame that is lost.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use host::mac::Mac;

use super::checksum;

/// IEEE 802: kinds of frames.
pub const ARP: u16 = 0x0806;
/// IPv4.
pub const IPV4: u16 = 0x0800;
/// IPv6.
pub const IPV6: u16 = 0x86dd;

/// IANA: protocols in IP.
pub const ICMP: u8 = 1;
/// TCP.
pub const TCP: u8 = 6;
/// UDP.
pub const UDP: u8 = 17;
/// ICMPv6.
pub const ICMPV6: u8 = 58;

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;
/// Bytes of an IPv4 header without options.
pub const HEADER_V4: usize = 20;
/// Bytes of an IPv6 header.
pub const HEADER_V6: usize = 40;
/// Bytes of a UDP header.
pub const HEADER_UDP: usize = 8;

/// The hop limit of what we write.
const HOPS: u8 = 64;
/// The hop limit that proves that what is said of neighbours comes from one (RFC 4861, 11.2).
const NEAR: u8 = 255;

/// A frame.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// To which card.
    pub to: Mac,
    /// From which card.
    pub from: Mac,
    /// What it carries.
    pub kind: u16,
    /// What follows the header.
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Reads the header.
    #[must_use]
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let (header, payload) = bytes.split_first_chunk::<ETHERNET>()?;
        let [to @ .., _, _, _, _, _, _, _, _] = header;
        let [_, _, _, _, _, _, from @ .., _, _] = header;
        let kind = u16::from_be_bytes([header[12], header[13]]);
        Some(Self { to: Mac(*to), from: Mac(*from), kind, payload })
    }
}

/// A question for the card of an address (RFC 826).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArpRequest {
    /// Who asks.
    pub mac: Mac,
    /// Its address.
    pub from: Ipv4Addr,
    /// Which address it looks for.
    pub wanted: Ipv4Addr,
}

/// Ethernet, IPv4, 6 and 4 bytes of address.
const ARP_KINDS: [u8; 6] = [0, 1, 8, 0, 6, 4];

impl ArpRequest {
    /// Reads a question; answers and other protocols are none.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.first_chunk::<28>()?;
        if bytes[..6] != ARP_KINDS || bytes[6..8] != [0, 1] {
            return None;
        }
        let mac = bytes[8..].first_chunk().copied().map(Mac)?;
        let from = bytes[14..].first_chunk().copied()?;
        let wanted = bytes[24..].first_chunk().copied()?;
        Some(Self { mac, from: Ipv4Addr::from(from), wanted: Ipv4Addr::from(wanted) })
    }

    /// The answer: that card is `mac`.
    #[must_use]
    pub fn answer(&self, mac: Mac) -> Vec<u8> {
        let mut answer = ARP_KINDS.to_vec();
        answer.extend([0, 2]);
        answer.extend(mac.0);
        answer.extend(self.wanted.octets());
        answer.extend(self.mac.0);
        answer.extend(self.from.octets());
        answer
    }
}

/// A part of a larger packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// Which packet.
    pub id: u32,
    /// Where in it.
    pub offset: usize,
    /// More follows.
    pub more: bool,
}

/// An IP packet.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Who sent it.
    pub from: IpAddr,
    /// To whom.
    pub to: IpAddr,
    /// What is in it.
    pub protocol: u8,
    /// How many routers it may pass.
    pub hops: u8,
    /// It is only a part.
    pub fragment: Option<Fragment>,
    /// What is in it, without the headers of IP.
    pub payload: &'a [u8],
    /// All of it.
    pub whole: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Reads what a frame carries, if that is IP as it should be.
    #[must_use]
    pub fn read(kind: u16, bytes: &'a [u8]) -> Option<Self> {
        match kind {
            IPV4 => Self::read_v4(bytes),
            IPV6 => Self::read_v6(bytes),
            _ => None,
        }
    }

    /// RFC 791, 3.1
    fn read_v4(bytes: &'a [u8]) -> Option<Self> {
        let fixed = bytes.first_chunk::<HEADER_V4>()?;
        let header = usize::from(fixed[0] & 15) * 4;
        let total = usize::from(word(fixed, 2));
        if fixed[0] >> 4 != 4 || header < HEADER_V4 || total < header {
            return None;
        }
        // Short frames are filled up to what Ethernet wants.
        let whole = bytes.get(..total)?;
        if checksum::finish(checksum::sum(&whole[..header])) != [0, 0] {
            return None;
        }
        let field = word(fixed, 6);
        let (more, offset) = (field & 0x2000 != 0, usize::from(field & 0x1fff) * 8);
        let id = u32::from(word(fixed, 4));
        let address =
            |at: usize| Some(IpAddr::V4(Ipv4Addr::from(*fixed.get(at..)?.first_chunk::<4>()?)));
        Some(Self {
            from: address(12)?,
            to: address(16)?,
            protocol: fixed[9],
            hops: fixed[8],
            fragment: (more || offset > 0).then_some(Fragment { id, offset, more }),
            payload: &whole[header..],
            whole,
        })
    }

    /// RFC 8200, 3 and 4
    fn read_v6(bytes: &'a [u8]) -> Option<Self> {
        let (fixed, rest) = bytes.split_first_chunk::<HEADER_V6>()?;
        if fixed[0] >> 4 != 6 {
            return None;
        }
        let length = usize::from(word(fixed, 4));
        let payload = rest.get(..length)?;
        let address =
            |at: usize| Some(IpAddr::V6(Ipv6Addr::from(*fixed.get(at..)?.first_chunk::<16>()?)));
        let mut packet = Self {
            from: address(8)?,
            to: address(24)?,
            protocol: fixed[6],
            hops: fixed[7],
            fragment: None,
            payload,
            whole: bytes.get(..HEADER_V6 + length)?,
        };
        packet.skip_extensions()?;
        Some(packet)
    }

    /// Steps over the headers that routers and receivers look at, and that say nothing to us.
    fn skip_extensions(&mut self) -> Option<()> {
        const HOP_BY_HOP: u8 = 0;
        const ROUTING: u8 = 43;
        const FRAGMENT: u8 = 44;
        const DESTINATION: u8 = 60;
        while self.fragment.is_none() {
            let length = match self.protocol {
                HOP_BY_HOP | DESTINATION => usize::from(*self.payload.get(1)?) * 8 + 8,
                // A route that is not at its end is not ours to go on with.
                ROUTING if *self.payload.get(3)? == 0 => usize::from(*self.payload.get(1)?) * 8 + 8,
                FRAGMENT => {
                    let header = self.payload.first_chunk::<8>()?;
                    let field = word(header, 2);
                    let id = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
                    let (offset, more) = (usize::from(field & !7), field & 1 != 0);
                    if more || offset > 0 {
                        self.fragment = Some(Fragment { id, offset, more });
                    }
                    8
                }
                _ => return Some(()),
            };
            self.protocol = *self.payload.first()?;
            self.payload = self.payload.get(length..)?;
        }
        Some(())
    }

    /// Whether the checksum over the payload is right: that of TCP, UDP or ICMPv6.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let Self { from, to, protocol, payload, .. } = *self;
        let head = checksum::pseudo(from, to, protocol, payload.len());
        checksum::finish(head + checksum::sum(payload)) == [0, 0]
    }

    /// As much of it as an error of ICMP has: RFC 1812, 4.3.2.3, and RFC 4443, 2.4 (c).
    #[must_use]
    pub fn quoted(&self) -> &'a [u8] {
        let most = if self.from.is_ipv4() { 548 } else { 1232 };
        &self.whole[..self.whole.len().min(most)]
    }
}

/// A number of 16 bits in a header.
fn word<const N: usize>(header: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([header[at], header[at + 1]])
}

/// A UDP datagram.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// The port of who sent it.
    pub from: u16,
    /// The port that it is for.
    pub to: u16,
    /// Its data.
    pub data: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Reads a packet's payload (RFC 768).
    #[must_use]
    pub fn read(packet: &Packet<'a>) -> Option<Self> {
        let header = packet.payload.first_chunk::<HEADER_UDP>()?;
        let length = usize::from(word(header, 4));
        let payload = packet.payload.get(..length)?;
        // In IPv4 a checksum may be left out, which is told by a zero.
        let summed = packet.from.is_ipv6() || header[6..] != [0, 0];
        if summed && !(Packet { payload, ..*packet }).is_sound() {
            return None;
        }
        let data = payload.get(HEADER_UDP..)?;
        Some(Self { from: word(header, 0), to: word(header, 2), data })
    }

    /// The header of so much data.
    #[must_use]
    pub fn header(from: u16, to: u16, length: usize) -> [u8; HEADER_UDP] {
        let mut header = [0; HEADER_UDP];
        let length = u16::try_from(HEADER_UDP + length).unwrap_or(u16::MAX);
        header[..2].copy_from_slice(&from.to_be_bytes());
        header[2..4].copy_from_slice(&to.to_be_bytes());
        header[4..6].copy_from_slice(&length.to_be_bytes());
        header
    }
}

/// The guest's end, and the other one as the guest knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    /// The guest's.
    pub guest: SocketAddr,
    /// The other one.
    pub peer: SocketAddr,
}

impl Pair {
    /// Of a packet that the guest sent, by its ports.
    #[must_use]
    pub fn of(packet: &Packet<'_>, (from, to): (u16, u16)) -> Self {
        let guest = SocketAddr::new(packet.from, from);
        Self { guest, peer: SocketAddr::new(packet.to, to) }
    }

    /// The addresses of a packet for the guest.
    #[must_use]
    pub fn back(&self) -> (IpAddr, IpAddr) {
        (self.peer.ip(), self.guest.ip())
    }
}

/// The ends of a packet that we write: cards and addresses.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// Our card, and the guest's.
    pub cards: (Mac, Mac),
    /// As whom we write, and to whom.
    pub addresses: (IpAddr, IpAddr),
}

/// Writes a frame behind its length, as the socket wants it.
pub fn write_frame(out: &mut Vec<u8>, cards: (Mac, Mac), kind: u16, payload: &[u8]) {
    start(out, cards, kind, payload.len());
    out.extend(payload);
}

fn start(out: &mut Vec<u8>, (from, to): (Mac, Mac), kind: u16, length: usize) {
    let length = u32::try_from(ETHERNET + length).expect("a packet has at most 64 KiB");
    out.extend(length.to_be_bytes());
    out.extend(to.0);
    out.extend(from.0);
    out.extend(kind.to_be_bytes());
}

/// What is written of a packet: its protocol, a header whose checksum is still to come, and data.
#[derive(Clone, Copy, Debug)]
pub struct Draft<'a> {
    /// What it is.
    pub protocol: u8,
    /// Its header. The bytes of the checksum are zero.
    pub header: &'a [u8],
    /// Where in the header the checksum belongs.
    pub checksum: usize,
    /// What follows.
    pub data: &'a [u8],
}

impl Draft<'_> {
    fn length(&self) -> usize {
        self.header.len() + self.data.len()
    }

    /// Writes a frame with this packet behind its length, as the socket wants it.
    pub fn write(&self, out: &mut Vec<u8>, ends: &Ends) {
        let sum = self.checksum(ends);
        self.start(out, ends, self.length(), [0, 0, 0x40, 0]);
        let header = out.len();
        out.extend(self.header);
        out[header + self.checksum..][..2].copy_from_slice(&sum);
        out.extend(self.data);
    }

    /// The same in frames of at most `mtu` bytes. `id` tells its parts from those of others.
    pub fn write_in_parts(&self, out: &mut Vec<u8>, ends: &Ends, (mtu, id): (usize, u16)) {
        let v4 = ends.addresses.0.is_ipv4();
        let before = if v4 { HEADER_V4 } else { HEADER_V6 };
        if before + self.length() <= mtu {
            return self.write(out, ends);
        }
        // The part header of IPv6 has 8 bytes, and offsets count by 8.
        let part = mtu.saturating_sub(before + if v4 { 0 } else { 8 }).max(8) / 8 * 8;
        let mut whole = self.header.to_vec();
        whole[self.checksum..][..2].copy_from_slice(&self.checksum(ends));
        whole.extend(self.data);
        let count = whole.len().div_ceil(part);
        for (number, bytes) in whole.chunks(part).enumerate() {
            let (offset, more) = (number * part, number + 1 < count);
            let offset = u16::try_from(offset).expect("a packet has at most 64 KiB");
            if v4 {
                let field = (offset / 8) | if more { 0x2000 } else { 0 };
                let ([a, b], [c, d]) = (id.to_be_bytes(), field.to_be_bytes());
                self.start(out, ends, bytes.len(), [a, b, c, d]);
            } else {
                let part = Draft { protocol: 44, ..*self };
                part.start(out, ends, bytes.len() + 8, [0; 4]);
                out.extend([self.protocol, 0]);
                out.extend((offset | u16::from(more)).to_be_bytes());
                out.extend(u32::from(id).to_be_bytes());
            }
            out.extend(bytes);
        }
    }

    fn checksum(&self, ends: &Ends) -> [u8; 2] {
        let (from, to) = ends.addresses;
        let head = if self.protocol == ICMP {
            0
        } else {
            checksum::pseudo(from, to, self.protocol, self.length())
        };
        let total = head + checksum::sum(self.header) + checksum::sum(self.data);
        match checksum::finish(total) {
            // To UDP a zero is a checksum that is left out.
            [0, 0] if self.protocol == UDP => [0xff, 0xff],
            sum => sum,
        }
    }

    /// The headers of Ethernet and IP before so many bytes; `id` is the second word of IPv4's.
    fn start(&self, out: &mut Vec<u8>, ends: &Ends, length: usize, id: [u8; 4]) {
        match ends.addresses {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let total = HEADER_V4 + length;
                start(out, ends.cards, IPV4, total);
                let ip = out.len();
                let total = u16::try_from(total).expect("a packet has at most 64 KiB");
                out.extend([0x45, 0]);
                out.extend(total.to_be_bytes());
                out.extend(id);
                out.extend([HOPS, self.protocol, 0, 0]);
                out.extend(from.octets());
                out.extend(to.octets());
                let sum = checksum::finish(checksum::sum(&out[ip..]));
                out[ip + 10..ip + 12].copy_from_slice(&sum);
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                start(out, ends.cards, IPV6, HEADER_V6 + length);
                let length = u16::try_from(length).expect("a packet has at most 64 KiB");
                out.extend([0x60, 0, 0, 0]);
                out.extend(length.to_be_bytes());
                let hops = if self.protocol == ICMPV6 { NEAR } else { HOPS };
                out.extend([self.protocol, hops]);
                out.extend(from.octets());
                out.extend(to.octets());
            }
            _ => unreachable!("both ends of what we write have addresses of one family"),
        }
    }
}
