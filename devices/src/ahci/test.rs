//! Tests with a driver, in the order of Linux and of Windows.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::*;
use crate::device::Kind;
use crate::registry;
use crate::testutil::Bench;
use crate::testutil::ahci::{
    CAP, CR, DATA, Driver, Ended, FISES, FR, FRE, Fis, GHC, IS, LIST, PI, PXCI, PXCLB, PXCMD, PXFB,
    PXIE, PXIS, PXSACT, PXSCTL, PXSERR, PXSIG, PXSSTS, PXTFD, ST,
};

use crate::testutil::image::{Double, DoubleState, GO, HOLD, WAIT};
use host::disk::Operation;

const AT: Address = Address::new(0x1f, 2);
/// INTA of slot 31.
const GSI: u32 = 16;
const RAM: usize = 16 << 20;
const DISK: u64 = 4 << 20;

/// Commands.
const IDENTIFY: u8 = 0xec;
const READ_DMA: u8 = 0x25;
const WRITE_DMA: u8 = 0x35;
const READ_QUEUED: u8 = 0x60;
const WRITE_QUEUED: u8 = 0x61;
const SET_FEATURES: u8 = 0xef;
const READ_LOG: u8 = 0x2f;
const PACKET: u8 = 0xa0;

/// PxIS.
const DHRS: u32 = 1;
const PSS: u32 = 2;
const TFES: u32 = 1 << 30;
const OFS: u32 = 1 << 24;
const HBFS: u32 = 1 << 29;

struct Machine {
    bench: Bench,
    folder: tempfile::TempDir,
}

impl Machine {
    fn new(kind: &str, name: &str, mut fields: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let machine = Self { bench: Bench::new(RAM), folder };
        fields["path"] = json!(machine.image(name, DISK));
        machine.with(kind, fields)
    }

    fn with(mut self, kind: &str, mut fields: Value) -> Self {
        fields["slot"] = json!("1f.2");
        let config = registry::Config::of_kind(kind, fields).unwrap().unwrap();
        self.bench.board.add(kind, |grants| config.build(grants)).unwrap();
        self.bench.board.run(Vec::new()).unwrap();
        self
    }

    fn disk() -> Self {
        Self::new("ahci-disk", "disk.img", json!({}))
    }

    fn cdrom() -> Self {
        Self::new("ahci-cdrom", "cd.iso", json!({}))
    }

    /// A file whose dwords all differ.
    fn image(&self, name: &str, size: u64) -> PathBuf {
        let path = self.folder.path().join(name);
        let numbers = 0..u32::try_from(size / 4).unwrap();
        std::fs::write(&path, numbers.flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
        path
    }

    fn driver(&self) -> Driver<'_> {
        Driver::find(&self.bench, AT)
    }

    /// A driver whose port is started.
    fn started(&self) -> Driver<'_> {
        let driver = self.driver();
        driver.start();
        driver
    }

    fn tray(&self) -> Arc<dyn host::disk::Tray> {
        self.bench.board.shared.disks.tray("ahci-cdrom").unwrap()
    }
}

fn good(ended: Ended) {
    assert!(ended.is_good(), "{ended:x?}");
}

/// The words of an IDENTIFY page at `DATA`.
fn words(driver: &Driver<'_>) -> Vec<u16> {
    let page: [u8; 512] = driver.data(DATA);
    assert_eq!(page.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0, "checksum");
    page.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect()
}

fn text(words: &[u16]) -> String {
    let bytes = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    String::from_utf8(bytes).unwrap().trim().to_owned()
}

#[test]
fn is_the_controller_of_the_ich9() {
    let machine = Machine::disk();
    let driver = machine.driver();
    let config = |at: u64| u32::from_le_bytes(machine.bench.read(Kind::Config, AT.config() + at));
    assert_eq!(config(0), 0x2922_8086);
    assert_eq!(config(8) >> 8, 0x01_0601);
    assert_eq!(config(MAP), 0x0101_0040);
    let capability = |at: u64| config(at) & 0xff;
    assert_eq!((capability(0x40), capability(0x50)), (5, 0x12), "MSI, SATA");
    assert_eq!(driver.get(CAP) & 0x1f, 0, "one port");
    assert_eq!(driver.get(CAP) >> 8 & 0x1f, 31, "32 slots");
    assert_eq!((driver.get(PI), driver.get(0x10)), (1, 0x0001_0301));
    assert_eq!(driver.get(GHC), 1 << 31);
    // The index-data pair reaches the same registers.
    driver.config(0x20, 0xc000);
    driver.config(0x04, 7);
    machine.bench.write(Kind::Port, 0xc010, &0x110_u32.to_le_bytes());
    assert_eq!(machine.bench.read(Kind::Port, 0xc010), 0x110_u32.to_le_bytes());
    machine.bench.write(Kind::Port, 0xc010, &0x114_u32.to_le_bytes());
    machine.bench.write(Kind::Port, 0xc014, &3_u32.to_le_bytes());
    assert_eq!(driver.get(PXIE), 3);
}

