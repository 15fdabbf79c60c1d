//! The parts that all USB devices share: standard requests (USB 2.0, 9.4), configurations and
//! halted endpoints, around the [`Function`](super::Function). Every device has one configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::descriptors::{BOS, CONFIGURATION, DEVICE, QUALIFIER, STRING};
use super::{
    Attached, CONTROL, Change, Fault, Progress, Setup, Speed, Stall, Transfer, TransferEnd,
};
use crate::device::Saved;
use host::memory::Memory;

/// bmRequestType without its direction: standard, and the recipient.
const TO_DEVICE: u8 = 0;
const TO_INTERFACE: u8 = 1;
const TO_ENDPOINT: u8 = 2;

/// bRequest.
const GET_STATUS: u8 = 0;
const CLEAR_FEATURE: u8 = 1;
const SET_FEATURE: u8 = 3;
const GET_DESCRIPTOR: u8 = 6;
const GET_CONFIGURATION: u8 = 8;
const SET_CONFIGURATION: u8 = 9;
const GET_INTERFACE: u8 = 10;
const SET_INTERFACE: u8 = 11;
const SET_SEL: u8 = 48;
const SET_ISOCH_DELAY: u8 = 49;

/// Features.
const ENDPOINT_HALT: u16 = 0;
const FUNCTION_SUSPEND: u16 = 0;
const U1_ENABLE: u16 = 48;
const U2_ENABLE: u16 = 49;

/// GET_STATUS of a device: self-powered; the device may begin U1, and U2.
const SELF_POWERED: u8 = 1 << 0;
const U1_ENABLED: u8 = 1 << 2;
const U2_ENABLED: u8 = 1 << 3;

/// The mutable state of a device besides its function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct State {
    configuration: u8,
    /// Alternate settings by interface, where they are not 0.
    alternates: BTreeMap<u8, u8>,
    halted: BTreeSet<u8>,
    /// [`U1_ENABLED`] and [`U2_ENABLED`], which are only stored: links save no power.
    link_power: u8,
}

/// The saved state of a device. The name prevents another device from getting it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedState {
    name: String,
    state: State,
    function: Saved,
}

impl SavedState {
    pub(super) fn is_of(&self, attached: &Attached) -> bool {
        self.name == attached.name
    }
}

/// A device at a port, while the controller runs.
pub(super) struct Device {
    attached: Arc<Attached>,
    state: State,
    /// The number of transfers in progress by endpoint, where there are any.
    busy: BTreeMap<u8, usize>,
    /// Aborted transfers that were not reaped yet.
    lost: Vec<TransferEnd>,
}

impl Device {
    pub(super) fn run(
        attached: Arc<Attached>,
        saved: Option<SavedState>,
        memory: &Memory,
    ) -> anyhow::Result<Self> {
        let name = attached.name.clone();
        let (state, function) = match saved {
            None => Default::default(),
            Some(saved) => (saved.state, saved.function),
        };
        attached.function().run(function, memory).context(name)?;
        Ok(Self { attached, state, busy: BTreeMap::new(), lost: Vec::new() })
    }

    /// Stops all activity. Appends completed transfers to `done`; the others must begin again.
    pub(super) fn park(mut self, done: &mut Vec<TransferEnd>) -> SavedState {
        let function = self.attached.function().park();
        self.reap(done);
        SavedState { name: self.attached.name.clone(), state: self.state, function }
    }

    pub(super) fn is_same_device(&self, attached: &Arc<Attached>) -> bool {
        Arc::ptr_eq(&self.attached, attached)
    }

    pub(super) fn speed(&self) -> Speed {
        self.attached.descriptors.speed
    }

