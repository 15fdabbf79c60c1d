//! fwts calls the runtime services of a firmware whose Secure Boot is on. Its module needs a kernel
//! without lockdown, which is what shim gives to a user who has switched its checks off.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use transom_tests::fwts::Report;
use transom_tests::lab;
use transom_tests::linux::Booted;

use super::{BOOT, SOON, Stock, disk, fwts, virt_fw_vars, with_smm};

/// `mokutil --disable-validation` leaves this variable: shim neither checks what it starts nor has
/// the kernel locked down. Firmware's Secure Boot stays on.
const WITHOUT_VALIDATION: &str = r#"{"version": 2, "variables": [{
    "name": "MokSBState", "guid": "605dab50-e046-4300-abb6-3dd810dd8b23", "attr": 3, "data": "01"
}]}"#;
/// Results of fwts. A certificate that it misses gives it only a warning.
const FOUND: [&str; 2] = ["Secure Boot Mode On", "key check passed"];
/// A terminal's line has 4095 bytes.
const PIECE: usize = 3000;

pub(crate) fn satisfy_fwts() -> anyhow::Result<()> {
    let Stock(guest, folder) = with_smm("microsoft")?;
    without_validation(folder.path())?;
    let guest = guest.word("--device").word(disk("linux", 5)?);
    let mut booted = Booted { running: guest.start()? };
    booted.ready(BOOT)?;
    let said = booted.run("dmesg", SOON)?;
    ensure!(!said.contains("Kernel is locked down"), "the kernel is locked down: {said}");
    booted.run("mount -t efivarfs efivarfs /sys/firmware/efi/efivars", SOON)?;
    send(&mut booted, &lab::asset("EFI_TEST_13")?)?;
    booted.run("insmod /tmp/sent.ko", SOON)?;
    fwts(&mut booted, "securebootcert")?;
    let log = booted.run("cat /tmp/fwts.log", SOON)?;
    let report = Report::read(&log).with_context(|| log.clone())?;
    ensure!(report.has("securebootcert"), "fwts did not test the certificates: {log}");
    let failures = report.failures_not_in(&Report::default());
    ensure!(failures.is_empty(), "{report}\n{log}");
    for words in FOUND {
        ensure!(log.contains(words), "fwts does not say {words:?}: {log}");
    }
    booted.running.kill()
}

/// Adds what shim reads to the store.
fn without_validation(folder: &Path) -> anyhow::Result<()> {
    let [store, changed, added] = ["vars.fd", "changed.fd", "added.json"].map(|it| folder.join(it));
    fs::write(&added, WITHOUT_VALIDATION)?;
    let words = ["-i".as_ref(), store.as_path(), "--set-json".as_ref(), &added];
    virt_fw_vars(&[&words[..], &["-o".as_ref(), &changed]].concat())?;
    fs::rename(changed, store).context("the store")
}

/// Sends a module by the serial line. It is not on the disk, because it is made from the kernel's
/// sources, which other tests do not need.
fn send(booted: &mut Booted, module: &Path) -> anyhow::Result<()> {
    let bytes = fs::read(module).with_context(|| module.display().to_string())?;
    for piece in bytes.chunks(PIECE / 4 * 3) {
        let line = BASE64_STANDARD.encode(piece);
        booted.run(&format!("echo {line} | base64 -d >> /tmp/sent.ko"), SOON)?;
    }
    Ok(())
}
