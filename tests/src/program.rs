//! Runs the `vmm` program as a user does: its words, output, signals and control socket.

use std::fmt::Write as _;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
pub use skip::{not_run, not_run_in_part};
use vmm::control::Client;
use vmm::kvm::KvmSupport;

use crate::idle;

/// The limit for anything that a program or guest must do. It is long because guests are slow when
/// emulated on a busy host.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The part of a processor that an idle machine may use.
pub const IDLE: f64 = 0.002;

/// Whether a test that starts machines can run on this host: it has KVM, and what `other` checked.
/// Reports the test as not run otherwise.
pub(crate) fn runs_here(test: &str, other: Result<(), &'static str>) -> bool {
    let kvm = match KvmSupport::of_this_host() {
        KvmSupport::None => Err("there is no usable /dev/kvm"),
        _ => Ok(()),
    };
    let checked = kvm.and(other);
    if let Err(why) = checked {
        not_run(test, why);
    }
    checked.is_ok()
}

/// Built with the same profile as this test. Cargo builds it if it is missing or older than its
/// sources.
pub fn vmm() -> &'static Path {
    static VMM: OnceLock<PathBuf> = OnceLock::new();
    VMM.get_or_init(|| find("vmm").expect("the vmm program"))
}

/// The path of the container's program, which starts `vmm`, built like `vmm`.
pub fn transom() -> &'static Path {
    static TRANSOM: OnceLock<PathBuf> = OnceLock::new();
    TRANSOM.get_or_init(|| find("transom").expect("the transom program"))
}

fn find(name: &str) -> Result<PathBuf> {
    // target/PROFILE/deps/TEST
    let test = env::current_exe().context("this test")?;
    let folder = test.ancestors().nth(2).context("a test in a target folder")?;
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") => "dev",
        Some(name) => name,
        None => bail!("{} is not the folder of a profile", folder.display()),
    };
    let mut build = build(profile);
    let built = build.output();
    let program = folder.join(name);
    match built {
        Ok(output) if output.status.success() => {}
        // The lab has no compiler, but the program was built before.
        Err(error) if error.kind() == io::ErrorKind::NotFound && program.exists() => {}
        Ok(output) => bail!("{build:?}: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => bail!("{build:?}: {error}"),
    }
    ensure!(program.exists(), "{} is missing after {build:?}", program.display());
    Ok(program)
}

#[derive(Debug)]
pub struct Ended {
    /// The exit status, or 128 + N after signal N, as in a shell.
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

/// The exit status, or 128 + N after signal N, as in a shell.
pub fn number(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Runs `vmm` with these words in a folder, until it ends.
pub fn run_in(folder: &Path, words: &[&str]) -> Result<Ended> {
    let mut command = Command::new(vmm());
    command.args(words).current_dir(folder);
    finish(&mut command)
}

/// Runs a command that must succeed, and returns its standard output. The error has its output.
pub fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let Output { status, stdout, stderr } = output;
    ensure!(status.success(), "{command:?}: {status}: {}{}", text(&stdout), text(&stderr));
    Ok(text(&stdout))
}

pub fn finish(command: &mut Command) -> Result<Ended> {
    let mut running = Running::spawn(command)?;
    let status = running.wait(PATIENCE)?;
    let stdout = running.stdout.text();
    Ok(Ended { status, stdout, stderr: running.stderr.text() })
}

#[derive(Clone, Default)]
pub struct Pipe(Arc<(Mutex<PipeOutput>, Condvar)>);

#[derive(Default)]
struct PipeOutput {
    bytes: Vec<u8>,
    closed: bool,
}

impl Pipe {
    fn read(mut from: impl Read + Send + 'static) -> Self {
        let pipe = Self::default();
        let shared = pipe.clone();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            loop {
                let got = from.read(&mut buffer).unwrap_or(0);
                let (output, changed) = &*shared.0;
                let mut output = output.lock().expect("no reader panicked");
                output.bytes.extend_from_slice(&buffer[..got]);
                output.closed = got == 0;
                changed.notify_all();
                if got == 0 {
                    return;
                }
            }
        });
        pipe
    }

    fn wait(&self, patience: Duration, enough: impl Fn(&str, bool) -> bool) -> bool {
        let (output, changed) = &*self.0;
        let output = output.lock().expect("no reader panicked");
        let lacks = |it: &mut PipeOutput| !enough(&String::from_utf8_lossy(&it.bytes), it.closed);
        let (guard, timeout) =
            changed.wait_timeout_while(output, patience, lacks).expect("no reader panicked");
        drop(guard);
        !timeout.timed_out()
    }

    /// The text so far; all of it, once the other end is closed.
    pub fn text(&self) -> String {
        let output = self.0.0.lock().expect("no reader panicked");
        String::from_utf8_lossy(&output.bytes).into_owned()
    }
}

/// Dropping it kills the process.
pub struct Running {
    child: Child,
    pub stdout: Pipe,
    pub stderr: Pipe,
}

