//! Parses and writes Ethernet frames with ARP, IPv4 and IPv6.
//!
//! Threats: the guest controls every byte that is parsed here. Each length is compared with the
//! available bytes before it is used, and a frame with a wrong checksum is dropped.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use host::mac::Mac;

use super::checksum;

// EtherTypes (IEEE 802).
pub const ARP: u16 = 0x0806;
pub const IPV4: u16 = 0x0800;
pub const IPV6: u16 = 0x86dd;

// Protocol numbers of IP (IANA).
pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const ICMPV6: u8 = 58;

/// Bytes of an Ethernet header.
pub const ETHERNET: usize = 14;
/// Bytes of an IPv4 header without options.
pub const HEADER_V4: usize = 20;
pub const HEADER_V6: usize = 40;
pub const HEADER_UDP: usize = 8;

/// The hop limit of our packets.
const HOPS: u8 = 64;
/// The hop limit of neighbor discovery, which proves that no router has forwarded a message (RFC
/// 4861, 11.2).
const LINK_HOPS: u8 = 255;

#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    pub to: Mac,
    pub from: Mac,
    /// EtherType.
    pub kind: u16,
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    pub fn read(bytes: &'a [u8]) -> Option<Self> {
        let (header, payload) = bytes.split_first_chunk::<ETHERNET>()?;
        let [to @ .., _, _, _, _, _, _, _, _] = header;
        let [_, _, _, _, _, _, from @ .., _, _] = header;
        let kind = u16::from_be_bytes([header[12], header[13]]);
        Some(Self { to: Mac(*to), from: Mac(*from), kind, payload })
    }
}

/// An ARP request for the MAC address of an IPv4 address (RFC 826).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArpRequest {
    /// MAC address of the sender.
    pub mac: Mac,
    pub from: Ipv4Addr,
    pub wanted: Ipv4Addr,
}

/// Ethernet, IPv4, and the lengths of their addresses.
const ARP_KINDS: [u8; 6] = [0, 1, 8, 0, 6, 4];

impl ArpRequest {
    /// Parses a request. Nothing for replies and other protocols.
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

    pub fn write(&self) -> Vec<u8> {
        arp(1, (self.mac, self.from), (Mac([0; 6]), self.wanted))
    }

    pub fn answer(&self, mac: Mac) -> Vec<u8> {
        arp(2, (mac, self.wanted), (self.mac, self.from))
    }
}

fn arp(operation: u8, from: (Mac, Ipv4Addr), to: (Mac, Ipv4Addr)) -> Vec<u8> {
    let mut packet = ARP_KINDS.to_vec();
    packet.extend([0, operation]);
    for (mac, address) in [from, to] {
        packet.extend(mac.0);
        packet.extend(address.octets());
    }
    packet
}

/// The position of a fragment in its packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    pub id: u32,
    /// Offset in bytes.
    pub offset: usize,
    pub more: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    pub from: IpAddr,
    pub to: IpAddr,
    pub protocol: u8,
    /// Hop limit, or time to live.
    pub hops: u8,
    pub fragment: Option<Fragment>,
    /// Content without the headers of IP.
    pub payload: &'a [u8],
    pub whole: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Parses the payload of a frame with this EtherType. Nothing if it is not a valid IP packet.
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
        // Short frames have padding, up to the minimum of Ethernet.
        let whole = bytes.get(..total)?;
        if checksum::finish(checksum::sum(&whole[..header])) != [0, 0] {
            return None;
        }
        // Each family has its own, and an answer is of the same family.
        if fixed[9] == ICMPV6 {
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
        (packet.protocol != ICMP).then_some(packet)
    }

    /// Skips the extension headers for routers and receivers, and takes the position of a fragment.
    fn skip_extensions(&mut self) -> Option<()> {
        const HOP_BY_HOP: u8 = 0;
        const ROUTING: u8 = 43;
        const FRAGMENT: u8 = 44;
        const DESTINATION: u8 = 60;
        while self.fragment.is_none() {
            let length = match self.protocol {
                HOP_BY_HOP | DESTINATION => usize::from(*self.payload.get(1)?) * 8 + 8,
                // A source route with hops left is not supported.
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

    /// Whether the checksum of TCP, UDP or ICMPv6 over the payload is correct.
    pub fn is_sound(&self) -> bool {
        let Self { from, to, protocol, payload, .. } = *self;
        let head = checksum::pseudo(from, to, protocol, payload.len());
        checksum::finish(head + checksum::sum(payload)) == [0, 0]
    }

    /// The beginning of the packet that ICMP errors quote (RFC 1812, 4.3.2.3; RFC 4443, 2.4 (c)).
    pub fn quoted(&self) -> &'a [u8] {
        let most = if self.from.is_ipv4() { 548 } else { 1232 };
        &self.whole[..self.whole.len().min(most)]
    }
}

fn word<const N: usize>(header: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([header[at], header[at + 1]])
}

#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    pub from: u16,
    pub to: u16,
    pub data: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// RFC 768
    pub fn read(packet: &Packet<'a>) -> Option<Self> {
        let header = packet.payload.first_chunk::<HEADER_UDP>()?;
        let length = usize::from(word(header, 4));
        let payload = packet.payload.get(..length)?;
        // In IPv4 the checksum is optional. Zero means none.
        let summed = packet.from.is_ipv6() || header[6..] != [0, 0];
        if summed && !(Packet { payload, ..*packet }).is_sound() {
            return None;
        }
        let data = payload.get(HEADER_UDP..)?;
        Some(Self { from: word(header, 0), to: word(header, 2), data })
    }

    /// The header for `length` bytes of data, without checksum.
    pub fn header(from: u16, to: u16, length: usize) -> [u8; HEADER_UDP] {
        let mut header = [0; HEADER_UDP];
        let length = u16::try_from(HEADER_UDP + length).unwrap_or(u16::MAX);
        header[..2].copy_from_slice(&from.to_be_bytes());
        header[2..4].copy_from_slice(&to.to_be_bytes());
        header[4..6].copy_from_slice(&length.to_be_bytes());
        header
    }
}

