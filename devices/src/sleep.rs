//! How the thread of a network controller waits: until a doorbell rings, its port is ready, or an
//! order arrives.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Context;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::poller::POLL_TIME;
use host::net::Wait;

/// The port's number among the events. Doorbells follow it.
const PORT: u64 = 0;
const MAX_EVENTS: usize = 8;

/// Wakes and stops a pair's thread. Shared with other threads.
pub(crate) struct Orders {
    pub(crate) bell: Arc<EventFd>,
    pub(crate) stop: AtomicBool,
}

impl Orders {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let bell = EventFd::new(EFD_NONBLOCK).context("an event for a queue pair")?;
        Ok(Self { bell: Arc::new(bell), stop: AtomicBool::new(false) })
    }

    /// Makes the thread check what has changed.
    pub(crate) fn wake(&self) {
        // If the doorbell's counter is full, it has rung already.
        self.bell.write(1).ok();
    }

    /// Serves for a short time, until there was something or the thread is to end. Returns false if
    /// nothing came.
    pub(crate) fn poll(&self, mut serve: impl FnMut() -> bool) -> bool {
        let start = Instant::now();
        while start.elapsed() < POLL_TIME && !self.stop.load(Ordering::Acquire) {
            if serve() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Asks the thread to end, or allows it to start.
    pub(crate) fn set_stop(&self, stop: bool) {
        self.stop.store(stop, Ordering::Release);
        self.wake();
    }
}

/// The events of a port that wake the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) receive: bool,
    pub(crate) send: bool,
}

/// An epoll of the doorbells and the port, with the port's current registration.
pub(crate) struct Sleep {
    epoll: Epoll,
    bells: Vec<Arc<EventFd>>,
    port: Option<(RawFd, u32, Interest)>,
}

impl Sleep {
    pub(crate) fn new(orders: &Orders, mut bells: Vec<Arc<EventFd>>) -> anyhow::Result<Self> {
        let epoll = Epoll::new().context("an epoll for a queue pair")?;
        bells.push(orders.bell.clone());
        for (number, bell) in (PORT + 1..).zip(&bells) {
            let event = EpollEvent::new(EventSet::IN, number);
            epoll
                .ctl(ControlOperation::Add, bell.as_raw_fd(), event)
                .context("a doorbell in an epoll")?;
        }
        Ok(Self { epoll, bells, port: None })
    }

    /// Waits until a doorbell rings, the port is ready for `interest`, or its deadline is reached.
    /// Returns a bit mask of the doorbells that rang, in their order.
    pub(crate) fn until(&mut self, wait: &Wait<'_>, interest: Interest) -> u8 {
        self.watch(wait, interest);
        let left = wait.due.map(|due| due.saturating_duration_since(Instant::now()));
        // Round up: waking a millisecond late is better than waking early many times.
        let left = left.map_or(-1, |left| i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX));
        let mut events = [EpollEvent::default(); MAX_EVENTS];
        // An interrupted wait needs no special case: the caller checks everything.
        let count = self.epoll.wait(left, &mut events).unwrap_or(0);
        let mut rung = 0;
        for event in &events[..count] {
            let number = event.data().checked_sub(PORT + 1).and_then(|it| usize::try_from(it).ok());
            if let Some((number, bell)) = number.and_then(|it| Some((it, self.bells.get(it)?))) {
                bell.read().ok();
                rung |= 1 << number;
            }
        }
        rung
    }

    /// A port without interest is removed, because a closed peer would wake the thread again and
    /// again.
    fn watch(&mut self, wait: &Wait<'_>, interest: Interest) {
        let any = interest.receive || interest.send;
        let wanted = wait.fd.filter(|_| any).map(|fd| (fd.as_raw_fd(), wait.connection, interest));
        if wanted == self.port {
            return;
        }
        let same = |a: (RawFd, u32, Interest), b: (RawFd, u32, Interest)| (a.0, a.1) == (b.0, b.1);
        let known = self.port.zip(wanted).is_some_and(|(a, b)| same(a, b));
        if let Some((fd, ..)) = self.port.filter(|_| !known) {
            // The kernel removes closed file descriptors by itself.
            self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default()).ok();
        }
        if let Some((fd, ..)) = wanted {
            let mut events = EventSet::empty();
            events.set(EventSet::IN, interest.receive);
            events.set(EventSet::OUT, interest.send);
            let how = if known { ControlOperation::Modify } else { ControlOperation::Add };
            self.epoll.ctl(how, fd, EpollEvent::new(events, PORT)).ok();
        }
        self.port = wanted;
    }
}
