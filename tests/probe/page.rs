//! The probe's page: its content, the time until it appears, and its reaction to a person's input.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use host::input::{Key, Motion};
use transom_tests::print::{PAGES, Picture, Print, find, place, says};
use transom_tests::program::{self, PATIENCE, Running, connect, run_in};
use vmm::config::Config;
use vmm::control::{Client, Command};
use vmm::machine::{self, Machine};

use crate::runs_here;

/// The goal for the time from the start of the program to the page.
const SOON: Duration = Duration::from_secs(2);

fn seen(client: &mut Client) -> Option<Picture> {
    let (picture, pixels) = client.screenshot().ok()?;
    Some(Picture { width: usize::try_from(picture.width).ok()?, pixels })
}

/// Waits for a page that satisfies a condition. Panics with the last page otherwise.
#[track_caller]
fn wait(mut look: impl FnMut() -> Option<Picture>, enough: impl Fn(&Picture) -> bool) -> Picture {
    let (start, mut last) = (Instant::now(), None);
    while start.elapsed() < PATIENCE {
        match look() {
            Some(picture) if enough(&picture) => return picture,
            other => last = other,
        }
        thread::sleep(Duration::from_millis(20));
    }
    let print = |it: &Picture| PAGES.iter().find(|page| page.0.0 == it.width).map(|page| page.2);
    let lines = last.and_then(|it| print(&it).map(|print| it.all(print)));
    panic!("the page did not appear; the last one is {lines:#?}");
}

#[test]
fn the_page_appears_at_once_and_shows_the_findings() {
    if !runs_here("the_page_appears_at_once_and_shows_the_findings") {
        return;
    }
    // The time to build the program does not count.
    program::vmm();
    for ((width, height), title, body) in PAGES {
        let folder = tempfile::tempdir().expect("a folder");
        let place = |name: &str| folder.path().join(name).display().to_string();
        let (control, size) = (place("control"), format!("{width}x{height}"));
        let screen = format!("unix:{}", place("screen"));
        // A machine with a screen keeps running without an option for that.
        let words = ["run", "--control", &control, "--display", &size, "--vnc", &screen];
        let first = |text: &'static str| move |it: &Picture| it.read(title, 1)[0].contains(text);
        // A busy host makes some of them late, but not all.
        let mut took = Vec::new();
        let (mut machine, mut client) = loop {
            let start = Instant::now();
            let machine = Running::vmm(&words).expect("vmm");
            let mut client = connect(control.as_ref()).expect("the control socket");
            wait(|| seen(&mut client), first("Transom probe"));
            took.push(start.elapsed());
            if took.last() < Some(&SOON) {
                break (machine, client);
            }
            assert!(took.len() < 8, "the page took {took:?}");
        };
        // The verdict ends at the right edge, so its letters may begin at any pixel.
        let well = |it: &Picture, x| it.read(Print { x, ..title }, 1)[0].contains("All is well");
        let from = title.x..title.x + title.width();
        wait(|| seen(&mut client), |it| from.clone().any(|x| well(it, x)));
        let picture = wait(|| seen(&mut client), says(body, "Keys", "type something"));
        let lines = picture.all(body);
        for (label, value) in [
            ("TSC", "Hz"),
            ("Processors", "1 of 1 run"),
            ("Test", "samples, 0 errors"),
            ("00:01.0", &format!("Display, {size}, ")),
            ("00:1f.0", "LPC bridge, ICH9"),
            ("Networks", "none"),
            ("Report", "s after the start"),
        ] {
            let found = find(&lines, label);
            assert!(found.is_some_and(|it| it.contains(value)), "{label} {value}: {lines:#?}");
        }
        for key in ["a", "shift-b", "f5", "1"] {
            let ended = run_in(folder.path(), &["ctl", "--control", &control, "key", key]);
            assert_eq!(ended.expect("an end").status, 0, "{key}");
        }
        let typed = wait(|| seen(&mut client), says(body, "Text", "aB1_"));
        let lines = typed.all(body);
        let keys: Vec<_> = find(&lines, "Keys").expect("keys").split_whitespace().collect();
        assert_eq!(keys, ["Keys", "A", "Left", "Shift", "B", "F5", "1"]);
        machine.wait_until_idle().expect("an idle machine");
        client.ask(&Command::Quit).expect("an answer");
        assert_eq!(machine.wait(PATIENCE).expect("an end"), 0);
    }
}

