//! SET_INFO ([MS-SMB2] 2.2.39): times, sizes, names, deletion.

use std::os::fd::AsFd;

use rustix::fs::{Dir, FallocateFlags, Timespec, Timestamps, UTIME_OMIT};

use crate::connection::info::class;
use crate::connection::open::{APPEND_DATA, DELETE, File, WRITE_ATTRIBUTES, WRITE_DATA};
use crate::connection::{Connection, Context};
use crate::folder::{self, READ_ONLY};
use crate::message::{Reply, Request};
use crate::names;
use crate::server::Server;
use crate::status::{Answer, Status};
use crate::table::{Path, Range};
use crate::wire::{Get, index, text};

const FILE: u8 = 1;
const SECURITY: u8 = 3;

impl Connection {
    pub(crate) fn set_info(&mut self, context: &Context, request: &Request<'_>) -> Answer<Reply> {
        request.expect(33)?;
        let (kind, class) = (request.u8(2)?, request.u8(3)?);
        let data = request.buffer(request.u16(8)?.into(), request.u32(4)?)?;
        request.check_charge(request.u32(4)?)?;
        let server = self.server.clone();
        let file = self.file(context, request, 16)?;
        if server.config.shares[file.share].read_only {
            return Err(Status::ACCESS_DENIED);
        }
        match (kind, class) {
            (FILE, class::BASIC) => set_basic(file, data)?,
            (FILE, class::RENAME) => rename(&server, file, data)?,
            (FILE, class::LINK) => return Err(Status::NOT_SUPPORTED),
            (FILE, class::DISPOSITION) => set_deleted(&server, file, data.u8_at(0)? != 0)?,
            (FILE, class::POSITION) => file.position = data.u64_at(0)?,
            (FILE, class::MODE) => data.u32_at(0).map(|_| ())?,
            (FILE, class::ALLOCATION) => allocate(file, data.u64_at(0)?)?,
            (FILE, class::END_OF_FILE) => resize(&server, file, data.u64_at(0)?)?,
            (FILE, class::FULL_EA) => return Err(Status::EAS_NOT_SUPPORTED),
            // As on a volume without access control lists, all of which say the same here.
            (SECURITY, _) => file.require(0x4_0000 | 0x8_0000)?,
            (FILE, _) => return Err(Status::INVALID_INFO_CLASS),
            _ => return Err(Status::NOT_SUPPORTED),
        }
        Ok(Reply::new(vec![2, 0]))
    }
}

fn set_basic(file: &File, data: &[u8]) -> Answer<()> {
    file.require(WRITE_ATTRIBUTES)?;
    let (access, write, attributes) = (data.u64_at(8)?, data.u64_at(16)?, data.u32_at(32)?);
    // Zero keeps a time. -1 and -2 are about times that change by themselves.
    let time = |filetime: u64| {
        let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        if filetime == 0 || i64::try_from(filetime).is_err() {
            return omit;
        }
        let (seconds, nanoseconds) = folder::unix_time(filetime);
        Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() }
    };
    let times = Timestamps { last_access: time(access), last_modification: time(write) };
    rustix::fs::futimens(&file.fd, &times)?;
    if attributes != 0 && !file.directory {
        folder::set_read_only(file.fd.as_fd(), attributes & READ_ONLY != 0)?;
    }
    Ok(())
}

fn set_deleted(server: &Server, file: &File, deleted: bool) -> Answer<()> {
    file.require(DELETE)?;
    if deleted {
        let facts = folder::facts(file.fd.as_fd(), "")?;
        if facts.attributes & READ_ONLY != 0 {
            return Err(Status::CANNOT_DELETE);
        }
        may_be_deleted(server, file)?;
    }
    server.table.set_deleted(file.id, deleted);
    Ok(())
}

/// The share's own folder stays, and so does a folder with files.
pub fn may_be_deleted(server: &Server, file: &File) -> Answer<()> {
    if server.table.path(file.id)?.names.is_empty() {
        return Err(Status::CANNOT_DELETE);
    }
    if file.directory && !is_empty(file)? {
        return Err(Status::DIRECTORY_NOT_EMPTY);
    }
    Ok(())
}

