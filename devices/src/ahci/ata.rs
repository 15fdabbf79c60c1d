//! The commands of a disk (ACS-2, 7), without security and host protected areas.
//!
//! Threats: blocks, counts and lists come from the guest. They are checked against the disk before
//! anything is planned. A list of ranges has at most 512.

use super::drive::{Disk, Failure, MAX_LIST, MAX_MULTIPLE};
use super::fis::{Command, DRDY, DSC, Reply};
use super::{identify, log};
use crate::scsi::{BlockTransfer, Plan};
use host::disk::Operation;

const LIST_BLOCK: usize = 512;

/// Device register: addresses are LBAs, or a queued command is durable (FUA).
const LBA: u8 = 1 << 6;
const FUA: u8 = 1 << 7;

/// Commands that are used more than once.
pub(super) const READ_QUEUED: u8 = 0x60;
pub(super) const WRITE_QUEUED: u8 = 0x61;
const DATA_SET_MANAGEMENT: u8 = 0x06;
const WRITE_DMA_FUA_EXT: u8 = 0x3d;
const WRITE_MULTIPLE_FUA_EXT: u8 = 0xce;

/// Whether a command is queued (NCQ).
pub(super) fn is_queued(code: u8) -> bool {
    matches!(code, READ_QUEUED | WRITE_QUEUED)
}

/// Whether the data of a command moves by DMA, and not by PIO.
pub(super) fn is_dma(code: u8) -> bool {
    matches!(code, DATA_SET_MANAGEMENT | 0x25 | 0x35 | 0x47 | 0xc8..=0xcb | WRITE_DMA_FUA_EXT)
        || is_queued(code)
}

