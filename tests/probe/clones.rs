//! Many machines go on from the snapshot of one, each with files of its own.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use transom_tests::image::check;
use transom_tests::program::{Ended, PATIENCE, Running, connect, report, run_in};
use vmm::control::snapshot::save;
use vmm::control::{Command, Then};

use crate::snapshot::{SIZE, disks_are_sound, qcow2};
use crate::{due, runs_here};

/// Clones that run at the same time, and the time that they all may take to be there.
const MANY: usize = 50;
const TOGETHER: Duration = Duration::from_secs(60);
/// The memory that each of them may have for itself.
const OWN_KIB: u64 = 10 << 10;
/// The guest's memory that is not zero.
const CONTENTS: usize = 128 << 20;

/// The words that make a machine a clone.
fn words(folder: &Path, name: &str) -> Vec<String> {
    let path = |name: &str| folder.join(name).display().to_string();
    let restore = format!("{},clone={}", path("saved"), path(name));
    let control = path(&format!("{name}.control"));
    ["run", "--restore", &restore, "--control", &control].map(str::to_owned).to_vec()
}

fn clone(folder: &Path, name: &str) -> Running {
    let words = words(folder, name);
    Running::vmm(&words.iter().map(String::as_str).collect::<Vec<_>>()).expect("vmm")
}

/// Runs a machine with these words, and saves it when it says this. It ends with its snapshot.
fn saved(folder: &Path, words: &[&str], says: &str) -> String {
    let control = folder.join("control").display().to_string();
    let words = [&["run", "--control", &control], words].concat();
    let mut running = Running::vmm(&words).expect("vmm");
    running.says(says, 1).expect("its words");
    // In the middle of its work.
    sleep(Duration::from_millis(20));
    let mut client = connect(Path::new(&control)).expect("control");
    save(&mut client, &folder.join("saved"), Then::Quit, None).expect("a snapshot");
    assert_eq!(running.wait(PATIENCE).expect("an end"), 0);
    running.stdout.text()
}

/// A writer of disks, for each kind of disk.
const WORK: &str = "checks=none disk=write,seed=7,depth=32,span=8M,requests=9000,wait=interrupt \
                    disk=verify,seed=7,depth=32,span=8M,requests=9000,wait=interrupt then=poweroff";

fn clones_do_the_same_work(kind: &str, format: &str) {
    let disks = tempfile::tempdir().expect("a folder");
    let folder = disks.path();
    let disk = match format {
        "qcow2" => qcow2(folder),
        _ => {
            let disk = folder.join("disk");
            File::create(&disk).and_then(|it| it.set_len(SIZE)).expect("a disk");
            disk
        }
    };
    let device = format!("{kind},path={}", disk.display());
    let words = ["--memory", "64M", "--device", &device, "--cmdline", WORK];
    let before = saved(folder, &words, "transom probe");
    let contents = fs::read(&disk).expect("the disk");
    let mut all = [1, 2, 3].map(|number| clone(folder, &format!("clone{number}")));
    for running in &mut all {
        let ended = running.wait(PATIENCE).expect("an end");
        let output = format!("{before}{}", running.stdout.text());
        assert_eq!(ended, 0, "{kind}: {output}{}", running.stderr.text());
        disks_are_sound(kind, &report(&output).expect("a report"));
    }
    for number in 1..=all.len() {
        let own = folder.join(format!("clone{number}/{kind}.qcow2"));
        assert_eq!(check(&own).expect("a sound image"), 0, "{kind}: leaks");
    }
    assert!(fs::read(&disk).expect("the disk") == contents, "{kind}: a clone wrote to it");
    // Later it starts by itself, from its own disk.
    let config = folder.join("clone2/config.json").display().to_string();
    let Ended { status, stdout, stderr } =
        run_in(folder, &["run", "--config", &config]).expect("vmm");
    assert_eq!(status, 0, "{kind}: {stderr}");
    disks_are_sound(kind, &report(&stdout).expect("a report"));
    // The first machine goes on as well.
    let saved = folder.join("saved").display().to_string();
    let Ended { status, stderr, .. } = run_in(folder, &["run", "--restore", &saved]).expect("vmm");
    assert_eq!(status, 0, "{kind}: {stderr}");
}

#[test]
fn clones_of_a_working_machine_do_its_work_and_leave_its_disks_alone() {
    if !runs_here("clones_of_a_working_machine_do_its_work_and_leave_its_disks_alone") {
        return;
    }
    let all = [("virtio-blk", "raw"), ("nvme", "qcow2"), ("nvme", "raw"), ("ahci-disk", "raw")];
    for &(kind, format) in due(&all) {
        clones_do_the_same_work(kind, format);
    }
}

