//! The controller's thread: executes requests from the registers, processes the rings, and reaps
//! completed transfers of the devices.

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use anyhow::{Context, ensure};
use rustix::event::epoll;
use serde::{Deserialize, Serialize};

use super::endpoint::{self, Slot};
use super::registers::{PORT_CHANGE, Registers};
use super::trb::{Code, PORT_STATUS_CHANGE, Trb};
use super::{Shared, context};
use crate::poller::Serve;
use crate::usb::device::{self, Device};
use crate::usb::{Attached, TransferEnd};

#[derive(Serialize, Deserialize)]
pub(super) struct SavedState {
    registers: Registers,
    slots: BTreeMap<u8, Slot>,
    devices: Vec<Option<device::SavedState>>,
}

impl SavedState {
    /// The state after power-on.
    pub(super) fn new(sockets: u8) -> Self {
        let registers = Registers::new(sockets);
        Self { devices: vec![None; registers.ports.len()], registers, slots: BTreeMap::new() }
    }

    pub(super) fn check(&self, sockets: u8) -> anyhow::Result<()> {
        self.registers.check(sockets)?;
        let ports = self.registers.ports.len();
        ensure!(
            self.devices.len() == ports,
            "saved state: {} ports instead of {ports}",
            self.devices.len()
        );
        endpoint::check(&self.slots, ports)
    }
}

/// The state of the controller's thread.
pub(super) struct Controller {
    pub(super) shared: Arc<Shared>,
    pub(super) slots: BTreeMap<u8, Slot>,
    /// Devices by port.
    pub(super) devices: Vec<Option<Device>>,
    /// An epoll of the events of all devices.
    events: OwnedFd,
    /// Whether transfers may be in progress.
    running: bool,
    /// The endpoint whose ring was processed last: slot and endpoint number.
    pub(super) last: (u8, u8),
    /// The number of TRBs that this round has read from transfer rings.
    pub(super) spent: u32,
}

