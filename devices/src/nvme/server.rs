//! The thread of a group of queues. It sleeps while there is nothing to do.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};

use anyhow::Context;
use vmm_sys_util::epoll::{Epoll, EpollEvent};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::group::{Group, watch};
use super::queues::Waker;

/// What the thread and the controller share.
struct Seat {
    group: Mutex<Group>,
    waker: Arc<Waker>,
    stopped: AtomicBool,
    epoll: Epoll,
}

impl Seat {
    fn lock(&self) -> MutexGuard<'_, Group> {
        self.group.lock().expect("no device panicked")
    }

    /// The thread, until it is stopped.
    fn serve(&self) {
        let mut events = [EpollEvent::default(); 2];
        while !self.stopped.load(Ordering::SeqCst) {
            if self.lock().pass() {
                continue;
            }
            self.waker.doze();
            if self.lock().is_idle() {
                // A signal is no reason to do anything else than look.
                self.epoll.wait(-1, &mut events).ok();
                // Empty when it was the disk that woke us.
                self.waker.event.read().ok();
            }
            self.waker.rise();
        }
    }
}

/// A group with its thread. Dropping it stops the thread and waits for what is under way.
pub(super) struct Server {
    seat: Option<Arc<Seat>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts the thread.
    pub(super) fn start(group: Group) -> anyhow::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK).context("an event for a queue")?;
        let waker = Arc::new(Waker::new(Arc::new(event)));
        let epoll = Epoll::new().context("an epoll for a queue")?;
        watch(&epoll, waker.event.as_raw_fd()).context("an event for a queue")?;
        group.watch(&epoll)?;
        group.connect(&waker);
        let name = format!("nvme-{}", group.completion.id);
        let (group, stopped) = (Mutex::new(group), AtomicBool::new(false));
        let seat = Arc::new(Seat { group, waker, stopped, epoll });
        let its = seat.clone();
        let thread = Builder::new().name(name).spawn(move || its.serve());
        match thread.context("a thread for a queue") {
            Ok(thread) => Ok(Self { seat: Some(seat), thread: Some(thread) }),
            Err(error) => {
                seat.lock().disconnect();
                Err(error)
            }
        }
    }

    fn seat(&self) -> &Arc<Seat> {
        self.seat.as_ref().expect("it is taken out when the server ends")
    }

    /// The group, between two of the thread's passes.
    pub(super) fn lock(&self) -> MutexGuard<'_, Group> {
        self.seat().lock()
    }

    pub(super) fn waker(&self) -> &Arc<Waker> {
        &self.seat().waker
    }

    /// Ends the thread and gives the group back, its doorbells disconnected.
    pub(super) fn stop(mut self) -> Group {
        let seat = self.end().expect("a server is stopped once");
        let seat = Arc::into_inner(seat).expect("the thread has ended");
        seat.group.into_inner().expect("no device panicked")
    }

    fn end(&mut self) -> Option<Arc<Seat>> {
        let seat = self.seat.take()?;
        seat.stopped.store(true, Ordering::SeqCst);
        seat.waker.rouse();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("a panic ends the process");
        }
        seat.lock().disconnect();
        Some(seat)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
