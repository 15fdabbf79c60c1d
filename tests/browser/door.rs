//! Access to the screen: login, wrong passwords, pages of other origins, and certificates.

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

/// Two certificates for `localhost`, each with its key: the first one and its renewal.
pub(crate) const PAIRS: [&str; 2] = [include_str!("first.pem"), include_str!("renewed.pem")];

/// Fills in and submits the login form as a person does.
pub(crate) fn log_in(browser: &mut Browser, password: &str) -> Result<()> {
    browser.until("document.readyState == 'complete' && document.forms.length == 1")?;
    browser.click("[name=password]")?;
    browser.order("Input.insertText", &json!({ "text": password }))?;
    browser.value("window.before = true")?;
    browser.press("Enter", "Enter", 13)?;
    browser.until("window.before === undefined && document.readyState == 'complete'")
}

fn login_error(browser: &mut Browser) -> Result<String> {
    let said = browser.value("document.querySelector('.wrong')?.textContent ?? ''")?;
    Ok(said.as_str().unwrap_or_default().to_owned())
}

/// Logs in, waiting as long as the page demands; returns the longest such wait in seconds.
fn log_in_patiently(browser: &mut Browser, password: &str) -> Result<u64> {
    let mut longest = 0;
    loop {
        log_in(browser, password)?;
        let said = login_error(browser)?;
        let Some((_, rest)) = said.split_once("try again in ") else { return Ok(longest) };
        let seconds = rest.trim_end_matches(" s.").parse().context(rest.to_owned())?;
        ensure!(seconds < 30, "{said}");
        longest = longest.max(seconds);
        thread::sleep(Duration::from_secs(seconds));
    }
}

#[test]
fn a_password_opens_the_screen_and_wrong_ones_cause_delays() -> Result<()> {
    if !runs_here("a_password_opens_the_screen_and_wrong_ones_cause_delays") {
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
        let error = login_error(&mut browser)?;
        ensure!(error == "The password is wrong.", "{error}");
    }
    browser.keep(&album(), "wrong-password")?;
    // Even the right password has to wait.
    waits.push(log_in_patiently(&mut browser, "secret")?);
    ensure!(waits[4] > waits[2], "the waits do not grow: {waits:?}");
    browser.until(CONNECTED)?;
    ready(&mut browser)?;
    let mut control = connect(&control)?;
    let status = control.ask(&Command::Status)?;
    let viewers = status["viewers"].as_array().context("viewers")?;
    ensure!(viewers.len() == 1 && viewers[0]["access"] == "full", "{status}");
    is_closed_to_other_origins(&mut browser, &address)?;
    let said = machine.stderr.text();
    ensure!(said.contains("was refused: This request is from `http://127.0.0.1:"), "{said}");
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    browser.click("#out button")?;
    browser.until("location.pathname == '/login'")?;
    let deadline = Instant::now() + PATIENCE;
    while control.ask(&Command::Status)?["viewers"] != json!([]) {
        ensure!(Instant::now() < deadline, "a viewer is still connected");
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// A page of another origin, in a browser that has our cookie and sends it along.
fn is_closed_to_other_origins(browser: &mut Browser, address: &str) -> Result<()> {
    let elsewhere = TcpListener::bind("127.0.0.1:0")?;
    let theirs = format!("http://{}/", elsewhere.local_addr()?);
    thread::spawn(move || {
        for stream in elsewhere.incoming() {
            let Ok(mut stream) = stream else { return };
            // Every request gets the same page.
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
    // The same script on our own page is let in.
    browser.go(address)?;
    browser.until(CONNECTED)?;
    ensure!(browser.value(&script)? == "open", "a page of ours did not open {wanted}");
    // The same by hand, with all headers that a browser would send.
    let cookies = browser.order("Network.getCookies", &json!({ "urls": [address] }))?;
    let cookie = &cookies["cookies"][0];
    ensure!(cookie["httpOnly"] == true && cookie["sameSite"] == "Strict", "{cookies}");
    let (name, value) = (cookie["name"].as_str(), cookie["value"].as_str());
    let cookie = format!("{}={}", name.context("a name")?, value.context("a value")?);
    let ours = address.trim_end_matches('/');
    for (origin, status) in [("http://evil.example", 403), ("null", 403), (ours, 101)] {
        let found = websocket_status(address, origin, &cookie)?;
        ensure!(found == status, "{origin}: status {found}, expected {status}");
    }
    Ok(())
}

/// Asks for the WebSocket; returns the status of the answer.
fn websocket_status(address: &str, origin: &str, cookie: &str) -> Result<u16> {
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

/// Replaces the certificate and key by renaming a new file, as renewal programs do.
pub(crate) fn replace_pair(folder: &Path, pair: &str) -> Result<String> {
    let (new, path) = (folder.join("new.pem"), folder.join("pair.pem"));
    fs::write(&new, pair)?;
    fs::rename(&new, &path)?;
    Ok(path.display().to_string())
}

/// The certificate that a new connection of the browser receives.
fn received_certificate(browser: &mut Browser, address: &str) -> Result<Vec<u8>> {
    let before = browser.open()?;
    browser.go(&format!("{address}healthz"))?;
    let origin = json!({ "origin": address.trim_end_matches('/') });
    let chain = browser.order("Network.getCertificate", &origin)?;
    browser.turn(before);
    decoded(chain["tableNames"][0].as_str().context("a certificate")?)
}

/// The certificate of a pair, as DER.
fn certificate(pair: &str) -> Result<Vec<u8>> {
    let (_, rest) = pair.split_once("-----BEGIN CERTIFICATE-----").context("a certificate")?;
    let (text, _) = rest.split_once("-----END CERTIFICATE-----").context("its end")?;
    decoded(&text.replace('\n', ""))
}

#[test]
fn a_renewed_certificate_is_used_and_viewers_stay_connected() -> Result<()> {
    if !runs_here("a_renewed_certificate_is_used_and_viewers_stay_connected") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let pair = replace_pair(folder.path(), PAIRS[0])?;
    let (machine, address) = machine(&format!("127.0.0.1:0,tls-cert={pair},tls-key={pair}"), &[])?;
    ensure!(address.starts_with("https://"), "{address}");
    browser.go(&address)?;
    ready(&mut browser)?;
    ensure!(
        received_certificate(&mut browser, &address)? == certificate(PAIRS[0])?,
        "the server does not send the first certificate"
    );
    replace_pair(folder.path(), PAIRS[1])?;
    let deadline = Instant::now() + PATIENCE;
    while received_certificate(&mut browser, &address)? != certificate(PAIRS[1])? {
        ensure!(Instant::now() < deadline, "the server still sends the old certificate");
        thread::sleep(Duration::from_millis(300));
    }
    // The earlier viewer keeps its connection, and its keys arrive.
    browser.press("y", "KeyY", 89)?;
    crate::reads(&mut browser, "Text", "y_")?;
    let said = machine.stderr.text();
    ensure!(said.contains("certificate reloaded") && !said.contains("disconnected"), "{said}");
    Ok(())
}
