//! NVMe (NVM Express 1.4): one pair of I/O queues, with doorbells in memory if the controller
//! supports them (5.7, Doorbell Buffer Config).
use core::sync::atomic::{Ordering, fence};

use crate::config::Function;
use crate::cpu::Cpu;
use crate::disk::{DEPTH, Disk, Operation, Request, Shape};
use crate::io::{read8, read16, read32, read64, write32, write64};
use crate::memory::Room;
use crate::msix;
use crate::paging::map_device;

/// Class code: mass storage, non-volatile memory, NVM Express.
const CLASS: u32 = 0x01_0802;
const BAR_SIZE: u64 = 0x2000;
const PAGE: u64 = 4096;

const CAP: u64 = 0x00;
const CC: u64 = 0x14;
const CSTS: u64 = 0x1c;
const AQA: u64 = 0x24;
const ASQ: u64 = 0x28;
const ACQ: u64 = 0x30;
const DOORBELLS: u64 = 0x1000;
/// CC: enabled, with entries of 64 and 16 bytes.
const RUN: u32 = 1 | 6 << 16 | 4 << 20;
const READY: u32 = 1;
const TIMEOUT_MS: u64 = 30_000;

const CREATE_SQ: u32 = 0x01;
const CREATE_CQ: u32 = 0x05;
/// Flags of a queue.
const CONTIGUOUS: u32 = 1;
const INTERRUPTS: u32 = 2;
const IDENTIFY: u32 = 0x06;
const DOORBELL_BUFFER: u32 = 0x7c;
/// Identify: a namespace, the controller.
const NAMESPACE: u32 = 0;
const CONTROLLER: u32 = 1;
/// Identify Controller: optional admin commands, and the bit of Doorbell Buffer Config.
const OACS: u64 = 256;
const OACS_DOORBELLS: u16 = 1 << 8;

const FLUSH: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;
const FUA: u32 = 1 << 30;

const ADMIN_ENTRIES: u32 = 16;
/// More entries than requests in flight, so that the completion doorbell is rung only occasionally.
const ENTRIES: u32 = 128;
const MAX_UNREPORTED: u32 = 32;

struct Queues {
    number: u64,
    entries: u32,
    submission: u64,
    completion: u64,
    tail: u32,
    head: u32,
    phase: bool,
    /// Completions that were read, but not yet reported through the doorbell.
    unreported: u32,
}

impl Queues {
    fn new(number: u64, entries: u32, room: &mut Room) -> Option<Self> {
        let submission = room.take(64 * u64::from(entries))?;
        let completion = room.take(16 * u64::from(entries))?;
        Some(Self {
            number,
            entries,
            submission,
            completion,
            tail: 0,
            head: 0,
            phase: true,
            unreported: 0,
        })
    }

    fn put(&mut self, command: &[u32; 16]) {
        let at = self.submission + 64 * u64::from(self.tail);
        for (index, dword) in command.iter().enumerate() {
            write32(at + 4 * index as u64, *dword);
        }
        self.tail = (self.tail + 1) % self.entries;
    }

    /// The identifier and status of a completed command.
    fn done(&mut self) -> Option<(u16, u32)> {
        let last = read32(self.completion + 16 * u64::from(self.head) + 12);
        if (last >> 16 & 1 == 1) != self.phase {
            return None;
        }
        fence(Ordering::Acquire);
        self.head = (self.head + 1) % self.entries;
        self.phase ^= self.head == 0;
        self.unreported += 1;
        Some((last as u16, last >> 17))
    }
}

/// A controller and its first namespace.
pub(crate) struct Nvme {
    bar: u64,
    /// Bytes from one doorbell to the next.
    step: u64,
    /// Doorbells in memory, and the indices at which the controller wants register writes.
    shadow: Option<[u64; 2]>,
    admin: Queues,
    io: Queues,
    /// A page list for each request, and the buffer that it describes.
    lists: u64,
    listed: [u64; DEPTH],
    block_shift: u32,
    bytes: u64,
    durable: bool,
    interrupts: bool,
}

