//! Runs targets, each in a process of its own, some at a time, and keeps the inputs that break one.

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

/// Most targets wait more than they compute: more of them run at a time than there may be
/// processors.
const JOBS: usize = 6;
/// An input may take this much time of a processor, and this long where it waits. Hosts are busy.
const BUSY: Duration = Duration::from_secs(5);
const STUCK: Duration = Duration::from_secs(60);
/// What a target may have resident. Targets need up to 200 MiB; what grows without bound gets here.
const RESIDENT: u64 = 1 << 30;
const LOOK: Duration = Duration::from_millis(100);
/// Longer inputs are in the file alone.
const SHOWN: usize = 4096;
/// The last of what a target wrote.
const TAIL: usize = 4000;

/// What a run is: which inputs, and for how long.
#[derive(Clone, Copy)]
pub struct Plan {
    /// Another seed makes other inputs.
    pub seed: u64,
    /// Of each target.
    pub time: Duration,
}

/// What a target came to: a line, and what broke it.
struct Outcome {
    line: String,
    failure: Option<String>,
}

/// Runs these targets and returns the number of those that failed.
///
/// # Errors
///
/// When a target cannot be started.
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

/// A process that runs a target, and its files.
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

    /// Time of processors that it has used: `utime` and `stime` in `proc_pid_stat(5)`.
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

    /// Waits for its end; `Err` has what it was ended for.
    fn watch(&mut self) -> anyhow::Result<Result<ExitStatus, String>> {
        let input = self.folder.path().join("input");
        let mut last = (u64::MAX, Instant::now(), Duration::ZERO);
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Ok(status));
            }
            sleep(LOOK);
            let number = Current::read(&input).map_or(0, |it| it.number);
            let processor = self.processor();
            if number != last.0 {
                last = (number, Instant::now(), processor);
            }
            let resident = self.resident();
            self.peak = self.peak.max(resident);
            let (waited, used) = (last.1.elapsed(), processor.saturating_sub(last.2));
            if resident > RESIDENT {
                return Ok(Err(format!("{} MiB are resident", resident >> 20)));
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

/// What a person needs to repeat it. The input is a file then, which every run begins with.
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
        let place = if current.is_old {
            "an input of tests/fuzz/found".to_owned()
        } else {
            keep(&found_folder().join(target.name), &current.bytes)?.display().to_string()
        };
        text += &format!("input {} ({} bytes): {place}\n", current.number, current.bytes.len());
        if current.bytes.len() <= SHOWN {
            let hex: String = current.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            text += &format!("the same in hexadecimal, for `xxd -r -p`: {hex}\n");
        }
    }
    text += &format!(
        "again: TRANSOM_FUZZ_SEED={seed:#x} cargo run --profile test-fast -p fuzz -- {}\n",
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

/// The targets of these names, or all of them.
///
/// # Errors
///
/// When there is none of a name.
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
