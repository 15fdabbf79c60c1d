//! An installed disk is never erased: whatever users change, delete, restore or mix, its bytes
//! stay, on the volume or in a backup, and no set-up disk is plugged in beside it.

use std::ffi::OsString;
use std::fs::{self, File};

use anyhow::{Context as _, Result, ensure};
use container::plan::Plan;
use container::state::Step;
use host::lock;
use tempfile::TempDir;
use transom_tests::place::{last_line, until};
use transom_tests::program::PATIENCE;

use super::runs_here;
use super::world::{Files, World, each};

/// A volume with an installed disk, what a user did to it, where the disk is afterwards, and the
/// machine.
struct Attempt {
    volume: &'static str,
    words: &'static [(&'static str, &'static str)],
    disk: &'static str,
    machine: &'static str,
}

const fn attempt(
    volume: &'static str,
    words: &'static [(&'static str, &'static str)],
    disk: &'static str,
    machine: &'static str,
) -> Attempt {
    Attempt { volume, words, disk, machine }
}

/// The machine that boots the disk, and one with a new disk beside it.
const BOOTS: &str = "virtio-scsi data.img | windows.vars";
const FRESH: &str = "nvme other.img > ahci-cdrom win11x64.iso + usb-storage set-up | \
                     new windows_secure.vars TPM";
const REPLACED: &str =
    "nvme data.img > ahci-cdrom win11x64.iso + usb-storage set-up | new windows_secure.vars TPM";
/// An installation that has booted, and a medium with which another one could be made.
const WHOLE: &str = "cp $D/installed data.img; echo win10x64.iso > windows.base; \
    : > windows.boot; cp $D/win11.iso win11x64.iso; \
    cp /usr/share/OVMF/OVMF_VARS_4M.fd windows.vars; \
    printf mine | dd of=windows.vars bs=1 seek=4096 conv=notrunc status=none";
const ELEVEN: (&str, &str) = ("VERSION", "11");
const DOCKUR: (&str, &str) = ("COMPAT", "dockur");

