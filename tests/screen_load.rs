//! Fifty clients of one screen, nearly all of them misbehaving. The good ones keep their frame
//! rate, memory stays within the limits in ARCHITECTURE.md, and nothing is left when they are gone.
//! One test uses VNC, the other WebSockets in TLS.
#![forbid(unsafe_code)]

#[path = "screen_load/bad.rs"]
mod bad;
#[path = "screen_load/line.rs"]
mod line;
#[path = "screen_load/viewer.rs"]
mod viewer;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinSet;
use transom_tests::program::{PATIENCE, Running, connect, not_run};
use vmm::control::{Client, Command};
use vmm::kvm::KvmSupport;

use crate::line::Door;
use crate::viewer::Viewer;

/// The number of well-behaved clients and of misbehaving ones.
const GOOD: usize = 2;
const BAD: usize = 48;
/// How long pictures are counted without bad clients, and how many times as long with them.
const COUNTED: Duration = Duration::from_secs(3);
const ROUNDS: u32 = 2;
/// Encoder threads end after some idle time; this is longer.
const IDLE: Duration = Duration::from_secs(7);
/// Good clients keep at least 1/`PART` of their pictures, even on a busy host. They usually keep
/// nearly all.
const PART: usize = 8;
/// ARCHITECTURE.md has the maximum cost of a client. Few of these clients cost that much, so a part
/// of it, and of the shared memory, is enough here.
const EACH_KIB: u64 = 2 << 10;
const SHARED_KIB: u64 = 32 << 10;
/// The memory that the host's allocator keeps for reuse, and the growth that one of `TIMES` further
/// rounds must not exceed. A leak would grow in each round.
const KEPT_KIB: u64 = 16 << 10;
const GROWTH_KIB: u64 = 4 << 10;
const TIMES: u32 = 3;

/// The resources of a process.
#[derive(Clone, Copy, Debug)]
struct Costs {
    threads: usize,
    files: usize,
    memory_kib: u64,
}

struct Bench {
    machine: Running,
    control: Client,
    door: Door,
}

fn entries(machine: &Running, folder: &str) -> Result<usize> {
    let folder = format!("/proc/{}/{folder}", machine.pid().as_raw_nonzero());
    Ok(fs::read_dir(&folder).context(folder)?.count())
}

impl Bench {
    fn costs(&self) -> Result<Costs> {
        let threads = entries(&self.machine, "task")?;
        let files = entries(&self.machine, "fd")?;
        Ok(Costs { threads, files, memory_kib: self.machine.memory_kib("Rss")? })
    }

    fn viewers(&mut self) -> Result<usize> {
        let status = self.control.ask(&Command::Status)?;
        Ok(status["viewers"].as_array().context("viewers")?.len())
    }

    /// Waits until there are no viewers and no more resources in use than `wanted`.
    fn is_left_with(&mut self, wanted: Costs) -> Result<Costs> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (costs, viewers) = (self.costs()?, self.viewers()?);
            let few = costs.threads <= wanted.threads && costs.files <= wanted.files;
            if few && viewers == 0 && costs.memory_kib <= wanted.memory_kib + KEPT_KIB {
                return Ok(costs);
            }
            ensure!(
                Instant::now() < deadline,
                "still in use: {costs:?} and {viewers} viewers, wanted {wanted:?}"
            );
            thread::sleep(Duration::from_millis(200));
        }
    }
}

