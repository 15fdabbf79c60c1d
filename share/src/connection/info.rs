//! QUERY_INFO ([MS-SMB2] 2.2.37): files and security. Volumes are in `volume.rs`.

use std::os::fd::AsFd;

use crate::connection::negotiate::MAX_DATA;
use crate::connection::open::{File, READ_ONLY_ACCESS};
use crate::connection::{Connection, Context};
use crate::folder::{self, Facts};
use crate::message::{Reply, Request};
use crate::names;
use crate::status::{Answer, Status};
use crate::wire::{Put, index, size32, utf16};

const FILE: u8 = 1;
const VOLUME: u8 = 2;
const SECURITY: u8 = 3;

/// Classes of files ([MS-FSCC] 2.4).
pub mod class {
    pub const BASIC: u8 = 4;
    pub const STANDARD: u8 = 5;
    pub const INTERNAL: u8 = 6;
    pub const EA: u8 = 7;
    pub const ACCESS: u8 = 8;
    pub const RENAME: u8 = 10;
    pub const LINK: u8 = 11;
    pub const DISPOSITION: u8 = 13;
    pub const POSITION: u8 = 14;
    pub const FULL_EA: u8 = 15;
    pub const MODE: u8 = 16;
    pub const ALIGNMENT: u8 = 17;
    pub const ALL: u8 = 18;
    pub const ALLOCATION: u8 = 19;
    pub const END_OF_FILE: u8 = 20;
    pub const ALTERNATE_NAME: u8 = 21;
    pub const STREAM: u8 = 22;
    pub const COMPRESSION: u8 = 28;
    pub const NETWORK_OPEN: u8 = 34;
    pub const ATTRIBUTE_TAG: u8 = 35;
    pub const NORMALIZED_NAME: u8 = 48;
    pub const ID: u8 = 59;
}

/// The file that a query is about.
struct Target<'a> {
    file: &'a File,
    facts: Facts,
    /// The client's path, which begins with `\`.
    path: String,
    deleted: bool,
}

impl Connection {
    pub(crate) fn query_info(&mut self, context: &Context, request: &Request<'_>) -> Answer<Reply> {
        request.expect(41)?;
        let (kind, class, limit) = (request.u8(2)?, request.u8(3)?, request.u32(4)?);
        let (additional, length) = (request.u32(16)?, request.u32(12)?);
        if limit > MAX_DATA || length > MAX_DATA {
            return Err(Status::INVALID_PARAMETER);
        }
        request.check_charge(limit.max(length))?;
        let server = self.server.clone();
        let open = self.open(context, request, 24)?;
        let Some(file) = open.file() else {
            return pipe_info(kind, class);
        };
        let share = &server.config.shares[file.share];
        let (fixed, bytes) = match kind {
            FILE => {
                let path = server.table.path(file.id)?.names;
                let target = Target {
                    facts: folder::facts(file.fd.as_fd(), path.last().map_or("", String::as_str))?,
                    path: path.iter().map(|it| format!("\\{}", names::to_client(it))).collect(),
                    deleted: server.table.is_deleted(file.id),
                    file,
                };
                target.query(class)?
            }
            VOLUME => crate::volume::query(share, class)?,
            SECURITY => {
                let bytes = security(additional, share.read_only);
                if bytes.len() > index(limit) {
                    return Ok(too_small(bytes.len()));
                }
                (bytes.len(), bytes)
            }
            _ => return Err(Status::NOT_SUPPORTED),
        };
        match index(limit) {
            limit if limit < fixed => Err(Status::INFO_LENGTH_MISMATCH),
            limit if limit < bytes.len() => {
                Ok(Reply::buffer(Status::BUFFER_OVERFLOW, &bytes[..limit]))
            }
            _ => Ok(Reply::buffer(Status::SUCCESS, &bytes)),
        }
    }
}

/// Pipes answer only their size and state.
fn pipe_info(kind: u8, class: u8) -> Answer<Reply> {
    let mut out = Vec::new();
    let bytes = match (kind, class) {
        (FILE, class::STANDARD) => out.put64(4096).put64(0).put32(1).put(&[1, 0, 0, 0]),
        (FILE, class::BASIC) => out.put(&[0; 32]).put32(folder::NORMAL).put32(0),
        _ => return Err(Status::NOT_SUPPORTED),
    };
    Ok(Reply::buffer(Status::SUCCESS, bytes))
}

/// The size that a security descriptor needs, in the error's data.
fn too_small(needed: usize) -> Reply {
    let mut body = Vec::new();
    body.put16(9).put16(0).put32(4).put32(size32(needed));
    Reply::with(Status::BUFFER_TOO_SMALL, body)
}

