//! The screen in real browsers: the probe's page, keyboard and pointer, windows, login, proxies,
//! and appearance. Screenshots of each state are saved in `tmp/browser` in the target folder.
#![forbid(unsafe_code)]

#[path = "browser/clipboard.rs"]
mod clipboard;
#[path = "browser/door.rs"]
mod door;
#[path = "browser/failed.rs"]
mod failed;
#[path = "browser/firefox.rs"]
mod firefox;
#[path = "browser/look.rs"]
mod look;
#[path = "browser/progress.rs"]
mod progress;
#[path = "browser/proxy.rs"]
mod proxy;
#[path = "browser/sight.rs"]
mod sight;
#[path = "browser/sound.rs"]
mod sound;
#[path = "browser/stage.rs"]
mod stage;
#[path = "browser/usb.rs"]
mod usb;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use tempfile::TempDir;
use transom_tests::browser::{self, Browser};
use transom_tests::print::{PAGES, Picture, find, says};
use transom_tests::program::{PATIENCE, Running, not_run};
use vmm::kvm::KvmSupport;

/// True when the page is connected to its machine.
const CONNECTED: &str = "document.body.dataset.state == 'connected'";
/// True while the page waits for its machine to come back.
const WAITING: &str = "document.body.dataset.state == 'waiting'";

/// Whether a test can run on this host. Reports it as skipped otherwise.
fn runs_here(test: &str) -> bool {
    if !browser::is_here() {
        not_run(test, "there is no chromium");
        return false;
    }
    there_is_kvm(test)
}

fn there_is_kvm(test: &str) -> bool {
    let there = KvmSupport::of_this_host() != KvmSupport::None;
    if !there {
        not_run(test, "there is no usable /dev/kvm");
    }
    there
}

/// Starts a browser, with a folder for the test.
fn browser() -> Result<(Browser, TempDir)> {
    let folder = tempfile::tempdir()?;
    Ok((Browser::new(&folder.path().join("profile"))?, folder))
}

/// The folder for screenshots.
fn album() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser")
}

/// Starts a machine with the probe and its web port at `web`, and returns the address that it
/// reports.
fn machine(web: &str, more: &[&str]) -> Result<(Running, String)> {
    let words = [&["run", "--web", web][..], more].concat();
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
        thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until the picture in the browser satisfies a condition.
fn until(browser: &mut Browser, enough: impl Fn(&Picture) -> bool) -> Result<Picture> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let picture = browser.picture(usize::MAX >> 1)?;
        if let Some(picture) = picture.filter(&enough) {
            return Ok(picture);
        }
        if Instant::now() > deadline {
            let lines = browser.picture(usize::MAX >> 1)?.map(|it| it.all(PAGES[0].2));
            bail!("timeout; the picture shows {lines:#?}");
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until the probe has finished its checks and waits for input.
fn ready(browser: &mut Browser) -> Result<()> {
    until(browser, |it| find(&it.all(PAGES[0].2), "Mouse").is_some()).map(|_| ())
}

/// Waits until the line with a label contains a text.
fn reads(browser: &mut Browser, label: &str, text: &str) -> Result<()> {
    until(browser, says(PAGES[0].2, label, text)).map(|_| ())
}
