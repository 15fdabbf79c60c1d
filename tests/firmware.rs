//! Stock UEFI firmware of two Debian releases: to its shell and back, and what it remembers.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use tempfile::TempDir;
use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi::{self, Shell};

/// Long enough for firmware in a lab on a busy machine.
const BOOT: Duration = Duration::from_secs(120);
/// For a command, or the end of a process.
const SOON: Duration = Duration::from_secs(30);

const RELEASES: [&str; 2] = ["12", "13"];
const ASSETS: &[&str] = &["OVMF_CODE_12", "OVMF_VARS_12", "OVMF_CODE_13", "OVMF_VARS_13"];

fn main() -> ExitCode {
    let test = |release: &str, says: &str, body: fn(&Stock) -> anyhow::Result<()>| {
        let name = release.to_owned();
        Test::new(format!("ovmf_{release}_{says}"), move || body(&Stock::new(&name)?))
    };
    let both = |says, body| RELEASES.map(|release| test(release, says, body));
    let mut tests = Vec::new();
    tests.extend(both("remembers_a_variable", remembers_a_variable));
    tests.extend(both("comes_back_after_each_reset", comes_back_after_each_reset));
    let says = "has_a_usable_store_whenever_it_was_killed";
    if lab::everything() {
        tests.push(test("12", says, has_a_usable_store_whenever_it_was_killed));
    }
    tests.push(test("13", says, has_a_usable_store_whenever_it_was_killed));
    Suite { lab: Lab { mib: 2048, seconds: 1200, assets: ASSETS }, tests }.main()
}

/// The firmware of a release and a store of its own.
struct Stock {
    guest: Guest,
    _folder: TempDir,
}

impl Stock {
    fn new(release: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("a folder for the store")?;
        let vars = lab::asset(&format!("OVMF_VARS_{release}"))?;
        let vars = uefi::store(&vars, folder.path())?;
        let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
        Ok(Self { guest: Guest::transom().memory("256M").firmware(code, vars), _folder: folder })
    }

    fn shell(&self) -> anyhow::Result<Shell> {
        Shell::start(&self.guest, BOOT)
    }
}

fn comes_back_after_each_reset(stock: &Stock) -> anyhow::Result<()> {
    let mut shell = stock.shell()?;
    for resets in 0..5 {
        ensure!(shell.running.resets()? == resets, "not {resets} resets");
        shell.running.send("reset")?;
        shell.prompt(BOOT)?;
    }
    ensure!(shell.running.resets()? == 5, "not 5 resets");
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)
}

/// A variable that the firmware keeps.
const VARIABLE: &str = "setvar transom -guid 5ac0ffee-0000-4000-8000-7472616e736f";

/// Sets the variable. An error: the process is gone, or the firmware refused.
fn set(shell: &mut Shell, value: u32) -> anyhow::Result<()> {
    let said = shell.run(&format!("{VARIABLE} -nv -bs =0x{value:08X}"), SOON)?;
    ensure!(said.trim().is_empty(), "the firmware says: {said}");
    Ok(())
}

/// The variable's value, if it is there.
fn value(shell: &mut Shell) -> anyhow::Result<Option<u32>> {
    let said = shell.run(VARIABLE, SOON)?;
    if said.contains("Unable to get") {
        return Ok(None);
    }
    let bytes = said.lines().map(str::trim).rfind(|line| !line.is_empty());
    let digits: String = bytes.unwrap_or_default().split_whitespace().collect();
    let value = u32::from_str_radix(&digits, 16);
    // The lowest byte stands first.
    Ok(Some(value.with_context(|| format!("{VARIABLE}: {said:?}"))?.swap_bytes()))
}

fn remembers_a_variable(stock: &Stock) -> anyhow::Result<()> {
    let mut shell = stock.shell()?;
    ensure!(value(&mut shell)?.is_none(), "the variable was there before");
    set(&mut shell, 0x600d_cafe)?;
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)?;
    let mut shell = stock.shell()?;
    ensure!(value(&mut shell)? == Some(0x600d_cafe), "not there after a new start");
    set(&mut shell, 0x1234_5678)?;
    shell.running.kill()?;
    let mut shell = stock.shell()?;
    ensure!(value(&mut shell)? == Some(0x1234_5678), "not there after kill -9");
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)
}

/// Ten times: writes until it is killed at some moment, then the store has what was written last, or
/// what was being written.
fn has_a_usable_store_whenever_it_was_killed(stock: &Stock) -> anyhow::Result<()> {
    let mut shell = stock.shell()?;
    let mut written = 0;
    set(&mut shell, written)?;
    for _ in 0..10 {
        let after = Duration::from_micros(RandomState::new().build_hasher().finish() % 2_500_000);
        let before = written;
        shell.running.kill_after(after);
        while set(&mut shell, written + 1).is_ok() {
            written += 1;
        }
        let status = shell.running.wait(SOON)?;
        ensure!(status.signal() == Some(9), "{status}: {}", shell.running.complaints());
        say!("killed after {after:?} and {} writes", written - before);
        shell = stock.shell()?;
        let found = value(&mut shell)?;
        ensure!(
            found == Some(written) || found == Some(written + 1),
            "{found:?} is neither {written} nor the next"
        );
        written = found.unwrap_or(written);
    }
    Ok(())
}