/// Linux: `ahci_init_one`, `ahci_hardreset`, `ahci_softreset`, then IDENTIFY and queued commands.
#[test]
fn starts_in_the_order_of_linux() {
    let machine = Machine::disk();
    let driver = machine.driver();
    driver.set(GHC, 1 << 31 | 1);
    driver.wait("the end of the reset", || driver.get(GHC) & 1 == 0);
    assert_eq!(driver.get(PXCMD) & (ST | FRE | CR | FR), 0);
    driver.set(PXSERR, driver.get(PXSERR));
    driver.set(PXIS, driver.get(PXIS));
    driver.set(IS, 1);
    driver.set(GHC, 1 << 31 | 2);
    driver.set(PXCLB, u32::try_from(LIST).unwrap());
    driver.set(PXFB, u32::try_from(FISES).unwrap());
    driver.set(PXCMD, driver.get(PXCMD) | FRE);
    driver.wait("FIS reception", || driver.get(PXCMD) & FR != 0);
    // The hard reset, with the list stopped.
    driver.set(PXSCTL, 0x301);
    driver.set(PXSCTL, 0x300);
    driver.wait("the link", || driver.get(PXSSTS) & 0xf == 3);
    driver.set(PXSERR, driver.get(PXSERR));
    driver.wait("readiness", || driver.get(PXTFD) & 0x80 == 0);
    assert_eq!(driver.get(PXSIG), 0x101);
    driver.set(PXCMD, driver.get(PXCMD) | ST);
    // The soft reset, in two steps.
    for control in [4, 0] {
        driver.put(0, &Fis::control(control), &[], &[]);
        driver.issue(1);
        driver.wait("the end of the control FIS", || driver.get(PXCI) == 0);
    }
    driver.wait("readiness", || driver.get(PXTFD) & 0x80 == 0);
    assert_eq!((driver.get(PXSIG), driver.get(PXTFD) & 0xff), (0x101, 0x50));
    // Thaw: the interrupts are enabled.
    driver.set(PXIS, driver.get(PXIS));
    driver.set(IS, 1);
    driver.set(PXIE, 0x7d40_006f);
    assert!(!machine.bench.hypervisor.pins.is_high(GSI));
    driver.put(0, &Fis::new(IDENTIFY, 0, 0), &[], &[(DATA, 512)]);
    driver.issue(1);
    driver.wait("the interrupt", || machine.bench.hypervisor.pins.is_high(GSI));
    assert_eq!((driver.get(IS), driver.get(PXIS)), (1, PSS));
    assert_eq!((driver.get(PXCI), driver.transferred(0)), (0, 512));
    // The ending status of PIO is in the PIO Setup FIS.
    let setup: [u8; 20] = driver.data(FISES + 0x20);
    assert_eq!((setup[0], setup[15], setup[16..18].to_vec()), (0x5f, 0x50, vec![0, 2]));
    driver.set(PXIS, PSS);
    assert!(machine.bench.hypervisor.pins.is_high(GSI), "IS is still set");
    driver.set(IS, 1);
    assert!(!machine.bench.hypervisor.pins.is_high(GSI));
    let page = words(&driver);
    assert_eq!(text(&page[27..47]), "Transom SATA disk");
    assert_eq!((page[75], page[76] >> 8 & 1), (31, 1), "NCQ");
    assert_eq!(u64::from(page[100]) | u64::from(page[101]) << 16, DISK / 512);
    // Queued reads in all slots at once.
    for slot in 0..32_u16 {
        let fis = Fis::queued(READ_QUEUED, u64::from(slot) * 8, 8, slot);
        driver.put(slot.into(), &fis, &[], &[(DATA + 4096 * u64::from(slot), 4096)]);
    }
    driver.set(PXSACT, u32::MAX);
    driver.issue(u32::MAX);
    good(driver.finish(u32::MAX));
    for slot in 0..32 {
        assert_eq!(
            driver.data(DATA + 4096 * slot),
            u32::try_from(slot * 1024).unwrap().to_le_bytes()
        );
    }
}

