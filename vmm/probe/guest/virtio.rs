//! virtio over PCI (VIRTIO 1.3, 4.1) with split queues (2.7): what all of its devices share.
use core::sync::atomic::{Ordering, fence};

use crate::config::Function;
use crate::cpu::Cpu;
use crate::io::{read8, read16, read32, write8, write16, write32, write64};
use crate::memory::Room;
use crate::msix;
use crate::paging::map_device;

const VENDOR: u32 = 0x1af4;
const VENDOR_CAPABILITY: u8 = 9;
const TYPE_COMMON: u32 = 1;
const TYPE_NOTIFY: u32 = 2;
const TYPE_DEVICE: u32 = 4;

/// The common configuration (4.1.4.3).
const DEVICE_FEATURE_SELECT: u64 = 0;
const DEVICE_FEATURE: u64 = 4;
const DRIVER_FEATURE_SELECT: u64 = 8;
const DRIVER_FEATURE: u64 = 12;
const DEVICE_STATUS: u64 = 20;
const CONFIG_MSIX_VECTOR: u64 = 16;
const QUEUE_SELECT: u64 = 22;
const QUEUE_SIZE: u64 = 24;
const QUEUE_MSIX_VECTOR: u64 = 26;
const QUEUE_ENABLE: u64 = 28;
const QUEUE_NOTIFY_OFF: u64 = 30;
const QUEUE_DESC: u64 = 32;
const QUEUE_DRIVER: u64 = 40;
const QUEUE_DEVICE: u64 = 48;

/// No interrupt.
const NO_VECTOR: u16 = 0xffff;

/// Device status: ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK.
const STATUS_ACKNOWLEDGE: u8 = 1;
const STATUS_DRIVER: u8 = 3;
const STATUS_FEATURES: u8 = 11;
const STATUS_RUNS: u8 = 15;

const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

/// Flags of a descriptor: another one follows; the device writes.
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
/// A driver that is no friend of interrupts, where indices do not say it.
const NO_INTERRUPT: u16 = 1;
/// A device that looks by itself.
const NO_NOTIFY: u16 = 1;

const ENTRIES: u16 = 256;
/// So often in the queue's indices the place of the next interrupt is moved out of reach.
const AHEAD: u16 = 0x4000;

/// A device that was taken over.
pub(crate) struct Transport {
    function: Function,
    common: u64,
    notify_register: u8,
    notify: u64,
    /// Its own configuration.
    pub(crate) device: u64,
    pub(crate) features: u64,
    /// The first vector interrupts us.
    pub(crate) interrupts: bool,
}

impl Transport {
    /// The first one on bus 0 with one of these device identifiers.
    pub(crate) fn find(ids: [u32; 2]) -> Option<Function> {
        Function::all().find(|at| {
            let id = at.read(0);
            id & 0xffff == VENDOR && ids.contains(&(id >> 16))
        })
    }

    /// Takes the device over from whoever had it, with those of the wanted features that it has,
    /// and with interrupts if they are wanted.
    pub(crate) fn open(
        function: Function,
        wanted: u64,
        interrupts: bool,
        cpu: &Cpu,
    ) -> Option<Self> {
        function.switch_on();
        let place = |kind| place(function, kind, cpu);
        let (_, common) = place(TYPE_COMMON)?;
        let (notify_register, notify) = place(TYPE_NOTIFY)?;
        let (_, device) = place(TYPE_DEVICE)?;
        let features = negotiate(common, wanted | EVENT_IDX | VERSION_1)?;
        let interrupts = interrupts && msix::switch_on(function, cpu);
        write16(common + CONFIG_MSIX_VECTOR, NO_VECTOR);
        Some(Self { function, common, notify_register, notify, device, features, interrupts })
    }

    /// Gives the device a queue.
    pub(crate) fn queue(&self, number: u16, room: &mut Room) -> Option<Queue> {
        let common = self.common;
        write16(common + QUEUE_SELECT, number);
        let size = read16(common + QUEUE_SIZE).min(ENTRIES);
        if size == 0 {
            return None;
        }
        write16(common + QUEUE_SIZE, size);
        let vector = if self.interrupts { 0 } else { NO_VECTOR };
        write16(common + QUEUE_MSIX_VECTOR, vector);
        if read16(common + QUEUE_MSIX_VECTOR) != vector {
            return None;
        }
        let step = u64::from(self.function.read(self.notify_register + 16));
        let queue = Queue {
            number,
            size,
            bell: self.notify + u64::from(read16(common + QUEUE_NOTIFY_OFF)) * step,
            by_index: self.features & EVENT_IDX != 0,
            descriptors: room.take(4096)?,
            available: room.take(4096)?,
            used: room.take(4096)?,
            put: 0,
            told: 0,
            seen: 0,
        };
        let areas = [queue.descriptors, queue.available, queue.used];
        for (register, address) in [QUEUE_DESC, QUEUE_DRIVER, QUEUE_DEVICE].into_iter().zip(areas) {
            write32(common + register, address as u32);
            write32(common + register + 4, (address >> 32) as u32);
        }
        queue.want_no_interrupt();
        write16(common + QUEUE_ENABLE, 1);
        Some(queue)
    }

