//! One pair of queues of a network device, and the thread that serves it (VIRTIO 1.3, 5.1.6).
//!
//! A frame is received into as many of the driver's buffers as it may need at once, by one system
//! call, and what was not needed stays for the next. Where the buffers that there are do not hold
//! it, its end waits in a buffer of ours for more of them. Without buffers the host's side is not
//! asked: what can wait there waits.
//!
//! Threats: a buffer without room for the header, or outside of memory, goes back empty. A frame to
//! send that is none goes back unsent. The thread looks at its orders after a bounded number of
//! frames, so neither the guest nor its peer keeps a device from being stopped.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Nic;
use super::control::OK;
use super::inbox::{Inbox, Terms};
use super::lease::Lease;
use super::sleep::{Orders, Sleep, Wish};
use crate::poller::AWAKE;
use crate::virtio::Queue;
use host::net::{Port, Stop, put};

/// Frames in one direction, before the other one and the orders are looked at.
const ROUND: usize = 256;
/// Frames that waited behind a cable that was pulled.
const STALE: usize = 4096;

/// One pair.
pub(super) struct Pair {
    pub(super) number: u16,
    pub(super) receive: Option<Queue>,
    pub(super) transmit: Option<Queue>,
    pub(super) control: Option<Queue>,
    pub(super) port: Box<dyn Port>,
    pub(super) nic: Arc<Nic>,
    pub(super) terms: Terms,
    pub(super) inbox: Inbox,
    pub(super) sleep: Sleep,
    /// The kernel may serve the rings.
    pub(super) lease: Option<Lease>,
    /// The peer takes nothing now.
    pub(super) full: bool,
    /// The cable was pulled.
    pub(super) pulled: bool,
}

impl Pair {
    /// Serves the queues until it is told to stop, and leaves them as if nothing had been begun.
    pub(super) fn run(mut self, orders: &Orders) -> Self {
        let mut looks = false;
        self.quiet();
        while !orders.stop.load(Ordering::Acquire) {
            if self.serve() || looks && self.look(orders) {
                continue;
            }
            if !self.listen() {
                looks = self.sleep() < AWAKE;
            }
            self.quiet();
        }
        if self.is_lent() {
            self.regain();
        }
        if let Some(queue) = &mut self.receive {
            self.inbox.undo(queue);
        }
        self
    }

    /// Whether the kernel has the rings. They are not ours to touch then.
    fn is_lent(&self) -> bool {
        self.lease.as_ref().is_some_and(Lease::is_out)
    }

    /// Whether the kernel should have them.
    fn is_for_kernel(&self) -> bool {
        let possible = self.lease.as_ref().is_some_and(Lease::is_possible);
        possible
            && self.transmit.is_some()
            && self.receive.as_ref().is_some_and(|queue| queue.memory().ram().is_ok())
            && self.number < self.nic.active.load(Ordering::Acquire)
            && self.nic.side.link().is_plugged()
    }

    /// Gives the kernel the rings, or takes them back, as it should be now.
    fn settle(&mut self) {
        match (self.is_lent(), self.is_for_kernel()) {
            (true, false) => self.regain(),
            (false, true) => self.lend(),
            _ => {}
        }
    }

    fn lend(&mut self) {
        // What came while the cable was pulled goes first.
        self.is_open();
        let (Some(receive), Some(transmit)) = (&mut self.receive, &mut self.transmit) else {
            return;
        };
        self.inbox.undo(receive);
        self.full = false;
        if let Some(lease) = &mut self.lease {
            lease.begin([receive, transmit]);
        }
    }

    fn regain(&mut self) {
        if let (Some(lease), Some(receive), Some(transmit)) =
            (&mut self.lease, &mut self.receive, &mut self.transmit)
        {
            lease.end([receive, transmit]);
        }
    }

    /// Does what there is to do; false if there was nothing.
    fn serve(&mut self) -> bool {
        self.settle();
        let answered = self.answer();
        if self.is_lent() {
            return answered;
        }
        let sent = self.send();
        let received = self.accept();
        answered || sent || received
    }

