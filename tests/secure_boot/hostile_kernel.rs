//! A guest's kernel attacks the keys of Secure Boot. Its module has a signature that the kernel
//! accepts, as that of a driver with a hole would.

use std::fs;
use std::time::Duration;

use anyhow::{Context, ensure};
use transom_tests::lab;
use transom_tests::linux::{Booted, Linux};

use super::{BOOT, SOON, STARTED, made, starts, with_smm};

/// The commands of all numbers take long in a lab.
const ATTACK: Duration = Duration::from_secs(900);
/// Attempts of `tests/firmware/attack.c`, and their results when they have no effect. TSEG is the
/// last 16 MiB of 512.
const ATTEMPTS: &[(&str, &str)] = &[
    ("keys", "refused"),
    ("enable", "21"),
    ("commands", "done"),
    ("messages", "done"),
    ("timers", "refused"),
    ("controller", "refused"),
    ("keys", "refused"),
];
const TSEG: &str = "0x1f000000";

/// Afterwards, and after a reset, firmware refuses an unsigned program and starts a signed one.
pub(crate) fn cannot_change_the_keys() -> anyhow::Result<()> {
    let mut stock = with_smm("test")?;
    stock.0 = stock.0.memory("512M").cpus("2");
    let linux = Linux::new(stock.0.clone(), &made("bzImage")?);
    let linux = linux.modules(&lab::asset("MODULES_13")?, &["efivarfs"]);
    let linux = linux.add(&made("signed.ko")?, "/signed.ko");
    let linux = linux.add(&lab::asset("ATTACK_13")?, "/unsigned.ko");
    let mut booted = linux.boot(BOOT)?;
    is_locked_down(&mut booted)?;
    let loaded = booted.try_run("insmod /unsigned.ko attempt=once", SOON)?;
    ensure!(loaded.status != 0, "the kernel loaded a module without a signature");
    let store = stock.1.path().join("vars.fd");
    for (attempt, expected) in ATTEMPTS {
        let before = fs::read(&store)?;
        let load = format!("dmesg -c > /dev/null; insmod /signed.ko attempt={attempt} tseg={TSEG}");
        let result = "rmmod attack; dmesg | sed -n 's/.*attack: result //p'";
        let said = booted.run(&format!("{load} && {result}"), ATTACK)?;
        ensure!(said.trim() == *expected, "{attempt}: {said}");
        ensure!(fs::read(&store)? == before, "{attempt}: the variables changed");
    }
    booted.begin(&format!("insmod /signed.ko attempt=reset tseg={TSEG}"))?;
    booted.ready(BOOT)?;
    ensure!(booted.running.resets()? == 1, "{} resets", booted.running.resets()?);
    is_locked_down(&mut booted).context("after the reset")?;
    booted.running.kill()?;
    starts(&stock, &["unsigned", "revoked"], "signed", STARTED)
}

pub(crate) fn is_locked_down(booted: &mut Booted) -> anyhow::Result<()> {
    let said = booted.run("dmesg", SOON)?;
    for words in ["Secure boot enabled", "Kernel is locked down from EFI Secure Boot"] {
        ensure!(said.contains(words), "the kernel does not say: {words}");
    }
    Ok(())
}
