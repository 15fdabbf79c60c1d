//! Pods over one base, the volume of a sealed pod, which is only read: each has its own changes and
//! its own identity. An ephemeral pod leaves no changes.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use transom_tests::image::qemu_img;
use transom_tests::lab;
use transom_tests::program::memory_kib;
use transom_tests::say;

use super::pod::{BOOT, DiskOf, Pod, Profile};
use super::town::{SOON, Town};
use super::{BUDGET, RESTRICTED, agent, idle, suspend};

/// Statuses of the pod's errors.
const DISK: i32 = 73;
const STATE: i32 = 66;

const SEALED: Profile = Profile {
    name: "sealed",
    last: 16,
    words: &["NETWORK=user", "USER_PORTS=2222", "DISK_TYPE=blk", agent::HEARS],
    ..RESTRICTED
};
/// Like RESTRICTED, over a base.
const KEEPS: Profile = Profile {
    name: "keeps",
    last: 13,
    disk: DiskOf::Base,
    words: &[
        "NETWORK=user",
        "HOST=ADA",
        "USER_PORTS=2222",
        "DISK_TYPE=blk",
        "BASE=/base",
        idle::IDLE,
    ],
    ..RESTRICTED
};
const PASSES: Profile = Profile {
    name: "passes",
    last: 15,
    // The names of both kinds of a base.
    words: &[
        "NETWORK=user",
        "USER_PORTS=2222",
        "DISK_TYPE=blk",
        "BASE=/base/data.img",
        "EPHEMERAL=Y",
        "BOOT_MODE=windows_secure",
    ],
    ..KEEPS
};

/// A snapshot with memory as the base.
const READY: &str = "BASE=/base/windows.snapshots/ready";
/// Its clones go on in its memory.
const GOLDEN: Profile = Profile { name: "golden", last: 17, ..SEALED };
const FIRST: Profile = Profile {
    name: "first",
    last: 18,
    disk: DiskOf::Base,
    words: &[
        "NETWORK=user",
        "USER_PORTS=2222",
        "DISK_TYPE=blk",
        agent::HEARS,
        READY,
        suspend::WORD,
    ],
    ..RESTRICTED
};
const SECOND: Profile = Profile {
    name: "second",
    last: 19,
    words: &[
        "NETWORK=user",
        "USER_PORTS=2222",
        "DISK_TYPE=blk",
        agent::HEARS,
        READY,
        "EPHEMERAL=Y",
    ],
    ..FIRST
};
/// The identity of the guest's boot, the serial number of its disk, and a file in its memory.
const MEMORY: &str = "cat /proc/sys/kernel/random/boot_id; cat /sys/block/vda/serial; md5sum /data";
const GOES_ON: &str = "Windows continues where the machine of BASE was";

const IDENTITY: &str = "cat /sys/class/dmi/id/product_uuid; cat /sys/class/net/eth0/address";
/// In MiB. The base has only zeros there.
const PLACES: [u32; 2] = [200, 65];

pub(crate) fn share_a_base() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut others = vec![seals(&town)?];
    let base = town.folder.path().join("base/data.img");
    let before = last_change(&base)?;
    let mut keeps = Pod::start(&town, &KEEPS)?;
    // `share_a_memory` has an ephemeral pod, too.
    if lab::everything() {
        others.push(passes(&town)?);
    }
    works(&town, &mut keeps)?;
    let identity = keeps.guest(&town, IDENTITY)?;
    for other in &others {
        let differ = identity.lines().zip(other.lines()).all(|(one, other)| one != other);
        ensure!(differ && identity.lines().count() == 2, "{identity}, and {other}");
    }
    let idle = idle::serves_first_connections(&town, &mut keeps, "ADA", idle::USED);
    idle.with_context(|| keeps.log())?;
    stops(&mut keeps)?;
    // Its base has another path here.
    let disk = keeps.volume.join("data.qcow2");
    let alone = json!({ "driver": "qcow2", "backing": null, "file.filename": disk });
    qemu_img(&["check", "--force-share"], Path::new(&format!("json:{alone}")), &[])?;
    let bytes = bytes_of(&keeps.volume)?;
    say!("{}: {} KiB on the volume", keeps.name, bytes >> 10);
    ensure!(bytes < 8 << 20, "{bytes} bytes on the volume");
    // `share_a_memory` starts a clone from its own disk, too.
    if lab::everything() {
        starts_again(&town, &mut keeps, &identity)?;
    }
    ensure!(last_change(&base)? == before, "the base has changed");
    // Another base would mix two systems.
    fs::write(base.with_file_name("windows.sealed"), "another one")?;
    keeps.again(NOTHING, NOTHING)?;
    let (status, log) = (keeps.ends(BUDGET)?, keeps.log());
    ensure!(status == DISK && log.contains("has changed since"), "{status}: {log}");
    Ok(())
}

