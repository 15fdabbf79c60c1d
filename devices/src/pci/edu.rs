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

/// A transfer programmed by the guest.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Dma {
    source: u64,
    destination: u64,
    count: u64,
    command: u64,
}

/// The saved state.
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
mod test {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::device::Kind;
    use crate::hypervisor::Doorbell;
    use crate::testutil::Bench;

    const AT: Address = Address::new(4, 0);
    const BAR0: u64 = 0xc000_0000;
    const BAR1: u64 = 0xd000_0000;
    /// INTA of slot 4.
    const GSI: u32 = 20;

    /// A device set up for a driver: BARs have addresses, memory decoding and bus mastering are on.
    fn bench() -> Bench {
        let mut bench = Bench::new(1 << 20);
        bench.board.add("edu", |grants| Config { slot: Some(AT) }.build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        set_config(&bench, 0x10, 0xc000_0000);
        set_config(&bench, 0x14, 0xd000_0000);
        set_config(&bench, 0x04, 6);
        bench
    }

    fn set_config(bench: &Bench, at: u64, value: u32) {
        bench.write(Kind::Config, AT.config() + at, &value.to_le_bytes());
    }

    fn get(bench: &Bench, at: u64) -> u32 {
        u32::from_le_bytes(bench.read(Kind::Memory, BAR0 + at))
    }

    fn set(bench: &Bench, at: u64, value: u32) {
        bench.write(Kind::Memory, BAR0 + at, &value.to_le_bytes());
    }

    fn set_wide(bench: &Bench, at: u64, value: u64) {
        bench.write(Kind::Memory, BAR0 + at, &value.to_le_bytes());
    }

    fn wait(event: &str, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(10), "timeout: {event}");
            std::thread::yield_now();
        }
    }

    fn program(bench: &Bench, source: u64, destination: u64, count: u64) {
        set_wide(bench, DMA_SOURCE, source);
        set_wide(bench, DMA_DESTINATION, destination);
        set_wide(bench, DMA_COUNT, count);
    }

    /// Runs a DMA as in the specification's example.
    fn dma(bench: &Bench, command: u64, source: u64, destination: u64, count: u64) {
        program(bench, source, destination, count);
        set_wide(bench, DMA_COMMAND, command | START);
        wait("the end of the DMA", || get(bench, DMA_COMMAND) & 1 == 0);
    }

    fn memory(bench: &Bench, at: u64) -> [u8; 4] {
        let mut data = [0; 4];
        bench.memory.read(at, &mut data).unwrap();
        data
    }

    #[test]
    fn says_what_it_is_and_that_it_lives() {
        let bench = bench();
        assert_eq!(get(&bench, IDENTIFICATION), 0x0100_00ed);
        set(&bench, LIVENESS, 0x1234_5678);
        assert_eq!(get(&bench, LIVENESS), !0x1234_5678);
        assert_eq!(bench.read(Kind::Config, AT.config()), [0x34, 0x12, 0xe8, 0x11]);
        assert_eq!(bench.read(Kind::Config, AT.config() + 8), [0x10, 0, 0xff, 0]);
    }

    #[test]
    fn wrong_widths_and_offsets_find_nobody() {
        let bench = bench();
        set_wide(&bench, LIVENESS, 0);
        bench.write(Kind::Memory, BAR0 + LIVENESS, &[0; 2]);
        assert_eq!(get(&bench, LIVENESS), 0, "as at power-on");
        assert_eq!(bench.read(Kind::Memory, BAR0), [0xff; 8]);
        assert_eq!(bench.read(Kind::Memory, BAR0 + DMA_SOURCE), [0xff; 2]);
        for at in [0x0c, 0x02, 0x60, 0x84, 0x9c, 0xa0, BUFFER, BAR_SIZE - 4] {
            assert_eq!(get(&bench, at), u32::MAX, "{at:#x}");
        }
        set_wide(&bench, DMA_SOURCE, 0x1_0000_0002);
        assert_eq!(bench.read(Kind::Memory, BAR0 + DMA_SOURCE), 0x1_0000_0002_u64.to_le_bytes());
        assert_eq!(get(&bench, DMA_SOURCE), 2);
    }

    #[test]
    fn computes_factorials_and_tells_by_wire_until_it_is_acknowledged() {
        let bench = bench();
        for (n, result) in [(0, 1), (5, 120), (13, 1_932_053_504), (33, 1 << 31), (u32::MAX, 0)] {
            set(&bench, FACTORIAL, n);
            wait("the factorial", || get(&bench, STATUS) & COMPUTING == 0);
            assert_eq!(get(&bench, FACTORIAL), result, "{n}!");
        }
        assert!(!bench.hypervisor.pins.is_high(GSI));
        set(&bench, STATUS, u32::MAX);
        assert_eq!(get(&bench, STATUS), FACTORIAL_INTERRUPT);
        set(&bench, FACTORIAL, 3);
        wait("the interrupt", || bench.hypervisor.pins.is_high(GSI));
        set(&bench, INTERRUPT_RAISE, 0x30);
        assert_eq!(get(&bench, INTERRUPT_STATUS), 0x31);
        set(&bench, INTERRUPT_ACKNOWLEDGE, 0x21);
        assert!(bench.hypervisor.pins.is_high(GSI), "one cause is left");
        set(&bench, INTERRUPT_ACKNOWLEDGE, 0x10);
        assert!(!bench.hypervisor.pins.is_high(GSI));
    }

    #[test]
    fn msix_replaces_the_wire() {
        let bench = bench();
        bench.write(Kind::Memory, BAR1, &0xfee0_0000_u64.to_le_bytes());
        bench.write(Kind::Memory, BAR1 + 8, &0x41_u64.to_le_bytes());
        set_config(&bench, 0x40, 0x8000_0000);
        dma(&bench, DMA_INTERRUPT, 0, BUFFER, 16);
        wait("the message", || bench.hypervisor.sent.lock().unwrap().len() == 1);
        assert_eq!(bench.hypervisor.sent.lock().unwrap()[0].data, 0x41);
        assert_eq!(get(&bench, INTERRUPT_STATUS), DMA_DONE);
        assert_eq!(bench.hypervisor.pins.edges(GSI), 0);
    }

    #[test]
    fn moves_memory_into_its_buffer_and_out_again() {
        let bench = bench();
        bench.memory.write(0x1000, b"abcd").unwrap();
        dma(&bench, 0, 0x1000, BUFFER + 4092, 4);
        dma(&bench, TO_MEMORY, BUFFER + 4092, 0x2001, 4);
        assert_eq!(&memory(&bench, 0x2001), b"abcd");
    }

    #[test]
    fn a_transfer_out_of_bounds_moves_nothing_and_is_finished() {
        let bench = bench();
        bench.memory.write(0, &[7; 8192]).unwrap();
        dma(&bench, 0, 0, BUFFER, 4096);
        for (source, count) in [
            (BUFFER - 1, 4),
            (BUFFER + 4093, 4),
            (BUFFER, 4097),
            (BUFFER + 4097, 0),
            (u64::MAX, 1),
            (BUFFER, u64::MAX),
            (BUFFER + 1, u64::MAX),
        ] {
            bench.memory.write(0x3000, b"kept").unwrap();
            dma(&bench, TO_MEMORY | DMA_INTERRUPT, source, 0x3000, count);
            assert_eq!(&memory(&bench, 0x3000), b"kept", "{source:#x} {count:#x}");
            wait("the interrupt", || get(&bench, INTERRUPT_STATUS) == DMA_DONE);
            set(&bench, INTERRUPT_ACKNOWLEDGE, DMA_DONE);
        }
        dma(&bench, TO_MEMORY, BUFFER, u64::MAX - 2, 4);
        dma(&bench, 0, 1 << 40, BUFFER, 4);
        set_config(&bench, 0x04, 2);
        dma(&bench, TO_MEMORY, BUFFER, 0x3000, 4);
        assert_eq!(&memory(&bench, 0x3000), b"kept", "the driver allowed no bus mastering");
    }

    #[test]
    fn the_doorbell_moves_along_and_runs_what_is_programmed() {
        let bench = bench();
        let bell = |address| Doorbell { kind: Kind::Memory, address, length: 4, value: Some(1) };
        assert_eq!(*bench.hypervisor.bells.lock().unwrap(), [bell(BAR0 + DMA_DOORBELL)]);
        bench.memory.write(0x1000, b"ring").unwrap();
        dma(&bench, 0, 0x1000, BUFFER, 4);
        program(&bench, BUFFER, 0x2000, 4);
        set(&bench, DMA_COMMAND, 6);
        assert_eq!(get(&bench, DMA_COMMAND), 6, "kept, and not started");
        set(&bench, DMA_DOORBELL, 2);
        set(&bench, DMA_DOORBELL, 1);
        wait("the transfer", || &memory(&bench, 0x2000) == b"ring");
        wait("the interrupt", || bench.hypervisor.pins.is_high(GSI));
        set_config(&bench, 0x10, 0xc010_0000);
        assert_eq!(
            *bench.hypervisor.bells.lock().unwrap(),
            [bell(BAR0 + (1 << 20) + DMA_DOORBELL)]
        );
    }

    #[test]
    fn what_was_pending_goes_on_after_a_park_and_is_gone_after_a_reset() {
        let bench = bench();
        bench.memory.write(0x1000, b"data").unwrap();
        dma(&bench, 0, 0x1000, BUFFER, 4);
        program(&bench, BUFFER, 0x2000, 4);
        set(&bench, LIVENESS, 5);
        let freeze = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut json = serde_json::to_value(bench.board.park()).unwrap();
            change(&mut json[0][1]["device"]);
            bench.board.run(serde_json::from_value(json).unwrap()).unwrap();
        };
        freeze(&|it| {
            assert_eq!(it["rung"], false);
            it["state"]["dma"]["command"] = (START | TO_MEMORY).into();
            it["state"]["status"] = (COMPUTING | FACTORIAL_INTERRUPT).into();
            it["state"]["factorial"] = 4.into();
        });
        wait("the factorial", || bench.hypervisor.pins.is_high(GSI));
        assert_eq!((get(&bench, FACTORIAL), get(&bench, LIVENESS)), (24, !5));
        wait("the transfer", || get(&bench, DMA_COMMAND) & 1 == 0);
        assert_eq!(&memory(&bench, 0x2000), b"data");
        bench.memory.write(0x2000, b"none").unwrap();
        freeze(&|it| it["rung"] = true.into());
        wait("the transfer of the doorbell", || &memory(&bench, 0x2000) == b"data");
        assert!(bench.hypervisor.pins.is_high(GSI), "not acknowledged yet");
        bench.board.reset().unwrap();
        assert!(!bench.hypervisor.pins.is_high(GSI));
        set_config(&bench, 0x10, 0xc000_0000);
        set_config(&bench, 0x04, 6);
        assert_eq!([LIVENESS, FACTORIAL, STATUS, DMA_COUNT].map(|at| get(&bench, at)), [0; 4]);
        dma(&bench, TO_MEMORY, BUFFER, 0x2000, 4);
        assert_eq!(memory(&bench, 0x2000), [0; 4], "the buffer is empty again");
    }

    #[test]
    fn refuses_a_buffer_of_another_size() {
        let bench = bench();
        let mut json = serde_json::to_value(bench.board.park()).unwrap();
        json[0][1]["device"]["buffer"] = "00".repeat(4095).into();
        let error = bench.board.run(serde_json::from_value(json).unwrap()).unwrap_err();
        assert!(format!("{error:#}").contains("8190 hexadecimal digits"), "{error:#}");
    }
}
