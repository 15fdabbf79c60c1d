//! Human interface devices (HID 1.11). Each interface has one interrupt endpoint, which sends a
//! report after user input, or when the idle rate demands a repetition.
//!
//! Threats: data from the guest is at most one report long, and is parsed as such. User input that
//! the guest does not fetch is queued up to a limit.

pub mod keyboard;
mod media;
pub mod tablet;
mod usages;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::Context;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{
    Change, Descriptors, Endpoint, Fault, Function, Identity, Interface, Kind, Progress, Setup,
    Speed, Stall, Transfer, TransferEnd, plug_device,
};
use crate::device::{Device, Saved};
use crate::grants::Grants;
use host::input::{Event, Lights, Sink};
use host::memory::Memory;

/// The vendor and the product that QEMU uses.
const ADOMAX: u16 = 0x0627;
const PRODUCT: u16 = 0x0001;

/// The endpoint of the first interface. The next interface has the next endpoint. Each is polled
/// every millisecond (2^3 microframes).
const ENDPOINT: u8 = 0x81;
const INTERVAL: u8 = 4;
const PACKET: u16 = 8;

/// Class, and descriptor types (7.1).
const HID: u8 = 3;
const HID_DESCRIPTOR: u8 = 0x21;
const REPORT_DESCRIPTOR: u8 = 0x22;

/// bmRequestType without the direction: class and standard requests to an interface.
const CLASS: u8 = 0x21;
const STANDARD: u8 = 0x01;
/// bRequest (7.2).
const GET_REPORT: u8 = 1;
const GET_IDLE: u8 = 2;
const GET_PROTOCOL: u8 = 3;
const GET_DESCRIPTOR: u8 = 6;
const SET_REPORT: u8 = 9;
const SET_IDLE: u8 = 10;
const SET_PROTOCOL: u8 = 11;
/// The upper half of wValue: an input report.
const INPUT: u8 = 1;

/// The parts that differ between devices. The default is the state after power-on.
trait Model: Clone + Default + Serialize + DeserializeOwned + Send + 'static {
    /// The report descriptor (6.2.2) of each interface.
    const REPORTS: &'static [&'static [u8]];
    /// Returns false if the event is not for this kind of device.
    fn take(&mut self, event: Event) -> bool;
    /// The next report of this interface with a change.
    fn next_report(&mut self, interface: usize) -> Option<Vec<u8>>;
    /// The last report of this interface and report ID (0 where reports have no ID) again.
    fn last_report(&self, interface: usize, number: u8) -> Option<Vec<u8>>;
    /// Handles an output report of the first interface.
    fn output(&mut self, _: &[u8]) {}
    fn lights(&self) -> Option<Lights> {
        None
    }
    /// Whether the guest has fetched all input.
    fn is_idle(&self) -> bool {
        true
    }
    /// See [`Sink::has_room`].
    fn has_room(&self) -> bool {
        true
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct State<M> {
    configured: bool,
    /// The idle rate of the first interface in units of 4 ms. 0: no repetition. Other interfaces
    /// have no idle rate.
    idle: u8,
    /// The protocol of the first interface. 1: the report protocol, which equals the boot protocol
    /// for these devices.
    protocol: u8,
    model: M,
}

impl<M: Model> Default for State<M> {
    fn default() -> Self {
        Self { configured: false, idle: 0, protocol: 1, model: M::default() }
    }
}

struct Inner<M> {
    state: State<M>,
    /// `None` while parked. The device then takes no input from the host.
    memory: Option<Memory>,
    /// Transfers of the guest that wait for a report, one per endpoint.
    pending: Vec<Transfer>,
    /// The idle rate demands a report of the first interface, even without a change.
    due: bool,
}

/// The state shared between the controller's thread and the host's input.
struct Shared<M> {
    inner: Mutex<Inner<M>>,
    /// Readable when a report is due: after input, or by the idle rate.
    timer: OwnedFd,
}

impl<M: Model> Shared<M> {
    fn new() -> anyhow::Result<Self> {
        let inner =
            Inner { state: State::default(), memory: None, pending: Vec::new(), due: false };
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags);
        let timer = timer.context("a timer for an input device")?;
        Ok(Self { inner: Mutex::new(inner), timer })
    }

    fn inner(&self) -> MutexGuard<'_, Inner<M>> {
        self.inner.lock().expect("no device panicked")
    }

    /// Makes the timer readable after this time, or never.
    fn wake(&self, after: Option<Duration>) {
        // A time of zero would disarm the timer.
        let after = after.map_or(Duration::ZERO, |it| it.max(Duration::from_nanos(1)));
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec::try_from(after).unwrap_or(none);
        let once = Itimerspec { it_interval: none, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once).ok();
    }

    /// Starts the timer for the repetition of the last report.
    fn start_idle(&self, idle: u8) {
        self.wake(Some(Duration::from_millis(4 * u64::from(idle))).filter(|it| !it.is_zero()));
    }
}

