//! The NVM command set: plans the disk requests of a command (NVMe 1.4, 6).
//!
//! Threats: the guest chooses blocks, lengths and data addresses. A request that is not entirely
//! inside the namespace is refused, and the channel checks again.

use super::Shared;
use super::command::{Command, Status};
use super::prp;
use host::disk::{Fault, Operation};
use host::memory::Piece;

/// Opcodes.
pub(super) const FLUSH: u8 = 0x00;
pub(super) const WRITE: u8 = 0x01;
pub(super) const READ: u8 = 0x02;
pub(super) const WRITE_ZEROES: u8 = 0x08;
pub(super) const DATASET: u8 = 0x09;

/// Bits of dword 12: force unit access, and deallocate (Write Zeroes).
const FUA: u32 = 1 << 30;
const DEALLOCATE: u32 = 1 << 25;
/// Bits of dword 12: protection information, which no LBA format has.
const PRINFO: u32 = 0xf << 26;
/// Bit of Dataset Management's dword 11: deallocate.
const DATASET_DEALLOCATE: u32 = 1 << 2;
/// Size of a Dataset Management range, and maximum number of ranges.
const RANGE_SIZE: usize = 16;
pub(super) const MAX_RANGES: usize = 256;

/// Identifiers of the only namespace, and of all namespaces.
pub(super) const NAMESPACE: u32 = 1;
pub(super) const EVERY_NAMESPACE: u32 = u32::MAX;

pub(super) struct DiskRequests {
    pub(super) operation: Operation,
    /// Offset and length in bytes on the disk: one request for each.
    pub(super) ranges: Vec<(u64, u64)>,
    /// A flush must follow, because the operation itself cannot be durable.
    pub(super) flush: bool,
}

impl DiskRequests {
    fn one(operation: Operation, offset: u64, length: u64) -> Self {
        Self { operation, ranges: vec![(offset, length)], flush: false }
    }
}

/// Appends the addresses of the command's data to `pieces`.
pub(super) fn plan(
    shared: &Shared,
    command: &Command,
    pieces: &mut Vec<Piece>,
) -> Result<DiskRequests, Status> {
    if command.is_fused_or_sgl() {
        return Err(Status::INVALID_FIELD);
    }
    let everywhere = command.opcode() == FLUSH && command.nsid() == EVERY_NAMESPACE;
    if command.nsid() != NAMESPACE && !everywhere {
        return Err(Status::INVALID_NAMESPACE);
    }
    match command.opcode() {
        FLUSH => Ok(DiskRequests::one(Operation::Flush, 0, 0)),
        READ | WRITE => transfer(shared, command, pieces),
        WRITE_ZEROES => zeroes(shared, command),
        DATASET if shared.discards() => dataset(shared, command),
        _ => Err(Status::INVALID_OPCODE),
    }
}

fn transfer(
    shared: &Shared,
    command: &Command,
    pieces: &mut Vec<Piece>,
) -> Result<DiskRequests, Status> {
    let (offset, length) = extent(shared, command)?;
    let durable = command.dword(12) & FUA != 0 || !shared.caches();
    let operation = match command.opcode() {
        READ => Operation::Read,
        _ => Operation::Write { durable },
    };
    if operation != Operation::Read {
        writable(shared)?;
    }
    let bytes = u32::try_from(length).map_err(|_| Status::INVALID_FIELD)?;
    prp::pieces(&shared.memory, shared.page(), command.prp(), bytes, pieces)?;
    let counter = if operation == Operation::Read { &shared.reads } else { &shared.writes };
    counter.count(length);
    Ok(DiskRequests::one(operation, offset, length))
}

fn zeroes(shared: &Shared, command: &Command) -> Result<DiskRequests, Status> {
    let (offset, length) = extent(shared, command)?;
    writable(shared)?;
    let unmap = command.dword(12) & DEALLOCATE != 0;
    let flush = command.dword(12) & FUA != 0 || !shared.caches();
    shared.writes.count(0);
    Ok(DiskRequests {
        flush,
        ..DiskRequests::one(Operation::WriteZeroes { unmap }, offset, length)
    })
}

/// Offset and length in bytes.
fn extent(shared: &Shared, command: &Command) -> Result<(u64, u64), Status> {
    if command.dword(12) & PRINFO != 0 {
        return Err(Status::INVALID_FIELD);
    }
    within(shared, command.slba(), command.blocks().into())
}

fn within(shared: &Shared, first: u64, blocks: u64) -> Result<(u64, u64), Status> {
    let end = first.checked_add(blocks).filter(|end| *end <= shared.blocks());
    end.ok_or(Status::LBA_OUT_OF_RANGE)?;
    let block = u64::from(shared.block);
    Ok((first * block, blocks * block))
}

fn writable(shared: &Shared) -> Result<(), Status> {
    if shared.read_only { Err(Status::WRITE_PROTECTED) } else { Ok(()) }
}

/// Upper limit of a command's requests, at least 1. It is counted before the ranges are read.
pub(super) fn requests(command: &Command) -> u32 {
    if command.opcode() == DATASET { u32::from(ranges_of(command)) } else { 1 }
}

/// Number of ranges that a Dataset Management command announces: 1 to 256.
fn ranges_of(command: &Command) -> u16 {
    (command.halves(10).0 & 0xff) + 1
}

/// Dataset Management. Only deallocation has an effect, other attributes are hints.
fn dataset(shared: &Shared, command: &Command) -> Result<DiskRequests, Status> {
    let count = usize::from(ranges_of(command));
    let mut bytes = [0; RANGE_SIZE * MAX_RANGES];
    let bytes = &mut bytes[..count * RANGE_SIZE];
    prp::copy_in(&shared.memory, shared.page(), command.prp(), bytes)?;
    let mut ranges = Vec::new();
    for range in bytes.as_chunks::<RANGE_SIZE>().0 {
        let [_, _, _, _, a, b, c, d, first @ ..] = *range;
        let (first, blocks) = (u64::from_le_bytes(first), u32::from_le_bytes([a, b, c, d]));
        // All ranges are checked before the first one is discarded.
        let range = within(shared, first, blocks.into())?;
        if blocks > 0 {
            ranges.push(range);
        }
    }
    if command.dword(11) & DATASET_DEALLOCATE == 0 {
        ranges.clear();
    } else {
        writable(shared)?;
    }
    Ok(DiskRequests { operation: Operation::Discard, ranges, flush: false })
}

pub(super) fn status(fault: Fault, opcode: u8) -> Status {
    match (fault, opcode) {
        // The blocks were checked before, so the guest's memory is at fault.
        (Fault::Refused, _) => Status::DATA_TRANSFER,
        // A hint that cannot be followed is not an error.
        (Fault::Unsupported, DATASET) => Status::SUCCESS,
        (Fault::Unsupported, _) => Status::INVALID_OPCODE,
        (Fault::Full, _) => Status::CAPACITY,
        (Fault::Broken, READ) => Status::READ_ERROR,
        (Fault::Broken, FLUSH) => Status::INTERNAL,
        (Fault::Broken, _) => Status::WRITE_FAULT,
    }
}
