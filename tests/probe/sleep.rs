//! A machine sleeps in its process: without its memory, until a frame or somebody wakes it.

use std::fs::{self, File};
use std::net::UdpSocket;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::mpsc::{self, Receiver};
use std::thread::{sleep, spawn};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use transom_tests::network::{in_namespace, ip, reflect};
use transom_tests::program::{PATIENCE, connect, findings, not_run, report};
use transom_tests::say;
use vmm::control::{Command, Then};

use crate::runs_here;
use crate::snapshot::Machine;

/// The memory of the machine, and the most that it may have asleep.
const MEMORY_KIB: u64 = 256 << 10;
const ASLEEP_KIB: u64 = 100 << 10;
/// A time in which nothing may happen.
const QUIET: Duration = Duration::from_millis(500);

fn ask(machine: &Machine, command: &Command) -> Result<Value> {
    connect(&machine.control())?.ask(command)
}

/// Waits for a frame in the background.
fn awaits(control: &Path) -> Receiver<Result<Value>> {
    let (sender, answers) = mpsc::channel();
    let control = control.to_owned();
    spawn(move || {
        let answer = connect(&control).and_then(|mut it| it.ask(&Command::Await));
        sender.send(answer).ok();
    });
    answers
}

fn answer(waiting: &Receiver<Result<Value>>) -> Result<bool> {
    let answer = waiting.recv_timeout(PATIENCE).context("no answer")??;
    answer["frame"].as_bool().context("an answer without `frame`")
}

fn is_quiet(waiting: &Receiver<Result<Value>>) -> Result<()> {
    match waiting.recv_timeout(QUIET) {
        Err(mpsc::RecvTimeoutError::Timeout) => Ok(()),
        other => anyhow::bail!("it does not wait: {other:?}"),
    }
}

#[test]
fn a_machine_that_sleeps_returns_its_memory_and_wakes_with_it() {
    if !runs_here("a_machine_that_sleeps_returns_its_memory_and_wakes_with_it") {
        return;
    }
    sleeps_and_wakes().expect("sleep");
}

/// The page of the probe, once it does not change any more.
fn page(machine: &Machine) -> Result<Vec<u8>> {
    let mut before = Vec::new();
    for _ in 0..200 {
        let (_, now) = connect(&machine.control())?.screenshot()?;
        if now == before {
            return Ok(now);
        }
        before = now;
        sleep(QUIET);
    }
    anyhow::bail!("its page does not stop changing")
}

fn sleeps_and_wakes() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let disk = folder.path().join("disk");
    File::create(&disk)?.set_len(32 << 20)?;
    let disk = format!("nvme,path={}", disk.display());
    let words = ["--memory", "256M,prealloc", "--cmdline", "then=halt"];
    let more = ["--display", "640x480", "--device", &disk];
    let mut machine = Machine::start(&[&words[..], &more].concat());
    machine.running.says("\"probe\"", 1)?;
    let before = page(&machine)?;
    for round in 0..3 {
        if round == 0 {
            let touched = machine.running.resident_kib()?;
            ensure!(touched > MEMORY_KIB, "{touched} KiB");
        }
        let dir = machine.save(Then::Sleep)?;
        ensure!(machine.status()["state"] == "asleep", "{}", machine.status());
        let asleep = machine.running.resident_kib()?;
        ensure!(asleep < ASLEEP_KIB, "{asleep} KiB asleep");
        say!("asleep with {} MiB resident, of a guest with {} MiB", asleep >> 10, MEMORY_KIB >> 10);
        for command in [Command::Nmi, Command::PowerButton, Command::Reset] {
            let error = ask(&machine, &command).expect_err("it is asleep").to_string();
            ensure!(error.contains("wake it first"), "{error}");
        }
        let (_, picture) = connect(&machine.control())?.screenshot()?;
        ensure!(picture == before, "another picture asleep");
        fs::remove_dir_all(&dir)?;
        ask(&machine, &Command::Resume)?;
        ensure!(machine.status()["state"] == "running", "{}", machine.status());
        let (_, picture) = connect(&machine.control())?.screenshot()?;
        ensure!(picture == before, "another picture after it woke");
    }
    // Its snapshot is whole while it sleeps.
    let dir = machine.save(Then::Sleep)?;
    machine.running.signal(Signal::KILL)?;
    machine.running.wait(PATIENCE)?;
    let control = machine.control();
    machine.restore(&dir, &[], "");
    ensure!(machine.status()["state"] == "running", "{}", machine.running.stderr.text());
    let (_, picture) = connect(&control)?.screenshot()?;
    ensure!(picture == before, "another picture after it was restored");
    Ok(())
}

#[test]
fn a_machine_that_cannot_sleep_runs_on() {
    if !runs_here("a_machine_that_cannot_sleep_runs_on") {
        return;
    }
    let mut machine = Machine::start(&["--memory", "64M", "--cmdline", "checks=none then=triple"]);
    machine.running.says("transom probe", 2).expect("resets");
    let control = machine.control();
    let dir = control.with_file_name("late");
    let save = |within| {
        let mut client = connect(&control).expect("control");
        vmm::control::snapshot::save(&mut client, &dir, Then::Sleep, within)
    };
    let late = save(Some(0)).expect_err("no time");
    assert!(late.to_string().contains("not complete after 0 s"), "{late:#}");
    assert!(!dir.exists(), "the rest of a snapshot that was given up");
    let resets = machine.running.stdout.text().matches("transom probe").count();
    machine.running.says("transom probe", resets + 2).expect("it continues");
    // It does not run while it sleeps.
    save(None).expect("it sleeps");
    let before = machine.running.stdout.text();
    sleep(QUIET);
    assert_eq!(machine.running.stdout.text(), before, "it runs");
    ask(&machine, &Command::Resume).expect("it wakes");
    let resets = before.matches("transom probe").count();
    machine.running.says("transom probe", resets + 2).expect("it continues");
}

