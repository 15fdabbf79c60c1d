//! Use of the screen: the first picture, keys, the pointer, windows of other sizes, the tools.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use transom_tests::browser::{Browser, Window, decoded};
use transom_tests::print::{PAGES, Picture, find};
use transom_tests::program::{PATIENCE, Running, connect, vmm};
use vmm::control::Command;

use crate::{CONNECTED, album, browser, machine, reads, ready, runs_here};

/// Limit from the start of the program to the picture in the browser.
const SOON: Duration = Duration::from_secs(2);
/// Attempts, because other tests may occupy the host's processors for a while.
const TRIES: u32 = 8;

#[test]
fn the_probe_page_reaches_the_browser_within_two_seconds() -> Result<()> {
    if !runs_here("the_probe_page_reaches_the_browser_within_two_seconds") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    // The time to build the program does not count.
    vmm();
    let control = folder.path().join("control");
    let mut times = Vec::new();
    for _ in 0..TRIES {
        let start = Instant::now();
        let (machine, address) = machine("127.0.0.1:0", &[])?;
        browser.go(&address)?;
        while !shows_title(&mut browser)? {}
        times.push(start.elapsed());
        drop(machine);
        if times.last().is_some_and(|it| *it < SOON) {
            break;
        }
    }
    ensure!(times.iter().any(|it| *it < SOON), "the page appeared only after {times:?}");
    // The browser shows the machine's picture exactly, to the last pixel.
    let place = control.display().to_string();
    let (machine, address) = machine("127.0.0.1:0", &["--control", &place])?;
    browser.go(&address)?;
    ready(&mut browser)?;
    reads(&mut browser, "Keys", "type something")?;
    let (_, shown) = connect(&control)?.screenshot()?;
    let seen = browser.picture(usize::MAX >> 1)?.context("a picture")?;
    let same = shown.chunks(4).zip(seen.pixels.chunks(4)).all(|(a, b)| a[1] == b[1]);
    ensure!(
        same && shown.len() == seen.pixels.len(),
        "the browser's picture differs from the machine's"
    );
    browser.keep(&album(), "probe")?;
    drop(machine);
    Ok(())
}

fn shows_title(browser: &mut Browser) -> Result<bool> {
    let (_, title, _) = PAGES[0];
    // The browser may have left the page in the meantime.
    let picture = browser.picture(title.y + title.line).unwrap_or_default();
    Ok(picture.is_some_and(|it| it.read(title, 1)[0].contains("Transom probe")))
}

/// Moves the mouse to a pixel of the machine's picture.
fn point(browser: &mut Browser, [x, y]: [u32; 2]) -> Result<()> {
    let place = page_position(browser, [x, y])?;
    browser.point(place)
}

/// The position on the page of the middle of a pixel of the machine's picture.
pub(crate) fn page_position(browser: &mut Browser, [x, y]: [u32; 2]) -> Result<[f64; 2]> {
    let script = format!(
        "(() => {{ const canvas = document.querySelector('#screen div canvas'); \
         const it = canvas.getBoundingClientRect(); \
         return [it.x + ({x} + .5) * it.width / canvas.width, \
         it.y + ({y} + .5) * it.height / canvas.height]; }})()"
    );
    let place = browser.value(&script)?;
    Ok([place[0].as_f64().context("a place")?, place[1].as_f64().context("a place")?])
}

/// Waits until the probe reports its pointer at `near`, to the precision of the page's pixels.
pub(crate) fn pointer(browser: &mut Browser, near: [u32; 2]) -> Result<()> {
    let step = browser.value(
        "(() => { const canvas = document.querySelector('#screen div canvas'); \
         return canvas.width / canvas.getBoundingClientRect().width; })()",
    )?;
    let far = step.as_f64().context("a step")? + 1.0;
    let is_near = |line: &str| {
        let numbers = line.split(|it: char| !it.is_ascii_digit()).filter(|it| !it.is_empty());
        let found: Vec<f64> = numbers.take(2).filter_map(|it| it.parse().ok()).collect();
        let pairs = found.iter().zip(near.map(f64::from));
        found.len() == 2 && pairs.into_iter().all(|(a, b)| (a - b).abs() <= far)
    };
    let at = |it: &Picture| find(&it.all(PAGES[0].2), "Mouse").is_some_and(is_near);
    crate::until(browser, at).map(|_| ()).with_context(|| format!("the pointer at {near:?}"))
}

