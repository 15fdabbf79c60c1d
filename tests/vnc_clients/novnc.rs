//! noVNC, served by the machine itself, in each encoding that it has.

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use transom_tests::browser::{self, Browser};
use transom_tests::print::Picture;

use crate::eye::settle;
use crate::hands::{Client, Hand, follows};
use crate::machine::Machine;
use crate::picture::Near;
use crate::{JPEG, PAGE, can};

/// The encodings that both sides have: the number, and our name. Tight and TightPNG are lossless
/// without a quality level.
const ENCODINGS: [(i32, &str); 7] = [
    (0, "raw"),
    (2, "rre"),
    (5, "hextile"),
    (6, "zlib"),
    (7, "tight"),
    (-260, "tightpng"),
    (16, "zrle"),
];

/// A script that replaces the viewer by one that offers only these pixel encodings.
const OPEN: &str = "(async (encodings) => {
    const page = await (await fetch('./')).text();
    const [, files] = page.match(/src=\"(files[^\"]*)viewer.js\"/);
    const { default: RFB } = await import(`./${files}novnc/core/rfb.js`);
    if (window.viewer) {
        const gone = new Promise((done) => viewer.addEventListener('disconnect', done));
        viewer.disconnect();
        await gone;
        target.remove();
    } else {
        window.said = RFB.messages.clientEncodings;
    }
    RFB.messages.clientEncodings = (sock, all) => {
        const pixels = (it) => it >= 2 && it < 100 || it == 0 || it == -260;
        const quality = (it) => it >= -32 && it <= -23;
        const rest = all.filter((it) => !pixels(it) && !quality(it));
        said.call(RFB.messages, sock, encodings.concat(rest));
    };
    window.target = document.body.appendChild(document.createElement('div'));
    const place = new URL('./websockify', location.href);
    place.protocol = 'ws:';
    window.viewer = new RFB(target, place.href, { shared: true });
    await new Promise((done) => viewer.addEventListener('connect', done));
    return true;
})";

/// A script that returns the width and the pixels of the canvas, in base64.
const LOOK: &str = "(() => {
    const canvas = document.querySelector('canvas');
    const { width, height } = canvas;
    const image = canvas.getContext('2d').getImageData(0, 0, width, height);
    const bytes = new Uint8Array(image.data.buffer);
    let text = '';
    for (let at = 0; at < bytes.length; at += 32768) {
        text += String.fromCharCode(...bytes.subarray(at, at + 32768));
    }
    return [width, btoa(text)];
})()";

fn look(browser: &mut Browser) -> Result<Picture> {
    let seen = browser.value(LOOK)?;
    let width = seen[0].as_u64().context("a width")?.try_into()?;
    let mut pixels = STANDARD.decode(seen[1].as_str().context("pixels")?)?;
    pixels.as_chunks_mut::<4>().0.iter_mut().for_each(|it| it.swap(0, 2));
    Ok(Picture { width, pixels })
}

fn found(test: &str) -> bool {
    can(test, "there is no chromium", browser::is_here)
}

/// Opens a page of the machine without a viewer.
fn open(machine: &Machine) -> Result<Browser> {
    let mut browser = Browser::new(&machine.path("profile"))?;
    browser.go(&format!("{}healthz", machine.address))?;
    Ok(browser)
}

fn connect(browser: &mut Browser, encodings: &[i32]) -> Result<()> {
    let done = browser.value(&format!("{OPEN}({encodings:?})"))?;
    ensure!(done == true, "{encodings:?}: {done}");
    Ok(())
}

#[test]
fn novnc_shows_the_same_picture_in_all_encodings() -> Result<()> {
    if !found("novnc_shows_the_same_picture_in_all_encodings") {
        return Ok(());
    }
    for (draw, bounds) in JPEG {
        let mut machine = Machine::for_browsers(draw, "1366x770", "")?;
        let mut browser = open(&machine)?;
        for (number, ours) in ENCODINGS {
            connect(&mut browser, &[number])?;
            let seen = settle(&mut machine, Near::Same, |_| look(&mut browser));
            seen.with_context(|| ours)?;
            let viewer = machine.viewer()?;
            ensure!(viewer["encoding"] == ours, "{number}: {viewer}");
        }
        for (number, quality) in [(7, 6), (7, 0), (7, 9), (-260, 6)] {
            connect(&mut browser, &[number, quality - 32])?;
            let near = Near::Decibels(bounds[usize::try_from(quality)?]);
            let seen = settle(&mut machine, near, |_| look(&mut browser));
            seen.with_context(|| format!("{number} at level {quality}"))?;
        }
    }
    Ok(())
}

#[test]
fn novnc_follows_drawing_and_resizing() -> Result<()> {
    if !found("novnc_follows_drawing_and_resizing") {
        return Ok(());
    }
    for number in [7, 16] {
        let mut machine = Machine::for_browsers(PAGE, "1280x800", "")?;
        let mut browser = open(&machine)?;
        connect(&mut browser, &[number])?;
        follows(&mut browser, &mut machine, Near::Same, Some((1024, 768)))?;
        // The browser shows no pointer of its own over the guest's.
        browser.until(INVISIBLE)?;
    }
    Ok(())
}

/// Whether the canvas's pointer is a picture without visible pixels.
const INVISIBLE: &str = "(async () => {
    const { cursor } = getComputedStyle(document.querySelector('canvas'));
    const [, source] = cursor.match(/^url\\(\"(data:[^\"]*)\"\\)/) ?? [];
    if (!source) return cursor;
    const image = new Image();
    image.src = source;
    await image.decode();
    const { width, height } = image;
    const context = new OffscreenCanvas(width, height).getContext('2d');
    context.drawImage(image, 0, 0);
    return context.getImageData(0, 0, width, height).data.every((it) => it == 0);
})()";

impl Client for Browser {
    fn picture(&mut self, _: &Machine) -> Result<Picture> {
        look(self)
    }

    fn send(&mut self, what: Hand) -> Result<()> {
        match what {
            Hand::Key(symbol) => self.value(&format!("viewer.sendKey({symbol}, null)")).map(drop),
            Hand::Pointer(x, y, buttons) => {
                // The canvas is not scrolled.
                let place = self.value(
                    "(({ left, top }) => [left, top])(\
                     document.querySelector('canvas').getBoundingClientRect())",
                )?;
                let at = |index: usize| place[index].as_f64().context("a place");
                // One mouse event; its kind depends on the buttons.
                let (kind, button) =
                    if buttons == 0 { ("mouseMoved", "none") } else { ("mousePressed", "left") };
                let event = json!({
                    "type": kind, "x": at(0)? + f64::from(x), "y": at(1)? + f64::from(y),
                    "button": button, "buttons": buttons, "clickCount": 1,
                });
                self.order("Input.dispatchMouseEvent", &event).map(drop)
            }
        }
    }

    /// Resizes the element of the viewer.
    fn ask_for(&mut self, width: u16, height: u16) -> Result<()> {
        self.value(&format!(
            "target.style.width = '{width}px'; target.style.height = '{height}px'; \
             viewer.resizeSession = true"
        ))
        .map(drop)
    }
}
