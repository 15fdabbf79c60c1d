//! `transom doctor --run` in a pod: the report is on the volume.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use transom_tests::doctor::{REPORT, check, step};
use transom_tests::engine::{Engine, runs_here};
use vmm::kvm::KvmSupport;

use crate::pod::Pod;

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn a_pod_tries_its_host_and_volume() -> Result<()> {
    if !runs_here("the pod") {
        return Ok(());
    }
    let pod = Pod::start(Engine::get()?, "doctor", &["--env", "VERSION=probe"])?;
    pod.until("/readyz", 200)?;
    let start = Instant::now();
    let (status, said) = pod.run(&["/usr/bin/transom", "doctor", "--run"])?;
    ensure!(start.elapsed() < MINUTE, "{:?}: {said}", start.elapsed());
    let full = KvmSupport::of_this_host() == KvmSupport::Full;
    ensure!(full || status == 1, "{status}: {said}");
    ensure!(said.contains("The report is in /storage/transom-doctor.json."), "{said}");
    let report = check(&pod.read(REPORT)?)?;
    for name in ["probe", "disk"] {
        ensure!(step(&report, name)?["verdict"] == "passed", "{name}: {said}");
    }
    // The image has no kernel, and the step says how to give it one.
    let linux = step(&report, "Linux")?;
    ensure!(linux["verdict"] == "skipped", "{linux}");
    ensure!(!full || linux["says"].to_string().contains("--kernel FILE"), "{linux}");
    ensure!(report["kvm"]["disk"]["name"] == "/storage", "{report}");
    ensure!(pod.stop(30)? == 143, "{}", pod.logs()?);
    Ok(())
}
