//! Firefox's WebDriver BiDi: JSON messages through a WebSocket.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_tungstenite::tungstenite::{Message, WebSocket};

use super::{Browser, Engine, Session, Step, Window, Wire};
use crate::program::PATIENCE;

/// The program's name on Debian.
const PROGRAM: &str = "firefox-esr";
/// `chrome` scripts set preferences that the protocol has no command for.
const FLAGS: [&str; 4] =
    ["--headless", "--no-remote", "--remote-debugging-port=0", "--remote-allow-system-access"];
/// The file of the profile that names the port.
const PORT: &str = "WebDriverBiDiServer.json";
/// A socket in the folder: the server of PulseAudio there, if any, plays the sound.
pub const SOUND: &str = "sound";
/// Keys that are no letters, by their names in DOM events (WebDriver, 17.4.2).
const KEYS: [(&str, char); 6] = [
    ("Backspace", '\u{e003}'),
    ("Tab", '\u{e004}'),
    ("Enter", '\u{e007}'),
    ("Shift", '\u{e008}'),
    ("Control", '\u{e009}'),
    ("Escape", '\u{e00c}'),
];
/// The text on the clipboard, or none.
const CLIPBOARD: &str = "(() => {
    const transfer = Cc['@mozilla.org/widget/transferable;1'].createInstance(Ci.nsITransferable);
    transfer.init(null);
    transfer.addDataFlavor('text/plain');
    Services.clipboard.getData(transfer, Ci.nsIClipboard.kGlobalClipboard);
    const found = {};
    try { transfer.getTransferData('text/plain', found); } catch { return ''; }
    return found.value.QueryInterface(Ci.nsISupportsString).data;
})()";
/// A click lets a page write the clipboard for 100 seconds instead of 5, because hosts are busy.
/// Firefox records no stacks of promises: in a page in which a script was evaluated, they take a
/// hundred times as long as the work of the desktop's client.
const PREFERENCES: &str = "user_pref('dom.user_activation.transient.timeout', 100000);
user_pref('javascript.options.asyncstack', false);
";
/// Kinds of pointers, as preferences have them (`LookAndFeel::PointerCapabilities`).
const COARSE: u32 = 1;
const FINE_AND_HOVER: u32 = 6;

pub fn is_here() -> bool {
    let asked = Command::new(PROGRAM).arg("--version").output();
    asked.is_ok_and(|asked| asked.status.success())
}

struct Socket(WebSocket<TcpStream>);

impl Wire for Socket {
    fn send(&mut self, order: Value, _: Option<&str>) -> Result<()> {
        // Commands that need the page have it in their parameters.
        Ok(self.0.send(Message::text(order.to_string()))?)
    }

    fn receive(&mut self) -> Result<Value> {
        loop {
            if let Message::Text(text) = self.0.read()? {
                return Ok(serde_json::from_str(&text)?);
            }
        }
    }
}

pub(super) fn start(folder: &Path) -> Result<Session> {
    fs::create_dir_all(folder)?;
    fs::write(folder.join("user.js"), PREFERENCES)?;
    // It would outlive a test that is killed, because it waits for the next client.
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", PROGRAM])
        .args(FLAGS)
        .arg("--profile")
        .arg(folder)
        .arg("about:blank");
    // Firefox does not start in a home of another user, and writes there.
    command.env("HOME", folder).env("MOZ_CRASHREPORTER_DISABLE", "1");
    command.env("PULSE_SERVER", format!("unix:{}", folder.join(SOUND).display()));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().context(PROGRAM)?;
    let socket = connect(&mut child, &folder.join(PORT));
    let mut session = match socket {
        Ok(socket) => Session::new(child, Box::new(socket)),
        Err(error) => {
            child.kill().ok();
            child.wait().ok();
            return Err(error);
        }
    };
    let wishes = json!({ "capabilities": { "alwaysMatch": { "acceptInsecureCerts": true } } });
    session.order("session.new", &wishes)?;
    session.order("session.subscribe", &json!({ "events": ["log.entryAdded"] }))?;
    let tree = session.order("browsingContext.getTree", &json!({}))?;
    let page = tree["contexts"][0]["context"].as_str().context("a page")?;
    session.order("browsingContext.activate", &json!({ "context": page }))?;
    session.page = Some(page.to_owned());
    Ok(session)
}

/// Waits for the port, and opens a WebSocket there.
fn connect(child: &mut Child, port: &Path) -> Result<Socket> {
    let deadline = Instant::now() + PATIENCE;
    let found: Value = loop {
        let text = fs::read_to_string(port).unwrap_or_default();
        match serde_json::from_str(&text) {
            Ok(found) => break found,
            Err(_) if Instant::now() > deadline => bail!("{PROGRAM} opens no port"),
            Err(_) => sleep(Duration::from_millis(10)),
        }
        ensure!(child.try_wait()?.is_none(), "{PROGRAM} has ended");
    };
    let port = found["ws_port"].as_u64().context("a port")?;
    let host = format!("127.0.0.1:{port}");
    let mut stream = TcpStream::connect(&host)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    // The key need not be a secret: only caches in between have a use for it (RFC 6455, 10.3).
    let request = format!(
        "GET /session HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        answer.extend(byte);
    }
    ensure!(answer.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&answer));
    Ok(Socket(WebSocket::from_raw_socket(stream, Role::Client, None)))
}

pub(super) struct Firefox;

impl Engine for Firefox {
    fn go(&self, session: &mut Session, address: &str) -> Result<()> {
        // Without this wait, later commands could still see the page before.
        let what = json!({ "context": session.page, "url": address, "wait": "interactive" });
        session.order("browsingContext.navigate", &what).map(|_| ())
    }

