//! CHANGE_NOTIFY ([MS-SMB2] 2.2.35) by inotify, for the directory itself and not for those in it;
//! and the requests whose answers come later, these and locks.
//!
//! Threats: the client watches many directories, and never takes the changes. Both are limited; a
//! client that lost changes has to list the directory again.

use std::borrow::Cow;
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use crate::connection::negotiate::MAX_DATA;
use crate::connection::open::READ_DATA;
use crate::connection::{Connection, Context};
use crate::message::{ASYNC, HEADER, Reply, Request};
use crate::names;
use crate::status::{Answer, Status};
use crate::table::{Range, Table};
use crate::wire::{Put, index, size32, utf16};

/// The maximum number of watched directories, of requests that wait, and of changes that wait for
/// a request.
const MAX_WATCHES: usize = 64;
const MAX_PENDING: usize = 128;
const MAX_CHANGES: usize = 256;
/// The bytes of names that a directory's changes have: more are answered as lost.
const MAX_NAMES: usize = 16 << 10;
/// The maximum of events in a row, so that a busy directory does not keep the connection.
const MAX_EVENTS: usize = 4096;

/// Completion filters.
const FILE_NAME: u32 = 0x1;
const DIR_NAME: u32 = 0x2;
const ATTRIBUTES: u32 = 0x4;
const CONTENT: u32 = 0x8 | 0x10;

/// Actions ([MS-FSCC] 2.7.1).
const ADDED: u32 = 1;
const REMOVED: u32 = 2;
const MODIFIED: u32 = 3;
const OLD_NAME: u32 = 4;
const NEW_NAME: u32 = 5;

/// An answer that comes after its request.
pub struct Late {
    pub header: Vec<u8>,
    pub session: u64,
    pub encrypted: bool,
    pub id: u64,
    pub reply: Reply,
}

/// The event that a request waits for.
#[derive(Clone, Copy)]
pub enum Wants {
    /// Changes of a directory, in an answer of at most this size in bytes.
    Changes(usize),
    /// A range that is locked by others.
    Lock(Range),
}

struct Pending {
    file: u64,
    id: u64,
    /// The header of the request.
    header: Vec<u8>,
    message: u64,
    session: u64,
    encrypted: bool,
    wants: Wants,
}

struct Watch {
    descriptor: i32,
    filter: u32,
    changes: Vec<(u32, String)>,
    /// Changes were lost.
    lost: bool,
}

#[derive(Default)]
pub struct Notify {
    inotify: Option<OwnedFd>,
    /// By the id of the open directory.
    watches: HashMap<u64, Watch>,
    pending: Vec<Pending>,
    ready: Vec<Late>,
    last: u64,
}

