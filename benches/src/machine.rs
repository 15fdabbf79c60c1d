//! A running machine: its output with the times of arrival, and its memory.

use std::fs::{self, File};
use std::io::{Read, Seek as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

pub const REPORT_END: &str = "]}\n";

const FIRST_LINE: &str = "transom probe";

/// A machine without output for this time has failed. Some tests of disks take minutes.
const PATIENCE: Duration = Duration::from_secs(300);

/// A process with a guest. Dropping it kills the process.
pub struct Machine {
    child: Child,
    stdin: Option<ChildStdin>,
    /// Chunks of output with their times. A thread reads them, so that there can be a timeout.
    chunks: Receiver<(Vec<u8>, Duration)>,
    stderr: File,
    started: Instant,
    pub output: String,
}

impl Machine {
    /// Times are counted from here.
    pub fn start(command: &mut Command) -> Result<Self> {
        Self::launch(command.stdin(Stdio::null()))
    }

    pub fn start_with_input(command: &mut Command) -> Result<Self> {
        Self::launch(command.stdin(Stdio::piped()))
    }

    fn launch(command: &mut Command) -> Result<Self> {
        let stderr = tempfile::tempfile().context("a file for standard error")?;
        command.stdout(Stdio::piped()).stderr(stderr.try_clone()?);
        let started = Instant::now();
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        let stdout = child.stdout.take().context("a pipe")?;
        let stdin = child.stdin.take();
        let chunks = read_in_thread(stdout, started);
        Ok(Self { child, stdin, chunks, stderr, started, output: String::new() })
    }

    /// Sends bytes to the guest's serial port.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        let stdin = self.stdin.as_mut().context("a machine without input")?;
        stdin.write_all(bytes).context("standard input")
    }

    /// Waits for more output, and returns it with its time.
    pub fn read_output(&mut self) -> Result<(String, Duration)> {
        let (bytes, at) = match self.chunks.recv_timeout(PATIENCE) {
            Ok(chunk) => chunk,
            Err(RecvTimeoutError::Timeout) => bail!("no output for {} s", PATIENCE.as_secs()),
            Err(RecvTimeoutError::Disconnected) => bail!("{}", self.why_ended()),
        };
        let words = String::from_utf8_lossy(&bytes).into_owned();
        self.output.push_str(&words);
        Ok((words, at))
    }

    /// Describes an early end: the exit status, and the last line of output.
    fn why_ended(&mut self) -> String {
        let status = self.child.wait().map_or_else(|it| it.to_string(), |it| it.to_string());
        let mut errors = String::new();
        // Unreadable errors are not shown.
        self.stderr.rewind().and_then(|()| self.stderr.read_to_string(&mut errors)).ok();
        let mut lines = self.output.lines().chain(errors.lines());
        let last = lines.rfind(|line| !line.trim().is_empty()).unwrap_or("no output");
        format!("ended early ({status}): {last}")
    }

    /// Waits for the guest's first output, and returns its time. Earlier lines of the program
    /// itself do not count.
    pub fn wait_for_guest(&mut self) -> Result<Duration> {
        loop {
            let (_, at) = self.read_output()?;
            if has_guest(&self.output) {
                return Ok(at);
            }
        }
    }

    /// Waits until the output contains `text` at least `times` times. Returns an upper bound of the
    /// time.
    pub fn wait_for(&mut self, text: &str, times: usize) -> Result<Duration> {
        while self.output.matches(text).count() < times {
            self.read_output()?;
        }
        Ok(self.started.elapsed())
    }

    pub fn report(&mut self) -> Result<Value> {
        self.wait_for(REPORT_END, 1)?;
        let line = self.output.lines().find(|line| line.starts_with("{\"probe\""));
        let report: Value = serde_json::from_str(line.context("a report")?)?;
        Ok(report)
    }

    /// Waits for `count` findings of the probe with this name. Returns each with the processor
    /// seconds that threads other than the vCPU's took for it. The first one counts from the
    /// probe's calibration of its processor.
    pub fn parts(&mut self, name: &str, count: usize) -> Result<Vec<(Value, f64)>> {
        self.wait_for("loops_per_us", 1)?;
        let mut times = vec![self.processor_seconds()?];
        for number in 1..=count {
            self.wait_for(&format!("  {name}  "), number)?;
            times.push(self.processor_seconds()?);
        }
        let report = self.report()?;
        ensure!(report["ok"] == true, "{report}");
        let findings = report["findings"].as_array().context("findings")?;
        let found = findings.iter().filter(|finding| finding["name"] == name).cloned();
        let used = times.windows(2).map(|pair| pair[1] - pair[0]);
        Ok(found.zip(used).collect())
    }

    /// Memory of the process in KiB without the guest's RAM: the sum of a field of `smaps`.
    pub fn memory_kib(&self, field: &str, ram_mib: u64) -> Result<u64> {
        Self::memory_of(self.id(), field, ram_mib)
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Like [`Self::memory_kib`], for any process.
    pub fn memory_of(pid: u32, field: &str, ram_mib: u64) -> Result<u64> {
        let path = format!("/proc/{pid}/smaps");
        let text = fs::read_to_string(&path).context(path)?;
        let (mut sum, mut ram) = (0, false);
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            let key = words.next().unwrap_or_default();
            let number = words.next().and_then(|it| it.parse::<u64>().ok()).unwrap_or(0);
            match key.strip_suffix(':') {
                // No other mapping is nearly as large as the guest's RAM.
                Some("Size") => ram = number >= ram_mib * 1024 * 3 / 4,
                Some(key) if key == field && !ram => sum += number,
                _ => {}
            }
        }
        Ok(sum)
    }

    /// Processor time in seconds of the process without its vCPU threads.
    pub fn processor_seconds(&self) -> Result<f64> {
        // Our thread is `cpu0`. Rivals have `CPU 0/KVM`, `vcpu0` and `fc_vcpu 0`.
        self.seconds(|name| !name.to_lowercase().contains("cpu"))
    }

    /// Processor time in seconds of all threads.
    pub fn all_seconds(&self) -> Result<f64> {
        self.seconds(|_| true)
    }

    fn seconds(&self, counts: impl Fn(&str) -> bool) -> Result<f64> {
        let path = format!("/proc/{}/task", self.child.id());
        let mut nanoseconds = 0.0;
        for task in fs::read_dir(&path).context(path)? {
            let task = task?.path();
            // A thread may end in the meantime.
            let read = |file| fs::read_to_string(task.join(file)).unwrap_or_default();
            if !counts(&read("comm")) {
                continue;
            }
            let text = read("schedstat");
            let first = text.split_ascii_whitespace().next().unwrap_or("0");
            nanoseconds += first.parse::<f64>().with_context(|| format!("{text:?}"))?;
        }
        Ok(nanoseconds / 1e9)
    }

    pub fn threads(&self) -> Result<usize> {
        let path = format!("/proc/{}/task", self.child.id());
        Ok(fs::read_dir(&path).context(path)?.count())
    }
}

