//! What it looks like: dark and light, on a phone, and while there is no picture.

use std::fs;

use anyhow::{Result, ensure};
use serde_json::Value;
use transom_tests::browser::{Browser, Window};
use transom_tests::print::{PAGES, says};
use transom_tests::program::{PATIENCE, connect};
use vmm::control::Command;

use crate::{CONNECTED, WAITING, album, browser, machine, ready, runs_here};

/// What is too hard to read: texts whose contrast with what is behind them is below 4.5 to 1, as
/// WCAG 2.2 (1.4.3) counts. Colours come from the page, behind which there is one of the system's.
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

/// Nothing is cut off: no way to scroll, all that can be touched within the window, and large
/// enough for a finger.
const REACHABLE: &str = "(() => {
    const page = document.documentElement;
    const wrong = page.scrollWidth > innerWidth || page.scrollHeight > innerHeight ? ['page'] : [];
    for (const it of document.querySelectorAll('#bar button, .card button, .card input')) {
        if (!it.checkVisibility()) { continue; }
        const { left, right, top, bottom, width, height } = it.getBoundingClientRect();
        const inside = left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight;
        const large = width >= 36 && height >= 36;
        if (!inside || !large) { wrong.push(it.outerHTML.slice(0, 80)); }
    }
    return wrong;
})()";

/// Windows in which everything must be there.
const WINDOWS: [(&str, Window); 4] = [
    ("desk", Window::desk(1280, 800)),
    ("portrait", Window::phone(375, 667)),
    ("landscape", Window::phone(667, 375)),
    ("small", Window::phone(320, 568)),
];

/// Looks at a state in both colours and all windows.
fn look(browser: &mut Browser, state: &str) -> Result<()> {
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

/// An upright phone shows a wide picture as high as it is, and all of it can be reached.
fn zooms(browser: &mut Browser) -> Result<()> {
    const HIGH: &str = "(() => {
        const pane = document.querySelector('#pane');
        const shown = document.querySelector('#screen canvas').getBoundingClientRect();
        return [shown.height / pane.clientHeight, pane.scrollWidth / pane.clientWidth];
    })()";
    ensure!(browser.value("document.querySelector('#zoom').hidden")? == true, "a desk needs none");
    browser.resize(Window::phone(375, 667))?;
    browser.until("!document.querySelector('#zoom').hidden")?;
    // The viewer draws its picture smaller some time after its window has become so.
    browser.until(&format!("{HIGH}[0] < .5 && {HIGH}[1] == 1"))?;
    browser.click("#zoom")?;
    browser.until(&format!("{HIGH}[0] > .95"))?;
    let zoomed = browser.value(HIGH)?;
    ensure!(zoomed[1].as_f64() > Some(2.0), "a finger moves it: {zoomed}");
    browser.keep(&album(), "zoomed")?;
    browser.click("#board")?;
    browser.until("document.querySelector('#strip').classList.contains('after')")?;
    browser.keep(&album(), "strip-phone")?;
    browser.value("document.querySelector('#strip').scrollLeft = 1e6")?;
    browser.until("document.querySelector('#strip').className == 'before'")?;
    browser.click("#board")?;
    browser.click("#zoom")?;
    browser.resize(WINDOWS[0].1)
}

fn ground(browser: &mut Browser, dark: bool) -> Result<Value> {
    browser.darken(dark)?;
    browser.value("getComputedStyle(document.body).backgroundColor")
}

#[test]
fn every_state_can_be_read_and_reached_in_both_colours_and_on_phones() -> Result<()> {
    if !runs_here("every_state_can_be_read_and_reached_in_both_colours_and_on_phones") {
        return Ok(());
    }
    let (mut browser, folder) = browser()?;
    let folder = folder.path();
    let (password, control) = (folder.join("password"), folder.join("control"));
    fs::write(&password, "secret\n")?;
    let web = format!("127.0.0.1:0,user=me,password={}", password.display());
    let place = control.display().to_string();
    let (mut machine, address) = machine(&web, &["--control", &place])?;
    browser.go(&address)?;
    browser.until("document.forms.length == 1 && document.readyState == 'complete'")?;
    ensure!(ground(&mut browser, true)? != ground(&mut browser, false)?, "dark is not light");
    browser.until("document.activeElement.name == 'user'")?;
    browser.until("document.querySelector('#hint').textContent.includes('password=FILE')")?;
    look(&mut browser, "login")?;
    let wrong = "document.querySelector('[name=user]').value = 'me'; \
                 document.querySelector('[name=password]').value = 'no'; \
                 document.querySelector('form button').click()";
    browser.value(wrong)?;
    browser.until(
        "document.querySelector('.wrong').textContent == 'The name or the password is wrong.'",
    )?;
    browser.until("document.querySelector('[name=user]').value == 'me'")?;
    look(&mut browser, "wrong")?;
    let right = wrong.replace("'no'", "'secret'");
    browser.value(&right)?;
    browser.until(CONNECTED)?;
    ready(&mut browser)?;
    look(&mut browser, "picture")?;
    for menu in ["keys", "clipboard", "view", "power"] {
        browser.click(&format!("[popovertarget={menu}]"))?;
        browser.until(&format!("document.querySelector('#{menu}').matches(':popover-open')"))?;
        look(&mut browser, &format!("menu-{menu}"))?;
        browser.value(&format!("document.querySelector('#{menu}').hidePopover()"))?;
    }
    // Another one pauses the machine, and this one lets it run on.
    connect(&control)?.ask(&Command::Pause)?;
    browser.click("[popovertarget=power]")?;
    browser.until("document.querySelector('#pause').textContent == 'Resume'")?;
    browser.value("document.querySelector('#power').hidePopover()")?;
    browser.until("document.querySelector('#reason').textContent == 'The machine is paused.'")?;
    look(&mut browser, "paused")?;
    browser.click("#resume")?;
    browser.until("document.querySelector('#cover').hidden")?;
    ensure!(connect(&control)?.ask(&Command::Status)?["state"] == "running", "it runs on");
    zooms(&mut browser)?;
    // Nothing is switched off by a slip.
    browser.value("window.asked = 0; window.confirm = () => ++window.asked > 1; 0")?;
    for _ in 0..2 {
        browser.value("document.querySelector('[data-press=off]').click()")?;
    }
    ensure!(machine.wait(PATIENCE)? == 0, "{}", machine.stderr.text());
    browser.until(WAITING)?;
    browser.until("document.querySelector('#reason').textContent == 'The machine is off.'")?;
    browser.until("document.querySelector('#last:not([hidden])') != null")?;
    browser.until("document.querySelector('#how').textContent.includes('Run vmm again')")?;
    look(&mut browser, "ended")?;
    Ok(())
}

#[test]
fn the_page_comes_back_by_itself() -> Result<()> {
    if !runs_here("the_page_comes_back_by_itself") {
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    let (first, address) = machine("127.0.0.1:0", &[])?;
    browser.go(&address)?;
    ready(&mut browser)?;
    // Killed: no word of parting.
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
