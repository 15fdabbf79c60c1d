//! `vmm doctor --disk PATH --net TAP`: its measurements, and that it changes nothing.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use serde_json::Value;
use transom_tests::network::{in_namespace, ip};
use transom_tests::program::{Ended, finish, not_run, run_in, vmm};
use vmm::kvm::KvmSupport;

use crate::runs_here;

/// The exit status on this host without any disk or tap.
fn usual() -> i32 {
    if KvmSupport::of_this_host() == KvmSupport::Full { 0 } else { 1 }
}

fn doctor(folder: &Path, words: &[&str]) -> Result<Ended> {
    run_in(folder, &[&["doctor"], words].concat())
}

/// The trial in the JSON of a doctor that found nothing wrong with the given disk or tap.
fn healthy(folder: &Path, words: &[&str], what: &str) -> Result<Value> {
    let ended = doctor(folder, &[&["--json"], words].concat())?;
    let said = (&ended.stdout, &ended.stderr);
    ensure!(ended.status == usual() && ended.stderr.is_empty(), "{words:?}: {said:?}");
    let mut found: Value = serde_json::from_str(&ended.stdout)?;
    let trial = found[what].take();
    ensure!(trial["works"] == true, "{words:?}: {trial}");
    Ok(trial)
}

/// The parts of a trial with this action.
fn parts<'a>(trial: &'a Value, does: &str) -> Vec<&'a Value> {
    let all = trial["parts"].as_array().into_iter().flatten();
    all.filter(|part| part["does"] == does).collect()
}

#[test]
fn an_existing_disk_is_only_read() {
    if !runs_here("an_existing_disk_is_only_read") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let bytes: Vec<u8> = (0..4 << 20).map(|at: u32| at.to_le_bytes()[2] ^ 0x5a).collect();
    let path = folder.path().join("disk.img");
    fs::write(&path, &bytes).expect("a disk");
    let before = fs::metadata(&path).and_then(|it| it.modified()).expect("a time");
    let trial = healthy(folder.path(), &["--disk", "disk.img"], "disk").expect("a trial");
    let reads = parts(&trial, "read");
    assert_eq!((reads.len(), &trial["name"]), (3, &"disk.img".into()), "{trial}");
    for (read, depth) in reads.iter().zip([32, 1, 32]) {
        assert_eq!(read["depth"], depth, "{trial}");
        for key in ["per_second", "mib_per_second", "median_us", "p99_us", "processor_us"] {
            assert!(read[key].as_f64() > Some(0.0), "{key}: {trial}");
        }
    }
    assert!(parts(&trial, "write").is_empty(), "{trial}");
    assert!(trial["says"].as_str().is_some_and(|it| it.contains("only read")), "{trial}");
    assert_eq!(fs::read(&path).expect("a disk"), bytes);
    let after = fs::metadata(&path).and_then(|it| it.modified()).expect("a time");
    assert_eq!(before, after);
}

#[test]
fn a_volume_is_measured_with_a_temporary_file() {
    if !runs_here("a_volume_is_measured_with_a_temporary_file") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let left = || fs::read_dir(folder.path()).expect("a folder").count();
    let trial = healthy(folder.path(), &["--disk", "new.img"], "disk").expect("a trial");
    let (write, verify) = (parts(&trial, "write"), parts(&trial, "verify"));
    assert_eq!((write.len(), verify.len(), parts(&trial, "read").len()), (1, 1, 3), "{trial}");
    let verified = verify[0]["verified_bytes"].as_u64().expect("a number");
    assert!((16 << 20..=256 << 20).contains(&verified), "{trial}");
    assert_eq!(left(), 0);
    // The report for people.
    let ended = doctor(folder.path(), &["--disk", "."]).expect("a doctor");
    assert_eq!((ended.status, ended.stderr.as_str()), (usual(), ""), "{}", ended.stdout);
    let said = ended.stdout;
    let table = said.split("\nDisk .: ").nth(1).expect("a section for the disk");
    for part in ["MiB was written there", "bytes verified", "latency", "processor"] {
        assert!(table.contains(part), "{part}: {said}");
    }
    assert_eq!(left(), 0);
}

#[test]
fn impossible_measurements_are_refused_in_one_sentence() {
    if !runs_here("impossible_measurements_are_refused_in_one_sentence") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    fs::write(folder.path().join("a,b"), [0; 512]).expect("a file");
    for (words, sentence) in [
        (["--disk", "gone/new.img"], "gone: no folder"),
        (["--disk", "/dev/null"], "/dev/null is neither a file nor a block device"),
        (["--disk", "a,b"], "a comma"),
        (["--net", "transom-gone"], "ip tuntap add transom-gone"),
        (["--net", "lo"], "lo is a network interface, but not a tap"),
        (["--net", "a/b"], "is not an interface name"),
    ] {
        let ended = doctor(folder.path(), &words).expect("a doctor");
        assert_eq!((ended.status, ended.stdout.as_str()), (1, ""), "{words:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(sentence), "{words:?}: {}", ended.stderr);
        assert_eq!(ended.stderr.lines().count(), 1, "{words:?}: {}", ended.stderr);
    }
}

/// A tap with an address, one without, and one that is down.
fn measures_taps() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for tap in ["doctor0", "doctor1"] {
        ip(&format!("tuntap add {tap} mode tap"))?;
    }
    // The state of the interface is in the namespace's own /sys.
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", "mount -t sysfs none /sys && exec \"$@\"", "sh"]);
    let down = finish(command.arg(vmm()).args(["doctor", "--net", "doctor1"]))?;
    ensure!(down.status == 1 && down.stderr.contains("doctor1 is down"), "{}", down.stderr);
    ip("addr add 10.9.7.3/24 dev doctor0")?;
    ip("link set doctor0 up")?;
    ip("link set doctor1 up")?;
    let trial = healthy(folder.path(), &["--net", "doctor0"], "net")?;
    let (sent, asked) = (parts(&trial, "send"), parts(&trial, "arp"));
    ensure!(sent.len() == 1 && asked.len() == 1, "{trial}");
    ensure!(sent[0]["size"] == 1514 && sent[0]["per_second"].as_f64() > Some(0.0), "{trial}");
    ensure!(asked[0]["count"] == 2000 && asked[0]["median_us"].as_f64() > Some(0.0), "{trial}");
    ensure!(trial["says"].as_str().is_some_and(|it| it.contains("10.9.7.3")), "{trial}");
    // Without an IPv4 address there is no peer, which is no fault of the tap.
    let trial = healthy(folder.path(), &["--net", "tap:doctor1"], "net")?;
    ensure!(parts(&trial, "arp").is_empty() && parts(&trial, "send").len() == 1, "{trial}");
    ensure!(trial["says"].as_str().is_some_and(|it| it.contains("no IPv4 address")), "{trial}");
    Ok(())
}

#[test]
fn a_tap_is_measured_with_the_host_as_its_peer() {
    let test = "a_tap_is_measured_with_the_host_as_its_peer";
    if !runs_here(test) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        not_run(test, "a tap needs root");
        return;
    }
    in_namespace(measures_taps).expect("taps");
}
