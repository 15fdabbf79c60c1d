//! Runs several targets at a time, each in its own process, and saves inputs that break them.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tempfile::TempDir;

use crate::child::Current;
use crate::{Target, found_folder};

/// Targets run at a time. Most of them wait more than they compute, so there may be more targets
/// than processors.
const JOBS: usize = 6;
/// The limits of one input: processor time, and total time. They are long because hosts are busy.
const BUSY: Duration = Duration::from_secs(5);
const STUCK: Duration = Duration::from_secs(60);
/// The limit of resident memory. Targets need up to 200 MiB; memory that grows without bound
/// reaches this limit.
const RESIDENT: u64 = 1 << 30;
const POLL: Duration = Duration::from_millis(100);
/// Longer inputs are not printed.
const SHOWN: usize = 4096;
/// The bytes at the end of a target's output that are printed.
const TAIL: usize = 4000;

#[derive(Clone, Copy)]
pub struct Plan {
    pub seed: u64,
    /// Time for each target.
    pub time: Duration,
}

/// The result of a target: a line of figures, and the failure.
struct Outcome {
    line: String,
    failure: Option<String>,
}

/// Runs these targets and returns the number of those that failed.
pub fn run(
    targets: &[&'static Target],
    plan: Plan,
    mut say: impl FnMut(&str) + Send,
) -> anyhow::Result<usize> {
    let waiting = Mutex::new(targets.iter());
    let (say, failures) = (Mutex::new(&mut say), Mutex::new(0));
    let next = || waiting.lock().expect("no panic").next().copied();
    let work = || {
        while let Some(target) = next() {
            let outcome = attempt(target, plan)?;
            let mut say = say.lock().expect("no panic");
            say(&outcome.line);
            match outcome.failure {
                None => say(&format!("test fuzz::{} ... ok", target.name)),
                Some(why) => {
                    *failures.lock().expect("no panic") += 1;
                    say(&format!("test fuzz::{} ... FAILED\n{why}", target.name));
                }
            }
        }
        anyhow::Ok(())
    };
    scope(|scope| {
        let all: Vec<_> = (0..JOBS).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(|it| it.join().expect("no panic"))
    })?;
    Ok(failures.into_inner().expect("no panic"))
}

struct Running {
    folder: TempDir,
    child: Child,
    start: Instant,
    peak: u64,
}

impl Running {
    fn start(target: &Target, plan: Plan) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir().context("a folder")?;
        let log = File::create(folder.path().join("log")).context("a log")?;
        let scratch = folder.path().join("scratch");
        fs::create_dir(&scratch).context("a folder")?;
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--child", target.name, &plan.seed.to_string()]);
        command.arg(plan.time.as_secs().to_string()).arg(folder.path().join("input"));
        command.env("TMPDIR", scratch).env("RUST_BACKTRACE", "1").stdin(Stdio::null());
        command.stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("{command:?}"))?;
        Ok(Self { folder, child, start: Instant::now(), peak: 0 })
    }

    fn proc(&self, file: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).unwrap_or_default()
    }

    /// The processor time used: `utime` and `stime` in `proc_pid_stat(5)`.
    fn processor(&self) -> Duration {
        let stat = self.proc("stat");
        let fields = stat.rsplit(')').next().unwrap_or_default().split_ascii_whitespace();
        let ticks: u64 = fields.skip(11).take(2).filter_map(|it| it.parse::<u64>().ok()).sum();
        Duration::from_millis(ticks * 10)
    }

    fn resident(&self) -> u64 {
        let pages = self.proc("statm");
        let pages = pages.split(' ').nth(1).and_then(|it| it.parse::<u64>().ok());
        pages.unwrap_or(0) * 4096
    }

    /// Waits for the end of the process. `Err` is the limit that it exceeded.
    fn watch(&mut self) -> anyhow::Result<Result<ExitStatus, String>> {
        let input = self.folder.path().join("input");
        let mut last = (u64::MAX, Instant::now(), Duration::ZERO);
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Ok(status));
            }
            sleep(POLL);
            let number = Current::read(&input).map_or(0, |it| it.number);
            let processor = self.processor();
            if number != last.0 {
                last = (number, Instant::now(), processor);
            }
            let resident = self.resident();
            self.peak = self.peak.max(resident);
            let (waited, used) = (last.1.elapsed(), processor.saturating_sub(last.2));
            if resident > RESIDENT {
                return Ok(Err(format!(
                    "{} MiB of resident memory are over the limit",
                    resident >> 20
                )));
            }
            if used > BUSY || waited > STUCK {
                return Ok(Err(format!("one input takes {waited:.0?}, {used:.0?} of a processor")));
            }
        }
    }

    fn log(&self) -> String {
        let log = fs::read(self.folder.path().join("log")).unwrap_or_default();
        let start = log.len().saturating_sub(TAIL);
        String::from_utf8_lossy(&log[start..]).into_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn attempt(target: &'static Target, plan: Plan) -> anyhow::Result<Outcome> {
    let mut running = Running::start(target, plan)?;
    let ended = running.watch()?;
    running.child.kill().ok();
    running.child.wait().ok();
    let seconds = running.start.elapsed().as_secs_f64();
    let current = Current::read(&running.folder.path().join("input"));
    let inputs = current.as_ref().map_or(0, |it| it.number);
    let line = format!(
        "fuzz: {} seed={:#x} inputs={inputs} seconds={seconds:.1} memory={}M",
        target.name,
        plan.seed,
        running.peak >> 20
    );
    let failure = match ended {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("{status}")),
        Err(why) => Some(why),
    };
    let failure = failure.map(|why| describe(target, plan, &why, current.ok(), &running.log()));
    Ok(Outcome { line, failure: failure.transpose()? })
}

/// The report of a failure. Saves its input to a file, which later runs begin with.
fn describe(
    target: &Target,
    plan: Plan,
    why: &str,
    current: Option<Current>,
    log: &str,
) -> anyhow::Result<String> {
    let seed = plan.seed;
    let mut text = format!("{log}\n{}: {why}\n", target.name);
    if let Some(current) = current.filter(|it| it.number > 0) {
        let path = if current.is_old {
            "an input of tests/fuzz/found".to_owned()
        } else {
            keep(&found_folder().join(target.name), &current.bytes)?.display().to_string()
        };
        text += &format!("input {} ({} bytes): {path}\n", current.number, current.bytes.len());
        if current.bytes.len() <= SHOWN {
            let hex: String = current.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            text += &format!("in hexadecimal, for `xxd -r -p`: {hex}\n");
        }
    }
    text += &format!(
        "to repeat: TRANSOM_FUZZ_SEED={seed:#x} cargo run --profile test-fast -p fuzz -- {}\n",
        target.name
    );
    Ok(text)
}

fn keep(folder: &Path, bytes: &[u8]) -> anyhow::Result<PathBuf> {
    let mut hash = DefaultHasher::new();
    bytes.hash(&mut hash);
    let path = folder.join(format!("{:016x}", hash.finish()));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&path, bytes));
    written.with_context(|| path.display().to_string())?;
    Ok(path)
}

/// All targets if there are no names.
pub fn choose(names: &[String]) -> anyhow::Result<Vec<&'static Target>> {
    if names.is_empty() {
        return Ok(crate::TARGETS.iter().collect());
    }
    let find = |name: &String| match Target::find(name) {
        Some(target) => Ok(target),
        None => bail!("{name}: no such target; --list lists them"),
    };
    names.iter().map(find).collect()
}
