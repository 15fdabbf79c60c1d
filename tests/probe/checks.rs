//! The memory of a snapshot is checked while its guest runs, whose disks change only afterwards.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, SystemTime};

use rustix::process::Signal;
use transom_tests::program::{PATIENCE, connect, report};
use vmm::control::{self, Command, Then};

use crate::snapshot::{Machine, disks_are_sound, qcow2, raw};
use crate::{due, runs_here};

/// Kinds of disks, and formats of their images.
const KINDS: [(&str, &str); 3] = [("virtio-blk", "raw"), ("nvme", "qcow2"), ("ahci-disk", "raw")];

/// MiB of contents of memory, and enough for another process to find the check in the middle.
const FILL: u32 = 192;
const LONG_FILL: u32 = 640;

/// A machine that ended with a snapshot, with writes in flight. Its memory takes a while to check.
struct Interrupted {
    machine: Machine,
    /// The folder of the snapshot.
    dir: PathBuf,
    disk: PathBuf,
    _folder: tempfile::TempDir,
}

impl Interrupted {
    fn new((kind, format): (&str, &str), fill: u32) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = match format {
            "qcow2" => qcow2(folder.path()),
            _ => raw(folder.path()),
        };
        let device = format!("{kind},path={}", disk.display());
        let way = "seed=7,depth=32,span=8M,requests=30000,wait=poll";
        let words = format!("checks=none fill={fill} disk=write,{way} disk=verify,{way}");
        let words = format!("{words} then=poweroff");
        let memory = format!("{}M", fill + 128);
        let words = ["--memory", &memory, "--device", &device, "--cmdline", &words];
        let mut machine = Machine::start(&words);
        machine.running.says("  fill  ", 1).expect("memory with contents");
        let untouched = changed(&disk);
        while changed(&disk) == untouched {
            sleep(Duration::from_millis(1));
        }
        let dir = machine.save(Then::Quit).expect("a snapshot");
        assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
        Self { machine, dir, disk, _folder: folder }
    }

    /// Goes on to its end, and has lost nothing.
    fn completes(&mut self, kind: &str) {
        let ended = self.machine.running.wait(PATIENCE).expect("an end");
        let output = self.machine.output();
        assert_eq!(ended, 0, "{kind}: {output}{}", self.machine.running.stderr.text());
        disks_are_sound(kind, &report(&output).expect("a report"));
    }
}

fn changed(path: &Path) -> SystemTime {
    fs::metadata(path).and_then(|it| it.modified()).expect("a time")
}

#[test]
fn damaged_memory_ends_a_machine_before_its_disks_change() {
    if !runs_here("damaged_memory_ends_a_machine_before_its_disks_change") {
        return;
    }
    for &(kind, format) in due(&KINDS) {
        let mut it = Interrupted::new((kind, format), FILL);
        let (disk, dir) = (it.disk.clone(), it.dir.clone());
        let (contents, time) = (fs::read(&disk).expect("its disk"), changed(&disk));
        // A byte of what the guest has written at the end of its memory.
        let memory = File::options().read(true).write(true).open(dir.join("memory"));
        let memory = memory.expect("memory");
        let at = last_data(&memory);
        let mut byte = [0];
        memory.read_exact_at(&mut byte, at).expect("memory");
        memory.write_all_at(&byte.map(|it| !it), at).expect("memory");
        for how in ["", ",check=later", ",check=first"] {
            it.machine.restore(&dir, &[], how);
            let ended = it.machine.running.wait(PATIENCE).expect("an end");
            let said = it.machine.running.stderr.text();
            assert_eq!(ended, 66, "{kind}{how}: {said}");
            let last = said.lines().last().expect("a reason");
            assert!(last.contains("damaged between the bytes"), "{said}");
            let ran = last.contains("though the guest ran for ");
            assert_eq!(ran, how != ",check=first", "{said}");
            assert_eq!(changed(&disk), time, "{kind}{how}");
            assert!(fs::read(&disk).expect("its disk") == contents, "{kind}{how}");
        }
        memory.write_all_at(&byte, at).expect("memory");
        it.machine.restore(&dir, &[], "");
        it.completes(kind);
    }
}

