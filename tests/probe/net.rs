//! Networks carry every byte: the probe sends frames, a peer sends them back, and the probe
//! compares them.

use std::os::unix::net::UnixListener;
use std::thread;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use transom_tests::network::{in_namespace, ip, reflect, while_reflecting};
use transom_tests::program::{PATIENCE, Running, findings, not_run, report};

use crate::runs_here;

/// Runs the probe with these words for the network until it powers off, and returns its report.
fn run(net: &str, words: &str) -> Result<Value> {
    let words = format!("checks=none {words} then=poweroff");
    let mut machine = Running::vmm(&["run", "--device", net, "--cmdline", &words])?;
    let status = machine.wait(PATIENCE)?;
    let output = machine.stdout.text();
    ensure!(status == 0, "{net}: {words}: {output}{}", machine.stderr.text());
    report(&output)
}

/// Like `run`, with a peer on a socket. `pass` may change or drop frames.
fn run_with(
    words: &str,
    pass: impl FnMut(u64, &mut [u8]) -> bool + Send + 'static,
) -> Result<(Value, u64)> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("peer");
    let listener = UnixListener::bind(&path)?;
    let peer = thread::spawn(move || reflect(listener.accept()?.0, pass));
    let report = run(&format!("virtio-net,to=passt:{}", path.display()), words)?;
    let count = peer.join().map_err(|_| anyhow::anyhow!("the peer panicked"))??;
    Ok((report, count))
}

/// Frame sizes, queue depths and numbers of frames.
const CASES: [(u64, u64, u64); 6] =
    [(22, 1, 200), (61, 7, 1000), (64, 1, 1000), (64, 64, 2000), (1514, 1, 500), (1514, 64, 4000)];

/// Runs all cases, and checks the report.
fn check_all_cases(run: impl FnOnce(&str) -> Result<Value>, more: &str) -> Result<()> {
    let words = CASES.iter().enumerate().map(|(seed, (size, depth, count))| {
        format!("net=echo,seed={seed},size={size},depth={depth},count={count}{more}")
    });
    let report = run(&words.collect::<Vec<_>>().join(" "))?;
    let found = findings(&report, "net");
    ensure!(found.len() == CASES.len(), "{report}");
    for (found, (size, depth, count)) in found.iter().zip(CASES) {
        ensure!(found["verdict"] == "pass", "{found}");
        ensure!(found["size"] == size && found["depth"] == depth, "{found}");
        ensure!(found["sent"] == count && found["received"] == count, "{found}");
        ensure!(found["mismatches"] == 0, "{found}");
        let [median, p99] = ["median_ns", "p99_ns"].map(|key| found[key].as_u64());
        ensure!(median > Some(0) && median <= p99, "{found}");
    }
    Ok(())
}

#[test]
fn every_byte_of_every_frame_comes_back() {
    if !runs_here("every_byte_of_every_frame_comes_back") {
        return;
    }
    let run = |words: &str| Ok(run_with(words, |_, _| true)?.0);
    check_all_cases(run, "").expect("all frames");
}

#[test]
fn network_completions_wake_a_halted_processor() {
    if !runs_here("network_completions_wake_a_halted_processor") {
        return;
    }
    let ways = ["depth=1,count=300", "depth=16,size=1514,count=1000"];
    let words = ways.map(|way| format!("net=echo,wait=interrupt,{way}")).join(" ");
    let words = format!("{words} net=send,wait=interrupt,depth=64,count=2000");
    let (report, _) = run_with(&words, |_, _| true).expect("a report");
    let found = findings(&report, "net");
    assert_eq!((&report["ok"], found.len()), (&true.into(), 3), "{report}");
    for found in found {
        assert!(found["interrupts"].as_u64() > Some(0), "{found}");
        assert_eq!(found["lost_interrupts"], 0, "{found}");
    }
}

#[test]
fn a_frame_changed_in_transit_is_detected() {
    if !runs_here("a_frame_changed_in_transit_is_detected") {
        return;
    }
    let change = |number, frame: &mut [u8]| {
        if number == 300 || number == 400 {
            frame[101] ^= 1;
        }
        true
    };
    let (report, _) = run_with("net=echo,size=700,depth=8,count=500", change).expect("a report");
    let found = findings(&report, "net")[0];
    assert_eq!((&report["ok"], &found["verdict"]), (&false.into(), &"fail".into()));
    assert_eq!((&found["mismatches"], &found["received"]), (&2.into(), &500.into()), "{found}");
    // Words of eight bytes after a header of 22.
    assert_eq!(found["first_bad"], "0x5e", "{found}");
}

