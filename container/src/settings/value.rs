//! The types of values, each with its parser and its textual form.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use host::size::Size;

/// A value that is parsed from a variable.
pub trait Value: Sized {
    /// A short description of accepted values, for the reference table.
    const ACCEPTS: &'static str;
    /// Whether the text may come from a file, whose path is in `NAME_FILE`.
    const FILE: bool = false;
    const SECRET: bool = false;
    /// Whether an error may show the text. False if the error itself names the wrong part, and
    /// other parts may be secret.
    const SHOWN: bool = true;
    /// Whether an invalid text is ignored with a warning, because the default is safe.
    const LENIENT: bool = false;

    /// Parses a text, which is not empty.
    ///
    /// # Errors
    ///
    /// The reason and the accepted values, without the text itself, which the caller adds.
    fn read(text: &str) -> anyhow::Result<Self>;

    /// The value as users write it, or `***` for a secret.
    fn show(&self) -> String;

    /// Notes for the user, for example on words that were replaced by others.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }
}

/// Removes surrounding blanks and one pair of quotes, which environment files often have.
pub fn strip(text: &str) -> &str {
    let text = text.trim();
    let quoted = |quote| text.strip_prefix(quote)?.strip_suffix(quote);
    quoted('"').or_else(|| quoted('\'')).map_or(text, str::trim)
}

/// The text as it can be shown in one line of a message: short, without control characters.
pub fn quote(text: &str) -> String {
    const MAX_CHARACTERS: usize = 120;
    let mut shown: String = text.chars().take(MAX_CHARACTERS).flat_map(escape).collect();
    if text.chars().nth(MAX_CHARACTERS).is_some() {
        shown.push('…');
    }
    shown
}

/// The character, escaped if it is not printable.
fn escape(letter: char) -> Vec<char> {
    let harmless = letter == '"' || letter == '\'' || letter == '\\';
    if harmless { vec![letter] } else { letter.escape_debug().collect() }
}

impl<T: Value> Value for Option<T> {
    const ACCEPTS: &'static str = T::ACCEPTS;
    const FILE: bool = T::FILE;
    const SECRET: bool = T::SECRET;
    const SHOWN: bool = T::SHOWN;
    const LENIENT: bool = T::LENIENT;

    fn read(text: &str) -> anyhow::Result<Self> {
        T::read(text).map(Some)
    }
    fn show(&self) -> String {
        self.as_ref().map_or_else(String::new, T::show)
    }
    fn notes(&self) -> Vec<String> {
        self.as_ref().map_or_else(Vec::new, T::notes)
    }
}

const YES: &[&str] = &["y", "yes", "true", "1", "on", "enable", "enabled"];
const NO: &[&str] = &["n", "no", "none", "false", "0", "off", "disable", "disabled"];

pub fn switch(text: &str) -> Option<bool> {
    let is = |word: &&str| word.eq_ignore_ascii_case(text);
    if YES.iter().any(is) {
        return Some(true);
    }
    NO.iter().any(is).then_some(false)
}

impl Value for bool {
    const ACCEPTS: &'static str = "Y or N";
    const LENIENT: Self = true;

    fn read(text: &str) -> anyhow::Result<Self> {
        switch(text).context("this is a switch: give Y or N")
    }
    fn show(&self) -> String {
        if *self { "Y".into() } else { "N".into() }
    }
}

/// A whole number from `MIN` to `MAX`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Within<const MIN: u32, const MAX: u32>(pub u32);

impl<const MIN: u32, const MAX: u32> Value for Within<MIN, MAX> {
    const ACCEPTS: &'static str = "number";
    const LENIENT: bool = true;

    fn read(text: &str) -> anyhow::Result<Self> {
        let number = digits(text).and_then(|digits| digits.parse().ok());
        let number = number.filter(|number| (MIN..=MAX).contains(number));
        number.map(Self).with_context(|| format!("give a whole number from {MIN} to {MAX}"))
    }
    fn show(&self) -> String {
        self.0.to_string()
    }
}

/// The text if it has only digits. `parse` would accept a sign too.
fn digits(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then_some(text)
}

pub type Port = Within<1, 65535>;

/// A time from `MIN` to `MAX` seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time<const MIN: u32, const MAX: u32>(pub Duration);

/// The units of a time, in seconds, the longest first.
const TIME_UNITS: [(&str, u32); 4] = [("d", 86400), ("h", 3600), ("m", 60), ("s", 1)];

