//! MAC addresses: as text, and as the bytes of a frame.
use std::fmt;
use std::str::FromStr;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use crate::fnv;

/// The address of a network card: `52:54:00:12:34:56`. Parsing accepts unicast addresses only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac(pub [u8; 6]);

impl Mac {
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// A locally administered address, derived from `words`: the same words give the same address.
    pub fn derived_from(words: &str) -> Self {
        let [a, b, c, d, e, ..] = fnv::hash(words.as_bytes(), 0).to_be_bytes();
        Self([0x02, a, b, c, d, e])
    }

    /// Reads six pairs of hexadecimal digits. Multicast addresses and zero are valid here.
    pub fn from_pairs<'a>(pairs: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let byte = |pair: &str| {
            let hex = pair.len() == 2 && pair.bytes().all(|digit| digit.is_ascii_hexdigit());
            u8::from_str_radix(pair, 16).ok().filter(|_| hex)
        };
        let bytes: Option<Vec<u8>> = pairs.into_iter().map(byte).collect();
        bytes?.try_into().ok().map(Self)
    }

    /// Broadcast is a multicast address too.
    pub fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    pub fn is_zero(self) -> bool {
        self.0 == [0; 6]
    }
}

impl FromStr for Mac {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let mac = Self::from_pairs(text.split([':', '-']));
        let mac =
            mac.with_context(|| format!("`{text}` is not a MAC address: write 52:54:00:12:34:56"))?;
        let unicast = !mac.is_multicast() && !mac.is_zero();
        ensure!(
            unicast,
            "`{text}` is not the address of a single host: write a unicast address such as \
             52:54:00:12:34:56"
        );
        Ok(mac)
    }
}

crate::as_text!(Mac);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn accepts_only_unicast_addresses() {
        for bad in ["", "01:00:5e:00:00:01", "00:00:00:00:00:00", "2:0:0:0:0:1", "02:00:00:00:00"] {
            assert!(bad.parse::<Mac>().is_err(), "{bad}");
        }
        let mac: Mac = "52-54-00-12-34-aB".parse().unwrap();
        assert_eq!(mac.to_string(), "52:54:00:12:34:ab");
        let json = serde_json::to_string(&mac).unwrap();
        assert_eq!(json, "\"52:54:00:12:34:ab\"");
        assert_eq!(serde_json::from_str::<Mac>(&json).unwrap(), mac);
        let error = serde_json::from_str::<Mac>("\"x\"").unwrap_err().to_string();
        assert!(error.starts_with("`x` is not a MAC address: write 52:54:00:12:34:56"), "{error}");
    }

    #[test]
    fn a_derived_address_is_stable() {
        assert_eq!(Mac::derived_from("x"), Mac::derived_from("x"));
        assert_ne!(Mac::derived_from("x"), Mac::derived_from("y"));
        assert!(!Mac::derived_from("x").is_multicast() && Mac::BROADCAST.is_multicast());
    }
}
