//! Many machines go on from one snapshot: the time for each, and the memory that it takes.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use transom_benches::machine::Machine;
use transom_benches::moved::compare;
use transom_benches::qmp::Monitor;
use transom_benches::rival::{OURS, Rival};
use vmm::control::snapshot::save;
use vmm::control::{self, Client, Then};

/// It halts, so that its clones do not compete.
const GUEST: &str = "checks=none then=halt";
const CLONES: usize = 20;
const PATIENCE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// For each clone: milliseconds, and MiB.
type Figures = [f64; 2];

const TITLES: [(&str, &str); 2] = [
    ("20 clones: from the start of the first until all run, for each", "ms"),
    ("20 clones: proportional memory (PSS) of each, that of the guest included", "MiB"),
];

fn main() -> Result<()> {
    // Firecracker's and Cloud Hypervisor's guests get no module.
    compare(&TITLES, &["firecracker", "cloud-hypervisor", "qemu q35"], figures)
}

fn figures(rival: &Rival, module: &Path, dir: &Path) -> Result<Figures> {
    if rival.name == OURS { ours(rival, module, dir) } else { qemu(rival, module, dir) }
}

fn ours(rival: &Rival, module: &Path, dir: &Path) -> Result<Figures> {
    let (control, saved) = (dir.join("control"), dir.join("saved"));
    let mut command = rival.command(GUEST)?;
    let probe = module.with_file_name("probe.elf");
    command.arg("--kernel").arg(probe).arg("--initrd").arg(module);
    command.args(["--accept-emulation", "--control"]).arg(&control);
    let mut machine = Machine::start(&mut command)?;
    machine.report()?;
    save(&mut Client::connect_timeout(&control, PATIENCE)?, &saved, Then::Quit, None)?;
    drop(machine);
    let start = |control: &Path| {
        let mut clone = Command::new(command.get_program());
        clone.env("VMM_LOG", "off").args(["run", "--restore"]);
        clone.arg(format!("{},unchecked,clone", saved.display())).arg("--control").arg(control);
        Machine::start(&mut clone)
    };
    let runs = |control: &Path| {
        let status = Client::connect_timeout(control, PATIENCE)?.ask(&control::Command::Status)?;
        Ok(status["state"] == "running")
    };
    many(dir, start, runs)
}

fn qemu(rival: &Rival, module: &Path, dir: &Path) -> Result<Figures> {
    let (control, saved) = (dir.join("control"), dir.join("saved"));
    let command = |control: &Path| {
        let mut command = rival.command(GUEST)?;
        command.arg("-initrd").arg(module).arg("-qmp");
        command.arg(format!("unix:{},server=on,wait=off", control.display()));
        anyhow::Ok(command)
    };
    let mut machine = Machine::start(&mut command(&control)?)?;
    machine.report()?;
    let mut monitor = Monitor::connect(&control)?;
    let limits = json!({ "max-bandwidth": 1_u64 << 40, "downtime-limit": 2_000_000 });
    monitor.ask("migrate-set-parameters", &limits)?;
    monitor.migrate(&format!("exec:cat > {}", saved.display()))?;
    monitor.ask("quit", &json!({}))?;
    drop(machine);
    let start = |control: &Path| {
        Machine::start(
            command(control)?.args(["-incoming", &format!("exec:cat {}", saved.display())]),
        )
    };
    let runs = |control: &Path| {
        Ok(Monitor::connect(control)?.ask("query-status", &json!({}))?["status"] == "running")
    };
    many(dir, start, runs)
}

/// Starts all clones, and waits until they run.
fn many(
    dir: &Path,
    start: impl Fn(&Path) -> Result<Machine>,
    runs: impl Fn(&Path) -> Result<bool>,
) -> Result<Figures> {
    let began = Instant::now();
    let controls: Vec<PathBuf> = (0..CLONES).map(|it| dir.join(it.to_string())).collect();
    let machines = controls.iter().map(|it| start(it)).collect::<Result<Vec<_>>>()?;
    for control in &controls {
        while !control.exists() || !runs(control)? {
            ensure!(began.elapsed() < PATIENCE, "a clone does not run");
            sleep(POLL_INTERVAL);
        }
    }
    let time = began.elapsed();
    let memory = machines.iter().map(|it| proportional_kib(it.id())).sum::<Result<u64>>()?;
    let each = |sum: f64| sum / CLONES as f64;
    Ok([each(time.as_secs_f64() * 1e3), each(memory as f64 / 1024.0)])
}

fn proportional_kib(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).context("its memory")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
