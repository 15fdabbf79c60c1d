//! The process that runs the inputs of one target. A panic in any thread, too much memory or too
//! many descriptors end the process; a file then has the input that was running.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::Target;
use crate::input::Inputs;

/// Limits of the process, for any input.
const ADDRESSES: u64 = 6 << 30;
const DESCRIPTORS: u64 = 1024;
/// Threads and descriptors that may be left at the end of a run.
const THREADS_LEFT: usize = 64;
const DESCRIPTORS_LEFT: usize = 256;

/// The running input, as stored in the file: its number, its origin, its length, its bytes.
pub struct Current {
    /// The input's number, from 1; 0 before the first input.
    pub number: u64,
    /// Whether the input is a file of `found`.
    pub is_old: bool,
    pub bytes: Vec<u8>,
}

const HEADER: usize = 24;

impl Current {
    /// Reads the input that runs now, or ran last.
    pub fn read(file: &Path) -> anyhow::Result<Self> {
        let all = fs::read(file).with_context(|| file.display().to_string())?;
        let number = |at: usize| {
            all.get(at..).and_then(|it| it.first_chunk()).map_or(0, |it| u64::from_le_bytes(*it))
        };
        let length = usize::try_from(number(16)).unwrap_or(0);
        let bytes = all.get(HEADER..).unwrap_or_default();
        let bytes = bytes.get(..length).unwrap_or(bytes).to_vec();
        Ok(Self { number: number(0), is_old: number(8) == 1, bytes })
    }
}

/// Runs the inputs that broke the target before, and then new inputs for the given time. Returns
/// the number of inputs. Fails also if too many threads or descriptors are left at the end.
pub fn run(target: &'static Target, seed: u64, time: Duration, file: &Path) -> anyhow::Result<u64> {
    limit()?;
    let shown = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        shown(info);
        std::process::abort();
    }));
    let file = File::create(file).with_context(|| file.display().to_string())?;
    let (mut number, mut record) = (0, Vec::new());
    let mut run = |bytes: &[u8], is_old: bool| {
        number += 1;
        record.clear();
        record.extend(u64::to_le_bytes(number));
        record.extend(u64::from(is_old).to_le_bytes());
        record.extend((bytes.len() as u64).to_le_bytes());
        record.extend(bytes);
        file.write_all_at(&record, 0).context("the current input")?;
        (target.run)(bytes);
        anyhow::Ok(number)
    };
    let found = crate::found(target.name)?;
    for bytes in &found {
        run(bytes, true)?;
    }
    let mut inputs = Inputs::new(target, seed, found);
    let start = Instant::now();
    let mut count = 0;
    while start.elapsed() < time {
        count = run(&inputs.make(), false)?;
    }
    let left = |folder: &str| fs::read_dir(folder).map_or(0, Iterator::count);
    let (threads, files) = (left("/proc/self/task"), left("/proc/self/fd"));
    ensure!(threads < THREADS_LEFT, "{threads} threads are left at the end");
    ensure!(files < DESCRIPTORS_LEFT, "{files} descriptors are left at the end");
    Ok(count)
}

fn limit() -> anyhow::Result<()> {
    let set = |resource, limit| {
        setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })
    };
    set(Resource::As, ADDRESSES).context("a limit of addresses")?;
    set(Resource::Core, 0).context("no core files")?;
    set(Resource::Nofile, DESCRIPTORS).context("a limit of descriptors")
}
