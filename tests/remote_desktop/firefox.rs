//! The remote desktop in Firefox, which has a client, a clipboard and a canvas of its own.

use anyhow::{Context as _, Result};
use tempfile::TempDir;
use transom_tests::browser::{Browser, Window, firefox};
use transom_tests::rdp_hosts::{PASSWORD, Shadow, USER};

use super::{
    COPIED, Pod, album, connected, copies_texts, holds, open_xrdp, reconnects, runs_with,
    type_line, until, xrdp_runs_here,
};

pub(crate) fn runs_here(test: &str) -> bool {
    runs_with(test, firefox::is_here(), "there is no firefox-esr")
}

/// Starts Firefox, with a folder for the test.
pub(crate) fn browser() -> Result<(Browser, TempDir)> {
    let folder = tempfile::tempdir()?;
    Ok((Browser::firefox(&folder.path().join("profile"))?, folder))
}

#[test]
fn firefox_has_the_windows_size_and_its_clipboard() -> Result<()> {
    let test = "firefox_has_the_windows_size_and_its_clipboard";
    if !runs_here(test) || !xrdp_runs_here(test) {
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    let (server, _pod) = open_xrdp(&mut browser, "127.0.0.37", "firefox ")?;
    copies_texts(&mut browser, &server)?;
    // The page may write the clipboard, because there was a click.
    until("the copied text", || Ok(browser.clipboard()? == COPIED))?;
    // Without a permission, a paste is that of the browser.
    browser.click_at([1100.0, 700.0])?;
    browser.value("navigator.clipboard.writeText('Wörter by Ctrl-V')")?;
    browser.chord(&["Control", "v"])?;
    until("the pasted text", || Ok(server.paste()?.contains("Wörter by Ctrl-V")))?;
    browser.resize(Window::phone(390, 844))?;
    until("the second size", || Ok(server.size()?.starts_with("1170x")))?;
    browser.keep(&album(), "firefox phone")
}

#[test]
fn a_user_of_firefox_corrects_the_password_and_types() -> Result<()> {
    if !runs_here("a_user_of_firefox_corrects_the_password_and_types") {
        return Ok(());
    }
    let server = Shadow::start("127.0.0.38")?;
    let pod = Pod::new("127.0.0.38", true)?;
    pod.web.desktop.set_login(USER, "another one".into());
    let (mut browser, _folder) = browser()?;
    browser.resize(Window::desk(1200, 800))?;
    browser.go(&pod.desktop())?;
    holds(&mut browser, "document.querySelector('.login form') != null", || server.log())?;
    browser.log_in(USER, PASSWORD)?;
    let asked = "document.getElementById('login')?.hidden === false";
    holds(&mut browser, asked, || server.log())?;
    browser.keep(&album(), "firefox refused")?;
    browser.value(&format!("document.getElementById('password').value = {PASSWORD:?}"))?;
    browser.click("#login button")?;
    connected(&mut browser, || server.log())?;
    type_line(&mut browser, "hello")?;
    let typed = until("typed text", || Ok(server.typed() == "hello\n"));
    browser.keep(&album(), "firefox desk")?;
    typed.with_context(|| format!("{:?}", server.typed()))
}

#[test]
fn a_page_in_firefox_reconnects() -> Result<()> {
    if !runs_here("a_page_in_firefox_reconnects") {
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    reconnects(&mut browser, "127.0.0.39", "firefox ")
}
