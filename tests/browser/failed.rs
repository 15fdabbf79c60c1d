//! The container's page when its machine did not start: the page itself in a browser, with the
//! events of a pod that failed.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use transom_tests::browser::{Window, is_here};
use transom_tests::program::not_run;

use crate::{album, browser};

const FAILURE: &str = "VERSION=11: Windows cannot be downloaded: mount its ISO at /custom.iso, \
                       or set VERSION=probe; `transom plan` shows what would run";

/// The end of the log after Windows Setup failed.
const SETUP_LOG: [&str; 4] = [
    "Windows Setup failed: open the screen",
    "the last lines of the log of Windows Setup:",
    r"  C:\Windows\Panther\setuperr.log:",
    "  2026-01-02 03:04:05, Error [SETUP.EXE] Callback_Unattend_InitEngine: An error occurred \
     while finding or loading the unattend file; hr = 0x1, hrResult = 0x8030000b",
];

/// The password that was made for Windows.
pub(crate) const PASSWORD: &str = "Kq7m2xw9tbn4ruce";

/// Serves the page with this scene at an address.
pub(crate) fn serve(scene: Value) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = format!("http://{}/", listener.local_addr()?);
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let scene = scene.clone();
            thread::spawn(move || answer(stream, &scene).ok());
        }
    });
    Ok(address)
}

/// Answers one request as the pod does.
fn answer(mut stream: TcpStream, scene: &Value) -> Result<()> {
    let mut request = [0; 4096];
    let length = stream.read(&mut request)?;
    let request = String::from_utf8_lossy(&request[..length]).into_owned();
    let path = request.split(' ').nth(1).context("a path")?;
    let web = Path::new(env!("CARGO_MANIFEST_DIR")).join("../container/web");
    let (kind, text) = match path.split('?').next().unwrap_or_default() {
        "/" => {
            let page = fs::read_to_string(web.join("status.html"))?;
            let installs = scene["phase"] == "running";
            let words = if installs { ["no", "yes"] } else { ["yes", "no"] };
            let page = page.replace("{SCREEN}", words[0]).replace("{LINK}", words[1]);
            let page = page.replace("{NAME}", "Windows").replace("{DOING}", "Starting…");
            // An earlier scene.
            let first = r#"{"phase":"preparing","doing":"Starting…","lines":0}"#;
            let page = page.replace("{SCENE}", &first.replace('"', "&quot;"));
            ("text/html", page.replace("{VARIABLES}", "VERSION RAM_SIZE"))
        }
        "/events" => ("text/event-stream", format!("data: {scene}\n\n")),
        "/account" => {
            let account = json!({ "user": "Docker", "password": PASSWORD });
            ("application/json", account.to_string())
        }
        "/log" => {
            let setup_failed = scene["installation"]["failed"] == "setup";
            let lines = if setup_failed { &SETUP_LOG[..] } else { &[FAILURE] };
            ("application/json", json!({ "lines": lines, "count": lines.len() }).to_string())
        }
        file => {
            let kind = if file.ends_with(".css") { "text/css" } else { "text/javascript" };
            (kind, fs::read_to_string(web.join(file.trim_start_matches("/pod/")))?)
        }
    };
    // The stream of events goes on while the machine does.
    let goes_on = path == "/events" && scene.get("failed").is_none();
    let length = text.len() + if goes_on { 1 << 20 } else { 0 };
    let head = format!("Content-Type: {kind}; charset=utf-8\r\nContent-Length: {length}");
    write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\n{head}\r\n\r\n{text}")?;
    if goes_on {
        stream.read_to_end(&mut Vec::new())?;
    }
    Ok(())
}

#[test]
fn a_failure_does_not_look_like_progress() -> Result<()> {
    if !is_here() {
        not_run("a_failure_does_not_look_like_progress", "there is no chromium");
        return Ok(());
    }
    let scene = json!({ "phase": "preparing", "doing": "", "lines": 1, "failed": FAILURE });
    let address = serve(scene)?;
    let (mut browser, _folder) = browser()?;
    for (name, window, dark) in
        [("desk", Window::desk(1280, 800), false), ("phone", Window::phone(375, 667), true)]
    {
        browser.resize(window)?;
        browser.darken(dark)?;
        browser.go(&address)?;
        browser.until("document.querySelector('h1').textContent == 'Windows did not start'")?;
        browser.until("document.querySelector('#log').open")?;
        browser.until("document.querySelector('#lines').textContent.includes('VERSION=11')")?;
        let seen = browser.value("document.querySelector('#bar').checkVisibility()")?;
        ensure!(seen == false, "the progress bar is visible");
        let next = browser.value("document.querySelector('#left').innerText")?;
        ensure!(next.as_str().is_some_and(|it| it.contains("started again")), "{next}");
        let mark = browser.value("document.querySelector('#mark').checkVisibility()")?;
        let codes = "[...document.querySelectorAll('code')].map((it) => it.textContent)";
        let codes = browser.value(codes)?;
        let wanted = json!(["VERSION=11", "VERSION=probe", "transom plan"]);
        ensure!(mark == true && codes == wanted, "{mark}, {codes}");
        ensure!(
            browser.value("document.querySelector('summary').textContent")? == "Log",
            "the log's heading is wrong"
        );
        let wide = "document.documentElement.scrollWidth <= innerWidth";
        ensure!(browser.value(wide)? == true, "the page is wider than the window");
        browser.keep(&album(), &format!("failed-{name}"))?;
    }
    Ok(())
}
