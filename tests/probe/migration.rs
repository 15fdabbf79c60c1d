//! A running machine moves to another process, and back.

use std::cell::Cell;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use host::testutil::noise::Noise;
use rustix::process::Signal;
use serde_json::Value;
use transom_tests::image::check;
use transom_tests::lab::everything;
use transom_tests::program::{PATIENCE, Running, connect, findings, report};
use vmm::control::Command;
use vmm::migration::stream::{Message, Reader, Writer};

use crate::runs_here;
use crate::snapshot::{SIZE, disks_are_sound, qcow2};

/// The moves of each machine, and with `TRANSOM_TESTS=all`.
const MOVES: [usize; 2] = [4, 30];
/// The cuts of the connection, and with `TRANSOM_TESTS=all`.
const CUTS: [usize; 2] = [12, 200];
/// The longest time between two moves, in microseconds.
const LONGEST: u64 = 30_000;
/// The bytes that a connection of 1 Gbit/s transfers in a second.
const GIGABIT: u64 = 1_000_000_000 / 8;
/// The exit status of a machine that has moved.
pub(crate) const MOVED: i32 = 79;

/// A machine that has been in several processes.
pub(crate) struct Traveller {
    folder: tempfile::TempDir,
    pub(crate) running: Running,
    /// Its output in earlier processes.
    before: String,
    /// The number of the process in which it runs, and of the last that was started.
    number: usize,
    last: Cell<usize>,
}

/// A process that waits for a machine.
pub(crate) struct Waiting {
    pub(crate) running: Running,
    pub(crate) number: usize,
    pub(crate) socket: PathBuf,
}

impl Waiting {
    /// Ends without a machine. If the connection was cut in the first message, it waits for
    /// another one until then.
    pub(crate) fn end(&mut self) -> String {
        self.running.signal(Signal::TERM).ok();
        let status = self.running.wait(PATIENCE).expect("the other end ends");
        let said = self.running.stderr.text();
        assert!([1, 143].contains(&status), "{status}: {said}");
        said
    }
}

impl Traveller {
    pub(crate) fn start(words: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let control = folder.path().join("control0").display().to_string();
        let running = Running::vmm(&[&["run", "--control", &control], words].concat());
        let running = running.expect("vmm");
        let traveller =
            Self { folder, running, before: String::new(), number: 0, last: Cell::new(0) };
        assert!(traveller.status().is_some(), "{}", traveller.running.stderr.text());
        traveller
    }

    pub(crate) fn path(&self, name: &str, number: usize) -> PathBuf {
        self.folder.path().join(format!("{name}{number}"))
    }

    fn ask(&self, command: &Command) -> anyhow::Result<Value> {
        connect(&self.path("control", self.number))?.ask(command)
    }

    fn status(&self) -> Option<Value> {
        self.ask(&Command::Status).ok()
    }

    /// The other end, which waits for the machine.
    pub(crate) fn other_end(&self, words: &[&str]) -> Waiting {
        let number = self.last.get() + 1;
        self.last.set(number);
        let (socket, control) = (self.path("in", number), self.path("control", number));
        let [incoming, control] = [&socket, &control].map(|it| it.display().to_string());
        let words = [&["run", "--incoming", &incoming, "--control", &control], words].concat();
        let running = Running::vmm(&words).expect("vmm");
        wait_for_socket(&socket);
        Waiting { running, number, socket }
    }

    pub(crate) fn send(&self, to: &Path, pause: Option<u32>) -> anyhow::Result<Value> {
        let stream = UnixStream::connect(to)?;
        let command = Command::Migrate { to: to.to_owned(), pause, within: None };
        let file = std::os::fd::AsFd::as_fd(&stream);
        connect(&self.path("control", self.number))?.ask_with(&command, &[file])
    }

    /// The machine runs there now.
    pub(crate) fn follow(&mut self, there: Waiting) {
        self.before.push_str(&self.running.stdout.text());
        self.running = there.running;
        self.number = there.number;
    }