    pub(super) fn watch(&self, watch: impl FnOnce(Option<BorrowedFd<'_>>)) {
        watch(self.attached.function().event());
    }

    pub(super) fn reset(&mut self) {
        self.abort(|_| true);
        self.state = State::default();
        self.change(Change::Reset);
    }

    /// Aborts the transfers of these endpoints, because the setting that they were for has ended.
    fn abort(&mut self, which: impl Fn(u8) -> bool) {
        let busy: Vec<u8> = self.busy.keys().copied().filter(|it| which(*it)).collect();
        for endpoint in &busy {
            self.change(Change::Cancel(*endpoint));
        }
        let mut done = Vec::new();
        self.reap(&mut done);
        for endpoint in busy {
            let left = self.busy.remove(&endpoint).unwrap_or(0);
            let gone = TransferEnd { endpoint, result: Err(Fault::Gone) };
            done.extend(std::iter::repeat_n(gone, left));
        }
        self.lost = done;
    }

    /// Fails if the endpoint does not exist, is busy or is halted. The transfer has then ended.
    pub(super) fn begin(&mut self, transfer: Transfer) -> Result<(), Fault> {
        let endpoint = transfer.endpoint;
        let descriptors = &self.attached.descriptors;
        let known = self.state.configuration > 0 && descriptors.has(endpoint);
        // None of our own devices has an isochronous endpoint.
        let known = known && !transfer.is_isochronous || descriptors.is_transparent;
        if !known || self.busy.contains_key(&endpoint) && !transfer.is_isochronous {
            return Err(Fault::Gone);
        }
        if self.state.halted.contains(&endpoint) {
            return Err(Fault::Stall);
        }
        *self.busy.entry(endpoint).or_default() += 1;
        self.attached.function().begin(transfer);
        Ok(())
    }

    /// A transfer that was complete already is appended to `done`.
    pub(super) fn cancel(&mut self, endpoint: u8, done: &mut Vec<TransferEnd>) {
        if self.busy.contains_key(&endpoint) {
            self.change(Change::Cancel(endpoint));
            self.reap(done);
            self.busy.remove(&endpoint);
        }
    }

    pub(super) fn reap(&mut self, done: &mut Vec<TransferEnd>) {
        done.append(&mut self.lost);
        let before = done.len();
        self.attached.function().reap(done);
        for it in &done[before..] {
            if let Some(count) = self.busy.get_mut(&it.endpoint) {
                // A request that waits for an order ends twice if the device is lost meanwhile.
                *count = count.saturating_sub(1);
            }
            let halts = !self.attached.descriptors.is_transparent;
            if halts && it.result == Err(Fault::Stall) {
                self.state.halted.insert(it.endpoint);
            }
        }
        self.busy.retain(|_, count| *count > 0);
    }

    /// The answer is cut to the requested length.
    pub(super) fn control(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<Progress, Stall> {
        let standard = setup.kind & 0x60 == 0 && !self.attached.descriptors.is_transparent;
        let answered = standard && self.standard(setup, data)?;
        if !answered && self.attached.function().control(setup, data)? == Progress::Pending {
            self.busy.insert(CONTROL, 1);
            return Ok(Progress::Pending);
        }
        if setup.is_in() {
            data.truncate(setup.length.into());
        }
        Ok(Progress::Done)
    }

    /// Returns false if the function must handle the request.
    fn standard(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<bool, Stall> {
        let Setup { value, index, .. } = setup;
        let [low, high] = value.to_le_bytes();
        match (setup.is_in(), setup.kind_and_request()) {
            (true, (TO_DEVICE, GET_DESCRIPTOR)) => *data = self.descriptor(high, low)?,
            (true, (TO_DEVICE, GET_CONFIGURATION)) => data.push(self.state.configuration),
            (false, (TO_DEVICE, SET_CONFIGURATION)) => self.configure(low)?,
            (true, (TO_DEVICE, GET_STATUS)) => {
                data.extend([SELF_POWERED | self.state.link_power, 0]);
            }
            (true, (TO_INTERFACE, GET_STATUS)) => data.extend([0, 0]),
            (true, (TO_ENDPOINT, GET_STATUS)) => {
                let halted = self.state.halted.contains(&endpoint_of(index));
                data.extend([u8::from(halted), 0]);
            }
            (false, (TO_ENDPOINT, CLEAR_FEATURE)) if value == ENDPOINT_HALT => {
                self.state.halted.remove(&endpoint_of(index));
                self.change(Change::Clear(endpoint_of(index)));
            }
            (false, (TO_ENDPOINT, SET_FEATURE)) if value == ENDPOINT_HALT => {
                let endpoint = endpoint_of(index);
                if !self.attached.descriptors.has(endpoint) {
                    return Err(Stall);
                }
                self.state.halted.insert(endpoint);
            }
            (false, (TO_DEVICE, SET_FEATURE | CLEAR_FEATURE)) => {
                self.enable_link_power(value, setup.request == SET_FEATURE)?;
            }
            // Suspending a USB 3 function has no effect.
            (false, (TO_INTERFACE, SET_FEATURE | CLEAR_FEATURE))
                if value == FUNCTION_SUSPEND && self.speed() == Speed::Super => {}
            // Latencies matter only for saving power.
            (false, (TO_DEVICE, SET_SEL | SET_ISOCH_DELAY)) if self.speed() == Speed::Super => {}
            (true, (TO_INTERFACE, GET_INTERFACE)) => {
                let [number, _] = index.to_le_bytes();
                data.push(self.state.alternates.get(&number).copied().unwrap_or(0));
            }
            (false, (TO_INTERFACE, SET_INTERFACE)) => {
                self.alternate(index.to_le_bytes()[0], low)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The features of a USB 3 device once it is configured (USB 3.2, 9.4.9).
    fn enable_link_power(&mut self, feature: u16, enable: bool) -> Result<(), Stall> {
        let bit = match feature {
            U1_ENABLE => U1_ENABLED,
            U2_ENABLE => U2_ENABLED,
            _ => return Err(Stall),
        };
        if self.speed() != Speed::Super || self.state.configuration == 0 {
            return Err(Stall);
        }
        let others = self.state.link_power & !bit;
        self.state.link_power = others | if enable { bit } else { 0 };
        Ok(())
    }

    fn descriptor(&self, kind: u8, number: u8) -> Result<Vec<u8>, Stall> {
        let all = &self.attached.descriptors;
        match (kind, number) {
            (DEVICE, _) => Some(all.device.clone()),
            (CONFIGURATION, 0) => Some(all.configuration.clone()),
            (QUALIFIER, _) => all.qualifier.clone(),
            (BOS, _) => all.bos.clone(),
            (STRING, number) => all.string(number),
            _ => None,
        }
        .ok_or(Stall)
    }

    fn configure(&mut self, number: u8) -> Result<(), Stall> {
        if number > 1 {
            return Err(Stall);
        }
        self.abort(|_| true);
        self.state = State { configuration: number, ..State::default() };
        self.change(Change::Configure(number));
        Ok(())
    }

    fn alternate(&mut self, number: u8, setting: u8) -> Result<(), Stall> {
        let interfaces = &self.attached.descriptors.interfaces;
        let all = interfaces.iter().filter(|it| it.number == number);
        let exists = all.clone().any(|it| it.alternate == setting);
        if !exists || self.state.configuration == 0 {
            return Err(Stall);
        }
        let endpoints: BTreeSet<u8> =
            all.flat_map(|it| &it.endpoints).map(|it| it.address).collect();
        self.state.halted.retain(|it| !endpoints.contains(it));
        self.abort(|endpoint| endpoints.contains(&endpoint));
        self.state.alternates.insert(number, setting);
        self.change(Change::Alternate(number, setting));
        Ok(())
    }

    fn change(&mut self, change: Change) {
        self.attached.function().change(change);
    }
}

/// The endpoint address in wIndex: its low byte.
fn endpoint_of(index: u16) -> u8 {
    index.to_le_bytes()[0]
}
