//! Debian's cloud kernels of two releases, and of the next one, as guests.
#![forbid(unsafe_code)]

#[path = "linux/doctor.rs"]
mod doctor;
#[path = "linux/tpm.rs"]
mod tpm;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::Signal;
use transom_tests::guest::{Guest, Machine};
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::recorded;
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi;
use vmm::control::Command;

/// Long enough for a kernel with many processors in a lab on a busy machine.
const BOOT: Duration = Duration::from_secs(180);
/// The limit for a command, or the end of a process.
const SOON: Duration = Duration::from_secs(60);

const RELEASES: [&str; 2] = ["12", "13"];
/// Linux 7.2, in testing.
const NEWEST: &str = "14";
const ASSETS: &[&str] = &[
    "BZIMAGE_12",
    "VMLINUX_12",
    "MODULES_12",
    "OVMF_CODE_12",
    "OVMF_VARS_12",
    "BZIMAGE_13",
    "VMLINUX_13",
    "MODULES_13",
    "OVMF_CODE_13",
    "OVMF_VARS_13",
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BZIMAGE_14",
    "MODULES_14",
    "BUSYBOX",
    "QEMU",
];

fn main() -> ExitCode {
    let test = |release: &'static str, says: &str, body: fn(&str) -> anyhow::Result<()>| {
        Test::new(format!("linux_{release}_{says}"), move || body(release))
    };
    let mut tests = Vec::new();
    let says = "pauses_and_ends_on_sigterm";
    tests.push(test(NEWEST, says, pauses_and_ends_on_sigterm));
    tests.push(test("12", says, pauses_and_ends_on_sigterm).thorough());
    tests.push(test("13", says, pauses_and_ends_on_sigterm).thorough());
    let says = "reacts_to_the_power_button";
    // A pod of the suite `cluster` presses the button of its Linux.
    tests.push(test("12", says, reacts_to_the_power_button).thorough());
    tests.push(test("13", says, reacts_to_the_power_button).thorough());
    // The suites `intel` and `rehearsal` restart Linux, too.
    tests.push(test("13", "reboots_in_the_same_process", reboots_in_the_same_process).thorough());
    tests.push(test("12", "reboots_in_the_same_process", reboots_in_the_same_process).thorough());
    // The suite `disks` covers NVMe with message interrupts, and `usb` a line through KVM.
    let wire = "keeps_files_on_nvme_with_an_interrupt_line";
    tests.push(test("13", wire, keeps_files_on_nvme_with_an_interrupt_line).thorough());
    tests.push(test("12", wire, keeps_files_on_nvme_with_an_interrupt_line).thorough());
    let nvme = |release| test(release, "keeps_files_on_nvme", keeps_files_on_nvme).thorough();
    tests.extend(RELEASES.map(nvme));
    tests.extend(all_cells().into_iter().map(|cell| match DUE.contains(&cell) {
        true => cell.test(),
        false => cell.test().thorough(),
    }));
    tests.push(test("13", "detects_a_new_generation_id", cloned_directly));
    let after = "detects_a_new_generation_id_after_firmware";
    tests.push(test("13", after, cloned_after_firmware).thorough());
    let doctor = doctor::boots_linux_with_every_device;
    // The suites `image` and `vmm_command_line` run doctor with the probe.
    tests.push(Test::new("doctor_boots_linux_with_every_device", doctor).thorough());
    let doctor = doctor::ends_within_a_minute;
    tests.push(Test::new("doctor_ends_within_a_minute", doctor).thorough());
    let doctor = doctor::reports_a_kernel_that_hangs;
    tests.push(Test::new("doctor_reports_a_kernel_that_hangs", doctor).thorough());
    // The newer kernel reports more errors.
    let (says, after) = ("logs_no_new_errors", "logs_no_new_errors_after_firmware");
    tests.push(test("13", says, logs_no_new_errors).thorough());
    tests.push(test("13", after, logs_no_new_errors_after_firmware));
    tests.push(test("12", says, logs_no_new_errors).thorough());
    tests.push(test("12", after, logs_no_new_errors_after_firmware).thorough());
    tests.push(test(NEWEST, "reacts_to_the_power_button", reacts_to_the_power_button).thorough());
    tests.push(test(NEWEST, "reboots_in_the_same_process", reboots_in_the_same_process).thorough());
    tests.push(test(NEWEST, "keeps_files_on_nvme", keeps_files_on_nvme).thorough());
    tests.push(test(NEWEST, says, logs_no_new_errors).thorough());
    let says = "uses_the_tpm_with_firmware_measurements_and_requests";
    tests.push(test("13", says, tpm::talks_to_the_tpm));
    tests.push(test("12", says, tpm::talks_to_the_tpm).thorough());
    Suite { lab: Lab { mib: 6144, seconds: 1320, assets: ASSETS }, tests }.main()
}

