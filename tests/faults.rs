//! Failures around a pod: killed programs, full volumes, ports in use. The user gets a helpful
//! message, nothing is lost, and the next start works.
#![forbid(unsafe_code)]

#[path = "faults/failing.rs"]
mod failing;
#[path = "faults/gate.rs"]
mod gate;
#[path = "faults/idle.rs"]
mod idle;
#[path = "faults/snapshots.rs"]
mod snapshots;
#[path = "faults/suspend.rs"]
mod suspend;

use std::fs;
use std::io::{self, ErrorKind, Read as _};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Signal, kill_process, test_kill_process};
use transom_tests::place::{self, HERE, Place, SEEN, last_line, runs_here, until};
use transom_tests::program::{PATIENCE, Running, connect, vmm};
use vmm::control::Command;
use vmm::kvm::KvmSupport;

const PROBE: (&str, &str) = ("VERSION", "probe");

/// Starts a pod with the probe, and waits until the probe runs.
fn probe(place: &Place, more: &[(&str, &str)]) -> Result<Running> {
    let mut pod = place.start("", &[&[PROBE], more].concat())?;
    pod.says("The probe runs", 1)?;
    Ok(pod)
}

fn stops(pod: &mut Running) -> Result<()> {
    pod.signal(Signal::TERM)?;
    let status = pod.wait(PATIENCE)?;
    let said = pod.stdout.text();
    ensure!(status == 143 && !said.contains("killing it"), "{status}: {said}{}", pod.stderr.text());
    Ok(())
}

#[test]
fn a_killed_machine_ends_its_pod_with_a_message() -> Result<()> {
    if !runs_here("a killed machine") {
        return Ok(());
    }
    let place = Place::new("machine")?;
    for network in ["nat", "user"] {
        let mut pod = probe(&place, &[("NETWORK", network)])?;
        kill_process(place::machine(&pod)?, Signal::KILL)?;
        let status = pod.wait(PATIENCE)?;
        let said = last_line(&pod);
        ensure!(status == 1 && said.contains("ended by signal 9"), "{status}: {said}");
        ensure!(said.contains("are not lost") && said.contains("start it again"), "{said}");
        place.has_nothing_left()?;
        // The next start works.
        stops(&mut probe(&place, &[("NETWORK", network)])?)?;
        place.has_nothing_left()?;
    }
    Ok(())
}

#[test]
fn a_killed_pod_ends_its_machine_and_removes_its_rules() -> Result<()> {
    if !runs_here("a killed pod") {
        return Ok(());
    }
    let place = Place::new("pod")?;
    for network in ["nat", "user"] {
        let mut pod = probe(&place, &[("NETWORK", network)])?;
        let machine = place::machine(&pod)?;
        ensure!((network == "nat") == place.rules()?.contains("table inet transom"), "rules");
        pod.signal(Signal::KILL)?;
        pod.wait(PATIENCE)?;
        until("its machine still runs", || Ok(test_kill_process(machine).is_err()))?;
        until("its rules are still there", || Ok(place.rules()?.is_empty()))?;
        place.has_nothing_left()?;
    }
    // A pod that starts at once is not harmed by the rules of the killed one.
    for _ in 0..3 {
        let mut pod = probe(&place, &[("NETWORK", "nat")])?;
        pod.signal(Signal::KILL)?;
        pod.wait(PATIENCE)?;
    }
    let mut pod = probe(&place, &[("NETWORK", "nat")])?;
    ensure!(pod.stdout.text().contains("the guest is 172.30."), "{}", pod.stdout.text());
    ensure!(place.rules()?.contains("table inet transom"), "no rules");
    stops(&mut pod)
}

#[test]
fn two_pods_cannot_share_a_folder() -> Result<()> {
    if !runs_here("two pods") {
        return Ok(());
    }
    let place = Place::new("two")?;
    let mut first = probe(&place, &[("NETWORK", "none")])?;
    let mut second = place.start("", &[PROBE, ("NETWORK", "none"), ("WEB", "N")])?;
    let status = second.wait(PATIENCE)?;
    let said = last_line(&second);
    ensure!(status == 1 && said.contains("another pod has it"), "{status}: {said}");
    stops(&mut first)
}

