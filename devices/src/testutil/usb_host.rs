//! A USB device of the host that a test controls, in place of usbfs.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use host::usb::usbfs::{Ended, Handle, Order, Speed, Urb};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use serde_json::json;

use super::Bench;
use crate::registry::Config;
use crate::usb::passthrough::Source;

/// The largest count of an eventfd, with which it is not writable.
const FULL: u64 = u64::MAX - 1;

/// Answers a URB when it is submitted. `None` leaves it in flight.
pub type Answer = Box<dyn FnMut(&Urb) -> Option<Ended> + Send>;
/// The result of an order.
pub type Obey = Box<dyn FnMut(Order) -> Result<(), Errno> + Send>;

struct State {
    answer: Answer,
    flying: Vec<Urb>,
    ended: VecDeque<Ended>,
    orders: Vec<Order>,
    gone: bool,
}

pub struct FakeUsb {
    state: Mutex<State>,
    /// As the kernel's lock on a device: an order holds it, however long it takes.
    obey: Mutex<Obey>,
    /// Writable while something has ended.
    event: OwnedFd,
}

/// The result of a URB that moved these bytes.
pub fn ended(urb: &Urb, result: Result<(), Errno>, moved: &[u8]) -> Ended {
    let (mut data, setup) = (urb.data.clone(), if urb.endpoint == 0x80 { 8 } else { 0 });
    if let Some(room) = data.get_mut(setup..setup + moved.len()) {
        room.copy_from_slice(moved);
    }
    Ended { tag: urb.tag, result, data, moved: moved.len(), packets: Vec::new() }
}

impl FakeUsb {
    pub fn new(answer: Answer, obey: Obey) -> Arc<Self> {
        let event = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let state = State {
            answer,
            flying: Vec::new(),
            ended: VecDeque::new(),
            orders: Vec::new(),
            gone: false,
        };
        let fake = Self { state: Mutex::new(state), obey: Mutex::new(obey), event };
        fake.signal(&fake.state());
        Arc::new(fake)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panicked")
    }

    /// Waits for the order that is carried out.
    fn wait(&self) {
        drop(self.obey.lock().expect("no test panicked"));
    }

    fn signal(&self, state: &State) {
        rustix::io::read(&self.event, &mut [0; 8]).ok();
        if state.ended.is_empty() && !state.gone {
            rustix::io::write(&self.event, &FULL.to_ne_bytes()).ok();
        }
    }

    /// Plugs it into a machine, and returns the machine's name for it.
    pub fn plug(self: &Arc<Self>, bench: &mut Bench, speed: Speed) -> anyhow::Result<()> {
        let config = Config::of_kind("usb-host", json!({})).expect("a kind");
        let Config::UsbHost(mut config) = config.expect("no fields") else {
            unreachable!("another kind")
        };
        config.source = Source::Fake(self.clone(), speed);
        bench.board.add("usb-host", |grants| Config::UsbHost(config).build(grants))
    }

    /// The device was unplugged at the host.
    pub fn unplug(&self) {
        let mut state = self.state();
        state.gone = true;
        self.signal(&state);
    }

    /// Ends the oldest transfer of this endpoint. Returns false if there is none.
    pub fn end(&self, endpoint: u8, result: Result<(), Errno>, moved: &[u8]) -> bool {
        let mut state = self.state();
        let Some(at) = state.flying.iter().position(|it| it.endpoint == endpoint) else {
            return false;
        };
        let urb = state.flying.remove(at);
        state.ended.push_back(ended(&urb, result, moved));
        self.signal(&state);
        true
    }

    /// A completion that no transfer expects.
    pub fn inject(&self, ended: Ended) {
        let mut state = self.state();
        state.ended.push_back(ended);
        self.signal(&state);
    }

    pub fn flying(&self) -> Vec<Urb> {
        self.state().flying.clone()
    }

    pub fn orders(&self) -> Vec<Order> {
        self.state().orders.clone()
    }
}

impl Handle for FakeUsb {
    fn submit(&self, urb: Urb) -> io::Result<()> {
        self.wait();
        let mut state = self.state();
        if state.gone {
            return Err(Errno::NODEV.into());
        }
        match (state.answer)(&urb) {
            Some(ended) => state.ended.push_back(ended),
            None => state.flying.push(urb),
        }
        self.signal(&state);
        Ok(())
    }

    fn discard(&self, tag: u64) {
        self.wait();
        let mut state = self.state();
        if let Some(at) = state.flying.iter().position(|it| it.tag == tag) {
            let urb = state.flying.remove(at);
            state.ended.push_back(ended(&urb, Err(Errno::NOENT), &[]));
            self.signal(&state);
        }
    }

    fn reap(&self) -> io::Result<Option<Ended>> {
        self.wait();
        let mut state = self.state();
        let next = state.ended.pop_front();
        if next.is_none() && state.gone {
            return Err(Errno::NODEV.into());
        }
        self.signal(&state);
        Ok(next)
    }

    fn order(&self, order: Order) -> io::Result<()> {
        self.state().orders.push(order);
        let mut obey = self.obey.lock().expect("no test panicked");
        obey(order).map_err(io::Error::from)
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
