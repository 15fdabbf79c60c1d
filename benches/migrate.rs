//! A running machine moves to another process on the same host: the pause that its guest sees, and
//! the time until it runs there. The guest writes its memory meanwhile.
#![forbid(unsafe_code)]

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use transom_benches::machine::Machine;
use transom_benches::moved::compare;
use transom_benches::qmp::Monitor;
use transom_benches::rival::{OURS, Rival};
use vmm::control::{self, Client};

/// 40 MiB in a second, for four seconds.
const GUEST: &str =
    "checks=none fill=256 memory=span=64M,rate=10000,milliseconds=4000 then=poweroff";
/// Printed by the guest when its memory has contents.
const FILLED: &str = "  fill  ";
/// The guest runs for this time before it moves.
const BEFORE: Duration = Duration::from_millis(700);
/// The allowed pause in milliseconds.
const PAUSE: u32 = 300;
const PATIENCE: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The milliseconds of the pause, and of the migration.
type Figures = [f64; 2];

const TITLES: [(&str, &str); 2] = [
    ("migration: the pause of the guest", "ms"),
    ("migration: from the command until the machine runs in the other process", "ms"),
];

fn main() -> Result<()> {
    // Firecracker does not migrate. Cloud Hypervisor's migration is not measured yet.
    compare(&TITLES, &["firecracker", "cloud-hypervisor", "qemu q35"], figures)
}

fn figures(rival: &Rival, dir: &Path) -> Result<Figures> {
    if rival.name == OURS { ours(rival, dir) } else { qemu(rival, dir) }
}

fn ours(rival: &Rival, dir: &Path) -> Result<Figures> {
    let [control, there, socket] = ["control", "there", "socket"].map(|name| dir.join(name));
    let mut command = rival.controlled(GUEST, &control)?;
    let mut source = Machine::start(&mut command)?;
    let mut waiting = Command::new(command.get_program());
    waiting.env("VMM_LOG", "off").args(["run", "--incoming"]).arg(&socket);
    waiting.arg("--control").arg(&there);
    let destination = Machine::start(&mut waiting)?;
    source.wait_for(FILLED, 1)?;
    sleep(BEFORE);
    let stream = connected(&socket)?;
    let mut client = Client::connect_timeout(&control, PATIENCE)?;
    let command = control::Command::Migrate { to: socket, pause: Some(PAUSE), within: None };
    let start = Instant::now();
    client.ask_with(&command, &[stream.as_fd()])?;
    // It answers when it has sent the last message.
    let moved = start.elapsed();
    Ok([pause(destination)?, milliseconds(moved)])
}

/// The first connection that it takes is the machine's.
fn connected(socket: &Path) -> Result<UnixStream> {
    let end = Instant::now() + PATIENCE;
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => return Ok(stream),
            Err(error) => ensure!(Instant::now() < end, "{}: {error}", socket.display()),
        }
        sleep(POLL_INTERVAL);
    }
}

fn qemu(rival: &Rival, dir: &Path) -> Result<Figures> {
    let [control, socket] = ["control", "socket"].map(|name| dir.join(name));
    let address = format!("unix:{}", socket.display());
    let mut source = Machine::start(&mut rival.controlled(GUEST, &control)?)?;
    let destination = Machine::start(rival.command(GUEST)?.args(["-incoming", &address]))?;
    source.wait_for(FILLED, 1)?;
    sleep(BEFORE);
    let end = Instant::now() + PATIENCE;
    while !socket.exists() {
        ensure!(Instant::now() < end, "the other QEMU does not listen");
        sleep(POLL_INTERVAL);
    }
    let mut monitor = Monitor::connect(&control)?;
    // Without the first, it sends 32 MiB in a second.
    let limits = json!({ "max-bandwidth": 1_u64 << 40, "downtime-limit": PAUSE });
    monitor.ask("migrate-set-parameters", &limits)?;
    let start = Instant::now();
    monitor.migrate(&address)?;
    let moved = start.elapsed();
    monitor.ask("quit", &json!({}))?;
    Ok([pause(destination)?, milliseconds(moved)])
}

/// The longest time in which the guest did not run, in milliseconds, as it tells at its end.
fn pause(mut machine: Machine) -> Result<f64> {
    let report = machine.report()?;
    let findings = report["findings"].as_array().context("findings")?;
    let found = findings.iter().find(|it| it["name"] == "memory-load").context("its load")?;
    ensure!(found["errors"] == 0, "memory was lost: {found}");
    Ok(found["longest_us"].as_f64().context("its pause")? / 1e3)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
