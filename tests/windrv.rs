//! Windows's own drivers on our devices. The storage drivers: each in each of its modes, on disks
//! with sectors of 512 and 4096 bytes, and on read-only disks. The network driver is in
//! `tests/windrv/netkvm.rs`, the display's in `display.rs`, the others are in `kmdf.rs`. The guest
//! is `tests/windrv`.
//!
//! A test fails for each check that the guest reports as failed, for missing checks, and if the
//! disk does not have the data that the guest wrote.
#![forbid(unsafe_code)]

#[path = "windrv/display.rs"]
mod display;
#[path = "windrv/drivers.rs"]
mod drivers;
#[path = "windrv/image.rs"]
mod image;
#[path = "windrv/kmdf.rs"]
mod kmdf;
#[path = "windrv/netkvm.rs"]
mod netkvm;
#[path = "windrv/qemu.rs"]
mod qemu;
#[path = "windrv/report.rs"]
mod report;
#[path = "windrv/snapshots.rs"]
mod snapshots;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{fs, iter};

use anyhow::{Context, Result, ensure};
use report::Report;
use transom_tests::program::{Running, vmm};

/// The size of a disk, and of the part that the checks write: REGION in
/// `tests/windrv/source/disk.h`.
const DISK: usize = 64 << 20;
const REGION: usize = 48 << 20;
/// Blocks after the region that the check `final` writes, and at the end that `grow` writes.
const FINAL_BLOCKS: usize = 8;
/// The bytes by which `grow` makes the disk longer.
const GROWTH: usize = 1 << 20;
/// The guest gives up after 60 seconds without an answer. A run takes two seconds on an idle host.
const PATIENCE: Duration = Duration::from_secs(300);

/// A driver and its device.
#[derive(Clone, Copy)]
struct Driver {
    name: &'static str,
    device: &'static str,
}

const VIOSTOR: Driver = Driver { name: "viostor", device: "virtio-blk" };
const VIOSCSI: Driver = Driver { name: "vioscsi", device: "virtio-scsi" };

/// A kind of disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Sectors512,
    Sectors4096,
    ReadOnly,
}

impl Kind {
    fn words(self) -> &'static str {
        match self {
            Self::Sectors512 => "sector=512",
            Self::Sectors4096 => "sector=4096",
            Self::ReadOnly => "readonly=on",
        }
    }

    fn sector(self) -> usize {
        if self == Self::Sectors4096 { 4096 } else { 512 }
    }

    /// The minimum number of checks in a run. `dump` has no requests in flight together.
    fn checks(self, driver: Driver, mode: &str) -> usize {
        match (self, driver.name, mode) {
            (Self::ReadOnly, ..) => 34,
            (_, "viostor", "dump") => 42,
            (_, "viostor", "smp2" | "smp4" | "smp_late4") => 67,
            (_, "viostor", _) => 64,
            (_, _, "dump") => 41,
            (_, _, "smp2" | "smp4" | "smp_late4") => 66,
            (..) => 63,
        }
    }
}

/// The tests of a driver on a kind of disk: one for each mode.
macro_rules! modes {
    ($driver:ident, $kind:ident) => {
        modes!($driver, $kind: msix4 late4 msix1 few one wire dump smp2 smp4 smp_late4);
    };
    ($driver:ident, $kind:ident: $($mode:ident)*) => {$(
        #[test]
        fn $mode() -> anyhow::Result<()> {
            crate::run(crate::$driver, stringify!($mode), crate::Kind::$kind)
        }
    )*};
}

/// The same with `TRANSOM_TESTS=all` alone: nothing in a driver depends on the mode and on the size
/// of sectors together.
macro_rules! rare_modes {
    ($driver:ident, $kind:ident: $($mode:ident)*) => {$(
        #[test]
        fn $mode() -> anyhow::Result<()> {
            crate::kmdf::thorough(|| {
                crate::run(crate::$driver, stringify!($mode), crate::Kind::$kind)
            })
        }
    )*};
}

macro_rules! kinds {
    ($driver:ident) => {
        mod sectors_of_512 {
            modes!($driver, Sectors512);
        }
        mod sectors_of_4096 {
            modes!($driver, Sectors4096: msix4 one smp4);
            rare_modes!($driver, Sectors4096: late4 msix1 few wire dump smp2 smp_late4);
        }
        mod read_only {
            modes!($driver, ReadOnly);
        }
    };
}

mod viostor {
    kinds!(VIOSTOR);

    #[test]
    fn above_4_gib() -> anyhow::Result<()> {
        crate::run_in(crate::VIOSTOR, "msix4", crate::Kind::Sectors512, crate::HIGH)
    }
}

