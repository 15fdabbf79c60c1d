//! AHCI (AHCI 1.3.1): a disk at port 0, with queued commands (NCQ).
use core::sync::atomic::{Ordering, fence};

use crate::config::Function;
use crate::cpu::Cpu;
use crate::disk::{Disk, Operation, Request, Shape};
use crate::io::{read16, read32, read64, write32, write64};
use crate::memory::Room;
use crate::msix;
use crate::paging::map_device;

/// Class code: mass storage, SATA, AHCI.
const CLASS: u32 = 0x01_0601;
/// ABAR, and the part of it that is used.
const BAR: u8 = 5;
const BAR_SIZE: u64 = 0x1000;

const GHC: u64 = 0x04;
const IS: u64 = 0x08;
const CLB: u64 = 0x100;
const FB: u64 = 0x108;
const PORT_IS: u64 = 0x110;
const PORT_IE: u64 = 0x114;
const CMD: u64 = 0x118;
const TFD: u64 = 0x120;
const SIG: u64 = 0x124;
const SERR: u64 = 0x130;
const SACT: u64 = 0x134;
const CI: u64 = 0x138;
/// GHC: reset, interrupts.
const RESET: u32 = 1;
const INTERRUPTS: u32 = 2;
/// CMD: start, receive FISes.
const START: u32 = 1;
const RECEIVE: u32 = 1 << 4;
/// TFD: busy, data request, error.
const BUSY: u32 = 0x88;
/// PORT_IS: register, PIO and device bits FISes; fatal errors.
const ANSWERS: u32 = 1 << 0 | 1 << 1 | 1 << 3;
const ERRORS: u32 = 1 << 24 | 1 << 27 | 1 << 29 | 1 << 30;
/// SIG of a disk.
const DISK: u32 = 0x101;
const TIMEOUT_MS: u64 = 30_000;

/// Commands.
const READ_QUEUED: u32 = 0x60;
const WRITE_QUEUED: u32 = 0x61;
const FLUSH_EXT: u32 = 0xea;
const IDENTIFY: u32 = 0xec;
/// The first dword of a FIS: a command to the device.
const COMMAND: u32 = 0x27 | 1 << 15;
/// Device register: LBA, and durable (FUA).
const LBA: u32 = 1 << 30;
const FUA: u32 = 1 << 31;

/// A header: a FIS of five dwords, a write, and the number of regions.
const FIS_DWORDS: u32 = 5;
const WRITE: u32 = 1 << 6;
const REGION: u32 = 1 << 16;
const HEADER_SIZE: u64 = 32;
const TABLE_SIZE: u64 = 256;
const REGIONS: u64 = 0x80;

const DEPTH: usize = 32;

pub(crate) struct Ahci {
    bar: u64,
    list: u64,
    tables: u64,
    sector_shift: u32,
    bytes: u64,
    durable: bool,
    interrupts: bool,
    /// Slots by state: put but not issued, issued, completed but not reported. Slots of flushes,
    /// which are not queued, so that each runs alone.
    held: u32,
    issued: u32,
    completed: u32,
    flushes: u32,
}

/// A command as the controller reads it: its FIS, the flags of its header, and its data.
struct Command {
    fis: [u32; 4],
    flags: u32,
    address: u64,
    length: u32,
}

