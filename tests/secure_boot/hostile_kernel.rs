//! A guest's kernel attacks the keys of Secure Boot. Its module has a signature that the kernel
//! accepts, as that of a driver with a hole would.

use std::fs;
use std::time::Duration;

use anyhow::{Context, ensure};
use transom_tests::attack;
use transom_tests::lab;
use transom_tests::linux::Linux;

use super::{BOOT, SOON, STARTED, is_locked_down, made, starts, with_smm};

/// The commands of all numbers take long in a lab.
const ATTACK: Duration = Duration::from_secs(900);

/// Afterwards, and after a reset, firmware refuses an unsigned program and starts a signed one.
pub(crate) fn cannot_change_the_keys() -> anyhow::Result<()> {
    let mut stock = with_smm("test")?;
    stock.0 = stock.0.memory(attack::MEMORY).cpus("2");
    let linux = Linux::new(stock.0.clone(), &made("bzImage")?);
    let linux = linux.modules(&lab::asset("MODULES_13")?, &["efivarfs"]);
    let linux = linux.add(&made("signed.ko")?, attack::MODULE);
    let linux = linux.add(&lab::asset("ATTACK_13")?, "/unsigned.ko");
    let mut booted = linux.file("attack", &attack::function()).boot(BOOT)?;
    is_locked_down(&mut booted)?;
    let loaded = booted.try_run("insmod /unsigned.ko attempt=once", SOON)?;
    ensure!(loaded.status != 0, "the kernel loaded a module without a signature");
    let store = stock.1.path().join("vars.fd");
    let keys = &[("keys", "refused")];
    for (attempt, expected) in keys.iter().chain(attack::ATTEMPTS).chain(keys) {
        let before = fs::read(&store)?;
        let said = booted.run(&format!(". /attack; attack {attempt}"), ATTACK)?;
        ensure!(said.trim() == *expected, "{attempt}: {said}");
        ensure!(fs::read(&store)? == before, "{attempt}: the variables changed");
    }
    booted.begin(". /attack; attack reset")?;
    booted.ready(BOOT)?;
    ensure!(booted.running.resets()? == 1, "{} resets", booted.running.resets()?);
    is_locked_down(&mut booted).context("after the reset")?;
    booted.running.kill()?;
    starts(&stock, &["unsigned", "revoked"], "signed", STARTED)
}
