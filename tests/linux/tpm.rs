//! The TPM under Linux: the firmware's measurements, judged by `tpm2_eventlog`, and requests that
//! Linux leaves for firmware by the physical presence interface.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use transom_tests::guest::Guest;
use transom_tests::lab;
use transom_tests::linux::Booted;
use transom_tests::program::{resident_kib, said};
use transom_tests::say;
use transom_tests::tpm::Swtpm;
use transom_tests::uefi;
use vmm::control;

use super::{BOOT, SOON, linux};

/// Prints the PCRs, the response to `TPM2_GetRandom` of 16 bytes in hexadecimal, and the firmware's
/// event log.
const TPM: &str = r#"
cat /sys/class/tpm/tpm0/tpm_version_major
for register in 0 1 2 3 4 5 6 7 16; do
  echo "$register $(cat /sys/class/tpm/tpm0/pcr-sha256/$register)"
done
exec 3<> /dev/tpm0
printf '\200\001\000\000\000\014\000\000\001\173\000\020' >&3
echo "random $(head -c 28 <&3 | od -v -A n -t x1 | tr -d ' \n')"
[ -d /sys/kernel/security/tpm0 ] || mount -t securityfs none /sys/kernel/security
echo "log $(base64 -w 0 /sys/kernel/security/tpm0/binary_bios_measurements)"
"#;

/// The operation "clear the TPM", which the user must confirm with F12.
const CLEAR: u32 = 5;
/// The memory overwrite request, which Linux has no interface for.
const OVERWRITE: &str = "devmem 0xfed4515a 8";
/// Written by the guest before its memory is cleared, and most of it.
const FILLED_MIB: u64 = 96;
const CLEARED_KIB: u64 = 64 << 10;

/// Checks the measurements of one start, and returns PCR 0 and the random numbers.
fn measured(booted: &mut Booted) -> anyhow::Result<[String; 2]> {
    let said = booted.run("sh /tpm.sh 2>&1", SOON)?;
    let lines: Vec<_> = said.lines().collect();
    ensure!(lines.first() == Some(&"2"), "no TPM 2.0: {said}");
    let find = |name: &str| {
        let found = lines.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        found.with_context(|| format!("no {name}: {said}"))
    };
    let log = STANDARD.decode(find("log")?).context("the event log")?;
    let replayed = replayed(&log)?;
    let zero = "0".repeat(64);
    for register in 0..8 {
        let value = find(&register.to_string())?.to_lowercase();
        ensure!(value.len() == 64 && value != zero, "register {register}: {said}");
        let log = replayed.get(&register);
        ensure!(log == Some(&value), "register {register} is {value}, by the log {log:?}");
    }
    ensure!(find("16")? == zero, "register 16, which must stay zero: {said}");
    say!("an event log of {} bytes has the values of {} registers", log.len(), replayed.len());
    let random = find("random")?;
    let head = "80010000001c000000000010";
    ensure!(random.starts_with(head) && random.len() == 56, "no random numbers: {said}");
    Ok([find("0")?, random].map(str::to_owned))
}

/// The values of the SHA-256 registers that `tpm2_eventlog` calculates from an event log.
fn replayed(log: &[u8]) -> anyhow::Result<BTreeMap<u32, String>> {
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), log)?;
    let text = said(Command::new("tpm2_eventlog").arg(file.path()))?;
    let (_, registers) = text.split_once("\npcrs:\n").context("no registers by tpm2_eventlog")?;
    let (_, registers) = registers.split_once("  sha256:\n").context("no SHA-256 registers")?;
    let register = |line: &str| {
        let (number, value) = line.strip_prefix("    ")?.split_once(": 0x")?;
        Some((number.trim().parse().ok()?, value.trim().to_lowercase()))
    };
    Ok(registers.lines().map_while(register).collect())
}

pub(super) fn talks_to_the_tpm(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
    let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
    let mut tpm = Swtpm::start()?;
    let guest = Guest::transom().cpus("2").firmware(code, vars).tpm(&tpm.path());
    let guest = guest.word("--jail").word("on");
    let linux = linux(guest, release)?.file("tpm.sh", TPM);
    let mut booted = linux.boot(BOOT)?;
    let first = measured(&mut booted)?;
    clears_the_memory(&mut booted)?;
    ensure!(booted.running.resets()? == 1, "not one reset");
    let second = measured(&mut booted)?;
    ensure!(second[0] == first[0], "the PCR was not reset: {first:?}, {second:?}");
    ensure!(second[1] != first[1], "the same random numbers: {first:?}, {second:?}");
    clears_the_tpm(&mut booted)?;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)?;
    tpm.ends(SOON)
}

/// A request to overwrite the memory at the next reset frees it on the host, so that the next
/// system reads zeros.
fn clears_the_memory(booted: &mut Booted) -> anyhow::Result<()> {
    let fill = format!("dd if=/dev/urandom of=/dev/shm/fill bs=1M count={FILLED_MIB} 2>&1");
    booted.run(&format!("mkdir -p /dev/shm; mount -t tmpfs none /dev/shm; {fill}"), SOON)?;
    booted.run(&format!("{OVERWRITE} 1"), SOON)?;
    let before = resident_kib(booted.running.pid())?;
    booted.running.send("reboot -f")?;
    booted.ready(BOOT)?;
    let after = resident_kib(booted.running.pid())?;
    say!("resident: {before} KiB before the memory was cleared, {after} KiB after the next start");
    ensure!(after + CLEARED_KIB < before, "the memory of the last system is still there");
    let request = booted.run(OVERWRITE, SOON)?;
    ensure!(request.trim() == "0x00", "the request is still there: {request}");
    Ok(())
}

/// Firmware asks its user to confirm a request, executes it and reports to the next system.
fn clears_the_tpm(booted: &mut Booted) -> anyhow::Result<()> {
    let at = "/sys/class/tpm/tpm0/ppi";
    let read = |booted: &mut Booted, file: &str| {
        booted.run(&format!("cat {at}/{file}"), SOON).map(|text| text.trim().to_owned())
    };
    ensure!(read(booted, "version")? == "1.3", "the interface's version");
    let operations = read(booted, "tcg_operations")?;
    say!("operations:\n{operations}");
    ensure!(operations.lines().any(|line| line.starts_with("5 ")), "no operation 5: {operations}");
    booted.run(&format!("echo {CLEAR} > {at}/request"), SOON)?;
    ensure!(read(booted, "request")?.starts_with('5'), "the request");
    booted.running.send("reboot -f")?;
    booted.running.expect("F12", BOOT)?;
    booted.running.ask(&control::Command::Key { keys: "f12".parse()? })?;
    booted.ready(BOOT)?;
    let response = read(booted, "response")?;
    ensure!(response == "5 0: Success", "firmware's response: {response}");
    Ok(())
}
