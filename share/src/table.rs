//! Open files of all connections: share modes, deletion, byte-range locks.
//!
//! Files are known by the host's spelling of their path, so that a rename moves all that is known
//! of them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::status::{Answer, Status};

/// The maximum number of open files of all clients. Each holds one descriptor.
pub const MAX_OPENS: usize = 512;
/// The maximum number of locks of a file.
const MAX_LOCKS: usize = 1024;

/// Rights ([MS-SMB2] 2.2.13.1) which share modes are about.
const READS: u32 = 0x1 | 0x20;
const WRITES: u32 = 0x2 | 0x4;
const DELETES: u32 = 0x1_0000;

/// A file: which share, and the host's names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path {
    pub share: usize,
    pub names: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
pub struct Mode {
    pub access: u32,
    pub sharing: u32,
}

impl Mode {
    /// Whether this one forbids what another does.
    fn forbids(self, other: Self) -> bool {
        [(READS, 1), (WRITES, 2), (DELETES, 4)]
            .iter()
            .any(|(access, share)| other.access & access != 0 && self.sharing & share == 0)
    }

    fn counts(self) -> bool {
        self.access & (READS | WRITES | DELETES) != 0
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub start: u64,
    pub length: u64,
    pub exclusive: bool,
}

impl Range {
    fn overlaps(&self, other: &Self) -> bool {
        // An empty range conflicts only within another one.
        let (a, b) = (u128::from(self.start), u128::from(other.start));
        let (a_end, b_end) = (a + u128::from(self.length), b + u128::from(other.length));
        a < b_end && b < a_end
    }
}

#[derive(Default)]
struct Node {
    opens: Vec<(u64, Mode)>,
    locks: Vec<(u64, Range)>,
    deleted: bool,
}

#[derive(Default)]
pub struct Table(Mutex<Files>);

#[derive(Default)]
struct Files {
    nodes: BTreeMap<Path, Node>,
    paths: HashMap<u64, Path>,
}

impl Files {
    fn node(&mut self, id: u64) -> Answer<&mut Node> {
        let path = self.paths.get(&id).ok_or(Status::FILE_CLOSED)?;
        self.nodes.get_mut(path).ok_or(Status::FILE_CLOSED)
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Files> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an open file. One that is emptied by this counts as being written for now.
    pub fn open(&self, path: &Path, id: u64, mode: Mode, empties: bool) -> Answer<()> {
        let mut files = self.lock();
        if files.paths.len() >= MAX_OPENS {
            return Err(Status::TOO_MANY_OPENED_FILES);
        }
        if let Some(node) = files.nodes.get(path) {
            if node.deleted {
                return Err(Status::DELETE_PENDING);
            }
            let now = if empties { Mode { access: mode.access | 0x2, ..mode } } else { mode };
            let conflict = |other: Mode| other.forbids(now) || now.forbids(other);
            let mut others = node.opens.iter().filter(|(_, other)| other.counts());
            if now.counts() && others.any(|(_, other)| conflict(*other)) {
                return Err(Status::SHARING_VIOLATION);
            }
        }
        files.nodes.entry(path.clone()).or_default().opens.push((id, mode));
        files.paths.insert(id, path.clone());
        Ok(())
    }

    /// Forgets an open file and its locks. Returns the path if the file is to be removed.
    pub fn close(&self, id: u64) -> Option<Path> {
        let mut files = self.lock();
        let path = files.paths.remove(&id)?;
        let node = files.nodes.get_mut(&path)?;
        node.opens.retain(|(other, _)| *other != id);
        node.locks.retain(|(other, _)| *other != id);
        if !node.opens.is_empty() {
            return None;
        }
        let node = files.nodes.remove(&path)?;
        node.deleted.then_some(path)
    }

    /// The path of an open file now.
    pub fn path(&self, id: u64) -> Answer<Path> {
        self.lock().paths.get(&id).cloned().ok_or(Status::FILE_CLOSED)
    }

    pub fn set_deleted(&self, id: u64, deleted: bool) {
        if let Ok(node) = self.lock().node(id) {
            node.deleted = deleted;
        }
    }

    pub fn is_deleted(&self, id: u64) -> bool {
        self.lock().node(id).is_ok_and(|it| it.deleted)
    }

    pub fn is_open(&self, path: &Path) -> bool {
        self.lock().nodes.contains_key(path)
    }

    /// Whether an open of the same file does not share its deletion, which a rename is.
    pub fn forbids_rename(&self, id: u64) -> bool {
        let forbids =
            |(other, mode): &(u64, Mode)| *other != id && mode.counts() && mode.sharing & 4 == 0;
        self.lock().node(id).is_ok_and(|it| it.opens.iter().any(forbids))
    }

    /// Whether an open of a directory forbids changes of the names in it. For these, Windows opens
    /// it without sharing its deletion.
    pub fn forbids_changes(&self, directory: &Path) -> bool {
        let change = Mode { access: 0x2, sharing: 3 };
        let conflict = |(_, other): &(u64, Mode)| {
            other.counts() && (other.forbids(change) || change.forbids(*other))
        };
        self.lock().nodes.get(directory).is_some_and(|it| it.opens.iter().any(conflict))
    }

    /// Whether files in a directory are open.
    pub fn has_open_children(&self, path: &Path) -> bool {
        let inside = |it: &Path| it.share == path.share && it.names.starts_with(&path.names);
        self.lock().nodes.keys().any(|it| it != path && inside(it))
    }

    pub fn rename(&self, from: &Path, to: &Path) {
        let mut files = self.lock();
        if let Some(node) = files.nodes.remove(from) {
            for (id, _) in &node.opens {
                files.paths.insert(*id, to.clone());
            }
            files.nodes.insert(to.clone(), node);
        }
    }

    pub fn lock_range(&self, id: u64, range: Range) -> Answer<()> {
        let mut files = self.lock();
        let node = files.node(id)?;
        // A file may have shared locks over its own exclusive ones.
        let conflict = |(owner, other): &(u64, Range)| {
            (range.exclusive || other.exclusive && *owner != id) && range.overlaps(other)
        };
        if node.locks.iter().any(conflict) {
            return Err(Status::LOCK_NOT_GRANTED);
        }
        if node.locks.len() >= MAX_LOCKS {
            return Err(Status::INSUFFICIENT_RESOURCES);
        }
        node.locks.push((id, range));
        Ok(())
    }

    pub fn unlock_range(&self, id: u64, range: Range) -> Answer<()> {
        let mut files = self.lock();
        let node = files.node(id)?;
        let same = |(other, it): &(u64, Range)| {
            *other == id && (it.start, it.length) == (range.start, range.length)
        };
        let at = node.locks.iter().position(same).ok_or(Status::RANGE_NOT_LOCKED)?;
        node.locks.remove(at);
        Ok(())
    }

    /// Whether a lock of another open forbids an access.
    pub fn is_locked(&self, id: u64, access: Range) -> bool {
        let forbids = |(other, it): &(u64, Range)| match access.exclusive {
            // Writes: a shared lock forbids them even to its holder.
            true => !(*other == id && it.exclusive) && it.overlaps(&access),
            false => *other != id && it.exclusive && it.overlaps(&access),
        };
        self.lock().node(id).is_ok_and(|it| it.locks.iter().any(forbids))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn path(name: &str) -> Path {
        Path { share: 0, names: name.split('/').map(str::to_owned).collect() }
    }

    fn mode(access: u32, sharing: u32) -> Mode {
        Mode { access, sharing }
    }

    #[test]
    fn share_modes_count_both_ways() {
        let table = Table::default();
        let file = path("a");
        table.open(&file, 1, mode(1, 1), false).unwrap();
        assert_eq!(table.open(&file, 2, mode(2, 7), false), Err(Status::SHARING_VIOLATION));
        assert_eq!(table.open(&file, 2, mode(1, 0), false), Err(Status::SHARING_VIOLATION));
        // Attributes alone are always allowed.
        table.open(&file, 2, mode(0x80, 0), false).unwrap();
        table.open(&file, 3, mode(1, 1), false).unwrap();
        assert!(table.close(1).is_none() && table.close(3).is_none());
        table.open(&file, 4, mode(2, 7), false).unwrap();
    }

    #[test]
    fn a_deleted_file_goes_with_its_last_open() {
        let table = Table::default();
        let file = path("a");
        table.open(&file, 1, mode(1, 7), false).unwrap();
        table.open(&file, 2, mode(1, 7), false).unwrap();
        table.set_deleted(1, true);
        assert_eq!(table.open(&file, 3, mode(1, 7), false), Err(Status::DELETE_PENDING));
        table.rename(&file, &path("b"));
        assert!(table.close(1).is_none());
        assert_eq!(table.close(2), Some(path("b")));
        assert!(!table.is_open(&path("b")));
    }

    #[test]
    fn locks_conflict_where_they_overlap() {
        let table = Table::default();
        let file = path("a");
        table.open(&file, 1, mode(1, 7), false).unwrap();
        table.open(&file, 2, mode(1, 7), false).unwrap();
        let range = |start, length, exclusive| Range { start, length, exclusive };
        table.lock_range(1, range(10, 10, true)).unwrap();
        let taken = Err(Status::LOCK_NOT_GRANTED);
        assert_eq!(table.lock_range(2, range(19, u64::MAX, false)), taken);
        table.lock_range(2, range(20, u64::MAX, false)).unwrap();
        assert!(table.is_locked(2, range(0, 11, false)));
        assert!(!table.is_locked(1, range(0, 11, true)));
        assert!(table.is_locked(2, range(25, 1, true)), "its own shared lock");
        let none = Err(Status::RANGE_NOT_LOCKED);
        assert_eq!(table.unlock_range(2, range(10, 10, true)), none);
        table.unlock_range(1, range(10, 10, true)).unwrap();
        assert!(!table.is_locked(2, range(0, 11, false)));
    }

    #[test]
    fn open_children_are_those_in_the_directory() {
        let table = Table::default();
        table.open(&path("a/b/c"), 1, mode(1, 7), false).unwrap();
        table.open(&path("a.txt"), 2, mode(1, 7), false).unwrap();
        assert!(table.has_open_children(&path("a")) && table.has_open_children(&path("a/b")));
        assert!(!table.has_open_children(&path("a/b/c")) && !table.has_open_children(&path("a.")));
    }
}
