//! A driver of the sound card: rings for commands, and streams.

use crate::device::Kind;
use crate::pci::Address;
use crate::testutil::Bench;

/// The addresses of the registers, the rings, the positions and the buffer lists.
const BAR: u64 = 0x4000_0000;
pub const CORB: u64 = 0x1000;
pub const RIRB: u64 = 0x2000;
pub const POSITIONS: u64 = 0x3000;
const LISTS: u64 = 0x8000;

/// Registers.
pub const GCTL: u64 = 0x08;
pub const WAKEEN: u64 = 0x0c;
pub const STATESTS: u64 = 0x0e;
pub const INTCTL: u64 = 0x20;
pub const INTSTS: u64 = 0x24;
pub const SSYNC: u64 = 0x38;
pub const CORBWP: u64 = 0x48;
pub const CORBRP: u64 = 0x4a;
pub const RIRBWP: u64 = 0x58;
pub const RIRBSTS: u64 = 0x5d;
const CORBLBASE: u64 = 0x40;
const CORBCTL: u64 = 0x4c;
const RIRBLBASE: u64 = 0x50;
pub const RINTCNT: u64 = 0x5a;
const RIRBCTL: u64 = 0x5c;
pub const DPLBASE: u64 = 0x70;
// Registers of a stream.
pub const CTL: u64 = 0x00;
pub const STS: u64 = 0x03;
pub const LPIB: u64 = 0x04;
pub const CBL: u64 = 0x08;
pub const LVI: u64 = 0x0c;
pub const FMT: u64 = 0x12;
pub const BDPL: u64 = 0x18;

/// The first output stream.
pub const OUTPUT: u64 = 4;

/// The driver.
pub struct Card<'a> {
    pub bench: &'a Bench,
    /// The number of responses that were taken.
    taken: u8,
}

/// A register of a stream.
pub fn of(stream: u64, register: u64) -> u64 {
    0x80 + stream * 0x20 + register
}

impl<'a> Card<'a> {
    /// Places the BAR and enables bus mastering.
    pub fn find(bench: &'a Bench, at: Address) -> Self {
        let bar = u32::try_from(BAR).expect("a low address");
        bench.write(Kind::Config, at.config() + 0x10, &bar.to_le_bytes());
        bench.write(Kind::Config, at.config() + 4, &[7, 0]);
        Self { bench, taken: 0 }
    }

    pub fn read<const N: usize>(&self, register: u64) -> [u8; N] {
        self.bench.read(Kind::Memory, BAR + register)
    }

    pub fn read8(&self, register: u64) -> u8 {
        u8::from_le_bytes(self.read(register))
    }

    pub fn read16(&self, register: u64) -> u16 {
        u16::from_le_bytes(self.read(register))
    }

    pub fn read32(&self, register: u64) -> u32 {
        u32::from_le_bytes(self.read(register))
    }

    pub fn write8(&self, register: u64, value: u8) {
        self.bench.write(Kind::Memory, BAR + register, &[value]);
    }

    pub fn write16(&self, register: u64, value: u16) {
        self.bench.write(Kind::Memory, BAR + register, &value.to_le_bytes());
    }

    pub fn write32(&self, register: u64, value: u32) {
        self.bench.write(Kind::Memory, BAR + register, &value.to_le_bytes());
    }

    /// Resets the controller and starts both rings, in the order of Linux.
    pub fn start(&mut self) {
        self.write32(GCTL, 0);
        self.write32(GCTL, 1);
        let low = |address: u64| u32::try_from(address).expect("a low address");
        self.write32(CORBLBASE, low(CORB));
        self.write16(CORBWP, 0);
        self.write16(CORBRP, 1 << 15);
        self.write16(CORBRP, 0);
        self.write8(CORBCTL, 2);
        self.write32(RIRBLBASE, low(RIRB));
        self.write16(RIRBWP, 1 << 15);
        self.write16(RINTCNT, 1);
        self.write8(RIRBCTL, 3);
        self.taken = 0;
    }

    /// Queues commands, and returns the write pointer for them.
    pub fn queue(&self, commands: &[u32]) -> u16 {
        let mut at = self.read8(CORBWP);
        for command in commands {
            at = at.wrapping_add(1);
            let address = CORB + 4 * u64::from(at);
            self.bench.memory.write(address, &command.to_le_bytes()).expect("a ring");
        }
        at.into()
    }

    /// The next response, with its upper half.
    pub fn take(&mut self) -> Option<u64> {
        if self.read8(RIRBWP) == self.taken {
            return None;
        }
        self.taken = self.taken.wrapping_add(1);
        let mut response = [0; 8];
        let address = RIRB + 8 * u64::from(self.taken);
        self.bench.memory.read(address, &mut response).expect("a ring");
        Some(u64::from_le_bytes(response))
    }

    /// Runs a command of a verb and its payload at a node of codec 0.
    pub fn command(&mut self, node: u32, verb: u32) -> Option<u64> {
        let end = self.queue(&[node << 20 | verb]);
        self.write16(CORBWP, end);
        self.take()
    }

    /// Resets a stream, and prepares buffers (address, length, interrupt) in the codec's format.
    pub fn prepare(&self, stream: u64, buffers: &[(u64, u32, bool)]) {
        self.write8(of(stream, CTL), 1);
        self.write8(of(stream, CTL), 0);
        let list = LISTS + stream * 0x1000;
        for ((address, length, interrupt), at) in buffers.iter().zip((list..).step_by(16)) {
            let entry = [*address, u64::from(*interrupt) << 32 | u64::from(*length)];
            let entry = entry.map(u64::to_le_bytes).concat();
            self.bench.memory.write(at, &entry).expect("a list");
        }
        let last = buffers.len().saturating_sub(1);
        self.write16(of(stream, LVI), u16::try_from(last).expect("a short list"));
        let length = buffers.iter().fold(0_u32, |sum, it| sum.wrapping_add(it.1));
        self.write32(of(stream, CBL), length);
        self.write16(of(stream, FMT), 0x0011);
        self.write32(of(stream, BDPL), u32::try_from(list).expect("a low address"));
    }

    /// Sets RUN, the interrupts and the number of a stream.
    pub fn run(&self, stream: u64, number: u8) {
        self.write8(of(stream, CTL + 2), number << 4);
        self.write8(of(stream, CTL), 0x1e);
    }
}
