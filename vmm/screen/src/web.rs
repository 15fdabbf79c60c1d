//! The screen in a browser: our page with noVNC, connected by a WebSocket to the same process.
//!
//! `listen` accepts connections and terminates TLS, `routes` answers requests, `gate` authenticates
//! them, and `socket` turns a WebSocket into a client connection of the
//! [`Server`](crate::rfb::Server). All links in the pages are relative, so they work below any path
//! and behind any proxy.
//!
//! Threats: any client that reaches the port, and foreign pages in the browser of a user who is
//! logged in. Against the first, requests are small and short-lived (`listen`), password guesses
//! are slowed down by the same counters as those of VNC clients, and cookies are random. The second
//! cannot open the WebSocket, log anybody in or out (`Origin`), embed the page, or reach a screen
//! without a password under a name of their own (DNS rebinding: see [`gate`]).

pub mod files;
pub mod gate;
pub mod line_socket;
pub mod listen;
pub mod routes;
mod sessions;
mod slots;
pub mod socket;
mod sound;
pub mod stage;
#[cfg(test)]
mod test;
pub mod trusted;
pub mod viewers;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use self::gate::OptionNames;
pub use self::sessions::Sessions;
pub use self::trusted::Proxies;
pub use crate::rfb::listen::Auth;
use host::listen::Address;

/// `--web`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    #[serde(rename = "to")]
    pub address: Option<Address>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password: Option<PathBuf>,
    /// A file with a second password, which gives view-only access.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub view_password: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A TLS certificate in PEM format. Browsers must then use TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key: Option<PathBuf>,
    /// `none` allows access without a password.
    pub auth: Auth,
    /// Viewers cannot use keyboard, mouse or clipboard.
    pub view_only: bool,
    /// Additional origins of this page, such as `https://example.org`, separated by blanks. Needed
    /// behind a proxy that hides the host name, or for a name without a password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Trusted proxies: IP addresses and networks whose `X-Forwarded-*` headers are believed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy: Option<Proxies>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip)]
    pub option_names: OptionNames,
    /// Accepts any host name, so DNS rebinding is not prevented.
    #[serde(skip)]
    pub any_host: bool,
}
