//! The screen from the view of a viewer: bytes and processor time of an update, updates per second,
//! the time from the guest's write to the viewer's pixel, and the cost of a still screen.
//!
//! Words after `--` select a part: the size (`1080p`, `4k`), the scene (`desktop`, `scrolling`,
//! `video`, `redraw`, `animation`), the encoding (`zrle`, `tight`, `jpeg`), `latency`, or `idle`.
#![forbid(unsafe_code)]

#[path = "screen/stage.rs"]
mod stage;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use transom_benches::machine::Machine;
use transom_benches::pictures::Picture;
use transom_benches::rival::{MEMORY, Rival, rivals};
use transom_benches::stage::Scene;
use transom_benches::table::{Samples, Spread, measured, print, rows_table};
use transom_benches::viewer::{PREFERENCES, Preference, Viewer};

use self::stage::stage;

const ROUNDS: usize = 3;
/// The time to measure a moving scene.
const SPAN: Duration = Duration::from_secs(2);
/// The number of requests for a still scene.
const FRAMES: u32 = 6;
/// The number of answers of each kind in a round.
const ANSWERS: u32 = 16;
/// The time to measure a still screen.
const IDLE: Duration = Duration::from_secs(20);
/// The time until everything is at rest.
const SETTLE: Duration = Duration::from_secs(7);
/// The limit in percent of a core for a still screen with a viewer.
const MAX_IDLE_PERCENT: f64 = 0.1;
/// The key symbol of `a`.
const KEY: u32 = 0x61;

/// The result of one run of a scene, in the order of [`FIGURES`].
type Figures = [f64; 6];

const FIGURES: [&str; 6] = ["drawn/s", "updates/s", "CPU ms each", "kB each", "CPU ms/s", "kB/s"];
/// The figures that have a ratio to ours.
const COMPARED: [usize; 4] = [2, 3, 4, 5];

/// A machine with a socket for viewers.
struct Shown {
    machine: Machine,
    socket: PathBuf,
}

struct Paths {
    folder: TempDir,
    module: PathBuf,
}

/// A program, and whether its viewer uses continuous updates.
struct Row<'a> {
    rival: &'a Rival,
    streams: bool,
}

impl Row<'_> {
    fn name(&self) -> String {
        let streams = if self.streams { ", streams" } else { "" };
        format!("{}{streams}", self.rival.name)
    }
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // These have no display.
    let all = rivals(&folder, &["cloud-hypervisor", "firecracker", "qemu microvm"])?;
    let module = folder.path().join("module");
    let mut stage = stage();
    stage.write(&module)?;
    let paths = Paths { folder, module };
    let words: Vec<_> = std::env::args().skip(1).filter(|it| !it.starts_with("--")).collect();
    let named = |tags: &[&str]| words.iter().all(|word| tags.contains(&&**word));
    for preference in PREFERENCES {
        for scene in stage.scenes.iter().filter(|it| named(&[it.size, it.kind, preference.name])) {
            if scene.kind != "answer" {
                print(&compare(&all, &paths, scene, preference)?);
            }
        }
    }
    let answer = stage.scenes.iter().find(|it| it.kind == "answer").context("a scene")?;
    if named(&["latency"]) {
        latency(&all, &paths, answer)?;
    }
    if named(&["idle"]) {
        idle(&all, &paths, answer)?;
    }
    Ok(())
}

/// The program with a display and a socket for viewers.
fn command(rival: &Rival, paths: &Paths, lossy: bool) -> Result<Command> {
    let mut command = rival.command("checks=none then=halt show=yes")?;
    let (socket, module) = (paths.socket().display().to_string(), paths.module.display());
    if rival.name == "vmm" {
        let probe = paths.folder.path().join("probe.elf");
        // On a KVM that emulates, `vmm` needs this option to run a guest that is not built in.
        command.arg("--accept-emulation").arg("--kernel").arg(probe);
        command.args(["--initrd", &module.to_string(), "--display", "1920x1080"]);
        command.args(["--vnc", &format!("unix:{socket}")]);
    } else {
        let lossy = if lossy { "on" } else { "off" };
        command.args(["-initrd", &module.to_string(), "-name", "bench,debug-threads=on"]);
        command.args(["-device", "VGA,vgamem_mb=64"]);
        command.args(["-vnc", &format!("unix:{socket},lossy={lossy}")]);
    }
    Ok(command)
}

impl Paths {
    fn socket(&self) -> PathBuf {
        self.folder.path().join("screen")
    }
}

impl Shown {
    fn new(rival: &Rival, paths: &Paths, lossy: bool) -> Result<Self> {
        let mut machine = Machine::start_with_input(&mut command(rival, paths, lossy)?)?;
        machine.wait_for("ready\n", 1)?;
        Ok(Self { machine, socket: paths.socket() })
    }