/// Windows' storahci: the port is started without a reset when the device is ready; messages.
#[test]
fn starts_in_the_order_of_windows() {
    let machine = Machine::disk();
    let driver = machine.driver();
    // MSI, as the PCI bus driver sets it up.
    driver.config(0x44, 0xfee0_0000);
    driver.config(0x4c, 0x61);
    driver.config(0x40, 0x0001_0000);
    driver.set(GHC, 1 << 31);
    assert_eq!((driver.get(PI), driver.get(PXCMD) & (ST | CR | FRE | FR)), (1, 0));
    driver.set(PXCLB, u32::try_from(LIST).unwrap());
    driver.set(PXCLB + 4, 0);
    driver.set(PXFB, u32::try_from(FISES).unwrap());
    driver.set(PXFB + 4, 0);
    driver.set(PXSERR, u32::MAX);
    driver.set(PXIS, u32::MAX);
    driver.set(IS, u32::MAX);
    driver.set(GHC, 1 << 31 | 2);
    // The states of its start: DET, FRE, BSY and DRQ, CR.
    driver.wait("the device", || driver.get(PXSSTS) & 0xf == 3);
    driver.set(PXCMD, driver.get(PXCMD) | FRE);
    driver.wait("FIS reception", || driver.get(PXCMD) & FR != 0);
    driver.set(PXSERR, u32::MAX);
    driver.wait("readiness", || driver.get(PXTFD) & 0x88 == 0);
    driver.set(PXIE, 0x7d40_00ef);
    driver.set(PXCMD, driver.get(PXCMD) | ST);
    driver.wait("the list", || driver.get(PXCMD) & CR != 0);
    assert_eq!(driver.get(PXSIG), 0x101);
    let sent = || machine.bench.hypervisor.sent.lock().unwrap().len();
    let before = sent();
    driver.put(0, &Fis::new(IDENTIFY, 0, 0), &[], &[(DATA, 512)]);
    driver.issue(1);
    driver.wait("the message", || sent() == before + 1);
    assert!(!machine.bench.hypervisor.pins.is_high(GSI));
    driver.set(PXIS, driver.get(PXIS));
    driver.set(IS, 1);
    assert_eq!(words(&driver)[0], 0x0040);
    // The logs that it reads, the write cache, and the first blocks.
    let features =
        |feature: u16, count| Fis { features: feature, ..Fis::new(SET_FEATURES, 0, count) };
    good(driver.execute(&Fis::new(READ_LOG, 0, 1), &[], &[(DATA, 512)]));
    assert_eq!(driver.data(DATA), [1, 0]);
    good(driver.execute(&features(0x02, 0), &[], &[]));
    good(driver.execute(&features(0xaa, 0), &[], &[]));
    good(driver.execute(&Fis::new(READ_DMA, 0, 1), &[], &[(DATA, 512)]));
    good(driver.execute(&Fis::new(0xea, 0, 0), &[], &[]));
    good(driver.execute(&Fis::new(0xe0, 0, 0), &[], &[]));
}

