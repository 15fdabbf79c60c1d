//! An idle machine: processor time of the whole process while its guest halts, after it used two
//! disks and a network.
#![forbid(unsafe_code)]

use std::fs::File;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use transom_benches::machine::Machine;
use transom_benches::rival::{Controller, Disk, Equipment, Rival, rivals};
use transom_benches::table::{Samples, measured, print, rows_table};
use transom_benches::tap::{HOST, NAME, Tap};

const ROUNDS: usize = 3;
const IDLE: Duration = Duration::from_secs(20);
/// The time after which all polling has stopped.
const SETTLE: Duration = Duration::from_secs(1);
/// The limit in microseconds per second, 1 % of a core. It proves that polling stops by itself.
const MAX_US: f64 = 10_000.0;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let all = rivals(&folder, &["qemu microvm"])?;
    let disks = ["a.img", "b.img"].map(|name| folder.path().join(name));
    for disk in &disks {
        File::create(disk).and_then(|file| file.set_len(64 << 20)).context("a disk")?;
    }
    let tap = Tap::new()?;
    let mut samples = vec![Samples::new(); all.len()];
    for _ in 0..ROUNDS {
        for (rival, samples) in all.iter().zip(&mut samples) {
            if samples.has_failed() {
                continue;
            }
            let used = measured(rival.name, [&mut *samples], idle(rival, &disks, &tap))?;
            used.into_iter().for_each(|used| samples.push(used));
        }
    }
    let title = format!("idle guest with two disks and a network, over {} s", IDLE.as_secs());
    let note = |it: &Rival| if it.has(Controller::Nvme, false) { "" } else { "no NVMe" };
    let rows: Vec<_> = all.iter().map(|rival| (rival.name, note(rival))).collect();
    print(&rows_table(&title, "us of processor time a second", &rows, &samples));
    let max = samples[0].values().iter().copied().fold(0.0, f64::max);
    ensure!(max < MAX_US, "vmm's idle machine took {max:.0} us a second: the limit is {MAX_US} us");
    Ok(())
}

/// Measures the processor time in microseconds per second.
fn idle(rival: &Rival, [one, other]: &[PathBuf; 2], tap: &Tap) -> Result<f64> {
    let words = format!(
        "checks=none then=halt disk=read,span=4M,wait=interrupt net=arp,host={HOST},count=100"
    );
    let other_controller =
        if rival.has(Controller::Nvme, false) { Controller::Nvme } else { Controller::Virtio };
    let disks = [(one, Controller::Virtio), (other, other_controller)]
        .map(|(path, controller)| Disk { controller, path, direct: false });
    let equipment = Equipment { disks: &disks, tap: Some(NAME), vhost: false };
    let mut machine = Machine::start(&mut tap.inside(&rival.equipped(&words, &equipment)?))?;
    let report = machine.report()?;
    ensure!(report["ok"] == true, "{report}");
    sleep(SETTLE);
    let (before, start) = (machine.all_seconds()?, Instant::now());
    sleep(IDLE);
    let used = machine.all_seconds()? - before;
    // Startup took processor time, so zero means that the measurement does not work.
    ensure!(before > 0.0, "the kernel reports no processor time of the process");
    Ok(used / start.elapsed().as_secs_f64() * 1e6)
}
