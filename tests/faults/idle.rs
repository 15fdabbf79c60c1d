//! A pod that nobody needs sleeps, and wakes for a connection, a viewer or a command; whatever ends
//! it meanwhile, its next start continues it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use transom_tests::lab::everything;
use transom_tests::place::{self, HERE, Place, beside, runs_here};
use transom_tests::program::{PATIENCE, Running, resident_kib, transom};
use transom_tests::say;

use super::suspend::{CONTINUES, PATIENT, Picture, checked, is_suspended, page, reacts, starts};
use super::{probe, stops};

const IDLE: (&str, &str) = ("IDLE", "10s");
const QMP: (&str, &str) = ("QMP", "unix:/mnt/qmp.sock,server");
const ASLEEP: &str = "the probe is asleep";
const WAKES: &str = "the probe wakes up: ";
/// A machine that is only asked about sleeps on for this time.
const QUIET: Duration = Duration::from_secs(3);

/// A pod whose machine sleeps, and its page before.
fn asleep(place: &Place, words: &[(&str, &str)]) -> Result<(Running, Picture)> {
    let (mut pod, page) = checked(place, &[&[IDLE, PATIENT], words].concat())?;
    pod.says(ASLEEP, 1)?;
    Ok((pod, page))
}

/// The lines of `transom status --text`.
fn status(pod: &Running) -> Result<String> {
    let (status, text) = beside(pod, &[&transom().display().to_string(), "status", "--text"])?;
    ensure!(status == Some(0), "{text}");
    Ok(text)
}

/// Waits until it is awake, and checks that its guest is as it was, and reacts.
fn is_awake(place: &Place, pod: &mut Running, before: &Picture, why: &str) -> Result<()> {
    let start = Instant::now();
    let woken = pod.stdout.text().matches(ASLEEP).count();
    pod.says(WAKES, woken)?;
    pod.says(&format!("{WAKES}{why}"), 1)?;
    say!("awake {:.3} s after {why}", start.elapsed().as_secs_f64());
    ensure!(!is_suspended(place), "the snapshot is there while its guest runs");
    ensure!(page(place)? == *before, "another picture");
    reacts(place, "x", before)
}

/// Sends a command to QMP, and waits for its answer.
fn order(place: &Place) -> Result<()> {
    let mut qmp = UnixStream::connect(place.storage().join("qmp.sock"))?;
    qmp.set_read_timeout(Some(PATIENCE))?;
    let mut lines = BufReader::new(qmp.try_clone()?).lines();
    let commands = [
        r#"{"execute":"qmp_capabilities"}"#,
        // The guest does not notice this one.
        r#"{"execute":"cont"}"#,
    ];
    for command in commands {
        writeln!(qmp, "{command}")?;
        loop {
            let line = lines.next().context("no answer")??;
            let answer: Value = serde_json::from_str(&line)?;
            ensure!(answer.get("error").is_none(), "{answer}");
            if answer.get("return").is_some() {
                break;
            }
        }
    }
    Ok(())
}

#[test]
fn an_idle_pod_sleeps_until_somebody_needs_it() -> Result<()> {
    if !runs_here("an idle pod") {
        return Ok(());
    }
    let networks = if everything() { &["user", "nat", "none"][..] } else { &["user", "nat"] };
    for &network in networks {
        let place = Place::new("idle")?;
        let words = [("NETWORK", network), QMP];
        let (mut pod, before) = asleep(&place, &words)?;
        let said = status(&pod)?;
        ensure!(said.contains("asleep: a connection"), "{said}");
        ensure!(is_suspended(&place), "{said}");
        let machine = place::machine(&pod)?.as_raw_nonzero().get().cast_unsigned();
        say!("{network}: asleep with {} KiB resident", resident_kib(machine)?);
        // Questions do not wake it.
        for path in ["/healthz", "/startupz", "/readyz"] {
            let answer = place.get(path)?;
            ensure!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        }
        sleep(QUIET);
        let said = status(&pod)?;
        ensure!(said.contains("asleep: a connection"), "{said}{}", pod.stdout.text());
        ensure!(!pod.stdout.text().contains(WAKES), "{}", pod.stdout.text());
        order(&place)?;
        is_awake(&place, &mut pod, &before, "somebody needs it").context(network)?;
        // It sleeps again.
        pod.says(ASLEEP, 2)?;
        let before = page(&place)?;
        let why = match network {
            "user" => {
                place.connect(HERE, 3389)?;
                "a connection"
            }
            "nat" => {
                // The pod's kernel asks for the guest's address first.
                let socket = place.within(|| UdpSocket::bind("0.0.0.0:0"))?;
                socket.send_to(b"hello", guest(&pod)?)?;
                "a connection"
            }
            _ => {
                order(&place)?;
                "somebody needs it"
            }
        };
        is_awake(&place, &mut pod, &before, why).context(network)?;
        stops(&mut pod)?;
        place.has_nothing_left()?;
    }
    Ok(())
}

