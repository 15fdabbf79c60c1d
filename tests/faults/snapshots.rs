//! `transom snapshot` with the real pod and the real file systems: disks that are cloned or copied
//! while the machine stands still, and put back, whatever is killed meanwhile.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Error, Result, ensure};
use host::testutil::noise::Noise;
use serde_json::Value;
use transom_tests::place::{Place, beside, runs_here, until};
use transom_tests::program::{PATIENCE, Running, connect, not_run, said, transom};
use transom_tests::say;
use vmm::control::snapshot::save;
use vmm::control::{self, Then};

use super::suspend::{CONTINUES, page, reacts, types};
use super::{PROBE, probe, stops};

/// The number of kills of each command.
const KILLS: usize = 8;
const MIB: u64 = 1 << 20;

const DISK: [(&str, &str); 2] =
    [("NETWORK", "none"), ("ARGUMENTS", "-drive file=/mnt/data.img,format=raw,if=virtio")];

/// A volume with a file system of its own.
struct Volume {
    place: Place,
}

impl Volume {
    /// `None` if there is no program that makes it, or if the kernel does not have it.
    fn new(kind: &str) -> Result<Option<Self>> {
        let make = format!("mkfs.{kind}");
        if kind != "tmpfs" && Command::new(&make).arg("-V").output().is_err() {
            not_run(&format!("snapshots on {kind}"), "there is no program that makes it");
            return Ok(None);
        }
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("snap{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let volume = Self { place: Place::new(&name)? };
        let at = volume.path();
        let mut mount = Command::new("mount");
        if kind == "tmpfs" {
            said(mount.args(["-t", "tmpfs", "-o", "size=1g", "tmpfs"]).arg(&at))?;
        } else {
            let image = at.with_file_name("image");
            File::create(&image)?.set_len(1536 * MIB)?;
            said(Command::new(&make).arg("-q").arg(&image))?;
            let mounted = said(mount.args(["-t", kind, "-o", "loop"]).arg(&image).arg(&at));
            // The kernel has loaded its module by now, if there is one.
            let known = fs::read_to_string("/proc/filesystems")?;
            if mounted.is_err() && !known.split_whitespace().any(|word| word == kind) {
                not_run(&format!("snapshots on {kind}"), "the kernel does not have it");
                return Ok(None);
            }
            mounted?;
        }
        Ok(Some(volume))
    }

    fn path(&self) -> PathBuf {
        self.place.storage()
    }

    /// A disk of this many MiB with data, and a hole behind.
    fn fill(&self, mebibytes: u64, seed: u64) -> Result<()> {
        let disk = File::create(self.path().join("data.img"))?;
        disk.set_len((mebibytes + 64) * MIB)?;
        let mut noise = Noise::new(seed);
        let block: Vec<u8> = noise.by_ref().take(1 << 20).collect();
        for number in 0..mebibytes {
            disk.write_all_at(&block, number * MIB)?;
            disk.write_all_at(&number.to_le_bytes(), number * MIB)?;
        }
        Ok(disk.sync_all()?)
    }

    /// The command without a pod, as in a container of its own.
    fn off(&self, words: &[&str]) -> Command {
        let mut command = Command::new(transom());
        command.arg("snapshot").args(words).env_clear().env("STORAGE", self.path());
        command
    }

    fn list(&self) -> Result<Value> {
        Ok(serde_json::from_str(&said(&mut self.off(&["list", "--json"]))?)?)
    }

    fn names(&self) -> Result<Vec<String>> {
        let names = fs::read_dir(self.path().join("windows.snapshots"))?;
        let mut names: Vec<_> = names
            .map(|it| Ok(it?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_>>()?;
        names.sort();
        Ok(names)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        Command::new("umount").args(["-l"]).arg(self.path()).output().ok();
    }
}

/// The command beside the pod's, in its container.
fn snapshot(pod: &Running, words: &[&str]) -> Result<(Option<i32>, String)> {
    let transom = transom().display().to_string();
    beside(pod, &[&[transom.as_str(), "snapshot"], words].concat())
}

fn state(place: &Place) -> Result<Value> {
    connect(&place.control())?.ask(&control::Command::Status)
}

fn same(one: &Path, two: &Path) -> Result<bool> {
    let compared = Command::new("cmp").arg("-s").arg(one).arg(two).status()?;
    Ok(compared.success())
}

#[test]
fn disks_are_cloned_while_the_machine_runs() -> Result<()> {
    if !runs_here("snapshots of running pods") {
        return Ok(());
    }
    for kind in ["xfs", "btrfs"] {
        let Some(volume) = Volume::new(kind)? else { continue };
        volume.fill(64, 1)?;
        let before = volume.path().with_file_name("before");
        fs::copy(volume.path().join("data.img"), &before)?;
        let mut pod = probe(&volume.place, &DISK)?;
        let (status, text) = snapshot(&pod, &["create", "one"])?;
        ensure!(status == Some(0), "{kind}: {text}");
        ensure!(text.contains("as after a power cut: no agent answers"), "{kind}: {text}");
        ensure!(text.contains("The guest stood still for "), "{kind}: {text}");
        ensure!(state(&volume.place)?["state"] == "running", "{kind}: it does not go on");
        let (status, text) = snapshot(&pod, &["restore", "one"])?;
        ensure!(
            status == Some(1) && text.contains("a machine runs in this container: stop it"),
            "{kind}: {text}"
        );
        // In another container, the disk's lock shows the machine.
        let refused = volume.off(&["restore", "one"]).output()?;
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(text.contains("stop the pod first: ") && text.contains("in use"), "{kind}: {text}");
        stops(&mut pod)?;
        volume.fill(64, 2)?;
        said(&mut volume.off(&["restore", "one"]))?;
        ensure!(same(&before, &volume.path().join("data.img"))?, "{kind}: another disk");
        let generation = fs::read_to_string(volume.path().join("windows.generation"))?;
        let mut pod = probe(&volume.place, &DISK)?;
        ensure!(state(&volume.place)?["vmgenid"] == generation.trim(), "{kind}: {generation}");
        let (_, text) = snapshot(&pod, &["list"])?;
        ensure!(text.contains("\none "), "{kind}: {text}");
        let (status, text) = snapshot(&pod, &["delete", "one"])?;
        ensure!(status == Some(0) && volume.names()? == [".lock"], "{kind}: {text}");
        stops(&mut pod)?;
        volume.place.has_nothing_left()?;
    }
    Ok(())
}

#[test]
fn disks_are_copied_where_nothing_can_be_cloned() -> Result<()> {
    if !runs_here("snapshots without clones") {
        return Ok(());
    }
    for kind in ["ext4", "tmpfs"] {
        let Some(volume) = Volume::new(kind)? else { continue };
        volume.fill(96, 3)?;
        let disk = volume.path().join("data.img");
        let before = volume.path().with_file_name("before");
        fs::copy(&disk, &before)?;
        let mut pod = probe(&volume.place, &DISK)?;
        let (status, text) = snapshot(&pod, &["create", "one"])?;
        ensure!(status == Some(1) && text.contains("allow it with --pause"), "{kind}: {text}");
        ensure!(volume.names()? == [".lock"], "{kind}: {:?}", volume.names());
        let (status, text) = snapshot(&pod, &["create", "one", "--pause"])?;
        ensure!(status == Some(0), "{kind}: {text}");
        ensure!(state(&volume.place)?["state"] == "running", "{kind}: it does not go on");
        stops(&mut pod)?;
        said(&mut volume.off(&["create", "two"]))?;
        let list = volume.list()?;
        ensure!(list[0]["kind"] == "power-cut" && list[1]["kind"] == "off", "{list}");
        for name in ["one", "two"] {
            let copy = volume.path().join("windows.snapshots").join(name).join("data.img");
            ensure!(same(&before, &copy)?, "{kind}: {name} has another disk");
            File::options().write(true).open(&disk)?.write_all_at(b"changed", 9)?;
            said(&mut volume.off(&["restore", name]))?;
            ensure!(same(&before, &disk)?, "{kind}: {name} restored another disk");
            said(&mut volume.off(&["delete", name]))?;
        }
        // No room: the error has the numbers, and nothing is left.
        volume.fill(800, 4)?;
        let refused = volume.off(&["create", "big"]).output()?;
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(text.contains("it needs 864M, but ") && text.contains("are free"), "{text}");
        ensure!(volume.names()? == [".lock"], "{kind}: {:?}", volume.names());
    }
    Ok(())
}

#[test]
fn a_qcow2_disk_is_whole_in_a_snapshot() -> Result<()> {
    if !runs_here("snapshots of qcow2 disks") {
        return Ok(());
    }
    let Some(volume) = Volume::new("xfs")? else { return Ok(()) };
    volume.fill(32, 5)?;
    let at = |name: &str| volume.path().join(name);
    let qemu =
        |words: &[&str], files: &[PathBuf]| said(Command::new("qemu-img").args(words).args(files));
    let raw = at("").with_file_name("before.img");
    fs::rename(at("data.img"), at("moved"))?;
    fs::copy(at("moved"), &raw)?;
    fs::remove_file(at("moved"))?;
    qemu(&["convert", "-O", "qcow2"], &[raw.clone(), at("data.qcow2")])?;
    let arguments = "-drive file=/mnt/data.qcow2,format=qcow2,if=virtio";
    let mut pod = probe(&volume.place, &[DISK[0], ("ARGUMENTS", arguments)])?;
    let (status, text) = snapshot(&pod, &["create", "one"])?;
    ensure!(status == Some(0), "{text}");
    let copy = at("windows.snapshots/one/data.qcow2");
    qemu(&["check"], std::slice::from_ref(&copy))?;
    let same = qemu(&["compare", "-f", "qcow2", "-F", "raw"], &[copy, raw])?;
    ensure!(same.contains("identical"), "{same}");
    stops(&mut pod)
}

#[test]
fn a_snapshot_with_memory_continues_where_it_was() -> Result<()> {
    if !runs_here("snapshots with memory") {
        return Ok(());
    }
    let Some(volume) = Volume::new("xfs")? else { return Ok(()) };
    fs::write(volume.path().join("key"), "a long passphrase")?;
    for (name, key) in [("plain", ""), ("encrypted", "/mnt/key")] {
        continues_from_memory(&volume, name, key).context(name)?;
    }
    Ok(())
}

/// A pod with this key takes a snapshot with memory, and goes on from it twice.
fn continues_from_memory(volume: &Volume, name: &str, key: &str) -> Result<()> {
    let place = &volume.place;
    let words = [&DISK[..], &[("SNAPSHOT_KEY_FILE", key)]].concat();
    volume.fill(16, 6)?;
    let mut pod = probe(place, &words)?;
    pod.says("the probe found", 1)?;
    types(place, "then")?;
    let before = page(place)?;
    let generation = state(place)?["vmgenid"].clone();
    if !key.is_empty() {
        let (status, text) = snapshot(&pod, &["create", name, "--memory"])?;
        ensure!(
            status == Some(1) && text.contains("with the SNAPSHOT_KEY_FILE of the pod"),
            "{text}"
        );
    }
    let (variable, program) = (format!("SNAPSHOT_KEY_FILE={key}"), transom().display().to_string());
    let create = ["env", &variable, &program, "snapshot", "create", name, "--memory"];
    let (status, text) = beside(&pod, &create)?;
    let start = format!("{name}: with memory. The guest stood");
    ensure!(status == Some(0) && text.starts_with(&start), "{text}");
    let header =
        fs::read(volume.path().join(format!("windows.snapshots/{name}/memory/machine.json")))?;
    let encrypted = header.windows(12).any(|it| it == b"\"encryption\"");
    ensure!(encrypted != key.is_empty(), "encrypted: {encrypted}");
    reacts(place, "now", &before)?;
    stops(&mut pod)?;
    volume.fill(16, 7)?;
    said(&mut volume.off(&["restore", name]))?;
    for _ in 0..2 {
        let mut pod = place.start("", &[&[PROBE], &words[..]].concat())?;
        pod.says(CONTINUES, 1)?;
        ensure!(page(place)? == before, "another picture");
        ensure!(state(place)?["vmgenid"] != generation, "the guest believes to be the same");
        reacts(place, "x", &before)?;
        stops(&mut pod)?;
        // It can be restored again.
        said(&mut volume.off(&["restore", name]))?;
    }
    // Its memory fits no other disk.
    let refused = volume.off(&["restore", name]).output()?;
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(text.contains("--drop-suspended"), "{text}");
    said(&mut volume.off(&["restore", name, "--drop-suspended"]))?;
    Ok(fs::remove_dir_all(volume.path().join("windows.suspended"))?)
}

/// Memory that did not change costs no blocks on a file system that can share them.
#[test]
fn a_second_snapshot_of_memory_shares_the_blocks_of_the_first() -> Result<()> {
    if !runs_here("second snapshots of memory") {
        return Ok(());
    }
    for kind in ["xfs", "btrfs"] {
        let Some(volume) = Volume::new(kind)? else { continue };
        let [control, first, second] = ["vmm.sock", "1", "2"].map(|it| volume.path().join(it));
        let start = |words: &[&str]| {
            let control = control.display().to_string();
            Running::vmm(&[&["run", "--control", &control], words].concat())
        };
        let restore = |dir: &Path, how| start(&["--restore", &format!("{}{how}", dir.display())]);
        let cmdline = "checks=none fill=128 then=halt";
        let mut machine = start(&["--memory", "256M", "--cmdline", cmdline])?;
        machine.says("\"probe\"", 1)?;
        save(&mut connect(&control)?, &first, Then::Quit, None)?;
        ensure!(machine.wait(PATIENCE)? == 0, "{kind}: {}", machine.stderr.text());
        let mut machine = restore(&first, "")?;
        let mut client = connect(&control)?;
        client.await_check(None)?;
        let before = free_space(&volume)?;
        save(&mut client, &second, Then::Quit, None)?;
        ensure!(machine.wait(PATIENCE)? == 0, "{kind}: {}", machine.stderr.text());
        let taken = before.saturating_sub(free_space(&volume)?) / MIB;
        ensure!(before > 128 * MIB, "{kind}: {before} bytes are free");
        let size = fs::metadata(second.join("memory"))?.blocks() * 512 / MIB;
        say!("{kind}: a second snapshot of {size} MiB takes {taken} MiB");
        ensure!(size >= 128 && taken < 32, "{kind}: {taken} MiB for {size}");
        let mut machine = restore(&second, ",check=first")?;
        let ended = connect(&control)?.ask(&control::Command::Quit);
        let status = machine.wait(PATIENCE)?;
        ensure!(ended.is_ok() && status == 0, "{kind}: {}", machine.stderr.text());
    }
    Ok(())
}

fn free_space(volume: &Volume) -> Result<u64> {
    let found = rustix::fs::statvfs(volume.path())?;
    // Not `f_bavail`: Btrfs changes it by more when it makes room for its own data.
    Ok(found.f_bfree * found.f_frsize)
}

#[test]
fn killed_snapshots_leave_a_running_machine_and_nothing_else() -> Result<()> {
    if !runs_here("killed snapshots") {
        return Ok(());
    }
    let Some(volume) = Volume::new("ext4")? else { return Ok(()) };
    volume.fill(320, 8)?;
    let mut pod = probe(&volume.place, &DISK)?;
    let transom = transom().display().to_string();
    let mut unfinished = 0;
    for round in 0..KILLS {
        let name = format!("k{round}");
        let target = pod.pid().as_raw_nonzero().to_string();
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &target, "--", &transom, "snapshot", "create", &name]);
        command.arg("--pause").env("STORAGE", "/mnt").stdout(Stdio::null()).stderr(Stdio::null());
        let mut client = command.spawn()?;
        // Before that, the guest's agent is asked, which it does not have.
        until("the machine is not held", || {
            Ok(client.try_wait()?.is_some() || state(&volume.place)?["state"] == "paused")
        })?;
        sleep(Duration::from_millis(20) * u32::try_from(round)?);
        client.kill()?;
        client.wait()?;
        until("the machine does not go on", || Ok(state(&volume.place)?["state"] == "running"))?;
        unfinished += usize::from(volume.list()?.as_array().context("a list")?.is_empty());
        if volume.names()?.contains(&name) {
            said(&mut volume.off(&["delete", &name]))?;
        }
    }
    ensure!(unfinished > 0, "no client was killed in time");
    // One is killed with its pod, which removes it at its next start.
    fs::create_dir(volume.path().join("windows.snapshots/.part-left"))?;
    stops(&mut pod)?;
    stops(&mut probe(&volume.place, &DISK)?)?;
    ensure!(volume.names()? == [".lock"], "{:?}", volume.names());
    Ok(())
}

#[test]
fn a_killed_restore_is_undone_or_finished_by_the_next_start() -> Result<()> {
    if !runs_here("killed restores") {
        return Ok(());
    }
    let Some(volume) = Volume::new("ext4")? else { return Ok(()) };
    volume.fill(320, 9)?;
    said(&mut volume.off(&["create", "one"]))?;
    let disk = volume.path().join("data.img");
    let journal = volume.path().join("windows.restoring");
    let [old, new] = ["old", "new"].map(|name| volume.path().with_file_name(name));
    fs::copy(&disk, &old)?;
    let change =
        || Ok::<_, Error>(File::options().write(true).open(&disk)?.write_all_at(b"changed", 9)?);
    let start = Instant::now();
    said(&mut volume.off(&["restore", "one"]))?;
    let time = start.elapsed();
    change()?;
    fs::copy(&disk, &new)?;
    let mut counts = [0, 0];
    for round in 0..KILLS {
        change()?;
        let mut client = volume.off(&["restore", "one"]).stderr(Stdio::null()).spawn()?;
        if round < KILLS - 1 {
            sleep(time * u32::try_from(round)? / u32::try_from(KILLS)?);
        } else {
            // From the journal on, it is finished.
            while !journal.exists() && client.try_wait()?.is_none() {
                sleep(Duration::from_micros(100));
            }
        }
        client.kill()?;
        client.wait()?;
        stops(&mut probe(&volume.place, &DISK)?)?;
        let restored = same(&disk, &old)?;
        ensure!(restored || same(&disk, &new)?, "{round}: the disk is neither");
        counts[usize::from(restored)] += 1;
        ensure!(volume.names()? == [".lock", "one"], "{round}: {:?}", volume.names());
    }
    ensure!(counts.iter().all(|count| *count > 0), "one outcome is not tested: {counts:?}");
    Ok(())
}

/// A signal that stops the pod ends a snapshot, not the other way round.
#[test]
fn a_pod_stops_during_a_snapshot() -> Result<()> {
    if !runs_here("pods that stop during a snapshot") {
        return Ok(());
    }
    let Some(volume) = Volume::new("ext4")? else { return Ok(()) };
    volume.fill(512, 10)?;
    let mut pod = probe(&volume.place, &DISK)?;
    let transom = transom().display().to_string();
    let target = pod.pid().as_raw_nonzero().to_string();
    let words = ["--mount", "--target", &target, "--", &transom, "snapshot", "create", "one"];
    let mut command = Command::new("nsenter");
    command.args(words).arg("--pause").env("STORAGE", "/mnt");
    let mut client = Running::spawn(&mut command)?;
    until("the machine is not held", || Ok(state(&volume.place)?["state"] == "paused"))?;
    stops(&mut pod)?;
    let status = client.wait(PATIENCE)?;
    ensure!(status != 0, "{}", client.stdout.text());
    ensure!(volume.names()? == [".lock"], "{:?}", volume.names());
    Ok(())
}
