//! A volume without room is no error of the disk: what does not fit is kept and tried again.
//!
//! The machine's owner is told, so that it pauses; it resumes when there is room. Reads go on
//! meanwhile. A machine that is switched off or reset drops the channel, and what is kept with it:
//! the guest never heard that it was done.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::timer::Timer;
use super::{Channel, Done, Fault, Geometry, Image, Operation, Request};
use crate::memory::Memory;

/// How often it is tried again.
const AGAIN: Duration = Duration::from_secs(1);

/// A volume has no room for a disk, or has again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Full {
    /// The disk.
    pub path: PathBuf,
    /// No room now. Said once, until it is not.
    pub full: bool,
}

/// Who is told. Called on the threads of devices: it must not wait for them.
///
/// The machine's processors are to stop, its devices are not: they try again, and tell when the
/// last request has found room. A machine whose devices are parked or reset meanwhile takes its
/// requests back, which tells that nothing waits any more; when it runs on and pushes them again,
/// it is told again.
pub type OnFull = Arc<dyn Fn(Full) + Send + Sync>;

/// An image whose channels wait for room.
pub(super) struct Patient {
    inner: Arc<dyn Image>,
    volume: Arc<Volume>,
}

/// What all channels of a disk share.
struct Volume {
    path: PathBuf,
    tell: Option<OnFull>,
    /// How many requests wait, over all channels.
    waiting: Mutex<usize>,
}

impl Volume {
    /// Counts requests that begin or end to wait, and tells when the first or the last one does.
    fn count(&self, more: usize, fewer: usize) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *waiting;
        *waiting = before + more - fewer;
        let full = *waiting > 0;
        if full == (before > 0) {
            return;
        }
        let path = self.path.clone();
        if full {
            tracing::warn!(disk = %path.display(), "the volume is full: writes wait for room");
        } else {
            tracing::info!(disk = %path.display(), "there is room again");
        }
        // Within the lock, so that the two are told in their order.
        if let Some(tell) = &self.tell {
            tell(Full { path, full });
        }
    }
}

impl Patient {
    pub(super) fn new(inner: Arc<dyn Image>, path: &Path, tell: Option<OnFull>) -> Self {
        let volume = Volume { path: path.to_owned(), tell, waiting: Mutex::new(0) };
        Self { inner, volume: Arc::new(volume) }
    }
}

impl Image for Patient {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        let inner = self.inner.channel(memory)?;
        let timer = Timer::around(inner.event())?;
        Ok(Box::new(Waiting {
            inner,
            timer,
            volume: self.volume.clone(),
            under_way: HashMap::new(),
            kept: Vec::new(),
            due: None,
        }))
    }

    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        self.inner.grow(size)
    }
}

/// What a request was, but for its pieces, which come back with the answer.
struct Asked {
    operation: Operation,
    offset: u64,
    length: u64,
    /// It was kept before, and is tried again.
    again: bool,
}

struct Waiting {
    inner: Box<dyn Channel>,
    timer: Timer,
    volume: Arc<Volume>,
    /// All but reads, by their tags.
    under_way: HashMap<u64, Asked>,
    /// For these there was no room.
    kept: Vec<Request>,
    /// When they are tried again.
    due: Option<Instant>,
}

impl Waiting {
    fn send(&mut self, request: Request, again: bool) {
        if request.operation != Operation::Read {
            let Request { operation, offset, length, .. } = request;
            let asked = Asked { operation, offset, length, again };
            self.under_way.insert(request.tag, asked);
        }
        self.inner.push(request);
    }

    /// Keeps what found no room; the rest is done.
    fn sort(&mut self, answer: Done) -> Option<Done> {
        // Reads are not noted, and never full.
        let Some(asked) = self.under_way.remove(&answer.tag) else { return Some(answer) };
        if answer.result != Err(Fault::Full) {
            self.volume.count(0, usize::from(asked.again));
            return Some(answer);
        }
        self.volume.count(usize::from(!asked.again), 0);
        let Asked { operation, offset, length, .. } = asked;
        let Done { tag, pieces, .. } = answer;
        self.kept.push(Request { tag, operation, offset, length, pieces });
        if self.due.is_none() {
            self.due = Some(Instant::now() + AGAIN);
            self.timer.set(Some(AGAIN));
        }
        None
    }
}

