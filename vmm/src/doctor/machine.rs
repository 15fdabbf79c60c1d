//! A machine in a process of its own: its lines of output, its processor time, and its end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;

/// Time without any output after which a machine counts as hung.
const SILENCE: Duration = Duration::from_secs(120);
/// The guest may print anything: longer lines are divided, further lines wait, and a longer log is
/// cut.
const MAX_LINE: u64 = 256 << 10;
const MAX_PENDING: usize = 256;
const MAX_LOG: u64 = 1 << 20;

/// Time limits of a machine.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    silence: Duration,
    end: Option<Instant>,
}

impl Limits {
    /// Only silence ends the machine.
    pub(super) const PATIENT: Self = Self { silence: SILENCE, end: None };

    /// The machine must end by then.
    pub(super) fn until(end: Instant) -> Self {
        Self { silence: SILENCE, end: Some(end) }
    }

    /// Whether measurements have to be short.
    pub(super) fn is_short(self) -> bool {
        self.end.is_some()
    }

    fn left(self) -> Duration {
        let left = self.end.map(|end| end.saturating_duration_since(Instant::now()));
        left.unwrap_or(self.silence).min(self.silence)
    }
}

/// Dropping the value kills the process.
pub(super) struct Machine {
    child: Child,
    lines: Receiver<String>,
    log: Option<thread::JoinHandle<String>>,
    limits: Limits,
    started: Instant,
    /// Processor time of its threads in nanoseconds, as last read.
    used: BTreeMap<OsString, u64>,
}

