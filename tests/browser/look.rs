//! The look of the page: dark and light, on a phone, and without a picture of the machine.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use serde_json::Value;
use transom_tests::browser::{Browser, Window};
use transom_tests::print::{PAGES, says};
use transom_tests::program::{PATIENCE, connect};
use vmm::control::Command;

use crate::{CONNECTED, WAITING, album, browser, machine, ready, runs_here};

/// A script that returns the texts whose contrast with their background is below 4.5 to 1 (WCAG
/// 2.2, 1.4.3), with the ratio. Colors come from the page; behind it is the system's color.
const PALE: &str = "(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    const pixel = (colours) => {
        canvas.fillStyle = '#fff';
        canvas.fillRect(0, 0, 1, 1);
        for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = (rgb) => {
        const [r, g, b] = rgb.map((it) => it / 255)
            .map((it) => it <= .04045 ? it / 12.92 : ((it + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const pale = [];
    for (const it of document.querySelectorAll('body *')) {
        const own = [...it.childNodes].some((node) => node.nodeType == 3 && node.data.trim());
        const seen = it.checkVisibility({ opacityProperty: true, visibilityProperty: true });
        if (!own || !seen || it.closest('script')) { continue; }
        const behind = [];
        for (let up = it; up; up = up.parentElement) {
            behind.unshift(getComputedStyle(up).backgroundColor);
        }
        const ground = light(pixel(behind));
        const text = light(pixel([...behind, getComputedStyle(it).color]));
        const ratio = (Math.max(ground, text) + .05) / (Math.min(ground, text) + .05);
        if (ratio < 4.5) { pale.push([it.outerHTML.slice(0, 80), ratio]); }
    }
    return pale;
})()";

/// A script that returns the elements that are out of reach. Only a list of steps may scroll, and
/// all controls must be inside the window and at least 36 by 36 pixels, large enough for a finger.
const REACHABLE: &str = "(() => {
    const page = document.documentElement;
    const high = page.scrollHeight > innerHeight && !document.querySelector('#steps');
    const wrong = page.scrollWidth > innerWidth || high ? ['page'] : [];
    const controls = '#bar button, #progress, .card button, .card input';
    for (const it of document.querySelectorAll(controls)) {
        if (!it.checkVisibility()) { continue; }
        const { left, right, top, bottom, width, height } = it.getBoundingClientRect();
        const inside = left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight;
        const large = width >= 36 && height >= 36;
        if (!inside || !large) { wrong.push(it.outerHTML.slice(0, 80)); }
    }
    return wrong;
})()";

/// Windows in which all controls must be reachable.
const WINDOWS: [(&str, Window); 4] = [
    ("desk", Window::desk(1280, 800)),
    ("portrait", Window::phone(375, 667)),
    ("landscape", Window::phone(667, 375)),
    ("small", Window::phone(320, 568)),
];

/// Checks a state of the page in both color schemes and all windows.
pub(crate) fn look(browser: &mut Browser, state: &str) -> Result<()> {
    let none = Value::Array(Vec::new());
    for (name, window) in WINDOWS {
        browser.resize(window)?;
        let wrong = browser.value(REACHABLE)?;
        ensure!(wrong == none, "{state}, {name}: cut off or too small: {wrong}");
        for dark in [false, true] {
            browser.darken(dark)?;
            let colours = if dark { "dark" } else { "light" };
            let pale = browser.value(PALE)?;
            ensure!(pale == none, "{state}, {colours}: hard to read: {pale}");
            if name == "desk" || (name == "portrait") == dark {
                browser.keep(&album(), &format!("{state}-{name}-{colours}"))?;
            }
        }
    }
    browser.resize(WINDOWS[0].1)
}

/// On an upright phone, the zoom button makes a wide picture as high as the window; scrolling
/// reaches the rest.
fn zooms(browser: &mut Browser, prefix: &str) -> Result<()> {
    const HIGH: &str = "(() => {
        const pane = document.querySelector('#pane');
        const shown = document.querySelector('#screen canvas').getBoundingClientRect();
        return [shown.height / pane.clientHeight, pane.scrollWidth / pane.clientWidth];
    })()";
    let hidden = browser.value("document.querySelector('#zoom').hidden")?;
    ensure!(hidden == true, "a desktop window shows the zoom button");
    browser.resize(Window::phone(375, 667))?;
    browser.until("!document.querySelector('#zoom').hidden")?;
    // The viewer shrinks its picture some time after the window has shrunk.
    browser.until(&format!("{HIGH}[0] < .5 && {HIGH}[1] == 1"))?;
    browser.click("#zoom")?;
    browser.until(&format!("{HIGH}[0] > .95"))?;
    let zoomed = browser.value(HIGH)?;
    ensure!(zoomed[1].as_f64() > Some(2.0), "the zoomed picture does not scroll: {zoomed}");
    browser.keep(&album(), &format!("{prefix}zoomed"))?;
    browser.click("#board")?;
    browser.until("document.querySelector('#strip').classList.contains('after')")?;
    let apart = browser.value(
        "(() => {
            document.querySelector('#toast').textContent = 'A message';
            const [toast, strip] = ['#toast', '#strip']
                .map((it) => document.querySelector(it).getBoundingClientRect());
            return toast.height > 0 && strip.height > 0 && toast.bottom <= strip.top;
        })()",
    )?;
    ensure!(apart == true, "a message covers the row of keys");
    browser.keep(&album(), &format!("{prefix}strip-phone"))?;
    browser.value("document.querySelector('#strip').scrollLeft = 1e6")?;
    browser.until("document.querySelector('#strip').className == 'before'")?;
    browser.click("#board")?;
    browser.click("#zoom")?;
    browser.resize(WINDOWS[0].1)
}

