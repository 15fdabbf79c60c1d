//! A process is killed at a random moment while its machine is saved, falls asleep, wakes or moves.
//! Its disk is then as after a power cut: it has all records that were reported to the guest as
//! durable. The other process goes on or says why not, and nothing runs twice.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use host::testutil::noise::Noise;
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use transom_tests::image::check;
use transom_tests::lab::everything;
use transom_tests::program::{Ended, PATIENCE, Running, connect, findings, report, run_in};
use vmm::control::snapshot::{MACHINE, UNFINISHED, save};
use vmm::control::{Command, Then};

use crate::migration::{MOVED, Traveller, Waiting, new_disk};
use crate::runs_here;
use crate::snapshot::qcow2;

/// The kills in each phase, and with `TRANSOM_TESTS=all`.
const KILLS: [usize; 2] = [3, 25];
/// The longest time before one, in microseconds: a snapshot or a move takes less.
const LONGEST: u64 = 25_000;
/// A client needs this time to start, too.
const LONGEST_OF_CLIENT: u64 = 40_000;
/// Anything that was asked of a machine is done by then, or at work.
const QUIET: Duration = Duration::from_secs(3);
/// The layout of all records.
const RECORDS: &str = "seed=8,block=4K,span=8M";
/// The exit status of a killed process: 128 + SIGKILL.
const KILLED: i32 = 137;

fn rounds(test: &str, seed: u64) -> (usize, Noise) {
    eprintln!("{test}: the moments are those of seed {seed}");
    let rounds = match runs_here(test) {
        true => KILLS[usize::from(everything())],
        false => 0,
    };
    (rounds, Noise::new(seed))
}

/// The last durable record that a process reported. Its first line may be the rest of one that
/// another process began, and its last line may be cut.
fn durable(output: &str) -> u64 {
    let whole = output.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let records = whole.lines().skip(1).filter_map(|line| line.trim().parse().ok());
    records.last().unwrap_or(0)
}

/// Whether more records become durable in this process, before it ends.
fn goes_on(running: &mut Running, than: u64) -> bool {
    let end = Instant::now() + PATIENCE;
    loop {
        if durable(&running.stdout.text()) > than {
            return true;
        }
        if running.wait(Duration::ZERO).is_ok() {
            return durable(&running.stdout.text()) > than;
        }
        assert!(Instant::now() < end, "it hangs after record {than}: {}", running.stderr.text());
        sleep(Duration::from_millis(5));
    }
}

/// Ends a process as a power cut would, and returns the last durable record.
fn kill(running: &mut Running) -> u64 {
    running.signal(Signal::KILL).expect("a process");
    let status = running.wait(PATIENCE).expect("an end");
    assert_eq!(status, KILLED, "{}", running.stderr.text());
    durable(&running.stdout.text())
}

/// Kills a process after a random time. The rest of the work goes on meanwhile.
fn kill_during<T>(victim: &Running, time: u64, work: impl FnOnce() -> T) -> T {
    let (victim, time) = (victim.pid(), Duration::from_micros(time));
    thread::scope(|scope| {
        scope.spawn(move || {
            sleep(time);
            // It may have ended. Nobody has waited for it yet.
            kill_process(victim, Signal::KILL).ok();
        });
        work()
    })
}

/// A machine that writes records to a disk.
struct Work {
    disk: PathBuf,
    machine: Traveller,
    folder: TempDir,
}

impl Work {
    /// The disk is raw, or a qcow2 image over a raw one.
    fn start(round: usize) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let image = !round.is_multiple_of(2);
        let disk = if image { qcow2(folder.path()) } else { new_disk(folder.path()) };
        let device = format!("virtio-blk,path={}", disk.display());
        let words = format!("checks=none disk=record,{RECORDS},depth=16,every=8,wait=interrupt");
        let words = ["--memory", "64M", "--device", &device, "--cmdline", &words];
        let mut work = Self { disk, machine: Traveller::start(&words), folder };
        assert!(goes_on(&mut work.machine.running, 100), "it writes");
        work
    }

    fn dir(&self) -> PathBuf {
        self.folder.path().join("saved")
    }

    fn control(&self) -> PathBuf {
        self.machine.path("control", 0)
    }

    /// The last durable record, in the process where the machine began.
    fn durable(&self) -> u64 {
        durable(&self.machine.running.stdout.text())
    }

    /// Gives a snapshot its name, as the error says that finds it without one.
    fn name(&self) {
        let [unfinished, name] = [UNFINISHED, MACHINE].map(|it| self.dir().join(it));
        if !name.exists() {
            fs::rename(unfinished, name).expect("a snapshot without its name");
        }
    }

    /// The snapshot goes on with the work until it is killed, or is refused in a sentence. Returns
    /// the last durable record of a machine that went on.
    fn restore(&self, before: u64, random: &mut Noise) -> Option<u64> {
        let how = random.choose(&["", ",copy"]);
        let restore = format!("{}{how}", self.dir().display());
        let mut restored = Running::vmm(&["run", "--restore", &restore]).expect("vmm");
        if goes_on(&mut restored, before) {
            return Some(kill(&mut restored));
        }
        let status = restored.wait(PATIENCE).expect("an end");
        let said = restored.stderr.text();
        assert_eq!((status, said.lines().count()), (66, 1), "{said}");
        let sentences = ["there is no complete snapshot", "has another size or time of change"];
        assert!(sentences.iter().any(|it| said.contains(it)), "{said}");
        None
    }

    /// Nobody has the disk any more. Its tables are sound, and it has all durable records.
    fn has_all(&self, durable: u64) {
        assert!(durable > 0, "nothing is durable");
        if self.disk.extension().is_some() {
            // It may have leaks, as after a power cut.
            check(&self.disk).expect("a sound image");
        }
        let found = recall(&self.disk, durable);
        assert_eq!((&found["verdict"], &found["durable"]), (&"pass".into(), &durable.into()));
    }
}

