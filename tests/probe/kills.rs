//! A process is killed at a random moment while its machine is saved, falls asleep, wakes or moves.
//! Its disk is then as after a power cut: another machine can use it, and nothing runs twice.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::{self, sleep};
use std::time::Duration;

use host::testutil::noise::Noise;
use rustix::process::{Signal, kill_process};
use transom_tests::image::check;
use transom_tests::lab::everything;
use transom_tests::program::{Ended, PATIENCE, Running, connect, report, run_in};
use vmm::control::snapshot::save;
use vmm::control::{Command, Then};

use crate::migration::{Traveller, busy, new_disk};
use crate::runs_here;
use crate::snapshot::{disks_are_sound, qcow2};

/// The kills in each phase, and with `TRANSOM_TESTS=all`.
const KILLS: [usize; 2] = [3, 40];
/// The longest time before one, in microseconds: a snapshot or a move takes less.
const LONGEST: u64 = 25_000;
/// Enough requests for a machine to be at work meanwhile.
const REQUESTS: usize = 15_000;

fn rounds(test: &str) -> usize {
    match runs_here(test) {
        true => KILLS[usize::from(everything())],
        false => 0,
    }
}

/// A raw disk, or a qcow2 image over one.
fn disk(folder: &Path, round: usize) -> PathBuf {
    if round.is_multiple_of(2) { new_disk(folder) } else { qcow2(folder) }
}

/// A machine that writes to a disk.
fn at_work(disk: &Path) -> Traveller {
    let words = busy("virtio-blk", disk, REQUESTS, "interrupt");
    Traveller::start(&words.each_ref().map(String::as_str))
}

/// Kills a process after a random time. The rest of the work goes on meanwhile.
fn kill_during<T>(victim: &Running, random: &mut Noise, work: impl FnOnce() -> T) -> T {
    let (victim, time) = (victim.pid(), Duration::from_micros(random.below(LONGEST)));
    thread::scope(|scope| {
        scope.spawn(move || {
            sleep(time);
            // It may have ended. Nobody has waited for it yet.
            kill_process(victim, Signal::KILL).ok();
        });
        work()
    })
}

/// Nobody has the disk any more. Its tables are sound, and all of it can be written and read.
fn is_free(disk: &Path) {
    if disk.extension().is_some() {
        // It may have leaks, as after a power cut.
        check(disk).expect("a sound image");
    }
    let work = "checks=none disk=write,seed=5,span=8M,requests=2000 \
                disk=verify,seed=5,span=8M,requests=2000 then=poweroff";
    let device = format!("virtio-blk,path={}", disk.display());
    let words = ["run", "--memory", "64M", "--device", &device, "--cmdline", work];
    let Ended { status, stdout, stderr } = run_in(Path::new("/"), &words).expect("vmm");
    assert_eq!(status, 0, "{stderr}");
    disks_are_sound("virtio-blk", &report(&stdout).expect("a report"));
}

/// The snapshot continues to the end of the machine's work, or is refused in a sentence.
fn continues_or_is_refused(dir: &Path, before: &str, random: &mut Noise) -> bool {
    let how = random.choose(&["", ",copy"]);
    let restore = format!("{}{how}", dir.display());
    let Ended { status, stdout, stderr } =
        run_in(Path::new("/"), &["run", "--restore", &restore]).expect("vmm");
    if status == 0 {
        let output = format!("{before}{stdout}");
        disks_are_sound("virtio-blk", &report(&output).expect("a report"));
        return true;
    }
    assert_eq!((status, stderr.lines().count()), (66, 1), "{stderr}");
    let sentences = ["there is no complete snapshot", "has another size or time of change"];
    assert!(sentences.iter().any(|it| stderr.contains(it)), "{stderr}");
    false
}