pub(crate) fn type_word(browser: &mut Browser, word: &str) -> Result<()> {
    for letter in word.chars() {
        let code = format!("Key{}", letter.to_ascii_uppercase());
        let number = u32::from(letter.to_ascii_uppercase());
        browser.press(&letter.to_string(), &code, number)?;
    }
    Ok(())
}

#[test]
fn keys_and_pointer_reach_the_machine_in_windows_of_any_size() -> Result<()> {
    if !runs_here("keys_and_pointer_reach_the_machine_in_windows_of_any_size") {
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    let (machine, address) = machine("127.0.0.1:0,name=a probe", &[])?;
    browser.resize(Window::desk(1400, 900))?;
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    browser.until("document.title == 'a probe'")?;
    ready(&mut browser)?;
    type_word(&mut browser, "transom")?;
    reads(&mut browser, "Text", "transom_")?;
    reads(&mut browser, "Keys", " T   R   A   N   S   O   M")?;
    point(&mut browser, [400, 300])?;
    pointer(&mut browser, [400, 300])?;
    // Windows smaller, narrower and larger than the picture, and a tiny one.
    for (width, height) in [(700, 500), (500, 900), (2200, 1400), (320, 240)] {
        browser.resize(Window::desk(width, height))?;
        browser.until(FITS)?;
        let place = [width % 1000 + 100, height % 700 + 50];
        point(&mut browser, place)?;
        pointer(&mut browser, place)?;
    }
    fingers(&mut browser, "")?;
    let rules = browser.events("Log.entryAdded")?;
    let broken: Vec<_> = rules.iter().filter(|it| it["entry"]["source"] == "security").collect();
    ensure!(broken.is_empty(), "the page violates its own security policy: {broken:?}");
    drop(machine);
    Ok(())
}

/// The picture is as large as possible, keeps its aspect ratio, and is not cut off.
pub(crate) const FITS: &str = "(() => {
    const canvas = document.querySelector('#screen div canvas');
    const [it, all] = [canvas, document.querySelector('#screen')]
        .map((it) => it.getBoundingClientRect());
    const inside = it.left >= all.left - 1 && it.right <= all.right + 1
        && it.top >= all.top - 1 && it.bottom <= all.bottom + 1;
    const full = Math.abs(it.width - all.width) < 2 || Math.abs(it.height - all.height) < 2;
    const shape = Math.abs(it.width / it.height - canvas.width / canvas.height) < .02;
    return inside && full && shape;
})()";

pub(crate) fn fingers(browser: &mut Browser, prefix: &str) -> Result<()> {
    for (name, window, at) in [
        ("portrait", Window::phone(375, 667), [900, 200]),
        ("landscape", Window::phone(667, 375), [200, 700]),
    ] {
        browser.resize(window)?;
        browser.until(FITS)?;
        let place = page_position(browser, at)?;
        browser.tap(place)?;
        pointer(browser, at).context(name)?;
        browser.keep(&album(), &format!("{prefix}phone-{name}"))?;
    }
    Ok(())
}

#[test]
fn the_tools_send_keys_and_text_and_change_the_view() -> Result<()> {
    if !runs_here("the_tools_send_keys_and_text_and_change_the_view") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let control = folder.path().join("control");
    let place = control.display().to_string();
    let (machine, address) = machine("127.0.0.1:0", &["--control", &place])?;
    browser.resize(Window::desk(1280, 900))?;
    browser.go(&address)?;
    ready(&mut browser)?;
    browser.click("#cad")?;
    reads(&mut browser, "Keys", "Left Ctrl   Left Alt   Delete")?;
    browser.click("[popovertarget=keys]")?;
    browser.keep(&album(), "keys")?;
    browser.click("#chords button:nth-child(3)")?;
    reads(&mut browser, "Keys", "Left Alt   Tab")?;
    browser.value("document.querySelector('#keys').hidePopover()")?;
    clipboard(&mut browser)?;
    strip(&mut browser)?;
    keyboard_alone(&mut browser)?;
    full_screen(&mut browser)?;
    follows(&mut browser, &control)?;
    drop(machine);
    Ok(())
}