const ATTEMPTS: &[Attempt] = &[
    // State files are deleted, emptied, or of something else.
    attempt("WHOLE; rm windows.boot", &[], "data.img", BOOTS),
    attempt("WHOLE; rm windows.boot windows.base", &[], "data.img", BOOTS),
    attempt("WHOLE; rm windows.*; STORE", &[], "data.img", BOOTS),
    attempt("WHOLE; : > windows.base", &[ELEVEN], "data.img", BOOTS),
    attempt(
        "WHOLE; rm windows.boot; echo win11x64.iso > windows.base",
        &[ELEVEN],
        "data.img",
        BOOTS,
    ),
    attempt("WHOLE; rm windows.boot; mkdir windows.boot", &[ELEVEN], "data.img", BOOTS),
    attempt("WHOLE; rm windows.boot; ln -s /gone windows.boot", &[ELEVEN], "data.img", BOOTS),
    attempt("WHOLE; head -c 5000 /dev/urandom > windows.base", &[ELEVEN], "data.img", BOOTS),
    attempt(
        "WHOLE; touch -d 1970-01-01 *; touch -d 2099-01-01 win11x64.iso",
        &[ELEVEN],
        "data.img",
        BOOTS,
    ),
    // Other settings.
    attempt("WHOLE", &[ELEVEN], "data.img", BOOTS),
    attempt("WHOLE", &[("VERSION", "https://127.0.0.1:9/x.iso")], "data.img", BOOTS),
    attempt("WHOLE", &[("VERSION", "win11x64.iso")], "data.img", BOOTS),
    attempt("WHOLE; cp $D/win11.iso custom.iso", &[], "data.img", BOOTS),
    attempt("WHOLE", &[ELEVEN, ("DISK_FMT", "qcow2")], "data.img", BOOTS),
    attempt("WHOLE", &[ELEVEN, ("DISK_TYPE", "scsi"), ("DISK_SIZE", "32M")], "data.img", BOOTS),
    attempt("WHOLE", &[ELEVEN, ("DISK_TYPE", "nvme")], "data.img", "nvme data.img | windows.vars"),
    attempt("WHOLE", &[ELEVEN, ("APP", "Other")], "data.img", BOOTS),
    attempt(
        "WHOLE; rm windows.boot",
        &[ELEVEN, ("MANUAL", "Y")],
        "data.img",
        "virtio-scsi data.img > ahci-cdrom win11x64.iso | new windows_secure.vars TPM",
    ),
    attempt("WHOLE", &[ELEVEN, ("DISK_NAME", "other")], "data.img", FRESH),
    attempt("WHOLE; cp $D/blank other.img", &[ELEVEN, ("DISK_NAME", "other")], "data.img", FRESH),
    attempt(
        "WHOLE; qemu-img create -q -f qcow2 data.qcow2 64M",
        &[ELEVEN, ("DISK_FMT", "qcow2")],
        "data.img",
        BOOTS,
    ),
    // With COMPAT=dockur, it moves.
    attempt(
        "WHOLE",
        &[ELEVEN, DOCKUR, ("BOOT_MODE", "windows_secure")],
        "backups/win10x64/data.img",
        REPLACED,
    ),
    attempt(
        "WHOLE; rm windows.boot",
        &[ELEVEN, DOCKUR, ("BOOT_MODE", "windows_secure")],
        "backups/win10x64/data.img",
        REPLACED,
    ),
    attempt(
        "WHOLE; mkdir -p backups/win10x64; cp $D/linux backups/win10x64/data.img",
        &[ELEVEN, DOCKUR, ("BOOT_MODE", "windows_secure")],
        "backups/win10x64.2/data.img",
        REPLACED,
    ),
    attempt("WHOLE; echo win11x64.iso > windows.base", &[ELEVEN, DOCKUR], "data.img", BOOTS),
    attempt("WHOLE; rm windows.base windows.boot", &[ELEVEN, DOCKUR], "data.img", BOOTS),
    // Backups that were put back as a whole or in part.
    attempt(
        "WHOLE; mkdir -p backups/win10x64.part; echo win11x64.iso > windows.base",
        &[ELEVEN, DOCKUR],
        "data.img",
        BOOTS,
    ),
    attempt(
        "WHOLE; mkdir -p backups/win10x64.part; mv windows.vars backups/win10x64.part",
        &[ELEVEN],
        "data.img",
        BOOTS,
    ),
    attempt(
        "WHOLE; mkdir -p backups/win10x64.part; mv windows.* backups/win10x64.part",
        &[ELEVEN],
        "data.img",
        BOOTS,
    ),
    attempt(
        "WHOLE; mkdir -p backups/win10x64.part; cp data.img backups/win10x64.part",
        &[ELEVEN],
        "data.img",
        BOOTS,
    ),
    attempt(
        "WHOLE; mkdir -p backups/win10x64.part; mv data.img windows.vars backups/win10x64.part",
        &[ELEVEN],
        "backups/win10x64/data.img",
        REPLACED,
    ),
];

fn script(text: &str) -> String {
    let store = WHOLE.split("win11x64.iso; ").last().unwrap_or_default();
    text.replace("WHOLE", WHOLE).replace("STORE", store)
}

#[test]
fn no_change_of_a_user_erases_an_installed_disk() -> Result<()> {
    if !runs_here("attempts to erase a disk") {
        return Ok(());
    }
    let files = Files::make()?;
    each(ATTEMPTS, |Attempt { volume, words, disk, machine }| {
        let of = || format!("{volume} {words:?}");
        let world = World::new(&files)?;
        world.run(&script(volume))?;
        // The guest writes to what it may believe to be its own.
        let log = world.boot(words).with_context(of)?;
        ensure!(world.is(disk, "installed"), "{}: {:?}: {log}", of(), world.names()?);
        let started = world.machine()?.with_context(of)?;
        ensure!(started == *machine, "{}: {started}: {log}", of());
        // Nor does the next start, with the settings as they were.
        let log = world.boot(&[("VERSION", "10")]).with_context(of);
        ensure!(world.is(disk, "installed"), "{}, then: {log:?}", of());
        Ok(())
    })
}

