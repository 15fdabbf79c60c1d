//! Agrees with firmware on the features of system-management interrupts (SMIs), which QEMU offers
//! in the fw_cfg files `etc/smi/...`.
//!
//! Threats: the system can write the requested features too. Once they are agreed, they are locked
//! until the next reset, and firmware agrees on them before it starts a system.

use std::sync::{Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

/// Feature bit 0: an SMI that a processor requests through APM_CNT reaches all processors.
const BROADCAST: u64 = 1 << 0;
/// The features that this machine offers. Plugging processors is not among them.
pub const SUPPORTED: u64 = BROADCAST;

#[derive(Default)]
pub struct Negotiation {
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct State {
    requested: u64,
    agreed: Option<u64>,
}

impl Negotiation {
    /// Whether each SMI is for all processors.
    pub(crate) fn is_broadcast(&self) -> bool {
        self.state().agreed.is_some_and(|features| features & BROADCAST != 0)
    }

    /// Records the features that firmware requests.
    pub fn request(&self, features: u64) {
        self.state().requested = features;
    }

    /// Agrees on the requested features, if all are supported and nothing was agreed before.
    /// Returns whether there is an agreement.
    pub fn agree(&self) -> bool {
        let mut state = self.state();
        if state.agreed.is_none() && state.requested & !SUPPORTED == 0 {
            state.agreed = Some(state.requested);
        }
        state.agreed.is_some()
    }

    pub(crate) fn save(&self) -> State {
        *self.state()
    }

    pub(crate) fn restore(&self, state: State) {
        *self.state() = State { agreed: state.agreed.map(|it| it & SUPPORTED), ..state };
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no device panicked")
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn request(negotiation: &Negotiation, features: u64) -> bool {
        negotiation.request(features);
        negotiation.agree()
    }

    #[test]
    fn firmware_gets_the_broadcast_that_it_requests() {
        let negotiation = Negotiation::default();
        assert!(!negotiation.is_broadcast());
        assert!(request(&negotiation, BROADCAST) && negotiation.is_broadcast());
        negotiation.restore(State::default());
        assert!(!negotiation.is_broadcast(), "after a reset");
        assert!(request(&negotiation, 0) && !negotiation.is_broadcast());
    }

    #[test]
    fn an_agreement_is_final_and_has_supported_features_only() {
        let negotiation = Negotiation::default();
        for features in [BROADCAST | 2, 1 << 63] {
            assert!(!request(&negotiation, features) && !negotiation.is_broadcast());
        }
        assert!(request(&negotiation, BROADCAST));
        assert!(request(&negotiation, 0) && negotiation.is_broadcast(), "the first one holds");
        let other = Negotiation::default();
        other.restore(negotiation.save());
        assert!(other.is_broadcast());
    }
}
