//! Slots and endpoints, as the controller has them. What of them the guest is to see is in its
//! memory too (output contexts).

use std::collections::BTreeMap;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::context::{self, Context};
use super::registers::SLOTS;
use super::trb::{Ring, Trb};
use crate::usb::Setup;
use host::memory::Memory;

/// What an endpoint does (Table 6-8); one that is disabled is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum State {
    Running = 1,
    Halted = 2,
    Stopped = 3,
    Error = 4,
}

/// A transfer descriptor that was taken from a ring.
#[derive(Clone, Debug)]
pub(super) struct Td {
    /// Its blocks and where they lie; at least one.
    pub(super) trbs: Vec<(u64, Trb)>,
    /// What comes after it.
    pub(super) next: Ring,
}

impl Td {
    /// Bytes of all buffers. There are 4096 blocks of 128 KiB at most.
    pub(super) fn length(&self) -> u32 {
        self.trbs.iter().map(|(_, trb)| trb.length()).sum()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Endpoint {
    pub(super) state: State,
    pub(super) ring: Ring,
    /// There may be something in the ring.
    pub(super) rung: bool,
    /// A control transfer that has begun, whether the device has done it, and the data for it.
    pub(super) setup: Option<Setup>,
    pub(super) answered: bool,
    pub(super) data: Vec<u8>,
    /// What the device has now. It is taken from the ring again after a pause.
    #[serde(skip)]
    pub(super) flight: Option<Td>,
}

impl Endpoint {
    pub(super) fn new(pointer: u64) -> Self {
        Self {
            state: State::Running,
            ring: Ring::new(pointer),
            rung: false,
            setup: None,
            answered: false,
            data: Vec::new(),
            flight: None,
        }
    }
}

/// A device slot that is enabled.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Slot {
    /// The output context.
    pub(super) context: u64,
    /// The port of its device, from 0 on: from when it was addressed until it is pulled.
    pub(super) port: Option<usize>,
    /// DEFAULT, ADDRESSED or CONFIGURED; 0 before.
    pub(super) state: u32,
    /// By number (DCI): 1 is the control endpoint, and every other has the double of its address,
    /// and one more if it is from the device.
    pub(super) endpoints: BTreeMap<u8, Endpoint>,
}

impl Slot {
    /// Shows the guest the state of an endpoint, and where it stands.
    pub(super) fn show(&self, memory: &Memory, number: u8) {
        // Contexts that are no memory any more are the guest's doing.
        let Ok(at) = context::offset(self.context, number) else { return };
        let Ok(mut context) = Context::read(memory, at) else { return };
        let endpoint = self.endpoints.get(&number);
        let state = endpoint.map_or(0, |it| it.state as u32);
        context.set_endpoint(state, endpoint.map_or(0, |it| it.ring.pointer()));
        context.write(memory, at).ok();
    }

    /// Shows the guest the state of the slot.
    pub(super) fn show_state(&self, memory: &Memory, number: u8) {
        let Ok(mut context) = Context::read(memory, self.context) else { return };
        let address = if self.state > context::DEFAULT { number } else { 0 };
        context.set_state(self.state, address);
        context.set_entries(self.endpoints.keys().max().copied().unwrap_or(0));
        context.write(memory, self.context).ok();
    }
}

/// That a saved state has nothing that a guest could not have made.
///
/// # Errors
///
/// When it has.
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

/// bEndpointAddress of the endpoint of this number.
pub(super) fn address(number: u8) -> u8 {
    number >> 1 | (number & 1) << 7
}

/// The number of the endpoint with this address.
pub(super) fn number(address: u8) -> u8 {
    (address & 0xf) << 1 | address >> 7
}