fn is_empty(file: &File) -> Answer<bool> {
    for entry in Dir::read_from(&file.fd)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

fn allocate(file: &File, size: u64) -> Answer<()> {
    file.require(WRITE_DATA | APPEND_DATA)?;
    let stat = rustix::fs::fstat(&file.fd)?;
    if file.directory || i64::try_from(size).is_err() {
        return Err(Status::INVALID_PARAMETER);
    }
    if size < u64::try_from(stat.st_size).unwrap_or(0) {
        return Ok(rustix::fs::ftruncate(&file.fd, size)?);
    }
    if size > 0 {
        // A file system that runs out of space in the middle keeps what it has allocated.
        let volume = rustix::fs::fstatvfs(&file.fd)?;
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        let more = size.saturating_sub(blocks.saturating_mul(512));
        if more > volume.f_bavail.saturating_mul(volume.f_frsize) {
            return Err(Status::DISK_FULL);
        }
        match rustix::fs::fallocate(&file.fd, FallocateFlags::KEEP_SIZE, 0, size) {
            // Space that cannot be reserved is allocated as the data comes.
            Err(rustix::io::Errno::OPNOTSUPP) => (),
            other => other?,
        }
    }
    Ok(())
}

fn resize(server: &Server, file: &File, size: u64) -> Answer<()> {
    file.require(WRITE_DATA | APPEND_DATA)?;
    if file.directory || i64::try_from(size).is_err() {
        return Err(Status::INVALID_PARAMETER);
    }
    let now = u64::try_from(rustix::fs::fstat(&file.fd)?.st_size).unwrap_or(0);
    let changed = Range { start: now.min(size), length: now.abs_diff(size), exclusive: true };
    if server.table.is_locked(file.id, changed) {
        return Err(Status::FILE_LOCK_CONFLICT);
    }
    Ok(rustix::fs::ftruncate(&file.fd, size)?)
}

fn rename(server: &Server, file: &File, data: &[u8]) -> Answer<()> {
    file.require(DELETE)?;
    let replace = data.u8_at(0)? != 0;
    let name = text(data.span(20, index(data.u32_at(16)?))?)?;
    let folder = &server.config.shares[file.share].folder;
    let wanted = names::parse(name.strip_prefix('\\').unwrap_or(&name))?;
    let from = server.table.path(file.id)?;
    let source = folder.find(&from.names)?;
    let mut target = folder.find(&wanted)?;
    let to = Path { share: file.share, names: target.path.clone() };
    if from.names.is_empty() || wanted.is_empty() {
        return Err(Status::INVALID_PARAMETER);
    }
    let within = |names: &[String]| {
        let names = names.split_last().map_or_else(Vec::new, |(_, parent)| parent.to_vec());
        server.table.forbids_changes(&Path { share: file.share, names })
    };
    if server.table.forbids_rename(file.id) || within(&from.names) || within(&to.names) {
        return Err(Status::SHARING_VIOLATION);
    }
    if file.directory && server.table.has_open_children(&from) {
        return Err(Status::ACCESS_DENIED);
    }
    if file.directory && to != from && to.names.starts_with(&from.names) {
        return Err(Status::INVALID_PARAMETER);
    }
    if to == from {
        // The same file: only the case of its letters changes.
        let last = wanted.last().ok_or(Status::INVALID_PARAMETER)?;
        if Some(last) == from.names.last() {
            return Ok(());
        }
        target.path.pop();
        target.path.push(last.clone());
        target.found = None;
    } else if let Some(stat) = &target.found {
        if !replace {
            return Err(Status::OBJECT_NAME_COLLISION);
        }
        let directory = folder::is_directory(stat) || file.directory;
        if directory || server.table.is_open(&to) || stat.st_mode & 0o200 == 0 {
            return Err(Status::ACCESS_DENIED);
        }
    }
    let stat = rustix::fs::fstat(&file.fd)?;
    if !source.found.is_some_and(|it| folder::is_same(&it, &stat)) {
        // Another program has moved it.
        return Err(Status::ACCESS_DENIED);
    }
    folder::rename(&source, &target, target.found.is_some())?;
    server.table.rename(&from, &Path { share: file.share, names: target.path });
    Ok(())
}