    /// All queues are there.
    pub(crate) fn run(&self) {
        write8(self.common + DEVICE_STATUS, STATUS_RUNS);
    }
}

/// The register of a structure's capability, and where the structure is.
fn place(function: Function, kind: u32, cpu: &Cpu) -> Option<(u8, u64)> {
    let at =
        function.capabilities(VENDOR_CAPABILITY).find(|&at| function.read(at) >> 24 == kind)?;
    let (bar, offset) = (function.read(at + 4) as u8, function.read(at + 8));
    let address = function.memory(bar)?.checked_add(offset.into())?;
    Some((at, map_device(address, function.read(at + 12).into(), cpu)?))
}

fn negotiate(common: u64, wanted: u64) -> Option<u64> {
    write8(common + DEVICE_STATUS, 0);
    while read8(common + DEVICE_STATUS) != 0 {}
    // One step at a time (3.1.1): there are devices that take nothing else.
    write8(common + DEVICE_STATUS, STATUS_ACKNOWLEDGE);
    write8(common + DEVICE_STATUS, STATUS_DRIVER);
    let half = |index: u32| {
        write32(common + DEVICE_FEATURE_SELECT, index);
        u64::from(read32(common + DEVICE_FEATURE)) << (32 * index)
    };
    let features = (half(0) | half(1)) & wanted;
    for index in [0, 1] {
        write32(common + DRIVER_FEATURE_SELECT, index);
        write32(common + DRIVER_FEATURE, (features >> (32 * index)) as u32);
    }
    write8(common + DEVICE_STATUS, STATUS_FEATURES);
    let agreed = read8(common + DEVICE_STATUS) == STATUS_FEATURES;
    (agreed && features & VERSION_1 != 0).then_some(features)
}

/// A split queue.
pub(crate) struct Queue {
    number: u16,
    pub(crate) size: u16,
    bell: u64,
    /// Both sides say by index when they want to hear of something.
    by_index: bool,
    descriptors: u64,
    available: u64,
    used: u64,
    put: u16,
    told: u16,
    seen: u16,
}

impl Queue {
    /// Writes a descriptor: where, how much, its flags and the next one.
    pub(crate) fn describe(
        &self,
        index: u16,
        address: u64,
        length: u32,
        (flags, next): (u16, u16),
    ) {
        let at = self.descriptors + 16 * u64::from(index);
        write64(at, address);
        write32(at + 8, length);
        write16(at + 12, flags);
        write16(at + 14, next);
    }

    /// Makes the chain that begins with this descriptor available, once [`Queue::ring`] tells.
    pub(crate) fn put(&mut self, first: u16) {
        write16(self.available + 4 + 2 * u64::from(self.put % self.size), first);
        self.put = self.put.wrapping_add(1);
    }

    pub(crate) fn ring(&mut self) {
        fence(Ordering::Release);
        write16(self.available + 2, self.put);
        // The index is seen before the device's wish is read.
        fence(Ordering::SeqCst);
        if self.is_to_be_told() {
            write16(self.bell, self.number);
        }
        self.told = self.put;
    }

    fn is_to_be_told(&self) -> bool {
        if !self.by_index {
            return read16(self.used) & NO_NOTIFY == 0;
        }
        // 2.7.10.1: whether the index passed the one that the device named.
        let event = read16(self.used + 4 + 8 * u64::from(self.size));
        let passed = self.put.wrapping_sub(event).wrapping_sub(1);
        passed < self.put.wrapping_sub(self.told)
    }

    /// The first descriptor of a chain that was used, and how much was written to it.
    pub(crate) fn done(&mut self) -> Option<(u32, u32)> {
        if read16(self.used + 2) == self.seen {
            return None;
        }
        fence(Ordering::Acquire);
        let at = self.used + 4 + 8 * u64::from(self.seen % self.size);
        self.seen = self.seen.wrapping_add(1);
        if self.seen % AHEAD == 0 {
            self.want_no_interrupt();
        }
        Some((read32(at), read32(at + 4)))
    }

    /// Asks for an interrupt with the next chain that is used.
    pub(crate) fn listen(&self) {
        if self.by_index {
            self.want_interrupt_at(self.seen);
        } else {
            write16(self.available, 0);
        }
        // The wish is seen before we look again.
        fence(Ordering::SeqCst);
    }

    /// Names an index that is far away as the one to interrupt at.
    fn want_no_interrupt(&self) {
        if self.by_index {
            self.want_interrupt_at(self.seen.wrapping_add(2 * AHEAD));
        } else {
            write16(self.available, NO_INTERRUPT);
        }
    }

    fn want_interrupt_at(&self, index: u16) {
        write16(self.available + 4 + 2 * u64::from(self.size), index);
    }
}
