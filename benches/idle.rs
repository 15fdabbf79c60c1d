//! An idle machine: processor time of the whole process while its guest halts, with two disks and a
//! network that were used before.
#![forbid(unsafe_code)]

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use transom_benches::machine::Machine;
use transom_benches::rival::{Rival, rivals};
use transom_benches::table::{Samples, print, table};
use transom_benches::tap::{HOST, NAME, Tap};

const ROUNDS: usize = 3;
const IDLE: Duration = Duration::from_secs(20);
/// Until all that polls has stopped.
const SETTLE: Duration = Duration::from_secs(1);
/// What shows that polling stops by itself: 1 % of a core.
const MOST: f64 = 10_000.0;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // These have controllers that the probe does not drive, or cannot reach.
    let all = rivals(&folder, &["cloud-hypervisor", "firecracker", "qemu microvm"])?;
    let disks = ["a.img", "b.img"].map(|name| folder.path().join(name));
    for disk in &disks {
        File::create(disk).and_then(|file| file.set_len(64 << 20)).context("a disk")?;
    }
    let tap = Tap::new()?;
    let mut samples = vec![Samples::new(); all.len()];
    for _ in 0..ROUNDS {
        for (rival, samples) in all.iter().zip(&mut samples) {
            samples.push(idle(rival, &disks, &tap).context(rival.name)?);
        }
    }
    let title = format!("idle guest with disk, NVMe and network, over {} s", IDLE.as_secs());
    print(&table(&title, "us of processor time a second", &all, &samples));
    let most = samples[0].iter().copied().fold(0.0, f64::max);
    ensure!(most < MOST, "our idle machine took {most:.0} us a second");
    Ok(())
}

fn command(rival: &Rival, words: &str, [one, other]: [&Path; 2]) -> Result<Command> {
    let (one, other) = (one.display(), other.display());
    let mut command = rival.command(words)?;
    if rival.name == "vmm" {
        for device in [
            format!("virtio-blk,path={one}"),
            format!("nvme,path={other}"),
            format!("virtio-net,to=tap:{NAME}"),
        ] {
            command.args(["--device", &device]);
        }
    } else {
        command.args(["-object", "iothread,id=io"]);
        for (id, path) in [("one", &one), ("other", &other)] {
            let drive = format!("if=none,id={id},format=raw,aio=io_uring,file={path}");
            command.args(["-drive", &drive]);
        }
        command.args(["-device", "virtio-blk-pci,drive=one,iothread=io"]);
        command.args(["-device", "nvme,serial=idle,drive=other"]);
        let tap = format!("tap,id=net,ifname={NAME},script=no,downscript=no");
        command.args(["-netdev", &tap, "-device", "virtio-net-pci,netdev=net,romfile="]);
    }
    Ok(command)
}

/// Microseconds of processor time in a second.
fn idle(rival: &Rival, [one, other]: &[std::path::PathBuf; 2], tap: &Tap) -> Result<f64> {
    let words = format!(
        "checks=none then=halt disk=read,span=4M,wait=interrupt net=arp,host={HOST},count=100"
    );
    let command = command(rival, &words, [one, other])?;
    let mut machine = Machine::start(&mut tap.inside(&command))?;
    let report = machine.report()?;
    ensure!(report["ok"] == true, "{report}");
    sleep(SETTLE);
    let (before, start) = (machine.all_seconds()?, Instant::now());
    sleep(IDLE);
    let used = machine.all_seconds()? - before;
    // What was used until now shows that it is counted at all.
    ensure!(before > 0.0, "no processor time is told of the process");
    Ok(used / start.elapsed().as_secs_f64() * 1e6)
}
