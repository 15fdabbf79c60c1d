//! A process that is killed at any moment loses no data that was reported to its guest as durable.
//!
//! The probe writes records and reports on the debug console which ones are durable. The file
//! behind that console outlives the process. The next run checks all of these records and writes
//! more.

use std::fs::{self, File};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use host::testutil::noise::Noise;
use rustix::process::Signal;
use tempfile::TempDir;
use transom_tests::image::{check, qemu_img};
use transom_tests::program::{PATIENCE, Running, findings, report};

use crate::runs_here;

pub(crate) const SIZE: u64 = 96 << 20;
/// The exit status of a killed process: 128 + SIGKILL.
const KILLED: i32 = 137;
/// Kills of one image before a new one replaces it. New images grow most.
pub(crate) const KILLS_PER_IMAGE: u64 = 10;
/// The longest time that a machine writes before it is killed, in microseconds.
const MAX_WRITE_US: u64 = 60_000;

pub(crate) fn kills() -> u64 {
    let all = std::env::var("TRANSOM_TESTS").is_ok_and(|which| which == "all");
    if all { 200 } else { 20 }
}

/// A disk with records, used by several machines one after the other.
pub(crate) struct Recorded {
    pub(crate) disk: PathBuf,
    pub(crate) controller: &'static str,
    /// Further options of the disk, each after a comma.
    pub(crate) options: &'static str,
    /// Seed, block size and span of all records.
    pub(crate) layout: String,
    /// The number of the last durable record.
    pub(crate) durable: u64,
    /// The number of kills that left leaked clusters in the image.
    pub(crate) leaks: u64,
    folder: TempDir,
}

impl Recorded {
    pub(crate) fn new(disk: PathBuf, random: &mut Noise) -> Self {
        let block = random.choose(&[512, 4096, 12 << 10, 40 << 10]);
        let layout = format!("seed={},block={block},span={}", random.below(1000), block * 2048);
        let folder = tempfile::tempdir().expect("a folder");
        let (durable, leaks, options) = (0, 0, "");
        let controller = random.choose(&["virtio-blk", "nvme", "ahci-disk"]);
        if disk.extension().is_some_and(|it| it == "qcow2") {
            let clusters = format!("cluster_size={}", random.choose(&["4k", "64k"]));
            let words = ["create", "-q", "-f", "qcow2", "-o", &clusters];
            qemu_img(&words, &disk, &[&SIZE.to_string()]).expect("an image");
        } else {
            File::create(&disk).and_then(|file| file.set_len(SIZE)).expect("a disk");
        }
        Self { disk, controller, options, layout, durable, leaks, folder }
    }

