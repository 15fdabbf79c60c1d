//! Pods that cannot start: they report the reason before they create anything, show it for a while,
//! and thus do not restart at once. Also the log of a pod that does start.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;
use transom_tests::place::{self, Place, last_line, until};
use transom_tests::program::{PATIENCE, transom, vmm};
use vmm::kvm::KvmSupport;

use super::{ISO, MARK, PROBE, probe, runs_here, stops};

/// Mistakes are reported before the pod creates a file, an interface or a rule.
#[test]
fn a_failed_start_does_not_change_the_volume() -> Result<()> {
    if !runs_here("what cannot run") {
        return Ok(());
    }
    let is = |first: &str, words: &[(&str, &str)], status: i32, says: &[&str]| {
        let place = Place::new("cannot")?;
        let mut pod = place.start(first, words)?;
        let (ended, said) = (pod.wait(PATIENCE)?, last_line(&pod));
        ensure!(ended == status, "{first}: {ended}: {}{said}", pod.stdout.text());
        ensure!(says.iter().all(|word| said.contains(word)), "{first}: {said}");
        ensure!(!said.contains(" --"), "the error names options of vmm: {said}");
        let mut left = fs::read_dir(place.storage())?.collect::<Result<Vec<_>, _>>()?;
        left.retain(|entry| entry.file_name() != "boot.iso");
        ensure!(left.is_empty(), "{first}: the pod created {left:?}");
        place.has_nothing_left()
    };
    let page = "echo '<html>404' > /mnt/boot.iso";
    is(page, &[], 64, &["/mnt/boot.iso is not an ISO image: it is a web page"])?;
    is("touch /mnt/boot.iso", &[], 64, &["not an ISO image: it is empty: download it again"])?;
    if KvmSupport::of_this_host() == KvmSupport::Paravirtual {
        let iso = ISO.replace("MARK", MARK);
        is(
            &iso,
            &[("MANUAL", "Y")],
            88,
            &["/dev/kvm: ", "Windows cannot run here", "VERSION=probe"],
        )?;
    }
    Ok(())
}

#[test]
fn a_failed_pod_shows_its_error_until_it_is_stopped() -> Result<()> {
    if !runs_here("the page of a failure") {
        return Ok(());
    }
    let vmm = format!("mount --bind /dev/null {}", vmm().display());
    for (first, words, status, says) in [
        ("", &[("VERSION", "tiny11")][..], 68, &["Tiny 11 cannot be downloaded: "][..]),
        ("", &[("CPU_CORES", "x"), ("RAM_SIZE", "abc")], 15, &["CPU_CORES=x: ", "RAM_SIZE=abc: "]),
        (vmm.as_str(), &[PROBE], 1, &["vmm: "]),
    ] {
        let place = Place::new("shows")?;
        let more = [("ERROR_HOLD", "3600"), ("NETWORK", "none")];
        let mut pod = place.start(first, &[&more, words].concat())?;
        // The log has the reason at once.
        pod.says("shows this for 3600 s", 1)?;
        // Standard error may be read later than standard output.
        until("the reason on standard error", || {
            let told = pod.stderr.text();
            Ok(says.iter().all(|word| told.contains(word)))
        })?;
        let (said, told) = (pod.stdout.text(), pod.stderr.text());
        ensure!(told.lines().all(|line| line.starts_with("transom: ")), "{told}");
        ensure!(
            said.contains(&format!(
                "8006/ shows this for 3600 s (ERROR_HOLD); then the pod \
             ends with status {status}"
            )),
            "{said}"
        );
        let page = place.get("/msg.html")?;
        for word in says {
            ensure!(told.contains(word) && page.contains(word), "{word}: {told}\n{page}");
        }
        ensure!(place.get("/readyz")?.starts_with("HTTP/1.1 503"), "the failed pod is ready");
        ensure!(
            place.get("/healthz")?.starts_with("HTTP/1.1 200"),
            "the failed pod is not healthy"
        );
        pod.signal(Signal::TERM)?;
        let start = Instant::now();
        let ended = pod.wait(PATIENCE)?;
        ensure!(
            ended == status && start.elapsed() < PATIENCE / 4,
            "{ended}: {:?}",
            start.elapsed()
        );
        ensure!(pod.stderr.text() == told, "the reason is logged twice: {}", pod.stderr.text());
        place.has_nothing_left()?;
    }
    // Visitors of the failure page get neither the API nor files.
    let place = Place::new("closed")?;
    let mut pod = place.start("", &[("VERSION", "tiny11"), ("ERROR_HOLD", "3600")])?;
    pod.says("shows this for 3600 s", 1)?;
    for (path, status) in [("/", "200"), ("/api/v1/state", "404"), ("/log", "404")] {
        let answer = place.get(path)?;
        ensure!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{path}: {answer}");
    }
    let rights = pod.proc("status")?;
    let lost = ["CapEff:\t0000000000000000\n", "Seccomp:\t2\n", "NoNewPrivs:\t1\n"];
    ensure!(lost.iter().all(|line| rights.contains(line)), "{rights}");
    pod.signal(Signal::TERM)?;
    pod.wait(PATIENCE)?;
    Ok(())
}

