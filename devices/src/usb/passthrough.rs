//! A USB device of the host, passed through to the guest by usbfs.
//!
//! The guest's transfers become URBs of the host's kernel. Requests that change the device as a
//! whole (SET_CONFIGURATION, SET_INTERFACE, CLEAR_FEATURE of ENDPOINT_HALT, a reset of the port)
//! become orders to the kernel, which has its own view of the device. They may take seconds, and
//! the kernel locks the device meanwhile, so a thread of the device carries them out. Until it is
//! done, nothing is submitted or reaped, and transfers that the guest withdraws are discarded
//! later. While the machine has the device, no driver of the host uses it.
//!
//! Threats: the guest is hostile to the device, which only the operator can judge, but not to the
//! host's bus: it cannot change the device's address or its link. The kernel has at most [`PART`]
//! bytes of an endpoint at a time. The device is hostile, too: lengths that it
//! reports are compared with the guest's buffer, and an endless answer is cut there. A device that
//! never answers keeps its own endpoints busy, and nothing else.

mod orders;
mod pipes;
mod request;
mod stream;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Context, bail};
use host::memory::Memory;
use host::usb::usbfs::{self, Handle, Order};
use host::usb::{Filter, usbfs::Device as HostDevice};
use rustix::event::epoll;
use serde::{Deserialize, Serialize};

use self::orders::Orders;
use self::pipes::Pipes;
use self::request::{ControlRequest, Start};
use super::{
    CONTROL, Change, Descriptors, Fault, Function, Progress, Setup, Speed, Stall, Transfer,
    TransferEnd, plug_device,
};
use crate::device::{Device, Saved};
use crate::grants::{Build, Event, Events, Grants};

/// The maximum number of bytes of an endpoint that the kernel has: a multiple of every packet size.
/// The kernel allows 16 MiB for all devices of the host.
const PART: u32 = 256 << 10;

/// `--device usb-host,vendorid=0x0403,productid=0x6001`: a USB device of the host.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The vendor's number, as `lsusb` shows it, with 0x.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vendorid: Option<u16>,
    /// The product's number, with 0x.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub productid: Option<u16>,
    /// The number of the host's USB bus.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostbus: Option<u8>,
    /// The ports on the way from the bus to the device, as in 1.4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostport: Option<String>,
    /// The address on the bus, which changes whenever the device is plugged in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hostaddr: Option<u8>,
    /// The open device.
    #[serde(skip)]
    pub source: Source,
}

/// Where a device comes from.
#[derive(Clone, Default)]
pub enum Source {
    /// The first device that fits is opened.
    #[default]
    Any,
    /// A device that another process, or the caller, has opened.
    Open(Arc<OwnedFd>),
    /// A device that behaves as a test wants it.
    Fake(Arc<dyn Handle>, usbfs::Speed),
    /// No device: the machine is only inspected.
    Nothing,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "Any",
            Self::Open(_) => "Open",
            Self::Fake(..) => "Fake",
            Self::Nothing => "Nothing",
        })
    }
}

impl Config {
    pub fn filter(&self) -> Filter {
        Filter {
            vendor: self.vendorid,
            product: self.productid,
            bus: self.hostbus,
            port: self.hostport.clone(),
            address: self.hostaddr,
        }
    }

    fn open(self) -> anyhow::Result<(Option<Arc<dyn Handle>>, usbfs::Speed)> {
        let file = match self.source {
            Source::Any => {
                let filter = self.filter();
                filter.check()?;
                filter.open()?.1
            }
            Source::Open(file) => file.try_clone().context("a USB device")?.into(),
            Source::Fake(handle, speed) => return Ok((Some(handle), speed)),
            Source::Nothing => return Ok((None, usbfs::Speed::High)),
        };
        let (device, speed) = HostDevice::claim(file)?;
        Ok((Some(Arc::new(device)), speed))
    }
}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        // Before its drivers at the host lose it.
        grants.shared().usb.check_room()?;
        let (handle, speed) = self.open()?;
        let speed = match speed {
            usbfs::Speed::Low => Speed::Low,
            usbfs::Speed::Full => Speed::Full,
            usbfs::Speed::High => Speed::High,
            usbfs::Speed::Super => Speed::Super,
        };
        let hub = grants.shared().usb.clone();
        let (name, retired) = (grants.name().to_owned(), hub.clone());
        let events = grants.shared().events.clone();
        let gone = Gone { events, retire: Box::new(move || retired.retire(&name)) };
        let events = epoll::create(epoll::CreateFlags::CLOEXEC).context("an epoll for USB")?;
        let shared = Arc::new(Shared { state: Mutex::new(State::new(handle, gone)), events });
        let function = Box::new(Host(shared.clone()));
        let release = Box::new(move || {
            // Outside of the lock, because it waits for orders.
            let handle = shared.state().release();
            if let Some(handle) = handle {
                handle.order(Order::Release).ok();
            }
        });
        plug_device(hub, grants.name(), Descriptors::of_host(speed), function, release)
    }

    fn is_usb(&self) -> bool {
        true
    }

    fn take_file(&mut self, file: OwnedFd) -> anyhow::Result<()> {
        self.source = Source::Open(Arc::new(file));
        Ok(())
    }

    fn detach_host_side(&mut self) {
        self.source = Source::Nothing;
    }
}

