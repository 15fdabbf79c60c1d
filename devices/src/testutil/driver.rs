//! The driver's side of a virtio device, for tests: it finds the structures by their capabilities,
//! as drivers do, and keeps its rings in the bench's memory.

use std::time::{Duration, Instant};

use super::Bench;
use crate::device::Kind;
use crate::pci::Address;

/// Where it puts the function's BARs.
const BAR1: u64 = 0xc000_0000;
const BAR4: u64 = 0xd000_0000;
/// From where on it uses memory.
const HEAP: u64 = 0x1000;

/// VIRTIO 1.3, 6: what every modern driver accepts, and the two choices for rings.
pub const VERSION_1: u64 = 1 << 32;
/// Notifications by index.
pub const EVENT_IDX: u64 = 1 << 29;
/// Tables of descriptors.
pub const INDIRECT_DESC: u64 = 1 << 28;

/// Descriptor flags.
pub const NEXT: u16 = 1;
/// The device writes it.
pub const WRITE: u16 = 2;
/// It is a table.
pub const INDIRECT: u16 = 4;

/// The common configuration's registers.
const DRIVER_FEATURE: u64 = 12;
const NUM_QUEUES: u64 = 18;
const STATUS: u64 = 20;
const QUEUE_SELECT: u64 = 22;
const QUEUE_SIZE: u64 = 24;
const QUEUE_VECTOR: u64 = 26;
const QUEUE_ENABLE: u64 = 28;
const QUEUE_DESC: u64 = 32;
/// ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK.
const STEPS: [u8; 3] = [1, 3, 11];
const DRIVER_OK: u8 = 15;

/// One queue as its driver keeps it.
#[derive(Clone, Debug, Default)]
pub struct Rings {
    /// Entries.
    pub size: u16,
    /// Descriptor table, available ring, used ring.
    pub at: [u64; 3],
    available: u16,
    used: u16,
    next: u16,
}

/// What came back: the chain's head, and how many bytes the device says it wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The first descriptor of the chain.
    pub head: u32,
    /// Bytes.
    pub length: u32,
}

/// A driver that found its device.
pub struct Driver<'a> {
    /// The board that the device sits on.
    pub bench: &'a Bench,
    at: Address,
    structures: [u64; 4],
    step: u64,
    heap: u64,
    /// Its queues, by number.
    pub queues: Vec<Rings>,
}

/// Types of the capabilities: common, notify, ISR, device.
const KINDS: usize = 4;

impl<'a> Driver<'a> {
    /// Places the BARs, switches the function on, and finds the structures.
    ///
    /// # Panics
    ///
    /// When a structure is missing.
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

    /// Reads its configuration space.
    pub fn config<const N: usize>(&self, register: u64) -> [u8; N] {
        self.bench.read(Kind::Config, self.at.config() + register)
    }

    /// Reads a register of the common configuration.
    pub fn common<const N: usize>(&self, register: u64) -> [u8; N] {
        self.bench.read(Kind::Memory, self.structures[0] + register)
    }

    /// Writes one.
    pub fn set_common(&self, register: u64, data: &[u8]) {
        self.bench.write(Kind::Memory, self.structures[0] + register, data);
    }

    /// The device status.
    pub fn status(&self) -> u8 {
        self.common::<1>(STATUS)[0]
    }

    /// Sets it.
    pub fn set_status(&self, status: u8) {
        self.set_common(STATUS, &[status]);
    }

    /// Reads the ISR byte, which clears it.
    pub fn isr(&self) -> u8 {
        self.bench.read::<1>(Kind::Memory, self.structures[2])[0]
    }

    /// Reads the device's own configuration.
    pub fn device<const N: usize>(&self, offset: u64) -> [u8; N] {
        self.bench.read(Kind::Memory, self.structures[3] + offset)
    }

    /// Writes it.
    pub fn set_device(&self, offset: u64, data: &[u8]) {
        self.bench.write(Kind::Memory, self.structures[3] + offset, data);
    }