    /// Moves to another process.
    fn travel(&mut self) -> Value {
        let there = self.other_end(&[]);
        let moved = self.send(&there.socket, None).unwrap_or_else(|error| {
            panic!("{error:#}: {} {}", self.running.stderr.text(), there.running.stderr.text())
        });
        assert_eq!(self.running.wait(PATIENCE).expect("an end"), MOVED);
        self.follow(there);
        moved
    }

    /// Its output in all processes.
    pub(crate) fn output(&self) -> String {
        format!("{}{}", self.before, self.running.stdout.text())
    }

    /// The report, when the guest has powered off.
    fn end(mut self) -> Value {
        let ended = self.running.wait(PATIENCE).expect("an end");
        let output = self.output();
        assert_eq!(ended, 0, "{output}{}", self.running.stderr.text());
        report(&output).expect("a report")
    }
}

/// Waits until it listens there. The connection is dropped before it says anything.
pub(crate) fn wait_for_socket(path: &Path) {
    let end = Instant::now() + PATIENCE;
    while UnixStream::connect(path).is_err() {
        assert!(Instant::now() < end, "nobody listens at {}", path.display());
        sleep(Duration::from_millis(5));
    }
}

/// Words for a machine that writes its disk and verifies it.
fn busy(kind: &str, disk: &Path, requests: usize, wait: &str) -> [String; 6] {
    let mut words = String::from("checks=none ");
    for mode in ["write", "verify"] {
        let way = format!("seed=8,depth=32,span=8M,requests={requests},wait={wait}");
        write!(words, "disk={mode},{way} ").expect("a String takes everything");
    }
    words.push_str("then=poweroff");
    let device = format!("{kind},path={}", disk.display());
    ["--memory", "64M", "--device", &device, "--cmdline", &words].map(str::to_owned)
}

pub(crate) fn new_disk(folder: &Path) -> PathBuf {
    let disk = folder.join("disk");
    File::create(&disk).and_then(|it| it.set_len(SIZE)).expect("a disk");
    disk
}

#[test]
fn disks_keep_every_byte_through_moves_at_any_moment() {
    if !runs_here("disks_keep_every_byte_through_moves_at_any_moment") {
        return;
    }
    let mut random = Noise::new(8);
    let moves = MOVES[usize::from(everything())];
    for (kind, format, wait) in [
        ("virtio-blk", "raw", "interrupt"),
        ("nvme", "raw", "poll"),
        ("ahci-disk", "raw", "interrupt"),
        ("nvme", "qcow2", "interrupt"),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = match format {
            "qcow2" => qcow2(folder.path()),
            _ => new_disk(folder.path()),
        };
        let words = busy(kind, &disk, moves * 8000, wait);
        let mut machine = Traveller::start(&words.each_ref().map(String::as_str));
        for _ in 0..moves {
            sleep(Duration::from_micros(random.below(LONGEST)));
            machine.travel();
        }
        disks_are_sound(kind, &machine.end());
        assert!(format != "qcow2" || check(&disk).expect("a sound image") == 0);
    }
}

#[test]
fn memory_that_is_written_meanwhile_arrives_and_the_pause_is_bounded() {
    if !runs_here("memory_that_is_written_meanwhile_arrives_and_the_pause_is_bounded") {
        return;
    }
    // 40 MiB in a second, over a connection of 1 Gbit/s, which transfers three times as much. With
    // `all`, 80 MiB in a second, in 2 GiB.
    let (memory, load) = if everything() {
        ("2G", "span=1800M,rate=20000,milliseconds=90000")
    } else {
        ("512M", "span=192M,rate=10000,milliseconds=16000")
    };
    let load = format!("checks=none memory={load} then=poweroff");
    let mut machine = Traveller::start(&["--memory", memory, "--cmdline", &load]);
    sleep(Duration::from_millis(if everything() { 8000 } else { 800 }));
    // The load must outlast the move, on a busy host too: one is enough.
    let there = machine.other_end(&[]);
    let relay = Relay::new(&there.socket, i64::MAX, Some(GIGABIT));
    let moved = machine.send(&relay.socket, None).expect("it moves");
    assert_eq!(machine.running.wait(PATIENCE).expect("an end"), MOVED);
    machine.follow(there);
    let pause = moved["pause_ms"].as_f64().expect("a pause");
    let report = machine.end();
    let [found] = &findings(&report, "memory-load")[..] else { panic!("{report}") };
    assert_eq!(found["errors"], 0, "{found}");
    eprintln!("{moved}, {} us for the guest", found["longest_us"]);
    // Another process is built in the pause, which takes longer while this host is busy.
    let most = if everything() { 300.0 } else { 1500.0 };
    assert!(pause < most, "{moved}");
    assert!(found["longest_us"].as_f64() < Some(most * 1e3), "{found}");
}

