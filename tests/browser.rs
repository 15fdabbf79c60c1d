//! The screen in a real browser: the login, the picture, keys and the pointer, and coming back.
#![forbid(unsafe_code)]

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use transom_tests::browser::{self, Browser};
use transom_tests::program::{PATIENCE, Running, connect, not_run};
use vmm::control::Command;
use vmm::kvm::Situation;

/// Whether a test can run here.
fn runs_here(test: &str) -> bool {
    let reason = if Situation::of_this_host() == Situation::None {
        "there is no usable /dev/kvm"
    } else if !browser::is_here() {
        "there is no chromium"
    } else {
        return true;
    };
    not_run(test, reason);
    false
}

/// A machine that draws, and where its viewer is.
fn machine(web: &str, control: &str) -> Result<(Running, String)> {
    let words = ["run", "--cmdline", "draw=yes then=halt", "--control", control, "--web", web];
    let machine = Running::vmm(&words)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let said = machine.stderr.text();
        if let Some((_, rest)) = said.split_once("web: listening at ")
            && let Some((address, _)) = rest.split_once('\n')
        {
            return Ok((machine, address.to_owned()));
        }
        ensure!(Instant::now() < deadline, "{said}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn log_in(browser: &mut Browser, password: &str) -> Result<()> {
    browser.until("document.readyState == 'complete' && document.forms.length == 1")?;
    let script = format!(
        "document.querySelector('[name=password]').value = '{password}'; \
         document.querySelector('form button').click()"
    );
    browser.value(&script)?;
    Ok(())
}

/// What the probe draws: red is the column, green the line, blue their exclusive or. It comes as
/// JPEG, which is near enough.
const DRAWN: &str = "(() => {
    const canvas = document.querySelector('canvas');
    if (!canvas || canvas.width < 1000) { return false; }
    const near = ([x, y]) => {
        const data = canvas.getContext('2d').getImageData(x, y, 1, 1).data;
        const wanted = [x & 255, y & 255, (x ^ y) & 255];
        return wanted.every((it, at) => Math.abs(it - data[at]) < 48);
    };
    return [[40, 20], [200, 40], [900, 600], [1000, 700], [72, 200]].every(near);
})()";

/// The frames that the page sent, as RFB messages; noVNC has one in each.
fn sent(browser: &mut Browser) -> Result<Vec<Vec<u8>>> {
    let frames = browser.events("Network.webSocketFrameSent")?;
    let read = |frame: &Value| {
        let text = frame["response"]["payloadData"].as_str().context("a frame")?;
        decoded(text)
    };
    frames.iter().map(read).collect()
}

/// Base 64, which is how the tools show bytes.
fn decoded(text: &str) -> Result<Vec<u8>> {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for letter in text.trim_end_matches('=').bytes() {
        let value = LETTERS.iter().position(|it| *it == letter).context("a letter")?;
        bits = (bits << 6 | u32::try_from(value)?) & 0xff_ffff;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 0xff)?);
        }
    }
    Ok(bytes)
}

#[test]
fn a_browser_shows_the_screen_to_those_who_know_the_password() -> Result<()> {
    if !runs_here("a_browser_shows_the_screen_to_those_who_know_the_password") {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let (password, control) = (folder.path().join("password"), folder.path().join("control"));
    fs::write(&password, "secret\n")?;
    let web = format!("127.0.0.1:0,name=a probe,password={}", password.display());
    let (machine, address) = machine(&web, &control.display().to_string())?;
    let mut control = connect(&control)?;
    let mut browser = Browser::new(&folder.path().join("profile"))?;
    browser.go(&address)?;
    log_in(&mut browser, "wrong")?;
    browser.until("document.querySelector('.wrong').textContent.includes('not the password')")?;
    log_in(&mut browser, "secret")?;
    browser.until("document.body.dataset.state == 'connected'")?;
    browser.until(DRAWN)?;
    browser.until("document.title == 'a probe'")?;
    let status = control.ask(&Command::Status)?;
    let viewers = status["viewers"].as_array().context("viewers")?;
    ensure!(viewers.len() == 1 && viewers[0]["access"] == "full", "{status}");
    keys_and_pointer(&mut browser)?;
    let mut blocked = browser.events("Log.entryAdded")?;
    blocked.retain(|it| it["entry"]["source"] == "security");
    ensure!(blocked.is_empty(), "the page breaks a rule of its own: {blocked:?}");
    browser.value("document.querySelector('#out button').click()")?;
    browser.until("location.pathname == '/login'")?;
    ensure!(control.ask(&Command::Status)?["viewers"] == json!([]), "nobody is left");
    drop(machine);
    Ok(())
}

fn keys_and_pointer(browser: &mut Browser) -> Result<()> {
    sent(browser)?;
    for kind in ["keyDown", "keyUp"] {
        let key = json!({ "type": kind, "key": "a", "code": "KeyA", "windowsVirtualKeyCode": 65 });
        browser.order("Input.dispatchKeyEvent", &key)?;
    }
    let moved = json!({ "type": "mouseMoved", "x": 400, "y": 300 });
    browser.order("Input.dispatchMouseEvent", &moved)?;
    thread::sleep(Duration::from_millis(200));
    browser.value("document.querySelector('#cad').click()")?;
    let all = sent(browser)?.concat();
    let has = |bytes: &[u8]| all.windows(bytes.len()).any(|it| it == bytes);
    // QEMU's key message: kind 255.0, down, the symbol, the scan code.
    ensure!(has(&[255, 0, 0, 1, 0, 0, 0, b'a', 0, 0, 0, 0x1e]), "A goes down: {all:x?}");
    ensure!(has(&[255, 0, 0, 0, 0, 0, 0, b'a', 0, 0, 0, 0x1e]), "and up: {all:x?}");
    ensure!(has(&[255, 0, 0, 1, 0, 0, 0xff, 0xff, 0, 0, 0, 0xd3]), "Delete: {all:x?}");
    // The pointer's message: kind 5, no button, the place.
    let pointers = all.windows(6).filter(|it| it[..2] == [5, 0]).count();
    ensure!(pointers > 0, "the pointer moves: {all:x?}");
    Ok(())
}

#[test]
fn the_page_comes_back_by_itself_and_fits_a_phone() -> Result<()> {
    if !runs_here("the_page_comes_back_by_itself_and_fits_a_phone") {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let control = folder.path().join("control").display().to_string();
    let (first, address) = machine("127.0.0.1:0,view-only", &control)?;
    let mut browser = Browser::new(&folder.path().join("profile"))?;
    let phone = json!({ "width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": true });
    browser.order("Emulation.setDeviceMetricsOverride", &phone)?;
    browser.go(&address)?;
    browser.until("document.body.dataset.state == 'connected'")?;
    browser.until(DRAWN)?;
    let wide = "document.documentElement.scrollWidth <= 360 && \
                [...document.querySelectorAll('#bar button')].every((it) => \
                it.offsetParent == null || it.getBoundingClientRect().right <= 360)";
    browser.until(wide)?;
    browser.until("!document.querySelector('#looks').hidden")?;
    browser.until("document.querySelector('#cad').offsetParent == null")?;
    drop(first);
    browser.until("document.body.dataset.state == 'waiting'")?;
    browser.until("document.querySelector('#reason').textContent.includes('Trying again')")?;
    let place = address.trim_start_matches("http://").trim_end_matches('/');
    fs::remove_file(&control).ok();
    let _second = machine(&format!("{place},view-only"), &control)?;
    browser.until("document.body.dataset.state == 'connected'")?;
    browser.until(DRAWN)?;
    Ok(())
}