fn background(browser: &mut Browser, dark: bool) -> Result<Value> {
    browser.darken(dark)?;
    browser.value("getComputedStyle(document.body).backgroundColor")
}

#[test]
fn every_state_is_readable_in_both_themes_and_on_phones() -> Result<()> {
    if !runs_here("every_state_is_readable_in_both_themes_and_on_phones") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    look_at_every_state(&mut browser, folder.path(), "")
}

/// The screenshots of another browser have a prefix.
pub(crate) fn look_at_every_state(
    browser: &mut Browser,
    folder: &Path,
    prefix: &str,
) -> Result<()> {
    let look = |browser: &mut Browser, state: &str| look(browser, &format!("{prefix}{state}"));
    let (password, control) = (folder.join("password"), folder.join("control"));
    fs::write(&password, "secret\n")?;
    let web = format!("127.0.0.1:0,user=me,password={}", password.display());
    let place = control.display().to_string();
    let (mut machine, address) = machine(&web, &["--control", &place])?;
    browser.go(&address)?;
    browser.until("document.forms.length == 1 && document.readyState == 'complete'")?;
    let [dark, light] = [background(browser, true)?, background(browser, false)?];
    ensure!(dark != light, "dark and light have the same background");
    browser.until("document.activeElement.name == 'user'")?;
    browser.until("document.querySelector('#hint').textContent.includes('password=FILE')")?;
    look(browser, "login")?;
    let wrong = "document.querySelector('[name=user]').value = 'me'; \
                 document.querySelector('[name=password]').value = 'no'; \
                 document.querySelector('form button').click()";
    browser.value(wrong)?;
    browser.until(
        "document.querySelector('.wrong').textContent == 'The name or the password is wrong.'",
    )?;
    browser.until("document.querySelector('[name=user]').value == 'me'")?;
    look(browser, "wrong")?;
    let right = wrong.replace("'no'", "'secret'");
    browser.value(&right)?;
    browser.until(CONNECTED)?;
    ready(browser)?;
    look(browser, "picture")?;
    for menu in ["keys", "clipboard", "view", "power"] {
        browser.click(&format!("[popovertarget={menu}]"))?;
        browser.until(&format!("document.querySelector('#{menu}').matches(':popover-open')"))?;
        look(browser, &format!("menu-{menu}"))?;
        browser.value(&format!("document.querySelector('#{menu}').hidePopover()"))?;
    }
    // Another client pauses the machine, and this page resumes it.
    connect(&control)?.ask(&Command::Pause)?;
    browser.click("[popovertarget=power]")?;
    browser.until("document.querySelector('#pause').textContent == 'Resume'")?;
    browser.value("document.querySelector('#power').hidePopover()")?;
    browser.until("document.querySelector('#reason').textContent == 'The machine is paused.'")?;
    look(browser, "paused")?;
    browser.click("#resume")?;
    browser.until("document.querySelector('#cover').hidden")?;
    let status = connect(&control)?.ask(&Command::Status)?;
    ensure!(status["state"] == "running", "the machine has not resumed: {status}");
    zooms(browser, prefix)?;
    // Switching off needs a confirmation.
    browser.value("window.asked = 0; window.confirm = () => ++window.asked > 1; 0")?;
    for _ in 0..2 {
        browser.value("document.querySelector('[data-press=off]').click()")?;
    }
    ensure!(machine.wait(PATIENCE)? == 0, "{}", machine.stderr.text());
    browser.until(WAITING)?;
    browser.until("document.querySelector('#reason').textContent == 'The machine is off.'")?;
    browser.until("document.querySelector('#last:not([hidden])') != null")?;
    browser.until("document.querySelector('#how').textContent.includes('Run vmm again')")?;
    look(browser, "ended")?;
    Ok(())
}

#[test]
fn the_page_reconnects_automatically() -> Result<()> {
    if !runs_here("the_page_reconnects_automatically") {
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    let (first, address) = machine("127.0.0.1:0", &[])?;
    browser.go(&address)?;
    ready(&mut browser)?;
    // Dropping kills the process: the connection breaks without a goodbye.
    drop(first);
    browser.until(WAITING)?;
    browser.until("document.querySelector('#hope').checkVisibility()")?;
    browser.keep(&album(), "lost")?;
    // The last picture stays, dimmed.
    let last = browser.value(
        "(() => { const last = document.querySelector('#last'); \
         return [last.hidden, last.width, getComputedStyle(last).filter]; })()",
    )?;
    ensure!(last[0] == false && last[1] == 1280, "{last}");
    ensure!(last[2].as_str().is_some_and(|it| it.contains("brightness")), "{last}");
    let place = address.trim_start_matches("http://").trim_end_matches('/');
    let (_second, _) = machine(place, &[])?;
    browser.until(CONNECTED)?;
    browser.until("document.querySelector('#last:not([hidden])') == null")?;
    crate::until(&mut browser, says(PAGES[0].2, "Keys", "type something")).map(|_| ())
}
