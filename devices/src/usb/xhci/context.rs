//! Contexts in guest memory (xHCI 6.2): 32 bytes each.

use host::memory::{Memory, NoMemory};

const SIZE: u64 = 32;
/// The number of contexts of a device: one for the slot, and one per endpoint.
pub(super) const CONTEXTS: u8 = 32;

/// A copy of a context: eight words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Context(pub [u32; 8]);

/// Slot states.
pub(super) const DEFAULT: u32 = 1;
pub(super) const ADDRESSED: u32 = 2;
pub(super) const CONFIGURED: u32 = 3;

/// Endpoint types.
const ISOCHRONOUS_OUT: u32 = 1;
const CONTROL: u32 = 4;
const ISOCHRONOUS_IN: u32 = 5;

impl Context {
    pub(super) fn read(memory: &Memory, at: u64) -> Result<Self, NoMemory> {
        let mut bytes = [0; 32];
        memory.read(at, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<4>();
        let mut context = Self::default();
        for (word, bytes) in context.0.iter_mut().zip(words) {
            *word = u32::from_le_bytes(*bytes);
        }
        Ok(context)
    }

    pub(super) fn write(&self, memory: &Memory, at: u64) -> Result<(), NoMemory> {
        let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.write(at, &bytes)
    }

    // Slot contexts.

    /// The port of the root hub, counted from 1. `None` for a device behind another hub.
    pub(super) fn port(&self) -> Option<u8> {
        let [_, _, port, _] = self.0[1].to_le_bytes();
        (self.0[0] & 0xf_ffff == 0).then_some(port)
    }

    pub(super) fn set_state(&mut self, state: u32, address: u8) {
        self.0[3] = state << 27 | u32::from(address);
    }

    pub(super) fn set_entries(&mut self, entries: u8) {
        self.0[0] = self.0[0] & !(0x1f << 27) | u32::from(entries) << 27;
    }

    // Endpoint contexts.

    pub(super) fn fits(&self, number: u8) -> bool {
        let kind = self.0[1] >> 3 & 7;
        let streams = self.0[0] >> 10 & 0x1f;
        let known = match number {
            1 => kind == CONTROL,
            // Isochronous, bulk and interrupt: first from the device, then to it.
            _ if number % 2 == 1 => matches!(kind, 5..=7),
            _ => matches!(kind, 1..=3),
        };
        known && streams == 0
    }

    pub(super) fn is_isochronous(&self) -> bool {
        matches!(self.0[1] >> 3 & 7, ISOCHRONOUS_OUT | ISOCHRONOUS_IN)
    }

    /// The pointer to the transfer ring, with the cycle bit.
    pub(super) fn pointer(&self) -> u64 {
        u64::from(self.0[3]) << 32 | u64::from(self.0[2])
    }

    pub(super) fn set_endpoint(&mut self, state: u32, pointer: u64) {
        self.0[0] = self.0[0] & !7 | state;
        let [low, high] = [pointer & u64::from(u32::MAX), pointer >> 32];
        self.0[2] = u32::try_from(low).expect("32 bits");
        self.0[3] = u32::try_from(high).expect("32 bits");
    }
}

/// An input context: bits of the contexts to drop and to add, and the new contexts.
pub(super) struct Input<'a> {
    memory: &'a Memory,
    at: u64,
    pub(super) drop: u32,
    pub(super) add: u32,
}

impl<'a> Input<'a> {
    pub(super) fn read(memory: &'a Memory, at: u64) -> Result<Self, NoMemory> {
        let at = at & !0xf;
        let control = Context::read(memory, at)?;
        Ok(Self { memory, at, drop: control.0[0], add: control.0[1] })
    }

    /// 0 is the slot context.
    pub(super) fn context(&self, number: u8) -> Result<Context, NoMemory> {
        Context::read(self.memory, offset(self.at, number + 1)?)
    }
}

pub(super) fn offset(base: u64, number: u8) -> Result<u64, NoMemory> {
    base.checked_add(SIZE * u64::from(number)).ok_or(NoMemory)
}
