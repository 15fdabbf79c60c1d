//! Received frames (82574 datasheet, 7.1): filters, the choice of a queue, and the three formats of
//! descriptors.
//!
//! Threats: the peer chooses frames, and the driver chooses addresses of buffers. Frames are in our
//! own memory and their headers are checked. A buffer outside of memory loses its part of a frame.

use std::sync::atomic::{Ordering, fence};

use super::card::{Card, DESCRIPTOR, RXDMT0, RXQ0, RXT0, Ring};
use super::frame::{Ip, TCP, TYPE, UDP, Version, short, sum, toeplitz};
use super::registers::{
    ADDRESSES, CTRL, CTRL_VME, MRQC, MTA, PSRCTL, RAH_AV, RAL, RCTL, RCTL_BAM, RCTL_BSEX, RCTL_EN,
    RCTL_LPE, RCTL_MPE, RCTL_PACKET_SPLIT, RCTL_SECRC, RCTL_UPE, RCTL_VFE, RDBAL, RETA, RFCTL,
    RFCTL_EXTEN, RSSRK, RXCSUM, RXCSUM_IPOFLD, RXCSUM_PCSD, RXCSUM_TUOFLD, Registers, VET, VFTA,
};
use host::memory::Memory;

/// Minimum bytes of a frame; shorter ones are padded. Maximum bytes without and with RCTL.LPE,
/// without a CRC.
const MIN_FRAME: usize = 60;
const MAX_USUAL: usize = 1518;
const MAX_LONG: usize = 16 * 1024 - 4;

// Bits of a descriptor's status.
const DONE: u32 = 1 << 0;
const END: u32 = 1 << 1;
const NO_CHECKSUM: u32 = 1 << 2;
const VLAN: u32 = 1 << 3;
const UDP_CHECKED: u32 = 1 << 4;
const TRANSPORT_CHECKED: u32 = 1 << 5;
const IP_CHECKED: u32 = 1 << 6;
const EXACT_MATCH: u32 = 1 << 7;
const TRANSPORT_WRONG: u32 = 1 << 29;
const IP_WRONG: u32 = 1 << 30;
/// Header status of a split packet: the header has a buffer of its own.
const SPLIT: u16 = 1 << 15;

/// The layout of a ring's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Legacy,
    Extended,
    PacketSplit,
}

/// The results of examining a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Findings {
    status: u32,
    tag: u16,
    queue: u32,
    hash_type: u32,
    hash: u32,
    checksum: u16,
    /// Where the data begins, if a split packet has headers.
    header: usize,
}

/// The result of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivery {
    /// Causes of an interrupt.
    Done(u32),
    /// The driver must add buffers first.
    NoBuffers,
}

/// Whether the driver has enabled reception and there is room for a frame.
pub(super) fn is_ready(card: &Card) -> bool {
    let size = ring_step(&card.registers);
    let any = |queue| card.ring(RDBAL, queue, size).is_some_and(|ring| ring.ready > 0);
    card.registers.has(RCTL, RCTL_EN) && (0..2).any(any)
}

fn format(registers: &Registers) -> Format {
    match (registers.has(RFCTL, RFCTL_EXTEN), registers.has(RCTL, RCTL_PACKET_SPLIT)) {
        (false, _) => Format::Legacy,
        (true, false) => Format::Extended,
        (true, true) => Format::PacketSplit,
    }
}

/// Bytes of a descriptor.
fn ring_step(registers: &Registers) -> u32 {
    if format(registers) == Format::PacketSplit { 2 * DESCRIPTOR } else { DESCRIPTOR }
}

/// The sizes of a descriptor's buffers.
fn buffers(registers: &Registers) -> [usize; 4] {
    let (rctl, split) = (registers.get(RCTL), registers.get(PSRCTL));
    if format(registers) == Format::PacketSplit {
        let kib = |shift: u32| ((split >> shift & 0x3f) as usize) << 10;
        return [((split & 0x7f) as usize) << 7, kib(8), kib(16), kib(24)];
    }
    let (flexible, size) = ((rctl >> 27 & 15) as usize, rctl >> 16 & 3);
    let one = match (flexible, rctl & RCTL_BSEX != 0) {
        (0, false) => 2048 >> size,
        (0, true) => 32768 >> size.max(1),
        (kib, _) => kib << 10,
    };
    [one, 0, 0, 0]
}

