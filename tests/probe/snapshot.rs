//! A machine is saved in the middle of its work, and goes on in another process.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use host::testutil::noise::Noise;
use rustix::process::Signal;
use serde_json::Value;
use transom_tests::image::{check, qemu_img};
use transom_tests::lab::everything;
use transom_tests::place::until;
use transom_tests::program::{Ended, PATIENCE, Running, connect, findings, report, run_in};
use vmm::control::snapshot::{Secret, save, save_with_key};
use vmm::control::{Command, Then};
use vmm::kvm::KvmSupport;

use crate::runs_here;

/// The number of snapshots of each machine, and with `TRANSOM_TESTS=all`.
const SNAPSHOTS: [usize; 2] = [6, 40];
/// The longest time between two, in microseconds.
const LONGEST: u64 = 30_000;
/// Requests of the probe for each snapshot, in each direction.
const REQUESTS: usize = 5000;
pub(crate) const SIZE: u64 = 32 << 20;
/// Ways to go on from a snapshot.
const HOW: [&str; 5] = ["", ",check=first", ",check=off", ",copy", ",copy,check=off"];

/// A machine that may have been saved and restored several times.
pub(crate) struct Machine {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) running: Running,
    /// Its output before it was saved.
    before: String,
    snapshots: usize,
}

impl Machine {
    pub(crate) fn start(words: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let control = folder.path().join("control").display().to_string();
        let words = [&["run", "--control", &control], words].concat();
        let running = Running::vmm(&words).expect("vmm");
        let mut machine = Self { folder, running, before: String::new(), snapshots: 0 };
        machine.status();
        machine
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.folder.path().join("control")
    }

    pub(crate) fn status(&mut self) -> Value {
        let status = connect(&self.control()).and_then(|mut it| it.ask(&Command::Status));
        status.unwrap_or_else(|error| {
            let ended = self.running.wait(PATIENCE);
            panic!("{error:#}: {ended:?}: {}", self.running.stderr.text())
        })
    }

    pub(crate) fn save(&mut self, then: Then) -> anyhow::Result<PathBuf> {
        self.save_with_key(then, None)
    }

    fn save_with_key(&mut self, then: Then, key: Option<&Path>) -> anyhow::Result<PathBuf> {
        let dir = self.folder.path().join(self.snapshots.to_string());
        let key = key.map(|key| Secret::open(key)?.for_snapshot()).transpose()?;
        save_with_key(&mut connect(&self.control())?, &dir, then, None, key.as_ref())?;
        self.snapshots += 1;
        Ok(dir)
    }

    /// Goes on in another process. `how` follows the folder.
    pub(crate) fn restore(&mut self, dir: &Path, words: &[&str], how: &str) {
        self.before.push_str(&self.running.stdout.text());
        let dir = format!("{}{how}", dir.display());
        let words = [&["run", "--restore", &dir], words].concat();
        self.running = Running::vmm(&words).expect("vmm");
    }

    pub(crate) fn output(&self) -> String {
        format!("{}{}", self.before, self.running.stdout.text())
    }
}

/// An image of small clusters over a raw one, so that tables change often.
pub(crate) fn qcow2(folder: &Path) -> PathBuf {
    let (image, base) = (folder.join("disk.qcow2"), folder.join("base"));
    File::create(&base).and_then(|it| it.set_len(SIZE)).expect("a disk");
    let base = base.display().to_string();
    let words = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", "-F", "raw", "-b", &base];
    qemu_img(&words, &image, &[]).expect("an image");
    image
}

/// Whether an image is as if it were closed: without leaks, and not marked as dirty. A copy shows
/// that, because a machine locks its image, and its base, which the copy does not name.
fn is_complete(image: &Path) -> bool {
    let copy = image.with_file_name("copy.qcow2");
    fs::copy(image, &copy).expect("a copy");
    let mut features = [0; 8];
    let file = File::options().read(true).write(true).open(&copy).expect("the copy");
    file.read_exact_at(&mut features, 72).expect("a header");
    file.write_all_at(&[0; 12], 8).expect("a header");
    check(&copy).expect("a sound image") == 0 && features == [0; 8]
}

