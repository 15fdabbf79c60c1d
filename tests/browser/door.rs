//! Who comes in: the login, wrong passwords, pages from elsewhere, and certificates.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use transom_tests::browser::{Browser, Window, decoded};
use transom_tests::program::{PATIENCE, connect};
use vmm::control::Command;

use crate::{CONNECTED, album, browser, machine, ready, runs_here};

/// A certificate for `localhost` with its key, and the one that comes after it.
pub(crate) const PAIRS: [&str; 2] = [include_str!("first.pem"), include_str!("renewed.pem")];

/// Fills in the form as a person does.
pub(crate) fn log_in(browser: &mut Browser, password: &str) -> Result<()> {
    browser.until("document.readyState == 'complete' && document.forms.length == 1")?;
    browser.click("[name=password]")?;
    browser.order("Input.insertText", &json!({ "text": password }))?;
    browser.value("window.before = true")?;
    browser.press("Enter", "Enter", 13)?;
    browser.until("window.before === undefined && document.readyState == 'complete'")
}

fn told(browser: &mut Browser) -> Result<String> {
    let said = browser.value("document.querySelector('.wrong')?.textContent ?? ''")?;
    Ok(said.as_str().unwrap_or_default().to_owned())
}

/// Logs in, and waits as long as the page says.
fn log_in_patiently(browser: &mut Browser, password: &str) -> Result<u64> {
    let mut longest = 0;
    loop {
        log_in(browser, password)?;
        let said = told(browser)?;
        let Some((_, rest)) = said.split_once("try again in ") else { return Ok(longest) };
        let seconds = rest.trim_end_matches(" s.").parse().context(rest.to_owned())?;
        ensure!(seconds < 30, "{said}");
        longest = longest.max(seconds);
        thread::sleep(Duration::from_secs(seconds));
    }
}

