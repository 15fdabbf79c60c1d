//! The container's page while Windows is installed: the page itself in a browser, with the events
//! of a pod.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use transom_tests::browser::{Window, is_here};
use transom_tests::program::not_run;

use crate::failed::{PASSWORD, serve};
use crate::look::look;
use crate::{CONNECTED, album, browser, machine, ready, runs_here};

/// Adds to the answers of `vmm` what a pod has: progress, and its events, which the test sends.
const POD: &str = "
    const get = window.fetch;
    window.fetch = async (...what) => {
        const answer = await get(...what);
        return what[0] != 'session' ? answer
            : Response.json({ ...await answer.json(), progress: true });
    };
    window.EventSource = class {
        constructor() { window.events = this; }
        close() { this.closed = true; }
    };";

/// The steps of the list: finished, current and later ones.
const LIST: &str = "[...document.querySelectorAll('#steps li')].map((it) => \
                    it.className || it.getAttribute('aria-current') || 'later').join(' ')";

fn scene(doing: &str, installation: &Value) -> Value {
    let percent = installation.get("percent").and_then(Value::as_u64);
    let mut scene = json!({ "phase": "running", "doing": doing, "lines": 1 });
    scene["installation"] = installation.clone();
    if let Some(percent) = percent {
        scene["thousandths"] = (percent * 10).into();
    }
    scene
}

#[test]
fn an_installation_shows_its_steps() -> Result<()> {
    if !is_here() {
        not_run("an_installation_shows_its_steps", "there is no chromium");
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    let cases = [
        (
            "copies",
            scene("Copying Windows to the disk", &json!({ "stage": "apply-image", "percent": 43 })),
            ["step later later later later", "true", "Copying Windows to the disk"],
        ),
        (
            "fails",
            scene("Windows Setup failed", &json!({ "stage": "specialize", "failed": "setup" })),
            ["done step later later later", "false", "Windows Setup failed"],
        ),
        (
            "is-ready",
            scene("Windows is ready", &json!({ "stage": "ready", "install_status": 3 })),
            ["done done done bad done", "false", "Windows is ready"],
        ),
    ];
    for (name, scene, wanted) in cases {
        let address = serve(scene)?;
        for (size, window, dark) in
            [("desk", Window::desk(1280, 800), false), ("phone", Window::phone(375, 667), true)]
        {
            browser.resize(window)?;
            browser.darken(dark)?;
            browser.go(&address)?;
            browser.until("document.querySelectorAll('#steps li').length == 5")?;
            let list = browser.value(LIST)?;
            let bar = browser.value("String(!document.querySelector('#bar').hidden)")?;
            let doing = browser.value("document.querySelector('#doing').textContent")?;
            ensure!(json!([list, bar, doing]) == json!(wanted), "{name}: {list} {bar} {doing}");
            let hint = browser.value("document.querySelector('#hint').checkVisibility()")?;
            ensure!(hint == (name == "copies"), "{name}: a hint: {hint}");
            let link = browser.value("document.querySelector('#open').checkVisibility()")?;
            if name == "fails" {
                browser.until("document.querySelector('#log').open")?;
                browser.until("document.querySelector('#lines').innerText.includes('setuperr')")?;
            }
            let fits = "document.documentElement.scrollWidth <= innerWidth";
            ensure!(link == true && browser.value(fits)? == true, "{name}, {size}: {link}");
            browser.keep(&album(), &format!("install-{name}-{size}"))?;
        }
    }
    Ok(())
}

/// The step of a download, its figures, and the value of the bar.
const DOWNLOAD: &str =
    "['#doing', '#left', '#hint'].map((it) => document.querySelector(it).innerText)
    .concat(document.querySelector('#bar').value)";

#[test]
fn a_download_shows_its_figures_and_a_finished_installation_the_made_password() -> Result<()> {
    if !is_here() {
        not_run("a_download_shows_its_figures", "there is no chromium");
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    let download = json!({ "phase": "preparing", "doing": "Downloading Windows 11…", "lines": 1,
        "thousandths": 400, "seconds_left": 95, "transfer":
        { "bytes": 3_080_000_000_u64, "of": 7_700_000_000_u64, "bytes_per_second": 48_600_000 } });
    // Lines end between the figures only.
    let figures = "40.0\u{a0}%, 3.1\u{a0}of\u{a0}7.7\u{a0}GB, 48.6\u{a0}MB/s, \
                   about\u{a0}2\u{a0}min\u{a0}left";
    let hint = "You can close this page: the download goes on.";
    let wanted = json!(["Downloading Windows 11…", figures, hint, 0.4]);
    browser.go(&serve(download)?)?;
    browser.until("document.querySelector('#left').innerText.includes('GB')")?;
    let seen = browser.value(DOWNLOAD)?;
    ensure!(seen == wanted, "{seen}");
    look(&mut browser, "download")?;
    let is_ready = scene("Windows is ready", &json!({ "stage": "ready" }));
    browser.go(&serve(is_ready)?)?;
    browser.until("document.querySelector('#account').checkVisibility()")?;
    let line = browser.value("document.querySelector('#account').innerText")?;
    let wanted = format!("Log on to Windows as Docker with the password {PASSWORD}");
    ensure!(line == wanted.as_str(), "{line}");
    look(&mut browser, "ready")
}

#[test]
fn the_viewer_links_to_an_installation() -> Result<()> {
    if !runs_here("the_viewer_links_to_an_installation") {
        return Ok(());
    }
    let (mut browser, _folder) = browser()?;
    let (_machine, address) = machine("127.0.0.1:0", &[])?;
    browser.order("Page.addScriptToEvaluateOnNewDocument", &json!({ "source": POD }))?;
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    ready(&mut browser)?;
    let link = "[document.querySelector('#progress').checkVisibility(), \
                document.querySelector('#progress span').textContent, events.closed ?? false]";
    ensure!(browser.value(link)? == json!([false, "", false]), "a link before the first event");
    let mut copies =
        scene("Copying Windows to the disk", &json!({ "stage": "apply-image", "percent": 43 }));
    copies["seconds_left"] = 100.into();
    let fails = scene("Windows Setup failed", &json!({ "stage": "specialize", "failed": "setup" }));
    let starts = json!({ "phase": "running", "doing": "Windows starts", "lines": 1 });
    let is_ready = scene("Windows is ready", &json!({ "stage": "ready" }));
    for (name, scene, wanted) in [
        ("copies", copies, json!([true, "43 % · Copying Windows to the disk · 2 min left", false])),
        ("fails", fails, json!([true, "The installation failed: see why", false])),
        ("starts", starts, json!([false, "Windows starts", false])),
        ("is-ready", is_ready, json!([false, "Windows starts", true])),
    ] {
        browser.value(&format!("events.onmessage({{ data: JSON.stringify({scene}) }})"))?;
        let seen = browser.value(link)?;
        ensure!(seen == wanted, "{name}: {seen}");
        look(&mut browser, &format!("viewer-{name}"))?;
    }
    let toast = browser.value("document.querySelector('#toast').textContent")?;
    ensure!(toast == "Windows is ready", "{toast}");
    Ok(())
}
