//! The thread of a queue group. It sleeps while there is no work.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Context;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::group::Group;
use super::queues::Waker;
use crate::poller::{Poller, Serve};

/// State shared by the thread and the controller.
struct GroupState {
    group: Mutex<Group>,
    waker: Arc<Waker>,
}

impl GroupState {
    fn lock(&self) -> MutexGuard<'_, Group> {
        self.group.lock().expect("no device panicked")
    }
}

struct Service(Arc<GroupState>);

impl Serve for Service {
    fn serve(&mut self) -> bool {
        self.0.lock().pass()
    }

    fn has_single_request(&self) -> bool {
        self.0.lock().has_single_request()
    }

    fn enable_doorbells(&mut self) -> bool {
        self.0.waker.prepare_sleep();
        !self.0.lock().is_idle()
    }

    fn disable_doorbells(&mut self) {
        self.0.waker.cancel_sleep();
    }

    fn events(&self) -> Vec<RawFd> {
        vec![self.0.waker.event.as_raw_fd(), self.0.lock().event()]
    }

    fn clear_events(&mut self) {
        // Empty if a finished disk request woke the thread.
        self.0.waker.event.read().ok();
    }
}

/// A group with its thread. Dropping it stops the thread and waits for requests in flight.
pub(super) struct Server {
    state: Option<Arc<GroupState>>,
    poller: Option<Poller<Service>>,
}

impl Server {
    pub(super) fn start(group: Group) -> anyhow::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK).context("an event for a queue")?;
        let waker = Arc::new(Waker::new(Arc::new(event)));
        group.connect(&waker);
        let name = format!("nvme-{}", group.completion.id);
        let state = Arc::new(GroupState { group: Mutex::new(group), waker });
        // From here on, drop disconnects the doorbells, even if no thread can be spawned.
        let mut server = Self { state: Some(state.clone()), poller: None };
        server.poller = Some(Poller::spawn(&name, Service(state))?);
        Ok(server)
    }

    fn state(&self) -> &Arc<GroupState> {
        self.state.as_ref().expect("it is only removed when the server ends")
    }

    /// Locks the group between two passes of the thread.
    pub(super) fn lock(&self) -> MutexGuard<'_, Group> {
        self.state().lock()
    }

    pub(super) fn waker(&self) -> &Arc<Waker> {
        &self.state().waker
    }

    pub(super) fn stop(mut self) -> Group {
        let state = self.end().expect("a server is stopped once");
        let state = Arc::into_inner(state).expect("the thread has ended");
        state.group.into_inner().expect("no device panicked")
    }

    fn end(&mut self) -> Option<Arc<GroupState>> {
        let state = self.state.take()?;
        drop(self.poller.take());
        state.lock().disconnect();
        Some(state)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
