//! From a packet to frames: checksums, and segments of a long TCP packet (82574 datasheet, 7.2.7
//! and 7.3), by the backend if it can, otherwise here.
//!
//! Threats: all offsets are the driver's. Those that leave the packet make it invalid.

use super::frame::{TYPE, short, sum};
use super::transmit::{Context, Packet, Sum};
use host::net::{HEADER_LENGTH, MAX_FRAME, Offloads};

/// Minimum and maximum bytes of a frame that is not segmented, without its CRC.
const MIN_FRAME: usize = 60;
const MAX_PLAIN: usize = 16 * 1024;
const TCP_HEADER: usize = 20;

/// Offsets in a TCP header, and bits of its flags.
const SEQUENCE: usize = 4;
const FLAGS: usize = 13;
const TCP_SUM: usize = 16;
const FIN_PSH: u8 = 0x09;
const CWR: u8 = 0x80;

/// Fields of `virtio_net_hdr_v1`.
const NEEDS_CSUM: u8 = 1;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_ECN: u8 = 0x80;

/// The header of a frame for the backend.
pub(super) type Header = [u8; HEADER_LENGTH];

/// The frames of one packet.
pub(super) struct Frames<'a> {
    packet: &'a Packet,
    offloads: Offloads,
}

impl<'a> Frames<'a> {
    /// `None` if the packet is invalid.
    pub(super) fn new(packet: &'a Packet, offloads: Offloads) -> Option<Self> {
        let length = packet.bytes.len();
        let valid = match packet.segments {
            None => (TYPE + 2..=MAX_PLAIN).contains(&length),
            Some(context) => is_valid(&context, length),
        };
        (valid && !packet.dropped).then_some(Self { packet, offloads })
    }

    /// How a long packet is cut, unless the backend does it.
    fn cuts(&self) -> Option<Context> {
        self.packet.segments.filter(|_| self.segmentation().is_none())
    }

    /// The number of frames.
    pub(super) fn count(&self) -> usize {
        self.cuts().map_or(1, |cut| (self.packet.bytes.len() - cut.header).div_ceil(cut.mss).max(1))
    }

    /// The kind of segmentation, if the backend does it.
    fn segmentation(&self) -> Option<u8> {
        let context = self.packet.segments?;
        let flags = self.packet.bytes[context.transport.start + FLAGS];
        let (able, kind) = if context.v4 {
            (self.offloads.tso4, GSO_TCPV4)
        } else {
            (self.offloads.tso6, GSO_TCPV6)
        };
        let ecn = if flags & CWR != 0 { GSO_ECN } else { 0 };
        let long = self.packet.bytes.len() - context.header > context.mss;
        let able = able && long && self.packet.tag.is_none() && (ecn == 0 || self.offloads.ecn);
        able.then_some(kind | ecn)
    }

    /// Puts a frame into `frame` and returns its header.
    pub(super) fn make(&self, number: usize, frame: &mut Vec<u8>) -> Header {
        frame.clear();
        let header = match (self.packet.segments, self.cuts()) {
            (_, Some(cut)) => {
                self.cut(cut, number, frame);
                Header::default()
            }
            (Some(context), None) => self.whole(context, frame),
            (None, None) => self.plain(frame),
        };
        if let Some(tag) = self.packet.tag {
            frame.splice(TYPE..TYPE, tag);
        }
        header
    }

    fn plain(&self, frame: &mut Vec<u8>) -> Header {
        frame.extend(&self.packet.bytes);
        let mut header = Header::default();
        for at in &self.packet.sums {
            let able = self.offloads.checksum && self.packet.tag.is_none();
            if able && self.packet.sums.last() == Some(at) && can_leave(*at, frame.len()) {
                header = partial(at.start, at.offset - at.start);
            } else {
                insert(frame, *at);
            }
        }
        frame.resize(frame.len().max(MIN_FRAME), 0);
        header
    }

    /// A packet that the backend cuts.
    fn whole(&self, context: Context, frame: &mut Vec<u8>) -> Header {
        frame.extend(&self.packet.bytes);
        let length = frame.len();
        finish_ip(&context, frame, length, 0);
        add_length(&context, frame, length);
        let tcp = context.transport;
        let mut header = partial(tcp.start, TCP_SUM);
        header[1] = self.segmentation().unwrap_or(0);
        header[2..4].copy_from_slice(&low(context.header));
        header[4..6].copy_from_slice(&low(context.mss));
        header
    }