/// The two ends of a flow, as the guest sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pair {
    pub guest: SocketAddr,
    pub peer: SocketAddr,
}

impl Pair {
    /// The ends of a packet from the guest, with its source and destination ports.
    pub fn of(packet: &Packet<'_>, (from, to): (u16, u16)) -> Self {
        let guest = SocketAddr::new(packet.from, from);
        Self { guest, peer: SocketAddr::new(packet.to, to) }
    }

    /// Source and destination of packets to the guest.
    pub fn back(&self) -> (IpAddr, IpAddr) {
        (self.peer.ip(), self.guest.ip())
    }
}

/// Source and destination of a packet that we write. Both IP addresses are of one family.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    pub cards: (Mac, Mac),
    pub addresses: (IpAddr, IpAddr),
}

/// Appends a frame with a length prefix, in the format of the socket to `vmm`.
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

/// The payload of an IP packet that we write.
#[derive(Clone, Copy, Debug)]
pub struct Payload<'a> {
    pub protocol: u8,
    /// Header of the protocol, with a checksum of zero.
    pub header: &'a [u8],
    /// Offset of the checksum in the header.
    pub checksum: usize,
    pub data: &'a [u8],
}

impl Payload<'_> {
    fn length(&self) -> usize {
        self.header.len() + self.data.len()
    }

    /// Appends a frame with this packet and a length prefix, in the format of the socket to `vmm`.
    pub fn write(&self, out: &mut Vec<u8>, ends: &Ends) {
        let sum = self.checksum(ends);
        self.start(out, ends, self.length(), [0, 0, 0x40, 0]);
        let header = out.len();
        out.extend(self.header);
        out[header + self.checksum..][..2].copy_from_slice(&sum);
        out.extend(self.data);
    }

    /// The same in fragments of at most `mtu` bytes, with the packet id `id`.
    pub fn write_fragments(&self, out: &mut Vec<u8>, ends: &Ends, mtu: usize, id: u16) {
        let v4 = ends.addresses.0.is_ipv4();
        let before = if v4 { HEADER_V4 } else { HEADER_V6 };
        if before + self.length() <= mtu {
            return self.write(out, ends);
        }
        // The fragment header of IPv6 has 8 bytes. Offsets are multiples of 8.
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
                let part = Payload { protocol: 44, ..*self };
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
            // In UDP, a checksum of zero means none.
            [0, 0] if self.protocol == UDP => [0xff, 0xff],
            sum => sum,
        }
    }

    /// Appends the headers of Ethernet and IP for a payload of `length` bytes. `id` is the second
    /// word of the IPv4 header.
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
                let hops = if self.protocol == ICMPV6 { LINK_HOPS } else { HOPS };
                out.extend([self.protocol, hops]);
                out.extend(from.octets());
                out.extend(to.octets());
            }
            _ => unreachable!("both ends have addresses of one family"),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// An answer to a message of the other family would end the process.
    #[test]
    fn each_family_has_its_own_messages() {
        let message = [0; 8];
        for (from, to, own, other) in
            [("10.0.2.15", "10.0.2.2", ICMP, ICMPV6), ("fe80::15", "fe80::1", ICMPV6, ICMP)]
        {
            for (protocol, accepted) in [(own, true), (other, false), (UDP, true)] {
                let mut bytes = Vec::new();
                let addresses = (from.parse().unwrap(), to.parse().unwrap());
                let ends = Ends { cards: (Mac([2; 6]), Mac([4; 6])), addresses };
                Payload { protocol, header: &message, checksum: 2, data: &[] }
                    .write(&mut bytes, &ends);
                let frame = Frame::read(&bytes[4..]).unwrap();
                let read = Packet::read(frame.kind, frame.payload);
                assert_eq!(read.is_some(), accepted, "protocol {protocol} from {from}");
            }
        }
    }
}
