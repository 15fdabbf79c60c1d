//! Channels over a medium. Requests are done in `submit`, or by a few threads.

use std::collections::VecDeque;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use anyhow::Context;
use rustix::event::{EventfdFlags, eventfd};

use super::medium::{Buffer, Medium, Report, perform};
use super::{Channel, Completion, Geometry, Image, Request};
use crate::memory::Memory;

pub(super) struct Threaded {
    medium: Arc<dyn Medium>,
    report: Arc<Report>,
    threads: usize,
    keeps_writes: bool,
}

impl Threaded {
    /// `submit` does the requests on the caller's thread. For media that never block.
    pub(super) fn inline(name: &str, medium: Arc<dyn Medium>) -> Self {
        Self::new(name, medium, 0)
    }

    /// Each channel has this number of threads.
    pub(super) fn new(name: &str, medium: Arc<dyn Medium>, threads: usize) -> Self {
        Self::with_report(medium, Arc::new(Report::new(name)), threads)
    }

    /// As `new`, but shares the error report with another channel to the medium.
    pub(super) fn with_report(
        medium: Arc<dyn Medium>,
        report: Arc<Report>,
        threads: usize,
    ) -> Self {
        Self { medium, report, threads, keeps_writes: true }
    }

    /// The medium keeps writes in memory.
    pub(super) fn in_memory(self) -> Self {
        Self { keeps_writes: false, ..self }
    }
}

impl Image for Threaded {
    fn geometry(&self) -> Geometry {
        self.medium.geometry()
    }

    fn keeps_writes(&self) -> bool {
        self.keeps_writes
    }

    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        let shared = Arc::new(Shared {
            medium: self.medium.clone(),
            report: self.report.clone(),
            memory: memory.clone(),
            queue: Mutex::default(),
            more: Condvar::new(),
            event: Event::new()?,
        });
        if self.threads == 0 {
            return Ok(Box::new(Inline { shared, pushed: Vec::new(), buffer: Buffer::default() }));
        }
        Ok(Box::new(Pool::new(shared, self.threads)?))
    }

    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        self.medium.grow(size)
    }
}

/// An eventfd that is either set or clear.
struct Event(OwnedFd);

impl Event {
    fn new() -> anyhow::Result<Self> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        Ok(Self(eventfd(0, flags).context("an event for a disk")?))
    }

    fn set(&self) {
        // Fails only if the counter is full, and then it is set already.
        rustix::io::write(&self.0, &1_u64.to_ne_bytes()).ok();
    }

    fn clear(&self) {
        rustix::io::read(&self.0, &mut [0; 8]).ok();
    }
}

/// State shared between a channel and its threads.
struct Shared {
    medium: Arc<dyn Medium>,
    report: Arc<Report>,
    memory: Memory,
    queue: Mutex<Queue>,
    /// Signaled for new requests and for the end.
    more: Condvar,
    event: Event,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Request>,
    done: Vec<Completion>,
    ended: bool,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn perform(&self, request: Request, buffer: &mut Buffer) {
        let medium = self.medium.as_ref();
        let result = perform(medium, &request, &self.memory, buffer, &self.report);
        let done = Completion { tag: request.tag, result, pieces: request.pieces };
        let mut queue = self.queue();
        queue.done.push(done);
        if queue.done.len() == 1 {
            // Set within the lock, so that `reap` cannot clear it before it is set.
            self.event.set();
        }
    }

    fn reap(&self, done: &mut Vec<Completion>) {
        let mut queue = self.queue();
        if !queue.done.is_empty() {
            self.event.clear();
            done.append(&mut queue.done);
        }
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.event.0.as_fd()
    }
}

fn serve(shared: &Shared) {
    let mut buffer = Buffer::default();
    loop {
        let mut queue = shared.queue();
        let request = loop {
            if let Some(request) = queue.waiting.pop_front() {
                break request;
            }
            if queue.ended {
                return;
            }
            queue = shared.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
        };
        drop(queue);
        shared.perform(request, &mut buffer);
    }
}

