//! virtio-blk over PCI (VIRTIO 1.3, 4.1 and 5.2): one queue, polled, without any interrupt.
use core::sync::atomic::{Ordering, fence};

use crate::cpu::Cpu;
use crate::disk::{Disk, Operation, Request, Shape};
use crate::io::{read8, read16, read32, write8, write16, write32, write64};
use crate::memory::{Room, map_device};
use crate::pci::Function;

const VENDOR: u32 = 0x1af4;
/// A modern device, and one that old drivers know, too.
const IDS: [u32; 2] = [0x1042, 0x1001];
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
const QUEUE_SELECT: u64 = 22;
const QUEUE_SIZE: u64 = 24;
const QUEUE_ENABLE: u64 = 28;
const QUEUE_NOTIFY_OFF: u64 = 30;
const QUEUE_DESC: u64 = 32;
const QUEUE_DRIVER: u64 = 40;
const QUEUE_DEVICE: u64 = 48;

/// Device status: ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK.
const STATUS_DRIVER: u8 = 3;
const STATUS_FEATURES: u8 = 11;
const STATUS_RUNS: u8 = 15;

const BLK_SIZE: u64 = 1 << 6;
const FLUSH: u64 = 1 << 9;
const CONFIG_WCE: u64 = 1 << 11;
const EVENT_IDX: u64 = 1 << 29;
const VERSION_1: u64 = 1 << 32;

/// The disk's configuration: sectors, bytes of a block, and whether writes may wait in caches.
const CAPACITY: u64 = 0;
const BLOCK: u64 = 20;
const WRITEBACK: u64 = 32;
const SECTOR: u64 = 512;

const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// A driver that is no friend of interrupts, where indices do not say it.
const NO_INTERRUPT: u16 = 1;
/// A device that looks by itself.
const NO_NOTIFY: u16 = 1;

const ENTRIES: u16 = 256;
/// Header, data and status of each request have descriptors of their own.
const EACH: u16 = 3;
/// So often in the queue's indices the place of the next interrupt is moved out of reach.
const AHEAD: u16 = 0x4000;

/// A disk, and its queue in memory.
pub(crate) struct VirtioBlk {
    device: u64,
    bell: u64,
    features: u64,
    size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    /// 16 bytes of header and a status byte for each request, 32 bytes apart.
    headers: u64,
    put: u16,
    told: u16,
    seen: u16,
}

impl VirtioBlk {
    /// The first one on bus 0.
    pub(crate) fn find() -> Option<Function> {
        Function::all().find(|at| {
            let id = at.read(0);
            id & 0xffff == VENDOR && IDS.contains(&(id >> 16))
        })
    }

    /// Takes the disk over from whoever had it.
    pub(crate) fn open(function: Function, room: &mut Room, cpu: &Cpu) -> Option<Self> {
        function.switch_on();
        let place = |kind| place(function, kind, cpu);
        let (_, common) = place(TYPE_COMMON)?;
        let (notify_register, notify) = place(TYPE_NOTIFY)?;
        let (_, device) = place(TYPE_DEVICE)?;
        let features = negotiate(common)?;
        write16(common + QUEUE_SELECT, 0);
        let size = read16(common + QUEUE_SIZE).min(ENTRIES);
        write16(common + QUEUE_SIZE, size);
        let mut disk = Self {
            device,
            bell: 0,
            features,
            size,
            descriptors: room.take(4096)?,
            available: room.take(4096)?,
            used: room.take(4096)?,
            headers: room.take(8192)?,
            put: 0,
            told: 0,
            seen: 0,
        };
        let areas = [disk.descriptors, disk.available, disk.used];
        for (register, address) in [QUEUE_DESC, QUEUE_DRIVER, QUEUE_DEVICE].into_iter().zip(areas) {
            write32(common + register, address as u32);
            write32(common + register + 4, (address >> 32) as u32);
        }
        let step = u64::from(function.read(notify_register + 16));
        disk.bell = notify + u64::from(read16(common + QUEUE_NOTIFY_OFF)) * step;
        write16(disk.available, NO_INTERRUPT);
        disk.want_no_interrupt();
        write16(common + QUEUE_ENABLE, 1);
        write8(common + DEVICE_STATUS, STATUS_RUNS);
        Some(disk)
    }

    fn descriptor(&self, index: u16, address: u64, length: u32, (flags, next): (u16, u16)) {
        let at = self.descriptors + 16 * u64::from(index);
        write64(at, address);
        write32(at + 8, length);
        write16(at + 12, flags);
        write16(at + 14, next);
    }

