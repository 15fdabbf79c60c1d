//! QEMU's control protocols at a pod, driven by clients of others: Python's `qemu.qmp`, which
//! QEMU's developers maintain, and `nc` at the socket of the human monitor.
//!
//! The machine runs the probe. The test needs root for its namespaces.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Pid;
use transom_tests::print::{PAGES, Picture, find};
use transom_tests::program::{PATIENCE, Running, not_run, vmm};
use transom_tests::python::{PYTHON, fetch};
use vmm::kvm::KvmSupport;

const POLL: Duration = Duration::from_millis(50);
/// The port of the listener that other hosts can reach, as in WinBoat's Compose file.
const EXPOSED: &str = "7149";

/// Starts the pod without conflicts with this host, and with an address of another host.
const START: &str = "mount -t tmpfs none /run && ip link set lo up && \
                     ip address add 192.0.2.1/32 dev lo && exec TRANSOM pod";

fn runs_here(test: &str) -> bool {
    let modules = ["-c", "import pip"];
    let pip = Command::new(PYTHON).args(modules).output().is_ok_and(|it| it.status.success());
    let reason = if KvmSupport::of_this_host() == KvmSupport::None {
        "there is no usable /dev/kvm"
    } else if !rustix::process::geteuid().is_root() {
        "namespaces need root"
    } else if !pip || !Path::new("/usr/bin/nc").exists() {
        "python3-pip or netcat-openbsd is missing"
    } else {
        return true;
    };
    not_run(test, reason);
    false
}

/// The only child of a process, once it exists.
fn child(parent: Pid) -> Result<String> {
    let pid = parent.as_raw_nonzero();
    let end = Instant::now() + PATIENCE;
    loop {
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        if let Some(child) = children.split_whitespace().next() {
            return Ok(child.to_owned());
        }
        ensure!(Instant::now() < end, "the process has no child");
        thread::sleep(POLL);
    }
}

/// Runs a command until its output is right.
fn repeat(command: impl Fn() -> Command, is_right: impl Fn(&str) -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let said = String::from_utf8_lossy(&command().output()?.stdout).into_owned();
        if is_right(&said) {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{said}");
        thread::sleep(POLL);
    }
}

/// Reads a picture in the format PPM.
fn ppm(bytes: &[u8]) -> Result<Picture> {
    let mut parts = bytes.splitn(4, |byte| *byte == b'\n');
    let mut part = || parts.next().context("a header");
    let (magic, size, depth) = (part()?, std::str::from_utf8(part()?)?, part()?);
    ensure!(magic == b"P6" && depth == b"255", "no PPM: {size}");
    let (width, height) = size.split_once(' ').context("a size")?;
    let (width, height): (usize, usize) = (width.parse()?, height.parse()?);
    let pixels = part()?;
    ensure!(pixels.len() == width * height * 3, "{} bytes for {size}", pixels.len());
    let pixels =
        pixels.as_chunks().0.iter().flat_map(|[red, green, blue]| [*blue, *green, *red, 0]);
    Ok(Picture { width, pixels: pixels.collect() })
}

/// Waits until the probe shows a text on a picture that the client takes.
fn wait_for(folder: &Path, label: &str, text: &str, client: &Running) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    let mut last = Vec::new();
    while Instant::now() < end {
        // The client replaces the file while it is read.
        let picture = fs::read(folder.join("screen.ppm")).ok().and_then(|it| ppm(&it).ok());
        if let Some(picture) = picture
            && let Some(page) = PAGES.iter().find(|page| page.0.0 == picture.width)
        {
            last = picture.all(page.2);
            if find(&last, label).is_some_and(|line| line.contains(text)) {
                return Ok(());
            }
        }
        thread::sleep(POLL);
    }
    bail!("no {text} in {last:#?}\n{}\n{}", client.stdout.text(), client.stderr.text())
}

#[test]
fn qemus_own_client_controls_the_pod() -> Result<()> {
    if !runs_here("qemu.qmp at a pod") {
        return Ok(());
    }
    let module = Path::new(env!("CARGO_TARGET_TMPDIR")).join("qemu-qmp");
    fetch(&Path::new(env!("CARGO_MANIFEST_DIR")).join("qmp/requirements.txt"), &module)?;
    let folder = tempfile::tempdir()?;
    let at = folder.path().to_str().context("a path in words")?;
    let transom = vmm().with_file_name("transom");
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    unshare.args(["sh", "-c", &START.replace("TRANSOM", &transom.display().to_string())]);
    unshare.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").envs([
        ("VERSION", "probe"),
        ("NETWORK", "N"),
        ("RAM_SIZE", "256M"),
        // A size whose layout the test knows.
        ("WIDTH", "1280"),
        ("HEIGHT", "800"),
        ("STORAGE", at),
        ("QMP", "tcp:127.0.0.1:4444,server,wait=off"),
        ("MONITOR", "unix:/run/shm/monitor.sock,server,nowait"),
        ("ARGUMENTS", &format!("-qmp tcp:0.0.0.0:{EXPOSED},server,wait=off")),
    ]);
    let mut pod = Running::spawn(&mut unshare)?;
    pod.says("The probe runs", 1)?;
    let log = pod.stdout.text() + &pod.stderr.text();
    ensure!(log.contains("tcp:0.0.0.0:7149 can be reached by other hosts"), "{log}");
    let target = child(pod.pid())?;
    let inside = |words: &[&str]| {
        let mut command = Command::new("nsenter");
        // Not its processes, which the pod's end kills.
        command.args(["--target", &target, "--mount", "--net", "--"]).args(words);
        command
    };
    let ask = "printf 'info status\\nnonsense\\n' | timeout 60 nc -N -U /run/shm/monitor.sock";
    let expected = "(qemu) VM status: running\r\n(qemu) unknown command: 'nonsense'\r\n(qemu) ";
    // The machine starts meanwhile.
    repeat(|| inside(&["sh", "-c", ask]), |said| said.ends_with(expected))?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("qmp/client.py");
    let mut client = inside(&[PYTHON, script.to_str().context("a path in words")?, at, EXPOSED]);
    let mut client = Running::spawn(client.env("PYTHONPATH", &module))?;
    wait_for(folder.path(), "Keys", "type something", &client)?;
    fs::write(folder.path().join("ready"), "")?;
    client.says("typed\n", 1)?;
    // The kernel ends connections to hosts that are gone, so that they do not keep others out.
    let sockets = ["ss", "-Htno", "sport", "=", ":4444"];
    repeat(|| inside(&sockets), |said| said.contains("timer:(keepalive,"))?;
    wait_for(folder.path(), "Text", "qmp1", &client)?;
    fs::write(folder.path().join("seen"), "")?;
    let status = client.wait(PATIENCE)?;
    let said = client.stdout.text();
    let ended = status == 0 && said.ends_with("off\n");
    ensure!(ended, "{status}: {said}\n{}", client.stderr.text());
    // The client's connections, and what it did, are no danger to the pod.
    let status = pod.wait(PATIENCE)?;
    ensure!(status == 0, "{status}: {}\n{}", pod.stdout.text(), pod.stderr.text());
    Ok(())
}
