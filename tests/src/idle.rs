//! Whether a program does nothing when there is nothing to do.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

/// Watches a process until its threads whose names begin so have been idle for three seconds: they
/// used less than this part of a processor, which is said.
///
/// Whatever else its host does makes some spans worse, and none better: on a machine that is
/// itself a guest, time that others take counts as that of the thread they took it from. Who
/// looks for work does so in each of them.
///
/// # Errors
///
/// When it is gone, has no such thread, or does not come to rest.
pub fn rests(process: u32, named: &str, limit: f64) -> Result<f64> {
    let mut seen = Vec::new();
    // A thread that the kernel has for a ring ends when it had nothing to do for five seconds,
    // one after the other, and takes its time with it.
    for _ in 0..12 {
        let (start, before) = (Instant::now(), threads(process, named)?);
        ensure!(before.values().any(|it| *it > 0.0), "no thread `{named}` ever ran");
        thread::sleep(Duration::from_secs(3));
        let (after, span) = (threads(process, named)?, start.elapsed().as_secs_f64());
        if !before.keys().eq(after.keys()) {
            continue;
        }
        let part = (after.values().sum::<f64>() - before.values().sum::<f64>()) / span;
        if part < limit {
            return Ok(part);
        }
        seen.push(part);
    }
    bail!("what is idle uses {seen:.5?} of a processor, not less than {limit}")
}

/// The seconds that each of its threads whose names begin so has run.
pub(crate) fn threads(process: u32, named: &str) -> Result<BTreeMap<OsString, f64>> {
    let mut seconds = BTreeMap::new();
    let folder = format!("/proc/{process}/task");
    for task in fs::read_dir(&folder).context(folder)? {
        let task = task?;
        // It may have ended since.
        let read = |file: &str| fs::read_to_string(task.path().join(file));
        let (Ok(name), Ok(said)) = (read("comm"), read("schedstat")) else { continue };
        if name.starts_with(named) {
            let first = said.split_ascii_whitespace().next().unwrap_or("0");
            let nanoseconds = first.parse::<f64>().with_context(|| format!("{said:?}"))?;
            seconds.insert(task.file_name(), nanoseconds / 1e9);
        }
    }
    Ok(seconds)
}
