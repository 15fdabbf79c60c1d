//! CREATE and CLOSE ([MS-SMB2] 2.2.13 to 2.2.16).

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::OFlags;

use crate::connection::change;
use crate::connection::open::{
    APPEND_DATA, DELETE, FULL_ACCESS, File, Kind, Open, READ_ONLY_ACCESS, WRITE_ATTRIBUTES,
    WRITE_DATA,
};
use crate::connection::session::Tree;
use crate::connection::{Connection, Context};
use crate::folder::{self, Facts, Place};
use crate::message::{HEADER, Reply, Request};
use crate::names;
use crate::pipe::Pipe;
use crate::status::{Answer, Status};
use crate::table::{Mode, Path};
use crate::wire::{Get, Put, index, size16, size32, text};

const MAXIMUM: u32 = 0x200_0000;
const GENERIC: [(u32, u32); 4] = [
    (0x1000_0000, FULL_ACCESS),
    (0x2000_0000, 0x12_00a0),
    (0x4000_0000, 0x12_0116),
    (0x8000_0000, 0x12_0089),
];
const SYSTEM_SECURITY: u32 = 0x100_0000;

/// The highest impersonation level: delegation.
const MAX_IMPERSONATION: u32 = 3;

/// The disposition that an existing file contradicts.
const CREATE: u32 = 2;
/// Options of CREATE.
const DIRECTORY_FILE: u32 = 1;
const NON_DIRECTORY_FILE: u32 = 0x40;
const DELETE_ON_CLOSE: u32 = 0x1000;
const OPEN_BY_ID: u32 = 0x2000;
/// All options, and all attributes ([MS-SMB2] 2.2.13; [MS-FSCC] 2.6).
const OPTIONS: u32 = 0x00ff_ffff;
const ATTRIBUTES: u32 = 0x007f_7fb7;
/// The options that FileModeInformation shows.
const MODE: u32 = 0x103e;

/// The maximum number of files of a connection.
const MAX_OPENS: usize = 400;
const MAX_PIPES: usize = 16;

/// A parsed CREATE.
struct Wanted {
    names: Vec<String>,
    access: u32,
    sharing: u32,
    disposition: u32,
    options: u32,
    attributes: u32,
    extras: Extras,
}

/// Contexts of CREATE that are answered. Leases and durable handles are not granted.
#[derive(Default)]
struct Extras {
    maximal_access: bool,
    file_id: bool,
}

/// CreateAction of the answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    Superseded = 0,
    Opened = 1,
    Created = 2,
    Overwritten = 3,
}

impl Wanted {
    fn parse(request: &Request<'_>) -> Answer<Self> {
        request.expect(57)?;
        if request.u32(4)? > MAX_IMPERSONATION {
            return Err(Status::BAD_IMPERSONATION_LEVEL);
        }
        let name = request.buffer(request.u16(44)?.into(), request.u16(46)?.into())?;
        let options = request.u32(40)?;
        let wanted = Self {
            names: names::parse(&text(name)?)?,
            access: request.u32(24)?,
            attributes: request.u32(28)?,
            sharing: request.u32(32)?,
            disposition: request.u32(36)?,
            options,
            extras: Extras::parse(request.buffer(request.u32(48)?, request.u32(52)?)?)?,
        };
        let directory = options & DIRECTORY_FILE != 0;
        let plain = options & NON_DIRECTORY_FILE != 0;
        let odd = options & !OPTIONS != 0
            || wanted.attributes & !ATTRIBUTES != 0
            || directory && (plain || matches!(wanted.disposition, 0 | 4 | 5))
            || wanted.disposition > 5
            || wanted.sharing > 7;
        match (odd, options & OPEN_BY_ID != 0) {
            (true, _) => Err(Status::INVALID_PARAMETER),
            (_, true) => Err(Status::NOT_SUPPORTED),
            _ => Ok(wanted),
        }
    }

    /// Translates generic rights and checks what a share allows.
    fn resolve_access(&mut self, allowed: u32) -> Answer<()> {
        let mut access = self.access;
        for (generic, specific) in GENERIC {
            if access & generic != 0 {
                access = access & !generic | specific;
            }
        }
        if access & MAXIMUM != 0 {
            access = access & !MAXIMUM | allowed;
        }
        let deletes = self.options & DELETE_ON_CLOSE != 0;
        if access == 0 || access & SYSTEM_SECURITY != 0 || access & !allowed != 0 {
            return Err(Status::ACCESS_DENIED);
        }
        if deletes && access & DELETE == 0 {
            return Err(Status::INVALID_PARAMETER);
        }
        self.access = access;
        Ok(())
    }