#[test]
fn data_moves_through_regions_of_every_size() {
    let machine = Machine::disk();
    let driver = machine.started();
    let data: Vec<u8> = (0..8192_u32).map(|at| at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect();
    driver.fill(DATA, &data);
    let odd = [(DATA, 2), (DATA + 2, 510), (DATA + 512, 4096), (DATA + 4608, 3584)];
    for (write, read) in [(WRITE_DMA, READ_DMA), (0x34, 0x24), (0x39, 0x29), (0x3d, READ_DMA)] {
        good(driver.execute(&Fis::new(write, 100, 16), &[], &odd));
        driver.fill(DATA + 0x1_0000, &[0; 8192]);
        good(driver.execute(&Fis::new(read, 100, 16), &[], &[(DATA + 0x1_0000, 8192)]));
        assert_eq!(driver.data::<8192>(DATA + 0x1_0000).to_vec(), data, "{write:#x}");
        assert_eq!(driver.transferred(0), 8192);
    }
    let fis = Fis::queued(WRITE_QUEUED, 7, 1, 3);
    driver.put(3, &fis, &[], &[(DATA, 512)]);
    driver.set(PXSACT, 8);
    driver.issue(8);
    good(driver.finish(8));
    let short = Fis { device: 0xe0, ..Fis::new(0xc8, 7, 1) };
    good(driver.execute(&short, &[], &[(DATA + 0x1_0000, 512)]));
    assert_eq!(driver.data::<512>(DATA + 0x1_0000).to_vec(), data[..512]);
}

#[test]
fn every_mistake_has_its_error() {
    let machine = Machine::disk();
    let driver = machine.started();
    let last = DISK / 512;
    let trim = Fis { features: 1, ..Fis::new(0x06, 0, 9) };
    for (name, fis, error) in [
        ("no such command", Fis::new(0x01, 0, 0), 0x04),
        ("beyond the end", Fis::new(READ_DMA, last, 1), 0x10),
        ("over the end", Fis::new(WRITE_DMA, last - 1, 2), 0x10),
        ("far beyond the end", Fis::new(READ_DMA, (1 << 48) - 1, 0), 0x10),
        ("cylinders", Fis { device: 0, ..Fis::new(0xc8, 0, 1) }, 0x04),
        ("security", Fis::new(0xf5, 0, 0), 0x04),
        ("a packet", Fis::new(PACKET, 0, 0), 0x04),
        ("a long list", trim, 0x04),
        ("no such log", Fis::new(READ_LOG, 0x13, 1), 0x04),
        ("no such feature", Fis { features: 0x77, ..Fis::new(SET_FEATURES, 0, 0) }, 0x04),
        ("SMART without its key", Fis { features: 0xd0, ..Fis::new(0xb0, 0, 1) }, 0x04),
    ] {
        let ended = driver.execute(&fis, &[], &[(DATA, 0x1000)]);
        assert_eq!((ended.errors, ended.task_file), (TFES, error << 8 | 0x51), "{name}");
    }
    good(driver.execute(&Fis::new(READ_DMA, 0, 1), &[], &[(DATA, 512)]));
}

#[test]
fn a_controller_error_stops_the_list_until_it_is_restarted() {
    let machine = Machine::disk();
    let driver = machine.started();
    let read = Fis::new(READ_DMA, 0, 2);
    assert_eq!(driver.execute(&read, &[], &[(DATA, 512)]).errors, OFS);
    assert_eq!(driver.execute(&read, &[], &[(0x7000_0000, 1024)]).errors, HBFS);
    driver.put(0, &read, &[], &[(DATA, 1024)]);
    driver.fill(LIST + 8, &[0, 0, 0, 0x70]);
    driver.issue(1);
    assert_eq!(driver.finish(1).errors, HBFS, "a table outside of memory");
    // Nothing runs until the restart.
    driver.put(1, &read, &[], &[(DATA, 1024)]);
    driver.issue(2);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_eq!(driver.get(PXCI), 3);
    driver.restart();
    assert_eq!(driver.get(PXCI), 0);
    good(driver.execute(&read, &[], &[(DATA, 1024)]));
}

#[test]
fn a_failed_queued_command_is_in_the_log_and_aborts_the_others() {
    let machine = Machine::disk();
    let driver = machine.started();
    let bad = DISK / 512;
    driver.put(5, &Fis::queued(READ_QUEUED, bad, 1, 5), &[], &[(DATA, 512)]);
    driver.set(PXSACT, 1 << 5);
    driver.issue(1 << 5);
    let ended = driver.finish(1 << 5);
    assert_eq!((ended.errors, ended.task_file), (TFES, 0x1051));
    assert_eq!(driver.get(PXSACT), 1 << 5);
    driver.restart();
    assert_eq!(driver.get(PXSACT), 0);
    good(driver.execute(&Fis::new(READ_LOG, 0x10, 1), &[], &[(DATA, 512)]));
    let page: [u8; 512] = driver.data(DATA);
    assert_eq!((page[0], page[2], page[3]), (5, 0x51, 0x10));
    assert_eq!(page[4..7], bad.to_le_bytes()[..3]);
    good(driver.execute(&Fis::new(READ_LOG, 0x10, 1), &[], &[(DATA, 512)]));
    assert_eq!(driver.data(DATA), [0; 4], "it was read");
    // The tag must be that of the slot.
    driver.put(1, &Fis::queued(READ_QUEUED, 0, 1, 2), &[], &[(DATA, 512)]);
    driver.set(PXSACT, 2);
    driver.issue(2);
    assert_eq!(driver.finish(2).errors, TFES);
}

#[test]
fn settings_show_in_identify_and_survive_a_soft_reset() {
    let machine = Machine::disk();
    let driver = machine.started();
    let identify = |driver: &Driver<'_>| {
        good(driver.execute(&Fis::new(IDENTIFY, 0, 0), &[], &[(DATA, 512)]));
        words(driver)
    };
    let set = |feature: u16, count| {
        let fis = Fis { features: feature, ..Fis::new(SET_FEATURES, 0, count) };
        good(driver.execute(&fis, &[], &[]));
    };
    assert_eq!(identify(&driver)[85] & 0x60, 0x60);
    set(0x82, 0);
    set(0x55, 0);
    set(0x03, 0x45);
    good(driver.execute(&Fis::new(0xc6, 0, 8), &[], &[]));
    for control in [4, 0] {
        driver.put(0, &Fis::control(control), &[], &[]);
        driver.issue(1);
        driver.wait("the end of the control FIS", || driver.get(PXCI) == 0);
    }
    let page = identify(&driver);
    assert_eq!((page[85] & 0x60, page[88], page[59]), (0, 0x207f, 0x108));
    machine.bench.board.reset().unwrap();
    let driver = machine.started();
    assert_eq!(identify(&driver)[85] & 0x60, 0x60);
}

