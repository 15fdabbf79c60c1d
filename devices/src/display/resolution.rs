//! Resolutions in the form `1920x1080`.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

/// Width and height in pixels, from 640x480 to 8192x8192.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Resolution {
    width: u16,
    height: u16,
}

/// Firmware ignores smaller sizes.
const MIN: Resolution = Resolution::new(640, 480);
const MAX: Resolution = Resolution::new(8192, 8192);

impl Resolution {
    /// A resolution that the caller knows to be within the limits.
    pub(crate) const fn new(width: u16, height: u16) -> Self {
        Self { width, height }
    }

    /// Limits width and height to the valid range.
    pub fn nearest(width: u32, height: u32) -> Self {
        let within = |it: u32, [least, most]: [u16; 2]| {
            u16::try_from(it).unwrap_or(u16::MAX).clamp(least, most)
        };
        let width = within(width, [MIN.width, MAX.width]);
        Self { width, height: within(height, [MIN.height, MAX.height]) }
    }

    pub fn width(self) -> u32 {
        self.width.into()
    }

    pub fn height(self) -> u32 {
        self.height.into()
    }

    /// The size of a picture in bytes.
    pub fn bytes(self) -> u64 {
        u64::from(self.width) * u64::from(self.height) * 4
    }
}

impl fmt::Display for Resolution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

host::as_text!(Resolution);

impl FromStr for Resolution {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let number = |digits: &str| {
            // `parse` would accept `+5`.
            let plain = digits.bytes().all(|byte| byte.is_ascii_digit());
            digits.parse().ok().filter(|_| plain)
        };
        let parts = text.split_once('x');
        let parts = parts.and_then(|(width, height)| Some((number(width)?, number(height)?)));
        let (width, height) = parts.with_context(|| {
            format!("`{text}` is not a resolution: write WIDTHxHEIGHT, as in `1920x1080`")
        })?;
        let nearest = Self::nearest(width, height);
        ensure!(
            (nearest.width(), nearest.height()) == (width, height),
            "`{text}` is not a supported resolution: choose one from {MIN} to {MAX}"
        );
        Ok(nearest)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_size_reads_back_as_printed() {
        let read = |text: &str| Resolution::try_from(text.to_owned());
        for text in ["640x480", "1728x1117", "8192x8192"] {
            assert_eq!(read(text).unwrap().to_string(), text);
        }
        for (bad, words) in [
            ("1920", "write WIDTHxHEIGHT"),
            ("1920x", "write WIDTHxHEIGHT"),
            ("+1920x1080", "write WIDTHxHEIGHT"),
            ("1920x1080x32", "write WIDTHxHEIGHT"),
            ("-1x-1", "write WIDTHxHEIGHT"),
            ("99999999999x1", "write WIDTHxHEIGHT"),
            ("639x480", "from 640x480 to 8192x8192"),
            ("70000x480", "from 640x480 to 8192x8192"),
            ("640x0", "from 640x480 to 8192x8192"),
        ] {
            let error = read(bad).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(bad), "{bad}: {error}");
        }
    }
}
