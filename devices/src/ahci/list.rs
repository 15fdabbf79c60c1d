//! The command list in the guest's memory: headers, tables and physical regions (AHCI 1.3.1, 4.2).
//!
//! Threats: all of it is the guest's, and changes at any time. Each part is copied once. Regions
//! are read only as far as the command needs data, and are at least 2 bytes long.

use host::memory::{Memory, NoMemory, Piece};

const HEADER: u64 = 32;
/// Offset of the byte count in a header.
const PRDBC: u64 = 4;
/// Header flags: clear BSY when the FIS was sent.
const CLEAR_BUSY: u32 = 1 << 10;
/// Offsets in a command table: the ATAPI command, the regions.
const ACMD: usize = 0x40;
const PRDT: u64 = 0x80;
/// The part of a table before its regions that is used: the FIS, and the ATAPI command.
const HEAD: usize = 0x50;
const ENTRY: usize = 16;
/// Regions that are read at once.
const BATCH: usize = 64;

/// A command header.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    at: u64,
    flags: u32,
    table: u64,
}

/// The FIS and the ATAPI command of a table.
pub(super) struct Head {
    pub(super) fis: [u8; 20],
    pub(super) packet: [u8; 16],
}

/// The regions for a transfer.
#[derive(Debug, Default)]
pub(super) struct Regions {
    pub(super) pieces: Vec<Piece>,
    /// In bytes.
    pub(super) length: u64,
    /// One of them wants an interrupt.
    pub(super) interrupt: bool,
}

impl Header {
    pub(super) fn read(memory: &Memory, list: u64, slot: u32) -> Result<Self, NoMemory> {
        let at = list.checked_add(HEADER * u64::from(slot)).ok_or(NoMemory)?;
        let mut bytes = [0; 16];
        memory.read(at, &mut bytes)?;
        let [f0, f1, f2, f3, _, _, _, _, table @ ..] = bytes;
        let flags = u32::from_le_bytes([f0, f1, f2, f3]);
        Ok(Self { at, flags, table: u64::from_le_bytes(table) & !0x7f })
    }

    /// The number of regions.
    pub(super) fn entries(&self) -> u32 {
        self.flags >> 16
    }

    pub(super) fn clears_busy(&self) -> bool {
        self.flags & CLEAR_BUSY != 0
    }

    pub(super) fn head(&self, memory: &Memory) -> Result<Head, NoMemory> {
        let mut bytes = [0; HEAD];
        memory.read(self.table, &mut bytes)?;
        let fis = *bytes.first_chunk().expect("a table begins with a FIS");
        let packet = *bytes[ACMD..].first_chunk().expect("the head ends with the packet");
        Ok(Head { fis, packet })
    }

    /// Reads regions until they have `wanted` bytes. They may have less.
    pub(super) fn regions(&self, memory: &Memory, wanted: u64) -> Result<Regions, NoMemory> {
        let mut regions = Regions::default();
        let mut left = usize::try_from(self.entries()).unwrap_or(0);
        let mut at = self.table.checked_add(PRDT).ok_or(NoMemory)?;
        let mut bytes = [0; ENTRY * BATCH];
        while left > 0 && regions.length < wanted {
            let bytes = &mut bytes[..ENTRY * left.min(BATCH)];
            memory.read(at, bytes)?;
            for entry in bytes.as_chunks::<ENTRY>().0 {
                regions.add(entry, wanted);
            }
            left -= left.min(BATCH);
            at = at.checked_add(bytes.len() as u64).ok_or(NoMemory)?;
        }
        Ok(regions)
    }

    /// Stores the number of bytes that were transferred.
    pub(super) fn set_count(&self, memory: &Memory, count: u64) -> Result<(), NoMemory> {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        memory.write(self.at.checked_add(PRDBC).ok_or(NoMemory)?, &count.to_le_bytes())
    }
}

impl Regions {
    fn add(&mut self, entry: &[u8; ENTRY], wanted: u64) {
        let [a0, a1, a2, a3, a4, a5, a6, a7, _, _, _, _, c0, c1, c2, c3] = *entry;
        let address = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]) & !1;
        let count = u32::from_le_bytes([c0, c1, c2, c3]);
        let left = wanted - self.length.min(wanted);
        // The count is one less than the length, which is even.
        let length = u64::from(count & 0x3f_ffff | 1) + 1;
        let length = u32::try_from(length.min(left)).unwrap_or(0);
        if length > 0 {
            self.interrupt |= count >> 31 != 0;
            self.length += u64::from(length);
            self.pieces.push(Piece { address, length });
        }
    }
}
