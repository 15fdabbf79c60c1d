//! A volume without room is no error of the disk: what does not fit is kept and tried again.
//!
//! The machine's owner is told, so that it pauses; it resumes when there is room. Reads go on
//! meanwhile. A machine that is switched off or reset drops the channel, and what is kept with it:
//! the guest never heard that it was done.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::timer::Timer;
use super::{Channel, Done, Fault, Geometry, Image, Operation, Request};
use crate::memory::Memory;

/// How often it is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// A volume has no room for a disk, or has again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Full {
    /// The disk.
    pub path: PathBuf,
    /// No room now. Said once, until it is not.
    pub full: bool,
}

/// Who is told. Called on the threads of devices: it must not wait for them.
pub type OnFull = Arc<dyn Fn(Full) + Send + Sync>;

/// An image whose channels wait for room.
pub(super) struct Patient {
    inner: Arc<dyn Image>,
    volume: Arc<Volume>,
}

/// What all channels of a disk share.
struct Volume {
    path: PathBuf,
    tell: Option<OnFull>,
    /// How many requests wait, over all channels.
    waiting: Mutex<usize>,
}

impl Volume {
    /// Counts requests that begin or end to wait, and tells when the first or the last one does.
    fn count(&self, more: usize, fewer: usize) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *waiting;
        *waiting = before + more - fewer;
        let full = *waiting > 0;
        if full == (before > 0) {
            return;
        }
        let path = self.path.clone();
        if full {
            tracing::warn!(disk = %path.display(), "the volume is full: writes wait for room");
        } else {
            tracing::info!(disk = %path.display(), "there is room again");
        }
        // Within the lock, so that the two are told in their order.
        if let Some(tell) = &self.tell {
            tell(Full { path, full });
        }
    }
}

impl Patient {
    pub(super) fn new(inner: Arc<dyn Image>, path: &Path, tell: Option<OnFull>) -> Self {
        let volume = Volume { path: path.to_owned(), tell, waiting: Mutex::new(0) };
        Self { inner, volume: Arc::new(volume) }
    }
}

impl Image for Patient {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        let inner = self.inner.channel(memory)?;
        let timer = Timer::around(inner.event())?;
        Ok(Box::new(Waiting {
            inner,
            timer,
            volume: self.volume.clone(),
            under_way: HashMap::new(),
            kept: Vec::new(),
            due: None,
        }))
    }

    fn grow(&self, size: u64) -> anyhow::Result<()> {
        self.inner.grow(size)
    }
}

/// What a request was, but for its pieces, which come back with the answer.
struct Asked {
    operation: Operation,
    offset: u64,
    length: u64,
    /// It was kept before, and is tried again.
    again: bool,
}

struct Waiting {
    inner: Box<dyn Channel>,
    timer: Timer,
    volume: Arc<Volume>,
    /// All but reads, by their tags.
    under_way: HashMap<u64, Asked>,
    /// For these there was no room.
    kept: Vec<Request>,
    /// When they are tried again.
    due: Option<Instant>,
}

impl Waiting {
    fn send(&mut self, request: Request, again: bool) {
        if request.operation != Operation::Read {
            let Request { operation, offset, length, .. } = request;
            let asked = Asked { operation, offset, length, again };
            self.under_way.insert(request.tag, asked);
        }
        self.inner.push(request);
    }

    /// Keeps what found no room; the rest is done.
    fn sort(&mut self, answer: Done) -> Option<Done> {
        // Reads are not noted, and never full.
        let Some(asked) = self.under_way.remove(&answer.tag) else { return Some(answer) };
        if answer.result != Err(Fault::Full) {
            self.volume.count(0, usize::from(asked.again));
            return Some(answer);
        }
        self.volume.count(usize::from(!asked.again), 0);
        let Asked { operation, offset, length, .. } = asked;
        let Done { tag, pieces, .. } = answer;
        self.kept.push(Request { tag, operation, offset, length, pieces });
        if self.due.is_none() {
            self.due = Some(Instant::now() + AGAIN);
            self.timer.set(Some(AGAIN));
        }
        None
    }
}

impl Channel for Waiting {
    fn push(&mut self, request: Request) {
        self.send(request, false);
    }

    fn submit(&mut self) {
        self.inner.submit();
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let start = done.len();
        self.inner.reap(done);
        if done[start..].iter().any(|it| self.under_way.contains_key(&it.tag)) {
            let answers: Vec<Done> = done.drain(start..).collect();
            done.extend(answers.into_iter().filter_map(|it| self.sort(it)));
        }
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.due = None;
            self.timer.set(None);
            for request in std::mem::take(&mut self.kept) {
                self.send(request, true);
            }
            self.inner.submit();
        }
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.timer.event()
    }

    fn withdraw(&mut self) -> Vec<Request> {
        let mut withdrawn = self.inner.withdraw();
        for request in &withdrawn {
            let asked = self.under_way.remove(&request.tag);
            self.volume.count(0, usize::from(asked.is_some_and(|it| it.again)));
        }
        // Still full as far as anybody knows, but nothing waits here any more. Who pushes them
        // again finds out, and tells again.
        self.volume.count(0, self.kept.len());
        withdrawn.append(&mut self.kept);
        self.due = None;
        self.timer.set(None);
        withdrawn
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let again = self.under_way.values().filter(|it| it.again).count();
        self.volume.count(0, self.kept.len() + again);
    }
}
