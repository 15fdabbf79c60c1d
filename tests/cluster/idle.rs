//! A pod that sleeps while nobody needs it, and serves the first connection that comes.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use transom_tests::lab::everything;
use transom_tests::program::resident_kib;
use transom_tests::say;

use super::pod::{BOOT, Pod, Profile};
use super::town::Town;
use super::{BY_BUTTON, TAP, has_desktop, stops};

pub(crate) const IDLE: &str = "IDLE=10s";
/// An idle pod sleeps within this time. Its guest may have work left after its start.
const WITHIN: Duration = Duration::from_secs(400);
/// The first connection of a client takes at most this long.
const SOON: Duration = Duration::from_secs(2);
/// The most memory that a machine has asleep, in KiB, and what guests have used before, in bytes.
const MOST_KIB: u64 = 100 << 10;
pub(crate) const USED: u64 = 20_000_000;
const USED_BY_MUCH: u64 = 2 << 30;

const BEHIND_TAP: Profile =
    Profile { name: "dozer", last: 14, words: &["HOST=BOB", "RAM_SIZE=3G", IDLE], ..TAP };

/// With a tap. `clones` has such a pod in user mode.
pub(crate) fn first_connections_are_served() -> anyhow::Result<()> {
    let town = Town::new()?;
    let mut pod = Pod::start(&town, &BEHIND_TAP)?;
    pod.says("the guest serves", 1, BOOT)?;
    serves_first_connections(&town, &mut pod, "BOB", USED_BY_MUCH).with_context(|| pod.log())?;
    stops(&mut pod, BY_BUTTON)
}

pub(crate) fn serves_first_connections(
    town: &Town,
    pod: &mut Pod,
    guest: &str,
    used: u64,
) -> anyhow::Result<()> {
    pod.until(town, ("/readyz", 200), BOOT)?;
    // Random bytes are slow there. Other file systems in memory take only half of it.
    let seed = used / 10;
    let fill =
        format!("mkdir /fill; mount -t ramfs none /fill; head -c {seed} /dev/urandom > /seed");
    let fill = format!("{fill}; for i in 0 1 2 3 4 5 6 7 8 9; do cat /seed >> /fill/data; done");
    let memory = format!("[ -e /fill ] || ({fill}); md5sum /fill/data");
    let before = pod.guest_slowly(town, &memory)?;
    let machine = pod.child("vmm")?;
    let awake = resident_kib(machine)?;
    ensure!(awake * 1024 > used, "{awake} KiB awake");
    let (first, rounds) = (pod.said("Windows is asleep"), if everything() { 3 } else { 1 });
    for times in first + 1..=first + rounds {
        let start = Instant::now();
        if let Err(error) = pod.says("Windows is asleep", times, WITHIN) {
            let status = pod.transom(&["status", "--text"])?;
            return Err(error).context(String::from_utf8_lossy(&status.stdout).into_owned());
        }
        let slept = start.elapsed();
        let asleep = resident_kib(machine)?;
        ensure!(asleep < MOST_KIB, "{asleep} KiB asleep, {awake} KiB awake");
        for path in ["/healthz", "/startupz", "/readyz"] {
            ensure!(pod.page(town, path)?.0 == 200, "{path} is not 200 asleep");
        }
        ensure!(pod.said("wakes up") == times - 1, "a health check woke it");
        let start = Instant::now();
        has_desktop(town, pod, guest).context("the first connection")?;
        let took = start.elapsed();
        say!(
            "{}: asleep after {:.0} s, with {} MiB, not {}; the first connection took {:.2} s",
            pod.name,
            slept.as_secs_f64(),
            asleep >> 10,
            awake >> 10,
            took.as_secs_f64()
        );
        // Other suites may run beside this one.
        let soon = if everything() { SOON } else { 10 * SOON };
        ensure!(took < soon, "the first connection took {took:?}");
        let after = pod.guest_slowly(town, &memory)?;
        ensure!(after == before, "{before}, then {after}");
    }
    Ok(())
}