/// An executor on the current thread.
fn runtime() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// The number of pictures that good viewers get, and the peak of the memory meanwhile.
fn count(bench: &Bench, time: Duration) -> Result<(usize, u64)> {
    let seen = Arc::new(AtomicUsize::new(0));
    let (door, counter) = (bench.door.clone(), seen.clone());
    let watch = thread::spawn(move || {
        runtime()?.block_on(async {
            let mut viewers = Vec::new();
            for _ in 0..GOOD {
                viewers.push(Viewer::good(door.enter().await?).await?);
            }
            let mut all = JoinSet::new();
            for mut viewer in viewers {
                let counter = counter.clone();
                all.spawn(async move {
                    loop {
                        viewer.look(true).await?;
                        counter.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            let early = tokio::time::timeout(time, all.join_next()).await;
            if let Ok(Some(ended)) = early {
                let ended: Result<()> = ended?;
                ended.context("a good viewer is gone")?;
            }
            anyhow::Ok(())
        })
    });
    let mut peak = 0;
    while !watch.is_finished() {
        peak = peak.max(bench.costs()?.memory_kib);
        thread::sleep(Duration::from_millis(100));
    }
    watch.join().expect("no viewer panics")?;
    Ok((seen.load(Ordering::Relaxed), peak))
}

/// The bad clients, on a thread of their own, until they are stopped.
struct Bad {
    stop: tokio::sync::oneshot::Sender<()>,
    thread: thread::JoinHandle<Result<()>>,
}

impl Bad {
    fn begin(door: &Door) -> Self {
        let (door, (stop, stopped)) = (door.clone(), tokio::sync::oneshot::channel());
        let thread = thread::spawn(move || {
            runtime()?.block_on(async {
                let mut all = JoinSet::new();
                (0..BAD).for_each(|kind| drop(all.spawn(bad::misbehave(kind, door.clone()))));
                stopped.await.ok();
                all.shutdown().await;
                anyhow::Ok(())
            })
        });
        Self { stop, thread }
    }

    fn end(self) -> Result<()> {
        self.stop.send(()).ok();
        self.thread.join().expect("no bad client panics")
    }
}

/// Further bad clients leave no more behind.
fn does_not_grow(bench: &mut Bench, start: Costs, first: Costs) -> Result<()> {
    for _ in 0..TIMES {
        let bad = Bad::begin(&bench.door);
        thread::sleep(COUNTED);
        bad.end()?;
        let left = bench.is_left_with(start)?;
        eprintln!("after another round: {left:?}");
        if left.memory_kib <= first.memory_kib + GROWTH_KIB {
            return Ok(());
        }
    }
    bail!("more than {first:?} is in use after each of {TIMES} rounds")
}

fn torture(bench: &mut Bench, name: &str) -> Result<()> {
    // The first round allocates what is allocated only once.
    count(bench, COUNTED / 3)?;
    thread::sleep(IDLE);
    ensure!(bench.viewers()? == 0, "viewers are left before the test begins");
    let start = bench.costs()?;
    let (alone, _) = count(bench, COUNTED)?;
    let bad = Bad::begin(&bench.door);
    thread::sleep(Duration::from_secs(2));
    let (began, mut viewers) = (Instant::now(), bench.viewers()?);
    while viewers < BAD / 3 && began.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(50));
        viewers = bench.viewers()?;
    }
    let (together, peak) = count(bench, ROUNDS * COUNTED)?;
    let threads = bench.costs()?.threads;
    bad.end()?;
    let together = together / ROUNDS as usize;
    eprintln!(
        "{name}: {alone} pictures alone, {together} with {viewers} others; {} of {} KiB, \
         {threads} threads",
        peak.saturating_sub(start.memory_kib),
        (GOOD + BAD) as u64 * EACH_KIB + SHARED_KIB
    );
    let first = bench.is_left_with(start)?;
    eprintln!("{name}: from {start:?} to {first:?}");
    does_not_grow(bench, start, first)?;
    ensure!(viewers >= BAD / 3, "only {viewers} of {BAD} bad clients are connected");
    ensure!(alone >= GOOD * 10, "only {alone} pictures without other clients");
    ensure!(together * PART >= alone, "{alone} pictures alone, {together} with {viewers} others");
    let bound = start.memory_kib + (GOOD + BAD) as u64 * EACH_KIB + SHARED_KIB;
    ensure!(peak <= bound, "{peak} KiB, but {bound} are allowed");
    Ok(())
}

/// A machine whose picture changes constantly.
fn machine(folder: &Path, screen: &[&str]) -> Result<(Running, Client)> {
    let control = folder.join("control");
    let path = control.display().to_string();
    let mut words = vec!["run", "--control", &path, "--display", "640x480"];
    words.extend(["--cmdline", "draw=moving then=halt"]);
    words.extend(screen);
    let mut machine = Running::vmm(&words)?;
    machine.says("]}\n", 1)?;
    Ok((machine, connect(&control)?))
}

fn runs_here(test: &str) -> bool {
    let here = KvmSupport::of_this_host() != KvmSupport::None;
    if !here {
        not_run(test, "there is no usable /dev/kvm");
    }
    here
}

#[test]
fn good_viewers_are_unaffected_by_bad_ones() -> Result<()> {
    if !runs_here("good_viewers_are_unaffected_by_bad_ones") {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let screen = folder.path().join("screen");
    let (machine, control) =
        machine(folder.path(), &["--vnc", &format!("unix:{}", screen.display())])?;
    torture(&mut Bench { machine, control, door: Door::Vnc(screen) }, "VNC")?;
    let (cert, key) = (folder.path().join("cert"), folder.path().join("key"));
    fs::write(&cert, line::CERTIFICATE)?;
    fs::write(&key, line::KEY)?;
    let web = format!("127.0.0.1:0,tls-cert={},tls-key={}", cert.display(), key.display());
    let (machine, control) = self::machine(folder.path(), &["--web", &web])?;
    // The web port listens before the guest runs.
    let said = machine.stderr.text();
    let place = place(&said).with_context(|| said.clone())?.to_owned();
    torture(&mut Bench { machine, control, door: Door::Web(place) }, "web")
}

/// HOST:PORT of `web: listening at https://HOST:PORT/`.
fn place(said: &str) -> Option<&str> {
    let (_, rest) = said.split_once("web: listening at https://")?;
    rest.split_once("/\n").map(|(place, _)| place)
}
