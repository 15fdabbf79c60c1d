//! UUIDs (RFC 9562).
use std::fmt;
use std::str::FromStr;

use anyhow::Context;

/// The bytes are in the order in which they are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// Version 4.
    pub fn random() -> anyhow::Result<Self> {
        let mut bytes = [0; 16];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .context("random bytes")?;
        Ok(Self::with_version(bytes, 4))
    }

    /// Sets the version and the variant.
    pub fn with_version(mut bytes: [u8; 16], version: u8) -> Self {
        bytes[6] = bytes[6] & 0xf | version << 4;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Self(bytes)
    }

    /// The bytes of a Microsoft GUID in memory: the first three fields are little-endian.
    pub fn in_memory(self) -> [u8; 16] {
        let [a, b, c, d, e, f, g, h, rest @ ..] = self.0;
        let [i, j, k, l, m, n, o, p] = rest;
        [d, c, b, a, f, e, h, g, i, j, k, l, m, n, o, p]
    }
}

/// Reads 32 hexadecimal digits, with hyphens or without.
impl FromStr for Uuid {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let digits: String = text.chars().filter(|c| *c != '-').collect();
        let number = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok()).flatten();
        let number = number.with_context(|| format!("{text}: a UUID is 32 hexadecimal digits"))?;
        Ok(Self(number.to_be_bytes()))
    }
}

/// Lower-case digits in five groups.
impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            let hyphen = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{hyphen}{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reads_prints_and_swaps_fields_like_windows() {
        let text = "12345678-9abc-def0-1122-334455667788";
        let id: Uuid = text.parse().unwrap();
        assert_eq!(id.to_string(), text);
        assert_eq!(text.to_ascii_uppercase().replace('-', "").parse::<Uuid>().unwrap(), id);
        let turned = [0x78, 0x56, 0x34, 0x12, 0xbc, 0x9a, 0xf0, 0xde];
        assert_eq!(id.in_memory()[..8], turned);
        assert_eq!(id.in_memory()[8..], id.0[8..]);
        for wrong in ["", "12", "x2345678-9abc-def0-1122-334455667788"] {
            let error = wrong.parse::<Uuid>().unwrap_err().to_string();
            assert_eq!(error, format!("{wrong}: a UUID is 32 hexadecimal digits"));
        }
    }

    #[test]
    fn random_uuids_differ_and_have_version_4() {
        let [one, other] = [(), ()].map(|()| Uuid::random().unwrap());
        assert_ne!(one, other);
        assert_eq!((one.0[6] >> 4, one.0[8] >> 6), (4, 2));
    }
}