#[test]
fn a_guest_that_writes_faster_than_the_connection_is_slowed_and_moves() {
    if !runs_here("a_guest_that_writes_faster_than_the_connection_is_slowed_and_moves") {
        return;
    }
    let load = "checks=none memory=span=40M,milliseconds=45000 then=poweroff";
    let mut machine = Traveller::start(&["--memory", "128M", "--cmdline", load]);
    // It is at work when it has used a processor for this time, which may take longer.
    let end = Instant::now() + PATIENCE;
    while machine.running.processor_seconds().expect("its time") < 0.5 {
        assert!(Instant::now() < end, "it does not write");
        sleep(Duration::from_millis(10));
    }
    let there = machine.other_end(&[]);
    // 100 MiB in a second; the guest writes gigabytes.
    let relay = Relay::new(&there.socket, i64::MAX, Some(100 << 20));
    let moved = machine.send(&relay.socket, None).expect("it moves");
    assert_eq!(machine.running.wait(PATIENCE).expect("an end"), MOVED);
    machine.follow(there);
    eprintln!("{moved}");
    assert!(moved["throttle_percent"].as_u64() > Some(0), "{moved}");
    let report = machine.end();
    assert_eq!(findings(&report, "memory-load")[0]["errors"], 0, "{report}");
}

/// A connection that ends after a number of bytes, in both directions together.
struct Relay {
    _folder: tempfile::TempDir,
    socket: PathBuf,
}

impl Relay {
    /// Passes `bytes` on, in both directions together, and not more than `per_second`.
    fn new(to: &Path, bytes: i64, per_second: Option<u64>) -> Self {
        let left = AtomicI64::new(bytes);
        Self::with(to, move |source, there| {
            thread::scope(|scope| {
                scope.spawn(|| pass(there, source, &left, None));
                pass(source, there, &left, per_second);
            });
        })
    }

    /// Connects one client to this socket.
    fn with(to: &Path, body: impl FnOnce(&UnixStream, &UnixStream) + Send + 'static) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("relay");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let to = to.to_owned();
        thread::spawn(move || {
            let Ok((source, _)) = listener.accept() else { return };
            let Ok(there) = UnixStream::connect(to) else { return };
            body(&source, &there);
        });
        Self { _folder: folder, socket }
    }
}

fn cut(one: &UnixStream, other: &UnixStream) {
    for end in [one, other] {
        end.shutdown(Shutdown::Both).ok();
    }
}

fn pass(mut from: &UnixStream, mut to: &UnixStream, left: &AtomicI64, per_second: Option<u64>) {
    let mut buffer = [0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let before = left.fetch_sub(count as i64, Ordering::SeqCst);
        let allowed = usize::try_from(before.clamp(0, count as i64)).unwrap_or(0);
        if to.write_all(&buffer[..allowed]).is_err() || allowed < count {
            break;
        }
        if let Some(rate) = per_second {
            sleep(Duration::from_secs_f64(count as f64 / rate as f64));
        }
    }
    cut(from, to);
}

