//! Network: packets and megabytes per second to a tap, a round trip to this host, and the processor
//! time of each.
#![forbid(unsafe_code)]

use std::path::Path;

use anyhow::{Context, Result};
use transom_benches::machine::Machine;
use transom_benches::rival::{Equipment, Rival, rivals};
use transom_benches::table::{Samples, measured, print, rows_table};
use transom_benches::tap::{HOST, NAME, Tap};

const ROUNDS: usize = 5;

/// The name, the probe's word, and whether it measures a round trip.
const WORKLOADS: [(&str, &str, bool); 3] = [
    ("send 1514 bytes", "net=send,size=1514,depth=256,count=1000000", false),
    ("send 64 bytes", "net=send,size=64,depth=256,count=1000000", false),
    ("round trip to the host, 64 bytes", "net=arp,host=HOST,size=64,count=20000", true),
];

/// A program, and its way to move frames.
struct Entry {
    rival: usize,
    name: &'static str,
    note: &'static str,
    vhost: bool,
}

/// The result of one run of a workload. [`columns`] names the figures.
type Figures = [f64; 3];

/// The names and units of the figures that are printed: the rate and the throughput, or the latency
/// of a round trip, and the processor time of the host's side.
fn columns(is_round_trip: bool) -> [Option<(&'static str, &'static str)>; 3] {
    let (rate, throughput) = (("rate", "thousand/s"), ("throughput", "MB/s"));
    let processor = Some(("processor time of the host's side for each", "us"));
    if is_round_trip {
        [Some(("median round trip", "us")), None, processor]
    } else {
        [Some(rate), Some(throughput), processor]
    }
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let rivals = rivals(&folder, &["qemu microvm"])?;
    let entries = entries(&rivals);
    let tap = Tap::new()?;
    let mut samples = WORKLOADS.map(|_| vec![[const { Samples::new() }; 3]; entries.len()]);
    for round in 0..=ROUNDS {
        for (index, entry) in entries.iter().enumerate() {
            let mut rows: Vec<_> = samples.iter_mut().flat_map(|it| &mut it[index]).collect();
            if rows.iter().any(|samples| samples.has_failed()) {
                continue;
            }
            let figures = run(entry, &rivals[entry.rival], &tap);
            let figures = measured(entry.name, rows.drain(..), figures)?.unwrap_or_default();
            // The first round warms up caches.
            for (samples, figures) in samples.iter_mut().zip(figures).filter(|_| round > 0) {
                samples[index].iter_mut().zip(figures).for_each(|(to, figure)| to.push(figure));
            }
        }
    }
    let rows: Vec<_> = entries.iter().map(|entry| (entry.name, entry.note)).collect();
    for ((name, _, is_round_trip), samples) in WORKLOADS.iter().zip(&samples) {
        for (column, head) in columns(*is_round_trip).into_iter().enumerate() {
            let Some((what, unit)) = head else { continue };
            let samples: Vec<_> = samples.iter().map(|it| it[column].clone()).collect();
            print(&format!("{}\n", rows_table(&format!("{name}: {what}"), unit, &rows, &samples)));
        }
    }
    Ok(())
}

/// All programs. QEMU is there with `vhost=off`, and also with `vhost=on` if the host has
/// vhost-net.
fn entries(rivals: &[Rival]) -> Vec<Entry> {
    let mut entries = Vec::new();
    let vhost = Path::new("/dev/vhost-net").exists();
    if !vhost {
        eprintln!("not compared: vhost=on: this host has no /dev/vhost-net");
    }
    for (index, rival) in rivals.iter().enumerate() {
        let mut add = |note, vhost| {
            entries.push(Entry { rival: index, name: rival.name, note, vhost });
        };
        if !rival.name.starts_with("qemu") {
            add("", false);
            continue;
        }
        add("vhost=off", false);
        if vhost {
            add("vhost=on", true);
        }
    }
    entries
}

fn run(entry: &Entry, rival: &Rival, tap: &Tap) -> Result<Vec<Figures>> {
    let words: Vec<_> = WORKLOADS.iter().map(|(_, word, _)| word.replace("HOST", HOST)).collect();
    let words = format!("checks=none then=halt {}", words.join(" "));
    let equipment = Equipment { tap: Some(NAME), vhost: entry.vhost, ..Equipment::default() };
    let mut machine = Machine::start(&mut tap.inside(&rival.equipped(&words, &equipment)?))?;
    let parts = machine.parts("net", WORKLOADS.len())?.into_iter();
    let figures = parts.zip(WORKLOADS).map(|((finding, used), (_, _, is_round_trip))| {
        let number = |key: &str| finding[key].as_f64().with_context(|| key.to_owned());
        let sent = number("sent")?;
        let rate = sent / number("microseconds")? * 1e3;
        let first = if is_round_trip { number("median_ns")? / 1e3 } else { rate };
        Ok([first, rate * number("size")? / 1e3, used * 1e6 / sent])
    });
    figures.collect()
}