#[test]
fn a_process_that_is_killed_while_it_saves_leaves_a_whole_snapshot_or_none() {
    let rounds = rounds("a_process_that_is_killed_while_it_saves_leaves_a_whole_snapshot_or_none");
    let mut random = Noise::new(41);
    let mut continued = 0;
    for round in 0..rounds {
        for then in [Then::Quit, Then::Sleep, Then::Resume] {
            let folder = tempfile::tempdir().expect("a folder");
            let disk = disk(folder.path(), round);
            let mut machine = at_work(&disk);
            let dir = folder.path().join("saved");
            let control = machine.path("control", 0);
            kill_during(&machine.running, &mut random, || {
                connect(&control).and_then(|mut it| save(&mut it, &dir, then, None)).ok()
            });
            machine.running.wait(PATIENCE).expect("an end");
            let before = machine.running.stdout.text();
            continued += usize::from(continues_or_is_refused(&dir, &before, &mut random));
            is_free(&disk);
        }
    }
    eprintln!("{continued} of {} continued", 3 * rounds);
}

#[test]
fn a_process_that_is_killed_while_it_wakes_leaves_its_disk_whole() {
    let mut random = Noise::new(42);
    for round in 0..rounds("a_process_that_is_killed_while_it_wakes_leaves_its_disk_whole") {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = disk(folder.path(), round);
        let mut machine = at_work(&disk);
        let dir = folder.path().join("saved");
        let mut client = connect(&machine.path("control", 0)).expect("control");
        save(&mut client, &dir, Then::Sleep, None).expect("a snapshot");
        let before = machine.running.stdout.text();
        kill_during(&machine.running, &mut random, || client.ask(&Command::Resume).ok());
        machine.running.wait(PATIENCE).expect("an end");
        continues_or_is_refused(&dir, &before, &mut random);
        is_free(&disk);
    }
}

#[test]
fn a_move_whose_other_end_is_killed_leaves_at_most_one_machine() {
    let mut random = Noise::new(43);
    for round in 0..rounds("a_move_whose_other_end_is_killed_leaves_at_most_one_machine") {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = disk(folder.path(), round);
        let mut machine = at_work(&disk);
        let there = machine.other_end(&[]);
        let sent = kill_during(&there.running, &mut random, || machine.send(&there.socket, None));
        match sent {
            // It had moved, and the process in which it ran was killed.
            Ok(_) => assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 79),
            Err(error) => {
                let said = format!("{error:#}");
                let stays = said.starts_with("the machine stays: ");
                assert!(stays || !said.contains('\n'), "{said}");
                if stays {
                    disks_are_sound("virtio-blk", &machine.end());
                } else {
                    assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 1, "{said}");
                }
            }
        }
        is_free(&disk);
    }
}

#[test]
fn a_move_whose_source_is_killed_leaves_at_most_one_machine() {
    let mut random = Noise::new(44);
    let mut moved = 0;
    for round in 0..rounds("a_move_whose_source_is_killed_leaves_at_most_one_machine") {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = disk(folder.path(), round);
        let mut machine = at_work(&disk);
        let mut there = machine.other_end(&[]);
        kill_during(&machine.running, &mut random, || machine.send(&there.socket, None).ok());
        machine.running.wait(PATIENCE).expect("an end");
        // If it runs there, its end is that of its work. Otherwise it waits for another machine, or
        // says why this one has not arrived.
        sleep(Duration::from_millis(500));
        let control = machine.path("control", there.number);
        let runs = UnixStream::connect(&control).is_ok()
            && connect(&control).and_then(|mut it| it.ask(&Command::Status)).is_ok();
        if runs {
            machine.follow(there);
            disks_are_sound("virtio-blk", &machine.end());
            moved += 1;
        } else {
            let said = there.end();
            assert!(!said.contains("panicked"), "{said}");
        }
        is_free(&disk);
    }
    eprintln!("{moved} moved");
}

/// The judge of the disks finds a fault.
#[test]
fn a_disk_that_is_damaged_is_found() {
    if rounds("a_disk_that_is_damaged_is_found") == 0 {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let disk = new_disk(folder.path());
    is_free(&disk);
    let file = File::options().write(true).open(&disk).expect("the disk");
    file.write_all_at(&[0x5a; 8 << 20], 0).expect("a write");
    let work = "checks=none disk=verify,seed=5,span=8M,requests=2000 then=poweroff";
    let device = format!("virtio-blk,path={}", disk.display());
    let words = ["run", "--memory", "64M", "--device", &device, "--cmdline", work];
    let Ended { stdout, .. } = run_in(Path::new("/"), &words).expect("vmm");
    assert_eq!(report(&stdout).expect("a report")["ok"], false, "{stdout}");
}