impl Running {
    pub fn vmm(words: &[&str]) -> Result<Self> {
        Self::spawn(Command::new(vmm()).args(words))
    }

    pub fn spawn(command: &mut Command) -> Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        let stdout = Pipe::read(child.stdout.take().context("a pipe")?);
        let stderr = Pipe::read(child.stderr.take().context("a pipe")?);
        Ok(Self { child, stdout, stderr })
    }

    /// Waits until standard output has `text` at least `times` times.
    pub fn says(&mut self, text: &str, times: usize) -> Result<()> {
        let count = |all: &str| all.matches(text).count();
        self.stdout.wait(PATIENCE, |all, closed| closed || count(all) >= times);
        let all = self.stdout.text();
        if count(&all) >= times {
            return Ok(());
        }
        let mut sentence = format!("`{text}` came {} times, not {times},", count(&all));
        write!(sentence, " within {PATIENCE:?} in:\n{all}\n{}", self.stderr.text())?;
        bail!(sentence)
    }

    pub fn wait(&mut self, patience: Duration) -> Result<i32> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait()? {
                for pipe in [&self.stdout, &self.stderr] {
                    pipe.wait(PATIENCE, |_, closed| closed);
                }
                return Ok(number(status));
            }
            if Instant::now() >= deadline {
                let (out, err) = (self.stdout.text(), self.stderr.text());
                bail!("still running after {patience:?}; its output:\n{out}\n{err}");
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn pid(&self) -> Pid {
        i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).expect("a process ID")
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(self.pid(), signal)?)
    }

    /// The text of a file in `/proc/PID`.
    pub fn proc(&self, file: &str) -> Result<String> {
        let path = format!("/proc/{}/{file}", self.child.id());
        fs::read_to_string(&path).context(path)
    }

    /// Processor time that all threads have used, in seconds.
    pub fn processor_seconds(&self) -> Result<f64> {
        Ok(idle::threads(self.child.id(), "")?.values().sum())
    }

    /// Waits until the program has been idle for three seconds, and returns the part of a processor
    /// that it used.
    pub fn wait_until_idle(&self) -> Result<f64> {
        idle::wait_until_idle(self.child.id(), "", IDLE)
    }

    /// The program's memory in KiB, like the function `resident_kib`.
    pub fn resident_kib(&self) -> Result<u64> {
        resident_kib(self.child.id())
    }

    /// The program's memory in KiB, like the function `memory_kib`.
    pub fn memory_kib(&self, field: &str) -> Result<u64> {
        memory_kib(self.child.id(), field)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// A process's resident memory in KiB, with its guest's RAM.
pub fn resident_kib(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let size = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no VmRSS")?;
    Ok(size.parse()?)
}

/// A process's memory in KiB, by a field of `smaps` (`Rss`, `Pss`), without its guest's RAM.
pub fn memory_kib(pid: u32, field: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/smaps");
    let (mut sum, mut ram) = (0, false);
    for line in fs::read_to_string(&path).context(path)?.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some(key) = first.strip_suffix(':') {
            if key == "Size" {
                // Only the guest's RAM is a mapping of this size.
                let size = words.next().and_then(|it| it.parse::<u64>().ok());
                ram = size.is_some_and(|kib| kib > 192 << 10);
            } else if key == field && !ram {
                let kib = words.next().and_then(|it| it.parse::<u64>().ok());
                sum += kib.context(field.to_owned())?;
            }
        }
    }
    Ok(sum)
}

/// Connects to a control socket as soon as it exists.
pub fn connect(path: &Path) -> Result<Client> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match Client::connect(path) {
            Ok(client) => return Ok(client),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// The command that builds our programs with a profile. It names the whole workspace, so that cargo
/// finds earlier builds of it up to date.
pub(crate) fn build(profile: &str) -> Command {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    forget_the_test(&mut build);
    build.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    build.args(["build", "--quiet", "--workspace", "--bins", "--profile", profile]);
    build
}

/// Removes the variables that cargo sets for a test from a build command. Packages with C code look
/// at them, and would be rebuilt each time with all their dependents.
pub fn forget_the_test(build: &mut Command) {
    for (name, _) in env::vars_os() {
        let prefixes = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name.to_str().is_some_and(|name| prefixes.iter().any(|it| name.starts_with(it))) {
            build.env_remove(name);
        }
    }
}

/// Finds the probe's report: the last line of JSON in its output.
pub fn report(output: &str) -> Result<Value> {
    let line = output.lines().rev().find(|line| line.starts_with("{\"probe\""));
    let line = line.with_context(|| format!("no report in:\n{output}"))?;
    serde_json::from_str(line).with_context(|| line.to_owned())
}

pub fn findings<'a>(report: &'a Value, name: &str) -> Vec<&'a Value> {
    let all = report["findings"].as_array().into_iter().flatten();
    all.filter(|finding| finding["name"] == name).collect()
}
