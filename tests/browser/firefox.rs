//! The screen in Firefox, whose clipboard and sound follow other rules than Chromium's.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use host::clipboard;
use host::sound;
use host::testutil::agent::{GuestAgent, WINDOWS};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use transom_tests::browser::{Browser, Window, firefox};
use transom_tests::print::PAGES;
use transom_tests::program::{Running, connect, not_run};
use transom_tests::{lab, place};

use crate::clipboard::arrives;
use crate::look::look_at_every_state;
use crate::sight::{FITS, fingers, page_position, pointer, type_word};
use crate::sound::plays_without_gaps;
use crate::stage::serve;
use crate::{CONNECTED, album, machine, reads, ready, there_is_kvm};

/// A script that collects violations of the page's own security policy.
const WATCH: &str = "() => addEventListener('securitypolicyviolation', (event) => \
    (window.broken ??= []).push(`${event.violatedDirective}: ${event.blockedURI}`))";

fn runs_here(test: &str) -> bool {
    if !firefox::is_here() {
        not_run(test, "there is no firefox-esr");
        return false;
    }
    there_is_kvm(test)
}

/// Starts Firefox, with a folder for the test.
fn browser() -> Result<(Browser, TempDir)> {
    let folder = tempfile::tempdir()?;
    Ok((Browser::firefox(&folder.path().join("profile"))?, folder))
}

#[test]
fn firefox_shows_the_machine_and_takes_keys_and_pointer() -> Result<()> {
    if !runs_here("firefox_shows_the_machine_and_takes_keys_and_pointer") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let (password, control) = (folder.path().join("password"), folder.path().join("control"));
    fs::write(&password, "secret\n")?;
    let web = format!("127.0.0.1:0,user=me,password={}", password.display());
    let (machine, address) = machine(&web, &["--control", &control.display().to_string()])?;
    browser.watch(WATCH)?;
    browser.resize(Window::desk(1280, 800))?;
    browser.go(&address)?;
    browser.until("document.forms.length == 1 && document.readyState == 'complete'")?;
    keeps_its_policy(&mut browser)?;
    browser.log_in("me", "secret")?;
    browser.until(CONNECTED)?;
    ready(&mut browser)?;
    type_word(&mut browser, "transom")?;
    reads(&mut browser, "Text", "transom_")?;
    browser.click("#cad")?;
    reads(&mut browser, "Keys", "Left Ctrl   Left Alt   Delete")?;
    browser.until(FITS)?;
    let at = [400, 300];
    let place = page_position(&mut browser, at)?;
    browser.point(place)?;
    pointer(&mut browser, at)?;
    // The browser shows the machine's picture exactly, to the last pixel, after it has arrived.
    place::until("the browser's picture differs from the machine's", || {
        let (_, shown) = connect(&control)?.screenshot()?;
        let seen = browser.picture(usize::MAX >> 1)?.context("a picture")?;
        let same = shown.chunks(4).zip(seen.pixels.chunks(4)).all(|(a, b)| a[1] == b[1]);
        Ok(same && shown.len() == seen.pixels.len() && seen.width == PAGES[0].0.0)
    })?;
    browser.keep(&album(), "firefox")?;
    fingers(&mut browser, "firefox-")?;
    keeps_its_policy(&mut browser)?;
    drop(machine);
    Ok(())
}

fn keeps_its_policy(browser: &mut Browser) -> Result<()> {
    let broken = browser.value("window.broken ?? null")?;
    ensure!(broken.is_null(), "the page violates its own security policy: {broken}");
    Ok(())
}

/// Firefox has no permission to read the clipboard, and lets a page write it only shortly after a
/// key or a click.
#[test]
fn firefox_shares_the_clipboard_of_the_guest_as_far_as_it_lets_pages() -> Result<()> {
    if !runs_here("firefox_shares_the_clipboard_of_the_guest_as_far_as_it_lets_pages") {
        return Ok(());
    }
    let (clipboard, sound) = (Arc::<clipboard::Hub>::default(), Arc::<sound::Hub>::default());
    sound.add_card();
    let runtime = Runtime::new()?;
    let address = serve(&runtime, &sound, &clipboard)?;
    let (mut browser, _folder) = browser()?;
    browser.resize(Window::desk(1000, 700))?;
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    browser.until("!document.querySelector('#buttons').hidden")?;
    let mut guest = GuestAgent::start(&clipboard, WINDOWS);
    guest.copy(b"without a click\n");
    browser.until(
        "document.querySelector('#toast').textContent \
         == 'Copied in the machine: “Clipboard” above has the text.'",
    )?;
    browser.click("[popovertarget=clipboard]")?;
    browser.until("!document.querySelector('#paste').disabled")?;
    browser.until("document.querySelector('#text').value == 'without a click\\n'")?;
    // Nothing can be sent by itself, so that is not offered.
    let offered = browser.value("document.querySelector('#share').checkVisibility()")?;
    ensure!(offered == false, "Firefox offers to send what is copied");
    browser.keep(&album(), "firefox-clipboard")?;
    browser.value("document.querySelector('#text').value = 'Grüße\\n€'; 0")?;
    browser.click("#paste")?;
    arrives(&mut guest, "Grüße\r\n€")?;
    guest.copy("after a click: ü\r\n".as_bytes());
    browser.until(
        "document.querySelector('#toast').textContent == 'Copied in the machine: paste it here.'",
    )?;
    let kept = browser.clipboard()?;
    ensure!(kept == "after a click: ü\n", "the clipboard has `{kept}`");
    // Firefox never starts to play on a device without a sound card.
    browser.click("#sound")?;
    browser.until(
        "document.querySelector('#toast').textContent.startsWith('The browser plays no sound yet')",
    )?;
    browser.keep(&album(), "firefox-no-sound")
}

/// A sound card for a browser with this profile: it takes sound as fast as a real one.
fn sound_card(profile: &Path) -> Result<Running> {
    fs::create_dir_all(profile)?;
    let socket = profile.join(firefox::SOUND);
    let mut command = Command::new("pulseaudio");
    command.args(["-n", "--daemonize=no", "--exit-idle-time=-1", "--load=module-null-sink"]);
    let protocol =
        format!("module-native-protocol-unix auth-anonymous=1 socket={}", socket.display());
    command.arg(format!("--load={protocol}"));
    command.env("HOME", profile).env("XDG_RUNTIME_DIR", profile);
    let card = Running::spawn(&mut command)?;
    place::until("PulseAudio has no socket", || Ok(socket.exists()))?;
    Ok(card)
}

#[test]
fn sound_plays_without_gaps_in_firefox() -> Result<()> {
    let test = "sound_plays_without_gaps_in_firefox";
    if !runs_here(test) {
        return Ok(());
    }
    if Command::new("pulseaudio").arg("--version").output().is_err() {
        not_run(test, "there is no pulseaudio");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let profile = folder.path().join("profile");
    let _card = sound_card(&profile)?;
    let sound = Arc::<sound::Hub>::default();
    sound.add_card();
    let runtime = Runtime::new()?;
    let address = serve(&runtime, &sound, &Arc::default())?;
    let mut browser = Browser::firefox(&profile)?;
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    plays_without_gaps(&mut browser, &sound, if lab::everything() { 60 } else { 2 })
}

#[test]
fn every_state_is_readable_in_firefox() -> Result<()> {
    let test = "every_state_is_readable_in_firefox";
    if !lab::everything() {
        not_run(test, lab::THOROUGH);
        return Ok(());
    }
    if !runs_here(test) {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    look_at_every_state(&mut browser, folder.path(), "firefox-")
}