/// A mistake of a user: the shell commands that set it up, the environment, the exit status, and
/// words of the last line.
type Mistake =
    (&'static str, &'static [(&'static str, &'static str)], i32, &'static [&'static str]);

/// A file that firmware accepts as a CD, but cannot boot.
const ISO: &str = "head -c 1M /dev/zero > /mnt/boot.iso; MARK; ";
/// The mark of a CD (ECMA-119 8.4).
const MARK: &str = "printf '\\001CD001\\001' | \
    dd of=/mnt/boot.iso bs=1 seek=32768 conv=notrunc status=none";
/// A processor with virtualization in its flags, so that the steps before the machine's start work
/// on any host.
const VIRTUALIZES: &str = "sed 's/^flags.*/& vmx/' /proc/cpuinfo > /run/cpuinfo; \
    mount --bind /run/cpuinfo /proc/cpuinfo; ";

const MISTAKES: &[Mistake] = &[
    ("mount -t tmpfs tmpfs /dev", &[PROBE], 88, &["/dev/kvm", "--device /dev/kvm"]),
    (
        "mount -t tmpfs -o size=64k tmpfs /mnt; head -c 36k /dev/zero > /mnt/boot.iso; MARK",
        &[("DISK_DISABLE", "Y"), ("MANUAL", "Y")],
        13,
        &["/mnt", "No space left", "delete something there, or make it larger"],
    ),
    (
        "mount -t tmpfs tmpfs /mnt; ISO mount -o remount,ro /mnt",
        &[("DISK_DISABLE", "Y"), ("MANUAL", "Y")],
        13,
        &["STORAGE=/mnt", "mounted read-only", "mount it for writing"],
    ),
    (
        "mount -t tmpfs -o size=4m tmpfs /mnt; ISO true",
        &[("ALLOCATE", "Y"), ("DISK_SIZE", "64M"), ("DISK_MINIMUM", "1M"), ("MANUAL", "Y")],
        73,
        &["DISK_SIZE: ALLOCATE=Y needs 64M more", "are free", "enlarge the volume"],
    ),
    ("ISO true", &[("STORAGE", "/gone")], 13, &["STORAGE=/gone", "mount a volume there"]),
];

#[test]
fn each_startup_error_is_one_sentence_with_advice() -> Result<()> {
    if !runs_here("what is missing") {
        return Ok(());
    }
    for (mounts, words, status, says) in MISTAKES {
        let place = Place::new("wrong")?;
        let first = format!("{VIRTUALIZES}{mounts}").replace("ISO ", ISO).replace("MARK", MARK);
        let mut pod = place.start(&first, words)?;
        let ended = pod.wait(PATIENCE)?;
        let said = last_line(&pod);
        ensure!(ended == *status, "{mounts}: {ended}: {}{said}", pod.stdout.text());
        ensure!(said.starts_with("transom: "), "{mounts}: {said}");
        ensure!(says.iter().all(|word| said.contains(word)), "{mounts}: {said}");
        ensure!(pod.stderr.text().trim().lines().count() == 1, "{mounts}: {}", pod.stderr.text());
        place.has_nothing_left()?;
    }
    Ok(())
}

/// Values in lists of compose files keep their quotes.
#[test]
fn the_log_is_complete_to_its_last_line() -> Result<()> {
    if !runs_here("a log of objects") {
        return Ok(());
    }
    let place = Place::new("objects")?;
    let words = [PROBE, ("NETWORK", "user"), ("LOG_FORMAT", "\"json\""), ("DEBUG", "'Y'")];
    let mut pod = place.start(&format!("mount --bind /dev/null {}", vmm().display()), &words)?;
    let status = pod.wait(PATIENCE)?;
    let lines = pod.stdout.text() + &pod.stderr.text();
    let mut level = String::new();
    for line in lines.lines() {
        let said: serde_json::Value = serde_json::from_str(line).context(line.to_owned())?;
        level = said["level"].as_str().context(line.to_owned())?.to_owned();
        ensure!(said["fields"]["message"].is_string(), "{line}");
    }
    ensure!(status == 1 && level == "ERROR" && lines.contains("vmm: "), "{status}: {lines}");
    Ok(())
}

