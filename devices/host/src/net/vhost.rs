//! vhost-net (Documentation/virt and drivers/vhost of Linux): the kernel serves the rings of a
//! tap itself. Our process sees none of the frames.
//!
//! Each pair of queues has an open file of `/dev/vhost-net`. The kernel knows all of the guest's
//! RAM from the time it is opened, and serves the rings between [`Vhost::start`] and
//! [`Vhost::stop`].
//!
//! Threats: rings and descriptors are the guest's, and the kernel checks them as it does for any
//! VMM. It refuses addresses outside the guest's RAM, and reports a ring that it cannot read as
//! broken. It does not filter addresses, so a driver sees everything that arrives at the tap, as on
//! a hub. It does not report that an interface was deleted on the host: frames are lost until the
//! rings come back.

use std::fs::File;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};

use crate::ram::GuestMemoryMmap;
use anyhow::{Context, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use vhost::net::VhostNet;
use vhost::vhost_kern::net::Net;
use vhost::{Error, VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::memory::Memory;

/// Features that the kernel must support (VIRTIO 1.3, 5.1.3 and 6): merged receive buffers,
/// indirect descriptors, event indices, version 1. Without one of them we do not use it.
const NEEDED: u64 = 1 << 15 | 1 << 28 | 1 << 29 | 1 << 32;

/// Whether the kernel serves the rings of a tap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// If `/dev/vhost-net` can be opened.
    #[default]
    Auto,
    /// Always. Fails if it cannot be opened.
    On,
    Off,
}

/// A split ring and its doorbell.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'a> {
    /// Number of entries.
    pub size: u16,
    /// Guest address of the descriptor table.
    pub descriptors: u64,
    /// Guest address of the driver area (available ring).
    pub driver: u64,
    /// Guest address of the device area (used ring).
    pub device: u64,
    /// Index of the next available entry to take.
    pub next: u16,
    /// Rung by the driver.
    pub bell: &'a EventFd,
}

/// The indices of both rings: the next entry to take, and the next one to return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    pub available: u16,
    pub used: u16,
}

/// The interface to vhost-net, which tests replace.
pub trait Kernel: Send {
    fn set_features(&self, features: u64) -> anyhow::Result<()>;

    /// Configures a ring, and its two events: used buffers, and an invalid ring.
    fn set_ring(&self, number: usize, ring: &Ring<'_>, events: [&EventFd; 2])
    -> anyhow::Result<()>;

    /// Serves a ring with this tap, or stops serving it if `tap` is `None`.
    fn set_tap(&self, number: usize, tap: Option<&File>) -> anyhow::Result<()>;

    fn set_doorbell(&self, number: usize, bell: &EventFd);

    /// The index of the next available entry that the kernel would take.
    fn next_available(&self, number: usize) -> Option<u16>;
}

impl Kernel for Net<Arc<GuestMemoryMmap>> {
    fn set_features(&self, features: u64) -> anyhow::Result<()> {
        VhostBackend::set_features(self, features)
            .with_context(|| format!("features {features:#x}"))
    }

    fn set_ring(
        &self,
        number: usize,
        ring: &Ring<'_>,
        events: [&EventFd; 2],
    ) -> anyhow::Result<()> {
        let areas = VringConfigData {
            queue_max_size: ring.size,
            queue_size: ring.size,
            flags: 0,
            desc_table_addr: ring.descriptors,
            used_ring_addr: ring.device,
            avail_ring_addr: ring.driver,
            log_addr: None,
        };
        let [call, error] = events;
        self.set_vring_num(number, ring.size).context("the size of a ring")?;
        self.set_vring_base(number, ring.next).context("the index in a ring")?;
        self.set_vring_addr(number, &areas).context("the addresses of a ring")?;
        self.set_vring_call(number, call).context("an interrupt")?;
        self.set_vring_err(number, error).context("an event for errors")?;
        self.set_vring_kick(number, ring.bell).context("a doorbell")
    }

    fn set_tap(&self, number: usize, tap: Option<&File>) -> anyhow::Result<()> {
        self.set_backend(number, tap).context("a tap")
    }

    fn set_doorbell(&self, number: usize, bell: &EventFd) {
        self.set_vring_kick(number, bell).ok();
    }

