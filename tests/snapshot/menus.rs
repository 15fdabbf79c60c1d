//! Menus that wait for a person when their machine is saved or moved: GRUB's, and the set-up
//! screen of UEFI firmware.

use std::path::Path;

use transom_tests::guest::Guest;
use transom_tests::lab;
use transom_tests::linux::Booted;
use transom_tests::uefi;

use super::{BOOT, SOON, migrated, moved};

const DOWN: &str = "\x1b[B";
const ESCAPE: &str = "\x1b";
/// The last line of GRUB's menu, in `tests/lab/witness.cfg`.
const LAST_ENTRY: &str = "Xen";

fn firmware(folder: &Path) -> anyhow::Result<Guest> {
    let vars = uefi::store(&lab::asset("OVMF_VARS_13")?, folder)?;
    Ok(Guest::transom().cpus("2").firmware(lab::asset("OVMF_CODE_13")?, vars))
}

/// GRUB goes on at its menu and at its prompt, and so does the Linux that it starts.
pub(crate) fn grub_goes_on() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = format!("virtio-blk,path={},readonly", lab::asset("WITNESS_DISK")?.display());
    let mut running = firmware(folder.path())?.word("--device").word(disk).start()?;
    running.expect(LAST_ENTRY, BOOT)?;
    let mut running = moved(running, folder.path(), "", None)?;
    running.console().type_keys("c")?;
    running.expect("grub> ", SOON)?;
    let mut running = migrated(running, folder.path(), None)?;
    running.send("lsefi")?;
    running.expect("Handle ", SOON)?;
    running.expect("grub> ", SOON)?;
    running.send("configfile $prefix/grub.cfg")?;
    running.expect(LAST_ENTRY, SOON)?;
    let mut running = moved(running, folder.path(), "", None)?;
    running.console().type_keys("l")?;
    let mut booted = Booted { running };
    booted.ready(BOOT)?;
    let Booted { running } = booted;
    let mut booted = Booted { running: migrated(running, folder.path(), None)? };
    booted.run("ls -d /sys/firmware/efi && cat /proc/uptime", SOON)?;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// Each page goes on, and its keys lead to the next one.
pub(crate) fn setup_screen_goes_on() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut running = firmware(folder.path())?.memory("256M").start()?;
    running.expect("Shell>", BOOT)?;
    running.send("exit")?;
    running.expect("Select Language", SOON)?;
    running.expect("Reset", SOON)?;
    let mut running = moved(running, folder.path(), "", None)?;
    running.console().type_keys(DOWN)?;
    running.send("")?;
    running.expect("Devices List", SOON)?;
    let mut running = migrated(running, folder.path(), None)?;
    running.console().type_keys(ESCAPE)?;
    running.expect("Select Language", SOON)?;
    let mut running = moved(running, folder.path(), ",copy", None)?;
    // The entry is still selected.
    running.send("")?;
    running.expect("Devices List", SOON)?;
    Ok(())
}
