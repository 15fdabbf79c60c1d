//! The guest finds the configured hardware.

use serde_json::Value;
use transom_tests::program::{Running, findings, report};

use crate::runs_here;

/// Runs the probe until it powers off, and returns its report.
fn run(words: &[&str]) -> Value {
    let mut machine = Running::vmm(&[&["run"], words].concat()).expect("vmm");
    let status = machine.wait(transom_tests::program::PATIENCE).expect("an end");
    let output = machine.stdout.text();
    assert_eq!(status, 0, "{words:?}: {output}{}", machine.stderr.text());
    let report = report(&output).expect("a report");
    assert_eq!(report["ok"], true, "{words:?}: {output}");
    assert_eq!(report["dropped"], 0, "{words:?}: {output}");
    report
}

#[test]
fn the_probe_is_the_default_and_passes() {
    if !runs_here("the_probe_is_the_default_and_passes") {
        return;
    }
    let report = run(&[]);
    let checks =
        ["tsc", "memory-test", "local-apic", "timer", "processors", "pci", "display", "nmi"];
    for name in checks {
        let found = findings(&report, name);
        assert_eq!(found.len(), 1, "{name} in {report}");
        assert_eq!(found[0]["verdict"], "pass", "{name} in {report}");
    }
    let functions = findings(&report, "pci-function");
    let ids: Vec<_> = functions.iter().map(|function| &function["id"]).collect();
    assert_eq!(ids, ["8086:29c0", "1234:1111", "1b36:000d", "8086:2918"]);
}

#[test]
fn both_config_mechanisms_reach_the_same_machine() {
    if !runs_here("both_config_mechanisms_reach_the_same_machine") {
        return;
    }
    let machine = ["--device", "virtio-net,to=none", "--device", "edu"];
    let by_ports = run(&machine);
    let door = findings(&by_ports, "pci")[0]["ecam"].as_str().expect("text").to_owned();
    let door = u64::from_str_radix(door.trim_start_matches("0x"), 16).expect("a number");
    let words = format!("ecam={door} then=poweroff");
    let by_window = run(&[&machine[..], &["--cmdline", &words]].concat());
    for (report, door) in [(&by_ports, "ports"), (&by_window, "ecam")] {
        let pci = findings(report, "pci")[0];
        assert_eq!((&pci["door"], &pci["byte_lanes"]), (&door.into(), &true.into()), "{report}");
        // The driver found the device and set up its interrupts through this access method.
        assert_eq!(findings(report, "edu")[0]["verdict"], "pass", "{report}");
    }
    let functions = [&by_ports, &by_window].map(|report| findings(report, "pci-function"));
    assert_eq!((functions[0].len(), &functions[0]), (6, &functions[1]));
}

#[test]
fn the_guest_has_the_configured_processors() {
    if !runs_here("the_guest_has_the_configured_processors") {
        return;
    }
    for (words, count) in [("4", 4), ("3,sockets=3", 3), ("6,sockets=2,cores=3", 6)] {
        let report = run(&["--cpus", words]);
        let found = findings(&report, "processors")[0];
        assert_eq!((&found["online"], &found["madt"]), (&count.into(), &count.into()), "{words}");
    }
}

#[test]
fn the_guest_has_the_configured_memory() {
    if !runs_here("the_guest_has_the_configured_memory") {
        return;
    }
    for (words, mib) in [("16M", 16), ("3G", 3072), ("5G", 5120)] {
        let report = run(&["--memory", words]);
        let ram = findings(&report, "memory-map")[0]["ram_bytes"].as_u64().expect("a number");
        let asked = mib << 20;
        // The range from 640 KiB to 1 MiB is not RAM.
        assert!(ram <= asked && asked - ram < 1 << 20, "{words}: {ram:#x}");
        let tested = findings(&report, "memory-test")[0];
        let high = tested["samples_above_4g"].as_u64().expect("a number");
        // Q35 has at most 2816 MiB below 4 GiB.
        assert_eq!(high > 0, mib > 2816, "{words}: {tested}");
    }
}

#[test]
fn a_custom_kernel_boots_like_the_probe() {
    if !runs_here("a_custom_kernel_boots_like_the_probe") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (kernel, initrd) = (folder.path().join("probe.elf"), folder.path().join("initrd"));
    std::fs::write(&kernel, probe::IMAGE).expect("a file");
    std::fs::write(&initrd, [7; 5000]).expect("a file");
    let [kernel, initrd] = [kernel, initrd].map(|path| path.display().to_string());
    let words = ["--kernel", &kernel, "--initrd", &initrd, "--cmdline", "then=poweroff"];
    run(&[&words[..], &["--accept-emulation"]].concat());
}
