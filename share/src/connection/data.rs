//! FLUSH, READ, WRITE and LOCK.

use rustix::fs::fdatasync;
use rustix::io::{Errno, pread, pwrite};

use crate::connection::negotiate::MAX_DATA;
use crate::connection::notify::Wants;
use crate::connection::open::{APPEND_DATA, EXECUTE, File, READ_DATA, WRITE_DATA};
use crate::connection::{Connection, Context};
use crate::message::{HEADER, Reply, Request};
use crate::status::{Answer, Status};
use crate::table::Range;
use crate::wire::{Get, Put, index, size32};

/// Bytes of a READ's answer before the data.
const READ_HEAD: usize = 16;
/// The maximum number of locks in a request.
const MAX_LOCKS: usize = 256;

impl Connection {
    pub(crate) fn flush(&mut self, context: &Context, request: &Request<'_>) -> Answer<Reply> {
        request.expect(24)?;
        let open = self.open(context, request, 8)?;
        if let Some(file) = open.file() {
            file.require(WRITE_DATA | APPEND_DATA)?;
            rustix::fs::fsync(&file.fd)?;
        }
        Ok(Reply::plain())
    }

    pub(crate) fn read(&mut self, context: &Context, request: &Request<'_>) -> Answer<Reply> {
        request.expect(49)?;
        let (length, offset, minimum) = (request.u32(4)?, request.u64(8)?, request.u32(32)?);
        let table = self.server.clone();
        let open = self.open(context, request, 16)?;
        if length > MAX_DATA {
            return Err(Status::INVALID_PARAMETER);
        }
        request.check_charge(length)?;
        if let Some(pipe) = open.pipe() {
            let (status, data) = pipe.read(index(length))?;
            let mut body = vec![0; READ_HEAD];
            body.put(&data);
            return Ok(read_reply(status, body));
        }
        let file = open.file().ok_or(Status::FILE_CLOSED)?;
        file.require(READ_DATA | EXECUTE)?;
        check_data(file)?;
        check_range(offset, length)?;
        let access = Range { start: offset, length: length.into(), exclusive: false };
        if length > 0 && table.table.is_locked(file.id, access) {
            return Err(Status::FILE_LOCK_CONFLICT);
        }
        let mut body = vec![0; READ_HEAD + index(length)];
        let count = read_at(file, &mut body[READ_HEAD..], offset)?;
        if count < index(minimum) || count == 0 && length > 0 {
            return Err(Status::END_OF_FILE);
        }
        file.position = offset.saturating_add(u64::try_from(count).unwrap_or(0));
        body.truncate(READ_HEAD + count);
        Ok(read_reply(Status::SUCCESS, body))
    }

    pub(crate) fn write(&mut self, context: &Context, request: &Request<'_>) -> Answer<Reply> {
        const WRITE_THROUGH: u32 = 1;
        request.expect(49)?;
        let (length, offset) = (request.u32(4)?, request.u64(8)?);
        let data = request.buffer(request.u16(2)?.into(), length)?;
        if length > MAX_DATA {
            return Err(Status::INVALID_PARAMETER);
        }
        request.check_charge(length)?;
        let server = self.server.clone();
        let open = self.open(context, request, 16)?;
        if let Some(pipe) = open.pipe() {
            pipe.write(data, &server.config)?;
        } else {
            let file = open.file().ok_or(Status::FILE_CLOSED)?;
            file.require(WRITE_DATA | APPEND_DATA)?;
            check_data(file)?;
            check_range(offset, length)?;
            let access = Range { start: offset, length: length.into(), exclusive: true };
            if server.table.is_locked(file.id, access) {
                return Err(Status::FILE_LOCK_CONFLICT);
            }
            write_at(file, data, offset)?;
            file.position = offset.saturating_add(length.into());
            if request.u32(44)? & WRITE_THROUGH != 0 {
                fdatasync(&file.fd)?;
            }
        }
        let mut body = Vec::new();
        body.put16(17).put16(0).put32(length).put32(0).put32(0);
        Ok(Reply::new(body))
    }

