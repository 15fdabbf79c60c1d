//! One queue pair of a network device, and the thread that serves it (VIRTIO 1.3, 5.1.6).
//!
//! One system call receives a frame into as many of the driver's buffers as a frame may need.
//! Buffers that stay unused are kept for the next frame. If the buffers are too small, the end of
//! the frame is kept in a buffer of this process until the driver adds more. Without buffers
//! nothing is read from the port, so frames wait on the host's side.
//!
//! Threats: a buffer without room for the header, or outside of memory, is returned empty. An
//! invalid frame is returned unsent. The thread checks its orders after a bounded number of frames,
//! so neither the guest nor its peer can prevent a device from being stopped.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Nic;
use super::control::OK;
use super::inbox::{Inbox, ReceiveFeatures};
use super::kernel_rings::KernelRings;
use crate::poller::POLL_TIME;
use crate::sleep::{Interest, Orders, Sleep};
use crate::virtio::Queue;
use host::net::{Port, TransferError, write_pieces};

/// Frames in one direction, before the other direction and the orders are served.
const MAX_FRAMES_PER_ROUND: usize = 256;
/// Frames that are discarded when the cable is plugged in again.
const MAX_STALE_FRAMES: usize = 4096;

pub(super) struct Pair {
    pub(super) number: u16,
    pub(super) receive: Option<Queue>,
    pub(super) transmit: Option<Queue>,
    pub(super) control: Option<Queue>,
    pub(super) port: Box<dyn Port>,
    pub(super) nic: Arc<Nic>,
    pub(super) features: ReceiveFeatures,
    pub(super) inbox: Inbox,
    pub(super) sleep: Sleep,
    /// Present if the kernel may serve the rings.
    pub(super) kernel_rings: Option<KernelRings>,
    /// The peer accepts no more frames at the moment.
    pub(super) full: bool,
    pub(super) unplugged: bool,
}

impl Pair {
    /// Serves the queues until it is asked to stop. No request is half done afterwards.
    pub(super) fn run(mut self, orders: &Orders) -> Self {
        let mut polls = false;
        self.disable_doorbells();
        while !orders.stop.load(Ordering::Acquire) {
            if self.serve() || polls && orders.poll(|| self.serve()) {
                continue;
            }
            if !self.enable_doorbells() {
                polls = self.sleep() < POLL_TIME;
            }
            self.disable_doorbells();
        }
        if self.is_kernel_active() {
            self.take_back();
        }
        if let Some(queue) = &mut self.receive {
            self.inbox.return_buffers(queue);
        }
        self
    }

    /// If so, this thread must not touch the rings.
    fn is_kernel_active(&self) -> bool {
        self.kernel_rings.as_ref().is_some_and(|rings| rings.active)
    }

    /// Whether the kernel should serve the rings now.
    fn is_for_kernel(&self) -> bool {
        let possible = self.kernel_rings.as_ref().is_some_and(KernelRings::is_possible);
        possible
            && self.transmit.is_some()
            && self.receive.as_ref().is_some_and(|queue| {
                // Writes of the kernel are not recorded.
                queue.memory.ram().is_ok() && !queue.memory.records_writes()
            })
            && self.number < self.nic.active.load(Ordering::Acquire)
            && self.nic.backend.link().is_plugged()
    }

    /// Hands the rings to the kernel or takes them back, as the current state demands.
    fn update_owner(&mut self) {
        match (self.is_kernel_active(), self.is_for_kernel()) {
            (true, false) => self.take_back(),
            (false, true) => self.hand_to_kernel(),
            _ => {}
        }
    }

    fn hand_to_kernel(&mut self) {
        // Discards the frames that came while the cable was unplugged.
        self.is_open();
        let (Some(receive), Some(transmit)) = (&mut self.receive, &mut self.transmit) else {
            return;
        };
        self.inbox.return_buffers(receive);
        self.full = false;
        if let Some(rings) = &mut self.kernel_rings {
            rings.begin([receive, transmit]);
        }
    }

    fn take_back(&mut self) {
        if let (Some(rings), Some(receive), Some(transmit)) =
            (&mut self.kernel_rings, &mut self.receive, &mut self.transmit)
        {
            rings.end([receive, transmit]);
        }
    }