#[test]
fn trim_smart_and_power_commands_answer() {
    let machine = Machine::disk();
    let driver = machine.started();
    let smart = |feature: u16| Fis { features: feature, ..Fis::new(0xb0, 0xc24f00, 1) };
    let mut list = [0; 512];
    list[..8].copy_from_slice(&(8_u64 | 16 << 48).to_le_bytes());
    driver.fill(DATA, &list);
    let trim = Fis { features: 1, ..Fis::new(0x06, 0, 1) };
    good(driver.execute(&trim, &[], &[(DATA, 512)]));
    list[..8].copy_from_slice(&((DISK / 512) | (1 << 48)).to_le_bytes());
    driver.fill(DATA, &list);
    assert_eq!(driver.execute(&trim, &[], &[(DATA, 512)]).errors, TFES);
    for feature in [0xd0, 0xd1] {
        good(driver.execute(&smart(feature), &[], &[(DATA, 512)]));
        let page: [u8; 512] = driver.data(DATA);
        assert_eq!(page.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        assert_eq!((page[0], page[2]), (0x10, 187));
    }
    good(driver.execute(&smart(0xda), &[], &[]));
    let fis: [u8; 7] = driver.data(FISES + 0x40);
    assert_eq!(fis[5..], [0x4f, 0xc2], "no threshold is exceeded");
    let mode = || {
        good(driver.execute(&Fis::new(0xe5, 0, 0), &[], &[]));
        driver.data::<1>(FISES + 0x4c)[0]
    };
    assert_eq!(mode(), 0xff);
    good(driver.execute(&Fis::new(0xe0, 0, 0), &[], &[]));
    assert_eq!(mode(), 0);
    good(driver.execute(&Fis::new(READ_DMA, 0, 1), &[], &[(DATA, 512)]));
    assert_eq!(mode(), 0xff);
}

#[test]
fn a_pause_in_the_middle_loses_nothing() {
    let machine = Machine::disk();
    let driver = machine.started();
    for round in 0..20_u64 {
        for slot in 0..32_u16 {
            let fis = Fis::queued(READ_QUEUED, (round + u64::from(slot)) * 8, 8, slot);
            driver.put(slot.into(), &fis, &[], &[(DATA + 4096 * u64::from(slot), 4096)]);
        }
        driver.set(PXSACT, u32::MAX);
        driver.issue(u32::MAX);
        let saved = machine.bench.board.park();
        machine.bench.board.run(saved).unwrap();
        good(driver.finish(u32::MAX));
        for slot in 0..32 {
            let first = u32::try_from((round + slot) * 1024).unwrap();
            assert_eq!(driver.data(DATA + 4096 * slot), first.to_le_bytes());
        }
    }
}

#[test]
fn a_link_reset_ends_commands_and_shows_the_device_again() {
    let machine = Machine::disk();
    let driver = machine.started();
    driver.put(0, &Fis::new(READ_DMA, 0, 8), &[], &[(DATA, 4096)]);
    driver.issue(1);
    driver.set(PXCMD, FRE);
    driver.wait("the end of the list", || driver.get(PXCMD) & CR == 0);
    driver.set(PXSERR, u32::MAX);
    driver.set(PXSCTL, 1);
    assert_eq!((driver.get(PXSSTS), driver.get(PXSIG)), (0, u32::MAX));
    driver.set(PXSCTL, 0);
    driver.wait("the device", || driver.get(PXSSTS) == 0x123 && driver.get(PXTFD) & 0x80 == 0);
    assert_eq!(driver.get(PXIS) >> 6 & 1, 1, "PCS mirrors PxSERR");
    driver.set(PXSERR, u32::MAX);
    assert_eq!(driver.get(PXIS) >> 6 & 1, 0);
    driver.set(PXSCTL, 4);
    driver.wait("the disabled port", || driver.get(PXSSTS) == 4);
}

/// Sends a packet that reads at most `length` bytes, by DMA.
fn packet(driver: &Driver<'_>, command: &[u8], length: u32) -> Ended {
    let fis = Fis { features: 1, ..Fis::new(PACKET, 0, 0) };
    let regions = [(DATA, length.max(2))];
    driver.execute(&fis, command, if length > 0 { &regions } else { &[] })
}

/// Reads sense data: key, code and qualifier.
fn sense(driver: &Driver<'_>) -> [u8; 3] {
    good(packet(driver, &[3, 0, 0, 0, 18, 0, 0, 0, 0, 0, 0, 0], 18));
    let data: [u8; 18] = driver.data(DATA);
    [data[2], data[12], data[13]]
}

const READY: [u8; 12] = [0; 12];

#[test]
fn a_cd_is_an_atapi_device_and_reads_its_blocks() {
    let machine = Machine::cdrom();
    let driver = machine.started();
    assert_eq!(driver.get(PXSIG), 0xeb14_0101);
    let ended = driver.execute(&Fis::new(IDENTIFY, 0, 0), &[], &[(DATA, 512)]);
    assert_eq!((ended.errors, ended.task_file >> 8), (TFES, 4));
    good(driver.execute(&Fis::new(0xa1, 0, 0), &[], &[(DATA, 512)]));
    let page = words(&driver);
    assert_eq!((page[0], text(&page[27..47]).as_str()), (0x85c0, "Transom SATA CD-ROM"));
    let ended = packet(&driver, &READY, 0);
    assert_eq!((ended.errors, ended.task_file), (TFES, 0x6051), "unit attention");
    assert_eq!(sense(&driver), [6, 0x29, 0]);
    good(packet(&driver, &READY, 0));
    good(packet(&driver, &[0x12, 0, 0, 0, 36, 0, 0, 0, 0, 0, 0, 0], 36));
    let inquiry: [u8; 36] = driver.data(DATA);
    assert_eq!((inquiry[0], &inquiry[16..27]), (5, &b"SATA CD-ROM"[..]));
    good(packet(&driver, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8));
    let blocks = u32::try_from(DISK / 2048).unwrap();
    assert_eq!(driver.data(DATA), (blocks - 1).to_be_bytes());
    for read in [[0x28, 0, 0, 0, 0, 3, 0, 0, 2, 0, 0, 0], [0xa8, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0]] {
        good(packet(&driver, &read, 4096));
        assert_eq!(driver.data(DATA), (3 * 512_u32).to_le_bytes());
        assert_eq!(driver.transferred(0), 4096);
    }
    // By PIO, the setup and the end have an interrupt each.
    let fis = Fis { features: 0, lba: 0x08_0000, ..Fis::new(PACKET, 0, 0) };
    driver.put(0, &fis, &[0x28, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0], &[(DATA, 2048)]);
    driver.issue(1);
    driver.wait("the end", || driver.get(PXCI) == 0);
    assert_eq!(driver.get(PXIS) & (PSS | DHRS), PSS | DHRS);
    assert_eq!(driver.data(DATA), 512_u32.to_le_bytes());
    // Feature 1 of GET CONFIGURATION: ATAPI.
    good(packet(&driver, &[0x46, 2, 0, 1, 0, 0, 0, 0, 64, 0, 0, 0], 64));
    assert_eq!(driver.data::<16>(DATA)[15], 2);
    good(packet(&driver, &[0x43, 0, 0, 0, 0, 0, 0, 0, 20, 0, 0, 0], 20));
    let ended = packet(&driver, &[0x28, 0, 0, 0xff, 0, 0, 0, 0, 1, 0, 0, 0], 2048);
    assert_eq!(ended.errors, TFES);
    assert_eq!(sense(&driver), [5, 0x21, 0]);
}

#[test]
fn a_cd_is_changed_while_the_machine_runs() {
    let machine = Machine::cdrom();
    let driver = machine.started();
    packet(&driver, &READY, 0);
    let events = || {
        good(packet(&driver, &[0x4a, 1, 0, 0, 0x10, 0, 0, 0, 8, 0, 0, 0], 8));
        let data: [u8; 8] = driver.data(DATA);
        (data[4], data[5])
    };
    let lock = |on: u8| good(packet(&driver, &[0x1e, 0, 0, 0, on, 0, 0, 0, 0, 0, 0, 0], 0));
    let tray = machine.tray();
    lock(1);
    assert!(tray.is_locked() && tray.eject(false).is_err());
    assert_eq!(events(), (1, 2), "the operator asks for the medium");
    lock(0);
    tray.eject(false).unwrap();
    assert_eq!(events(), (3, 0));
    packet(&driver, &READY, 0);
    assert_eq!(sense(&driver), [2, 0x3a, 0]);
    // It stays empty after a pause.
    let saved = machine.bench.board.park();
    machine.bench.board.run(saved).unwrap();
    assert!(tray.medium().is_none());
    let other = machine.image("other.iso", 1 << 20);
    tray.insert(&other, None).unwrap();
    assert_eq!(events(), (2, 2));
    packet(&driver, &READY, 0);
    assert_eq!(sense(&driver), [6, 0x28, 0]);
    good(packet(&driver, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8));
    assert_eq!(driver.data(DATA), 511_u32.to_be_bytes());
    // The guest ejects it by START STOP UNIT.
    good(packet(&driver, &[0x1b, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0], 0));
    assert!(tray.medium().is_none());
}

#[test]
fn patches_are_for_the_first_cd_alone() {
    // Across two blocks.
    let overlay = "6142:00000006:aabbccdd";
    let machine = Machine::new("ahci-cdrom", "cd.iso", json!({ "overlay": overlay }));
    let driver = machine.started();
    let read = || {
        // Unit attention.
        packet(&driver, &READY, 0);
        good(packet(&driver, &[0x28, 0, 0, 0, 0, 2, 0, 0, 2, 0, 0, 0], 4096));
        driver.data::<4096>(DATA)
    };
    let first = machine.folder.path().join("cd.iso");
    let file = std::fs::read(&first).unwrap();
    let mut patched = file[4096..8192].to_vec();
    patched[2046..2050].copy_from_slice(&[0xaa, 0xbb, 0xcc, 0xdd]);
    assert_eq!(read()[..], patched);
    let tray = machine.tray();
    let other = machine.image("other.iso", DISK);
    for (path, content) in [(&other, &file[4096..8192]), (&first, &patched)] {
        tray.eject(false).unwrap();
        tray.insert(path, None).unwrap();
        assert_eq!(read()[..], *content, "{}", path.display());
    }
    assert!(std::fs::read(&first).unwrap() == file, "the file is changed");
}

#[test]
fn several_queues_and_unusable_isos_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.iso");
    std::fs::write(&path, [0; 512]).unwrap();
    for (kind, fields, reason) in [
        ("ahci-disk", json!({ "path": path, "queues": 2 }), "queues=2"),
        ("ahci-cdrom", json!({ "path": path }), "less than one block"),
        ("ahci-cdrom", json!({ "path": path, "overlay": "0:01:02" }), "not those that the patch"),
        ("ahci-cdrom", json!({ "path": path, "overlay": true }), "has no effect on a CD"),
        ("usb-storage", json!({ "path": path, "overlay": true }), "has no effect on a CD"),
    ] {
        let config = registry::Config::of_kind(kind, fields).unwrap().unwrap();
        let mut bench = Bench::new(4096);
        let error = bench.board.add(kind, |grants| config.build(grants)).unwrap_err();
        assert!(format!("{error:#}").contains(reason), "{error:#}");
    }
}

