//! Memory of the process beyond the guest's RAM, after the guest has done its work and is idle.
#![forbid(unsafe_code)]

use anyhow::Result;
use transom_benches::machine::Machine;
use transom_benches::rival::{MEMORY, Rival, rivals};
use transom_benches::table::{interleave, print, table};

const ROUNDS: usize = 5;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let all = rivals(&folder, &[])?;
    let mut threads = Vec::new();
    for field in ["Pss", "Rss", "Private_Dirty"] {
        let measure = |rival: &Rival| {
            let mut machine = Machine::start(&mut rival.command("then=halt checks=none")?)?;
            machine.report()?;
            threads.push((rival.name, machine.threads()?));
            Ok(machine.memory_kib(field, MEMORY)? as f64 / 1024.0)
        };
        let samples = interleave(&all, ROUNDS, measure)?;
        let title = format!("memory beyond guest RAM: {field}");
        print(&format!("{}\n", table(&title, "MiB", &all, &samples)));
    }
    threads.truncate(all.len());
    print(&format!("threads: {threads:?}\n"));
    Ok(())
}
