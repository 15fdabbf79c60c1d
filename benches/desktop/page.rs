//! The pages in Chromium, and the frames that they show.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tempfile::TempDir;
use transom_tests::browser::{Browser, Window};
use transom_tests::rdp_hosts::{PASSWORD, USER};

use crate::pod::processor_seconds;
use crate::show::{LAST_FRAME, SHADES, SIDE, SIZE, SQUARES};

const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Console,
    Desktop,
}

impl Way {
    pub(crate) const ALL: [Self; 2] = [Self::Console, Self::Desktop];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Console => "console",
            Self::Desktop => "desktop",
        }
    }

    fn path(self) -> &'static str {
        match self {
            Self::Console => "",
            Self::Desktop => "desktop",
        }
    }

    fn canvas(self) -> &'static str {
        match self {
            Self::Console => "#screen div canvas",
            Self::Desktop => "#screen",
        }
    }
}

/// Counts what the page's WebSockets receive. DevTools would send all of it to this process, which
/// costs the browser more time than some of its clients.
const COUNT: &str = "window.received = 0; \
    window.WebSocket = new Proxy(WebSocket, { \
      construct(target, words, made) { \
        const socket = Reflect.construct(target, words, made); \
        socket.addEventListener('message', ({ data }) => { \
          window.received += data.byteLength ?? data.size ?? data.length; }); \
        return socket; } });";

/// Looks at the canvas whenever the browser draws the page.
const LOOK: &str = "(() => { \
    const context = document.querySelector(CANVAS).getContext('2d'); \
    const seen = { looks: 0, changed: 0, whole: 0, frames: '', frame: -1, since: 0 }; \
    window.seen = seen; \
    const look = () => { \
      const frames = PLACES.map(([x, y]) => \
        Math.round((context.getImageData(x, y, 1, 1).data[1] - FIRST) / STEP)); \
      seen.looks += 1; \
      seen.changed += seen.frames !== frames.join() ? 1 : 0; \
      seen.frames = frames.join(); \
      if (frames.every((it) => it === frames[0]) && seen.frame !== frames[0]) { \
        [seen.frame, seen.since] = [frames[0], Date.now()]; \
        seen.whole += 1; \
      } \
      requestAnimationFrame(look); \
    }; \
    look(); })()";

/// Counts of the pictures that the page has shown.
pub(crate) struct Seen {
    pub(crate) looks: f64,
    /// Looks at which another picture was there.
    pub(crate) changed: f64,
    /// Pictures that were completely there.
    pub(crate) whole: f64,
    /// Bytes of WebSockets.
    pub(crate) bytes: f64,
}

pub(crate) struct Page {
    browser: Browser,
    way: Way,
    _profile: TempDir,
}

impl Page {
    /// Opens the page with a window in which the picture has its own size.
    pub(crate) fn open(port: u16, way: Way) -> Result<Self> {
        let profile = tempfile::tempdir()?;
        let browser = Browser::new(&profile.path().join("profile"))?;
        let mut page = Self { browser, way, _profile: profile };
        // It reports each message of a WebSocket.
        page.browser.order("Network.disable", &json!({}))?;
        page.browser.order("Page.addScriptToEvaluateOnNewDocument", &json!({ "source": COUNT }))?;
        let address = format!("http://127.0.0.1:{port}/{}", way.path());
        page.browser.resize(Window::desk(SIZE.0.into(), SIZE.1.into()))?;
        page.browser.go(&address)?;
        // Before its styles are there, the page has another layout.
        page.until("document.readyState === 'complete'")?;
        let bar = "[innerWidth - document.getElementById('pane').clientWidth, \
                   innerHeight - document.getElementById('pane').clientHeight]";
        let bar = page.browser.value(bar)?;
        let side = |at: usize| anyhow::Ok(u32::try_from(bar[at].as_u64().context("a size")?)?);
        let window = Window::desk(u32::from(SIZE.0) + side(0)?, u32::from(SIZE.1) + side(1)?);
        page.browser.resize(window)?;
        page.browser.go(&address)?;
        page.sign_in()?;
        let [width, height] = [SIZE.0, SIZE.1];
        page.until(&format!(
            "(() => {{ const {{ width, height, clientWidth }} = document.querySelector({:?}); \
             return width === {width} && height === {height} && clientWidth === {width}; }})()",
            way.canvas()
        ))?;
        Ok(page)
    }

    /// Answers the questions of the desktop's page.
    fn sign_in(&mut self) -> Result<()> {
        let shown = |id: &str| format!("document.getElementById('{id}')?.hidden === false");
        let connected = "document.body.dataset.state == 'connected'";
        let end = Instant::now() + PATIENCE;
        let is =
            |page: &mut Self, what: &str| page.browser.value(what).ok() == Some(Value::Bool(true));
        while !is(self, connected) {
            if self.way == Way::Desktop && is(self, &shown("login")) {
                for (name, text) in [("user", USER), ("password", PASSWORD)] {
                    let set = format!("document.getElementById({name:?}).value = {text:?}");
                    self.browser.value(&set)?;
                }
                self.browser.click("#login button")?;
            } else if self.way == Way::Desktop && is(self, &shown("trust")) {
                self.browser.click("#trust")?;
            }
            if Instant::now() > end {
                self.keep("failed")?;
                bail!("{}", self.browser.value("document.body.innerText")?);
            }
            sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    fn until(&mut self, what: &str) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        // A page that is about to be replaced has no body.
        while self.browser.value(what).ok() != Some(Value::Bool(true)) {
            if Instant::now() > end {
                self.keep("failed")?;
                bail!("`{what}` never held: {}", self.browser.value("document.body.innerText")?);
            }
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Begins to look at the picture, and waits until there is one.
    pub(crate) fn watch(&mut self) -> Result<()> {
        let places = SQUARES.map(|(x, y)| [x + SIDE / 2, y + SIDE / 2]);
        let look = LOOK
            .replace("CANVAS", &format!("{:?}", self.way.canvas()))
            .replace("PLACES", &json!(places).to_string())
            .replace("FIRST", &SHADES.0.to_string())
            .replace("STEP", &SHADES.1.to_string());
        self.browser.value(&look)?;
        self.until("window.seen.whole > 1")
    }

    pub(crate) fn seen(&mut self) -> Result<Seen> {
        let seen = self.browser.value("[seen.looks, seen.changed, seen.whole, received]")?;
        let number = |at: usize| seen[at].as_f64().context("a number");
        let [looks, changed, whole, bytes] = [number(0)?, number(1)?, number(2)?, number(3)?];
        Ok(Seen { looks, changed, whole, bytes })
    }

    /// Waits for the last picture, which was drawn just now. Returns the milliseconds until the
    /// page showed it.
    pub(crate) fn until_last(&mut self) -> Result<f64> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64() * 1e3;
        self.until(&format!("window.seen.frame === {LAST_FRAME}"))?;
        let since = self.browser.value("seen.since")?.as_f64().context("a time")?;
        Ok(since - now)
    }

    pub(crate) fn processor_seconds(&self) -> Result<f64> {
        processor_seconds(self.browser.id())
    }

    pub(crate) fn keep(&mut self, name: &str) -> Result<()> {
        self.browser.keep(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("desktop"), name)
    }
}
