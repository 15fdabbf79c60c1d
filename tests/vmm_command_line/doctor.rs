//! `vmm doctor --run`: it tries this host within a minute, and leaves one report, without secrets.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use transom_tests::doctor::{self, REPORT};
use transom_tests::program::{Running, finish, not_run, vmm};
use transom_tests::python::PYTHON;
use vmm::kvm::KvmSupport;

use crate::{NO_KVM, listing};

const MINUTE: Duration = Duration::from_secs(60);

/// Whether this host has KVM, and the validator. Reports the test as not run otherwise.
fn runs_here(test: &str) -> bool {
    let validator = Command::new(PYTHON).args(["-c", "import jsonschema"]).output();
    if KvmSupport::of_this_host() == KvmSupport::None {
        not_run(test, "there is no usable /dev/kvm");
    } else if !validator.is_ok_and(|output| output.status.success()) {
        not_run(test, "python3-jsonschema is missing");
    } else {
        return true;
    }
    false
}

#[test]
fn a_run_tries_this_host_within_a_minute_and_reports_it() -> Result<()> {
    if !runs_here("a_run_tries_this_host_within_a_minute_and_reports_it") {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let start = Instant::now();
    let ended = finish(&mut doctor::command(vmm(), folder.path(), &["--disk", "."]))?;
    ensure!(start.elapsed() < MINUTE, "{:?}: {}", start.elapsed(), ended.stdout);
    ensure!(ended.stderr.is_empty(), "{}", ended.stderr);
    let names: Vec<_> = listing(folder.path()).into_iter().map(|(name, _)| name).collect();
    ensure!(names == [REPORT], "{names:?} are left");
    let text = fs::read_to_string(folder.path().join(REPORT))?;
    let report = doctor::check(&text)?;
    let status = report["status"].as_i64();
    ensure!(status == Some(ended.status.into()), "{}: {}", ended.status, ended.stdout);
    let full = KvmSupport::of_this_host() == KvmSupport::Full;
    ensure!(full || ended.status == 1, "{}: {}", ended.status, ended.stdout);
    let ours = [("probe", true), ("probe on Hyper-V", full), ("disk", true)];
    for (name, works) in ours {
        let step = doctor::step(&report, name)?;
        let wanted = if works { "passed" } else { "skipped" };
        ensure!(step["verdict"] == wanted, "{name}: {step}");
        let line = ended.stdout.lines().find(|line| line.trim_start().starts_with(name));
        let says = step["says"].as_str().unwrap_or_default();
        ensure!(line.is_some_and(|line| line.contains(wanted) && line.ends_with(says)), "{line:?}");
    }
    // A host may keep its kernel from users, and then there is a reason.
    let linux = doctor::step(&report, "Linux")?;
    ensure!(full || linux["verdict"] == "skipped", "{linux}");
    ensure!(linux["says"].as_str().is_some_and(|says| says.len() > 20), "{linux}");
    measured(&report)?;
    for heading in ["Processor", "Memory", "Interrupts", "Exits", "Disk .:", "Verdict after"] {
        let found = ended.stdout.lines().any(|line| line.starts_with(heading));
        ensure!(found, "no {heading}: {}", ended.stdout);
    }
    Ok(())
}

/// Facts, costs and measurements are there.
fn measured(report: &Value) -> Result<()> {
    ensure!(report["probe"]["report"]["ok"] == true, "{report}");
    let exits = report["probe"]["exits"].as_array().map_or(&[][..], Vec::as_slice);
    let names: Vec<_> = exits.iter().filter_map(|exit| exit["name"].as_str()).collect();
    ensure!(names == ["cpuid", "port", "mmio", "eoi", "doorbell", "wake"], "{names:?}");
    for exit in exits.iter().filter(|exit| exit["name"] != "eoi") {
        ensure!(exit["median_ns"].as_u64() > Some(0), "{exit}");
    }
    ensure!(report["kvm"]["disk"]["parts"].as_array().is_some_and(|it| it.len() == 5), "{report}");
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    for field in ["vendor", "name", "microcode"] {
        let value = report["host"]["processor"][field].as_str().unwrap_or_default();
        ensure!(!value.is_empty() && cpuinfo.contains(value), "{field}: {value}");
    }
    let module = report["host"]["modules"]["kvm"].as_object();
    ensure!(module.is_some() == Path::new("/sys/module/kvm").exists(), "{report}");
    Ok(())
}

#[test]
fn the_validator_refuses_reports_that_differ_from_the_schema() -> Result<()> {
    if !runs_here("the_validator_refuses_reports_that_differ_from_the_schema") {
        return Ok(());
    }
    // Without KVM there is nothing to wait for.
    let Some(text) = without_kvm()? else { return Ok(()) };
    doctor::validate(&text)?;
    let report: Value = serde_json::from_str(&text)?;
    let changed = |change: fn(&mut Value)| {
        let mut report = report.clone();
        change(&mut report);
        doctor::validate(&report.to_string())
    };
    let changes: [fn(&mut Value); 4] = [
        |report| report["host"]["name"] = "x".into(),
        |report| report["steps"][0]["verdict"] = "good".into(),
        |report| report["status"] = 2.into(),
        |report| drop(report.as_object_mut().expect("an object").remove("kvm")),
    ];
    for change in changes {
        ensure!(changed(change).is_err(), "the validator accepts a wrong report");
    }
    Ok(())
}

/// The report on a host without KVM. `None`: this test cannot hide it.
fn without_kvm() -> Result<Option<String>> {
    if !rustix::process::geteuid().is_root() {
        not_run("without_kvm", "hiding /dev/kvm needs root");
        return Ok(None);
    }
    let folder = tempfile::tempdir()?;
    let mut command = Command::new("unshare");
    let script = "mount -t tmpfs none /dev && exec \"$1\" doctor --run --json";
    command.args(["--mount", "sh", "-ec", script, "sh"]).arg(vmm()).current_dir(folder.path());
    let ended = finish(&mut command)?;
    ensure!(ended.status == NO_KVM, "{}: {}{}", ended.status, ended.stdout, ended.stderr);
    let written = fs::read_to_string(folder.path().join(REPORT))?;
    ensure!(written == ended.stdout, "the file differs from {}", ended.stdout);
    let report = doctor::check(&written)?;
    for step in report["steps"].as_array().into_iter().flatten() {
        ensure!(step["verdict"] == "skipped", "{step}");
    }
    Ok(Some(written))
}

/// Process IDs of the children of a process.
fn children(of: u32) -> Vec<u32> {
    let ids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = ids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let parent = |id: &u32| {
        let text = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // The name, in brackets, may contain spaces.
        text.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok())
    };
    ids.filter(|id| parent(id) == Some(of)).collect()
}

#[test]
fn a_killed_doctor_leaves_no_machine() -> Result<()> {
    if !runs_here("a_killed_doctor_leaves_no_machine") {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(vmm());
    command.args(["doctor", "--run", "--disk", "."]).current_dir(folder.path());
    let mut running = Running::spawn(&mut command)?;
    let id = running.pid().as_raw_nonzero().get().unsigned_abs();
    let start = Instant::now();
    let machine = loop {
        if let Some(child) = children(id).first() {
            break *child;
        }
        ensure!(start.elapsed() < MINUTE, "no machine was started");
        sleep(Duration::from_millis(5));
    };
    running.signal(Signal::KILL)?;
    running.wait(MINUTE)?;
    // A process that nobody waits for stays in the list as a zombie, without memory.
    let lives = || {
        fs::read_to_string(format!("/proc/{machine}/statm")).is_ok_and(|it| !it.starts_with('0'))
    };
    let start = Instant::now();
    while lives() {
        ensure!(start.elapsed() < MINUTE, "the machine {machine} still runs");
        sleep(Duration::from_millis(5));
    }
    Ok(())
}