/// A new machine reads all records.
fn recall(disk: &Path, durable: u64) -> Value {
    let work =
        format!("checks=none disk=recall,{RECORDS},depth=16,durable={durable} then=poweroff");
    let device = format!("virtio-blk,path={}", disk.display());
    let words = ["run", "--memory", "64M", "--device", &device, "--cmdline", &work];
    let Ended { status, stdout, stderr } = run_in(Path::new("/"), &words).expect("vmm");
    assert_eq!(status, 0, "{stderr}");
    findings(&report(&stdout).expect("a report"), "disk")[0].clone()
}

#[test]
fn a_process_that_is_killed_while_it_saves_leaves_a_whole_snapshot_or_none() {
    let test = "a_process_that_is_killed_while_it_saves_leaves_a_whole_snapshot_or_none";
    let (rounds, mut random) = rounds(test, 41);
    let mut continued = 0;
    for round in 0..rounds {
        for then in [Then::Quit, Then::Sleep, Then::Resume] {
            let mut work = Work::start(round);
            let (dir, control) = (work.dir(), work.control());
            kill_during(&work.machine.running, random.below(LONGEST), || {
                connect(&control).and_then(|mut it| save(&mut it, &dir, then, None)).ok()
            });
            let status = work.machine.running.wait(PATIENCE).expect("an end");
            assert!(status == KILLED || then == Then::Quit && status == 0, "{then:?}: {status}");
            let before = work.durable();
            let after = work.restore(before, &mut random);
            assert!(status == KILLED || after.is_some(), "it ended without a snapshot");
            continued += usize::from(after.is_some());
            work.has_all(after.unwrap_or(before));
        }
    }
    eprintln!("{continued} of {} continued", 3 * rounds);
}

#[test]
fn a_process_that_is_killed_while_it_wakes_leaves_its_disk_whole() {
    let test = "a_process_that_is_killed_while_it_wakes_leaves_its_disk_whole";
    let (rounds, mut random) = rounds(test, 42);
    for round in 0..rounds {
        let mut work = Work::start(round);
        let mut client = connect(&work.control()).expect("control");
        save(&mut client, &work.dir(), Then::Sleep, None).expect("a snapshot");
        let time = random.below(LONGEST);
        kill_during(&work.machine.running, time, || client.ask(&Command::Resume).ok());
        assert_eq!(work.machine.running.wait(PATIENCE).expect("an end"), KILLED);
        let before = work.durable();
        let after = work.restore(before, &mut random);
        work.has_all(after.unwrap_or(before));
    }
}

/// Nobody waits for the answer any more: the machine goes on, sleeps, or ended with its snapshot.
#[test]
fn a_client_that_is_killed_while_it_saves_leaves_a_machine_or_a_snapshot() {
    let test = "a_client_that_is_killed_while_it_saves_leaves_a_machine_or_a_snapshot";
    let (rounds, mut random) = rounds(test, 43);
    let mut ended = 0;
    for round in 0..rounds {
        for then in ["quit", "sleep", "resume"] {
            let mut work = Work::start(round);
            let [control, dir] = [work.control(), work.dir()].map(|it| it.display().to_string());
            let words = ["ctl", "--control", &control, "snapshot", &dir, "then", then];
            let client = Running::vmm(&words).expect("vmm");
            kill_during(&client, random.below(LONGEST_OF_CLIENT), || ());
            if let Ok(status) = work.machine.running.wait(QUIET) {
                assert_eq!((status, then), (0, "quit"), "{}", work.machine.running.stderr.text());
                work.name();
                let after = work.restore(work.durable(), &mut random);
                work.has_all(after.expect("it ended with a whole snapshot"));
                ended += 1;
                continue;
            }
            let before = work.durable();
            let mut client = connect(&work.control()).expect("control");
            let state = client.ask(&Command::Status).expect("its state")["state"].clone();
            assert!(state == "running" || (&state, then) == (&"asleep".into(), "sleep"), "{state}");
            if state == "asleep" {
                client.ask(&Command::Resume).expect("it wakes");
            }
            assert!(goes_on(&mut work.machine.running, before), "it ended");
            let durable = kill(&mut work.machine.running);
            work.has_all(durable);
        }
    }
    eprintln!("{ended} of {rounds} ended with a snapshot");
}

