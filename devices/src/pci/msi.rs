//! MSI (PCI Local Bus 3.0, 6.8.1): one message with a 64-bit address, without a mask.
//!
//! Threats: the guest may set any message, which reaches only its own vCPUs. It may write its
//! registers in a loop, so an unchanged message is not sent to the kernel again.

use std::fmt;
use std::sync::{Mutex, MutexGuard};

use crate::hypervisor::{Message, Route};

pub(super) const ID: u8 = 0x05;
/// The capability after its ID and its link: control (64-bit address), address, data.
pub(super) const BODY: [u8; 12] = [0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// The bits of it that the guest can write: MSI enable, and the message.
pub(super) const WRITABLE: [u8; 12] =
    [1, 0, 0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];

/// The message in a capability. `None` while MSI is disabled.
pub(super) fn message(body: &[u8; 12]) -> Option<Message> {
    let [control, _, a, b, c, d, e, f, g, h, low, high] = *body;
    let address = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
    let data = u32::from_le_bytes([low, high, 0, 0]);
    (control & 1 != 0).then_some(Message { address, data })
}

/// The message of one function.
pub struct Msi {
    route: Box<dyn Route>,
    aim: Mutex<Aim>,
}

#[derive(Default)]
struct Aim {
    enabled: bool,
    /// The message that the route was last set to.
    message: Option<Message>,
    /// Whether the refusal of a message was logged.
    refused: bool,
}

impl Msi {
    pub(super) fn new(route: Box<dyn Route>) -> Self {
        Self { route, aim: Mutex::default() }
    }

    fn current(&self) -> MutexGuard<'_, Aim> {
        self.aim.lock().expect("no device panicked")
    }

    pub(super) fn aim(&self, message: Option<Message>) {
        let mut aim = self.current();
        aim.enabled = message.is_some();
        let Some(message) = message.filter(|it| aim.message != Some(*it)) else { return };
        aim.message = match self.route.set_message(message) {
            Ok(()) => Some(message),
            Err(error) => {
                // Log this once: the guest chooses the address, and can repeat this endlessly.
                if !std::mem::replace(&mut aim.refused, true) {
                    tracing::warn!("MSI cannot be routed: {error:#}");
                }
                None
            }
        };
    }

    /// Returns false if MSI is off.
    pub fn send(&self) -> bool {
        let aim = self.current();
        if aim.enabled && aim.message.is_some() {
            self.route.send();
        }
        aim.enabled
    }

    pub fn is_enabled(&self) -> bool {
        self.current().enabled
    }
}

impl fmt::Debug for Msi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Msi({})", if self.is_enabled() { "on" } else { "off" })
    }
}

#[cfg(test)]
mod test {
    use std::sync::Arc;

    use super::*;
    use crate::bus::Inert;
    use crate::device::Kind;
    use crate::pci::{Address, Id, Identity, Interrupt};
    use crate::testutil::Bench;

    const AT: Address = Address::new(2, 0);

    fn bench() -> (Bench, Interrupt) {
        let mut bench = Bench::new(4096);
        let kept = Arc::new(Mutex::new(None));
        let id = Id { vendor: 1, device: 2, class: 0xff_0000, revision: 0, subsystem: (0, 0) };
        let identity = Identity {
            at: Some(AT),
            msi: true,
            pin: Some(0),
            capabilities: vec![(0x12, vec![0x10, 0])],
            ..Identity::new(id)
        };
        let keep = kept.clone();
        bench
            .board
            .add("plain", |grants| {
                let slot = grants.pci(identity)?;
                *keep.lock().unwrap() = Some(slot.interrupt.clone());
                Ok(slot.wrap(Box::new(Inert(()))))
            })
            .unwrap();
        bench.board.run(Vec::new()).unwrap();
        let interrupt = kept.lock().unwrap().take().unwrap();
        (bench, interrupt)
    }

    fn set(bench: &Bench, register: u64, value: u32) {
        bench.write(Kind::Config, AT.config() + register, &value.to_le_bytes());
    }

    #[test]
    fn an_enabled_message_replaces_the_line_and_is_sent_as_written() {
        let (bench, interrupt) = bench();
        assert_eq!(bench.read(Kind::Config, AT.config() + 0x40), [5, 0x50, 0x80, 0]);
        assert_eq!(bench.read(Kind::Config, AT.config() + 0x50), [0x12, 0, 0x10, 0]);
        let line = interrupt.line.clone().unwrap();
        line.set(true);
        assert!(!interrupt.message(0) && bench.hypervisor.pins.is_high(22));
        set(&bench, 0x44, 0xfee0_1003);
        set(&bench, 0x48, 0);
        set(&bench, 0x4c, 0xabcd_0051);
        set(&bench, 0x40, 0x00ff_0000);
        assert!(interrupt.message(0) && !bench.hypervisor.pins.is_high(22));
        let sent = bench.hypervisor.sent.lock().unwrap().clone();
        assert_eq!(sent, [Message { address: 0xfee0_1000, data: 0x51 }]);
        assert_eq!(bench.read(Kind::Config, AT.config() + 0x42), [0x81, 0]);
    }

    #[test]
    fn it_is_saved_with_the_function_and_off_after_a_reset() {
        let (bench, interrupt) = bench();
        set(&bench, 0x44, 0xfee0_0000);
        set(&bench, 0x40, 0x0001_0000);
        let saved = bench.board.park();
        bench.board.reset().unwrap();
        assert!(!interrupt.message(0));
        bench.board.park();
        bench.board.run(saved).unwrap();
        assert!(interrupt.message(0));
    }
}
