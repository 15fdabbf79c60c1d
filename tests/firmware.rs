//! Stock UEFI firmware of two Debian releases: boots to its shell, resets, and keeps its variables.
#![forbid(unsafe_code)]

#[path = "firmware/attack.rs"]
mod attack;

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tempfile::TempDir;
use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi::{self, Shell};

/// Long enough for firmware in a lab on a busy machine.
const BOOT: Duration = Duration::from_secs(300);
/// Firmware that finds a half-written variable moves its whole store to the spare blocks and back,
/// byte by byte. This causes a million exits, which are slow on an emulated processor.
const MOVE: Duration = Duration::from_secs(1200);
/// The limit for a command, or the end of a process.
const SOON: Duration = Duration::from_secs(60);

const ASSETS: &[&str] = &[
    "OVMF_CODE_12",
    "OVMF_VARS_12",
    "OVMF_VARS_MS_12",
    "OVMF_CODE_SECBOOT_12",
    "OVMF_CODE_13",
    "OVMF_CODE_SECBOOT_13",
    "OVMF_VARS_13",
    "OVMF_CODE_SECBOOT_14",
    "OVMF_VARS_14",
    "BOOT_DISK",
    "BOOT_CD",
    "BZIMAGE_13",
    "MODULES_13",
    "ATTACK_13",
    "BUSYBOX",
];
/// Releases with system-management mode, and numbers of processors. 14 is in testing.
const SMM: [(&str, u32); 8] =
    [("13", 1), ("13", 4), ("13", 8), ("13", 16), ("12", 1), ("12", 4), ("14", 1), ("14", 4)];

fn main() -> ExitCode {
    let test = |release: &str, says: &str, body: fn(&Stock) -> anyhow::Result<()>| {
        let name = release.to_owned();
        Test::new(format!("ovmf_{release}_{says}"), move || body(&Stock::new(&name)?))
    };
    let mut tests = Vec::new();
    // The disks of `boots_from` show that variables stay.
    tests.push(test("12", "remembers_a_variable", remembers_a_variable).thorough());
    tests.push(test("13", "remembers_a_variable", remembers_a_variable).thorough());
    let says = "restarts_after_each_reset";
    // The suite `intel` has it, too.
    tests.push(test("13", says, restarts_after_each_reset).thorough());
    tests.push(test("12", says, restarts_after_each_reset).thorough());
    let nvme = |stock: &Stock| boots_from("nvme", stock);
    let virtio = |stock: &Stock| boots_from("virtio-blk", stock);
    let scsi = |stock: &Stock| boots_from("virtio-scsi", stock);
    let sata = |stock: &Stock| boots_from("ahci-disk", stock);
    // `tries_disks_in_order` covers all kinds of disks, virtio-scsi below keeps the order, and the
    // suite `cluster` boots from virtio-blk.
    tests.push(test("12", "boots_from_nvme_and_keeps_the_boot_order", nvme).thorough());
    tests.push(test("13", "boots_from_virtio_and_keeps_the_boot_order", virtio).thorough());
    tests.push(test("13", "boots_from_virtio_scsi_and_keeps_the_boot_order", scsi));
    tests.push(test("12", "boots_from_sata_and_keeps_the_boot_order", sata).thorough());
    tests.push(test("13", "boots_from_nvme_and_keeps_the_boot_order", nvme).thorough());
    tests.push(test("13", "boots_from_sata_and_keeps_the_boot_order", sata).thorough());
    // The suites `snapshot` and `rehearsal` start such a CD.
    tests.push(test("12", "boots_from_a_cd_at_sata", boots_from_a_cd).thorough());
    tests.push(test("13", "boots_from_a_cd_at_sata", boots_from_a_cd).thorough());
    tests.push(test("12", "boots_from_virtio_and_keeps_the_boot_order", virtio).thorough());
    let says = "tries_disks_in_the_configured_boot_order";
    tests.push(test("12", says, tries_disks_in_order).thorough());
    tests.push(test("13", says, tries_disks_in_order));
    // The suite `secure_boot` has it with SMM, and `cluster` boots a signed system.
    tests.push(test("12", "refuses_unsigned_programs", refuses_unsigned_programs).thorough());
    for (release, cpus) in SMM {
        let name = format!("secboot_{release}_remembers_a_variable_with_{cpus}_processors");
        let body = move || remembers_a_variable(&Stock::with_smm(release, cpus)?);
        // The next test starts this firmware, too.
        tests.push(Test::new(name, body).thorough());
    }
    let name = "secboot_13_keeps_its_variables_and_memory_from_root_and_kernel".to_owned();
    tests.push(Test::new(name, || attack::keeps_root_out(&Stock::with_smm("13", 2)?)));
    for cpus in [1, 2] {
        let name = format!("secboot_13_goes_on_through_many_smis_with_{cpus}_processors");
        let body = move || attack::goes_on_through_many_smis(&Stock::with_smm("13", cpus)?);
        tests.push(Test::new(name, body).thorough());
    }
    let name = "secboot_13_survives_invalid_smis".to_owned();
    tests.push(Test::new(name, || survives_invalid_smis(&Stock::with_smm("13", 1)?)).thorough());
    let name = "secboot_13_runs_in_huge_pages".to_owned();
    tests.push(Test::new(name, in_huge_pages).thorough());
    let name = "secboot_13_keeps_a_usable_store_through_kills".to_owned();
    // One kill would hardly meet a write.
    let kills = || keeps_a_usable_store_through_kills(&Stock::with_smm("13", 1)?, 200);
    tests.push(Test::new(name, kills).thorough());
    for release in ["12", "13"] {
        let says = "keeps_a_usable_store_through_kills";
        let kills = |stock: &Stock| keeps_a_usable_store_through_kills(stock, 10);
        tests.push(test(release, says, kills).thorough());
    }
    // One kill in 20 makes firmware move its store, which takes minutes.
    let seconds = if lab::everything() { 9000 } else { 2400 };
    Suite { lab: Lab { mib: 2048, seconds, assets: ASSETS }, tests }.main()
}

