//! The memory of the physical presence interface: requests that an operating system leaves for
//! firmware, which executes them after a reset. Layout: QEMU, `docs/specs/tpm.rst`.
//!
//! The content outlives a reset of the machine, but not its end. One request is for us: to clear
//! the machine's memory at the next reset, so that the next system does not find keys in it (TCG
//! Platform Reset Attack Mitigation Specification 1.10).
//!
//! Threats: the guest writes any bytes. Only one bit of them is used here.

use serde::{Deserialize, Serialize};

use crate::bytes::Bytes;
use crate::hypervisor::Hypervisor;

const BYTES: usize = 0x400;
pub(super) const LENGTH: u64 = BYTES as u64;
/// The memory overwrite request (MOR).
const OVERWRITE: usize = 0x15a;
const OVERWRITE_CLEAR: u8 = 1;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Presence(Bytes<BYTES>);

impl Presence {
    pub(super) fn read(&self, offset: u64) -> u8 {
        index(offset).and_then(|at| self.0.get(at).copied()).unwrap_or(0)
    }

    pub(super) fn write(&mut self, offset: u64, byte: u8) {
        if let Some(place) = index(offset).and_then(|at| self.0.get_mut(at)) {
            *place = byte;
        }
    }

    /// Clears the machine's memory if that was requested.
    pub(super) fn reset(&mut self, host: &dyn Hypervisor) {
        let Some(request) = self.0.get_mut(OVERWRITE) else { return };
        if *request & OVERWRITE_CLEAR != 0 {
            *request &= !OVERWRITE_CLEAR;
            host.release(0..u64::MAX);
        }
    }
}

fn index(offset: u64) -> Option<usize> {
    usize::try_from(offset).ok()
}
