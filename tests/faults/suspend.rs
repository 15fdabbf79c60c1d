//! A pod that is suspended instead of shut down continues at its next start: with its guest as it
//! was, and once, whatever happens to the pod in between.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use host::testutil::noise::Noise;
use rustix::process::Signal;
use transom_tests::lab::everything;
use transom_tests::place::{Place, last_line, runs_here, until};
use transom_tests::program::{PATIENCE, Running, connect};
use transom_tests::say;
use vmm::control::Command;

use super::{PROBE, probe, stops};

/// The number of kills, and with `TRANSOM_TESTS=all`.
const KILLS: [usize; 2] = [10, 200];
/// The longest time before a kill, in microseconds. A suspension of the probe takes about half of
/// it, and a restoration less.
const LONGEST: u64 = 300_000;

const SUSPEND: [(&str, &str); 3] = [("SHUTDOWN", "suspend"), ("NETWORK", "user"), PATIENT];
/// On a busy host, the volume may seem to be too slow for less.
pub(super) const PATIENT: (&str, &str) = ("TIMEOUT", "600");
pub(super) const CONTINUES: &str = "the probe continues where it was suspended";
const SUSPENDED: &str = "the probe is suspended: the next start continues it";

pub(super) type Picture = Vec<u8>;

/// The picture now. At first, the machine does not listen, and its display is off.
fn picture(place: &Place) -> Option<Picture> {
    let taken = connect(&place.control()).and_then(|mut machine| machine.screenshot());
    taken.ok().map(|(_, pixels)| pixels)
}

/// The page of the probe, once it does not change any more. On a busy host, it may stand still for
/// a moment before that.
pub(super) fn page(place: &Place) -> Result<Picture> {
    let (mut last, mut same) = (None, 0);
    until("the page still changes", || {
        sleep(Duration::from_millis(300));
        let now = picture(place);
        same = if now.is_some() && last == now { same + 1 } else { 0 };
        last = now;
        Ok(same == 3)
    })?;
    last.context("no page")
}

/// A probe that has done all its checks, and its page.
pub(super) fn checked(place: &Place, words: &[(&str, &str)]) -> Result<(Running, Picture)> {
    let mut pod = probe(place, words)?;
    pod.says("the probe found nothing wrong", 1)?;
    Ok((pod, page(place)?))
}

pub(super) fn types(place: &Place, text: &str) -> Result<()> {
    connect(&place.control())?.ask(&Command::Type { text: text.into() }).map(drop)
}

/// Types, and waits until the page is no longer this one.
pub(super) fn reacts(place: &Place, text: &str, before: &Picture) -> Result<()> {
    types(place, text)?;
    until("the guest does not react", || Ok(picture(place).is_some_and(|now| now != *before)))
}

/// The folder of the suspended machine.
fn folder(place: &Place) -> PathBuf {
    place.storage().join("windows.suspended")
}

pub(super) fn is_suspended(place: &Place) -> bool {
    folder(place).join("machine.json").exists()
}

/// Starts a pod with the probe, which may continue.
pub(super) fn starts(place: &Place, words: &[(&str, &str)]) -> Result<Running> {
    place.start("", &[&[PROBE], words].concat())
}

fn continues(place: &Place, more: &[(&str, &str)]) -> Result<Running> {
    let mut pod = starts(place, more)?;
    pod.says(CONTINUES, 1)?;
    Ok(pod)
}

