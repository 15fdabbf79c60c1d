//! Transmit descriptors (82574 datasheet, 7.2): legacy, context and data descriptors become
//! packets.
//!
//! Threats: lengths, offsets and counts in descriptors are the driver's. A packet without an end,
//! or longer than a network packet can be, is dropped; its descriptors are returned.

use super::card::{Card, DESCRIPTOR, Ring, TXDW, TXQ0, TXQE};
use super::registers::{
    CTRL, CTRL_VME, SECOND, TARC, TARC_ENABLE, TCTL, TCTL_EN, TDBAL, TSCTC, VET,
};
use host::memory::{Memory, NoMemory};
use host::net::MAX_FRAME;
use serde::{Deserialize, Serialize};

pub(super) const QUEUES: u32 = 2;
/// Maximum number of descriptors of a packet.
const MAX_DESCRIPTORS: u32 = 256;

// The command byte. EOP ends a packet, RS asks for a report.
const EOP: u8 = 1 << 0;
/// Legacy: insert a checksum. Data: segment the packet.
const IC_OR_TSE: u8 = 1 << 2;
const RS: u8 = 1 << 3;
const DEXT: u8 = 1 << 5;
const VLE: u8 = 1 << 6;
// The options of a data descriptor.
const IXSM: u8 = 1 << 0;
const TXSM: u8 = 1 << 1;
/// "Descriptor done", in the status byte.
const DONE: u8 = 1 << 0;
/// Offset of the status byte.
const STATUS: u64 = 12;

/// Where a checksum begins and ends, and where it goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sum {
    pub(super) start: usize,
    pub(super) offset: usize,
    /// The last byte. 0 is the end of the packet.
    pub(super) last: usize,
}

/// A context descriptor (7.2.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Context {
    pub(super) ip: Sum,
    pub(super) transport: Sum,
    pub(super) tcp: bool,
    pub(super) v4: bool,
    pub(super) header: usize,
    pub(super) mss: usize,
}

impl Context {
    fn new(words: [u32; 4]) -> Self {
        let sum = |word: u32| {
            let [start, offset, low, high] = word.to_le_bytes();
            let last = u16::from_le_bytes([low, high]);
            Sum { start: start.into(), offset: offset.into(), last: last.into() }
        };
        let [command, header] = [words[2].to_le_bytes()[3], words[3].to_le_bytes()[1]];
        Self {
            ip: sum(words[0]),
            transport: sum(words[1]),
            tcp: command & 1 != 0,
            v4: command & 2 != 0,
            header: header.into(),
            mss: (words[3] >> 16) as usize,
        }
    }
}

/// A packet as the driver described it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Packet {
    pub(super) bytes: Vec<u8>,
    /// The checksums to insert.
    pub(super) sums: Vec<Sum>,
    /// The packet is cut into segments as this says.
    pub(super) segments: Option<Context>,
    /// The tag to insert: type and content.
    pub(super) tag: Option<[u8; 4]>,
    /// The packet is invalid.
    pub(super) dropped: bool,
}

/// Descriptors that belong together: those of a packet, or a context.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) packet: Option<Packet>,
    ring: Ring,
    count: u32,
    /// The addresses of the descriptors that ask for a report.
    reports: Vec<u64>,
    resets: u32,
}

/// The state of a queue between two packets.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Queue {
    /// The last context descriptor: a driver may rely on it for all later packets.
    context: [u32; 4],
    /// The end of a packet that was too long is still to come.
    dropping: bool,
}

/// The four words of a descriptor.
fn words(memory: &Memory, address: u64) -> Result<[u32; 4], NoMemory> {
    let mut bytes = [0; DESCRIPTOR as usize];
    memory.read(address, &mut bytes)?;
    let word =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    Ok([word(0), word(4), word(8), word(12)])
}

