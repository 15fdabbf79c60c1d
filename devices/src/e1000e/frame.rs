//! Headers of a frame: where they begin, their checksums, and the hash that chooses a receive queue
//! (82574 datasheet, 7.1.11).

/// The type of a VLAN tag, and its length.
pub(super) const TAG: usize = 4;
/// Offset of the type behind the two addresses.
pub(super) const TYPE: usize = 12;
const ETHERNET: usize = 14;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    Four,
    Six,
}

/// An IP packet in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ip {
    pub(super) version: Version,
    /// Offset of the IP header.
    pub(super) start: usize,
    /// Offset of the header behind it.
    pub(super) next: usize,
    /// Offset of the packet's end.
    pub(super) end: usize,
    /// TCP or UDP with a complete header, which is not a fragment.
    pub(super) transport: Option<u8>,
}

pub(super) fn short(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes([pair[0], pair[1]]))
}

/// The folded sum of big-endian 16-bit words, added to `seed`. An odd byte is padded with zero.
pub(super) fn sum(bytes: &[u8], seed: u16) -> u16 {
    // The sum does not depend on the byte order, except for its own.
    let mut total = u64::from(seed.swap_bytes());
    let chunks = bytes.chunks_exact(8);
    let mut last = [0; 8];
    last[..chunks.remainder().len()].copy_from_slice(chunks.remainder());
    let words = chunks.map(|it| [it[0], it[1], it[2], it[3], it[4], it[5], it[6], it[7]]);
    for word in words.chain([last]) {
        let word = u64::from_le_bytes(word);
        total += (word & 0xffff_ffff) + (word >> 32);
    }
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    u16::try_from(total).expect("16 bits").swap_bytes()
}

impl Ip {
    /// Finds the packet in a frame, which may have one VLAN tag of type `vet`.
    pub(super) fn find(frame: &[u8], vet: u16) -> Option<Self> {
        let tagged = short(frame, TYPE)? == vet;
        let start = if tagged { ETHERNET + TAG } else { ETHERNET };
        match short(frame, start - 2)? {
            IPV4 => Self::four(frame, start),
            IPV6 => Self::six(frame, start),
            _ => None,
        }
    }

    fn four(frame: &[u8], start: usize) -> Option<Self> {
        let header = frame.get(start..start + 20)?;
        let (next, end) = (
            start + usize::from(header[0] & 15) * 4,
            start + usize::from(u16::from_be_bytes([header[2], header[3]])),
        );
        let valid = header[0] >> 4 == 4 && next >= start + 20 && next <= end && end <= frame.len();
        let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
        let found = Self { version: Version::Four, start, next, end, transport: None };
        valid.then(|| found.with(header[9], fragment))
    }

    /// Extension headers are not followed: such a packet has no transport header.
    fn six(frame: &[u8], start: usize) -> Option<Self> {
        let header = frame.get(start..start + 40)?;
        let next = start + 40;
        let end = next + usize::from(u16::from_be_bytes([header[4], header[5]]));
        let found = Self { version: Version::Six, start, next, end, transport: None };
        (header[0] >> 4 == 6 && end <= frame.len()).then(|| found.with(header[6], false))
    }

    fn with(self, protocol: u8, fragment: bool) -> Self {
        let needed = match protocol {
            TCP => 20,
            UDP => 8,
            _ => usize::MAX,
        };
        let whole = !fragment && self.end - self.next >= needed;
        Self { transport: whole.then_some(protocol), ..self }
    }

    /// Whether the checksum of the IP header is right. `None` if it has none.
    pub(super) fn header_is_right(&self, frame: &[u8]) -> Option<bool> {
        let header = frame.get(self.start..self.next)?;
        (self.version == Version::Four).then(|| sum(header, 0) == 0xffff)
    }

    /// Whether the checksum of TCP or UDP is right. `None` if there is none.
    pub(super) fn transport_is_right(&self, frame: &[u8]) -> Option<bool> {
        let protocol = self.transport?;
        if protocol == UDP && short(frame, self.next + 6)? == 0 {
            return None;
        }
        let length = u16::try_from(self.end - self.next).ok()?;
        let pseudo = sum(self.addresses(frame)?, sum(&length.to_be_bytes(), protocol.into()));
        Some(sum(frame.get(self.next..self.end)?, pseudo) == 0xffff)
    }

