//! Open files, directories and pipes of a connection.

use std::os::fd::OwnedFd;

use crate::listing::Listing;
use crate::pipe::Pipe;
use crate::status::{Answer, Status};

/// Rights of a file ([MS-SMB2] 2.2.13.1.1).
pub const READ_DATA: u32 = 0x1;
pub const WRITE_DATA: u32 = 0x2;
pub const APPEND_DATA: u32 = 0x4;
pub const EXECUTE: u32 = 0x20;
pub const WRITE_ATTRIBUTES: u32 = 0x100;
pub const DELETE: u32 = 0x1_0000;
pub const FULL_ACCESS: u32 = 0x1f_01ff;
pub const READ_ONLY_ACCESS: u32 = 0x12_00a9;

pub struct Open {
    pub session: u64,
    pub tree: u32,
    pub kind: Kind,
}

pub enum Kind {
    File(Box<File>),
    Pipe(Pipe),
}

impl Open {
    pub fn file(&mut self) -> Option<&mut File> {
        match &mut self.kind {
            Kind::File(file) => Some(file),
            Kind::Pipe(_) => None,
        }
    }

    pub fn pipe(&mut self) -> Option<&mut Pipe> {
        match &mut self.kind {
            Kind::Pipe(pipe) => Some(pipe),
            Kind::File(_) => None,
        }
    }
}

/// An open file or directory. The table of the server knows its path.
pub struct File {
    pub id: u64,
    pub share: usize,
    pub fd: OwnedFd,
    pub directory: bool,
    pub access: u32,
    pub delete_on_close: bool,
    pub listing: Option<Listing>,
    pub position: u64,
    /// For FileModeInformation.
    pub mode: u32,
}

impl File {
    /// Refuses what needs one of these rights.
    pub fn require(&self, rights: u32) -> Answer<()> {
        if self.access & rights != 0 { Ok(()) } else { Err(Status::ACCESS_DENIED) }
    }
}
