//! Handles a full volume: requests that found no room are kept and tried again, instead of being
//! reported to the guest as errors. Writes that may not begin yet, because a gate is closed, are
//! kept here, too: a layer of its own would be one epoll more than Linux nests.
//!
//! A callback is called when the volume is full, so that the machine pauses, and again when there
//! is room, so that it resumes. Reads continue meanwhile. A machine that is switched off or reset
//! drops the channel with the kept requests, whose completion the guest has never seen.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::timer::Timer;
use super::{
    Below, Channel, Completion, Fault, Geometry, Holds, Image, LockedFile, Operation, Request,
};
use crate::gate::Gate;
use crate::memory::Memory;

const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How soon a channel that holds writes looks at the gate again, at first and at last.
const GATE_INTERVALS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(50)];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeChange {
    /// The path of the disk image.
    pub path: PathBuf,
    pub full: bool,
}

/// Called when a volume becomes full and when it has room again. It runs on the threads of devices
/// and must not wait for them.
///
/// The callback should stop the machine's processors but not its devices: they try again, and
/// report when the last request has found room. Parking or resetting the devices meanwhile
/// withdraws the requests, which reports room. If they are pushed again, a full volume is reported
/// again.
pub type OnFull = Arc<dyn Fn(VolumeChange) + Send + Sync>;

/// An image whose channels keep requests until the volume has room.
pub(super) struct RetryWhenFull {
    inner: Arc<dyn Image>,
    volume: Arc<Volume>,
    gate: Option<Arc<Gate>>,
}

/// State shared by all channels of a disk.
struct Volume {
    path: PathBuf,
    on_full: Option<OnFull>,
    /// Number of waiting requests, over all channels.
    waiting: Mutex<usize>,
}

impl Volume {
    /// Adds `more` waiting requests and subtracts `fewer`. Calls `on_full` at changes from or to 0.
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
        // Called within the lock, so that reports keep their order.
        if let Some(on_full) = &self.on_full {
            on_full(VolumeChange { path, full });
        }
    }
}

impl RetryWhenFull {
    pub(super) fn new(inner: Arc<dyn Image>, path: &Path, holds: Option<Holds>) -> Self {
        let (on_full, gate) = holds.map(|it| (it.full, it.gate)).unzip();
        let volume = Volume { path: path.to_owned(), on_full, waiting: Mutex::new(0) };
        Self { inner, volume: Arc::new(volume), gate: gate.flatten() }
    }
}

impl Image for RetryWhenFull {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn keeps_writes(&self) -> bool {
        self.inner.keeps_writes()
    }

    fn complete(&self) -> std::io::Result<()> {
        self.inner.complete()
    }

    fn file(&self) -> Option<LockedFile> {
        self.inner.file()
    }

    fn below(&self) -> std::io::Result<Below> {
        self.inner.below()
    }

    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        let inner = self.inner.channel(memory)?;
        let timer = Timer::with_event(inner.event())?;
        Ok(Box::new(Waiting {
            inner,
            timer,
            volume: self.volume.clone(),
            in_flight: HashMap::new(),
            kept: Vec::new(),
            due: None,
            gate: self.gate.clone(),
            held: Vec::new(),
            interval: GATE_INTERVALS[0],
        }))
    }

    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        self.inner.grow(size)
    }
}

/// A request in flight, without its pieces, which come back with the answer.
struct InFlight {
    operation: Operation,
    offset: u64,
    length: u64,
    /// Whether this is a retry.
    again: bool,
}

struct Waiting {
    inner: Box<dyn Channel>,
    timer: Timer,
    volume: Arc<Volume>,
    /// Requests by their tags, without reads.
    in_flight: HashMap<u64, InFlight>,
    /// Requests that found no room.
    kept: Vec<Request>,
    /// The time of the next attempt with the kept requests.
    due: Option<Instant>,
    /// `None` once it is open, because it stays so.
    gate: Option<Arc<Gate>>,
    /// Writes that wait for the gate.
    held: Vec<Request>,
    /// When it looks at the gate again.
    interval: Duration,
}

impl Waiting {
    /// Sends the writes that wait for the gate, if it is open.
    fn look_at_gate(&mut self) {
        if self.gate.take_if(|gate| gate.is_open()).is_some() && !self.held.is_empty() {
            for request in std::mem::take(&mut self.held) {
                self.send(request, false);
            }
            self.inner.submit();
        }
        self.interval = GATE_INTERVALS[1].min(2 * self.interval);
        self.set_timer();
    }

    /// Sets the timer to the next moment at which there is something to do.
    fn set_timer(&self) {
        let retry = self.due.map(|due| due.saturating_duration_since(Instant::now()));
        let look = (!self.held.is_empty()).then_some(self.interval);
        self.timer.set(retry.into_iter().chain(look).min());
    }

    fn send(&mut self, request: Request, again: bool) {
        if request.operation != Operation::Read {
            let Request { operation, offset, length, .. } = request;
            let sent = InFlight { operation, offset, length, again };
            self.in_flight.insert(request.tag, sent);
        }
        self.inner.push(request);
    }

    /// Keeps a request that found no room; returns every other answer.
    fn sort(&mut self, answer: Completion) -> Option<Completion> {
        // Reads are not in the map, and never find the volume full.
        let Some(sent) = self.in_flight.remove(&answer.tag) else { return Some(answer) };
        if answer.result != Err(Fault::Full) {
            self.volume.count(0, usize::from(sent.again));
            return Some(answer);
        }
        self.volume.count(usize::from(!sent.again), 0);
        let InFlight { operation, offset, length, .. } = sent;
        let Completion { tag, pieces, .. } = answer;
        self.kept.push(Request { tag, operation, offset, length, pieces });
        if self.due.is_none() {
            self.due = Some(Instant::now() + RETRY_INTERVAL);
            self.set_timer();
        }
        None
    }
}

impl Channel for Waiting {
    fn push(&mut self, request: Request) {
        if self.gate.is_none() || !request.operation.is_write() {
            return self.send(request, false);
        }
        self.held.push(request);
        self.look_at_gate();
    }

    fn submit(&mut self) {
        self.inner.submit();
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        let start = done.len();
        self.inner.reap(done);
        if done[start..].iter().any(|it| self.in_flight.contains_key(&it.tag)) {
            let answers: Vec<Completion> = done.drain(start..).collect();
            done.extend(answers.into_iter().filter_map(|it| self.sort(it)));
        }
        if self.gate.is_some() {
            self.look_at_gate();
        }
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.due = None;
            self.set_timer();
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
            let sent = self.in_flight.remove(&request.tag);
            self.volume.count(0, usize::from(sent.is_some_and(|it| it.again)));
        }
        // The volume may still be full, but no request waits here any more. If they are pushed
        // again, a full volume is reported again.
        self.volume.count(0, self.kept.len());
        withdrawn.append(&mut self.kept);
        withdrawn.append(&mut self.held);
        self.due = None;
        self.timer.set(None);
        withdrawn
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let again = self.in_flight.values().filter(|it| it.again).count();
        self.volume.count(0, self.kept.len() + again);
    }
}

#[cfg(test)]
mod test;
