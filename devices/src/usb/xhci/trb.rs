//! Transfer request blocks, TRBs (xHCI 6.4), and the rings that guests fill with them (4.9).

use std::sync::atomic::{Ordering, fence};

use serde::{Deserialize, Serialize};

use host::memory::{Memory, NoMemory};

pub(super) const SIZE: u64 = 16;
/// The maximum number of consecutive link TRBs. A ring that consists of links counts as empty.
const MAX_LINKS: u32 = 8;

/// TRB types (Table 6-91).
pub(super) const NORMAL: u32 = 1;
pub(super) const SETUP: u32 = 2;
pub(super) const DATA: u32 = 3;
pub(super) const STATUS: u32 = 4;
pub(super) const ISOCH: u32 = 5;
pub(super) const LINK: u32 = 6;
pub(super) const EVENT_DATA: u32 = 7;
pub(super) const NO_OP: u32 = 8;
pub(super) const TRANSFER_EVENT: u32 = 32;
pub(super) const COMMAND_COMPLETION: u32 = 33;
pub(super) const PORT_STATUS_CHANGE: u32 = 34;
pub(super) const HOST_CONTROLLER: u32 = 37;

/// Bits of the control word.
const CYCLE: u32 = 1 << 0;
const TOGGLE: u32 = 1 << 1;
const SHORT: u32 = 1 << 2;
const CHAIN: u32 = 1 << 4;
const COMPLETION: u32 = 1 << 5;
const IMMEDIATE: u32 = 1 << 6;
const IN: u32 = 1 << 16;

/// Completion codes (Table 6-90).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    Success = 1,
    DataBuffer = 2,
    Transaction = 4,
    Trb = 5,
    Stall = 6,
    NoSlots = 9,
    SlotNotEnabled = 11,
    EndpointNotEnabled = 12,
    ShortPacket = 13,
    Parameter = 17,
    ContextState = 19,
    EventRingFull = 21,
    CommandRingStopped = 24,
    Stopped = 26,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Trb {
    pub(super) parameter: u64,
    pub(super) status: u32,
    pub(super) control: u32,
}

impl Trb {
    pub(super) fn event(kind: u32, code: Code, parameter: u64) -> Self {
        Self { parameter, status: (code as u32) << 24, control: kind << 10 }
    }

    pub(super) fn kind(self) -> u32 {
        self.control >> 10 & 0x3f
    }

    pub(super) fn is_chained(self) -> bool {
        self.control & CHAIN != 0
    }

    /// Interrupt On Completion.
    pub(super) fn wants_event(self) -> bool {
        self.control & COMPLETION != 0
    }

    /// Interrupt-on Short Packet.
    pub(super) fn wants_short(self) -> bool {
        self.control & SHORT != 0
    }

    /// Immediate Data: the data is in the parameter.
    pub(super) fn is_immediate(self) -> bool {
        self.control & IMMEDIATE != 0
    }

    /// Whether this is a data stage from the device.
    pub(super) fn is_in(self) -> bool {
        self.control & IN != 0
    }

    pub(super) fn length(self) -> u32 {
        match self.kind() {
            NORMAL | DATA | ISOCH => self.status & 0x1_ffff,
            _ => 0,
        }
    }

    pub(super) fn interrupter(self) -> usize {
        (self.status >> 22) as usize
    }

    fn from_bytes(bytes: [u8; 16]) -> Self {
        let wide = u128::from_le_bytes(bytes);
        let word = |at: u32| u32::try_from(wide >> at & u128::from(u32::MAX)).expect("32 bits");
        let parameter = u64::from(word(32)) << 32 | u64::from(word(0));
        Self { parameter, status: word(64), control: word(96) }
    }

    /// The word with the cycle bit is written last.
    pub(super) fn write(self, memory: &Memory, at: u64, cycle: bool) -> Result<(), NoMemory> {
        let mut first = [0; 12];
        first[..8].copy_from_slice(&self.parameter.to_le_bytes());
        first[8..].copy_from_slice(&self.status.to_le_bytes());
        memory.write(at, &first)?;
        fence(Ordering::Release);
        let control = self.control & !CYCLE | u32::from(cycle);
        memory.write(at.wrapping_add(12), &control.to_le_bytes())
    }
}

/// A position in a ring that the guest fills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ring {
    pub(super) at: u64,
    /// The cycle bit that the next TRB has once the guest has filled it.
    pub(super) cycle: bool,
}

impl Ring {
    /// Parses a pointer whose lowest bit is the cycle bit.
    pub(super) fn new(pointer: u64) -> Self {
        Self { at: pointer & !0xf, cycle: pointer & 1 != 0 }
    }

    pub(super) fn pointer(self) -> u64 {
        self.at | u64::from(self.cycle)
    }

    /// Takes the next TRB and its address, if the guest has filled it. Adds the number of TRBs that
    /// were read to `count`.
    pub(super) fn next(
        &mut self,
        memory: &Memory,
        count: &mut u32,
    ) -> Result<Option<(u64, Trb)>, NoMemory> {
        for _ in 0..MAX_LINKS {
            *count += 1;
            let mut bytes = [0; 16];
            memory.read(self.at, &mut bytes)?;
            let mut trb = Trb::from_bytes(bytes);
            if (trb.control & CYCLE != 0) != self.cycle {
                return Ok(None);
            }
            // The guest writes the rest of a TRB before its cycle bit, so it is read after that.
            fence(Ordering::Acquire);
            memory.read(self.at, &mut bytes)?;
            trb = Trb { control: trb.control, ..Trb::from_bytes(bytes) };
            let at = self.at;
            if trb.kind() != LINK {
                self.at = self.at.wrapping_add(SIZE);
                return Ok(Some((at, trb)));
            }
            self.at = trb.parameter & !0xf;
            self.cycle ^= trb.control & TOGGLE != 0;
        }
        Ok(None)
    }
}
