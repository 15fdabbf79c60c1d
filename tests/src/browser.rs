//! Drives a headless browser: Chromium or Firefox.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::print::Picture;
use crate::program::PATIENCE;

pub mod chromium;
pub mod firefox;

/// Chromium, which most tests use.
pub use chromium::is_here;

/// Dropping it ends the browser.
pub struct Browser {
    session: Session,
    engine: &'static dyn Engine,
}

#[derive(Clone, Copy)]
pub struct Window {
    /// Pixels of the page.
    pub width: u32,
    /// Pixels of the page.
    pub height: u32,
    /// Pixels of the screen for each pixel of the page.
    pub scale: u32,
    /// Whether the screen has touch input and no mouse.
    pub phone: bool,
}

impl Window {
    pub const fn desk(width: u32, height: u32) -> Self {
        Self { width, height, scale: 1, phone: false }
    }

    pub const fn phone(width: u32, height: u32) -> Self {
        Self { width, height, scale: 3, phone: true }
    }
}

/// A step of a user. Places are in pixels of the page.
enum Step<'a> {
    Point([f64; 2]),
    Click([f64; 2]),
    Tap([f64; 2]),
    /// A key by its meaning, its position and its Windows key code.
    Press(&'a str, &'a str, u32),
}

/// The steps that differ between browsers.
trait Engine {
    fn go(&self, session: &mut Session, address: &str) -> Result<()>;
    fn value(&self, session: &mut Session, expression: &str) -> Result<Value>;
    fn step(&self, session: &mut Session, step: &Step) -> Result<()>;
    /// Does not wait for the page.
    fn resize(&self, session: &mut Session, window: Window) -> Result<()>;
    fn darken(&self, session: &mut Session, dark: bool) -> Result<()>;
    /// A screenshot of the page, as a PNG in base 64.
    fn shot(&self, session: &mut Session) -> Result<Value>;
}

/// How messages reach a browser.
trait Wire {
    /// Sends a command, to this page if it is for one.
    fn send(&mut self, order: Value, page: Option<&str>) -> Result<()>;
    /// Waits for the next message of the browser.
    fn receive(&mut self) -> Result<Value>;
}

/// The process and its protocol. Both protocols have commands with a number, answers with the same
/// number, and events without one.
struct Session {
    child: Child,
    wire: Box<dyn Wire>,
    events: VecDeque<Value>,
    page: Option<String>,
    last: u64,
}

impl Session {
    fn new(child: Child, wire: Box<dyn Wire>) -> Self {
        Self { child, wire, events: VecDeque::new(), page: None, last: 0 }
    }