    pub(crate) fn lock(&mut self, context: &Context, request: &Request<'_>) -> Answer<Reply> {
        const SHARED: u32 = 1;
        const EXCLUSIVE: u32 = 2;
        const UNLOCK: u32 = 4;
        const AT_ONCE: u32 = 0x10;
        request.expect(48)?;
        let count = usize::from(request.u16(2)?);
        if count == 0 || count > MAX_LOCKS {
            return Err(Status::INVALID_PARAMETER);
        }
        let server = self.server.clone();
        let file = self.file(context, request, 8)?;
        file.require(READ_DATA | WRITE_DATA)?;
        let list = request.bytes.span(HEADER + 24, 24 * count)?;
        // The first one decides whether all are taken, or all are released.
        let releases = list.u32_at(16)? == UNLOCK;
        let mut taken: Vec<Range> = Vec::new();
        for lock in list.as_chunks::<24>().0 {
            let (start, length) = (lock.u64_at(0)?, lock.u64_at(8)?);
            let flags = lock.u32_at(16)?;
            let kind = flags & !AT_ONCE;
            let range = Range { start, length, exclusive: kind == EXCLUSIVE };
            let wraps = length > 0 && start.checked_add(length - 1).is_none();
            let result = match kind {
                _ if releases != (flags == UNLOCK) => Err(Status::INVALID_PARAMETER),
                _ if wraps => Err(Status::INVALID_LOCK_RANGE),
                // Only a single lock may wait.
                SHARED | EXCLUSIVE if count > 1 && flags & AT_ONCE == 0 => {
                    Err(Status::INVALID_PARAMETER)
                }
                SHARED | EXCLUSIVE => server.table.lock_range(file.id, range),
                UNLOCK if releases => server.table.unlock_range(file.id, range),
                _ => Err(Status::INVALID_PARAMETER),
            };
            match result {
                Ok(()) if kind != UNLOCK => taken.push(range),
                Ok(()) => (),
                Err(Status::LOCK_NOT_GRANTED) if flags & AT_ONCE == 0 => {
                    let file = file.id;
                    return self.wait_later(context, request, (file, Wants::Lock(range)));
                }
                Err(status) => {
                    for range in taken {
                        server.table.unlock_range(file.id, range)?;
                    }
                    return Err(status);
                }
            }
        }
        Ok(Reply::plain())
    }
}

fn read_reply(status: Status, mut body: Vec<u8>) -> Reply {
    let length = size32(body.len() - READ_HEAD);
    body[..4].copy_from_slice(&[17, 0, 80, 0]);
    body.set32(4, length);
    if length == 0 {
        // The body's size includes a byte of data.
        body.push(0);
    }
    Reply::with(status, body)
}

/// Refuses what lies beyond the largest file.
fn check_range(offset: u64, length: u32) -> Answer<()> {
    let end = offset.checked_add(length.into()).and_then(|it| i64::try_from(it).ok());
    end.map(|_| ()).ok_or(Status::INVALID_PARAMETER)
}

fn check_data(file: &File) -> Answer<()> {
    if file.directory { Err(Status::INVALID_DEVICE_REQUEST) } else { Ok(()) }
}

/// Reads up to the end of the file.
pub fn read_at(file: &File, buffer: &mut [u8], offset: u64) -> Answer<usize> {
    let mut count = 0;
    while count < buffer.len() {
        let at = offset.checked_add(u64::try_from(count).unwrap_or(0));
        let Some(at) = at.filter(|it| i64::try_from(*it).is_ok()) else { break };
        match pread(&file.fd, &mut buffer[count..], at) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(Errno::INTR) => (),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(count)
}

pub fn write_at(file: &File, mut data: &[u8], mut offset: u64) -> Answer<()> {
    if i64::try_from(offset).is_err() {
        return Err(Status::INVALID_PARAMETER);
    }
    while !data.is_empty() {
        match pwrite(&file.fd, data, offset) {
            Ok(0) => return Err(Status::DISK_FULL),
            Ok(count) => {
                data = &data[count..];
                offset = offset.saturating_add(u64::try_from(count).unwrap_or(0));
            }
            Err(Errno::INTR) => (),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