    /// Returns false if there was nothing to do.
    fn serve(&mut self) -> bool {
        self.update_owner();
        let answered = self.answer();
        if self.is_kernel_active() {
            return answered;
        }
        let sent = self.send();
        let received = self.accept();
        answered || sent || received
    }

    fn disable_doorbells(&mut self) {
        let own = !self.is_kernel_active();
        let (receive, transmit) = (self.receive.as_mut(), self.transmit.as_mut());
        let queues = [receive.filter(|_| own), transmit.filter(|_| own), self.control.as_mut()];
        queues.into_iter().flatten().for_each(Queue::disable_doorbell);
    }

    /// The receive queue needs its doorbell only while it has no buffers. Returns true if something
    /// came in the meantime.
    fn enable_doorbells(&mut self) -> bool {
        let own = !self.is_kernel_active();
        let receive = self.receive.as_mut().filter(|_| own && self.inbox.starved);
        let transmit = self.transmit.as_mut().filter(|_| own && !self.full);
        let queues = [receive, transmit, self.control.as_mut()];
        queues.into_iter().flatten().any(Queue::enable_doorbell)
    }

    /// Serves the control queue. Returns true if it had commands.
    fn answer(&mut self) -> bool {
        let Some(queue) = &mut self.control else { return false };
        for round in 0..MAX_FRAMES_PER_ROUND {
            let Some(chain) = queue.pop() else { return round > 0 };
            self.nic.execute(&queue.memory, &chain.readable);
            let written = write_pieces(&queue.memory, &chain.writable, 0, &[OK]);
            queue.push(chain, u32::from(written == Ok(1)));
            queue.notify();
        }
        true
    }

    /// Returns true if any frame was sent.
    fn send(&mut self) -> bool {
        let Some(queue) = &mut self.transmit else { return false };
        let plugged = self.nic.backend.link().is_plugged();
        let mut sent = 0;
        while sent < MAX_FRAMES_PER_ROUND {
            let Some(chain) = queue.pop() else { break };
            // Without a cable, frames are discarded.
            let result =
                if plugged { self.port.send(&queue.memory, &chain.readable) } else { Ok(()) };
            self.full = result == Err(TransferError::WouldBlock);
            if self.full {
                queue.return_chain(chain);
                break;
            }
            queue.push(chain, 0);
            sent += 1;
        }
        queue.notify();
        sent > 0
    }

    /// Whether this pair may receive frames now.
    fn is_open(&mut self) -> bool {
        let Some(queue) = &self.receive else { return false };
        if self.number >= self.nic.active.load(Ordering::Acquire) {
            return false;
        }
        let plugged = self.nic.backend.link().is_plugged();
        if plugged && self.unplugged {
            // Discard what came while the cable was unplugged.
            for _ in 0..MAX_STALE_FRAMES {
                if self.port.receive(&queue.memory, &[], self.inbox.discard_buffer())
                    == Err(TransferError::WouldBlock)
                {
                    break;
                }
            }
        }
        self.unplugged = !plugged;
        plugged
    }

    /// Returns true if any frame had arrived.
    fn accept(&mut self) -> bool {
        if !self.is_open() {
            return false;
        }
        let Some(queue) = &mut self.receive else { return false };
        self.inbox.update_filter(&self.nic);
        let mut received = 0;
        while received < MAX_FRAMES_PER_ROUND && self.inbox.gather(queue, self.features.merge) {
            let (pieces, rest) = self.inbox.destination();
            match self.port.receive(&queue.memory, pieces, rest) {
                Ok(length) => self.inbox.deliver(queue, length, self.features),
                Err(TransferError::Refused) => self.inbox.refuse(queue),
                Err(TransferError::WouldBlock) => break,
            }
            received += 1;
        }
        queue.notify();
        received > 0
    }

    /// Returns how long it waited.
    fn sleep(&mut self) -> Duration {
        if let (Some(rings), Some(receive), Some(transmit)) =
            (&mut self.kernel_rings, &mut self.receive, &mut self.transmit)
            && rings.active
        {
            rings.sleep([receive, transmit]);
            // The kernel sees frames first, so polling afterwards is useless.
            return Duration::MAX;
        }
        let receive = self.is_open() && !self.inbox.starved;
        let wait = self.port.wait();
        let interest = Interest { receive, send: self.full || wait.full };
        let start = Instant::now();
        self.sleep.until(&wait, interest);
        start.elapsed()
    }
}