    /// One segment of a packet.
    fn cut(&self, cut: Context, number: usize, frame: &mut Vec<u8>) {
        let bytes = &self.packet.bytes;
        let start = (cut.header + number * cut.mss).min(bytes.len());
        let end = (start + cut.mss).min(bytes.len());
        frame.extend(&bytes[..cut.header]);
        frame.extend(&bytes[start..end]);
        let length = frame.len();
        finish_ip(&cut, frame, length, number);
        add_length(&cut, frame, length);
        let tcp = cut.transport.start;
        let moved = u32::try_from(number * cut.mss).unwrap_or(0);
        let at = tcp + SEQUENCE;
        let sequence = [frame[at], frame[at + 1], frame[at + 2], frame[at + 3]];
        let sequence = u32::from_be_bytes(sequence).wrapping_add(moved);
        frame[at..at + 4].copy_from_slice(&sequence.to_be_bytes());
        if end < bytes.len() {
            frame[tcp + FLAGS] &= !FIN_PSH;
        }
        if number > 0 {
            frame[tcp + FLAGS] &= !CWR;
        }
        insert(frame, Sum { last: 0, ..cut.transport });
        frame.resize(frame.len().max(MIN_FRAME), 0);
    }
}

fn is_valid(context: &Context, length: usize) -> bool {
    let (ip, tcp) = (context.ip.start, context.transport.start);
    let ip_header = if context.v4 { 20 } else { 40 };
    context.tcp
        && context.mss > 0
        && ip >= TYPE + 2
        && ip + ip_header <= tcp
        && tcp + TCP_HEADER <= context.header
        && context.transport.offset == tcp + TCP_SUM
        && context.header <= length
        && context.header + context.mss <= MAX_PLAIN
        && length <= MAX_FRAME
}

/// The lower 16 bits, little-endian.
fn low(value: usize) -> [u8; 2] {
    u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes()
}

/// The header of a frame whose checksum the backend completes.
fn partial(start: usize, offset: usize) -> Header {
    let mut header = Header::default();
    header[0] = NEEDS_CSUM;
    header[6..8].copy_from_slice(&low(start));
    header[8..10].copy_from_slice(&low(offset));
    header
}

/// Whether the backend can compute this checksum: to the end of the frame, which is not padded.
fn can_leave(at: Sum, length: usize) -> bool {
    at.last == 0 && at.offset >= at.start && at.offset + 2 <= length && length >= MIN_FRAME
}

/// Writes a checksum over the bytes from `start`, which include its own seed.
fn insert(frame: &mut [u8], at: Sum) {
    let end = if at.last == 0 { frame.len() } else { (at.last + 1).min(frame.len()) };
    let Some(covered) = frame.get(at.start..end) else { return };
    let checksum = match !sum(covered, 0) {
        // 0 would mean "no checksum" in UDP, and is the same number in all others.
        0 => 0xffff,
        other => other,
    };
    if let Some(to) = frame.get_mut(at.offset..at.offset + 2) {
        to.copy_from_slice(&checksum.to_be_bytes());
    }
}

/// Sets length, identification and checksum of the IP header. The offsets were checked.
fn finish_ip(context: &Context, frame: &mut [u8], length: usize, number: usize) {
    let start = context.ip.start;
    let put = |frame: &mut [u8], at: usize, value: usize| {
        let [_, _, .., high, low] = value.to_be_bytes();
        frame[at..at + 2].copy_from_slice(&[high, low]);
    };
    if !context.v4 {
        return put(frame, start + 4, length - start - 40);
    }
    put(frame, start + 2, length - start);
    let id = usize::from(short(frame, start + 4).unwrap_or(0)) + number;
    put(frame, start + 4, id & 0xffff);
    frame[start + 10..start + 12].fill(0);
    let checksum = !sum(&frame[start..context.transport.start], 0);
    frame[start + 10..start + 12].copy_from_slice(&checksum.to_be_bytes());
}

/// Completes the pseudo header's sum, which the driver computed for a length of 0.
fn add_length(context: &Context, frame: &mut [u8], length: usize) {
    let at = context.transport.offset;
    let length = u16::try_from(length - context.transport.start).unwrap_or(u16::MAX);
    let seed = sum(&length.to_be_bytes(), short(frame, at).unwrap_or(0));
    frame[at..at + 2].copy_from_slice(&seed.to_be_bytes());
}

#[cfg(test)]
mod test {
    use super::super::frame::{Ip, TCP};
    use super::*;

