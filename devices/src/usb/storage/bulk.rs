//! Command and status wrappers (Bulk-Only Transport 1.0, 5), and the progress of a command.

use serde::{Deserialize, Serialize};

use crate::scsi::{BlockTransfer, Cdb};
use host::disk::Operation;

/// The sizes of a Command Block Wrapper and of a Command Status Wrapper in bytes.
pub(super) const CBW: u32 = 31;
pub(super) const CSW: u32 = 13;
const CBW_SIGNATURE: [u8; 4] = *b"USBC";
const CSW_SIGNATURE: [u8; 4] = *b"USBS";

/// The status of a command (bCSWStatus).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Status {
    Passed = 0,
    Failed = 1,
    /// Wrapper and command disagree about the data (6.7). The guest must reset the device.
    PhaseError = 2,
}

/// A command with the data of its wrapper, and its progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Command {
    tag: u32,
    /// The bytes that the guest wants to send or receive.
    pub(super) wanted: u32,
    /// Data goes from the device to the guest.
    pub(super) is_in: bool,
    /// The bytes of `wanted` that went over the bus.
    pub(super) went: u32,
    /// The bytes of `went` that the command used.
    pub(super) moved: u32,
    pub(super) status: Status,
}

impl Command {
    /// Parses a wrapper. `None` if it is not valid or not meaningful (6.2).
    pub(super) fn read(bytes: &[u8; CBW as usize]) -> Option<(Self, Cdb)> {
        let [a, b, c, d, t0, t1, t2, t3, l0, l1, l2, l3, flags, unit, length, block @ ..] = *bytes;
        let meaningful = flags & 0x7f == 0 && unit == 0 && (1..=16).contains(&length);
        if [a, b, c, d] != CBW_SIGNATURE || !meaningful {
            return None;
        }
        let mut cdb = block;
        // The bytes behind the command are undefined.
        cdb[usize::from(length)..].fill(0);
        let command = Self {
            tag: u32::from_le_bytes([t0, t1, t2, t3]),
            wanted: u32::from_le_bytes([l0, l1, l2, l3]),
            is_in: flags & 0x80 != 0,
            went: 0,
            moved: 0,
            status: Status::Passed,
        };
        Some((command, cdb))
    }

    pub(super) fn end(&self) -> [u8; CSW as usize] {
        let mut bytes = [0; CSW as usize];
        bytes[..4].copy_from_slice(&CSW_SIGNATURE);
        bytes[4..8].copy_from_slice(&self.tag.to_le_bytes());
        let residue = self.wanted.saturating_sub(self.moved);
        bytes[8..12].copy_from_slice(&residue.to_le_bytes());
        bytes[12] = self.status as u8;
        bytes
    }

    pub(super) fn remaining(&self) -> u32 {
        self.wanted.saturating_sub(self.went)
    }

    pub(super) fn advance(&mut self, went: u64, moved: u64) {
        let add = |sum: u32, more: u64| {
            u32::try_from(u64::from(sum).saturating_add(more)).unwrap_or(u32::MAX)
        };
        (self.went, self.moved) = (add(self.went, went), add(self.moved, moved));
    }
}

/// The next action of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Data {
    Answer(Vec<u8>),
    Parameters(Parameters),
    Move(BlockTransfer),
    /// Clear these ranges of the medium, the last one first.
    Clear(Operation, Vec<(u64, u64)>),
    Flush,
    /// Refuse the next transfer, because the guest wants more data than there is.
    Refuse,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Parameters {
    pub(super) cdb: Cdb,
    /// The expected number of bytes.
    pub(super) length: usize,
    pub(super) received: Vec<u8>,
}

impl Data {
    pub(super) fn needs_medium(&self) -> bool {
        !matches!(self, Self::Answer(_) | Self::Refuse)
    }

    /// A saved state may contain anything.
    fn is_valid(&self, size: u64) -> bool {
        let within =
            |offset: u64, length: u64| offset.checked_add(length).is_some_and(|end| end <= size);
        match self {
            Self::Answer(_) | Self::Flush | Self::Refuse => true,
            Self::Parameters(it) => it.received.len() <= it.length && it.length <= 0xffff,
            Self::Move(it) => within(it.offset, it.length),
            Self::Clear(Operation::Discard | Operation::WriteZeroes { .. }, ranges) => {
                ranges.iter().all(|it| within(it.0, it.1))
            }
            Self::Clear(..) => false,
        }
    }
}

impl Phase {
    pub(super) fn is_valid(&self, size: u64) -> bool {
        !matches!(self, Self::Data(_, data) if !data.is_valid(size))
    }
}

/// The phase of the transport (5.3).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    #[default]
    Ready,
    Data(Command, Data),
    /// The status of the command must be sent.
    Ended(Command),
    /// The guest sent an invalid command (6.6.1). Everything is refused until a Bulk-Only Mass
    /// Storage Reset.
    Broken,
}
