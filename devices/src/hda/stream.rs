//! A stream descriptor (HDA 3.3.35 to 3.3.42) and its DMA engine, which moves bytes between the
//! buffers of a list and the link at the pace of the host's clock.

use std::time::{Duration, Instant};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use host::memory::Memory;
use host::sound::{FRAME_BYTES, RATE};

// SDnCTL: reset, run, and the stream's number.
const RESET: u32 = 1 << 0;
const RUN: u32 = 1 << 1;
/// Bits that are kept: those two, the interrupts below, stripe, traffic priority, number.
const CONTROL: u32 = 0x00f7_001f;
// SDnSTS. Its interrupt bits are at the same places in SDnCTL, where they enable interrupts.
const COMPLETED: u8 = 1 << 2;
const FIFO_ERROR: u8 = 1 << 3;
const LIST_ERROR: u8 = 1 << 4;
const INTERRUPTS: u8 = COMPLETED | FIFO_ERROR | LIST_ERROR;
const FIFO_READY: u8 = 1 << 5;
/// The only value of SDnFIFOW: 32 bytes.
const WATERMARK: u32 = 4;

/// A buffer list has at most this many entries (LVI has 8 bits).
const MAX_ENTRIES: usize = 256;
const ENTRY_BYTES: usize = 16;
/// The flag of an entry after whose end the driver wants an interrupt.
const ON_COMPLETION: u32 = 1;

/// A stream that is later than this skips the time: the driver would be late as well, and the work
/// at once stays bounded.
const MAX_LATE: Duration = Duration::from_millis(100);
const SECOND: u128 = 1_000_000_000;

/// An entry of the buffer list, which is copied when the stream starts. Its length is not 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Buffer {
    address: u64,
    length: u32,
    interrupt: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Stream {
    control: u32,
    status: u8,
    /// LPIB: bytes from the start of the cyclic buffer.
    pub position: u32,
    /// CBL, in bytes.
    length: u32,
    /// LVI
    last: u8,
    pub format: u16,
    /// BDPL and BDPU
    list: u64,
    buffers: Vec<Buffer>,
    /// The next byte to move: a buffer, and an offset in it.
    buffer: usize,
    offset: u32,
    /// Unset while the stream does not move.
    #[serde(skip)]
    clock: Option<Clock>,
}

/// The pace of a stream.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Clock {
    since: Instant,
    /// Frames that were moved since then.
    moved: u64,
}

