//! The NVM command set: what a command asks of the disk (NVMe 1.4, 6).
//!
//! Threats: the guest chooses blocks, lengths and where its data is; what is not wholly within the
//! namespace is refused before it is a request, and the channel checks again.

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

/// Of dword 12: force unit access, and deallocate (Write Zeroes).
const FUA: u32 = 1 << 30;
const DEALLOCATE: u32 = 1 << 25;
/// Of dword 12: checks of protection information, which no format has.
const PRINFO: u32 = 0xf << 26;
/// Of Dataset Management's dword 11: deallocate.
const DATASET_DEALLOCATE: u32 = 1 << 2;
/// Bytes of one of its ranges, and their number at most.
const RANGE: usize = 16;
pub(super) const RANGES: usize = 256;

/// The one namespace, and all of them.
pub(super) const NAMESPACE: u32 = 1;
pub(super) const EVERY_NAMESPACE: u32 = u32::MAX;

/// What a command becomes.
pub(super) struct Work {
    pub(super) operation: Operation,
    /// The bytes of the disk: one request for each.
    pub(super) ranges: Vec<(u64, u64)>,
    /// A flush afterwards, because the operation itself cannot be durable.
    pub(super) flush: bool,
}

impl Work {
    fn one(operation: Operation, offset: u64, length: u64) -> Self {
        Self { operation, ranges: vec![(offset, length)], flush: false }
    }
}

/// What `command` asks for; its data goes to `pieces`.
pub(super) fn understand(
    shared: &Shared,
    command: &Command,
    pieces: &mut Vec<Piece>,
) -> Result<Work, Status> {
    if command.is_fused_or_sgl() {
        return Err(Status::INVALID_FIELD);
    }
    let everywhere = command.opcode() == FLUSH && command.nsid() == EVERY_NAMESPACE;
    if command.nsid() != NAMESPACE && !everywhere {
        return Err(Status::INVALID_NAMESPACE);
    }
    match command.opcode() {
        FLUSH => Ok(Work::one(Operation::Flush, 0, 0)),
        READ | WRITE => transfer(shared, command, pieces),
        WRITE_ZEROES => zeroes(shared, command),
        DATASET if shared.discards() => dataset(shared, command),
        _ => Err(Status::INVALID_OPCODE),
    }
}

fn transfer(shared: &Shared, command: &Command, pieces: &mut Vec<Piece>) -> Result<Work, Status> {
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
    Ok(Work::one(operation, offset, length))
}

fn zeroes(shared: &Shared, command: &Command) -> Result<Work, Status> {
    let (offset, length) = extent(shared, command)?;
    writable(shared)?;
    let unmap = command.dword(12) & DEALLOCATE != 0;
    let flush = command.dword(12) & FUA != 0 || !shared.caches();
    shared.writes.count(0);
    Ok(Work { flush, ..Work::one(Operation::WriteZeroes { unmap }, offset, length) })
}

/// Which blocks a command is about, as bytes.
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

/// Requests that a command comes to at most, and at least one: they are counted before its data are
/// looked at.
pub(super) fn requests(command: &Command) -> u32 {
    if command.opcode() == DATASET { u32::from(ranges_of(command)) } else { 1 }
}

/// The ranges that Dataset Management says it has: 1 to 256.
fn ranges_of(command: &Command) -> u16 {
    (command.halves(10).0 & 0xff) + 1
}

/// Dataset Management: only the deallocation of ranges does something here, the rest is advice.
fn dataset(shared: &Shared, command: &Command) -> Result<Work, Status> {
    let count = usize::from(ranges_of(command));
    let mut bytes = [0; RANGE * RANGES];
    let bytes = &mut bytes[..count * RANGE];
    prp::copy_in(&shared.memory, shared.page(), command.prp(), bytes)?;
    let mut ranges = Vec::new();
    for range in bytes.as_chunks::<RANGE>().0 {
        let [_, _, _, _, a, b, c, d, first @ ..] = *range;
        let (first, blocks) = (u64::from_le_bytes(first), u32::from_le_bytes([a, b, c, d]));
        // All are checked before the first is gone.
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
    Ok(Work { operation: Operation::Discard, ranges, flush: false })
}

/// What the guest is told of a request that was not done.
pub(super) fn status(fault: Fault, opcode: u8) -> Status {
    match (fault, opcode) {
        // Its blocks were checked: it is the memory that is not there.
        (Fault::Refused, _) => Status::DATA_TRANSFER,
        // Advice that cannot be followed is no error.
        (Fault::Unsupported, DATASET) => Status::SUCCESS,
        (Fault::Unsupported, _) => Status::INVALID_OPCODE,
        (Fault::Full, _) => Status::CAPACITY,
        (Fault::Broken, READ) => Status::READ_ERROR,
        (Fault::Broken, FLUSH) => Status::INTERNAL,
        (Fault::Broken, _) => Status::WRITE_FAULT,
    }
}