#[test]
fn a_suspended_pod_continues_where_it_was() -> Result<()> {
    if !runs_here("a suspended pod") {
        return Ok(());
    }
    for network in ["nat", "user", "none"] {
        let place = Place::new("suspended")?;
        let words = [("SHUTDOWN", "suspend"), ("NETWORK", network), PATIENT];
        let (mut pod, _) = checked(&place, &words)?;
        for text in ["one", "two", "six"] {
            types(&place, text)?;
            let before = page(&place)?;
            stops(&mut pod)?;
            let said = pod.stdout.text();
            ensure!(said.contains(SUSPENDED), "{said}{}", pod.stderr.text());
            for file in ["", "machine.json", "memory"] {
                let found = fs::metadata(folder(&place).join(file))?;
                ensure!(found.mode() & 0o077 == 0, "{file:?} has mode {:o}", found.mode());
            }
            pod = continues(&place, &words)?;
            ensure!(!is_suspended(&place), "the snapshot is still there while its guest runs");
            ensure!(page(&place)? == before, "{network}, {text}: another picture");
            ensure!(!pod.stdout.text().contains("transom probe"), "{}", pod.stdout.text());
            reacts(&place, "x", &before).with_context(|| format!("{network}, {text}"))?;
        }
        // Whatever SHUTDOWN is now, a suspended machine continues.
        stops(&mut pod)?;
        pod = continues(&place, &[("NETWORK", network)])?;
        stops(&mut pod)?;
        ensure!(!is_suspended(&place), "suspended without SHUTDOWN=suspend");
        // The folder goes with the setting.
        stops(&mut probe(&place, &[("NETWORK", network)])?)?;
        ensure!(!folder(&place).exists(), "an empty folder without SHUTDOWN=suspend");
        place.has_nothing_left()?;
    }
    Ok(())
}

/// Kills pods while they suspend or continue. The next start continues the machine as it was, or
/// starts as after a power cut, and never continues a machine that ran since.
#[test]
fn a_kill_at_any_moment_loses_at_most_what_a_power_cut_does() -> Result<()> {
    if !runs_here("killed suspended pods") {
        return Ok(());
    }
    let place = Place::new("killed")?;
    let random = &mut Noise::new(71);
    let mut counts = [0; 4];
    for round in 0..KILLS[usize::from(everything())] {
        let (mut pod, before) = checked(&place, &SUSPEND)?;
        let resumes = round % 2 == 1;
        if resumes {
            stops(&mut pod)?;
            ensure!(is_suspended(&place), "{}", pod.stdout.text());
            pod = starts(&place, &SUSPEND)?;
        } else {
            pod.signal(Signal::TERM)?;
        }
        sleep(Duration::from_micros(random.below(LONGEST)));
        pod.signal(Signal::KILL)?;
        pod.wait(PATIENCE)?;
        let ran = pod.stdout.text().contains(CONTINUES);
        let mut next = starts(&place, &SUSPEND)?;
        until("it neither starts nor continues", || {
            let said = next.stdout.text();
            Ok(said.contains(CONTINUES) || said.contains("The probe runs"))
        })
        .with_context(|| format!("{round}: {}{}", next.stdout.text(), next.stderr.text()))?;
        let continued = next.stdout.text().contains(CONTINUES);
        ensure!(!(ran && continued), "{round}: continued twice: {}", pod.stdout.text());
        if continued {
            let shows = || Ok(picture(&place).as_ref() == Some(&before));
            until("another picture", shows).with_context(|| round.to_string())?;
        }
        counts[usize::from(resumes) * 2 + usize::from(continued)] += 1;
        next.signal(Signal::KILL)?;
        next.wait(PATIENCE)?;
    }
    say!(
        "killed while suspending: {} started anew, {} continued; while continuing: {}, {}",
        counts[0],
        counts[1],
        counts[2],
        counts[3]
    );
    Ok(())
}

#[test]
fn a_pod_that_cannot_be_suspended_shuts_down() -> Result<()> {
    if !runs_here("pods that cannot be suspended") {
        return Ok(());
    }
    let place = Place::new("small")?;
    let start = |first: &str| {
        let mut pod = place.start(first, &[&[PROBE], &SUSPEND[..]].concat())?;
        pod.says("The probe runs", 1)?;
        anyhow::Ok(pod)
    };
    for (first, words) in [
        ("mount -t tmpfs -o size=40m tmpfs /mnt", "are free: enlarge the volume"),
        ("mount -t tmpfs -o ro tmpfs /mnt", "shut down, not suspended: /mnt/windows.suspended: "),
    ] {
        for _ in 0..2 {
            let mut pod = start(first)?;
            page(&place)?;
            stops(&mut pod)?;
            let said = pod.stdout.text();
            ensure!(said.contains(words), "{first}: {said}");
            ensure!(!said.contains(SUSPENDED), "{first}: {said}");
        }
    }
    Ok(())
}

