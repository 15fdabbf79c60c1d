//! A virtio driver for tests. It finds the device's structures by their capabilities, as real
//! drivers do, and keeps its rings in the bench's memory.

use std::time::{Duration, Instant};

use super::Bench;
use crate::device::Kind;
use crate::pci::Address;

// The addresses that the driver assigns to the BARs.
const BAR1: u64 = 0xc000_0000;
const BAR4: u64 = 0xd000_0000;
/// The lowest address of the driver's memory.
const HEAP: u64 = 0x1000;

/// VIRTIO 1.3, 6: the feature that every modern driver accepts.
pub const VERSION_1: u64 = 1 << 32;
/// Feature: notifications by index.
pub const EVENT_IDX: u64 = 1 << 29;
/// Feature: tables of descriptors.
pub const INDIRECT_DESC: u64 = 1 << 28;

/// Descriptor flag: the chain continues with the next descriptor.
pub const NEXT: u16 = 1;
/// Descriptor flag: the device writes the buffer.
pub const WRITE: u16 = 2;
/// Descriptor flag: the buffer is a table of descriptors.
pub const INDIRECT: u16 = 4;

// Registers of the common configuration.
const DRIVER_FEATURE: u64 = 12;
const NUM_QUEUES: u64 = 18;
const STATUS: u64 = 20;
const QUEUE_SELECT: u64 = 22;
const QUEUE_SIZE: u64 = 24;
const QUEUE_VECTOR: u64 = 26;
const QUEUE_ENABLE: u64 = 28;
const QUEUE_DESC: u64 = 32;
// The steps of the device status: ACKNOWLEDGE, DRIVER, FEATURES_OK, and then DRIVER_OK.
const STEPS: [u8; 3] = [1, 3, 11];
const DRIVER_OK: u8 = 15;

/// The driver's state of a queue.
#[derive(Clone, Debug, Default)]
pub struct Rings {
    pub size: u16,
    /// The addresses of the descriptor table, the available ring and the used ring.
    pub at: [u64; 3],
    available: u16,
    used: u16,
    next: u16,
}

/// A descriptor (VIRTIO 1.3, 2.7.5).
#[derive(Clone, Copy, Debug, Default)]
pub struct Descriptor {
    pub address: u64,
    pub length: u32,
    /// [`NEXT`], [`WRITE`] and [`INDIRECT`].
    pub flags: u16,
    pub next: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The first descriptor of the chain.
    pub head: u32,
    /// The number of bytes that the device reports as written.
    pub length: u32,
}

pub struct Driver<'a> {
    pub bench: &'a Bench,
    at: Address,
    structures: [u64; 4],
    step: u64,
    heap: u64,
    pub queues: Vec<Rings>,
}

/// The number of capability types: common, notify, ISR, device.
const KINDS: usize = 4;

impl<'a> Driver<'a> {
    /// Assigns addresses to the BARs, enables the function, and finds the structures.
    pub fn find(bench: &'a Bench, at: Address) -> Self {
        let config = |register: u64, value: u32| {
            bench.write(Kind::Config, at.config() + register, &value.to_le_bytes());
        };
        config(0x14, u32::try_from(BAR1).unwrap());
        config(0x20, u32::try_from(BAR4).unwrap());
        config(0x24, 0);
        config(0x04, 6);
        let mut driver =
            Self { bench, at, structures: [0; KINDS], step: 0, heap: HEAP, queues: Vec::new() };
        let byte = |at: u64| driver.config::<1>(at)[0];
        let word = |at: u64| u64::from(u32::from_le_bytes(driver.config(at)));
        let (mut found, mut step) = ([0; KINDS], 0);
        let mut capability = u64::from(byte(0x34));
        while capability != 0 {
            let kind = usize::from(byte(capability + 3));
            if byte(capability) == 9 && (1..=KINDS).contains(&kind) {
                assert_eq!(byte(capability + 4), 4, "the BAR of structure {kind}");
                found[kind - 1] = BAR4 + word(capability + 8);
                step = if kind == 2 { word(capability + 16) } else { step };
            }
            capability = u64::from(byte(capability + 1));
        }
        assert!(!found.contains(&0), "structures at {found:x?}");
        (driver.structures, driver.step) = (found, step);
        driver
    }

    pub fn config<const N: usize>(&self, register: u64) -> [u8; N] {
        self.bench.read(Kind::Config, self.at.config() + register)
    }

    /// Reads a register of the common configuration.
    pub fn common<const N: usize>(&self, register: u64) -> [u8; N] {
        self.bench.read(Kind::Memory, self.structures[0] + register)
    }

    pub fn set_common(&self, register: u64, data: &[u8]) {
        self.bench.write(Kind::Memory, self.structures[0] + register, data);
    }

    pub fn status(&self) -> u8 {
        self.common::<1>(STATUS)[0]
    }

    pub fn set_status(&self, status: u8) {
        self.set_common(STATUS, &[status]);
    }

    /// Reads the ISR byte, which clears it.
    pub fn isr(&self) -> u8 {
        self.bench.read::<1>(Kind::Memory, self.structures[2])[0]
    }

    /// Reads the device-specific configuration.
    pub fn device<const N: usize>(&self, offset: u64) -> [u8; N] {
        self.bench.read(Kind::Memory, self.structures[3] + offset)
    }

    pub fn set_device(&self, offset: u64, data: &[u8]) {
        self.bench.write(Kind::Memory, self.structures[3] + offset, data);
    }

    pub fn features(&self) -> u64 {
        let half = |select: u32| {
            self.set_common(0, &select.to_le_bytes());
            u64::from(u32::from_le_bytes(self.common(4)))
        };
        half(0) | half(1) << 32
    }

