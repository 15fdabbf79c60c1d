//! An AHCI driver for tests: one port with its command list, tables and FIS area.

use std::time::{Duration, Instant};

use super::Bench;
use crate::device::Kind;
use crate::pci::Address;

/// The address of the registers.
pub const ABAR: u64 = 0xc000_0000;
/// Guest addresses of the command list, the FIS area, the tables and data.
pub const LIST: u64 = 0x1000;
pub const FISES: u64 = 0x2000;
const TABLES: u64 = 0x1_0000;
const TABLE_SIZE: u64 = 0x1000;
pub const DATA: u64 = 0x8_0000;

/// Registers of the controller.
pub const CAP: u64 = 0x00;
pub const GHC: u64 = 0x04;
pub const IS: u64 = 0x08;
pub const PI: u64 = 0x0c;
/// Registers of the port.
pub const PXCLB: u64 = 0x100;
pub const PXFB: u64 = 0x108;
pub const PXIS: u64 = 0x110;
pub const PXIE: u64 = 0x114;
pub const PXCMD: u64 = 0x118;
pub const PXTFD: u64 = 0x120;
pub const PXSIG: u64 = 0x124;
pub const PXSSTS: u64 = 0x128;
pub const PXSCTL: u64 = 0x12c;
pub const PXSERR: u64 = 0x130;
pub const PXSACT: u64 = 0x134;
pub const PXCI: u64 = 0x138;
/// PxCMD: start, FIS receive enable, and both "running" bits.
pub const ST: u32 = 1;
pub const FRE: u32 = 1 << 4;
pub const FR: u32 = 1 << 14;
pub const CR: u32 = 1 << 15;
/// PxIS: errors that stop the list (TFES, HBFS, IFS, OFS).
pub const ERRORS: u32 = 1 << 30 | 1 << 29 | 1 << 27 | 1 << 24;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A Register FIS to the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fis {
    pub code: u8,
    pub features: u16,
    pub lba: u64,
    pub count: u16,
    pub device: u8,
    pub control: u8,
}

impl Fis {
    pub fn new(code: u8, lba: u64, count: u16) -> Self {
        Self { code, lba, count, device: 0x40, ..Self::default() }
    }

    /// A queued read or write (NCQ) with this tag.
    pub fn queued(code: u8, lba: u64, count: u16, tag: u16) -> Self {
        Self { features: count, ..Self::new(code, lba, tag << 3) }
    }

    /// A write to the device control register.
    pub fn control(control: u8) -> Self {
        Self { control, ..Self::default() }
    }

    fn bytes(&self) -> [u8; 20] {
        let [l0, l1, l2, l3, l4, l5, ..] = self.lba.to_le_bytes();
        let ([f0, f1], [c0, c1]) = (self.features.to_le_bytes(), self.count.to_le_bytes());
        let command = u8::from(self.code != 0) << 7;
        let Self { code, device, control, .. } = *self;
        let head =
            [0x27, command, code, f0, l0, l1, l2, device, l3, l4, l5, f1, c0, c1, 0, control];
        let mut bytes = [0; 20];
        bytes[..head.len()].copy_from_slice(&head);
        bytes
    }
}

/// The end of commands: PxTFD, and the errors in PxIS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub task_file: u32,
    pub errors: u32,
}

impl Ended {
    pub fn is_good(self) -> bool {
        self.errors == 0 && self.task_file & 0x89 == 0
    }
}

pub struct Driver<'a> {
    pub bench: &'a Bench,
    at: Address,
}

impl<'a> Driver<'a> {
    /// Assigns the registers' address, and enables the function.
    pub fn find(bench: &'a Bench, at: Address) -> Self {
        let driver = Self { bench, at };
        driver.config(0x24, u32::try_from(ABAR).expect("below 4 GiB"));
        driver.config(0x04, 6);
        driver
    }

    pub fn config(&self, register: u64, value: u32) {
        self.bench.write(Kind::Config, self.at.config() + register, &value.to_le_bytes());
    }

    pub fn get(&self, register: u64) -> u32 {
        u32::from_le_bytes(self.bench.read(Kind::Memory, ABAR + register))
    }

