//! Disks: time and processor time of a request, by controller, queue depth and size, with and
//! without the page cache.
//!
//! Words after `--` select a part: `nvme`, `virtio-blk`, `cached`, `direct`.
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
/// The kernel's value on this architecture.
const O_DIRECT: i32 = 0o40000;

struct Workload {
    /// `read` or `fill`, in the probe's words.
    mode: &'static str,
    /// The size of a request.
    block: &'static str,
    depth: u64,
    /// The number of requests with the page cache, and without it.
    requests: [u64; 2],
}

const fn workload(
    mode: &'static str,
    block: &'static str,
    depth: u64,
    requests: [u64; 2],
) -> Workload {
    Workload { mode, block, depth, requests }
}

/// Writes come last, so that their writeback does not disturb reads.
const WORKLOADS: [Workload; 6] = [
    workload("read", "4K", 1, [20_000, 2000]),
    workload("read", "4K", 32, [200_000, 20_000]),
    workload("read", "128K", 32, [8000, 2000]),
    workload("fill", "4K", 1, [20_000, 2000]),
    workload("fill", "4K", 32, [200_000, 20_000]),
    workload("fill", "128K", 32, [8000, 2000]),
];

#[derive(Clone, Copy)]
struct Setup {
    controller: Controller,
    direct: bool,
}

const SETUPS: [Setup; 4] = [
    Setup { controller: Controller::Virtio, direct: false },
    Setup { controller: Controller::Nvme, direct: false },
    Setup { controller: Controller::Virtio, direct: true },
    Setup { controller: Controller::Nvme, direct: true },
];

impl Setup {
    fn controller(self) -> &'static str {
        if self.controller == Controller::Nvme { "nvme" } else { "virtio-blk" }
    }

    fn cache(self) -> &'static str {
        if self.direct { "direct" } else { "cached" }
    }

    fn requests(self, workload: &Workload) -> u64 {
        workload.requests[usize::from(self.direct)]
    }
}

/// The result of one run of a workload, in microseconds.
#[derive(Clone, Copy)]
struct Figures {
    /// At depth 1 the median latency, otherwise the time per request.
    each: f64,
    /// Processor time of the process per request, without the vCPU's thread.
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
    let named =
        |setup: &Setup| words.iter().all(|it| [setup.controller(), setup.cache()].contains(&&**it));
    for setup in SETUPS.into_iter().filter(named) {
        if setup.direct && OpenOptions::new().read(true).custom_flags(O_DIRECT).open(&disk).is_err()
        {
            eprintln!("not compared: direct, {} does not support it", folder.path().display());
            continue;
        }
        let able: Vec<_> = all.iter().filter(|it| it.has(setup.controller, setup.direct)).collect();
        compare(setup, &able, &disk)?;
    }
    Ok(())
}

/// Measures all programs in turn. Without the page cache, also measures the host itself if `fio` is
/// installed.
fn compare(setup: Setup, all: &[&Rival], disk: &Path) -> Result<()> {
    let mut rows: Vec<_> = all.iter().map(|rival| (rival.name, rival.note)).collect();
    let fio = setup.direct && Command::new("fio").arg("--version").output().is_ok();
    if fio {
        rows.push(("fio", "on the host, without any guest"));
    }
    let mut samples = WORKLOADS.map(|_| vec![[Samples::new(), Samples::new()]; rows.len()]);
    for round in 0..=ROUNDS {
        for (index, (name, _)) in rows.iter().enumerate() {
            let mut cells: Vec<_> = samples.iter_mut().flat_map(|it| &mut it[index]).collect();
            if cells.iter().any(|samples| samples.has_failed()) {
                continue;
            }
            let figures = match all.get(index) {
                Some(rival) => run(rival, setup, disk),
                None => WORKLOADS.iter().map(|workload| host(workload, setup, disk)).collect(),
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
    for (Workload { mode, block, depth, .. }, samples) in WORKLOADS.iter().zip(&samples) {
        let name = if *mode == "fill" { "write" } else { mode };
        let (controller, cache) = (setup.controller(), setup.cache());
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

fn run(rival: &Rival, setup: Setup, disk: &Path) -> Result<Vec<Figures>> {
    let words = WORKLOADS.map(|workload| {
        let Workload { mode, block, depth, .. } = workload;
        let requests = setup.requests(&workload);
        format!("disk={mode},depth={depth},block={block},requests={requests},span={SPAN_MIB}M")
    });
    let words = format!("checks=none then=halt {}", words.join(" "));
    let disks = [Disk { controller: setup.controller, path: disk, direct: setup.direct }];
    let equipment = Equipment { disks: &disks, ..Equipment::default() };
    let mut machine = Machine::start(&mut rival.equipped(&words, &equipment)?)?;
    let parts = machine.parts("disk", WORKLOADS.len())?.into_iter();
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

/// Runs the workload on the host with `fio`, in its fastest configuration.
fn host(workload: &Workload, setup: Setup, disk: &Path) -> Result<Figures> {
    let Workload { mode, block, depth, .. } = workload;
    let requests = setup.requests(workload);
    let mut fio = Command::new("fio");
    fio.args(["--name=host", "--output-format=json", "--direct=1", "--ioengine=io_uring"]);
    fio.arg(format!("--filename={}", disk.display()));
    fio.arg(format!("--rw={}", if *mode == "read" { "randread" } else { "randwrite" }));
    fio.arg(format!("--bs={block}")).arg(format!("--iodepth={depth}"));
    // The total number of bytes, even if it exceeds the size of the file.
    let bytes = block.trim_end_matches('K').parse::<u64>()? * 1024 * requests;
    fio.arg(format!("--size={SPAN_MIB}M")).arg(format!("--io_size={bytes}")).arg("--norandommap");
    let output = fio.output().context("fio")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).context("fio's JSON")?;
    let job = &report["jobs"][0];
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