/// The RFB messages that the page sent since the last call; noVNC sends one in each frame.
fn sent(browser: &mut Browser) -> Result<Vec<Vec<u8>>> {
    let frames = browser.events("Network.webSocketFrameSent")?;
    let read = |frame: &Value| {
        let text = frame["response"]["payloadData"].as_str().context("a frame")?;
        decoded(text)
    };
    frames.iter().map(read).collect()
}

fn clipboard(browser: &mut Browser) -> Result<()> {
    browser.click("[popovertarget=clipboard]")?;
    browser.click("#text")?;
    browser.order("Input.insertText", &serde_json::json!({ "text": "Hello, World! #1" }))?;
    browser.keep(&album(), "clipboard")?;
    sent(browser)?;
    browser.click("#type")?;
    reads(browser, "Text", "Hello, World! #1_")?;
    browser.click("[popovertarget=clipboard]")?;
    // The machine has no port for an agent, and the page reports that.
    browser.until(
        "document.querySelector('#paste').disabled && !document.querySelector('#no-port').hidden",
    )?;
    lacking(browser)?;
    paste(browser)
}

/// Puts a text into the text field.
fn fill(browser: &mut Browser, text: &str) -> Result<()> {
    let script = "document.querySelector('#text').value = TEXT; \
                  document.querySelector('#text').dispatchEvent(new Event('input'))";
    browser.value(&script.replace("TEXT", &serde_json::json!(text).to_string())).map(|_| ())
}

/// Characters that the machine's keyboard lacks are listed before anything is typed.
fn lacking(browser: &mut Browser) -> Result<()> {
    fill(browser, "\n1ä2€3한4")?;
    browser.click("#type")?;
    browser.until(
        "document.querySelector('#told').textContent.includes('(us) has no key for: ä € 한')",
    )?;
    browser.keep(&album(), "no-key")?;
    reads(browser, "Text", "Hello, World! #1_")?;
    browser.until("document.querySelector('#type').textContent == 'Type the rest'")?;
    browser.click("#type")?;
    reads(browser, "Text", "1234_")?;
    browser.until(
        "document.querySelector('#toast').textContent == 'Typed 5 characters, without ä € 한.'",
    )
}

/// A long text arrives without a loss.
fn paste(browser: &mut Browser) -> Result<()> {
    let lines: Vec<_> = (0..100).map(|line| format!("{line:03} Sphinx of Quartz")).collect();
    browser.click("[popovertarget=clipboard]")?;
    fill(browser, &format!("\n{}", lines.join("\n")))?;
    browser.click("#type")?;
    reads(browser, "Text", "099 Sphinx of Quartz_")?;
    // The count includes the 16 and 5 characters typed before.
    let lines = browser.picture(usize::MAX >> 1)?.context("a picture")?.all(PAGES[0].2);
    let text = find(&lines, "Text").context("a text")?;
    let count = text.split_whitespace().rev().nth(1).and_then(|it| it.parse::<u32>().ok());
    let before = 16 + 5;
    ensure!(count.is_some_and(|it| (before + 2100..before + 2110).contains(&it)), "{text}");
    fill(browser, "\n#1")?;
    browser.click("[popovertarget=clipboard]")?;
    browser.click("#type")?;
    reads(browser, "Text", "#1_")
}

/// Modifiers of the on-screen keys stay down until they are touched again or the keys close.
fn strip(browser: &mut Browser) -> Result<()> {
    browser.click("#board")?;
    browser.keep(&album(), "on-screen-keys")?;
    browser.value(
        "[...document.querySelectorAll('#strip button')].filter((it) => \
         ['Shift', 'F5'].includes(it.textContent)).forEach((it) => { it.id = it.textContent; })",
    )?;
    browser.click("#Shift")?;
    browser.until("document.querySelector('#Shift').ariaPressed == 'true'")?;
    browser.click("#F5")?;
    reads(browser, "Keys", "Left Shift   F5")?;
    browser.click("#board")?;
    browser.until("document.querySelector('#Shift').ariaPressed == 'false'")?;
    type_word(browser, "x")?;
    reads(browser, "Text", "#1x_")
}