/// Reports that the device was unplugged at the host.
struct Gone {
    events: Events,
    retire: Box<dyn Fn() + Send>,
}

/// State shared between the controller's thread and the operator, who unplugs the device.
struct Shared {
    state: Mutex<State>,
    /// Readable when there may be something to reap.
    events: OwnedFd,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no device panicked")
    }
}

fn watch(events: &OwnedFd, event: BorrowedFd<'_>, flags: epoll::EventFlags) -> anyhow::Result<()> {
    let added = epoll::add(events, event, epoll::EventData::new_u64(0), flags);
    added.context("an event of a USB device")
}

struct State {
    /// `None` once the device is gone, or unplugged by the operator.
    handle: Option<Arc<dyn Handle>>,
    gone: Gone,
    memory: Option<Memory>,
    orders: Option<Orders>,
    request: ControlRequest,
    pipes: Pipes,
    /// The tag of the next URB.
    next: u64,
    /// Whether the controller is woken when there is something to reap.
    watched: bool,
    /// Whether the guest has configured the device since the last reset, which the next one needs.
    used: bool,
    done: Vec<TransferEnd>,
}

impl State {
    fn new(handle: Option<Arc<dyn Handle>>, gone: Gone) -> Self {
        Self {
            handle,
            gone,
            memory: None,
            orders: None,
            request: ControlRequest::default(),
            pipes: Pipes::default(),
            next: 0,
            watched: false,
            used: false,
            done: Vec::new(),
        }
    }

    fn end(&mut self, endpoint: u8, result: Result<u32, Fault>) {
        self.done.push(TransferEnd { endpoint, result });
    }

    /// Ends everything, and returns the device that must be given back to the host.
    fn release(&mut self) -> Option<Arc<dyn Handle>> {
        self.fail_all();
        self.handle.take()
    }

    /// Ends everything: the device is gone.
    fn fail_all(&mut self) {
        if self.request.fail() {
            self.end(CONTROL, Ok(0));
        }
        self.done.extend(self.pipes.fail());
    }

    /// The device was unplugged at the host.
    fn lose(&mut self, events: &OwnedFd) {
        let Some(handle) = self.handle.take() else { return };
        // The kernel reports forever that a device is gone.
        epoll::delete(events, handle.event()).ok();
        self.fail_all();
        (self.gone.retire)();
        (self.gone.events)(Event::UsbGone);
    }

    /// Whether the kernel still carries out orders. Transfers wait meanwhile.
    fn is_waiting(&self) -> bool {
        self.orders.as_ref().is_some_and(Orders::is_busy)
    }

    fn order(&mut self, order: Order) {
        if let (Some(orders), Some(handle)) = (&mut self.orders, &self.handle) {
            orders.push(handle, order);
        }
    }

    fn reset(&mut self) {
        self.cancel_all();
        self.request = ControlRequest::default();
        // As in QEMU: a system resets a port more than once before it uses the device.
        if std::mem::take(&mut self.used) {
            self.order(Order::Reset);
        }
    }

    /// Cancels all transfers, and returns their ends. Data that they moved is lost.
    fn cancel_all(&mut self) -> Vec<TransferEnd> {
        for tag in self.pipes.tags().into_iter().chain(self.request.tag()) {
            self.discard(tag);
        }
        self.pipes.fail()
    }

    fn discard(&self, tag: u64) {
        match (&self.handle, &self.orders) {
            (Some(handle), Some(orders)) if orders.is_busy() => orders.discard(handle, tag),
            (Some(handle), _) => handle.discard(tag),
            (None, _) => {}
        }
    }