    /// Selects a scene. Returns the number of frames drawn of the previous scene.
    fn choose(&mut self, scene: &Scene) -> Result<f64> {
        self.machine.output.clear();
        self.machine.send(&[b'a' + scene.number])?;
        self.machine.wait_for(&format!("scene {}\n", scene.number), 1)?;
        let drew = self.machine.output.lines().find_map(|line| line.strip_prefix("drew "));
        drew.context("no number of drawn frames")?.parse().context("the number of drawn frames")
    }

    /// Connects a viewer, and waits until it has the whole picture.
    fn viewer(&self, scene: &Scene, preference: Preference, streams: bool) -> Result<Viewer> {
        let mut viewer = Viewer::new(&self.socket)?;
        viewer.set_preference(preference, streams)?;
        let size = if scene.size == "4k" { (3840, 2160) } else { (1920, 1080) };
        loop {
            let before = (viewer.width, viewer.height);
            viewer.ask(false)?;
            let update = viewer.update()?;
            let all = update.pixels >= size.0 * size.1 && before == size;
            let right = |picture: &Picture| viewer.pixels == picture.pixels;
            if all && (preference.lossy || scene.still.as_ref().is_none_or(right)) {
                return Ok(viewer);
            }
        }
    }
}

/// Compares all programs in turn.
fn compare(all: &[Rival], paths: &Paths, scene: &Scene, preference: Preference) -> Result<String> {
    let mut rows: Vec<_> = all.iter().map(|rival| Row { rival, streams: false }).collect();
    if preference.lossy && scene.rate > 0 {
        // The rivals do not support continuous updates.
        rows.insert(1, Row { rival: &all[0], streams: true });
    }
    let mut samples: Vec<Vec<Figures>> = vec![Vec::new(); rows.len()];
    for _ in 0..ROUNDS {
        for (row, samples) in rows.iter().zip(&mut samples) {
            samples.push(run(row, paths, scene, preference).with_context(|| row.name())?);
        }
    }
    table(scene, preference, &rows, &samples)
}