/// Passes messages on until this one, the first of its kind, and cuts the connection instead. The
/// answer to the state is a `verdict`, and the one after that the `last`.
fn cut_at(to: &Path, kind: &'static str) -> Relay {
    Relay::with(to, move |source, there| {
        let [state_seen, went] = [(); 2].map(|()| AtomicBool::new(false));
        let pass = |mut from: &UnixStream, mut to: &UnixStream| {
            let mut reader = Reader::new(&mut from);
            let mut writer = Writer::new(&mut to).expect("a connection");
            while let Ok(message) = reader.receive() {
                let found = match message {
                    Message::Hello(_) => "hello",
                    Message::Pages { .. } | Message::Zeros { .. } => "pages",
                    Message::Sync => "sync",
                    Message::State(_) => "state",
                    Message::Go => "go",
                    Message::Answer(_) if went.load(Ordering::SeqCst) => "last",
                    Message::Answer(_) if state_seen.load(Ordering::SeqCst) => "verdict",
                    Message::Answer(_) => "answer",
                };
                if found == kind {
                    break;
                }
                state_seen.fetch_or(found == "state", Ordering::SeqCst);
                went.fetch_or(found == "go", Ordering::SeqCst);
                if writer.send(&message).is_err() {
                    break;
                }
            }
            cut(from, to);
        };
        thread::scope(|scope| {
            scope.spawn(|| pass(there, source));
            pass(source, there);
        });
    })
}

#[test]
fn a_connection_that_is_cut_at_any_message_leaves_exactly_one_machine() {
    if !runs_here("a_connection_that_is_cut_at_any_message_leaves_exactly_one_machine") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let disk = new_disk(folder.path());
    let device = format!("nvme,path={}", disk.display());
    let idle = ["--memory", "64M", "--cmdline", "checks=none then=halt"];
    for (with_disk, words) in
        [(true, &[&idle[..], &["--device", &device]].concat()[..]), (false, &idle)]
    {
        let mut machine = Traveller::start(words);
        machine.running.says("\"probe\"", 1).expect("a report");
        for (kind, moves) in [
            ("hello", false),
            ("answer", false),
            ("pages", false),
            ("sync", false),
            ("state", false),
            // The other end has the locks of the disks, or the source's consent is missing.
            ("verdict", with_disk),
            // Without disks, the source cannot know whether its consent has arrived.
            ("go", true),
            ("last", true),
        ] {
            if ["go", "last"].contains(&kind) && !with_disk {
                continue;
            }
            let mut there = machine.other_end(&[]);
            let relay = cut_at(&there.socket, kind);
            let sent = machine.send(&relay.socket, None);
            if moves {
                // The source does not know that it runs there: its supervisor may start it again.
                assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 1, "{kind}");
                machine.follow(there);
            } else {
                let error = sent.expect_err("a cut").to_string();
                assert!(error.starts_with("the machine stays: "), "{kind}: {error}");
                let said = there.end();
                assert!(!said.contains("the machine has arrived"), "{kind}: {said}");
            }
            let status = machine.status().unwrap_or_else(|| panic!("{kind}: no machine"));
            assert_eq!(status["state"], "running", "{kind}");
            assert!(status["migration"].is_null(), "{kind}");
        }
    }
}

#[test]
fn a_picture_that_moves_and_a_guest_that_resets_arrive() {
    if !runs_here("a_picture_that_moves_and_a_guest_that_resets_arrive") {
        return;
    }
    let mut machine =
        Traveller::start(&["--memory", "64M", "--cmdline", "checks=none then=triple"]);
    machine.running.says("transom probe", 2).expect("resets");
    for _ in 0..3 {
        machine.travel();
        machine.running.says("transom probe", 2).expect("resets");
    }
    let words = ["--memory", "64M", "--display", "640x480", "--cmdline", "draw=moving then=halt"];
    let mut machine = Traveller::start(&words);
    machine.running.says("\"probe\"", 1).expect("a report");
    let picture = |machine: &Traveller| {
        let mut client = connect(&machine.path("control", machine.number)).expect("control");
        client.screenshot().expect("a picture").1
    };
    let before = picture(&machine);
    machine.travel();
    let end = Instant::now() + PATIENCE;
    while picture(&machine) == before {
        assert!(Instant::now() < end, "the picture does not move");
        sleep(Duration::from_millis(20));
    }
    machine.ask(&Command::Pause).expect("it pauses");
    let paused = picture(&machine);
    assert!(paused.iter().any(|byte| *byte != 0));
    machine.travel();
    assert!(picture(&machine) == paused, "another picture");
}