impl Queue {
    /// Takes the next packet or context of a ring. `None` if there is no complete one.
    pub(super) fn take(&mut self, card: &Card, memory: &Memory, number: u32) -> Option<Unit> {
        let registers = &card.registers;
        let enabled =
            registers.has(TCTL, TCTL_EN) && registers.has(TARC + SECOND * number, TARC_ENABLE);
        let ring = card.ring(TDBAL, number, DESCRIPTOR).filter(|_| enabled)?;
        let mut reports = Vec::new();
        let mut packet: Option<Packet> = None;
        for at in 0..ring.ready.min(MAX_DESCRIPTORS) {
            let address = ring.address(at);
            let words = words(memory, address).ok()?;
            let command = words[2].to_le_bytes()[3];
            if command & RS != 0 {
                reports.push(address);
            }
            let unit = |packet, reports| {
                let resets = card.resets;
                Some(Unit { packet, ring, count: at + 1, reports, resets })
            };
            if command & DEXT != 0 && words[2] >> 20 & 15 == 0 {
                self.context = words;
                if packet.is_none() {
                    return unit(None, reports);
                }
                continue;
            }
            let first = packet.is_none();
            let packet = packet.get_or_insert_default();
            self.add(packet, words, first, memory);
            let end = command & EOP != 0;
            if end && registers.has(CTRL, CTRL_VME) && command & VLE != 0 {
                let ([high, low], tag) = (vet(card), (words[3] >> 16).to_be_bytes());
                packet.tag = Some([high, low, tag[2], tag[3]]);
            }
            if end || at + 1 == MAX_DESCRIPTORS {
                packet.dropped |= !end || self.dropping;
                self.dropping = !end;
                return unit(Some(std::mem::take(packet)), reports);
            }
        }
        None
    }

    /// Adds a legacy or data descriptor to a packet.
    fn add(&self, packet: &mut Packet, words: [u32; 4], first: bool, memory: &Memory) {
        let address = u64::from(words[1]) << 32 | u64::from(words[0]);
        let command = words[2].to_le_bytes()[3];
        let extended = command & DEXT != 0;
        let length = words[2] & if extended { 0xf_ffff } else { 0xffff };
        let (start, length) = (packet.bytes.len(), length as usize);
        if start + length > MAX_FRAME {
            packet.dropped = true;
        }
        if !packet.dropped {
            packet.bytes.resize(start + length, 0);
            packet.dropped = memory.read(address, &mut packet.bytes[start..]).is_err();
        }
        let [_, options, ..] = words[3].to_le_bytes();
        match (first, extended) {
            (true, true) => {
                let context = Context::new(self.context);
                if command & IC_OR_TSE != 0 {
                    packet.segments = Some(context);
                }
                let wanted = [(options & IXSM, context.ip), (options & TXSM, context.transport)];
                let wanted = wanted.into_iter().filter(|(bit, _)| *bit != 0);
                packet.sums = wanted.map(|(_, sum)| sum).collect();
            }
            (_, false) if command & IC_OR_TSE != 0 => {
                let offset = words[2].to_le_bytes()[2].into();
                packet.sums = vec![Sum { start: options.into(), offset, last: 0 }];
            }
            _ => {}
        }
    }
}

fn vet(card: &Card) -> [u8; 2] {
    let [_, _, high, low] = card.registers.get(VET).to_be_bytes();
    [high, low]
}

impl Unit {
    /// Returns the descriptors to the driver, unless the card was reset. Returns the causes of an
    /// interrupt.
    pub(super) fn finish(&self, card: &mut Card, memory: &Memory, number: u32) -> u32 {
        if card.resets != self.resets {
            return 0;
        }
        for address in &self.reports {
            // Without bus mastering, the report is lost as on any bus.
            memory.write(address.wrapping_add(STATUS), &[DONE]).ok();
        }
        card.advance(TDBAL, number, &self.ring, self.count);
        if self.packet.as_ref().is_some_and(|it| it.segments.is_some() && !it.dropped) {
            card.registers.count(TSCTC, 1);
        }
        let report = if self.reports.is_empty() { 0 } else { TXDW | TXQ0 << number };
        let empty = self.count == self.ring.ready;
        report | if empty { TXQE } else { 0 }
    }
}
