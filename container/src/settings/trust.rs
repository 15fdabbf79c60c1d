//! Origins and proxies that the web port trusts.

use screen::web::trusted;

use super::value::Value;

/// Origins under which browsers reach the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(pub trusted::Origins);

impl Value for Origins {
    const ACCEPTS: &'static str = "origins like https://example.org, comma-separated";

    fn read(text: &str) -> anyhow::Result<Self> {
        trusted::Origins::read(text).map(Self)
    }
    fn show(&self) -> String {
        self.0.to_string().replace(' ', ",")
    }
}

/// Trusted proxies: peers whose forwarding headers are believed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxies(pub trusted::Proxies);

impl Value for Proxies {
    const ACCEPTS: &'static str = "addresses and networks, comma-separated";

    fn read(text: &str) -> anyhow::Result<Self> {
        trusted::Proxies::read(text).map(Self)
    }
    fn show(&self) -> String {
        self.0.to_string().replace(' ', ",")
    }
}
