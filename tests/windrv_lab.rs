//! Windows' drivers, as in the suite `windrv`, on a complete KVM.
#![forbid(unsafe_code)]

use std::env;
use std::fs;
use std::process::ExitCode;

use anyhow::{Context, Result};
use transom_tests::lab::{self, Lab};
use transom_tests::program::not_run;
use transom_tests::suite::{Suite, Test};

#[path = "windrv/drivers.rs"]
mod drivers;
#[path = "windrv/image.rs"]
mod image;
#[path = "windrv/report.rs"]
mod report;

use drivers::{DRIVERS, Driver};

/// The tests that always run: interrupts of each kind, and several processors. The others run only
/// with `TRANSOM_TESTS=all`, and want a processor of their own: the checks of the balloon have
/// limits.
const ALWAYS: &[(&str, &str)] =
    &[("viostor", "msix4"), ("vioscsi", "wire"), ("viostor", "smp_late4"), ("vioscsi", "smp2")];

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
        let test = format!("{}_{mode}", driver.name);
        not_run(&test, "the guest was not built: set TRANSOM_VIRTIO_WIN");
        return Ok(());
    }
    driver.run(mode, &image, &lab::vmm()?, &[("PATH".as_ref(), path()?.as_ref())])
}

/// The programs of the distribution come first: others of the same name, such as the scripts of
/// `pyenv`, take long to start in the lab.
fn path() -> Result<String> {
    Ok(format!("/usr/bin:/bin:{}", env::var("PATH").context("PATH")?))
}
