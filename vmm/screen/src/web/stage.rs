//! The machine behind the web server: one of this process, or one elsewhere.

use std::pin::Pin;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

pub use crate::keys::layout::{Layout, Name as LayoutName};
pub use crate::keys::text;
pub use crate::rfb::connection_limit::{ConnectionLimit, Slot};
pub use crate::rfb::listen::keep_alive;
pub use crate::rfb::security::{Access, LoginLimiter, PeerNetwork};
use crate::rfb::{self, Admission, Entry, Server, Wire};

/// The status of a machine after a [`Button`] is pressed.
pub type StatusFuture = Pin<Box<dyn Future<Output = anyhow::Result<Value>> + Send>>;

/// A machine with a screen. Clients reach it after the gate has admitted them.
pub trait Stage: Send + Sync + 'static {
    fn login_limiter(&self) -> &LoginLimiter;

    /// Serves the screen to a viewer until it disconnects.
    fn serve(self: Arc<Self>, viewer: Viewer) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// A page to show to everybody while there is no screen, instead of the viewer.
    fn replacement_page(&self) -> Option<Response> {
        None
    }

    fn about(&self) -> About;

    /// Presses a button, if any. Returns the status after it, as [`brief`] shows it.
    fn control(self: Arc<Self>, button: Option<Button>) -> StatusFuture;
}

/// Facts about the machine for the pages.
pub struct About {
    /// The keyboard layout that the guest expects.
    pub keyboard: Arc<Layout>,
    /// Whether viewers can hear the guest.
    pub sound: bool,
    /// The hint on where user name and password are set.
    pub login: &'static str,
    pub restart_hint: &'static str,
    /// A page `progress` with its `events` exists, and something is in progress.
    pub progress: bool,
    /// The guest's driver may change the size of the picture to that of the window.
    pub resizes: bool,
    /// A page `desktop` exists, for a guest with a remote desktop.
    pub desktop: bool,
    /// USB devices of the host can be attached, at `api/v1/usb`.
    pub usb: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Button {
    /// Asks the guest to shut down.
    Shutdown,
    /// Resets the machine at once.
    Reset,
    /// Stops the vCPUs.
    Pause,
    Resume,
    /// Powers off at once.
    Off,
}

/// Presses a button of this process's machine, or asks for its status.
pub type ControlFn = Arc<dyn Fn(Option<Button>) -> anyhow::Result<Value> + Send + Sync>;

/// The part of the machine's status that pages show: `{"state": "running", "clipboard": true}`.
pub fn brief(status: &Value) -> Value {
    json!({ "state": status["state"], "clipboard": status["clipboard"] })
}

/// A client that the gate has admitted.
pub struct Viewer {
    /// The byte stream: RFB for a screen.
    pub stream: Wire,
    /// The client's address, for logs.
    pub peer: String,
    pub view_only: bool,
}

/// Serves the bytes of a WebSocket until its client disconnects.
pub type ServeFn = Arc<dyn Fn(Viewer) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

/// Additional routes at the same port.
#[derive(Default)]
pub struct ExtraRoutes {
    /// Open to everybody, under any host name, and not limited by the number of connections. Must
    /// not reveal anything about the guest.
    pub health: Router,
    /// Open to everybody. Each request carries its [`PeerNetwork`].
    pub open: Router,
    /// Open to authenticated clients. Changes are accepted from our own pages only. Each request
    /// carries its [`Access`].
    pub inside: Router,
    /// Paths of WebSockets that transport bytes, for authenticated clients from our own pages.
    pub sockets: Vec<(&'static str, ServeFn)>,
}

/// The screen of this process's machine.
pub struct LocalStage {
    server: Arc<Server>,
    rules: Arc<rfb::Rules>,
    control: ControlFn,
}

impl LocalStage {
    pub fn new(server: Arc<Server>, name: String, control: ControlFn) -> Self {
        // The gate has decided who may use the keyboard, and viewers do not disconnect each other.
        let rules = rfb::Rules { name, always_shared: true, ..rfb::Rules::default() };
        Self { server, rules: Arc::new(rules), control }
    }
}

impl Stage for LocalStage {
    fn login_limiter(&self) -> &LoginLimiter {
        self.server.login_limiter()
    }

    fn serve(self: Arc<Self>, viewer: Viewer) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let Viewer { stream, peer, view_only } = viewer;
        let admission =
            Admission { peer: format!("{peer} (web)"), entry: Entry::Authenticated { view_only } };
        Box::pin(self.server.clone().serve(self.rules.clone(), stream, admission))
    }
    fn about(&self) -> About {
        let interfaces = &self.server.interfaces;
        About {
            keyboard: interfaces.layout.clone(),
            sound: interfaces.sound.has_card(),
            resizes: self.server.canvas.scanout().is_some_and(|it| it.resizes()),
            login: "Name and password are set by --web of vmm: user=NAME,password=FILE.",
            restart_hint: "Run vmm again to start it.",
            progress: false,
            desktop: false,
            usb: false,
        }
    }

    fn control(self: Arc<Self>, button: Option<Button>) -> StatusFuture {
        Box::pin(async move {
            let work = move || -> anyhow::Result<Value> {
                let pressed = button.map(|button| (self.control)(Some(button))).transpose()?;
                match (pressed, button) {
                    (Some(_), Some(Button::Off)) => Ok(json!({ "state": "off" })),
                    _ => Ok(brief(&(self.control)(None)?)),
                }
            };
            tokio::task::spawn_blocking(work).await.context("the thread for the command")?
        })
    }
}
