//! Stock UEFI firmware of two Debian releases: to its shell and back, and what it remembers.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::ensure;
use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi::{self, Shell};

/// Long enough for firmware in a lab on a busy machine.
const BOOT: Duration = Duration::from_secs(120);
const SOON: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for release in ["12", "13"] {
        tests.push(Test::new(format!("ovmf_{release}_comes_back_after_each_reset"), move || {
            comes_back_after_each_reset(release)
        }));
    }
    let assets = &["OVMF_CODE_12", "OVMF_VARS_12", "OVMF_CODE_13", "OVMF_VARS_13"];
    Suite { lab: Lab { mib: 2048, seconds: 900, assets }, tests }.main()
}

fn comes_back_after_each_reset(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
    let guest = Guest::transom().firmware(lab::asset(&format!("OVMF_CODE_{release}"))?, vars);
    let mut shell = Shell::start(&guest, BOOT)?;
    for resets in 0..5 {
        ensure!(shell.running.resets()? == resets, "{:?} resets", shell.running.resets());
        let start = std::time::Instant::now();
        shell.running.send("reset")?;
        shell.prompt(BOOT)?;
        println!("{:?}", start.elapsed());
    }
    ensure!(shell.running.resets()? == 5, "{:?} resets", shell.running.resets());
    println!("{:?}", shell.run("ver", SOON)?);
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)
}
