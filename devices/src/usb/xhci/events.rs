//! Interrupters and their event rings (xHCI 4.9.4, 4.17, 5.5.2).
//!
//! Events that do not fit into a ring are queued here. The controller processes nothing new while
//! events are queued, so the queue is bounded.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::trb::{Code, HOST_CONTROLLER, SIZE, Trb};
use host::memory::{Memory, NoMemory};

/// IMAN.
pub(super) const PENDING: u32 = 1 << 0;
pub(super) const ENABLE: u32 = 1 << 1;
/// ERDP: the event handler is busy.
const BUSY: u64 = 1 << 3;
/// The maximum number of segments, as an exponent of two for HCSPARAMS2.
pub(super) const SEGMENTS_LOG: u32 = 4;
const SEGMENTS: u32 = 1 << SEGMENTS_LOG;
/// The number of entries that a segment may have (Table 6-85).
const ENTRIES: std::ops::RangeInclusive<u32> = 16..=4096;

/// Registers of an interrupter: IMAN, IMOD, ERSTSZ, ERSTBA, ERDP.
const IMAN: u64 = 0x00;
const IMOD: u64 = 0x04;
const ERSTSZ: u64 = 0x08;
const ERSTBA: u64 = 0x10;
const ERDP: u64 = 0x18;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Producer {
    /// The address and the number of entries of each segment.
    table: Vec<(u64, u32)>,
    segment: usize,
    index: u32,
    cycle: bool,
}

impl Producer {
    fn load(memory: &Memory, at: u64, segments: u32) -> Result<Self, NoMemory> {
        let mut table = Vec::new();
        for number in 0..u64::from(segments) {
            let mut bytes = [0; 12];
            memory.read((at & !0x3f).checked_add(16 * number).ok_or(NoMemory)?, &mut bytes)?;
            let [a, b, c, d, e, f, g, h, size @ ..] = bytes;
            let entries = u32::from_le_bytes(size) & 0xffff;
            if !ENTRIES.contains(&entries) {
                return Err(NoMemory);
            }
            table.push((u64::from_le_bytes([a, b, c, d, e, f, g, h]) & !0x3f, entries));
        }
        Ok(Self { table, segment: 0, index: 0, cycle: true })
    }

    /// The address of the next entry. `None` if a damaged saved state is outside of the table.
    fn at(&self) -> Option<u64> {
        let (base, entries) = self.table.get(self.segment)?;
        let index = Some(self.index).filter(|index| index < entries)?;
        base.checked_add(SIZE * u64::from(index))
    }

    fn advance(&mut self) {
        self.index += 1;
        if self.table.get(self.segment).is_none_or(|(_, entries)| self.index >= *entries) {
            (self.index, self.segment) = (0, self.segment + 1);
        }
        if self.segment >= self.table.len() {
            self.segment = 0;
            self.cycle = !self.cycle;
        }
    }

    /// The number of free entries, without the one that always stays free: 0, 1, or 2 for more.
    fn room(&self, dequeue: u64) -> u32 {
        let mut ahead = self.clone();
        for room in 0..2 {
            ahead.advance();
            if ahead.at() == Some(dequeue) {
                return room;
            }
        }
        2
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Interrupter {
    iman: u32,
    imod: u32,
    erstsz: u32,
    erstba: u64,
    erdp: u64,
    producer: Option<Producer>,
    waiting: VecDeque<Trb>,
    /// The last event in the ring reports that the ring is full.
    told: bool,
}

impl Interrupter {
    pub(super) fn read(&self, offset: u64) -> u32 {
        match offset {
            IMAN => self.iman,
            IMOD => self.imod,
            ERSTSZ => self.erstsz,
            ERSTBA | 0x14 => half(self.erstba, offset),
            ERDP | 0x1c => half(self.erdp, offset),
            _ => 0,
        }
    }

    pub(super) fn write(&mut self, offset: u64, value: u32) {
        match offset {
            IMAN => self.iman = self.iman & !value & PENDING | value & ENABLE,
            IMOD => self.imod = value,
            ERSTSZ => self.erstsz = value & 0xffff,
            // The ring begins anew. The next event reads the segment table.
            ERSTBA | 0x14 => {
                set_half(&mut self.erstba, offset, value);
                self.erstba &= !0x3f;
                self.producer = None;
            }
            ERDP | 0x1c => {
                let busy = self.erdp & BUSY;
                set_half(&mut self.erdp, offset, value);
                let handled = offset == ERDP && u64::from(value) & BUSY != 0;
                self.erdp = self.erdp & !BUSY | if handled { 0 } else { busy };
                if handled && self.is_behind() {
                    self.raise();
                }
            }
            _ => {}
        }
    }

    /// Whether the guest has not handled all events.
    fn is_behind(&self) -> bool {
        let next = self.producer.as_ref().and_then(Producer::at);
        next.is_some_and(|next| next != self.erdp & !0xf)
    }

    pub(super) fn push(&mut self, event: Trb) {
        self.waiting.push_back(event);
    }

    pub(super) fn has_queued(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Writes queued events to the ring as far as there is room.
    pub(super) fn flush(&mut self, memory: &Memory) -> Result<(), NoMemory> {
        while let Some(event) = self.waiting.front().copied() {
            let producer = match &mut self.producer {
                Some(producer) => producer,
                // The interrupter was never set up: its events are lost.
                None if self.erstsz == 0 => {
                    self.waiting.clear();
                    return Ok(());
                }
                none => {
                    let segments = self.erstsz.min(SEGMENTS);
                    none.insert(Producer::load(memory, self.erstba, segments)?)
                }
            };
            let at = producer.at().ok_or(NoMemory)?;
            let event = match producer.room(self.erdp & !0xf) {
                0 => return Ok(()),
                1 if self.told => return Ok(()),
                1 => Trb::event(HOST_CONTROLLER, Code::EventRingFull, 0),
                _ => event,
            };
            event.write(memory, at, producer.cycle)?;
            producer.advance();
            self.told = event.kind() == HOST_CONTROLLER;
            if !self.told {
                self.waiting.pop_front();
            }
            if self.erdp & BUSY == 0 {
                self.raise();
            }
        }
        Ok(())
    }

    fn raise(&mut self) {
        self.erdp |= BUSY;
        self.iman |= PENDING;
    }

    pub(super) fn is_raised(&self) -> bool {
        self.iman & (PENDING | ENABLE) == PENDING | ENABLE
    }

    /// Called after the interrupt was sent as a message.
    pub(super) fn sent(&mut self) {
        self.iman &= !PENDING;
    }

    pub(super) fn is_pending(&self) -> bool {
        self.iman & PENDING != 0
    }
}

/// The half of a 64-bit register at this offset.
pub(super) fn half(value: u64, offset: u64) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    u32::from_le_bytes(if offset & 4 == 0 { [a, b, c, d] } else { [e, f, g, h] })
}

pub(super) fn set_half(register: &mut u64, offset: u64, value: u32) {
    *register = if offset & 4 == 0 {
        *register >> 32 << 32 | u64::from(value)
    } else {
        *register & u64::from(u32::MAX) | u64::from(value) << 32
    };
}
