//! Disks of every kind keep every byte: the probe writes a pattern, and reads it back.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;
use transom_tests::image::qemu_img;
use transom_tests::program::{PATIENCE, Running, findings, report};

use crate::runs_here;

const SIZE: u64 = 32 << 20;
/// Queue depth, block size, and bytes to write, chosen to take a moment.
const CASES: [(u64, u64, u64); 6] = [
    (1, 512, 128 << 10),
    (32, 512, 1 << 20),
    (1, 4096, 1 << 20),
    (32, 4096, 8 << 20),
    (1, 128 << 10, 8 << 20),
    (32, 128 << 10, SIZE),
];

/// Runs the probe with these words for the disk until it powers off, and returns its report.
fn run(disk: &str, words: &str) -> Value {
    let words = format!("checks=none {words} then=poweroff");
    let mut machine = Running::vmm(&["run", "--device", disk, "--cmdline", &words]).expect("vmm");
    let status = machine.wait(PATIENCE).expect("an end");
    let output = machine.stdout.text();
    assert_eq!(status, 0, "{disk}: {words}: {output}{}", machine.stderr.text());
    report(&output).expect("a report")
}

fn raw(path: &Path) {
    File::create(path).and_then(|file| file.set_len(SIZE)).expect("a disk");
}

fn qcow2(path: &Path, more: &[&str]) {
    let size = SIZE.to_string();
    let words = [&["create", "-q", "-f", "qcow2"], more].concat();
    qemu_img(&words, path, &[&size]).expect("an image");
}

/// Writes and verifies each case, over the data of the case before.
fn write_and_verify(disk: &str) {
    let mut words = String::new();
    for (seed, (depth, block, span)) in CASES.into_iter().enumerate() {
        for mode in ["write", "verify"] {
            let way = format!("seed={seed},depth={depth},block={block},span={span}");
            write!(words, "disk={mode},{way} ").expect("a String takes everything");
        }
    }
    let report = run(disk, &words);
    let found = findings(&report, "disk");
    assert_eq!(found.len(), 2 * CASES.len(), "{disk}: {report}");
    for (found, (depth, block, span)) in found.chunks(2).zip(CASES) {
        for found in found {
            assert_eq!(found["verdict"], "pass", "{disk}: {found}");
            assert_eq!((&found["depth"], &found["block"]), (&depth.into(), &block.into()));
            assert_eq!(found["requests"], span / block, "{disk}: {found}");
            assert_eq!(found["bytes"], span, "{disk}: {found}");
            assert_eq!((&found["mismatches"], &found["errors"]), (&0.into(), &0.into()));
            assert!(found["microseconds"].as_u64() > Some(0), "{disk}: {found}");
        }
        assert_eq!((&found[0]["mode"], &found[1]["mode"]), (&"write".into(), &"verify".into()));
    }
}

/// Verifies the last case again after a restart.
fn verify_again(disk: &str) -> Value {
    let (depth, block, span) = CASES[CASES.len() - 1];
    let seed = CASES.len() - 1;
    run(disk, &format!("disk=verify,seed={seed},depth={depth},block={block},span={span}"))
}

/// On a raw file, in a qcow2 image, and in an image with a backing file.
#[test]
fn every_written_byte_survives_a_restart() {
    if !runs_here("every_written_byte_survives_a_restart") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    raw(&path("disk.img"));
    raw(&path("base.img"));
    qcow2(&path("disk.qcow2"), &[]);
    qcow2(&path("top.qcow2"), &["-b", "base.img", "-F", "raw"]);
    for name in ["disk.img", "disk.qcow2", "top.qcow2"] {
        // Each controller reads the data that the other one wrote.
        for [one, other] in
            [["virtio-blk", "nvme"], ["nvme", "ahci-disk"], ["ahci-disk", "virtio-blk"]]
        {
            let disk = |kind| format!("{kind},path={}", path(name).display());
            write_and_verify(&disk(one));
            let report = verify_again(&disk(other));
            assert_eq!(report["ok"], true, "{name}: {report}");
            assert_eq!(findings(&report, "disk")[0]["kind"], other, "{report}");
        }
    }
    let base = fs::read(path("base.img")).expect("a file");
    assert!(base.iter().all(|&byte| byte == 0), "a backing file is never written");
}