/// All tools can be reached without a mouse, and have a name that can be read aloud.
fn keyboard_alone(browser: &mut Browser) -> Result<()> {
    browser.value("document.querySelector('#cad').focus()")?;
    browser.press("Tab", "Tab", 9)?;
    browser.until("document.activeElement.getAttribute('popovertarget') == 'keys'")?;
    browser.press("Enter", "Enter", 13)?;
    browser.until("document.querySelector('#keys').matches(':popover-open')")?;
    browser.press("Escape", "Escape", 27)?;
    browser.until("!document.querySelector('#keys').matches(':popover-open')")?;
    let nameless = browser.value(
        "[...document.querySelectorAll('button, input, textarea')].filter((it) => \
         !(it.ariaLabel || it.textContent.trim() || it.labels?.length)).length",
    )?;
    ensure!(nameless == 0, "{nameless} controls have no name that can be read aloud");
    Ok(())
}

fn full_screen(browser: &mut Browser) -> Result<()> {
    browser.click("#full")?;
    browser.until("document.fullscreenElement != null")?;
    browser.until(FITS)?;
    browser.until("document.querySelector('#bar').offsetParent == null")?;
    browser.keep(&album(), "full-screen")?;
    browser.click("#handle")?;
    browser.click("#full")?;
    browser.until("document.fullscreenElement == null")
}

/// The machine's monitor takes the size of the window when the machine next asks for it.
fn follows(browser: &mut Browser, control: &Path) -> Result<()> {
    browser.resize(Window::desk(1024, 800))?;
    browser.click("[popovertarget=view]")?;
    browser.keep(&album(), "view")?;
    // This display takes a size when it starts, so its picture is fitted at first.
    browser.until("document.querySelector('input[value=fit]').checked")?;
    browser.until("document.querySelector('#later').offsetParent != null")?;
    browser.click("input[value=follow]")?;
    browser.value("document.querySelector('#view').hidePopover()")?;
    let size = requested_size(browser)?;
    machine_takes(browser, control, size)?;
    browser.until(FITS)
}

/// Waits until the page's last request is for a display as large as its window; returns the size.
fn requested_size(browser: &mut Browser) -> Result<[u16; 2]> {
    let screen = browser.value(
        "(({ clientWidth, clientHeight }) => [clientWidth, clientHeight])\
         (document.querySelector('#screen'))",
    )?;
    let side = |index: usize| Ok(u16::try_from(screen[index].as_u64().context("a side")?)?);
    let wanted: Result<Vec<u16>> = [0, 1].into_iter().map(side).collect();
    let wanted = wanted?;
    let deadline = Instant::now() + PATIENCE;
    let mut last = None;
    while last != Some([wanted[0], wanted[1]]) {
        ensure!(Instant::now() < deadline, "no request for {wanted:?}, the last was {last:?}");
        for frame in sent(browser)? {
            // SetDesktopSize: kind, padding, width, height.
            if let [251, _, a, b, c, d, ..] = frame[..] {
                last = Some([[a, b], [c, d]].map(u16::from_be_bytes));
            }
        }
        thread::sleep(Duration::from_millis(20));
    }
    Ok([wanted[0], wanted[1]])
}

/// Waits until the machine has the size that the page requested; it takes the size when it starts.
fn machine_takes(browser: &mut Browser, control: &Path, [width, height]: [u16; 2]) -> Result<()> {
    let taken = format!(
        "(() => {{ const it = document.querySelector('#screen div canvas'); \
         return it.width == {width} && Math.abs(it.height - {height}) < 8; }})()"
    );
    let deadline = Instant::now() + PATIENCE;
    let mut pause = Duration::from_secs(3);
    while browser.value(&taken)? != true {
        ensure!(Instant::now() < deadline, "no display of {width}x{height}");
        connect(control)?.ask(&Command::Reset)?;
        // The request may have arrived just after the reset.
        let again = Instant::now() + pause;
        while Instant::now() < again && browser.value(&taken)? != true {
            thread::sleep(Duration::from_millis(20));
        }
        pause *= 2;
    }
    Ok(())
}

