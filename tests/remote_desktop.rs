//! The remote desktop in a real browser, through the pod's gateway, with RDP servers that others
//! wrote. Screenshots are saved in `tmp/remote_desktop` in the target folder.
#![forbid(unsafe_code)]

#[path = "remote_desktop/firefox.rs"]
mod firefox;
#[path = "remote_desktop/follower.rs"]
mod follower;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fs, net::TcpListener};

use anyhow::{Context as _, Result, bail, ensure};
use container::agent::Agent;
use container::plan::Plan;
use container::pod::guard::Guard;
use container::pod::network::GuestAddress;
use container::pod::runtime_folder::RuntimeFolder;
use container::settings::environment::Environment;
use container::story::{Phase, Story};
use container::web::{self, WebState};
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use transom_tests::browser::{self, Browser, Window};
use transom_tests::program::not_run;
use transom_tests::rdp_hosts::{self, PASSWORD, Shadow, USER, Xrdp};

/// Letters of several alphabets.
const COPIED: &str = "Grüße, 你好 from the guest";
const CONNECTED: &str = "document.body.dataset.state == 'connected'";
/// A limit for the effect of a key on a busy host.
const PATIENCE: Duration = Duration::from_secs(30);

/// A pod's web port without a machine: its guest is a server of this host.
struct Pod {
    _runtime: Runtime,
    web: Arc<WebState>,
    address: String,
    folder: TempDir,
}

impl Pod {
    /// The guest has this address. A pod with a password asks for it.
    fn new(guest: &str, guarded: bool) -> Result<Self> {
        let runtime = Runtime::new()?;
        let folder = tempfile::tempdir()?;
        let runtime_folder = RuntimeFolder::within(folder.path());
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let words = [("VERSION", "probe"), ("WEB_PORT", &port.to_string())];
        let words: Environment =
            words.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect();
        let plan = Plan::make(&words, Path::new("/"))?;
        let (story, agent) = (Story::new(), Arc::new(Agent::new(runtime_folder.agent())));
        let address = OnceLock::from(GuestAddress::Fixed(guest.parse()?));
        let web = WebState::new(story.clone(), runtime_folder, &plan, Arc::new(address), agent);
        let web = Arc::new(web);
        story.enter(Phase::Running, "Windows runs");
        let guard = if guarded {
            let password = folder.path().join("password");
            fs::write(&password, PASSWORD)?;
            Guard::Password { user: USER.into(), password, vnc: None }
        } else {
            Guard::Open
        };
        let context = runtime.enter();
        let served = web::open(&plan.input.settings, &guard, &web)?.served;
        drop(context);
        runtime.spawn(served.context("a web port")?);
        Ok(Self { _runtime: runtime, web, address: format!("http://127.0.0.1:{port}/"), folder })
    }

    fn desktop(&self) -> String {
        format!("{}desktop", self.address)
    }
}

/// Starts a browser, with a folder for the test.
fn browser() -> Result<(Browser, TempDir)> {
    let folder = tempfile::tempdir()?;
    Ok((Browser::new(&folder.path().join("profile"))?, folder))
}

fn album() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("remote_desktop")
}

