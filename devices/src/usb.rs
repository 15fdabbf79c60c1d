//! USB: the interface between devices and their controller, and the ports of a machine.
//!
//! A USB device implements [`Function`] and has [`Descriptors`]. The controller gives it at most
//! one transfer per endpoint at a time, or many of an isochronous one, and reaps completed ones
//! when the function's event is readable. An endpoint without data keeps its transfer, where a
//! real one would send NAK. The parts that all of our devices share (addresses, configurations,
//! halted endpoints, descriptors) are in `device.rs`, and functions do not see them; a device of
//! the host has its own.

mod descriptors;
mod device;
pub mod hid;
pub mod passthrough;
mod ports;
pub mod storage;
pub mod xhci;

use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};

use crate::device::Saved;
use host::memory::{Memory, NoMemory, Piece};

pub use descriptors::{Descriptors, Endpoint, Identity, Interface, Kind};
pub use ports::{Attached, Ports, RootHub, plug_device};

/// The speed of a device (xHCI 7.2.2.1.1, the default speed IDs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Speed {
    /// 12 Mb/s.
    Full = 1,
    /// 1.5 Mb/s.
    Low = 2,
    /// 480 Mb/s.
    High = 3,
    /// 5 Gb/s: USB 3.
    Super = 4,
}

/// The first packet of a control transfer (USB 2.0, 9.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// bmRequestType: direction, type and recipient.
    pub kind: u8,
    pub request: u8,
    pub value: u16,
    pub index: u16,
    pub length: u16,
}

impl Setup {
    pub fn new(bytes: [u8; 8]) -> Self {
        let [kind, request, value_low, value_high, index_low, index_high, low, high] = bytes;
        Self {
            kind,
            request,
            value: u16::from_le_bytes([value_low, value_high]),
            index: u16::from_le_bytes([index_low, index_high]),
            length: u16::from_le_bytes([low, high]),
        }
    }

    /// Whether the data stage goes from the device to the host.
    pub fn is_in(self) -> bool {
        self.kind & 0x80 != 0
    }

    /// The two bytes that identify a request: bmRequestType without the direction, and bRequest.
    pub fn kind_and_request(self) -> (u8, u8) {
        (self.kind & 0x7f, self.request)
    }
}

/// The endpoint address of control transfers, in both directions.
pub const CONTROL: u8 = 0x80;

/// The state of a control request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Done,
    /// The request is repeated, with the same arguments, when `reap` has returned the end of a
    /// transfer of [`CONTROL`].
    Pending,
}

/// The device does not support a request, or cannot do it: the request or the endpoint stalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall;

/// One transfer at an endpoint other than the control endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// bEndpointAddress: bit 7 says that data comes from the device.
    pub endpoint: u8,
    /// The guest's buffer: the data to send, or room for data to receive. A device that sends less
    /// ends the transfer with a short packet, which is not an error.
    pub pieces: Vec<Piece>,
    /// The sum of the lengths of the pieces.
    pub length: u32,
    /// The data of one interval of an isochronous endpoint, which may have many transfers.
    pub is_isochronous: bool,
}

impl Transfer {
    /// Whether data comes from the device.
    pub fn is_in(&self) -> bool {
        self.endpoint & 0x80 != 0
    }

    /// Copies the first bytes that the guest sends. Fails also if the guest sends fewer.
    pub fn read(&self, memory: &Memory, data: &mut [u8]) -> Result<(), NoMemory> {
        memory.gather(&self.pieces, data)
    }

    /// Copies data to the guest, up to the length of its buffer. Returns the number of bytes.
    pub fn write(&self, memory: &Memory, data: &[u8]) -> Result<u32, NoMemory> {
        let length = data.len().min(self.length as usize);
        memory.scatter(&self.pieces, &data[..length])?;
        Ok(u32::try_from(length).expect("at most a length of 32 bits"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The endpoint halts until the guest clears the halt ([`Change::Clear`]).
    Stall,
    /// The guest's buffer is not in memory.
    Memory,
    /// The device is absent, or does not answer.
    Gone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferEnd {
    pub endpoint: u8,
    /// The number of bytes that were transferred.
    pub result: Result<u32, Fault>,
}

/// An event of a device other than a transfer. `Reset` and `Configure` come while no transfer is in
/// progress, `Alternate` while none of its interface is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A bus reset. The device is as after power-on, and not configured.
    Reset,
    /// SET_CONFIGURATION. 0 means not configured.
    Configure(u8),
    /// SET_INTERFACE: the interface and its alternate setting.
    Alternate(u8, u8),
    /// CLEAR_FEATURE of ENDPOINT_HALT: the endpoint starts afresh. It need not be halted.
    Clear(u8),
    /// Cancels the transfers of this endpoint. If one is complete, `reap` returns it as usual.
    /// Otherwise the function forgets it, and does not touch its guest memory after this.
    Cancel(u8),
}

/// A USB device, as its controller sees it. The controller's thread calls it. Other events, such as
/// a key press or the completion of a disk request, make its event readable.
pub trait Function: Send {
    /// Handles a request to the control endpoint that `device.rs` does not answer: class and vendor
    /// requests, and other descriptors. If data goes from the device, it is put into `data`, which
    /// the controller cuts to `setup.length`. Otherwise `data` has the bytes from the guest.
    fn control(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<Progress, Stall>;
    fn change(&mut self, change: Change);
    /// Begins a transfer, the only one of its endpoint. `reap` returns it, at once or later. Those
    /// of an isochronous endpoint are returned in their order, and begin with the next `reap`.
    fn begin(&mut self, transfer: Transfer);
    /// Appends the completed transfers without waiting, and makes the event unreadable until there
    /// are more. Is also called when nothing has completed.
    fn reap(&mut self, done: &mut Vec<TransferEnd>);
    /// A file descriptor that is readable while there may be something to reap. Requested after
    /// each `run`. `None` if all transfers are complete when `begin` returns.
    fn event(&self) -> Option<BorrowedFd<'_>>;
    /// Stops all activity, as a [`Device`](crate::device::Device) does. Transfers in progress
    /// either end first, to be reaped once more, or are forgotten: the controller begins them again
    /// after `run`.
    fn park(&mut self) -> Saved;
    /// Continues from `saved`; `Saved::default()` is power-on. `memory` is the guest memory of all
    /// transfers.
    fn run(&mut self, saved: Saved, memory: &Memory) -> anyhow::Result<()>;
}
