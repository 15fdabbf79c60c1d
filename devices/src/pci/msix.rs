//! MSI-X (PCI Local Bus 3.0, 6.8.2): the vector table, masking and pending bits.
//!
//! Threats: the guest may set any message in a vector, which reaches only its own vCPUs. It may
//! flood the table with writes, so an unchanged entry is not sent to the kernel again.

use std::fmt;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::hypervisor::{Message, Route};

// Message control: enable, and mask the whole function.
const ENABLE: u16 = 1 << 15;
const MASK_ALL: u16 = 1 << 14;
/// Size of a table entry in bytes: address, data, control.
const ENTRY: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    address: u64,
    data: u32,
    masked: bool,
    pending: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    entries: Vec<Entry>,
    control: u16,
}

struct Inner {
    state: State,
    /// The message that each route was last set to.
    aimed: Vec<Option<Message>>,
    /// Whether the refusal of a message was logged.
    refused: bool,
}

/// The vectors of one function.
pub struct Msix {
    routes: Vec<Box<dyn Route>>,
    inner: Mutex<Inner>,
}

/// Size in bytes of the BAR with the table and the pending bits.
pub(super) fn bar_size(vectors: u16) -> u64 {
    u64::from(pending_at(vectors)) * 2
}

/// Offset of the pending bits in the BAR.
pub(super) fn pending_at(vectors: u16) -> u32 {
    (u32::from(vectors) * 16).next_power_of_two().max(2048)
}

impl Msix {
    pub(super) fn new(routes: Vec<Box<dyn Route>>) -> Self {
        let count = routes.len();
        let inner =
            Inner { state: State::power_on(count), aimed: vec![None; count], refused: false };
        Self { routes, inner: Mutex::new(inner) }
    }

    /// Sends a vector, or marks it as pending while it is masked. Returns false if MSI-X is off.
    pub fn send(&self, vector: u16) -> bool {
        let mut inner = self.inner.lock().expect("no device panicked");
        let state = &mut inner.state;
        if state.control & ENABLE == 0 {
            return false;
        }
        let held = state.control & MASK_ALL != 0;
        // A driver may configure a vector that does not exist: then nothing is sent.
        let Some(entry) = state.entries.get_mut(usize::from(vector)) else { return true };
        if held || entry.masked {
            entry.pending = true;
        } else {
            self.routes[usize::from(vector)].send();
        }
        true
    }

    pub fn is_enabled(&self) -> bool {
        self.inner.lock().expect("no device panicked").state.control & ENABLE != 0
    }

    pub(super) fn set_control(&self, control: u16) {
        let mut inner = self.inner.lock().expect("no device panicked");
        if inner.state.control != control {
            inner.state.control = control;
            self.settle(&mut inner);
        }
    }

    pub(super) fn read(&self, offset: usize, data: &mut [u8]) {
        let inner = self.inner.lock().expect("no device panicked");
        let entries = &inner.state.entries;
        let pending_at = pending_at(u16::try_from(entries.len()).unwrap_or(u16::MAX)) as usize;
        for (at, byte) in (offset..).zip(data) {
            *byte = if at >= pending_at {
                let bit = (at - pending_at) * 8;
                let bits = entries.iter().skip(bit).take(8).zip(0..);
                bits.map(|(entry, bit)| u8::from(entry.pending) << bit).sum()
            } else {
                entries.get(at / ENTRY).map_or(0, |entry| entry.bytes()[at % ENTRY])
            };
        }
    }

    pub(super) fn write(&self, offset: usize, data: &[u8]) {
        let mut inner = self.inner.lock().expect("no device panicked");
        for (at, byte) in (offset..).zip(data) {
            if let Some(entry) = inner.state.entries.get_mut(at / ENTRY) {
                entry.set_byte(at % ENTRY, *byte);
            }
        }
        self.settle(&mut inner);
    }

