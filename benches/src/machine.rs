//! A machine that runs: its words with the moments at which they came, and its memory.

use std::fs::{self, File};
use std::io::{Read, Seek as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The end of the probe's report.
pub const REPORTED: &str = "]}\n";

/// The first line of the probe.
const FIRST_LINE: &str = "transom probe";

/// A machine that is silent for longer has failed: some tests of disks take minutes.
const PATIENCE: Duration = Duration::from_secs(300);

/// A process with a guest; it is killed when this is dropped.
pub struct Machine {
    child: Child,
    stdin: Option<ChildStdin>,
    /// What it wrote, and when: read by a thread, so that a silent machine can be given up.
    chunks: Receiver<(Vec<u8>, Duration)>,
    stderr: File,
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
        let stderr = tempfile::tempfile().context("a file for standard error")?;
        command.stdout(Stdio::piped()).stderr(stderr.try_clone()?);
        let started = Instant::now();
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        let stdout = child.stdout.take().context("a pipe")?;
        let stdin = child.stdin.take();
        let chunks = read_in_thread(stdout, started);
        Ok(Self { child, stdin, chunks, stderr, started, said: String::new() })
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
        let (bytes, at) = match self.chunks.recv_timeout(PATIENCE) {
            Ok(chunk) => chunk,
            Err(RecvTimeoutError::Timeout) => bail!("nothing came for {} s", PATIENCE.as_secs()),
            Err(RecvTimeoutError::Disconnected) => bail!("{}", self.why_ended()),
        };
        let words = String::from_utf8_lossy(&bytes).into_owned();
        self.said.push_str(&words);
        Ok((words, at))
    }

    /// The status of a machine that ended early, and the last line that it wrote.
    fn why_ended(&mut self) -> String {
        let status = self.child.wait().map_or_else(|it| it.to_string(), |it| it.to_string());
        let mut errors = String::new();
        // What cannot be read is not shown.
        self.stderr.rewind().and_then(|()| self.stderr.read_to_string(&mut errors)).ok();
        let mut lines = self.said.lines().chain(errors.lines());
        let last = lines.rfind(|line| !line.trim().is_empty()).unwrap_or("it wrote nothing");
        format!("ended early ({status}): {last}")
    }

    /// Waits for the first words of the guest, and tells when they came. Lines that the program
    /// itself prints before do not count.
    ///
    /// # Errors
    ///
    /// When there will be none.
    pub fn first_words(&mut self) -> Result<Duration> {
        loop {
            let (_, at) = self.hear()?;
            if has_guest(&self.said) {
                return Ok(at);
            }
        }
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

/// Whether a line is the probe's first one, or its beginning: it may come byte by byte.
fn has_guest(said: &str) -> bool {
    let is_first = |line: &str| line.starts_with(FIRST_LINE) || FIRST_LINE.starts_with(line);
    said.lines().map(str::trim_end).any(|line| !line.is_empty() && is_first(line))
}

fn read_in_thread(
    mut from: impl Read + Send + 'static,
    started: Instant,
) -> Receiver<(Vec<u8>, Duration)> {
    let (sender, chunks) = mpsc::channel();
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            // Nobody hears it once the machine is dropped.
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
    fn lines_of_the_program_before_the_guests_do_not_count() {
        let mut rival = machine("echo 2026 Running Rival v1; sleep 0.2; printf 't'; sleep 9");
        let at = rival.first_words().unwrap();
        assert!(at >= Duration::from_millis(200), "{at:?}");
        assert!(rival.said.starts_with("2026 Running Rival v1\nt"), "{}", rival.said);
    }

    #[test]
    fn a_report_is_found_behind_lines_of_the_program() {
        let line = r#"echo Running; echo transom probe; echo '{"probe":1,"findings":[]}'"#;
        assert_eq!(machine(line).report().unwrap()["probe"], 1);
    }

    #[test]
    fn a_machine_that_ends_early_says_why() {
        let mut rival = machine("echo Running; echo no such kernel >&2; exit 3");
        let error = rival.first_words().unwrap_err().to_string();
        assert_eq!(error, "ended early (exit status: 3): no such kernel");
    }
}