impl Nvme {
    /// The first one on bus 0.
    pub(crate) fn find() -> Option<Function> {
        Function::all().find(|at| at.read(8) >> 8 == CLASS)
    }

    /// Resets the controller and starts it, whatever its state.
    pub(crate) fn open(
        function: Function,
        room: &mut Room,
        interrupts: bool,
        cpu: &Cpu,
    ) -> Option<Self> {
        function.switch_on();
        let bar = map_device(function.memory(0)?, BAR_SIZE, cpu)?;
        let mut disk = Self {
            bar,
            step: 4 << (read64(bar + CAP) >> 32 & 0xf),
            shadow: None,
            admin: Queues::new(0, ADMIN_ENTRIES, room)?,
            io: Queues::new(1, ENTRIES, room)?,
            lists: room.take(PAGE * DEPTH as u64)?,
            listed: [0; DEPTH],
            block_shift: 0,
            bytes: 0,
            durable: false,
            interrupts: interrupts && msix::switch_on(function, cpu),
        };
        disk.enable(cpu)?;
        disk.identify(room, cpu)?;
        let both = (ENTRIES - 1) << 16 | 1;
        let [submission, completion] = [disk.io.submission, disk.io.completion];
        // Contiguous, with interrupts by the first vector or none. Completions go to queue 1.
        let flags = if disk.interrupts { CONTIGUOUS | INTERRUPTS } else { CONTIGUOUS };
        let (data, own) = ([completion, 0], [both, flags]);
        disk.execute(AdminCommand { opcode: CREATE_CQ, namespace: 0, data, own }, cpu)?;
        let (data, own) = ([submission, 0], [both, 1 << 16 | CONTIGUOUS]);
        disk.execute(AdminCommand { opcode: CREATE_SQ, namespace: 0, data, own }, cpu)?;
        Some(disk)
    }

    fn enable(&mut self, cpu: &Cpu) -> Option<()> {
        let bar = self.bar;
        write32(bar + CC, 0);
        cpu.wait(TIMEOUT_MS, || read32(bar + CSTS) & READY == 0)?;
        write32(bar + AQA, (ADMIN_ENTRIES - 1) << 16 | (ADMIN_ENTRIES - 1));
        for (register, address) in [(ASQ, self.admin.submission), (ACQ, self.admin.completion)] {
            write32(bar + register, address as u32);
            write32(bar + register + 4, (address >> 32) as u32);
        }
        write32(bar + CC, RUN);
        cpu.wait(TIMEOUT_MS, || read32(bar + CSTS) & READY != 0)
    }

    fn identify(&mut self, room: &mut Room, cpu: &Cpu) -> Option<()> {
        let page = room.take(PAGE)?;
        let (data, own) = ([page, 0], [NAMESPACE, 0]);
        self.execute(AdminCommand { opcode: IDENTIFY, namespace: 1, data, own }, cpu)?;
        let format = u64::from(read8(page + 26) & 0xf);
        self.block_shift = read32(page + 128 + 4 * format) >> 16 & 0xff;
        if !(9..=12).contains(&self.block_shift) {
            return None;
        }
        self.bytes = read64(page) << self.block_shift;
        let own = [CONTROLLER, 0];
        self.execute(AdminCommand { opcode: IDENTIFY, namespace: 0, data, own }, cpu)?;
        if read16(page + OACS) & OACS_DOORBELLS != 0 {
            let data = [room.take(PAGE)?, room.take(PAGE)?];
            let opcode = DOORBELL_BUFFER;
            self.execute(AdminCommand { opcode, namespace: 0, data, own: [0, 0] }, cpu)?;
            self.shadow = Some(data);
        }
        Some(())
    }

    fn execute(&mut self, admin: AdminCommand, cpu: &Cpu) -> Option<()> {
        let AdminCommand { opcode, namespace, data, own } = admin;
        self.admin.put(&command(opcode, namespace, data, [own[0], own[1], 0]));
        // The controller always reads the doorbell registers of the admin queue.
        write32(self.bar + DOORBELLS, self.admin.tail);
        let mut status = None;
        cpu.wait(TIMEOUT_MS, || {
            status = self.admin.done();
            status.is_some()
        })?;
        write32(self.bar + DOORBELLS + self.step, self.admin.head);
        status.filter(|(_, status)| status & 0x7ff == 0).map(|_| ())
    }

