//! A headless Chromium, driven as its developer tools do: JSON with a zero after each message,
//! through two pipes.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::program::PATIENCE;

/// What Debian calls it.
const PROGRAM: &str = "chromium";

/// Whether this host has one.
pub fn is_here() -> bool {
    let asked = Command::new(PROGRAM).arg("--version").output();
    asked.is_ok_and(|asked| asked.status.success())
}

/// A browser with one page; it ends when this is dropped.
pub struct Browser {
    child: Child,
    orders: ChildStdin,
    said: Receiver<Value>,
    events: VecDeque<Value>,
    page: Option<String>,
    last: u64,
}

impl Browser {
    /// Starts it; `folder` is for what it remembers.
    ///
    /// # Errors
    ///
    /// When it does not start.
    pub fn new(folder: &Path) -> Result<Self> {
        // It takes orders at descriptor 3, and answers at 4.
        let script = format!("exec {PROGRAM} \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1");
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh", "--headless=new", "--no-sandbox", "--disable-gpu"]);
        command.args(["--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"]);
        command.arg(format!("--user-data-dir={}", folder.display())).arg("about:blank");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("the browser")?;
        let orders = child.stdin.take().context("a pipe")?;
        let answers = BufReader::new(child.stdout.take().context("a pipe")?);
        let (tell, said) = channel();
        thread::spawn(move || {
            for message in answers.split(0).map_while(Result::ok) {
                let Ok(message) = serde_json::from_slice(&message) else { return };
                if tell.send(message).is_err() {
                    return;
                }
            }
        });
        let events = VecDeque::new();
        let mut browser = Self { child, orders, said, events, page: None, last: 0 };
        let target = browser.order("Target.createTarget", &json!({ "url": "about:blank" }))?;
        let id = target["targetId"].clone();
        let attach = json!({ "targetId": id, "flatten": true });
        let session = browser.order("Target.attachToTarget", &attach)?;
        browser.page = session["sessionId"].as_str().map(ToOwned::to_owned);
        for domain in ["Page", "Runtime", "Network", "Log"] {
            browser.order(&format!("{domain}.enable"), &json!({}))?;
        }
        Ok(browser)
    }

    /// Has it do something, and gives what came of it.
    ///
    /// # Errors
    ///
    /// When it refuses, or does not answer.
    pub fn order(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.last += 1;
        let mut order = json!({ "id": self.last, "method": method, "params": params });
        if let Some(page) = &self.page {
            order["sessionId"] = page.as_str().into();
        }
        let mut text = order.to_string().into_bytes();
        text.push(0);
        self.orders.write_all(&text).with_context(|| method.to_owned())?;
        loop {
            let message = self.said.recv_timeout(PATIENCE).with_context(|| method.to_owned())?;
            if message["id"] == self.last {
                ensure!(message["error"].is_null(), "{method}: {}", message["error"]);
                return Ok(message["result"].clone());
            }
            self.events.push_back(message);
        }
    }

    /// Goes to an address.
    ///
    /// # Errors
    ///
    /// When there is nothing.
    pub fn go(&mut self, address: &str) -> Result<()> {
        let gone = self.order("Page.navigate", &json!({ "url": address }))?;
        ensure!(gone["errorText"].is_null(), "{address}: {}", gone["errorText"]);
        Ok(())
    }

    /// What an expression is in the page.
    ///
    /// # Errors
    ///
    /// When it throws.
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

    /// Waits until an expression is true in the page, whichever page that is by then.
    ///
    /// # Errors
    ///
    /// When it does not become so.
    pub fn until(&mut self, expression: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let value = self.value(expression);
            if value.as_ref().is_ok_and(|it| *it == Value::Bool(true)) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let page = self.value("document.documentElement.outerHTML");
                bail!("`{expression}` is {value:?} in {page:?}");
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// What of a kind happened since this was asked last, as far as it is known by now.
    ///
    /// # Errors
    ///
    /// When it does not answer.
    pub fn events(&mut self, method: &str) -> Result<Vec<Value>> {
        // An answer to anything comes after what happened before.
        self.order("Runtime.evaluate", &json!({ "expression": "0" }))?;
        let all = std::mem::take(&mut self.events);
        let (wanted, rest) = all.into_iter().partition::<Vec<_>, _>(|it| it["method"] == method);
        self.events = rest.into();
        Ok(wanted.into_iter().map(|it| it["params"].clone()).collect())
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
