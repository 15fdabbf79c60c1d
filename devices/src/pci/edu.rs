//! QEMU's educational device 1234:11e8 (docs/specs/edu.rst): liveness, factorials, interrupts and
//! DMA. The probe and the benchmarks use it: it is the smallest device with all parts of a fast
//! one, namely a worker thread, MSI-X and a doorbell that does not leave the kernel.
//!
//! Differences to QEMU's device: it has MSI-X (one vector, BAR 1) instead of MSI. DMA reaches all
//! of memory and starts at once. A command without its start bit is stored. Writing 1 to the
//! doorbell at 0x9C runs the programmed DMA.
//!
//! Threats: the guest chooses source, destination and count. A transfer that leaves the buffer or
//! memory moves nothing, and completes like any other. The computation of a factorial ends once the
//! result stays zero, so no argument keeps the worker busy for long. The guest can have one running
//! job of each kind. Further rings in the meantime count as one.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Address, Bar, Id, Identity, Interrupt};
use crate::bytes::Bytes;
use crate::device::{Access, Device, Region, Saved};
use crate::grants::{Build, Grants};
use crate::worker::Worker;
use host::memory::Memory;

/// `--device edu,slot=04.0`
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// PCI slot. Defaults to the first free slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
}

// Registers in BAR 0. Those below `DMA_SOURCE` are 4 bytes wide, the others 4 or 8.
const IDENTIFICATION: u64 = 0x00;
/// Version 1.0, "edu".
const VERSION: u32 = 0x0100_00ed;
const LIVENESS: u64 = 0x04;
const FACTORIAL: u64 = 0x08;
const STATUS: u64 = 0x20;
const INTERRUPT_STATUS: u64 = 0x24;
const INTERRUPT_RAISE: u64 = 0x60;
const INTERRUPT_ACKNOWLEDGE: u64 = 0x64;
const DMA_SOURCE: u64 = 0x80;
const DMA_DESTINATION: u64 = 0x88;
const DMA_COUNT: u64 = 0x90;
const DMA_COMMAND: u64 = 0x98;
/// Not in QEMU's device: runs the programmed DMA.
const DMA_DOORBELL: u64 = 0x9c;
const BAR_SIZE: u64 = 1 << 20;

// STATUS: a factorial is being computed, and its end raises an interrupt.
const COMPUTING: u32 = 1 << 0;
const FACTORIAL_INTERRUPT: u32 = 1 << 7;
// INTERRUPT_STATUS: the bits that the device sets.
const FACTORIAL_DONE: u32 = 1 << 0;
const DMA_DONE: u32 = 1 << 8;
// DMA_COMMAND: start, direction from the buffer to memory, raise an interrupt at the end.
const START: u64 = 1 << 0;
const TO_MEMORY: u64 = 1 << 1;
const DMA_INTERRUPT: u64 = 1 << 2;
const COMMAND_KEPT: u64 = START | TO_MEMORY | DMA_INTERRUPT;

// The DMA address of the device's own buffer, and its length.
const BUFFER: u64 = 0x4_0000;
const BUFFER_SIZE: usize = 4096;

// The numbers of the worker's bells.
const KICK: usize = 0;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let id = Id {
            vendor: 0x1234,
            device: 0x11e8,
            class: 0x00_ff00,
            revision: 0x10,
            subsystem: (0x1af4, 0x1100),
        };
        let identity = Identity {
            at: self.slot,
            bars: vec![(0, Bar::Memory32(BAR_SIZE))],
            msix: Some((1, 1)),
            pin: Some(0),
            ..Identity::new(id)
        };
        let slot = grants.pci(identity)?;
        let device = Edu {
            registers: Arc::new(Mutex::new(Registers::new(slot.interrupt.clone()))),
            memory: slot.memory.clone(),
            kick: Arc::new(EventFd::new(EFD_NONBLOCK)?),
            doorbell: slot.bar(0).doorbell(DMA_DOORBELL, 4, Some(1))?,
            worker: None,
        };
        Ok(slot.wrap(Box::new(device)))
    }
}

