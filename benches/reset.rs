//! The time from a guest's triple fault to its first byte after the reset, in the same process.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use transom_benches::machine::{Machine, REPORT_END};
use transom_benches::rival::{Rival, rivals};
use transom_benches::table::{Spread, interleave, print, table};

const ROUNDS: usize = 5;
const RESETS: usize = 20;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // These exit when the guest resets itself.
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
        let (words, at) = machine.read_output()?;
        // The first byte of a run is at the start of a chunk.
        if let Some(end) = end.take() {
            times.push((at - end).as_secs_f64() * 1e3);
        }
        // If a chunk continues after the report, the time of the report's end is unknown.
        end = words.ends_with(REPORT_END).then_some(at).filter(|_| !machine.output.is_empty());
    }
    Some(Spread::of(&times).median).filter(|it| it.is_finite()).context("no resets")
}
