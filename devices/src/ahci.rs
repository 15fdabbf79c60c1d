//! An AHCI controller (AHCI 1.3.1) with one port, as the ICH9 has it (8086:2922): a disk or a
//! CD-ROM drive for which every system has a driver. PCI class 010601.
//!
//! Each drive has a controller of its own, like every other disk here: its thread, its channel and
//! its interrupt (MSI, or the line). BAR 5 has the registers, BAR 4 the index-data pair. A vCPU
//! that writes a register only stores the value. Only if it resets the controller or the link, it
//! waits for the requests in flight. Not supported: port multipliers, power states of the link,
//! command coalescing, security and host protected areas.
//!
//! Threats: the guest writes the command list, its tables and all registers at any time. Commands
//! are copied once and then checked. Addresses are checked on every access; lists outside of memory
//! halt the port until the guest restarts it. The work in flight is bounded (`port.rs`).

mod ata;
pub mod cdrom;
pub mod disk;
mod drive;
mod fis;
mod identify;
mod list;
mod log;
mod port;
mod registers;
mod target;

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use anyhow::Context;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::Errno;

use self::fis::Fis;
use self::port::{Port, SavedState, SharedPort};
use self::registers::{HBFS, Registers};
use self::target::Target;
use crate::device::{Access, Device, Region, Saved};
use crate::grants::Grants;
use crate::pci::{Address, Bar, Id, Identity, Interrupt};
use crate::poller::Poller;
use host::memory::Memory;

/// The SATA controller of the ICH9 in AHCI mode. Drivers match the class.
const ID: Id = Id {
    vendor: 0x8086,
    device: 0x2922,
    class: 0x01_0601,
    revision: 2,
    subsystem: (0x1af4, 0x1100),
};

/// ABAR, the BAR of the registers, and its size.
const ABAR: u8 = 5;
const ABAR_SIZE: u64 = 0x1000;
/// The BAR of the index-data pair (AHCI 1.3.1, 11.1), its size, and the offsets of its registers.
const IDP_BAR: u8 = 4;
const IDP_SIZE: u64 = 32;
const INDEX: u64 = 0x10;
const DATA: u64 = 0x14;
/// The SATA capability: revision 1.0, and the place of the index-data pair (BAR 4, dword 4).
const SATA: (u8, [u8; 6]) = (0x12, [0x10, 0, 0x48, 0, 0, 0]);
/// Registers of the ICH9 (datasheet 316972, 14.1): MAP, which selects AHCI mode, and PCS, with port
/// 0 enabled and present.
const MAP: u64 = 0x90;
/// Configuration registers that are our own: MAP and PCS.
const OWN: Range<u64> = MAP..0x94;
const MAP_AND_PCS: [u8; 4] = [0x40, 0, 0x01, 0x01];

/// State shared by the vCPUs and the port's thread.
struct Shared {
    registers: Mutex<Registers>,
    memory: Memory,
    interrupt: Interrupt,
    /// Notified when the port's thread has carried out a reset.
    was_reset: Condvar,
    /// Signaled when the port's thread has work.
    kick: OwnedFd,
    /// Readable when there is work, or the medium has finished a request.
    events: OwnedFd,
}

impl Shared {
    fn new(memory: Memory, interrupt: Interrupt) -> anyhow::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC).context("an epoll for a port")?;
        let kick = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let kick = kick.context("an event for a port")?;
        let (registers, was_reset) = Default::default();
        let shared = Self { registers, memory, interrupt, was_reset, kick, events };
        shared.watch(&shared.kick)?;
        Ok(shared)
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().expect("no device panicked")
    }

    /// Changes the registers, then the interrupt accordingly.
    fn update<T>(&self, change: impl FnOnce(&mut Registers) -> T) -> T {
        let mut registers = self.registers();
        let result = change(&mut registers);
        let signal = registers.settle();
        if let Some(line) = &self.interrupt.line {
            line.set(signal.line);
        }
        if signal.message {
            self.interrupt.message(0);
        }
        result
    }

    /// Replaces the registers. An interrupt that is raised already sends no message again.
    fn restore(&self, registers: Registers) {
        if let Some(line) = &self.interrupt.line {
            line.set(registers.raised);
        }
        *self.registers() = registers;
        self.kick();
    }

    /// Writes a FIS of the device to the guest's memory, if the driver wants it.
    fn post(&self, registers: &mut Registers, fis: &Fis) {
        let Some(area) = registers.fis_area() else { return };
        let at = area.saturating_add(fis.at);
        if self.memory.write(at, &fis.bytes).is_err() {
            registers.halt(HBFS);
        }
    }

    /// Waits until the port's thread has carried out all resets. After a reset of the link,
    /// Windows' driver waits only 30 ms for the device, and gives up the memory of all commands
    /// without a further look at the registers.
    fn wait_for_resets(&self) {
        let resets = |it: &mut Registers| it.requests.hba_reset || it.requests.link_reset;
        drop(self.was_reset.wait_while(self.registers(), resets).expect("no device panicked"));
    }

    fn kick(&self) {
        // If the counter is full, the thread is woken anyway.
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).ok();
    }

    fn clear_kick(&self) {
        rustix::io::read(&self.kick, &mut [0; 8]).ok();
    }

    fn events(&self) -> RawFd {
        self.events.as_raw_fd()
    }

    /// Adds a file descriptor to the events. Closing it removes it again.
    fn watch(&self, event: impl AsFd) -> anyhow::Result<()> {
        let data = epoll::EventData::new_u64(0);
        match epoll::add(&self.events, event, data, epoll::EventFlags::IN) {
            // A disk passes the ring of its last channel on to the next one.
            Err(Errno::EXIST) => Ok(()),
            added => added.context("an event of a disk"),
        }
    }
}