#[test]
fn commands_that_change_a_machine_wait_until_it_has_moved() {
    if !runs_here("commands_that_change_a_machine_wait_until_it_has_moved") {
        return;
    }
    let load = "checks=none memory=span=64M,rate=2000,milliseconds=8000 then=poweroff";
    let mut machine = Traveller::start(&["--memory", "128M", "--cmdline", load]);
    sleep(Duration::from_millis(1500));
    let mut there = machine.other_end(&[]);
    let relay = Relay::new(&there.socket, i64::MAX, Some(2 << 20));
    let control = machine.path("control", 0);
    let watch = thread::spawn(move || {
        let mut client = connect(&control).expect("control");
        let end = Instant::now() + PATIENCE;
        loop {
            let status = client.ask(&Command::Status).expect("its state");
            let left = status["migration"]["left_bytes"].as_u64();
            if left.is_some_and(|left| left > 0 && left < 128 << 20) {
                break;
            }
            assert!(Instant::now() < end, "no progress: {status}");
            sleep(Duration::from_millis(5));
        }
        for refused in [Command::Settle, Command::Vmgenid { id: None }] {
            let error = client.ask(&refused).expect_err("it is being moved").to_string();
            assert!(error.starts_with("the machine is being moved"), "{error}");
        }
    });
    // The guest powers off before its memory was sent.
    machine.send(&relay.socket, None).expect_err("it is off");
    watch.join().expect("a watcher");
    assert_eq!(machine.running.wait(PATIENCE).expect("an end"), 0);
    there.end();
    let mut machine = Traveller::start(&["--memory", "64M", "--cmdline", "checks=none then=halt"]);
    machine.running.says("\"probe\"", 1).expect("a report");
    let mut there = machine.other_end(&[]);
    let stream = UnixStream::connect(&there.socket).expect("a socket");
    let file = std::os::fd::AsFd::as_fd(&stream);
    for (pause, within, said) in [(Some(0), None, "without a pause"), (None, Some(0), "after 0 s")]
    {
        let command = Command::Migrate { to: there.socket.clone(), pause, within };
        let asked =
            connect(&machine.path("control", 0)).expect("control").ask_with(&command, &[file]);
        let error = asked.expect_err("it cannot be done").to_string();
        assert!(error.contains(said), "{error}");
    }
    there.end();
}

#[test]
fn a_cut_connection_leaves_exactly_one_machine() {
    if !runs_here("a_cut_connection_leaves_exactly_one_machine") {
        return;
    }
    let mut random = Noise::new(9);
    let cuts = CUTS[usize::from(everything())];
    let folder = tempfile::tempdir().expect("a folder");
    let disk = new_disk(folder.path());
    let words = busy("virtio-blk", &disk, cuts * 12_000, "interrupt");
    let mut machine = Traveller::start(&words.each_ref().map(String::as_str));
    // How many bytes a migration has.
    let there = machine.other_end(&[]);
    let counted = Relay::new(&there.socket, i64::MAX, None);
    let whole = machine.send(&counted.socket, None).expect("it moves")["sent_bytes"].as_i64();
    let whole = whole.expect("a number") + 200_000;
    machine.running.wait(PATIENCE).expect("an end");
    machine.follow(there);
    let (mut stayed, mut moved) = (0, 0);
    for cut in 0..cuts {
        let mut there = machine.other_end(&[]);
        // The last bytes decide, so half of the cuts are there.
        let bytes = match cut % 2 {
            0 => random.below(u64::try_from(whole).expect("a length")) as i64,
            _ => whole - 200_000 + random.below(300_000) as i64,
        };
        let relay = Relay::new(&there.socket, bytes, None);
        let answer = machine.send(&relay.socket, None);
        let here = answer.is_err() && machine.status().is_some_and(|it| it["state"] == "running");
        if here {
            let said = there.end();
            assert!(!said.contains("INFO virtio-blk"), "{said}");
            stayed += 1;
            continue;
        }
        let ended = machine.running.wait(PATIENCE).expect("an end");
        assert_eq!(ended, if answer.is_ok() { MOVED } else { 1 }, "{answer:?}");
        machine.follow(there);
        let status = machine.status().unwrap_or_else(|| panic!("no machine: {answer:?}"));
        assert_eq!(status["state"], "running");
        moved += 1;
    }
    eprintln!("after {cuts} cuts, the machine stayed {stayed} times and moved {moved} times");
    assert!(stayed > 0);
    disks_are_sound("virtio-blk", &machine.end());
}