/// Firmware keys, passwords and hardware of an installed machine belong to its disk.
#[test]
fn a_start_without_the_disk_keeps_what_belongs_to_it() -> Result<()> {
    if !runs_here("starts without the disk") {
        return Ok(());
    }
    let state = [
        ("mode", "windows_secure"),
        ("account", "Secret1word"),
        ("rdp", "a fingerprint"),
        ("type", "sata"),
        ("adapter", "e1000e"),
    ];
    let write = state.map(|(end, text)| format!("; echo '{text}' > windows.{end}")).concat();
    let (live, mode) = (("DISK_DISABLE", "Y"), ("BOOT_MODE", "windows"));
    let starts = [&[live][..], &[live, mode], &[("EPHEMERAL", "Y"), mode]];
    let files = Files::make()?;
    each(&starts, |words| {
        let world = World::new(&files)?;
        world.run(&script(&format!("WHOLE; cp $D/win11.iso custom.iso{write}")))?;
        let log = world.boot(words)?;
        for (end, text) in state.iter().chain(&[("boot", ""), ("base", "win10x64.iso")]) {
            let path = world.volume().join(format!("windows.{end}"));
            let found = fs::read_to_string(&path).unwrap_or_else(|error| error.to_string());
            ensure!(found.trim() == *text, "{words:?}: windows.{end}: {found}: {log}");
        }
        Ok(())
    })
}

/// Disks of others, each with the state files of an installation that was interrupted.
#[test]
fn a_disk_with_anything_else_than_an_unfinished_windows_is_kept() -> Result<()> {
    if !runs_here("disks of others") {
        return Ok(());
    }
    let files = Files::make()?;
    let disks = [("linux", "boot"), ("bios", "boot"), ("data", "boot"), ("divided", "again")];
    each(&disks, |(disk, step)| {
        let world = World::new(&files)?;
        let base = "echo win11x64.iso > windows.base; cp $D/win11.iso win11x64.iso";
        world.run(&format!("cp $D/{disk} data.img; {base}"))?;
        let log = world.boot(&[ELEVEN])?;
        ensure!(world.is("data.img", disk), "{disk}: {log}");
        let machine = world.machine()?.context("a machine")?;
        ensure!(machine.contains("set-up") == (*step == "again"), "{disk}: {machine}: {log}");
        // Without state files, nothing is known of the disk.
        world.run("rm -f windows.*")?;
        let mut pod = world.start("", &[ELEVEN])?;
        let status = pod.wait(PATIENCE)?;
        let machine = world.machine()?.unwrap_or_default();
        ensure!(status == if *step == "again" { 66 } else { 0 }, "{disk}: {status}");
        ensure!(!machine.contains("set-up") && world.is("data.img", disk), "{disk}: {machine}");
        Ok(())
    })
}

#[test]
fn a_second_pod_neither_moves_nor_erases_the_disk_of_the_first() -> Result<()> {
    if !runs_here("two pods on a volume") {
        return Ok(());
    }
    let files = Files::make()?;
    for disk in ["installed", "divided"] {
        let world = World::new(&files)?;
        world.run(&script("WHOLE"))?;
        if disk == "divided" {
            world
                .run("rm windows.boot; cp $D/divided data.img; echo win11x64.iso > windows.base")?;
        }
        let before = world.names()?;
        // The machine of another container has the disk.
        let path = world.volume().join("data.img");
        let file = File::options().read(true).write(true).open(&path)?;
        lock::exclusive(&file, &path)?;
        let mut pod = world.start("", &[ELEVEN, DOCKUR])?;
        let status = pod.wait(PATIENCE)?;
        let said = last_line(&pod);
        drop(file);
        ensure!(world.machine()?.is_none(), "{disk}: a machine started");
        ensure!(status != 0 && said.contains("data.img"), "{disk}: {status}: {said}");
        let after: Vec<_> = world.names()?.into_iter().filter(|it| before.contains(it)).collect();
        ensure!(world.is("data.img", disk) && after == before, "{disk}: {after:?}");
    }
    Ok(())
}

/// Counts the installed disks of the volume when the pod has ended.
const COUNT: &str = "(while kill -0 $$; do sleep 0.05; done; \
    for it in $(find /mnt -name data.img); \
    do cmp -n 67108864 $it $D/installed && echo $it; done > COUNTED) > /dev/null 2>&1 &";