    fn control(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<Progress, Stall> {
        if let Some(answer) = self.request.answer(setup) {
            *data = answer?;
            return Ok(Progress::Done);
        }
        if self.request.is_pending(setup) || self.is_waiting() {
            return Ok(Progress::Pending);
        }
        let handle = self.handle.clone().ok_or(Stall)?;
        self.next += 1;
        match request::start(setup, data, self.next)? {
            Start::Nothing => return Ok(Progress::Done),
            Start::Order(order) => {
                match order {
                    Order::Configure(_) => {
                        self.used = true;
                        let canceled = self.cancel_all();
                        self.done.extend(canceled);
                    }
                    Order::Alternate(..) => self.used = true,
                    _ => {}
                }
                self.request.ordered(setup);
                self.order(order);
            }
            Start::Urb(urb) => {
                handle.submit(urb).map_err(|_| Stall)?;
                self.request.sent(setup, self.next);
            }
        }
        Ok(Progress::Pending)
    }

    fn cancel(&mut self, endpoint: u8, events: &OwnedFd) {
        if endpoint == CONTROL {
            if let Some(tag) = self.request.tag() {
                self.discard(tag);
            }
            self.request = ControlRequest::default();
            return;
        }
        // The transfer ends with the data that has arrived. While an order is under way, that data
        // is lost.
        for tag in self.pipes.tags_of(endpoint) {
            self.discard(tag);
        }
        self.pipes.stop(endpoint);
        self.collect(events);
        self.pipes.remove(endpoint);
    }

    /// Reaps orders and URBs.
    fn collect(&mut self, events: &OwnedFd) {
        self.collect_orders();
        let free = !self.is_waiting();
        if let Err(error) = self.watch(events, free) {
            tracing::debug!("{error:#}");
            return self.lose(events);
        }
        if free {
            self.collect_urbs(events);
        }
    }

    fn watch(&mut self, events: &OwnedFd, wanted: bool) -> anyhow::Result<()> {
        if let Some(handle) = self.handle.as_ref().filter(|_| self.watched != wanted) {
            if wanted {
                watch(events, handle.event(), epoll::EventFlags::OUT)?;
            } else {
                epoll::delete(events, handle.event()).ok();
            }
            self.watched = wanted;
        }
        Ok(())
    }

    fn collect_urbs(&mut self, events: &OwnedFd) {
        while let Some(handle) = self.handle.clone() {
            match handle.reap() {
                Ok(None) => break,
                Ok(Some(ended)) => {
                    if self.request.end(&ended) {
                        self.end(CONTROL, Ok(0));
                    } else if let Some(memory) = &self.memory {
                        self.done.extend(self.pipes.end(&ended, memory));
                    }
                }
                Err(error) => {
                    tracing::debug!("a USB device of the host is gone: {error}");
                    self.lose(events);
                }
            }
        }
    }

    fn collect_orders(&mut self) {
        let results = self.orders.as_mut().map(Orders::collect).unwrap_or_default();
        for (order, result) in results {
            if let Err(error) = &result {
                tracing::debug!("{order:?} of a USB device: {error}");
            }
            self.request.order_ended(order, result.is_ok());
            // The request has an answer, or it waited for this order and is repeated now.
            self.end(CONTROL, Ok(0));
        }
    }

    /// Passes waiting transfers to the kernel.
    fn proceed(&mut self) {
        let (Some(handle), Some(memory)) = (self.handle.clone(), self.memory.clone()) else {
            self.done.extend(self.pipes.fail());
            return;
        };
        if !self.is_waiting() {
            let ended = self.pipes.submit(&*handle, &memory, &mut self.next);
            self.done.extend(ended);
        }
    }
}

/// The function of the device, on the controller's thread.
struct Host(Arc<Shared>);

impl Function for Host {
    fn control(&mut self, setup: Setup, data: &mut Vec<u8>) -> Result<Progress, Stall> {
        self.0.state().control(setup, data)
    }

    fn change(&mut self, change: Change) {
        let mut state = self.0.state();
        match change {
            Change::Reset => state.reset(),
            Change::Cancel(endpoint) => state.cancel(endpoint, &self.0.events),
            // The guest's requests reach `control`.
            Change::Configure(_) | Change::Alternate(..) | Change::Clear(_) => {}
        }
    }

    fn begin(&mut self, transfer: Transfer) {
        let mut state = self.0.state();
        let waits = transfer.is_isochronous;
        state.pipes.add(transfer);
        if !waits {
            state.proceed();
        }
    }

    fn reap(&mut self, done: &mut Vec<TransferEnd>) {
        let mut state = self.0.state();
        state.collect(&self.0.events);
        state.proceed();
        done.append(&mut state.done);
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.events.as_fd())
    }

    fn park(&mut self) -> Saved {
        let mut state = self.0.state();
        state.cancel_all();
        state.collect(&self.0.events);
        state.memory = None;
        state.request = ControlRequest::default();
        // A control request is repeated after `run`.
        state.done.retain(|it| it.endpoint != CONTROL);
        let orders = state.orders.take();
        // Outside of the lock, because the thread may carry out an order.
        drop(state);
        drop(orders);
        Saved::default()
    }

    fn run(&mut self, saved: Saved, memory: &Memory) -> anyhow::Result<()> {
        if saved != Saved::default() {
            bail!("saved state: a USB device of the host has none");
        }
        let mut state = self.0.state();
        let orders = Orders::new()?;
        watch(&self.0.events, orders.event(), epoll::EventFlags::IN)?;
        state.watch(&self.0.events, true)?;
        (state.orders, state.memory) = (Some(orders), Some(memory.clone()));
        Ok(())
    }
}

#[cfg(test)]
mod test;