    fn value(&self, session: &mut Session, expression: &str) -> Result<Value> {
        let page = json!({ "context": session.page });
        evaluate(session, &page, expression)
    }

    fn step(&self, session: &mut Session, step: &Step) -> Result<()> {
        let action = match *step {
            Step::Point(place) => pointer("mouse", &[move_to(place)]),
            Step::Click(place) => pointer("mouse", &[move_to(place), down(), up()]),
            Step::Tap(place) => pointer("touch", &[move_to(place), down(), up()]),
            Step::Press(key, ..) => keys(&[key])?,
        };
        act(session, &action)
    }

    fn resize(&self, session: &mut Session, window: Window) -> Result<()> {
        let Window { width, height, scale, phone } = window;
        let pointer = if phone { COARSE } else { FINE_AND_HOVER };
        for kind in ["primary", "all"] {
            let name = format!("ui.{kind}PointerCapabilities");
            privileged(session, &format!("Services.prefs.setIntPref({name:?}, {pointer})"))?;
        }
        let what = json!({
            "context": session.page, "devicePixelRatio": scale,
            "viewport": { "width": width, "height": height },
        });
        session.order("browsingContext.setViewport", &what).map(|_| ())
    }

    fn darken(&self, session: &mut Session, dark: bool) -> Result<()> {
        let scheme = if dark { "dark" } else { "light" };
        let page = "gBrowser.selectedBrowser.browsingContext";
        let set = format!("{page}.prefersColorSchemeOverride = {scheme:?}");
        privileged(session, &set).map(|_| ())
    }

    fn shot(&self, session: &mut Session) -> Result<Value> {
        let what = json!({ "context": session.page });
        Ok(session.order("browsingContext.captureScreenshot", &what)?["data"].clone())
    }
}

/// Steps of Firefox alone.
impl Browser {
    /// Presses these keys and releases them in reverse order.
    pub fn chord(&mut self, names: &[&str]) -> Result<()> {
        act(&mut self.session, &keys(names)?)
    }

    /// Calls a function in each page that is opened from now on, before the scripts of the page.
    pub fn watch(&mut self, function: &str) -> Result<()> {
        let what = json!({ "functionDeclaration": function });
        self.order("script.addPreloadScript", &what).map(|_| ())
    }

    /// The text on the clipboard, as other programs get it.
    pub fn clipboard(&mut self) -> Result<String> {
        let text = privileged(&mut self.session, CLIPBOARD)?;
        Ok(text.as_str().context("a text")?.to_owned())
    }

    /// Chooses files in a field of the page.
    pub fn choose(&mut self, selector: &str, files: &[String]) -> Result<()> {
        let context = self.session.page.clone();
        let locator = json!({ "type": "css", "value": selector });
        let what = json!({ "context": context, "locator": locator });
        let found = self.order("browsingContext.locateNodes", &what)?;
        let element = json!({ "sharedId": found["nodes"][0]["sharedId"] });
        let what = json!({ "context": context, "element": element, "files": files });
        self.order("input.setFiles", &what).map(|_| ())
    }
}

/// Evaluates an expression in the browser's own window, which may do everything.
fn privileged(session: &mut Session, expression: &str) -> Result<Value> {
    let tree = session.order("browsingContext.getTree", &json!({ "moz:scope": "chrome" }))?;
    let window = json!({ "context": tree["contexts"][0]["context"] });
    evaluate(session, &window, expression)
}

fn evaluate(session: &mut Session, target: &Value, expression: &str) -> Result<Value> {
    let what = json!({ "expression": expression, "target": target, "awaitPromise": true });
    let result = session.order("script.evaluate", &what)?;
    let thrown = &result["exceptionDetails"];
    ensure!(thrown.is_null(), "{expression}: {thrown}");
    Ok(plain(&result["result"]))
}

/// A value of the protocol, which names the type of each part, as JSON.
fn plain(value: &Value) -> Value {
    let parts = value["value"].as_array();
    match (value["type"].as_str(), parts) {
        (Some("array"), Some(parts)) => parts.iter().map(plain).collect(),
        (Some("object"), Some(parts)) => parts
            .iter()
            .filter_map(|it| Some((it[0].as_str()?.to_owned(), plain(&it[1]))))
            .collect(),
        (Some("string" | "number" | "boolean"), _) => value["value"].clone(),
        _ => Value::Null,
    }
}

fn act(session: &mut Session, action: &Value) -> Result<()> {
    let what = json!({ "context": session.page, "actions": [action] });
    session.order("input.performActions", &what).map(|_| ())
}

fn pointer(kind: &str, actions: &[Value]) -> Value {
    let parameters = json!({ "pointerType": kind });
    json!({ "type": "pointer", "id": kind, "parameters": parameters, "actions": actions })
}

fn move_to([x, y]: [f64; 2]) -> Value {
    json!({ "type": "pointerMove", "x": x, "y": y })
}

fn down() -> Value {
    json!({ "type": "pointerDown", "button": 0 })
}

fn up() -> Value {
    json!({ "type": "pointerUp", "button": 0 })
}

fn keys(names: &[&str]) -> Result<Value> {
    let values = names.iter().map(|name| {
        let named = KEYS.iter().find(|it| it.0 == *name).map(|it| it.1.to_string());
        let letter = (name.chars().count() == 1).then(|| (*name).to_owned());
        named.or(letter).with_context(|| format!("{name} is no key of this list"))
    });
    let values = values.collect::<Result<Vec<_>>>()?;
    let action = |kind: &str, value: &String| json!({ "type": kind, "value": value });
    let down = values.iter().map(|it| action("keyDown", it));
    let up = values.iter().rev().map(|it| action("keyUp", it));
    let actions: Vec<_> = down.chain(up).collect();
    Ok(json!({ "type": "key", "id": "keyboard", "actions": actions }))
}