    /// Names an index that is far away as the one to interrupt at.
    fn want_no_interrupt(&self) {
        let event = self.seen.wrapping_add(2 * AHEAD);
        write16(self.available + 4 + 2 * u64::from(self.size), event);
    }

    fn is_to_be_told(&self) -> bool {
        if self.features & EVENT_IDX == 0 {
            return read16(self.used) & NO_NOTIFY == 0;
        }
        // 2.7.10.1: whether the index passed the one that the device named.
        let event = read16(self.used + 4 + 8 * u64::from(self.size));
        let passed = self.put.wrapping_sub(event).wrapping_sub(1);
        passed < self.put.wrapping_sub(self.told)
    }
}

/// The register of a structure's capability, and where the structure is.
fn place(function: Function, kind: u32, cpu: &Cpu) -> Option<(u8, u64)> {
    let at =
        function.capabilities(VENDOR_CAPABILITY).find(|&at| function.read(at) >> 24 == kind)?;
    let (bar, offset) = (function.read(at + 4) as u8, function.read(at + 8));
    let address = function.memory(bar) + u64::from(offset);
    map_device(address, function.read(at + 12).into(), cpu).then_some((at, address))
}

fn negotiate(common: u64) -> Option<u64> {
    write8(common + DEVICE_STATUS, 0);
    while read8(common + DEVICE_STATUS) != 0 {}
    write8(common + DEVICE_STATUS, STATUS_DRIVER);
    let half = |index: u32| {
        write32(common + DEVICE_FEATURE_SELECT, index);
        u64::from(read32(common + DEVICE_FEATURE)) << (32 * index)
    };
    let features = (half(0) | half(1)) & (BLK_SIZE | FLUSH | CONFIG_WCE | EVENT_IDX | VERSION_1);
    for index in [0, 1] {
        write32(common + DRIVER_FEATURE_SELECT, index);
        write32(common + DRIVER_FEATURE, (features >> (32 * index)) as u32);
    }
    write8(common + DEVICE_STATUS, STATUS_FEATURES);
    let agreed = read8(common + DEVICE_STATUS) == STATUS_FEATURES;
    (agreed && features & VERSION_1 != 0).then_some(features)
}

impl Disk for VirtioBlk {
    fn shape(&self) -> Shape {
        let [low, high] = [0, 4].map(|at| u64::from(read32(self.device + CAPACITY + at)));
        let told = self.features & BLK_SIZE != 0;
        Shape {
            kind: "virtio-blk",
            bytes: (high << 32 | low) * SECTOR,
            sector: if told { read32(self.device + BLOCK).into() } else { SECTOR },
            depth: usize::from(self.size / EACH),
        }
    }

    fn write_through(&mut self, on: bool) -> bool {
        if self.features & CONFIG_WCE == 0 {
            return !on;
        }
        write8(self.device + WRITEBACK, u8::from(!on));
        read8(self.device + WRITEBACK) == u8::from(!on)
    }

    fn put(&mut self, tag: usize, request: &Request) {
        let header = self.headers + 32 * tag as u64;
        let (kind, flags) = match request.operation {
            Operation::Read => (TYPE_IN, WRITE),
            Operation::Write => (TYPE_OUT, 0),
            Operation::Flush => (TYPE_FLUSH, 0),
        };
        write32(header, kind);
        write32(header + 4, 0);
        write64(header + 8, request.offset / SECTOR);
        write8(header + 16, 0xff);
        let first = tag as u16 * EACH;
        let (data, status) = (first + 1, first + 2);
        let second = if request.length == 0 { status } else { data };
        self.descriptor(first, header, 16, (NEXT, second));
        self.descriptor(data, request.address, request.length, (NEXT | flags, status));
        self.descriptor(status, header + 16, 1, (WRITE, 0));
        write16(self.available + 4 + 2 * u64::from(self.put % self.size), first);
        self.put = self.put.wrapping_add(1);
    }

    fn ring(&mut self) {
        fence(Ordering::Release);
        write16(self.available + 2, self.put);
        // The index is seen before the device's wish is read.
        fence(Ordering::SeqCst);
        if self.is_to_be_told() {
            write16(self.bell, 0);
        }
        self.told = self.put;
    }

    fn done(&mut self) -> Option<(usize, bool)> {
        if read16(self.used + 2) == self.seen {
            return None;
        }
        fence(Ordering::Acquire);
        let tag = read32(self.used + 4 + 8 * u64::from(self.seen % self.size)) / u32::from(EACH);
        self.seen = self.seen.wrapping_add(1);
        if self.seen % AHEAD == 0 {
            self.want_no_interrupt();
        }
        let status = read8(self.headers + 32 * u64::from(tag) + 16);
        Some((tag as usize, status == 0))
    }
}
