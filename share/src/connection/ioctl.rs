//! IOCTL ([MS-SMB2] 2.2.31): controls of files, pipes and the connection.

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::connection::negotiate::MAX_DATA;
use crate::connection::open::{File, READ_DATA, WRITE_DATA};
use crate::connection::{Connection, Context};
use crate::message::{HEADER, Reply, Request};
use crate::status::{Answer, Status};
use crate::table::Range;
use crate::wire::{Get, Put, index, size32};

mod control {
    pub(super) const DFS_REFERRALS: u32 = 0x0006_0194;
    pub(super) const DFS_REFERRALS_EX: u32 = 0x0006_01b0;
    pub(super) const SET_SPARSE: u32 = 0x0009_00c4;
    pub(super) const GET_REPARSE_POINT: u32 = 0x0009_00a8;
    pub(super) const ALLOCATED_RANGES: u32 = 0x0009_40cf;
    pub(super) const SET_ZERO_DATA: u32 = 0x0009_80c8;
    pub(super) const PIPE_WAIT: u32 = 0x0011_0018;
    pub(super) const PIPE_TRANSCEIVE: u32 = 0x0011_c017;
    pub(super) const RESUME_KEY: u32 = 0x0014_0078;
    pub(super) const VALIDATE_NEGOTIATE: u32 = 0x0014_0204;
    pub(super) const COPY_CHUNK: u32 = 0x0014_40f2;
    pub(super) const COPY_CHUNK_WRITE: u32 = 0x0014_80f2;
}

/// The request is a control of a file system, and not of a device.
const IS_FSCTL: u32 = 1;
/// The maximum number of ranges in an answer.
const MAX_RANGES: usize = 4096;

impl Connection {
    pub(crate) fn ioctl(&mut self, context: &Context, request: &Request<'_>) -> Answer<Reply> {
        request.expect(57)?;
        let (code, limit) = (request.u32(4)?, request.u32(44)?);
        let (length, flags) = (request.u32(28)?, request.u32(48)?);
        let input = request.buffer(request.u32(24)?, length)?;
        if limit > MAX_DATA {
            return Err(Status::INVALID_PARAMETER);
        }
        request.check_charge(limit.max(length))?;
        if flags != IS_FSCTL {
            return Err(Status::NOT_SUPPORTED);
        }
        let limit = index(limit);
        let (status, output) = match code {
            control::VALIDATE_NEGOTIATE => match self.validate_negotiation(input) {
                Some(output) => (Status::SUCCESS, output),
                None => {
                    self.broken = true;
                    return Err(Status::ACCESS_DENIED);
                }
            },
            control::DFS_REFERRALS | control::DFS_REFERRALS_EX => {
                return Err(Status::FS_DRIVER_REQUIRED);
            }
            control::PIPE_WAIT => return Err(Status::NOT_SUPPORTED),
            control::PIPE_TRANSCEIVE => {
                let server = self.server.clone();
                let open = self.open(context, request, 8)?;
                let pipe = open.pipe().ok_or(Status::NOT_SUPPORTED)?;
                pipe.write(input, &server.config)?;
                pipe.read(limit)?
            }
            control::COPY_CHUNK | control::COPY_CHUNK_WRITE => {
                return self.copy_chunks(context, request, input);
            }
            _ => {
                let server = self.server.clone();
                let open = self.open(context, request, 8)?;
                let file = open.file().ok_or(Status::NOT_SUPPORTED)?;
                file_control(file, code, input, limit, |range| {
                    server.table.is_locked(file.id, range)
                })?
            }
        };
        Ok(reply(request, status, &output))
    }
}

pub fn reply(request: &Request<'_>, status: Status, output: &[u8]) -> Reply {
    let mut body = Vec::with_capacity(48 + output.len());
    body.put16(49).put16(0).put(&request.bytes[HEADER + 4..HEADER + 24]);
    let at = size32(HEADER + 48);
    body.put32(at).put32(0).put32(at).put32(size32(output.len())).put64(0).put(output);
    Reply::with(status, body)
}

fn file_control(
    file: &File,
    code: u32,
    input: &[u8],
    limit: usize,
    is_locked: impl Fn(Range) -> bool,
) -> Answer<(Status, Vec<u8>)> {
    let mut out = Vec::new();
    match code {
        // All files may have holes.
        control::SET_SPARSE => {
            file.require(WRITE_DATA | 0x100)?;
            if file.directory {
                return Err(Status::INVALID_PARAMETER);
            }
        }
        control::SET_ZERO_DATA => {
            file.require(WRITE_DATA)?;
            let (start, end) = (input.u64_at(0)?, input.u64_at(8)?);
            let length = end.checked_sub(start).ok_or(Status::INVALID_PARAMETER)?;
            if is_locked(Range { start, length, exclusive: true }) {
                return Err(Status::FILE_LOCK_CONFLICT);
            }
            zero(file, start, length)?;
        }
        control::ALLOCATED_RANGES => {
            file.require(READ_DATA)?;
            let (start, length) = (input.u64_at(0)?, input.u64_at(8)?);
            let end = start.checked_add(length).ok_or(Status::INVALID_PARAMETER)?;
            return allocated(file, (start, end), limit);
        }
        control::RESUME_KEY => {
            out.put64(file.id).put64(0).put64(0).put32(0).put32(0);
        }
        control::GET_REPARSE_POINT => return Err(Status::NOT_A_REPARSE_POINT),
        _ => return Err(Status::INVALID_DEVICE_REQUEST),
    }
    if out.len() > limit { Err(Status::BUFFER_TOO_SMALL) } else { Ok((Status::SUCCESS, out)) }
}

fn zero(file: &File, start: u64, length: u64) -> Answer<()> {
    let size = u64::try_from(rustix::fs::fstat(&file.fd)?.st_size).unwrap_or(0);
    let length = length.min(size.saturating_sub(start));
    if length == 0 {
        return Ok(());
    }
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(&file.fd, flags, start, length)?)
}

/// Ranges with data between two offsets.
fn allocated(file: &File, (start, end): (u64, u64), limit: usize) -> Answer<(Status, Vec<u8>)> {
    let mut out = Vec::new();
    let mut at = start;
    let most = MAX_RANGES.min(limit / 16);
    while at < end && i64::try_from(at).is_ok() {
        let from = match rustix::fs::seek(&file.fd, SeekFrom::Data(at)) {
            Ok(from) if from < end => from,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let to = rustix::fs::seek(&file.fd, SeekFrom::Hole(from))?.min(end);
        if out.len() / 16 == most {
            return Ok((Status::BUFFER_OVERFLOW, out));
        }
        out.put64(from).put64(to - from);
        at = to.max(at + 1);
    }
    Ok((Status::SUCCESS, out))
}