#[test]
fn a_move_whose_other_end_is_killed_leaves_at_most_one_machine() {
    let test = "a_move_whose_other_end_is_killed_leaves_at_most_one_machine";
    let (rounds, mut random) = rounds(test, 44);
    let mut stayed = 0;
    for round in 0..rounds {
        let mut work = Work::start(round);
        let machine = &mut work.machine;
        let mut there = machine.other_end(&[]);
        let time = random.below(LONGEST);
        let sent = kill_during(&there.running, time, || machine.send(&there.socket, None));
        assert_eq!(there.running.wait(PATIENCE).expect("an end"), KILLED);
        let said = sent.map_or_else(|error| format!("{error:#}"), |_| String::new());
        assert_eq!(said.lines().count(), usize::from(!said.is_empty()), "{said}");
        let durable = if let Ok(status) = machine.running.wait(QUIET) {
            // It had moved, and its process was killed; or nobody knows whether it had.
            assert_eq!(status, if said.is_empty() { MOVED } else { 1 }, "{said}");
            machine.follow(there);
            durable(&machine.output())
        } else {
            // It may have been killed before anything was asked.
            let sentences = ["the machine stays: ", "Connection refused"];
            assert!(sentences.iter().any(|it| said.starts_with(it)), "{said}");
            let before = durable(&machine.running.stdout.text());
            assert!(goes_on(&mut machine.running, before), "{said}");
            stayed += 1;
            kill(&mut machine.running)
        };
        work.has_all(durable);
    }
    eprintln!("{stayed} of {rounds} stayed");
}

/// Whether the machine runs there. If not, it says why, or waits for another machine.
fn has_arrived(machine: &Traveller, there: &mut Waiting, before: u64) -> bool {
    sleep(QUIET);
    let control = machine.path("control", there.number);
    let runs = UnixStream::connect(&control).is_ok()
        && connect(&control).and_then(|mut it| it.ask(&Command::Status)).is_ok();
    if runs {
        assert!(goes_on(&mut there.running, before), "{}", there.running.stderr.text());
    } else {
        let said = there.end();
        let last = said.lines().last().unwrap_or_default();
        assert!(!said.contains("panicked"), "{said}");
        eprintln!("the other end: {last}");
    }
    runs
}

#[test]
fn a_move_whose_source_is_killed_leaves_at_most_one_machine() {
    let test = "a_move_whose_source_is_killed_leaves_at_most_one_machine";
    let (rounds, mut random) = rounds(test, 45);
    let mut moved = 0;
    for round in 0..rounds {
        let mut work = Work::start(round);
        let machine = &mut work.machine;
        let mut there = machine.other_end(&[]);
        let time = random.below(LONGEST);
        kill_during(&machine.running, time, || machine.send(&there.socket, None).ok());
        let status = machine.running.wait(PATIENCE).expect("an end");
        assert!([KILLED, MOVED].contains(&status), "{status}");
        let mut durable = durable(&machine.running.stdout.text());
        if has_arrived(machine, &mut there, durable) {
            durable = kill(&mut there.running);
            moved += 1;
        }
        work.has_all(durable);
    }
    eprintln!("{moved} of {rounds} moved");
}

/// A client that only asks for a move is not needed any more.
#[test]
fn a_client_that_is_killed_while_it_moves_a_machine_leaves_exactly_one() {
    let test = "a_client_that_is_killed_while_it_moves_a_machine_leaves_exactly_one";
    let (rounds, mut random) = rounds(test, 46);
    let mut moved = 0;
    for round in 0..rounds {
        let mut work = Work::start(round);
        let machine = &mut work.machine;
        let mut there = machine.other_end(&[]);
        let [control, socket] = [&machine.path("control", 0), &there.socket];
        let [control, socket] = [control, socket].map(|it| it.display().to_string());
        let client = Running::vmm(&["ctl", "--control", &control, "migrate", &socket]);
        kill_during(&client.expect("vmm"), random.below(LONGEST_OF_CLIENT), || ());
        let ended = machine.running.wait(QUIET);
        let before = durable(&machine.running.stdout.text());
        let durable = if let Ok(status) = ended {
            assert_eq!(status, MOVED, "{}", machine.running.stderr.text());
            assert!(has_arrived(machine, &mut there, before), "nobody has the machine");
            moved += 1;
            kill(&mut there.running)
        } else {
            assert!(!has_arrived(machine, &mut there, before), "two have the machine");
            assert!(goes_on(&mut machine.running, before), "it ended");
            kill(&mut machine.running)
        };
        work.has_all(durable);
    }
    eprintln!("{moved} of {rounds} moved");
}

/// The judge of the disks finds a fault.
#[test]
fn a_disk_that_lost_records_is_found() {
    if rounds("a_disk_that_lost_records_is_found", 47).0 == 0 {
        return;
    }
    let mut work = Work::start(0);
    let durable = kill(&mut work.machine.running);
    work.has_all(durable);
    let file = File::options().write(true).open(&work.disk).expect("the disk");
    file.write_all_at(&[0; 1 << 20], 0).expect("a write");
    assert_eq!(recall(&work.disk, durable)["verdict"], "fail");
}
