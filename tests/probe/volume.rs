//! A volume that becomes full while the guest writes: the machine waits, continues by itself when
//! there is room, and loses nothing durable when it is killed before, during or after that.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use host::testutil::noise::Noise;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use tempfile::TempDir;
use transom_tests::program::{PATIENCE, connect, findings, finish, not_run, report, vmm};
use vmm::control::snapshot::save;
use vmm::control::{self, Then};

use crate::crash::{KILLS_PER_IMAGE, Recorded, kills};
use crate::runs_here;
use crate::snapshot::Machine;

const MIB: u64 = 1 << 20;
/// The size of a volume, and of the disk's part with the records, which fits an otherwise empty
/// volume.
const SIZE: u64 = 48 * MIB;
const SPAN: u64 = 32 * MIB;
/// The free space of a new volume.
const ROOM: u64 = 2 * MIB;
/// The maximum number of records that are not durable yet.
const WINDOW: u64 = 1024;

/// Commands that mount volumes: tmpfs, which notices at once that it is full, and ext4, with a
/// journal, direct I/O, and delayed allocation.
const TMPFS: &str = "mount -t tmpfs -o size=48m none \"$1\"";
const EXT4: &str = "truncate -s 48M \"$0\" && mkfs.ext4 -q -F -m 0 -b 4096 \"$0\" && \
                    mount -o loop \"$0\" \"$1\"";
const SMALL_BLOCKS: &str = "truncate -s 48M \"$0\" && mkfs.ext4 -q -F -m 0 -b 1024 \"$0\" && \
                            mount -o loop \"$0\" \"$1\"";

/// A small file system in its own mount namespace. It disappears with the process that made the
/// namespace, however this test ends. A filler file takes the space that the disk shall not have.
struct Volume {
    keeper: Child,
    /// The volume's path from outside of the namespace.
    place: PathBuf,
    filler: File,
    _folder: TempDir,
}

impl Volume {
    /// Returns the error message if the volume cannot be made.
    fn new(mount: &str) -> Result<Self, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path().join("volume");
        fs::create_dir(&at).expect("a folder");
        let script = format!("{mount} && echo mounted && read end");
        let mut keeper = Command::new("unshare");
        keeper.args(["--mount", "--propagation", "private", "sh", "-ec", &script]);
        keeper.arg(folder.path().join("image")).arg(&at);
        keeper.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut keeper = keeper.spawn().map_err(|error| format!("unshare(1): {error}"))?;
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        if line != "mounted\n" {
            let output = keeper.wait_with_output().expect("an end");
            return Err(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; "));
        }
        let inside = at.strip_prefix("/").expect("temporary files are below the root");
        let place = Path::new("/proc").join(keeper.id().to_string()).join("root").join(inside);
        let filler = File::create(place.join("filler")).expect("a file");
        let it = Self { keeper, place, filler, _folder: folder };
        it.fill();
        it.release(ROOM);
        Ok(it)
    }

    /// Frees this many bytes.
    fn release(&self, bytes: u64) {
        let length = self.filler.metadata().expect("the filler").len();
        self.filler.set_len(length.saturating_sub(bytes)).expect("a shorter filler");
    }