impl<const MIN: u32, const MAX: u32> Value for Time<MIN, MAX> {
    const ACCEPTS: &'static str = "time";
    const LENIENT: bool = true;

    fn read(text: &str) -> anyhow::Result<Self> {
        let lower = text.to_ascii_lowercase();
        let seconds = TIME_UNITS.iter().find_map(|(unit, seconds)| {
            let number: u32 = digits(lower.strip_suffix(unit)?.trim_end())?.parse().ok()?;
            number.checked_mul(*seconds)
        });
        let seconds = seconds.filter(|seconds| (MIN..=MAX).contains(seconds));
        let time = seconds.map(|seconds| Self(Duration::from_secs(seconds.into())));
        time.with_context(|| {
            let [least, most] = [MIN, MAX].map(|it| Self(Duration::from_secs(it.into())).show());
            format!("give a time from {least} to {most} with its unit, like 90s, 30m or 2h")
        })
    }
    fn show(&self) -> String {
        let seconds = self.0.as_secs();
        let unit = TIME_UNITS.iter().find(|(_, unit)| seconds.is_multiple_of((*unit).into()));
        let (unit, length) = unit.copied().unwrap_or(("s", 1));
        format!("{}{unit}", seconds / u64::from(length))
    }
}

/// A number that may have a fraction, from 0 to 10000.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Decimal(pub f64);

impl Value for Decimal {
    const ACCEPTS: &'static str = "decimal number";
    const LENIENT: bool = true;

    fn read(text: &str) -> anyhow::Result<Self> {
        let number = plain_decimal(text).filter(|number| *number <= 10_000.0);
        number.map(Self).context("give a number from 0 to 10000, like 0.5")
    }
    fn show(&self) -> String {
        self.0.to_string()
    }
}

/// Parses digits with at most one dot: no sign, no exponent, no infinity.
pub(super) fn plain_decimal(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.parse().ok().filter(|_| plain)
}

/// A text of one line.
impl Value for String {
    const ACCEPTS: &'static str = "text";

    fn read(text: &str) -> anyhow::Result<Self> {
        ensure!(!text.contains(char::is_control), "it contains a control character: remove that");
        Ok(text.to_owned())
    }
    fn show(&self) -> String {
        quote(self)
    }
}

/// An absolute path.
impl Value for PathBuf {
    const ACCEPTS: &'static str = "path";

    fn read(text: &str) -> anyhow::Result<Self> {
        ensure!(text.starts_with('/'), "give an absolute path, which starts with /");
        ensure!(!text.contains(char::is_control), "it contains a control character: remove that");
        Ok(Self::from(text))
    }
    fn show(&self) -> String {
        quote(&self.display().to_string())
    }
}

/// The absolute path of a file with a secret. Users may write the secret itself by mistake, so no
/// error shows the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile(pub PathBuf);

impl Value for KeyFile {
    const ACCEPTS: &'static str = "path";
    const SHOWN: bool = false;

    fn read(text: &str) -> anyhow::Result<Self> {
        let path = PathBuf::read(text);
        path.map(Self).context("write the key into a file, and give the path of that")
    }
    fn show(&self) -> String {
        self.0.show()
    }
}

impl Value for Ipv4Addr {
    const ACCEPTS: &'static str = "IPv4 address";

    fn read(text: &str) -> anyhow::Result<Self> {
        let address: Self = text.parse().ok().context("give an IPv4 address, like 172.30.0.2")?;
        let guest = !address.is_unspecified() && !address.is_multicast() && !address.is_broadcast();
        ensure!(guest && !address.is_loopback(), "the address is reserved: give another one");
        Ok(address)
    }
    fn show(&self) -> String {
        self.to_string()
    }
}

/// A secret text, printed as `***`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl Value for Secret {
    const ACCEPTS: &'static str = "secret text";
    const FILE: bool = true;
    const SECRET: bool = true;

    fn read(text: &str) -> anyhow::Result<Self> {
        let length = text.chars().count();
        ensure!(length <= 127, "it has {length} characters: give at most 127");
        ensure!(!text.contains(char::is_control), "it contains a control character: remove that");
        Ok(Self(text.to_owned()))
    }
    fn show(&self) -> String {
        "***".into()
    }
}

