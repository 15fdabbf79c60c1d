//! The pod: the time to its page and to its guest, the memory of its processes, and the size of its
//! image. If Podman is installed, also compares a container with one that runs only a web server.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use transom_benches::machine::{Machine, REPORT_END};
use transom_benches::rival::{MEMORY, release};
use transom_benches::table::{Samples, print, rows_table};

const ROUNDS: usize = 20;
/// Fewer rounds, because a container engine is slow.
const ENGINE_ROUNDS: usize = 7;
const PATIENCE: Duration = Duration::from_secs(60);
const IMAGE: &str = "localhost/transom-bench";
/// The image with only a web server.
const SERVER: &str = "localhost/transom-bench-httpd";

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let programs = release(&["vmm", "container"])?;
    let mut page = Samples::new();
    let mut guest = Samples::new();
    for round in 0..=ROUNDS {
        let (soon, later) = start(&programs, folder.path())?;
        // The first round warms up caches.
        if round > 0 {
            page.push(soon);
            guest.push(later);
        }
    }
    let rows = [("page", "first byte of /"), ("guest", "first byte in the log")];
    print(&rows_table("pod: exec to", "ms", &rows, &[page, guest]));
    let rows = memory(&programs, folder.path())?;
    let names: Vec<_> = rows.iter().map(|(name, _)| (name.as_str(), "")).collect();
    let values: Vec<_> = rows.iter().map(|(_, value)| Samples::from(vec![*value])).collect();
    print(&format!("\n{}", rows_table("pod: PSS beyond the guest's RAM", "MiB", &names, &values)));
    match engine() {
        Ok(podman) => contained(&podman, &folder),
        Err(why) => {
            print(&format!("\nnot run: containers: {why}\n"));
            Ok(())
        }
    }
}

/// A pod with the probe, outside of a container, with its page at this port.
fn pod(programs: &Path, folder: &Path, port: u16) -> Result<Command> {
    let mut command = Command::new(programs.join("transom"));
    command.arg("pod").env_clear().envs(settings(port)?).env("STORAGE", folder);
    Ok(command)
}

fn settings(port: u16) -> Result<[(&'static str, String); 7]> {
    Ok([
        // Use another port each time, because the previous machine's port may still be in use.
        ("VNC_PORT", free_port()?.to_string()),
        ("VERSION", "probe".into()),
        ("NETWORK", "none".into()),
        ("RAM_SIZE", format!("{MEMORY}M")),
        ("CPU_CORES", "1".into()),
        ("DISPLAY", "web".into()),
        ("WEB_PORT", port.to_string()),
    ])
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Measures the milliseconds to the page and to the guest.
fn start(programs: &Path, folder: &Path) -> Result<(f64, f64)> {
    let port = free_port()?;
    let begin = Instant::now();
    let mut machine = Machine::start(&mut pod(programs, folder, port)?)?;
    let page = first_byte(port, begin)?;
    let guest = machine.wait_for("transom probe", 1)?;
    end(machine)?;
    Ok((page * 1e3, guest.as_secs_f64() * 1e3))
}

/// Stops a pod as an engine does. After a kill, the next pod would wait for the end of the old
/// machine.
fn end(mut machine: Machine) -> Result<()> {
    let pid = i32::try_from(machine.id()).ok().and_then(Pid::from_raw).context("a process")?;
    kill_process(pid, Signal::TERM)?;
    while machine.read_output().is_ok() {}
    Ok(())
}

/// Requests the page until it is served, and returns the seconds since `begin`.
fn first_byte(port: u16, begin: Instant) -> Result<f64> {
    loop {
        if let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            stream.set_read_timeout(Some(PATIENCE))?;
            let asked = stream.write_all(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n");
            if asked.is_ok() && stream.read(&mut [0]).is_ok_and(|count| count > 0) {
                return Ok(begin.elapsed().as_secs_f64());
            }
        }
        ensure!(begin.elapsed() < PATIENCE, "nothing answers at port {port}");
        sleep(Duration::from_micros(200));
    }
}

/// Measures the memory of each process, and the total.
fn memory(programs: &Path, folder: &Path) -> Result<Vec<(String, f64)>> {
    let port = free_port()?;
    let begin = Instant::now();
    let mut machine = Machine::start(&mut pod(programs, folder, port)?)?;
    first_byte(port, begin)?;
    // The report is the guest's last action.
    machine.wait_for(REPORT_END, 1)?;
    let mut rows = Vec::new();
    for pid in family(machine.id())? {
        let name = fs::read_to_string(format!("/proc/{pid}/comm"))?.trim().to_owned();
        let kib = Machine::memory_of(pid, "Pss", MEMORY)?;
        rows.push((name, kib as f64 / 1024.0));
    }
    end(machine)?;
    rows.insert(0, ("all".into(), rows.iter().map(|row| row.1).sum()));
    Ok(rows)
}

/// A process and its descendants.
fn family(pid: u32) -> Result<Vec<u32>> {
    let mut all = vec![pid];
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let children = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace() {
            all.extend(family(child.parse()?)?);
        }
    }
    Ok(all)
}

/// The command for Podman, or the reason why it cannot be used.
fn engine() -> Result<Vec<String>> {
    let here = Command::new("podman").arg("--version").stdout(Stdio::null()).status();
    ensure!(here.is_ok_and(|it| it.success()), "podman is not installed");
    ensure!(rustix::process::geteuid().is_root(), "containers with devices need root");
    let words = std::env::var("TRANSOM_PODMAN").unwrap_or_else(|_| "podman".into());
    Ok(words.split_whitespace().map(str::to_owned).collect())
}

fn podman(words: &[String], more: &[&str]) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).args(more);
    command
}