impl Machine {
    /// Starts `vmm run` with these options. The machine also ends when this process does.
    pub(super) fn start(options: &[String], limits: Limits) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("this program")?;
        let mut command = Command::new(program);
        command.arg("run").args(options).args(["--die-with", &std::process::id().to_string()]);
        command.env("VMM_LOG", "info").env_remove("VMM_LOG_FORMAT");
        Self::spawn(&mut command, limits)
    }

    fn spawn(command: &mut Command, limits: Limits) -> anyhow::Result<Self> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let started = Instant::now();
        let mut child = command.spawn().context("a machine for the trial")?;
        let stdout = child.stdout.take().context("a pipe")?;
        let mut stderr = child.stderr.take().context("a pipe")?;
        let (sender, lines) = mpsc::sync_channel(MAX_PENDING);
        thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            while let Some(line) = line(&mut stdout) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let log = thread::spawn(move || {
            let mut log = Vec::new();
            stderr.by_ref().take(MAX_LOG).read_to_end(&mut log).ok();
            std::io::copy(&mut stderr, &mut std::io::sink()).ok();
            String::from_utf8_lossy(&log).into_owned()
        });
        Ok(Self { child, lines, log: Some(log), limits, started, used: BTreeMap::new() })
    }

    /// Returns `None` at the end of the output.
    pub(super) fn next_line(&self) -> anyhow::Result<Option<String>> {
        match self.lines.recv_timeout(self.limits.left()) {
            Ok(line) if self.limits.left().is_zero() => Err(self.late(&line)),
            Ok(line) => Ok(Some(line)),
            Err(mpsc::RecvTimeoutError::Disconnected) => Ok(None),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(self.late("")),
        }
    }

    fn late(&self, line: &str) -> anyhow::Error {
        let seconds = self.started.elapsed().as_secs_f64();
        let doing = if line.is_empty() { "hangs" } else { "is slow or hangs" };
        anyhow::anyhow!("no end after {seconds:.0} s: the guest or a device {doing}")
    }

    /// The processor time of all threads except the guest's processors. Includes threads that have
    /// ended since.
    pub(super) fn processor(&mut self) -> Duration {
        let folder = format!("/proc/{}/task", self.child.id());
        for task in fs::read_dir(folder).into_iter().flatten().flatten() {
            // A thread may end while it is read.
            let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
            let (name, text) = (read("comm"), read("schedstat"));
            let first = text.split_ascii_whitespace().next().and_then(|it| it.parse().ok());
            if let Some(nanoseconds) =
                first.filter(|_| !name.is_empty() && !name.starts_with("cpu"))
            {
                self.used.insert(task.file_name(), nanoseconds);
            }
        }
        Duration::from_nanos(self.used.values().sum())
    }

    /// Waits for the end of the process, and returns its status and its log.
    pub(super) fn end(&mut self) -> anyhow::Result<(ExitStatus, String)> {
        let deadline = Instant::now() + self.limits.left();
        let status = loop {
            if let Some(status) = self.child.try_wait().context("the machine")? {
                break status;
            }
            if Instant::now() >= deadline {
                return Err(self.late(""));
            }
            thread::sleep(Duration::from_millis(5));
        };
        let log = self.log.take().and_then(|log| log.join().ok()).unwrap_or_default();
        Ok((status, log))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The next line, or `None` at the end.
fn line(from: &mut impl std::io::BufRead) -> Option<String> {
    let mut bytes = Vec::new();
    from.take(MAX_LINE).read_until(b'\n', &mut bytes).ok().filter(|&count| count > 0)?;
    Some(String::from_utf8_lossy(bytes.trim_ascii_end()).into_owned())
}

/// The last error message in the log of a machine that ended early.
pub(super) fn last_error(log: &str) -> String {
    let last = log.lines().rev().find_map(|line| line.strip_prefix("vmm: "));
    last.unwrap_or("the machine ended early").to_owned()
}

#[cfg(test)]
mod test {
    use super::*;

    /// A program that prints two words and does not end.
    fn hung(limits: Limits) -> Machine {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two; exec sleep 1000"]);
        Machine::spawn(&mut command, limits).unwrap()
    }

    #[test]
    fn a_machine_that_hangs_is_reported_in_time_and_killed() {
        let start = Instant::now();
        let machine = hung(Limits::until(start + Duration::from_millis(500)));
        let process = format!("/proc/{}", machine.child.id());
        assert_eq!(machine.next_line().unwrap().as_deref(), Some("one"));
        assert_eq!(machine.next_line().unwrap().as_deref(), Some("two"));
        let error = machine.next_line().unwrap_err().to_string();
        assert!(error.contains("no end after"), "{error}");
        assert!((500..5000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
        drop(machine);
        assert!(!fs::exists(process).unwrap());
    }

    #[test]
    fn a_machine_that_prints_forever_ends_too() {
        let mut command = Command::new("sh");
        command.args(["-c", "while :; do echo again; done"]);
        let start = Instant::now();
        let limits = Limits::until(start + Duration::from_millis(300));
        let machine = Machine::spawn(&mut command, limits).unwrap();
        while machine.next_line().is_ok() {}
        assert!((300..5000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    }

    #[test]
    fn a_machine_that_closes_its_output_and_stays_is_reported() {
        let mut command = Command::new("sh");
        command.args(["-c", "exec sleep 1000 > /dev/null 2> /dev/null"]);
        let limits = Limits::until(Instant::now() + Duration::from_millis(300));
        let mut machine = Machine::spawn(&mut command, limits).unwrap();
        assert_eq!(machine.next_line().unwrap(), None);
        let error = machine.end().unwrap_err().to_string();
        assert!(error.contains("no end after"), "{error}");
    }

    #[test]
    fn a_long_line_is_divided() {
        let text = vec![b'x'; usize::try_from(MAX_LINE).unwrap() + 3];
        let mut from = text.as_slice();
        assert_eq!(line(&mut from).map(|it| it.len() as u64), Some(MAX_LINE));
        assert_eq!(line(&mut from).as_deref(), Some("xxx"));
        assert_eq!(line(&mut from), None);
    }

    #[test]
    fn an_early_exit_is_reported_with_its_last_error() {
        assert_eq!(last_error(" INFO disk\nvmm: nobody: no disk\n"), "nobody: no disk");
        assert!(last_error("").contains("ended early"));
    }
}
