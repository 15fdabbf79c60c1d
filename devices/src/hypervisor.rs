//! The services that the board needs from a hypervisor. Devices use these traits, and do not know
//! which hypervisor implements them.

pub mod fake;

use std::ops::Range;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::device::Kind;
use host::smram::Smram;

pub trait Hypervisor: Send + Sync {
    fn pin(&self, gsi: u32) -> anyhow::Result<Box<dyn Pin>>;
    fn route(&self) -> anyhow::Result<Box<dyn Route>>;
    /// Makes the guest's writes raise an event in the kernel. Fails if the host does not support
    /// it, or has another doorbell for the same writes.
    fn connect_doorbell(&self, bell: Doorbell, event: &Arc<EventFd>) -> anyhow::Result<()>;
    /// Removes a doorbell that was connected with this event.
    fn disconnect_doorbell(&self, bell: Doorbell, event: &Arc<EventFd>);
    /// Allocates memory that the guest accesses without an exit, as far as `guest` allows.
    fn backing(&self, size: u64, guest: GuestAccess) -> anyhow::Result<Arc<dyn Backing>>;
    /// Returns guest RAM in `range` to the host, in whole pages of the host. The guest may use it
    /// again at any time, and then reads zeros. Parts of `range` that are not RAM are ignored.
    fn release(&self, range: Range<u64>);
    /// System-management mode. Fails if the host does not support it, or the machine does not have
    /// it.
    fn smm(&self) -> anyhow::Result<Arc<dyn Smm>>;
}

/// System-management mode (SMM), in which processors run code of the firmware that the system
/// neither sees nor changes.
pub trait Smm: Send + Sync {
    /// Changes which processors access which RAM. After an error, RAM may be visible that should be
    /// hidden.
    fn set_smram(&self, smram: Smram) -> anyhow::Result<()>;
    /// Sends a system-management interrupt (SMI) to the processor whose access the calling thread
    /// handles, before its next instruction, and to all others if `everybody` is set.
    fn interrupt(&self, everybody: bool);
}

/// A level-triggered input of an interrupt controller.
pub trait Pin: Send + Sync {
    fn set(&self, high: bool);
}

/// The route of a message-signalled interrupt to a processor.
pub trait Route: Send + Sync {
    fn set_message(&self, message: Message) -> anyhow::Result<()>;
    /// Sends the message. Wait-free: any thread may call this.
    fn send(&self);
}

/// A message-signalled interrupt: a memory write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// The address of the write (destination processor, mode).
    pub address: u64,
    /// The data of the write (vector, trigger).
    pub data: u32,
}

/// A guest's write that serves only as a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doorbell {
    pub kind: Kind,
    /// The address, or an offset in a window.
    pub address: u64,
    /// The length of the write in bytes. 0 matches every length.
    pub length: u32,
    /// The value of the write. `None` matches every value.
    pub value: Option<u64>,
}

impl Doorbell {
    /// Converts the offset in a window that begins at `start` to an address.
    pub fn moved(self, start: u64) -> Self {
        Self { address: self.address + start, ..self }
    }

    /// Whether a write may match both. A host has at most one doorbell for a write.
    pub fn collides(self, other: Self) -> bool {
        let same_length = [self.length, other.length].contains(&0) || self.length == other.length;
        let same_value = self.value.is_none() || other.value.is_none() || self.value == other.value;
        self.kind == other.kind && self.address == other.address && same_length && same_value
    }
}

/// The guest's access to memory from [`Hypervisor::backing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestAccess {
    /// Read only: writes reach the device.
    ReadOnly,
    ReadWrite,
    /// Read and write, and `Backing::changed` reports the pages written.
    Tracked,
}

/// Memory of a device in the guest's address space. Its content survives moves and resets of the
/// device. Devices do not save it with their state: like RAM, it is too large, and is saved with
/// the RAM.
pub trait Backing: Send + Sync {
    /// Maps the memory at an address, or unmaps it.
    fn map(&self, at: Option<u64>) -> anyhow::Result<()>;
    /// Copies bytes out. Bytes of `data` beyond the end of the memory stay unchanged.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Copies bytes in. Bytes beyond the end of the memory are ignored.
    fn write(&self, offset: u64, data: &[u8]);
    /// Reports the pages of 4096 bytes that the guest, or `write`, changed since the last call: bit
    /// `n % 64` of word `n / 64` is page `n`. Sets bits but clears none, and extends `pages` as
    /// needed. Only memory with [`GuestAccess::Tracked`] is tracked.
    fn changed(&self, pages: &mut Vec<u64>);
}
