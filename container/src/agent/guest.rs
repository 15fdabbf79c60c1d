//! Parses answers of the guest's agent: operating system, addresses, and the status of programs.
//! All of it may be wrong.

use std::net::IpAddr;

use anyhow::{Context as _, bail};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::protocol::plain;

/// In characters.
const MAX_NAME: usize = 100;
const MAX_ADDRESSES: usize = 32;

/// Information about the guest, as its agent reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Guest {
    /// Name of the operating system, such as `Debian GNU/Linux 12 (bookworm)`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// IP addresses of all network interfaces but loopback.
    pub addresses: Vec<IpAddr>,
}

impl Guest {
    /// Parses the answers to `guest-get-osinfo` and `guest-network-get-interfaces`.
    pub fn new(system: Option<&Value>, interfaces: Option<&Value>) -> Self {
        let name = |key: &str| system?[key].as_str().map(|name| plain(name, MAX_NAME));
        let cards = interfaces.and_then(Value::as_array).into_iter().flatten();
        let addresses = cards.flat_map(|card| card["ip-addresses"].as_array()).flatten();
        let addresses = addresses.filter_map(|it| {
            // Windows appends the interface (zone index) after a `%`.
            it["ip-address"].as_str()?.split('%').next()?.parse().ok()
        });
        let addresses = addresses.filter(|it: &IpAddr| !it.is_loopback()).take(MAX_ADDRESSES);
        Self {
            system: name("pretty-name").or_else(|| name("name")).filter(|it| !it.is_empty()),
            addresses: addresses.collect(),
        }
    }
}

/// State of a program that was started in the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Runs,
    Ended(Ended),
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Exit status, as shells report it: 128 + N for signal N, 255 for a status that does not fit.
    pub status: u8,
    /// Full status, if it does not fit into `status`.
    pub odd: Option<i64>,
    pub output: Vec<u8>,
    /// Standard error.
    pub errors: Vec<u8>,
    /// The agent kept only a part of the output.
    pub cut: bool,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "return")]
    value: ExecStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ExecStatus {
    exited: bool,
    exitcode: Option<i64>,
    signal: Option<i64>,
    #[serde(default)]
    out_data: String,
    #[serde(default)]
    err_data: String,
    #[serde(default)]
    out_truncated: bool,
    #[serde(default)]
    err_truncated: bool,
}

impl Outcome {
    /// Parses the answer to `guest-exec-status`.
    pub fn read(answer: &[u8]) -> anyhow::Result<Self> {
        let Answer { value: result } = serde_json::from_slice(answer).context("no answer")?;
        if !result.exited {
            return Ok(Self::Runs);
        }
        let (status, odd) = match (result.exitcode, result.signal) {
            (Some(code), _) => match u8::try_from(code) {
                Ok(status) => (status, None),
                // Windows has larger exit codes, and none of them is a success.
                Err(_) => (u8::MAX, Some(code)),
            },
            // Shells report signal N as status 128 + N.
            (None, Some(signal @ 1..=64)) => (128 + u8::try_from(signal)?, None),
            (None, Some(signal)) => bail!("signal {signal} is invalid"),
            (None, None) => bail!("it does not say how the program ended"),
        };
        let bytes = |text: &str, of| BASE64_STANDARD.decode(text).context(of);
        Ok(Self::Ended(Ended {
            status,
            odd,
            output: bytes(&result.out_data, "output")?,
            errors: bytes(&result.err_data, "errors")?,
            cut: result.out_truncated || result.err_truncated,
        }))
    }
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    #[test]
    fn guest_facts_from_the_agent_are_bounded() {
        let system = json!({ "name": "Debian", "pretty-name": "Debian\u{9b} 12\u{1b}[2J" });
        let address = |text: &str| json!({ "ip-address": text, "prefix": 24 });
        let cards = json!([
            { "name": "lo", "ip-addresses": [address("127.0.0.1"), address("::1")] },
            { "name": "sit0" },
            { "name": "eth0", "ip-addresses": [address("172.30.0.2"), address("fe80::1%12"),
                address("no address"), 7] },
        ]);
        let guest = Guest::new(Some(&system), Some(&cards));
        assert_eq!(guest.system.as_deref(), Some("Debian 12[2J"));
        let shown: Vec<String> = guest.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["172.30.0.2", "fe80::1"]);
        let many = json!([{ "ip-addresses": vec![address("10.0.0.1"); 5000] }]);
        assert_eq!(Guest::new(None, Some(&many)).addresses.len(), MAX_ADDRESSES);
        let none = Guest::new(Some(&json!([])), Some(&json!({ "ip-addresses": 1 })));
        assert_eq!(none, Guest::default());
        let short = Guest::new(Some(&json!({ "name": "mswindows", "pretty-name": null })), None);
        assert_eq!(short.system.as_deref(), Some("mswindows"));
    }

    #[test]
    fn an_outcome_has_a_status_and_the_output() {
        let read = |value: Value| Outcome::read(json!({ "return": value }).to_string().as_bytes());
        assert_eq!(read(json!({ "exited": false })).unwrap(), Outcome::Runs);
        let value = json!({ "exited": true, "exitcode": 3, "out-data": "aGkK", "err-data": "",
            "out-truncated": true });
        let ended = Ended { status: 3, output: b"hi\n".into(), cut: true, ..Ended::default() };
        assert_eq!(read(value).unwrap(), Outcome::Ended(ended));
        for (how, status, odd) in [
            (json!({ "exited": true, "signal": 9 }), 137, None),
            (json!({ "exited": true, "exitcode": 256 }), 255, Some(256)),
            (json!({ "exited": true, "exitcode": -1_073_741_819 }), 255, Some(-1_073_741_819)),
        ] {
            let ended = Ended { status, odd, ..Ended::default() };
            assert_eq!(read(how).unwrap(), Outcome::Ended(ended));
        }
        for wrong in [
            json!(null),
            json!({ "exited": 1 }),
            json!({ "exited": true }),
            json!({ "exited": true, "signal": 1000 }),
            json!({ "exited": true, "exitcode": 0, "out-data": "a" }),
            json!({ "exited": true, "exitcode": 0.5 }),
        ] {
            assert!(read(wrong).is_err());
        }
    }
}