/// Whether the driver wants a frame: `None` if not, otherwise whether an address matched exactly.
fn accepts(registers: &Registers, frame: &[u8]) -> Option<bool> {
    let rctl = registers.get(RCTL);
    let long = frame.len() > if rctl & RCTL_LPE != 0 { MAX_LONG } else { MAX_USUAL };
    if long || frame.len() < TYPE + 2 {
        return None;
    }
    if rctl & RCTL_VFE != 0 && Some(vet(registers)) == short(frame, TYPE) {
        let id = u32::from(short(frame, TYPE + 2)? & 0xfff);
        if registers.get(VFTA + (id >> 5) * 4) >> (id & 31) & 1 == 0 {
            return None;
        }
    }
    let to: [u8; 6] = frame[..6].try_into().ok()?;
    let exact = (0..ADDRESSES).any(|number| {
        let [low, high] = [0, 4].map(|half| registers.get(RAL + 8 * number + half));
        let ([a, b, c, d], [e, f, ..]) = (low.to_le_bytes(), high.to_le_bytes());
        high & RAH_AV != 0 && [a, b, c, d, e, f] == to
    });
    let group = to[0] & 1 != 0;
    let wanted = exact
        || !group && rctl & RCTL_UPE != 0
        || group && rctl & RCTL_MPE != 0
        || to == [0xff; 6] && rctl & RCTL_BAM != 0
        || group && is_in_table(registers, to);
    wanted.then_some(exact)
}

/// The multicast table: a bit for each value of 12 bits of the address (7.1.1.2).
fn is_in_table(registers: &Registers, to: [u8; 6]) -> bool {
    let shift = [4, 3, 2, 0][(registers.get(RCTL) >> 12 & 3) as usize];
    let bit = u32::from(u16::from_le_bytes([to[4], to[5]]) >> shift) & 0xfff;
    registers.get(MTA + (bit >> 5) * 4) >> (bit & 31) & 1 != 0
}

fn vet(registers: &Registers) -> u16 {
    (registers.get(VET) & 0xffff) as u16
}

impl Findings {
    fn check(&mut self, registers: &Registers, frame: &[u8], ip: &Ip) {
        let rxcsum = registers.get(RXCSUM);
        if rxcsum & RXCSUM_IPOFLD != 0 {
            match ip.header_is_right(frame) {
                Some(true) => self.status |= IP_CHECKED,
                Some(false) => self.status |= IP_CHECKED | IP_WRONG,
                None => {}
            }
        }
        if rxcsum & RXCSUM_TUOFLD != 0
            && let Some(right) = ip.transport_is_right(frame)
        {
            self.status |= TRANSPORT_CHECKED;
            if ip.transport == Some(UDP) {
                self.status |= UDP_CHECKED;
            }
            if !right {
                self.status |= TRANSPORT_WRONG;
            }
        }
    }

    /// Receive side scaling (7.1.11).
    fn spread(&mut self, registers: &Registers, frame: &[u8], ip: &Ip) {
        let mrqc = registers.get(MRQC);
        let tcp = ip.transport == Some(TCP);
        let enabled = |bit: u32| mrqc >> bit & 1 != 0;
        self.hash_type = match ip.version {
            Version::Four if tcp && enabled(16) => 1,
            Version::Four if enabled(17) => 2,
            Version::Six if tcp && enabled(18) => 3,
            Version::Six if enabled(19) => 4,
            Version::Six if enabled(20) => 5,
            _ => return,
        };
        let ports = if [1, 3].contains(&self.hash_type) { ip.next..ip.next + 4 } else { 0..0 };
        let parts = [ip.addresses(frame).unwrap_or_default(), &frame[ports]];
        self.hash = toeplitz(|at| registers.byte(RSSRK, at % 40), &parts);
        self.queue = u32::from(registers.byte(RETA, self.hash & 0x7f) >> 7);
    }

    fn new(registers: &Registers, frame: &[u8], exact: bool) -> Self {
        let mut found = Self::default();
        let rxcsum = registers.get(RXCSUM);
        let raw = rxcsum & RXCSUM_PCSD == 0;
        if let Some(ip) = Ip::find(frame, vet(registers)) {
            found.check(registers, frame, &ip);
            if registers.get(MRQC) & 3 == 1 && !raw && format(registers) != Format::Legacy {
                found.spread(registers, frame, &ip);
            }
            found.header = ip.headers_end(frame);
        }
        if found.status & (IP_CHECKED | TRANSPORT_CHECKED) == 0 {
            found.status |= NO_CHECKSUM;
        }
        if raw {
            found.checksum = sum(frame.get((rxcsum & 0xff) as usize..).unwrap_or_default(), 0);
        }
        if exact {
            found.status |= EXACT_MATCH;
        }
        found
    }
}