/// One machine of the matrix: indexes of the kernel, its format, processors and memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell([usize; 4]);

const FORMATS: [&str; 2] = ["BZIMAGE", "VMLINUX"];
/// Sockets, cores and threads.
const CPUS: [[usize; 3]; 4] = [[1, 1, 1], [2, 1, 1], [1, 5, 1], [2, 2, 2]];
const MEMORY: [&str; 3] = ["256M", "3G", "5G"];
/// The machines that always run: both kernels, both formats, a small and a large machine.
const DUE: [Cell; 2] = [Cell([0, 0, 1, 0]), Cell([1, 1, 3, 2])];

fn all_cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for memory in 0..MEMORY.len() {
        for cpus in 0..CPUS.len() {
            for format in 0..FORMATS.len() {
                cells.extend((0..RELEASES.len()).map(|it| Cell([it, format, cpus, memory])));
            }
        }
    }
    cells
}

impl Cell {
    fn test(self) -> Test {
        let Self([release, format, cpus, memory]) = self;
        let count: usize = CPUS[cpus].iter().product();
        let format = if FORMATS[format] == "VMLINUX" { "elf" } else { "bzimage" };
        let name = format!(
            "linux_{}_as_{format}_on_{count}_cpus_with_{}",
            RELEASES[release], MEMORY[memory]
        );
        Test::new(name, move || self.has_the_configured_processors_and_memory())
    }

    fn has_the_configured_processors_and_memory(self) -> anyhow::Result<()> {
        let Self([release, format, cpus, memory]) = self;
        let [sockets, cores, threads] = CPUS[cpus];
        let count: usize = CPUS[cpus].iter().product();
        let layout = format!("{count},sockets={sockets},cores={cores},threads={threads}");
        let kernel = lab::asset(&format!("{}_{}", FORMATS[format], RELEASES[release]))?;
        let guest = Guest::transom().cpus(&layout).memory(MEMORY[memory]);
        let linux = Linux::new(guest, &kernel).program("/usr/bin/lscpu")?;
        let mut booted = linux.file("facts.sh", FACTS).boot(BOOT)?;
        let facts = booted.run("sh /facts.sh", SOON)?;
        let facts = Facts::read(&facts);
        for (what, wanted) in [
            ("nproc", count),
            ("CPU(s)", count),
            ("Socket(s)", sockets),
            ("Core(s) per socket", cores),
            ("Thread(s) per core", threads),
        ] {
            let found = facts.number(what)?;
            ensure!(found == wanted, "{what}: {found}, not {wanted}");
        }
        facts.memory_is(bytes(MEMORY[memory]))?;
        booted.running.send("poweroff -f")?;
        booted.running.ends_with(0, SOON)
    }
}

/// Prints the machine as the guest sees it, in lines `NAME: VALUE`.
const FACTS: &str = r#"
lscpu
echo "nproc: $(nproc)"
grep MemTotal /proc/meminfo
total=0
for entry in /sys/firmware/memmap/*; do
  if [ "$(cat $entry/type)" = "System RAM" ]; then
    total=$((total + $(cat $entry/end) - $(cat $entry/start) + 1))
  fi
done
echo "map: $total"
total=0
while read -r range colon name; do
  if [ "$name" = "System RAM" ]; then
    total=$((total + 0x${range#*-} - 0x${range%-*} + 1))
  fi
done < /proc/iomem
echo "iomem: $total"
cat /sys/devices/system/memory/memory*/online > /online
echo "blocks: $(grep -c 1 /online)"
echo "block: $((0x$(cat /sys/devices/system/memory/block_size_bytes)))"
"#;