/// The place of the last byte that is not zero.
fn last_data(memory: &File) -> u64 {
    let mut end = memory.metadata().expect("memory").len();
    let mut page = [0; 4096];
    loop {
        end -= 4096;
        memory.read_exact_at(&mut page, end).expect("memory");
        if let Some(at) = page.iter().rposition(|byte| *byte != 0) {
            return end + at as u64;
        }
    }
}

#[test]
fn the_disks_of_a_paused_machine_are_as_they_were() {
    if !runs_here("the_disks_of_a_paused_machine_are_as_they_were") {
        return;
    }
    for &(kind, format) in due(&KINDS) {
        let mut it = Interrupted::new((kind, format), FILL);
        let (disk, dir) = (it.disk.clone(), it.dir.clone());
        let time = changed(&disk);
        // Its end at any moment before it goes on leaves the snapshot as it was.
        for (signal, how) in [(Signal::KILL, ""), (Signal::TERM, ",check=first")] {
            it.machine.restore(&dir, &[], &format!("{how},paused"));
            // Long enough for the check, and for writes.
            sleep(Duration::from_millis(500));
            let status = it.machine.status();
            assert_eq!(
                (&status["state"], &status["writes_wait"]),
                (&"paused".into(), &true.into())
            );
            it.machine.running.signal(signal).expect("a signal");
            it.machine.running.wait(PATIENCE).expect("an end");
            assert_eq!(changed(&disk), time, "{kind}");
        }
        it.machine.restore(&dir, &[], ",paused");
        it.machine.status();
        fs::remove_dir_all(&dir).expect("a machine that has its snapshot open");
        ask(&it.machine, &Command::Resume).expect("it resumes");
        it.completes(kind);
    }
}

#[test]
fn a_snapshot_waits_for_the_check_of_the_one_before() {
    if !runs_here("a_snapshot_waits_for_the_check_of_the_one_before") {
        return;
    }
    let mut it = Interrupted::new(("nvme", "raw"), FILL);
    let mut last = it.dir.clone();
    for _ in 0..3 {
        it.machine.restore(&last, &[], "");
        it.machine.status();
        last = it.machine.save(Then::Quit).expect("a snapshot");
        assert_eq!(it.machine.running.wait(PATIENCE).expect("an end"), 0);
    }
    it.machine.restore(&last, &[], "");
    it.completes("nvme");
}

/// A program that has stopped a machine's check of memory in the middle, until it ends.
struct Stopped(Child);

impl Stopped {
    /// Restores the machine.
    fn in_check(machine: &mut Machine, dir: &Path) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/probe/stop_thread.py");
        let mut command = process::Command::new("python3");
        let piped = command.args([script, "check"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut stopper = piped.spawn().expect("python3");
        let mut output = BufReader::new(stopper.stdout.take().expect("its output")).lines();
        let mut says = |wanted: &str| output.next().is_some_and(|it| it.expect("a line") == wanted);
        assert!(says("ready"), "{script}");
        machine.restore(dir, &[], "");
        let mut input = stopper.stdin.as_ref().expect("its input");
        writeln!(input, "{}", machine.running.pid().as_raw_pid()).expect("its input");
        assert!(says("stopped"), "{script}: {}", machine.running.stderr.text());
        assert_eq!(machine.status()["unchecked"], true);
        Self(stopper)
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().expect("an end").success());
    }
}

