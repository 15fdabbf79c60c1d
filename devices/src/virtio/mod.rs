//! VIRTIO 1.3: what makes one device different from another, and (in `pci.rs`, once) all that is
//! the same.

pub mod balloon;
pub mod blk;
pub mod console;
pub mod net;
mod pci;
mod queue;
pub mod rng;
pub mod scsi;
mod signal;

pub use self::pci::on_pci;
pub use self::queue::{Chain, Queue, length};
pub use self::signal::Signal;
use crate::device::Saved;

/// What a device is before any driver speaks to it.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The device type of VIRTIO 1.3, 5.
    pub id: u16,
    /// For the log.
    pub name: &'static str,
    /// The PCI class: 24 bits.
    pub class: u32,
    /// The most entries of each queue: powers of two.
    pub queues: Vec<u16>,
    /// Its own features; those of queues and transport are added.
    pub features: u64,
}

/// A virtio device behind its transport.
///
/// It runs between `start` and `stop`, and only then touches the guest's memory.
pub trait Virtio: Send + 'static {
    /// What it is. Always the same answer.
    fn identity(&self) -> Identity;
    /// The configuration structure as the guest would read it now.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    /// The guest writes into it: that part which it may.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}
    /// Takes the queues that the driver enabled, and serves them on threads of its own.
    ///
    /// # Errors
    ///
    /// When the host has no thread or file descriptor left.
    fn start(&mut self, queues: Vec<Queue>, negotiated: u64) -> anyhow::Result<()>;
    /// Gives them back, idle: what was begun is done, or undone.
    fn stop(&mut self) -> Vec<Queue>;
    /// What the driver told it, beyond its queues.
    fn save(&self) -> Saved {
        Saved::default()
    }
    /// Takes that back; nothing saved is a reset. Only called while it is stopped.
    ///
    /// # Errors
    ///
    /// When the state is not one of this device.
    fn restore(&mut self, _saved: Saved) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Takes the next chain of a queue. Where there is none, the driver rings for the next: one that
/// goes by indices rings only when it was asked to.
fn next(queue: &mut Queue) -> Option<Chain> {
    queue.pop().or_else(|| if queue.listen() { queue.pop() } else { None })
}
