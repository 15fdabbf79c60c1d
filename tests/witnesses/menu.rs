//! Systems that GRUB's menu starts from a disk: see `tests/lab/witness.cfg`.

use anyhow::{Context, ensure};
use tempfile::TempDir;
use transom_tests::compare::{self, Facts, expected};
use transom_tests::guest::{Guest, Machine, Running};
use transom_tests::lab;
use transom_tests::linux::Booted;

use super::{BOOT, SOON, guest};

/// The list of intended differences.
const EXPECTED: &str = include_str!("expected.txt");
const PROMPT: &str = "grub> ";
const LAST_ENTRY: &str = "Xen";
/// The identity of Xen's second domain, in `tests/lab/second-domain`.
const SECOND_DOMAIN: &str = "5ec00d00-7472-616e-736f-6d0000000002";

/// GRUB at its menu, and the folder of the machine's variables.
struct Menu {
    running: Running,
    _folder: TempDir,
}

impl Menu {
    fn start(machine: Machine, memory: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let guest = with_disk(machine, guest(machine, folder.path())?.memory(memory))?;
        let mut running = guest.start()?;
        running.expect("GNU GRUB  version 2.12", BOOT)?;
        running.expect(LAST_ENTRY, BOOT)?;
        Ok(Self { running, _folder: folder })
    }
}

fn with_disk(machine: Machine, guest: Guest) -> anyhow::Result<Guest> {
    let disk = lab::asset("WITNESS_DISK")?;
    let disk = disk.display();
    Ok(match machine {
        Machine::Transom => guest.word("--device").word(format!("virtio-blk,path={disk},overlay")),
        Machine::Qemu => guest
            .word("-drive")
            .word(format!("if=none,id=disk,format=raw,snapshot=on,file={disk}"))
            .word("-device")
            .word("virtio-blk-pci,drive=disk,disable-legacy=on"),
    })
}

/// Facts that a system found: functions of PCI, tables of firmware, complaints about firmware.
pub(crate) type Found = Vec<(String, String)>;

/// GRUB lists what it finds, and starts Linux 7.2, which takes commands.
pub(crate) fn starts_linux(machine: Machine) -> anyhow::Result<Found> {
    let Menu { mut running, _folder } = Menu::start(machine, "512M")?;
    running.console().type_keys("c")?;
    running.expect(PROMPT, SOON)?;
    let mut facts = Found::new();
    for command in ["lspci", "lsefisystab"] {
        running.send(command)?;
        let said = running.expect(PROMPT, SOON)?;
        let found = said.lines().filter_map(|line| fact(command, line)).collect::<Vec<_>>();
        ensure!(found.len() > 2, "{command} lists too little: {said}");
        facts.extend(found);
    }
    running.send("configfile $prefix/grub.cfg")?;
    running.expect(LAST_ENTRY, SOON)?;
    running.console().type_keys("l")?;
    let mut booted = Booted { running };
    booted.ready(BOOT)?;
    let said = booted.run("cat /proc/version; nproc; ls -d /sys/firmware/efi", SOON)?;
    ensure!(said.starts_with("Linux version 7."), "{said}");
    ensure!(said.ends_with("\n2\n/sys/firmware/efi\n"), "not 2 processors and EFI: {said}");
    let log = booted.run("dmesg", SOON)?;
    if machine == Machine::Transom {
        for fault in ["unchecked MSR", "WARNING:", "BUG:", "Hardware Error"] {
            ensure!(!log.contains(fault), "{fault}: {log}");
        }
    }
    facts.extend(log.lines().filter_map(complaint));
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)?;
    Ok(facts)
}

/// A line of GRUB's, as a fact that does not depend on addresses: `00:1f.0 8086:2918 [0601] ISA
/// Bridge`, or `0x7f988000  eb9d2d31-… SMBIOS`.
fn fact(command: &str, line: &str) -> Option<(String, String)> {
    let mut words = line.split_whitespace();
    let (place, what) = (words.next()?, words.next()?);
    let rest = words.collect::<Vec<_>>().join(" ");
    match command {
        "lspci" => place.contains(':').then(|| (format!("pci {what}"), rest)),
        _ => place.starts_with("0x").then(|| (format!("table {what}"), rest)),
    }
}

/// Linux' opinion of firmware in a line of its log, without the time before it.
fn complaint(line: &str) -> Option<(String, String)> {
    let (_, text) = line.split_once("] ")?;
    let kinds = ["Firmware Bug", "Firmware Warn", "ACPI BIOS", "ACPI Error", "ACPI Warning"];
    kinds.iter().any(|it| text.contains(it)).then(|| (format!("log {text}"), "there".into()))
}

/// Each machine's GRUB and Linux 7.2 find the same, except for what the list explains.
pub(crate) fn differences() -> anyhow::Result<()> {
    let qemu = Facts::of(starts_linux(Machine::Qemu)?)?;
    let transom = Facts::of(starts_linux(Machine::Transom)?)?;
    for kind in ["pci", "table"] {
        let counts = [&qemu, &transom].map(|facts| facts.count(kind));
        ensure!(counts.iter().all(|&it| it > 2), "{kind}: nothing to compare");
        eprintln!("{kind}: {counts:?} facts");
    }
    let found = compare::differences(&qemu, &transom);
    expected::check(&found, &expected::read(EXPECTED)?)
}

/// memtest86+ finds the memory and both processors, and no error in its first tests. Returns the
/// size of memory in its words.
pub(crate) fn tests_memory(machine: Machine) -> anyhow::Result<String> {
    let Menu { mut running, _folder } = Menu::start(machine, "256M")?;
    running.console().type_keys("m")?;
    for words in ["Memtest86+ v8.", "CPU: 2 Cores 2 Threads", "SMP: 2T"] {
        running.expect(words, BOOT)?;
    }
    // After tests of addresses, and moving inversions of ones and zeros, and of bytes.
    let seen = running.expect("#5  [", BOOT)?;
    let (all, none) = (seen.matches("Errors: ").count(), seen.matches("Errors: 0 ").count());
    ensure!(all > 0 && all == none, "errors: {seen}");
    let size = seen.rsplit_once(" of ").and_then(|(_, rest)| rest.split_once(']'));
    Ok(size.with_context(|| format!("no size of memory: {seen}"))?.0.to_owned())
}

pub(crate) fn same_memory() -> anyhow::Result<()> {
    let [qemu, transom] = [Machine::Qemu, Machine::Transom].map(tests_memory);
    let (qemu, transom) = (qemu?, transom?);
    ensure!(qemu == transom, "memtest86+ finds {transom}, and {qemu} on QEMU");
    Ok(())
}

/// Xen starts Linux 6.12 as its first domain, which starts a second one with Xen's tools.
pub(crate) fn starts_xen(machine: Machine) -> anyhow::Result<()> {
    let Menu { mut running, _folder } = Menu::start(machine, "1536M")?;
    running.console().type_keys("x")?;
    running.expect("Xen version 4.20", BOOT)?;
    let (which, said) = running.expect_any(&[">>>transom ready\n", "crashed"], BOOT)?;
    ensure!(which == 0, "the first domain crashed: {said}");
    let mut booted = Booted { running };
    let said = booted.run("cat /sys/hypervisor/type; nproc", SOON)?;
    ensure!(said == "xen\n2\n", "{said}");
    let second = booted.try_run("sh /second-domain 2>&1", BOOT)?;
    let wanted = format!("second: xen {SECOND_DOMAIN} 2");
    ensure!(second.status == 0 && second.output.contains(&wanted), "{second:?}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}
