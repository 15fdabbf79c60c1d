//! Human interface devices (HID 1.11): one interface with one interrupt endpoint, over which
//! reports go when a person did something, or when the idle rate has them repeated.
//!
//! Threats: what the guest sends is at most a report long, and looked at as such. What people do
//! piles up to a small bound when the guest does not ask for it.

pub mod keyboard;
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
    Change, Descriptors, Done, Endpoint, Fault, Function, Identity, Interface, Kind, Setup, Speed,
    Stall, Transfer, seat,
};
use crate::device::{Device, Place, Saved};
use crate::input::{Event, Lights, Sink};
use crate::memory::Memory;

/// As QEMU's: the vendor, and the product.
const ADOMAX: u16 = 0x0627;
const PRODUCT: u16 = 0x0001;

/// The one endpoint, asked each millisecond (2^3 microframes).
const ENDPOINT: u8 = 0x81;
const INTERVAL: u8 = 4;
const PACKET: u16 = 8;

/// Class, and descriptor types (7.1).
const HID: u8 = 3;
const HID_DESCRIPTOR: u8 = 0x21;
const REPORT_DESCRIPTOR: u8 = 0x22;

/// bmRequestType without its direction: to an interface, of its class or standard.
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
/// wValue's upper half: an input report.
const INPUT: u8 = 1;

/// What differs from device to device. Its default is power-on.
trait Model: Clone + Default + Serialize + DeserializeOwned + Send + 'static {
    /// Its report descriptor (6.2.2).
    const REPORT: &'static [u8];
    /// Takes what a person did; false when it is not for such a device.
    fn take(&mut self, event: Event) -> bool;
    /// The next report that says something new.
    fn next(&mut self) -> Option<Vec<u8>>;
    /// The last report, again.
    fn again(&self) -> Vec<u8>;
    /// An output report.
    fn output(&mut self, _: &[u8]) {}
    /// Its lights.
    fn lights(&self) -> Option<Lights> {
        None
    }
    /// Whether the guest has fetched all that was taken.
    fn is_idle(&self) -> bool {
        true
    }
}

/// What of it changes.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct State<M> {
    configured: bool,
    /// In steps of 4 ms; 0 is never.
    idle: u8,
    /// 1: reports are as the descriptor says, which is as at boot for these devices.
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
    /// Parked, it takes nothing from the host's side.
    memory: Option<Memory>,
    /// The guest waits for a report.
    asked: Option<Transfer>,
    /// A report is due although nothing is new.
    due: bool,
}

/// Where the host's side is plugged in.
struct Plug<M> {
    inner: Mutex<Inner<M>>,
    /// Readable when there is a report: at once, or when the idle rate says so.
    timer: OwnedFd,
}

impl<M: Model> Plug<M> {
    fn new() -> anyhow::Result<Self> {
        let inner = Inner { state: State::default(), memory: None, asked: None, due: false };
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags);
        let timer = timer.context("a timer for an input device")?;
        Ok(Self { inner: Mutex::new(inner), timer })
    }

    fn inner(&self) -> MutexGuard<'_, Inner<M>> {
        self.inner.lock().expect("no device panicked")
    }

    /// Makes the timer readable then, or never.
    fn wake(&self, after: Option<Duration>) {
        // All zeros would be no moment at all.
        let after = after.map_or(Duration::ZERO, |it| it.max(Duration::from_nanos(1)));
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec::try_from(after).unwrap_or(none);
        let once = Itimerspec { it_interval: none, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once).ok();
    }

    /// When the last report is to be repeated.
    fn rest(&self, idle: u8) {
        self.wake(Some(Duration::from_millis(4 * u64::from(idle))).filter(|it| !it.is_zero()));
    }
}

impl<M: Model> Sink for Plug<M> {
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
}

/// The device, as its controller has it.
struct Hid<M> {
    plug: Arc<Plug<M>>,
    done: Vec<Done>,
}

impl<M: Model> Hid<M> {
    /// Answers a guest that waits, if there is something to say.
    fn answer(&mut self) {
        let mut inner = self.plug.inner();
        let inner = &mut *inner;
        let (Some(memory), true) = (&inner.memory, inner.asked.is_some()) else { return };
        let fresh = inner.state.model.next();
        let again = || inner.due.then(|| inner.state.model.again());
        let Some(report) = fresh.or_else(again) else { return };
        let Some(transfer) = inner.asked.take() else { return };
        inner.due = false;
        let result = transfer.write(memory, &report).map_err(|_| Fault::Memory);
        self.done.push(Done { endpoint: ENDPOINT, result });
        self.plug.rest(inner.state.idle);
    }

