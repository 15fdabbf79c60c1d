//! Mass storage at USB: Linux of two releases reads and writes a disk, reads a CD, and follows what
//! the operator plugs, pulls, takes out and puts in; stock firmware boots from a CD.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi;
use vmm::control::{Command, Force};

const BOOT: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(60);

const RELEASES: [&str; 2] = ["12", "13"];
/// Cloud kernels have no USB.
const ASSETS: &[&str] = &[
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BZIMAGE_GENERIC_13",
    "MODULES_GENERIC_13",
    "BUSYBOX",
    "OVMF_CODE_12",
    "OVMF_VARS_12",
    "OVMF_CODE_13",
    "OVMF_VARS_13",
    "BOOT_CD",
];
const MODULES: &[&str] = &["xhci-pci", "usb-storage", "sd_mod", "sr_mod", "isofs"];

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for release in RELEASES {
        for speed in ["high", "super"] {
            let name = format!("linux_{release}_uses_a_disk_and_a_cd_at_{speed}_speed");
            tests.push(Test::new(name, move || uses_a_disk_and_a_cd(release, speed)));
        }
        let name = format!("linux_{release}_follows_what_is_plugged_and_what_is_changed");
        tests.push(Test::new(name, move || follows(release)));
        let name = format!("ovmf_{release}_boots_from_a_cd_at_usb");
        tests.push(Test::new(name, move || boots_from_a_cd(release)));
    }
    Suite { lab: Lab { mib: 3072, seconds: 1200, assets: ASSETS }, tests }.main()
}

/// A file in which no two sectors are alike.
fn file(folder: &Path, name: &str, mib: usize) -> anyhow::Result<PathBuf> {
    let path = folder.join(name);
    let words = (0..mib << 18).map(|it| u32::try_from(it).unwrap_or(0).wrapping_mul(0x9e37_79b1));
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    fs::write(&path, bytes).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// The checksum of a part of a file, as busybox computes it.
fn sum(path: &Path, skip: usize, mib: usize) -> anyhow::Result<String> {
    let part = format!("dd if='{}' bs=1M skip={skip} count={mib} | sha256sum", path.display());
    let sum = process::Command::new("sh").args(["-c", &part]).output().context("sha256sum")?;
    let text = String::from_utf8_lossy(&sum.stdout).into_owned();
    text.split_whitespace().next().map(str::to_owned).context("sha256sum said nothing")
}

fn boot(release: &str, devices: &[String]) -> anyhow::Result<Booted> {
    let (kernel, modules) = match release {
        "12" => ("BZIMAGE_GENERIC", "MODULES_GENERIC"),
        _ => ("BZIMAGE_GENERIC_13", "MODULES_GENERIC_13"),
    };
    let guest = Guest::transom().word("--device").word("xhci");
    let guest = devices.iter().fold(guest, |guest, it| guest.word("--device").word(it.as_str()));
    Linux::new(guest, &lab::asset(kernel)?).modules(&lab::asset(modules)?, MODULES).boot(BOOT)
}

/// Waits until a command of the guest's succeeds.
fn comes_true(booted: &mut Booted, command: &str) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let answer = booted.try_run(command, SOON)?;
        if answer.status == 0 {
            return Ok(());
        }
        ensure!(start.elapsed() < SOON, "`{command}` is not true: {}", answer.output);
        booted.run("sleep 0.3", SOON)?;
    }
}

/// The guest's checksum of a part of a device.
fn seen(booted: &mut Booted, device: &str, skip: usize, mib: usize) -> anyhow::Result<String> {
    booted.run("echo 3 > /proc/sys/vm/drop_caches", SOON)?;
    let command = format!("dd if={device} bs=1M skip={skip} count={mib} 2> /dev/null | sha256sum");
    let text = booted.run(&command, SOON)?;
    text.split_whitespace().next().map(str::to_owned).context("the guest has no checksum")
}

fn no_complaints(booted: &mut Booted) -> anyhow::Result<()> {
    let complaints =
        "dmesg | grep -E 'usb|xhci|sd |sr ' | grep -iE 'reset|error|timeout|died|bug|timing out'";
    let complaints = booted.try_run(complaints, SOON)?.output;
    ensure!(complaints.trim().is_empty(), "the kernel complains: {complaints}");
    Ok(())
}