fn run(row: &Row, paths: &Paths, scene: &Scene, preference: Preference) -> Result<Figures> {
    let mut shown = Shown::new(row.rival, paths, preference.lossy)?;
    shown.choose(scene)?;
    let (began, still) = (Instant::now(), scene.rate == 0);
    let mut viewer = shown.viewer(scene, preference, row.streams)?;
    if row.streams {
        viewer.stream(true)?;
    }
    let (before, bytes, start) =
        (shown.machine.processor_seconds()?, viewer.received, Instant::now());
    let mut updates = 0;
    while if still { updates < FRAMES } else { start.elapsed() < SPAN } {
        if !row.streams {
            viewer.ask(!still)?;
        }
        // A resize, or a change of the cursor, does not count as an update.
        while viewer.update()?.pixels == 0 {}
        updates += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    let used = (shown.machine.processor_seconds()? - before) * 1e3;
    let (updates, bytes) = (f64::from(updates), (viewer.received - bytes) as f64 / 1e3);
    let time = began.elapsed().as_secs_f64();
    let drawn = shown.choose(scene)? / time;
    let (each, second) =
        ([used, bytes].map(|it| it / updates), [used, bytes].map(|it| it / seconds));
    Ok([drawn, updates / seconds, each[0], each[1], second[0], second[1]])
}

/// Builds a table with one line for each program: medians, their spread, and the ratio to ours.
fn table(
    scene: &Scene,
    preference: Preference,
    rows: &[Row],
    samples: &[Vec<Figures>],
) -> Result<String> {
    let (size, kind, name) = (scene.size, scene.kind, preference.name);
    let mut text = format!("{size}, {kind}, {name} ({ROUNDS} rounds in turn)\n  {:<18}", "");
    FIGURES.iter().try_for_each(|head| write!(text, "{head:>23}"))?;
    COMPARED.iter().try_for_each(|at| write!(text, "{:>15}", format!("x {}", FIGURES[*at])))?;
    text.push('\n');
    let spread = |samples: &[Figures], at: usize| {
        Spread::of(&samples.iter().map(|it| it[at]).collect::<Vec<_>>())
    };
    for (row, its) in rows.iter().zip(samples) {
        write!(text, "  {:<18}", row.name())?;
        for at in 0..FIGURES.len() {
            let Spread { median, min, max, .. } = spread(its, at);
            write!(text, "{:>23}", format!("{median:.2} ({min:.2}-{max:.2})"))?;
        }
        for at in COMPARED {
            let ratio = spread(its, at).median / spread(&samples[0], at).median;
            write!(text, "{ratio:>15.2}")?;
        }
        text.push('\n');
    }
    text.push('\n');
    Ok(text)
}

/// Measures the time from the guest's write, or from a key press, to the viewer's decoded pixel.
fn latency(all: &[Rival], paths: &Paths, scene: &Scene) -> Result<()> {
    let mut samples = vec![[Samples::new(), Samples::new()]; all.len()];
    for _ in 0..ROUNDS {
        for (rival, samples) in all.iter().zip(&mut samples) {
            if samples[0].has_failed() {
                continue;
            }
            let answered = answers(rival, paths, scene, samples);
            measured(rival.name, samples, answered)?;
        }
    }
    let rows: Vec<_> = all.iter().map(|rival| (rival.name, rival.note)).collect();
    for (at, what) in ["the guest's write", "a key"].iter().enumerate() {
        let samples: Vec<_> = samples.iter().map(|it| it[at].clone()).collect();
        let title = format!("latency from {what} to the viewer's pixel, after a pause");
        print(&format!("{}\n", rows_table(&title, "ms", &rows, &samples)));
    }
    Ok(())
}

fn answers(rival: &Rival, paths: &Paths, scene: &Scene, samples: &mut [Samples; 2]) -> Result<()> {
    let mut shown = Shown::new(rival, paths, false)?;
    shown.choose(scene)?;
    let mut viewer = shown.viewer(scene, PREFERENCES[0], false)?;
    viewer.ask(true)?;
    for answer in 0..2 * ANSWERS {
        // Vary the pause to cover all phases of periodic work.
        sleep(Duration::from_millis(u64::from(100 + answer * 367 % 500)));
        let (by_key, middle) = (answer % 2 == 1, 540 * 1920 + 960);
        let before = viewer.pixels[middle];
        shown.machine.output.clear();
        let mut start = Instant::now();
        if by_key {
            viewer.key(KEY, answer % 4 == 1)?;
        } else {
            shown.machine.send(b".")?;
            shown.machine.wait_for("!", 1)?;
            start = Instant::now();
        }
        while viewer.pixels[middle] == before {
            viewer.update()?;
            viewer.ask(true)?;
        }
        samples[usize::from(by_key)].push(start.elapsed().as_secs_f64() * 1e3);
        if by_key {
            shown.machine.wait_for("!", 1)?;
        }
    }
    Ok(())
}

/// Measures a still screen with and without a viewer (processor time and bytes), and the memory of
/// a process that only listens.
fn idle(all: &[Rival], paths: &Paths, scene: &Scene) -> Result<()> {
    let titles = [
        ("a still screen without a viewer", "% of a core"),
        ("a still screen with a viewer", "% of a core"),
        ("a still screen with a viewer: data sent", "bytes"),
        ("PSS beyond the guest's RAM, listening for viewers, display off", "MiB"),
    ];
    let mut samples = titles.map(|_| vec![Samples::new(); all.len()]);
    for (at, rival) in all.iter().enumerate() {
        let cells = samples.iter_mut().map(|samples| &mut samples[at]);
        let figures = measured(rival.name, cells, rest(rival, paths, scene))?;
        let Some(figures) = figures else { continue };
        samples.iter_mut().zip(figures).for_each(|(samples, it)| samples[at].push(it));
    }
    let rows: Vec<_> = all.iter().map(|rival| (rival.name, rival.note)).collect();
    for ((title, unit), samples) in titles.iter().zip(&samples) {
        print(&format!("{}\n", rows_table(title, unit, &rows, samples)));
    }
    let [_, watched, bytes, _] = samples.map(|it| it[0].values()[0]);
    ensure!(
        watched < MAX_IDLE_PERCENT && bytes == 0.0,
        "a still screen: {watched:.3} %, {bytes} bytes"
    );
    Ok(())
}

/// Measures the PSS of a machine without the module, which a program may keep in memory.
fn memory(rival: &Rival, paths: &Paths) -> Result<u64> {
    let mut command = rival.command("checks=none then=halt")?;
    let vnc = format!("unix:{}", paths.socket().display());
    command.args(if rival.name == "vmm" { ["--vnc", &vnc] } else { ["-vnc", &vnc] });
    if rival.name != "vmm" {
        command.args(["-device", "VGA,vgamem_mb=64"]);
    }
    let mut machine = Machine::start(&mut command)?;
    machine.report()?;
    sleep(SETTLE);
    machine.memory_kib("Pss", MEMORY)
}

fn rest(rival: &Rival, paths: &Paths, scene: &Scene) -> Result<[f64; 4]> {
    let memory = memory(rival, paths)?;
    let mut shown = Shown::new(rival, paths, false)?;
    shown.choose(scene)?;
    let share = |machine: &Machine, wait: &mut dyn FnMut() -> Result<u64>| {
        let (before, start) = (machine.processor_seconds()?, Instant::now());
        let bytes = wait()?;
        let used = machine.processor_seconds()? - before;
        anyhow::Ok((used / start.elapsed().as_secs_f64() * 100.0, bytes))
    };
    sleep(SETTLE);
    let (alone, _) = share(&shown.machine, &mut || {
        sleep(IDLE);
        Ok(0)
    })?;
    let mut viewer = shown.viewer(scene, PREFERENCES[0], false)?;
    viewer.ask(true)?;
    // A change that was too late for the first picture may arrive now.
    viewer.silence(SETTLE)?;
    viewer.ask(true)?;
    let (watched, bytes) = share(&shown.machine, &mut || viewer.silence(IDLE))?;
    Ok([alone, watched, bytes as f64, memory as f64 / 1024.0])
}
