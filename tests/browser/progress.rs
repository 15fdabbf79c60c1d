//! The container's page while Windows is installed: the page itself in a browser, with the events
//! of a pod.

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use transom_tests::browser::{Window, is_here};
use transom_tests::program::not_run;

use crate::failed::serve;
use crate::{album, browser};

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
            let link = browser.value("document.querySelector('#open').checkVisibility()")?;
            let fits = "document.documentElement.scrollWidth <= innerWidth";
            ensure!(link == true && browser.value(fits)? == true, "{name}, {size}: {link}");
            browser.keep(&album(), &format!("install-{name}-{size}"))?;
        }
    }
    Ok(())
}
