//! The time from exec to the first byte that the guest writes to its serial port.
#![forbid(unsafe_code)]

use anyhow::Result;
use transom_benches::machine::Machine;
use transom_benches::rival::{Rival, rivals};
use transom_benches::table::{interleave, print, table};

const ROUNDS: usize = 30;
/// A program that needs seconds, and is measured in fewer rounds.
const SLOW: &str = "qemu q35";
const SLOW_ROUNDS: usize = 5;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let fast = rivals(&folder, &[SLOW])?;
    let title = "start: exec to first byte, 512 MiB, 1 processor";
    print(&table(title, "ms", &fast, &interleave(&fast, ROUNDS, start)?));
    let but = ["cloud-hypervisor", "firecracker", "qemu microvm"];
    let slow = rivals(&folder, &but)?;
    if slow.len() > 1 {
        let title = "start, with full firmware before the kernel";
        print(&format!("\n{}", table(title, "ms", &slow, &interleave(&slow, SLOW_ROUNDS, start)?)));
    }
    Ok(())
}

fn start(rival: &Rival) -> Result<f64> {
    let mut machine = Machine::start(&mut rival.command("then=halt checks=none")?)?;
    Ok(machine.wait_for_guest()?.as_secs_f64() * 1e3)
}