/// The probe found no fault, and all disks as it wrote them.
pub(crate) fn disks_are_sound(kind: &str, report: &Value) {
    let all = report["findings"].as_array().expect("findings");
    // A paravirtual KVM shows the host's time stamp counter, which does not stand still.
    let may_fail = match KvmSupport::of_this_host() {
        KvmSupport::Paravirtual => &["tsc"][..],
        KvmSupport::Full | KvmSupport::None => &[],
    };
    let failed = all.iter().filter(|finding| finding["verdict"] == "fail");
    let failed: Vec<_> = failed.filter_map(|finding| finding["name"].as_str()).collect();
    assert!(failed.iter().all(|name| may_fail.contains(name)), "{kind}: {report}");
    let found = findings(report, "disk");
    assert_eq!(found.len(), 2, "{kind}: {report}");
    for found in found {
        assert_eq!(found["verdict"], "pass", "{kind}: {found}");
        assert_eq!((&found["mismatches"], &found["errors"]), (&0.into(), &0.into()), "{found}");
    }
}

/// Copies of a disk are the same while its machine is settled, and whole. Then the machine goes on.
fn stands_still(machine: &Machine, disk: &Path, format: &str, random: &mut Noise) {
    sleep(Duration::from_micros(random.below(LONGEST)));
    let mut client = connect(&machine.control()).expect("control");
    for _ in 0..2 {
        client.ask(&Command::Settle).expect("it settles");
    }
    assert_eq!(client.ask(&Command::Status).expect("its state")["state"], "paused");
    let refused = client.ask(&Command::PowerButton).expect_err("no device runs").to_string();
    assert!(refused.starts_with("the machine was saved or settled"), "{refused}");
    let first = fs::read(disk).expect("the disk");
    assert!(format != "qcow2" || is_complete(disk));
    sleep(Duration::from_millis(5));
    assert!(fs::read(disk).expect("the disk") == first, "{format}: it changes");
    client.ask(&Command::Resume).expect("it resumes");
}

pub(crate) fn raw(folder: &Path) -> PathBuf {
    let disk = folder.join("disk");
    File::create(&disk).and_then(|it| it.set_len(SIZE)).expect("a disk");
    disk
}

/// The probe's words for disks that are written and verified, with this many requests each.
fn disk_words(requests: usize, wait: &str) -> String {
    let mut words = String::from("checks=none ");
    for mode in ["write", "verify"] {
        let way = format!("seed=19,depth=32,span=8M,requests={requests},wait={wait}");
        write!(words, "disk={mode},{way} ").expect("a String takes everything");
    }
    words + "then=poweroff"
}

/// Writes and verifies disks, and saves the machine at random moments until it is done.
fn works_through_snapshots(kind: &str, format: &str, wait: &str, random: &mut Noise) {
    let folder = tempfile::tempdir().expect("a folder");
    let disk = if format == "qcow2" { qcow2(folder.path()) } else { raw(folder.path()) };
    let key = folder.path().join("key");
    fs::write(&key, [0xf5; 32]).expect("a key");
    let with_key = format!(",key={}", key.display());
    let device = format!("{kind},path={}", disk.display());
    let wanted = SNAPSHOTS[usize::from(everything())];
    // Long enough for all snapshots: the rest is done without them.
    let words = disk_words(wanted * REQUESTS, wait);
    let mut machine =
        Machine::start(&["--memory", "64M", "--device", &device, "--cmdline", &words]);
    let mut first = None;
    while machine.snapshots < wanted {
        stands_still(&machine, &disk, format, random);
        sleep(Duration::from_micros(random.below(LONGEST)));
        let then = random.choose(&[Then::Resume, Then::Pause, Then::Sleep, Then::Quit, Then::Quit]);
        let (key, with_key) = match random.below(3) {
            0 if then != Then::Sleep => (Some(&*key), &*with_key),
            _ => (None, ""),
        };
        let dir = machine.save_with_key(then, key).unwrap_or_else(|error| {
            panic!("{kind}, snapshot {}: {error:#}: {}", machine.snapshots, machine.output())
        });
        match then {
            // The next must be as good after this one.
            Then::Resume => {}
            Then::Pause => {
                assert!(format != "qcow2" || is_complete(&disk), "{kind}");
                let mut client = connect(&machine.control()).expect("control");
                client.ask(&Command::Resume).expect("it resumes");
            }
            Then::Sleep if random.below(2) == 0 => {
                assert_eq!(machine.status()["state"], "asleep", "{kind}");
                // Its snapshot is of no use from now on.
                fs::remove_dir_all(&dir).expect("a machine that has its snapshot open");
                let mut client = connect(&machine.control()).expect("control");
                client.ask(&Command::Resume).expect("it wakes");
            }
            Then::Sleep => {
                machine.running.signal(Signal::KILL).expect("a signal");
                machine.running.wait(PATIENCE).expect("an end");
                machine.restore(&dir, &[], "");
            }
            Then::Quit => {
                first.get_or_insert_with(|| (dir.clone(), with_key.to_owned()));
                assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
                assert!(format != "qcow2" || is_complete(&disk), "{kind}");
                let how = random.choose(&HOW);
                machine.restore(&dir, &[], &format!("{how}{with_key}"));
            }
        }
    }
    let ended = machine.running.wait(PATIENCE).expect("an end");
    let output = machine.output();
    assert_eq!(ended, 0, "{kind}: {output}{}", machine.running.stderr.text());
    disks_are_sound(kind, &report(&output).expect("a report"));
    // It has written since, so that no earlier snapshot fits.
    if let Some((first, with_key)) = first {
        let error = refused_with(&first, &with_key, &[]);
        assert!(error.contains("has another size or time"), "{error}");
    }
}