#[test]
fn a_kvm_permission_error_names_the_group() -> Result<()> {
    if !runs_here("no permission") {
        return Ok(());
    }
    let place = Place::new("denied")?;
    let words = "chmod 660 /dev/kvm";
    let mounts = format!("cp -a /dev/kvm /run/kvm; mount --bind /run/kvm /dev/kvm; {words}");
    let mut pod =
        place.start_as("setpriv --reuid 65534 --regid 65534 --clear-groups", &mounts, &[PROBE])?;
    let (status, said) = (pod.wait(PATIENCE)?, last_line(&pod));
    ensure!(status == 88 && said.contains("--group-add"), "{status}: {said}");
    Ok(())
}

#[test]
fn names_log_levels_and_time_zone_follow_the_variables() -> Result<()> {
    if !runs_here("names and levels") {
        return Ok(());
    }
    let place = Place::new("said")?;
    let words = [("NETWORK", "none"), ("LOG_FORMAT", "json"), ("APP", "My Box")];
    for (more, is, asks) in [
        ([("DEBUG", "'Y'"), ("TZ", "Asia/Kathmandu"), ("SHUTDOWN", "N")], "DEBUG", false),
        ([("TRACE", "\"on\""), ("TZ", "Asia/Kathmandu"), ("SHUTDOWN", "Y")], "TRACE", true),
    ] {
        let mut pod = probe(&place, &[&words[..], &more].concat())?;
        let environment = format!("/proc/{}/environ", place::machine(&pod)?.as_raw_nonzero());
        let mut told = String::new();
        // A starting program has its name before it has its environment.
        until("the machine has an environment", || {
            told = fs::read_to_string(&environment)?;
            Ok(!told.is_empty())
        })?;
        let level = format!("VMM_LOG={}", is.to_lowercase());
        for word in ["TZ=Asia/Kathmandu", &level] {
            ensure!(told.split('\0').any(|it| it == word), "no {word}: {told:?}");
        }
        pod.says(&format!("\"level\":\"{is}\""), 1)?;
        stops(&mut pod)?;
        let said = pod.stdout.text();
        ensure!(said.contains("Starting My Box…") && said.contains("Stopping My Box…"), "{said}");
        ensure!(said.contains("asked to shut down") == asks, "{more:?}: {said}");
    }
    Ok(())
}

#[test]
fn a_port_in_use_is_reported_with_its_variable() -> Result<()> {
    if !runs_here("ports in use") {
        return Ok(());
    }
    let place = Place::new("ports")?;
    for (variable, port) in [("WEB_PORT", 8006), ("VNC_PORT", 5900)] {
        let _taken = place.listen(port)?;
        let words = [PROBE, ("NETWORK", "nat"), ("VNC_PORT", "5900")];
        let mut pod = place.start("", &words)?;
        let (status, said) = (pod.wait(PATIENCE)?, last_line(&pod));
        ensure!(status == 1, "{status}: {said}");
        let name = format!("{variable}={port}");
        ensure!(said.contains(&name) && said.contains("in use"), "no {name}: {said}");
        place.has_nothing_left()?;
    }
    stops(&mut probe(&place, &[])?)
}

#[test]
fn the_machine_runs_without_name_servers_and_routes() -> Result<()> {
    if !runs_here("no network") {
        return Ok(());
    }
    let place = Place::new("lonely")?;
    // First without a name server, then with one that does not answer.
    for resolv in ["", "nameserver 192.0.2.1"] {
        let mounts =
            format!("echo '{resolv}' > /run/resolv; mount --bind /run/resolv /etc/resolv.conf");
        let mut pod = place.start(&mounts, &[PROBE, ("NETWORK", "nat")])?;
        pod.says("The probe runs", 1)?;
        let told = pod.stdout.text().contains("no name server is in");
        ensure!(told == resolv.is_empty(), "{}", pod.stdout.text());
        stops(&mut pod)?;
    }
    let mut pod = place.start("ip link delete eth0", &[PROBE, ("NETWORK", "nat")])?;
    pod.says("The probe runs", 1)?;
    let said = pod.stdout.text();
    ensure!(said.contains("the pod has no network") && said.contains("attach it to one"), "{said}");
    stops(&mut pod)?;
    place.has_nothing_left()
}

/// The network does not forward packets yet.
const CLOSED: &str = "echo 0 > /proc/sys/net/ipv4/ip_forward";

