//! Runs the same Linux guest and firmware on QEMU's q35, which is known to run Windows, and on our
//! machine. Every difference is intended, for the reason in `compare/expected.txt`.
//!
//! QEMU is configured like container images that run Windows: without SMM, HPET, S3 and S4, and
//! with every Hyper-V enlightenment of KVM.
#![forbid(unsafe_code)]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use transom_tests::compare::{self, Facts, expected};
use transom_tests::guest::{Guest, Machine};
use transom_tests::lab::{self, Lab};
use transom_tests::linux::Linux;
use transom_tests::recorded;
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi;

const BOOT: Duration = Duration::from_secs(240);
const LOOK: Duration = Duration::from_secs(120);

/// QEMU's options for a machine like ours.
const QEMU_MACHINE: &str = "smm=off,graphics=off,vmport=off,hpet=off";
const QEMU_CPU: &str = "host,kvm=on,l3-cache=on,+hypervisor,migratable=no,hv_passthrough";
const QEMU_GLOBALS: [&str; 3] =
    ["ICH9-LPC.disable_s3=1", "ICH9-LPC.disable_s4=1", "kvm-pit.lost_tick_policy=discard"];

/// The script that runs in the guest.
const SCRIPT: &str = include_str!("compare/guest.sh");
/// The list of intended differences.
const EXPECTED: &str = include_str!("compare/expected.txt");
/// The archive of the guest's script on QEMU, in the lab.
const QEMU_SHOWED: &str = include_str!("compare/qemu.txt");

fn main() -> ExitCode {
    let assets = &["BZIMAGE_12", "MODULES_12", "OVMF_CODE_12", "OVMF_VARS_12", "BUSYBOX", "QEMU"];
    let tests = vec![
        Test::new("a_guest_reads_the_tables_of_transom", || look(Machine::Transom).map(drop)),
        Test::new("every_difference_is_expected", every_difference),
        Test::new("tables_of_the_guest_recompile", tables_compile),
    ];
    Suite { lab: Lab { mib: 6144, seconds: 1200, assets }, tests }.main()
}

/// The folder with the files that a guest saved; it stays for inspection.
fn folder(machine: Machine) -> anyhow::Result<PathBuf> {
    let name = match machine {
        Machine::Qemu => "seen-on-qemu",
        Machine::Transom => "seen-on-transom",
    };
    Ok(lab::shared()?.join(name))
}

fn look(machine: Machine) -> anyhow::Result<Facts> {
    let work = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset("OVMF_VARS_12")?, work.path())?;
    let mut guest = Guest::on(machine).cpus("2,sockets=1,cores=2,threads=1").memory("3072M");
    guest = guest.firmware(lab::asset("OVMF_CODE_12")?, vars);
    if machine == Machine::Qemu {
        guest = guest.word("-M").word(QEMU_MACHINE).word("-cpu").word(QEMU_CPU);
        for global in QEMU_GLOBALS {
            guest = guest.word("-global").word(global);
        }
    }
    let linux = Linux::new(guest, &lab::asset("BZIMAGE_12")?)
        .modules(&lab::asset("MODULES_12")?, &["cpuid"])
        // Keep the kernel at the same address in every run.
        .cmdline("efi=debug nokaslr tsc=reliable cryptomgr.notests norandmaps")
        .cmdline("rcupdate.rcu_cpu_stall_suppress=1")
        .file("look.sh", SCRIPT);
    let mut booted = linux.boot(BOOT)?;
    let said = booted.run("sh /look.sh", LOOK)?;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, LOOK)?;
    let (_, archive) = said.split_once(">>>seen begin\n").context("no output of the script")?;
    let (archive, _) =
        archive.split_once(">>>seen end").context("the script's output is cut off")?;
    fs::write(folder(machine)?.with_extension("txt"), archive)?;
    unpack(archive, &folder(machine)?)
}

/// Unpacks the archive of the guest's script, in the place of an earlier one.
fn unpack(archive: &str, folder: &Path) -> anyhow::Result<Facts> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let mut tar = Command::new("sh")
        .args(["-c", "base64 -d | tar xz"])
        .current_dir(folder)
        .stdin(Stdio::piped())
        .spawn()
        .context("base64 and tar")?;
    tar.stdin.take().context("no input")?.write_all(archive.as_bytes())?;
    let status = tar.wait()?;
    ensure!(status.success(), "unpacking the guest's archive: {status}");
    Facts::read(folder).with_context(|| folder.display().to_string())
}

fn every_difference() -> anyhow::Result<()> {
    let transom = Facts::read(&folder(Machine::Transom)?)?;
    let record = || unpack(QEMU_SHOWED, &folder(Machine::Qemu)?);
    recorded::or_live(record, || look(Machine::Qemu), |qemu| differences(qemu, &transom))
}

fn differences(qemu: &Facts, transom: &Facts) -> anyhow::Result<()> {
    let mut found = compare::differences(qemu, transom);
    let mut expected = expected::read(EXPECTED)?;
    for kind in ["acpi", "cpuid", "memory", "pci", "smbios"] {
        let (facts, lines) = (transom.count(kind), found.iter().filter(|it| it.starts_with(kind)));
        eprintln!("{kind}: {facts} facts, {} differences", lines.count());
        ensure!(facts > 0 && qemu.count(kind) > 0, "{kind}: nothing to compare");
    }
    if !lab::inside() {
        eprintln!("CPUID is not compared: the list is for the lab's processor");
        found.retain(|line| !line.starts_with("cpuid "));
        expected.retain(|it| !it.pattern.starts_with("cpuid "));
    }
    expected::check(&found, &expected)
}

fn tables_compile() -> anyhow::Result<()> {
    let count = compare::compile(&folder(Machine::Transom)?.join("acpi"))?;
    eprintln!("{count} tables disassembled and compiled again");
    Ok(())
}
