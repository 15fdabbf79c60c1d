//! The screen of a machine: a client connects, sees a complete picture, and leaves nothing behind.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use transom_tests::print::{PAGES, Picture, find};
use transom_tests::program::{IDLE, PATIENCE, Running, connect};
use vmm::control::{Client, Command};

use crate::runs_here;

/// A viewer with RFB 3.8 and Raw.
struct Viewer {
    line: UnixStream,
    width: u16,
    height: u16,
}

impl Viewer {
    fn new(path: &Path) -> Self {
        let mut line = UnixStream::connect(path).expect("the screen");
        line.set_read_timeout(Some(PATIENCE)).expect("a time-out");
        assert_eq!(&read::<12>(&mut line), b"RFB 003.008\n");
        line.write_all(b"RFB 003.008\n").expect("room");
        assert_eq!(read(&mut line), [1, 1], "a Unix socket needs no password");
        line.write_all(&[1]).expect("room");
        assert_eq!(read(&mut line), [0; 4]);
        line.write_all(&[1]).expect("room");
        let (width, height) = (read(&mut line), read(&mut line));
        let (width, height) = (u16::from_be_bytes(width), u16::from_be_bytes(height));
        read::<16>(&mut line);
        let name = u32::from_be_bytes(read(&mut line));
        let mut name = vec![0; usize::try_from(name).expect("a name")];
        line.read_exact(&mut name).expect("a name");
        assert_eq!(name, b"a probe");
        Self { line, width, height }
    }

    /// Requests the picture, or its changes.
    fn ask(&mut self, incremental: bool) {
        let mut ask = vec![3, incremental.into(), 0, 0, 0, 0];
        ask.extend(self.width.to_be_bytes());
        ask.extend(self.height.to_be_bytes());
        self.line.write_all(&ask).expect("room");
    }

    /// Counts the bytes that arrive within a time.
    fn silence(&mut self, time: Duration) -> usize {
        thread::sleep(time);
        self.line.set_nonblocking(true).expect("a mode");
        let (mut all, mut bytes) = (0, vec![0; 1 << 16]);
        while let Ok(count) = self.line.read(&mut bytes) {
            assert!(count > 0, "the screen is gone");
            all += count;
        }
        self.line.set_nonblocking(false).expect("a mode");
        all
    }

    /// Requests the whole picture, and counts the pixels that arrive.
    fn look(&mut self) -> usize {
        self.ask(false);
        let [kind, _, count @ ..] = read::<4>(&mut self.line);
        assert_eq!(kind, 0, "an update");
        let mut pixels = 0;
        for _ in 0..u16::from_be_bytes(count) {
            let head = read::<12>(&mut self.line);
            assert_eq!(head[8..], [0; 4], "Raw");
            let side = |at: usize| usize::from(u16::from_be_bytes([head[at], head[at + 1]]));
            let count = side(4) * side(6);
            let mut data = vec![0; 4 * count];
            self.line.read_exact(&mut data).expect("pixels");
            pixels += count;
        }
        pixels
    }
}

fn read<const N: usize>(line: &mut UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    line.read_exact(&mut bytes).expect("the server's bytes");
    bytes
}

fn viewers(control: &mut Client) -> Vec<Value> {
    let status = control.ask(&Command::Status).expect("a status");
    status["viewers"].as_array().cloned().expect("a list")
}

/// The number of a process's threads whose names begin with `name`.
fn threads(machine: &Running, name: &str) -> usize {
    let folder = format!("/proc/{}/task", machine.pid().as_raw_nonzero());
    let tasks = fs::read_dir(folder).expect("the process").flatten();
    let names = tasks.map(|task| fs::read_to_string(task.path().join("comm")).unwrap_or_default());
    names.filter(|it| it.starts_with(name)).count()
}

/// The line of the probe's page with this label.
fn line(control: &mut Client, label: &str) -> String {
    let Ok((picture, pixels)) = control.screenshot() else { return String::new() };
    let width = usize::try_from(picture.width).expect("a width");
    let lines = Picture { width, pixels }.all(PAGES[0].2);
    find(&lines, label).map(str::to_owned).unwrap_or_default()
}

/// The value of `--vnc` for a screen at this path.
fn served(screen: &Path) -> String {
    format!("unix:{},name=a probe", screen.display())
}

/// Starts a probe with its screen at this path, and its control socket in the same folder.
fn start(screen: &Path) -> (Running, Client) {
    let control = screen.with_file_name("control");
    let (vnc, path) = (served(screen), control.display().to_string());
    let words = ["run", "--control", &path, "--vnc", &vnc, "--cmdline", "then=halt"];
    let machine = Running::vmm(&words).expect("vmm");
    (machine, connect(&control).expect("the control socket"))
}

