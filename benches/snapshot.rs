//! The time in which a machine is saved to a file, and from the start of a process to the first
//! byte of the guest that continues in it. The guest prints endlessly.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use transom_benches::machine::Machine;
use transom_benches::moved::compare;
use transom_benches::rival::Rival;
use transom_benches::saved::Saver;

const GUEST: &str = "checks=none fill=256 then=beats";

/// The milliseconds of a save, those to the first byte, with and without our checksums of memory,
/// and the MiB on the disk.
type Figures = [f64; 4];

const TITLES: [(&str, &str); 4] = [
    ("snapshot: from the command until it is durable", "ms"),
    ("restore: from the start of the process to the guest's first byte", "ms"),
    ("the same, ours with `check=off`: no other program has checksums of memory", "ms"),
    ("size of the snapshot", "MiB"),
];

fn main() -> Result<()> {
    compare(&TITLES, &["qemu q35"], figures)
}

fn figures(rival: &Rival, dir: &Path) -> Result<Figures> {
    let saver = Saver { rival, words: GUEST, folder: dir.join("saved") };
    let control = dir.join("control");
    let machine = saver.boot(&control)?;
    let start = Instant::now();
    saver.save(&control)?;
    let saved = milliseconds(start.elapsed());
    drop(machine);
    let off = first_byte(saver.restore(&dir.join("again"), ",check=off")?)?;
    let first = first_byte(saver.restore(&dir.join("once-more"), "")?)?;
    Ok([saved, milliseconds(first), milliseconds(off), mebibytes(&saver.folder)?])
}

/// The programs print lines of their own before.
fn first_byte(mut restored: Machine) -> Result<Duration> {
    loop {
        let (text, at) = restored.read_output()?;
        if text.contains('~') {
            return Ok(at);
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn mebibytes(folder: &Path) -> Result<f64> {
    let mut blocks = 0;
    for entry in fs::read_dir(folder)? {
        blocks += entry?.metadata()?.blocks();
    }
    Ok((blocks * 512) as f64 / f64::from(1 << 20))
}