    fn console_file(&self) -> PathBuf {
        self.folder.path().join("console")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    fn start(&self, words: &str) -> Running {
        let (controller, options) = (self.controller, self.options);
        let disk = format!("{controller},path={}{options}", self.disk.display());
        let console = format!("debugcon,to=file:{}", self.console_file().display());
        let durable = self.durable;
        let recall = format!("disk=recall,{},durable={durable},depth=32", self.layout);
        let words = format!("checks=none {recall} {words}");
        let socket = self.socket().display().to_string();
        let options = ["--control", &socket, "--device", &disk, "--device", &console];
        let words = [&["run", "--cmdline", &words], &options[..]].concat();
        let mut machine = Running::vmm(&words).expect("vmm");
        machine.says("mode=recall", 1).expect("a check of the records");
        let output = machine.stdout.text();
        let line = output.lines().find(|line| line.contains("mode=recall")).expect("a line");
        assert!(line.starts_with("pass"), "{}: {line}", self.layout);
        machine
    }

    /// Starts a machine that checks all records, and then writes more with random parameters.
    pub(crate) fn write(&self, random: &mut Noise) -> Running {
        let (depth, every) = (random.choose(&[1, 4, 32]), random.choose(&[1, 3, 8, 50]));
        let through = u8::from(random.below(4) == 0);
        self.record(&format!("depth={depth},every={every},through={through}"))
    }

    /// Like `write`, with the given parameters.
    pub(crate) fn record(&self, way: &str) -> Running {
        let durable = self.durable;
        self.start(&format!("disk=record,{},durable={durable},{way}", self.layout))
    }

    /// The last record reported as durable. Lines without a line end do not count.
    pub(crate) fn last_durable(&self) -> u64 {
        let reports = fs::read_to_string(self.console_file()).unwrap_or_default();
        let whole = reports.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().last().map_or(self.durable, |line| line.parse().expect("a number"))
    }

    /// Waits until more than `than` records are durable.
    pub(crate) fn wait_for_more(&self, than: u64) {
        let deadline = Instant::now() + PATIENCE;
        while self.last_durable() <= than {
            assert!(Instant::now() < deadline, "{}: {than} is the last", self.disk.display());
            sleep(Duration::from_millis(2));
        }
    }

    /// Kills the machine, and returns the number of records that became durable in it.
    pub(crate) fn kill(&mut self, mut machine: Running) -> u64 {
        machine.signal(Signal::KILL).expect("a process");
        let status = machine.wait(PATIENCE).expect("an end");
        assert_eq!(status, KILLED, "{}{}", machine.stdout.text(), machine.stderr.text());
        let last = self.last_durable();
        assert!(last >= self.durable, "{last} after {}", self.durable);
        if self.disk.extension().is_some_and(|it| it == "qcow2") {
            let leaks = check(&self.disk).expect("a sound image");
            self.leaks += u64::from(leaks > 0);
        }
        last - std::mem::replace(&mut self.durable, last)
    }

    /// Checks the records a last time, with a machine that ends by itself.
    pub(crate) fn end(self) {
        let mut machine = self.start("then=poweroff");
        assert_eq!(machine.wait(PATIENCE).expect("an end"), 0);
        let report = report(&machine.stdout.text()).expect("a report");
        let found = findings(&report, "disk")[0];
        assert_eq!((&report["ok"], &found["durable"]), (&true.into(), &self.durable.into()));
        if self.disk.extension().is_some_and(|it| it == "qcow2") {
            // The leaked clusters were found and freed.
            assert_eq!(check(&self.disk).expect("a sound image"), 0);
        }
    }
}

fn kill_often(name: &str, seed: u64) {
    let (mut random, mut records, mut empty) = (Noise::new(seed), 0, 0);
    let start = Instant::now();
    for _ in 0..kills() / KILLS_PER_IMAGE {
        let folder = tempfile::tempdir().expect("a folder");
        let mut disk = Recorded::new(folder.path().join(name), &mut random);
        for _ in 0..KILLS_PER_IMAGE {
            disk.controller = random.choose(&["virtio-blk", "nvme", "ahci-disk"]);
            let machine = disk.write(&mut random);
            // Mostly during writes, sometimes before any record is durable.
            if random.below(4) != 0 {
                disk.wait_for_more(disk.durable);
            }
            sleep(Duration::from_micros(random.below(MAX_WRITE_US)));
            let more = disk.kill(machine);
            records += more;
            empty += u64::from(more == 0);
        }
        disk.end();
    }
    eprintln!(
        "{name}: {} kills, {records} durable records, {empty} runs without one, {:?}",
        kills(),
        start.elapsed()
    );
    assert!(empty < kills() / 2 && records > kills() * 2, "too few records were written");
}

#[test]
fn raw_loses_no_durable_record_by_a_kill() {
    if runs_here("raw_loses_no_durable_record_by_a_kill") {
        kill_often("disk.img", 1);
    }
}

#[test]
fn qcow2_loses_no_durable_record_by_a_kill() {
    if runs_here("qcow2_loses_no_durable_record_by_a_kill") {
        kill_often("disk.qcow2", 2);
    }
}

#[test]
fn a_lost_record_is_detected() {
    if !runs_here("a_lost_record_is_detected") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut random = Noise::new(3);
    let mut disk = Recorded::new(folder.path().join("disk.img"), &mut random);
    let machine = disk.write(&mut random);
    disk.wait_for_more(99);
    assert!(disk.kill(machine) >= 100);
    // All records should be durable, but the disk is empty.
    File::create(&disk.disk).and_then(|file| file.set_len(SIZE)).expect("a disk");
    let words = format!("disk=recall,{},durable={}", disk.layout, disk.durable);
    let words = format!("checks=none then=poweroff {words}");
    let device = format!("virtio-blk,path={}", disk.disk.display());
    let mut machine =
        Running::vmm(&["run", "--device", &device, "--cmdline", &words]).expect("vmm");
    assert_eq!(machine.wait(PATIENCE).expect("an end"), 0);
    let report = report(&machine.stdout.text()).expect("a report");
    let found = findings(&report, "disk")[0];
    assert_eq!(report["ok"], false, "{found}");
    assert!(found["mismatches"].as_u64() > Some(50), "{found}");
    assert_eq!((&found["found"], &found["newest"]), (&0.into(), &0.into()));
}
