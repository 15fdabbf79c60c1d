//! The logical unit: its properties, its state, and the plan for a command (SPC-4, SBC-3; for a CD,
//! MMC-5). The commands are in `commands.rs` and the files that it calls.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::sense::Sense;
use host::disk::{Fault, Geometry, Operation};

pub(crate) const CD_BLOCK: u32 = 2048;
/// Maximum number of ranges in one UNMAP.
pub(crate) const MAX_RANGES: usize = 256;
/// Maximum number of blocks in one range of an UNMAP, or in a WRITE SAME.
pub(crate) const MAX_RANGE_BLOCKS: u32 = 1 << 22;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bus {
    /// One command at a time.
    Usb,
    /// ATAPI: one command at a time.
    Sata,
    /// A SCSI transport, with many commands at once.
    Scsi,
}

/// Properties of a unit that do not change while it is attached.
#[derive(Clone, Debug)]
pub(crate) struct Profile {
    pub(crate) bus: Bus,
    /// A CD-ROM drive. Otherwise a disk.
    pub(crate) cdrom: bool,
    pub(crate) removable: bool,
    /// At most 20 ASCII characters.
    pub(crate) serial: String,
}

impl Profile {
    /// Size of this medium's blocks, in bytes.
    pub(crate) fn block(&self, medium: &Geometry) -> u32 {
        if self.cdrom { CD_BLOCK } else { medium.logical_block }
    }

    /// An incomplete block at the end of a CD does not count.
    pub(crate) fn blocks(&self, medium: &Geometry) -> u64 {
        medium.size / u64::from(self.block(medium))
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Conditions {
    /// Sense data of the last failed command, until REQUEST SENSE reads it.
    pub(super) sense: Option<Sense>,
    /// Pending unit attentions. Each is reported at most once, before the next command is executed.
    pub(super) attentions: VecDeque<Sense>,
    /// The guest locked the medium in the drive.
    pub(crate) prevented: bool,
    /// The pending media event of a CD-ROM drive.
    pub(crate) news: MediaEvent,
    /// The guest disabled the write cache (WCE): each write is durable when it finishes.
    #[serde(default)]
    pub(crate) write_through: bool,
}

/// Media events (MMC-5, 6.6.2.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MediaEvent {
    #[default]
    None = 0,
    EjectRequest = 1,
    NewMedium = 2,
    Removal = 3,
}

impl Default for Conditions {
    fn default() -> Self {
        let attentions = VecDeque::from([Sense::POWER_ON]);
        let (prevented, news, write_through) = (false, MediaEvent::None, false);
        Self { sense: None, attentions, prevented, news, write_through }
    }
}

impl Conditions {
    /// The write cache setting stays: drivers do not set it again, and a guest that relies on
    /// durable writes must not lose them.
    pub(crate) fn reset(&mut self) {
        *self = Self { write_through: self.write_through, ..Self::default() };
    }

    pub(crate) fn add_attention(&mut self, sense: Sense) {
        if !self.attentions.contains(&sense) {
            self.attentions.push_back(sense);
        }
    }

    pub(crate) fn fail(&mut self, sense: Sense) {
        self.sense = Some(sense);
    }
}

/// How the transport continues with a command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// The command is finished, without data.
    Done,
    Answer(Vec<u8>),
    Transfer(BlockTransfer),
    /// The guest sends this many bytes. They are passed to [`Unit::parameters`].
    Parameters(usize),
    /// An operation without data on these ranges: offset and length in bytes.
    Clear(Operation, Vec<(u64, u64)>),
    Flush,
    Eject,
}

/// A transfer between the guest and the medium, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BlockTransfer {
    pub(crate) write: bool,
    /// Forced unit access (FUA): the write is durable when it finishes.
    pub(crate) durable: bool,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A command descriptor block, padded to 16 bytes.
pub(crate) type Cdb = [u8; 16];

pub(crate) fn be16(cdb: &[u8], at: usize) -> usize {
    usize::from(cdb[at]) << 8 | usize::from(cdb[at + 1])
}

pub(crate) fn be32(cdb: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([cdb[at], cdb[at + 1], cdb[at + 2], cdb[at + 3]])
}

pub(crate) fn be64(cdb: &[u8], at: usize) -> u64 {
    u64::from(be32(cdb, at)) << 32 | u64::from(be32(cdb, at + 4))
}

/// A unit while it plans a command.
pub(crate) struct Unit<'a> {
    pub(crate) profile: &'a Profile,
    pub(crate) conditions: &'a mut Conditions,
    pub(crate) medium: Option<&'a Geometry>,
}

impl Unit<'_> {
    pub(crate) fn medium(&self) -> Result<&Geometry, Sense> {
        self.medium.ok_or(Sense::NO_MEDIUM)
    }

    /// Whether the host makes use of discarded blocks.
    pub(crate) fn discards(&self) -> bool {
        !self.profile.cdrom && self.medium.is_some_and(|it| it.discard > 0 && !it.read_only)
    }

    /// Converts a range of blocks to offset and length in bytes. Fails if the medium is shorter.
    pub(crate) fn within(&self, first: u64, count: u64) -> Result<(u64, u64), Sense> {
        let medium = self.medium()?;
        let end = first.checked_add(count).filter(|end| *end <= self.profile.blocks(medium));
        let block = u64::from(self.profile.block(medium));
        end.map(|_| (first * block, count * block)).ok_or(Sense::OUT_OF_RANGE)
    }
}

/// Faults in guest memory are not covered here.
pub(crate) fn sense_for(fault: Fault, write: bool) -> Sense {
    match fault {
        Fault::Refused => Sense::OUT_OF_RANGE,
        Fault::Full => Sense::NO_ROOM,
        Fault::Unsupported => Sense::INVALID_COMMAND,
        Fault::Broken if write => Sense::WRITE_ERROR,
        Fault::Broken => Sense::READ_ERROR,
    }
}

/// Plans to send `data`, cut to the guest's allocation length. A length of 0 is not an error.
pub(crate) fn answer(mut data: Vec<u8>, room: usize) -> Plan {
    data.truncate(room);
    if data.is_empty() { Plan::Done } else { Plan::Answer(data) }
}