#[test]
fn a_failing_pod_removes_its_network() -> Result<()> {
    if !runs_here("a pod without its machine's program") {
        return Ok(());
    }
    let place = Place::new("undone")?;
    let first = format!("{CLOSED}; mount --bind /dev/null {}", vmm().display());
    let mut pod = place.start(&first, &[PROBE, ("NETWORK", "nat")])?;
    let status = pod.wait(PATIENCE)?;
    let (said, last) = (pod.stdout.text(), last_line(&pod));
    ensure!(status == 1 && last.starts_with("transom: vmm: "), "{status}: {said}{last}");
    ensure!(said.contains("the guest is 172.30."), "the pod had no network: {said}");
    ensure!(!place.forwards()?, "packets are forwarded");
    place.has_nothing_left()
}

#[test]
fn a_signal_ends_the_pod_at_any_time() -> Result<()> {
    if !runs_here("signals") {
        return Ok(());
    }
    let place = Place::new("signals")?;
    for milliseconds in [0, 5, 10, 20, 40, 80, 160] {
        let mut pod = place.start("", &[PROBE, ("NETWORK", "nat"), ("TIMEOUT", "10")])?;
        thread::sleep(Duration::from_millis(milliseconds));
        stops(&mut pod)?;
        until("its rules are still there", || Ok(place.rules()?.is_empty()))?;
        place.has_nothing_left()?;
    }
    // A signal is also effective while the network is set up, and before the machine listens.
    for (words, shutdown) in [("Preparing the network", "Y"), ("Starting the probe", "N")].repeat(3)
    {
        let more = [("NETWORK", "nat"), ("TIMEOUT", "10"), ("SHUTDOWN", shutdown)];
        let mut pod = place.start("", &[&[PROBE], &more[..]].concat())?;
        pod.says(words, 1)?;
        stops(&mut pod)?;
        place.has_nothing_left()?;
    }
    // A paused machine is resumed, because it would not see the power button.
    let mut pod = probe(&place, &[("NETWORK", "none")])?;
    connect(&place.control())?.ask(&Command::Pause)?;
    stops(&mut pod)?;
    let said = pod.stdout.text();
    ensure!(said.contains("it is resumed to shut down") && !said.contains("in time"), "{said}");
    // A repeated SIGTERM does not cut off a guest that installs updates; SIGINT does.
    let mut pod = probe(&place, &[("NETWORK", "none")])?;
    kill_process(place::machine(&pod)?, Signal::STOP)?;
    pod.signal(Signal::TERM)?;
    pod.says("Stopping the probe", 1)?;
    pod.signal(Signal::TERM)?;
    pod.says("the machine is being stopped: SIGINT", 1)?;
    pod.signal(Signal::HUP)?;
    pod.says("the machine is being stopped: SIGINT", 2)?;
    let start = Instant::now();
    pod.signal(Signal::INT).ok();
    let status = pod.wait(PATIENCE)?;
    ensure!(status == 143 && start.elapsed() < PATIENCE / 4, "{status} {:?}", start.elapsed());
    Ok(())
}

/// Standard output is a full pipe without a reader.
const STALLS: &str = "mkfifo /run/full; exec 3<> /run/full; head -c 65536 /dev/zero >&3; exec >&3";

#[test]
fn a_stalled_log_reader_does_not_block_the_pod() -> Result<()> {
    if !runs_here("a log that nobody reads") {
        return Ok(());
    }
    let place = Place::new("stalls")?;
    let words = [PROBE, ("NETWORK", "none"), ("TIMEOUT", "10")];
    let mut pod = place.start(STALLS, &words)?;
    let mut machine = connect(&place.control())?;
    until("the probe is not running", || Ok(machine.ask(&Command::Status)?["state"] == "running"))?;
    ensure!(place.get("/healthz")?.ends_with("\r\n\r\nok\n"), "no health");
    stops(&mut pod)?;
    place.has_nothing_left()?;
    // A stalled standard error stops nothing either.
    let mut pod = place.start(&format!("rm /run/full; {STALLS} 2>&3"), &words)?;
    drop(connect(&place.control())?);
    kill_process(place::machine(&pod)?, Signal::KILL)?;
    let status = pod.wait(PATIENCE)?;
    ensure!(status == 1, "{status}");
    Ok(())
}

