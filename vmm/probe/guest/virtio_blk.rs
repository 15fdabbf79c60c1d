//! virtio-blk (VIRTIO 1.3, 5.2): one queue.
use crate::config::Function;
use crate::cpu::Cpu;
use crate::disk::{Disk, Operation, Request, Shape};
use crate::io::{read8, read32, write8, write32, write64};
use crate::memory::Room;
use crate::virtio::{Descriptor, NEXT, Queue, Transport, WRITE};

/// Device IDs: modern, and transitional.
const IDS: [u32; 2] = [0x1042, 0x1001];

const BLK_SIZE: u64 = 1 << 6;
const FLUSH: u64 = 1 << 9;
const CONFIG_WCE: u64 = 1 << 11;

/// Offsets in the device configuration: number of sectors, block size in bytes, and whether there
/// is a write-back cache.
const CAPACITY: u64 = 0;
const BLOCK: u64 = 20;
const WRITEBACK: u64 = 32;
const SECTOR: u64 = 512;

const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;

/// Descriptors of a request: header, data and status.
const DESCRIPTORS_PER_REQUEST: u16 = 3;

pub(crate) struct VirtioBlk {
    transport: Transport,
    queue: Queue,
    /// A header of 16 bytes and a status byte for each request, 32 bytes apart.
    headers: u64,
}

impl VirtioBlk {
    /// The first one on bus 0.
    pub(crate) fn find() -> Option<Function> {
        Transport::find(IDS)
    }

    /// Resets the disk and starts it, whatever its state.
    pub(crate) fn open(
        function: Function,
        room: &mut Room,
        interrupts: bool,
        cpu: &Cpu,
    ) -> Option<Self> {
        let wanted = BLK_SIZE | FLUSH | CONFIG_WCE;
        let transport = Transport::open(function, wanted, interrupts, cpu)?;
        let queue = transport.queue(0, room)?;
        transport.run();
        Some(Self { queue, headers: room.take(8192)?, transport })
    }
}

impl Disk for VirtioBlk {
    fn moved(&mut self, by: u64) {
        self.transport.moved(by);
        self.queue.moved(by);
    }

    fn shape(&self) -> Shape {
        let device = self.transport.device;
        let [low, high] = [0, 4].map(|at| u64::from(read32(device + CAPACITY + at)));
        let has_block_size = self.transport.features & BLK_SIZE != 0;
        Shape {
            kind: "virtio-blk",
            bytes: (high << 32 | low) * SECTOR,
            sector: if has_block_size { read32(device + BLOCK).into() } else { SECTOR },
            depth: usize::from(self.queue.size / DESCRIPTORS_PER_REQUEST),
            interrupts: self.transport.interrupts,
        }
    }

    fn write_through(&mut self, on: bool) -> bool {
        if self.transport.features & CONFIG_WCE == 0 {
            return !on;
        }
        let register = self.transport.device + WRITEBACK;
        write8(register, u8::from(!on));
        read8(register) == u8::from(!on)
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
        let first = tag as u16 * DESCRIPTORS_PER_REQUEST;
        let (data, status) = (first + 1, first + 2);
        let second = if request.length == 0 { status } else { data };
        let descriptor = |address, length, flags, next| Descriptor { address, length, flags, next };
        self.queue.describe(first, descriptor(header, 16, NEXT, second));
        let described = descriptor(request.address, request.length, NEXT | flags, status);
        self.queue.describe(data, described);
        self.queue.describe(status, descriptor(header + 16, 1, WRITE, 0));
        self.queue.put(first);
    }

    fn ring(&mut self) {
        self.queue.ring();
    }

    fn request_interrupt(&mut self) {
        self.queue.request_interrupt();
    }

    fn done(&mut self) -> Option<(usize, bool)> {
        let (first, _) = self.queue.done()?;
        let tag = first / u32::from(DESCRIPTORS_PER_REQUEST);
        let status = read8(self.headers + 32 * u64::from(tag) + 16);
        Some((tag as usize, status == 0))
    }
}