/// Sends frames, and is saved while their answers are under way: they wake it, and none is lost.
#[test]
fn frames_wake_a_machine_and_are_delivered() {
    if !runs_here("frames_wake_a_machine_and_are_delivered") {
        return;
    }
    woken_by_frames().expect("frames");
}

fn woken_by_frames() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("peer");
    let listener = UnixListener::bind(&path)?;
    // The peer takes a few milliseconds for a frame, so that one is nearly always under way.
    let slow = |_: u64, _: &mut [u8]| {
        sleep(Duration::from_millis(5));
        true
    };
    let peer = spawn(move || reflect(listener.accept()?.0, slow));
    let net = format!("virtio-net,to=passt:{}", path.display());
    let words = "checks=none net=echo,depth=4,count=600,wait=interrupt then=poweroff";
    let words = ["--memory", "64M", "--device", &net, "--cmdline", words];
    let mut machine = Machine::start(&words);
    let mut woken = 0;
    for _ in 0..8 {
        sleep(Duration::from_millis(40));
        let dir = machine.save(Then::Sleep)?;
        let waiting = awaits(&machine.control());
        // All answers may have come before.
        woken += i32::from(waiting.recv_timeout(QUIET).is_ok());
        fs::remove_dir_all(&dir)?;
        ask(&machine, &Command::Resume)?;
    }
    ensure!(woken > 0, "no frame woke it");
    let ended = machine.running.wait(PATIENCE)?;
    let output = machine.output();
    ensure!(ended == 0, "{output}{}", machine.running.stderr.text());
    let report = report(&output)?;
    let found = findings(&report, "net")[0];
    ensure!(found["received"] == 600 && found["mismatches"] == 0, "{woken}: {report}");
    peer.join().map_err(|_| anyhow::anyhow!("the peer panicked"))??;
    Ok(())
}

#[test]
fn clients_wait_until_the_machine_wakes() {
    if !runs_here("clients_wait_until_the_machine_wakes") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("peer");
    let _listener = UnixListener::bind(&path).expect("a peer");
    let net = format!("virtio-net,to=passt:{}", path.display());
    let words = ["--memory", "64M", "--device", &net, "--cmdline", "checks=none then=halt"];
    let mut machine = Machine::start(&words);
    machine.running.says("\"probe\"", 1).expect("a report");
    assert!(!answer(&awaits(&machine.control())).expect("an answer"), "it is not asleep");
    machine.save(Then::Sleep).expect("it sleeps");
    let first = awaits(&machine.control());
    is_quiet(&first).expect("it sleeps");
    let second = awaits(&machine.control());
    assert!(!answer(&first).expect("an answer"), "one waits at a time");
    is_quiet(&second).expect("it sleeps");
    ask(&machine, &Command::Resume).expect("it wakes");
    assert!(!answer(&second).expect("an answer"), "no frame came");
}

/// Broadcasts do not wake a machine at a tap. A question for its address does, and a packet.
fn sleeps_at_a_tap() -> Result<()> {
    ip("tuntap add probe0 mode tap")?;
    ip("addr add 10.9.8.1/24 dev probe0")?;
    ip("link set probe0 up")?;
    let net = "virtio-net,to=tap:probe0,mac=52:54:00:00:00:09";
    let words = "checks=none net=arp,host=10.9.8.1,count=5 then=halt";
    let words = ["--memory", "64M", "--device", net, "--cmdline", words];
    let mut machine = Machine::start(&words);
    machine.running.says("\"probe\"", 1)?;
    let socket = UdpSocket::bind("10.9.8.1:0")?;
    socket.set_broadcast(true)?;
    let mut sleeps = |packet: &str, known: bool| {
        if known {
            ip("neigh replace 10.9.8.2 lladdr 52:54:00:00:00:09 nud permanent dev probe0")?;
        }
        // Frames from before do not wake it.
        let dir = machine.save(Then::Sleep)?;
        let waiting = awaits(&machine.control());
        for _ in 0..1200 {
            // More than the tap holds.
            socket.send_to(b"to all", "10.9.8.255:9")?;
            socket.send_to(b"to many", "224.0.0.251:5353").ok();
        }
        is_quiet(&waiting)?;
        socket.send_to(b"to the guest", packet)?;
        ensure!(answer(&waiting)?, "nothing woke it");
        fs::remove_dir_all(&dir)?;
        ask(&machine, &Command::Resume)?;
        Ok(())
    };
    sleeps("10.9.8.2:9", false).context("a question for its address")?;
    sleeps("10.9.8.2:9", true).context("a packet")
}

#[test]
fn a_packet_at_a_tap_wakes_a_machine_and_broadcasts_do_not() {
    let test = "a_packet_at_a_tap_wakes_a_machine_and_broadcasts_do_not";
    if !runs_here(test) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        not_run(test, "a tap needs root");
        return;
    }
    in_namespace(sleeps_at_a_tap).expect("a tap");
}
