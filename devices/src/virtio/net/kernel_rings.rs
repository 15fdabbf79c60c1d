//! A queue pair whose rings the kernel serves (vhost-net) while the cable is plugged in, the driver
//! uses the pair, and the device is a bus master. At any other time the pair's thread serves the
//! rings from the position that the kernel reached.
//!
//! While the kernel serves the rings, the thread answers the control queue and forwards interrupts.
//! Masks, pending bits and the interrupt line therefore work as for every other device.
//!
//! Threats: if the kernel refuses the rings or reports an error, the thread serves them until the
//! next reset and finds out what is wrong. When a guest clears bus mastering, the kernel keeps
//! writing for a moment, until the thread is informed.

use std::sync::Arc;

use anyhow::{Context, anyhow};
use vmm_sys_util::eventfd::EventFd;

use crate::sleep::{Interest, Orders, Sleep};
use crate::virtio::Queue;
use host::net::Wait;
use host::net::link::Link;
use host::net::vhost::Vhost;

/// Index of the doorbell for ring errors. It follows those of the two queues.
const ERROR: usize = 2;

pub(super) struct KernelRings {
    pub(super) vhost: Vhost,
    link: Arc<Link>,
    features: u64,
    sleep: Sleep,
    pub(super) active: bool,
    /// The kernel cannot serve these rings.
    refused: bool,
}

impl KernelRings {
    /// The thread serves the rings at first. It is also woken by its orders and the control queue.
    pub(super) fn new(
        vhost: Vhost,
        link: &Arc<Link>,
        features: u64,
        orders: &Orders,
        control: Option<&Arc<EventFd>>,
    ) -> anyhow::Result<Self> {
        let mut bells = vhost.calls.to_vec();
        bells.push(vhost.error.clone());
        bells.extend(control.cloned());
        let sleep = Sleep::new(orders, bells)?;
        Ok(Self { vhost, link: link.clone(), features, sleep, active: false, refused: false })
    }

    /// Whether the kernel can serve these rings at all.
    pub(super) fn is_possible(&self) -> bool {
        !self.refused
    }

    /// Hands the rings to the kernel: receiving, sending.
    pub(super) fn begin(&mut self, [receive, transmit]: [&mut Queue; 2]) {
        let rings = receive
            .hand_to_kernel()
            .zip(transmit.hand_to_kernel())
            .context("chains that are out of order");
        let named = rings
            .and_then(|(receive, transmit)| self.vhost.prepare([receive, transmit], self.features));
        if let Err(error) = named {
            return self.refuse(&error);
        }
        self.active = true;
        self.link.count_kernel_pair(true);
        if let Err(error) = self.vhost.start() {
            self.refuse(&error);
            return self.end([receive, transmit]);
        }
        for queue in [receive, transmit] {
            // If the doorbell's counter is full, it has rung already.
            queue.bell.write(1).ok();
        }
    }

    fn refuse(&mut self, error: &anyhow::Error) {
        // A guest can cause this again after each reset: warn once.
        self.vhost.warned.call_once(|| {
            tracing::warn!("vhost-net: this process serves the rings instead: {error:#}");
        });
        self.refused = true;
    }

    pub(super) fn end(&mut self, queues: [&mut Queue; 2]) {
        let [receive, transmit] = &queues;
        let positions = self.vhost.stop([receive.device_area(), transmit.device_area()]);
        for (queue, position) in queues.into_iter().zip(positions) {
            queue.take_back(position);
        }
        self.active = false;
        self.link.count_kernel_pair(false);
    }

    /// Waits for work that the kernel does not do, and forwards its interrupts.
    pub(super) fn sleep(&mut self, queues: [&mut Queue; 2]) {
        let rung = self.sleep.until(&Wait::default(), Interest { receive: false, send: false });
        for (number, queue) in queues.into_iter().enumerate() {
            if rung & 1 << number != 0 {
                queue.signal.used(queue.number);
            }
        }
        if rung & 1 << ERROR != 0 {
            self.refuse(&anyhow!("the kernel cannot read a ring"));
        }
    }
}