    /// The action for a file that exists, or does not.
    fn action(&self, place: &Place) -> Answer<Action> {
        let Some(stat) = &place.found else {
            return match self.disposition {
                1 | 4 => Err(Status::OBJECT_NAME_NOT_FOUND),
                _ if self.attributes & folder::READ_ONLY != 0
                    && self.options & DELETE_ON_CLOSE != 0 =>
                {
                    Err(Status::CANNOT_DELETE)
                }
                _ => Ok(Action::Created),
            };
        };
        let directory = folder::is_directory(stat);
        let action = match self.disposition {
            0 => Action::Superseded,
            1 | 3 => Action::Opened,
            4 | 5 => Action::Overwritten,
            _ => return Err(Status::OBJECT_NAME_COLLISION),
        };
        if directory && self.options & NON_DIRECTORY_FILE != 0 {
            return Err(Status::FILE_IS_A_DIRECTORY);
        }
        if directory && action != Action::Opened {
            return Err(Status::INVALID_PARAMETER);
        }
        if !directory && self.options & DIRECTORY_FILE != 0 {
            return Err(Status::NOT_A_DIRECTORY);
        }
        self.check_read_only(action, !directory && stat.st_mode & 0o200 == 0).map(|()| action)
    }

    /// A file with the attribute `read-only` is neither written nor deleted.
    fn check_read_only(&self, action: Action, read_only: bool) -> Answer<()> {
        let writes = self.access & (WRITE_DATA | APPEND_DATA) != 0 || action != Action::Opened;
        match () {
            () if !read_only => Ok(()),
            () if writes && self.access != FULL_ACCESS => Err(Status::ACCESS_DENIED),
            () if self.options & DELETE_ON_CLOSE != 0 => Err(Status::CANNOT_DELETE),
            () => Ok(()),
        }
    }

    fn open(&mut self, place: &Place, action: Action) -> Answer<OwnedFd> {
        if action == Action::Created {
            return folder::create(place, self.options & DIRECTORY_FILE != 0);
        }
        let truncates = action != Action::Opened;
        let writes = truncates || self.access & (WRITE_DATA | APPEND_DATA) != 0;
        let flags = if writes { OFlags::RDWR } else { OFlags::RDONLY };
        let file = match folder::open(place, flags) {
            // MAXIMUM_ALLOWED is what the host allows.
            Err(Status::ACCESS_DENIED) if self.access == FULL_ACCESS && !truncates => {
                self.access = READ_ONLY_ACCESS | DELETE | WRITE_ATTRIBUTES;
                folder::open(place, OFlags::RDONLY)?
            }
            other => other?,
        };
        if truncates {
            rustix::fs::ftruncate(&file, 0)?;
        }
        Ok(file)
    }
}

impl Extras {
    fn parse(mut contexts: &[u8]) -> Answer<Self> {
        let mut extras = Self::default();
        for _ in 0..16 {
            if contexts.is_empty() {
                break;
            }
            let next = index(contexts.u32_at(0)?);
            let name = contexts.span(contexts.u16_at(4)?.into(), contexts.u16_at(6)?.into())?;
            match name {
                b"MxAc" => extras.maximal_access = true,
                b"QFid" => extras.file_id = true,
                // Handles that are gone, and former versions.
                b"DHnC" | b"DH2C" | b"TWrp" => return Err(Status::OBJECT_NAME_NOT_FOUND),
                b"ExtA" => return Err(Status::EAS_NOT_SUPPORTED),
                _ => (),
            }
            contexts = if next == 0 { &[] } else { contexts.get(next..).unwrap_or_default() };
        }
        Ok(extras)
    }

    fn answer(&self, allowed: u32, inode: u64, serial: u32) -> Vec<u8> {
        let mut list: Vec<(&[u8], Vec<u8>)> = Vec::new();
        if self.maximal_access {
            let mut data = Vec::new();
            data.put32(0).put32(allowed);
            list.push((b"MxAc", data));
        }
        if self.file_id {
            let mut data = Vec::new();
            data.put64(inode).put64(serial.into()).put(&[0; 16]);
            list.push((b"QFid", data));
        }
        let mut out = Vec::new();
        for (at, (name, data)) in list.iter().enumerate() {
            let next = if at + 1 < list.len() { 24 + data.len() } else { 0 };
            out.put32(size32(next)).put16(16).put16(4).put16(0).put16(24);
            out.put32(size32(data.len())).put(name).put32(0).put(data);
        }
        out
    }
}

impl Connection {
    pub(crate) fn create(&mut self, context: &mut Context, request: &Request<'_>) -> Answer<Reply> {
        if self.opens.len() >= MAX_OPENS {
            return Err(Status::TOO_MANY_OPENED_FILES);
        }
        match self.tree(context)? {
            Tree::Pipes => {
                request.expect(57)?;
                let name = request.buffer(request.u16(44)?.into(), request.u16(46)?.into())?;
                let pipes = self.opens.values().filter(|it| matches!(it.kind, Kind::Pipe(_)));
                if pipes.count() >= MAX_PIPES {
                    return Err(Status::TOO_MANY_OPENED_FILES);
                }
                let pipe = Pipe::open(&text(name)?)?;
                let id = self.keep(context, Kind::Pipe(pipe), self.server.next());
                let facts = Facts { attributes: folder::NORMAL, ..Facts::default() };
                Ok(created(id, Action::Opened, &facts, &[]))
            }
            Tree::Files(share) => {
                let wanted = Wanted::parse(request)?;
                let must_be_new = wanted.disposition == CREATE;
                match self.create_file(context, wanted, share) {
                    // Another client has made it meanwhile.
                    Err(Status::OBJECT_NAME_COLLISION) if !must_be_new => {
                        self.create_file(context, Wanted::parse(request)?, share)
                    }
                    other => other,
                }
            }
        }
    }

