//! The boot manager on the system partition, and firmware's entry for it, as `bcdboot` makes them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use super::console::say;
use super::partition::Target;
use super::{drivers, drives, files, tool};

const ENTRY: &str = "Windows Boot Manager";
const LOADER: &str = "\\EFI\\Microsoft\\Boot\\bootmgfw.efi";
const VARIABLES: &str = "/sys/firmware/efi/efivars";
const GLOBAL: &str = "8be4df61-93ca-11d2-aa0d-00e098032b8c";

/// A Windows on its disk, and where its partitions are mounted.
pub(crate) struct Boot {
    pub(crate) target: Target,
    pub(crate) windows: PathBuf,
    pub(crate) system: PathBuf,
}

impl Boot {
    /// Makes the disk start Windows.
    pub(crate) fn install(&self) -> anyhow::Result<()> {
        let manager = self.system.join("EFI/Microsoft/Boot");
        files::copy(&self.windows.join("Windows/Boot/EFI"), &manager)?;
        // The loader and the kernel, which Windows' own boot manager would read from NTFS.
        for name in ["ntoskrnl.exe", "winload.efi"] {
            fs::copy(self.windows.join("Windows/System32").join(name), manager.join(name))?;
        }
        let fallback = self.system.join("EFI/BOOT");
        fs::create_dir_all(&fallback)?;
        fs::copy(manager.join("bootmgfw.efi"), fallback.join("bootx64.efi"))?;
        fs::copy(manager.join("grubx64.efi"), fallback.join("grubx64.efi"))?;
        enter(&self.target)
    }

    /// Tells the loader which drivers of the installed Windows it has to load.
    pub(crate) fn finish(&self) -> anyhow::Result<()> {
        let drivers = drivers::of_boot(&drivers::stored(&self.windows)?)?.join(",");
        let partition = self.target.name()?;
        let words = format!("console=ttyS0 loglevel=1 windows=disk windows.partition={partition}");
        let configuration = format!(
            "linux /EFI/Microsoft/Boot/ntoskrnl.exe {words} windows.drivers={drivers}\n\
             initrd /EFI/Microsoft/Boot/winload.efi\nboot\n"
        );
        fs::create_dir_all(self.system.join("EFI/debian"))?;
        let file = self.system.join("EFI/debian/grub.cfg");
        fs::write(file, configuration).context("the boot manager")
    }
}

/// Makes the firmware start Windows next, whatever its order is.
pub(crate) fn next() -> anyhow::Result<()> {
    let listed = tool::run("/bin/efibootmgr", &[])?;
    let entry = listed.lines().find(|line| line.contains(ENTRY));
    let number = entry.and_then(|line| line.get(4..8)).context("no entry of Windows")?;
    tool::run("/bin/efibootmgr", &["-q", "-n", number]).map(drop)
}

/// Writes the entry, first in the boot order. Entries of this name that are there go.
fn enter(target: &Target) -> anyhow::Result<()> {
    mount_variables()?;
    let listed = tool::run("/bin/efibootmgr", &[])?;
    for line in listed.lines().filter(|line| line.contains(ENTRY)) {
        let number = line.get(4..8).context("an entry has a number")?;
        tool::run("/bin/efibootmgr", &["-q", "-b", number, "-B"])?;
    }
    let partition = target.system.to_string();
    let disk = target.disk.path();
    let new = ["-q", "-c", "-d", &disk, "-p", &partition, "-L", ENTRY, "-l", LOADER];
    tool::run("/bin/efibootmgr", &new)?;
    let listed = tool::run("/bin/efibootmgr", &[])?;
    let order = listed.lines().find(|line| line.starts_with("BootOrder")).unwrap_or_default();
    say!("firmware has the entry {ENTRY}: {order}");
    Ok(())
}

fn mount_variables() -> anyhow::Result<()> {
    let at = Path::new(VARIABLES);
    ensure!(at.exists(), "the firmware is not UEFI");
    match at.join(format!("BootOrder-{GLOBAL}")).exists() {
        true => Ok(()),
        false => drives::mount("efivarfs", at, "efivarfs", "rw"),
    }
}

/// Whether firmware checks signatures.
pub(crate) fn is_secure() -> anyhow::Result<bool> {
    mount_variables()?;
    let state = fs::read(Path::new(VARIABLES).join(format!("SecureBoot-{GLOBAL}")));
    // Four bytes of attributes come first.
    Ok(state.is_ok_and(|bytes| bytes.get(4) == Some(&1)))
}