    /// Rings a doorbell: writes it to memory first, and to the register if the controller requests
    /// it.
    fn ring_doorbell(&self, index: u64, value: u32) {
        let register = self.bar + DOORBELLS + index * self.step;
        let Some([shadow, events]) = self.shadow else { return write32(register, value) };
        let at = index * self.step;
        let before = read32(shadow + at);
        write32(shadow + at, value);
        fence(Ordering::SeqCst);
        let [before, value, event] = [before, value, read32(events + at)].map(|it| it as u16);
        if value.wrapping_sub(event).wrapping_sub(1) < value.wrapping_sub(before) {
            write32(register, value.into());
        }
    }

    fn report_completions(&mut self) {
        self.io.unreported = 0;
        self.ring_doorbell(2 * self.io.number + 1, self.io.head);
    }

    /// The second address of a request's data (PRP2): a page, or a list of pages.
    fn second(&mut self, tag: usize, request: &Request) -> u64 {
        let list = self.lists + PAGE * tag as u64;
        match u64::from(request.length) {
            0..=PAGE => 0,
            length if length <= 2 * PAGE => request.address + PAGE,
            _ => {
                // The list covers the largest request. Buffers do not move, so it stays valid.
                if self.listed[tag] != request.address {
                    for page in 1..256 {
                        write64(list + 8 * (page - 1), request.address + PAGE * page);
                    }
                    self.listed[tag] = request.address;
                }
                list
            }
        }
    }
}

/// An admin command: opcode, namespace, two data addresses, and dwords 10 and 11.
struct AdminCommand {
    opcode: u32,
    namespace: u32,
    data: [u64; 2],
    own: [u32; 2],
}

/// A submission queue entry. `own` are dwords 10 to 12.
fn command(opcode: u32, namespace: u32, data: [u64; 2], own: [u32; 3]) -> [u32; 16] {
    let [first, second] = data.map(|it| [it as u32, (it >> 32) as u32]);
    let mut command = [0; 16];
    (command[0], command[1]) = (opcode, namespace);
    command[6..8].copy_from_slice(&first);
    command[8..10].copy_from_slice(&second);
    command[10..13].copy_from_slice(&own);
    command
}

impl Disk for Nvme {
    fn moved(&mut self, by: u64) {
        self.bar = self.bar.wrapping_add(by);
    }

    fn shape(&self) -> Shape {
        Shape {
            kind: "nvme",
            bytes: self.bytes,
            sector: 1 << self.block_shift,
            depth: DEPTH,
            interrupts: self.interrupts,
        }
    }

    fn write_through(&mut self, on: bool) -> bool {
        self.durable = on;
        true
    }

    fn put(&mut self, tag: usize, request: &Request) {
        let opcode = match request.operation {
            Operation::Read => READ,
            Operation::Write => WRITE,
            Operation::Flush => FLUSH,
        };
        let identified = opcode | (tag as u32) << 16;
        let data = [request.address, self.second(tag, request)];
        let first = request.offset >> self.block_shift;
        let blocks = (request.length >> self.block_shift).wrapping_sub(1) & 0xffff;
        let durable = self.durable && request.operation == Operation::Write;
        let own = match request.operation {
            Operation::Flush => [0; 3],
            _ => [first as u32, (first >> 32) as u32, blocks | if durable { FUA } else { 0 }],
        };
        self.io.put(&command(identified, 1, data, own));
    }

    fn ring(&mut self) {
        fence(Ordering::Release);
        self.ring_doorbell(2 * self.io.number, self.io.tail);
    }

    fn request_interrupt(&mut self) {
        self.report_completions();
    }

    fn done(&mut self) -> Option<(usize, bool)> {
        let (tag, status) = self.io.done()?;
        if self.io.unreported >= MAX_UNREPORTED {
            self.report_completions();
        }
        Some((usize::from(tag), status & 0x7ff == 0))
    }
}
