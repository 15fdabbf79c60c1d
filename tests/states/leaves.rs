//! Volumes that this image leaves behind: the reference image, by its rules, goes on with each.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use transom_tests::place::until;
use transom_tests::program::PATIENCE;

use super::reference::{self, Theirs, machine, text};
use super::runs_here;
use super::world::{BOOTS, Files, World};

const ISO: &str = "win11x64.iso";
const ELEVEN: &[(&str, &str)] = &[("VERSION", "11")];
const TEN_DOCKUR: &[(&str, &str)] = &[("VERSION", "10"), ("COMPAT", "dockur")];

/// Checks the state files as the reference image's scripts read them: a name in the first line of
/// `windows.base`, a controller and a boot mode that they know, and the firmware's variables.
fn is_readable(world: &World<'_>) -> Result<()> {
    let volume = world.volume();
    let base = text(&volume.join("windows.base"));
    ensure!(base.ends_with(".iso") && !base.contains(['/', ' ']), "{base:?}");
    let (bus, mode) = machine(&volume);
    let known = ["scsi", "blk", "ide", "sata", "nvme", "usb", "auto"].contains(&&*bus);
    ensure!(known, "{bus:?}");
    ensure!(["windows", "windows_plain", "windows_secure"].contains(&&*mode), "{mode:?}");
    let length = |path: &str| fs::metadata(path).map(|it| it.len());
    let vars = volume.join(format!("{mode}.vars"));
    let vars = length(vars.to_str().context("text")?)?;
    ensure!(vars == length("/usr/share/OVMF/OVMF_VARS_4M.fd")?, "{vars} bytes of variables");
    Ok(())
}

#[test]
fn the_reference_image_goes_on_with_each_moment_of_an_installation() -> Result<()> {
    if !runs_here("moments of an installation") {
        return Ok(());
    }
    let files = Files::make()?;
    let world = World::new(&files)?;
    let theirs = || reference::step(&world.volume(), ISO);
    // Before the first start, and after a machine that wrote nothing.
    world.run("cp $D/win11.iso win11x64.iso")?;
    ensure!(theirs() == Theirs::Installs, "{:?}", theirs());
    world.boot(ELEVEN)?;
    is_readable(&world)?;
    ensure!(theirs() == Theirs::Installs, "{:?}", theirs());
    // Setup is interrupted, twice. The medium has the name by which it is used again.
    for disk in ["divided", "begun"] {
        world.guest(&format!("dd if=$D/{disk} of=data.img conv=notrunc,sparse status=none"))?;
        world.boot(ELEVEN)?;
        is_readable(&world)?;
        ensure!(theirs() == Theirs::BeginsAgain, "{disk}: {:?}", theirs());
        ensure!(world.volume().join(text(&world.volume().join("windows.base"))).is_file(), "ISO");
    }
    // Windows boots from its disk, and the pod is killed at once.
    let installs = "dd if=$D/installed of=data.img conv=notrunc,sparse status=none; ";
    world.guest(&format!("{installs}{BOOTS}sleep 1000"))?;
    let mut pod = world.start("", ELEVEN)?;
    until("no mark", || Ok(world.volume().join("windows.boot").is_file()))?;
    pod.signal(Signal::KILL)?;
    pod.wait(PATIENCE)?;
    is_readable(&world)?;
    ensure!(theirs() == Theirs::Boots, "{:?}", theirs());
    // Ours starts it on the controller of the installation, and theirs does.
    world.guest("")?;
    world.boot(&[])?;
    let (bus, mode) = machine(&world.volume());
    let started = world.machine()?.context("a machine")?;
    ensure!(started.starts_with(&format!("{bus} data.img |")), "{bus}: {started}");
    ensure!(started.contains(&format!("{mode}.vars")), "{mode}: {started}");
    Ok(())
}

#[test]
fn a_backup_is_what_the_reference_image_makes() -> Result<()> {
    if !runs_here("a backup") {
        return Ok(());
    }
    let files = Files::make()?;
    let world = World::new(&files)?;
    let theirs = |medium: &str| reference::step(&world.volume(), medium);
    world.run("cp $D/win11.iso win11x64.iso")?;
    let installs = "dd if=$D/installed of=data.img conv=notrunc,sparse status=none; ";
    world.guest(&format!("{installs}{BOOTS}"))?;
    world.boot(ELEVEN)?;
    // Another VERSION: a line, and the disk as it is. The reference image would back it up.
    world.guest("")?;
    world.run("cp $D/win11.iso win10x64.iso")?;
    let log = world.boot(&[("VERSION", "10")])?;
    let lines = log.lines().filter(|line| line.contains("another Windows than")).count();
    ensure!(lines == 1 && log.contains("COMPAT=dockur"), "{log}");
    ensure!(
        theirs("win10x64.iso") == Theirs::BacksUp && world.is("data.img", "installed"),
        "{log}"
    );
    // With COMPAT=dockur, this one does.
    let before = fs::read(world.volume().join("windows_secure.vars"))?;
    let log = world.boot(TEN_DOCKUR)?;
    ensure!(log.contains("a backup of your previous installation will be saved"), "{log}");
    ensure!(world.is("backups/win11x64/data.img", "installed"), "{:?}", world.names()?);
    let kept = fs::read(world.volume().join("backups/win11x64/windows_secure.vars"))?;
    ensure!(kept == before, "the firmware's variables are not in the backup");
    is_readable(&world)?;
    ensure!(theirs("win10x64.iso") == Theirs::Installs, "{:?}", theirs("win10x64.iso"));
    world.guest(&format!("{installs}{BOOTS}"))?;
    world.boot(TEN_DOCKUR)?;
    ensure!(theirs("win10x64.iso") == Theirs::Boots, "{:?}", theirs("win10x64.iso"));
    // A person puts the backup back.
    world.guest("")?;
    world.run("rm -f data.img windows*; mv backups/win11x64/* .")?;
    ensure!(theirs(ISO) == Theirs::Boots, "{:?}", theirs(ISO));
    let log = world.boot(ELEVEN)?;
    ensure!(log.contains("the next step is boot: it has booted before"), "{log}");
    Ok(())
}

/// The connection breaks, and the pod is stopped.
#[test]
fn a_download_that_was_cut_is_no_medium_for_the_reference_image() -> Result<()> {
    if !runs_here("a download that is cut") {
        return Ok(());
    }
    let files = Files::make()?;
    let world = World::new(&files)?;
    super::server::serve(world.place.listen(9000)?);
    let words = [("VERSION", "http://127.0.0.1:9000/cut.iso")];
    let mut pod = world.start("", &words)?;
    until("nothing was downloaded", || {
        Ok(world.names()?.iter().any(|name| name.ends_with(".part")))
    })?;
    pod.signal(Signal::TERM)?;
    let status = pod.wait(PATIENCE)?;
    ensure!(status == 143, "{status}: {}", pod.stderr.text());
    ensure!(!world.names()?.iter().any(|it| it.ends_with(".iso")), "{:?}", world.names()?);
    ensure!(world.machine()?.is_none(), "a machine started");
    ensure!(reference::step(&world.volume(), "cut.iso") == Theirs::Installs, "it does not install");
    Ok(())
}