#[test]
fn disks_keep_every_byte_through_snapshots_at_any_moment() {
    if !runs_here("disks_keep_every_byte_through_snapshots_at_any_moment") {
        return;
    }
    let mut random = Noise::new(19);
    for wait in ["poll", "interrupt"] {
        for kind in ["virtio-blk", "nvme", "ahci-disk"] {
            works_through_snapshots(kind, "raw", wait, &mut random);
        }
    }
    for kind in ["virtio-blk", "nvme"] {
        works_through_snapshots(kind, "qcow2", "interrupt", &mut random);
    }
}

/// A machine that is saved at its end, where it halts: its memory and its disk.
fn saved(folder: &Path, then: Then) -> Machine {
    saved_with(&raw(folder), then)
}

fn saved_with(disk: &Path, then: Then) -> Machine {
    saved_by(&[], disk, then)
}

fn saved_by(words: &[&str], disk: &Path, then: Then) -> Machine {
    let disk = format!("nvme,path={}", disk.display());
    let guest = ["--memory", "64M", "--cmdline", "checks=none then=halt"];
    let devices = ["--display", "640x480", "--device", &disk];
    let mut machine = Machine::start(&[words, &guest, &devices].concat());
    machine.running.says("\"probe\"", 1).expect("a report");
    machine.save(then).expect("a snapshot");
    machine
}

fn refused(dir: &Path, words: &[&str]) -> String {
    refused_with(dir, "", words)
}

fn refused_with(dir: &Path, how: &str, words: &[&str]) -> String {
    // Before its guest runs, which has one line, the reason.
    let from = format!(".,check=first{how}");
    let words = [&["run", "--restore", &from], words].concat();
    let Ended { status, stderr, .. } = run_in(dir, &words).expect("vmm");
    assert_eq!(status, 66, "{words:?}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{words:?}: {stderr}");
    stderr
}