#[test]
fn a_lost_or_unexpected_frame_is_detected() {
    if !runs_here("a_lost_or_unexpected_frame_is_detected") {
        return;
    }
    let words = "net=echo,count=500,patience=10";
    let (report, count) = run_with(words, |number, _| number != 123).expect("a report");
    let found = findings(&report, "net")[0];
    assert_eq!((&report["ok"], &found["verdict"]), (&false.into(), &"fail".into()));
    assert_eq!((&found["sent"], &found["received"]), (&124.into(), &123.into()), "{found}");
    assert_eq!((count, &found["mismatches"]), (124, &0.into()), "{found}");
    // A frame with another number is not an answer.
    let renumber = |number: u64, frame: &mut [u8]| {
        if number == 200 {
            frame[14] ^= 0x80;
        }
        true
    };
    let (report, _) = run_with(words, renumber).expect("a report");
    let found = findings(&report, "net")[0];
    assert_eq!((&found["received"], &found["mismatches"]), (&200.into(), &1.into()), "{found}");
    assert_eq!((&found["verdict"], &found["first_bad"]), (&"fail".into(), &"0xe".into()));
}

#[test]
fn all_sent_frames_leave() {
    if !runs_here("all_sent_frames_leave") {
        return;
    }
    let words = "net=send,size=1514,depth=64,count=5000 net=send,size=64,depth=256,count=20000";
    let (report, count) = run_with(words, |_, _| false).expect("a report");
    let found = findings(&report, "net");
    assert_eq!((&report["ok"], count), (&true.into(), 25_000), "{report}");
    assert_eq!((&found[0]["sent"], &found[1]["sent"]), (&5000.into(), &20_000.into()));
}

#[test]
fn invalid_network_arguments_fail() {
    if !runs_here("invalid_network_arguments_fail") {
        return;
    }
    let bad = ["echo,dept=3", "wipe", "echo,depth=257", "echo,size=21", "echo,size=1000000"];
    let more = [
        "arp",
        "arp,host=10.0.0",
        "arp,host=10.0.0.256",
        "echo,peer=01:02:03:04:05",
        "echo,count=0",
    ];
    for words in bad.into_iter().chain(more) {
        let report = run("virtio-net", &format!("net={words}")).expect("a report");
        let found = findings(&report, "net")[0];
        assert_eq!((&report["ok"], &found["verdict"]), (&false.into(), &"fail".into()), "{words}");
        assert!(found["wants"].is_string(), "{words}: {found}");
    }
    let report = run("edu", "net=send").expect("a report");
    assert_eq!(findings(&report, "net")[0]["kind"], "none that works", "{report}");
}

/// Uses a new tap, the host's kernel, and a thread that sends the tap's frames back.
fn speaks_through_a_tap() -> Result<()> {
    ip("tuntap add probe0 mode tap")?;
    ip("addr add 10.9.8.1/24 dev probe0")?;
    ip("link set probe0 up")?;
    let net = "virtio-net,to=tap:probe0,mac=52:54:00:00:00:09";
    let report = run(net, "net=arp,host=10.9.8.1,count=500 net=arp,host=10.9.8.2,patience=1")?;
    let found = findings(&report, "net");
    ensure!(found[0]["verdict"] == "pass" && found[0]["received"] == 500, "{report}");
    // No host has this address.
    ensure!(found[1]["verdict"] == "fail" && found[1]["received"] == 0, "{report}");
    while_reflecting(|| check_all_cases(|words| run(net, words), ",peer=02:00:00:00:00:01"))?;
    let before = arrived()?;
    run(net, "net=send,size=1514,depth=256,count=50000")?;
    let all = arrived()? - before;
    ensure!(all >= 50_000, "only {all} of 50000 frames came out of the tap");
    Ok(())
}

/// The number of packets that the guest sent to the tap.
fn arrived() -> Result<u64> {
    // The count includes packets that the tap dropped because nothing received them.
    let output = ip("-s -j link show dev probe0")?;
    let stats: Value = serde_json::from_str(&output).context(output)?;
    stats[0]["stats64"]["rx"]["packets"].as_u64().context("packets")
}

#[test]
fn every_byte_comes_back_through_a_tap() {
    let test = "every_byte_comes_back_through_a_tap";
    if !runs_here(test) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        not_run(test, "a tap needs root");
        return;
    }
    in_namespace(speaks_through_a_tap).expect("a tap");
}