    /// Takes all free space.
    fn fill(&self) {
        for step in [MIB, 64 << 10, 4 << 10] {
            loop {
                let length = self.filler.metadata().expect("the filler").len();
                match fallocate(&self.filler, FallocateFlags::empty(), length, step) {
                    Ok(()) | Err(Errno::INTR) => {}
                    Err(Errno::NOSPC) => break,
                    Err(error) => panic!("{}: {error}", self.place.display()),
                }
            }
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // The keeper ends with its input.
        drop(self.keeper.stdin.take());
        self.keeper.wait().ok();
    }
}

/// Whether volumes can be made on this host. Reports the test as skipped otherwise.
fn mounts_here(test: &str) -> bool {
    let complaint = Volume::new(EXT4).err().or_else(|| Volume::new(TMPFS).err());
    if let Some(complaint) = &complaint {
        not_run(test, &format!("a small file system cannot be mounted: {complaint}"));
    }
    complaint.is_none()
}

/// Waits until the machine waits for room. Fills the volume again if a slow machine takes long.
fn wait_until_held(disk: &Recorded, volume: &Volume) {
    let mut client = connect(&disk.socket()).expect("a control socket");
    let start = Instant::now();
    let mut soon = Duration::from_millis(500);
    loop {
        let status = client.ask(&control::Command::Status).expect("a status");
        if status["state"] == "waiting for the host" {
            return;
        }
        if start.elapsed() > soon {
            volume.fill();
            soon += soon;
        }
        let (blocks, durable) = progress(disk);
        let name = disk.disk.display();
        let what = format!(
            "{name}: the machine does not wait, with {blocks} blocks and {durable} records"
        );
        assert!(start.elapsed() < PATIENCE, "{what}, {}: {status}", disk.layout);
        sleep(Duration::from_millis(5));
    }
}

/// Waits until a machine that waited for room has made progress.
fn wait_until_resumed(disk: &Recorded, before: (u64, u64)) {
    let deadline = Instant::now() + PATIENCE;
    while progress(disk) == before {
        assert!(Instant::now() < deadline, "{}: the machine does not resume", disk.disk.display());
        sleep(Duration::from_millis(5));
    }
}

/// The file's blocks, and the last record that is durable for the guest.
fn progress(disk: &Recorded) -> (u64, u64) {
    (fs::metadata(&disk.disk).expect("the disk").blocks(), disk.last_durable())
}

/// The moment at which the machine is killed.
#[derive(Clone, Copy)]
enum Moment {
    BeforeFull,
    WhileWaiting,
    /// There is room again, but the machine has not noticed yet.
    BeforeResuming,
    AfterResuming,
    /// Room comes and goes.
    Changing,
}

const MOMENTS: [Moment; 5] = [
    Moment::BeforeFull,
    Moment::WhileWaiting,
    Moment::BeforeResuming,
    Moment::AfterResuming,
    Moment::Changing,
];

fn pause(random: &mut Noise, milliseconds: u64) {
    sleep(Duration::from_micros(random.below(milliseconds * 1000)));
}

fn reach(moment: Moment, disk: &Recorded, volume: &Volume, random: &mut Noise) {
    match moment {
        Moment::BeforeFull => pause(random, 60),
        Moment::WhileWaiting => {
            wait_until_held(disk, volume);
            pause(random, 60);
        }
        Moment::BeforeResuming => {
            wait_until_held(disk, volume);
            volume.release(MIB);
            pause(random, 1200);
        }
        Moment::AfterResuming => {
            wait_until_held(disk, volume);
            let before = progress(disk);
            volume.release(MIB);
            wait_until_resumed(disk, before);
            pause(random, 60);
        }
        Moment::Changing => {
            for _ in 0..5 {
                pause(random, 150);
                volume.fill();
                pause(random, 150);
                volume.release((64 << 10) << random.below(4));
            }
        }
    }
}

/// The totals of a test.
#[derive(Default)]
struct Figures {
    kills: u64,
    records: u64,
    leaks: u64,
    /// Kills of a machine that waited for room.
    waiting: u64,
}

/// Uses one disk on one volume, through several kills.
fn live(name: &str, mount: &str, random: &mut Noise, figures: &mut Figures) {
    let volume = Volume::new(mount).expect("a volume");
    let mut disk = Recorded::new(volume.place.join(name), random);
    let block = random.choose(&[1024, 4096, 12 << 10, 40 << 10]);
    disk.layout = format!("seed={},block={block},span={SPAN}", random.below(1000));
    // With the host's cache, a file system may notice late that it is full.
    disk.options = random.choose(&["", "", ",direct=off"]);
    for _ in 1..KILLS_PER_IMAGE {
        disk.controller = random.choose(&["virtio-blk", "nvme", "ahci-disk"]);
        let machine = disk.write(random);
        let moment = random.choose(&MOMENTS);
        reach(moment, &disk, &volume, random);
        let waiting = matches!(moment, Moment::WhileWaiting | Moment::BeforeResuming);
        figures.waiting += u64::from(waiting);
        figures.kills += 1;
        figures.records += disk.kill(machine);
        // The next machine finds some room, or none.
        volume.release(random.choose(&[0, 64 << 10, MIB]));
    }
    // With all of the volume free, none of the requests is left waiting.
    let machine = disk.record("depth=32,every=8");
    wait_until_held(&disk, &volume);
    volume.release(SIZE);
    disk.wait_for_more(disk.last_durable() + WINDOW);
    figures.kills += 1;
    figures.records += disk.kill(machine);
    figures.leaks += disk.leaks;
    disk.end();
}

fn kill_often(name: &str, seed: u64) {
    let (mut random, mut figures, start) = (Noise::new(seed), Figures::default(), Instant::now());
    while figures.kills < kills() {
        let mount = [EXT4, TMPFS, SMALL_BLOCKS]
            [usize::try_from(figures.kills / KILLS_PER_IMAGE % 3).unwrap()];
        live(name, mount, &mut random, &mut figures);
    }
    let Figures { kills, records, leaks, waiting } = figures;
    eprintln!(
        "{name} on full volumes: {kills} kills, {waiting} of them while the machine waited, \
         {records} durable records, {leaks} images with leaked clusters, {:?}",
        start.elapsed()
    );
    assert!(records > kills * 2, "too few records were written");
}

#[test]
fn raw_on_a_full_volume_loses_no_durable_record_by_a_kill() {
    let test = "raw_on_a_full_volume_loses_no_durable_record_by_a_kill";
    if runs_here(test) && mounts_here(test) {
        kill_often("disk.img", 4);
    }
}

#[test]
fn qcow2_on_a_full_volume_loses_no_durable_record_by_a_kill() {
    let test = "qcow2_on_a_full_volume_loses_no_durable_record_by_a_kill";
    if runs_here(test) && mounts_here(test) {
        kill_often("disk.qcow2", 5);
    }
}

/// A write beyond the limit of a file's size fails at once: waiting would not help.
#[test]
fn a_file_size_limit_is_an_error_for_the_guest() {
    if !runs_here("a_file_size_limit_is_an_error_for_the_guest") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for (name, kind) in [("disk.img", "virtio-blk"), ("disk.qcow2", "nvme")] {
        for direct in ["auto", "off"] {
            let disk = Recorded::new(folder.path().join(name), &mut Noise::new(6));
            let device = format!("{kind},path={},direct={direct}", disk.disk.display());
            let way = "span=96M,block=64K,depth=8";
            let words = format!("checks=none disk=write,{way} disk=read,{way} then=poweroff");
            let mut limited = Command::new("prlimit");
            limited.arg(format!("--fsize={}", 64 * MIB)).arg(vmm());
            limited.args(["run", "--memory=64M", "--device", &device, "--cmdline", &words]);
            let ended = finish(&mut limited).expect("prlimit");
            assert_eq!(ended.status, 0, "{name}, direct={direct}: {ended:?}");
            let report = report(&ended.stdout).expect("a report");
            let found = findings(&report, "disk");
            let errors = found[0]["errors"].as_u64().expect("a number");
            assert!((512..=600).contains(&errors), "{name}: {} of 1536", found[0]);
            assert_eq!(found[1]["verdict"], "pass", "{name}: {}", found[1]);
            assert_eq!(ended.stderr.matches("File too large").count(), 1, "{}", ended.stderr);
            assert!(!ended.stderr.contains("full"), "{name}: {}", ended.stderr);
        }
    }
}

/// With no room at all, and with room for a part of it.
#[test]
fn a_snapshot_without_room_leaves_nothing_and_its_machine_goes_on() {
    let test = "a_snapshot_without_room_leaves_nothing_and_its_machine_goes_on";
    if !runs_here(test) || !mounts_here(test) {
        return;
    }
    for (mount, room) in [(TMPFS, 0), (EXT4, 0), (TMPFS, 128 << 10), (EXT4, 128 << 10)] {
        let words = ["--memory", "64M", "--cmdline", "checks=none then=triple"];
        let mut machine = Machine::start(&words);
        machine.running.says("transom probe", 2).expect("resets");
        let volume = Volume::new(mount).expect("a volume");
        volume.fill();
        volume.release(room);
        let dir = volume.place.join("saved");
        let mut client = connect(&machine.control()).expect("control");
        let error = save(&mut client, &dir, Then::Quit, None).expect_err("there is no room");
        assert!(format!("{error:#}").contains("No space left on device"), "{mount}: {error:#}");
        assert!(!dir.exists(), "{mount}: the rest of a snapshot that was given up");
        let resets = machine.running.stdout.text().matches("transom probe").count();
        machine.running.says("transom probe", resets + 2).expect("it continues");
        let dir = machine.save(Then::Quit).expect("a snapshot elsewhere");
        assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
        machine.restore(&dir, &[], "");
        machine.running.says("transom probe", 1).expect("it goes on");
    }
}
