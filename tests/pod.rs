//! The container image as people run it: built, started by Podman, seen from outside, and stopped.
#![forbid(unsafe_code)]

#[path = "pod/engine.rs"]
mod engine;
#[path = "pod/kube.rs"]
mod kube;
#[path = "pod/sight.rs"]
mod sight;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use transom_tests::browser::Browser;
use transom_tests::print::Picture;
use transom_tests::program::{PATIENCE, not_run};
use vmm::kvm::Situation;

use self::engine::{Engine, Pod};

/// Whether a test can run here.
fn runs_here(test: &str) -> bool {
    let reason = if Situation::of_this_host() == Situation::None {
        "there is no usable /dev/kvm"
    } else if let Err(why) = engine::is_here() {
        why
    } else {
        return true;
    };
    not_run(test, reason);
    false
}

/// Waits until the picture in the browser is as it should be.
fn until(browser: &mut Browser, enough: impl Fn(&Picture) -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !browser.picture(usize::MAX >> 1)?.is_some_and(|it| enough(&it)) {
        ensure!(Instant::now() < deadline, "the picture is not as it should be");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[test]
fn the_probe_is_seen_and_a_stop_is_in_time() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let pod = Pod::start(engine, "probe", &["--env", "VERSION=probe"])?;
    pod.until("/readyz", 200)?;
    for (path, status, words) in [
        ("/healthz", 200, "ok"),
        ("/startupz", 200, "ok"),
        ("/", 200, "viewer.js"),
        ("/msg.html", 404, ""),
        ("/metrics", 200, "transom_machine_up 1\n"),
        ("/metrics", 200, "transom_phase{phase=\"running\"} 1\n"),
        ("/api/v1/state", 200, "\"phase\":\"running\""),
        ("/api/openapi.json", 200, "\"openapi\""),
        ("/log?after=0", 200, "probe"),
    ] {
        let answer = pod.get(path)?;
        ensure!(answer.status == status && answer.body.contains(words), "{path}: {answer:?}");
    }
    // A tap with address translation is what there is where it is allowed.
    let said = pod.logs()?;
    ensure!(said.contains("the guest is 172.30."), "{said}");
    // Whoever breaks out of the machine is nobody.
    let process = pod.process()?;
    for line in [
        "Uid:\t10001\t10001\t10001\t10001",
        "Gid:\t10001\t10001\t10001\t10001",
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    ] {
        ensure!(process.contains(line), "no {line} in {process}");
    }
    for (word, status, words) in [("live", 0, "ok"), ("ready", 0, "ok"), ("never", 2, "")] {
        let (ended, said) = pod.run(&["/usr/bin/transom", "probe", word])?;
        ensure!(ended == status && said.trim() == words, "{word}: {ended}: {said}");
    }
    let start = Instant::now();
    let status = pod.stop(30)?;
    ensure!(status == 143, "{status}\n{}", pod.logs()?);
    ensure!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    Ok(())
}

#[test]
fn a_guest_that_switches_itself_off_ends_the_pod_with_0() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let pod = Pod::start(engine, "off", &["--env", "VERSION=probe"])?;
    pod.until("/readyz", 200)?;
    let answer = pod.post("/api/v1/power", r#"{"action":"shutdown"}"#)?;
    ensure!(answer.status == 200, "{answer:?}");
    let status = pod.wait()?;
    ensure!(status == 0, "{status}\n{}", pod.logs()?);
    Ok(())
}

/// Pod Security "restricted", and no file system of its own to write to.
#[test]
fn nobody_without_rights_runs_it() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let folder = tempfile::tempdir()?;
    // What a device plugin gives: a device that this user may open.
    let node = folder.path().join("kvm");
    let number = fs::metadata("/dev/kvm")?.rdev();
    let mode = Mode::RUSR | Mode::WUSR | Mode::ROTH | Mode::WOTH;
    mknodat(CWD, &node, FileType::CharacterDevice, mode, number)?;
    fs::set_permissions(&node, fs::Permissions::from_mode(0o666))?;
    let device = format!("{}:/dev/kvm", node.display());
    let rights = ["--user", "10001:10001", "--cap-drop", "ALL", "--device", &device];
    let closed = ["--security-opt", "no-new-privileges", "--read-only", "--tmpfs", "/tmp"];
    let words = ["--env", "VERSION=probe", "--env", "NETWORK=user"];
    let words = [&rights[..], &closed, &words].concat();
    let pod = Pod::start_with(engine, "nobody", &words)?;
    pod.until("/readyz", 200)?;
    let said = pod.logs()?;
    ensure!(said.contains("user mode: the guest is 10.99.0.2"), "{said}");
    let process = pod.process()?;
    for line in ["Uid:\t10001\t10001", "CapEff:\t0000000000000000", "Seccomp:\t2"] {
        ensure!(process.contains(line), "no {line} in {process}");
    }
    let status = pod.stop(30)?;
    ensure!(status == 143, "{status}\n{}", pod.logs()?);
    Ok(())
}

#[test]
fn what_is_wrong_is_one_sentence_and_a_status() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    for (words, status, sentence) in [
        (&["--env", "VERSION=11"][..], 68, "mount its ISO as /custom.iso"),
        (&["--env", "CPU_CORES=many"], 15, "CPU_CORES=many"),
        (&["--env", "VERSION=probe", "--env", "QMP=tcp:0.0.0.0:1"], 2, "QMP"),
    ] {
        let pod = Pod::start(engine, "wrong", words)?;
        let (ended, said) = (pod.wait()?, pod.logs()?);
        ensure!(ended == status, "{words:?}: {ended}: {said}");
        let last = said.lines().last().context("no line")?;
        ensure!(last.starts_with("transom: ") && last.contains(sentence), "{words:?}: {said}");
    }
    let pod = Pod::start_with(engine, "without", &["--env", "VERSION=probe"])?;
    let (ended, said) = (pod.wait()?, pod.logs()?);
    ensure!(ended == 88 && said.contains("--device /dev/kvm"), "{ended}: {said}");
    Ok(())
}

#[test]
fn the_screen_asks_for_the_password() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let engine = Engine::get()?;
    let secret = tempfile::NamedTempFile::new()?;
    fs::write(secret.path(), "a long word")?;
    let mount = format!("{}:/run/secrets/word:ro", secret.path().display());
    let words = ["VERSION=probe", "PROTECT=Y", "USERNAME=ada", "PASSWORD_FILE=/run/secrets/word"];
    let words = words.iter().flat_map(|word| ["--env", word]);
    let words: Vec<_> = words.chain(["--volume", &mount]).collect();
    let pod = Pod::start(engine, "asks", &words)?;
    pod.until("/readyz", 200)?;
    for (path, who, status) in [
        ("/", None, 303),
        ("/metrics", None, 401),
        ("/api/v1/state", Some("ada:wrong"), 401),
        ("/healthz", None, 200),
    ] {
        let answer = pod.get_as(path, who)?;
        ensure!(answer.status == status, "{path}: {answer:?}");
    }
    let answer = pod.until_as("/api/v1/state", "ada:a long word", 200)?;
    ensure!(answer.body.contains("\"machine\":{"), "{answer:?}");
    let (status, word) = pod.run(&["/usr/bin/transom", "password"])?;
    ensure!(status == 0 && word == "a long word\n", "{status}: {word}");
    let (status, said) = pod.run(&["/usr/bin/transom", "status"])?;
    ensure!(status == 0 && said.contains("\"state\": \"running\""), "{status}: {said}");
    ensure!(!pod.logs()?.contains("a long word"), "a secret is in the log");
    Ok(())
}
