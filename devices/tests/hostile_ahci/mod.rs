//! An AHCI controller with a hostile driver.

use std::path::{Path, PathBuf};

use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::ahci::{
    ABAR, DATA, Driver, FRE, Fis, GHC, LIST, PXCI, PXCMD, PXIE, PXIS, PXSACT, PXSCTL, PXSERR, ST,
};
use devices::testutil::hostile::Actions;
use serde_json::{Value, json};

const AT: Address = Address::new(2, 0);
/// Sizes of guest memory and of the medium.
const RAM: u64 = 1 << 20;
const DISK: u64 = 1 << 18;
/// Slots that the driver uses.
const SLOTS: u32 = 8;

/// ATA commands: reads and writes of each protocol, lists, logs, settings, power, resets.
const COMMANDS: [u8; 32] = [
    0x60, 0x61, 0x60, 0x61, 0x25, 0x35, 0x24, 0x34, 0xc8, 0xca, 0x20, 0x30, 0x29, 0x39, 0x3d, 0x06,
    0x2f, 0x47, 0xb0, 0xec, 0xa1, 0xef, 0xc6, 0xe7, 0xea, 0xe0, 0xe5, 0x40, 0x42, 0x90, 0x08, 0xa0,
];
/// Packet commands: reads, sense data, descriptions, the tray.
const PACKETS: [u8; 16] = [
    0x28, 0xa8, 0x28, 0x12, 0x03, 0x00, 0x25, 0x43, 0x46, 0x4a, 0x51, 0x5a, 0x1b, 0x1e, 0xbe, 0xad,
];

/// Returns the fields of a device.
type Fields = fn(&Path) -> Value;

/// Kinds and configurations.
const CONFIGS: &[(&str, Fields)] = &[
    ("ahci-disk", |folder| json!({ "path": medium(folder), "overlay": true })),
    ("ahci-disk", |folder| json!({ "path": medium(folder), "iops": 2000 })),
    ("ahci-disk", |folder| json!({ "path": medium(folder), "sector": 4096 })),
    ("ahci-cdrom", |folder| json!({ "path": medium(folder) })),
    ("ahci-cdrom", |_| json!({})),
];

fn medium(folder: &Path) -> PathBuf {
    let path = folder.join("medium");
    let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    file.expect("a folder to write in").set_len(DISK).expect("a few pages");
    path
}

/// Runs the actions that the bytes describe, then checks that the controller still works. The first
/// byte selects the configuration. Returns how many commands succeeded.
pub(crate) fn run(folder: &Path, mut bytes: impl Iterator<Item = u8>) -> u32 {
    let Some(way) = bytes.next() else { return 0 };
    let (kind, fields) = CONFIGS[usize::from(way) % CONFIGS.len()];
    let mut fields = fields(folder);
    fields["slot"] = json!("02.0");
    let config = Config::of_kind(kind, fields).expect("it is in the registry");
    let config = config.expect("its fields");
    let mut bench = Bench::new(usize::try_from(RAM).expect("a few pages"));
    bench.board.add(kind, |grants| config.build(grants)).expect("the board is empty");
    bench.board.run(Vec::new()).expect("power-on");
    let driver = Driver::find(&bench, AT);
    driver.start();
    let mut actions = Actions::new(bytes, RAM);
    let mut served = 0;
    while step(&mut actions, &driver, folder, &mut served).is_some() {}
    bench.board.reset().expect("power-on again");
    let driver = Driver::find(&bench, AT);
    driver.start();
    let identify = if kind == "ahci-disk" { 0xec } else { 0xa1 };
    let ended = driver.execute(&Fis::new(identify, 0, 0), &[], &[(DATA, 512)]);
    assert!(ended.is_good(), "{ended:x?}");
    served
}