fn starts_again(town: &Town, keeps: &mut Pod, identity: &str) -> anyhow::Result<()> {
    keeps.again(NOTHING, NOTHING)?;
    keeps.says("the guest serves", 1, BOOT)?;
    reads(town, keeps, KEEPS.name)?;
    let again = keeps.guest(town, IDENTITY)?;
    ensure!(again == identity, "{identity}, then {again}");
    stops(keeps)
}

/// The identity of the guest of an ephemeral pod over the base.
fn passes(town: &Town) -> anyhow::Result<String> {
    let mut pod = Pod::start(town, &PASSES)?;
    works(town, &mut pod)?;
    let identity = pod.guest(town, IDENTITY)?;
    leaves_nothing(&pod).with_context(|| pod.log())?;
    Ok(identity)
}

fn works(town: &Town, pod: &mut Pod) -> anyhow::Result<()> {
    pod.says("the guest serves", 1, BOOT)?;
    write(town, pod, pod.name)?;
    reads(town, pod, pod.name)
}

/// Pods that begin where another one was: at once, with its memory, which they share.
pub(crate) fn share_a_memory() -> anyhow::Result<()> {
    let town = Town::new()?;
    let before = keeps_a_memory(&town)?;
    let disk = town.folder.path().join("base/windows.snapshots/ready/data.img");
    let base = last_change(&disk)?;
    let [mut first, mut second] = [Pod::start(&town, &FIRST)?, Pod::start(&town, &SECOND)?];
    for pod in [&mut first, &mut second] {
        pod.says(GOES_ON, 1, SOON)?;
        let (after, age) = (pod.guest(&town, MEMORY)?, pod.age());
        ensure!(after == before, "{before}, then {after}: {}", pod.log());
        let own = memory_kib(pod.processes()?[1], "Private_Dirty")?;
        say!("{}: its guest answers {age:.1} s after the start of runc, {own} KiB", pod.name);
        write(&town, pod, pod.name)?;
        reads(&town, pod, pod.name)?;
    }
    reads(&town, &first, FIRST.name)?;
    stops(&mut second)?;
    has_no_disk(&second)?;
    stops(&mut first)?;
    ensure!(first.log().contains("Windows is suspended"), "{}", first.log());
    // It continues where it was itself.
    first.again(NOTHING, NOTHING)?;
    first.says("Windows continues where it was suspended", 1, SOON)?;
    ensure!(first.guest(&town, MEMORY)? == before, "another memory: {}", first.log());
    reads(&town, &first, FIRST.name)?;
    kills(&first)?;
    first.ends(BUDGET)?;
    // From now on it has a disk of its own.
    first.again(NOTHING, NOTHING)?;
    first.says("the guest serves", 1, BOOT)?;
    reads(&town, &first, FIRST.name)?;
    let after = first.guest(&town, IDENTITY)?;
    ensure!(!before.is_empty() && first.said(GOES_ON) == 0, "{}", first.log());
    say!("{}: {}", first.name, after.replace('\n', " "));
    stops(&mut first)?;
    ensure!(last_change(&disk)? == base, "the base has changed");
    // Another machine than that of the base.
    let other = Profile { name: "other", last: 20, words: OTHER, ..FIRST };
    let said = Pod::start(&town, &other).err().map(|error| format!("{error:#}"));
    let said = said.context("another machine goes on")?;
    let sentence = "its machine cannot go on here";
    ensure!(said.contains(sentence) && said.contains("the snapshot has"), "{said}");
    Ok(())
}

/// Devices that the machine of the base does not have.
const OTHER: &[&str] = &["NETWORK=user", "USER_PORTS=2222", "DISK_TYPE=nvme", agent::HEARS, READY];

/// Makes a base with memory of a pod. Returns what its guest has in its memory.
fn keeps_a_memory(town: &Town) -> anyhow::Result<String> {
    let mut pod = Pod::start(town, &GOLDEN)?;
    pod.says("the guest's agent answers", 1, BOOT)?;
    pod.guest(town, "head -c 1000000 /dev/urandom > /data")?;
    // QEMU's agent sets no clock without this program, which would set the real-time clock, too.
    pod.guest(town, "printf '#!/bin/sh\\n' > /sbin/hwclock && chmod +x /sbin/hwclock")?;
    let memory = pod.guest(town, MEMORY)?;
    ensure!(memory.lines().count() == 2, "{memory}");
    let said = pod.transom(&["snapshot", "create", "ready", "--memory", "--pause"])?;
    let text = [said.stdout, said.stderr].concat();
    ensure!(said.status.success(), "{}: {}", String::from_utf8_lossy(&text), pod.log());
    stops(&mut pod)?;
    fs::rename(&pod.volume, town.folder.path().join("base"))?;
    Ok(memory)
}