#[test]
fn a_machine_obeys_while_its_memory_is_checked_and_is_saved_afterwards() {
    if !runs_here("a_machine_obeys_while_its_memory_is_checked_and_is_saved_afterwards") {
        return;
    }
    let mut it = Interrupted::new(("nvme", "raw"), LONG_FILL);
    let dir = it.dir.clone();
    let time = changed(&it.disk);
    // It ends at once, and its disk is as it was.
    for signal in [None, Some(Signal::TERM)] {
        let stopped = Stopped::in_check(&mut it.machine, &dir);
        match signal {
            Some(signal) => it.machine.running.signal(signal).expect("a signal"),
            None => drop(ask(&it.machine, &Command::Quit)),
        }
        it.machine.running.wait(PATIENCE).expect("an end");
        assert_eq!(changed(&it.disk), time);
        stopped.end();
    }
    // The whole guest waits after a while, and its snapshot until the check has ended.
    let stopped = Stopped::in_check(&mut it.machine, &dir);
    let continued = it.machine.status()["continued"].as_u64().expect("a number");
    let (control, last) = (it.machine.control(), it.machine.folder.path().join("1"));
    let other = last.clone();
    let save = thread::spawn(move || {
        let mut client = connect(&control).expect("control");
        control::snapshot::save(&mut client, &other, Then::Pause, None)
    });
    while it.machine.status()["state"] == "running" {
        sleep(Duration::from_millis(10));
    }
    assert_eq!(it.machine.status()["state"], "waiting for the host");
    assert_eq!(changed(&it.disk), time);
    assert!(!save.is_finished(), "memory that is not checked yet");
    stopped.end();
    save.join().expect("a client").expect("a snapshot");
    // Its clocks stood still, too.
    assert_eq!(it.machine.status()["continued"], continued + 1);
    ask(&it.machine, &Command::Quit).expect("it quits");
    assert_eq!(it.machine.running.wait(PATIENCE).expect("an end"), 0);
    // A reset does not wait for the check.
    let stopped = Stopped::in_check(&mut it.machine, &last);
    ask(&it.machine, &Command::Reset).expect("a reset");
    assert_eq!(it.machine.status()["resets"], 1);
    ask(&it.machine, &Command::Quit).expect("it quits");
    it.machine.running.wait(PATIENCE).expect("an end");
    stopped.end();
    it.machine.restore(&last, &[], "");
    ask(&it.machine, &Command::Resume).expect("it resumes");
    it.completes("nvme");
}

fn ask(machine: &Machine, command: &Command) -> anyhow::Result<serde_json::Value> {
    connect(&machine.control())?.ask(command)
}

/// Whether a process catches the signal, or is a zombie, as its status file says.
fn catches(status: &str, signal: Signal) -> bool {
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let mask = field("SigCgt:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    mask.is_some_and(|mask| mask >> (signal.as_raw() - 1) & 1 == 1)
        || field("State:").is_some_and(|state| state.starts_with('Z'))
}

#[test]
fn a_signal_ends_the_reading_of_memory() {
    if !runs_here("a_signal_ends_the_reading_of_memory") {
        return;
    }
    let mut it = Interrupted::new(("nvme", "raw"), LONG_FILL);
    let (dir, time) = (it.dir.clone(), changed(&it.disk));
    for how in [",check=first,paused", ",copy,paused"] {
        // On a busy host, the signal may come too late.
        let in_time = (0..20).any(|_| {
            it.machine.restore(&dir, &[], how);
            let status = format!("/proc/{}/status", it.machine.running.pid().as_raw_pid());
            // Until it catches signals, or has ended.
            while fs::read_to_string(&status).is_ok_and(|it| !catches(&it, Signal::TERM)) {
                sleep(Duration::from_millis(1));
            }
            it.machine.running.signal(Signal::TERM).ok();
            let ended = it.machine.running.wait(PATIENCE).expect("an end");
            let said = it.machine.running.stderr.text();
            assert_eq!(ended, 143, "{how}: {said}");
            assert_eq!(changed(&it.disk), time, "{how}");
            said.contains("a signal ends the process")
        });
        assert!(in_time, "{how}: its memory was read to the end");
    }
    it.machine.restore(&dir, &[], ",copy");
    it.completes("nvme");
}

#[test]
fn a_usb_disk_with_a_limit_waits_for_the_check() {
    if !runs_here("a_usb_disk_with_a_limit_waits_for_the_check") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let device = format!("usb-storage,path={},bandwidth=50M", raw(folder.path()).display());
    let words = ["--cmdline", "checks=none then=halt", "--device", "xhci", "--device", &device];
    let mut machine = Machine::start(&words);
    machine.running.says("\"probe\"", 1).expect("a report");
    let dir = machine.save(Then::Quit).expect("a snapshot");
    assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
    machine.restore(&dir, &[], "");
    assert_eq!(machine.status()["state"], "running", "{}", machine.running.stderr.text());
}