/// Whether the output contains the probe's first line, or a part of it: it may arrive byte by byte.
fn has_guest(output: &str) -> bool {
    let is_first = |line: &str| line.starts_with(FIRST_LINE) || FIRST_LINE.starts_with(line);
    output.lines().map(str::trim_end).any(|line| !line.is_empty() && is_first(line))
}

fn read_in_thread(
    mut from: impl Read + Send + 'static,
    started: Instant,
) -> Receiver<(Vec<u8>, Duration)> {
    let (sender, chunks) = mpsc::channel();
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            // This fails after the machine was dropped.
            sender.send((buffer[..count].to_vec(), started.elapsed())).ok();
        }
    });
    chunks
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn machine(script: &str) -> Machine {
        Machine::start(Command::new("sh").args(["-c", script])).unwrap()
    }

    #[test]
    fn vmm_output_before_the_guests_does_not_count() {
        let mut rival = machine("echo 2026 Running Rival v1; sleep 0.2; printf 't'; sleep 9");
        let at = rival.wait_for_guest().unwrap();
        assert!(at >= Duration::from_millis(200), "{at:?}");
        assert!(rival.output.starts_with("2026 Running Rival v1\nt"), "{}", rival.output);
    }

    #[test]
    fn a_report_is_found_after_vmm_output() {
        let line = r#"echo Running; echo transom probe; echo '{"probe":1,"findings":[]}'"#;
        assert_eq!(machine(line).report().unwrap()["probe"], 1);
    }

    #[test]
    fn an_early_exit_is_reported_with_its_reason() {
        let mut rival = machine("echo Running; echo no such kernel >&2; exit 3");
        let error = rival.wait_for_guest().unwrap_err().to_string();
        assert_eq!(error, "ended early (exit status: 3): no such kernel");
    }
}
