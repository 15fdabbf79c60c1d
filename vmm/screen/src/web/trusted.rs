//! Configured origins that are ours, and trusted proxies.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

/// Additional origins, such as `https://example.org`: a list separated by blanks or commas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(Vec<String>);

impl Origins {
    pub fn read(text: &str) -> anyhow::Result<Self> {
        let read = |word: &str| {
            let parts = word.split_once("://").filter(|(scheme, _)| {
                scheme.eq_ignore_ascii_case("https") || scheme.eq_ignore_ascii_case("http")
            });
            let is_host = |host: &str| {
                !host.is_empty() && host.bytes().all(|it| it.is_ascii_graphic() && it != b'/')
            };
            ensure!(
                parts.is_some_and(|(_, host)| is_host(host)),
                "{}: write it like https://example.org, without a path",
                shown(word)
            );
            Ok(word.to_ascii_lowercase())
        };
        words(text).map(read).collect::<anyhow::Result<_>>().map(Self)
    }

    pub(super) fn contains(&self, origin: &str) -> bool {
        self.0.iter().any(|it| it.eq_ignore_ascii_case(origin))
    }

    /// The hosts of the origins, with their ports.
    pub(super) fn hosts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|it| it.split_once("://")).map(|(_, host)| host)
    }
}

impl fmt::Display for Origins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(" "))
    }
}

/// Trusted proxies: a list of IP addresses and networks, separated by blanks or commas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Proxies(Vec<(IpAddr, u32)>);

impl Proxies {
    pub fn read(text: &str) -> anyhow::Result<Self> {
        let read = |word: &str| {
            let (address, bits) =
                word.split_once('/').map_or((word, None), |it| (it.0, Some(it.1)));
            let address: Option<IpAddr> = address.parse().ok();
            let network = address.and_then(|address| {
                let all = if address.is_ipv4() { 32 } else { 128 };
                let bits = bits.map_or(Some(all), |bits| bits.parse().ok())?;
                (bits <= all).then_some((address, bits))
            });
            network.with_context(|| {
                let word = shown(word);
                format!("{word}: write an IP address like 10.0.0.1 or a network like 10.0.0.0/8")
            })
        };
        words(text).map(read).collect::<anyhow::Result<_>>().map(Self)
    }

    pub(super) fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|(network, bits)| match (network, address) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                let differs = network.to_bits() ^ address.to_bits();
                differs.checked_shr(32 - bits).unwrap_or(0) == 0
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                let differs = network.to_bits() ^ address.to_bits();
                differs.checked_shr(128 - bits).unwrap_or(0) == 0
            }
            _ => network.to_canonical() == address,
        })
    }
}

impl FromStr for Proxies {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::read(text).map_err(|error| error.to_string())
    }
}

host::as_text!(Proxies);

impl fmt::Display for Proxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.0.iter().map(|(address, bits)| match (address, bits) {
            (IpAddr::V4(_), 32) | (IpAddr::V6(_), 128) => address.to_string(),
            _ => format!("{address}/{bits}"),
        });
        f.write_str(&shown.collect::<Vec<_>>().join(" "))
    }
}

/// Escapes and shortens user input for messages.
fn shown(word: &str) -> String {
    word.escape_debug().take(80).collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split([',', ' ']).map(str::trim).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn proxies_are_addresses_and_networks() {
        let proxies = Proxies::read("10.0.0.1, 192.0.2.0/24 fd00::/8,2001:db8::1").unwrap();
        assert_eq!(proxies.to_string(), "10.0.0.1 192.0.2.0/24 fd00::/8 2001:db8::1");
        let has = |text: &str| proxies.contains(text.parse().unwrap());
        for one in ["10.0.0.1", "::ffff:10.0.0.1", "192.0.2.255", "fdff::1", "2001:db8::1"] {
            assert!(has(one), "{one}");
        }
        for other in ["10.0.0.2", "192.0.3.0", "fe00::1", "2001:db8::2", "::1"] {
            assert!(!has(other), "{other}");
        }
        let all = Proxies::read("0.0.0.0/0").unwrap();
        assert!(
            all.contains("203.0.113.9".parse().unwrap()) && !all.contains("::1".parse().unwrap())
        );
        assert!(!Proxies::default().contains("127.0.0.1".parse().unwrap()));
        for wrong in ["vm", "10.0.0.0/33", "::/129", "10.0.0.0/", "10.0.0.0/-1", "1.2.3"] {
            let error = Proxies::read(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("IP address"), "{error}");
        }
    }

    #[test]
    fn origins_have_a_scheme_and_no_path() {
        let origins = Origins::read("https://Vm.org:8443 http://b.org,").unwrap();
        assert!(origins.contains("https://vm.org:8443") && origins.contains("HTTP://B.org"));
        assert!(!origins.contains("http://vm.org:8443") && !origins.contains(""));
        assert_eq!(origins.hosts().collect::<Vec<_>>(), ["vm.org:8443", "b.org"]);
        for wrong in ["vm.org", "ftp://vm.org", "https://", "https://vm.org/path", "http://ü"] {
            let error = Origins::read(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong) && error.contains("https://example.org"), "{error}");
        }
        let error = Origins::read(&format!("\u{7}{}", "x".repeat(9000))).unwrap_err().to_string();
        assert!(error.len() < 200 && !error.contains('\u{7}'), "{error}");
    }
}
