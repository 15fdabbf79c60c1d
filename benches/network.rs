//! A network: packets per second into a tap, a round trip to this host, and the processor time of
//! each.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use transom_benches::machine::Machine;
use transom_benches::rival::{Rival, rivals};
use transom_benches::table::{Samples, print, rows_table};
use transom_benches::tap::{HOST, NAME, Tap};

const ROUNDS: usize = 5;

/// What it is called, the probe's word for it, and whether its latency counts.
const WORKS: [(&str, &str, bool); 3] = [
    ("send 1514 bytes", "net=send,size=1514,depth=256,count=1000000", false),
    ("send 64 bytes", "net=send,size=64,depth=256,count=1000000", false),
    ("ask the host, 64 bytes there", "net=arp,host=HOST,size=64,count=20000", true),
];

/// A program, and what it is told beyond that.
struct Entry {
    rival: usize,
    name: &'static str,
    note: &'static str,
    more: &'static str,
}

/// What one run tells of one work: packets per second, in thousands, or microseconds; and
/// microseconds of the host's side.
type Figures = [f64; 2];

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // These have controllers that the probe does not drive, or cannot reach.
    let rivals = rivals(&folder, &["cloud-hypervisor", "firecracker", "qemu microvm"])?;
    let entries = entries(&rivals);
    let tap = Tap::new()?;
    let mut samples = WORKS.map(|_| vec![[Samples::new(), Samples::new()]; entries.len()]);
    for round in 0..=ROUNDS {
        for (index, entry) in entries.iter().enumerate() {
            let figures = run(entry, &rivals[entry.rival], &tap).context(entry.name)?;
            // The first round warms up caches.
            for (samples, figures) in samples.iter_mut().zip(figures).filter(|_| round > 0) {
                samples[index].iter_mut().zip(figures).for_each(|(to, figure)| to.push(figure));
            }
        }
    }
    let rows: Vec<_> = entries.iter().map(|entry| (entry.name, entry.note)).collect();
    for ((name, _, asks), samples) in WORKS.iter().zip(&samples) {
        let first = if *asks { ("median round trip", "us") } else { ("rate", "thousand/s") };
        let second = ("processor time of the host's side for each", "us");
        for (column, (what, unit)) in [first, second].into_iter().enumerate() {
            let samples: Vec<_> = samples.iter().map(|it| it[column].clone()).collect();
            print(&format!("{}\n", rows_table(&format!("{name}: {what}"), unit, &rows, &samples)));
        }
    }
    Ok(())
}

/// Ours, and QEMU with its own way and the kernel's, where that is there.
fn entries(rivals: &[Rival]) -> Vec<Entry> {
    let mut entries = Vec::new();
    let vhost = Path::new("/dev/vhost-net").exists();
    if !vhost {
        eprintln!("not compared: vhost=on, there is no /dev/vhost-net");
    }
    for (index, rival) in rivals.iter().enumerate() {
        let mut add = |name, note, more| entries.push(Entry { rival: index, name, note, more });
        if rival.name == "vmm" {
            add("vmm", "", "");
            continue;
        }
        add(rival.name, "vhost=off", ",vhost=off");
        if vhost {
            add(rival.name, "vhost=on", ",vhost=on");
        }
    }
    entries
}

fn command(entry: &Entry, rival: &Rival, words: &str) -> Result<Command> {
    let mut command = rival.command(words)?;
    if rival.name == "vmm" {
        command.args(["--device", &format!("virtio-net,to=tap:{NAME}{}", entry.more)]);
    } else {
        let tap = format!("tap,id=net,ifname={NAME},script=no,downscript=no{}", entry.more);
        command.args(["-name", "bench,debug-threads=on", "-netdev", &tap]);
        command.args(["-device", "virtio-net-pci,netdev=net,romfile="]);
    }
    Ok(command)
}

fn run(entry: &Entry, rival: &Rival, tap: &Tap) -> Result<Vec<Figures>> {
    let words: Vec<_> = WORKS.iter().map(|(_, word, _)| word.replace("HOST", HOST)).collect();
    let words = format!("checks=none then=halt {}", words.join(" "));
    let mut machine = Machine::start(&mut tap.inside(&command(entry, rival, &words)?))?;
    let parts = machine.parts("net", WORKS.len())?.into_iter();
    let figures = parts.zip(WORKS).map(|((finding, used), (_, _, asks))| {
        let number = |key: &str| finding[key].as_f64().with_context(|| key.to_owned());
        let sent = number("sent")?;
        let rate = sent / number("microseconds")? * 1e3;
        let first = if asks { number("median_ns")? / 1e3 } else { rate };
        Ok([first, used * 1e6 / sent])
    });
    figures.collect()
}