impl Controller {
    pub(super) fn restore(shared: &Arc<Shared>, saved: SavedState) -> anyhow::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC).context("an epoll for USB")?;
        let devices: Vec<_> = saved.devices.iter().map(|_| None).collect();
        *shared.registers() = saved.registers;
        let slots = saved.slots;
        let (running, last, spent) = Default::default();
        let shared_too = shared.clone();
        let mut controller =
            Self { shared: shared_too, slots, devices, events, running, last, spent };
        let ports = shared.root.ports();
        for (port, (attached, saved)) in ports.into_iter().zip(saved.devices).enumerate() {
            let Some(attached) = attached else {
                // The device of the saved state is not in this machine.
                if saved.is_some() {
                    controller.release(port);
                    controller.connect(port, None);
                }
                continue;
            };
            match saved.filter(|saved| saved.is_of(&attached)) {
                Some(saved) => controller.attach(port, attached, Some(saved))?,
                None => {
                    let speed = attached.descriptors.speed;
                    controller.release(port);
                    controller.attach(port, attached, None)?;
                    controller.connect(port, Some(speed));
                }
            }
        }
        controller.shared.registers().update_interrupts(&shared.interrupt);
        Ok(controller)
    }

    pub(super) fn save(mut self) -> SavedState {
        let devices = mem::take(&mut self.devices);
        let mut saved = Vec::new();
        for (port, device) in devices.into_iter().enumerate() {
            let mut done = Vec::new();
            saved.push(device.map(|device| device.park(&mut done)));
            self.finish(port, &done);
        }
        self.flush();
        for endpoint in self.slots.values_mut().flat_map(|slot| slot.endpoints.values_mut()) {
            endpoint.flights.clear();
        }
        let registers = self.shared.registers().clone();
        // The interrupt line is low while the device is parked.
        if let Some(line) = &self.shared.interrupt.line {
            line.set(false);
        }
        SavedState { registers, slots: mem::take(&mut self.slots), devices: saved }
    }

    fn attach(
        &mut self,
        port: usize,
        attached: Arc<Attached>,
        saved: Option<device::SavedState>,
    ) -> anyhow::Result<()> {
        let device = Device::run(attached, saved, &self.shared.memory)?;
        device.watch(|event| {
            let Some(event) = event else { return };
            let data = epoll::EventData::new_u64(0);
            // If this fails for lack of memory, the device is served together with others.
            epoll::add(&self.events, event, data, epoll::EventFlags::IN).ok();
        });
        self.devices[port] = Some(device);
        Ok(())
    }

    fn detach(&mut self, port: usize) {
        let Some(mut device) = self.devices[port].take() else { return };
        device.watch(|event| {
            if let Some(event) = event {
                epoll::delete(&self.events, event).ok();
            }
        });
        device.reset();
        let mut done = Vec::new();
        device.reap(&mut done);
        device.park(&mut done);
        self.finish(port, &done);
        self.release(port);
    }

    /// Removes the port from the slot of a device that is gone. The slot stays enabled, and its
    /// requests fail, until the guest disables it. A new device at the port gets another slot.
    fn release(&mut self, port: usize) {
        for slot in self.slots.values_mut().filter(|slot| slot.port == Some(port)) {
            slot.port = None;
        }
    }

    fn connect(&mut self, port: usize, speed: Option<crate::usb::Speed>) {
        let mut registers = self.shared.registers();
        let usb3 = registers.is_usb3(port);
        registers.ports[port].connect(speed, usb3);
    }

    /// Handles devices that were plugged in or pulled. Returns true if there were any.
    fn update_ports(&mut self) -> bool {
        let mut changed = false;
        for (port, attached) in self.shared.root.ports().into_iter().enumerate() {
            let same = match (&self.devices[port], &attached) {
                (Some(device), Some(attached)) => device.is_same_device(attached),
                (None, None) => true,
                _ => false,
            };
            if same {
                continue;
            }
            changed = true;
            if self.devices[port].is_some() {
                self.detach(port);
                self.connect(port, None);
            }
            let Some(attached) = attached else { continue };
            let (speed, name) = (attached.descriptors.speed, attached.name.clone());
            match self.attach(port, attached.clone(), None) {
                Ok(()) => self.connect(port, Some(speed)),
                Err(error) => {
                    tracing::warn!("cannot plug in {name}: {error:#}");
                    self.shared.root.eject(&attached);
                }
            }
        }
        changed
    }

    /// HCRST: everything but the devices in the ports is as after power-on.
    fn reset(&mut self) {
        self.slots.clear();
        self.running = false;
        for device in self.devices.iter_mut().flatten() {
            device.reset();
            device.reap(&mut Vec::new());
        }
        self.shared.registers().restart();
        for port in 0..self.devices.len() {
            if let Some(speed) = self.devices[port].as_ref().map(Device::speed) {
                self.connect(port, Some(speed));
            }
        }
        self.shared.registers().update_interrupts(&self.shared.interrupt);
    }

    fn reset_port(&mut self, port: usize) {
        if let Some(device) = self.devices.get_mut(port).and_then(Option::as_mut) {
            device.reset();
            let mut done = Vec::new();
            device.reap(&mut done);
            self.finish(port, &done);
        }
        let mut registers = self.shared.registers();
        let usb3 = registers.is_usb3(port);
        registers.ports[port].end_reset(usb3);
    }

    /// While the controller is halted, nothing touches guest memory.
    fn set_running(&mut self, run: bool) {
        self.running = run;
        if run {
            self.shared.registers().ports.iter_mut().for_each(|port| port.announce());
            return;
        }
        let slots: Vec<_> = self.slots.keys().copied().collect();
        for slot in slots {
            for number in 1..context::CONTEXTS {
                self.withdraw(slot, number);
            }
        }
        self.flush();
        self.shared.registers().halt();
    }

    /// Returns true if there were changes.
    fn report_port_changes(&mut self) -> bool {
        let mut registers = self.shared.registers();
        if registers.is_blocked() || !registers.runs() {
            return false;
        }
        let mut events = Vec::new();
        for (number, port) in (1_u64..).zip(&mut registers.ports) {
            if port.take_unreported() {
                events.push(Trb::event(PORT_STATUS_CHANGE, Code::Success, number << 24));
            }
        }
        let some = !events.is_empty();
        if some {
            registers.status |= PORT_CHANGE;
            events.into_iter().for_each(|event| registers.push(0, event));
        }
        some
    }

    pub(super) fn push_event(&mut self, interrupter: usize, event: Trb) {
        self.shared.registers().push(interrupter, event);
    }

    /// Writes queued events to the rings, and updates interrupts.
    pub(super) fn flush(&mut self) {
        let mut registers = self.shared.registers();
        registers.flush(&self.shared.memory);
        registers.update_interrupts(&self.shared.interrupt);
    }

    /// Whether nothing that causes events may be processed now.
    pub(super) fn is_blocked(&self) -> bool {
        let registers = self.shared.registers();
        registers.is_blocked() || !registers.runs()
    }

    /// Returns true if transfers had completed.
    fn reap(&mut self) -> bool {
        let mut some = false;
        for port in 0..self.devices.len() {
            let Some(device) = &mut self.devices[port] else { continue };
            let mut done: Vec<TransferEnd> = Vec::new();
            device.reap(&mut done);
            some |= !done.is_empty();
            self.finish(port, &done);
        }
        some
    }
}

impl Serve for Controller {
    fn serve(&mut self) -> bool {
        // Queued events first, because the room in the rings decides what may be processed.
        self.flush();
        let requests = self.shared.registers().take_requests();
        if requests.reset {
            self.reset();
            return true;
        }
        let mut did = self.update_ports() || !requests.resets.is_empty();
        for port in requests.resets {
            self.reset_port(port);
        }
        if requests.run != self.running {
            self.set_running(requests.run);
            did = true;
        }
        did |= self.reap();
        if requests.run {
            did |= self.report_port_changes();
            did |= requests.stop_commands && self.stop_commands();
            // Written now, so that these events do not block the rest of this round.
            self.flush();
            did |= self.commands();
            did |= self.ring_endpoints();
            did |= self.transfers();
        }
        self.flush();
        // A system error halts the controller in the next round, without a kick.
        did || self.running != self.shared.registers().may_run()
    }

    fn enable_doorbells(&mut self) -> bool {
        false
    }

    fn disable_doorbells(&mut self) {}

    fn events(&self) -> Vec<RawFd> {
        vec![self.shared.kick.as_raw_fd(), self.events.as_raw_fd()]
    }

    fn clear_events(&mut self) {
        self.shared.kick.read().ok();
    }
}
