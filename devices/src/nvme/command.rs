//! Queue entries: commands of 64 bytes and completions of 16 bytes (NVMe 1.4, 4.2 and 4.6).

use serde::{Deserialize, Serialize};

pub(super) const ENTRY_SIZE: usize = 64;

/// A copy of a command. The guest's later writes do not change it.
#[derive(Clone, Debug)]
pub(super) struct Command([u8; ENTRY_SIZE]);

impl Command {
    pub(super) fn new(bytes: [u8; ENTRY_SIZE]) -> Self {
        Self(bytes)
    }

    pub(super) fn dword(&self, n: usize) -> u32 {
        let bytes = self.0[4 * n..].first_chunk().expect("there are 16 dwords");
        u32::from_le_bytes(*bytes)
    }

    fn wide(&self, n: usize) -> u64 {
        u64::from(self.dword(n)) | u64::from(self.dword(n + 1)) << 32
    }

    /// The lower half first.
    pub(super) fn halves(&self, n: usize) -> (u16, u16) {
        let [a, b, c, d] = self.dword(n).to_le_bytes();
        (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
    }

    pub(super) fn opcode(&self) -> u8 {
        self.0[0]
    }

    pub(super) fn id(&self) -> u16 {
        self.halves(0).1
    }

    pub(super) fn nsid(&self) -> u32 {
        self.dword(1)
    }

    /// Fused operations and data described by SGLs are not supported.
    pub(super) fn is_fused_or_sgl(&self) -> bool {
        self.0[1] & 0b1100_0011 != 0
    }

    pub(super) fn prp(&self) -> Prp {
        Prp { first: self.wide(6), second: self.wide(8) }
    }

    pub(super) fn slba(&self) -> u64 {
        self.wide(10)
    }

    pub(super) fn blocks(&self) -> u32 {
        u32::from(self.halves(12).0) + 1
    }
}

/// The two entries of a data pointer. The second is a page, or the address of a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prp {
    pub(super) first: u64,
    pub(super) second: u64,
}

/// Status of a completion: status code, its type from bit 8, and "do not retry" (bit 14).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Status(pub(super) u16);

/// Do not retry: the same command would fail again.
const DNR: u16 = 1 << 14;
/// The error log has an entry for this command.
const MORE: u16 = 1 << 13;

impl Status {
    pub(super) const SUCCESS: Self = Self(0);
    pub(super) const INVALID_OPCODE: Self = Self(0x01 | DNR);
    pub(super) const INVALID_FIELD: Self = Self(0x02 | DNR);
    pub(super) const DATA_TRANSFER: Self = Self(0x04);
    pub(super) const INTERNAL: Self = Self(0x06);
    pub(super) const ABORTED: Self = Self(0x07);
    pub(super) const QUEUE_DELETED: Self = Self(0x08);
    pub(super) const INVALID_NAMESPACE: Self = Self(0x0b | DNR);
    pub(super) const SEQUENCE: Self = Self(0x0c | DNR);
    pub(super) const PRP_OFFSET: Self = Self(0x13 | DNR);
    pub(super) const WRITE_PROTECTED: Self = Self(0x20 | DNR);
    pub(super) const LBA_OUT_OF_RANGE: Self = Self(0x80 | DNR);
    pub(super) const CAPACITY: Self = Self(0x81);
    pub(super) const COMPLETION_QUEUE_INVALID: Self = Self(0x100 | DNR);
    pub(super) const INVALID_QUEUE: Self = Self(0x101 | DNR);
    pub(super) const INVALID_QUEUE_SIZE: Self = Self(0x102 | DNR);
    pub(super) const EVENT_LIMIT: Self = Self(0x105 | DNR);
    pub(super) const INVALID_VECTOR: Self = Self(0x108 | DNR);
    pub(super) const INVALID_LOG_PAGE: Self = Self(0x109 | DNR);
    pub(super) const INVALID_QUEUE_DELETION: Self = Self(0x10c | DNR);
    pub(super) const NOT_SAVEABLE: Self = Self(0x10d | DNR);
    pub(super) const NOT_PER_NAMESPACE: Self = Self(0x10f | DNR);
    pub(super) const WRITE_FAULT: Self = Self(0x280);
    pub(super) const READ_ERROR: Self = Self(0x281);

    pub(super) fn is_error(self) -> bool {
        self != Self::SUCCESS
    }

    /// This status with the bit for an error log entry.
    pub(super) fn logged(self) -> Self {
        Self(self.0 | MORE)
    }
}

/// Dword 0 of the completion, or the error status.
pub(super) type Answer = Result<u32, Status>;

/// A completion queue entry without its phase bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Completed {
    /// Dword 0.
    pub(super) result: u32,
    /// The submission queue of the command, and its head pointer.
    pub(super) queue: u16,
    pub(super) head: u16,
    pub(super) id: u16,
    pub(super) status: Status,
}

impl Completed {
    /// The first three dwords, and the last one. It contains the phase bit and must be written
    /// last.
    pub(super) fn bytes(&self, phase: bool) -> ([u8; 12], u32) {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&self.result.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.head.to_le_bytes());
        bytes[10..].copy_from_slice(&self.queue.to_le_bytes());
        let last = u32::from(self.status.0) << 17 | u32::from(phase) << 16 | u32::from(self.id);
        (bytes, last)
    }
}