    /// Resets the device and negotiates these features and VERSION_1. Returns false if the device
    /// refuses.
    pub fn negotiate(&mut self, features: u64) -> bool {
        self.set_status(0);
        self.queues = vec![Rings::default(); usize::from(self.number(NUM_QUEUES))];
        self.set_status(STEPS[0]);
        self.set_status(STEPS[1]);
        for (select, half) in [(0_u32, features), (1, (features | VERSION_1) >> 32)] {
            self.set_common(8, &select.to_le_bytes());
            self.set_common(DRIVER_FEATURE, &half.to_le_bytes()[..4]);
        }
        self.set_status(STEPS[2]);
        self.status() == STEPS[2]
    }

    /// Reads a 16-bit register of the common configuration.
    pub fn number(&self, register: u64) -> u16 {
        u16::from_le_bytes(self.common(register))
    }

    /// Allocates memory of the driver, aligned to 16 bytes.
    pub fn allocate(&mut self, bytes: u64) -> u64 {
        let at = self.heap;
        self.heap += bytes.next_multiple_of(16);
        at
    }

    /// Allocates the rings of a queue and enables it. The queue's vector depends on its number.
    pub fn enable(&mut self, number: u16, size: u16) {
        let bytes = u64::from(size);
        let lengths = [16 * bytes, 6 + 2 * bytes, 6 + 8 * bytes];
        let at = lengths.map(|length| self.allocate(length));
        for (at, length) in at.into_iter().zip(lengths) {
            self.bench.memory.write(at, &vec![0; usize::try_from(length).unwrap()]).unwrap();
        }
        self.queues[usize::from(number)] = Rings { size, at, ..Rings::default() };
        self.set_common(QUEUE_SELECT, &number.to_le_bytes());
        self.set_common(QUEUE_SIZE, &size.to_le_bytes());
        self.set_common(QUEUE_VECTOR, &(number + 1).to_le_bytes());
        for (register, at) in (QUEUE_DESC..).step_by(8).zip(at) {
            // Write two halves, as the drivers for Windows do.
            self.set_common(register, &at.to_le_bytes()[..4]);
            self.set_common(register + 4, &at.to_le_bytes()[4..]);
        }
        self.set_common(QUEUE_ENABLE, &1_u16.to_le_bytes());
    }

    /// Sets DRIVER_OK: the device may start to work.
    pub fn start(&self) {
        self.set_status(DRIVER_OK);
    }

    pub fn write_descriptor(&self, queue: u16, index: u16, descriptor: Descriptor) {
        let mut bytes = descriptor.address.to_le_bytes().to_vec();
        bytes.extend(descriptor.length.to_le_bytes());
        bytes.extend(descriptor.flags.to_le_bytes());
        bytes.extend(descriptor.next.to_le_bytes());
        let table = self.queues[usize::from(queue)].at[0];
        self.bench.memory.write(table + 16 * u64::from(index), &bytes).unwrap();
    }

    /// Offers a chain of these pieces (address, length, whether the device writes it) and returns
    /// its head. Descriptors are used in turn.
    pub fn offer(&mut self, queue: u16, pieces: &[(u64, u32, bool)]) -> u16 {
        let rings = &self.queues[usize::from(queue)];
        let (size, first) = (rings.size, rings.next);
        let index = |count: usize| (first + u16::try_from(count).unwrap()) % size;
        for (count, (address, length, writes)) in pieces.iter().enumerate() {
            let chained = if count + 1 < pieces.len() { NEXT } else { 0 };
            let flags = chained | if *writes { WRITE } else { 0 };
            let (address, length, next) = (*address, *length, index(count + 1));
            let descriptor = Descriptor { address, length, flags, next };
            self.write_descriptor(queue, index(count), descriptor);
        }
        self.queues[usize::from(queue)].next = index(pieces.len());
        self.publish(queue, first);
        first
    }

    /// Adds the head of a chain to the available ring.
    pub fn publish(&mut self, queue: u16, head: u16) {
        let rings = &mut self.queues[usize::from(queue)];
        let slot = rings.at[1] + 4 + 2 * u64::from(rings.available % rings.size);
        rings.available = rings.available.wrapping_add(1);
        let (ring, index) = (rings.at[1], rings.available);
        self.bench.memory.write(slot, &head.to_le_bytes()).unwrap();
        self.bench.memory.write(ring + 2, &index.to_le_bytes()).unwrap();
    }

    pub fn kick(&self, queue: u16) {
        let bell = self.structures[1] + self.step * u64::from(queue);
        self.bench.write(Kind::Memory, bell, &queue.to_le_bytes());
    }

    /// Takes the next entry of the used ring, if there is one.
    pub fn take(&mut self, queue: u16) -> Option<Used> {
        let rings = &mut self.queues[usize::from(queue)];
        let mut index = [0; 2];
        self.bench.memory.read(rings.at[2] + 2, &mut index).unwrap();
        if u16::from_le_bytes(index) == rings.used {
            return None;
        }
        let mut entry = [0; 8];
        let slot = rings.at[2] + 4 + 8 * u64::from(rings.used % rings.size);
        self.bench.memory.read(slot, &mut entry).unwrap();
        rings.used = rings.used.wrapping_add(1);
        let [a, b, c, d, length @ ..] = entry;
        Some(Used { head: u32::from_le_bytes([a, b, c, d]), length: u32::from_le_bytes(length) })
    }

    /// Waits at most ten seconds for the next entry of the used ring.
    pub fn wait(&mut self, queue: u16) -> Used {
        let start = Instant::now();
        loop {
            if let Some(used) = self.take(queue) {
                return used;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "queue {queue}: no used entry");
            std::thread::yield_now();
        }
    }

    pub fn bytes(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.bench.memory.read(at, &mut bytes).unwrap();
        bytes
    }
}