    fn next_available(&self, number: usize) -> Option<u16> {
        let base = self.get_vring_base(number);
        base.ok().and_then(|base| u16::try_from(base & 0xffff).ok())
    }
}

/// The vhost-net backend of one pair of queues.
pub struct Vhost {
    kernel: Box<dyn Kernel>,
    ram: Arc<GuestMemoryMmap>,
    tap: File,
    /// Raised by the kernel when the receive queue or the transmit queue has used buffers.
    pub calls: [Arc<EventFd>; 2],
    /// Raised for an invalid ring.
    pub error: Arc<EventFd>,
    /// A doorbell that the driver never rings, for rings that the kernel does not serve.
    silence: EventFd,
    /// Errors of a guest's rings are logged once per machine.
    pub warned: Once,
}

/// Opens vhost-net for each of these taps, if it is configured and available. The result is empty
/// if this process is to serve the rings.
pub fn open(choice: Mode, taps: Vec<File>, memory: &Memory) -> anyhow::Result<Vec<Vhost>> {
    if choice == Mode::Off {
        return Ok(Vec::new());
    }
    if taps.is_empty() {
        ensure!(choice == Mode::Auto, "vhost=on: the network is not a tap: leave vhost out");
        return Ok(Vec::new());
    }
    let each = taps.into_iter().map(|tap| Vhost::open(tap, memory.ungated_ram()));
    match each.collect::<anyhow::Result<Vec<_>>>() {
        Ok(each) => {
            tracing::info!("tap: the kernel serves the rings (vhost-net)");
            Ok(each)
        }
        Err(error) if choice == Mode::On => Err(error),
        Err(error) => {
            tracing::info!("tap: this process serves the rings: {error:#}");
            Ok(Vec::new())
        }
    }
}

fn explain(error: Error) -> anyhow::Error {
    let Error::VhostOpen(error) = error else { return anyhow!("vhost-net: {error}") };
    match error.kind() {
        io::ErrorKind::NotFound => anyhow!(
            "there is no /dev/vhost-net: load the module `vhost_net`, or pass the device to \
             the container"
        ),
        io::ErrorKind::PermissionDenied => anyhow!(
            "/dev/vhost-net cannot be opened: join the group of the device file, or pass the \
             device to the container (--device /dev/vhost-net)"
        ),
        _ => anyhow!("/dev/vhost-net: {error}"),
    }
}

impl Vhost {
    fn open(tap: File, ram: Arc<GuestMemoryMmap>) -> anyhow::Result<Self> {
        let net = Net::new(ram.clone()).map_err(explain)?;
        let features = net.get_features().context("the features of vhost-net")?;
        if features & NEEDED != NEEDED {
            bail!("this kernel's vhost-net lacks features: {:#x}", NEEDED & !features);
        }
        net.set_owner().context("vhost-net for this process")?;
        let region = |region: &crate::ram::GuestRegionMmap| VhostUserMemoryRegionInfo {
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr().expose_provenance() as u64,
            mmap_offset: 0,
            mmap_handle: -1,
        };
        let regions: Vec<_> = ram.iter().map(region).collect();
        net.set_mem_table(&regions).context("guest RAM for vhost-net")?;
        Self::with_kernel(Box::new(net), tap, ram)
    }

    pub fn with_kernel(
        kernel: Box<dyn Kernel>,
        tap: File,
        ram: Arc<GuestMemoryMmap>,
    ) -> anyhow::Result<Self> {
        let event = || EventFd::new(EFD_NONBLOCK).context("an event for vhost-net");
        let calls = [Arc::new(event()?), Arc::new(event()?)];
        let (error, silence, warned) = (Arc::new(event()?), event()?, Once::new());
        Ok(Self { kernel, ram, tap, calls, error, silence, warned })
    }

    /// Configures the receive ring and the transmit ring. The kernel does not serve them yet.
    pub fn prepare(&self, rings: [Ring<'_>; 2], features: u64) -> anyhow::Result<()> {
        self.kernel.set_features(features & NEEDED)?;
        for (number, ring) in rings.iter().enumerate() {
            self.kernel.set_ring(number, ring, [&self.calls[number], &self.error])?;
        }
        Ok(())
    }

    /// Starts serving the configured rings. From now on the kernel raises `calls`. The caller must
    /// ring both doorbells afterwards, for buffers that arrived while the rings were not served.
    /// After an error, the kernel may still use one of the rings until [`Vhost::stop`].
    pub fn start(&self) -> anyhow::Result<()> {
        // Clears an error of earlier rings, which does not concern these.
        self.error.read().ok();
        (0..self.calls.len()).try_for_each(|number| self.kernel.set_tap(number, Some(&self.tap)))
    }

    /// Stops serving the rings, and returns their positions. `devices` are the addresses of their
    /// device areas. Nothing is in flight afterwards.
    pub fn stop(&self, devices: [u64; 2]) -> [Position; 2] {
        for number in 0..self.calls.len() {
            if let Err(error) = self.kernel.set_tap(number, None) {
                self.warned.call_once(|| {
                    tracing::warn!("vhost-net: queue {number} does not stop: {error:#}");
                });
            }
            // The doorbell now belongs to this process alone.
            self.kernel.set_doorbell(number, &self.silence);
        }
        [0, 1].map(|number| {
            let used = GuestAddress(devices[number].saturating_add(2));
            // The address was in RAM when the kernel accepted the ring, and RAM does not change.
            let used = self.ram.load::<u16>(used, Ordering::Acquire).map_or(0, u16::from_le);
            Position { available: self.kernel.next_available(number).unwrap_or(used), used }
        })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// Accepts everything.
    struct Agreeing;

    impl Kernel for Agreeing {
        fn set_features(&self, _: u64) -> anyhow::Result<()> {
            Ok(())
        }
        fn set_ring(&self, _: usize, _: &Ring<'_>, _: [&EventFd; 2]) -> anyhow::Result<()> {
            Ok(())
        }
        fn set_tap(&self, _: usize, _: Option<&File>) -> anyhow::Result<()> {
            Ok(())
        }
        fn set_doorbell(&self, _: usize, _: &EventFd) {}
        fn next_available(&self, _: usize) -> Option<u16> {
            None
        }
    }

    #[test]
    fn errors_of_earlier_rings_are_discarded() {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let tap = File::open("/dev/null").unwrap();
        let vhost = Vhost::with_kernel(Box::new(Agreeing), tap, Arc::new(ram)).unwrap();
        vhost.error.write(1).unwrap();
        vhost.start().unwrap();
        assert!(vhost.error.read().is_err(), "nothing is to be heard of");
    }
}
