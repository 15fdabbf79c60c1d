//! How the thread of a pair of queues sleeps: until a doorbell rings, its port has something, or it
//! gets an order.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Context;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use host::net::Wait;

/// The number of the port among the events; bells come after it.
const PORT: u64 = 0;
/// Most events of one look.
const EVENTS: usize = 8;

/// How others reach a pair's thread.
pub(super) struct Orders {
    pub(super) bell: Arc<EventFd>,
    /// It is to end.
    pub(super) stop: AtomicBool,
}

impl Orders {
    pub(super) fn new() -> anyhow::Result<Self> {
        let bell = EventFd::new(EFD_NONBLOCK).context("an event for a pair of queues")?;
        Ok(Self { bell: Arc::new(bell), stop: AtomicBool::new(false) })
    }

    /// Makes it look at what has changed.
    pub(super) fn wake(&self) {
        // A bell that cannot take one more ring is rung already.
        self.bell.write(1).ok();
    }

    /// Makes it end, or lets it begin.
    pub(super) fn set_stop(&self, stop: bool) {
        self.stop.store(stop, Ordering::Release);
        self.wake();
    }
}

/// What a port is to wake the thread for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    /// A frame has arrived.
    pub(super) receive: bool,
    /// A frame can be sent.
    pub(super) send: bool,
}

/// The bells, and the port as it is known to the kernel.
pub(super) struct Sleep {
    epoll: Epoll,
    bells: Vec<Arc<EventFd>>,
    port: Option<(RawFd, u32, Wish)>,
}

impl Sleep {
    /// Wakes up for these bells, and for orders.
    pub(super) fn new(orders: &Orders, mut bells: Vec<Arc<EventFd>>) -> anyhow::Result<Self> {
        let epoll = Epoll::new().context("an epoll for a pair of queues")?;
        bells.push(orders.bell.clone());
        for (number, bell) in (PORT + 1..).zip(&bells) {
            let event = EpollEvent::new(EventSet::IN, number);
            epoll.ctl(ControlOperation::Add, bell.as_raw_fd(), event).context("a bell")?;
        }
        Ok(Self { epoll, bells, port: None })
    }

    /// Sleeps until a bell rings, the port has what is wished for, or is due. Says which bells
    /// rang: a bit for each, in their order.
    pub(super) fn until(&mut self, wait: &Wait<'_>, wish: Wish) -> u8 {
        self.watch(wait, wish);
        let left = wait.due.map(|due| due.saturating_duration_since(Instant::now()));
        // A millisecond late rather than many times too early.
        let left = left.map_or(-1, |left| i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX));
        let mut events = [EpollEvent::default(); EVENTS];
        // Interrupted or not: everything is looked at.
        let count = self.epoll.wait(left, &mut events).unwrap_or(0);
        let mut heard = 0;
        for event in &events[..count] {
            let number = event.data().checked_sub(PORT + 1).and_then(|it| usize::try_from(it).ok());
            if let Some((number, bell)) = number.and_then(|it| Some((it, self.bells.get(it)?))) {
                bell.read().ok();
                heard |= 1 << number;
            }
        }
        heard
    }

    /// Tells the kernel what has changed of the port. One that is not wished for is not known: it
    /// would wake us for a peer that is gone.
    fn watch(&mut self, wait: &Wait<'_>, wish: Wish) {
        let any = wish.receive || wish.send;
        let wanted = wait.fd.filter(|_| any).map(|fd| (fd.as_raw_fd(), wait.connection, wish));
        if wanted == self.port {
            return;
        }
        let same = |a: (RawFd, u32, Wish), b: (RawFd, u32, Wish)| (a.0, a.1) == (b.0, b.1);
        let known = self.port.zip(wanted).is_some_and(|(a, b)| same(a, b));
        if let Some((fd, ..)) = self.port.filter(|_| !known) {
            // The kernel forgot one that was closed.
            self.epoll.ctl(ControlOperation::Delete, fd, EpollEvent::default()).ok();
        }
        if let Some((fd, ..)) = wanted {
            let mut events = EventSet::empty();
            events.set(EventSet::IN, wish.receive);
            events.set(EventSet::OUT, wish.send);
            let how = if known { ControlOperation::Modify } else { ControlOperation::Add };
            self.epoll.ctl(how, fd, EpollEvent::new(events, PORT)).ok();
        }
        self.port = wanted;
    }
}
