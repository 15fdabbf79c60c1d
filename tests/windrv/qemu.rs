//! The same drivers on QEMU's devices. A check that fails on them, too, is not about ours.

use std::path::Path;

use anyhow::{Context, Result};
use transom_tests::lab;
use transom_tests::program::not_run;

use crate::drivers::DRIVERS;
use crate::image;

#[test]
fn every_driver_passes_on_qemu() -> Result<()> {
    if !lab::everything() {
        not_run("every_driver_passes_on_qemu", lab::THOROUGH);
        return Ok(());
    }
    let Some(image) = image::image()? else { return Ok(()) };
    let tree = lab::asset("QEMU")?;
    let at = |path: &str| tree.join(path).display().to_string();
    let libraries = at("usr/lib/x86_64-linux-gnu");
    let qemu = format!(
        "{} --library-path {libraries} {} -L {} -L {}",
        at("lib64/ld-linux-x86-64.so.2"),
        at("usr/bin/qemu-system-x86_64"),
        at("usr/share/qemu"),
        at("usr/share/seabios"),
    );
    for driver in DRIVERS {
        for mode in driver.modes {
            let modules = ("QEMU_MODULE_DIR", format!("{libraries}/qemu"));
            let settings = [("QEMU", qemu.clone()), modules];
            let run = driver.run(mode, image, Path::new("qemu"), settings);
            run.with_context(|| format!("{} in mode {mode}, on QEMU", driver.name))?;
        }
    }
    Ok(())
}