struct Inline {
    shared: Arc<Shared>,
    pushed: Vec<Request>,
    buffer: Buffer,
}

impl Channel for Inline {
    fn push(&mut self, request: Request) {
        self.pushed.push(request);
    }

    fn submit(&mut self) {
        for request in mem::take(&mut self.pushed) {
            self.shared.perform(request, &mut self.buffer);
        }
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        self.shared.reap(done);
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.shared.event()
    }
}

struct Pool {
    shared: Arc<Shared>,
    pushed: Vec<Request>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    fn new(shared: Arc<Shared>, threads: usize) -> anyhow::Result<Self> {
        let mut pool = Self { shared, pushed: Vec::new(), threads: Vec::new() };
        for _ in 0..threads {
            let shared = pool.shared.clone();
            let thread = Builder::new().name("disk".to_owned()).spawn(move || serve(&shared));
            pool.threads.push(thread.context("a thread for a disk")?);
        }
        Ok(pool)
    }
}

impl Channel for Pool {
    fn push(&mut self, request: Request) {
        self.pushed.push(request);
    }

    fn submit(&mut self) {
        if self.pushed.is_empty() {
            return;
        }
        self.shared.queue().waiting.extend(self.pushed.drain(..));
        self.shared.more.notify_all();
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        self.shared.reap(done);
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.shared.event()
    }

    fn withdraw(&mut self) -> Vec<Request> {
        let waiting = mem::take(&mut self.shared.queue().waiting);
        waiting.into_iter().chain(self.pushed.drain(..)).collect()
    }
}

impl Drop for Pool {
    /// Waits until everything that was submitted is done.
    fn drop(&mut self) {
        self.shared.queue().ended = true;
        self.shared.more.notify_all();
        for thread in self.threads.drain(..) {
            // A panic ends the process anyway.
            thread.join().ok();
        }
    }
}

#[cfg(test)]
mod test {
    use std::io;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::Operation;
    use super::super::driver::{Driver, piece};
    use super::super::overlay::Overlay;
    use super::*;

    /// A disk whose reads wait while the gate is locked.
    struct Held {
        disk: Overlay,
        gate: Mutex<()>,
        reads: AtomicBool,
    }

    impl Medium for Held {
        fn geometry(&self) -> Geometry {
            self.disk.geometry()
        }
        fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            self.reads.store(true, Ordering::SeqCst);
            drop(self.gate.lock());
            self.disk.read(buffer, offset)
        }
        fn write(&self, buffer: &[u8], offset: u64, durable: bool) -> io::Result<()> {
            self.disk.write(buffer, offset, durable)
        }
        fn flush(&self) -> io::Result<()> {
            self.disk.flush()
        }
        fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
            self.disk.discard(offset, length)
        }
        fn zero(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()> {
            self.disk.zero(offset, length, unmap)
        }
        fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
            self.disk.grow(size)
        }
    }

    #[test]
    fn requests_that_wait_for_a_thread_are_withdrawn() {
        let (disk, reads) = (Overlay::empty(1 << 20), AtomicBool::new(false));
        let held = Arc::new(Held { disk, gate: Mutex::default(), reads });
        let image: Arc<dyn Image> = Arc::new(Threaded::new("held", held.clone(), 1));
        let mut driver = Driver::new(&image);
        let read = |driver: &mut Driver| driver.push(Operation::Read, 0, 512, &[piece(0, 512)]);
        let gate = held.gate.lock().unwrap();
        let begun = read(&mut driver);
        driver.channel.submit();
        while !held.reads.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let submitted = [read(&mut driver), read(&mut driver)];
        driver.channel.submit();
        let pushed = read(&mut driver);
        let tags: Vec<_> = driver.channel.withdraw().iter().map(|it| it.tag).collect();
        assert_eq!(tags, [submitted[0], submitted[1], pushed]);
        drop(gate);
        let done = driver.wait(1);
        assert_eq!(done.iter().map(|it| it.tag).collect::<Vec<_>>(), [begun]);
        assert!(driver.channel.withdraw().is_empty());
    }
}