/// The registers, without the buffer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    liveness: u32,
    factorial: u32,
    status: u32,
    interrupts: u32,
    dma: Dma,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Dma {
    source: u64,
    destination: u64,
    count: u64,
    command: u64,
}

#[derive(Default, Serialize, Deserialize)]
struct SavedState {
    state: State,
    buffer: Bytes<BUFFER_SIZE>,
    /// The doorbell was rung, and the worker has not handled it yet.
    rung: bool,
}

/// The registers, shared by the vCPUs and the worker.
struct Registers {
    state: State,
    interrupt: Interrupt,
}

impl Registers {
    fn new(interrupt: Interrupt) -> Self {
        Self { state: State::default(), interrupt }
    }

    fn raise(&mut self, bits: u32) {
        self.state.interrupts |= bits;
        if self.state.interrupts != 0 && !self.interrupt.message(0) {
            self.level();
        }
    }

    fn acknowledge(&mut self, bits: u32) {
        self.state.interrupts &= !bits;
        self.level();
    }

    /// Sets the line: high while an interrupt is not acknowledged.
    fn level(&self) {
        if let Some(line) = &self.interrupt.line {
            line.set(self.state.interrupts != 0);
        }
    }

    fn read(&self, offset: u64) -> Option<u64> {
        let state = &self.state;
        Some(match offset {
            IDENTIFICATION => VERSION.into(),
            LIVENESS => state.liveness.into(),
            FACTORIAL => state.factorial.into(),
            STATUS => state.status.into(),
            INTERRUPT_STATUS => state.interrupts.into(),
            DMA_SOURCE => state.dma.source,
            DMA_DESTINATION => state.dma.destination,
            DMA_COUNT => state.dma.count,
            DMA_COMMAND => state.dma.command,
            _ => return None,
        })
    }

    /// Writes a register of four bytes. Returns true if the worker has work, `None` if there is no
    /// such register.
    fn write(&mut self, offset: u64, value: u32) -> Option<bool> {
        let state = &mut self.state;
        match offset {
            LIVENESS => state.liveness = !value,
            FACTORIAL if state.status & COMPUTING == 0 => {
                state.factorial = value;
                state.status |= COMPUTING;
                return Some(true);
            }
            STATUS => state.status = state.status & COMPUTING | value & FACTORIAL_INTERRUPT,
            INTERRUPT_RAISE => self.raise(value),
            INTERRUPT_ACKNOWLEDGE => self.acknowledge(value),
            // Read-only registers, and the argument while a factorial is being computed.
            IDENTIFICATION | FACTORIAL | INTERRUPT_STATUS => {}
            _ => return None,
        }
        Some(false)
    }

    /// Writes a register of the DMA. They cannot be changed while a transfer runs.
    fn program(&mut self, offset: u64, value: u64) -> Option<bool> {
        let mut dma = self.state.dma;
        match offset {
            DMA_SOURCE => dma.source = value,
            DMA_DESTINATION => dma.destination = value,
            DMA_COUNT => dma.count = value,
            DMA_COMMAND => dma.command = value & COMMAND_KEPT,
            _ => return None,
        }
        if self.state.dma.command & START != 0 {
            return Some(false);
        }
        self.state.dma = dma;
        Some(dma.command & START != 0)
    }
}

impl Dma {
    /// Performs the transfer, unless it leaves the buffer or memory.
    fn run(self, buffer: &mut [u8], memory: &Memory) {
        let ours = if self.command & TO_MEMORY == 0 { self.destination } else { self.source };
        let start = ours.checked_sub(BUFFER).and_then(|start| usize::try_from(start).ok());
        let count = usize::try_from(self.count).ok();
        let range = start.zip(count).and_then(|(start, count)| {
            let end = start.checked_add(count)?;
            buffer.get_mut(start..end)
        });
        let Some(bytes) = range else { return };
        // Missing memory, or disabled bus mastering, is the driver's mistake: the buffer or the
        // memory stays unchanged.
        if self.command & TO_MEMORY == 0 {
            memory.read(self.source, bytes).ok();
        } else {
            memory.write(self.destination, bytes).ok();
        }
    }
}