/// As an engine does with `restart: always` and no delay.
#[test]
fn restarts_of_a_failing_pod_are_slowed_down() -> Result<()> {
    if !runs_here("restarts") {
        return Ok(());
    }
    let place = Place::new("again")?;
    let start = Instant::now();
    for (lives, words) in [("LOG_FORMAT", ""), ("WEB", "N"), ("CPU_CORES", "x")].iter().enumerate()
    {
        let mut pod = place.start("", &[*words, ("VERSION", "tiny11"), ("ERROR_HOLD", "2")])?;
        let status = pod.wait(PATIENCE)?;
        ensure!(status == 68 || status == 15, "{words:?}: {status}");
        let least = Duration::from_secs(2) * u32::try_from(lives + 1)?;
        ensure!(start.elapsed() >= least, "{} runs in only {:?}", lives + 1, start.elapsed());
    }
    Ok(())
}

#[test]
fn a_probe_without_a_display_reacts_to_the_power_button() -> Result<()> {
    if !runs_here("a probe without a display") {
        return Ok(());
    }
    let place = Place::new("dark")?;
    let words = [("NETWORK", "none"), ("DISPLAY", "none")];
    let mut pod = probe(&place, &words)?;
    pod.says("found nothing wrong", 1)?;
    stops(&mut pod)?;
    let said = pod.stdout.text();
    ensure!(!said.contains("in time") && !said.contains("Windows"), "{said}");
    ensure!(said.lines().count() < 16, "the log is long: {said}");
    // `transom shutdown --wait` succeeds once the machine is off.
    let mut pod = probe(&place, &words)?;
    pod.says("found nothing wrong", 1)?;
    let program = transom().display().to_string();
    let (status, said) = place::beside(&pod, &[&program, "shutdown", "--wait", "60"])?;
    ensure!(status == Some(0), "{status:?}: {said}");
    let status = pod.wait(PATIENCE)?;
    ensure!(status == 0, "{status}");
    Ok(())
}

#[test]
fn the_log_gives_the_screen_address_and_the_login() -> Result<()> {
    if !runs_here("the address") {
        return Ok(());
    }
    let place = Place::new("address")?;
    for (words, says) in [
        (&[][..], "The screen: http://10.99.0.2:8006/, or port 8006 of the host"),
        (
            &[
                ("WEB_PORT", "8086"),
                ("PROTECT", "Y"),
                ("PASSWORD", "hushhush"),
                ("USERNAME", "ada"),
            ],
            "The screen: http://10.99.0.2:8086/",
        ),
    ] {
        let mut pod = probe(&place, &[&[("NETWORK", "none")], words].concat())?;
        pod.says(says, 1)?;
        let asks = pod.stdout.text().contains("(name ada; password: set in PASSWORD)");
        ensure!(asks != words.is_empty(), "{}", pod.stdout.text());
        ensure!(!pod.stdout.text().contains("hushhush"), "the password is in the log");
        stops(&mut pod)?;
    }
    Ok(())
}
