//! Checks that a program does nothing when there is nothing to do.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

/// Watches a process until its threads whose names begin with `named` have been idle for three
/// seconds: they used less than `limit` of a processor. Returns the part that they used.
///
/// Other load on the host makes some spans worse and none better: if the host is itself a guest,
/// time that others take counts for the thread that they took it from. A thread that polls shows up
/// in every span.
pub fn wait_until_idle(process: u32, named: &str, limit: f64) -> Result<f64> {
    let mut seen = Vec::new();
    // The kernel's worker threads of a ring end after five idle seconds, one after the other, and
    // each takes its time with it.
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
    bail!("not idle: uses {seen:.5?} of a processor, not less than {limit}")
}

/// Seconds that each thread whose name begins with `named` has run.
pub(crate) fn threads(process: u32, named: &str) -> Result<BTreeMap<OsString, f64>> {
    let mut seconds = BTreeMap::new();
    let folder = format!("/proc/{process}/task");
    for task in fs::read_dir(&folder).context(folder)? {
        let task = task?;
        // The thread may have ended since.
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
