//! Tests of `full`.

use std::process::Command;

use super::super::driver::{Driver, piece};
use super::super::overlay::Overlay;

use super::super::rehearsal::sparse;
use super::super::threads::Threaded;
use super::super::{Config, Holds, medium::Medium, open};
use super::*;

/// The reported changes of a volume.
type Reports = Arc<Mutex<Vec<bool>>>;

fn listener() -> (Reports, OnFull) {
    let reported = Reports::default();
    let reports = reported.clone();
    (reported, Arc::new(move |full: VolumeChange| reports.lock().unwrap().push(full.full)))
}

/// A disk whose volume has no room while `full` is set.
struct Tight {
    disk: Overlay,
    full: Arc<Mutex<bool>>,
    /// The error of writes to the full volume.
    errno: rustix::io::Errno,
}

impl Medium for Tight {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }
    fn read(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.disk.read(buffer, offset)
    }
    fn write(&self, buffer: &[u8], offset: u64, durable: bool) -> std::io::Result<()> {
        if *self.full.lock().unwrap() {
            return Err(self.errno.into());
        }
        self.disk.write(buffer, offset, durable)
    }
    fn flush(&self) -> std::io::Result<()> {
        self.disk.flush()
    }
    fn discard(&self, offset: u64, length: u64) -> std::io::Result<()> {
        self.disk.discard(offset, length)
    }
    fn zero(&self, offset: u64, length: u64, unmap: bool) -> std::io::Result<()> {
        self.disk.zero(offset, length, unmap)
    }
    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        self.disk.grow(size)
    }
}

fn tight() -> (Arc<dyn Image>, Arc<Mutex<bool>>, Reports) {
    refusing(rustix::io::Errno::NOSPC)
}

fn refusing(errno: rustix::io::Errno) -> (Arc<dyn Image>, Arc<Mutex<bool>>, Reports) {
    let full = Arc::new(Mutex::new(true));
    let tight = Tight { disk: Overlay::empty(1 << 20), full: full.clone(), errno };
    let (reported, tell) = listener();
    let image = Arc::new(Threaded::new("tight", Arc::new(tight), 1));
    let holds = Holds { full: tell, gate: None };
    (Arc::new(RetryWhenFull::new(image, Path::new("tight"), Some(holds))), full, reported)
}

const WRITE: Operation = Operation::Write { durable: false };