struct Facts(BTreeMap<String, String>);

impl Facts {
    fn read(text: &str) -> Self {
        let pairs = text.lines().filter_map(|line| line.split_once(':'));
        Self(pairs.map(|(name, value)| (name.trim().into(), value.trim().into())).collect())
    }

    fn number(&self, name: &str) -> anyhow::Result<usize> {
        let value = self.0.get(name).with_context(|| format!("the guest did not report {name}"))?;
        let number = value.split_whitespace().next().unwrap_or_default().parse();
        number.with_context(|| format!("{name}: {value}"))
    }

    fn memory_is(&self, asked: usize) -> anyhow::Result<()> {
        // A PC has no RAM from the BIOS's data area to 1 MiB, and Linux never hands out page 0.
        let hole = 0x10_0000 - 0x9_fc00;
        let map = self.number("map")?;
        ensure!(map == asked - hole, "the memory map has {map} bytes of {asked}");
        let iomem = self.number("iomem")?;
        ensure!(iomem == asked - hole - 4096, "/proc/iomem has {iomem} bytes of {asked}");
        let blocks = self.number("blocks")? * self.number("block")?;
        ensure!(blocks == asked, "Linux has {blocks} bytes of {asked} online");
        let total = self.number("MemTotal")? << 10;
        ensure!((asked / 5 * 4..asked).contains(&total), "MemTotal is {total} of {asked}");
        Ok(())
    }
}

fn bytes(size: &str) -> usize {
    let (number, unit) = size.split_at(size.len() - 1);
    let number: usize = number.parse().expect("MEMORY has numbers");
    number << if unit == "G" { 30 } else { 20 }
}

fn linux(guest: Guest, release: &str) -> anyhow::Result<Linux> {
    let linux = Linux::new(guest, &lab::asset(&format!("BZIMAGE_{release}"))?);
    // Linux 7 stops at the lab's emulated XSAVE, on QEMU too.
    Ok(if release == NEWEST { linux.cmdline("noxsave") } else { linux })
}

