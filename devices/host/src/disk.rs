//! Disks: the interface between a controller and an image, which is the same for all images.
//!
//! A controller opens an [`Image`] and takes one [`Channel`] for each of its queues. Features that
//! every disk has (waiting for free space on the volume, rate limits) are layers with a channel of
//! their own in front of the image's.

mod backing;
mod config;
mod device;
mod direct;
mod drive;
#[cfg(test)]
mod driver;
mod format;
mod full;
mod limit;
mod medium;
mod overlay;
mod patch;
pub mod qcow2;
mod raw;
#[cfg(test)]
mod rehearsal;
mod rings;
mod threads;
mod timer;
mod tray;
mod uring;

use std::fs::{File, Metadata};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::gate::Gate;
use crate::memory::{Memory, Piece};

pub use backing::BackingFile;
pub use config::Expected;
pub use config::{Config, Direct, FileId, Sector, open};
pub use drive::{Disks, Drive, Watch};
pub use format::Format;
pub use full::{OnFull, VolumeChange};
pub use overlay::memory;
pub use patch::{Changes, Patch};
pub use tray::{MediumOpener, Tray};

/// The properties of an image that a controller reports to its guest. All numbers are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The size of the disk. It grows when the image does. A multiple of `logical_block`.
    pub size: u64,
    /// The smallest read or write: 512 or 4096.
    pub logical_block: u32,
    /// Writes of this size and alignment need no read before them. A power of two.
    pub physical_block: u32,
    /// Discards of this size and alignment free space. 0 if discards never free any.
    pub discard: u32,
    pub read_only: bool,
}

/// An open file whose lock is held.
pub struct LockedFile {
    pub file: Arc<File>,
    /// The lock excludes all other machines that know this file. That of a device excludes only
    /// those that use the same device node.
    pub exclusive: bool,
}

/// The files that an image is based on.
#[derive(Debug, Default)]
pub struct Below {
    /// As they are now, the nearest first.
    pub files: Vec<Metadata>,
    /// Nothing was written above these files: the image is the disk that they are.
    pub untouched: bool,
}

/// The reasons for requests of a machine's disks to wait.
#[derive(Clone)]
pub struct Holds {
    pub full: OnFull,
    /// Writes wait while it is closed.
    pub gate: Option<Arc<Gate>>,
}

/// One disk, open and locked.
pub trait Image: Send + Sync {
    fn geometry(&self) -> Geometry;
    /// Whether writes outlive this process.
    fn keeps_writes(&self) -> bool {
        true
    }
    /// Completes the file: nothing that was written is in this process alone, and the file is as
    /// if it were closed. For a snapshot; no request may be in flight.
    fn complete(&self) -> std::io::Result<()> {
        Ok(())
    }
    /// The open file, with its lock. Nothing if the image is not one.
    fn file(&self) -> Option<LockedFile> {
        None
    }
    /// The files that this one is based on.
    fn below(&self) -> std::io::Result<Below> {
        Ok(Below::default())
    }
    /// Opens a channel, one for each queue, whose requests refer to pieces of `memory`. Requests
    /// are not ordered, neither on one channel nor across several. A caller that needs an order
    /// waits for the answer.
    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>>;
    /// Grows the image to `size`, or to the current length of its file or device if `size` is
    /// `None`. The caller notifies controllers (see [`Drive::grow`]).
    fn grow(&self, size: Option<u64>) -> anyhow::Result<()>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    Read,
    Write {
        /// Completion means that the write survives a loss of power (FUA).
        durable: bool,
    },
    /// Makes everything that completed before this was pushed survive a loss of power.
    Flush,
    /// The content is no longer needed. It then reads as zeros or as before.
    Discard,
    WriteZeroes {
        /// The space may be returned to the host.
        unmap: bool,
    },
}

/// One request. The controller has checked that it lies within the image and consists of whole
/// blocks. The channel checks again, because a guest must never reach anything else.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Identifies the answer. Unique among the requests in flight on a channel.
    pub tag: u64,
    pub operation: Operation,
    /// The first byte on the disk.
    pub offset: u64,
    /// The number of bytes. For a read or a write, the sum of `pieces`.
    pub length: u64,
    /// The guest's memory, for a read or a write.
    pub pieces: Vec<Piece>,
}

impl Operation {
    /// Whether the operation modifies the disk.
    pub fn is_write(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard | Self::WriteZeroes { .. })
    }
}

impl Request {
    /// Checks the range, the blocks, the sum of the pieces and the write protection.
    pub fn check(&self, geometry: &Geometry) -> Result<(), Fault> {
        if self.operation == Operation::Flush {
            return Ok(());
        }
        let block = u64::from(geometry.logical_block);
        let whole = self.offset.is_multiple_of(block) && self.length.is_multiple_of(block);
        let end = self.offset.checked_add(self.length);
        let within = end.is_some_and(|end| end <= geometry.size);
        let allowed = !(geometry.read_only && self.operation.is_write());
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

/// The reason why a request failed. The log has the details, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The guest's fault: outside the image, not whole blocks, not the guest's memory, or a write
    /// to a read-only disk.
    Refused,
    /// The host's device or file system failed.
    Broken,
    Unsupported,
    /// The volume has no free space. Images from [`open`] hold such requests until there is some,
    /// so controllers do not see this fault.
    Full,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Completion {
    pub tag: u64,
    pub result: Result<(), Fault>,
    /// The request's pieces, for reuse.
    pub pieces: Vec<Piece>,
}

/// A channel to an image. Dropping it waits for the requests in flight. After that nothing touches
/// the guest's memory any more, and only what the guest requested before is written.
pub trait Channel: Send {
    /// Takes a request, which may wait for `submit`.
    fn push(&mut self, request: Request);
    fn submit(&mut self);
    /// Appends the requests that are completed by now, without waiting.
    fn reap(&mut self, done: &mut Vec<Completion>);
    /// Readable while there may be completions. Spurious wakeups are possible.
    fn event(&self) -> BorrowedFd<'_>;
    /// Takes back requests that are not in flight: they wait for a thread, for free space on the
    /// volume or for a rate limit. They are not answered. A controller that parks keeps them, reaps
    /// the rest, and pushes them again when it runs on. After a reset they may be forgotten.
    fn withdraw(&mut self) -> Vec<Request> {
        Vec::new()
    }
}

/// Sleeps until there may be completions, at most 10 ms. The limit is needed because a request that
/// begins to wait for free space makes nothing readable.
pub fn wait(channel: &dyn Channel) {
    let event = channel.event();
    let mut polled = [PollFd::new(&event, PollFlags::IN)];
    // A signal merely ends the wait early.
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 })).ok();
}