    /// All features that the device offers.
    pub fn features(&self) -> u64 {
        let half = |select: u32| {
            self.set_common(0, &select.to_le_bytes());
            u64::from(u32::from_le_bytes(self.common(4)))
        };
        half(0) | half(1) << 32
    }

    /// Resets the device and agrees on these features and VERSION_1; false if it does not.
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

    /// A 16-bit register of the common configuration.
    pub fn number(&self, register: u64) -> u16 {
        u16::from_le_bytes(self.common(register))
    }

    /// Memory of its own, aligned to 16 bytes.
    pub fn allocate(&mut self, bytes: u64) -> u64 {
        let at = self.heap;
        self.heap += bytes.next_multiple_of(16);
        at
    }

    /// Lays a queue out and enables it, with the vector that its number asks for.
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
            // In halves, as the drivers for Windows do.
            self.set_common(register, &at.to_le_bytes()[..4]);
            self.set_common(register + 4, &at.to_le_bytes()[4..]);
        }
        self.set_common(QUEUE_ENABLE, &1_u16.to_le_bytes());
    }

    /// The device may work now.
    pub fn start(&self) {
        self.set_status(DRIVER_OK);
    }

    /// Writes one descriptor.
    pub fn describe(
        &self,
        queue: u16,
        index: u16,
        (address, length): (u64, u32),
        link: (u16, u16),
    ) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(link.0.to_le_bytes());
        bytes.extend(link.1.to_le_bytes());
        let table = self.queues[usize::from(queue)].at[0];
        self.bench.memory.write(table + 16 * u64::from(index), &bytes).unwrap();
    }

    /// Offers a chain of these pieces (address, length, whether the device writes it) and answers
    /// with its head. Descriptors are used in turn.
    pub fn offer(&mut self, queue: u16, pieces: &[(u64, u32, bool)]) -> u16 {
        let rings = &self.queues[usize::from(queue)];
        let (size, first) = (rings.size, rings.next);
        let index = |count: usize| (first + u16::try_from(count).unwrap()) % size;
        for (count, (address, length, writes)) in pieces.iter().enumerate() {
            let next = if count + 1 < pieces.len() { NEXT } else { 0 };
            let flags = next | if *writes { WRITE } else { 0 };
            self.describe(queue, index(count), (*address, *length), (flags, index(count + 1)));
        }
        self.queues[usize::from(queue)].next = index(pieces.len());
        self.publish(queue, first);
        first
    }

    /// Puts a head into the available ring.
    pub fn publish(&mut self, queue: u16, head: u16) {
        let rings = &mut self.queues[usize::from(queue)];
        let slot = rings.at[1] + 4 + 2 * u64::from(rings.available % rings.size);
        rings.available = rings.available.wrapping_add(1);
        let (ring, index) = (rings.at[1], rings.available);
        self.bench.memory.write(slot, &head.to_le_bytes()).unwrap();
        self.bench.memory.write(ring + 2, &index.to_le_bytes()).unwrap();
    }

    /// Rings the doorbell.
    pub fn kick(&self, queue: u16) {
        let bell = self.structures[1] + self.step * u64::from(queue);
        self.bench.write(Kind::Memory, bell, &queue.to_le_bytes());
    }

    /// What the device gave back, if it did.
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

    /// Waits for it.
    ///
    /// # Panics
    ///
    /// When nothing comes for ten seconds.
    pub fn wait(&mut self, queue: u16) -> Used {
        let start = Instant::now();
        loop {
            if let Some(used) = self.take(queue) {
                return used;
            }
            assert!(start.elapsed() < Duration::from_secs(10), "queue {queue}: nothing came");
            std::thread::yield_now();
        }
    }

    /// Reads memory.
    pub fn bytes(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.bench.memory.read(at, &mut bytes).unwrap();
        bytes
    }
}
