//! The clipboard of the console: texts go both ways between the page and an agent in the guest.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use host::clipboard::Hub;
use host::testutil::agent::{GuestAgent, WINDOWS};
use serde_json::json;
use tokio::runtime::Runtime;
use transom_tests::place;

use crate::stage::serve;
use crate::{CONNECTED, album, browser, runs_here};

const SEND: &str = "document.querySelector('#paste')";
const TICK: Duration = Duration::from_millis(20);

/// The guest takes texts until this one arrives.
pub(crate) fn arrives(guest: &mut GuestAgent, wanted: &str) -> Result<()> {
    place::until(&format!("`{wanted}` does not arrive in the guest"), || {
        guest.serve();
        thread::sleep(TICK);
        Ok(guest.texts.pop_front().is_some_and(|text| text == wanted))
    })
}

#[test]
fn the_clipboard_of_the_console_is_that_of_the_guest() -> Result<()> {
    if !runs_here("the_clipboard_of_the_console_is_that_of_the_guest") {
        return Ok(());
    }
    let clipboard = Arc::<Hub>::default();
    let runtime = Runtime::new()?;
    let address = serve(&runtime, &Arc::default(), &clipboard)?;
    let (mut browser, _folder) = browser()?;
    browser.go(&address)?;
    let context = browser.order("Target.getTargetInfo", &json!({}))?;
    let context = &context["targetInfo"]["browserContextId"];
    for name in ["clipboard-read", "clipboard-write"] {
        let right = json!({
            "permission": { "name": name }, "setting": "granted", "browserContextId": context
        });
        browser.order("Browser.setPermission", &right)?;
    }
    browser.until(CONNECTED)?;
    // The last button that appears moves the others.
    browser.until("!document.querySelector('#buttons').hidden")?;
    browser.click("[popovertarget=clipboard]")?;
    browser.until(&format!("{SEND}.disabled"))?;
    browser.keep(&album(), "clipboard-without-agent")?;
    browser.click("[popovertarget=clipboard]")?;

    // The agent comes later, and the button works.
    let mut guest = GuestAgent::start(&clipboard, WINDOWS);
    browser.click("[popovertarget=clipboard]")?;
    browser.until(&format!("!{SEND}.disabled && document.querySelector('#no-agent').hidden"))?;
    browser.click("#text")?;
    browser.order("Input.insertText", &json!({ "text": "Grüße\n€" }))?;
    browser.click("#paste")?;
    arrives(&mut guest, "Grüße\r\n€")?;
    browser.keep(&album(), "clipboard-with-agent")?;

    guest.copy("aus dem Gast: ü\r\n".as_bytes());
    browser.until("document.querySelector('#text').value == 'aus dem Gast: ü\\n'")?;
    browser.until("document.querySelector('#toast').textContent.endsWith('paste it here.')")?;
    let kept = browser.value("navigator.clipboard.readText()")?;
    ensure!(kept == "aus dem Gast: ü\n", "the browser's clipboard has {kept}");

    // A text that is copied on this device is sent by itself, if the user wants that.
    browser.value("navigator.clipboard.writeText('von hier')")?;
    browser.value("dispatchEvent(new Event('focus'))")?;
    thread::sleep(Duration::from_millis(500));
    guest.serve();
    ensure!(guest.texts.is_empty(), "a text was sent unasked: {:?}", guest.texts);
    browser.click("#share")?;
    arrives(&mut guest, "von hier")?;
    browser.value("navigator.clipboard.writeText('noch eins')")?;
    browser.value("dispatchEvent(new Event('focus'))")?;
    arrives(&mut guest, "noch eins")?;
    guest.copy(b"mine");
    browser.until("document.querySelector('#text').value == 'mine'")?;
    browser.value("dispatchEvent(new Event('focus'))")?;
    thread::sleep(Duration::from_millis(500));
    guest.serve();
    ensure!(guest.texts.is_empty(), "the guest's own text came back: {:?}", guest.texts);
    Ok(())
}