    fn class(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<(), Stall> {
        let [low, high] = setup.value.to_le_bytes();
        let mut inner = self.plug.inner();
        let state = &mut inner.state;
        match (setup.is_in(), setup.request) {
            (true, GET_REPORT) if high == INPUT => *data = state.model.again(),
            (true, GET_IDLE) => data.push(state.idle),
            (true, GET_PROTOCOL) => data.push(state.protocol),
            (false, SET_REPORT) => state.model.output(data),
            (false, SET_IDLE) => {
                state.idle = high;
                // Not just from the last report on: what wakes us now may be a person.
                self.plug.wake(Some(Duration::ZERO));
            }
            (false, SET_PROTOCOL) if low < 2 => state.protocol = low,
            _ => return Err(Stall),
        }
        Ok(())
    }
}

impl<M: Model> Function for Hid<M> {
    fn control(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<(), Stall> {
        let [_, kind] = setup.value.to_le_bytes();
        match setup.what() {
            (STANDARD, GET_DESCRIPTOR) if kind == HID_DESCRIPTOR => *data = descriptor::<M>(),
            (STANDARD, GET_DESCRIPTOR) if kind == REPORT_DESCRIPTOR => *data = M::REPORT.to_vec(),
            (CLASS, _) => return self.class(setup, data),
            _ => return Err(Stall),
        }
        Ok(())
    }

    fn change(&mut self, change: Change) {
        let mut inner = self.plug.inner();
        match change {
            Change::Reset => inner.state = State::default(),
            Change::Configure(number) => {
                inner.state = State { configured: number > 0, ..State::default() };
            }
            Change::Cancel(_) => inner.asked = None,
            Change::Alternate(..) | Change::Clear(_) => {}
        }
    }

    fn begin(&mut self, transfer: Transfer) {
        self.plug.inner().asked = Some(transfer);
        self.answer();
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut count = [0; 8];
        if rustix::io::read(&self.plug.timer, &mut count).is_ok() {
            // Whether a person or the idle rate woke us: what is new goes first.
            let mut inner = self.plug.inner();
            inner.due = inner.state.idle > 0;
            drop(inner);
            self.answer();
        }
        done.append(&mut self.done);
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.plug.timer.as_fd())
    }

    fn park(&mut self) -> Saved {
        let mut inner = self.plug.inner();
        (inner.memory, inner.asked) = (None, None);
        Saved::of(&inner.state)
    }

    fn run(&mut self, saved: Saved, memory: &Memory) -> anyhow::Result<()> {
        let state: Option<State<M>> = saved.take()?;
        let mut inner = self.plug.inner();
        inner.state = state.unwrap_or_default();
        inner.memory = Some(memory.clone());
        self.plug.rest(inner.state.idle);
        Ok(())
    }
}

/// The HID descriptor (6.2.1): HID 1.11, no country, one report descriptor.
fn descriptor<M: Model>() -> Vec<u8> {
    let length = u16::try_from(M::REPORT.len()).expect("ours are short").to_le_bytes();
    vec![9, HID_DESCRIPTOR, 0x11, 0x01, 0, 1, REPORT_DESCRIPTOR, length[0], length[1]]
}

/// Plugs in such a device; subclass and protocol are those of boot devices (4.2, 4.3).
fn build<M: Model>(
    place: &dyn Place,
    name: &str,
    boot: (u8, u8),
) -> anyhow::Result<Box<dyn Device>> {
    let endpoint =
        Endpoint { address: ENDPOINT, kind: Kind::Interrupt, packet: PACKET, interval: INTERVAL };
    let interface = Interface {
        number: 0,
        alternate: 0,
        class: (HID, boot.0, boot.1),
        extra: descriptor::<M>(),
        endpoints: vec![endpoint],
    };
    let identity = Identity {
        vendor: ADOMAX,
        product: PRODUCT,
        maker: "Transom".into(),
        name: name.into(),
        serial: place.name().into(),
    };
    let descriptors = Descriptors::new(Speed::High, identity, vec![interface]);
    let plug = Arc::new(Plug::<M>::new()?);
    let sink: Arc<dyn Sink> = plug.clone();
    let input = place.shared().input.clone();
    input.register(sink.clone());
    let leave = Box::new(move || input.forget(&sink));
    seat(place, descriptors, Box::new(Hid { plug, done: Vec::new() }), leave)
}