    /// Sets the routes of the unmasked vectors, and sends those that are pending.
    fn settle(&self, inner: &mut Inner) {
        if inner.state.control & (ENABLE | MASK_ALL) != ENABLE {
            return;
        }
        for (number, entry) in inner.state.entries.iter_mut().enumerate() {
            if entry.masked {
                continue;
            }
            let message = Message { address: entry.address, data: entry.data };
            if inner.aimed[number] != Some(message) {
                if let Err(error) = self.routes[number].set_message(message) {
                    // Log this once: the guest chooses the address, and can repeat this endlessly.
                    if !std::mem::replace(&mut inner.refused, true) {
                        tracing::warn!("MSI-X vector {number} cannot be routed: {error:#}");
                    }
                    continue;
                }
                inner.aimed[number] = Some(message);
            }
            if std::mem::take(&mut entry.pending) {
                self.routes[number].send();
            }
        }
    }

    pub(super) fn state(&self) -> State {
        self.inner.lock().expect("no device panicked").state.clone()
    }

    pub(super) fn restore(&self, mut state: State) {
        state.entries.resize(self.routes.len(), Entry::power_on());
        let mut inner = self.inner.lock().expect("no device panicked");
        inner.state = state;
        self.settle(&mut inner);
    }
}

impl State {
    fn power_on(count: usize) -> Self {
        Self { entries: vec![Entry::power_on(); count], control: 0 }
    }
}

impl Entry {
    fn power_on() -> Self {
        Self { address: 0, data: 0, masked: true, pending: false }
    }

    fn bytes(&self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.data.to_le_bytes());
        bytes[12] = u8::from(self.masked);
        bytes
    }

    fn set_byte(&mut self, at: usize, byte: u8) {
        let mut bytes = self.bytes();
        bytes[at] = byte;
        let [a0, a1, a2, a3, a4, a5, a6, a7, d0, d1, d2, d3, control, ..] = bytes;
        self.address = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]) & !3;
        self.data = u32::from_le_bytes([d0, d1, d2, d3]);
        self.masked = control & 1 != 0;
    }
}

impl fmt::Debug for Msix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Msix({} vectors)", self.routes.len())
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::hypervisor::Hypervisor;
    use crate::hypervisor::fake::FakeHypervisor;

    fn table(host: &FakeHypervisor, count: usize) -> Msix {
        Msix::new((0..count).map(|_| host.route().unwrap()).collect())
    }

    fn aim(msix: &Msix, vector: usize, data: u32, masked: u8) {
        msix.write(vector * ENTRY, &0xfee0_0000_u64.to_le_bytes());
        msix.write(vector * ENTRY + 8, &data.to_le_bytes());
        msix.write(vector * ENTRY + 12, &[masked, 0, 0, 0]);
    }

    #[test]
    fn a_masked_vector_stays_pending() {
        let host = FakeHypervisor::default();
        let msix = table(&host, 10);
        assert!(!msix.send(9), "off: the device must use its wire");
        msix.set_control(ENABLE);
        aim(&msix, 9, 0x41, 1);
        assert!(msix.send(9));
        let mut pending = [0; 2];
        msix.read(2048, &mut pending);
        assert_eq!((pending, host.sent.lock().unwrap().len()), ([0, 2], 0));
        aim(&msix, 9, 0x41, 0);
        assert_eq!(*host.sent.lock().unwrap(), [Message { address: 0xfee0_0000, data: 0x41 }]);
        msix.read(2048, &mut pending);
        assert_eq!(pending, [0, 0]);
    }

    #[test]
    fn the_function_mask_masks_all_vectors() {
        let host = FakeHypervisor::default();
        let msix = table(&host, 2);
        aim(&msix, 0, 0x30, 0);
        msix.set_control(ENABLE | MASK_ALL);
        msix.send(0);
        assert!(host.sent.lock().unwrap().is_empty());
        msix.set_control(ENABLE);
        assert_eq!(host.sent.lock().unwrap().len(), 1);
    }

    #[test]
    fn accesses_stay_inside_the_table() {
        let host = FakeHypervisor::default();
        let msix = table(&host, 1);
        msix.set_control(ENABLE);
        let mut data = [0; 8];
        for offset in (0..4096).step_by(4) {
            msix.write(offset, &[0xff; 8]);
            msix.read(offset, &mut data);
        }
        assert!(msix.send(7), "a vector that is not there is swallowed");
    }
}