/// The firmware of a release, with a variable store of its own.
struct Stock {
    guest: Guest,
    folder: TempDir,
}

impl Stock {
    fn new(release: &str) -> anyhow::Result<Self> {
        Self::with(&format!("OVMF_CODE_{release}"), release)
    }

    fn with(code: &str, release: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("a folder for the store")?;
        let vars = lab::asset(&format!("OVMF_VARS_{release}"))?;
        let vars = uefi::store(&vars, folder.path())?;
        let code = lab::asset(code)?;
        Ok(Self { guest: Guest::transom().memory("256M").firmware(code, vars), folder })
    }

    /// The firmware that needs system-management mode. Its shell is on a CD, because it has none.
    fn with_smm(release: &str, cpus: u32) -> anyhow::Result<Self> {
        let Self { guest, folder } = Self::with(&format!("OVMF_CODE_SECBOOT_{release}"), release)?;
        let cd = format!("ahci-cdrom,path={}", lab::asset("BOOT_CD")?.display());
        let guest =
            guest.cpus(&cpus.to_string()).word("--smm").word("on").word("--device").word(cd);
        Ok(Self { guest, folder })
    }

    fn store(&self) -> PathBuf {
        self.folder.path().join("vars.fd")
    }

    fn shell(&self) -> anyhow::Result<Shell> {
        Shell::start(&self.guest, BOOT)
    }
}

fn restarts_after_each_reset(stock: &Stock) -> anyhow::Result<()> {
    let mut shell = stock.shell()?;
    for resets in 0..3 {
        ensure!(shell.running.resets()? == resets, "not {resets} resets");
        shell.running.send("reset")?;
        shell.prompt(BOOT)?;
    }
    ensure!(shell.running.resets()? == 3, "not 3 resets");
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)
}

/// The disk adds an entry for itself to the boot order, and firmware boots that entry the next
/// time.
fn boots_from(kind: &str, stock: &Stock) -> anyhow::Result<()> {
    let disk = stock.folder.path().join("disk.img");
    fs::copy(lab::asset("BOOT_DISK")?, &disk).context("the disk")?;
    let device = format!("{kind},path={}", disk.display());
    let guest = stock.guest.clone().word("--device").word(device);
    for words in ["started from the disk", "starting Boot"] {
        let mut running = guest.start()?;
        running.expect(words, BOOT)?;
        if words.starts_with("starting") {
            let entry = running.expect("\n", BOOT)?;
            ensure!(entry.contains("the entry of the test"), "it started{entry}");
            running.expect("started from the disk", BOOT)?;
        }
        running.ends_with(0, BOOT)?;
    }
    Ok(())
}