/// Runs one action. Returns None at the end of the bytes.
fn step<B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    driver: &Driver<'_>,
    folder: &Path,
    served: &mut u32,
) -> Option<()> {
    let (what, bench) = (actions.byte()?, driver.bench);
    let slot = u32::from(actions.byte()?) % SLOTS;
    match what {
        0..120 => command(actions, driver, slot)?,
        120..150 => {
            driver.set(PXSACT, u32::from(actions.byte()?));
            driver.issue(u32::from(actions.byte()?));
        }
        150..175 => {
            let done = driver.get(PXCI) >> slot & 1 == 0 && driver.transferred(slot) > 0;
            *served += u32::from(done);
            driver.set(PXIS, u32::MAX);
        }
        // Stop, start, FIS reception, CLO, and other bits.
        175..190 => driver.set(PXCMD, [0, ST, FRE, FRE | ST, 8, u32::MAX][slot as usize % 6]),
        190..200 => driver.set(PXSCTL, u32::from(actions.byte()? & 7)),
        200..205 => driver.set(GHC, u32::from(actions.byte()?)),
        205..215 => {
            driver.set(PXSERR, actions.word()?);
            driver.set(PXIE, actions.word()?);
        }
        215..225 => {
            let at = u64::from(actions.byte()?) * 4;
            driver.set(at & 0x17c, actions.word()?);
        }
        225..232 => drop(bench.memory.write(actions.address()?, &actions.word()?.to_le_bytes())),
        232..236 => driver.config(4, u32::from(actions.byte()?)),
        236..240 => change_medium(driver, folder, slot),
        240..247 => {
            let saved = bench.board.park();
            bench.board.run(saved).expect("what was just saved");
        }
        247..249 => bench.board.reset().expect("power-on again"),
        // A new driver.
        _ => {
            driver.config(0x24, u32::try_from(ABAR).expect("below 4 GiB"));
            driver.config(0x04, 6);
            driver.start();
        }
    }
    Some(())
}

/// The operator ejects, inserts or grows.
fn change_medium(driver: &Driver<'_>, folder: &Path, how: u32) {
    let disks = &driver.bench.board.shared.disks;
    for tray in disks.trays() {
        if tray.eject(how.is_multiple_of(2)).is_err() {
            tray.insert(&medium(folder), None).ok();
        }
    }
    for disk in disks.all().iter().filter(|disk| disk.name == "ahci-disk") {
        disk.grow(Some(DISK + u64::from(how) * 4096)).ok();
    }
}

/// A well-formed command with random contents, mostly.
fn command<B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    driver: &Driver<'_>,
    slot: u32,
) -> Option<()> {
    let (choice, shape) = (actions.byte()?, actions.byte()?);
    let code = if choice < 240 { COMMANDS[usize::from(choice) % 32] } else { actions.byte()? };
    let small = u16::from(actions.byte()?);
    let (lba, count) = (u64::from(actions.byte()?), small & 15);
    let tag = u16::try_from(slot).expect("a few slots");
    let mut fis = match code {
        0x60 | 0x61 => Fis::queued(code, lba, count, tag),
        0xb0 => Fis { features: 0xd0 | count, ..Fis::new(code, 0xc24f00, 1) },
        _ => Fis { features: 1, ..Fis::new(code, lba, count) },
    };
    if shape < 30 {
        fis.lba = u64::from(actions.word()?) << (shape & 15);
        (fis.count, fis.features) = (actions.short()?, actions.short()?);
    }
    if shape == 30 || shape == 31 {
        fis = Fis::control((shape & 1) << 2);
    }
    let mut packet = Vec::new();
    if code == 0xa0 {
        packet = vec![PACKETS[usize::from(choice ^ shape) % 16], 0, 0, 0, 0];
        for _ in 5..12 {
            packet.push(actions.byte()? & if shape < 100 { 0xff } else { 7 });
        }
    }
    let mut regions = Vec::new();
    for _ in 0..=shape % 4 {
        let length = (u32::from(small) + 1) * 64;
        let address = if shape % 16 == 0 { actions.address()? } else { DATA };
        regions.push((address, length));
    }
    driver.put(slot, &fis, &packet, &regions);
    if shape % 32 == 5 {
        // The number of regions, or the address of the table.
        let at = LIST + 32 * u64::from(slot) + u64::from(shape & 0x40) / 8;
        driver.bench.memory.write(at, &actions.word()?.to_le_bytes()).ok();
    }
    if shape & 8 == 0 {
        if matches!(code, 0x60 | 0x61) {
            driver.set(PXSACT, 1 << slot);
        }
        driver.issue(1 << slot);
    }
    Some(())
}