#[test]
fn two_thousand_keys_in_one_write_arrive_at_a_ps2_keyboard() {
    let test = "two_thousand_keys_in_one_write_arrive_at_a_ps2_keyboard";
    if !runs_here(test) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let screen = folder.path().join("screen");
    let (mut machine, mut control) = start(&screen);
    let wait = |control: &mut Client, label: &str, text: &str| {
        let deadline = Instant::now() + PATIENCE;
        while !line(control, label).contains(text) {
            assert!(Instant::now() < deadline, "{text}: {}", line(control, label));
            thread::sleep(Duration::from_millis(50));
        }
    };
    wait(&mut control, "Keys", "type something");
    let mut viewer = Viewer::new(&screen);
    let lines: Vec<_> = (0..100).map(|line| format!("{line:03} sphinx of quartz")).collect();
    let text = lines.join("\n");
    let keys = text.chars().flat_map(|it| {
        let symbol = if it == '\n' { 0xff0d } else { u32::from(it) }.to_be_bytes();
        [1, 0].map(|down| [[4, down, 0, 0], symbol].concat()).concat()
    });
    viewer.line.write_all(&keys.collect::<Vec<u8>>()).expect("room");
    wait(&mut control, "Text", "099 sphinx of quartz_");
    assert_eq!(text.len(), 2099);
    let typed = line(&mut control, "Text");
    assert!(typed.contains(" 2099 typed"), "{typed}");
    control.ask(&Command::Quit).expect("an answer");
    assert_eq!(machine.wait(PATIENCE).expect("an end"), 0);
}

#[test]
fn a_viewer_gets_a_whole_picture_and_leaves_nothing_behind() {
    let test = "a_viewer_gets_a_whole_picture_and_leaves_nothing_behind";
    if !runs_here(test) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let screen = folder.path().join("screen");
    let (mut machine, mut control) = start(&screen);
    assert!(viewers(&mut control).is_empty());
    let mut viewer = Viewer::new(&screen);
    assert_eq!(viewer.look(), usize::from(viewer.width) * usize::from(viewer.height));
    let shown = viewers(&mut control);
    assert_eq!((shown.len(), &shown[0]["access"]), (1, &Value::from("full")), "{shown:?}");
    // A second machine cannot have the same screen, and the first one continues.
    let other = Running::vmm(&["run", "--vnc", &served(&screen)]);
    let mut other = other.expect("vmm");
    assert_eq!(other.wait(PATIENCE).expect("an end"), 1);
    let said = other.stderr.text();
    assert!(said.contains("in use by another process"), "{said}");
    drop(viewer);
    let deadline = Instant::now() + PATIENCE;
    while !viewers(&mut control).is_empty() {
        assert!(Instant::now() < deadline, "the viewer is still listed");
        thread::sleep(Duration::from_millis(10));
    }
    assert!((1..=8).contains(&threads(&machine, "screen")));
    let _late = Viewer::new(&screen);
    machine.signal(Signal::TERM).expect("a signal");
    let start = Instant::now();
    assert_eq!(machine.wait(PATIENCE).expect("an end"), 128 + 15);
    assert!(start.elapsed() < Duration::from_secs(5), "viewers do not hold up the end");
    assert!(!screen.exists(), "the socket's file must be removed");
}

#[test]
fn a_machine_without_a_screen_has_no_threads_for_it() {
    if !runs_here("a_machine_without_a_screen_has_no_threads_for_it") {
        return;
    }
    let mut machine = Running::vmm(&["run", "--cmdline", "then=halt"]).expect("vmm");
    machine.says("transom probe", 1).expect("a probe");
    assert_eq!(threads(&machine, "screen"), 0);
}

#[test]
fn a_still_screen_costs_no_traffic_and_little_time() {
    if !runs_here("a_still_screen_costs_no_traffic_and_little_time") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let screen = folder.path().join("screen");
    let vnc = served(&screen);
    let mut machine = Running::vmm(&["run", "--vnc", &vnc, "--cmdline", "then=halt"]).expect("vmm");
    machine.says("]}\n", 1).expect("a report");
    let mut viewer = Viewer::new(&screen);
    viewer.look();
    let mut tries = Vec::new();
    // Other load on this host makes some tries worse, and none better. The last drawing may still
    // arrive in several parts, each on request.
    while tries.len() < 8 && !tries.last().is_some_and(is_still) {
        viewer.ask(true);
        let (before, start) = (machine.processor_seconds().expect("its use"), Instant::now());
        let bytes = viewer.silence(Duration::from_secs(5));
        let used = machine.processor_seconds().expect("its use") - before;
        tries.push((bytes, used / start.elapsed().as_secs_f64()));
    }
    eprintln!("bytes, and part of a processor: {tries:?}");
    assert!(tries.last().is_some_and(is_still), "a still screen: {tries:?}");
    let parts = tries.iter().take_while(|(bytes, _)| *bytes > 0).count();
    let silent = tries[parts..].iter().all(|(bytes, _)| *bytes == 0);
    assert!(parts <= 3 && silent, "a still screen: {tries:?}");
}

/// No bytes, and almost no processor time.
fn is_still(&(bytes, used): &(usize, f64)) -> bool {
    bytes == 0 && used < IDLE
}
