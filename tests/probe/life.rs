//! Reset, pause, signals and the control socket: commands take effect, and soon.

use std::fs::File;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use host::size::Size;
use rustix::process::Signal;
use tempfile::TempDir;
use transom_tests::program::{PATIENCE, Running, connect, report};
use vmm::control::{Client, Command, LinkState};

use crate::runs_here;

/// The first and the last output of a run of the probe.
const FIRST: &str = "transom probe";
const LAST: &str = "]}\n";

/// A machine with a control socket.
struct Controlled {
    machine: Running,
    client: Client,
    socket: PathBuf,
    _folder: TempDir,
}

impl Controlled {
    fn new(words: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("control");
        let path = socket.display().to_string();
        let words = [&["run", "--control", &path], words].concat();
        let machine = Running::vmm(&words).expect("vmm");
        let client = connect(&socket).expect("the control socket");
        Self { machine, client, socket, _folder: folder }
    }

    fn ask(&mut self, command: &Command) -> serde_json::Value {
        self.client.ask(command).expect("an answer")
    }
}

#[test]
fn every_kind_of_reset_restarts_in_the_same_process() {
    if !runs_here("every_kind_of_reset_restarts_in_the_same_process") {
        return;
    }
    for way in ["then=reset", "then=triple"] {
        let start = Instant::now();
        let mut it = Controlled::new(&["--cmdline", way]);
        let pid = it.machine.pid().as_raw_nonzero().get();
        it.machine.says(LAST, 4).expect("four runs");
        let status = it.ask(&Command::Status);
        assert_eq!(status["pid"], pid, "{way}");
        assert!(status["resets"].as_u64().is_some_and(|resets| resets >= 3), "{status}");
        it.ask(&Command::Quit);
        assert_eq!(it.machine.wait(PATIENCE).expect("an end"), 0);
        // Each run was complete and found nothing wrong.
        let output = it.machine.stdout.text();
        assert!(!output.contains("\nfail") && !output.contains("\"ok\":false"), "{output}");
        // A guest that keeps resetting does not fill the log: one line every ten seconds.
        let (said, most) = (it.machine.stderr.text(), 1 + start.elapsed().as_secs() / 10);
        assert!((1..=most).contains(&(said.lines().count() as u64)), "{said}");
    }
}

#[test]
fn the_control_socket_pauses_resumes_and_resets() {
    if !runs_here("the_control_socket_pauses_resumes_and_resets") {
        return;
    }
    let mut it = Controlled::new(&["--cpus", "2", "--cmdline", "then=reset"]);
    it.machine.says(LAST, 1).expect("a run");
    it.ask(&Command::Pause);
    assert_eq!(it.ask(&Command::Status)["state"], "paused");
    let resets = it.ask(&Command::Status)["resets"].clone();
    // After this, all output has passed the pipe.
    it.machine.wait_until_idle().expect("a paused machine");
    let before = it.machine.stdout.text();
    thread::sleep(Duration::from_millis(500));
    assert_eq!(it.machine.stdout.text(), before, "a paused guest still runs");
    assert_eq!(it.ask(&Command::Status)["resets"], resets);
    it.ask(&Command::Resume);
    assert_eq!(it.ask(&Command::Status)["state"], "running");
    let runs = before.matches(LAST).count();
    it.machine.says(LAST, runs + 2).expect("more runs");
    // Reset an idle guest. It is not paused, so there is nothing to resume.
    let mut it = Controlled::new(&["--cmdline", "then=halt"]);
    for run in 1..=3 {
        it.machine.says(LAST, run).expect("a run");
        it.ask(&Command::Resume);
        it.ask(&Command::Reset);
    }
    it.machine.says(LAST, 4).expect("a run");
    assert_eq!(it.ask(&Command::Status)["resets"], 3);
    // A paused machine stays paused through a reset, until it is resumed.
    it.ask(&Command::Pause);
    it.ask(&Command::Reset);
    assert_eq!(it.ask(&Command::Status)["state"], "paused");
    it.ask(&Command::Resume);
    it.machine.says(LAST, 5).expect("a run");
}

