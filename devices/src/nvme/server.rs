//! The thread of a group of queues. It sleeps while there is nothing to do.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Context;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::group::Group;
use super::queues::Waker;
use crate::poller::{Poller, Serve};

/// What the thread and the controller share.
struct Seat {
    group: Mutex<Group>,
    waker: Arc<Waker>,
}

impl Seat {
    fn lock(&self) -> MutexGuard<'_, Group> {
        self.group.lock().expect("no device panicked")
    }
}

/// The thread's side.
struct Service(Arc<Seat>);

impl Serve for Service {
    fn serve(&mut self) -> bool {
        self.0.lock().pass()
    }

    fn awaits(&self) -> bool {
        self.0.lock().awaits()
    }

    fn listen(&mut self) -> bool {
        self.0.waker.doze();
        !self.0.lock().is_idle()
    }

    fn quiet(&mut self) {
        self.0.waker.rise();
    }

    fn events(&self) -> Vec<RawFd> {
        vec![self.0.waker.event.as_raw_fd(), self.0.lock().event()]
    }

    fn heard(&mut self) {
        // Empty when it was the disk that woke us.
        self.0.waker.event.read().ok();
    }
}

/// A group with its thread. Dropping it stops the thread and waits for what is under way.
pub(super) struct Server {
    seat: Option<Arc<Seat>>,
    poller: Option<Poller<Service>>,
}

impl Server {
    /// Starts the thread.
    pub(super) fn start(group: Group) -> anyhow::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK).context("an event for a queue")?;
        let waker = Arc::new(Waker::new(Arc::new(event)));
        group.connect(&waker);
        let name = format!("nvme-{}", group.completion.id);
        let seat = Arc::new(Seat { group: Mutex::new(group), waker });
        // From here on its drop disconnects the doorbells, also when there is no thread left.
        let mut server = Self { seat: Some(seat.clone()), poller: None };
        server.poller = Some(Poller::spawn(&name, Service(seat))?);
        Ok(server)
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
        drop(self.poller.take());
        seat.lock().disconnect();
        Some(seat)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
