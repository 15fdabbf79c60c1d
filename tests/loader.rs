//! The same EFI program on QEMU's q35, which is known to run Windows, and on our machine. It does
//! what the boot manager, the loader and the early kernel of Windows do with firmware: screen,
//! tables, memory map, TPM, variables, and runtime services at other addresses. Every difference
//! is intended, for the reason in `loader/expected.txt`.
#![forbid(unsafe_code)]

#[path = "loader/acpi.rs"]
mod acpi;
#[path = "loader/report.rs"]
mod report;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail, ensure};
use transom_tests::compare::{self, Facts, expected};
use transom_tests::guest::{Guest, Machine};
use transom_tests::lab::{self, Lab};
use transom_tests::recorded;
use transom_tests::suite::{Suite, Test};
use transom_tests::tpm::Swtpm;
use transom_tests::uefi;

use self::report::Report;

/// Three starts of the firmware, in a lab on a busy machine.
const ALL: Duration = Duration::from_secs(1800);
const SOON: Duration = Duration::from_secs(60);
const MACHINES: [Machine; 2] = [Machine::Qemu, Machine::Transom];
/// Debian's release whose firmware is always compared, and one that is with `TRANSOM_TESTS=all`.
const RELEASES: [&str; 2] = ["13", "12"];
const ASSETS: &[&str] = &["OVMF_CODE_12", "OVMF_VARS_12", "OVMF_CODE_13", "OVMF_VARS_13", "QEMU"];

/// QEMU's options for a machine like ours: without SMM, HPET, S3 and S4.
const QEMU_MACHINE: &str = "smm=off,graphics=off,vmport=off,hpet=off";
const QEMU_GLOBALS: [&str; 2] = ["ICH9-LPC.disable_s3=1", "ICH9-LPC.disable_s4=1"];
const QEMU_DEVICES: [&str; 3] =
    ["bochs-display,xres=1280,yres=800", "virtio-rng-pci", "ide-hd,drive=disk,bus=ide.0"];
const QEMU_CDS: [&str; 4] = [
    "ide-cd,drive=sata,bus=ide.1",
    "qemu-xhci",
    "usb-bot,id=bot",
    "scsi-cd,drive=usb,bus=bot.0,lun=0",
];

/// The list of intended differences.
const EXPECTED: &str = include_str!("loader/expected.txt");
/// The report of QEMU with the first release's firmware.
const QEMU_SHOWED: &str = include_str!("loader/qemu.txt");

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for release in RELEASES {
        let test = Test::new(format!("a_loader_sees_transom_with_ovmf_{release}"), move || {
            look(Machine::Transom, release).map(drop)
        });
        tests.push(if release == RELEASES[0] { test } else { test.thorough() });
    }
    tests.push(Test::new("every_difference_is_expected", every_difference));
    let name = "a_full_store_is_as_on_qemu";
    tests.push(Test::new(name, full_store).thorough());
    // The other tests read parts of it.
    tests.push(Test::new("firmware_reads_a_whole_file_of_5_gib", whole_file).thorough());
    Suite { lab: Lab { mib: 6144, seconds: 1800, assets: ASSETS }, tests }.main_after(build)
}

/// Builds the guest, its disk, and the CD with a file of 5 GiB, on the host that the lab is on.
fn build() -> anyhow::Result<()> {
    for (name, to) in [("build", lab::shared()?), ("big", cd()?)] {
        let program = lab::repository().join("tests/loader").join(name);
        let mut command = Command::new(&program);
        let status = command.arg(to).status().with_context(|| program.display().to_string())?;
        ensure!(status.success(), "{}: {status}", program.display());
    }
    Ok(())
}

fn cd() -> anyhow::Result<PathBuf> {
    Ok(lab::shared()?.join("loader-big.iso"))
}

/// The guest with one machine's words for the same devices: a disk, and CDs if they are wanted.
fn guest(machine: Machine, disk: &Path, cds: bool) -> anyhow::Result<Guest> {
    let (disk, cd) = (disk.display(), cd()?);
    let cd = cd.display();
    let mut words: Vec<String> = Vec::new();
    let mut add = |option: &str, value: &str| words.extend([option, value].map(str::to_owned));
    match machine {
        Machine::Transom => {
            let usb = format!("usb-storage,path={cd},cdrom");
            let (disk, sata) = (format!("ahci-disk,path={disk}"), format!("ahci-cdrom,path={cd}"));
            let devices = ["virtio-rng", &disk, &sata, "xhci", &usb];
            let count = if cds { devices.len() } else { 2 };
            devices[..count].iter().for_each(|device| add("--device", device));
        }
        Machine::Qemu => {
            add("-M", QEMU_MACHINE);
            QEMU_GLOBALS.iter().for_each(|global| add("-global", global));
            add("-drive", &format!("if=none,id=disk,format=raw,file={disk}"));
            QEMU_DEVICES.iter().for_each(|device| add("-device", device));
            for id in ["sata", "usb"].into_iter().filter(|_| cds) {
                add("-drive", &format!("if=none,id={id},format=raw,readonly=on,file={cd}"));
            }
            QEMU_CDS.iter().filter(|_| cds).for_each(|device| add("-device", device));
        }
    }
    let guest = Guest::on(machine).cpus("2,sockets=1,cores=2,threads=1").memory("3072M");
    Ok(words.into_iter().fold(guest.display("1280x800"), Guest::word))
}