#[test]
fn registers_and_interrupts_are_read_over_the_control_socket() {
    if !runs_here("registers_and_interrupts_are_read_over_the_control_socket") {
        return;
    }
    let mut it = Controlled::new(&["--cpus", "2", "--cmdline", "then=halt"]);
    it.machine.says(LAST, 1).expect("a run");
    let registers = it.ask(&Command::Registers);
    let all = registers["registers"].as_array().expect("a list");
    assert_eq!(all.len(), 2);
    for one in all {
        assert!(one.as_str().is_some_and(|it| it.contains("rip 0000000000")), "{one}");
    }
    it.ask(&Command::Nmi);
    assert_eq!(it.ask(&Command::Status)["state"], "running");
    let error = it.client.ask(&Command::PowerButton);
    assert!(error.is_ok(), "{error:?}");
}

#[test]
fn disks_and_links_are_listed_and_changed_at_run_time() {
    if !runs_here("disks_and_links_are_listed_and_changed_at_run_time") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.img");
    let set_length = |length| {
        let file = File::options().create(true).append(true).open(&path).expect("a file");
        file.set_len(length).expect("room");
    };
    set_length(1 << 20);
    let disk = format!("{},serial=first", path.display());
    let words = ["--disk", &disk, "--device", "virtio-net,mtu=1500", "--cmdline", "then=halt"];
    let mut it = Controlled::new(&words);
    let length = || path.metadata().expect("a file").len();
    let mut grow = |name: &str, size| {
        let answer = it.client.ask(&Command::Grow { name: name.into(), size });
        answer.map_err(|error| error.to_string())
    };
    let grown = grow("first", Some(Size(2 << 20))).expect("room");
    assert_eq!((&grown["size"], &grown["name"]), (&(2 << 20).into(), &"nvme".into()));
    assert_eq!(length(), 2 << 20);
    set_length(3 << 20);
    assert_eq!(grow("nvme", None).expect("it is longer")["size"], 3 << 20);
    let shrunk = grow("nvme", Some(Size(1 << 20))).expect_err("shorter");
    assert!(shrunk.contains("cannot shrink"), "{shrunk}");
    let unknown = grow("sda", None).expect_err("no such disk");
    assert!(unknown.contains("`sda`") && unknown.contains("nvme (serial first"), "{unknown}");
    assert_eq!(length(), 3 << 20);
    let mut link = |state, mtu| it.ask(&Command::Link { name: "virtio-net".into(), state, mtu });
    assert_eq!(link(Some(LinkState::Down), None)["plugged"], false);
    assert_eq!(link(None, Some(1400))["mtu"], 1400);
    let status = it.ask(&Command::Status);
    assert_eq!(status["disks"].as_array().map(Vec::len), Some(1), "{status}");
    let disk = &status["disks"][0];
    assert_eq!((&disk["kind"], &disk["serial"]), (&"nvme".into(), &"first".into()));
    assert_eq!(
        (&disk["path"], &disk["size"]),
        (&path.display().to_string().into(), &(3 << 20).into())
    );
    assert_eq!(
        (&status["links"][0]["plugged"], &status["links"][0]["mtu"]),
        (&false.into(), &1400.into())
    );
    // A second machine reports the process that uses the disk.
    let second = Running::vmm(&["run", "--disk", &path.display().to_string()]);
    let mut second = second.expect("vmm");
    assert_eq!(second.wait(PATIENCE).expect("an end"), 1);
    let (pid, said) = (it.machine.pid().as_raw_nonzero().get(), second.stderr.text());
    assert!(said.contains(&format!("in use by process {pid} (vmm)")), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn signals_end_the_machine_at_once_and_remove_its_socket() {
    if !runs_here("signals_end_the_machine_at_once_and_remove_its_socket") {
        return;
    }
    for (signal, status) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
        for words in ["then=halt", "then=reset", "torture=1,100000000"] {
            // A busy host makes some of them late, but not all.
            let (limit, mut took) = (Duration::from_secs(1), Vec::new());
            while took.len() < 3 && took.last().is_none_or(|it| *it >= limit) {
                let mut it = Controlled::new(&["--cpus", "2", "--cmdline", words]);
                it.machine.says(FIRST, 1).expect("a guest");
                let start = Instant::now();
                it.machine.signal(signal).expect("a process");
                assert_eq!(it.machine.wait(PATIENCE).expect("an end"), status, "{words}");
                took.push(start.elapsed());
                assert!(!it.socket.exists(), "{words}: the socket still exists");
            }
            assert!(took.last().is_some_and(|it| *it < limit), "{words}: {took:?}");
        }
    }
}

#[test]
fn a_signal_during_startup_ends_the_machine() {
    if !runs_here("a_signal_during_startup_ends_the_machine") {
        return;
    }
    for delay in [0, 1, 2, 4, 8, 16] {
        let mut machine = Running::vmm(&["run", "--cmdline", "then=halt"]).expect("vmm");
        thread::sleep(Duration::from_millis(delay));
        machine.signal(Signal::TERM).expect("a process");
        assert_eq!(machine.wait(PATIENCE / 4).expect("an end"), 143, "{delay} ms");
    }
}

#[test]
fn a_guest_that_ignores_the_power_button_is_stopped_later() {
    if !runs_here("a_guest_that_ignores_the_power_button_is_stopped_later") {
        return;
    }
    let deaf = ["--display", "none", "--cmdline", "then=deaf"];
    let mut it = Controlled::new(&[&deaf[..], &["--grace", "1"]].concat());
    it.machine.says(LAST, 1).expect("a run");
    let start = Instant::now();
    it.machine.signal(Signal::TERM).expect("a process");
    assert_eq!(it.machine.wait(PATIENCE).expect("an end"), 143);
    let took = start.elapsed();
    assert!(took >= Duration::from_secs(1), "{took:?}");
    // A second signal ends the wait.
    let mut it = Controlled::new(&[&deaf[..], &["--grace", "100"]].concat());
    it.machine.says(LAST, 1).expect("a run");
    // Two signals that come before the machine looks count as one.
    let ended = (0..100).find_map(|_| {
        it.machine.signal(Signal::TERM).ok();
        it.machine.wait(Duration::from_millis(200)).ok()
    });
    assert_eq!(ended, Some(143));
}

/// No guest runs yet, so there is nothing to wait for.
#[test]
fn a_signal_ends_a_machine_during_memory_preallocation() {
    if !runs_here("a_signal_ends_a_machine_during_memory_preallocation") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("control");
    let path = socket.display().to_string();
    let words = ["run", "--grace", "100", "--memory", "4G,prealloc", "--control", &path];
    for (signal, status) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let mut machine = Running::vmm(&words).expect("vmm");
        // The control socket is made just before memory is allocated, and signals are handled by
        // then. After a longer wait, all memory might be allocated.
        connect(&socket).expect("the control socket");
        machine.signal(signal).expect("a process");
        // The host takes a while to free gigabytes, but less than the guest's grace period.
        assert_eq!(machine.wait(Duration::from_secs(30)).expect("an end"), status);
        let said = machine.stderr.text();
        let parts = ["ended before the guest ran", "of --memory 4G were allocated"];
        assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        assert_eq!((said.lines().count(), machine.stdout.text().as_str()), (1, ""), "{said}");
        assert!(!socket.exists(), "the socket still exists");
    }
}