fn reboots_in_the_same_process(release: &str) -> anyhow::Result<()> {
    let guest = Guest::transom().cpus("2").word("--jail").word("on");
    let mut booted = linux(guest, release)?.boot(BOOT)?;
    let first = booted.run("cat /proc/sys/kernel/random/boot_id", SOON)?;
    ensure!(booted.running.resets()? == 0, "the machine was reset before");
    booted.running.send("reboot -f")?;
    booted.ready(BOOT)?;
    ensure!(booted.running.resets()? == 1, "not one reset");
    let second = booted.run("cat /proc/sys/kernel/random/boot_id", SOON)?;
    ensure!(first != second, "the same boot: {first}");
    ensure!(booted.run("nproc", SOON)?.trim() == "2", "a processor is missing after the reboot");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

fn pauses_and_ends_on_sigterm(release: &str) -> anyhow::Result<()> {
    let mut booted = linux(Guest::transom(), release)?.boot(BOOT)?;
    let before = booted.uptime(SOON)?;
    booted.running.ask(&Command::Pause)?;
    let state = booted.running.ask(&Command::Status)?;
    ensure!(state["state"] == "paused", "{state}");
    booted.running.send("echo still asleep")?;
    sleep(Duration::from_secs(2));
    let console = booted.running.console().text();
    ensure!(!console.contains("still asleep"), "a paused guest answers");
    booted.running.ask(&Command::Resume)?;
    booted.running.expect("still asleep\n>>>transom done 0\n", SOON)?;
    let after = booted.uptime(SOON)?;
    sleep(Duration::from_secs(1));
    let later = booted.uptime(SOON)?;
    ensure!(
        before < after && after + 0.9 < later,
        "the guest's clock reads {before}, {after}, {later}"
    );
    booted.running.signal(Signal::TERM)?;
    booted.running.ends_with(143, SOON)
}

/// Waits for an event of the button, as a desktop or systemd does, and powers off.
const BUTTON: &str = r#"
for device in /sys/class/input/event*; do
  if [ "$(cat $device/device/name)" = "Power Button" ]; then
    echo waiting
    head -c 24 /dev/input/${device##*/} > /dev/null
    echo pressed
    poweroff -f
  fi
done
exit 1
"#;

fn reacts_to_the_power_button(release: &str) -> anyhow::Result<()> {
    let modules = lab::asset(&format!("MODULES_{release}"))?;
    let linux = linux(Guest::transom(), release)?;
    let linux = linux.modules(&modules, &["button", "evdev"]).file("button.sh", BUTTON);
    let mut booted = linux.boot(BOOT)?;
    booted.running.send("sh /button.sh")?;
    booted.running.expect("waiting\n", SOON)?;
    sleep(Duration::from_secs(1));
    booted.running.ask(&Command::PowerButton)?;
    booted.running.expect("pressed\n", SOON)?;
    booted.running.ends_with(0, SOON)
}

/// Debian 12's kernel has no driver for VMGENID.
fn detects_a_new_generation_id(guest: Guest, release: &str) -> anyhow::Result<()> {
    const RESEEDED: &str = "dmesg | grep -c 'crng reseeded due to virtual machine fork'; true";
    let mut booted = linux(guest, release)?.boot(BOOT)?;
    let count = |booted: &mut Booted| booted.run(RESEEDED, SOON).map(|it| it.trim().to_owned());
    ensure!(count(&mut booted)? == "0", "a clone was reported too early");
    let before = booted.running.ask(&Command::Status)?["vmgenid"].clone();
    let after = booted.running.ask(&Command::Vmgenid { id: None })?["vmgenid"].clone();
    ensure!(before != after && after.is_string(), "the ID changed from {before} to {after}");
    let deadline = Instant::now() + SOON;
    while count(&mut booted)? != "1" {
        ensure!(
            Instant::now() < deadline,
            "the guest did not notice the change from {before} to {after}"
        );
        sleep(Duration::from_millis(100));
    }
    // Setting the same ID again is no clone.
    let id = after.as_str().map(str::to_owned);
    booted.running.ask(&Command::Vmgenid { id })?;
    sleep(Duration::from_secs(1));
    ensure!(
        count(&mut booted)? == "1",
        "the guest reported a clone although the ID did not change"
    );
    Ok(())
}

fn cloned_directly(release: &str) -> anyhow::Result<()> {
    detects_a_new_generation_id(Guest::transom(), release)
}

fn cloned_after_firmware(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
    let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
    detects_a_new_generation_id(Guest::transom().firmware(code, vars), release)
}

/// Fills the disk's end with lines that the host checks, and keeps files at its beginning.
const DISK: &str = r#"
set -e
disk=/dev/nvme0n1
test "$(cat /sys/block/nvme0n1/size)" = 131072
seq 1 100000 > /lines
dd if=/lines of=$disk bs=64k seek=800 2> /dev/null
dd if=/dev/urandom of=/data bs=1M count=8 2> /dev/null
/usr/sbin/mke2fs -q -t ext4 $disk 49152k
for round in 1 2; do
  mount -t ext4 -o discard $disk /mnt
  cp /data /mnt/data.$round
  rm -f /mnt/data.$((round - 1))
  sync
  umount /mnt
  echo 3 > /proc/sys/vm/drop_caches
  mount -t ext4 $disk /mnt
  cmp /data /mnt/data.$round
  umount /mnt
done
for part in 0 1 2 3 4 5 6 7; do
  dd if=$disk of=/dev/null bs=$((512 << part)) count=200 skip=$part iflag=direct 2> /dev/null &
done
wait
dd if=$disk bs=64k skip=800 2> /dev/null | head -c $(stat -c %s /lines) | cmp - /lines
grep nvme /proc/interrupts
dmesg | grep -i nvme
"#;

fn keeps_files_on_nvme(release: &str) -> anyhow::Result<()> {
    let said = keeps_files(release, "")?;
    ensure!(said.contains("nvme0q1"), "no interrupt of an I/O queue of its own: {said}");
    Ok(())
}

fn keeps_files_on_nvme_with_an_interrupt_line(release: &str) -> anyhow::Result<()> {
    keeps_files(release, "pci=nomsi").map(drop)
}

fn keeps_files(release: &str, words: &str) -> anyhow::Result<String> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("disk.img");
    File::create(&path)?.set_len(64 << 20)?;
    let device = format!("nvme,path={},serial=transom-1", path.display());
    let guest = Guest::transom().cpus("2").word("--device").word(device);
    let linux = linux(guest, release)?.cmdline(words).file("disk.sh", DISK);
    let mut booted = linux.program("/usr/sbin/mke2fs")?.boot(BOOT)?;
    booted.running.send("mkdir -p /mnt; sh /disk.sh > /said 2>&1; echo ended $?")?;
    // The pauses come at random moments of the script and must lose nothing.
    for _ in 0..3 {
        sleep(Duration::from_millis(700));
        booted.running.ask(&Command::Pause)?;
        sleep(Duration::from_millis(100));
        booted.running.ask(&Command::Resume)?;
    }
    let status = booted.running.expect_any(&["ended 0\n", "ended 1\n", "ended 2\n"], BOOT)?.0;
    booted.running.expect(">>>transom done ", SOON)?;
    let said = booted.run("cat /said", SOON)?;
    say!("{said}");
    ensure!(status == 0, "the guest's script ended with {status}: {said}");
    ensure!(!said.contains("timeout") && !said.contains("error"), "{said}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)?;
    let lines: String = (1..=100_000).map(|number| format!("{number}\n")).collect();
    let image = fs::read(&path)?;
    ensure!(image[800 << 16..].starts_with(lines.as_bytes()), "the host's file has other data");
    Ok(said)
}

/// The level of an error in the kernel's log. More severe levels are smaller.
const ERR: u32 = 3;

/// The kernel's messages of level `err` or more severe, without their time.
fn complaints(guest: Guest, release: &str) -> anyhow::Result<BTreeSet<String>> {
    let machine = guest.machine();
    let mut booted = linux(guest, release)?.boot(BOOT)?;
    let log = booted.run("dmesg -r", SOON)?;
    ensure!(log.contains("Linux version"), "{machine:?}: the log has lost its beginning: {log}");
    let line = |line: &str| {
        let (level, text) = line.strip_prefix('<')?.split_once('>')?;
        let text = text.split_once("] ").map_or(text, |(_, text)| text);
        // Bits 3 and up are the facility.
        Some((level.parse::<u32>().ok()? & 7, text.trim().to_owned()))
    };
    let lines: Vec<_> = log.lines().filter_map(line).collect();
    ensure!(lines.len() > 100, "{machine:?}: {} lines with a level: {log}", lines.len());
    Ok(lines.into_iter().filter(|(level, _)| *level <= ERR).map(|(_, text)| text).collect())
}

/// Compares the errors of the same guest on our machine and on QEMU, which starts only if there are
/// some.
fn compare(release: &str, guest: impl Fn(Machine) -> anyhow::Result<Guest>) -> anyhow::Result<()> {
    let ours = complaints(guest(Machine::Transom)?, release).context("on Transom")?;
    say!("errors on Transom: {ours:?}");
    let live = || complaints(guest(Machine::Qemu)?, release).context("on QEMU");
    recorded::or_live(
        || Ok(BTreeSet::new()),
        live,
        |known| {
            let new: Vec<_> = ours.difference(known).map(String::as_str).collect();
            say!("errors on QEMU: {known:?}");
            ensure!(new.is_empty(), "errors only on our machine:\n{}", new.join("\n"));
            Ok(())
        },
    )
}

fn logs_no_new_errors(release: &str) -> anyhow::Result<()> {
    compare(release, |machine| Ok(Guest::on(machine).cpus("2")))
}

fn logs_no_new_errors_after_firmware(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    compare(release, |machine| {
        let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
        let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
        Ok(Guest::on(machine).cpus("2").firmware(code, vars))
    })
}
