//! The cost of a guest exit: the kernel's part, and ours.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use transom_benches::machine::Machine;
use transom_benches::rival::{Rival, rivals};
use transom_benches::table::{Samples, measured, print, table};

const ROUNDS: usize = 5;
/// The kernel handles `exit-cpuid` alone: its cost is the kernel's part of the other exits.
const KINDS: [&str; 3] = ["exit-port", "exit-mmio", "exit-cpuid"];

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // With firmware a round takes seconds, and the exits are those of the other QEMU machine.
    let all = rivals(&folder, &["qemu q35"])?;
    let mut samples = BTreeMap::from(KINDS.map(|kind| (kind, vec![Samples::new(); all.len()])));
    for _ in 0..ROUNDS {
        for (index, rival) in all.iter().enumerate() {
            let mut rows: Vec<_> = samples.values_mut().map(|rows| &mut rows[index]).collect();
            if rows.iter().any(|samples| samples.has_failed()) {
                continue;
            }
            let costs = measured(rival.name, rows.drain(..), exits(rival))?;
            for (kind, cost) in costs.into_iter().flatten() {
                samples.get_mut(kind).context(kind)?[index].push(cost);
            }
        }
    }
    for (kind, samples) in &samples {
        print(&format!("{}\n", table(&format!("cost of an {kind}"), "us", &all, samples)));
    }
    Ok(())
}

fn exits(rival: &Rival) -> Result<Vec<(&'static str, f64)>> {
    let mut machine = Machine::start(&mut rival.command("bench=exits then=halt")?)?;
    let report = machine.report()?;
    let findings = report["findings"].as_array().context("findings")?;
    let cost = |kind: &'static str| {
        let finding = findings.iter().find(|finding| finding["name"] == kind).context(kind)?;
        let nanoseconds = finding["median_ns"].as_f64().context("median_ns")?;
        Ok((kind, nanoseconds / 1e3))
    };
    KINDS.into_iter().map(cost).collect()
}
