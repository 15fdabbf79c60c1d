//! Parses and writes TCP segments (RFC 9293, 3.1), and compares sequence numbers.

use super::packet::Packet;

/// Bytes of a header without options.
pub const HEADER: usize = 20;
/// Offset of the checksum in a header.
pub const CHECKSUM: usize = 16;

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const PSH: u8 = 0x08;
pub const ACK: u8 = 0x10;

/// The largest shift of a window (RFC 7323, 2.3).
pub const MAX_SCALE: u8 = 14;

/// Wraps around at 2^32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seq(pub u32);

impl Seq {
    pub fn plus(self, bytes: usize) -> Self {
        let bytes = u32::try_from(bytes).expect("no window is larger than 2^32");
        Self(self.0.wrapping_add(bytes))
    }

    /// The number of bytes since another number, which must not be later.
    pub fn since(self, other: Self) -> usize {
        self.0.wrapping_sub(other.0) as usize
    }

    /// Whether it is after another number: less than 2^31 ahead of it.
    pub fn is_after(self, other: Self) -> bool {
        (1..1 << 31).contains(&self.0.wrapping_sub(other.0))
    }

    pub fn later(self, other: Self) -> Self {
        if self.is_after(other) { self } else { other }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment<'a> {
    /// Source and destination ports.
    pub ports: (u16, u16),
    /// Sequence number of the first byte.
    pub seq: Seq,
    /// Next expected sequence number of the other side, if [`ACK`] is set.
    pub ack: Seq,
    pub flags: u8,
    /// Window of the sender, unscaled.
    pub window: u16,
    /// Option: maximum segment size, in bytes.
    pub mss: Option<u16>,
    /// Option: window scale, as a shift.
    pub scale: Option<u8>,
    pub data: &'a [u8],
}

impl<'a> Segment<'a> {
    pub fn read(packet: &Packet<'a>) -> Option<Self> {
        let bytes = packet.payload;
        let fixed = bytes.first_chunk::<HEADER>()?;
        let length = usize::from(fixed[12] >> 4) * 4;
        let options = bytes.get(HEADER..length)?;
        if !packet.is_sound() {
            return None;
        }
        let short = |at: usize| u16::from_be_bytes([fixed[at], fixed[at + 1]]);
        let long = |at: usize| {
            u32::from_be_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]])
        };
        let mut segment = Self {
            ports: (short(0), short(2)),
            seq: Seq(long(4)),
            ack: Seq(long(8)),
            flags: fixed[13],
            window: short(14),
            mss: None,
            scale: None,
            data: bytes.get(length..)?,
        };
        segment.read_options(options);
        Some(segment)
    }

    fn read_options(&mut self, mut options: &[u8]) {
        loop {
            options = match options {
                [] | [0, ..] => return,
                [1, rest @ ..] => rest,
                [2, 4, a, b, rest @ ..] => {
                    self.mss = Some(u16::from_be_bytes([*a, *b]));
                    rest
                }
                [3, 3, shift, rest @ ..] => {
                    self.scale = Some((*shift).min(MAX_SCALE));
                    rest
                }
                [_, length, ..] if *length >= 2 => match options.get(usize::from(*length)..) {
                    Some(rest) => rest,
                    None => return,
                },
                _ => return,
            };
        }
    }

    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// The number of sequence numbers that the segment occupies, with SYN and FIN.
    pub fn length(&self) -> usize {
        self.data.len() + usize::from(self.has(SYN)) + usize::from(self.has(FIN))
    }

    /// The header with options, and a checksum of zero.
    pub fn header(&self) -> Header {
        let mut header = Header { bytes: [0; HEADER + 8], length: HEADER };
        if let Some(mss) = self.mss {
            let [a, b] = mss.to_be_bytes();
            header.push([2, 4, a, b]);
        }
        if let Some(scale) = self.scale {
            header.push([1, 3, 3, scale]);
        }
        let words = u8::try_from(header.length / 4).expect("a header has at most 28 bytes");
        let bytes = &mut header.bytes;
        bytes[..2].copy_from_slice(&self.ports.0.to_be_bytes());
        bytes[2..4].copy_from_slice(&self.ports.1.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.seq.0.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.ack.0.to_be_bytes());
        bytes[12] = words << 4;
        bytes[13] = self.flags;
        bytes[14..16].copy_from_slice(&self.window.to_be_bytes());
        header
    }

    /// The reset for a segment without a connection (RFC 9293, 3.10.7.1), if it gets one.
    pub fn refusal(&self) -> Option<Segment<'static>> {
        let ports = (self.ports.1, self.ports.0);
        if self.has(RST) {
            None
        } else if self.has(ACK) {
            Some(Segment { ports, seq: self.ack, flags: RST, ..Segment::default() })
        } else {
            let ack = self.seq.plus(self.length());
            Some(Segment { ports, ack, flags: RST | ACK, ..Segment::default() })
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Header {
    bytes: [u8; HEADER + 8],
    length: usize,
}

impl Header {
    fn push(&mut self, option: [u8; 4]) {
        self.bytes[self.length..][..4].copy_from_slice(&option);
        self.length += 4;
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}