#[test]
fn a_machine_without_disks_needs_the_sources_consent() {
    if !runs_here("a_machine_without_disks_needs_the_sources_consent") {
        return;
    }
    let words = ["--memory", "64M", "--cmdline", "checks=none then=halt"];
    let mut machine = Traveller::start(&words);
    machine.running.says("\"probe\"", 1).expect("a report");
    machine.travel();
    assert_eq!(machine.status().expect("a machine")["state"], "running");
    // Paused here, paused there.
    machine.ask(&Command::Pause).expect("it pauses");
    machine.travel();
    assert_eq!(machine.status().expect("a machine")["state"], "paused");
    machine.ask(&Command::Resume).expect("it resumes");
    let mut there = machine.other_end(&[]);
    let relay = Relay::new(&there.socket, 250_000, None);
    let error = machine.send(&relay.socket, None).expect_err("a cut").to_string();
    assert!(error.contains("other end"), "{error}");
    assert_eq!(machine.status().expect("a machine")["state"], "running");
    there.end();
    // Cancelled by the operator.
    let mut there = machine.other_end(&[]);
    let relay = Relay::new(&there.socket, i64::MAX, Some(100_000));
    let control = machine.path("control", machine.number);
    let cancel = thread::spawn(move || {
        let end = Instant::now() + PATIENCE;
        loop {
            let mut client = connect(&control).expect("control");
            if client.ask(&Command::MigrateCancel).is_ok() {
                return;
            }
            assert!(Instant::now() < end, "no migration begins");
            sleep(Duration::from_millis(10));
        }
    });
    machine.send(&relay.socket, None).expect_err("it is cancelled");
    cancel.join().expect("it cancels");
    assert_eq!(machine.status().expect("a machine")["state"], "running");
    there.end();
}

#[test]
fn an_end_that_does_not_fit_refuses_the_machine_which_stays() {
    if !runs_here("an_end_that_does_not_fit_refuses_the_machine_which_stays") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let disk = new_disk(folder.path());
    let other = folder.path().join("other");
    File::create(&other).and_then(|it| it.set_len(SIZE)).expect("a disk");
    let (device, other) =
        (format!("nvme,path={}", disk.display()), format!("nvme,path={}", other.display()));
    let words = ["--memory", "64M", "--device", &device, "--cmdline", "checks=none then=halt"];
    let mut machine = Traveller::start(&words);
    machine.running.says("\"probe\"", 1).expect("a report");
    for (words, said) in [
        (["--cpus", "2"], "--cpus 1"),
        (["--memory", "128M"], "other parts"),
        (["--device", "edu"], "`nvme`"),
        (["--device", &other], "is not in use by the machine"),
    ] {
        let mut there = machine.other_end(&words);
        let error = machine.send(&there.socket, None).expect_err("it does not fit").to_string();
        assert!(error.contains(said), "{words:?}: {error}");
        assert_ne!(there.running.wait(PATIENCE).expect("an end"), 0);
        assert!(
            there.running.stderr.text().contains(said),
            "{words:?}: {}",
            there.running.stderr.text()
        );
        assert_eq!(machine.status().expect("a machine")["state"], "running", "{words:?}");
    }
    machine.travel();
    assert_eq!(machine.status().expect("a machine")["state"], "running");
}