#[test]
fn disk_completions_wake_a_halted_processor() {
    if !runs_here("disk_completions_wake_a_halted_processor") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.img");
    raw(&path);
    for kind in ["virtio-blk", "nvme", "ahci-disk"] {
        let disk = format!("{kind},path={}", path.display());
        let mut words = String::new();
        for way in ["depth=1,span=1M", "depth=16,span=4M"] {
            for mode in ["write", "verify"] {
                let word = format!("disk={mode},seed=5,{way},wait=interrupt");
                write!(words, "{word} ").expect("a String takes everything");
            }
        }
        // A driver that polls gets no interrupts.
        let report = run(&disk, &format!("{words} disk=verify,seed=5,span=4M"));
        let found = findings(&report, "disk");
        assert_eq!((&report["ok"], found.len()), (&true.into(), 5), "{report}");
        for found in &found[..4] {
            assert!(found["interrupts"].as_u64() > Some(0), "{found}");
            assert_eq!(found["lost_interrupts"], 0, "{found}");
        }
        assert!(found[4]["interrupts"].is_null(), "{}", found[4]);
    }
}

/// Registers may be anywhere in physical memory, as firmware may place them; doorbells and
/// interrupts still work. Where no processor can reach them, there is no disk.
#[test]
fn disks_work_with_registers_at_any_address() {
    if !runs_here("disks_work_with_registers_at_any_address") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.img");
    raw(&path);
    let way = "seed=7,depth=16,span=1M";
    for kind in ["virtio-blk", "nvme"] {
        let disk = format!("{kind},path={}", path.display());
        let there = |place: u64| {
            let ways = format!("disk=write,{way} disk=verify,{way},wait=interrupt");
            run(&disk, &format!("bars={place} {ways}"))
        };
        let report = there(40 << 30);
        let bits = findings(&report, "cpu")[0]["physical_bits"].as_u64().expect("a number");
        // In the upper half of physical memory, which may exceed the linear address space.
        for report in [report, there(1 << (bits - 1))] {
            assert_eq!(report["ok"], true, "{disk}: {report}");
            assert!(findings(&report, "bars")[0]["moved"].as_u64() > Some(0), "{report}");
            let found = findings(&report, "disk");
            assert_eq!((found.len(), &found[1]["requests"]), (2, &256.into()), "{report}");
            assert!(found[1]["interrupts"].as_u64() > Some(0), "{report}");
        }
        let report = there(1 << bits);
        assert_eq!(findings(&report, "bars")[0]["verdict"], "pass", "{report}");
        assert_eq!(findings(&report, "disk")[0]["kind"], "none that works", "{report}");
    }
}

#[test]
fn an_overlay_keeps_every_byte_until_the_machine_ends() {
    if !runs_here("an_overlay_keeps_every_byte_until_the_machine_ends") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.img");
    raw(&path);
    let disk = format!("virtio-blk,path={},overlay=on", path.display());
    write_and_verify(&disk);
    let report = verify_again(&disk);
    let found = findings(&report, "disk")[0];
    assert_eq!((&report["ok"], &found["mismatches"]), (&false.into(), &(SIZE / 8).into()));
}

#[test]
fn a_byte_changed_on_the_host_is_detected() {
    if !runs_here("a_byte_changed_on_the_host_is_detected") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.img");
    raw(&path);
    let disk = format!("virtio-blk,path={}", path.display());
    let way = "seed=9,depth=8,block=4096,span=1M";
    let report = run(&disk, &format!("disk=write,{way} disk=verify,{way}"));
    assert_eq!(report["ok"], true, "{report}");
    let file = File::options().read(true).write(true).open(&path).expect("the disk");
    let mut byte = [0];
    for offset in [0x12343_u64, 0xabcd1] {
        file.read_exact_at(&mut byte, offset).expect("a byte");
        file.write_all_at(&[!byte[0]], offset).expect("a byte");
    }
    let report = run(&disk, &format!("disk=verify,{way}"));
    let found = findings(&report, "disk")[0];
    assert_eq!((&report["ok"], &found["verdict"]), (&false.into(), &"fail".into()));
    assert_eq!((&found["mismatches"], &found["first_bad"]), (&2.into(), &"0x12340".into()));
}

#[test]
fn invalid_disk_arguments_fail() {
    if !runs_here("invalid_disk_arguments_fail") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.img");
    raw(&path);
    let disk = |more: &str| format!("virtio-blk,path={}{more}", path.display());
    for (more, words) in [
        ("", "disk=write,dept=3"),
        ("", "disk=wipe"),
        ("", "disk=write,depth=65"),
        ("", "disk=write,block=1000"),
        ("", "disk=write,span=33M"),
        (",sector=4096", "disk=write,block=512"),
    ] {
        let report = run(&disk(more), words);
        let found = findings(&report, "disk")[0];
        assert_eq!((&report["ok"], &found["verdict"]), (&false.into(), &"fail".into()), "{words}");
        assert!(found["wants"].is_string(), "{words}: {found}");
    }
    // A read-only disk fails each write.
    let report = run(&disk(",readonly=on"), "disk=write,span=64K disk=read,span=64K");
    let found = findings(&report, "disk");
    assert_eq!((&found[0]["verdict"], &found[0]["errors"]), (&"fail".into(), &16.into()));
    assert_eq!(found[1]["verdict"], "pass", "{report}");
}
