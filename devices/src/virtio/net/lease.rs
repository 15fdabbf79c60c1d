//! A pair of queues whose rings the kernel serves (vhost-net) as long as it can: while the cable is
//! plugged in, the driver uses the pair, and the device is a bus master. At any other time the
//! pair's thread serves them itself, from where the kernel left off.
//!
//! While the kernel has the rings, the thread answers the control queue, and hands interrupts on:
//! so masks, pending bits and the wire are what they are for every other device.
//!
//! Threats: rings that the kernel refuses, or calls broken, are served by the thread until the next
//! reset, and it is the thread that finds out what is wrong with them. A guest that is no bus
//! master any more keeps the kernel writing for the moment until the thread has heard of it.

use std::sync::Arc;

use anyhow::{Context, anyhow};
use vmm_sys_util::eventfd::EventFd;

use super::sleep::{Orders, Sleep, Wish};
use crate::virtio::Queue;
use host::net::Wait;
use host::net::link::Link;
use host::net::vhost::Vhost;

/// Which of the bells is that of a broken ring; those of the two queues come before it.
const ERROR: usize = 2;

/// What the kernel has of a pair.
pub(super) struct Lease {
    vhost: Vhost,
    link: Arc<Link>,
    /// What was agreed on with the driver.
    features: u64,
    sleep: Sleep,
    out: bool,
    /// The kernel cannot serve these rings.
    refused: bool,
}

impl Lease {
    /// Nothing is lent yet. The thread will hear of orders, and of the control queue, too.
    pub(super) fn new(
        vhost: Vhost,
        (link, features): (&Arc<Link>, u64),
        orders: &Orders,
        control: Option<&Arc<EventFd>>,
    ) -> anyhow::Result<Self> {
        let mut bells = vhost.calls.to_vec();
        bells.push(vhost.error.clone());
        bells.extend(control.cloned());
        let sleep = Sleep::new(orders, bells)?;
        Ok(Self { vhost, link: link.clone(), features, sleep, out: false, refused: false })
    }

    /// Whether the kernel has the rings.
    pub(super) fn is_out(&self) -> bool {
        self.out
    }

    /// Whether it can have these rings at all.
    pub(super) fn is_possible(&self) -> bool {
        !self.refused
    }

    /// Gives the kernel the rings: receiving, sending.
    pub(super) fn begin(&mut self, [receive, transmit]: [&mut Queue; 2]) {
        let rings = receive.lend().zip(transmit.lend()).context("chains that are out of order");
        let named = rings
            .and_then(|(receive, transmit)| self.vhost.prepare([receive, transmit], self.features));
        if let Err(error) = named {
            return self.refuse(&error);
        }
        self.out = true;
        self.link.count_in_kernel(true);
        if let Err(error) = self.vhost.take() {
            self.refuse(&error);
            return self.end([receive, transmit]);
        }
        for queue in [receive, transmit] {
            // One that cannot take one more ring is rung already.
            queue.bell().write(1).ok();
        }
    }

    fn refuse(&mut self, error: &anyhow::Error) {
        // Rings are the guest's, who can reset the device for ever.
        self.vhost.told.call_once(|| {
            tracing::warn!("vhost-net: this process serves the rings instead: {error:#}");
        });
        self.refused = true;
    }

    /// Takes them back.
    pub(super) fn end(&mut self, queues: [&mut Queue; 2]) {
        let [receive, transmit] = &queues;
        let positions = self.vhost.leave([receive.device_area(), transmit.device_area()]);
        for (queue, position) in queues.into_iter().zip(positions) {
            queue.regain(position);
        }
        self.out = false;
        self.link.count_in_kernel(false);
    }

    /// Sleeps until there is something to do besides what the kernel does, and interrupts.
    pub(super) fn sleep(&mut self, queues: [&mut Queue; 2]) {
        let heard = self.sleep.until(&Wait::default(), Wish { receive: false, send: false });
        for (number, queue) in queues.into_iter().enumerate() {
            if heard & 1 << number != 0 {
                queue.signal().used(queue.number());
            }
        }
        if heard & 1 << ERROR != 0 {
            self.refuse(&anyhow!("the kernel cannot read a ring"));
        }
    }

    /// Nothing is lent any more.
    pub(super) fn into_vhost(self) -> Vhost {
        self.vhost
    }
}
