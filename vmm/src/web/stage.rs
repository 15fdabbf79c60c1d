//! What browsers come to see: the screen of this process' machine, or of one elsewhere.

use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::response::Response;

pub use crate::rfb::crowd::Crowd;
pub use crate::rfb::security::{Door, Doors};
use crate::rfb::{self, Admission, Entry, Server, Wire};

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
}

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
    /// To everybody; each request carries its [`Door`].
    pub open: Router,
    /// To those whom the gate lets in; what changes something, to pages of ours alone.
    pub inside: Router,
}

/// The screen of this process' machine.
pub struct Own {
    server: Arc<Server>,
    rules: Arc<rfb::Rules>,
}

impl Own {
    /// Under this name.
    pub fn new(server: Arc<Server>, name: String) -> Self {
        // Who may touch is known already, and nobody sends others away.
        let rules = rfb::Rules { name, always_shared: true, ..rfb::Rules::default() };
        Self { server, rules: Arc::new(rules) }
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
}
