//! Devices with the kernel's help (irqfd, ioeventfd), and under random accesses.

use std::time::{Duration, Instant};

use transom_tests::flash;
use transom_tests::program::{PATIENCE, Running, findings, report};

use crate::runs_here;

#[test]
fn a_device_thread_interrupts_and_receives_doorbells() {
    if !runs_here("a_device_thread_interrupts_and_receives_doorbells") {
        return;
    }
    // Alone; and in another slot, with memory above 4 GiB.
    for words in [&["--device", "edu"][..], &["--device", "edu,slot=1e.0", "--memory", "5G"]] {
        let words = [&["run", "--cpus", "2"], words].concat();
        let mut machine = Running::vmm(&words).expect("vmm");
        assert_eq!(machine.wait(PATIENCE).expect("an end"), 0, "{words:?}");
        let output = machine.stdout.text();
        let report = report(&output).expect("a report");
        assert_eq!(report["ok"], true, "{output}");
        let edu = findings(&report, "edu");
        assert_eq!(edu.len(), 1, "{output}");
        for part in ["alive", "factorial", "dma", "doorbell"] {
            assert_eq!(edu[0][part], true, "{output}");
        }
        // One interrupt for the factorial, each of two transfers, and each of 64 doorbells: while
        // the processor runs, and while it halts.
        assert_eq!(edu[0]["interrupts"], 3 + 2 * 64, "{output}");
    }
}

/// Accesses for each seed. A million take three minutes on a paravirtual KVM.
fn count() -> u64 {
    let all = std::env::var("TRANSOM_TESTS").is_ok_and(|which| which == "all");
    if all { 1_000_000 } else { 40_000 }
}

/// Runs random accesses on a machine with all devices, and with flash that the guest programs and
/// erases.
fn torture(seed: u64, count: u64, patience: Duration) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    flash::write(folder.path());
    let flash = format!("flash,code={},vars={}", path("code.fd"), path("vars.fd"));
    let port = format!("serial,port=2,to=file:{}", path("serial"));
    let words = format!("torture={seed},{count} then=poweroff");
    let mut machine = Running::vmm(&[
        "run",
        "--cmdline",
        &words,
        "--display",
        "640x480,memory=4M",
        "--device",
        "edu",
        "--device",
        "hpet",
        "--device",
        &flash,
        "--device",
        &port,
        "--device",
        "debugcon",
    ])
    .expect("vmm");
    let start = Instant::now();
    let mut sizes = Vec::new();
    for tenth in 1..10 {
        machine.says(&format!("torture {}\n", count / 10 * tenth), 1).expect("progress");
        assert!(start.elapsed() < patience, "seed {seed}: a tenth took {:?}", start.elapsed());
        sizes.push(machine.memory_kib("Rss").expect("a process"));
    }
    let status = machine.wait(patience).expect("an end");
    let (output, log) = (machine.stdout.text(), machine.stderr.text());
    assert_eq!(status, 0, "seed {seed}: {output}\n{log}");
    let report = report(&output).expect("a report");
    assert_eq!(findings(&report, "torture")[0]["count"], count, "{output}");
    eprintln!("seed {seed}: {count} accesses in {:?}, RSS in KiB {sizes:?}", start.elapsed());
    // Each device logs each mistake once, so the log is bounded.
    assert!(log.lines().count() < 200, "seed {seed}: {} lines: {log}", log.lines().count());
    let (first, most) = (sizes[0], sizes.iter().copied().max().unwrap_or(0));
    // Program pages that are read for the first time, and pages of the display's memory.
    assert!(most <= first + 256 + (4 << 10), "seed {seed}: memory grows: {sizes:?} KiB");
}

#[test]
fn random_accesses_do_no_harm_and_cost_no_memory() {
    if !runs_here("random_accesses_do_no_harm_and_cost_no_memory") {
        return;
    }
    let seeds = [11, 12]
        .map(|seed| std::thread::spawn(move || torture(seed, count(), Duration::from_secs(900))));
    for seed in seeds {
        seed.join().expect("no panic of a run");
    }
}
