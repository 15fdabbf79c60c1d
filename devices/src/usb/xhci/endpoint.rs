//! Slots and endpoints, as the controller keeps them. The parts that the guest may see are also in
//! guest memory (output contexts).

use std::collections::{BTreeMap, VecDeque};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::context::{self, Context};
use super::registers::SLOTS;
use super::trb::{ISOCH, NORMAL, Ring, Trb};
use crate::usb::Setup;
use host::memory::Memory;

/// The maximum number of transfers in flight of an isochronous endpoint: 16 ms at least.
const MAX_FLIGHTS: usize = 128;

/// The state of an endpoint (Table 6-8). Disabled endpoints do not exist here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum State {
    Running = 1,
    Halted = 2,
    Stopped = 3,
    Error = 4,
}

/// A transfer descriptor (TD) that was taken from a ring.
#[derive(Clone, Debug)]
pub(super) struct Td {
    /// The TRBs with their addresses. There is at least one.
    pub(super) trbs: Vec<(u64, Trb)>,
    /// The ring position after the descriptor.
    pub(super) next: Ring,
}

impl Td {
    /// The total length of all buffers in bytes. There are at most 4096 TRBs of 128 KiB.
    pub(super) fn length(&self) -> u32 {
        self.trbs.iter().map(|(_, trb)| trb.length()).sum()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Endpoint {
    pub(super) state: State,
    pub(super) ring: Ring,
    /// The doorbell was rung: there may be TRBs in the ring.
    pub(super) rung: bool,
    /// The setup packet of a control transfer in progress.
    pub(super) setup: Option<Setup>,
    /// The device has handled the control transfer already.
    pub(super) answered: bool,
    /// The data of the control transfer for the device.
    pub(super) data: Vec<u8>,
    /// Each transfer is the data of an interval, and errors do not halt the endpoint.
    #[serde(default)]
    pub(super) is_isochronous: bool,
    /// The transfers that the device has now, in their order. After a pause, they are taken from
    /// the ring again.
    #[serde(skip)]
    pub(super) flights: VecDeque<Td>,
}

impl Endpoint {
    pub(super) fn new(context: &Context) -> Self {
        let pointer = context.pointer();
        Self {
            state: State::Running,
            ring: Ring::new(pointer),
            rung: false,
            setup: None,
            answered: false,
            data: Vec::new(),
            is_isochronous: context.is_isochronous(),
            flights: VecDeque::new(),
        }
    }

    /// The type of the first TRB of a descriptor.
    pub(super) fn data_kind(&self) -> u32 {
        if self.is_isochronous { ISOCH } else { NORMAL }
    }

    /// Whether the device takes another transfer now.
    pub(super) fn has_room(&self) -> bool {
        self.flights.len() < if self.is_isochronous { MAX_FLIGHTS } else { 1 }
    }

    /// The ring position of the first transfer that the device does not have.
    pub(super) fn position(&self) -> Ring {
        self.flights.back().map_or(self.ring, |td| td.next)
    }
}

/// A device slot that is enabled.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Slot {
    /// The address of the output context.
    pub(super) context: u64,
    /// The port of the device, counted from 0, from Address Device until the device is pulled.
    pub(super) port: Option<usize>,
    /// DEFAULT, ADDRESSED or CONFIGURED. 0 before Address Device.
    pub(super) state: u32,
    /// Endpoints by number (DCI). The control endpoint has 1. Others have twice their address, plus
    /// one if data goes from the device.
    pub(super) endpoints: BTreeMap<u8, Endpoint>,
}

impl Slot {
    pub(super) fn write_context(&self, memory: &Memory, number: u8) {
        // A context outside of memory is a mistake of the guest, which is ignored.
        let Ok(at) = context::offset(self.context, number) else { return };
        let Ok(mut context) = Context::read(memory, at) else { return };
        let endpoint = self.endpoints.get(&number);
        let state = endpoint.map_or(0, |it| it.state as u32);
        context.set_endpoint(state, endpoint.map_or(0, |it| it.ring.pointer()));
        context.write(memory, at).ok();
    }

    pub(super) fn write_slot_context(&self, memory: &Memory, number: u8) {
        let Ok(mut context) = Context::read(memory, self.context) else { return };
        let address = if self.state > context::DEFAULT { number } else { 0 };
        context.set_state(self.state, address);
        context.set_entries(self.endpoints.keys().max().copied().unwrap_or(0));
        context.write(memory, self.context).ok();
    }
}

/// Checks that a saved state contains only values that a guest could have caused.
pub(super) fn check(slots: &BTreeMap<u8, Slot>, ports: usize) -> anyhow::Result<()> {
    for (number, slot) in slots {
        ensure!((1..=SLOTS).contains(number), "there is no slot {number}");
        ensure!(slot.port.is_none_or(|port| port < ports), "slot {number}: no such port");
        ensure!(slot.state <= context::CONFIGURED, "slot {number}: no such state");
        let known = |number: &u8| (1..context::CONTEXTS).contains(number);
        ensure!(slot.endpoints.keys().all(known), "slot {number}: no such endpoint");
    }
    Ok(())
}

/// The bEndpointAddress of the endpoint of this number.
pub(super) fn address(number: u8) -> u8 {
    number >> 1 | (number & 1) << 7
}

pub(super) fn number(address: u8) -> u8 {
    (address & 0xf) << 1 | address >> 7
}