    fn order(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.last += 1;
        let order = json!({ "id": self.last, "method": method, "params": params });
        self.wire.send(order, self.page.as_deref()).with_context(|| method.to_owned())?;
        loop {
            let message = self.wire.receive().with_context(|| method.to_owned())?;
            if message["id"] == self.last {
                ensure!(message["error"].is_null(), "{method}: {message}");
                return Ok(message["result"].clone());
            }
            self.events.push_back(message);
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Browser {
    /// Chromium, with its profile in `folder`.
    pub fn new(folder: &Path) -> Result<Self> {
        Ok(Self { session: chromium::start(folder)?, engine: &chromium::Chromium })
    }

    /// Firefox, with its profile in `folder`.
    pub fn firefox(folder: &Path) -> Result<Self> {
        Ok(Self { session: firefox::start(folder)?, engine: &firefox::Firefox })
    }

    /// Opens a page that shares neither cookies nor connections with the others, and makes it the
    /// current one. Returns the previous page, for [`Browser::turn`]. Chromium only.
    pub fn open(&mut self) -> Result<Option<String>> {
        chromium::open(&mut self.session)
    }

    /// Makes another page the current one, and returns the previous one.
    pub fn turn(&mut self, page: Option<String>) -> Option<String> {
        std::mem::replace(&mut self.session.page, page)
    }

    /// The process that started all others of the browser.
    pub fn id(&self) -> u32 {
        self.session.child.id()
    }

    /// Sends a command of the browser's own protocol, and returns its result.
    pub fn order(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.session.order(method, params)
    }

    pub fn go(&mut self, address: &str) -> Result<()> {
        self.engine.go(&mut self.session, address).with_context(|| address.to_owned())
    }

    /// Evaluates a JavaScript expression in the page. Fails if the expression throws.
    pub fn value(&mut self, expression: &str) -> Result<Value> {
        self.engine.value(&mut self.session, expression)
    }

    /// Waits until an expression is true in the page, also across a change of pages.
    pub fn until(&mut self, expression: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let value = self.value(expression);
            if value.as_ref().is_ok_and(|it| *it == Value::Bool(true)) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                // The page is long: put it first, because reports keep the end of a message.
                let page = self.value("document.documentElement.outerHTML");
                bail!("in {page:?}, `{expression}` is {value:?}");
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the events of one kind since the last call.
    pub fn events(&mut self, method: &str) -> Result<Vec<Value>> {
        // Events arrive before the answer to a later command.
        self.value("0")?;
        let all = std::mem::take(&mut self.session.events);
        let (wanted, rest) = all.into_iter().partition::<Vec<_>, _>(|it| it["method"] == method);
        self.session.events = rest.into();
        Ok(wanted.into_iter().map(|it| it["params"].clone()).collect())
    }

    /// Returns the messages that the page wrote to its console since the last call.
    pub fn console(&mut self) -> Result<Vec<Value>> {
        let mut said = self.events("Runtime.consoleAPICalled")?;
        said.extend(self.events("log.entryAdded")?);
        Ok(said.into_iter().map(|it| it["args"].clone()).collect())
    }

    pub fn resize(&mut self, window: Window) -> Result<()> {
        self.engine.resize(&mut self.session, window)?;
        let Window { width, height, .. } = window;
        self.until(&format!("innerWidth == {width} && innerHeight == {height}"))?;
        // Scripts that observe a size act in the next frame, and move the targets of clicks.
        let frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))";
        self.value(frame).map(|_| ())
    }

    /// Sets whether pages prefer a dark color scheme.
    pub fn darken(&mut self, dark: bool) -> Result<()> {
        self.engine.darken(&mut self.session, dark)?;
        self.until(&format!("matchMedia('(prefers-color-scheme: dark)').matches == {dark}"))
    }

    /// The center of a visible element.
    fn middle(&mut self, selector: &str) -> Result<[f64; 2]> {
        let script = format!(
            "(() => {{ const it = document.querySelector({selector:?}).getBoundingClientRect(); \
             return [it.x + it.width / 2, it.y + it.height / 2, it.width]; }})()"
        );
        let place = self.value(&script)?;
        let number = |at: usize| place[at].as_f64().context(selector.to_owned());
        ensure!(number(2)? > 0.0, "{selector} is not visible");
        Ok([number(0)?, number(1)?])
    }

    /// Clicks on a visible element as a mouse does: an element that covers it gets the click.
    pub fn click(&mut self, selector: &str) -> Result<()> {
        let place = self.middle(selector)?;
        self.click_at(place)
    }

    /// Fills the form of the login page, and sends it.
    pub fn log_in(&mut self, user: &str, password: &str) -> Result<()> {
        // A style that arrives later would move the button away from the click.
        self.until("document.forms.length == 1 && document.readyState == 'complete'")?;
        for (name, text) in [("user", user), ("password", password)] {
            self.value(&format!("document.querySelector('[name={name}]').value = {text:?}"))?;
        }
        self.click(".login button")
    }

    /// Moves the mouse.
    pub fn point(&mut self, place: [f64; 2]) -> Result<()> {
        self.engine.step(&mut self.session, &Step::Point(place))
    }

    /// Moves the mouse, and clicks there.
    pub fn click_at(&mut self, place: [f64; 2]) -> Result<()> {
        self.engine.step(&mut self.session, &Step::Click(place))
    }

    pub fn tap(&mut self, place: [f64; 2]) -> Result<()> {
        self.engine.step(&mut self.session, &Step::Tap(place))
    }

    /// Presses and releases a key, given by its meaning, its position and its Windows key code.
    pub fn press(&mut self, key: &str, code: &str, number: u32) -> Result<()> {
        self.engine.step(&mut self.session, &Step::Press(key, code, number))
    }

    /// The first lines of noVNC's canvas: the green channel only, which is enough to read letters.
    pub fn picture(&mut self, lines: usize) -> Result<Option<Picture>> {
        let script = format!(
            "(() => {{ \
             const canvas = document.querySelector('#screen div canvas'); \
             if (!canvas || !canvas.width || !canvas.height) return null; \
             const [width, height] = [canvas.width, Math.min(canvas.height, {lines})]; \
             const context = canvas.getContext('2d'); \
             const pixels = context.getImageData(0, 0, width, height).data; \
             const green = new Uint8Array(width * height); \
             for (let at = 0; at < green.length; at += 1) green[at] = pixels[4 * at + 1]; \
             let text = ''; \
             for (let at = 0; at < green.length; at += 8192) \
             text += String.fromCharCode(...green.subarray(at, at + 8192)); \
             return [width, btoa(text)]; }})()"
        );
        let value = self.value(&script)?;
        if value.is_null() {
            return Ok(None);
        }
        let width = usize::try_from(value[0].as_u64().context("a width")?)?;
        let green = decoded(value[1].as_str().context("pixels")?)?;
        Ok(Some(Picture { width, pixels: green.iter().flat_map(|it| [*it; 4]).collect() }))
    }

    /// Writes a screenshot of the page into a folder, for people to look at.
    pub fn keep(&mut self, folder: &Path, name: &str) -> Result<()> {
        let shot = self.engine.shot(&mut self.session)?;
        let bytes = decoded(shot.as_str().context("a picture")?)?;
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        fs::write(folder.join(format!("{name}.png")), bytes).context(name.to_owned())
    }
}

/// Decodes base 64, which the protocols use for bytes.
pub fn decoded(text: &str) -> Result<Vec<u8>> {
    let mut values = [None; 256];
    let letters = (b'A'..=b'Z').chain(b'a'..=b'z').chain(b'0'..=b'9').chain(*b"+/");
    for (value, letter) in (0_u32..).zip(letters) {
        values[usize::from(letter)] = Some(value);
    }
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for letter in text.trim_end_matches('=').bytes() {
        let value = values[usize::from(letter)].context("a letter of base 64")?;
        bits = (bits << 6 | value) & 0xff_ffff;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 0xff)?);
        }
    }
    Ok(bytes)
}
