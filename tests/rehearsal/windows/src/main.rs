//! Takes the way of Windows in a Linux guest: from the install medium, it is Windows PE with
//! Windows Setup; from the disk, it is the installed Windows.
//!
//! It does what Windows does, in its order and with its limits, and nothing that Windows would not
//! do: it is the judge of answer files, set-up disk and machine where no Windows can run.
#![forbid(unsafe_code)]

mod answers;
mod batch;
mod boot;
mod console;
mod desktop;
mod diskpart;
mod disks;
mod dism;
mod domain;
mod drivers;
mod drives;
mod edition;
mod files;
mod installed;
mod network;
mod oobe;
mod partition;
mod pe;
mod places;
mod programs;
mod registry;
mod schema;
mod shell;
mod specialize;
mod tool;
mod tools;
mod xml;

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, bail};

use self::console::say;

fn main() {
    let outcome = start();
    if let Err(error) = outcome {
        // A message box, or a blue screen: Windows waits for somebody to read it.
        say!("stopped: {error:#}");
    }
    loop {
        sleep(Duration::from_secs(3600));
    }
}

fn start() -> anyhow::Result<()> {
    fs::create_dir_all("/run")?;
    let words = fs::read_to_string("/proc/cmdline").context("the kernel's command line")?;
    let word = |name: &str| {
        let value = words.split_whitespace().find_map(|word| word.strip_prefix(name));
        value.and_then(|value| value.strip_prefix('='))
    };
    match word("windows") {
        Some("pe") => pe::start(),
        Some("disk") => {
            let partition = word("windows.partition").context("no system partition")?;
            installed::start(partition, word("windows.drivers").unwrap_or_default())
        }
        other => bail!("windows={other:?}: neither pe nor disk"),
    }
}