/// Hands a frame to the driver, or drops it if the driver does not want it.
pub(super) fn deliver(card: &mut Card, memory: &Memory, frame: &mut Vec<u8>) -> Delivery {
    let registers = &card.registers;
    let Some(exact) = accepts(registers, frame) else { return Delivery::Done(0) };
    frame.resize(frame.len().max(MIN_FRAME), 0);
    let mut found = Findings::new(registers, frame, exact);
    let tagged = short(frame, TYPE) == Some(vet(registers));
    let strip = tagged && registers.has(CTRL, CTRL_VME);
    if strip {
        found.tag = short(frame, TYPE + 2).unwrap_or(0);
        found.status |= VLAN;
        found.header = found.header.saturating_sub(4);
    }
    let step = ring_step(registers);
    let Some(ring) = card.ring(RDBAL, found.queue, step) else { return Delivery::Done(0) };
    let crc = if registers.has(RCTL, RCTL_SECRC) { 0 } else { 4 };
    let length = frame.len() + crc - if strip { 4 } else { 0 };
    let room = buffers(registers).iter().sum::<usize>();
    let Some(needed) = u32::try_from(length.div_ceil(room.max(1))).ok().filter(|_| room > 0) else {
        return Delivery::Done(0);
    };
    if needed > ring.ready {
        // A ring that never has this many buffers loses the frame.
        return if needed < ring.count { Delivery::NoBuffers } else { Delivery::Done(0) };
    }
    card.count(frame, true);
    if strip {
        frame.drain(TYPE..TYPE + 4);
    }
    // The CRC is not computed: drivers ignore it.
    frame.resize(length, 0);
    let used = fill(card, memory, &ring, &found, frame);
    card.advance(RDBAL, found.queue, &ring, used);
    let threshold = ring.count >> ((card.registers.get(RCTL) >> 8 & 3) + 1);
    let low = if ring.ready - used <= threshold { RXDMT0 } else { 0 };
    Delivery::Done(RXT0 | RXQ0 << found.queue | low)
}

/// The bytes in each buffer of a descriptor, and the header status.
#[derive(Clone, Copy, Default)]
struct Lengths([u16; 4], u16);

/// Puts a frame into as many buffers as it needs. Returns the number of descriptors.
fn fill(card: &Card, memory: &Memory, ring: &Ring, found: &Findings, frame: &[u8]) -> u32 {
    let (format, sizes) = (format(&card.registers), buffers(&card.registers));
    let (mut rest, mut used) = (frame, 0);
    while !rest.is_empty() && used < ring.ready {
        let address = ring.address(used);
        used += 1;
        let mut old = [0; 2 * DESCRIPTOR as usize];
        let count = if format == Format::PacketSplit { 4 } else { 1 };
        // Without bus mastering, all of this is lost.
        memory.read(address, &mut old[..8 * count]).ok();
        let first = used == 1 && format == Format::PacketSplit;
        let header = found.header.min(rest.len());
        let split = first && header > 0 && header <= sizes[0];
        let mut lengths = Lengths::default();
        for (number, to) in old.chunks_exact(8).take(count).enumerate() {
            let size = if number == 0 && split { header } else { sizes[number] };
            let (now, later) = rest.split_at(size.min(rest.len()));
            let to = to.try_into().map_or(0, u64::from_le_bytes);
            memory.write(to, now).ok();
            lengths.0[number] = u16::try_from(now.len()).unwrap_or(u16::MAX);
            rest = later;
        }
        let end = if rest.is_empty() { END } else { 0 };
        let found = Findings { status: found.status | DONE | end, ..*found };
        lengths.1 = if split { SPLIT | lengths.0[0] } else { 0 };
        report((memory, address), format, &found, lengths);
    }
    used
}

/// Writes a descriptor. Its status comes last, because the driver polls it.
fn report((memory, address): (&Memory, u64), format: Format, found: &Findings, filled: Lengths) {
    let Lengths(lengths, header) = filled;
    let put = |at: u64, bytes: &[u8]| {
        // Without bus mastering, the report is lost.
        memory.write(address.wrapping_add(at), bytes).ok();
    };
    let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
    if format == Format::Legacy {
        put(8, &pair(lengths[0], found.checksum).to_le_bytes());
        fence(Ordering::Release);
        let status = found.status & 0xff | found.status >> 16 & 0xff00;
        return put(12, &(status | u32::from(found.tag) << 16).to_le_bytes());
    }
    let second = if found.hash_type == 0 { pair(0, found.checksum) } else { found.hash };
    put(0, &(found.hash_type | found.queue << 8).to_le_bytes());
    put(4, &second.to_le_bytes());
    put(12, &pair(lengths[0], found.tag).to_le_bytes());
    if format == Format::PacketSplit {
        put(16, &pair(header, lengths[1]).to_le_bytes());
        put(20, &pair(lengths[2], lengths[3]).to_le_bytes());
    }
    fence(Ordering::Release);
    put(8, &found.status.to_le_bytes());
}