impl<M: Model> Sink for Shared<M> {
    fn take(&self, event: Event) -> bool {
        let mut inner = self.inner();
        let listens = inner.memory.is_some() && inner.state.configured;
        let taken = listens && inner.state.model.take(event);
        if taken {
            self.wake(Some(Duration::ZERO));
        }
        taken
    }

    fn lights(&self) -> Option<Lights> {
        let inner = self.inner();
        inner.state.model.lights().filter(|_| inner.memory.is_some() && inner.state.configured)
    }

    fn is_idle(&self) -> bool {
        self.inner().state.model.is_idle()
    }

    fn has_room(&self) -> bool {
        self.inner().state.model.has_room()
    }
}

/// The function of the device, on the controller's thread.
struct Hid<M> {
    shared: Arc<Shared<M>>,
    done: Vec<TransferEnd>,
}

impl<M: Model> Hid<M> {
    /// Completes pending transfers for which there is a report.
    fn answer(&mut self) {
        let mut inner = self.shared.inner();
        let inner = &mut *inner;
        let Some(memory) = &inner.memory else { return };
        let mut reported = false;
        for transfer in std::mem::take(&mut inner.pending) {
            let endpoint = transfer.endpoint;
            let interface = usize::from(endpoint.saturating_sub(ENDPOINT));
            let fresh = inner.state.model.next_report(interface);
            let due = inner.due && interface == 0;
            let again = || due.then(|| inner.state.model.last_report(0, 0)).flatten();
            let Some(report) = fresh.or_else(again) else {
                inner.pending.push(transfer);
                continue;
            };
            if interface == 0 {
                (inner.due, reported) = (false, true);
            }
            let result = transfer.write(memory, &report).map_err(|_| Fault::Memory);
            self.done.push(TransferEnd { endpoint, result });
        }
        if reported {
            self.shared.start_idle(inner.state.idle);
        }
    }

