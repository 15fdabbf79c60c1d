//! Faults of servers, on demand.

use std::str::FromStr;

use anyhow::{Context as _, bail};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A file's answer breaks off after this percentage of it.
    Reset(u64),
    /// A file's answer stays silent after this percentage of it.
    Stall(u64),
    /// A byte of each file is wrong.
    Checksum,
    /// Files, or pages, are refused with this status.
    Status(u16),
    PageStatus(u16),
    /// Each file is a web page, with status 200.
    Html,
    /// Each page asks whether the client is a robot.
    Captcha,
    /// The list of links says that the address is refused.
    Sentinel,
    /// Files come at this many bytes in a second, on each connection.
    Slow(u64),
    /// Files seem to have this many bytes more.
    Size(u64),
    /// Ranges are ignored: each answer is the whole file.
    NoRanges,
    /// The identity of files changes with each answer.
    Changing,
    /// The pages have no product and no checksum.
    NoChecksum,
    /// All links of the evaluation centre say that they are in English.
    OneCulture,
    /// Files are said to be at this address.
    Redirect(String),
    /// Files come in unknown length, and never end.
    Endless,
    /// The answer of a file has a header that never ends.
    Head,
    /// Files come byte by byte.
    Drip,
    /// Files are packed by gzip, although nobody asked for that. A few bytes become many zeros.
    Bomb,
}

impl FromStr for Fault {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (name, number) = text.split_once('=').unwrap_or((text, ""));
        let number = || number.parse::<u64>().with_context(|| format!("{text}: give a number"));
        Ok(match name {
            "reset" => Self::Reset(number()?),
            "stall" => Self::Stall(number()?),
            "checksum" => Self::Checksum,
            "status" => Self::Status(u16::try_from(number()?)?),
            "page-status" => Self::PageStatus(u16::try_from(number()?)?),
            "html" => Self::Html,
            "captcha" => Self::Captcha,
            "sentinel" => Self::Sentinel,
            "slow" => Self::Slow(number()?),
            "size" => Self::Size(number()?),
            "no-ranges" => Self::NoRanges,
            "changing" => Self::Changing,
            "no-checksum" => Self::NoChecksum,
            "one-culture" => Self::OneCulture,
            "redirect" => Self::Redirect(text.split_once('=').context("redirect=URL")?.1.into()),
            "endless" => Self::Endless,
            "head" => Self::Head,
            "drip" => Self::Drip,
            "bomb" => Self::Bomb,
            _ => bail!(
                "{text}: the faults are reset, stall, checksum, status, page-status, html, \
                 captcha, sentinel, slow, size, no-ranges, changing, no-checksum, one-culture, \
                 redirect, endless, head, drip and bomb"
            ),
        })
    }
}

/// Faults that break one answer happen once for each mention. The others stay.
pub(crate) struct Faults(Vec<Fault>);

impl Faults {
    pub(crate) fn new(faults: Vec<Fault>) -> Self {
        Self(faults)
    }

    pub(crate) fn take(&mut self, fits: impl Fn(&Fault) -> bool) -> Option<Fault> {
        let at = self.0.iter().position(fits)?;
        match &self.0[at] {
            Fault::Reset(_) | Fault::Stall(_) => Some(self.0.remove(at)),
            other => Some(other.clone()),
        }
    }
}