impl Target<'_> {
    /// The information of a class, and the size of its part with a fixed size.
    fn query(&self, class: u8) -> Answer<(usize, Vec<u8>)> {
        let facts = &self.facts;
        let mut out = Vec::new();
        let fixed = match class {
            class::BASIC => self.basic(&mut out).len(),
            class::STANDARD => self.standard(&mut out).len(),
            class::INTERNAL => out.put64(facts.inode).len(),
            class::EA | class::ALIGNMENT => out.put32(0).len(),
            class::ACCESS => out.put32(self.file.access).len(),
            class::POSITION => out.put64(self.file.position).len(),
            class::MODE => out.put32(self.file.mode).len(),
            class::ALL => {
                self.all(&mut out);
                100
            }
            class::NORMALIZED_NAME => {
                let name = utf16(self.path.trim_start_matches('\\'));
                out.put32(size32(name.len())).put(&name);
                4
            }
            class::ALTERNATE_NAME => return Err(Status::OBJECT_NAME_NOT_FOUND),
            class::FULL_EA => return Err(Status::NO_EAS_ON_FILE),
            class::STREAM if facts.directory => 0,
            class::STREAM => {
                let name = utf16("::$DATA");
                out.put32(0).put32(size32(name.len())).put64(facts.size);
                out.put64(facts.allocated).put(&name);
                24
            }
            class::COMPRESSION => out.put64(facts.size).put64(0).len(),
            class::NETWORK_OPEN => {
                let times = self.times(&mut out);
                times.put64(facts.allocated).put64(facts.size);
                times.put32(facts.attributes).put32(0).len()
            }
            class::ATTRIBUTE_TAG => out.put32(facts.attributes).put32(0).len(),
            class::ID => out.put64(1).put64(facts.inode).put64(0).len(),
            _ => return Err(Status::INVALID_INFO_CLASS),
        };
        Ok((fixed, out))
    }

    fn times<'a>(&self, out: &'a mut Vec<u8>) -> &'a mut Vec<u8> {
        for time in self.facts.times {
            out.put64(time);
        }
        out
    }

    fn basic<'a>(&self, out: &'a mut Vec<u8>) -> &'a mut Vec<u8> {
        self.times(out).put32(self.facts.attributes).put32(0)
    }

    fn standard<'a>(&self, out: &'a mut Vec<u8>) -> &'a mut Vec<u8> {
        let links = self.facts.links.max(1) - u32::from(self.deleted);
        out.put64(self.facts.allocated).put64(self.facts.size).put32(links);
        out.put(&[u8::from(self.deleted), u8::from(self.facts.directory), 0, 0])
    }

    fn all(&self, out: &mut Vec<u8>) {
        self.basic(out);
        self.standard(out);
        out.put64(self.facts.inode).put32(0).put32(self.file.access);
        out.put64(self.file.position).put32(self.file.mode).put32(0);
        let path = if self.path.is_empty() { "\\" } else { &self.path };
        let name = utf16(path);
        out.put32(size32(name.len())).put(&name);
    }
}

/// A fixed security descriptor: the account of the share may do everything, or read.
fn security(wanted: u32, read_only: bool) -> Vec<u8> {
    const OWNER: u32 = 1;
    const GROUP: u32 = 2;
    const ACL: u32 = 4;
    /// Everyone: S-1-1-0.
    const EVERYONE: [u8; 12] = [1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0];
    let mut out = vec![1, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for (flag, at) in [(OWNER, 4), (GROUP, 8)] {
        if wanted & flag != 0 {
            let place = size32(out.len());
            out.set32(at, place);
            out.put(&EVERYONE);
        }
    }
    if wanted & ACL != 0 {
        let place = size32(out.len());
        out.set32(16, place);
        // SE_DACL_PRESENT.
        out[2] |= 4;
        let rights =
            if read_only { READ_ONLY_ACCESS } else { crate::connection::open::FULL_ACCESS };
        // One entry, inherited by files and directories.
        out.put16(2).put16(28).put16(1).put16(0);
        out.put(&[0, 3]).put16(20).put32(rights).put(&EVERYONE);
    }
    out
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_security_descriptor_has_what_was_asked() {
        assert_eq!(security(0, false).len(), 20);
        let all = security(7, true);
        assert_eq!(all.len(), 20 + 12 + 12 + 28);
        assert_eq!(all[16..20], [44, 0, 0, 0]);
        assert_eq!(all[56..60], READ_ONLY_ACCESS.to_le_bytes());
    }
}
