//! A disk: time and processor time of a request, by controller, depth and size, in the page cache
//! and around it.
//!
//! Words after `--` leave some out: `nvme`, `virtio-blk`, `cached`, `direct`.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use transom_benches::machine::Machine;
use transom_benches::rival::{Controller, Disk, Equipment, Rival, rivals};
use transom_benches::table::{Samples, measured, print, rows_table};

const ROUNDS: usize = 5;
const SPAN_MIB: usize = 256;
/// As the kernel has it for this architecture.
const O_DIRECT: i32 = 0o40000;

/// What a work is called, bytes, depth, and requests in the page cache and around it.
type Work = (&'static str, &'static str, u64, [u64; 2]);

/// Writes come last, so that nothing that is being written disturbs a read.
const WORKS: [Work; 6] = [
    ("read", "4K", 1, [20_000, 2000]),
    ("read", "4K", 32, [200_000, 20_000]),
    ("read", "128K", 32, [8000, 2000]),
    ("fill", "4K", 1, [20_000, 2000]),
    ("fill", "4K", 32, [200_000, 20_000]),
    ("fill", "128K", 32, [8000, 2000]),
];

/// A controller, and whether the page cache is left out.
#[derive(Clone, Copy)]
struct Way {
    controller: Controller,
    direct: bool,
}

const WAYS: [Way; 4] = [
    Way { controller: Controller::Virtio, direct: false },
    Way { controller: Controller::Nvme, direct: false },
    Way { controller: Controller::Virtio, direct: true },
    Way { controller: Controller::Nvme, direct: true },
];

impl Way {
    fn controller(self) -> &'static str {
        if self.controller == Controller::Nvme { "nvme" } else { "virtio-blk" }
    }

    fn cache(self) -> &'static str {
        if self.direct { "direct" } else { "cached" }
    }

    fn requests(self, work: &Work) -> u64 {
        work.3[usize::from(self.direct)]
    }
}

/// What one run tells of one work, in microseconds.
#[derive(Clone, Copy)]
struct Figures {
    /// At depth 1 the median of their latencies, else the time from one to the next.
    each: f64,
    /// Of the process' threads but the guest's processor.
    processor: f64,
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let all = rivals(&folder, &["qemu microvm"])?;
    let disk = folder.path().join("disk.img");
    let mut file = File::create(&disk).context("a disk")?;
    for _ in 0..SPAN_MIB {
        file.write_all(&[0x5a; 1 << 20]).context("a disk")?;
    }
    file.sync_all().context("a disk")?;
    let words: Vec<_> = std::env::args().skip(1).filter(|it| !it.starts_with("--")).collect();
    let named = |way: &Way| words.iter().all(|it| [way.controller(), way.cache()].contains(&&**it));
    for way in WAYS.into_iter().filter(named) {
        if way.direct && OpenOptions::new().read(true).custom_flags(O_DIRECT).open(&disk).is_err() {
            eprintln!("not compared: direct, {} cannot", folder.path().display());
            continue;
        }
        let able: Vec<_> = all.iter().filter(|it| it.has(way.controller, way.direct)).collect();
        compare(way, &able, &disk)?;
    }
    Ok(())
}

