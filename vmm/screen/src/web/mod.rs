//! The screen in any browser: a page of ours with noVNC, over a WebSocket of the same process.
//!
//! `listen` takes connections and speaks TLS, `routes` answers, `gate` knows who may come in, and
//! `socket` makes a WebSocket the line of one client of the
//! [`Server`](crate::rfb::Server). All addresses in the pages
//! are relative, so the whole works below any path, behind any proxy.
//!
//! Threats: whoever reaches the port, and pages from elsewhere in the browser of somebody who is
//! in. Of the first, each request is small and soon over (`listen`), guesses become slow at the
//! same doors as those of VNC clients, and cookies are random. The second can neither open the
//! WebSocket nor log anybody in or out (`Origin`), nor embed the page, nor reach a screen without
//! a password under a name of their own (DNS rebinding: see [`gate`]).

mod files;
pub mod gate;
pub mod known;
pub mod listen;
mod places;
pub mod routes;
mod sessions;
pub mod socket;
pub mod stage;
pub mod talk;
#[cfg(test)]
mod test;
pub mod viewers;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use self::gate::Words;
pub use self::known::Proxies;
pub use crate::rfb::listen::Auth;
use host::listen::Address;

/// `--web`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    /// Where to listen.
    pub to: Option<Address>,
    /// A file with the password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password: Option<PathBuf>,
    /// A file with a second password, for those who may only look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub view_password: Option<PathBuf>,
    /// The name that goes with the passwords.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A certificate in PEM format: browsers must use TLS then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key: Option<PathBuf>,
    /// `none` lets everybody in who reaches the port.
    pub auth: Auth,
    /// Nobody may touch.
    pub view_only: bool,
    /// What browsers call us, like `https://example.org`, where a proxy hides that, or nobody is
    /// asked for a password; several with blanks between them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The address of a proxy that may say for whom it asks, or a network of such.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<Proxies>,
    /// What the window is called.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// How all this is called where it is set.
    #[serde(skip)]
    pub words: Words,
    /// Nobody minds what browsers call us.
    #[serde(skip)]
    pub any_name: bool,
}