/// A started disk whose requests the test holds.
fn held() -> (Machine, Arc<DoubleState>) {
    let (image, state) = Double::over(host::disk::memory(DISK));
    let mut machine = Machine { bench: Bench::new(RAM), folder: tempfile::tempdir().unwrap() };
    let config = host::disk::Config { slot: Some(AT), ..host::disk::Config::new("disk") };
    let config = disk::Config(config);
    machine.bench.board.add("ahci-disk", |grants| config.attach_image(image, grants)).unwrap();
    machine.bench.board.run(Vec::new()).unwrap();
    (machine, state)
}

/// Issues queued commands in the first slots.
fn issue_queued(driver: &Driver<'_>, code: u8, count: u16) -> u32 {
    for slot in 0..count {
        let fis = Fis::queued(code, u64::from(slot) * 8, 8, slot);
        driver.put(slot.into(), &fis, &[], &[(DATA + 4096 * u64::from(slot), 4096)]);
    }
    let slots = u32::MAX >> (32 - count);
    driver.set(PXSACT, slots);
    driver.issue(slots);
    slots
}

/// Waits until the disk has this number of requests.
fn reach(driver: &Driver<'_>, disk: &DoubleState, count: usize) -> Vec<Operation> {
    let seen = std::cell::RefCell::new(Vec::new());
    driver.wait("requests", || {
        seen.borrow_mut().extend(disk.seen());
        seen.borrow().len() >= count
    });
    seen.into_inner()
}