#[test]
fn holds_writes_until_there_is_room_and_reports_it_once() {
    let (image, full, reported) = tight();
    let (mut one, mut two) = (Driver::new(&image), Driver::new(&image));
    one.memory.write(0, &[7; 1024]).unwrap();
    let first = one.push(WRITE, 0, 512, &[piece(0, 512)]);
    let second = one.push(WRITE, 512, 512, &[piece(512, 512)]);
    one.channel.submit();
    two.push(WRITE, 1024, 512, &[piece(0, 512)]);
    two.channel.submit();
    // Reads continue.
    assert_eq!(one.execute(Operation::Read, 0, 512, &[piece(4096, 512)]), Ok(()));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1200) {
        let mut done = Vec::new();
        one.channel.reap(&mut done);
        two.channel.reap(&mut done);
        assert!(done.is_empty(), "{done:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(*reported.lock().unwrap(), [true]);
    *full.lock().unwrap() = false;
    let mut done = one.wait(2);
    done.sort_by_key(|it| it.tag);
    assert_eq!(done.iter().map(|it| it.tag).collect::<Vec<_>>(), [first, second]);
    assert!(done.iter().all(|it| it.result == Ok(()) && it.pieces.len() == 1));
    assert_eq!(two.wait(1)[0].result, Ok(()));
    assert_eq!(*reported.lock().unwrap(), [true, false]);
    assert_eq!(one.read(0, 1024).unwrap(), vec![7; 1024]);
}

#[test]
fn waits_for_a_quota_but_not_for_a_file_size_limit() {
    let (image, full, reported) = refusing(rustix::io::Errno::DQUOT);
    let mut driver = Driver::new(&image);
    driver.push(WRITE, 0, 512, &[piece(0, 512)]);
    driver.channel.submit();
    while reported.lock().unwrap().is_empty() {
        driver.channel.reap(&mut Vec::new());
    }
    *full.lock().unwrap() = false;
    assert_eq!(driver.wait(1)[0].result, Ok(()));
    let (image, _full, reported) = refusing(rustix::io::Errno::FBIG);
    assert_eq!(Driver::new(&image).write(0, &[1; 512]), Err(Fault::Broken));
    assert!(reported.lock().unwrap().is_empty());
}

#[test]
fn returns_held_writes_when_the_machine_parks() {
    let (image, full, reported) = tight();
    let mut driver = Driver::new(&image);
    driver.memory.write(0, &[9; 512]).unwrap();
    driver.push(WRITE, 0, 512, &[piece(0, 512)]);
    driver.channel.submit();
    while reported.lock().unwrap().is_empty() {
        driver.channel.reap(&mut Vec::new());
    }
    let kept = driver.channel.withdraw();
    assert_eq!(*reported.lock().unwrap(), [true, false]);
    *full.lock().unwrap() = false;
    // The machine continues with another channel.
    let mut after = Driver::new(&image);
    after.memory = driver.memory.clone();
    after.channel = image.channel(&after.memory).unwrap();
    drop(driver);
    for request in kept {
        after.channel.push(request);
    }
    after.channel.submit();
    assert_eq!(after.wait(1)[0].result, Ok(()));
    assert_eq!(after.read(0, 512).unwrap(), vec![9; 512]);
}

#[test]
fn a_wait_for_space_ends_when_the_machine_is_switched_off() {
    let (image, full, reported) = tight();
    let mut driver = Driver::new(&image);
    driver.push(WRITE, 0, 512, &[piece(0, 512)]);
    driver.channel.submit();
    while reported.lock().unwrap().is_empty() {
        driver.channel.reap(&mut Vec::new());
    }
    let start = Instant::now();
    drop(driver);
    assert!(start.elapsed() < Duration::from_millis(500));
    assert_eq!(*reported.lock().unwrap(), [true, false]);
    *full.lock().unwrap() = false;
    assert_eq!(Driver::new(&image).read(0, 512).unwrap(), vec![0; 512]);
}

#[test]
fn waits_for_space_on_a_real_volume() {
    let folder = tempfile::tempdir().unwrap();
    let mount = |kind: &str| {
        let mut mount = Command::new("mount");
        mount.args(["-t", kind, "-o", "size=2m", "none"]).arg(folder.path());
        mount.output().is_ok_and(|it| it.status.success())
    };
    if !mount("tmpfs") {
        skip::not_run("waits_for_space_on_a_real_volume", "mounting needs root");
        return;
    }
    let outcome = std::panic::catch_unwind(|| fill(folder.path()));
    Command::new("umount").arg("-l").arg(folder.path()).status().unwrap();
    outcome.unwrap();
}

fn fill(volume: &Path) {
    let qcow2 = volume.join("disk.qcow2");
    let mut create = Command::new("qemu-img");
    let create = create.args(["create", "-q", "-f", "qcow2"]).arg(&qcow2).arg("4M").status();
    let raw = volume.join("disk.raw");
    std::fs::File::create(&raw).unwrap().set_len(4 << 20).unwrap();
    let images = if create.is_ok_and(|it| it.success()) { vec![raw, qcow2] } else { vec![raw] };
    for path in images {
        let ballast = volume.join("ballast");
        std::fs::write(&ballast, vec![1; 1 << 20]).unwrap();
        let (reported, tell) = listener();
        let image = open(&Config::new(&path), Some(Holds { full: tell, gate: None })).unwrap();
        let mut driver = Driver::new(&image);
        let data: Vec<u8> = (0..1_500_000_u32 / 512 * 512).map(|it| it.to_le_bytes()[0]).collect();
        driver.memory.write(0, &data).unwrap();
        let length = data.len();
        driver.push(WRITE, 0, length as u64, &[piece(0, length)]);
        driver.push(Operation::Flush, 0, 0, &[]);
        driver.channel.submit();
        let mut done = Vec::new();
        let mut reap = |enough: &dyn Fn(Duration) -> bool| {
            let start = Instant::now();
            while !enough(start.elapsed()) {
                driver.channel.reap(&mut done);
            }
        };
        let limit = Duration::from_secs(10);
        reap(&|took| took > limit || !reported.lock().unwrap().is_empty());
        // The full volume is reported once, although the requests are tried again.
        reap(&|took| took > Duration::from_millis(300));
        assert_eq!(*reported.lock().unwrap(), [true], "{done:?}");
        std::fs::remove_file(&ballast).unwrap();
        let more = driver.wait(2 - done.len());
        assert!(done.iter().chain(&more).all(|it| it.result == Ok(())), "{done:?} {more:?}");
        assert_eq!(*reported.lock().unwrap(), [true, false]);
        assert!(driver.read(0, length).unwrap() == data);
        driver.flush().unwrap();
        drop((driver, image));
        if path.extension().is_some_and(|it| it == "qcow2") {
            super::super::rehearsal::check(&path);
        }
        // The ring may keep the file open a little longer; emptying it frees its room now.
        std::fs::write(&path, []).unwrap();
    }
}

/// A disk of sevens behind a gate that is closed.
fn behind_a_gate(path: &Path) -> (Arc<Gate>, Driver) {
    std::fs::write(path, [7; 1 << 20]).unwrap();
    let gate = Arc::new(Gate::new(true, false));
    gate.started(|| ());
    let holds = Holds { full: Arc::new(|_| {}), gate: Some(gate.clone()) };
    let config = Config { iops: Some(1_000_000), ..Config::new(path) };
    (gate, Driver::new(&open(&config, Some(holds)).unwrap()))
}

/// Pushes a request of each kind that writes, in places of their own.
fn push_writes(driver: &mut Driver) {
    driver.memory.write(1 << 20, &[9; 4096]).unwrap();
    let pieces = [piece(1 << 20, 4096)];
    driver.push(WRITE, 0, 4096, &pieces);
    driver.push(Operation::Write { durable: true }, 4096, 4096, &pieces);
    driver.push(Operation::WriteZeroes { unmap: true }, 8192, 4096, &[]);
    driver.push(Operation::Discard, 12288, 4096, &[]);
    driver.channel.submit();
}

#[test]
fn writes_wait_for_the_gate_and_reads_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = sparse(&folder, "disk", 1 << 20);
    let (gate, mut driver) = behind_a_gate(&path);
    let changed = || std::fs::metadata(&path).unwrap().modified().unwrap();
    let before = changed();
    push_writes(&mut driver);
    assert_eq!(driver.read(0, 512).unwrap(), [7; 512]);
    driver.flush().unwrap();
    std::thread::sleep(2 * GATE_INTERVALS[1]);
    let mut done = Vec::new();
    driver.channel.reap(&mut done);
    assert!(done.is_empty() && changed() == before, "{done:?}");
    gate.checked();
    assert!(driver.wait(4).iter().all(|it| it.result.is_ok()));
    let found = std::fs::read(&path).unwrap();
    assert_eq!([found[0], found[4096], found[8192], found[16384]], [9, 9, 0, 7]);
    driver.write(0, &[5; 512]).unwrap();
    assert_eq!(driver.read(0, 512).unwrap(), [5; 512]);
}

#[test]
fn writes_behind_a_gate_that_never_opens_are_withdrawn_or_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let path = sparse(&folder, "disk", 1 << 20);
    let (gate, mut driver) = behind_a_gate(&path);
    push_writes(&mut driver);
    assert_eq!(driver.channel.withdraw().len(), 4);
    push_writes(&mut driver);
    gate.shut();
    assert_eq!(driver.read(0, 512).unwrap(), [7; 512]);
    drop(driver);
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 7));
}
