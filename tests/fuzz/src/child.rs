//! The process that runs the inputs of one target. It dies of what it finds: a panic in whatever
//! thread, too much memory, too many descriptors. What it was at is in a file then.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::Target;
use crate::input::Inputs;

/// What a run of inputs must not exceed, whatever they say.
const ADDRESSES: u64 = 6 << 30;
const DESCRIPTORS: u64 = 1024;
/// What is still there after a run that began without anything.
const THREADS_LEFT: usize = 64;
const DESCRIPTORS_LEFT: usize = 256;

/// The input that runs, as the file has it: its number, its length, its bytes.
pub struct Current {
    /// Counts from 1; 0 before the first.
    pub number: u64,
    /// Whether it is a file of `found`.
    pub is_old: bool,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

const HEADER: usize = 24;

impl Current {
    /// Reads what runs now, or ran last.
    ///
    /// # Errors
    ///
    /// When there is no such file.
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

/// Runs what was found before, and then new inputs for this long. Returns how many.
///
/// # Errors
///
/// When the file cannot be written, or something is left in the end.
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
    ensure!(threads < THREADS_LEFT, "{threads} threads are left");
    ensure!(files < DESCRIPTORS_LEFT, "{files} descriptors are left");
    Ok(count)
}

fn limit() -> anyhow::Result<()> {
    let set =
        |resource, most| setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) });
    set(Resource::As, ADDRESSES).context("a limit of addresses")?;
    set(Resource::Core, 0).context("no core files")?;
    set(Resource::Nofile, DESCRIPTORS).context("a limit of descriptors")
}