#[test]
fn queued_commands_are_in_flight_together_and_others_alone() {
    let (machine, disk) = held();
    let driver = machine.started();
    disk.set(HOLD);
    let slots = issue_queued(&driver, WRITE_QUEUED, 32);
    let seen = reach(&driver, &disk, 32);
    assert!(seen.iter().all(|it| *it == Operation::Write { durable: false }));
    assert_eq!((driver.get(PXCI), driver.get(PXSACT)), (0, slots));
    disk.set(GO);
    good(driver.finish(slots));
    disk.set(HOLD);
    driver.put(0, &Fis::new(0xea, 0, 0), &[], &[]);
    driver.put(1, &Fis::new(READ_DMA, 0, 1), &[], &[(DATA, 512)]);
    driver.issue(3);
    assert_eq!(reach(&driver, &disk, 1).len(), 1);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert!(disk.seen().is_empty(), "the second command waits for the first");
    disk.set(GO);
    good(driver.finish(3));
}

#[test]
fn a_stop_waits_for_requests_in_flight_and_forgets_pending_ones() {
    let (machine, disk) = held();
    let driver = machine.started();
    disk.set(WAIT);
    issue_queued(&driver, READ_QUEUED, 4);
    reach(&driver, &disk, 4);
    driver.restart();
    assert_eq!(driver.get(PXSACT), 0);
    disk.set(HOLD);
    issue_queued(&driver, READ_QUEUED, 4);
    reach(&driver, &disk, 4);
    driver.set(PXCMD, FRE);
    std::thread::sleep(std::time::Duration::from_millis(20));
    assert_ne!(driver.get(PXCMD) & CR, 0);
    disk.set(GO);
    driver.restart();
    good(driver.execute(&Fis::new(READ_DMA, 0, 1), &[], &[(DATA, 512)]));
}

