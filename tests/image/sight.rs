//! The pod in a real browser: its page, the login, the screen, a key.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::json;
use transom_tests::browser::{self, Browser, Window};
use transom_tests::engine::Engine;
use transom_tests::print::{PAGES, says};
use transom_tests::program::not_run;

use super::pod::Pod;
use super::runs_here;

const DESK: Window = Window::desk(1280, 800);
const PHONE: Window = Window { width: 390, height: 844, scale: 2, phone: true };

/// The folder for screenshots.
fn album() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("pod")
}

#[test]
fn a_user_logs_in_and_types() -> Result<()> {
    const TEST: &str = "the pod in a browser";
    if !runs_here(TEST) {
        return Ok(());
    }
    if !browser::is_here() {
        not_run(TEST, "there is no chromium");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let mut browser = Browser::new(&folder.path().join("profile"))?;
    let engine = Engine::get()?;
    // This machine has no screen in the browser: the page shows its state and stays.
    let unseen = Pod::start(engine, "page", &["--env", "VERSION=probe", "--env", "DISPLAY=vnc"])?;
    unseen.until("/readyz", 200)?;
    for (name, window, dark) in [("page", DESK, false), ("page-phone", PHONE, true)] {
        browser.darken(dark)?;
        browser.resize(window)?;
        browser.go(&unseen.address()?)?;
        browser.until("document.body.dataset.phase == 'running'")?;
        browser.until("document.getElementById('doing').textContent == 'The probe runs'")?;
        // Without a password, everyone may read the log.
        browser.until("document.getElementById('lines').textContent.includes('probe')")?;
        browser.click("summary")?;
        browser.keep(&album(), name)?;
    }
    drop(unseen);
    browser.darken(false)?;
    let words =
        ["VERSION=probe", "PROTECT=Y", "USERNAME=ada", "PASSWORD=a long word", "HEIGHT=800"];
    let words: Vec<_> = words.iter().flat_map(|word| ["--env", word]).collect();
    let pod = Pod::start(engine, "seen", &words)?;
    pod.until("/readyz", 200)?;
    browser.go(&pod.address()?)?;
    browser.until("document.forms.length == 1")?;
    browser.keep(&album(), "login-phone")?;
    browser.resize(DESK)?;
    browser.keep(&album(), "login")?;
    for (field, text) in [("user", "ada"), ("password", "a long word")] {
        browser.click(&format!("[name={field}]"))?;
        browser.order("Input.insertText", &json!({ "text": text }))?;
    }
    browser.press("Enter", "Enter", 13)?;
    browser.until("document.body.dataset.state == 'connected'")?;
    let heading = PAGES[0].2;
    super::until(&mut browser, |it| it.all(heading).iter().any(|line| line.contains("Mouse")))?;
    browser.press("q", "KeyQ", 81)?;
    super::until(&mut browser, says(heading, "Text", "q_"))?;
    browser.until("document.getElementById('name').textContent == 'Transom probe'")?;
    browser.keep(&album(), "viewer")?;
    browser.resize(PHONE)?;
    super::until(&mut browser, says(heading, "Text", "q_"))?;
    browser.keep(&album(), "viewer-phone")
}
