//! The thread that carries out a device's orders, one after another.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{Builder, JoinHandle};

use anyhow::Context;
use host::usb::usbfs::{Handle, Order};
use rustix::event::{EventfdFlags, eventfd};

struct Job {
    handle: Arc<dyn Handle>,
    deed: Deed,
}

enum Deed {
    Order(Order),
    /// A transfer that the guest withdrew while the kernel carries out an order.
    Discard(u64),
}

type Outcome = (Order, io::Result<()>);

/// Dropping it ends the thread, after the order that it carries out.
pub(super) struct Orders {
    jobs: Option<Sender<Job>>,
    outcomes: Receiver<Outcome>,
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    /// Orders whose outcomes were not collected yet. A guest can give a reset, and one request.
    pending: Vec<Order>,
}

impl Orders {
    pub(super) fn new() -> anyhow::Result<Self> {
        let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let bell = Arc::new(bell.context("an event for a USB device")?);
        let (jobs, orders) = mpsc::channel::<Job>();
        let (results, outcomes) = mpsc::channel();
        let rings = bell.clone();
        let body = move || {
            for Job { handle, deed } in orders {
                let order = match deed {
                    Deed::Order(order) => order,
                    Deed::Discard(tag) => {
                        handle.discard(tag);
                        continue;
                    }
                };
                let result = handle.order(order);
                drop(handle);
                if results.send((order, result)).is_err() {
                    return;
                }
                // If the counter is full, the controller is woken anyway.
                rustix::io::write(&*rings, &1_u64.to_ne_bytes()).ok();
            }
        };
        let thread = Builder::new().name("usb-host".into()).spawn(body).context("a thread")?;
        Ok(Self { jobs: Some(jobs), outcomes, bell, thread: Some(thread), pending: Vec::new() })
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.pending.is_empty()
    }

    /// An order that is pending already is not given again.
    pub(super) fn push(&mut self, handle: &Arc<dyn Handle>, order: Order) {
        if self.pending.contains(&order) {
            return;
        }
        if self.send(handle, Deed::Order(order)) {
            self.pending.push(order);
        }
    }

    /// Discards a transfer after the orders that are pending.
    pub(super) fn discard(&self, handle: &Arc<dyn Handle>, tag: u64) {
        self.send(handle, Deed::Discard(tag));
    }

    fn send(&self, handle: &Arc<dyn Handle>, deed: Deed) -> bool {
        let job = Job { handle: handle.clone(), deed };
        self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }

    pub(super) fn collect(&mut self) -> Vec<Outcome> {
        rustix::io::read(&*self.bell, &mut [0; 8]).ok();
        let outcomes: Vec<Outcome> = self.outcomes.try_iter().collect();
        for (order, _) in &outcomes {
            self.pending.retain(|it| it != order);
        }
        outcomes
    }
}

impl Drop for Orders {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            thread.join().expect("a panic ends the process");
        }
    }
}
