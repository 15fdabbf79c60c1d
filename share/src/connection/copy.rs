//! Copies on the server (FSCTL_SRV_COPYCHUNK, [MS-SMB2] 3.3.5.15.6), as Explorer makes them within
//! a share.

use rustix::fs::copy_file_range;
use rustix::io::Errno;

use crate::connection::ioctl::reply;
use crate::connection::open::{APPEND_DATA, File, READ_DATA, WRITE_DATA};
use crate::connection::{Connection, Context};
use crate::message::{Reply, Request};
use crate::status::{Answer, Status};
use crate::table::Range;
use crate::wire::{Get, Put, index};

/// Limits, which an answer has: chunks, bytes of a chunk, bytes of a request.
const MAX_CHUNKS: u32 = 256;
const MAX_CHUNK: u32 = 1 << 20;
const MAX_TOTAL: u32 = 16 << 20;

struct Chunk {
    from: u64,
    to: u64,
    length: u32,
}

impl Connection {
    pub(crate) fn copy_chunks(
        &mut self,
        context: &Context,
        request: &Request<'_>,
        input: &[u8],
    ) -> Answer<Reply> {
        let Some(chunks) = parse(input)? else {
            let mut limits = Vec::new();
            limits.put32(MAX_CHUNKS).put32(MAX_CHUNK).put32(MAX_TOTAL);
            return Ok(reply(request, Status::INVALID_PARAMETER, &limits));
        };
        let source = input.u64_at(0)?;
        let server = self.server.clone();
        let target = self.file(context, request, 8)?.id;
        // The key is the id of a file of the same session.
        let source = self.opens.get_mut(&source).filter(|it| it.session == context.session);
        let source = source.and_then(|it| it.file()).ok_or(Status::OBJECT_NAME_NOT_FOUND)?;
        source.require(READ_DATA)?;
        let from = rustix::io::fcntl_dupfd_cloexec(&source.fd, 0)?;
        let (source_id, size) = (source.id, rustix::fs::fstat(&from)?.st_size);
        let size = u64::try_from(size).unwrap_or(0);
        let target = self.opens.get_mut(&target).and_then(|it| it.file());
        let target = target.ok_or(Status::FILE_CLOSED)?;
        target.require(WRITE_DATA | APPEND_DATA)?;
        if target.directory {
            return Err(Status::INVALID_DEVICE_REQUEST);
        }
        let mut total = 0_u32;
        for chunk in &chunks {
            let end =
                chunk.from.checked_add(chunk.length.into()).ok_or(Status::INVALID_VIEW_SIZE)?;
            if end > size || i64::try_from(chunk.to.saturating_add(chunk.length.into())).is_err() {
                return Err(Status::INVALID_VIEW_SIZE);
            }
            let range = |start, exclusive| Range { start, length: chunk.length.into(), exclusive };
            if server.table.is_locked(source_id, range(chunk.from, false))
                || server.table.is_locked(target.id, range(chunk.to, true))
            {
                return Err(Status::FILE_LOCK_CONFLICT);
            }
            copy(&from, target, chunk)?;
            total += chunk.length;
        }
        let mut done = Vec::new();
        done.put32(u32::try_from(chunks.len()).unwrap_or(0)).put32(0).put32(total);
        Ok(reply(request, Status::SUCCESS, &done))
    }
}

/// The chunks of a request. None if they exceed the limits.
fn parse(input: &[u8]) -> Answer<Option<Vec<Chunk>>> {
    let count = input.u32_at(24)?;
    if count > MAX_CHUNKS {
        return Ok(None);
    }
    let list = input.span(32, 24 * index(count))?;
    let mut total = 0_u32;
    let mut chunks = Vec::new();
    for chunk in list.as_chunks::<24>().0 {
        let length = chunk.u32_at(16)?;
        total = total.saturating_add(length);
        if length == 0 || length > MAX_CHUNK || total > MAX_TOTAL {
            return Ok(None);
        }
        chunks.push(Chunk { from: chunk.u64_at(0)?, to: chunk.u64_at(8)?, length });
    }
    Ok(Some(chunks))
}

fn copy(from: &std::os::fd::OwnedFd, target: &File, chunk: &Chunk) -> Answer<()> {
    let (mut source, mut place, mut rest) = (chunk.from, chunk.to, index(chunk.length));
    while rest > 0 {
        match copy_file_range(from, Some(&mut source), &target.fd, Some(&mut place), rest) {
            Ok(0) => return Err(Status::END_OF_FILE),
            Ok(count) => rest -= count.min(rest),
            Err(Errno::INTR) => (),
            // Ranges of one file that overlap, and file systems that cannot.
            Err(Errno::INVAL | Errno::XDEV | Errno::OPNOTSUPP) => {
                let mut buffer = vec![0; rest];
                let count = rustix::io::pread(from, &mut buffer, source)?;
                if count == 0 {
                    return Err(Status::END_OF_FILE);
                }
                crate::connection::data::write_at(target, &buffer[..count], place)?;
                source += u64::try_from(count).unwrap_or(0);
                place += u64::try_from(count).unwrap_or(0);
                rest -= count;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