    fn create_file(
        &mut self,
        context: &mut Context,
        mut wanted: Wanted,
        share: usize,
    ) -> Answer<Reply> {
        let read_only = self.share(share).read_only;
        let allowed = if read_only { READ_ONLY_ACCESS } else { FULL_ACCESS };
        wanted.resolve_access(allowed)?;
        let place = self.share(share).folder.find(&wanted.names)?;
        let action = wanted.action(&place)?;
        if read_only && action != Action::Opened {
            return Err(Status::ACCESS_DENIED);
        }
        let id = self.server.next();
        let path = Path { share, names: place.path.clone() };
        let mode = Mode { access: wanted.access, sharing: wanted.sharing };
        let empties = matches!(action, Action::Overwritten | Action::Superseded);
        self.server.table.open(&path, id, mode, empties)?;
        let opened = wanted.open(&place, action).and_then(|fd| {
            // A folder of this kind could not be filled.
            let file = wanted.options & DIRECTORY_FILE == 0;
            if file && action != Action::Opened && wanted.attributes & folder::READ_ONLY != 0 {
                folder::set_read_only(fd.as_fd(), true)?;
            }
            let facts = folder::facts(fd.as_fd(), place.name())?;
            Ok((fd, facts))
        });
        let (fd, facts) = opened.inspect_err(|_| {
            self.server.table.close(id);
        })?;
        let extras = wanted.extras.answer(allowed, facts.inode, self.share(share).folder.serial());
        let file = File {
            id,
            share,
            fd,
            directory: facts.directory,
            access: wanted.access,
            delete_on_close: wanted.options & DELETE_ON_CLOSE != 0,
            listing: None,
            position: 0,
            mode: wanted.options & MODE,
        };
        self.keep(context, Kind::File(Box::new(file)), id);
        Ok(created(id, action, &facts, &extras))
    }

    fn keep(&mut self, context: &mut Context, kind: Kind, id: u64) -> u64 {
        let (session, tree) = (context.session, context.tree);
        self.opens.insert(id, Open { session, tree, kind });
        context.file = Some(id);
        id
    }

    pub(crate) fn close(&mut self, context: &Context, request: &Request<'_>) -> Answer<Reply> {
        request.expect(24)?;
        let flags = request.u16(2)?;
        let open = self.open(context, request, 8)?;
        let mut facts = None;
        let id = context.file_id(request, 8)?;
        if let Some(file) = open.file()
            && flags & 1 != 0
        {
            facts = folder::facts(file.fd.as_fd(), "").ok();
        }
        self.close_id(id);
        let mut body = Vec::new();
        body.put16(60).put16(u16::from(facts.is_some())).put32(0);
        put_facts(&mut body, &facts.unwrap_or_default());
        body.truncate(60);
        Ok(Reply::new(body))
    }

    pub(crate) fn close_where(&mut self, which: impl Fn(&Open) -> bool) {
        let ids: Vec<_> =
            self.opens.iter().filter(|(_, open)| which(open)).map(|(id, _)| *id).collect();
        for id in ids {
            self.close_id(id);
        }
    }

    fn close_id(&mut self, id: u64) {
        self.notify.close(id);
        let Some(Open { kind: Kind::File(file), .. }) = self.opens.remove(&id) else { return };
        let table = &self.server.table;
        // Otherwise others could not open it until they have closed it.
        if file.delete_on_close && change::may_be_deleted(&self.server, &file).is_ok() {
            table.set_deleted(id, true);
        }
        if let Some(path) = table.close(id) {
            let folder = &self.share(file.share).folder;
            let place = folder.find(&path.names);
            // The client has no answer to this: the file stays.
            let _ = place.and_then(|place| folder::remove(&place, file.fd.as_fd()));
        }
    }
}

/// Times, sizes and attributes, as CREATE and CLOSE answer them.
fn put_facts(body: &mut Vec<u8>, facts: &Facts) {
    for time in facts.times {
        body.put64(time);
    }
    body.put64(facts.allocated).put64(facts.size).put32(facts.attributes).put32(0);
}

fn created(id: u64, action: Action, facts: &Facts, extras: &[u8]) -> Reply {
    let mut body = Vec::new();
    body.put16(89).put16(0).put32(action as u32);
    put_facts(&mut body, facts);
    body.put64(id).put64(id);
    let at = if extras.is_empty() { 0 } else { HEADER + 88 };
    body.put16(size16(at)).put16(0).put32(size32(extras.len())).put(extras);
    Reply::new(body)
}