/// The memory that a process does not share, in KiB.
fn own_kib(running: &Running) -> u64 {
    let text = running.proc("smaps_rollup").expect("its memory");
    let own = text.lines().filter(|line| line.starts_with("Private_"));
    own.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

#[test]
fn fifty_clones_share_the_memory_of_one_machine() {
    if !runs_here("fifty_clones_share_the_memory_of_one_machine") {
        return;
    }
    let disks = tempfile::tempdir().expect("a folder");
    let folder = disks.path();
    let paths = ["disk", "probe.elf", "module"].map(|name| folder.join(name));
    File::create(&paths[0]).and_then(|it| it.set_len(SIZE)).expect("a disk");
    fs::write(&paths[1], probe::IMAGE).expect("the probe");
    fs::write(&paths[2], (1..=250).cycle().take(CONTENTS).collect::<Vec<u8>>()).expect("a module");
    let [disk, kernel, module] = paths.map(|path| path.display().to_string());
    let words = ["--memory", "512M", "--disk", &disk, "--kernel", &kernel, "--initrd", &module];
    let how = ["--accept-emulation", "--cmdline", "checks=none then=halt"];
    saved(folder, &[&words[..], &how].concat(), "{\"probe\"");
    let start = Instant::now();
    let all: Vec<_> = (0..MANY).map(|number| clone(folder, &number.to_string())).collect();
    let status = |number: usize| {
        let control = folder.join(format!("{number}.control"));
        connect(&control).and_then(|mut it| it.ask(&Command::Status)).expect("its state")
    };
    let states: Vec<_> = (0..MANY).map(status).collect();
    let time = start.elapsed();
    let memory: u64 = all.iter().map(own_kib).sum();
    let each = memory / MANY as u64;
    eprintln!("{MANY} clones in {time:?}, {each} KiB each");
    assert!(time < TOGETHER, "{time:?}");
    assert!(each < OWN_KIB, "{each} KiB");
    let identities = ["vmgenid", "uuid"].map(|key| {
        let all = states.iter().map(|state| state[key].as_str().expect(key));
        all.collect::<BTreeSet<_>>().len()
    });
    assert_eq!(identities, [MANY; 2]);
    assert!(states.iter().all(|state| state["state"] == "running"));
}

/// The error about a clone, which leaves nothing.
fn refused(folder: &Path, restore: &str, others: &[&str]) -> String {
    let words = [&["run", "--restore", restore], others].concat();
    let Ended { status, stderr, .. } = run_in(folder, &words).expect("vmm");
    assert_ne!(status, 0, "{restore}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{restore}: {stderr}");
    assert!(!folder.join("new").exists(), "{restore}: {stderr}");
    stderr
}

#[test]
fn a_clone_without_files_of_its_own_is_refused_in_a_sentence() {
    if !runs_here("a_clone_without_files_of_its_own_is_refused_in_a_sentence") {
        return;
    }
    let disks = tempfile::tempdir().expect("a folder");
    let folder = disks.path();
    let disk = folder.join("disk");
    File::create(&disk).and_then(|it| it.set_len(SIZE)).expect("a disk");
    let device = format!("nvme,path={}", disk.display());
    saved(folder, &["--device", &device, "--cmdline", "checks=none then=halt"], "{\"probe\"");
    let error = refused(folder, "saved,clone", &[]);
    assert!(error.contains("nvme would write to") && error.contains("`clone=FOLDER`"), "{error}");
    let error = refused(folder, "saved,clone=saved", &[]);
    assert!(error.contains("files in it already"), "{error}");
    let error = refused(folder, "saved,clone=/tmp", &[]);
    assert!(error.contains("you alone can write"), "{error}");
    let error = refused(folder, "saved,clone=new/deep", &[]);
    assert!(error.contains("clone=new/deep: No such file"), "{error}");
    let error = refused(folder, "saved,clone=new", &["--cpus", "2"]);
    assert!(error.contains("--cpus 1"), "{error}");
    let file = File::options().write(true).open(&disk).expect("the disk");
    let before = file.metadata().and_then(|it| it.modified()).expect("a time");
    file.write_all_at(b"other", 0).expect("a byte");
    let error = refused(folder, "saved,clone=new", &[]);
    assert!(error.contains("the file of `nvme` has another size or time"), "{error}");
    file.set_modified(before).expect("a time");
    // A clone that has run, and images of others.
    let mut running = clone(folder, "one");
    let state = connect(&folder.join("one.control")).and_then(|mut it| it.ask(&Command::Status));
    state.expect("it runs");
    running.signal(Signal::TERM).expect("a signal");
    running.wait(PATIENCE).expect("an end");
    let error = refused(folder, "saved,clone=one", &[]);
    assert!(error.contains("one/config.json` boots it"), "{error}");
    let above = format!("nvme,path=one/nvme.qcow2,backing={}", disk.display());
    let error = refused(folder, "saved,clone=new", &["--device", &above]);
    assert!(error.contains("not possible yet for clones"), "{error}");
    let over = |image: PathBuf| format!("nvme,path={},backing={}", image.display(), disk.display());
    let own = folder.join("one/nvme.qcow2");
    fs::copy(&own, folder.join("used.qcow2")).expect("a copy");
    let written = File::options().write(true).open(folder.join("used.qcow2")).expect("an image");
    // An entry in its first table: a cluster that is there.
    written.write_all_at(&(1_u64 << 63 | 4 << 16).to_be_bytes(), 3 << 16).expect("an entry");
    written.set_len(5 << 16).expect("a table");
    let error = refused(folder, "saved,clone", &["--device", &over(folder.join("used.qcow2"))]);
    assert!(error.contains("nvme would write to"), "{error}");
    File::create(folder.join("other")).and_then(|it| it.set_len(SIZE)).expect("another disk");
    let other = format!("nvme,path={},backing={}", own.display(), folder.join("other").display());
    let error = refused(folder, "saved,clone", &["--device", &other]);
    assert!(error.contains("the file of `nvme` has another size or time"), "{error}");
    // An empty one of the user's is as good as a new one. So is a disk whose changes are lost.
    for device in [over(own), format!("{device},overlay=on")] {
        let control = folder.join("given.control").display().to_string();
        let words = ["run", "--restore", "saved,clone", "--control", &control, "--device", &device];
        let mut command = std::process::Command::new(transom_tests::program::vmm());
        let mut running = Running::spawn(command.args(words).current_dir(folder)).expect("vmm");
        let state = connect(Path::new(&control)).and_then(|mut it| it.ask(&Command::Status));
        let said = running.stderr.text();
        assert_eq!(state.expect("its state")["state"], "running", "{device}: {said}");
        running.signal(Signal::TERM).expect("a signal");
        running.wait(PATIENCE).expect("an end");
    }
}