    /// Looks until there was something to do; false if there was not.
    fn look(&mut self, orders: &Orders) -> bool {
        let start = Instant::now();
        while start.elapsed() < AWAKE && !orders.stop.load(Ordering::Acquire) {
            if self.serve() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Asks the driver not to ring. Buffers to receive into are only missed when there are none.
    fn quiet(&mut self) {
        let own = !self.is_lent();
        let (receive, transmit) = (self.receive.as_mut(), self.transmit.as_mut());
        let queues = [receive.filter(|_| own), transmit.filter(|_| own), self.control.as_mut()];
        queues.into_iter().flatten().for_each(Queue::quiet);
    }

    /// Asks the driver to ring for what it gives us to do. True when something came meanwhile.
    fn listen(&mut self) -> bool {
        let own = !self.is_lent();
        let receive = self.receive.as_mut().filter(|_| own && self.inbox.is_hungry());
        let transmit = self.transmit.as_mut().filter(|_| own && !self.full);
        let queues = [receive, transmit, self.control.as_mut()];
        queues.into_iter().flatten().any(Queue::listen)
    }

    /// Answers the control queue; true if it had something.
    fn answer(&mut self) -> bool {
        let Some(queue) = &mut self.control else { return false };
        for round in 0..ROUND {
            let Some(chain) = queue.pop() else { return round > 0 };
            self.nic.obey(queue.memory(), &chain.readable);
            let told = put(queue.memory(), &chain.writable, 0, &[OK]);
            queue.push(chain, u32::from(told == Ok(1)));
            queue.notify();
        }
        true
    }

    /// Sends what the driver has; true if it sent something.
    fn send(&mut self) -> bool {
        let Some(queue) = &mut self.transmit else { return false };
        let plugged = self.nic.side.link().is_plugged();
        let mut sent = 0;
        while sent < ROUND {
            let Some(chain) = queue.pop() else { break };
            // A cable that was pulled leads nowhere.
            let result =
                if plugged { self.port.send(queue.memory(), &chain.readable) } else { Ok(()) };
            self.full = result == Err(Stop::Wait);
            if self.full {
                queue.undo(chain);
                break;
            }
            queue.push(chain, 0);
            sent += 1;
        }
        queue.notify();
        sent > 0
    }

    /// Whether frames are to come by this pair now.
    fn is_open(&mut self) -> bool {
        let Some(queue) = &self.receive else { return false };
        if self.number >= self.nic.active.load(Ordering::Acquire) {
            return false;
        }
        let plugged = self.nic.side.link().is_plugged();
        if plugged && self.pulled {
            // What came in while nobody could have heard it.
            for _ in 0..STALE {
                if self.port.receive(queue.memory(), &[], self.inbox.rest()) == Err(Stop::Wait) {
                    break;
                }
            }
        }
        self.pulled = !plugged;
        plugged
    }

    /// Receives what has arrived; true if there was something.
    fn accept(&mut self) -> bool {
        if !self.is_open() {
            return false;
        }
        let Some(queue) = &mut self.receive else { return false };
        self.inbox.hear(&self.nic);
        let mut received = 0;
        while received < ROUND && self.inbox.gather(queue, self.terms.merge) {
            let (pieces, rest) = self.inbox.place();
            match self.port.receive(queue.memory(), pieces, rest) {
                Ok(length) => self.inbox.deliver(queue, length, self.terms),
                Err(Stop::Refused) => self.inbox.refuse(queue),
                Err(Stop::Wait) => break,
            }
            received += 1;
        }
        queue.notify();
        received > 0
    }

    /// Sleeps until there may be something to do; says how long.
    fn sleep(&mut self) -> Duration {
        if let (Some(lease), Some(receive), Some(transmit)) =
            (&mut self.lease, &mut self.receive, &mut self.transmit)
            && lease.is_out()
        {
            lease.sleep([receive, transmit]);
            // There is nothing to look for that the kernel does not see first.
            return Duration::MAX;
        }
        let receive = self.is_open() && !self.inbox.is_hungry();
        let wait = self.port.wait();
        let wish = Wish { receive, send: self.full || wait.full };
        let start = Instant::now();
        self.sleep.until(&wait, wish);
        start.elapsed()
    }
}
