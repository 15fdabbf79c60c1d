//! The noVNC page in a real browser, used as a person would.

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tempfile::TempDir;
use vmm::screenshot::Picture;

use crate::browser::Browser;
use crate::desk::{Key, PASSWORD, Sitter};
use crate::sight::Sight;

/// The page, after login.
pub struct Page {
    browser: Browser,
    _folder: TempDir,
}

/// The pixels of noVNC's canvas: one number each, with red in the lowest byte.
const PIXELS: &str = "(() => {
    const canvas = document.querySelector('canvas');
    const { width, height } = canvas;
    const { data } = canvas.getContext('2d').getImageData(0, 0, width, height);
    return { width, height, pixels: Array.from(new Uint32Array(data.buffer)) };
})()";

/// The position on the page of a pixel of the canvas.
fn place(x: u16, y: u16) -> String {
    format!(
        "(() => {{ const it = document.querySelector('canvas'); \
         const {{ left, top, width, height }} = it.getBoundingClientRect(); \
         return [left + ({x} + 0.5) * width / it.width, top + ({y} + 0.5) * height / it.height]; \
         }})()"
    )
}

impl Page {
    /// Opens the page at a port of this host, enters the password, and waits for the picture.
    pub fn new(port: u16) -> anyhow::Result<Self> {
        Self::open(port, None)
    }

    /// Like `new`, but also enters a user name.
    pub fn open(port: u16, user: Option<&str>) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let browser = Browser::new(&folder.path().join("profile"));
        let mut browser = browser.context("chromium (package chromium)")?;
        // The window is larger than the guest's screen, so that each of the guest's pixels can be
        // clicked.
        let room =
            json!({ "width": 1600, "height": 1300, "deviceScaleFactor": 1, "mobile": false });
        browser.order("Emulation.setDeviceMetricsOverride", &room)?;
        browser.go(&format!("http://127.0.0.1:{port}/"))?;
        browser.until("document.readyState == 'complete' && document.forms.length == 1")?;
        for (field, text) in [("user", user), ("password", Some(PASSWORD))] {
            if let Some(text) = text {
                browser
                    .value(&format!("document.querySelector('[name={field}]').value = '{text}'"))?;
            }
        }
        browser.value("document.querySelector('form button').click()")?;
        let mut page = Self { browser, _folder: folder };
        page.is_connected()?;
        Ok(page)
    }

    /// Waits until the page shows the machine.
    pub fn is_connected(&mut self) -> anyhow::Result<()> {
        self.browser.until("document.body.dataset.state == 'connected'")
    }

    fn key(&mut self, key: &str, code: &str, number: u8) -> anyhow::Result<()> {
        for kind in ["keyDown", "keyUp"] {
            let number = json!(number);
            let what =
                json!({ "type": kind, "key": key, "code": code, "windowsVirtualKeyCode": number });
            self.browser.order("Input.dispatchKeyEvent", &what)?;
        }
        Ok(())
    }

    fn mouse(&mut self, kind: &str, place: &[Value], buttons: u8) -> anyhow::Result<()> {
        let button = if kind == "mouseMoved" { "none" } else { "left" };
        let what = json!({
            "type": kind, "x": place[0], "y": place[1],
            "button": button, "buttons": buttons, "clickCount": 1,
        });
        self.browser.order("Input.dispatchMouseEvent", &what)?;
        Ok(())
    }
}

impl Sitter for Page {
    fn see(&mut self) -> anyhow::Result<Sight> {
        let seen = self.browser.value(PIXELS)?;
        let side = |name: &str| {
            let side = seen[name].as_u64().and_then(|it| u32::try_from(it).ok());
            side.with_context(|| format!("{name} of the canvas"))
        };
        let picture = Picture { width: side("width")?, height: side("height")? };
        let mut pixels = Vec::new();
        for pixel in seen["pixels"].as_array().context("pixels")? {
            let pixel = pixel.as_u64().context("a pixel")?;
            let [red, green, blue, ..] = pixel.to_le_bytes();
            pixels.extend([blue, green, red, 0]);
        }
        Sight::new(picture, pixels)
    }

    fn type_text(&mut self, text: &str) -> anyhow::Result<()> {
        for letter in text.chars() {
            let number = u8::try_from(letter.to_ascii_uppercase())?;
            let code = match letter {
                'a'..='z' => format!("Key{}", letter.to_ascii_uppercase()),
                '0'..='9' => format!("Digit{letter}"),
                ' ' => "Space".into(),
                _ => bail!("{letter:?}: this test has no key for it"),
            };
            self.key(&letter.to_string(), &code, number)?;
        }
        Ok(())
    }

    fn press(&mut self, key: Key) -> anyhow::Result<()> {
        let (name, number) = match key {
            Key::Enter => ("Enter", 13),
            Key::Escape => ("Escape", 27),
            Key::Down => ("ArrowDown", 40),
            Key::Up => ("ArrowUp", 38),
            Key::F10 => ("F10", 121),
        };
        self.key(name, name, number)
    }

    fn click(&mut self, x: u16, y: u16) -> anyhow::Result<()> {
        let place = self.browser.value(&place(x, y))?;
        let place = place.as_array().filter(|it| it.len() == 2).context("a place")?.clone();
        self.mouse("mouseMoved", &place, 0)?;
        self.mouse("mousePressed", &place, 1)?;
        self.mouse("mouseReleased", &place, 0)
    }
}
