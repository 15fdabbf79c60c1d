//! The display with the kernel's help: screenshots have the guest's picture, and changed pages are
//! known.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use transom_tests::program::{PATIENCE, Running, connect, findings, report, run_in};
use vmm::config::Config;
use vmm::control::Command;
use vmm::machine;

use crate::runs_here;

/// The end of the probe's report.
const LAST: &str = "]}\n";

/// The pixel that the probe draws: blue, green, red.
fn drawn(x: usize, y: usize) -> [u8; 3] {
    [x ^ y, y, x].map(|it| it.to_le_bytes()[0])
}

/// Whether all pixels are as the probe draws them.
fn is_drawn(width: usize, pixels: &[u8]) -> bool {
    let (pixels, rest) = pixels.as_chunks::<4>();
    let right = |(at, pixel): (usize, &[u8; 4])| pixel[..3] == drawn(at % width, at / width);
    rest.is_empty() && pixels.iter().enumerate().all(right)
}

#[test]
fn a_screenshot_matches_the_guests_drawing() {
    if !runs_here("a_screenshot_matches_the_guests_drawing") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (socket, file) = (folder.path().join("control"), folder.path().join("out.png"));
    let path = |path: &Path| path.display().to_string();
    let (control, out) = (path(&socket), path(&file));
    let screenshot = ["ctl", "--control", &control, "screenshot", &out];
    for (display, words) in [("1728x1117", "draw=yes"), ("1728x1117", "draw=no"), ("none", "")] {
        let words = format!("then=halt {words}");
        let all = ["run", "--control", &control, "--display", display, "--cmdline", &words];
        let mut machine = Running::vmm(&all).expect("vmm");
        machine.says(LAST, 1).expect("a report");
        let output = machine.stdout.text();
        let report = report(&output).expect("a report");
        let found = findings(&report, "display");
        let mut client = connect(&socket).expect("the control socket");
        let status = client.ask(&Command::Status).expect("an answer");
        let ended = run_in(folder.path(), &screenshot).expect("an end");
        match (display, words.contains("draw=yes")) {
            ("none", _) => {
                assert_eq!(found.len(), 0, "{output}");
                assert!(status["display"].is_null(), "{status}");
                assert!(ended.stderr.contains("no display"), "{}", ended.stderr);
                assert_eq!(ended.status, 1, "{}", ended.stderr);
            }
            (_, false) => {
                assert_eq!(found[0]["verdict"], "pass", "{output}");
                assert!(status["display"]["mode"].is_null(), "{status}");
                assert!(ended.stderr.contains("the display is off"), "{}", ended.stderr);
            }
            (_, true) => {
                assert_eq!((&found[0]["width"], &found[0]["height"]), (&1728.into(), &1117.into()));
                assert_eq!(status["display"]["mode"], "1728x1117");
                let (picture, pixels) = client.screenshot().expect("a picture");
                assert_eq!((picture.width, picture.height), (1728, 1117));
                assert!(is_drawn(1728, &pixels));
                assert_eq!(ended.status, 0, "{}", ended.stderr);
                let png = std::fs::read(&file).expect("a file");
                assert_eq!(png[..4], *b"\x89PNG");
                // IHDR: the size.
                assert_eq!(png[16..24], [0, 0, 6, 192, 0, 0, 4, 93]);
            }
        }
        client.ask(&Command::Quit).expect("an answer");
        assert_eq!(machine.wait(PATIENCE).expect("an end"), 0);
    }
}

#[test]
fn the_kernel_reports_dirty_video_pages() {
    if !runs_here("the_kernel_reports_dirty_video_pages") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let serial = folder.path().join("serial");
    let mut config = Config::default();
    let to = format!("file:{}", serial.display());
    for (key, text) in
        [("display", "1280x800"), ("serial", to.as_str()), ("cmdline", "draw=yes then=halt")]
    {
        config.set(key, text).expect("an option");
    }
    let built = machine::build(config, None, Arc::new(|_| {}), Arc::new(|_| {}));
    let mut machine = built.expect("a machine");
    machine.start().expect("threads");
    machine.prepare().expect("power-on");
    let screen = machine.shared().screens.first().expect("a display");
    let changed = || {
        let mut pages = Vec::new();
        screen.changed(&mut pages);
        let is_set = |page: &usize| pages[page / 64] >> (page % 64) & 1 == 1;
        (0..pages.len() * 64).filter(is_set).collect::<Vec<_>>()
    };
    assert_eq!(changed(), [0; 0], "nothing is drawn yet");
    machine.resume();
    let start = Instant::now();
    while !std::fs::read_to_string(&serial).is_ok_and(|text| text.ends_with(LAST)) {
        assert!(start.elapsed() < PATIENCE, "the probe sends no report");
        std::thread::sleep(Duration::from_millis(10));
    }
    // 1280 by 800 pixels of 4 bytes, in pages of 4096.
    assert_eq!(changed(), (0..1000).collect::<Vec<_>>());
    assert_eq!(changed(), [0; 0], "each page is reported once");
    let mode = screen.mode().expect("a picture");
    let mut pixels = vec![0; (mode.stride * mode.height) as usize];
    screen.read(mode.start, &mut pixels);
    assert!(is_drawn(1280, &pixels));
    machine.pause();
    // A reset unmaps the display's memory. The picture stays, and all pages count as changed.
    machine.prepare().expect("a reset");
    assert_eq!(screen.mode(), None);
    assert_eq!(changed().len(), (64 << 20) / 4096);
    screen.read(mode.start, &mut pixels);
    assert!(is_drawn(1280, &pixels));
    machine.park();
}
