//! Windows on its disk: which part of it comes next.

use std::path::Path;

use anyhow::bail;

use super::console::say;
use super::drives::{self, C};
use super::registry::{DONE, OOBE, Registry, SETUP, SPECIALIZE, VERSION};
use super::{drivers, oobe, partition, specialize};

/// Starts the Windows on this partition, whose disk needs these drivers.
pub(crate) fn start(partition: &str, boot_drivers: &str) -> anyhow::Result<()> {
    for module in boot_drivers.split(',').filter(|it| !it.is_empty()) {
        drivers::insert(module)?;
    }
    let (disk, number) = partition::appears_by_name(partition)?;
    // As Windows does, after a start that ended without a shutdown, too.
    drives::mount(&disk.partition(number), Path::new(C), "ntfs3", "rw,force")?;
    let registry = Registry::read(Path::new(C))?;
    let name = registry.get(VERSION, "ProductName").unwrap_or_default().to_owned();
    let phase = registry.get(SETUP, "Phase").unwrap_or_default().to_owned();
    say!("{name} starts from {}: {phase}", disk.name);
    let packages = drivers::stored(Path::new(C))?;
    drivers::load(&packages)?;
    match phase.as_str() {
        SPECIALIZE => specialize::run(registry),
        OOBE => oobe::run(registry, &packages),
        DONE => oobe::start(&registry, &packages),
        other => bail!("{other}: no such phase"),
    }
}
