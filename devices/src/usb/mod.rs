//! USB: what a device at a port is to its controller, and where devices are plugged in.
//!
//! The vocabulary of a USB device is [`Function`], with its [`Descriptors`]. The controller gives
//! it one transfer for each endpoint at a time, and looks for what is done when the function's
//! event says so: an endpoint that has nothing to say keeps its transfer, which is what a real one
//! does by NAK. What all devices have (addresses, configurations, halted endpoints, descriptors) is
//! in `device.rs` and not theirs to know.

mod descriptors;
mod device;
pub mod hid;
mod hub;
pub mod storage;
pub mod xhci;

use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};

use crate::device::Saved;
use host::memory::{Memory, NoMemory, Piece};

pub use descriptors::{Descriptors, Endpoint, Identity, Interface, Kind};
pub use hub::{Attached, Hub, Root, seat};

/// How fast a device talks (xHCI 7.2.2.1.1, the default speed IDs).
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
    /// bRequest.
    pub request: u8,
    /// wValue.
    pub value: u16,
    /// wIndex.
    pub index: u16,
    /// wLength.
    pub length: u16,
}

impl Setup {
    /// From its eight bytes.
    #[must_use]
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

    /// Data comes from the device.
    #[must_use]
    pub fn is_in(self) -> bool {
        self.kind & 0x80 != 0
    }

    /// bmRequestType without the direction, and bRequest: what a request is told by.
    #[must_use]
    pub fn what(self) -> (u8, u8) {
        (self.kind & 0x7f, self.request)
    }
}

/// The device does not know this, or cannot: the request, or the endpoint, stalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall;

/// One transfer at an endpoint other than the control endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// bEndpointAddress: bit 7 says that data comes from the device.
    pub endpoint: u8,
    /// Where the data is, or goes: as many bytes as the guest has, or has room for. Less than that
    /// from a device is a short packet, which is no fault.
    pub pieces: Vec<Piece>,
    /// Their sum.
    pub length: u32,
}

impl Transfer {
    /// Copies the first bytes of what the guest sends.
    ///
    /// # Errors
    ///
    /// When they are fewer, or not in memory.
    pub fn read(&self, memory: &Memory, data: &mut [u8]) -> Result<(), NoMemory> {
        memory.gather(&self.pieces, data)
    }

    /// Gives the guest these bytes, or as many as it has room for, and says how many those are.
    ///
    /// # Errors
    ///
    /// When the guest named what is no memory.
    pub fn write(&self, memory: &Memory, data: &[u8]) -> Result<u32, NoMemory> {
        let length = data.len().min(self.length as usize);
        memory.scatter(&self.pieces, &data[..length])?;
        Ok(u32::try_from(length).expect("at most a length of 32 bits"))
    }
}

/// Why a transfer did not end well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The endpoint halts until the guest clears that ([`Change::Clear`]).
    Stall,
    /// The guest named what is no memory.
    Memory,
    /// The device is not there, or does not answer.
    Gone,
}

/// The end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Whose.
    pub endpoint: u8,
    /// How many bytes went.
    pub result: Result<u32, Fault>,
}

/// What happens to a device beside transfers. All but `Clear` and `Cancel` come when no transfer is
/// under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// A reset of the bus: as after power-on, and not configured.
    Reset,
    /// SET_CONFIGURATION; 0 is none.
    Configure(u8),
    /// SET_INTERFACE: interface, and alternate setting.
    Alternate(u8, u8),
    /// The endpoint, which may be halted, starts afresh (CLEAR_FEATURE of ENDPOINT_HALT).
    Clear(u8),
    /// The transfer of this endpoint is to end. What is done already is told by `reap` as ever;
    /// else the function forgets it, and nothing touches the guest's memory for it after this.
    Cancel(u8),
}

/// A USB device, as its controller sees it. It lives on the controller's thread; what else can
/// happen to it (a key, a disk's completion) makes its event readable.
pub trait Function: Send {
    /// A request to the control endpoint that `device.rs` does not answer: those of classes and
    /// makers, and descriptors that it does not know. From the device: what it puts into `data`,
    /// which the controller cuts to `setup.length`. To the device: what came is in `data`.
    ///
    /// # Errors
    ///
    /// When there is no such request.
    fn control(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<(), Stall>;
    /// Something happened to the device.
    fn change(&mut self, change: Change);
    /// Takes a transfer, the only one of its endpoint. It ends with `reap`, at once or later.
    fn begin(&mut self, transfer: Transfer);
    /// Appends what ended by now, without waiting, and makes the event unreadable until there is
    /// more. Comes also when there is nothing.
    fn reap(&mut self, done: &mut Vec<Done>);
    /// Readable while there may be something to reap; asked for after each `run`. None of a
    /// function that is done with all transfers when `begin` returns.
    fn event(&self) -> Option<BorrowedFd<'_>>;
    /// Goes quiet, as a [`Device`](crate::device::Device) does. What is under way ends first, to be
    /// reaped once more, or is forgotten: the controller begins it again after `run`.
    fn park(&mut self) -> Saved;
    /// Runs on from `saved`; `Saved::default()` is power-on. The memory is what pieces lie in.
    ///
    /// # Errors
    ///
    /// When it cannot, or the state is damaged.
    fn run(&mut self, saved: Saved, memory: &Memory) -> anyhow::Result<()>;
}
