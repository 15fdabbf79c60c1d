//! The probe's word `moves`: BARs move as Windows 11 25H2 moves them, while their devices work.
//! The host's trace shows which writes left the guest, so slow doorbells are counted, not timed.

use std::fs::File;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result, ensure};

use crate::network::reflect;
use crate::program::{PATIENCE, Running, findings, report, vmm};

const DISK: u64 = 16 << 20;
/// BARs are above RAM.
const FIRST_BAR: u64 = 0x2000_0000;
/// BARs with doorbells have 64 bits and are above 4 GiB; MSI-X tables are below.
const FIRST_WIDE: u64 = 1 << 32;
/// The BARs with doorbells have this size: virtio's and NVMe's.
const BAR_SIZE: u64 = 0x4000;
/// virtio's page of notifications, and the doorbell of NVMe's first I/O queue.
const NOTIFY: u64 = 0x3000;
const NOTIFY_END: u64 = 0x3010;
const SUBMISSION: u64 = 0x1008;
/// The register of AHCI that starts commands. It is no doorbell, so each write leaves the guest.
const AHCI_BAR_SIZE: u64 = 0x1000;
const PORT_CI: u64 = 0x138;

/// Runs a machine whose BARs move this many times. All data must be right, and no doorbell slow.
pub fn keeps_working(rounds: u64) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    let disk = |kind: &str| -> Result<String> {
        File::create(path(kind))?.set_len(DISK)?;
        Ok(format!("{kind},path={}", path(kind).display()))
    };
    let listener = UnixListener::bind(path("peer"))?;
    let peer = thread::spawn(move || reflect(listener.accept()?.0, |_, _| true));
    let mut command = Command::new(vmm());
    command.env("VMM_LOG", "trace").args(["run", "--display", "640x480,memory=16M"]);
    for kind in ["virtio-blk", "nvme", "ahci-disk"] {
        command.arg("--device").arg(disk(kind)?);
    }
    let net = format!("virtio-net,to=passt:{}", path("peer").display());
    for device in [net.as_str(), "virtio-rng", "xhci", "edu"] {
        command.args(["--device", device]);
    }
    command.arg("--cmdline").arg(format!("checks=none moves={rounds} then=poweroff"));
    let mut machine = Running::spawn(&mut command)?;
    let status = machine.wait(PATIENCE)?;
    let (output, log) = (machine.stdout.text(), machine.stderr.text());
    ensure!(status == 0, "status {status}: {output}");
    let frames = peer.join().map_err(|_| anyhow::anyhow!("the peer panicked"))??;
    examine(&output, rounds, frames)?;
    let slow = slow_doorbells(&log);
    ensure!(slow.is_empty(), "doorbells left the guest: {slow:?}");
    let others = writes(&log).filter(|it| it.0 % AHCI_BAR_SIZE == PORT_CI && it.1 == 4).count();
    ensure!(others as u64 >= rounds, "the trace has only {others} writes of AHCI's register");
    Ok(())
}

fn examine(output: &str, rounds: u64, frames: u64) -> Result<()> {
    let report = report(output)?;
    let found = findings(&report, "moves");
    let found = *found.first().context("no finding")?;
    eprintln!("{found}");
    ensure!(found["verdict"] == "pass" && report["ok"] == true, "{report}");
    ensure!(found["rounds"] == rounds && found["disks"] == 3, "{found}");
    // Six functions with two BARs at least, and each disk with requests before and after a move.
    ensure!(found["bars"].as_u64() >= Some(12), "{found}");
    ensure!(found["requests"].as_u64() >= Some(3 * 4 * rounds), "{found}");
    ensure!(found["frames"] == frames && frames >= 2 * rounds, "{found}");
    ensure!(found["interrupts"].as_u64() >= Some(rounds), "{found}");
    Ok(())
}

/// The address and the length of each write in a trace.
fn writes(log: &str) -> impl Iterator<Item = (u64, usize)> {
    log.lines().filter_map(|line| {
        let (address, data) = line.split_once("write 0x")?.1.split_once(": [")?;
        let address = u64::from_str_radix(address, 16).ok()?;
        (address >= FIRST_BAR).then_some((address, data.split(',').count()))
    })
}

fn slow_doorbells(log: &str) -> Vec<(u64, usize)> {
    let is_bell = |(address, length): &(u64, usize)| match address % BAR_SIZE {
        NOTIFY..NOTIFY_END => *length == 2,
        SUBMISSION => *length == 4,
        _ => false,
    };
    writes(log).filter(|it| it.0 >= FIRST_WIDE && is_bell(it)).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn slow_doorbells_are_found_in_a_trace() {
        let log = "TRACE devices::bus: write 0xa00003004: [01, 00]\n\
                   TRACE devices::bus: write 0xa00001008: [01, 00, 00, 00]\n\
                   TRACE devices::bus: write 0xa00003004: [01]\n\
                   TRACE devices::bus: write 0x1008: [01, 00, 00, 00]\n\
                   TRACE devices::bus: write 0x80001008: [01, 00, 00, 00]\n\
                   TRACE devices::bus: write 0xc0000138: [01, 00, 00, 00]\n";
        assert_eq!(slow_doorbells(log), [(0xa_0000_3004, 2), (0xa_0000_1008, 4)]);
        assert_eq!(writes(log).count(), 5);
    }
}
