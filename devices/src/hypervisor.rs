//! What the hypervisor lends to the board, so that no device knows which one it is.

use std::ops::Range;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::device::Kind;

/// A hypervisor, as devices see it.
pub trait Host: Send + Sync {
    /// The pin of the interrupt controllers with this number.
    ///
    /// # Errors
    ///
    /// When there is no such pin.
    fn pin(&self, gsi: u32) -> anyhow::Result<Box<dyn Pin>>;
    /// A way for one message-signalled interrupt.
    ///
    /// # Errors
    ///
    /// When all routes are taken.
    fn route(&self) -> anyhow::Result<Box<dyn Route>>;
    /// Makes the guest's writes raise an event in the kernel, where the host can do that.
    fn ring(&self, bell: Doorbell, event: &Arc<EventFd>);
    /// Ends what `ring` began.
    fn unring(&self, bell: Doorbell, event: &Arc<EventFd>);
    /// Memory of ours that the guest reads, or reads and writes, without an exit.
    ///
    /// # Errors
    ///
    /// When the host has no memory, or cannot map it so.
    fn backing(&self, size: u64, guest: Guest) -> anyhow::Result<Arc<dyn Backing>>;
    /// Takes guest RAM back that the guest does not need, as far as these bytes are whole pages of
    /// the host's. When somebody touches it again, it is there, and reads as zeros. What is not RAM
    /// is left alone.
    fn release(&self, range: Range<u64>);
}

/// A level-triggered input of an interrupt controller.
pub trait Pin: Send + Sync {
    /// Raises or lowers it.
    fn set(&self, high: bool);
}

/// One message-signalled interrupt's way to a processor.
pub trait Route: Send + Sync {
    /// What is sent from now on.
    ///
    /// # Errors
    ///
    /// When the host refuses the message.
    fn aim(&self, message: Message) -> anyhow::Result<()>;
    /// Sends it. Wait-free: any thread may call this.
    fn send(&self);
}

/// The write that is an MSI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Where to (destination processor, mode).
    pub address: u64,
    /// What (vector, trigger).
    pub data: u32,
}

/// A guest's write that is only a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    /// Ports or memory.
    pub kind: Kind,
    /// The address, or the offset in a window.
    pub address: u64,
    /// Bytes of the write; 0 is any.
    pub length: u32,
    /// Only this value counts, or any.
    pub value: Option<u64>,
}

impl Doorbell {
    /// The bell of a window that begins at `start`.
    #[must_use]
    pub fn moved(self, start: u64) -> Self {
        Self { address: self.address + start, ..self }
    }
}

/// What the guest may do with memory that we lend it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// Read; writes reach the device.
    Reads,
    /// Read and write.
    Writes,
    /// The same, and `Backing::changed` tells where it wrote.
    Draws,
}

/// Memory of ours in the guest's address space. What it holds stays when it is moved, and when its
/// device is reset; no device saves it with its state: it is as much as RAM, and goes with that.
pub trait Backing: Send + Sync {
    /// Puts it at an address, or takes it away.
    ///
    /// # Errors
    ///
    /// When the host has no place for it there.
    fn place(&self, at: Option<u64>) -> anyhow::Result<()>;
    /// Copies out; what lies behind the end is left alone.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Copies in; what lies behind the end is dropped.
    fn write(&self, offset: u64, data: &[u8]);
    /// The pages (of 4096 bytes) that the guest, or `write`, wrote since this was last asked: bit
    /// `n % 64` of word `n / 64` is page `n`. Sets bits and clears none, and makes the list as long
    /// as it must be. Nobody notes this of memory that the guest does not draw in.
    fn changed(&self, pages: &mut Vec<u64>);
}