/// Measures all in turn, and the host itself where `fio` is there and there is no cache.
fn compare(way: Way, all: &[&Rival], disk: &Path) -> Result<()> {
    let mut rows: Vec<_> = all.iter().map(|rival| (rival.name, rival.note)).collect();
    let fio = way.direct && Command::new("fio").arg("--version").output().is_ok();
    if fio {
        rows.push(("fio", "on the host, without any guest"));
    }
    let mut samples = WORKS.map(|_| vec![[Samples::new(), Samples::new()]; rows.len()]);
    for round in 0..=ROUNDS {
        for (index, (name, _)) in rows.iter().enumerate() {
            let mut cells: Vec<_> = samples.iter_mut().flat_map(|it| &mut it[index]).collect();
            if cells.iter().any(|samples| samples.has_failed()) {
                continue;
            }
            let figures = match all.get(index) {
                Some(rival) => run(rival, way, disk),
                None => WORKS.iter().map(|work| host(work, way, disk)).collect(),
            };
            let figures: Vec<Figures> =
                measured(name, cells.drain(..), figures)?.unwrap_or_default();
            // The first round warms up caches.
            for (samples, it) in samples.iter_mut().zip(figures).filter(|_| round > 0) {
                samples[index][0].push(it.each);
                samples[index][1].push(it.processor);
            }
        }
    }
    for ((mode, block, depth, _), samples) in WORKS.iter().zip(&samples) {
        let name = if *mode == "fill" { "write" } else { mode };
        let (controller, cache) = (way.controller(), way.cache());
        for (column, what) in ["time", "processor time of the host's side"].iter().enumerate() {
            let samples: Vec<_> = samples.iter().map(|it| it[column].clone()).collect();
            let title = format!("{controller}, {cache}, {name}, {block}, depth {depth}: {what}");
            print(&format!(
                "{}\n",
                rows_table(&format!("{title} for each"), "us", &rows, &samples)
            ));
        }
    }
    Ok(())
}

fn run(rival: &Rival, way: Way, disk: &Path) -> Result<Vec<Figures>> {
    let words = WORKS.map(|work| {
        let (mode, block, depth, _) = work;
        let requests = way.requests(&work);
        format!("disk={mode},depth={depth},block={block},requests={requests},span={SPAN_MIB}M")
    });
    let words = format!("checks=none then=halt {}", words.join(" "));
    let disks = [Disk { controller: way.controller, path: disk, direct: way.direct }];
    let equipment = Equipment { disks: &disks, ..Equipment::default() };
    let mut machine = Machine::start(&mut rival.equipped(&words, &equipment)?)?;
    let parts = machine.parts("disk", WORKS.len())?.into_iter();
    let figures = parts.map(|(finding, used)| {
        let number = |key: &str| finding[key].as_f64().with_context(|| key.to_owned());
        let requests = number("requests")?;
        let each = match number("depth")? {
            1.0 => number("median_ns")? / 1e3,
            _ => number("microseconds")? / requests,
        };
        Ok(Figures { each, processor: used * 1e6 / requests })
    });
    figures.collect()
}

/// The same by `fio`, with the best that it has.
fn host(work: &Work, way: Way, disk: &Path) -> Result<Figures> {
    let (mode, block, depth, _) = work;
    let requests = way.requests(work);
    let mut fio = Command::new("fio");
    fio.args(["--name=host", "--output-format=json", "--direct=1", "--ioengine=io_uring"]);
    fio.arg(format!("--filename={}", disk.display()));
    fio.arg(format!("--rw={}", if *mode == "read" { "randread" } else { "randwrite" }));
    fio.arg(format!("--bs={block}")).arg(format!("--iodepth={depth}"));
    // So much, however often the file is gone through.
    let bytes = block.trim_end_matches('K').parse::<u64>()? * 1024 * requests;
    fio.arg(format!("--size={SPAN_MIB}M")).arg(format!("--io_size={bytes}")).arg("--norandommap");
    let output = fio.output().context("fio")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).context("fio's JSON")?;
    let job = &told["jobs"][0];
    let part = &job[if *mode == "read" { "read" } else { "write" }];
    let number = |value: &Value| value.as_f64().context("a number of fio's");
    let (count, milliseconds) = (number(&part["total_ios"])?, number(&part["runtime"])?);
    let each = match depth {
        1 => number(&part["clat_ns"]["percentile"]["50.000000"])? / 1e3,
        _ => milliseconds * 1e3 / count,
    };
    let percent = number(&job["usr_cpu"])? + number(&job["sys_cpu"])?;
    Ok(Figures { each, processor: percent / 100.0 * milliseconds * 1e3 / count })
}