#[test]
fn leftovers_of_a_killed_machine_do_not_block_the_next() {
    if !runs_here("leftovers_of_a_killed_machine_do_not_block_the_next") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let control = folder.path().join("control");
    let path = control.display().to_string();
    let serial = format!("socket:{}", folder.path().join("serial").display());
    let words = ["run", "--control", &path, "--serial", &serial, "--cmdline", "then=halt"];
    for _ in 0..3 {
        let mut machine = Running::vmm(&words).expect("vmm");
        let mut client = connect(&control).expect("the control socket");
        assert_eq!(client.ask(&Command::Status).expect("an answer")["state"], "running");
        machine.signal(Signal::KILL).expect("a process");
        assert_eq!(machine.wait(PATIENCE).expect("an end"), 137);
        assert!(control.exists(), "a killed process cannot remove its socket");
    }
    let mut machine = Running::vmm(&words).expect("vmm");
    connect(&control).expect("the socket").ask(&Command::Quit).expect("an answer");
    assert_eq!(machine.wait(PATIENCE).expect("an end"), 0);
    assert_eq!(folder.path().read_dir().expect("a folder").count(), 0);
}

#[test]
fn an_idle_guest_uses_no_cpu_time() {
    if !runs_here("an_idle_guest_uses_no_cpu_time") {
        return;
    }
    let mut machine = Running::vmm(&["run", "--cpus", "2", "--cmdline", "then=halt"]).expect("vmm");
    machine.says(LAST, 1).expect("a run");
    let part = machine.wait_until_idle().expect("an idle machine");
    eprintln!("idle: {part:.5} of a processor");
}

