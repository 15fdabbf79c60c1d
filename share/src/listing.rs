//! Listings of a directory ([MS-FSCC] 2.4), which is read as the client asks for more.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::fs::Dir;

use crate::folder::{self, Facts};
use crate::names;
use crate::status::{Answer, Status};
use crate::wire::{Put, size32, utf16};

/// Classes of entries ([MS-FSCC] 2.4).
mod class {
    pub(super) const DIRECTORY: u8 = 1;
    pub(super) const FULL: u8 = 2;
    pub(super) const BOTH: u8 = 3;
    pub(super) const NAMES: u8 = 12;
    pub(super) const ID_BOTH: u8 = 37;
    pub(super) const ID_FULL: u8 = 38;
}

/// The time in which the next entry must be found.
const SEARCH: Duration = Duration::from_secs(2);

/// A listing in progress.
pub struct Listing {
    entries: Dir,
    pattern: String,
    /// An entry that did not fit.
    pending: Option<(String, Facts)>,
    /// Any entry was returned.
    begun: bool,
}

impl Listing {
    pub fn new(directory: BorrowedFd<'_>, pattern: String) -> Answer<Self> {
        Ok(Self { entries: Dir::read_from(directory)?, pattern, pending: None, begun: false })
    }

    /// The next entry that matches: the client's name, and its facts.
    fn next(&mut self, directory: BorrowedFd<'_>) -> Answer<Option<(String, Facts)>> {
        if let Some(pending) = self.pending.take() {
            return Ok(Some(pending));
        }
        let until = Instant::now() + SEARCH;
        for entry in self.entries.by_ref() {
            // The next request goes on here.
            if Instant::now() > until {
                return Err(Status::IO_TIMEOUT);
            }
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let mapped = names::to_client(name);
            if !names::matches(&self.pattern, &mapped) {
                continue;
            }
            if matches!(name, "." | "..") {
                return Ok(Some((name.to_owned(), folder::facts(directory, "")?)));
            }
            if let Some(facts) = folder::facts_in(directory, name)? {
                return Ok(Some((mapped.into_owned(), facts)));
            }
        }
        Ok(None)
    }
}

/// Entries up to `limit` bytes, or a single one.
pub fn fill(
    listing: &mut Listing,
    directory: BorrowedFd<'_>,
    class: u8,
    (limit, single): (usize, bool),
) -> Answer<Vec<u8>> {
    let mut out = Vec::new();
    let mut last = None;
    while let Some((name, facts)) = listing.next(directory)? {
        let start = out.len().next_multiple_of(8);
        let entry = entry(class, &name, &facts);
        if start + entry.len() > limit {
            listing.pending = Some((name, facts));
            break;
        }
        if let Some(last) = last {
            out.set32(last, size32(start - last));
        }
        out.pad(8).put(&entry);
        last = Some(start);
        listing.begun = true;
        if single {
            break;
        }
    }
    match last {
        Some(_) => Ok(out),
        None if listing.pending.is_some() => Err(Status::INFO_LENGTH_MISMATCH),
        None if listing.begun => Err(Status::NO_MORE_FILES),
        None => {
            listing.begun = true;
            Err(Status::NO_SUCH_FILE)
        }
    }
}

/// Bytes before the name.
pub fn fixed_size(class: u8) -> Option<usize> {
    Some(match class {
        class::DIRECTORY => 64,
        class::FULL => 68,
        class::BOTH => 94,
        class::NAMES => 12,
        class::ID_BOTH => 104,
        class::ID_FULL => 80,
        _ => return None,
    })
}

fn entry(class: u8, name: &str, facts: &Facts) -> Vec<u8> {
    let name = utf16(name);
    let mut out = Vec::with_capacity(104 + name.len());
    out.put32(0).put32(0);
    if class != class::NAMES {
        for time in facts.times {
            out.put64(time);
        }
        out.put64(facts.size).put64(facts.allocated).put32(facts.attributes);
    }
    out.put32(size32(name.len()));
    // No extended attributes, no short name.
    let zeros = match class {
        class::FULL => 4,
        class::BOTH => 30,
        class::ID_BOTH => 32,
        class::ID_FULL => 8,
        _ => 0,
    };
    out.put(&[0; 32][..zeros]);
    if matches!(class, class::ID_BOTH | class::ID_FULL) {
        out.put64(facts.inode);
    }
    out.put(&name);
    out
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn entries_have_the_sizes_of_ms_fscc() {
        for class in [1, 2, 3, 12, 37, 38] {
            let entry = entry(class, "ab", &Facts::default());
            assert_eq!(entry.len(), fixed_size(class).unwrap() + 4, "{class}");
        }
    }
}
