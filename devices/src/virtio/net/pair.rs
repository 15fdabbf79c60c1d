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

use super::Nic;
use super::control::OK;
use super::inbox::Inbox;
use super::sleep::{Orders, Sleep, Wish};
use crate::backend::net::{Port, Stop, put};
use crate::virtio::Queue;

/// Frames in one direction, before the other one and the orders are looked at.
const ROUND: usize = 256;
/// Frames that waited behind a cable that was pulled.
const STALE: usize = 4096;

/// What was agreed on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// A frame may go into more than one buffer.
    pub(super) merge: bool,
    /// The driver knows checksums that are not done.
    pub(super) checksum: bool,
    /// It says which VLANs it wants.
    pub(super) by_vlan: bool,
}

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
    /// The peer takes nothing now.
    pub(super) full: bool,
    /// The cable was pulled.
    pub(super) pulled: bool,
}

impl Pair {
    /// Serves the queues until it is told to stop, and leaves them as if nothing had been begun.
    pub(super) fn run(mut self, orders: &Orders) -> Self {
        if let Some(queue) = &mut self.receive {
            queue.quiet();
        }
        while !orders.stop.load(Ordering::Acquire) {
            self.answer();
            let sent = self.send();
            let received = self.accept();
            if !sent && !received {
                self.sleep();
            }
        }
        if let Some(queue) = &mut self.receive {
            self.inbox.undo(queue);
        }
        self
    }

    /// Answers the control queue.
    fn answer(&mut self) {
        let Some(queue) = &mut self.control else { return };
        loop {
            while let Some(chain) = queue.pop() {
                self.nic.obey(queue.memory(), &chain.readable);
                let told = put(queue.memory(), &chain.writable, 0, &[OK]);
                queue.push(chain, u32::from(told == Ok(1)));
                queue.notify();
            }
            if !queue.listen() {
                break;
            }
        }
    }

    /// Sends what the driver has; true when there is more.
    fn send(&mut self) -> bool {
        let Some(queue) = &mut self.transmit else { return false };
        queue.quiet();
        let plugged = self.nic.side.link().is_plugged();
        let mut more = true;
        for _ in 0..ROUND {
            let Some(chain) = queue.pop() else {
                more = queue.listen();
                if more {
                    continue;
                }
                break;
            };
            let sent = if plugged {
                self.port.send(queue.memory(), &chain.readable)
            } else {
                // As into a cable that leads nowhere.
                Ok(())
            };
            self.full = sent == Err(Stop::Wait);
            if self.full {
                queue.undo(chain);
                more = false;
                break;
            }
            queue.push(chain, 0);
        }
        queue.notify();
        more
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

    /// Receives what has arrived; true when there may be more.
    fn accept(&mut self) -> bool {
        if !self.is_open() {
            return false;
        }
        let Some(queue) = &mut self.receive else { return false };
        self.inbox.hear(&self.nic);
        let mut more = true;
        for _ in 0..ROUND {
            more = self.inbox.gather(queue, self.terms.merge);
            if !more {
                break;
            }
            let (pieces, rest) = self.inbox.place();
            match self.port.receive(queue.memory(), pieces, rest) {
                Ok(length) => self.inbox.deliver(queue, length, self.terms),
                Err(Stop::Refused) => self.inbox.refuse(queue),
                Err(Stop::Wait) => {
                    more = false;
                    break;
                }
            }
        }
        queue.notify();
        more
    }

    /// Sleeps until there may be something to do.
    fn sleep(&mut self) {
        let receive = self.is_open() && !self.inbox.is_hungry();
        let wait = self.port.wait();
        let wish = Wish { receive, send: self.full || wait.full };
        self.sleep.until(&wait, wish);
    }
}