impl Stream {
    /// Refuses values that no guest can set.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(self.buffers.len() <= MAX_ENTRIES, "a list of {} buffers", self.buffers.len());
        ensure!(self.buffers.iter().all(|it| it.length > 0), "a buffer without bytes");
        let next = self.buffers.get(self.buffer);
        let inside =
            next.map_or(self.buffer == 0 && self.offset == 0, |it| self.offset < it.length);
        ensure!(inside, "a stream at byte {} of buffer {}", self.offset, self.buffer);
        let runs = self.control & RUN != 0;
        ensure!(!runs || !self.buffers.is_empty(), "a running stream without buffers");
        Ok(())
    }

    pub(super) fn number(&self) -> u8 {
        self.control.to_le_bytes()[2] >> 4
    }

    /// Whether the stream's status is an interrupt that the driver wants.
    pub(super) fn interrupts(&self) -> bool {
        u32::from(self.status & INTERRUPTS) & self.control != 0
    }

    pub(super) fn moves(&self) -> bool {
        self.clock.is_some()
    }

    /// Starts or stops the clock of a stream that runs, unless SSYNC holds it.
    pub(super) fn set_clock(&mut self, now: Instant, held: bool) {
        let moves = self.control & RUN != 0 && !held;
        match self.clock {
            None if moves => self.clock = Some(Clock { since: now, moved: 0 }),
            Some(_) if !moves => self.clock = None,
            _ => {}
        }
    }

    pub(super) fn read(&self, register: u64) -> u32 {
        let ready = if self.control & RUN != 0 { FIFO_READY } else { 0 };
        let [a, b, c, d, e, f, g, h] = self.list.to_le_bytes();
        match register {
            0x00 => self.control | u32::from(self.status | ready) << 24,
            0x04 => self.position,
            0x08 => self.length,
            0x0c => u32::from(self.last) | WATERMARK << 16,
            0x10 => u32::from(self.format) << 16,
            0x18 => u32::from_le_bytes([a, b, c, d]),
            0x1c => u32::from_le_bytes([e, f, g, h]),
            _ => 0,
        }
    }

    /// Writes the bits of `mask`.
    pub(super) fn write(&mut self, register: u64, value: u32, mask: u32, memory: &Memory) {
        let set = |old: u32| old & !mask | value & mask;
        match register {
            0x00 => {
                self.status &= !(value & mask).to_le_bytes()[3];
                self.set_control(set(self.control) & CONTROL, memory);
            }
            0x08 => self.length = set(self.length),
            0x0c => self.last = set(self.last.into()).to_le_bytes()[0],
            0x10 => {
                let [.., low, high] = set(u32::from(self.format) << 16).to_le_bytes();
                self.format = u16::from_le_bytes([low, high]) & 0x7f7f;
            }
            0x18 | 0x1c => {
                let shift = if register == 0x18 { 0 } else { 32 };
                let (value, mask) = (u64::from(value) << shift, u64::from(mask) << shift);
                self.list = (self.list & !mask | value & mask) & !0x7f;
            }
            _ => {}
        }
    }

    fn set_control(&mut self, control: u32, memory: &Memory) {
        if control & RESET != 0 {
            *self = Self { control: RESET, ..Self::default() };
            return;
        }
        let started = control & RUN != 0 && self.control & RUN == 0;
        self.control = control;
        if started {
            self.load(memory);
        }
    }

    /// Copies the buffer list. A stream that stopped in the middle continues there, if it can.
    fn load(&mut self, memory: &Memory) {
        self.buffers.clear();
        let mut bytes = vec![0; (usize::from(self.last) + 1) * ENTRY_BYTES];
        if memory.read(self.list, &mut bytes).is_ok() {
            let (words, _) = bytes.as_chunks::<4>();
            let entries = words.chunks(4).map(|words| {
                let word = |at: usize| u32::from_le_bytes(words[at]);
                Buffer {
                    address: u64::from(word(1)) << 32 | u64::from(word(0)),
                    length: word(2),
                    interrupt: word(3) & ON_COMPLETION != 0,
                }
            });
            self.buffers.extend(entries.filter(|it| it.length > 0));
        }
        if self.buffers.get(self.buffer).is_none_or(|it| self.offset >= it.length) {
            (self.buffer, self.offset) = (0, 0);
        }
        if self.buffers.is_empty() {
            self.control &= !RUN;
            self.status |= LIST_ERROR;
        }
    }

    /// Bytes that are due.
    pub(super) fn due(&mut self, now: Instant) -> usize {
        let Some(clock) = &mut self.clock else { return 0 };
        let rate = u64::from(RATE);
        let frames = |time: Duration| {
            u64::try_from(time.as_nanos() * u128::from(RATE) / SECOND).unwrap_or(u64::MAX)
        };
        let mut due =
            frames(now.saturating_duration_since(clock.since)).saturating_sub(clock.moved);
        let most = frames(MAX_LATE);
        if due > most {
            due = most;
            *clock = Clock { since: now, moved: 0 };
        } else {
            clock.moved += due;
            if clock.moved >= rate {
                clock.moved -= rate;
                clock.since += Duration::from_secs(1);
            }
        }
        usize::try_from(due).expect("frames of a moment") * FRAME_BYTES
    }

    /// Moves `data` out of the buffers, or into them if the stream is an input.
    pub(super) fn transfer(&mut self, memory: &Memory, data: &mut [u8], input: bool) {
        let mut rest = data;
        while !rest.is_empty() {
            let Some(buffer) = self.buffers.get(self.buffer).copied() else { return };
            let left = (buffer.length - self.offset) as usize;
            let (part, later) = rest.split_at_mut(rest.len().min(left));
            let address = buffer.address.saturating_add(self.offset.into());
            let moved =
                if input { memory.write(address, part) } else { memory.read(address, part) };
            if moved.is_err() {
                self.status |= FIFO_ERROR;
                part.fill(0);
            }
            self.advance(u32::try_from(part.len()).expect("no longer than a buffer"), buffer);
            rest = later;
        }
    }

    fn advance(&mut self, moved: u32, buffer: Buffer) {
        let position = u64::from(self.position) + u64::from(moved);
        let position = position.checked_rem(self.length.into()).unwrap_or(0);
        self.position = u32::try_from(position).expect("less than CBL");
        self.offset += moved;
        if self.offset == buffer.length {
            self.offset = 0;
            self.buffer = (self.buffer + 1) % self.buffers.len();
            if buffer.interrupt {
                self.status |= COMPLETED;
            }
        }
    }
}