#[test]
fn a_password_opens_the_screen_and_wrong_ones_cost_more_each_time() -> Result<()> {
    if !runs_here("a_password_opens_the_screen_and_wrong_ones_cost_more_each_time") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let (password, control) = (folder.path().join("password"), folder.path().join("control"));
    fs::write(&password, "secret\n")?;
    let web = format!("127.0.0.1:0,name=a probe,password={}", password.display());
    let place = control.display().to_string();
    let (machine, address) = machine(&web, &["--control", &place])?;
    browser.resize(Window::desk(1280, 800))?;
    browser.go(&address)?;
    browser.until("document.forms.length == 1")?;
    browser.keep(&album(), "login")?;
    let mut waits = Vec::new();
    for _ in 0..4 {
        waits.push(log_in_patiently(&mut browser, "wrong")?);
        ensure!(told(&mut browser)? == "The password is wrong.", "{}", told(&mut browser)?);
    }
    browser.keep(&album(), "wrong-password")?;
    // Even the right one is not heard before that.
    waits.push(log_in_patiently(&mut browser, "secret")?);
    ensure!(waits[4] > waits[2], "each costs more than the one before: {waits:?}");
    browser.until(CONNECTED)?;
    ready(&mut browser)?;
    let mut control = connect(&control)?;
    let status = control.ask(&Command::Status)?;
    let viewers = status["viewers"].as_array().context("viewers")?;
    ensure!(viewers.len() == 1 && viewers[0]["access"] == "full", "{status}");
    from_elsewhere(&mut browser, &address)?;
    let said = machine.stderr.text();
    ensure!(said.contains("was refused: This request is from `http://127.0.0.1:"), "{said}");
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    browser.click("#out button")?;
    browser.until("location.pathname == '/login'")?;
    let deadline = Instant::now() + PATIENCE;
    while control.ask(&Command::Status)?["viewers"] != json!([]) {
        ensure!(Instant::now() < deadline, "somebody is left");
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// A page of another place, in a browser that has our cookie and sends it along.
fn from_elsewhere(browser: &mut Browser, address: &str) -> Result<()> {
    let elsewhere = TcpListener::bind("127.0.0.1:0")?;
    let theirs = format!("http://{}/", elsewhere.local_addr()?);
    thread::spawn(move || {
        for stream in elsewhere.incoming() {
            let Ok(mut stream) = stream else { return };
            // What it asks for is the same for all.
            if stream.read(&mut [0; 4096]).is_err() {
                continue;
            }
            let page = "<!doctype html><title>elsewhere</title>";
            let length = page.len();
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close";
            write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{page}").ok();
        }
    });
    let wanted = address.replace("http:", "ws:") + "websockify";
    let script = format!(
        "new Promise((done) => {{ const line = new WebSocket({wanted:?}, ['binary']); \
         line.onopen = () => done('open'); line.onclose = () => done('refused'); }})"
    );
    browser.go(&theirs)?;
    browser.until("document.title == 'elsewhere'")?;
    ensure!(browser.value(&script)? == "refused", "a page of {theirs} opened {wanted}");
    // The same from a page of ours is let in.
    browser.go(address)?;
    browser.until(CONNECTED)?;
    ensure!(browser.value(&script)? == "open", "a page of ours did not open {wanted}");
    // And by hand, with all that a browser would say.
    let cookies = browser.order("Network.getCookies", &json!({ "urls": [address] }))?;
    let cookie = &cookies["cookies"][0];
    ensure!(cookie["httpOnly"] == true && cookie["sameSite"] == "Strict", "{cookies}");
    let (name, value) = (cookie["name"].as_str(), cookie["value"].as_str());
    let cookie = format!("{}={}", name.context("a name")?, value.context("a value")?);
    let ours = address.trim_end_matches('/');
    for (origin, status) in [("http://evil.example", 403), ("null", 403), (ours, 101)] {
        let found = knock(address, origin, &cookie)?;
        ensure!(found == status, "{origin}: {found} in place of {status}");
    }
    Ok(())
}

/// Asks for the WebSocket, and gives the status of the answer.
fn knock(address: &str, origin: &str, cookie: &str) -> Result<u16> {
    let place = address.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = TcpStream::connect(place)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let request = format!(
        "GET /websockify HTTP/1.1\r\nHost: {place}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
         Origin: {origin}\r\nCookie: {cookie}\r\n\r\n"
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer)?;
    let text = String::from_utf8_lossy(&answer).into_owned();
    text.split(' ').nth(1).and_then(|it| it.parse().ok()).context(text)
}

/// Puts a pair in place of another, as programs that renew certificates do.
pub(crate) fn put(folder: &Path, pair: &str) -> Result<String> {
    let (new, path) = (folder.join("new.pem"), folder.join("pair.pem"));
    fs::write(&new, pair)?;
    fs::rename(&new, &path)?;
    Ok(path.display().to_string())
}

/// The certificate that a browser is shown which was never here before.
fn shown(browser: &mut Browser, address: &str) -> Result<Vec<u8>> {
    let before = browser.open()?;
    browser.go(&format!("{address}healthz"))?;
    let origin = json!({ "origin": address.trim_end_matches('/') });
    let chain = browser.order("Network.getCertificate", &origin)?;
    browser.turn(before);
    decoded(chain["tableNames"][0].as_str().context("a certificate")?)
}

/// The certificate of a pair.
fn certificate(pair: &str) -> Result<Vec<u8>> {
    let (_, rest) = pair.split_once("-----BEGIN CERTIFICATE-----").context("a certificate")?;
    let (text, _) = rest.split_once("-----END CERTIFICATE-----").context("its end")?;
    decoded(&text.replace('\n', ""))
}

#[test]
fn a_renewed_certificate_is_shown_and_viewers_stay() -> Result<()> {
    if !runs_here("a_renewed_certificate_is_shown_and_viewers_stay") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let pair = put(folder.path(), PAIRS[0])?;
    let (machine, address) = machine(&format!("127.0.0.1:0,tls-cert={pair},tls-key={pair}"), &[])?;
    ensure!(address.starts_with("https://"), "{address}");
    browser.go(&address)?;
    ready(&mut browser)?;
    ensure!(shown(&mut browser, &address)? == certificate(PAIRS[0])?, "the first certificate");
    put(folder.path(), PAIRS[1])?;
    let deadline = Instant::now() + PATIENCE;
    while shown(&mut browser, &address)? != certificate(PAIRS[1])? {
        ensure!(Instant::now() < deadline, "the old certificate is shown");
        thread::sleep(Duration::from_millis(300));
    }
    // The one who was there before has the line of before, and what is done arrives.
    browser.press("y", "KeyY", 89)?;
    crate::reads(&mut browser, "Text", "y_")?;
    let said = machine.stderr.text();
    ensure!(said.contains("certificate reloaded") && !said.contains("disconnected"), "{said}");
    Ok(())
}