fn look(machine: Machine, release: &str) -> anyhow::Result<Report> {
    let kept = Report::path(machine, release)?;
    // Remove the report of an earlier run.
    if kept.exists() {
        fs::remove_file(&kept).with_context(|| kept.display().to_string())?;
    }
    // Both releases have the same UDF driver.
    let cds = release == RELEASES[0] || lab::everything();
    let text = run((machine, release), "loader.img", cds)?;
    fs::write(&kept, &text).with_context(|| kept.display().to_string())?;
    let report = Report::read(&text)?;
    report.is_right()?;
    Ok(report)
}

/// Starts the guest from a disk, and returns the lines of all its starts.
fn run((machine, release): (Machine, &str), disk: &str, cds: bool) -> anyhow::Result<String> {
    let work = tempfile::tempdir()?;
    let image = lab::shared()?.join(disk);
    let disk = work.path().join("disk.img");
    fs::copy(&image, &disk).with_context(|| image.display().to_string())?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, work.path())?;
    let tpm = Swtpm::start()?;
    let guest = guest(machine, &disk, cds)?.tpm(&tpm.path());
    let guest = guest.firmware(lab::asset(&format!("OVMF_CODE_{release}"))?, vars);
    let start = SystemTime::now();
    let mut running = guest.start()?;
    running.expect(">>>loader begin", ALL)?;
    let (which, text) = running.expect_any(&[">>>loader end", "wrong: exception"], ALL)?;
    if which == 1 {
        let more = running.expect("\n", SOON)?;
        bail!("the guest was interrupted by exception{more}after:\n{text}");
    }
    running.ends_with(0, SOON)?;
    Report::read(&text)?.clock(start, SystemTime::now())?;
    Ok(text)
}

/// Each byte of the file on the CDs at SATA and USB.
fn whole_file() -> anyhow::Result<()> {
    let release = (Machine::Transom, RELEASES[0]);
    let report = Report::read(&run(release, "loader-whole.img", true)?)?;
    report.is_right()?;
    for bus in ["SATA", "USB"] {
        let name = format!("file on {bus}, whole");
        let found = report.facts.iter().find(|fact| fact.0 == name).map(|fact| fact.1.as_str());
        ensure!(found == Some("5120 MiB right"), "{name}: {found:?} in {:?}", report.facts);
    }
    Ok(())
}

/// Fills the store of variables at run time, and empties it.
fn full_store() -> anyhow::Result<()> {
    let [qemu, transom] = MACHINES.map(|machine| -> anyhow::Result<Facts> {
        let report = Report::read(&run((machine, RELEASES[0]), "loader-full.img", false)?)?;
        report.is_right()?;
        let refused = report.facts.iter().filter(|it| it.1.ends_with("OUT_OF_RESOURCES")).count();
        ensure!(refused > 2, "the store is not full: {:?}", report.facts);
        Facts::of(report.facts)
    });
    let differences = compare::differences(&qemu?, &transom?);
    ensure!(differences.is_empty(), "{}", differences.join("\n"));
    Ok(())
}

/// The newest of Windows evaluates QEMU's tables. Ours are evaluated by Vista, 10 and 11, and with
/// `TRANSOM_TESTS=all` by each.
fn evaluate(machine: Machine, report: &Report) -> anyhow::Result<Vec<(String, String)>> {
    let newest = acpi::VERSIONS.len() - 1;
    let versions = match machine {
        Machine::Qemu => vec![newest],
        Machine::Transom if lab::everything() => (0..=newest).collect(),
        Machine::Transom => vec![0, 7, newest],
    };
    acpi::Tables::new(&report.tables)?.evaluate(&versions)
}

/// The facts of one machine with the first release's firmware.
fn facts(machine: Machine, report: &Report) -> anyhow::Result<Facts> {
    let mut facts = report.contents()?;
    facts.extend_from_slice(&report.facts);
    facts.extend(evaluate(machine, report).with_context(|| format!("{machine:?}"))?);
    Facts::of(facts)
}

fn every_difference() -> anyhow::Result<()> {
    let [first, second] = RELEASES;
    let transom = facts(Machine::Transom, &Report::kept(Machine::Transom, first)?)?;
    // The facts of the second release without ACPI's: the tables are the same.
    let mut more = Vec::new();
    if lab::everything() {
        let [qemu, transom] =
            [look(Machine::Qemu, second)?, Report::kept(Machine::Transom, second)?]
                .map(|report| Facts::of(report.contents()?.into_iter().chain(report.facts)));
        more = differences(&qemu?, &transom?, second)?;
    }
    let record = || facts(Machine::Qemu, &Report::read(QEMU_SHOWED)?);
    let live = || facts(Machine::Qemu, &look(Machine::Qemu, first)?);
    recorded::or_live(record, live, |qemu| {
        let mut found = differences(qemu, &transom, first)?;
        found.extend_from_slice(&more);
        expected::check(&found, &expected::read(EXPECTED)?)
    })
}

fn differences(qemu: &Facts, transom: &Facts, release: &str) -> anyhow::Result<Vec<String>> {
    for kind in report::KINDS {
        let counts = [qemu, transom].map(|facts| facts.count(kind));
        ensure!(counts.iter().all(|&it| it > 0), "{release}: {kind}: nothing to compare");
        eprintln!("ovmf {release}: {kind}: {counts:?} facts");
    }
    let lines = compare::differences(qemu, transom).into_iter();
    Ok(lines.map(|it| format!("ovmf {release} {it}")).collect())
}
