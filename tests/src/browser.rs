//! Drives a headless Chromium over its DevTools protocol: JSON messages, each ended by a zero byte,
//! through two pipes.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::print::Picture;
use crate::program::PATIENCE;

/// The program's name on Debian.
const PROGRAM: &str = "chromium";
/// No graphics card, no sandbox (it needs rights that containers lack), and self-signed
/// certificates are accepted.
const FLAGS: [&str; 8] = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--ignore-certificate-errors",
    "--host-resolver-rules=MAP *.example 127.0.0.1",
    "--remote-debugging-pipe",
];

pub fn is_here() -> bool {
    let asked = Command::new(PROGRAM).arg("--version").output();
    asked.is_ok_and(|asked| asked.status.success())
}

/// Dropping it ends the browser.
pub struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    events: VecDeque<Value>,
    page: Option<String>,
    last: u64,
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

impl Browser {
    /// The profile is in `folder`.
    pub fn new(folder: &Path) -> Result<Self> {
        // Chromium reads commands at descriptor 3, and answers at 4.
        let script = format!("exec {PROGRAM} \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1");
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh"]).args(FLAGS);
        command.arg(format!("--user-data-dir={}", folder.display())).arg("about:blank");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("the browser")?;
        let input = child.stdin.take().context("a pipe")?;
        let answers = BufReader::new(child.stdout.take().context("a pipe")?);
        let (sender, messages) = channel();
        thread::spawn(move || {
            for message in answers.split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { return };
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let events = VecDeque::new();
        let mut browser = Self { child, input, messages, events, page: None, last: 0 };
        browser.open()?;
        Ok(browser)
    }

    /// Opens a page that shares neither cookies nor connections with the others, and makes it the
    /// current one. Returns the previous page, for [`Browser::turn`].
    pub fn open(&mut self) -> Result<Option<String>> {
        let before = self.page.take();
        let context = self.order("Target.createBrowserContext", &json!({}))?;
        let what = json!({
            "url": "about:blank", "browserContextId": context["browserContextId"],
        });
        let target = self.order("Target.createTarget", &what)?;
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = self.order("Target.attachToTarget", &attach)?;
        self.page = session["sessionId"].as_str().map(ToOwned::to_owned);
        for domain in ["Page", "Runtime", "Network", "Log"] {
            self.order(&format!("{domain}.enable"), &json!({}))?;
        }
        self.order("Emulation.setFocusEmulationEnabled", &json!({ "enabled": true }))?;
        Ok(before)
    }

    /// Makes another page the current one, and returns the previous one.
    pub fn turn(&mut self, page: Option<String>) -> Option<String> {
        std::mem::replace(&mut self.page, page)
    }

    /// Sends a DevTools command and returns its result.
    pub fn order(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.last += 1;
        let mut order = json!({ "id": self.last, "method": method, "params": params });
        if let Some(page) = &self.page {
            order["sessionId"] = page.as_str().into();
        }
        let mut text = order.to_string().into_bytes();
        text.push(0);
        self.input.write_all(&text).with_context(|| method.to_owned())?;
        loop {
            let message =
                self.messages.recv_timeout(PATIENCE).with_context(|| method.to_owned())?;
            if message["id"] == self.last {
                ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
                return Ok(message["result"].clone());
            }
            self.events.push_back(message);
        }
    }

    pub fn go(&mut self, address: &str) -> Result<()> {
        let gone = self.order("Page.navigate", &json!({ "url": address }))?;
        ensure!(gone["errorText"].is_null(), "{address}: {}", gone["errorText"]);
        Ok(())
    }

    /// Evaluates a JavaScript expression in the page. Fails if the expression throws.
    pub fn value(&mut self, expression: &str) -> Result<Value> {
        let what = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let result = self.order("Runtime.evaluate", &what)?;
        ensure!(
            result["exceptionDetails"].is_null(),
            "{expression}: {}",
            result["exceptionDetails"]
        );
        Ok(result["result"]["value"].clone())
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
        self.order("Runtime.evaluate", &json!({ "expression": "0" }))?;
        let all = std::mem::take(&mut self.events);
        let (wanted, rest) = all.into_iter().partition::<Vec<_>, _>(|it| it["method"] == method);
        self.events = rest.into();
        Ok(wanted.into_iter().map(|it| it["params"].clone()).collect())
    }

    pub fn resize(&mut self, window: Window) -> Result<()> {
        let Window { width, height, scale, phone } = window;
        let metrics = json!({
            "width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone,
        });
        self.order("Emulation.setDeviceMetricsOverride", &metrics)?;
        self.order("Emulation.setTouchEmulationEnabled", &json!({ "enabled": phone }))?;
        self.until(&format!("innerWidth == {width} && innerHeight == {height}"))?;
        // Scripts that observe a size act in the next frame, and move the targets of clicks.
        let frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))";
        self.value(frame).map(|_| ())
    }

    /// Sets whether pages prefer a dark color scheme.
    pub fn darken(&mut self, dark: bool) -> Result<()> {
        let value = if dark { "dark" } else { "light" };
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": value }] });
        self.order("Emulation.setEmulatedMedia", &features).map(|_| ())
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
        self.mouse("mouseMoved", place, 0)?;
        self.mouse("mousePressed", place, 1)?;
        self.mouse("mouseReleased", place, 0)
    }

    /// Fills the form of the login page, and sends it.
    pub fn log_in(&mut self, user: &str, password: &str) -> Result<()> {
        for (name, text) in [("user", user), ("password", password)] {
            self.value(&format!("document.querySelector('[name={name}]').value = {text:?}"))?;
        }
        self.click(".login button")
    }

    /// Sends one mouse event, with the buttons that are held.
    pub fn mouse(&mut self, kind: &str, [x, y]: [f64; 2], buttons: u32) -> Result<()> {
        let button = if kind == "mouseMoved" { "none" } else { "left" };
        let event = json!({
            "type": kind, "x": x, "y": y, "button": button, "buttons": buttons, "clickCount": 1,
        });
        self.order("Input.dispatchMouseEvent", &event).map(|_| ())
    }

    pub fn tap(&mut self, [x, y]: [f64; 2]) -> Result<()> {
        let start = json!({ "type": "touchStart", "touchPoints": [{ "x": x, "y": y }] });
        self.order("Input.dispatchTouchEvent", &start)?;
        let end = json!({ "type": "touchEnd", "touchPoints": [] });
        self.order("Input.dispatchTouchEvent", &end).map(|_| ())
    }

    /// Presses and releases a key, given by its meaning, its position and its Windows key code.
    pub fn press(&mut self, key: &str, code: &str, number: u32) -> Result<()> {
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({
                "type": kind, "key": key, "code": code, "windowsVirtualKeyCode": number,
            });
            // Without a text, Enter presses no button.
            if kind == "keyDown" && key == "Enter" {
                event["text"] = "\r".into();
            }
            self.order("Input.dispatchKeyEvent", &event)?;
        }
        Ok(())
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
        let shot = self.order("Page.captureScreenshot", &json!({ "format": "png" }))?;
        let bytes = decoded(shot["data"].as_str().context("a picture")?)?;
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        fs::write(folder.join(format!("{name}.png")), bytes).context(name.to_owned())
    }
}

/// Decodes base 64, which DevTools use for bytes.
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

impl Drop for Browser {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
