//! The ports of a machine: controllers bring them, devices are plugged into them and pulled, while
//! the machine is built and while it runs.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{bail, ensure};
use vmm_sys_util::eventfd::EventFd;

use super::{Descriptors, Function, Speed};
use crate::device::{Access, Device, Region, Saved};

/// A device that is plugged in.
pub struct Attached {
    name: String,
    descriptors: Descriptors,
    function: Mutex<Box<dyn Function>>,
}

impl Attached {
    /// As the operator calls it: `usb-keyboard`, and `usb-keyboard.2` for the second.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it says it is.
    pub fn descriptors(&self) -> &Descriptors {
        &self.descriptors
    }

    /// The device itself. The controller has it, one at a time.
    pub(super) fn function(&self) -> MutexGuard<'_, Box<dyn Function>> {
        self.function.lock().expect("no device panicked")
    }
}

/// The ports of one controller. A socket has two of them, of which a device uses one: ports from 0
/// on are USB 2's, and as many USB 3's come after them.
pub struct Root {
    ports: Mutex<Vec<Option<Arc<Attached>>>>,
    kick: Arc<EventFd>,
}

impl Root {
    /// So many sockets; the controller is told of changes by its kick.
    pub(super) fn new(sockets: usize, kick: Arc<EventFd>) -> Self {
        Self { ports: Mutex::new(vec![None; 2 * sockets]), kick }
    }

    /// What is plugged in now, port by port.
    pub(super) fn ports(&self) -> Vec<Option<Arc<Attached>>> {
        self.ports.lock().expect("no device panicked").clone()
    }

    /// Takes out what cannot run.
    pub(super) fn eject(&self, device: &Arc<Attached>) {
        let mut ports = self.ports.lock().expect("no device panicked");
        for port in ports.iter_mut() {
            port.take_if(|it| Arc::ptr_eq(it, device));
        }
    }

    fn plug(&self, device: &Arc<Attached>) -> bool {
        let mut ports = self.ports.lock().expect("no device panicked");
        let sockets = ports.len() / 2;
        let free = |at: &usize| ports[*at].is_none() && ports[at + sockets].is_none();
        let Some(socket) = (0..sockets).find(free) else { return false };
        let upper = if device.descriptors.speed == Speed::Super { sockets } else { 0 };
        ports[socket + upper] = Some(device.clone());
        // A bell that cannot take one more ring is rung already.
        self.kick.write(1).ok();
        true
    }

    fn pull(&self, name: &str) -> bool {
        let mut ports = self.ports.lock().expect("no device panicked");
        let port = ports.iter_mut().find(|it| it.as_ref().is_some_and(|it| it.name == name));
        let found = port.map(|port| *port = None).is_some();
        self.kick.write(1).ok();
        found
    }
}

#[derive(Default)]
struct State {
    roots: Vec<Arc<Root>>,
    /// Plugged in where no port is yet: the order of devices is nobody's to know.
    waiting: VecDeque<Arc<Attached>>,
}

/// All ports of a machine.
#[derive(Default)]
pub struct Hub(Mutex<State>);

impl Hub {
    /// Brings ports; what waited for some is plugged in.
    pub(super) fn connect(&self, root: Arc<Root>) {
        let mut state = self.state();
        state.waiting.retain(|device| !root.plug(device));
        state.roots.push(root);
    }

    /// Takes ports away.
    pub(super) fn disconnect(&self, root: &Arc<Root>) {
        self.state().roots.retain(|it| !Arc::ptr_eq(it, root));
    }

    /// Plugs a device into the first port that is free, or that comes.
    ///
    /// # Errors
    ///
    /// When there is one of this name, or all ports are taken.
    pub fn plug(
        &self,
        name: &str,
        descriptors: Descriptors,
        function: Box<dyn Function>,
    ) -> anyhow::Result<()> {
        ensure!(!self.names().iter().any(|it| it == name), "there is a USB device `{name}`");
        let function = Mutex::new(function);
        let device = Arc::new(Attached { name: name.to_owned(), descriptors, function });
        let mut state = self.state();
        if state.roots.is_empty() {
            state.waiting.push_back(device);
        } else if !state.roots.iter().any(|root| root.plug(&device)) {
            bail!("all USB ports are taken: add another --device xhci");
        }
        Ok(())
    }

    /// Pulls a device out.
    ///
    /// # Errors
    ///
    /// When there is none of this name, with those that there are.
    pub fn pull(&self, name: &str) -> anyhow::Result<()> {
        let mut state = self.state();
        let before = state.waiting.len();
        state.waiting.retain(|it| it.name != name);
        if state.waiting.len() == before && !state.roots.iter().any(|root| root.pull(name)) {
            drop(state);
            bail!("there is no USB device `{name}`, but: {}", self.names().join(", "));
        }
        Ok(())
    }

    /// What is plugged in.
    pub fn names(&self) -> Vec<String> {
        let state = self.state();
        let ports = state.roots.iter().flat_map(|root| root.ports()).flatten();
        ports.chain(state.waiting.iter().cloned()).map(|it| it.name.clone()).collect()
    }

    /// Where a device is: its controller, in the order in which they came, and its port there.
    pub fn port(&self, name: &str) -> Option<(usize, usize)> {
        let at = |root: &Arc<Root>| {
            root.ports().iter().position(|it| it.as_ref().is_some_and(|it| it.name == name))
        };
        let state = self.state();
        (0..).zip(&state.roots).find_map(|(controller, root)| Some((controller, at(root)?)))
    }

    /// Once all devices of a machine are built: that each has its port.
    ///
    /// # Errors
    ///
    /// When one has none.
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

/// Plugs a USB device into `hub` for as long as the machine has it: the board's device that is
/// returned pulls it when it is dropped, and calls `leave`, which releases the host's side.
///
/// # Errors
///
/// When there is no port for it.
pub fn seat(
    hub: Arc<Hub>,
    name: &str,
    descriptors: Descriptors,
    function: Box<dyn Function>,
    leave: Box<dyn FnOnce() + Send>,
) -> anyhow::Result<Box<dyn Device>> {
    if let Err(error) = hub.plug(name, descriptors, function) {
        leave();
        return Err(error);
    }
    Ok(Box::new(Seat { hub, name: name.to_owned(), leave: Some(leave) }))
}

/// A device whose registers and state are its controller's.
struct Seat {
    hub: Arc<Hub>,
    name: String,
    leave: Option<Box<dyn FnOnce() + Send>>,
}

impl Device for Seat {
    fn read(&mut self, _: Region, _: u64, _: &mut [u8]) -> Access {
        Access::Ignored
    }
    fn write(&mut self, _: Region, _: u64, _: &[u8]) -> Access {
        Access::Ignored
    }
    fn park(&mut self) -> Saved {
        Saved::default()
    }
    fn run(&mut self, _: Saved) -> anyhow::Result<()> {
        Ok(())
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        // The operator may have pulled it.
        self.hub.pull(&self.name).ok();
        if let Some(leave) = self.leave.take() {
            leave();
        }
    }
}
