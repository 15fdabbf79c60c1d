//! A pod that is suspended, and continues in a new container: the guest, its memory, its agent and
//! its ports.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use rustix::process::Signal;
use transom_tests::say;

use super::pod::{BOOT, Pod};
use super::town::{SOON, Town};
use super::{BUDGET, has_desktop};

pub(crate) const WORD: &str = "SHUTDOWN=suspend";
/// A pod that has this one, too, continues with all features of the processor.
pub(crate) const MODEL: &str = "CPU_MODEL=x86-64-v2-AES";

/// The identity of the guest's boot, and a file in its memory.
pub(crate) const MEMORY: &str = "cat /proc/sys/kernel/random/boot_id; md5sum /data";
/// How long the guest is suspended at least, and how wrong its clock may be then, in seconds.
const ASLEEP: u64 = 4;
const WRONG: u64 = 2;

/// The variables that a pod has no more, and its new ones.
#[derive(Default)]
pub(crate) struct Change {
    pub(crate) without: &'static [&'static str],
    pub(crate) with: &'static [&'static str],
}

/// Suspends a pod, and continues it with other variables. A connection of its guest outlives that
/// if `outlives` is set.
pub(crate) fn continues(
    town: &Town,
    pod: &mut Pod,
    guest: &str,
    outlives: bool,
    change: &Change,
) -> anyhow::Result<()> {
    pod.guest(town, "[ -e /data ] || head -c 1000000 /dev/urandom > /data")?;
    // QEMU's agent sets no clock without this program, which would set the real-time clock, too.
    pod.guest(town, "printf '#!/bin/sh\\n' > /sbin/hwclock && chmod +x /sbin/hwclock")?;
    let before = pod.guest(town, MEMORY)?;
    ensure!(before.lines().count() == 2, "{before}");
    let mut shell = Shell::open(town, pod)?;
    shell.says("one")?;
    let start = Instant::now();
    pod.signal(Signal::TERM)?;
    let status = pod.ends(BUDGET)?;
    let log = pod.log();
    ensure!(status == 143 && log.contains("Windows is suspended"), "{status}: {log}");
    say!("{}: suspended in {:.1} s", pod.name, start.elapsed().as_secs_f64());
    ensure!(pod.volume.join("windows.suspended/machine.json").exists(), "{log}");
    sleep(Duration::from_secs(ASLEEP));
    pod.again(change.without, change.with)?;
    pod.says("Windows continues where it was suspended", 1, BOOT)?;
    say!("{}: continued {:.1} s after the start of runc", pod.name, pod.age());
    if outlives {
        shell.says("two").context("the connection from before")?;
    }
    has_desktop(town, pod, guest)?;
    let after = pod.guest(town, MEMORY)?;
    ensure!(after == before, "{before}, then {after}");
    ensure!(!pod.volume.join("windows.suspended/machine.json").exists(), "it is still there");
    pod.until(town, ("/readyz", 200), BOOT)
}

/// The agent of a guest that has continued sets its clock.
pub(crate) fn knows_the_time(town: &Town, pod: &mut Pod) -> anyhow::Result<()> {
    pod.says("the guest's agent has set its clock", 1, SOON)?;
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map(|it| it.as_secs());
    let before = now()?;
    let theirs: u64 = pod.guest(town, "date +%s")?.trim().parse()?;
    let right = before - WRONG..=now()? + WRONG;
    ensure!(right.contains(&theirs), "the guest's clock is {theirs}, not in {right:?}");
    Ok(())
}

/// A connection from outside to the guest's shell.
struct Shell(BufReader<TcpStream>);

impl Shell {
    fn open(town: &Town, pod: &Pod) -> anyhow::Result<Self> {
        let to = (pod.address, 2222);
        let stream = town.outside.within(move || Ok(TcpStream::connect(to)?))?;
        stream.set_read_timeout(Some(SOON))?;
        Ok(Self(BufReader::new(stream)))
    }

    fn says(&mut self, word: &str) -> anyhow::Result<()> {
        writeln!(self.0.get_mut(), "echo {word}")?;
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        ensure!(line.trim() == word, "{line:?} instead of {word}");
        Ok(())
    }
}
