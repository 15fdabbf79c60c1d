//! Windows' drivers, as in the suite `windrv`, on a complete KVM.
#![forbid(unsafe_code)]

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use transom_tests::lab::{self, Lab};
use transom_tests::program::not_run;
use transom_tests::suite::{Suite, Test};

#[path = "windrv/image.rs"]
mod image;
#[path = "windrv/report.rs"]
mod report;

use report::Report;

/// A driver, its modes (see `windrv/README.md`), and the minimum number of checks in each mode.
struct Driver {
    name: &'static str,
    modes: &'static [&'static str],
    checks: usize,
}

const DRIVERS: &[Driver] = &[
    Driver { name: "viorng", modes: &["msix", "wire"], checks: 18 },
    Driver { name: "balloon", modes: &["wire"], checks: 30 },
    Driver { name: "vioserial", modes: &["msix", "wire"], checks: 40 },
    Driver { name: "netkvm", modes: &["msix4", "msix1", "two", "one", "wire"], checks: 42 },
    Driver { name: "viostor", modes: STORAGE, checks: 56 },
    Driver { name: "vioscsi", modes: STORAGE, checks: 55 },
];
const STORAGE: &[&str] = &["msix4", "late4", "msix1", "few", "one", "wire"];

/// The tests that always run: interrupts of each kind. The others run only with
/// `TRANSOM_TESTS=all`, and want a processor of their own: the checks of the balloon have limits.
const ALWAYS: &[(&str, &str)] = &[("viostor", "msix4"), ("vioscsi", "wire")];

fn main() -> ExitCode {
    let suite = Suite {
        lab: Lab { mib: 4096, seconds: 3600, assets: &[] },
        tests: DRIVERS.iter().flat_map(tests_of).collect(),
    };
    suite.main_after(prepare)
}

fn tests_of(driver: &'static Driver) -> impl Iterator<Item = Test> {
    driver.modes.iter().map(move |&mode| {
        let test = Test::new(format!("{}_{mode}", driver.name), move || run(driver, mode));
        if ALWAYS.contains(&(driver.name, mode)) { test } else { test.thorough() }
    })
}

/// The image is built on the host of the lab, where compilers are fast.
fn prepare() -> Result<()> {
    if image::image()?.is_none() {
        // So that the tests do not use an old one.
        fs::remove_file(image::place()).ok();
    }
    Ok(())
}

fn run(driver: &Driver, mode: &str) -> Result<()> {
    let image = image::place();
    if !image.exists() {
        not_run(image::SUITE, "the guest was not built: set TRANSOM_VIRTIO_WIN");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(tests.join("windrv/run"));
    command.arg(image).arg(folder.path()).arg(lab::vmm()?).env("PATH", path()?);
    command.args([format!("driver={}", driver.name), format!("mode={mode}")]);
    let ended = command.output().with_context(|| format!("{command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (output, log) = (text(&ended.stdout), text(&ended.stderr));
    let everything = || format!("{}:\n{output}\n{log}", ended.status);
    Report::read(&output).and_then(|it| it.judge(driver.checks)).with_context(everything)?;
    ensure!(ended.status.success(), everything());
    Ok(())
}

/// The programs of the distribution come first: others of the same name, such as the scripts of
/// `pyenv`, take long to start in the lab.
fn path() -> Result<String> {
    Ok(format!("/usr/bin:/bin:{}", env::var("PATH").context("PATH")?))
}
