//! Control requests. Most reach the device as they are; those that change the device as a whole are
//! the kernel's; those that change its address or its link are nobody's.

use host::usb::usbfs::{Ended, Kind, Order, Urb};

use crate::usb::{CONTROL, Setup, Stall};

/// bmRequestType without its direction: standard, and the recipient.
const TO_DEVICE: u8 = 0;
const TO_INTERFACE: u8 = 1;
const TO_ENDPOINT: u8 = 2;

/// bRequest.
const CLEAR_FEATURE: u8 = 1;
const SET_FEATURE: u8 = 3;
const SET_ADDRESS: u8 = 5;
const SET_CONFIGURATION: u8 = 9;
const SET_INTERFACE: u8 = 11;
const SET_SEL: u8 = 48;
const SET_ISOCH_DELAY: u8 = 49;

/// Features. Those of the link and of tests belong to the host.
const ENDPOINT_HALT: u16 = 0;
const FUNCTION_SUSPEND: u16 = 0;
const REMOTE_WAKEUP: u16 = 1;
const TEST_MODE: u16 = 2;

/// The bits of `bmRequestType` for the direction, and for the kind: 0 is standard.
const DIRECTION: u8 = 0x80;
const KIND: u8 = 0x60;

/// The length of a setup packet.
const SETUP: usize = 8;

/// How a request begins.
pub(super) enum Start {
    /// It has no effect.
    Nothing,
    Order(Order),
    Urb(Urb),
}

/// `data` are the bytes for the device.
pub(super) fn start(setup: Setup, data: &[u8], tag: u64) -> Result<Start, Stall> {
    let Setup { value, index, .. } = setup;
    let ([low, _], [which, _]) = (value.to_le_bytes(), index.to_le_bytes());
    let (target, request) = (setup.kind & !DIRECTION, setup.request);
    let test = request == SET_FEATURE && value == TEST_MODE;
    let elsewhere = request == SET_CONFIGURATION && target != TO_DEVICE;
    let standard = target & KIND == 0;
    // A device may ignore the recipient.
    if standard && (request == SET_ADDRESS || test || elsewhere || target > TO_ENDPOINT) {
        return Err(Stall);
    }
    // Without data, the direction has no meaning (USB 2.0, 9.3.1).
    if setup.is_in() && setup.length > 0 {
        return Ok(Start::Urb(urb(setup, data, tag)));
    }
    Ok(match (target, request) {
        (TO_DEVICE, SET_CONFIGURATION) => Start::Order(Order::Configure(low)),
        (TO_INTERFACE, SET_INTERFACE) => Start::Order(Order::Alternate(which, low)),
        (TO_ENDPOINT, CLEAR_FEATURE) if value == ENDPOINT_HALT => Start::Order(Order::Clear(which)),
        (TO_DEVICE, SET_FEATURE | CLEAR_FEATURE) if value != REMOTE_WAKEUP => Start::Nothing,
        (TO_INTERFACE, SET_FEATURE) if value == FUNCTION_SUSPEND => Start::Nothing,
        (TO_DEVICE, SET_SEL | SET_ISOCH_DELAY) => Start::Nothing,
        _ => Start::Urb(urb(setup, data, tag)),
    })
}

fn urb(setup: Setup, data: &[u8], tag: u64) -> Urb {
    let mut bytes = vec![setup.kind, setup.request];
    for word in [setup.value, setup.index, setup.length] {
        bytes.extend(word.to_le_bytes());
    }
    if !setup.is_in() {
        bytes.extend(data);
    }
    // A guest that sends less than it announced sends zeros.
    bytes.resize(SETUP + usize::from(setup.length), 0);
    Urb { kind: Kind::Control, endpoint: CONTROL, tag, data: bytes, packets: Vec::new() }
}

/// The guest's current control request.
#[derive(Debug, Default)]
pub(super) enum ControlRequest {
    #[default]
    None,
    Sent(Setup, u64),
    Ordered(Setup),
    Answered(Setup, Result<Vec<u8>, Stall>),
}

impl ControlRequest {
    pub(super) fn sent(&mut self, setup: Setup, tag: u64) {
        *self = Self::Sent(setup, tag);
    }

    pub(super) fn ordered(&mut self, setup: Setup) {
        *self = Self::Ordered(setup);
    }

    /// Takes the answer to this request, if there is one. An answer to another one is dropped.
    pub(super) fn answer(&mut self, setup: Setup) -> Option<Result<Vec<u8>, Stall>> {
        if !matches!(self, Self::Answered(..)) {
            return None;
        }
        match std::mem::take(self) {
            Self::Answered(of, answer) if of == setup => Some(answer),
            _ => None,
        }
    }

    pub(super) fn is_pending(&self, setup: Setup) -> bool {
        matches!(self, Self::Sent(of, _) | Self::Ordered(of) if *of == setup)
    }

    /// The tag of the request's URB.
    pub(super) fn tag(&self) -> Option<u64> {
        if let Self::Sent(_, tag) = self { Some(*tag) } else { None }
    }

    /// Takes the result of a URB. Returns false if it is of something else.
    pub(super) fn end(&mut self, ended: &Ended) -> bool {
        let Self::Sent(setup, tag) = *self else { return false };
        if tag != ended.tag {
            return false;
        }
        let data = ended.data.get(SETUP..).unwrap_or_default();
        let moved = data.get(..ended.moved).unwrap_or(data);
        let data = if setup.is_in() { moved.to_vec() } else { Vec::new() };
        *self = Self::Answered(setup, ended.result.map(|()| data).map_err(|_| Stall));
        true
    }

    /// An order that a reset gave is not the request's.
    pub(super) fn order_ended(&mut self, order: Order, good: bool) {
        if let Self::Ordered(setup) = *self
            && matches!(start(setup, &[], 0), Ok(Start::Order(of)) if of == order)
        {
            *self = Self::Answered(setup, if good { Ok(Vec::new()) } else { Err(Stall) });
        }
    }

    /// Fails a pending request. Returns false if there is none.
    pub(super) fn fail(&mut self) -> bool {
        let (Self::Sent(setup, _) | Self::Ordered(setup)) = *self else { return false };
        *self = Self::Answered(setup, Err(Stall));
        true
    }
}