#[test]
fn a_stuck_machine_does_not_use_up_the_pods_threads() -> Result<()> {
    if !runs_here("a machine that is stuck") {
        return Ok(());
    }
    let place = Place::new("stuck")?;
    let mut pod = probe(&place, &[("NETWORK", "none"), ("TIMEOUT", "10")])?;
    let tasks = format!("/proc/{}/task", pod.pid().as_raw_nonzero());
    let threads = || Ok::<_, io::Error>(fs::read_dir(&tasks)?.count());
    let machine = place::machine(&pod)?;
    kill_process(machine, Signal::STOP)?;
    let before = threads()?;
    let asking: Vec<_> = (0..40).map(|_| place.ask(HERE, "/metrics")).collect::<Result<_>>()?;
    let said = place.get("/metrics")?;
    ensure!(said.contains("transom_machine_up 0"), "{said}");
    let now = threads()?;
    ensure!(now < before + 8, "{before} threads became {now}");
    drop(asking);
    kill_process(machine, Signal::CONT)?;
    until("the machine is not reported as up again", || {
        Ok(place.get("/metrics")?.contains("transom_machine_up 1"))
    })?;
    stops(&mut pod)
}

#[test]
fn pod_warnings_name_their_variables() -> Result<()> {
    if !runs_here("warnings") {
        return Ok(());
    }
    let place = Place::new("warns")?;
    let words = [("NETWORK", "none"), ("VNC_PORT", "5900"), ("PASSWORD", "a long word")];
    let mut pod = probe(&place, &words)?;
    pod.says("VNC_PORT=5900: VNC is not encrypted", 1)?;
    let said = pod.stdout.text();
    ensure!(said.contains("WEB_PORT=8006: without TLS"), "{said}");
    let strange = ["--vnc", "--web", "tls-cert"].iter().find(|it| said.contains(**it));
    ensure!(strange.is_none(), "{strange:?} in {said}");
    stops(&mut pod)
}

#[test]
fn event_listeners_leave_slots_for_others() -> Result<()> {
    if !runs_here("many who listen") {
        return Ok(());
    }
    let place = Place::new("listens")?;
    let mut pod = probe(&place, &[("NETWORK", "none")])?;
    let listen = |address| -> Result<_> {
        let mut stream = place.ask(address, "/events")?;
        let mut first = [0; 12];
        stream.read_exact(&mut first)?;
        Ok((stream, String::from_utf8_lossy(&first).into_owned()))
    };
    let mut many = Vec::new();
    for number in 0..100 {
        let (stream, said) = listen(SEEN)?;
        ensure!(said == "HTTP/1.1 200", "number {number}: {said}");
        many.push(stream);
    }
    // An address has 16 places, and its oldest listener gives way.
    let last = many.split_off(100 - 16);
    for stream in &mut many {
        stream.read_to_end(&mut Vec::new()).context("a listener that did not give way")?;
    }
    for mut stream in &last {
        stream.set_nonblocking(true)?;
        let end = io::copy(&mut stream, &mut io::sink());
        ensure!(end.is_err_and(|it| it.kind() == ErrorKind::WouldBlock), "the newest gave way");
    }
    // Another address may listen, and the first address still gets answers.
    ensure!(listen(HERE)?.1 == "HTTP/1.1 200", "another address is refused");
    let mut answer = String::new();
    place.ask(SEEN, "/healthz")?.read_to_string(&mut answer)?;
    ensure!(answer.ends_with("ok\n"), "{answer}");
    stops(&mut pod)
}

/// The probe has a balloon device and no driver for it, which does no harm.
#[test]
fn low_host_memory_inflates_the_balloon() -> Result<()> {
    if !runs_here("the balloon") {
        return Ok(());
    }
    let place = Place::new("balloon")?;
    let words = [
        ("NETWORK", "none"),
        ("BALLOONING", "Y"),
        ("BALLOONING_RAM_THRESHOLD", "0"),
        ("BALLOONING_RAM_THRESHOLD_HARD", "0.1"),
        ("BALLOONING_MIN_MEM", "32M"),
        ("BALLOONING_INTERVAL", "1"),
        ("BALLOONING_DEBUG", "controller"),
    ];
    let mut pod = probe(&place, &words)?;
    let mut machine = connect(&place.control())?;
    let ask = Command::read(&["balloon".to_owned()])?;
    until("the balloon's target did not change", || Ok(machine.ask(&ask)?["target"] == 32 << 20))?;
    pod.says("balloon: ", 1)?;
    stops(&mut pod)
}

