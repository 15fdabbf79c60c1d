//! The wrappers of commands and their statuses (Bulk-Only Transport 1.0, 5), and how far one is.

use serde::{Deserialize, Serialize};

use crate::scsi::{Cdb, Move};
use host::disk::Operation;

/// Bytes of a Command Block Wrapper and of a Command Status Wrapper.
pub(super) const CBW: u32 = 31;
pub(super) const CSW: u32 = 13;
const CBW_SIGNATURE: [u8; 4] = *b"USBC";
const CSW_SIGNATURE: [u8; 4] = *b"USBS";

/// How a command ended (bCSWStatus).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Status {
    Passed = 0,
    Failed = 1,
    /// Guest and device do not mean the same (6.7): the guest has to reset the device.
    PhaseError = 2,
}

/// A command, as its wrapper has it, and how far it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Command {
    tag: u32,
    /// What the guest wants to send or get, in bytes.
    pub(super) wanted: u32,
    /// Data comes from the device.
    pub(super) is_in: bool,
    /// Bytes that went over the bus, of those that are wanted.
    pub(super) went: u32,
    /// Bytes of them that were of use.
    pub(super) moved: u32,
    pub(super) status: Status,
}

impl Command {
    /// Reads a wrapper; nothing when it is none, or means nothing (6.2).
    pub(super) fn read(bytes: &[u8; CBW as usize]) -> Option<(Self, Cdb)> {
        let [a, b, c, d, t0, t1, t2, t3, l0, l1, l2, l3, flags, unit, length, block @ ..] = *bytes;
        let meaningful = flags & 0x7f == 0 && unit == 0 && (1..=16).contains(&length);
        if [a, b, c, d] != CBW_SIGNATURE || !meaningful {
            return None;
        }
        let mut cdb = block;
        // What is behind the command is anything.
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

    /// The wrapper of its end.
    pub(super) fn end(&self) -> [u8; CSW as usize] {
        let mut bytes = [0; CSW as usize];
        bytes[..4].copy_from_slice(&CSW_SIGNATURE);
        bytes[4..8].copy_from_slice(&self.tag.to_le_bytes());
        let residue = self.wanted.saturating_sub(self.moved);
        bytes[8..12].copy_from_slice(&residue.to_le_bytes());
        bytes[12] = self.status as u8;
        bytes
    }

    /// What the guest still has to send or to get.
    pub(super) fn left(&self) -> u32 {
        self.wanted.saturating_sub(self.went)
    }

    /// So many bytes went, of which so many were of use.
    pub(super) fn advance(&mut self, went: u64, moved: u64) {
        let add = |sum: u32, more: u64| {
            u32::try_from(u64::from(sum).saturating_add(more)).unwrap_or(u32::MAX)
        };
        (self.went, self.moved) = (add(self.went, went), add(self.moved, moved));
    }
}

/// What a command is about to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Data {
    /// These bytes are for the guest.
    Answer(Vec<u8>),
    /// As many bytes come; these did. They belong to this command.
    Parameters(Cdb, usize, Vec<u8>),
    /// Blocks go between the guest and the medium.
    Move(Move),
    /// The content of these ranges of the medium goes, of the last first.
    Clear(Operation, Vec<(u64, u64)>),
    /// The medium is flushed.
    Flush,
    /// The guest wants more than there is: its next transfer is refused.
    Refuse,
}

impl Data {
    /// Whether another medium would be another matter.
    pub(super) fn is_of_the_medium(&self) -> bool {
        !matches!(self, Self::Answer(_) | Self::Refuse)
    }

    /// Whether it can be, on a medium of this size: a state that is read back may say anything.
    fn is_sound(&self, size: u64) -> bool {
        let within =
            |offset: u64, length: u64| offset.checked_add(length).is_some_and(|end| end <= size);
        match self {
            Self::Answer(_) | Self::Flush | Self::Refuse => true,
            Self::Parameters(_, length, have) => have.len() <= *length && *length <= 0xffff,
            Self::Move(it) => within(it.offset, it.length),
            Self::Clear(Operation::Discard | Operation::WriteZeroes { .. }, ranges) => {
                ranges.iter().all(|it| within(it.0, it.1))
            }
            Self::Clear(..) => false,
        }
    }
}

impl Phase {
    /// Whether it can be, on a medium of this size.
    pub(super) fn is_sound(&self, size: u64) -> bool {
        !matches!(self, Self::Data(_, data) if !data.is_sound(size))
    }
}

/// Where the transport is (5.3).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    /// A command may come.
    #[default]
    Ready,
    /// It is being done.
    Data(Command, Data),
    /// Its end is to be told.
    Ended(Command),
    /// No command came (6.6.1): everything is refused until a Bulk-Only Mass Storage Reset.
    Broken,
}