/// The store has Microsoft's keys; neither the disk's loader nor a shell is signed with them.
fn refuses_unsigned_programs(stock: &Stock) -> anyhow::Result<()> {
    let keys = uefi::store(&lab::asset("OVMF_VARS_MS_12")?, stock.folder.path())?;
    let disk = format!("virtio-blk,path={},overlay", lab::asset("BOOT_DISK")?.display());
    let guest = stock.guest.clone().firmware(lab::asset("OVMF_CODE_12")?, keys);
    let mut running = guest.word("--device").word(disk).start()?;
    running.expect("BdsDxe: failed to load Boot", BOOT)?;
    let line = running.expect("\n", SOON)?;
    ensure!(line.contains("HD(") || line.contains("Pci("), "not the disk:{line}");
    ensure!(line.contains("Access Denied"), "refused for another reason:{line}");
    running.expect("No bootable option or device was found", BOOT)?;
    running.kill()?;
    Ok(())
}

/// Empty disks of all kinds, which firmware tries in vain, a CD, which it boots, and a disk after
/// it.
fn tries_disks_in_order(stock: &Stock) -> anyhow::Result<()> {
    let empty = |kind: &str, slot: &str| -> anyhow::Result<String> {
        let path = stock.folder.path().join(kind);
        fs::File::create(&path)?.set_len(8 << 20)?;
        Ok(format!("{kind},path={}{slot}", path.display()))
    };
    let cd = lab::asset("BOOT_CD")?;
    let mut guest = stock.guest.clone();
    for device in [
        "xhci,slot=9.0".to_owned(),
        empty("nvme", ",slot=5.0")?,
        empty("usb-storage", "")?,
        empty("ahci-disk", ",slot=7.0")?,
        empty("virtio-blk", ",slot=6.0")?,
        empty("virtio-scsi", ",slot=1a.0")?,
        format!("usb-storage,path={},cdrom", cd.display()),
        format!("nvme,path={},overlay", lab::asset("BOOT_DISK")?.display()),
    ] {
        guest = guest.word("--device").word(device);
    }
    let order = "virtio-scsi,usb-storage,ahci-disk,nvme,virtio-blk,usb-storage.2,nvme.2";
    let mut running = guest.word("--boot").word(order).start()?;
    let places =
        ["Pci(0x1A,0x0)", "Pci(0x9,0x0)/USB", "Pci(0x7,0x0)/Sata", "Pci(0x5,0x0)", "Pci(0x6,0x0)"];
    for place in places {
        running.expect("BdsDxe: failed to load", BOOT)?;
        let line = running.expect("\n", SOON)?;
        ensure!(line.contains(place), "{place} should be tried next, not:{line}");
    }
    running.expect("BdsDxe: starting", BOOT)?;
    let line = running.expect("\n", SOON)?;
    ensure!(line.contains("USB CD-ROM"), "the CD should be started, not:{line}");
    running.kill()
}

/// An empty drive, and a CD where QEMU's machine has its SATA controller. The order names both.
fn boots_from_a_cd(stock: &Stock) -> anyhow::Result<()> {
    let cd = format!("ahci-cdrom,path={},slot=1f.2", lab::asset("BOOT_CD")?.display());
    let guest = stock.guest.clone().word("--device").word("ahci-cdrom").word("--device").word(cd);
    let mut running = guest.word("--boot").word("ahci-cdrom,ahci-cdrom.2").start()?;
    running.expect("BdsDxe: starting", BOOT)?;
    let line = running.expect("\n", SOON)?;
    ensure!(line.contains("SATA CD-ROM"), "the CD should be started, not:{line}");
    running.expect("started from the CD", BOOT)?;
    running.kill()
}

/// The command for the variable that the tests set.
const VARIABLE: &str = "setvar transom -guid 5ac0ffee-0000-4000-8000-7472616e736f";

/// Types the command that sets the variable, without Enter, and waits for its echo.
fn type_value(shell: &mut Shell, value: u32) -> anyhow::Result<()> {
    let value = format!("=0x{value:08X}");
    shell.running.console().type_keys(&format!("{VARIABLE} -nv -bs {value}"))?;
    shell.running.expect(&value, SOON)?;
    Ok(())
}

/// Sets the variable, and returns the time that the firmware took.
fn set(shell: &mut Shell, value: u32) -> anyhow::Result<Duration> {
    type_value(shell, value)?;
    let start = Instant::now();
    let said = shell.run("", SOON)?;
    ensure!(said.trim().is_empty(), "the firmware reported: {said}");
    Ok(start.elapsed())
}

