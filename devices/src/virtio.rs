//! VIRTIO 1.3: the devices, and the transport that they share (`pci.rs`).

pub mod balloon;
pub mod blk;
pub mod console;
pub mod gpu;
pub mod net;
mod pci;
mod queue;
pub mod rng;
pub mod scsi;
mod signal;

use std::sync::Arc;

use host::disk::{self, Drive};

pub use self::pci::on_pci;
pub use self::queue::{Chain, Queue, length};
pub use self::signal::Signal;
use crate::device::Saved;
use crate::grants::Grants;

/// Opens a controller's disk, and registers it with the machine.
fn open_disk(disk: &disk::Config, grants: &mut dyn Grants) -> anyhow::Result<Arc<Drive>> {
    let image = disk.open(grants.shared().holds())?;
    let drive = disk.drive(image, grants.name())?;
    grants.shared().disks.add(&drive);
    Ok(drive)
}

/// Properties of a device that no driver changes.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The device type (VIRTIO 1.3, 5).
    pub id: u16,
    pub name: &'static str,
    /// The PCI class code, 24 bits.
    pub class: u32,
    /// The maximum size of each queue, in entries. Powers of two.
    pub queues: Vec<u16>,
    /// The device's own feature bits. The transport adds those of the queues and its own.
    pub features: u64,
}

/// A virtio device behind its transport.
///
/// It touches guest memory only between `start` and `stop`.
pub trait Virtio: Send + 'static {
    /// Always returns the same properties.
    fn identity(&self) -> Identity;
    /// The device configuration structure, as the guest reads it now.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    /// The guest writes to the device configuration. Read-only fields ignore it.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}
    /// Takes the queues that the driver enabled and serves them on threads of the device.
    /// `negotiated` holds the feature bits.
    fn start(&mut self, queues: Vec<Queue>, negotiated: u64) -> anyhow::Result<()>;
    /// Returns the queues. Every request is finished or undone.
    fn stop(&mut self) -> Vec<Queue>;
    /// The driver's settings beyond the queues.
    fn save(&self) -> Saved {
        Saved::default()
    }
    /// Restores a saved state. The empty state is a reset. Only called while the device is stopped.
    fn restore(&mut self, _saved: Saved) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Takes the next chain. If the queue is empty, asks the driver to ring for the next one: with
/// EVENT_IDX a driver rings only when asked.
fn next(queue: &mut Queue) -> Option<Chain> {
    queue.pop().or_else(|| if queue.enable_doorbell() { queue.pop() } else { None })
}