/// When a file or its content was changed, in seconds and nanoseconds, and its length.
fn last_change(path: &Path) -> anyhow::Result<[i64; 3]> {
    let file = fs::metadata(path).with_context(|| path.display().to_string())?;
    Ok([file.ctime(), file.ctime_nsec(), i64::try_from(file.len())?])
}

/// Kills an ephemeral pod. Neither the disk nor the firmware's variables are kept.
fn leaves_nothing(pod: &Pod) -> anyhow::Result<()> {
    ensure!(pod.said("Secure Boot: enabled") == 1, "Secure Boot is off");
    kills(pod)?;
    let firmware = lab::asset("OVMF_CODE_12")?;
    let kept = fs::read(pod.volume.join("windows_secure.vars"))?;
    let new = fs::read(firmware.with_file_name("OVMF_VARS_4M.ms.fd"))?;
    ensure!(kept == new, "the firmware's variables were kept");
    has_no_disk(pod)
}

fn has_no_disk(pod: &Pod) -> anyhow::Result<()> {
    let names = fs::read_dir(&pod.volume)?.map(|it| Ok(it?.file_name()));
    let names: Vec<_> = names.collect::<std::io::Result<_>>()?;
    let disks = names.iter().any(|it| it.to_string_lossy().contains("data"));
    let bytes = bytes_of(&pod.volume)?;
    ensure!(!disks && bytes < 2 << 20, "{bytes} bytes in {names:?}");
    Ok(())
}

/// Bytes that the files of a volume take.
fn bytes_of(volume: &Path) -> anyhow::Result<u64> {
    let blocks = fs::read_dir(volume)?.map(|it| Ok(it?.metadata()?.blocks()));
    Ok(blocks.sum::<std::io::Result<u64>>()? * 512)
}

/// Makes a base of a pod, whose own machine does not start any more. Returns its guest's identity.
fn seals(town: &Town) -> anyhow::Result<String> {
    let mut pod = Pod::start(town, &SEALED)?;
    pod.says("the guest's agent answers", 1, BOOT)?;
    let identity = pod.guest(town, IDENTITY)?;
    pod.guest(town, "mkdir -p /etc/ssh && echo key > /etc/machine-id")?;
    let said = pod.transom(&["seal", "--wait", "300"])?;
    let text = [said.stdout, said.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    ensure!(said.status.success() && text.contains("sealed: "), "{text}: {}", pod.log());
    ensure!(text.contains("the guest of a pod gives up its identity"), "{text}");
    let status = pod.ends(BUDGET)?;
    ensure!(status == 0 && pod.log().contains("Windows is off"), "{status}: {}", pod.log());
    pod.again(NOTHING, NOTHING)?;
    let status = pod.ends(BUDGET)?;
    ensure!(status == STATE && pod.log().contains("is sealed"), "{status}: {}", pod.log());
    let firmware = lab::asset("OVMF_CODE_12")?;
    let new = fs::read(firmware.with_file_name("OVMF_VARS_4M.fd"))?;
    ensure!(fs::read(pod.volume.join("windows.vars"))? != new, "the firmware has written nothing");
    fs::rename(&pod.volume, town.folder.path().join("base"))?;
    Ok(identity)
}

/// No variables of a pod.
const NOTHING: &[&str] = &[];

/// Writes a text to the guest's disk.
fn write(town: &Town, pod: &Pod, text: &str) -> anyhow::Result<()> {
    for at in PLACES {
        let dd = format!("dd of=/dev/vda bs=1M seek={at} conv=fsync,notrunc");
        let said = pod.guest(town, &format!("[ -b /dev/vda ] && printf {text} | {dd}"))?;
        ensure!(said.contains("0+1 records out"), "{said}");
    }
    Ok(())
}

fn reads(town: &Town, pod: &Pod, text: &str) -> anyhow::Result<()> {
    for at in PLACES {
        let length = text.replace("\\0", "0").len();
        let dd =
            format!("dd if=/dev/vda bs=1 skip=$(({at} * 1048576)) count={length} 2> /dev/null");
        let compared = format!("printf '{text}' > /wanted; {dd} | cmp - /wanted && echo same");
        let said = pod.guest(town, &compared)?;
        ensure!(said.trim() == "same", "at {at} MiB: {said}");
    }
    Ok(())
}

fn kills(pod: &Pod) -> anyhow::Result<()> {
    let first = i32::try_from(pod.processes()?[0])?;
    Ok(kill_process(Pid::from_raw(first).context("a number")?, Signal::KILL)?)
}

fn stops(pod: &mut Pod) -> anyhow::Result<()> {
    pod.signal(Signal::TERM)?;
    let status = pod.ends(BUDGET).with_context(|| pod.log())?;
    ensure!(status == 143, "{status}: {}", pod.log());
    Ok(())
}
