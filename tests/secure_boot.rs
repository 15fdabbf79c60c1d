//! Secure Boot with keys that `deploy/enroll` wrote: which programs firmware starts, and what a
//! Linux says of the keys.
#![forbid(unsafe_code)]

#[path = "secure_boot/certificates.rs"]
mod certificates;
#[path = "secure_boot/hostile_kernel.rs"]
mod hostile_kernel;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::Value;
use tempfile::TempDir;
use transom_tests::guest::{Guest, Running};
use transom_tests::lab::{self, Lab};
use transom_tests::linux::Booted;
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi;

/// Long enough for firmware in a lab on a busy machine.
const BOOT: Duration = Duration::from_secs(300);
const SOON: Duration = Duration::from_secs(60);
/// The last one is needed by a test that runs only with `TRANSOM_TESTS=all`.
const ASSETS: [&str; 8] = [
    "OVMF_CODE_SECBOOT_13",
    "OVMF_CODE_12",
    "SECURE_BOOT",
    "VIRT_FIRMWARE",
    "MODULES_13",
    "ATTACK_13",
    "BUSYBOX",
    "EFI_TEST_13",
];
/// The signed program's words.
const STARTED: &str = "To execute an unsigned binary";
/// Replaces the guest's shell. `efi-readvar` asks it for `mount -l`, which busybox does not have.
const SHELL: &str = "rm /bin/sh; printf '%s\\n' '#!/bin/busybox sh' \
    'case \"$*\" in *\"mount -l\") exec busybox mount ;; esac' 'exec busybox sh \"$@\"' > /bin/sh; \
    chmod 755 /bin/sh";
/// The words of Debian's shim without its second stage.
const SHIM_STARTED: &str = "\\EFI\\BOOT\\grubx64.efi";

fn main() -> ExitCode {
    let test = |name: &str, body: fn() -> anyhow::Result<()>| Test::new(name.to_owned(), body);
    let tests = vec![
        test("the_store_has_the_keys_of_the_list", reads_the_store),
        test("only_signed_programs_start", || {
            tries("test", &["unsigned", "unknown", "revoked", "stolen"], "signed", STARTED)
        }),
        test("a_revoked_program_starts_without_the_dbx", || {
            tries("test-no-dbx", &["unsigned", "unknown"], "revoked", STARTED)
        }),
        test("a_program_of_a_revoked_signer_starts_without_the_dbx", || {
            tries("test-no-dbx", &[], "stolen", STARTED)
        })
        .thorough(),
        test("microsofts_keys_refuse_programs_of_others", || {
            tries("microsoft", &["unsigned", "signed"], "shim", SHIM_STARTED)
        }),
        test("the_keys_of_2011_start_debians_shim", || tries("first", &[], "shim", SHIM_STARTED))
            .thorough(),
        test("the_keys_of_2023_start_debians_shim", || tries("second", &[], "shim", SHIM_STARTED))
            .thorough(),
        test("the_keys_for_windows_alone_refuse_debians_shim", || {
            tries("windows", &["shim"], "", "No bootable option or device was found")
        }),
        test("linux_with_smm_sees_and_keeps_the_keys", || asks_linux(&with_smm("microsoft")?)),
        test("linux_without_smm_sees_and_keeps_the_keys", || asks_linux(&without_smm()?))
            .thorough(),
        test("the_certificates_satisfy_fwts", certificates::satisfy_fwts).thorough(),
        // The suite `firmware` has the same attacks on a store without keys.
        test("a_hostile_kernel_cannot_change_the_keys", hostile_kernel::cannot_change_the_keys)
            .thorough(),
    ];
    let assets = if lab::everything() { &ASSETS[..] } else { &ASSETS[..7] };
    Suite { lab: Lab { mib: 2048, seconds: 1500, assets }, tests }.main()
}

/// A machine, and the folder with its variable store.
struct Stock(Guest, TempDir);

fn stock(code: &str, store: &str) -> anyhow::Result<Stock> {
    let folder = tempfile::tempdir().context("a folder for the store")?;
    let store = made(&format!("{store}.fd"))?;
    let vars = uefi::store(&store, folder.path())?;
    Ok(Stock(Guest::transom().memory("768M").firmware(lab::asset(code)?, vars), folder))
}

