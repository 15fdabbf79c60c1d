//! Chromium's DevTools protocol: JSON messages, each ended by a zero byte, through two pipes.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Engine, Session, Step, Window, Wire};
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

struct Pipes {
    input: ChildStdin,
    messages: Receiver<Value>,
}

impl Wire for Pipes {
    fn send(&mut self, mut order: Value, page: Option<&str>) -> Result<()> {
        if let Some(page) = page {
            order["sessionId"] = page.into();
        }
        let mut text = order.to_string().into_bytes();
        text.push(0);
        Ok(self.input.write_all(&text)?)
    }

    fn receive(&mut self) -> Result<Value> {
        Ok(self.messages.recv_timeout(PATIENCE)?)
    }
}

pub(super) fn start(folder: &Path) -> Result<Session> {
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
    let mut session = Session::new(child, Box::new(Pipes { input, messages }));
    open(&mut session)?;
    Ok(session)
}

pub(super) fn open(session: &mut Session) -> Result<Option<String>> {
    let before = session.page.take();
    let context = session.order("Target.createBrowserContext", &json!({}))?;
    let what = json!({
        "url": "about:blank", "browserContextId": context["browserContextId"],
    });
    let target = session.order("Target.createTarget", &what)?;
    let attach = json!({ "targetId": target["targetId"], "flatten": true });
    let attached = session.order("Target.attachToTarget", &attach)?;
    session.page = attached["sessionId"].as_str().map(ToOwned::to_owned);
    for domain in ["Page", "Runtime", "Network", "Log"] {
        session.order(&format!("{domain}.enable"), &json!({}))?;
    }
    session.order("Emulation.setFocusEmulationEnabled", &json!({ "enabled": true }))?;
    Ok(before)
}

pub(super) struct Chromium;

impl Engine for Chromium {
    fn go(&self, session: &mut Session, address: &str) -> Result<()> {
        let gone = session.order("Page.navigate", &json!({ "url": address }))?;
        ensure!(gone["errorText"].is_null(), "{}", gone["errorText"]);
        Ok(())
    }

    fn value(&self, session: &mut Session, expression: &str) -> Result<Value> {
        let what = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let result = session.order("Runtime.evaluate", &what)?;
        let thrown = &result["exceptionDetails"];
        ensure!(thrown.is_null(), "{expression}: {thrown}");
        Ok(result["result"]["value"].clone())
    }

    fn step(&self, session: &mut Session, step: &Step) -> Result<()> {
        match *step {
            Step::Point(place) => mouse(session, "mouseMoved", place, 0),
            Step::Click(place) => {
                mouse(session, "mouseMoved", place, 0)?;
                mouse(session, "mousePressed", place, 1)?;
                mouse(session, "mouseReleased", place, 0)
            }
            Step::Tap([x, y]) => {
                let start = json!({ "type": "touchStart", "touchPoints": [{ "x": x, "y": y }] });
                session.order("Input.dispatchTouchEvent", &start)?;
                let end = json!({ "type": "touchEnd", "touchPoints": [] });
                session.order("Input.dispatchTouchEvent", &end).map(|_| ())
            }
            Step::Press(key, code, number) => press(session, key, code, number),
        }
    }

    fn resize(&self, session: &mut Session, window: Window) -> Result<()> {
        let Window { width, height, scale, phone } = window;
        let metrics = json!({
            "width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone,
        });
        session.order("Emulation.setDeviceMetricsOverride", &metrics)?;
        let touch = json!({ "enabled": phone });
        session.order("Emulation.setTouchEmulationEnabled", &touch).map(|_| ())
    }

    fn darken(&self, session: &mut Session, dark: bool) -> Result<()> {
        let value = if dark { "dark" } else { "light" };
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": value }] });
        session.order("Emulation.setEmulatedMedia", &features).map(|_| ())
    }

    fn shot(&self, session: &mut Session) -> Result<Value> {
        let shot = session.order("Page.captureScreenshot", &json!({ "format": "png" }))?;
        Ok(shot["data"].clone())
    }
}

/// Sends one mouse event, with the buttons that are held.
fn mouse(session: &mut Session, kind: &str, [x, y]: [f64; 2], buttons: u32) -> Result<()> {
    let button = if kind == "mouseMoved" { "none" } else { "left" };
    let event = json!({
        "type": kind, "x": x, "y": y, "button": button, "buttons": buttons, "clickCount": 1,
    });
    session.order("Input.dispatchMouseEvent", &event).map(|_| ())
}

fn press(session: &mut Session, key: &str, code: &str, number: u32) -> Result<()> {
    for kind in ["keyDown", "keyUp"] {
        let mut event = json!({
            "type": kind, "key": key, "code": code, "windowsVirtualKeyCode": number,
        });
        // Without a text, Enter presses no button.
        if kind == "keyDown" && key == "Enter" {
            event["text"] = "\r".into();
        }
        session.order("Input.dispatchKeyEvent", &event)?;
    }
    Ok(())
}