    /// A TCP packet with `payload` bytes, as a driver prepares it for segmentation.
    fn packet(payload: usize, mss: usize, v4: bool) -> Packet {
        let mut bytes = vec![2; 12];
        let ip = if v4 { 20 } else { 40 };
        if v4 {
            bytes.extend([8, 0, 0x45, 0, 0, 0, 0xff, 0xff, 0x40, 0, 64, TCP, 0, 0]);
            bytes.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        } else {
            bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, TCP, 64]);
            bytes.extend([0xfd; 32]);
        }
        let addresses = bytes[bytes.len() - ip + 12 - if v4 { 0 } else { 4 }..].to_vec();
        let seed = sum(&addresses, TCP.into());
        let tcp = bytes.len();
        bytes.extend([0, 80, 1, 2, 0xff, 0xff, 0xff, 0xf0, 0, 0, 0, 0, 0x50, 0x99, 1, 0]);
        bytes.extend(seed.to_be_bytes());
        bytes.extend([0, 0]);
        bytes.extend((0..payload).map(|at| u8::try_from(at % 251).unwrap()));
        let context = Context {
            ip: Sum { start: 14, offset: 24, last: tcp - 1 },
            transport: Sum { start: tcp, offset: tcp + 16, last: 0 },
            tcp: true,
            v4,
            header: tcp + 20,
            mss,
        };
        Packet { bytes, segments: Some(context), ..Packet::default() }
    }

    #[test]
    fn segments_have_right_headers_and_all_of_the_data() {
        for v4 in [true, false] {
            for (payload, mss, count) in [(3000, 1000, 3), (2999, 1000, 3), (1, 536, 1)] {
                let packet = packet(payload, mss, v4);
                let header = packet.segments.unwrap().header;
                let frames = Frames::new(&packet, Offloads::default()).unwrap();
                assert_eq!(frames.count(), count);
                let (mut frame, mut data) = (Vec::new(), Vec::<u8>::new());
                for number in 0..count {
                    assert_eq!(frames.make(number, &mut frame), Header::default());
                    let ip = Ip::find(&frame, 0x8100).unwrap();
                    assert_ne!(ip.header_is_right(&frame), Some(false));
                    assert_eq!(ip.transport_is_right(&frame), Some(true), "{v4} {number}");
                    let flags = frame[ip.next + FLAGS];
                    assert_eq!(flags & FIN_PSH != 0, number + 1 == count);
                    assert_eq!(flags & CWR != 0, number == 0);
                    let sequence =
                        u32::from_be_bytes(frame[ip.next + 4..][..4].try_into().unwrap());
                    assert_eq!(
                        sequence,
                        0xffff_fff0_u32.wrapping_add(u32::try_from(number * mss).unwrap())
                    );
                    data.extend(&frame[header..ip.end]);
                }
                assert_eq!(data, packet.bytes[header..]);
            }
        }
    }

    #[test]
    fn a_backend_that_can_gets_the_whole_packet() {
        let packet = packet(3000, 1000, true);
        let frames = Frames::new(&packet, Offloads { ecn: false, ..Offloads::ALL }).unwrap();
        assert_eq!(frames.count(), 3, "it does not know CWR");
        let frames = Frames::new(&packet, Offloads::ALL).unwrap();
        let mut frame = Vec::new();
        let header = frames.make(0, &mut frame);
        assert_eq!(header, [1, 0x81, 54, 0, 0xe8, 3, 34, 0, 16, 0, 0, 0]);
        assert_eq!(Ip::find(&frame, 0x8100).unwrap().header_is_right(&frame), Some(true));
        let tagged = Packet { tag: Some([0x81, 0, 0, 7]), ..packet };
        let frames = Frames::new(&tagged, Offloads::ALL).unwrap();
        assert_eq!((frames.count(), frames.make(2, &mut frame)), (3, Header::default()));
        let ip = Ip::find(&frame, 0x8100).unwrap();
        assert_eq!((ip.start, ip.transport_is_right(&frame)), (18, Some(true)));
    }

    #[test]
    fn offsets_outside_of_the_packet_are_refused() {
        let good = packet(100, 50, true);
        assert!(Frames::new(&good, Offloads::default()).is_some());
        let changes: [fn(&mut Context); 7] = [
            |it| it.mss = 0,
            |it| it.tcp = false,
            |it| it.header = 255,
            |it| it.header = 53,
            |it| it.ip.start = 15,
            |it| it.transport.offset = 255,
            |it| it.transport.start = 200,
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut bad = good.clone();
            change(bad.segments.as_mut().unwrap());
            assert!(Frames::new(&bad, Offloads::default()).is_none(), "{number}");
        }
        for length in [0, 13, MAX_PLAIN + 1] {
            let bad = Packet { bytes: vec![0; length], ..Packet::default() };
            assert!(Frames::new(&bad, Offloads::default()).is_none(), "{length}");
        }
        // Checksums outside of the frame are not written.
        let sums =
            vec![Sum { start: 200, offset: 2, last: 0 }, Sum { start: 14, offset: 99, last: 1 }];
        let odd = Packet { bytes: vec![7; 60], sums, ..Packet::default() };
        let mut frame = Vec::new();
        Frames::new(&odd, Offloads::ALL).unwrap().make(0, &mut frame);
        assert_eq!(frame, odd.bytes);
    }
}