/// All devices of a machine that was busy stop polling by themselves.
#[test]
fn an_idle_machine_with_all_devices_uses_no_cpu_time() {
    if !runs_here("an_idle_machine_with_all_devices_uses_no_cpu_time") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let serial = format!("socket:{}", path("serial"));
    let port = format!("virtio-serial,name=a,to=socket:{}", path("port"));
    let words = "checks=none disk=write,span=64M,depth=32 disk=verify,span=64M,depth=32";
    let others = ["virtio-net,to=none", "virtio-rng", "virtio-balloon,size=256M", &port];
    // The probe drives the first disk.
    for kinds in [["virtio-blk", "nvme"], ["nvme", "nvme"]] {
        let mut all = vec!["--cpus", "2", "--serial", "stdio", "--device", "serial,port=2"];
        let disks = [(kinds[0], "one"), (kinds[1], "two")].map(|(kind, name)| {
            File::create(path(name)).and_then(|file| file.set_len(64 << 20)).expect("a disk");
            format!("{kind},path={}", path(name))
        });
        let second = format!("serial,port=3,to={serial}");
        let devices = disks.iter().map(String::as_str).chain(others).chain([second.as_str()]);
        all.extend(devices.flat_map(|it| ["--device", it]));
        let mut it = Controlled::new(&[&all[..], &["--cmdline", words]].concat());
        it.machine.says(LAST, 1).expect("a run");
        let report = report(&it.machine.stdout.text()).expect("a report");
        assert_eq!(report["ok"], true, "{report}");
        let part = it.machine.wait_until_idle().expect("an idle machine");
        eprintln!("idle with all devices, after {}: {part:.5} of a processor", kinds[0]);
    }
}

/// The time from the command to the answer, with a guest that computes on all processors.
///
/// A busy host wakes our threads late, but not always. If half of the answers in one of a few
/// series come in time, the machine waits only for its processors.
#[test]
fn processors_stop_within_a_millisecond() {
    if !runs_here("processors_stop_within_a_millisecond") {
        return;
    }
    let mut it = Controlled::new(&["--cmdline", "torture=1,100000000"]);
    it.machine.says("pass  pci", 1).expect("a guest");
    let mut medians = Vec::new();
    for _ in 0..5 {
        let times = pauses(&mut it);
        let at = |percent: usize| times[(times.len() - 1) * percent / 100];
        eprintln!("pause: median {:?}, {:?} to {:?}, 90 % {:?}", at(50), at(0), at(100), at(90));
        medians.push(at(50));
        if at(50) < Duration::from_millis(1) {
            break;
        }
    }
    assert!(medians.iter().any(|it| *it < Duration::from_millis(1)), "medians {medians:?}");
    // The guest ran between the pauses.
    assert!(report(&it.machine.stdout.text()).is_err(), "the guest ended");
}

/// The durations of 200 pauses, sorted.
fn pauses(it: &mut Controlled) -> Vec<Duration> {
    let mut times = Vec::new();
    for round in 0..200_u64 {
        thread::sleep(Duration::from_micros(500 + 37 * (round % 40)));
        let start = Instant::now();
        it.ask(&Command::Pause);
        times.push(start.elapsed());
        it.ask(&Command::Resume);
    }
    times.sort_unstable();
    times
}