/// A port of the guest, by its address in the log.
fn guest(pod: &Running) -> Result<String> {
    let said = pod.stdout.text();
    let address = said.split("the guest is ").nth(1).and_then(|it| it.split(',').next());
    Ok(format!("{}:9", address.with_context(|| said.clone())?))
}

#[test]
fn commands_keep_a_pod_awake() -> Result<()> {
    if !runs_here("a busy pod") {
        return Ok(());
    }
    let place = Place::new("busy")?;
    let (mut pod, _) = checked(&place, &[IDLE, ("NETWORK", "user"), QMP])?;
    let end = Instant::now() + 2 * Duration::from_secs(10);
    while Instant::now() < end {
        order(&place)?;
        sleep(Duration::from_secs(1));
    }
    let said = status(&pod)?;
    ensure!(said.contains("keeps it awake: ") && said.contains("a command"), "{said}");
    ensure!(!pod.stdout.text().contains(ASLEEP), "{}", pod.stdout.text());
    pod.says(ASLEEP, 1)?;
    stops(&mut pod)
}

#[test]
fn a_pod_that_ends_asleep_continues() -> Result<()> {
    if !runs_here("a pod that ends asleep") {
        return Ok(());
    }
    let place = Place::new("ends")?;
    let words = [("NETWORK", "user"), ("SHUTDOWN", "suspend")];
    let continues = |before: &Picture| -> Result<()> {
        ensure!(is_suspended(&place), "the snapshot is gone");
        let mut pod = starts(&place, &words)?;
        pod.says(CONTINUES, 1)?;
        ensure!(page(&place)? == *before, "another picture");
        pod.signal(Signal::KILL)?;
        pod.wait(PATIENCE)?;
        Ok(())
    };
    // SIGTERM: it is saved already.
    let (mut pod, before) = asleep(&place, &words)?;
    let start = Instant::now();
    stops(&mut pod)?;
    say!("ended asleep after {:.1} s", start.elapsed().as_secs_f64());
    let said = pod.stdout.text();
    ensure!(said.contains("the next start continues it"), "{said}");
    continues(&before).context("SIGTERM")?;
    // The pod is killed.
    let (mut pod, before) = asleep(&place, &words)?;
    pod.signal(Signal::KILL)?;
    pod.wait(PATIENCE)?;
    continues(&before).context("a killed pod")?;
    // Its machine is killed.
    let (mut pod, before) = asleep(&place, &words)?;
    kill_process(place::machine(&pod)?, Signal::KILL)?;
    let status = pod.wait(PATIENCE)?;
    ensure!(status == 1, "{status}: {}", pod.stdout.text());
    continues(&before).context("a killed machine")
}

#[test]
fn a_pod_that_is_to_shut_down_wakes_first() -> Result<()> {
    if !runs_here("a pod that shuts down asleep") {
        return Ok(());
    }
    let place = Place::new("wakes")?;
    let (mut pod, _) = asleep(&place, &[("NETWORK", "user")])?;
    stops(&mut pod)?;
    let said = pod.stdout.text();
    ensure!(said.contains(WAKES) && said.contains("asked to shut down"), "{said}");
    ensure!(!is_suspended(&place), "a snapshot of a guest that has shut down");
    // The folder goes with the setting.
    stops(&mut probe(&place, &[("NETWORK", "user")])?)?;
    ensure!(!place.storage().join("windows.suspended").exists(), "an empty folder without IDLE");
    Ok(())
}

#[test]
fn a_pod_that_cannot_sleep_says_so_and_stays_awake() -> Result<()> {
    if !runs_here("a pod that cannot sleep") {
        return Ok(());
    }
    let place = Place::new("sleepless")?;
    let mut start = "mount -t tmpfs -o size=40m tmpfs /mnt".to_owned();
    let words = [super::PROBE, IDLE, ("NETWORK", "none")];
    let mut pod = place.start(&start, &words)?;
    pod.says("the probe stays awake: it needs", 1)?;
    let said = pod.stdout.text();
    ensure!(said.contains("enlarge the volume. It is tried again in 10 min"), "{said}");
    sleep(QUIET);
    let said = status(&pod)?;
    ensure!(said.contains("machine       running"), "{said}{}", pod.stdout.text());
    stops(&mut pod)?;
    start = "mount -t tmpfs -o ro tmpfs /mnt".into();
    let mut pod = place.start(&start, &words)?;
    pod.says("The probe runs", 1)?;
    pod.says("IDLE: the machine stays awake: it cannot be saved", 1)?;
    let said = status(&pod)?;
    ensure!(said.contains("idle          never: it cannot be saved"), "{said}");
    stops(&mut pod)
}