    pub fn set(&self, register: u64, value: u32) {
        self.bench.write(Kind::Memory, ABAR + register, &value.to_le_bytes());
    }

    pub fn wait(&self, what: &str, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            let status = [PXCMD, PXTFD, PXIS, PXCI, PXSACT].map(|it| self.get(it));
            assert!(start.elapsed() < TIMEOUT, "{what} never came: {status:x?}");
            std::thread::yield_now();
        }
    }

    /// Resets the controller and starts the port.
    pub fn start(&self) {
        self.set(GHC, 1);
        self.wait("the end of the reset", || self.get(GHC) & 1 == 0);
        for (register, address) in [(PXCLB, LIST), (PXFB, FISES)] {
            self.set(register, u32::try_from(address).expect("below 4 GiB"));
            self.set(register + 4, 0);
        }
        self.set(PXSERR, u32::MAX);
        self.set(PXCMD, FRE);
        self.wait("the signature", || self.get(PXTFD) & 0x88 == 0);
        self.set(PXIS, u32::MAX);
        self.set(PXCMD, FRE | ST);
    }

    /// Stops the command list and starts it again, as after an error.
    pub fn restart(&self) {
        self.set(PXCMD, FRE);
        self.wait("the end of the list", || self.get(PXCMD) & CR == 0);
        self.set(PXSERR, u32::MAX);
        self.set(PXIS, u32::MAX);
        self.set(PXCMD, FRE | ST);
    }

    /// Writes a command with data at these addresses and lengths.
    pub fn put(&self, slot: u32, fis: &Fis, packet: &[u8], regions: &[(u64, u32)]) {
        let table = TABLES + u64::from(slot) * TABLE_SIZE;
        let mut bytes = fis.bytes().to_vec();
        bytes.resize(0x40, 0);
        bytes.extend(packet);
        bytes.resize(0x80, 0);
        for (address, length) in regions {
            bytes.extend(address.to_le_bytes());
            bytes.extend([0; 4]);
            bytes.extend((length - 1).to_le_bytes());
        }
        self.fill(table, &bytes);
        let entries = u32::try_from(regions.len()).expect("a few regions");
        let packet = u32::from(!packet.is_empty()) << 5;
        // A reset clears BSY by itself (C), and so ends the command.
        let clears = u32::from(fis.control & 4 != 0) << 10;
        let flags = 5 | packet | clears | entries << 16;
        let header = [flags, 0, u32::try_from(table).expect("below 4 GiB"), 0];
        let header: Vec<u8> = header.iter().flat_map(|it| it.to_le_bytes()).collect();
        self.fill(LIST + 32 * u64::from(slot), &header);
    }

    pub fn issue(&self, slots: u32) {
        self.set(PXCI, slots);
    }

    /// Waits until these commands have ended, or an error stops the list. Clears the status.
    pub fn finish(&self, slots: u32) -> Ended {
        self.wait("the end of commands", || {
            (self.get(PXCI) | self.get(PXSACT)) & slots == 0 || self.get(PXIS) & ERRORS != 0
        });
        let status = self.get(PXIS);
        self.set(PXIS, status);
        Ended { task_file: self.get(PXTFD), errors: status & ERRORS }
    }

    /// Executes a command in slot 0. After an error, the list is started again.
    pub fn execute(&self, fis: &Fis, packet: &[u8], regions: &[(u64, u32)]) -> Ended {
        self.put(0, fis, packet, regions);
        self.issue(1);
        let ended = self.finish(1);
        if ended.errors != 0 {
            self.restart();
        }
        ended
    }

    /// The number of bytes that the command in a slot has transferred.
    pub fn transferred(&self, slot: u32) -> u32 {
        u32::from_le_bytes(self.data(LIST + 32 * u64::from(slot) + 4))
    }

    pub fn fill(&self, at: u64, data: &[u8]) {
        self.bench.memory.write(at, data).expect("it is RAM");
    }

    pub fn data<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut data = [0; N];
        self.bench.memory.read(at, &mut data).expect("it is RAM");
        data
    }
}
