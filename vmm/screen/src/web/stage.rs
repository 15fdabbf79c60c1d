//! What browsers come to see: the screen of this process' machine, or of one elsewhere.

use std::pin::Pin;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};

pub use crate::keys::layout::{Layout, Name as LayoutName};
pub use crate::keys::text;
pub use crate::rfb::crowd::Crowd;
pub use crate::rfb::security::{Door, Doors};
use crate::rfb::{self, Admission, Entry, Server, Wire};

/// The answer of a machine whose button is pressed.
pub type Answer = Pin<Box<dyn Future<Output = anyhow::Result<Value>> + Send>>;

/// A screen, behind a gate that asks for passwords.
pub trait Stage: Send + Sync + 'static {
    /// Where wrong passwords are counted.
    fn doors(&self) -> &Doors;

    /// Shows the screen to somebody, until they leave.
    fn show(self: Arc<Self>, viewer: Viewer) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// The page in place of the viewer while there is nothing to view, for everybody to see.
    fn instead(&self) -> Option<Response> {
        None
    }

    /// What pages say of the machine.
    fn about(&self) -> About;

    /// Presses a button, or none; how the machine is then: `{"state": "running"}`.
    fn press(self: Arc<Self>, button: Option<Button>) -> Answer;
}

/// What pages say of the machine.
pub struct About {
    /// The keyboard that the guest expects.
    pub keyboard: Arc<Layout>,
    /// Texts of viewers reach the guest's clipboard.
    pub clipboard: bool,
    /// Where name and password come from.
    pub login: &'static str,
    /// How the machine is started again.
    pub again: &'static str,
}

/// What may be done to a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Button {
    /// The guest is asked to shut down.
    Shutdown,
    /// It starts anew at once.
    Reset,
    /// Its processors stop.
    Pause,
    /// They run on.
    Resume,
    /// It is off at once.
    Off,
}

/// Presses a button of this process' machine, or asks for its status.
pub type Ask = Arc<dyn Fn(Option<Button>) -> anyhow::Result<Value> + Send + Sync>;

/// Somebody who was let in.
pub struct Viewer {
    /// Their bytes, which are RFB.
    pub line: Wire,
    /// Who they are, for people.
    pub peer: String,
    /// They may not touch.
    pub view_only: bool,
}

/// What else is served at the same port.
#[derive(Default)]
pub struct More {
    /// To everybody, by any name, and however many connections there are: nothing of the guest's.
    pub health: Router,
    /// To everybody; each request carries its [`Door`].
    pub open: Router,
    /// To those whom the gate lets in; what changes something, to pages of ours alone.
    pub inside: Router,
}

/// The screen of this process' machine.
pub struct Own {
    server: Arc<Server>,
    rules: Arc<rfb::Rules>,
    ask: Ask,
}

impl Own {
    /// Under this name.
    pub fn new(server: Arc<Server>, name: String, ask: Ask) -> Self {
        // Who may touch is known already, and nobody sends others away.
        let rules = rfb::Rules { name, always_shared: true, ..rfb::Rules::default() };
        Self { server, rules: Arc::new(rules), ask }
    }
}

impl Stage for Own {
    fn doors(&self) -> &Doors {
        self.server.doors()
    }

    fn show(self: Arc<Self>, viewer: Viewer) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let Viewer { line, peer, view_only } = viewer;
        let admission =
            Admission { peer: format!("{peer} (web)"), entry: Entry::Open { view_only } };
        Box::pin(self.server.clone().serve(self.rules.clone(), line, admission))
    }
    fn about(&self) -> About {
        let outside = self.server.outside();
        About {
            keyboard: outside.layout.clone(),
            clipboard: outside.clipboard.is_some(),
            login: "They are set by the option --web of vmm: user=NAME, password=FILE.",
            again: "Run vmm again to start it.",
        }
    }

    fn press(self: Arc<Self>, button: Option<Button>) -> Answer {
        Box::pin(async move {
            let work = move || -> anyhow::Result<Value> {
                let pressed = button.map(|button| (self.ask)(Some(button))).transpose()?;
                match (pressed, button) {
                    (Some(_), Some(Button::Off)) => Ok(json!({ "state": "off" })),
                    _ => Ok(json!({ "state": (self.ask)(None)?["state"] })),
                }
            };
            tokio::task::spawn_blocking(work).await.context("a thread")?
        })
    }
}