/// The volume has so little room that each of the changes may be the one that fails.
#[test]
fn a_volume_that_is_full_amid_the_changes_loses_nothing() -> Result<()> {
    if !runs_here("a volume that fills up") {
        return Ok(());
    }
    let files = Files::make()?;
    // Files and folders that the volume has room for, beside those of the installation.
    let rooms: Vec<_> = (1..13).collect();
    each(&rooms, |room| {
        let world = World::new(&files)?;
        let counted = files.path(&format!("counted{room}"));
        let count = COUNT.replace("COUNTED", &counted.display().to_string());
        let mount = format!("mount -t tmpfs -o nr_inodes={} tmpfs /mnt; cd /mnt; ", 6 + room);
        let mut pod = world.start(
            &format!("{mount}{}; cd /; {count}", script("WHOLE")),
            &[ELEVEN, DOCKUR, ("BOOT_MODE", "windows_secure")],
        )?;
        let status = pod.wait(PATIENCE)?;
        let said = last_line(&pod);
        ensure!([0, 13, 73].contains(&status), "{room}: {status}: {said}");
        ensure!(status == 0 || said.contains("it is full"), "{room}: {status}: {said}");
        let mut found = String::new();
        until("nobody counted", || {
            found = fs::read_to_string(&counted).unwrap_or_default();
            Ok(!found.is_empty())
        })?;
        ensure!(found.lines().count() == 1, "{room}: {found}");
        Ok(())
    })
}

/// All combinations of state files and variables, by plans alone.
#[test]
fn no_combination_of_state_files_and_variables_installs_over_an_installed_disk() -> Result<()> {
    let files = Files::make()?;
    let disks = ["installed", "linux", "data", "bios"];
    let bases = ["", "win11x64.iso", "win10x64.iso", "windows.77.iso", "../x"];
    let words: [&[(&str, &str)]; 8] = [
        &[],
        &[ELEVEN],
        &[ELEVEN, DOCKUR],
        &[("VERSION", "10"), ("DISK_TYPE", "blk")],
        &[("VERSION", "https://example.com/x.iso"), DOCKUR],
        &[ELEVEN, ("DISK_FMT", "qcow2")],
        &[ELEVEN, ("APP", "Other"), DOCKUR],
        &[("MANUAL", "Y"), DOCKUR],
    ];
    let bases = || disks.iter().flat_map(|disk| bases.iter().map(move |base| (disk, base)));
    let mut count = 0;
    for (disk, base, bits) in
        bases().flat_map(|(disk, base)| (0..32).map(move |it| (disk, base, it)))
    {
        let root = volume(&files, disk, base, bits)?;
        for words in &words {
            let words = words.iter().chain(&[("RAM_CHECK", "N"), ("DISK_MINIMUM", "1M")]);
            let words = words.map(|(name, text)| (OsString::from(name), OsString::from(text)));
            let Ok(plan) = Plan::make(&words.collect(), root.path()) else { continue };
            let next = plan.next.context("a step")?;
            let keeps = matches!(next.step, Step::Boot(_) | Step::ByHand);
            let moves = next.step == Step::Replace && next.found.movable;
            ensure!(keeps || moves, "{disk} {base} {bits} {:?}", next.step);
            ensure!(keeps || plan.input.names.contains("COMPAT"), "{disk} {base} {bits}");
            count += 1;
        }
    }
    ensure!(count > 4000, "only {count} of 5120 plans were made");
    Ok(())
}

/// A volume with this disk, a base, and other files by these bits.
fn volume(files: &Files, disk: &str, base: &str, bits: u32) -> Result<TempDir> {
    let root = tempfile::tempdir()?;
    let volume = root.path().join("storage");
    fs::create_dir(&volume)?;
    // Plans only read them.
    let link = |name: &str, to: &str| fs::hard_link(files.path(name), volume.join(to));
    link(disk, "data.img")?;
    if bits & 16 != 0 {
        fs::write(volume.join("data.qcow2"), [])?;
    }
    if !base.is_empty() {
        fs::write(volume.join("windows.base"), base)?;
    }
    for (bit, make) in ["windows.boot", "win11x64.iso", "custom.iso"].iter().enumerate() {
        if bits & 1 << bit != 0 {
            match make.ends_with("iso") {
                true => link("win11.iso", make)?,
                false => fs::write(volume.join(make), "")?,
            }
        }
    }
    if bits & 8 != 0 {
        fs::create_dir_all(volume.join("backups/win11x64.part"))?;
    }
    Ok(root)
}
