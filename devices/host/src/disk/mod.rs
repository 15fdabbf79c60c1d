//! Disks: what a controller asks of an image, whatever the image is.
//!
//! A controller opens an [`Image`] and takes one [`Channel`] for each of its queues. All kinds of
//! image have this one path for requests; what every disk has (patience with a full volume, rate
//! limits) stands before it as a channel of its own.

mod config;
mod device;
mod drive;
#[cfg(test)]
mod driver;
mod format;
mod limit;
mod medium;
mod overlay;
mod patience;
pub mod qcow2;
mod raw;
#[cfg(test)]
mod rehearsal;
mod rings;
mod threads;
mod timer;
mod tray;
mod uring;

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::memory::{Memory, Piece};

pub use config::Expected;
pub use config::{Config, Direct, FileId, Sector, open};
pub use drive::{Disks, Drive, Watch};
pub use format::Format;
pub use overlay::memory;
pub use patience::{Full, OnFull};
pub use tray::{Opener, Tray};

/// What a controller tells its guest of an image. All numbers are bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The length, which grows when the image does. A multiple of `logical_block`.
    pub size: u64,
    /// The smallest read or write: 512 or 4096.
    pub logical_block: u32,
    /// Writes of this size and alignment need no reading before: a power of two.
    pub physical_block: u32,
    /// Discards of this size and alignment free room; 0 where nothing is ever freed.
    pub discard: u32,
    /// Writes and discards are refused.
    pub read_only: bool,
}

/// One disk, open and locked.
pub trait Image: Send + Sync {
    /// What it is now.
    fn geometry(&self) -> Geometry;
    /// Another way to it, for another queue, whose requests name pieces of `memory`. Requests are
    /// not ordered, on one channel or on several: who wants an order waits for the answer.
    ///
    /// # Errors
    ///
    /// When the host has no file descriptor, memory or thread left.
    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>>;
    /// Makes it longer; without a size, as long as its file or device is now. Controllers are told
    /// by who calls this: see [`Drive::grow`].
    ///
    /// # Errors
    ///
    /// When it cannot be, or would become shorter.
    fn grow(&self, size: Option<u64>) -> anyhow::Result<()>;
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Into the guest's memory.
    Read,
    /// From the guest's memory. Durable: completed means that it survives a loss of power.
    Write {
        /// As a write and a flush of it (FUA).
        durable: bool,
    },
    /// Everything that completed before this was pushed survives a loss of power.
    Flush,
    /// The content is of no interest any more; it reads as zeros or as before.
    Discard,
    /// Reads as zeros afterwards.
    WriteZeroes {
        /// Room may be given back to the host.
        unmap: bool,
    },
}

/// One request. The controller has checked that it lies within the image and is whole blocks; the
/// channel checks again, because a guest must never reach anything else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Comes back with the answer. Unique among what is under way on this channel.
    pub tag: u64,
    /// What to do.
    pub operation: Operation,
    /// The first byte on the disk.
    pub offset: u64,
    /// How many bytes: of `pieces` together, for a read or a write.
    pub length: u64,
    /// The guest's memory, for a read or a write.
    pub pieces: Vec<Piece>,
}

impl Operation {
    /// Whether it changes the disk.
    #[must_use]
    pub fn changes(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard | Self::WriteZeroes { .. })
    }
}

impl Request {
    /// Whether it may be done on such a disk.
    ///
    /// # Errors
    ///
    /// [`Fault::Refused`].
    pub fn check(&self, geometry: &Geometry) -> Result<(), Fault> {
        if self.operation == Operation::Flush {
            return Ok(());
        }
        let block = u64::from(geometry.logical_block);
        let whole = self.offset.is_multiple_of(block) && self.length.is_multiple_of(block);
        let end = self.offset.checked_add(self.length);
        let within = end.is_some_and(|end| end <= geometry.size);
        let allowed = !(geometry.read_only && self.operation.changes());
        let carried = match self.operation {
            Operation::Read | Operation::Write { .. } => {
                self.pieces.iter().map(|piece| u64::from(piece.length)).sum()
            }
            _ => self.length,
        };
        if whole && within && allowed && carried == self.length {
            Ok(())
        } else {
            Err(Fault::Refused)
        }
    }
}

/// Why a request was not done. The reason for people is in the log, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Not within the image, not whole blocks, not the guest's memory, a write to what is
    /// read-only: the guest's doing.
    Refused,
    /// The host's device or file system.
    Broken,
    /// Not something that this image can do.
    Unsupported,
    /// The volume has no room. Patience keeps such requests until there is some, so that a
    /// controller does not see this of what [`open`] gives.
    Full,
}

/// The end of a request.
#[derive(Debug, PartialEq, Eq)]
pub struct Done {
    /// Whose.
    pub tag: u64,
    /// How it went.
    pub result: Result<(), Fault>,
    /// The request's pieces, to be used again.
    pub pieces: Vec<Piece>,
}

/// A way to an image. What is dropped with requests under way waits for them first: nothing
/// touches the guest's memory afterwards, and nothing is written that the guest did not ask for
/// before.
pub trait Channel: Send {
    /// Takes a request, which may wait for `submit`.
    fn push(&mut self, request: Request);
    /// Sends everything that was pushed.
    fn submit(&mut self);
    /// Appends what is done by now, without waiting.
    fn reap(&mut self, done: &mut Vec<Done>);
    /// Readable while there may be something to reap; may be readable without need.
    fn event(&self) -> BorrowedFd<'_>;
    /// Takes back what waits and is not under way: for room on the volume, or for its turn under a
    /// limit. These are not answered. A controller that parks keeps them, reaps the rest, and
    /// pushes them again when it runs on; after a reset nobody misses them.
    fn withdraw(&mut self) -> Vec<Request> {
        Vec::new()
    }
}

/// Sleeps until something may be reaped, or for a moment: what comes to wait for room meanwhile
/// makes nothing readable.
pub fn wait(channel: &dyn Channel) {
    let event = channel.event();
    let mut polled = [PollFd::new(&event, PollFlags::IN)];
    // A signal is no reason to do anything else than look.
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 })).ok();
}
