//! Windows's network driver, in each interrupt mode, on a network with a peer that sends frames
//! back (`tests/windrv/peer`).

use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use transom_tests::program::{Running, vmm};

use crate::PATIENCE;
use crate::image;
use crate::kmdf;
use crate::report::Report;

/// OWN in `tests/windrv/ndis/traffic.c`.
const ADDRESS: &str = "52:54:00:77:69:6e";
/// The minimum number of checks of a mode.
const CHECKS: usize = 42;

/// The tests of the adapter: one for each mode.
macro_rules! modes {
    ($($mode:ident)*) => {$(
        #[test]
        fn $mode() -> Result<()> {
            run(stringify!($mode), "")
        }
    )*};
}

modes! { msix4 msix1 two one wire }

/// The device tells the driver a shorter maximum of packets.
#[test]
fn mtu() -> Result<()> {
    run("msix1", "1400")
}

fn run(mode: &str, mtu: &str) -> Result<()> {
    let Some(image) = image::image()? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let network = folder.path().join("network");
    let _peer = peer(&network)?;
    let mut device = format!("virtio-net,to=passt:{},mac={ADDRESS}", network.display());
    let control = folder.path().join("control");
    let mut words = format!("driver=netkvm mode={mode} host=vmm");
    if !mtu.is_empty() {
        device += &format!(",mtu={mtu}");
        words += &format!(" mtu={mtu}");
    }
    let mut machine = Command::new(vmm());
    machine.args(["run", "--cpus", "1", "--display", "none", "--serial", "stdio"]);
    machine.args(["--accept-emulation", "--memory", "256M", "--device", &device]);
    machine.args(["--cmdline", &words, "--kernel"]).arg(image).arg("--control").arg(&control);
    let mut guest = Running::spawn(&mut machine)?;
    let status = kmdf::obey(&mut guest, &control);
    let (output, log) = (guest.stdout.text(), guest.stderr.text());
    let everything = || format!("netkvm.{mode}:\n{output}\n{log}");
    ensure!(status.with_context(everything)? == 0, "vmm failed: {}", everything());
    Report::read(&output).and_then(|it| it.judge(CHECKS)).with_context(everything)
}

/// Starts the peer, and waits until it listens: the link must be up from the start.
fn peer(at: &Path) -> Result<Running> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("windrv/peer");
    let peer = Running::spawn(Command::new(program).arg(at))?;
    let deadline = Instant::now() + PATIENCE;
    while !at.exists() {
        ensure!(Instant::now() < deadline, "the peer does not listen: {}", peer.stderr.text());
        sleep(Duration::from_millis(5));
    }
    Ok(peer)
}
