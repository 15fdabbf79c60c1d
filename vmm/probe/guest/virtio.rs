//! virtio over PCI (VIRTIO 1.3, 4.1) with split queues (2.7): the parts that all devices share.
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

/// The vector number that means no interrupt.
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
/// The driver wants no interrupts. Used without EVENT_IDX.
const NO_INTERRUPT: u16 = 1;
/// The device wants no notifications. Used without EVENT_IDX.
const NO_NOTIFY: u16 = 1;

const ENTRIES: u16 = 256;
/// Distance by which the index of the next interrupt is moved out of reach.
const AHEAD: u16 = 0x4000;

/// A device that was reset and configured.
pub(crate) struct Transport {
    function: Function,
    common: u64,
    notify_register: u8,
    notify: u64,
    /// The address of the device-specific configuration.
    pub(crate) device: u64,
    pub(crate) features: u64,
    /// Whether the first vector interrupts this processor.
    pub(crate) interrupts: bool,
}

impl Transport {
    /// The first device on bus 0 with one of these device IDs.
    pub(crate) fn find(ids: [u32; 2]) -> Option<Function> {
        Function::all().find(|at| {
            let id = at.read(0);
            id & 0xffff == VENDOR && ids.contains(&(id >> 16))
        })
    }

    /// Resets the device. Negotiates the wanted features that it has, and enables interrupts if
    /// they are wanted.
    pub(crate) fn open(
        function: Function,
        wanted: u64,
        interrupts: bool,
        cpu: &Cpu,
    ) -> Option<Self> {
        function.switch_on();
        let structure = |kind| structure(function, kind, cpu);
        let (_, common) = structure(TYPE_COMMON)?;
        let (notify_register, notify) = structure(TYPE_NOTIFY)?;
        let (_, device) = structure(TYPE_DEVICE)?;
        let features = negotiate(common, wanted | EVENT_IDX | VERSION_1)?;
        let interrupts = interrupts && msix::switch_on(function, cpu);
        write16(common + CONFIG_MSIX_VECTOR, NO_VECTOR);
        Some(Self { function, common, notify_register, notify, device, features, interrupts })
    }

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
            doorbell: self.notify + u64::from(read16(common + QUEUE_NOTIFY_OFF)) * step,
            by_index: self.features & EVENT_IDX != 0,
            descriptors: room.take(4096)?,
            available: room.take(4096)?,
            used: room.take(4096)?,
            put: 0,
            notified: 0,
            seen: 0,
        };
        let areas = [queue.descriptors, queue.available, queue.used];
        for (register, address) in [QUEUE_DESC, QUEUE_DRIVER, QUEUE_DEVICE].into_iter().zip(areas) {
            write32(common + register, address as u32);
            write32(common + register + 4, (address >> 32) as u32);
        }
        queue.suppress_interrupts();
        write16(common + QUEUE_ENABLE, 1);
        Some(queue)
    }

    /// Adds `by` to the addresses of the registers, after their BAR moved.
    pub(crate) fn moved(&mut self, by: u64) {
        for address in [&mut self.common, &mut self.notify, &mut self.device] {
            *address = address.wrapping_add(by);
        }
    }

    /// Starts the device, once all queues are set up.
    pub(crate) fn run(&self) {
        write8(self.common + DEVICE_STATUS, STATUS_RUNS);
    }
}

/// The offset of a structure's capability, and the mapped address of the structure.
fn structure(function: Function, kind: u32, cpu: &Cpu) -> Option<(u8, u64)> {
    let at =
        function.capabilities(VENDOR_CAPABILITY).find(|&at| function.read(at) >> 24 == kind)?;
    let (bar, offset) = (function.read(at + 4) as u8, function.read(at + 8));
    let address = function.memory(bar)?.checked_add(offset.into())?;
    Some((at, map_device(address, function.read(at + 12).into(), cpu)?))
}

fn negotiate(common: u64, wanted: u64) -> Option<u64> {
    write8(common + DEVICE_STATUS, 0);
    while read8(common + DEVICE_STATUS) != 0 {}
    // Set one bit at a time (3.1.1): some devices accept nothing else.
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

/// A descriptor: a buffer, its flags and the next descriptor of the chain.
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

pub(crate) struct Queue {
    number: u16,
    pub(crate) size: u16,
    doorbell: u64,
    /// Whether both sides request notifications by index (EVENT_IDX).
    by_index: bool,
    descriptors: u64,
    available: u64,
    used: u64,
    put: u16,
    notified: u16,
    seen: u16,
}

impl Queue {
    pub(crate) fn describe(&self, index: u16, descriptor: Descriptor) {
        let Descriptor { address, length, flags, next } = descriptor;
        let at = self.descriptors + 16 * u64::from(index);
        write64(at, address);
        write32(at + 8, length);
        write16(at + 12, flags);
        write16(at + 14, next);
    }

    /// Adds `by` to the address of the doorbell, after its BAR moved.
    pub(crate) fn moved(&mut self, by: u64) {
        self.doorbell = self.doorbell.wrapping_add(by);
    }

    /// Queues the chain that begins with this descriptor. [`Queue::ring`] makes it available.
    pub(crate) fn put(&mut self, first: u16) {
        write16(self.available + 4 + 2 * u64::from(self.put % self.size), first);
        self.put = self.put.wrapping_add(1);
    }

    pub(crate) fn ring(&mut self) {
        fence(Ordering::Release);
        write16(self.available + 2, self.put);
        // The device must see the index before its notification request is read.
        fence(Ordering::SeqCst);
        if self.needs_notification() {
            write16(self.doorbell, self.number);
        }
        self.notified = self.put;
    }

    fn needs_notification(&self) -> bool {
        if !self.by_index {
            return read16(self.used) & NO_NOTIFY == 0;
        }
        // 2.7.10.1: whether the index has passed the one that the device requested.
        let event = read16(self.used + 4 + 8 * u64::from(self.size));
        let passed = self.put.wrapping_sub(event).wrapping_sub(1);
        passed < self.put.wrapping_sub(self.notified)
    }

    /// The first descriptor of a used chain, and the number of bytes written to it.
    pub(crate) fn done(&mut self) -> Option<(u32, u32)> {
        if read16(self.used + 2) == self.seen {
            return None;
        }
        fence(Ordering::Acquire);
        let at = self.used + 4 + 8 * u64::from(self.seen % self.size);
        self.seen = self.seen.wrapping_add(1);
        if self.seen % AHEAD == 0 {
            self.suppress_interrupts();
        }
        Some((read32(at), read32(at + 4)))
    }

    /// Requests an interrupt for the next used chain.
    pub(crate) fn request_interrupt(&self) {
        if self.by_index {
            self.set_interrupt_index(self.seen);
        } else {
            write16(self.available, 0);
        }
        // The device must see the request before the queue is polled again.
        fence(Ordering::SeqCst);
    }

    /// Suppresses interrupts by requesting one at a distant index.
    fn suppress_interrupts(&self) {
        if self.by_index {
            self.set_interrupt_index(self.seen.wrapping_add(2 * AHEAD));
        } else {
            write16(self.available, NO_INTERRUPT);
        }
    }

    fn set_interrupt_index(&self, index: u16) {
        write16(self.available + 4 + 2 * u64::from(self.size), index);
    }
}