/// `n!` modulo 2^32.
fn factorial(n: u32) -> u32 {
    // From 34! on, the result has 32 factors of two.
    if n >= 34 { 0 } else { (1..=n).fold(1, u32::wrapping_mul) }
}

/// Handles the bell number `bell`, on the worker.
fn work(registers: &Mutex<Registers>, memory: &Memory, buffer: &mut [u8], bell: usize) {
    let lock = || registers.lock().expect("no device panicked");
    if bell != KICK {
        lock().state.dma.command |= START;
    }
    let state = lock().state.clone();
    if state.status & COMPUTING != 0 {
        let result = factorial(state.factorial);
        let mut registers = lock();
        registers.state.factorial = result;
        registers.state.status &= !COMPUTING;
        // Read the flag now: the guest may have set it in the meantime.
        if registers.state.status & FACTORIAL_INTERRUPT != 0 {
            registers.raise(FACTORIAL_DONE);
        }
    }
    if state.dma.command & START != 0 {
        state.dma.run(buffer, memory);
        let mut registers = lock();
        registers.state.dma.command &= !START;
        if state.dma.command & DMA_INTERRUPT != 0 {
            registers.raise(DMA_DONE);
        }
    }
}

struct Edu {
    registers: Arc<Mutex<Registers>>,
    memory: Memory,
    /// Wakes the worker after a write to a register.
    kick: Arc<EventFd>,
    doorbell: Arc<EventFd>,
    /// Owns the buffer while the device runs.
    worker: Option<Worker<Bytes<BUFFER_SIZE>>>,
}

impl Device for Edu {
    fn read(&mut self, _: Region, offset: u64, data: &mut [u8]) -> Access {
        let wide = data.len() == 8 && offset >= DMA_SOURCE;
        if data.len() != 4 && !wide {
            return Access::Ignored;
        }
        let value = self.registers.lock().expect("no device panicked").read(offset);
        let Some(value) = value else { return Access::Ignored };
        data.copy_from_slice(&value.to_le_bytes()[..data.len()]);
        Access::Done
    }

    fn write(&mut self, _: Region, offset: u64, data: &[u8]) -> Access {
        let mut registers = self.registers.lock().expect("no device panicked");
        let work = if let Ok(data) = <[u8; 4]>::try_from(data) {
            let value = u32::from_le_bytes(data);
            if offset == DMA_DOORBELL {
                // The host does not support doorbells. Only the value 1 rings.
                if value == 1 {
                    self.doorbell.write(1).ok();
                }
                return Access::Done;
            }
            registers.write(offset, value).or_else(|| registers.program(offset, value.into()))
        } else if let Ok(data) = <[u8; 8]>::try_from(data) {
            registers.program(offset, u64::from_le_bytes(data))
        } else {
            None
        };
        match work {
            None => return Access::Ignored,
            // If the write fails because the counter is full, the bell is rung already.
            Some(true) => drop(self.kick.write(1)),
            Some(false) => {}
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        // The buffer of a device that never ran is empty.
        let buffer = self.worker.take().map(Worker::stop).unwrap_or_default();
        // The registers contain the work that the kick announced.
        self.kick.read().ok();
        let rung = self.doorbell.read().is_ok();
        let state = self.registers.lock().expect("no device panicked").state.clone();
        Saved::of(&SavedState { state, buffer, rung })
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let SavedState { state, buffer, rung } = saved.take()?;
        let pending = state.status & COMPUTING != 0 || state.dma.command & START != 0;
        let mut registers = self.registers.lock().expect("no device panicked");
        registers.state = state;
        registers.level();
        drop(registers);
        if pending {
            self.kick.write(1)?;
        }
        if rung {
            self.doorbell.write(1)?;
        }
        let bells = vec![self.kick.clone(), self.doorbell.clone()];
        let (registers, memory) = (self.registers.clone(), self.memory.clone());
        let step =
            move |buffer: &mut Bytes<_>, bell| work(&registers, &memory, &mut buffer[..], bell);
        self.worker = Some(Worker::spawn("edu", buffer, bells, step)?);
        Ok(())
    }
}

#[cfg(test)]
mod test;
