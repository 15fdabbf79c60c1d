//! The time in which a machine is saved to a file, and from the start of a process to the first
//! byte of the guest that continues in it. The guest resets itself endlessly: each reset prints.
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use transom_benches::machine::Machine;
use transom_benches::moved::compare;
use transom_benches::qmp::Monitor;
use transom_benches::rival::{OURS, Rival};
use vmm::control::snapshot::save;
use vmm::control::{Client, Then};

const GUEST: &str = "then=triple checks=none";
const PATIENCE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The milliseconds of a save, the milliseconds to the first byte, and the MiB on the disk.
type Figures = [f64; 3];

const TITLES: [(&str, &str); 3] = [
    ("snapshot: from the command to the end of the process", "ms"),
    ("restore: from the start of the process to the guest's first byte", "ms"),
    ("size of the snapshot", "MiB"),
];

fn main() -> Result<()> {
    // Firecracker ends when its guest resets. Cloud Hypervisor's guest gets no module.
    compare(&TITLES, &["firecracker", "cloud-hypervisor", "qemu q35"], figures)
}

fn figures(rival: &Rival, module: &Path, dir: &Path) -> Result<Figures> {
    let (control, file) = (dir.join("control"), dir.join("snapshot"));
    let program = if rival.name == OURS { ours } else { qemu };
    program(rival, module, &control, &file)
}

fn ours(rival: &Rival, module: &Path, control: &Path, dir: &Path) -> Result<Figures> {
    let mut command = rival.command(GUEST)?;
    let probe = module.with_file_name("probe.elf");
    command.arg("--kernel").arg(probe).arg("--initrd").arg(module);
    command.args(["--accept-emulation", "--control"]).arg(control);
    let mut machine = Machine::start(&mut command)?;
    machine.wait_for_guest()?;
    let start = Instant::now();
    save(&mut Client::connect_timeout(control, PATIENCE)?, dir, Then::Quit, None)?;
    ends(&machine)?;
    let saved = milliseconds(start.elapsed());
    drop(machine);
    let mut restore = Command::new(command.get_program());
    restore.env("VMM_LOG", "off").args(["run", "--restore"]).arg(dir);
    let first = Machine::start(&mut restore)?.read_output()?.1;
    Ok([saved, milliseconds(first), mebibytes(&dir.join("memory"))?])
}

fn qemu(rival: &Rival, module: &Path, control: &Path, file: &Path) -> Result<Figures> {
    let command = || {
        let mut command = rival.command(GUEST)?;
        command.arg("-initrd").arg(module);
        anyhow::Ok(command)
    };
    let mut first = command()?;
    first.arg("-qmp").arg(format!("unix:{},server=on,wait=off", control.display()));
    let mut machine = Machine::start(&mut first)?;
    machine.wait_for_guest()?;
    let start = Instant::now();
    let mut monitor = Monitor::connect(control)?;
    // Without these, it writes 32 MiB/s so that a guest can run on meanwhile, and again what that
    // has written. A guest that was stopped before would stay so when it is restored.
    let limits = json!({ "max-bandwidth": 1_u64 << 40, "downtime-limit": 2_000_000 });
    monitor.ask("migrate-set-parameters", &limits)?;
    monitor.migrate(&format!("exec:cat > {}", file.display()))?;
    // A snapshot of ours is durable.
    File::open(file)?.sync_all()?;
    monitor.ask("quit", &json!({}))?;
    ends(&machine)?;
    let saved = milliseconds(start.elapsed());
    drop(machine);
    let mut restore = command()?;
    restore.arg("-incoming").arg(format!("exec:cat {}", file.display()));
    let first = Machine::start(&mut restore)?.read_output()?.1;
    Ok([saved, milliseconds(first), mebibytes(file)?])
}

/// Waits until the process has ended. It stays a zombie until the machine is dropped.
fn ends(machine: &Machine) -> Result<()> {
    let path = format!("/proc/{}/stat", machine.id());
    let end = Instant::now() + PATIENCE;
    while !fs::read_to_string(&path)?.contains(") Z ") {
        ensure!(Instant::now() < end, "the process does not end");
        sleep(POLL_INTERVAL);
    }
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn mebibytes(file: &Path) -> Result<f64> {
    use std::os::unix::fs::MetadataExt as _;

    Ok((fs::metadata(file)?.blocks() * 512) as f64 / f64::from(1 << 20))
}