impl Ahci {
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
        let bar = map_device(function.memory(BAR)?, BAR_SIZE, cpu)?;
        let mut disk = Self {
            bar,
            list: room.take(HEADER_SIZE * DEPTH as u64)?,
            tables: room.take(TABLE_SIZE * DEPTH as u64)?,
            sector_shift: 9,
            bytes: 0,
            durable: false,
            interrupts: interrupts && msix::switch_on_msi(function),
            held: 0,
            issued: 0,
            completed: 0,
            flushes: 0,
        };
        disk.start(room, cpu)?;
        disk.identify(room, cpu)?;
        if disk.interrupts {
            write32(bar + PORT_IS, u32::MAX);
            write32(bar + IS, u32::MAX);
            write32(bar + PORT_IE, ANSWERS | ERRORS);
            write32(bar + GHC, read32(bar + GHC) | INTERRUPTS);
        }
        Some(disk)
    }

    fn start(&mut self, room: &mut Room, cpu: &Cpu) -> Option<()> {
        let bar = self.bar;
        write32(bar + GHC, RESET);
        cpu.wait(TIMEOUT_MS, || read32(bar + GHC) & RESET == 0)?;
        for (register, address) in [(CLB, self.list), (FB, room.take(256)?)] {
            write32(bar + register, address as u32);
            write32(bar + register + 4, (address >> 32) as u32);
        }
        write32(bar + CMD, RECEIVE);
        cpu.wait(TIMEOUT_MS, || read32(bar + TFD) & BUSY == 0)?;
        write32(bar + SERR, u32::MAX);
        write32(bar + CMD, RECEIVE | START);
        (read32(bar + SIG) == DISK).then_some(())
    }

    fn identify(&mut self, room: &mut Room, cpu: &Cpu) -> Option<()> {
        let page = room.take(4096)?;
        let fis = [COMMAND | IDENTIFY << 16, LBA, 0, 0];
        self.describe(0, &Command { fis, flags: 0, address: page, length: 512 });
        let bar = self.bar;
        write32(bar + CI, 1);
        cpu.wait(TIMEOUT_MS, || read32(bar + CI) & 1 == 0 || read32(bar + PORT_IS) & ERRORS != 0)?;
        let word = |number: u64| read16(page + 2 * number);
        // Words 117 and 118: larger sectors, in units of two bytes.
        if word(106) & 0xd000 == 0x5000 {
            let size = 2 * (u32::from(word(117)) | u32::from(word(118)) << 16);
            self.sector_shift = size.checked_ilog2()?;
        }
        let queued = word(76) & 1 << 8 != 0 && word(75) & 0x1f == 31;
        let fits = (9..=12).contains(&self.sector_shift) && queued;
        self.bytes = read64(page + 200).checked_mul(1 << self.sector_shift)?;
        (fits && read32(bar + CI) & 1 == 0).then_some(())
    }

    fn describe(&self, slot: usize, command: &Command) {
        let Command { fis, flags, address, length } = *command;
        let header = self.list + HEADER_SIZE * slot as u64;
        let table = self.tables + TABLE_SIZE * slot as u64;
        let regions = if length > 0 { REGION } else { 0 };
        for (at, dword) in fis.into_iter().chain([0]).enumerate() {
            write32(table + 4 * at as u64, dword);
        }
        write64(table + REGIONS, address);
        write32(table + REGIONS + 8, 0);
        write32(table + REGIONS + 12, length.saturating_sub(1));
        write32(header, FIS_DWORDS | flags | regions);
        write32(header + 4, 0);
        write64(header + 8, table);
    }

    /// Issues held commands. A flush waits for all others, and they wait for it.
    fn issue(&mut self) {
        let flushes = self.held & self.flushes;
        if self.held == 0 || self.issued & self.flushes != 0 || flushes != 0 && self.issued != 0 {
            return;
        }
        fence(Ordering::Release);
        let slots = if flushes == 0 { self.held } else { 1 << flushes.trailing_zeros() };
        if flushes == 0 {
            write32(self.bar + SACT, slots);
        }
        self.held &= !slots;
        self.issued |= slots;
        write32(self.bar + CI, slots);
    }
}

impl Disk for Ahci {
    fn moved(&mut self, by: u64) {
        self.bar = self.bar.wrapping_add(by);
    }

    fn shape(&self) -> Shape {
        Shape {
            kind: "ahci-disk",
            bytes: self.bytes,
            sector: 1 << self.sector_shift,
            depth: DEPTH,
            interrupts: self.interrupts,
        }
    }

    fn write_through(&mut self, on: bool) -> bool {
        self.durable = on;
        true
    }

    fn put(&mut self, tag: usize, request: &Request) {
        let first = request.offset >> self.sector_shift;
        let count = request.length >> self.sector_shift & 0xffff;
        let (low, high) = (first as u32 & 0xff_ffff, (first >> 24) as u32 & 0xff_ffff);
        let queued = |code: u32, durable: bool| {
            // The features have the count, and the count has the tag.
            let device = LBA | if durable { FUA } else { 0 };
            let features = [(count & 0xff) << 24, (count >> 8) << 24];
            let command = COMMAND | code << 16 | features[0];
            [command, low | device, high | features[1], (tag as u32) << 3]
        };
        let (fis, flags) = match request.operation {
            Operation::Read => (queued(READ_QUEUED, false), 0),
            Operation::Write => (queued(WRITE_QUEUED, self.durable), WRITE),
            Operation::Flush => ([COMMAND | FLUSH_EXT << 16, LBA, 0, 0], 0),
        };
        let Request { address, length, .. } = *request;
        self.describe(tag, &Command { fis, flags, address, length });
        let slot = 1 << tag;
        self.held |= slot;
        self.flushes &= !slot;
        if request.operation == Operation::Flush {
            self.flushes |= slot;
        }
    }

    fn ring(&mut self) {
        self.issue();
    }

    fn request_interrupt(&mut self) {
        if self.interrupts {
            write32(self.bar + PORT_IS, ANSWERS);
            write32(self.bar + IS, 1);
        }
    }

    fn done(&mut self) -> Option<(usize, bool)> {
        if self.completed == 0 && self.issued != 0 {
            let pending = read32(self.bar + SACT) | read32(self.bar + CI);
            fence(Ordering::Acquire);
            // After an error the rest never completes, and the check fails.
            self.completed = self.issued & !pending;
            self.issued &= pending;
            self.issue();
        }
        let tag = self.completed.trailing_zeros();
        self.completed &= self.completed.wrapping_sub(1);
        (tag < DEPTH as u32).then_some((tag as usize, true))
    }
}