#[test]
fn the_machine_follows_gradual_and_sudden_window_resizes() -> Result<()> {
    if !runs_here("the_machine_follows_gradual_and_sudden_window_resizes") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let control = folder.path().join("control");
    let place = control.display().to_string();
    let (machine, address) = machine("127.0.0.1:0", &["--control", &place])?;
    browser.resize(Window::desk(1280, 900))?;
    browser.go(&address)?;
    ready(&mut browser)?;
    browser.value("document.querySelector('input[value=follow]').click()")?;
    for (width, height) in [(1024, 800), (1120, 700), (960, 720)] {
        browser.resize(Window::desk(width, height))?;
        requested_size(&mut browser)?;
    }
    let size = requested_size_at_once(&mut browser, &machine)?;
    machine_takes(&mut browser, &control, size)?;
    // Once more, now that the machine has taken a size.
    let size = requested_size_at_once(&mut browser, &machine)?;
    machine_takes(&mut browser, &control, size)
}

#[test]
fn a_display_of_virtio_follows_the_window_by_default() -> Result<()> {
    if !runs_here("a_display_of_virtio_follows_the_window_by_default") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let control = folder.path().join("control");
    let place = control.display().to_string();
    let words = ["--control", &place, "--display", "adapter=virtio"];
    let (_machine, address) = machine("127.0.0.1:0", &words)?;
    browser.resize(Window::desk(1010, 800))?;
    browser.go(&address)?;
    ready(&mut browser)?;
    browser.until("document.querySelector('input[value=follow]').checked")?;
    browser.until("document.querySelector('#later').hidden")?;
    let size = requested_size(&mut browser)?;
    machine_takes(&mut browser, &control, size)
}

/// Changes the window twice, the second time before the first request is answered.
fn requested_size_at_once(browser: &mut Browser, machine: &Running) -> Result<[u16; 2]> {
    machine.signal(Signal::STOP)?;
    browser.resize(Window::desk(1200, 860))?;
    requested_size(browser)?;
    browser.resize(Window::desk(1008, 760))?;
    // After two frames, the page knows its new size.
    browser.until(
        "new Promise((done) => \
         requestAnimationFrame(() => requestAnimationFrame(() => done(true))))",
    )?;
    machine.signal(Signal::CONT)?;
    requested_size(browser)
}

#[test]
fn a_view_only_listener_does_not_restrict_another_one() -> Result<()> {
    if !runs_here("a_view_only_listener_does_not_restrict_another_one") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let control = folder.path().join("control").display().to_string();
    let vnc = format!("unix:{}", folder.path().join("vnc").display());
    let status = |machine: &Running| -> Result<Value> {
        let status = connect(&folder.path().join("control"))?.ask(&Command::Status)?;
        ensure!(machine.proc("stat").is_ok(), "the machine has ended");
        Ok(status["viewers"][0]["access"].clone())
    };
    for (web, words, access) in [
        ("127.0.0.1:0", format!("{vnc},view-only,name=theirs"), "full"),
        ("127.0.0.1:0,view-only", format!("{vnc},name=theirs"), "view"),
    ] {
        let more = ["--control", &control, "--vnc", &words];
        let (machine, address) = machine(web, &more)?;
        browser.go(&address)?;
        browser.until(CONNECTED)?;
        browser.until("document.title == 'Transom'")?;
        ensure!(status(&machine)? == access, "{words}");
        let looks = access == "view";
        browser.until(&format!("document.querySelector('#looks').hidden != {looks}"))?;
        browser
            .until(&format!("(document.querySelector('#cad').offsetParent == null) == {looks}"))?;
        ready(&mut browser)?;
        if !looks {
            type_word(&mut browser, "x")?;
            reads(&mut browser, "Text", "x_")?;
        }
        drop(machine);
    }
    Ok(())
}