fn with_smm(store: &str) -> anyhow::Result<Stock> {
    let Stock(guest, folder) = stock("OVMF_CODE_SECBOOT_13", store)?;
    Ok(Stock(guest.word("--smm").word("on"), folder))
}

/// The container's firmware.
fn without_smm() -> anyhow::Result<Stock> {
    stock("OVMF_CODE_12", "microsoft")
}

/// A file of the asset.
fn made(name: &str) -> anyhow::Result<PathBuf> {
    Ok(lab::asset("SECURE_BOOT")?.join(name))
}

fn disk(name: &str, slot: usize) -> anyhow::Result<String> {
    let path = made(&format!("{name}.img"))?;
    Ok(format!("nvme,path={},overlay,slot={slot:x}.0", path.display()))
}

/// Firmware refuses the programs on some disks, and then starts the next one, which says `words`.
fn tries(store: &str, refused: &[&str], started: &str, words: &str) -> anyhow::Result<()> {
    starts(&with_smm(store)?, refused, started, words).with_context(|| store.to_owned())
}

fn starts(
    Stock(guest, _folder): &Stock,
    refused: &[&str],
    started: &str,
    words: &str,
) -> anyhow::Result<()> {
    let mut guest = guest.clone();
    let disks = refused.iter().copied().chain([started]).filter(|name| !name.is_empty());
    let mut order = Vec::new();
    for (index, name) in disks.enumerate() {
        guest = guest.word("--device").word(disk(name, 5 + index)?);
        order.push(if index == 0 { "nvme".to_owned() } else { format!("nvme.{}", index + 1) });
    }
    let mut running = guest.word("--boot").word(order.join(",")).start()?;
    for (index, name) in refused.iter().enumerate() {
        is_refused(&mut running, 5 + index).with_context(|| (*name).to_owned())?;
    }
    running.expect(words, BOOT).with_context(|| started.to_owned())?;
    running.kill()
}

/// The next program that firmware tries is the one at this slot, and it is not started.
fn is_refused(running: &mut Running, slot: usize) -> anyhow::Result<()> {
    let words = ["BdsDxe: failed to load", STARTED, SHIM_STARTED];
    let (found, _) = running.expect_any(&words, BOOT)?;
    ensure!(found == 0, "it was started");
    let line = running.expect("\n", SOON)?;
    ensure!(line.contains(&format!("Pci(0x{slot:X},0x0)")), "another disk:{line}");
    ensure!(line.contains("Access Denied"), "refused for another reason:{line}");
    Ok(())
}

/// A line of `deploy/keys/list`: variable, SHA-256, file.
type Key = (String, String, PathBuf);

fn keys() -> anyhow::Result<Vec<Key>> {
    let folder = lab::repository().join("deploy/keys");
    let text = fs::read_to_string(folder.join("list"))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys = lines.map(|line| {
        let mut words = line.split(' ').map(str::to_owned);
        let mut next = || words.next().with_context(|| format!("a line is too short: {line}"));
        Ok((next()?, next()?, folder.join(next()?)))
    });
    keys.collect()
}

/// The signature lists in a signed update, after its time and its certificate.
fn lists(update: &Path) -> anyhow::Result<(usize, Vec<u8>)> {
    let mut bytes = fs::read(update)?;
    let length = bytes.get(16..20).context("an update is too short")?;
    let begin = 16 + u32::from_le_bytes(length.try_into()?) as usize;
    ensure!(begin < bytes.len(), "{}: it has no lists", update.display());
    Ok((begin, bytes.split_off(begin)))
}

/// Another program reads the store; made again, it is the same.
fn reads_the_store() -> anyhow::Result<()> {
    let (store, again) = (made("microsoft.fd")?, made("again.fd")?);
    ensure!(fs::read(&store)? == fs::read(again)?, "made twice, the store differs");
    let folder = tempfile::tempdir()?;
    let found = folder.path().join("found.json");
    virt_fw_vars(&["-i".as_ref(), &store, "--output-json".as_ref(), &found])?;
    let found: Value = serde_json::from_slice(&fs::read(&found)?)?;
    let mut names = Vec::new();
    for variable in found["variables"].as_array().context("no variables")? {
        let name = variable["name"].as_str().context("a variable without a name")?;
        let data = variable["data"].as_str().context("a variable without data")?;
        ensure!(variable["attr"] == 0x27, "the attributes of {name}");
        ensure!(data == expected(name)?, "{name} is not as in the list");
        names.push(name.to_owned());
    }
    names.sort();
    ensure!(names == ["KEK", "PK", "db", "dbx"], "the variables are {names:?}");
    Ok(())
}