fn output_of(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{command:?}: {error}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Measures the size of the image, and the time from `podman run` to the first byte.
fn contained(words: &[String], folder: &TempDir) -> Result<()> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    output_of(Command::new(top.join("deploy/image")).args(["--podman", &words.join(" "), IMAGE]))?;
    let busybox = PathBuf::from("/bin/busybox");
    ensure!(busybox.exists(), "{}: install busybox-static", busybox.display());
    let stage = folder.path().join("httpd");
    fs::create_dir_all(&stage)?;
    fs::copy(&busybox, stage.join("busybox"))?;
    fs::write(stage.join("index.html"), "here")?;
    fs::write(stage.join("Containerfile"), "FROM scratch\nCOPY busybox index.html /\n")?;
    let stage = stage.display().to_string();
    output_of(&mut podman(words, &["build", "--quiet", "--tag", SERVER, &stage]))?;
    let size =
        output_of(&mut podman(words, &["image", "inspect", "--format", "{{.Size}}", IMAGE]))?;
    let size: f64 = size.trim().parse()?;
    print(&format!("\nimage: {:.1} MB\n", size / 1e6));
    let mut samples = [Samples::new(), Samples::new()];
    for round in 0..=ENGINE_ROUNDS {
        for (at, which) in samples.iter_mut().enumerate() {
            let took = run(words, at == 0)?;
            if round > 0 {
                which.push(took);
            }
        }
    }
    let rows = [("transom", "the page, while the machine starts"), ("busybox httpd", "a file")];
    print(&format!("\n{}", rows_table("podman run to the first byte", "ms", &rows, &samples)));
    for image in [IMAGE, SERVER] {
        output_of(&mut podman(words, &["rmi", image]))?;
    }
    Ok(())
}

/// Measures the milliseconds until a container answers.
fn run(words: &[String], ours: bool) -> Result<f64> {
    let port = free_port()?;
    let mut arguments = vec!["run", "--detach", "--network", "host"];
    let settings = settings(port)?.map(|(name, value)| format!("{name}={value}"));
    let text = port.to_string();
    if ours {
        arguments.extend(["--device", "/dev/kvm"]);
        settings.iter().for_each(|it| arguments.extend(["--env", it]));
        arguments.push(IMAGE);
    } else {
        arguments.extend([SERVER, "/busybox", "httpd", "-f", "-p", &text, "-h", "/"]);
    }
    let begin = Instant::now();
    // Request the page while the engine still runs, because the engine exits only later.
    let mut command = podman(words, &arguments);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let took = first_byte(port, begin);
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let name = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output_of(&mut podman(words, &["rm", "--force", "--time", "0", &name]))?;
    Ok(took? * 1e3)
}