impl Disk<'_> {
    /// Commands with parameters continue in [`Disk::parameters`].
    pub(super) fn plan(&mut self, command: &Command, reply: &mut Reply) -> Result<Plan, Failure> {
        match command.code {
            0x20 | 0x21 | 0xc4 | 0xc8 | 0xc9 => self.transfer(short(command)?, false, false),
            0x30 | 0x31 | 0xc5 | 0xca | 0xcb => self.transfer(short(command)?, true, false),
            0x24 | 0x25 | 0x29 => self.transfer(long(command), false, false),
            0x34 | 0x35 | 0x39 => self.transfer(long(command), true, false),
            WRITE_DMA_FUA_EXT | WRITE_MULTIPLE_FUA_EXT => self.transfer(long(command), true, true),
            READ_QUEUED | WRITE_QUEUED => {
                let durable = command.device & FUA != 0;
                self.transfer(queued(command), command.code == WRITE_QUEUED, durable)
            }
            // READ VERIFY.
            0x40 | 0x41 => self.within(short(command)?).map(|_| Plan::Done),
            0x42 => self.within(long(command)).map(|_| Plan::Done),
            DATA_SET_MANAGEMENT => self.data_set_management(command),
            0x2f | 0x47 => log::read(self.state, command).map(Plan::Answer),
            0xb0 => log::smart(self.state, command),
            0xe7 | 0xea => Ok(Plan::Flush),
            0xec => Ok(Plan::Answer(identify::disk(self))),
            0xef => self.set_features(command),
            0xc6 => self.set_multiple(command),
            0x90 => {
                *reply = SIGNATURE;
                Ok(Plan::Done)
            }
            0xe0..=0xe3 | 0xe5 | 0xe6 => Ok(self.power(command, reply)),
            _ => Err(Failure::ABORTED),
        }
    }

    fn power(&mut self, command: &Command, reply: &mut Reply) -> Plan {
        match command.code {
            // CHECK POWER MODE: standby, or active.
            0xe5 => {
                reply.count = if self.state.standby { 0 } else { 0xff };
                Plan::Done
            }
            // STANDBY (IMMEDIATE) and SLEEP also make writes durable.
            0xe0 | 0xe2 | 0xe6 => {
                self.state.standby = true;
                Plan::Flush
            }
            // IDLE (IMMEDIATE).
            _ => {
                self.state.standby = false;
                Plan::Done
            }
        }
    }

    /// Converts a range of sectors to offset and length in bytes.
    fn within(&self, (first, count): (u64, u64)) -> Result<(u64, u64), Failure> {
        let sector = u64::from(self.geometry.logical_block);
        let sectors = self.geometry.size / sector;
        let end = first.checked_add(count).filter(|end| *end <= sectors);
        end.map(|_| (first * sector, count * sector)).ok_or(Failure::NOT_FOUND)
    }

    fn transfer(&mut self, range: (u64, u64), write: bool, durable: bool) -> Result<Plan, Failure> {
        let (offset, length) = self.within(range)?;
        if write && self.geometry.read_only {
            return Err(Failure::ABORTED);
        }
        self.state.standby = false;
        let durable = write && (durable || !self.state.write_cache);
        Ok(Plan::Transfer(BlockTransfer { write, durable, offset, length }))
    }

    /// DATA SET MANAGEMENT: only TRIM.
    fn data_set_management(&self, command: &Command) -> Result<Plan, Failure> {
        let known = command.features == 1 && (1..=MAX_LIST).contains(&command.count);
        if !known || !self.discards() {
            return Err(Failure::ABORTED);
        }
        Ok(Plan::Parameters(usize::from(command.count) * LIST_BLOCK))
    }

    /// Plans a command whose parameters have arrived: the ranges of a TRIM.
    pub(super) fn parameters(&self, data: &[u8]) -> Result<Plan, Failure> {
        let mut ranges = Vec::new();
        for entry in data.as_chunks::<8>().0 {
            let entry = u64::from_le_bytes(*entry);
            let (first, count) = (entry & 0xffff_ffff_ffff, entry >> 48);
            // All ranges are checked before the first one is discarded.
            let range = self.within((first, count)).map_err(|_| Failure::ABORTED)?;
            if count > 0 {
                ranges.push(range);
            }
        }
        Ok(if ranges.is_empty() { Plan::Done } else { Plan::Clear(Operation::Discard, ranges) })
    }

    fn set_features(&mut self, command: &Command) -> Result<Plan, Failure> {
        let value = command.count.to_le_bytes()[0];
        match (command.feature(), value) {
            (0x02, _) => self.state.write_cache = true,
            (0x82, _) => {
                self.state.write_cache = false;
                return Ok(Plan::Flush);
            }
            (0x55, _) => self.state.look_ahead = false,
            (0xaa, _) => self.state.look_ahead = true,
            // The transfer mode: PIO, multiword DMA, Ultra DMA.
            (0x03, 0 | 1 | 0x08..=0x0c | 0x20..=0x22 | 0x40..=0x46) => self.state.mode = value,
            // Software settings preservation, which is always enabled.
            (0x10, 6) => {}
            // Power-on defaults after a software reset.
            (0x66 | 0xcc, _) => {}
            _ => return Err(Failure::ABORTED),
        }
        Ok(Plan::Done)
    }

    fn set_multiple(&mut self, command: &Command) -> Result<Plan, Failure> {
        let count = command.count.to_le_bytes()[0];
        if count > MAX_MULTIPLE || count > 0 && !count.is_power_of_two() {
            return Err(Failure::ABORTED);
        }
        self.state.multiple = count;
        Ok(Plan::Done)
    }
}

/// The registers of a disk after a reset: ready, diagnostics passed.
pub(super) const SIGNATURE: Reply =
    Reply { status: DRDY | DSC, error: 1, lba: 1, device: 0, count: 1 };

/// Sectors of a command with 28 bits: 0 means 256.
fn short(command: &Command) -> Result<(u64, u64), Failure> {
    if command.device & LBA == 0 {
        return Err(Failure::ABORTED);
    }
    let first = command.lba & 0xff_ffff | u64::from(command.device & 0xf) << 24;
    let count = u64::from(command.count & 0xff);
    Ok((first, if count == 0 { 256 } else { count }))
}

/// Sectors of a command with 48 bits: 0 means 65536.
fn long(command: &Command) -> (u64, u64) {
    (command.lba, if command.count == 0 { 1 << 16 } else { command.count.into() })
}

/// Sectors of a queued command, whose count is in the features.
fn queued(command: &Command) -> (u64, u64) {
    long(&Command { count: command.features, ..*command })
}

/// The tag of a queued command.
pub(super) fn tag(command: &Command) -> u8 {
    command.count.to_le_bytes()[0] >> 3
}
