//! The registers of the controller (HDA 3.3), its command rings and its interrupts.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::codec::Codec;
use super::stream::Stream;
use crate::pci::Interrupt;
use host::memory::Memory;
use host::sound::Ends;

/// The time between two looks at streams that move: positions in memory and interrupts are late by
/// this at most.
pub(super) const TICK: Duration = Duration::from_millis(2);
/// Input streams come first.
const INPUTS: usize = 4;
const STREAMS: usize = 8;

// Registers.
const GCTL: u64 = 0x08;
const WAKE: u64 = 0x0c;
const LPIB_ALIASES: u64 = 0x2084;
const STREAM_REGISTERS: std::ops::Range<u64> = 0x80..0x180;
const STREAM_BYTES: u64 = 0x20;

// GCTL: out of reset, flush, unsolicited responses.
const CRST: u32 = 1 << 0;
const FLUSH: u32 = 1 << 1;
const UNSOLICITED: u32 = 1 << 8;
// INTCTL and INTSTS: the whole controller, its rings and codecs, the streams.
const GLOBAL: u32 = 1 << 31;
const CONTROLLER: u32 = 1 << 30;
const EACH_STREAM: u32 = (1 << STREAMS) - 1;
/// Bits of STATESTS and WAKEEN: the codec at address 0.
const CODEC: u16 = 1;
/// The reset bit of CORBRP and RIRBWP.
const POINTER_RESET: u32 = 1 << 15;
// CORBCTL, CORBSTS: run, memory errors.
const CORB_RUN: u8 = 1 << 1;
const MEMORY_ERROR: u8 = 1 << 0;
// RIRBCTL and RIRBSTS: interrupts of responses and of overruns. RIRBCTL: run.
const RESPONSE: u8 = 1 << 0;
const OVERRUN: u8 = 1 << 2;
const RIRB_RUN: u8 = 1 << 1;
/// Both rings have 256 entries, and no other size.
const RING_SIZE: u32 = 0x42 << 16;
// The immediate command status: busy, valid.
const BUSY: u32 = 1 << 0;
const VALID: u8 = 1 << 1;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    gctl: u32,
    flushed: bool,
    wakeen: u16,
    statests: u16,
    intctl: u32,
    /// The interrupts that were last signaled.
    signaled: u32,
    corb: Corb,
    rirb: Rirb,
    immediate: Immediate,
    /// DPLBASE and DPUBASE
    positions: u64,
    ssync: u32,
    streams: [Stream; STREAMS],
    codec: Codec,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Corb {
    base: u64,
    write: u8,
    read: u8,
    resetting: bool,
    control: u8,
    status: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Rirb {
    base: u64,
    write: u8,
    /// RINTCNT: responses for each interrupt, where 0 is 256.
    interval: u8,
    /// Responses since the last interrupt.
    since: u8,
    control: u8,
    status: u8,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Immediate {
    command: u32,
    response: u32,
    status: u8,
}

pub(super) struct Controller {
    state: State,
    memory: Memory,
    interrupt: Interrupt,
    ends: Ends,
    /// The time when WALCLK was zero.
    start: Instant,
    /// Frames on their way.
    frames: Vec<u8>,
}

/// Replaces the bits of `mask`.
fn merge(old: u32, value: u32, mask: u32) -> u32 {
    old & !mask | value & mask
}

/// Replaces bits of the low or the high half of an address.
fn merge_half(old: u64, value: u32, mask: u32, high: bool) -> u64 {
    let shift = if high { 32 } else { 0 };
    let (value, mask) = (u64::from(value) << shift, u64::from(mask) << shift);
    old & !mask | value & mask
}

fn half(address: u64, high: bool) -> u32 {
    let [a, b, c, d, e, f, g, h] = address.to_le_bytes();
    u32::from_le_bytes(if high { [e, f, g, h] } else { [a, b, c, d] })
}

fn bytes<const N: usize>(all: [u8; N]) -> u32 {
    all.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

impl Controller {
    pub(super) fn new(memory: Memory, interrupt: Interrupt, ends: Ends) -> Self {
        let (state, frames) = (State::default(), Vec::new());
        Self { state, memory, interrupt, ends, start: Instant::now(), frames }
    }

    pub(super) fn save(&mut self) -> State {
        let now = Instant::now();
        self.state.streams.iter_mut().for_each(|it| it.set_clock(now, true));
        self.state.clone()
    }

    pub(super) fn restore(&mut self, state: State) -> anyhow::Result<()> {
        state.streams.iter().try_for_each(Stream::check).context("hda")?;
        state.codec.check().context("hda")?;
        self.state = state;
        self.start = Instant::now();
        self.set_clocks(self.start);
        if let Some(line) = &self.interrupt.line {
            line.set(self.active() != 0);
        }
        Ok(())
    }

    /// Whether a stream moves, so that `advance` must be called soon.
    pub(super) fn moves(&self) -> bool {
        self.state.streams.iter().any(Stream::moves)
    }

    /// Moves all streams to the present.
    pub(super) fn advance(&mut self, now: Instant) {
        for at in 0..STREAMS {
            self.move_stream(at, now);
        }
        self.update_interrupt();
    }

    fn move_stream(&mut self, at: usize, now: Instant) {
        let State { streams, codec, .. } = &mut self.state;
        let stream = &mut streams[at];
        let due = stream.due(now);
        if due == 0 {
            return;
        }
        self.frames.clear();
        self.frames.resize(due, 0);
        let (number, format) = (stream.number(), stream.format);
        if at < INPUTS {
            if codec.records(number, format) {
                self.ends.record(&mut self.frames);
                codec.amplify_input(&mut self.frames);
            }
            stream.transfer(&self.memory, &mut self.frames, true);
        } else {
            stream.transfer(&self.memory, &mut self.frames, false);
            if codec.plays(number, format) {
                codec.amplify_output(&mut self.frames);
                self.ends.play(&self.frames);
            }
        }
        if self.state.positions & 1 != 0 {
            let entry = (self.state.positions & !1).saturating_add(8 * at as u64);
            let position = u64::from(self.state.streams[at].position);
            // A driver that chose an address without RAM sees no positions.
            self.memory.write(entry, &position.to_le_bytes()).ok();
        }
    }

    fn set_clocks(&mut self, now: Instant) {
        let ssync = self.state.ssync;
        for (at, stream) in self.state.streams.iter_mut().enumerate() {
            stream.set_clock(now, ssync >> at & 1 != 0);
        }
    }

    /// Interrupts that occurred: streams, and the rest of the controller.
    fn occurred(&self) -> u32 {
        let State { corb, rirb, .. } = &self.state;
        let streams = self.state.streams.iter().enumerate();
        let streams = streams.fold(0, |all, (at, it)| all | u32::from(it.interrupts()) << at);
        let controller = self.state.statests & self.state.wakeen != 0
            || corb.status & corb.control & MEMORY_ERROR != 0
            || rirb.status & rirb.control & (RESPONSE | OVERRUN) != 0;
        streams | if controller { CONTROLLER } else { 0 }
    }

    /// Interrupts that are to be signaled.
    fn active(&self) -> u32 {
        let enabled = self.state.intctl;
        if enabled & GLOBAL == 0 { 0 } else { self.occurred() & enabled }
    }

    /// Sets the line, or sends a message whenever what is active has changed.
    fn update_interrupt(&mut self) {
        let active = self.active();
        let changed = std::mem::replace(&mut self.state.signaled, active) != active;
        if changed && active != 0 {
            self.interrupt.message(0);
        }
        if let Some(line) = &self.interrupt.line {
            line.set(active != 0);
        }
    }

    fn walclk(&self, now: Instant) -> u32 {
        let ticks = now.saturating_duration_since(self.start).as_nanos() * 24 / 1000;
        u32::try_from(ticks % (1 << 32)).expect("32 bits")
    }

    /// Reads 4 bytes at a multiple of 4. Reserved registers are 0.
    pub(super) fn read(&mut self, at: u64, now: Instant) -> u32 {
        if STREAM_REGISTERS.contains(&at) || at >= LPIB_ALIASES {
            self.advance(now);
        }
        let State { corb, rirb, immediate, .. } = &self.state;
        match at {
            // GCAP: 4 outputs, 4 inputs, addresses of 64 bits. Version 1.0.
            0x00 => 0x0100_4401,
            // Words of the link for outputs and inputs, for all and for one stream.
            0x04 => 0x001d_003c,
            0x18 => 0x0018_0030,
            GCTL => self.state.gctl,
            WAKE => u32::from(self.state.statests) << 16 | u32::from(self.state.wakeen),
            // FSTS
            0x10 => u32::from(self.state.flushed) << 1,
            0x20 => self.state.intctl,
            0x24 => {
                let occurred = self.occurred();
                let any = occurred & self.state.intctl != 0;
                occurred | if any { GLOBAL } else { 0 }
            }
            0x30 | 0x2030 => self.walclk(now),
            0x34 | 0x38 => self.state.ssync,
            0x40 | 0x44 => half(corb.base, at == 0x44),
            0x48 => {
                let resetting = if corb.resetting { POINTER_RESET } else { 0 };
                u32::from(corb.write) | (u32::from(corb.read) | resetting) << 16
            }
            0x4c => bytes([corb.control, corb.status]) | RING_SIZE,
            0x50 | 0x54 => half(rirb.base, at == 0x54),
            0x58 => bytes([rirb.write, 0, rirb.interval]),
            0x5c => bytes([rirb.control, rirb.status]) | RING_SIZE,
            0x60 => immediate.command,
            0x64 => immediate.response,
            0x68 => immediate.status.into(),
            0x70 | 0x74 => half(self.state.positions, at == 0x74),
            _ => self.read_stream(at),
        }
    }

    fn read_stream(&self, at: u64) -> u32 {
        let register = match at.checked_sub(LPIB_ALIASES) {
            Some(alias) if alias % STREAM_BYTES == 0 => STREAM_REGISTERS.start + alias + 4,
            Some(_) => return 0,
            None => at,
        };
        let Some((stream, register)) = stream_register(register) else { return 0 };
        self.state.streams[stream].read(register)
    }

    /// Writes the bits of `mask` at a multiple of 4.
    pub(super) fn write(&mut self, at: u64, value: u32, mask: u32, now: Instant) {
        if self.state.gctl & CRST == 0 && !matches!(at, GCTL | WAKE) {
            return;
        }
        self.advance(now);
        let bits = value & mask;
        match at {
            GCTL => self.control(merge(self.state.gctl, value, mask), now),
            WAKE => {
                let [wake, .., low, high] = bits.to_le_bytes();
                self.state.statests &= !u16::from_le_bytes([low, high]);
                if mask & 0xff != 0 {
                    self.state.wakeen = u16::from(wake) & CODEC;
                }
            }
            0x10 => self.state.flushed &= bits & 1 << 1 == 0,
            0x20 => {
                let all = GLOBAL | CONTROLLER | EACH_STREAM;
                self.state.intctl = merge(self.state.intctl, value, mask) & all;
            }
            0x34 | 0x38 => {
                self.state.ssync = merge(self.state.ssync, value, mask) & EACH_STREAM;
            }
            0x40..0x50 => self.write_corb(at, value, mask),
            0x50..0x60 => self.write_rirb(at, value, mask),
            0x60 => self.state.immediate.command = merge(self.state.immediate.command, value, mask),
            0x68 => self.run_immediate(bits),
            0x70 | 0x74 => {
                let positions = merge_half(self.state.positions, value, mask, at == 0x74);
                self.state.positions = positions & !0x7e;
            }
            _ => {
                if let Some((stream, register)) = stream_register(at) {
                    let stream = &mut self.state.streams[stream];
                    stream.write(register, value, mask, &self.memory);
                }
            }
        }
        self.set_clocks(now);
        self.update_interrupt();
    }

    /// GCTL. A reset keeps what a codec uses to wake the system. After it, the codec reports.
    fn control(&mut self, value: u32, now: Instant) {
        let old = self.state.gctl;
        if value & CRST == 0 {
            let State { wakeen, statests, .. } = self.state;
            self.state = State { wakeen, statests, ..State::default() };
            return;
        }
        if old & CRST == 0 {
            self.state.statests |= CODEC;
            self.start = now;
        }
        self.state.gctl = value & (CRST | UNSOLICITED);
        self.state.flushed |= value & FLUSH != 0;
    }

    fn write_corb(&mut self, at: u64, value: u32, mask: u32) {
        let corb = &mut self.state.corb;
        match at {
            0x40 | 0x44 => {
                corb.base = merge_half(corb.base, value, mask, at == 0x44) & !0x7f;
            }
            0x48 => {
                let reset = POINTER_RESET << 16;
                if mask & reset != 0 {
                    corb.resetting = value & reset != 0;
                    if corb.resetting {
                        corb.read = 0;
                    }
                }
                corb.write = merge(corb.write.into(), value, mask).to_le_bytes()[0];
            }
            0x4c => {
                let [control, ..] = merge(corb.control.into(), value, mask).to_le_bytes();
                corb.control = control & (CORB_RUN | MEMORY_ERROR);
                corb.status &= !(value & mask).to_le_bytes()[1];
            }
            _ => {}
        }
        self.run_corb();
    }

    fn write_rirb(&mut self, at: u64, value: u32, mask: u32) {
        let rirb = &mut self.state.rirb;
        match at {
            0x50 | 0x54 => {
                rirb.base = merge_half(rirb.base, value, mask, at == 0x54) & !0x7f;
            }
            0x58 => {
                if value & mask & POINTER_RESET != 0 {
                    (rirb.write, rirb.since) = (0, 0);
                }
                let [.., interval, _] =
                    merge(u32::from(rirb.interval) << 16, value, mask).to_le_bytes();
                rirb.interval = interval;
            }
            0x5c => {
                let [control, ..] = merge(rirb.control.into(), value, mask).to_le_bytes();
                rirb.control = control & (RESPONSE | RIRB_RUN | OVERRUN);
                rirb.status &= !(value & mask).to_le_bytes()[1];
            }
            _ => {}
        }
    }

    /// Runs all pending commands, which are at most 255.
    fn run_corb(&mut self) {
        loop {
            let corb = &mut self.state.corb;
            let stopped = corb.control & CORB_RUN == 0 || corb.resetting;
            if stopped || corb.read == corb.write {
                return;
            }
            corb.read = corb.read.wrapping_add(1);
            let mut command = [0; 4];
            let at = corb.base.saturating_add(4 * u64::from(corb.read));
            if self.memory.read(at, &mut command).is_err() {
                corb.status |= MEMORY_ERROR;
                corb.control &= !CORB_RUN;
                return;
            }
            let empty = corb.read == corb.write;
            let response = self.command(u32::from_le_bytes(command));
            self.respond(response, empty);
        }
    }

    /// `None` if there is no codec at the address.
    fn command(&mut self, command: u32) -> Option<u32> {
        (command >> 28 == 0).then(|| self.state.codec.command(command))
    }

    /// Stores a response. `last` if no further command is pending.
    fn respond(&mut self, response: Option<u32>, last: bool) {
        let rirb = &mut self.state.rirb;
        if let Some(response) = response.filter(|_| rirb.control & RIRB_RUN != 0) {
            rirb.write = rirb.write.wrapping_add(1);
            let at = rirb.base.saturating_add(8 * u64::from(rirb.write));
            // The upper half: from codec 0, and solicited.
            if self.memory.write(at, &u64::from(response).to_le_bytes()).is_err() {
                rirb.status |= OVERRUN;
            }
            rirb.since = rirb.since.wrapping_add(1);
            if rirb.since == rirb.interval {
                // This includes 256, which is 0 for both.
                rirb.since = 0;
                rirb.status |= RESPONSE;
            }
        }
        if rirb.since != 0 && last {
            rirb.since = 0;
            rirb.status |= RESPONSE;
        }
    }

    /// A command without rings (3.4).
    fn run_immediate(&mut self, bits: u32) {
        let status = bits.to_le_bytes()[0];
        self.state.immediate.status &= !(status & VALID);
        if bits & BUSY == 0 {
            return;
        }
        if let Some(response) = self.command(self.state.immediate.command) {
            self.state.immediate.response = response;
            self.state.immediate.status |= VALID;
        }
    }
}

/// A stream, and a register of it.
fn stream_register(at: u64) -> Option<(usize, u64)> {
    if !STREAM_REGISTERS.contains(&at) {
        return None;
    }
    let at = at - STREAM_REGISTERS.start;
    Some((usize::try_from(at / STREAM_BYTES).ok()?, at % STREAM_BYTES))
}