    /// Source and destination.
    pub(super) fn addresses<'a>(&self, frame: &'a [u8]) -> Option<&'a [u8]> {
        match self.version {
            Version::Four => frame.get(self.start + 12..self.start + 20),
            Version::Six => frame.get(self.start + 8..self.start + 40),
        }
    }

    /// The offset behind all headers that a driver may want apart from the data.
    pub(super) fn headers_end(&self, frame: &[u8]) -> usize {
        match self.transport {
            Some(TCP) => {
                let words = frame.get(self.next + 12).map_or(5, |byte| usize::from(byte >> 4));
                (self.next + words.max(5) * 4).min(self.end)
            }
            Some(_) => self.next + 8,
            None => self.next,
        }
    }
}

/// The Toeplitz hash of `parts`. `key` returns a byte of the 40 in the key.
pub(super) fn toeplitz(key: impl Fn(u32) -> u8, parts: &[&[u8]]) -> u32 {
    let mut window = u32::from_be_bytes([key(0), key(1), key(2), key(3)]);
    let (mut hash, mut next) = (0, 4);
    for byte in parts.iter().copied().flatten() {
        let following = key(next);
        next += 1;
        for bit in (0..8).rev() {
            if byte >> bit & 1 != 0 {
                hash ^= window;
            }
            window = window << 1 | u32::from(following >> bit & 1);
        }
    }
    hash
}

#[cfg(test)]
mod test {
    use super::*;

    /// The key and the results of Microsoft's "Verifying the RSS Hash Calculation".
    const KEY: [u8; 40] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f,
        0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30,
        0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    #[test]
    fn the_hash_is_that_of_the_published_examples() {
        let key = |at: u32| KEY[at as usize];
        let addresses = [66, 9, 149, 187, 161, 142, 100, 80];
        let ports = [2794_u16.to_be_bytes(), 1766_u16.to_be_bytes()].concat();
        assert_eq!(toeplitz(key, &[&addresses]), 0x323e_8fc2);
        assert_eq!(toeplitz(key, &[&addresses, &ports]), 0x51cc_c178);
    }

    /// An IPv4 packet with UDP and right checksums.
    fn datagram() -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00]);
        frame.extend([0x45, 0, 0, 30, 0, 0, 0, 0, 64, 17, 0x66, 0xce, 10, 0, 0, 1, 10, 0, 0, 1]);
        frame.extend([0, 1, 0, 2, 0, 10, 0x8a, 0x73, 0x61, 0x62]);
        frame
    }

    #[test]
    fn finds_headers_and_wrong_checksums() {
        let mut frame = datagram();
        let ip = Ip::find(&frame, 0x8100).unwrap();
        assert_eq!((ip.start, ip.next, ip.end, ip.transport), (14, 34, 44, Some(UDP)));
        assert_eq!(ip.header_is_right(&frame), Some(true));
        assert_eq!(ip.transport_is_right(&frame), Some(true));
        frame[43] ^= 1;
        assert_eq!(ip.transport_is_right(&frame), Some(false));
        frame[22] ^= 1;
        assert_eq!(ip.header_is_right(&frame), Some(false));
        frame[40..42].fill(0);
        assert_eq!(ip.transport_is_right(&frame), None, "UDP without a checksum");
        frame[20] = 0x20;
        assert_eq!(Ip::find(&frame, 0x8100).unwrap().transport, None, "a fragment");
        frame.splice(12..12, [0x81, 0, 0, 5]);
        assert_eq!(Ip::find(&frame, 0x8100).unwrap().start, 18);
        assert_eq!(Ip::find(&frame, 0x9100), None);
    }

    #[test]
    fn lengths_in_headers_are_checked() {
        let whole = datagram();
        for length in 0..whole.len() {
            assert_eq!(Ip::find(&whole[..length], 0x8100), None, "{length}");
        }
        for (at, value) in [(14, 0x44), (14, 0x4f), (14, 0x65), (17, 31), (17, 19)] {
            let mut frame = whole.clone();
            frame[at] = value;
            assert_eq!(Ip::find(&frame, 0x8100), None, "{value:#x} at {at}");
        }
    }

    #[test]
    fn a_sum_does_not_depend_on_its_grouping() {
        let bytes: Vec<u8> = (0..=255).collect();
        let plain = |bytes: &[u8]| {
            let words = bytes
                .chunks(2)
                .map(|it| u32::from(u16::from_be_bytes([it[0], it.get(1).copied().unwrap_or(0)])));
            let total: u32 = words.sum();
            let folded = (total & 0xffff) + (total >> 16);
            u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap()
        };
        for length in 0..bytes.len() {
            assert_eq!(sum(&bytes[..length], 0), plain(&bytes[..length]), "{length}");
        }
        assert_eq!(sum(&[0xff, 0xff], 1), 1);
    }
}
