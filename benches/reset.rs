//! From a guest's triple fault to its first byte after the reset, in the same process.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use transom_benches::machine::{Machine, REPORTED};
use transom_benches::rival::{Rival, rivals};
use transom_benches::table::{Spread, interleave, print, table};

const ROUNDS: usize = 5;
const RESETS: usize = 20;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // These end where a guest resets itself.
    let all = rivals(&folder, &["firecracker", "qemu q35"])?;
    let samples = interleave(&all, ROUNDS, reset)?;
    let title = format!("reset: triple fault to first byte, median of {RESETS} each");
    print(&table(&title, "ms", &all, &samples));
    Ok(())
}

fn reset(rival: &Rival) -> Result<f64> {
    let mut machine = Machine::start(&mut rival.command("then=triple checks=none")?)?;
    let mut times = Vec::new();
    let mut end = None;
    while times.len() < RESETS {
        let (words, at) = machine.hear()?;
        // The first byte of a run comes alone or leads what comes.
        if let Some(end) = end.take() {
            times.push((at - end).as_secs_f64() * 1e3);
        }
        // A chunk that has more after the report came too late to tell.
        end = words.ends_with(REPORTED).then_some(at).filter(|_| !machine.said.is_empty());
    }
    Some(Spread::of(&times).median).filter(|it| it.is_finite()).context("no resets")
}