/// The variable's value, if it exists.
fn value(shell: &mut Shell) -> anyhow::Result<Option<u32>> {
    let said = shell.run(VARIABLE, SOON)?;
    if said.contains("Unable to get") {
        return Ok(None);
    }
    let bytes = said.lines().map(str::trim).rfind(|line| !line.is_empty());
    let digits: String = bytes.unwrap_or_default().split_whitespace().collect();
    let value = u32::from_str_radix(&digits, 16);
    // The bytes are printed in little-endian order.
    Ok(Some(value.with_context(|| format!("{VARIABLE}: {said:?}"))?.swap_bytes()))
}

fn remembers_a_variable(stock: &Stock) -> anyhow::Result<()> {
    let mut shell = stock.shell()?;
    ensure!(value(&mut shell)?.is_none(), "the variable existed before");
    set(&mut shell, 0x600d_cafe)?;
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)?;
    let mut shell = stock.shell()?;
    ensure!(value(&mut shell)? == Some(0x600d_cafe), "the variable is missing after a restart");
    set(&mut shell, 0x1234_5678)?;
    shell.running.kill()?;
    let mut shell = stock.shell()?;
    ensure!(value(&mut shell)? == Some(0x1234_5678), "the variable is missing after kill -9");
    shell.running.send("reset")?;
    shell.prompt(BOOT)?;
    ensure!(value(&mut shell)? == Some(0x1234_5678), "the variable is missing after a reset");
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)
}

/// SMRAM in a memory file.
fn in_huge_pages() -> anyhow::Result<()> {
    fs::write("/proc/sys/vm/nr_hugepages", "128").context("huge pages of the lab")?;
    let Stock { guest, folder } = Stock::with_smm("13", 2)?;
    let guest = guest.memory("256M,hugepages=2M");
    let found = remembers_a_variable(&Stock { guest, folder });
    fs::write("/proc/sys/vm/nr_hugepages", "0")?;
    found
}

/// Ports that cause SMIs, in the firmware's shell after it has locked the chip set: interrupts stay
/// enabled, and commands that no driver of the firmware gives have no effect.
fn survives_invalid_smis(stock: &Stock) -> anyhow::Result<()> {
    let mut shell = stock.shell()?;
    set(&mut shell, 0x600d_cafe)?;
    shell.run("mm 630 20 -w 1 -IO", SOON)?;
    let said = shell.run("mm 630 -w 1 -IO -n", SOON)?;
    ensure!(said.contains("0x21"), "SMI_EN is {said}");
    for code in [0x00, 0x01, 0x02, 0x03, 0x7f, 0x80, 0xa0, 0xff] {
        shell.run(&format!("mm b3 {code:x} -w 1 -IO"), SOON)?;
        shell.run(&format!("mm b2 {code:x} -w 1 -IO"), SOON)?;
    }
    ensure!(value(&mut shell)? == Some(0x600d_cafe), "the variable changed");
    set(&mut shell, 0x1234_5678)?;
    ensure!(value(&mut shell)? == Some(0x1234_5678), "the variable cannot be changed any more");
    shell.running.kill()
}

/// Writes the variable, then kills the machine at a random moment of a second write, between Enter
/// and the prompt. Afterwards the store has the old or the new value.
fn keeps_a_usable_store_through_kills(stock: &Stock, kills: u32) -> anyhow::Result<()> {
    let mut shell = stock.shell()?;
    let (mut value_before, mut newer) = (0, 0);
    for kill in 1..=kills {
        value_before += 1;
        let took = set(&mut shell, value_before)?;
        type_value(&mut shell, value_before + 1)?;
        let share = RandomState::new().build_hasher().finish() % 1000;
        let after = took.mul_f64(share as f64 / 1000.0);
        shell.running.kill_after(after);
        shell.running.send("")?;
        let status = shell.running.wait(SOON)?;
        ensure!(status.signal() == Some(9), "{status}: {}", shell.running.stderr());
        // A copy of the store, for inspection after a failure.
        let evidence = lab::shared()?.join("killed.fd");
        fs::copy(stock.folder.path().join("vars.fd"), &evidence)?;
        let store = || format!("killed {after:?} into a write of {took:?}: {}", evidence.display());
        shell = Shell::start(&stock.guest, MOVE).with_context(store)?;
        let found = value(&mut shell).with_context(store)?;
        if kill % 20 == 0 {
            say!("killed {kill} times");
        }
        let kept = found == Some(value_before);
        ensure!(
            kept || found == Some(value_before + 1),
            "{}: {found:?}, after {value_before}",
            store()
        );
        if !kept {
            newer += 1;
            value_before += 1;
        }
    }
    say!("killed {kills} times during a write, which was complete {newer} times");
    Ok(())
}
