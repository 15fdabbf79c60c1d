//! Headers of messages ([MS-SMB2] 2.2.1).

use crate::status::{Answer, Status};
use crate::wire::{Get, Put, index};

pub const HEADER: usize = 64;
pub const PROTOCOL: &[u8] = b"\xfeSMB";
pub const TRANSFORM: &[u8] = b"\xfdSMB";
pub const SMB1: &[u8] = b"\xffSMB";
/// Bytes of the header of an encrypted message.
pub const TRANSFORM_HEADER: usize = 52;

/// Flags of a header.
pub const FROM_SERVER: u32 = 1;
pub const ASYNC: u32 = 2;
pub const RELATED: u32 = 4;
pub const SIGNED: u32 = 8;

/// The id of a file in a related request: that of the request before it.
pub const PREVIOUS_FILE: u64 = u64::MAX;

pub mod command {
    pub const NEGOTIATE: u16 = 0;
    pub const SESSION_SETUP: u16 = 1;
    pub const LOGOFF: u16 = 2;
    pub const TREE_CONNECT: u16 = 3;
    pub const TREE_DISCONNECT: u16 = 4;
    pub const CREATE: u16 = 5;
    pub const CLOSE: u16 = 6;
    pub const FLUSH: u16 = 7;
    pub const READ: u16 = 8;
    pub const WRITE: u16 = 9;
    pub const LOCK: u16 = 10;
    pub const IOCTL: u16 = 11;
    pub const CANCEL: u16 = 12;
    pub const ECHO: u16 = 13;
    pub const QUERY_DIRECTORY: u16 = 14;
    pub const CHANGE_NOTIFY: u16 = 15;
    pub const QUERY_INFO: u16 = 16;
    pub const SET_INFO: u16 = 17;
}

/// One request. Offsets in it count from its header.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    pub bytes: &'a [u8],
    pub command: u16,
    pub flags: u32,
    pub charge: u16,
    pub credits: u16,
    pub id: u64,
    /// The request that a CANCEL is about.
    pub async_id: u64,
    pub tree: u32,
    pub session: u64,
}

impl<'a> Request<'a> {
    pub fn parse(bytes: &'a [u8]) -> Answer<Self> {
        if bytes.len() < HEADER || !bytes.starts_with(PROTOCOL) || bytes.u16_at(4)? != 64 {
            return Err(Status::INVALID_PARAMETER);
        }
        Ok(Self {
            bytes,
            command: bytes.u16_at(12)?,
            flags: bytes.u32_at(16)?,
            charge: bytes.u16_at(6)?,
            credits: bytes.u16_at(14)?,
            id: bytes.u64_at(24)?,
            async_id: bytes.u64_at(32)?,
            tree: bytes.u32_at(36)?,
            session: bytes.u64_at(40)?,
        })
    }

    /// Checks the size that the body states. Odd sizes include a byte that need not exist.
    pub fn expect(&self, size: u16) -> Answer<()> {
        let there = self.bytes.len() - HEADER >= usize::from(size & !1);
        let right = there && self.bytes.u16_at(HEADER)? == size;
        if right { Ok(()) } else { Err(Status::INVALID_PARAMETER) }
    }

    pub fn u8(&self, at: usize) -> Answer<u8> {
        self.bytes.u8_at(HEADER + at)
    }

    pub fn u16(&self, at: usize) -> Answer<u16> {
        self.bytes.u16_at(HEADER + at)
    }

    pub fn u32(&self, at: usize) -> Answer<u32> {
        self.bytes.u32_at(HEADER + at)
    }

    pub fn u64(&self, at: usize) -> Answer<u64> {
        self.bytes.u64_at(HEADER + at)
    }

    /// A buffer whose offset counts from the header.
    pub fn buffer(&self, offset: u32, length: u32) -> Answer<&'a [u8]> {
        if length == 0 {
            return Ok(&[]);
        }
        if index(offset) < HEADER {
            return Err(Status::INVALID_PARAMETER);
        }
        self.bytes.span(index(offset), index(length))
    }

    /// A file id, whose halves are the same here.
    pub fn file(&self, at: usize) -> Answer<u64> {
        let id = self.u64(at)?;
        if id == self.u64(at + 8)? { Ok(id) } else { Err(Status::FILE_CLOSED) }
    }

    /// The file that the request names by its id, for related requests after it.
    pub fn named_file(&self) -> Option<u64> {
        use command::*;
        let at = match self.command {
            CLOSE | FLUSH | LOCK | IOCTL | QUERY_DIRECTORY | CHANGE_NOTIFY => 8,
            READ | WRITE | SET_INFO => 16,
            QUERY_INFO => 24,
            _ => return None,
        };
        self.file(at).ok().filter(|id| *id != PREVIOUS_FILE)
    }

    /// Refuses data for which the client has not paid ([MS-SMB2] 3.3.5.2.5).
    pub fn check_charge(&self, length: u32) -> Answer<()> {
        let needed = length.saturating_sub(1) / 65_536 + 1;
        let paid = u32::from(self.charge.max(1));
        if needed <= paid { Ok(()) } else { Err(Status::INVALID_PARAMETER) }
    }
}

/// The answer to a request.
#[derive(Debug)]
pub struct Reply {
    pub status: Status,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn new(body: Vec<u8>) -> Self {
        Self { status: Status::SUCCESS, body }
    }

    pub fn with(status: Status, body: Vec<u8>) -> Self {
        Self { status, body }
    }

    /// A body of four bytes, which many commands have.
    pub fn plain() -> Self {
        Self::new(vec![4, 0, 0, 0])
    }

    pub fn error(status: Status) -> Self {
        Self::with(status, vec![9, 0, 0, 0, 0, 0, 0, 0, 0])
    }

    /// A body of `size` 9 with a buffer: QUERY_INFO and QUERY_DIRECTORY.
    pub fn buffer(status: Status, bytes: &[u8]) -> Self {
        let mut body = Vec::with_capacity(8 + bytes.len());
        body.put16(9).put16(72).put32(crate::wire::size32(bytes.len())).put(bytes);
        Self::with(status, body)
    }
}

/// The fields of an answer's header beside the request's own fields.
pub struct Head {
    pub status: Status,
    pub credits: u16,
    pub session: u64,
    pub tree: u32,
    /// Set for answers that come later.
    pub async_id: Option<u64>,
}

/// Appends the header of an answer.
pub fn put_header(out: &mut Vec<u8>, request: &Request<'_>, head: &Head) {
    let mut flags = FROM_SERVER | request.flags & RELATED;
    if head.async_id.is_some() {
        flags |= ASYNC;
    }
    out.put(PROTOCOL).put16(64).put16(request.charge).put32(head.status.0);
    out.put16(request.command).put16(head.credits).put32(flags).put32(0).put64(request.id);
    match head.async_id {
        Some(id) => out.put64(id),
        None => out.put32(0xfeff).put32(head.tree),
    };
    out.put64(head.session).put(&[0; 16]);
}
