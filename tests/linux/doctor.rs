//! `vmm doctor --run` on a host with a complete KVM: Linux boots with a device of each kind.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use transom_tests::doctor::{self, REPORT};
use transom_tests::lab;
use transom_tests::program::{Ended, finish};
use transom_tests::say;

const MINUTE: Duration = Duration::from_secs(60);
/// Time in a lab beside which another one works.
const BUSY: &str = "240";
/// Drivers of the kernel for our devices.
const DRIVERS: [&str; 13] = [
    "nvme",
    "ahci",
    "e1000e",
    "virtio-pci",
    "virtio_blk",
    "virtio_scsi",
    "virtio_net",
    "virtio_rng",
    "virtio_balloon",
    "virtio_console",
    "xhci_hcd",
    "usbhid",
    "usb-storage",
];

/// Runs it with these words, and returns its report.
fn run(words: &[&str]) -> Result<(Ended, Value)> {
    let folder = tempfile::tempdir()?;
    let ended = finish(&mut doctor::command(&lab::vmm()?, folder.path(), words))?;
    say!("{}{}", ended.stdout, ended.stderr);
    let report = doctor::check(&fs::read_to_string(folder.path().join(REPORT))?)?;
    Ok((ended, report))
}

pub(crate) fn boots_linux_with_every_device() -> Result<()> {
    boots_linux(&["--seconds", BUSY])
}

pub(crate) fn ends_within_a_minute() -> Result<()> {
    let start = Instant::now();
    boots_linux(&[])?;
    let elapsed = start.elapsed();
    ensure!(elapsed < MINUTE, "it took {elapsed:?}");
    Ok(())
}

/// With the kernel that has most of the drivers, all as modules.
fn boots_linux(words: &[&str]) -> Result<()> {
    let kernel = lab::asset("BZIMAGE_GENERIC")?;
    let modules = lab::asset("MODULES_GENERIC")?;
    let [kernel, modules] = [&kernel, &modules].map(|path| path.to_str().unwrap_or_default());
    let all = [&["--disk", ".", "--kernel", kernel, "--modules", modules], words].concat();
    let (ended, report) = run(&all)?;
    ensure!(ended.status == 0, "{ended:?}");
    for step in ["probe", "probe on Hyper-V", "Linux", "firmware", "disk"] {
        ensure!(doctor::step(&report, step)?["verdict"] == "passed", "{report}");
    }
    let linux = &report["linux"];
    let devices = linux["devices"].as_array().context("devices")?;
    for driver in DRIVERS {
        ensure!(devices.iter().any(|it| it["driver"] == driver), "no {driver}: {linux}");
    }
    let disks = linux["disks"].as_array().context("disks")?;
    ensure!(disks.len() == 5 && disks.iter().all(|it| it["result"] == "read"), "{linux}");
    ensure!(linux["refused_modules"] == Value::Array(Vec::new()), "{linux}");
    ensure!(linux["clock"].as_str().is_some_and(|clock| !clock.is_empty()), "{linux}");
    // The lab's processors have neither AVIC nor APICv, so an end of interrupt exits.
    ensure!(report["interrupts"]["active"] == false, "{report}");
    Ok(())
}

/// The probe runs forever with the words for a Linux, and stands for a kernel that hangs.
pub(crate) fn reports_a_kernel_that_hangs() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let kernel = folder.path().join("kernel");
    fs::write(&kernel, probe::IMAGE)?;
    let (ended, report) = run(&["--kernel", kernel.to_str().context("a path")?])?;
    ensure!(ended.status == 1, "{ended:?}");
    let step = doctor::step(&report, "Linux")?;
    let says = step["says"].as_str().unwrap_or_default();
    ensure!(step["verdict"] == "failed", "{step}");
    ensure!(says.contains("did not start our program") && says.contains("no end after"), "{says}");
    ensure!(ended.stdout.contains("FAILED: Linux"), "{ended:?}");
    Ok(())
}