/// An enum of fixed words. Each variant has one name and optional synonyms.
macro_rules! choices {
    ($(#[doc = $doc:literal])+ $name:ident: $($(#[$what:meta])+
        $variant:ident $word:literal $(or $($alias:literal),+)?;)+) => {
        $(#[doc = $doc])+
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $($(#[$what])+ $variant),+ }

        impl $crate::settings::value::Value for $name {
            const ACCEPTS: &'static str = $crate::settings::value::choices!(@list $($word)+);

            fn read(text: &str) -> anyhow::Result<Self> {
                let text = text.to_ascii_lowercase();
                match text.as_str() {
                    $($word $($(| $alias)+)? => Ok(Self::$variant),)+
                    _ => anyhow::bail!("give one of: {}", Self::ACCEPTS),
                }
            }
            fn show(&self) -> String {
                match self { $(Self::$variant => $word.into()),+ }
            }
        }
    };
    (@list $first:literal $($word:literal)*) => { concat!($first $(, ", ", $word)*) };
}
pub(crate) use choices;

pub const MIB: u64 = 1 << 20;

/// A size in whole MiB, for people.
pub fn in_mib(bytes: u64) -> String {
    Size(bytes / MIB * MIB).show()
}

pub const GIB: u64 = 1 << 30;

/// Parses a size as the reference image does: with fractions, spaces and `GB`, which the parser of
/// [`Size`] itself refuses. All units are binary. `bare` returns the unit of a number without one.
fn size_with_unit(text: &str, bare: impl Fn(f64) -> u64) -> anyhow::Result<Size> {
    let upper = text.to_ascii_uppercase().replace(' ', "");
    let end = upper.find(|letter: char| letter.is_ascii_alphabetic()).unwrap_or(upper.len());
    let (number, unit) = upper.split_at(end);
    let number = plain_decimal(number).context("give a size, like 512M or 8G")?;
    let scale = match unit {
        "" => bare(number),
        "B" => 1,
        "K" | "KB" | "KIB" => 1 << 10,
        "M" | "MB" | "MIB" => MIB,
        "G" | "GB" | "GIB" => GIB,
        "T" | "TB" | "TIB" => 1 << 40,
        _ => bail!("the unit is unknown: give a size, like 512M or 8G"),
    };
    #[expect(clippy::cast_precision_loss, reason = "units are powers of two")]
    let bytes = number * scale as f64;
    ensure!(bytes <= 1e18, "the size is too large: give a size, like 512M or 8G");
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 1e18")]
    Ok(Size(bytes as u64))
}

/// A size in bytes: `512M`, `1.5G`, `8GB`, or a number of bytes.
impl Value for Size {
    const ACCEPTS: &'static str = "size";

    fn read(text: &str) -> anyhow::Result<Self> {
        size_with_unit(text, |_| 1)
    }
    /// Unlike `Display`, it always writes a unit, because the text may be a setting whose bare
    /// numbers are gibibytes. It uses only units that `read` accepts.
    fn show(&self) -> String {
        for (unit, letter) in [(1 << 40, "T"), (GIB, "G"), (MIB, "M"), (1 << 10, "K")] {
            if self.0 != 0 && self.0.is_multiple_of(unit) {
                return format!("{}{letter}", self.0 / unit);
            }
        }
        format!("{}B", self.0)
    }
}

/// An amount, or a share of the host's available resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share<T> {
    Exactly(T),
    Half,
    Max,
}

impl<T: Default> Default for Share<T> {
    fn default() -> Self {
        Self::Exactly(T::default())
    }
}

impl<T: Value> Share<T> {
    fn read_with(text: &str, read: impl Fn(&str) -> anyhow::Result<T>) -> anyhow::Result<Self> {
        match text.to_ascii_lowercase().as_str() {
            "half" => Ok(Self::Half),
            "max" => Ok(Self::Max),
            _ => read(text).map(Self::Exactly),
        }
    }

    fn shown(&self) -> String {
        match self {
            Self::Exactly(value) => value.show(),
            Self::Half => "half".into(),
            Self::Max => "max".into(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cores(pub Share<Within<0, 65535>>);

/// Bare numbers below 130 are GiB, others MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ram(pub Share<Size>);

/// Bare numbers are GiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Disk(pub Share<Size>);

/// Implements `Value` for types that wrap a [`Share`], each with its own parser of amounts.
macro_rules! shares {
    ($($name:ident $accepts:literal $read:expr, $help:literal;)+) => {$(
        impl Value for $name {
            const ACCEPTS: &'static str = $accepts;

            fn read(text: &str) -> anyhow::Result<Self> {
                Share::read_with(text, $read).map(Self).map_err(|_| anyhow::anyhow!($help))
            }
            fn show(&self) -> String {
                self.0.shown()
            }
        }
    )+};
}

shares! {
    Cores "number, half, max" Within::read, "give a whole number, half or max";
    Ram "size, half, max" |text| {
        size_with_unit(text, |number| if number < 130.0 { GIB } else { MIB })
    }, "give a size with its unit, like 8G or 4096M, or half, or max";
    Disk "size, half, max" |text| size_with_unit(text, |_| GIB),
        "give a size with its unit, like 64G, or half, or max";
}

#[cfg(test)]
mod test {
    use super::*;

    fn shown<T: Value>(text: &str) -> Option<String> {
        T::read(text).ok().map(|value| value.show())
    }

    #[test]
    fn switches_accept_the_words_of_the_reference_image() {
        for text in ["y", "YES", "True", "1", "on", "enable", "Enabled"] {
            assert_eq!(switch(text), Some(true), "{text}");
        }
        for text in ["n", "No", "none", "false", "0", "OFF", "disable", "disabled"] {
            assert_eq!(switch(text), Some(false), "{text}");
        }
        for text in ["", "yep", "nope", "2", "-1", "y n", "\u{130}"] {
            assert_eq!(switch(text), None, "{text}");
        }
    }

    #[test]
    fn quotes_are_removed_in_pairs() {
        for (text, bare) in [
            (" a ", "a"),
            ("\" a\"", "a"),
            ("'a'", "a"),
            ("\"a'", "\"a'"),
            ("\"", "\""),
            ("''", ""),
            ("\"'a'\"", "'a'"),
        ] {
            assert_eq!(strip(text), bare, "{text}");
        }
    }

    #[test]
    fn quoted_values_are_escaped_and_fit_a_line() {
        assert_eq!(quote("a\u{1b}[2J\n\u{202e}"), "a\\u{1b}[2J\\n\\u{202e}");
        assert_eq!(quote("it's \"é\" \\"), "it's \"é\" \\");
        assert_eq!(quote(&"x".repeat(500)).chars().count(), 121);
    }

    #[test]
    fn sizes_are_binary_and_have_units() {
        for (text, wanted) in [
            ("512M", Some("512M")),
            ("1.5g", Some("1536M")),
            ("8 GiB", Some("8G")),
            ("2tb", Some("2T")),
            ("1024", Some("1K")),
            ("1000B", Some("1000B")),
            ("0", Some("0B")),
            ("", None),
            ("G", None),
            ("-1G", None),
            ("+1G", None),
            ("1e3", None),
            ("0x10", None),
            ("1.2.3G", None),
            ("8X", None),
            ("8GG", None),
            ("999999999999T", None),
            ("٣G", None),
        ] {
            assert_eq!(shown::<Size>(text).as_deref(), wanted, "{text}");
        }
        assert_eq!(shown::<Ram>("129.5").as_deref(), Some("132608M"));
        assert_eq!(shown::<Ram>("130").as_deref(), Some("130M"));
        assert_eq!(shown::<Disk>("130").as_deref(), Some("130G"));
        assert_eq!(shown::<Disk>("MAX").as_deref(), Some("max"));
        assert_eq!(shown::<Size>("max"), None);
    }

    #[test]
    fn numbers_are_digits_within_their_limits() {
        assert_eq!(shown::<Within<5, 9>>("007").as_deref(), Some("7"));
        for text in ["4", "10", "+5", "-5", "5.0", " 5", "", "99999999999999999999"] {
            assert_eq!(shown::<Within<5, 9>>(text), None, "{text}");
        }
        for text in ["-1", "inf", "NaN", "1e3", ".", "10001", ""] {
            assert_eq!(shown::<Decimal>(text), None, "{text}");
        }
        assert_eq!(shown::<Cores>("half").as_deref(), Some("half"));
        assert_eq!(shown::<Cores>("1.5"), None);
    }

    #[test]
    fn only_unicast_addresses_are_accepted() {
        assert!(shown::<Ipv4Addr>("10.0.0.2").is_some());
        for text in ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "10.0.0", "::1"] {
            assert_eq!(shown::<Ipv4Addr>(text), None, "{text}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let secret = Secret::read("hush").unwrap();
        assert_eq!(format!("{secret:?} {}", secret.show()), "*** ***");
        assert!(Secret::read(&"é".repeat(127)).is_ok());
        assert!(Secret::read(&"x".repeat(128)).is_err());
        assert!(Secret::read("a\tb").is_err());
    }
}