impl Channel for Waiting {
    fn push(&mut self, request: Request) {
        self.send(request, false);
    }

    fn submit(&mut self) {
        self.inner.submit();
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let start = done.len();
        self.inner.reap(done);
        if done[start..].iter().any(|it| self.under_way.contains_key(&it.tag)) {
            let answers: Vec<Done> = done.drain(start..).collect();
            done.extend(answers.into_iter().filter_map(|it| self.sort(it)));
        }
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.due = None;
            self.timer.set(None);
            for request in std::mem::take(&mut self.kept) {
                self.send(request, true);
            }
            self.inner.submit();
        }
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.timer.event()
    }

    fn withdraw(&mut self) -> Vec<Request> {
        let mut withdrawn = self.inner.withdraw();
        for request in &withdrawn {
            let asked = self.under_way.remove(&request.tag);
            self.volume.count(0, usize::from(asked.is_some_and(|it| it.again)));
        }
        // Still full as far as anybody knows, but nothing waits here any more. Who pushes them
        // again finds out, and tells again.
        self.volume.count(0, self.kept.len());
        withdrawn.append(&mut self.kept);
        self.due = None;
        self.timer.set(None);
        withdrawn
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let again = self.under_way.values().filter(|it| it.again).count();
        self.volume.count(0, self.kept.len() + again);
    }
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use super::super::driver::{Driver, piece};
    use super::super::overlay::Overlay;

    use super::super::threads::Threaded;
    use super::super::{Config, medium::Medium, open};
    use super::*;

    type Told = Arc<Mutex<Vec<bool>>>;

    fn listener() -> (Told, OnFull) {
        let told = Told::default();
        let tell = told.clone();
        (told, Arc::new(move |full: Full| tell.lock().unwrap().push(full.full)))
    }

    /// A disk whose volume has no room while `full` is set, and for which reason.
    struct Tight {
        disk: Overlay,
        full: Arc<Mutex<bool>>,
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

    fn tight() -> (Arc<dyn Image>, Arc<Mutex<bool>>, Told) {
        refusing(rustix::io::Errno::NOSPC)
    }

    fn refusing(errno: rustix::io::Errno) -> (Arc<dyn Image>, Arc<Mutex<bool>>, Told) {
        let full = Arc::new(Mutex::new(true));
        let tight = Tight { disk: Overlay::empty(1 << 20), full: full.clone(), errno };
        let (told, tell) = listener();
        let image = Arc::new(Threaded::new("tight", Arc::new(tight), 1));
        (Arc::new(Patient::new(image, Path::new("tight"), Some(tell))), full, told)
    }

    const WRITE: Operation = Operation::Write { durable: false };

    #[test]
    fn keeps_writes_until_there_is_room_and_says_so_once() {
        let (image, full, told) = tight();
        let (mut one, mut two) = (Driver::new(&image), Driver::new(&image));
        one.memory.write(0, &[7; 1024]).unwrap();
        let first = one.push(WRITE, (0, 512), &[piece(0, 512)]);
        let second = one.push(WRITE, (512, 512), &[piece(512, 512)]);
        one.channel.submit();
        two.push(WRITE, (1024, 512), &[piece(0, 512)]);
        two.channel.submit();
        // Reads go on.
        assert_eq!(one.ask(Operation::Read, (0, 512), &[piece(4096, 512)]), Ok(()));
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(1200) {
            let mut done = Vec::new();
            one.channel.reap(&mut done);
            two.channel.reap(&mut done);
            assert!(done.is_empty(), "{done:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(*told.lock().unwrap(), [true]);
        *full.lock().unwrap() = false;
        let mut done = one.wait(2);
        done.sort_by_key(|it| it.tag);
        assert_eq!(done.iter().map(|it| it.tag).collect::<Vec<_>>(), [first, second]);
        assert!(done.iter().all(|it| it.result == Ok(()) && it.pieces.len() == 1));
        assert_eq!(two.wait(1)[0].result, Ok(()));
        assert_eq!(*told.lock().unwrap(), [true, false]);
        assert_eq!(one.read(0, 1024).unwrap(), vec![7; 1024]);
    }

    #[test]
    fn waits_for_a_quota_as_for_room_but_not_for_a_file_that_may_not_grow() {
        let (image, full, told) = refusing(rustix::io::Errno::DQUOT);
        let mut driver = Driver::new(&image);
        driver.push(WRITE, (0, 512), &[piece(0, 512)]);
        driver.channel.submit();
        while told.lock().unwrap().is_empty() {
            driver.channel.reap(&mut Vec::new());
        }
        *full.lock().unwrap() = false;
        assert_eq!(driver.wait(1)[0].result, Ok(()));
        let (image, _full, told) = refusing(rustix::io::Errno::FBIG);
        assert_eq!(Driver::new(&image).write(0, &[1; 512]), Err(Fault::Broken));
        assert!(told.lock().unwrap().is_empty());
    }

    #[test]
    fn gives_back_what_it_keeps_for_a_machine_that_parks() {
        let (image, full, told) = tight();
        let mut driver = Driver::new(&image);
        driver.memory.write(0, &[9; 512]).unwrap();
        driver.push(WRITE, (0, 512), &[piece(0, 512)]);
        driver.channel.submit();
        while told.lock().unwrap().is_empty() {
            driver.channel.reap(&mut Vec::new());
        }
        let kept = driver.channel.withdraw();
        assert_eq!(*told.lock().unwrap(), [true, false]);
        *full.lock().unwrap() = false;
        // The machine runs on, with another channel.
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
    fn ends_at_once_when_the_machine_is_switched_off_meanwhile() {
        let (image, full, told) = tight();
        let mut driver = Driver::new(&image);
        driver.push(WRITE, (0, 512), &[piece(0, 512)]);
        driver.channel.submit();
        while told.lock().unwrap().is_empty() {
            driver.channel.reap(&mut Vec::new());
        }
        let start = Instant::now();
        drop(driver);
        assert!(start.elapsed() < Duration::from_millis(500));
        assert_eq!(*told.lock().unwrap(), [true, false]);
        *full.lock().unwrap() = false;
        assert_eq!(Driver::new(&image).read(0, 512).unwrap(), vec![0; 512]);
    }

    #[test]
    fn waits_for_room_on_a_real_volume() {
        let folder = tempfile::tempdir().unwrap();
        let mount = |kind: &str| {
            let mut mount = Command::new("mount");
            mount.args(["-t", kind, "-o", "size=2m", "none"]).arg(folder.path());
            mount.output().is_ok_and(|it| it.status.success())
        };
        if !mount("tmpfs") {
            skip::not_run("waits_for_room_on_a_real_volume", "mounting needs root");
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
            let (told, tell) = listener();
            let image = open(&Config::new(&path), Some(tell)).unwrap();
            let mut driver = Driver::new(&image);
            let data: Vec<u8> =
                (0..1_500_000_u32 / 512 * 512).map(|it| it.to_le_bytes()[0]).collect();
            driver.memory.write(0, &data).unwrap();
            let length = data.len();
            driver.push(WRITE, (0, length as u64), &[piece(0, length)]);
            driver.push(Operation::Flush, (0, 0), &[]);
            driver.channel.submit();
            let mut done = Vec::new();
            let mut reap = |enough: &dyn Fn(Duration) -> bool| {
                let start = Instant::now();
                while !enough(start.elapsed()) {
                    driver.channel.reap(&mut done);
                }
            };
            let limit = Duration::from_secs(10);
            reap(&|took| took > limit || !told.lock().unwrap().is_empty());
            // It is said once.
            reap(&|took| took > Duration::from_millis(300));
            assert_eq!(*told.lock().unwrap(), [true], "{done:?}");
            std::fs::remove_file(&ballast).unwrap();
            let more = driver.wait(2 - done.len());
            assert!(done.iter().chain(&more).all(|it| it.result == Ok(())), "{done:?} {more:?}");
            assert_eq!(*told.lock().unwrap(), [true, false]);
            assert!(driver.read(0, length).unwrap() == data);
            driver.flush().unwrap();
            drop((driver, image));
            if path.extension().is_some_and(|it| it == "qcow2") {
                super::super::rehearsal::check(&path);
            }
            // The ring may hold the file a little longer, but not its room.
            std::fs::write(&path, []).unwrap();
        }
    }
}
