//! The commands of a logical unit (SPC-4, SBC-3; for a CD, MMC-5): checks each one and plans the
//! transport's work for it.
//!
//! Threats: a command's blocks, ranges and lengths come from the guest. They are checked against
//! the medium before anything is planned, and a list has at most 256 ranges.

use super::sense::Sense;
use super::unit::{
    BlockTransfer, CD_BLOCK, Cdb, MAX_RANGE_BLOCKS, MAX_RANGES, Plan, Unit, answer, be16, be32,
    be64,
};
use super::{cd, inquiry, mode, operations};
use host::disk::Operation;

/// Operation codes that are used more than once.
const INQUIRY: u8 = 0x12;
const REQUEST_SENSE: u8 = 0x03;
const REPORT_LUNS: u8 = 0xa0;
const UNMAP: u8 = 0x42;
const GET_CONFIGURATION: u8 = 0x46;
const GET_EVENTS: u8 = 0x4a;

impl Unit<'_> {
    /// Commands with parameters continue in [`Unit::parameters`].
    pub(crate) fn plan(&mut self, cdb: &Cdb) -> Result<Plan, Sense> {
        let cd = self.profile.cdrom;
        // These commands are answered despite pending unit attentions (SAM-5, 5.14; MMC-5, 4.1.6).
        let always = matches!(cdb[0], INQUIRY | REQUEST_SENSE | REPORT_LUNS)
            || cd && matches!(cdb[0], GET_CONFIGURATION | GET_EVENTS);
        if !always && let Some(attention) = self.conditions.attentions.pop_front() {
            return Err(attention);
        }
        if cdb[0] == REQUEST_SENSE {
            return Ok(self.request_sense(cdb));
        }
        self.conditions.sense = None;
        if cd && let Some(plan) = cd::plan(self, cdb) {
            return plan;
        }
        match cdb[0] {
            0x00 => self.medium().map(|_| Plan::Done),
            INQUIRY => inquiry::plan(self, cdb),
            0x1a => mode::plan(self, cdb, cdb[4].into(), false),
            0x5a => mode::plan(self, cdb, be16(cdb, 7), true),
            0x15 if !cd => mode::select(cdb, cdb[4].into()),
            0x55 if !cd => mode::select(cdb, be16(cdb, 7)),
            0x1b => self.start_stop(cdb),
            0x1e => {
                self.conditions.prevented = self.profile.removable && cdb[4] & 1 != 0;
                Ok(Plan::Done)
            }
            0x23 => Ok(self.format_capacities(cdb)),
            0x25 => self.capacity(),
            0x9e if cdb[1] & 0x1f == 0x10 && !cd => self.long_capacity(cdb),
            0x08 | 0x28 | 0xa8 | 0x88 => self.transfer(cdb, false),
            0x0a | 0x2a | 0xaa | 0x8a if !cd => self.transfer(cdb, true),
            0x2f | 0xaf | 0x8f => self.verify(cdb),
            0x35 | 0x91 if !cd => self.medium().map(|_| Plan::Flush),
            0x41 | 0x93 if !cd => self.write_same(cdb),
            UNMAP if self.discards() => Self::unmap(cdb),
            0xa3 if cdb[1] & 0x1f == 0x0c && !cd => operations::plan(self, cdb),
            REPORT_LUNS => Ok(Self::report(cdb)),
            _ => Err(Sense::INVALID_COMMAND),
        }
    }

    /// Plans a command for a logical unit that does not exist (SPC-4, 4.3; SAM-5, 5.11).
    pub(crate) fn plan_absent_unit(cdb: &Cdb) -> Result<Plan, Sense> {
        match cdb[0] {
            // Peripheral qualifier 3: no device is possible at this unit number.
            INQUIRY if cdb[1] & 1 == 0 => {
                let mut data = vec![0x7f, 0, 6, 2, 31];
                data.resize(36, 0);
                Ok(answer(data, be16(cdb, 3)))
            }
            REQUEST_SENSE => Ok(answer(Sense::NO_UNIT.data(cdb[1] & 1 != 0), cdb[4].into())),
            REPORT_LUNS => Ok(Self::report(cdb)),
            _ => Err(Sense::NO_UNIT),
        }
    }

    /// REPORT LUNS: only unit 0.
    fn report(cdb: &Cdb) -> Plan {
        let mut data = vec![0, 0, 0, 8];
        data.resize(16, 0);
        answer(data, usize::try_from(be32(cdb, 6)).unwrap_or(usize::MAX))
    }

    fn request_sense(&mut self, cdb: &Cdb) -> Plan {
        let sense = self.conditions.sense.take();
        let sense = sense.or_else(|| self.conditions.attentions.pop_front());
        answer(sense.unwrap_or(Sense::NONE).data(cdb[1] & 1 != 0), cdb[4].into())
    }

    fn start_stop(&self, cdb: &Cdb) -> Result<Plan, Sense> {
        let (start, eject, power) = (cdb[4] & 1 != 0, cdb[4] & 2 != 0, cdb[4] >> 4);
        if power != 0 || start || !eject || !self.profile.removable || self.medium.is_none() {
            // The motor always runs, and only the operator loads media. But a host that stops it
            // may switch the disk off (SBC-3, 5.25), unless NO_FLUSH is set.
            let stops = power != 0 || !start && !eject;
            let flushes = stops && cdb[4] & 4 == 0 && self.medium.is_some() && !self.profile.cdrom;
            return Ok(if flushes { Plan::Flush } else { Plan::Done });
        }
        if self.conditions.prevented { Err(Sense::REMOVAL_PREVENTED) } else { Ok(Plan::Eject) }
    }

    /// Number of blocks, limited to 32 bits, and their size in bytes.
    fn blocks(&self) -> Option<(u32, u32)> {
        let medium = self.medium?;
        let count = u32::try_from(self.profile.blocks(medium)).unwrap_or(u32::MAX);
        Some((count, self.profile.block(medium)))
    }

    fn format_capacities(&self, cdb: &Cdb) -> Plan {
        // Formatted media, or no medium with the maximum capacity.
        let (count, kind, block) = match self.blocks() {
            Some((count, block)) => (count, 2, block),
            None => (u32::MAX, 3, if self.profile.cdrom { CD_BLOCK } else { 512 }),
        };
        let mut data = vec![0, 0, 0, 8];
        data.extend(count.to_be_bytes());
        data.extend((block | kind << 24).to_be_bytes());
        answer(data, be16(cdb, 7))
    }

    fn capacity(&self) -> Result<Plan, Sense> {
        let medium = self.medium()?;
        let last = self.profile.blocks(medium).saturating_sub(1);
        let last = u32::try_from(last).unwrap_or(u32::MAX).to_be_bytes();
        let block = self.profile.block(medium).to_be_bytes();
        Ok(Plan::Answer([last, block].concat()))
    }

    fn long_capacity(&self, cdb: &Cdb) -> Result<Plan, Sense> {
        let medium = self.medium()?;
        let mut data = self.profile.blocks(medium).saturating_sub(1).to_be_bytes().to_vec();
        data.extend(medium.logical_block.to_be_bytes());
        let physical = (medium.physical_block / medium.logical_block.max(1)).max(1).ilog2();
        // LBPME: blocks can be unmapped.
        data.extend([0, physical.to_le_bytes()[0], u8::from(self.discards()) << 7]);
        data.resize(32, 0);
        Ok(answer(data, usize::try_from(be32(cdb, 10)).unwrap_or(usize::MAX)))
    }

    /// The first block and the number of blocks that a command names.
    fn range(cdb: &Cdb) -> (u64, u64) {
        match cdb[0] >> 5 {
            // 21 bits for the block, and 0 means 256 blocks.
            0 => {
                let count = if cdb[4] == 0 { 256 } else { cdb[4].into() };
                (u64::from(be32(cdb, 0) & 0x1f_ffff), count)
            }
            1 | 2 => (be32(cdb, 2).into(), be16(cdb, 7) as u64),
            5 => (be32(cdb, 2).into(), be32(cdb, 6).into()),
            _ => (be64(cdb, 2), be32(cdb, 10).into()),
        }
    }

    fn transfer(&self, cdb: &Cdb, write: bool) -> Result<Plan, Sense> {
        let (first, count) = Self::range(cdb);
        let long = cdb[0] >= 0x20;
        if long && cdb[1] >> 5 != 0 {
            return Err(Sense::INVALID_FIELD);
        }
        let (offset, length) = self.within(first, count)?;
        if write && self.medium()?.read_only {
            return Err(Sense::WRITE_PROTECTED);
        }
        let durable = write && self.conditions.write_through || long && cdb[1] & 8 != 0;
        let plan = Plan::Transfer(BlockTransfer { write, durable, offset, length });
        Ok(if length == 0 { Plan::Done } else { plan })
    }

    fn verify(&self, cdb: &Cdb) -> Result<Plan, Sense> {
        let (first, count) = Self::range(cdb);
        // BYTCHK, comparing with the guest's data, is not supported.
        if cdb[1] & 6 != 0 {
            return Err(Sense::INVALID_FIELD);
        }
        self.within(first, count).map(|_| Plan::Done)
    }

    fn unmap(cdb: &Cdb) -> Result<Plan, Sense> {
        if cdb[1] & 1 != 0 {
            return Err(Sense::INVALID_FIELD);
        }
        let length = be16(cdb, 7);
        Ok(if length == 0 { Plan::Done } else { Plan::Parameters(length) })
    }

    fn write_same(&self, cdb: &Cdb) -> Result<Plan, Sense> {
        if self.conditions.write_through {
            // The zeros would not be durable. The driver writes zeros itself instead.
            return Err(Sense::INVALID_COMMAND);
        }
        let (zeros, medium) = (self.zeros(cdb)?, self.medium()?);
        // NDOB: zeros without a data buffer.
        if cdb[0] == 0x93 && cdb[1] & 1 != 0 {
            return Ok(zeros);
        }
        let block = usize::try_from(medium.logical_block).unwrap_or(usize::MAX);
        Ok(Plan::Parameters(block))
    }

    /// Plans a WRITE SAME of zeros. Drivers use it for nothing else.
    fn zeros(&self, cdb: &Cdb) -> Result<Plan, Sense> {
        let unmap = cdb[1] & 8 != 0;
        let known = if cdb[0] == 0x93 { 9 } else { 8 };
        let (first, count) = Self::range(cdb);
        // 0 would mean all following blocks.
        let out_of_range = count == 0 || count > MAX_RANGE_BLOCKS.into();
        if out_of_range || cdb[1] & !known != 0 || unmap && !self.discards() {
            return Err(Sense::INVALID_FIELD);
        }
        let range = self.within(first, count)?;
        if self.medium()?.read_only {
            return Err(Sense::WRITE_PROTECTED);
        }
        Ok(Plan::Clear(Operation::WriteZeroes { unmap }, vec![range]))
    }

    /// Plans a command whose parameters have arrived.
    pub(crate) fn parameters(&mut self, cdb: &Cdb, data: &[u8]) -> Result<Plan, Sense> {
        if matches!(cdb[0], 0x15 | 0x55) {
            return mode::apply(self, cdb[0] == 0x55, data);
        }
        if cdb[0] != UNMAP {
            let zeros = data.iter().all(|byte| *byte == 0);
            return if zeros { self.zeros(cdb) } else { Err(Sense::INVALID_PARAMETER) };
        }
        let ranges = self.ranges(data)?;
        Ok(if ranges.is_empty() { Plan::Done } else { Plan::Clear(Operation::Discard, ranges) })
    }

    /// The ranges of an UNMAP parameter list: offset and length in bytes.
    fn ranges(&self, data: &[u8]) -> Result<Vec<(u64, u64)>, Sense> {
        let length = data.get(2..4).map_or(0, |_| be16(data, 2));
        let list = data.get(8..).unwrap_or_default();
        let list = list.get(..length - length % 16).ok_or(Sense::INVALID_PARAMETER)?;
        if list.len() / 16 > MAX_RANGES {
            return Err(Sense::INVALID_PARAMETER);
        }
        let (ranges, _) = list.as_chunks::<16>();
        let ranges = ranges.iter().map(|it| self.within(be64(it, 0), be32(it, 8).into()));
        ranges.filter(|it| !matches!(it, Ok((_, 0)))).collect()
    }
}
