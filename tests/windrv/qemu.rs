//! The same drivers on QEMU's devices. A check that fails on them, too, is not about ours.

use std::ffi::OsStr;
use std::iter;
use std::path::Path;

use anyhow::{Context, Result};
use transom_tests::guest;

use crate::drivers::DRIVERS;
use crate::{image, kmdf};

#[test]
fn every_driver_passes_on_qemu() -> Result<()> {
    kmdf::thorough(passes)
}

fn passes() -> Result<()> {
    let Some(image) = image::image()? else { return Ok(()) };
    let qemu = guest::qemu()?;
    let words: Vec<_> = iter::once(qemu.get_program()).chain(qemu.get_args()).collect();
    let words = words.join(OsStr::new(" "));
    let mut settings = vec![(OsStr::new("QEMU"), words.as_os_str())];
    settings.extend(qemu.get_envs().filter_map(|(name, value)| Some((name, value?))));
    for driver in DRIVERS {
        for mode in driver.modes {
            let run = driver.run(mode, image, Path::new("qemu"), &settings);
            run.with_context(|| format!("{} in mode {mode}, on QEMU", driver.name))?;
        }
    }
    Ok(())
}