/// Runs another program for variable stores.
fn virt_fw_vars(words: &[&Path]) -> anyhow::Result<()> {
    let tree = lab::asset("VIRT_FIRMWARE")?;
    let mut program = lab::unpacked("VIRT_FIRMWARE", "usr/bin/python3")?;
    program.arg(tree.join("usr/bin/virt-fw-vars")).args(words);
    let output = program.env("PYTHONHOME", tree.join("usr")).output().context("virt-fw-vars")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The value of a variable, in hexadecimal: the specification's words for the files of the list.
fn expected(variable: &str) -> anyhow::Result<String> {
    let hex = |bytes: &[u8]| bytes.iter().map(|it| format!("{it:02x}")).collect::<String>();
    let mut value = String::new();
    for (_, _, path) in keys()?.iter().filter(|key| key.0 == variable) {
        if variable == "dbx" {
            value += &hex(&lists(path)?.1);
            continue;
        }
        let certificate = fs::read(path)?;
        let entry = u32::try_from(16 + certificate.len())?;
        // EFI_CERT_X509_GUID, the lengths of list, header and entry, and Microsoft's GUID.
        value += "a159c0a5e494a74a87b5ab155c2bf072";
        value += &hex(&[(28 + entry).to_le_bytes(), [0; 4], entry.to_le_bytes()].concat());
        value += "bd9afa775903324dbd6028f4e78f784b";
        value += &hex(&certificate);
    }
    Ok(value)
}

/// Linux, started by shim and GRUB, sees the keys of the list, and cannot change them. It can
/// apply Microsoft's own update.
fn asks_linux(Stock(guest, _folder): &Stock) -> anyhow::Result<()> {
    let guest = guest.clone().word("--device").word(disk("linux", 5)?);
    let mut booted = Booted { running: guest.start()? };
    booted.ready(BOOT)?;
    booted.run("mount -t efivarfs efivarfs /sys/firmware/efi/efivars", SOON)?;
    booted.run(SHELL, SOON)?;
    is_locked_down(&mut booted)?;
    let said = booted.run("mokutil --sb-state", SOON)?;
    ensure!(said.contains("SecureBoot enabled"), "mokutil says {said}");
    compares_keys(&mut booted)?;
    tests_the_firmware(&mut booted)?;
    changes_keys(&mut booted)?;
    booted.running.kill()
}

/// `efi-readvar` and `mokutil` read the keys of the list.
fn compares_keys(booted: &mut Booted) -> anyhow::Result<()> {
    let keys = keys()?;
    for (variable, option) in [("PK", "pk"), ("KEK", "kek"), ("db", "db")] {
        let wanted = keys.iter().filter(|key| key.0 == variable).map(|key| key.1.clone());
        let wanted: Vec<_> = wanted.collect();
        let read = format!("cd /tmp && efi-readvar -v {variable} -o {variable}.esl");
        booted.run(&format!("{read} && sig-list-to-certs {variable}.esl {variable}"), SOON)?;
        let said = booted.run(&format!("sha256sum /tmp/{variable}-*.der"), SOON)?;
        let found = |said: &str| -> Vec<String> {
            said.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
        };
        ensure!(found(&said) == wanted, "efi-readvar has other keys in {variable}: {said}");
        let sums = booted.run(&format!("sha1sum /tmp/{variable}-*.der"), SOON)?;
        let said = booted.run(&format!("mokutil --{option}"), SOON)?;
        let prints = said.lines().filter_map(|line| line.trim().strip_prefix("SHA1 Fingerprint: "));
        let prints: Vec<_> = prints.map(|it| it.replace(':', "")).collect();
        ensure!(prints == found(&sums), "mokutil has other keys in {variable}: {said}");
    }
    let dbx = &keys.iter().find(|key| key.0 == "dbx").context("no dbx")?.2;
    let (begin, lists) = lists(dbx)?;
    let same = format!("tail -c +{} /dbx.bin | cmp - /tmp/dbx.esl", begin + 1);
    booted.run(&format!("efi-readvar -v dbx -o /tmp/dbx.esl && {same}"), SOON)?;
    let hashes = booted.run("mokutil --dbx | grep -cE '^ *[0-9a-f]{64}$'", SOON)?;
    let count = self::hashes(&lists);
    ensure!(hashes.trim() == count.to_string(), "mokutil has {hashes} hashes, not {count}");
    Ok(())
}

/// The number of hashes in one list of them. Each has an owner.
fn hashes(list: &[u8]) -> usize {
    (list.len() - 28) / 48
}

/// The firmware test suite finds Secure Boot enabled, and all signatures. Its test of certificates
/// needs a device that the kernel refuses under lockdown, so that this is its reader.
fn tests_the_firmware(booted: &mut Booted) -> anyhow::Result<()> {
    let said = fwts(booted, "uefidump")?;
    let find = "grep -o 'Secure Boot Mode O[nf]*' /tmp/fwts.log; \
        grep -c 'SignatureOwner: 77FA9ABD-0359-4D32-BD60-28F4E78F784B' /tmp/fwts.log";
    let found = booted.run(find, SOON)?;
    let keys = keys()?;
    let dbx = &keys.iter().find(|key| key.0 == "dbx").context("no dbx")?.2;
    let signatures = keys.len() - 1 + hashes(&lists(dbx)?.1);
    let wanted = format!("Secure Boot Mode On {signatures}");
    ensure!(found.split_whitespace().eq(wanted.split(' ')), "{found}, not {wanted}: {said}");
    Ok(())
}

/// Runs tests of the firmware test suite. Its log is /tmp/fwts.log. If it fails, returns what it
/// printed.
fn fwts(booted: &mut Booted, tests: &str) -> anyhow::Result<String> {
    let libraries = "/later/usr/lib/x86_64-linux-gnu";
    let run = format!(
        "/later/lib64/ld-linux-x86-64.so.2 --library-path {libraries}:{libraries}/fwts \
         /later/usr/bin/fwts -q -w 1000 -r /tmp/fwts.log {tests} > /tmp/fwts.said 2>&1"
    );
    booted.run(&format!("{run} || cat /tmp/fwts.said"), BOOT)
}

/// Root cannot replace a key or remove the PK, and an update must have its signature.
fn changes_keys(booted: &mut Booted) -> anyhow::Result<()> {
    let at = |name: &str, guid: &str| format!("/sys/firmware/efi/efivars/{name}-{guid}");
    let global = "8be4df61-93ca-11d2-aa0d-00e098032b8c";
    let (pk, kek) = (at("PK", global), at("KEK", global));
    let dbx = at("dbx", "d719b2cb-3d3a-4596-a3bc-dad00e67656f");
    let sums = format!("sha256sum {pk} {kek} {dbx}");
    let before = booted.run(&sums, SOON)?;
    booted.run(&format!("chattr -i {pk} {kek} {dbx}"), SOON)?;
    // An update with the attributes of an addition, and with a bit of its last hash changed.
    let update = r"(printf '\147\000\000\000'; cat /dbx.bin) > /tmp/good";
    let wrong = r"(head -c -1 /tmp/good; printf '\377') > /tmp/wrong; cat /tmp/wrong";
    booted.run(update, SOON)?;
    for attempt in [
        format!("cat {kek} > /tmp/kek; cat /tmp/kek > {kek}"),
        format!("cat {kek} > /tmp/kek; cat /tmp/kek > {pk}"),
        format!("rm {pk}"),
        format!("{wrong} > {dbx}"),
    ] {
        let answer = booted.try_run(&attempt, SOON)?;
        ensure!(answer.status != 0, "{attempt} succeeded: {}", answer.output);
        ensure!(booted.run(&sums, SOON)? == before, "{attempt} changed a key");
    }
    // All its hashes are in the dbx already.
    booted.run(&format!("cat /tmp/good > {dbx}"), SOON)?;
    ensure!(booted.run(&sums, SOON)? == before, "the update changed the dbx");
    Ok(())
}

fn is_locked_down(booted: &mut Booted) -> anyhow::Result<()> {
    let said = booted.run("dmesg", SOON)?;
    for words in ["Secure boot enabled", "Kernel is locked down from EFI Secure Boot"] {
        ensure!(said.contains(words), "the kernel does not say: {words}");
    }
    Ok(())
}
