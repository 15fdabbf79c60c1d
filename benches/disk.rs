//! A disk in the page cache: time and processor time of a request, by depth and size.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use transom_benches::machine::Machine;
use transom_benches::rival::{Rival, rivals};
use transom_benches::table::{Samples, print, table};

const ROUNDS: usize = 5;
const SPAN_MIB: usize = 256;

/// Mode, bytes, depth, requests.
type Work = (&'static str, &'static str, u64, u64);

/// Writes come last, so that nothing that is being written disturbs a read.
const WORKS: [Work; 6] = [
    ("read", "4K", 1, 20_000),
    ("read", "4K", 32, 200_000),
    ("read", "128K", 32, 8000),
    ("fill", "4K", 1, 20_000),
    ("fill", "4K", 32, 200_000),
    ("fill", "128K", 32, 8000),
];

/// What one run tells of one work, in microseconds.
struct Figures {
    /// At depth 1 the median of their latencies, else the time from one to the next.
    each: f64,
    /// Of the process' threads but the guest's processor.
    processor: f64,
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // These have disks that the probe does not drive, or cannot reach.
    let all = rivals(&folder, &["cloud-hypervisor", "firecracker", "qemu microvm"])?;
    let disk = folder.path().join("disk.img");
    let mut file = File::create(&disk).context("a disk")?;
    for _ in 0..SPAN_MIB {
        file.write_all(&[0x5a; 1 << 20]).context("a disk")?;
    }
    let empty = || vec![[Samples::new(), Samples::new()]; all.len()];
    let mut samples = WORKS.map(|_| empty());
    for round in 0..=ROUNDS {
        for (index, rival) in all.iter().enumerate() {
            let figures = run(rival, &disk).context(rival.name)?;
            // The first round warms up caches.
            if round == 0 {
                continue;
            }
            for (samples, it) in samples.iter_mut().zip(figures) {
                samples[index][0].push(it.each);
                samples[index][1].push(it.processor);
            }
        }
    }
    for ((mode, block, depth, _), samples) in WORKS.iter().zip(&samples) {
        let name = if *mode == "fill" { "write" } else { mode };
        for (column, what) in ["time", "processor time of the host's side"].iter().enumerate() {
            let samples: Vec<_> = samples.iter().map(|it| it[column].clone()).collect();
            let title = format!("{name}, {block}, depth {depth}: {what} for each");
            print(&format!("{}\n", table(&title, "us", &all, &samples)));
        }
    }
    Ok(())
}

/// The program with its best: io_uring, a thread of its own that polls, the host's page cache.
fn command(rival: &Rival, words: &str, disk: &Path) -> Result<Command> {
    let mut command = rival.command(words)?;
    let disk = disk.display();
    if rival.name == "vmm" {
        command.arg("--device").arg(format!("virtio-blk,path={disk},direct=off"));
    } else {
        let drive = "if=none,id=disk,format=raw,aio=io_uring,cache=writeback";
        command.args(["-name", "bench,debug-threads=on", "-object", "iothread,id=io"]);
        command.arg("-drive").arg(format!("{drive},file={disk}"));
        command.args(["-device", "virtio-blk-pci,drive=disk,iothread=io"]);
    }
    Ok(command)
}

fn run(rival: &Rival, disk: &Path) -> Result<Vec<Figures>> {
    let words = WORKS.map(|(mode, block, depth, requests)| {
        let way = format!("depth={depth},block={block},requests={requests}");
        format!("disk={mode},{way},span={SPAN_MIB}M")
    });
    let words = format!("checks=none then=halt {}", words.join(" "));
    let mut machine = Machine::start(&mut command(rival, &words, disk)?)?;
    machine.wait_for("loops_per_us", 1)?;
    let mut times = vec![machine.processor_seconds()?];
    for count in 1..=WORKS.len() {
        machine.wait_for("  disk  ", count)?;
        times.push(machine.processor_seconds()?);
    }
    let report = machine.report()?;
    ensure!(report["ok"] == true, "{report}");
    let findings = report["findings"].as_array().context("findings")?;
    let found = findings.iter().filter(|finding| finding["name"] == "disk");
    let used = times.windows(2).map(|pair| pair[1] - pair[0]);
    let figures = found.zip(used).map(|(finding, used)| {
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