impl Notify {
    /// The id of the request that was made to wait last.
    pub fn last(&self) -> u64 {
        self.last
    }

    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inotify.as_ref().map(AsFd::as_fd)
    }

    fn watch(&mut self, file: u64, directory: &OwnedFd, filter: u32) -> Answer<()> {
        if self.watches.contains_key(&file) {
            return Ok(());
        }
        if self.watches.len() >= MAX_WATCHES {
            return Err(Status::INSUFFICIENT_RESOURCES);
        }
        if self.inotify.is_none() {
            self.inotify = Some(inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?);
        }
        let inotify = self.inotify.as_ref().ok_or(Status::NOT_SUPPORTED)?;
        let flags = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR;
        let path = format!("/proc/self/fd/{}", directory.as_raw_fd());
        let added = inotify::add_watch(inotify, path, flags);
        let descriptor = added.map_err(|_| Status::NOT_SUPPORTED)?;
        let watch = Watch { descriptor, filter, changes: Vec::new(), lost: false };
        self.watches.insert(file, watch);
        Ok(())
    }

    /// The changes of a directory so far, if there are any.
    fn take(&mut self, file: u64, limit: usize) -> Option<Reply> {
        let watch = self.watches.get_mut(&file)?;
        if watch.changes.is_empty() && !watch.lost {
            return None;
        }
        let lost = std::mem::take(&mut watch.lost);
        let bytes = entries(&std::mem::take(&mut watch.changes));
        Some(if lost || bytes.len() > limit {
            Reply::buffer(Status::NOTIFY_ENUM_DIR, &[])
        } else {
            Reply::buffer(Status::SUCCESS, &bytes)
        })
    }

    /// Ends what concerns a closed directory.
    pub fn close(&mut self, file: u64) {
        if let (Some(watch), Some(inotify)) = (self.watches.remove(&file), &self.inotify)
            && !self.watches.values().any(|it| it.descriptor == watch.descriptor)
        {
            // The directory may be gone, and its watch with it.
            let _ = inotify::remove_watch(inotify, watch.descriptor);
        }
        self.end(Status::RANGE_NOT_LOCKED, |it| {
            it.file == file && matches!(it.wants, Wants::Lock(_))
        });
        self.end(Status::NOTIFY_CLEANUP, |it| it.file == file);
    }

    fn end(&mut self, status: Status, which: impl Fn(&Pending) -> bool) {
        while let Some(at) = self.pending.iter().position(&which) {
            let reply = Reply::error(status);
            let late = self.pending.remove(at).answer(reply);
            self.ready.push(late);
        }
    }

    fn read(&mut self) {
        let Some(inotify) = &self.inotify else { return };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(inotify, &mut buffer);
        let mut moved: Option<(u32, i32, String)> = None;
        for count in 0.. {
            // Those that are read already would be lost.
            if count >= MAX_EVENTS && reader.is_buffer_empty() {
                break;
            }
            let Ok(event) = reader.next() else { break };
            let (flags, directory) = (event.events(), event.wd());
            if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
                self.watches.values_mut().for_each(|it| it.lost = true);
            }
            let name = event.file_name().and_then(|it| it.to_str().ok()).map(names::to_client);
            let Some(name) = name.map(Cow::into_owned) else { continue };
            let kind = if flags.contains(ReadFlags::ISDIR) { DIR_NAME } else { FILE_NAME };
            let pair = moved.take();
            let joined = flags.contains(ReadFlags::MOVED_TO)
                && pair.as_ref().is_some_and(|it| (it.0, it.1) == (event.cookie(), directory));
            if let Some((_, from, old)) = pair {
                let action = if joined { OLD_NAME } else { REMOVED };
                note(&mut self.watches, from, (FILE_NAME | DIR_NAME, action), &old);
            }
            let change = match () {
                () if flags.contains(ReadFlags::MOVED_FROM) => {
                    moved = Some((event.cookie(), directory, name));
                    continue;
                }
                () if joined => (kind, NEW_NAME),
                () if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) => (kind, ADDED),
                () if flags.contains(ReadFlags::DELETE) => (kind, REMOVED),
                () if flags.contains(ReadFlags::ATTRIB) => (ATTRIBUTES | CONTENT, MODIFIED),
                () => (CONTENT, MODIFIED),
            };
            note(&mut self.watches, directory, change, &name);
        }
        if let Some((_, from, old)) = moved {
            note(&mut self.watches, from, (FILE_NAME | DIR_NAME, REMOVED), &old);
        }
    }

    /// Whether requests wait for locks of others, which have to be tried again.
    pub fn waits_for_locks(&self) -> bool {
        self.pending.iter().any(|it| matches!(it.wants, Wants::Lock(_)))
    }

    /// Reads what happened, and returns the answers to requests that waited for it.
    pub fn take_ready(&mut self, table: &Table) -> Vec<Late> {
        self.read();
        let mut at = 0;
        while at < self.pending.len() {
            let Pending { file, wants, .. } = self.pending[at];
            let reply = match wants {
                Wants::Changes(limit) => self.take(file, limit),
                Wants::Lock(range) => match table.lock_range(file, range) {
                    Err(Status::LOCK_NOT_GRANTED) => None,
                    Err(status) => Some(Reply::error(status)),
                    Ok(()) => Some(Reply::plain()),
                },
            };
            match reply {
                Some(reply) => {
                    let late = self.pending.remove(at).answer(reply);
                    self.ready.push(late);
                }
                None => at += 1,
            }
        }
        std::mem::take(&mut self.ready)
    }
}

/// Adds a change, an action that a filter asks for, to the watches of a directory.
fn note(
    watches: &mut HashMap<u64, Watch>,
    directory: i32,
    (filter, action): (u32, u32),
    name: &str,
) {
    for watch in watches.values_mut() {
        if watch.descriptor != directory || watch.filter & filter == 0 {
            continue;
        }
        let change = (action, name.to_owned());
        if watch.changes.last() == Some(&change) {
            continue;
        }
        let held: usize = watch.changes.iter().map(|it| it.1.len()).sum();
        if watch.changes.len() < MAX_CHANGES && held + name.len() <= MAX_NAMES {
            watch.changes.push(change);
        } else {
            watch.lost = true;
        }
    }
}

