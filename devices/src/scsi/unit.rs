//! The logical unit: what it is, its state, and the plan that a command comes to (SPC-4, SBC-3; for
//! a CD, MMC-5). The commands are in `commands.rs` and the files that it calls.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::sense::Sense;
use host::disk::{Fault, Geometry, Operation};

/// Bytes of a CD's block.
pub(crate) const CD_BLOCK: u32 = 2048;
/// Most ranges of one UNMAP.
pub(crate) const RANGES: usize = 256;
/// Most blocks that one range of an UNMAP, or a WRITE SAME, has.
pub(crate) const RANGE_BLOCKS: u32 = 1 << 22;

/// What carries the commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bus {
    /// The unit does one thing after the other.
    Usb,
    /// A transport of SCSI's own, with many commands at once.
    Scsi,
}

/// What a unit is as long as it is plugged in.
#[derive(Clone, Debug)]
pub(crate) struct Profile {
    pub(crate) bus: Bus,
    /// A CD-ROM drive, else a disk.
    pub(crate) cdrom: bool,
    /// Its medium can be taken out.
    pub(crate) removable: bool,
    /// At most 20 ASCII characters.
    pub(crate) serial: String,
}

impl Profile {
    /// Bytes of a block of this medium.
    pub(crate) fn block(&self, medium: &Geometry) -> u32 {
        if self.cdrom { CD_BLOCK } else { medium.logical_block }
    }

    /// Blocks of this medium. What is left over at the end of a CD is not part of it.
    pub(crate) fn blocks(&self, medium: &Geometry) -> u64 {
        medium.size / u64::from(self.block(medium))
    }
}

/// What of it changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Conditions {
    /// Why the last command was not done, until somebody asks.
    pub(super) sense: Option<Sense>,
    /// What the guest must hear before its next command is done: each at most once.
    pub(super) attentions: VecDeque<Sense>,
    /// The guest wants its medium to stay.
    pub(crate) prevented: bool,
    /// What a CD's guest hears when it asks for events.
    pub(crate) news: News,
    /// The guest switched the write cache off (WCE): each write is durable when it ends.
    #[serde(default)]
    pub(crate) write_through: bool,
}

/// Media events (MMC-5, 6.6.2.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum News {
    #[default]
    None = 0,
    EjectRequest = 1,
    NewMedium = 2,
    Removal = 3,
}

impl Default for Conditions {
    fn default() -> Self {
        let attentions = VecDeque::from([Sense::POWER_ON]);
        let (prevented, news, write_through) = (false, News::None, false);
        Self { sense: None, attentions, prevented, news, write_through }
    }
}

impl Conditions {
    /// A reset of the unit. The write cache stays as it was set: drivers do not set it again, and a
    /// guest that relies on durable writes must not lose them.
    pub(crate) fn reset(&mut self) {
        *self = Self { write_through: self.write_through, ..Self::default() };
    }

    pub(crate) fn attend(&mut self, sense: Sense) {
        if !self.attentions.contains(&sense) {
            self.attentions.push_back(sense);
        }
    }

    /// A command was not done.
    pub(crate) fn fail(&mut self, sense: Sense) {
        self.sense = Some(sense);
    }
}

/// What a command comes to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// It is done.
    Done,
    /// Bytes for the guest.
    Answer(Vec<u8>),
    /// Blocks between the guest and the medium, in bytes.
    Move(Move),
    /// As many bytes come, which say what [`Unit::parameters`] plans.
    Parameters(usize),
    /// The content of these ranges goes: an operation that has no data, and bytes.
    Clear(Operation, Vec<(u64, u64)>),
    /// What was written before is to last.
    Flush,
    /// The medium is to go.
    Eject,
}

/// Data on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Move {
    pub(crate) write: bool,
    /// The cache is not enough (FUA).
    pub(crate) durable: bool,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A command with its bytes, 16 whatever it has.
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

/// A unit while a command is looked at.
pub(crate) struct Unit<'a> {
    pub(crate) profile: &'a Profile,
    pub(crate) conditions: &'a mut Conditions,
    pub(crate) medium: Option<&'a Geometry>,
}

impl Unit<'_> {
    /// The medium, if there is one.
    pub(crate) fn medium(&self) -> Result<&Geometry, Sense> {
        self.medium.ok_or(Sense::NO_MEDIUM)
    }

    /// Whether what a guest forgets is of use to the host.
    pub(crate) fn discards(&self) -> bool {
        !self.profile.cdrom && self.medium.is_some_and(|it| it.discard > 0 && !it.read_only)
    }

    /// A range of blocks in bytes of this medium.
    pub(crate) fn within(&self, first: u64, count: u64) -> Result<(u64, u64), Sense> {
        let medium = self.medium()?;
        let end = first.checked_add(count).filter(|end| *end <= self.profile.blocks(medium));
        let block = u64::from(self.profile.block(medium));
        end.map(|_| (first * block, count * block)).ok_or(Sense::OUT_OF_RANGE)
    }
}

/// What a guest is told when the medium did not do, but for its own memory.
pub(crate) fn fault(fault: Fault, write: bool) -> Sense {
    match fault {
        Fault::Refused => Sense::OUT_OF_RANGE,
        Fault::Full => Sense::NO_ROOM,
        Fault::Unsupported => Sense::INVALID_COMMAND,
        Fault::Broken if write => Sense::WRITE_ERROR,
        Fault::Broken => Sense::READ_ERROR,
    }
}

/// Bytes for the guest, as many as it has room for. No room is no mistake.
pub(crate) fn answer(mut data: Vec<u8>, room: usize) -> Plan {
    data.truncate(room);
    if data.is_empty() { Plan::Done } else { Plan::Answer(data) }
}