fn uses_a_disk_and_a_cd(release: &str, speed: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder for the media")?;
    let disk = file(folder.path(), "disk.img", 24)?;
    let cd = file(folder.path(), "cd.iso", 16)?;
    let mut booted = boot(
        release,
        &[
            format!("usb-storage,path={},speed={speed}", disk.display()),
            format!("usb-storage,path={},speed={speed}", cd.display()),
        ],
    )?;
    comes_true(&mut booted, "test -b /dev/sda && test -b /dev/sr0")?;
    let link = booted.run("cat /sys/bus/usb/devices/*/speed", SOON)?;
    let wanted = if speed == "high" { "480" } else { "5000" };
    ensure!(link.contains(wanted), "the speeds are {link}");
    let size = booted.run("blockdev --getss /dev/sda; blockdev --getss /dev/sr0", SOON)?;
    let sizes: Vec<_> = size.split_whitespace().collect();
    ensure!(sizes == ["512", "2048"], "sectors: {size}");
    ensure!(seen(&mut booted, "/dev/sda", 0, 24)? == sum(&disk, 0, 24)?, "the disk differs");
    ensure!(seen(&mut booted, "/dev/sr0", 0, 16)? == sum(&cd, 0, 16)?, "the CD differs");
    booted.run("dd if=/dev/sr0 of=/dev/sda bs=1M count=8 seek=8 conv=fsync 2> /dev/null", SOON)?;
    ensure!(sum(&disk, 8, 8)? == sum(&cd, 0, 8)?, "what was written is not in the file");
    // A reset of the machine finds both again.
    booted.running.ask(&Command::Reset)?;
    booted.ready(BOOT)?;
    comes_true(&mut booted, "test -b /dev/sda && test -b /dev/sr0")?;
    ensure!(seen(&mut booted, "/dev/sda", 0, 24)? == sum(&disk, 0, 24)?, "after the reset");
    no_complaints(&mut booted)?;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

fn follows(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder for the media")?;
    let (one, two) = (file(folder.path(), "1.iso", 4)?, file(folder.path(), "2.iso", 6)?);
    let stick = file(folder.path(), "stick.img", 8)?;
    let mut booted = boot(release, &[format!("usb-storage,path={}", one.display())])?;
    comes_true(&mut booted, "test -b /dev/sr0")?;
    let name = "usb-storage".to_owned();
    for (path, mib) in [(&two, 6), (&one, 4)] {
        let eject = Command::Eject { name: name.clone(), force: None };
        booted.running.ask(&eject)?;
        comes_true(&mut booted, "! dd if=/dev/sr0 of=/dev/null bs=2048 count=1")?;
        booted.running.ask(&Command::Insert { name: name.clone(), path: path.clone() })?;
        comes_true(&mut booted, "dd if=/dev/sr0 of=/dev/null bs=2048 count=1")?;
        ensure!(seen(&mut booted, "/dev/sr0", 0, mib)? == sum(path, 0, mib)?, "another CD");
    }
    // Who has it open holds it.
    booted.run("(exec 3< /dev/sr0; sleep 1000) & sleep 1", SOON)?;
    let held = booted.running.ask(&Command::Eject { name: name.clone(), force: None });
    ensure!(held.is_err(), "the guest holds the CD");
    booted.running.ask(&Command::Eject { name, force: Some(Force::Force) })?;
    for _ in 0..5 {
        let device = format!("usb-storage,path={},removable", stick.display());
        let answer = booted.running.ask(&Command::Attach { device })?;
        let name = answer["name"].as_str().context("a name")?.to_owned();
        comes_true(&mut booted, "test -b /dev/sda")?;
        ensure!(seen(&mut booted, "/dev/sda", 0, 8)? == sum(&stick, 0, 8)?, "the stick differs");
        booted.running.ask(&Command::Detach { name })?;
        comes_true(&mut booted, "! test -b /dev/sda")?;
    }
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

fn boots_from_a_cd(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder for the store")?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
    let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
    let device = format!("usb-storage,path={},cdrom", lab::asset("BOOT_CD")?.display());
    let guest = Guest::transom().memory("256M").firmware(code, vars).word("--device").word("xhci");
    let mut running = guest.word("--device").word(device).start()?;
    running.expect("started from the CD", BOOT)?;
    running.ends_with(0, BOOT)
}
