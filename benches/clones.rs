//! Many machines go on from one snapshot: the time for each, and the memory that it takes.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use transom_benches::machine::Machine;
use transom_benches::moved::compare;
use transom_benches::rival::Rival;
use transom_benches::saved::Saver;

/// It halts, so that its clones do not compete.
const GUEST: &str = "checks=none fill=256 then=halt";
const CLONES: usize = 20;
const PATIENCE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// For each clone: milliseconds, and MiB.
type Figures = [f64; 2];

const TITLES: [(&str, &str); 2] = [
    ("20 clones: from the start of the first until all run, for each", "ms"),
    ("20 clones: proportional memory (PSS) of each, that of the guest included", "MiB"),
];

fn main() -> Result<()> {
    compare(&TITLES, &["qemu q35"], figures)
}

fn figures(rival: &Rival, dir: &Path) -> Result<Figures> {
    let saver = Saver { rival, words: GUEST, folder: dir.join("saved") };
    let control = dir.join("control");
    let machine = saver.boot(&control)?;
    saver.save(&control)?;
    drop(machine);
    let start = |control: &Path| saver.restore(control, ",check=off,clone");
    many(dir, start, |control| saver.runs(control))
}

/// Starts all clones, and waits until they run.
fn many(
    dir: &Path,
    start: impl Fn(&Path) -> Result<Machine> + Sync,
    runs: impl Fn(&Path) -> Result<bool>,
) -> Result<Figures> {
    let began = Instant::now();
    let controls: Vec<PathBuf> = (0..CLONES).map(|it| dir.join(it.to_string())).collect();
    // Some programs must be asked to restore, and answer later. All start at the same time.
    let start = &start;
    let machines = thread::scope(|scope| {
        let started: Vec<_> =
            controls.iter().map(|control| scope.spawn(move || start(control))).collect();
        let all = started.into_iter().map(|it| it.join().expect("a thread that ends"));
        all.collect::<Result<Vec<_>>>()
    })?;
    for control in &controls {
        while !control.exists() || !runs(control)? {
            ensure!(began.elapsed() < PATIENCE, "a clone does not run");
            sleep(POLL_INTERVAL);
        }
    }
    let time = began.elapsed();
    let memory = machines.iter().map(|it| proportional_kib(it.id())).sum::<Result<u64>>()?;
    let each = |sum: f64| sum / CLONES as f64;
    Ok([each(time.as_secs_f64() * 1e3), each(memory as f64 / 1024.0)])
}

fn proportional_kib(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).context("its memory")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
