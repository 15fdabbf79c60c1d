//! A driver of the 82574: registers, and one ring in each direction with extended descriptors.

use crate::device::Kind;
use crate::pci::Address;
use crate::testutil::Bench;

/// The addresses of the registers, the rings and the buffers.
const BAR: u64 = 0x4000_0000;
const RECEIVE: u64 = 0x1000;
const TRANSMIT: u64 = 0x2000;
const FRAMES: u64 = 0x4000;
const BUFFERS: u64 = 0x2_0000;
/// Bytes of a receive buffer.
const ROOM: u64 = 2048;
/// Descriptors of each ring.
pub const ENTRIES: u64 = 32;

/// Registers.
pub const CTRL: u64 = 0x0000;
pub const STATUS: u64 = 0x0008;
pub const ICR: u64 = 0x00c0;
pub const ICS: u64 = 0x00c8;
pub const IMS: u64 = 0x00d0;
pub const RCTL: u64 = 0x0100;
pub const TCTL: u64 = 0x0400;
pub const RDBAL: u64 = 0x2800;
pub const TDBAL: u64 = 0x3800;
const RXCSUM: u64 = 0x5000;
const RFCTL: u64 = 0x5008;
// Registers of a ring.
const LENGTH: u64 = 0x08;
pub const HEAD: u64 = 0x10;
pub const TAIL: u64 = 0x18;

/// Bits of CTRL, and of the command in a data descriptor.
pub const RESET: u32 = 1 << 26;
pub const EOP: u32 = 1 << 24;
pub const REPORT: u32 = 1 << 27;

/// The driver.
pub struct Card<'a> {
    pub bench: &'a Bench,
    /// The next descriptors: to receive into, to look for a frame, to send.
    offered: u64,
    taken: u64,
    sent: u64,
}

/// A received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    pub bytes: Vec<u8>,
    pub status: u32,
    pub tag: u16,
}

impl<'a> Card<'a> {
    /// Places the BARs and enables bus mastering.
    pub fn find(bench: &'a Bench, at: Address) -> Self {
        for (bar, address) in
            [(0, 0x4000_0000_u32), (1, 0x4100_0000), (2, 0xc000), (3, 0x4200_0000)]
        {
            bench.write(Kind::Config, at.config() + 0x10 + 4 * bar, &address.to_le_bytes());
        }
        bench.write(Kind::Config, at.config() + 4, &[7, 0]);
        Self { bench, offered: 0, taken: 0, sent: 0 }
    }

    /// The same driver after its machine has moved to another one.
    pub fn moved_to<'b>(&self, bench: &'b Bench) -> Card<'b> {
        let Self { offered, taken, sent, .. } = *self;
        Card { bench, offered, taken, sent }
    }

    pub fn read(&self, register: u64) -> u32 {
        u32::from_le_bytes(self.bench.read(Kind::Memory, BAR + register))
    }

    pub fn write(&self, register: u64, value: u32) {
        self.bench.write(Kind::Memory, BAR + register, &value.to_le_bytes());
    }

    /// Resets the card and enables both rings, with promiscuous reception.
    pub fn start(&mut self) {
        self.write(CTRL, RESET);
        (self.offered, self.taken, self.sent) = (0, 0, 0);
        for (ring, address) in [(RDBAL, RECEIVE), (TDBAL, TRANSMIT)] {
            self.write(ring, u32::try_from(address).expect("a low address"));
            self.write(ring + LENGTH, u32::try_from(ENTRIES * 16).expect("a short ring"));
        }
        self.write(RFCTL, 1 << 15);
        self.write(RXCSUM, 1 << 8 | 1 << 9 | 1 << 13);
        self.write(RCTL, 1 << 1 | 1 << 3 | 1 << 4 | 1 << 15 | 1 << 26);
        self.write(TCTL, 1 << 1 | 1 << 3);
    }

    /// Offers buffers for frames.
    pub fn offer(&mut self, count: u64) {
        for _ in 0..count {
            let at = self.offered % ENTRIES;
            let descriptor = [BUFFERS + at * ROOM, 0].map(u64::to_le_bytes).concat();
            self.bench.memory.write(RECEIVE + at * 16, &descriptor).expect("a ring");
            self.offered += 1;
        }
        let tail = u32::try_from(self.offered % ENTRIES).expect("a short ring");
        self.write(RDBAL + TAIL, tail);
    }

    /// The next received frame.
    pub fn take(&mut self) -> Option<Received> {
        let at = self.taken % ENTRIES;
        let mut words = [0; 16];
        self.bench.memory.read(RECEIVE + at * 16, &mut words).expect("a ring");
        let status = u32::from_le_bytes([words[8], words[9], words[10], words[11]]);
        if self.taken == self.offered || status & 1 == 0 {
            return None;
        }
        self.taken += 1;
        let mut bytes = vec![0; u16::from_le_bytes([words[12], words[13]]).into()];
        self.bench.memory.read(BUFFERS + at * ROOM, &mut bytes).expect("a buffer");
        Some(Received { bytes, status, tag: u16::from_le_bytes([words[14], words[15]]) })
    }

    /// Writes the four words of the next transmit descriptor.
    pub fn describe(&mut self, words: [u32; 4]) {
        let address = TRANSMIT + self.sent % ENTRIES * 16;
        self.bench.memory.write(address, &words.map(u32::to_le_bytes).concat()).expect("a ring");
        self.sent += 1;
    }

    /// Tells the card about the descriptors.
    pub fn kick(&self) {
        let tail = u32::try_from(self.sent % ENTRIES).expect("a short ring");
        self.write(TDBAL + TAIL, tail);
    }

    /// Sends a frame, with options in the last word of its descriptor.
    pub fn send(&mut self, frame: &[u8], command: u32, options: u32) {
        self.bench.memory.write(FRAMES, frame).expect("memory");
        let length = u32::try_from(frame.len()).expect("a frame");
        let address = u32::try_from(FRAMES).expect("a low address");
        // Data descriptor with DEXT.
        let command = command | EOP | REPORT | 1 << 29 | 1 << 20 | length;
        self.describe([address, 0, command, options]);
        self.kick();
    }

    /// Whether the card has sent everything.
    pub fn is_done(&self) -> bool {
        self.read(TDBAL + HEAD) == self.read(TDBAL + TAIL)
    }
}
