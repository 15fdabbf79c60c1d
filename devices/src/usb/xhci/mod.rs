//! A USB 3 host controller (xHCI 1.0 as of its registers; sections are those of xHCI 1.2), with
//! sockets for devices of all speeds. PCI class 0C0330, which Windows, Linux and UEFI firmware
//! bring a driver for.
//!
//! Registers are BAR 0, the MSI-X table BAR 2. One thread does what the rings ask for; processors
//! leave their doorbells and resets there for it. It sleeps on its kick and on the events of the
//! devices, so an idle controller costs nothing. There are no streams, no isochronous transfers, no
//! hubs, no bandwidth to negotiate, and links that save power save none.
//!
//! Threats: rings, contexts and buffers are the guest's, which writes them while we read. Blocks
//! are copied once and then judged; chains and links are bounded; an address that is no memory
//! stops an endpoint, or the controller until it is reset. What does not fit into an event ring
//! waits, and nothing new is done meanwhile. A ring that never ends keeps this controller's thread
//! busy, as it would a processor of the guest's; a reset and a stop have their turn after a few
//! thousand blocks, and so has each of the other endpoints that are busy.

mod command;
mod context;
mod controller;
mod endpoint;
mod events;
mod port;
mod registers;
mod transfer;
mod trb;

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use self::controller::{Controller, Frozen};
use self::registers::{BAR_SIZE, INTERRUPTERS, Registers};
use super::{Hub, Root};
use crate::device::{Access, Device, Region, Saved};
use crate::grants::{Build, Grants};
use crate::pci::{Address, Bar, Id, Identity, Interrupt};
use crate::poller::Poller;
use host::memory::Memory;

/// What Red Hat lends to emulated xHCI controllers. Drivers match the class.
const ID: Id = Id {
    vendor: 0x1b36,
    device: 0x000d,
    class: 0x0c_0330,
    revision: 1,
    subsystem: (0x1af4, 0x1100),
};
/// SBRN: USB 3.0; FLADJ: frames as long as they should be.
const SERIAL_BUS_RELEASE: std::ops::Range<u64> = 0x60..0x62;
const RELEASE: [u8; 2] = [0x30, 0x20];

/// Sockets if nobody says how many, and the most.
const SOCKETS: u8 = 8;
const MOST_SOCKETS: u8 = 15;

/// `--device xhci`: USB 2 and USB 3 ports for devices like `usb-tablet`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Its PCI slot; the first that is free if there is none given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
    /// How many devices can be plugged in: 1 to 15, each at USB 2 or USB 3; 8 if it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<u8>,
}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let sockets = self.ports.unwrap_or(SOCKETS);
        ensure!(
            (1..=MOST_SOCKETS).contains(&sockets),
            "ports={sockets}: an xHCI controller has 1 to {MOST_SOCKETS} of them here"
        );
        let identity = Identity {
            at: self.slot,
            bars: vec![(0, Bar::Memory64(BAR_SIZE))],
            msix: Some((INTERRUPTERS, 2)),
            pin: Some(0),
            own: vec![SERIAL_BUS_RELEASE],
            ..Identity::new(ID)
        };
        let slot = grants.pci(identity)?;
        let kick = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let root = Arc::new(Root::new(sockets.into(), kick.clone()));
        let shared = Shared {
            registers: Mutex::new(Registers::new(sockets)),
            memory: slot.memory.clone(),
            interrupt: slot.interrupt.clone(),
            kick,
            root: root.clone(),
        };
        let hub = grants.shared().usb.clone();
        hub.connect(root);
        let device = Xhci {
            shared: Arc::new(shared),
            bar: slot.bar(0).region(),
            config: slot.config,
            sockets,
            hub,
            start: Instant::now(),
            poller: None,
        };
        Ok(slot.carry(Box::new(device)))
    }
}

/// What processors and the controller's thread share.
struct Shared {
    registers: Mutex<Registers>,
    memory: Memory,
    interrupt: Interrupt,
    kick: Arc<EventFd>,
    root: Arc<Root>,
}

impl Shared {
    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().expect("no device panicked")
    }

    fn kick(&self) {
        // A bell that cannot take one more ring is rung already.
        self.kick.write(1).ok();
    }
}

struct Xhci {
    shared: Arc<Shared>,
    bar: Region,
    config: Region,
    sockets: u8,
    hub: Arc<Hub>,
    /// MFINDEX counts from here.
    start: Instant,
    poller: Option<Poller<Controller>>,
}

impl Xhci {
    fn microframes(&self) -> u32 {
        u32::try_from(self.start.elapsed().as_micros() / 125 % (1 << 14)).expect("14 bits")
    }
}

impl Device for Xhci {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if region == self.config {
            for (byte, at) in data.iter_mut().zip(offset..) {
                let at = usize::try_from(at.saturating_sub(SERIAL_BUS_RELEASE.start));
                *byte = at.ok().and_then(|at| RELEASE.get(at)).copied().unwrap_or(0);
            }
            return Access::Done;
        }
        let length = data.len() as u64;
        let fits = matches!(length, 1 | 2 | 4 | 8) && offset.is_multiple_of(length.min(4));
        if region != self.bar || !fits {
            return Access::Ignored;
        }
        let microframes = self.microframes();
        let registers = self.shared.registers();
        // Drivers read CAPLENGTH as the byte that it is.
        let within = usize::try_from(offset % 4).expect("less than 4");
        for (word, at) in data.chunks_mut(4).zip((offset & !3..).step_by(4)) {
            let bytes = registers.read(at, microframes).to_le_bytes();
            word.copy_from_slice(&bytes[within..within + word.len()]);
        }
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        let (words, rest) = data.as_chunks::<4>();
        let fits = offset.is_multiple_of(4) && rest.is_empty() && words.len() <= 2;
        if region != self.bar || !fits {
            return Access::Ignored;
        }
        let mut registers = self.shared.registers();
        let mut work = false;
        for (word, at) in words.iter().zip((offset..).step_by(4)) {
            work |= registers.write(at, u32::from_le_bytes(*word));
        }
        registers.settle(&self.shared.interrupt);
        drop(registers);
        if work {
            self.shared.kick();
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        let Some(poller) = self.poller.take() else { return Saved::default() };
        let frozen = poller.stop().freeze();
        self.shared.kick.read().ok();
        Saved::of(&frozen)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let frozen: Option<Frozen> = saved.take()?;
        let frozen = frozen.unwrap_or_else(|| Frozen::new(self.sockets));
        frozen.check(self.sockets)?;
        let controller = Controller::thaw(&self.shared, frozen)?;
        self.poller = Some(Poller::spawn("xhci", controller)?);
        Ok(())
    }
}

impl Drop for Xhci {
    fn drop(&mut self) {
        self.hub.disconnect(&self.shared.root);
    }
}

#[cfg(test)]
mod test;