    fn class(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<Progress, Stall> {
        let [low, high] = setup.value.to_le_bytes();
        let interface = usize::from(setup.index);
        let mut inner = self.shared.inner();
        let state = &mut inner.state;
        if setup.is_in() && setup.request == GET_REPORT && high == INPUT {
            *data = state.model.last_report(interface, low).ok_or(Stall)?;
            return Ok(Progress::Done);
        }
        // The other requests are for boot devices, which only the first interface may be (7.2).
        if interface != 0 {
            return Err(Stall);
        }
        match (setup.is_in(), setup.request) {
            (true, GET_IDLE) => data.push(state.idle),
            (true, GET_PROTOCOL) => data.push(state.protocol),
            (false, SET_REPORT) => state.model.output(data),
            (false, SET_IDLE) => {
                state.idle = high;
                // Wakes at once, because the timer may have been set for pending user input.
                self.shared.wake(Some(Duration::ZERO));
            }
            (false, SET_PROTOCOL) if low < 2 => state.protocol = low,
            _ => return Err(Stall),
        }
        Ok(Progress::Done)
    }
}

impl<M: Model> Function for Hid<M> {
    fn control(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<Progress, Stall> {
        let [_, kind] = setup.value.to_le_bytes();
        let report = M::REPORTS.get(usize::from(setup.index));
        match (setup.kind_and_request(), report) {
            ((STANDARD, GET_DESCRIPTOR), Some(report)) if kind == HID_DESCRIPTOR => {
                *data = descriptor(report);
            }
            ((STANDARD, GET_DESCRIPTOR), Some(report)) if kind == REPORT_DESCRIPTOR => {
                *data = report.to_vec();
            }
            ((CLASS, _), Some(_)) => return self.class(setup, data),
            _ => return Err(Stall),
        }
        Ok(Progress::Done)
    }

    fn change(&mut self, change: Change) {
        let mut inner = self.shared.inner();
        match change {
            Change::Reset => inner.state = State::default(),
            Change::Configure(number) => {
                inner.state = State { configured: number > 0, ..State::default() };
            }
            Change::Cancel(endpoint) => inner.pending.retain(|it| it.endpoint != endpoint),
            Change::Alternate(..) | Change::Clear(_) => {}
        }
    }

    fn begin(&mut self, transfer: Transfer) {
        self.shared.inner().pending.push(transfer);
        self.answer();
    }

    fn reap(&mut self, done: &mut Vec<TransferEnd>) {
        let mut count = [0; 8];
        if rustix::io::read(&self.shared.timer, &mut count).is_ok() {
            // After input as well as by the idle rate: reports with changes go first.
            let mut inner = self.shared.inner();
            inner.due = inner.state.idle > 0;
            drop(inner);
            self.answer();
        }
        done.append(&mut self.done);
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.shared.timer.as_fd())
    }

    fn park(&mut self) -> Saved {
        let mut inner = self.shared.inner();
        (inner.memory, inner.pending) = (None, Vec::new());
        Saved::of(&inner.state)
    }

    fn run(&mut self, saved: Saved, memory: &Memory) -> anyhow::Result<()> {
        let state: Option<State<M>> = saved.take()?;
        let mut inner = self.shared.inner();
        inner.state = state.unwrap_or_default();
        inner.memory = Some(memory.clone());
        self.shared.start_idle(inner.state.idle);
        Ok(())
    }
}

/// The HID descriptor (6.2.1): HID 1.11, no country, one report descriptor.
fn descriptor(report: &[u8]) -> Vec<u8> {
    let length = u16::try_from(report.len()).expect("our reports are short").to_le_bytes();
    vec![9, HID_DESCRIPTOR, 0x11, 0x01, 0, 1, REPORT_DESCRIPTOR, length[0], length[1]]
}

/// Plugs in a device. `boot` is the subclass and the protocol of the first interface, for boot
/// devices (4.2, 4.3).
fn build<M: Model>(
    grants: &dyn Grants,
    name: &str,
    boot: (u8, u8),
) -> anyhow::Result<Box<dyn Device>> {
    let interface = |(number, report): (u8, &&[u8])| {
        let (subclass, protocol) = if number == 0 { boot } else { (0, 0) };
        let endpoint = Endpoint {
            address: ENDPOINT + number,
            kind: Kind::Interrupt,
            packet: PACKET,
            interval: INTERVAL,
        };
        Interface {
            number,
            alternate: 0,
            class: (HID, subclass, protocol),
            extra: descriptor(report),
            endpoints: vec![endpoint],
        }
    };
    let interfaces = (0..).zip(M::REPORTS).map(interface).collect();
    let identity = Identity {
        vendor: ADOMAX,
        product: PRODUCT,
        maker: "Transom".into(),
        name: name.into(),
        serial: grants.name().into(),
    };
    let descriptors = Descriptors::new(Speed::High, identity, interfaces);
    let shared = Arc::new(Shared::<M>::new()?);
    let sink: Arc<dyn Sink> = shared.clone();
    let input = grants.shared().input.clone();
    input.register(sink.clone());
    let release = Box::new(move || input.unregister(&sink));
    let hub = grants.shared().usb.clone();
    let function = Box::new(Hid { shared, done: Vec::new() });
    plug_device(hub, grants.name(), descriptors, function, release)
}