impl Pending {
    fn answer(self, reply: Reply) -> Late {
        let (session, encrypted, id) = (self.session, self.encrypted, self.id);
        Late { header: self.header, session, encrypted, id, reply }
    }
}

fn entries(changes: &[(u32, String)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut last = None;
    for (action, name) in changes {
        out.pad(4);
        let (start, name) = (out.len(), utf16(name));
        if let Some(last) = last {
            out.set32(last, size32(start - last));
        }
        out.put32(0).put32(*action).put32(size32(name.len())).put(&name);
        last = Some(start);
    }
    out
}

impl Connection {
    pub(crate) fn change_notify(
        &mut self,
        context: &Context,
        request: &Request<'_>,
    ) -> Answer<Reply> {
        request.expect(32)?;
        let (limit, filter) = (request.u32(4)?, request.u32(24)?);
        if limit > MAX_DATA || filter == 0 {
            return Err(Status::INVALID_PARAMETER);
        }
        let file = self.file(context, request, 8)?;
        file.require(READ_DATA)?;
        if !file.directory {
            return Err(Status::INVALID_PARAMETER);
        }
        let (file, directory) = (file.id, rustix::io::fcntl_dupfd_cloexec(&file.fd, 0)?);
        self.notify.watch(file, &directory, filter)?;
        self.notify.read();
        if let Some(reply) = self.notify.take(file, index(limit)) {
            return Ok(reply);
        }
        self.wait_later(context, request, (file, Wants::Changes(index(limit))))
    }

    /// Keeps a request whose answer comes later.
    pub(crate) fn wait_later(
        &mut self,
        context: &Context,
        request: &Request<'_>,
        (file, wants): (u64, Wants),
    ) -> Answer<Reply> {
        if !context.last {
            return Err(Status::INTERNAL_ERROR);
        }
        if self.notify.pending.len() >= MAX_PENDING {
            return Err(Status::INSUFFICIENT_RESOURCES);
        }
        let id = self.server.next();
        self.notify.last = id;
        self.notify.pending.push(Pending {
            file,
            id,
            header: request.bytes[..HEADER].to_vec(),
            message: request.id,
            session: context.session,
            encrypted: context.is_encrypted(),
            wants,
        });
        Ok(Reply::error(Status::PENDING))
    }

    pub(crate) fn cancel(&mut self, session: u64, request: &Request<'_>) {
        let by_id = request.flags & ASYNC != 0;
        self.notify.end(Status::CANCELLED, |it| {
            let same = if by_id { it.id == request.async_id } else { it.message == request.id };
            same && it.session == session
        });
    }

    pub(crate) fn waits_for_locks(&self) -> bool {
        self.notify.waits_for_locks()
    }

    /// The descriptor that is readable when a watched directory has changed.
    pub fn changes(&self) -> Option<BorrowedFd<'_>> {
        self.notify.descriptor()
    }
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::*;

    #[test]
    fn changes_of_a_directory_are_told() {
        let root = tempfile::tempdir().unwrap();
        let directory: OwnedFd = fs::File::open(root.path()).unwrap().into();
        let mut notify = Notify::default();
        notify.watch(7, &directory, FILE_NAME | DIR_NAME).unwrap();
        assert!(notify.take(7, 4096).is_none());
        fs::write(root.path().join("a"), "x").unwrap();
        fs::rename(root.path().join("a"), root.path().join("b")).unwrap();
        fs::remove_file(root.path().join("b")).unwrap();
        fs::create_dir(root.path().join("c")).unwrap();
        notify.read();
        let changes = &notify.watches[&7].changes;
        let told: Vec<_> = changes.iter().map(|(action, name)| (*action, &name[..])).collect();
        assert_eq!(told, [(1, "a"), (4, "a"), (5, "b"), (2, "b"), (1, "c")]);
        assert_eq!(notify.take(7, 4096).unwrap().status, Status::SUCCESS);
        assert!(notify.take(7, 4096).is_none());
    }

    #[test]
    fn too_many_changes_ask_for_a_new_listing() {
        let root = tempfile::tempdir().unwrap();
        let directory: OwnedFd = fs::File::open(root.path()).unwrap().into();
        let mut notify = Notify::default();
        notify.watch(7, &directory, FILE_NAME).unwrap();
        for count in 0..2 * MAX_CHANGES {
            fs::write(root.path().join(count.to_string()), "").unwrap();
            notify.read();
        }
        assert_eq!(notify.watches[&7].changes.len(), MAX_CHANGES);
        assert_eq!(notify.take(7, 1 << 20).unwrap().status, Status::NOTIFY_ENUM_DIR);
    }
}
