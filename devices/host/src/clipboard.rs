//! The clipboard of a machine: texts that viewers copy, and texts that the guest copies.
//!
//! The guest's end is SPICE's agent, which opens a virtio port ([`Port`]) and speaks the protocol
//! in [`agent`]. Without a running agent, texts of viewers have no destination.
//!
//! Threats: see [`agent`].

pub mod agent;

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use anyhow::{Context as _, bail};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use self::agent::Agent;

/// Name by which the agent in the guest finds its port.
pub const PORT: &str = "com.redhat.spice.0";
/// Maximum bytes of a text. Longer ones are not transferred.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// Called with each text that the guest copies. It must not block or call the hub.
pub type OnCopied = Box<dyn Fn(&str) + Send + Sync>;

#[derive(Default)]
pub struct Hub {
    state: Mutex<State>,
    on_copied: OnceLock<OnCopied>,
}

#[derive(Default)]
struct State {
    agent: Agent,
    /// Signaled when there are bytes for the agent. A machine has at most one port for it.
    bell: Option<Arc<EventFd>>,
}

impl Hub {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no user of the clipboard panicked")
    }

    /// Sets the receiver of the guest's texts, once.
    pub fn on_copied(&self, receiver: OnCopied) {
        self.on_copied.set(receiver).ok();
    }

    /// Whether an agent runs in the guest, so that texts of viewers have a destination.
    pub fn has_agent(&self) -> bool {
        self.state().agent.takes_texts()
    }

    /// Whether the machine has a port for the agent.
    pub fn has_port(&self) -> bool {
        self.state().bell.is_some()
    }

    /// A viewer copied a text.
    pub fn offer(&self, text: &str) {
        let mut state = self.state();
        state.agent.offer(text);
        state.ring();
    }

    /// The port for the agent. Fails if the machine has one already.
    pub fn port(self: &Arc<Self>) -> anyhow::Result<Port> {
        let mut state = self.state();
        if state.bell.is_some() {
            bail!("to=clipboard: another port has the clipboard: remove one of them");
        }
        let bell = Arc::new(EventFd::new(EFD_NONBLOCK).context("an event for the clipboard")?);
        state.bell = Some(bell.clone());
        Ok(Port { hub: self.clone(), bell })
    }
}

impl State {
    fn ring(&self) {
        if let Some(bell) = self.bell.as_ref().filter(|_| self.agent.has_bytes()) {
            bell.write(1).ok();
        }
    }
}

/// The end of the virtio port.
pub struct Port {
    hub: Arc<Hub>,
    bell: Arc<EventFd>,
}

impl Port {
    /// The guest's agent has opened or closed the port.
    pub fn set_open(&self, open: bool) {
        let mut state = self.hub.state();
        state.agent.set_open(open);
        state.ring();
    }

    /// Fills `buffer` with bytes for the agent. Returns 0 if there are none now.
    pub fn read(&self, buffer: &mut [u8]) -> usize {
        // Whatever comes later rings again.
        self.bell.read().ok();
        let mut state = self.hub.state();
        let count = state.agent.read(buffer);
        state.ring();
        count
    }

    /// Takes bytes of the agent.
    pub fn write(&self, bytes: &[u8]) {
        let texts = {
            let mut state = self.hub.state();
            let texts = state.agent.write(bytes);
            state.ring();
            texts
        };
        let Some(receiver) = self.hub.on_copied.get() else { return };
        texts.iter().for_each(|text| receiver(text));
    }
}

impl AsRawFd for Port {
    /// Readable when there are bytes for the agent.
    fn as_raw_fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let mut state = self.hub.state();
        state.agent.set_open(false);
        state.bell = None;
    }
}