#[test]
fn pending_commands_are_parked_and_start_again() {
    let (machine, disk) = held();
    let driver = machine.started();
    driver.fill(DATA, &[7; 4 * 4096]);
    disk.set(WAIT);
    let slots = issue_queued(&driver, WRITE_QUEUED, 4);
    reach(&driver, &disk, 4);
    let saved = machine.bench.board.park();
    assert_eq!(
        machine.bench.board.run(saved.clone()).map(|()| machine.bench.board.park()).unwrap(),
        saved
    );
    machine.bench.board.run(saved).unwrap();
    disk.set(GO);
    good(driver.finish(slots));
    driver.fill(DATA, &[0; 512]);
    good(driver.execute(&Fis::new(READ_DMA, 31, 1), &[], &[(DATA, 512)]));
    assert_eq!(driver.data(DATA), [7; 512]);
}

#[test]
fn without_a_cache_every_write_is_durable() {
    let (machine, disk) = held();
    let driver = machine.started();
    let write = || {
        good(driver.execute(&Fis::new(WRITE_DMA, 0, 1), &[], &[(DATA, 512)]));
        disk.seen()
    };
    assert_eq!(write(), [Operation::Write { durable: false }]);
    let off = Fis { features: 0x82, ..Fis::new(SET_FEATURES, 0, 0) };
    good(driver.execute(&off, &[], &[]));
    assert_eq!(disk.seen(), [Operation::Flush]);
    assert_eq!(write(), [Operation::Write { durable: true }]);
    good(driver.execute(&Fis::new(0xe0, 0, 0), &[], &[]));
    assert_eq!(disk.seen(), [Operation::Flush]);
}

#[test]
fn a_failing_disk_reports_errors_and_counts_them() {
    let (machine, disk) = held();
    let driver = machine.started();
    disk.fails.store(true, std::sync::atomic::Ordering::SeqCst);
    for (code, task_file) in [(READ_DMA, 0x4051), (WRITE_DMA, 0x0471), (0xea, 0x0471)] {
        let ended = driver.execute(&Fis::new(code, 0, 1), &[], &[(DATA, 512)]);
        assert_eq!((ended.errors, ended.task_file), (TFES, task_file), "{code:#x}");
    }
    disk.fails.store(false, std::sync::atomic::Ordering::SeqCst);
    let smart = Fis { features: 0xd0, ..Fis::new(0xb0, 0xc24f00, 1) };
    good(driver.execute(&smart, &[], &[(DATA, 512)]));
    assert_eq!(driver.data::<16>(DATA)[7], 3);
}
