//! A USB 3 host controller with sockets for devices of all speeds. Its registers are those of xHCI
//! 1.0; section numbers are those of xHCI 1.2. It has PCI class 0C0330, for which Windows, Linux
//! and UEFI firmware have a driver.
//!
//! BAR 0 has the registers, BAR 2 the MSI-X table. One thread processes the rings. The vCPUs leave
//! doorbells and resets in the registers for this thread, which sleeps on its kick and on the
//! events of the devices, so an idle controller costs nothing. There are no streams, no
//! hubs, no bandwidth negotiation, and link power states save no power. Isochronous transfers begin
//! as soon as the device takes them, whatever frame they are for.
//!
//! Threats: the guest owns rings, contexts and buffers, and writes them while we read. TRBs are
//! copied once and then checked. Chains and links are bounded. An address outside of memory stops
//! an endpoint, or stops the controller until a reset. Events that do not fit into an event ring
//! wait, and nothing new is processed meanwhile. A ring that never ends keeps this controller's
//! thread busy, as it would a vCPU. After a few thousand TRBs, resets and stops have their turn,
//! and so has each other busy endpoint.

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

use self::controller::{Controller, SavedState};
use self::registers::{BAR_SIZE, INTERRUPTERS, LEGACY_REGISTERS, Registers};
use super::{Ports, RootHub};
use crate::device::{Access, Device, Region, Saved};
use crate::grants::{Build, Grants};
use crate::pci::{Address, Bar, Id, Identity, Interrupt};
use crate::poller::Poller;
use host::memory::Memory;

/// The ID that Red Hat provides for emulated xHCI controllers. Drivers match the class.
const ID: Id = Id {
    vendor: 0x1b36,
    device: 0x000d,
    class: 0x0c_0330,
    revision: 1,
    subsystem: (0x1af4, 0x1100),
};
/// SBRN: USB 3.0. FLADJ: the standard frame length.
const SERIAL_BUS_RELEASE: std::ops::Range<u64> = 0x60..0x62;
const RELEASE: [u8; 2] = [0x30, 0x20];

/// The default number of sockets.
const SOCKETS: u8 = 8;
const MAX_SOCKETS: u8 = 15;

/// `--device xhci`: USB 2 and USB 3 ports for devices like `usb-tablet`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The PCI slot. By default, the first free one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
    /// The maximum number of devices, each at USB 2 or USB 3: 1 to 15, by default 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports: Option<u8>,
}

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let sockets = self.ports.unwrap_or(SOCKETS);
        ensure!(
            (1..=MAX_SOCKETS).contains(&sockets),
            "ports={sockets}: an xHCI controller can have 1 to {MAX_SOCKETS} ports"
        );
        let identity = Identity {
            at: self.slot,
            bars: vec![(0, Bar::Memory64(BAR_SIZE))],
            msix: Some((INTERRUPTERS, 2)),
            pin: Some(0),
            own_registers: vec![SERIAL_BUS_RELEASE],
            ..Identity::new(ID)
        };
        let slot = grants.pci(identity)?;
        let kick = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let root = Arc::new(RootHub::new(sockets.into(), kick.clone()));
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
            bar: slot.bar(0).region,
            config: slot.config,
            sockets,
            hub,
            start: Instant::now(),
            poller: None,
        };
        Ok(slot.wrap(Box::new(device)))
    }
}

/// State shared between the vCPUs and the controller's thread.
struct Shared {
    registers: Mutex<Registers>,
    memory: Memory,
    interrupt: Interrupt,
    kick: Arc<EventFd>,
    root: Arc<RootHub>,
}

impl Shared {
    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().expect("no device panicked")
    }

    fn kick(&self) {
        // If the counter is full, the thread is woken anyway.
        self.kick.write(1).ok();
    }
}

struct Xhci {
    shared: Arc<Shared>,
    bar: Region,
    config: Region,
    sockets: u8,
    hub: Arc<Ports>,
    /// The time when MFINDEX was zero.
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
        // Drivers read CAPLENGTH as a single byte.
        let within = usize::try_from(offset % 4).expect("less than 4");
        for (word, at) in data.chunks_mut(4).zip((offset & !3..).step_by(4)) {
            let bytes = registers.read(at, microframes).to_le_bytes();
            word.copy_from_slice(&bytes[within..within + word.len()]);
        }
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        let mut registers = self.shared.registers();
        let (mut offset, mut data) = (offset, data);
        let mut merged;
        if LEGACY_REGISTERS.contains(&offset) && data.len() < 4 {
            // Firmware and system each have a byte, and may write it alone (7.1.1).
            merged = registers.read(offset & !3, 0).to_le_bytes();
            let within = usize::try_from(offset % 4).expect("less than 4");
            let bytes = merged.get_mut(within..within + data.len());
            let Some(bytes) = bytes.filter(|_| region == self.bar) else { return Access::Ignored };
            bytes.copy_from_slice(data);
            (offset, data) = (offset & !3, &merged[..]);
        }
        let (words, rest) = data.as_chunks::<4>();
        let fits = offset.is_multiple_of(4) && rest.is_empty() && words.len() <= 2;
        if region != self.bar || !fits {
            return Access::Ignored;
        }
        let mut work = false;
        for (word, at) in words.iter().zip((offset..).step_by(4)) {
            work |= registers.write(at, u32::from_le_bytes(*word));
        }
        registers.update_interrupts(&self.shared.interrupt);
        drop(registers);
        if work {
            self.shared.kick();
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        let Some(poller) = self.poller.take() else { return Saved::default() };
        let saved = poller.stop().save();
        self.shared.kick.read().ok();
        Saved::of(&saved)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<SavedState> = saved.take()?;
        let saved = saved.unwrap_or_else(|| SavedState::new(self.sockets));
        saved.check(self.sockets)?;
        let controller = Controller::restore(&self.shared, saved)?;
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
