//! The USB ports of a machine. Controllers provide them. Devices are plugged in and pulled while
//! the machine is built and while it runs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{bail, ensure};
use vmm_sys_util::eventfd::EventFd;

use super::{Descriptors, Function, Speed};
use crate::bus::Inert;
use crate::device::Device;

const NO_ROOM: &str = "all USB ports are taken: add another --device xhci";

pub struct Attached {
    pub name: String,
    pub descriptors: Descriptors,
    function: Mutex<Box<dyn Function>>,
}

impl Attached {
    /// Used only by the controller that the device is plugged into.
    pub(super) fn function(&self) -> MutexGuard<'_, Box<dyn Function>> {
        self.function.lock().expect("no device panicked")
    }
}

/// The ports of one controller. Each socket has two ports, of which a device uses one. The first
/// half of the ports is USB 2, the second half USB 3.
pub struct RootHub {
    ports: Mutex<Vec<Option<Arc<Attached>>>>,
    kick: Arc<EventFd>,
}

impl RootHub {
    /// `kick` wakes the controller after changes.
    pub(super) fn new(sockets: usize, kick: Arc<EventFd>) -> Self {
        Self { ports: Mutex::new(vec![None; 2 * sockets]), kick }
    }

    pub(super) fn ports(&self) -> Vec<Option<Arc<Attached>>> {
        self.ports.lock().expect("no device panicked").clone()
    }

    /// Removes a device that cannot run.
    pub(super) fn eject(&self, device: &Arc<Attached>) {
        let mut ports = self.ports.lock().expect("no device panicked");
        for port in ports.iter_mut() {
            port.take_if(|it| Arc::ptr_eq(it, device));
        }
    }

    fn has_room(&self) -> bool {
        free_socket(&self.ports()).is_some()
    }

    fn plug(&self, device: &Arc<Attached>) -> bool {
        let mut ports = self.ports.lock().expect("no device panicked");
        let Some(socket) = free_socket(&ports) else { return false };
        let upper = if device.descriptors.speed == Speed::Super { ports.len() / 2 } else { 0 };
        ports[socket + upper] = Some(device.clone());
        // If the counter is full, the controller is woken anyway.
        self.kick.write(1).ok();
        true
    }

    fn unplug(&self, name: &str) -> bool {
        let mut ports = self.ports.lock().expect("no device panicked");
        let port = ports.iter_mut().find(|it| it.as_ref().is_some_and(|it| it.name == name));
        let found = port.map(|port| *port = None).is_some();
        self.kick.write(1).ok();
        found
    }
}

/// The first socket of which no port is used.
fn free_socket(ports: &[Option<Arc<Attached>>]) -> Option<usize> {
    let (usb2, usb3) = ports.split_at(ports.len() / 2);
    usb2.iter().zip(usb3).position(|(lower, upper)| lower.is_none() && upper.is_none())
}

#[derive(Default)]
struct State {
    roots: Vec<Arc<RootHub>>,
    /// Devices that wait for a port, because they may be listed before their controller.
    waiting: VecDeque<Arc<Attached>>,
    /// Devices that removed themselves.
    retired: Vec<String>,
}

/// All ports of a machine.
#[derive(Default)]
pub struct Ports(Mutex<State>);

impl Ports {
    /// Adds the ports of a controller, and plugs in waiting devices.
    pub(super) fn connect(&self, root: Arc<RootHub>) {
        let mut state = self.state();
        state.waiting.retain(|device| !root.plug(device));
        state.roots.push(root);
    }

    pub(super) fn disconnect(&self, root: &Arc<RootHub>) {
        self.state().roots.retain(|it| !Arc::ptr_eq(it, root));
    }

    /// Plugs a device into the first free port. Without any ports, it waits for a controller.
    pub fn plug(
        &self,
        name: &str,
        descriptors: Descriptors,
        function: Box<dyn Function>,
    ) -> anyhow::Result<()> {
        ensure!(
            !self.names().iter().any(|it| it == name),
            "there is already a USB device `{name}`"
        );
        let function = Mutex::new(function);
        let device = Arc::new(Attached { name: name.to_owned(), descriptors, function });
        let mut state = self.state();
        if state.roots.is_empty() {
            state.waiting.push_back(device);
        } else if !state.roots.iter().any(|root| root.plug(&device)) {
            bail!(NO_ROOM);
        }
        Ok(())
    }

    /// Fails if no port is free for another device. Without any ports, it would wait.
    pub fn check_room(&self) -> anyhow::Result<()> {
        let state = self.state();
        ensure!(state.roots.is_empty() || state.roots.iter().any(|root| root.has_room()), NO_ROOM);
        Ok(())
    }

    /// The error for an unknown name lists all devices.
    pub fn unplug(&self, name: &str) -> anyhow::Result<()> {
        let mut state = self.state();
        let before = state.waiting.len();
        state.waiting.retain(|it| it.name != name);
        if state.waiting.len() == before && !state.roots.iter().any(|root| root.unplug(name)) {
            drop(state);
            bail!("there is no USB device `{name}`: choose one of: {}", self.names().join(", "));
        }
        Ok(())
    }

    /// Unplugs a device that is gone at the host. An event makes the machine take the name and
    /// release the rest.
    pub(super) fn retire(&self, name: &str) {
        let mut state = self.state();
        state.waiting.retain(|it| it.name != name);
        if state.roots.iter().any(|root| root.unplug(name)) {
            state.retired.push(name.to_owned());
        }
    }

    pub fn take_retired(&self) -> Vec<String> {
        std::mem::take(&mut self.state().retired)
    }

    pub fn names(&self) -> Vec<String> {
        let state = self.state();
        let ports = state.roots.iter().flat_map(|root| root.ports()).flatten();
        ports.chain(state.waiting.iter().cloned()).map(|it| it.name.clone()).collect()
    }

    /// The index of a device's controller, in the order of their creation, and its port there.
    pub fn port(&self, name: &str) -> Option<(usize, usize)> {
        let at = |root: &Arc<RootHub>| {
            root.ports().iter().position(|it| it.as_ref().is_some_and(|it| it.name == name))
        };
        let state = self.state();
        (0..).zip(&state.roots).find_map(|(controller, root)| Some((controller, at(root)?)))
    }

    /// Checks that each device has a port, once all devices of a machine are built.
    pub fn check(&self) -> anyhow::Result<()> {
        if let Some(device) = self.state().waiting.front() {
            bail!("`{}` has no USB port: add --device xhci", device.name);
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no device panicked")
    }
}

/// Plugs a USB device into a port. Dropping the returned device unplugs it, and calls `release`,
/// which releases the host's side.
pub fn plug_device(
    ports: Arc<Ports>,
    name: &str,
    descriptors: Descriptors,
    function: Box<dyn Function>,
    release: Box<dyn FnOnce() + Send>,
) -> anyhow::Result<Box<dyn Device>> {
    if let Err(error) = ports.plug(name, descriptors, function) {
        release();
        return Err(error);
    }
    Ok(Box::new(Inert(PluggedDevice { ports, name: name.to_owned(), release: Some(release) })))
}

/// The board's handle of a USB device. Registers and state belong to the controller.
struct PluggedDevice {
    ports: Arc<Ports>,
    name: String,
    release: Option<Box<dyn FnOnce() + Send>>,
}

impl Drop for PluggedDevice {
    fn drop(&mut self) {
        // The operator may have pulled it.
        self.ports.unplug(&self.name).ok();
        if let Some(release) = self.release.take() {
            release();
        }
    }
}
