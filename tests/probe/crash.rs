//! A process that is killed at any moment has lost nothing of which its guest was told that it is
//! durable.
//!
//! The probe writes records and says on the debug console which ones are durable; the file that it
//! says it to outlives the process. The next run looks for all of them, and goes on.

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
/// What a killed process ends with.
const KILLED: i32 = 137;
/// So often an image is killed before the next one takes its place: new images grow most.
pub(crate) const LIFE: u64 = 10;
/// The longest that a machine writes after that, in microseconds.
const WRITES: u64 = 60_000;

pub(crate) fn kills() -> u64 {
    let all = std::env::var("TRANSOM_TESTS").is_ok_and(|which| which == "all");
    if all { 200 } else { 20 }
}

/// A disk with records on it, through the lives of several machines.
pub(crate) struct Recorded {
    pub(crate) disk: PathBuf,
    pub(crate) controller: &'static str,
    /// More of the disk's keys, each after a comma.
    pub(crate) options: &'static str,
    /// Seed, block and span of all its records.
    pub(crate) layout: String,
    /// The last record that was called durable.
    pub(crate) durable: u64,
    /// After so many kills the image had clusters that nobody has.
    pub(crate) leaks: u64,
    folder: TempDir,
}

impl Recorded {
    pub(crate) fn new(disk: PathBuf, random: &mut Noise) -> Self {
        let block = random.of(&[512, 4096, 12 << 10, 40 << 10]);
        let layout = format!("seed={},block={block},span={}", random.below(1000), block * 2048);
        let folder = tempfile::tempdir().expect("a folder");
        let (durable, leaks, options) = (0, 0, "");
        let controller = random.of(&["virtio-blk", "nvme"]);
        if disk.extension().is_some_and(|it| it == "qcow2") {
            let clusters = format!("cluster_size={}", random.of(&["4k", "64k"]));
            let words = ["create", "-q", "-f", "qcow2", "-o", &clusters];
            qemu_img(&words, &disk, &[&SIZE.to_string()]).expect("an image");
        } else {
            File::create(&disk).and_then(|file| file.set_len(SIZE)).expect("a disk");
        }
        Self { disk, controller, options, layout, durable, leaks, folder }
    }

    fn said(&self) -> PathBuf {
        self.folder.path().join("said")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    fn start(&self, words: &str) -> Running {
        let (controller, options) = (self.controller, self.options);
        let disk = format!("{controller},path={}{options}", self.disk.display());
        let console = format!("debugcon,to=file:{}", self.said().display());
        let durable = self.durable;
        let recall = format!("disk=recall,{},durable={durable},depth=32", self.layout);
        let words = format!("checks=none {recall} {words}");
        let socket = self.socket().display().to_string();
        let options = ["--control", &socket, "--device", &disk, "--device", &console];
        let words = [&["run", "--cmdline", &words], &options[..]].concat();
        let mut machine = Running::vmm(&words).expect("vmm");
        machine.says("mode=recall", 1).expect("a look at the records");
        let output = machine.stdout.text();
        let line = output.lines().find(|line| line.contains("mode=recall")).expect("a line");
        assert!(line.starts_with("pass"), "{}: {line}", self.layout);
        machine
    }

    /// A machine that has looked at all records, and now writes more of them.
    pub(crate) fn write(&self, random: &mut Noise) -> Running {
        let (depth, every) = (random.of(&[1, 4, 32]), random.of(&[1, 3, 8, 50]));
        let through = u8::from(random.below(4) == 0);
        self.record(&format!("depth={depth},every={every},through={through}"))
    }

    /// The same, in this way.
    pub(crate) fn record(&self, way: &str) -> Running {
        let durable = self.durable;
        self.start(&format!("disk=record,{},durable={durable},{way}", self.layout))
    }

    /// The last that was said. A line without an end is one that was not said.
    pub(crate) fn heard(&self) -> u64 {
        let said = fs::read_to_string(self.said()).unwrap_or_default();
        let whole = said.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().last().map_or(self.durable, |line| line.parse().expect("a number"))
    }

    /// Waits until more than this is durable.
    pub(crate) fn wait_for_more(&self, than: u64) {
        let deadline = Instant::now() + PATIENCE;
        while self.heard() <= than {
            assert!(Instant::now() < deadline, "{}: {than} is the last", self.disk.display());
            sleep(Duration::from_millis(2));
        }
    }

    /// Kills the machine, and hears what it has said before. How many records that were.
    pub(crate) fn kill(&mut self, mut machine: Running) -> u64 {
        machine.signal(Signal::KILL).expect("a process");
        let status = machine.wait(PATIENCE).expect("an end");
        assert_eq!(status, KILLED, "{}{}", machine.stdout.text(), machine.stderr.text());
        let heard = self.heard();
        assert!(heard >= self.durable, "{} after {}", heard, self.durable);
        if self.disk.extension().is_some_and(|it| it == "qcow2") {
            let leaks = check(&self.disk).expect("a sound image");
            self.leaks += u64::from(leaks > 0);
        }
        heard - std::mem::replace(&mut self.durable, heard)
    }

    /// Looks a last time, with a machine that ends by itself.
    pub(crate) fn end(self) {
        let mut machine = self.start("then=poweroff");
        assert_eq!(machine.wait(PATIENCE).expect("an end"), 0);
        let report = report(&machine.stdout.text()).expect("a report");
        let found = findings(&report, "disk")[0];
        assert_eq!((&report["ok"], &found["durable"]), (&true.into(), &self.durable.into()));
        if self.disk.extension().is_some_and(|it| it == "qcow2") {
            // What a kill left to nobody was found, and given back.
            assert_eq!(check(&self.disk).expect("a sound image"), 0);
        }
    }
}

fn kill_often(name: &str, seed: u64) {
    let (mut random, mut records, mut empty) = (Noise::new(seed), 0, 0);
    let start = Instant::now();
    for _ in 0..kills() / LIFE {
        let folder = tempfile::tempdir().expect("a folder");
        let mut disk = Recorded::new(folder.path().join(name), &mut random);
        for _ in 0..LIFE {
            disk.controller = random.of(&["virtio-blk", "nvme"]);
            let machine = disk.write(&mut random);
            // Mostly in the midst of writing, now and then before anything is durable.
            if random.below(4) != 0 {
                disk.wait_for_more(disk.durable);
            }
            sleep(Duration::from_micros(random.below(WRITES)));
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
    assert!(empty < kills() / 2 && records > kills() * 2, "hardly anything was written");
}

#[test]
fn no_durable_record_on_a_raw_file_is_lost_by_a_kill() {
    if runs_here("no_durable_record_on_a_raw_file_is_lost_by_a_kill") {
        kill_often("disk.img", 1);
    }
}

#[test]
fn no_durable_record_in_a_qcow2_image_is_lost_by_a_kill() {
    if runs_here("no_durable_record_in_a_qcow2_image_is_lost_by_a_kill") {
        kill_often("disk.qcow2", 2);
    }
}

#[test]
fn a_record_that_is_gone_is_found_out() {
    if !runs_here("a_record_that_is_gone_is_found_out") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut random = Noise::new(3);
    let mut disk = Recorded::new(folder.path().join("disk.img"), &mut random);
    let machine = disk.write(&mut random);
    disk.wait_for_more(99);
    assert!(disk.kill(machine) >= 100);
    // All of them are claimed, none is there.
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