#[test]
fn a_snapshot_that_does_not_fit_is_refused_in_a_sentence() {
    if !runs_here("a_snapshot_that_does_not_fit_is_refused_in_a_sentence") {
        return;
    }
    let disks = tempfile::tempdir().expect("a folder");
    let mut machine = saved(disks.path(), Then::Quit);
    assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
    let dir = machine.folder.path().join("0");
    let disk = disks.path().join("disk");
    let device = format!("nvme,path={}", disk.display());
    for (words, said) in [
        (["--cpus", "2"], "--cpus 1"),
        (["--memory", "128M"], "--memory 64M"),
        (["--display", "none"], "`display`"),
        (["--device", "edu"], "`nvme`"),
        (["--device", &format!("{device},slot=07.0")], "differs from the snapshot's"),
    ] {
        let error = refused(&dir, &words);
        assert!(error.contains(said), "{words:?}: {error}");
    }
    // Its files, damaged one after the other, and mended again.
    let (state, memory) = (dir.join("machine.json"), dir.join("memory"));
    let text = fs::read(&state).expect("its state");
    for (new, said) in [
        (&b"{}\n{}"[..], "first line is damaged"),
        (b"", "first line is damaged"),
        (br#"{"format":9,"vmm":"7.1","bytes":0,"crc32":0}"#, "first line"),
        (b"{\"format\":9,\"vmm\":\"7.1\",\"bytes\":0,\"crc32\":0}\n", "with vmm 7.1"),
        (&text[..text.len() - 1], "checksum"),
        (&[&text[..text.len() - 9], b"123456789"].concat(), "checksum"),
    ] {
        fs::write(&state, new).expect("a damaged file");
        let error = refused(&dir, &[]);
        assert!(error.contains(said), "{said}: {error}");
    }
    fs::remove_file(&state).expect("it is removed");
    assert!(refused(&dir, &[]).contains("no complete snapshot"));
    fs::write(&state, &text).expect("it is whole again");
    let file = File::options().read(true).write(true).open(&memory).expect("memory");
    let mut page = [0; 64];
    file.read_exact_at(&mut page, 0x10_0000).expect("memory");
    file.write_all_at(&page.map(|byte| !byte), 0x10_0000).expect("memory");
    assert!(refused(&dir, &[]).contains("damaged between"));
    file.write_all_at(&page, 0x10_0000).expect("memory");
    let length = file.metadata().expect("memory").len();
    file.set_len(length - 1).expect("memory");
    assert!(refused(&dir, &[]).contains("bytes, and the machine has"));
    file.set_len(length).expect("memory");
    // A disk that was written since.
    let times = fs::metadata(&disk).and_then(|it| it.modified()).expect("a time");
    let file = File::options().write(true).open(&disk).expect("the disk");
    file.write_all_at(b"other", 5 << 20).expect("a byte");
    assert!(refused(&dir, &[]).contains("the file of `nvme` has another size or time"));
    file.set_modified(times).expect("a time");
    drop(file);
    // Whole again, it runs.
    machine.restore(&dir, &[], "");
    assert_eq!(machine.status()["state"], "running", "{}", machine.running.stderr.text());
}

/// After a loss of power, a disk can have writes without the time of the last change.
#[test]
fn a_snapshot_does_not_fit_once_its_machine_goes_on_even_if_it_writes_nothing() {
    let test = "a_snapshot_does_not_fit_once_its_machine_goes_on_even_if_it_writes_nothing";
    if !runs_here(test) {
        return;
    }
    let disks = tempfile::tempdir().expect("a folder");
    // The disk belongs to another user than the machine, as in a container.
    let is_root = rustix::process::geteuid().is_root();
    let user: &[&str] = if is_root { &["--jail", "on,user=10001"] } else { &[] };
    for (then, how) in [
        (Then::Resume, ""),
        (Then::Pause, ""),
        (Then::Sleep, ""),
        (Then::Quit, ""),
        (Then::Quit, ",check=first"),
        (Then::Quit, ",paused"),
    ] {
        let mut machine = saved_by(user, &raw(disks.path()), then);
        let dir = machine.folder.path().join("0");
        if then == Then::Quit {
            assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
            machine.restore(&dir, user, how);
        }
        let mut client = connect(&machine.control()).expect("control");
        client.ask(&Command::Resume).expect("it goes on");
        let open = || Ok(machine.status()["writes_wait"] == false);
        until("its writes wait", open).expect("memory that is checked");
        client.ask(&Command::Quit).expect("it quits");
        machine.running.wait(PATIENCE).expect("an end");
        let error = refused(&dir, &[]);
        assert!(error.contains("`nvme` has another size or time of change"), "{error}");
    }
}

#[test]
fn an_encrypted_snapshot_is_of_use_only_with_its_key() {
    if !runs_here("an_encrypted_snapshot_is_of_use_only_with_its_key") {
        return;
    }
    let disks = tempfile::tempdir().expect("a folder");
    let new = |name: &str, contents: &[u8]| {
        fs::write(disks.path().join(name), contents).expect("a key");
        disks.path().join(name)
    };
    let other = new("other", &[0xf8; 32]);
    let with = |key: &Path| format!(",key={}", key.display());
    for key in [new("key", &[0xf7; 32]), new("passphrase", b"correct horse battery staple\n")] {
        let mut machine = saved(disks.path(), Then::Resume);
        let plain = machine.folder.path().join("0");
        let asleep = machine.save_with_key(Then::Sleep, Some(&key)).expect_err("it cannot sleep");
        assert!(asleep.to_string().contains("leave `key` out"), "{asleep:#}");
        // Never silently without encryption.
        let file = File::open("/dev/null").expect("a file");
        for (key, files) in [(Some(key.clone()), 2), (None, 3)] {
            let command = Command::Snapshot { dir: "1".into(), then: None, within: None, key };
            let mut client = connect(&machine.control()).expect("control");
            let refused = client.ask_with(&command, &vec![file.as_fd(); files]);
            let refused = format!("{:#}", refused.expect_err("another number of files"));
            assert!(refused.contains("two open files, and with `key` a third"), "{refused}");
        }
        let dir = machine.save_with_key(Then::Quit, Some(&key)).expect("a snapshot");
        assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
        // The guest's command line in its memory, and a part of the state.
        for (name, words) in [("memory", &b"then=halt"[..]), ("machine.json", b"\"cpuid\"")] {
            for (dir, is_there) in [(&plain, true), (&dir, false)] {
                let bytes = fs::read(dir.join(name)).expect("a file");
                let found = bytes.windows(words.len()).any(|it| it == words);
                assert_eq!(found, is_there, "{name}");
            }
        }
        let blocks = |dir: &Path| fs::metadata(dir.join("memory")).expect("memory").blocks();
        assert!(blocks(&dir) <= blocks(&plain) + blocks(&plain) / 4, "it has no holes");
        for (dir, how, said) in [
            (&dir, "", "it is encrypted: add `,key=FILE`"),
            (&dir, &*with(&other), "machine.json: it is damaged, or the key is another one"),
            (&dir, &*with(&disks.path().join("none")), "No such file"),
            (&dir, &*with(&new("short", b"secret\n")), "it has 6 bytes: give a key of 32"),
            (&plain, &*with(&key), "it is not encrypted, so anybody may have changed it"),
        ] {
            let error = refused_with(dir, how, &[]);
            assert!(error.contains(said), "{said}: {error}");
        }
        let memory = File::options().read(true).write(true).open(dir.join("memory"));
        let memory = memory.expect("memory");
        let mut byte = [0];
        memory.read_exact_at(&mut byte, 0x10_0000).expect("memory");
        memory.write_all_at(&byte.map(|it| !it), 0x10_0000).expect("memory");
        let error = refused_with(&dir, &with(&key), &[]);
        assert!(error.contains("damaged between the bytes 1048576 and 2097152"), "{error}");
        memory.write_all_at(&byte, 0x10_0000).expect("memory");
        machine.restore(&dir, &[], &with(&key));
        assert_eq!(machine.status()["state"], "running", "{}", machine.running.stderr.text());
        // It can be saved again, without the key.
        machine.save(Then::Quit).expect("a snapshot");
    }
}

#[test]
fn a_machine_that_cannot_be_saved_goes_on() {
    if !runs_here("a_machine_that_cannot_be_saved_goes_on") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    File::create(path("raw")).and_then(|it| it.set_len(SIZE)).expect("a disk");
    let device = format!("nvme,path={},overlay=on", path("raw").display());
    let words = ["--memory", "64M", "--device", &device, "--cmdline", "checks=none then=halt"];
    let reason = "nvme: with `overlay=on` its writes are in no file";
    let mut machine = Machine::start(&words);
    machine.running.says("\"probe\"", 1).expect("a report");
    let error = machine.save(Then::Quit).expect_err(reason).to_string();
    assert!(error.contains(reason), "{error}");
    assert!(!machine.folder.path().join("0").exists(), "the rest of a snapshot that failed");
    assert_eq!(machine.status()["state"], "running");
}

#[test]
fn a_snapshot_that_takes_too_long_is_given_up_and_a_paused_one_waits() {
    if !runs_here("a_snapshot_that_takes_too_long_is_given_up_and_a_paused_one_waits") {
        return;
    }
    let mut machine = Machine::start(&["--memory", "64M", "--cmdline", "checks=none then=triple"]);
    machine.running.says("transom probe", 2).expect("resets");
    let dir = machine.folder.path().join("0");
    let mut client = connect(&machine.control()).expect("control");
    let late = save(&mut client, &dir, Then::Quit, Some(0)).expect_err("no time");
    assert!(late.to_string().contains("not complete after 0 s"), "{late:#}");
    assert!(!dir.exists(), "the rest of a snapshot that was given up");
    let resets = machine.running.stdout.text().matches("transom probe").count();
    machine.running.says("transom probe", resets + 2).expect("it continues");
    let dir = machine.save(Then::Quit).expect("a snapshot");
    assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
    machine.restore(&dir, &[], ",paused");
    assert_eq!(machine.status()["state"], "paused");
    sleep(Duration::from_millis(200));
    assert_eq!(machine.running.stdout.text(), "", "it runs before `resume`");
    fs::remove_dir_all(&dir).expect("a machine that has its snapshot open");
    connect(&machine.control()).expect("control").ask(&Command::Resume).expect("it resumes");
    machine.running.says("transom probe", 2).expect("it continues");
}

#[test]
fn a_qcow2_image_fits_until_it_or_its_base_is_written() {
    if !runs_here("a_qcow2_image_fits_until_it_or_its_base_is_written") {
        return;
    }
    let disks = tempfile::tempdir().expect("a folder");
    let image = qcow2(disks.path());
    let mut machine = saved_with(&image, Then::Quit);
    assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
    let dir = machine.folder.path().join("0");
    // Machines that do not go on.
    for _ in 0..2 {
        machine.restore(&dir, &[], ",paused");
        assert_eq!(machine.status()["state"], "paused", "{}", machine.running.stderr.text());
        let mut client = connect(&machine.control()).expect("control");
        client.ask(&Command::Quit).expect("it quits");
        assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
        assert!(is_complete(&image));
    }
    for (name, said) in [("disk.qcow2", "`nvme` has"), ("base", "`nvme, backing file 1` has")] {
        let file = File::options().write(true).open(disks.path().join(name)).expect("a file");
        let before = file.metadata().and_then(|it| it.modified()).expect("a time");
        file.set_modified(before + Duration::from_nanos(1)).expect("a time");
        let error = refused(&dir, &[]);
        assert!(error.contains(said), "{error}");
        file.set_modified(before).expect("a time");
    }
}

#[test]
fn a_copy_gets_a_generation_of_its_own_and_a_suspended_machine_keeps_it() {
    if !runs_here("a_copy_gets_a_generation_of_its_own_and_a_suspended_machine_keeps_it") {
        return;
    }
    let disks = tempfile::tempdir().expect("a folder");
    for (then, same) in [(Then::Pause, false), (Then::Quit, true)] {
        let mut machine = saved(disks.path(), then);
        let dir = machine.folder.path().join("0");
        let text = fs::read_to_string(dir.join("machine.json")).expect("its state");
        let state = text.lines().nth(1).expect("a second line");
        let id = serde_json::from_str::<Value>(state).expect("JSON")["generation"].clone();
        if then == Then::Pause {
            let mut client = connect(&machine.control()).expect("control");
            // A second snapshot does not let the devices go on.
            machine.save(Then::Resume).expect("another snapshot");
            for command in [Command::Nmi, Command::PowerButton] {
                let error = client.ask(&command).expect_err("the devices are parked").to_string();
                assert!(error.contains("resume it first"), "{error}");
            }
            client.ask(&Command::Quit).expect("it quits");
        }
        machine.running.wait(PATIENCE).expect("an end");
        // Its disk was moved meanwhile.
        let (old, new) = (disks.path().join("disk"), disks.path().join("moved"));
        fs::rename(old, &new).expect("another name");
        machine.restore(&dir, &["--device", &format!("nvme,path={}", new.display())], "");
        let now = machine.status()["vmgenid"].clone();
        assert_eq!(now == id, same, "{then:?}: {id} and {now}");
    }
}
