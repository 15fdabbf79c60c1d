//! Boots the host's own kernel, or a given one, with a device of each kind. The initial RAM disk
//! has one program of ours (vmm/probe/init), and the kernel's modules for these devices.

mod facts;
mod kernel;
mod modules;

use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail, ensure};

pub(super) use self::facts::Facts;
use self::kernel::Kernel;
use super::archive::Archive;
use super::equipment::{self, memory_file, path_of};
use super::machine::{Limits, Machine, last_error};

/// Errors of the kernel are printed; `panic=0` keeps a panicked kernel from starting again.
const WORDS: &str = "console=ttyS0 loglevel=4 panic=0";
const PANIC: &str = "Kernel panic";
const NO_POWER_OFF: &str = "transom: no power-off";
/// Major and minor number of /dev/console.
const CONSOLE: (u32, u32) = (5, 1);

/// The kernel to boot; or a sentence that says why there is none, and what to do.
pub(super) fn find(kernel: Option<&Path>, modules: Option<&Path>) -> Result<Kernel, String> {
    Kernel::find(kernel, modules)
}

pub(super) fn run(kernel: &Kernel, limits: Limits) -> anyhow::Result<Facts> {
    let modules = modules::read(kernel.modules.as_deref())?;
    let mut archive = Archive::default();
    ["dev", "proc", "sys", "m"].into_iter().for_each(|name| archive.folder(name));
    archive.device("dev/console", CONSOLE);
    archive.program("init", probe::INIT);
    for (number, (_, bytes)) in modules.iter().enumerate() {
        archive.program(&format!("m/{number}"), bytes);
    }
    let mut initrd = memory_file("initrd")?;
    initrd.write_all(&archive.finish()).context("an initial RAM disk in memory")?;
    let disks = equipment::disks()?;
    let processors = equipment::processors();
    let mut options = equipment::options(&disks);
    let path = kernel.path.to_str().with_context(|| format!("{:?} is not text", kernel.path))?;
    options.extend(["--cpus", &processors.to_string(), "--memory", "512M"].map(str::to_owned));
    options.extend(["--kernel", path, "--initrd", &path_of(&initrd)].map(str::to_owned));
    options.extend(["--cmdline", WORDS].map(str::to_owned));
    let machine = Machine::start(&options, limits)?;
    let names = modules.iter().map(|(name, _)| name.clone()).collect();
    let mut facts = watch(machine, Facts::new(names))?;
    facts.judge(&disks, processors);
    Ok(facts)
}

/// Reads the lines of the guest until the machine is off.
fn watch(mut machine: Machine, mut facts: Facts) -> anyhow::Result<Facts> {
    let mut last = String::new();
    loop {
        let next = machine.next_line().with_context(|| match (facts.is_started(), &*last) {
            (true, _) => "Linux started, but did not finish".to_owned(),
            (false, "") => "the kernel printed nothing".to_owned(),
            (false, last) => format!("the kernel did not start our program, and printed: {last}"),
        });
        let Some(line) = next? else { break };
        if line.contains(PANIC) {
            bail!("{}", super::host::short(&line));
        }
        ensure!(line != NO_POWER_OFF, "Linux could not power the machine off");
        if !facts.read(&line, Instant::now()) && !line.is_empty() {
            last = super::host::short(&line);
        }
    }
    let (status, log) = machine.end()?;
    ensure!(status.success(), "{}", last_error(&log));
    ensure!(facts.is_complete(), "Linux ended early, after it printed: {last}");
    Ok(facts)
}