fn until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !holds()? {
        ensure!(Instant::now() < deadline, "timeout: {what}");
        sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn runs_here(test: &str) -> bool {
    runs_with(test, browser::is_here(), "there is no chromium")
}

/// Whether a test can run with a browser and the servers. Reports it as skipped otherwise.
fn runs_with(test: &str, browser_is_here: bool, no_browser: &str) -> bool {
    let reason = if browser_is_here { rdp_hosts::missing() } else { Some(no_browser) };
    if let Some(reason) = reason {
        not_run(test, reason);
    }
    reason.is_none()
}

/// Waits until this holds in the page. An error has the messages of the page and of the server.
fn holds(browser: &mut Browser, expression: &str, log: impl Fn() -> String) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    // A page that is about to be replaced has no body.
    while browser.value(expression).ok() != Some(Value::Bool(true)) {
        if Instant::now() > deadline {
            let name = std::thread::current().name().unwrap_or("failed").to_owned();
            browser.keep(&album(), &name)?;
            let said = browser.value("[location.href, document.body.innerText]")?;
            let console = browser.console()?;
            bail!("timeout: {expression}: {said} {console:#?} {}", log());
        }
        sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn connected(browser: &mut Browser, log: impl Fn() -> String) -> Result<()> {
    holds(browser, CONNECTED, log)
}

/// Types into the terminal, which needs the pointer.
fn type_line(browser: &mut Browser, text: &str) -> Result<()> {
    browser.click_at([400.0, 300.0])?;
    for letter in text.chars() {
        let key = letter.to_string();
        let code = format!("Key{}", letter.to_ascii_uppercase());
        browser.press(&key, &code, u32::from(letter.to_ascii_uppercase()))?;
    }
    browser.press("Enter", "Enter", 13)
}

#[test]
fn a_user_signs_in_by_nla_and_types() -> Result<()> {
    if !runs_here("a_user_signs_in_by_nla_and_types") {
        return Ok(());
    }
    let server = Shadow::start("127.0.0.31")?;
    let pod = Pod::new("127.0.0.31", true)?;
    pod.web.desktop.set_login(USER, PASSWORD.into());
    let (mut browser, _folder) = browser()?;
    browser.resize(Window::desk(1200, 800))?;
    // A stranger logs in first, and comes back to the desktop.
    browser.go(&pod.desktop())?;
    holds(&mut browser, "document.querySelector('.login form') != null", || server.log())?;
    browser.log_in(USER, PASSWORD)?;
    connected(&mut browser, || server.log())?;
    type_line(&mut browser, "hello")?;
    until("typed text", || Ok(server.typed() == "hello\n"))?;
    browser.keep(&album(), "desk")?;
    // The console offers the desktop.
    browser.click("#console")?;
    holds(&mut browser, "document.getElementById('desktop')?.hidden === false", || server.log())?;
    browser.keep(&album(), "console")?;
    browser.click("#desktop")?;
    connected(&mut browser, || server.log())?;
    browser.resize(Window::phone(390, 844))?;
    sleep(Duration::from_secs(1));
    browser.keep(&album(), "phone")?;
    Ok(())
}

#[test]
fn a_refused_password_can_be_corrected() -> Result<()> {
    if !runs_here("a_refused_password_can_be_corrected") {
        return Ok(());
    }
    let server = Shadow::start("127.0.0.33")?;
    let pod = Pod::new("127.0.0.33", false)?;
    pod.web.desktop.set_login(USER, "another one".into());
    let (mut browser, _folder) = browser()?;
    browser.go(&pod.desktop())?;
    holds(&mut browser, "!document.getElementById('login').hidden", || server.log())?;
    browser.keep(&album(), "refused")?;
    browser.value(&format!("document.getElementById('password').value = {PASSWORD:?}"))?;
    browser.click("#login button")?;
    connected(&mut browser, || server.log())
}

#[test]
fn a_page_reconnects_and_asks_about_another_certificate() -> Result<()> {
    if !runs_here("a_page_reconnects_and_asks_about_another_certificate") {
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    reconnects(&mut browser, "127.0.0.34", "")
}

/// The screenshots of another browser have a prefix.
fn reconnects(browser: &mut Browser, address: &str, prefix: &str) -> Result<()> {
    let server = Shadow::start(address)?;
    let pod = Pod::new(address, false)?;
    let kept = pod.folder.path().join("windows.rdp");
    pod.web.desktop.keep_certificate(kept.clone());
    pod.web.desktop.set_login(USER, PASSWORD.into());
    browser.go(&pod.desktop())?;
    connected(browser, || server.log())?;
    let first = fs::read_to_string(&kept)?;
    // The next server has a key of its own.
    drop(server);
    let server = Shadow::start(address)?;
    holds(browser, "!document.getElementById('trust').hidden", || server.log())?;
    browser.keep(&album(), &format!("{prefix}certificate"))?;
    ensure!(fs::read_to_string(&kept)? == first, "the kept certificate was replaced");
    browser.click("#trust")?;
    connected(browser, || server.log())?;
    ensure!(fs::read_to_string(&kept)? != first, "the new certificate is not kept");
    Ok(())
}

#[test]
fn the_desktop_has_the_windows_size_and_its_clipboard() -> Result<()> {
    let test = "the_desktop_has_the_windows_size_and_its_clipboard";
    if !runs_here(test) || !xrdp_runs_here(test) {
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    let (server, _pod) = open_xrdp(&mut browser, "127.0.0.32", "")?;
    copies_texts(&mut browser, &server)?;
    browser.resize(Window::desk(900, 700))?;
    until("the second size", || Ok(server.size()?.starts_with("900x")))?;
    // Whether the picture follows is judged with another server (see `follower`): this one does not
    // tell its client.
    browser.keep(&album(), "smaller")
}

fn xrdp_runs_here(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        not_run(test, "Xorg of xrdp needs root");
    }
    root
}

/// Shows the desktop of xrdp at this address. The screenshots of another browser have a prefix.
fn open_xrdp(browser: &mut Browser, address: &str, prefix: &str) -> Result<(Xrdp, Pod)> {
    let server = Xrdp::start(address)?;
    let pod = Pod::new(address, false)?;
    pod.web.desktop.set_login(USER, PASSWORD.into());
    browser.resize(Window::desk(1200, 800))?;
    browser.go(&pod.desktop())?;
    // It has no CredSSP, so it would get the password of a user who does not look.
    holds(browser, "!document.getElementById('trust').hidden", || server.log())?;
    browser.keep(&album(), &format!("{prefix}unproven"))?;
    browser.click("#trust")?;
    connected(browser, || server.log())?;
    until("the first size", || Ok(server.size()?.starts_with("1200x")))?;
    browser.keep(&album(), &format!("{prefix}xrdp"))?;
    Ok((server, pod))
}

fn copies_texts(browser: &mut Browser, server: &Xrdp) -> Result<()> {
    // Text for the machine.
    browser.click("[popovertarget=clipboard]")?;
    browser.value("document.getElementById('text').value = 'žluťoučký from the page'")?;
    browser.click("#paste")?;
    browser.value("document.getElementById('clipboard').hidePopover()")?;
    until("the pasted text", || Ok(server.paste()?.contains("žluťoučký from the page")))?;
    // Text that is copied there, after the server has taken the page's.
    let _copied = server.copy(COPIED)?;
    let shown = format!("document.getElementById('text').value.includes({COPIED:?})");
    holds(browser, &shown, || server.log())
}