/// The controller, and the regions of its registers.
struct Ahci {
    shared: Arc<Shared>,
    port: SharedPort,
    poller: Option<Poller<SharedPort>>,
    config: Region,
    index_data: Region,
}

/// Builds a controller with a drive at its port. Returns the port for the operator.
fn attach(
    target: Target,
    at: Option<Address>,
    grants: &mut dyn Grants,
) -> anyhow::Result<(Box<dyn Device>, SharedPort)> {
    let identity = Identity {
        at,
        bars: vec![(IDP_BAR, Bar::Port(IDP_SIZE)), (ABAR, Bar::Memory32(ABAR_SIZE))],
        msi: true,
        pin: Some(0),
        capabilities: vec![(SATA.0, SATA.1.to_vec())],
        own_registers: vec![OWN],
        ..Identity::new(ID)
    };
    let slot = grants.pci(identity)?;
    let shared = Arc::new(Shared::new(slot.memory.clone(), slot.interrupt.clone())?);
    let port = SharedPort(Arc::new(Mutex::new(Port::new(shared.clone(), target))));
    let (config, index_data) = (slot.config, slot.bar(IDP_BAR).region);
    let device = Ahci { shared, port: port.clone(), poller: None, config, index_data };
    Ok((slot.wrap(Box::new(device)), port))
}

impl Ahci {
    fn set(&self, offset: u64, value: u32) {
        if self.shared.update(|registers| registers.write(offset, value)) {
            self.shared.kick();
            if self.poller.is_some() {
                self.shared.wait_for_resets();
            }
        }
    }

    fn read_index_data(&self, offset: u64) -> Option<u32> {
        let registers = self.shared.registers();
        match offset {
            INDEX => Some(registers.index()),
            DATA => Some(registers.read(registers.index().into())),
            _ => None,
        }
    }

    fn write_index_data(&self, offset: u64, value: u32) -> Access {
        match offset {
            INDEX => self.shared.registers().set_index(value),
            DATA => {
                let index = self.shared.registers().index();
                self.set(index.into(), value);
            }
            _ => return Access::Ignored,
        }
        Access::Done
    }
}

impl Device for Ahci {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if region == self.config {
            for (byte, at) in data.iter_mut().zip(offset.saturating_sub(MAP)..) {
                let at = usize::try_from(at).unwrap_or(usize::MAX);
                *byte = MAP_AND_PCS.get(at).copied().unwrap_or(0);
            }
            return Access::Done;
        }
        let first = offset & !3;
        let skip = usize::try_from(offset - first).unwrap_or(0);
        let words = if skip + data.len() > 4 { 2 } else { 1 };
        let mut bytes = [0; 8];
        if skip + data.len() > 4 * words || words == 2 && skip > 0 {
            return Access::Ignored;
        }
        for (word, at) in bytes.chunks_mut(4).zip((first..).step_by(4)).take(words) {
            let value = if region == self.index_data {
                self.read_index_data(at)
            } else {
                Some(self.shared.registers().read(at))
            };
            let Some(value) = value else { return Access::Ignored };
            word.copy_from_slice(&value.to_le_bytes());
        }
        data.copy_from_slice(&bytes[skip..skip + data.len()]);
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        if region == self.config {
            return Access::Done;
        }
        let (words, rest) = data.as_chunks::<4>();
        if !offset.is_multiple_of(4) || !rest.is_empty() || words.len() > 2 {
            return Access::Ignored;
        }
        let mut access = Access::Done;
        for (word, at) in words.iter().zip((offset..).step_by(4)) {
            let value = u32::from_le_bytes(*word);
            if region != self.index_data {
                self.set(at, value);
            } else if self.write_index_data(at, value) == Access::Ignored {
                access = Access::Ignored;
            }
        }
        access
    }

    fn park(&mut self) -> Saved {
        let Some(poller) = self.poller.take() else { return Saved::default() };
        poller.stop();
        let saved = self.port.lock().park();
        self.shared.clear_kick();
        Saved::of(&saved)
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<SavedState> = saved.take()?;
        self.port.lock().run(saved)?;
        self.poller = Some(Poller::spawn("ahci", self.port.clone())?);
        Ok(())
    }
}

#[cfg(test)]
mod test;