/// Starts a pod, which refuses the suspended machine and leaves it on the volume.
fn refuses(place: &Place, words: &[(&str, &str)], text: &str) -> Result<()> {
    let mut pod = starts(place, words)?;
    let status = pod.wait(PATIENCE)?;
    let said = last_line(&pod);
    let way_out = said.contains("or remove /mnt/windows.suspended");
    ensure!(status == 66 && said.contains(text) && way_out, "{status}: {said}");
    ensure!(is_suspended(place), "it is gone");
    Ok(())
}

#[test]
fn an_encrypted_machine_continues_with_its_key_alone() -> Result<()> {
    if !runs_here("encrypted suspended machines") {
        return Ok(());
    }
    let place = Place::new("encrypted")?;
    for (name, byte) in [("key", 0xf7), ("other", 0xf8)] {
        fs::write(place.storage().join(name), [byte; 32])?;
    }
    let with = |key| [&SUSPEND[..], &[("SNAPSHOT_KEY_FILE", key)]].concat();
    let (mut pod, before) = checked(&place, &with("/mnt/key"))?;
    for _ in 0..2 {
        stops(&mut pod)?;
        let state = fs::read(folder(&place).join("machine.json"))?;
        ensure!(!state.windows(7).any(|it| it == b"\"cpuid\""), "it is not encrypted");
        refuses(&place, &SUSPEND, "set SNAPSHOT_KEY_FILE to the file of its key")?;
        refuses(&place, &with("/mnt/other"), "it is damaged, or the key is another one")?;
        pod = continues(&place, &with("/mnt/key"))?;
        ensure!(page(&place)? == before, "another picture");
    }
    stops(&mut pod)?;
    fs::remove_dir_all(folder(&place))?;
    // One that was suspended without a key, as the way out says.
    let (mut pod, before) = checked(&place, &SUSPEND)?;
    stops(&mut pod)?;
    refuses(&place, &with("/mnt/key"), "without SNAPSHOT_KEY_FILE and with SHUTDOWN=Y")?;
    pod = continues(&place, &[("SHUTDOWN", "Y"), ("NETWORK", "user")])?;
    ensure!(page(&place)? == before, "another picture");
    stops(&mut pod)?;
    ensure!(!is_suspended(&place), "suspended without SHUTDOWN=suspend");
    let both = [&with("/mnt/key")[..], &[("IDLE", "30m")]].concat();
    for (words, text) in [
        (with("/mnt/none"), "SNAPSHOT_KEY_FILE: No such file"),
        (both, "IDLE and SNAPSHOT_KEY_FILE are both set"),
    ] {
        let mut pod = starts(&place, &words)?;
        let status = pod.wait(PATIENCE)?;
        let said = last_line(&pod);
        ensure!(status == 2 && said.contains(text), "{status}: {said}");
    }
    Ok(())
}

/// A machine that cannot continue is refused in a sentence, and stays on the volume.
#[test]
fn a_machine_that_cannot_continue_is_kept() -> Result<()> {
    if !runs_here("suspended machines that cannot continue") {
        return Ok(());
    }
    let place = Place::new("kept")?;
    let words = [&SUSPEND[..], &[("CPU_CORES", "1")]].concat();
    let (mut pod, before) = checked(&place, &words)?;
    stops(&mut pod)?;
    refuses(&place, &[&words[..], &[("HPET", "Y")]].concat(), "hpet")?;
    let memory = File::options().read(true).write(true).open(folder(&place).join("memory"))?;
    let mut byte = [0];
    let at = data(&memory)?;
    memory.read_exact_at(&mut byte, at)?;
    memory.write_all_at(&[byte[0] ^ 1], at)?;
    refuses(&place, &words, "damaged")?;
    memory.write_all_at(&byte, at)?;
    // Other sizes wait until the guest has shut down.
    let others = [&SUSPEND[..], &[("CPU_CORES", "2"), ("RAM_SIZE", "96M")]].concat();
    let mut pod = continues(&place, &others)?;
    ensure!(page(&place)? == before, "another picture");
    let said = pod.stdout.text();
    ensure!(said.contains("continues with CPU_CORES=1 and RAM_SIZE=64M"), "{said}");
    stops(&mut pod)?;
    fs::remove_dir_all(folder(&place))?;
    stops(&mut probe(&place, &[])?)
}

/// The first byte of the file that is not in a hole.
fn data(file: &File) -> Result<u64> {
    rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)).context("no data")
}