/// The picture of a machine in this process.
fn picture(machine: &Machine) -> Option<Picture> {
    let screen = machine.shared().screens.first()?;
    let mode = screen.mode()?;
    let mut pixels = vec![0; (mode.stride * mode.height) as usize];
    screen.read(mode.start, &mut pixels);
    Some(Picture { width: mode.width as usize, pixels })
}

#[test]
fn the_page_shows_the_pointer_and_the_pressed_keys() {
    if !runs_here("the_page_shows_the_pointer_and_the_pressed_keys") {
        return;
    }
    let mut config = Config::default();
    for (key, text) in [("display", "1280x800"), ("serial", "none"), ("cmdline", "then=halt")] {
        config.set(key, text).expect("an option");
    }
    let built = machine::build(config, None, Arc::new(|_| {}), Arc::new(|_| {}));
    let mut machine = built.expect("a machine");
    machine.start().expect("threads");
    machine.prepare().expect("power-on");
    machine.resume();
    let (_, _, body) = PAGES[0];
    let look = || picture(&machine);
    let untouched = wait(look, says(body, "Mouse", "move it over this page"));
    let motion = |dx, dy, wheel, buttons| {
        let taken = machine.shared().input.motion(Motion { dx, dy, wheel, buttons });
        assert!(taken, "the guest listens to its mouse");
    };
    // From the upper left corner, in more than one packet.
    motion(900, 300, 0, 0);
    motion(0, 0, 2, 0b101);
    wait(look, says(body, "Mouse", "at 900, 300 "));
    let there = wait(look, says(body, "Mouse", "wheel 2"));
    assert_eq!(there.pixel(900, 300), [0; 3], "the border of the arrow");
    assert_eq!(there.pixel(901, 303), [0xff; 3], "and its inside");
    let ground = |button| {
        let (x, y) = place(&there, body, "Mouse", button);
        there.pixel(x, y)
    };
    assert_ne!(ground("Left"), ground("Right"), "a held button stands out");
    assert_eq!(ground("Left"), ground("Middle"));
    // After the pointer has moved away, the page is as before.
    motion(-5000, -5000, 0, 0);
    let gone = wait(look, says(body, "Mouse", "at 0, 0 "));
    for (x, y) in (890..920).flat_map(|x| (290..330).map(move |y| (x, y))) {
        assert_eq!(gone.pixel(x, y), untouched.pixel(x, y), "{x}, {y}");
    }
    // A held key stands out until it is released.
    let key = Key::new(0x1e).expect("the key A");
    assert!(machine.shared().input.key(key, true));
    let held = wait(look, says(body, "Keys", " A"));
    let (x, y) = place(&held, body, "Keys", "A");
    assert!(machine.shared().input.key(key, false));
    wait(look, |it| it.pixel(x, y) != held.pixel(x, y));
    // Also if it is released while the machine is paused.
    assert!(machine.shared().input.key(key, true));
    wait(look, |it| it.pixel(x, y) == held.pixel(x, y));
    machine.pause();
    machine.stand_still().expect("a moment");
    assert!(!machine.shared().input.key(key, false));
    machine.unpark().expect("devices");
    machine.resume();
    assert!(machine.shared().input.motion(Motion { dx: 1, ..Motion::default() }));
    wait(|| picture(&machine), |it| it.pixel(x, y) != held.pixel(x, y));
    machine.pause();
    machine.park();
}