/// Starts with a CD and a disk that must be created, and is stopped in the middle of that. The last
/// start runs to the end.
#[test]
fn files_on_the_volume_are_complete_after_a_signal_at_any_time() -> Result<()> {
    if !runs_here("the volume") {
        return Ok(());
    }
    let place = Place::new("volume")?;
    let words = [("DISK_SIZE", "1G"), ("DISK_MINIMUM", "1M"), ("NETWORK", "none"), ("MANUAL", "Y")];
    let storage = place.storage();
    let mut medium = vec![0; 1 << 20];
    medium[32768..][..7].copy_from_slice(b"\x01CD001\x01");
    fs::write(storage.join("boot.iso"), medium)?;
    for (milliseconds, signal) in [0, 10, 20, 40, 80, 160, 320]
        .into_iter()
        .flat_map(|time| [(time, Signal::TERM), (time, Signal::KILL)])
    {
        let mut pod = place.start(VIRTUALIZES, &words)?;
        thread::sleep(Duration::from_millis(milliseconds));
        pod.signal(signal).ok();
        pod.wait(PATIENCE)?;
        whole(&storage)?;
    }
    let mut pod = place.start(VIRTUALIZES, &words)?;
    until("no machine started", || {
        Ok(pod.stdout.text().contains("Starting Windows") || pod.proc("status").is_err())
    })?;
    pod.signal(Signal::TERM).ok();
    let status = pod.wait(PATIENCE)?;
    // On a paravirtual KVM, firmware fails at once.
    ensure!(
        status == 143 || KvmSupport::of_this_host() != KvmSupport::Full,
        "{status}: {}",
        pod.stderr.text()
    );
    whole(&storage)?;
    for name in ["data.img", "windows.vars", "windows.password", "windows.mac"] {
        let there = storage.join(name).exists();
        ensure!(there || name == "windows.mac", "{name} is missing");
    }
    Ok(())
}

/// Only the guest itself can free the space.
#[test]
fn a_disk_on_a_full_volume_boots() -> Result<()> {
    const FULL: &str = "mount -t tmpfs -o size=4m tmpfs /mnt; \
        cp /usr/share/OVMF/OVMF_VARS_4M.fd /mnt/windows.vars; touch /mnt/windows.boot; \
        echo hushhushhushhush > /mnt/windows.password; echo 02:00:00:00:00:01 > /mnt/windows.mac; \
        yes | head -c 1M > /mnt/data.img; truncate -s 64M /mnt/data.img; \
        cat /dev/zero > /mnt/rest 2> /dev/null || true";
    if !runs_here("a full volume") {
        return Ok(());
    }
    let place = Place::new("full")?;
    let words =
        [("STORAGE", "/mnt"), ("DISK_SIZE", "32M"), ("DISK_MINIMUM", "1G"), ("NETWORK", "none")];
    let mut pod = place.start(&format!("{VIRTUALIZES}{FULL}"), &words)?;
    until("no machine started", || {
        Ok(pod.stdout.text().contains("Starting Windows") || pod.proc("status").is_err())
    })?;
    pod.signal(Signal::TERM).ok();
    let status = pod.wait(PATIENCE)?;
    let said = pod.stdout.text();
    // On a paravirtual KVM, firmware fails at once.
    ensure!(
        status == 143 || KvmSupport::of_this_host() != KvmSupport::Full,
        "{status}: {said}{}",
        pod.stderr.text()
    );
    for words in
        ["the guest pauses until there is free space", "the disk has 64M and cannot shrink"]
    {
        ensure!(said.contains(words), "no {words:?}: {said}");
    }
    Ok(())
}

/// A file with its final name is complete; incomplete files have other names.
fn whole(storage: &Path) -> Result<()> {
    for entry in fs::read_dir(storage)? {
        let entry = entry?;
        let length = entry.metadata()?.len();
        let wanted = match entry.file_name().to_str() {
            Some("data.img") => 1 << 30,
            Some("windows.vars") => fs::metadata("/usr/share/OVMF/OVMF_VARS_4M.fd")?.len(),
            Some("windows.password") => 16,
            _ => continue,
        };
        ensure!(length == wanted, "{entry:?} has {length} bytes of {wanted}");
    }
    Ok(())
}
