//! A machine that runs: its words with the moments at which they came, and its memory.

use std::fs;
use std::io::{Read, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The end of the probe's report.
pub const REPORTED: &str = "]}\n";

/// A process with a guest; it is killed when this is dropped.
pub struct Machine {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    started: Instant,
    /// All that the guest has said.
    pub said: String,
}

impl Machine {
    /// Starts a command; time counts from here.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        Self::launch(command.stdin(Stdio::null()))
    }

    /// The same, to be talked to.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start_to_talk(command: &mut Command) -> Result<Self> {
        Self::launch(command.stdin(Stdio::piped()))
    }

    fn launch(command: &mut Command) -> Result<Self> {
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let started = Instant::now();
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        let stdout = child.stdout.take().context("a pipe")?;
        let stdin = child.stdin.take();
        Ok(Self { child, stdin, stdout, started, said: String::new() })
    }

    /// Says something to the guest's serial port.
    ///
    /// # Errors
    ///
    /// When nobody hears it.
    pub fn say(&mut self, bytes: &[u8]) -> Result<()> {
        let stdin = self.stdin.as_mut().context("a machine that is talked to")?;
        stdin.write_all(bytes).context("standard input")
    }

    /// Waits for more words, and tells what they are and when they came.
    ///
    /// # Errors
    ///
    /// When there will be none.
    pub fn hear(&mut self) -> Result<(String, Duration)> {
        let mut buffer = [0; 4096];
        let count = self.stdout.read(&mut buffer).context("standard output")?;
        let at = self.started.elapsed();
        ensure!(count > 0, "the machine ended early; it said:\n{}", self.said);
        let words = String::from_utf8_lossy(&buffer[..count]).into_owned();
        self.said.push_str(&words);
        Ok((words, at))
    }

    /// Waits until all that was said has `text` in it so many times; tells when that was, at the
    /// latest.
    ///
    /// # Errors
    ///
    /// When it will not be said.
    pub fn wait_for(&mut self, text: &str, times: usize) -> Result<Duration> {
        while self.said.matches(text).count() < times {
            self.hear()?;
        }
        Ok(self.started.elapsed())
    }

    /// The probe's report, which is waited for.
    ///
    /// # Errors
    ///
    /// When there is none, or it is not good.
    pub fn report(&mut self) -> Result<Value> {
        self.wait_for(REPORTED, 1)?;
        let line = self.said.lines().find(|line| line.starts_with("{\"probe\""));
        let report: Value = serde_json::from_str(line.context("a report")?)?;
        Ok(report)
    }

    /// What the probe found of this name, so often, and the processor seconds that other threads
    /// of the process took for each, from when the probe knew its processor on.
    ///
    /// # Errors
    ///
    /// When one of them is missing, or not all was well.
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

    /// Memory of the process in KiB without the guest's RAM: a field of `smaps`, added up.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub fn memory_kib(&self, field: &str, ram_mib: u64) -> Result<u64> {
        Self::memory_of(self.id(), field, ram_mib)
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The same of any process.
    ///
    /// # Errors
    ///
    /// When it is gone.
    pub fn memory_of(pid: u32, field: &str, ram_mib: u64) -> Result<u64> {
        let path = format!("/proc/{pid}/smaps");
        let text = fs::read_to_string(&path).context(path)?;
        let (mut sum, mut ram) = (0, false);
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            let key = words.next().unwrap_or_default();
            let number = words.next().and_then(|it| it.parse::<u64>().ok()).unwrap_or(0);
            match key.strip_suffix(':') {
                // No mapping but the guest's RAM is nearly as large.
                Some("Size") => ram = number >= ram_mib * 1024 * 3 / 4,
                Some(key) if key == field && !ram => sum += number,
                _ => {}
            }
        }
        Ok(sum)
    }

    /// Processor time of the process' threads but those that are the guest's processors.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub fn processor_seconds(&self) -> Result<f64> {
        // `cpu0` is ours; others have `CPU 0/KVM`, `vcpu0` and `fc_vcpu 0`.
        self.seconds(|name| !name.to_lowercase().contains("cpu"))
    }

    /// Processor time of all threads.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub fn all_seconds(&self) -> Result<f64> {
        self.seconds(|_| true)
    }

    fn seconds(&self, counts: impl Fn(&str) -> bool) -> Result<f64> {
        let path = format!("/proc/{}/task", self.child.id());
        let mut nanoseconds = 0.0;
        for task in fs::read_dir(&path).context(path)? {
            let task = task?.path();
            // A thread may end while it is looked at.
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

    /// Threads of the process.
    ///
    /// # Errors
    ///
    /// When the process is gone.
    pub fn threads(&self) -> Result<usize> {
        let path = format!("/proc/{}/task", self.child.id());
        Ok(fs::read_dir(&path).context(path)?.count())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