mod vioscsi {
    kinds!(VIOSCSI);

    #[test]
    fn above_4_gib() -> anyhow::Result<()> {
        crate::run_in(crate::VIOSCSI, "msix4", crate::Kind::Sectors4096, crate::HIGH)
    }
}

/// The machine's memory, and words for the guest.
type Memory = (&'static str, &'static str);
const LOW: Memory = ("256M", " host=vmm");
const HIGH: Memory = ("5G", " host=vmm heap=high");

/// Starts the guest with one disk, and checks its report and the disk.
fn run(driver: Driver, mode: &str, kind: Kind) -> Result<()> {
    run_in(driver, mode, kind, LOW)
}

fn run_in(driver: Driver, mode: &str, kind: Kind, (memory, words): Memory) -> Result<()> {
    let Some(image) = image::image()? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let (control, disk) = (folder.path().join("control"), new_disk(folder.path())?);
    let device = format!("path={},{}", disk.display(), kind.words());
    let mut guest =
        Machine { driver, mode, memory, words, disk: &device }.start(image, &control)?;
    let status = kmdf::obey(&mut guest, &control)?;
    let (output, log) = (guest.stdout.text(), guest.stderr.text());
    ensure!(status == 0, "vmm ended with status {status}:\n{output}\n{log}");
    let outcome = Report::read(&output).and_then(|it| it.judge(kind.checks(driver, mode)));
    let grows = kind != Kind::ReadOnly && mode != "dump";
    let outcome = outcome.and_then(|()| found_on(&disk, kind, FINAL_BLOCKS, grows));
    outcome.with_context(|| format!("{}.{mode} with {}:\n{output}", driver.name, kind.words()))
}

/// A machine with one disk.
struct Machine<'a> {
    driver: Driver,
    mode: &'a str,
    memory: &'a str,
    /// Further words for the guest.
    words: &'a str,
    /// The disk's options.
    disk: &'a str,
}

impl Machine<'_> {
    fn start(&self, image: &Path, control: &Path) -> Result<Running> {
        let Self { driver: Driver { name, device }, mode, memory, words, disk } = self;
        let cpus = drivers::processors(mode).to_string();
        let words = format!("driver={name} mode={mode} processors={cpus}{words}");
        let device = format!("{device},queues=4,serial={},{disk}", kmdf::DISK);
        let mut machine = Command::new(vmm());
        machine.args(["run", "--memory", memory, "--cpus", &cpus, "--display", "none"]);
        machine.args(["--serial", "stdio", "--accept-emulation", "--device", &device]);
        machine.args(["--cmdline", &words, "--kernel"]);
        Running::spawn(machine.arg(image).arg("--control").arg(control))
    }
}

/// A disk with its initial content.
fn new_disk(folder: &Path) -> Result<PathBuf> {
    let disk = folder.join("disk.img");
    fs::write(&disk, original(0, DISK)).with_context(|| disk.display().to_string())?;
    Ok(disk)
}

/// The initial content of the disk between two offsets: each 8 bytes have their own offset, so that
/// the guest notices a sector from another place.
fn original(from: usize, to: usize) -> Vec<u8> {
    (from..to).step_by(8).flat_map(|offset| (offset as u64).to_le_bytes()).collect()
}

/// Checks that the guest's last `blocks` are at their place, and that the bytes after them are
/// unchanged. A disk that grew has zeros and, at its end, blocks of the guest.
fn found_on(disk: &Path, kind: Kind, blocks: usize, grows: bool) -> Result<()> {
    let found = fs::read(disk).with_context(|| disk.display().to_string())?;
    let size = DISK + if grows { GROWTH } else { 0 };
    ensure!(found.len() == size, "the disk has {} bytes, not {size}", found.len());
    let (from, mut wanted) = match kind {
        Kind::ReadOnly => (0, original(0, DISK)),
        _ => (REGION, original(REGION, DISK)),
    };
    if kind != Kind::ReadOnly {
        let written = &mut wanted[..blocks * kind.sector()];
        written.iter_mut().for_each(|byte| *byte = !*byte);
    }
    if grows {
        let last = size - FINAL_BLOCKS * kind.sector();
        wanted.resize(last - from, 0);
        wanted.extend(original(last, size).iter().map(|byte| !byte));
    }
    let differs = iter::zip(&found[from..], &wanted).position(|(found, wanted)| found != wanted);
    ensure!(
        differs.is_none(),
        "the disk is wrong from byte {} on: the guest's last blocks are elsewhere, or it wrote \
         outside of its region",
        from + differs.unwrap_or_default()
    );
    Ok(())
}
