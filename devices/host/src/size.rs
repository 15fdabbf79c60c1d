//! Sizes as people write them: `4G`, `512M`, `4096`.
//!
//! All units are binary, as in QEMU and in Kubernetes' `Gi`, because memory and disks of guests
//! come in pages. `GB` is refused because half of its users mean 10⁹.
use std::fmt;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The accepted units, smallest first, each with its power of two.
const UNITS: [(char, u32); 6] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50), ('E', 60)];

/// A number of bytes. Reads `4G`, `4GiB`, `4Gi`, `4096M` or a plain number; prints the largest
/// unit that is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        ensure!(
            !number.is_empty(),
            "`{text}` is not a size: write a number such as `512M` or `4G`"
        );
        let shift = shift_of(unit).with_context(|| format!("`{text}` is not a size"))?;
        number
            .parse()
            .ok()
            .and_then(|number: u64| number.checked_mul(1 << shift))
            .map(Self)
            .with_context(|| format!("`{text}` is too large: the largest size is below 16E"))
    }
}

/// The power of two of a unit. An empty unit means bytes.
fn shift_of(unit: &str) -> anyhow::Result<u32> {
    let mut letters = unit.chars();
    let Some(letter) = letters.next() else { return Ok(0) };
    let shift = UNITS.iter().find(|(known, _)| letter.eq_ignore_ascii_case(known));
    match (shift, letters.as_str()) {
        (Some((_, shift)), "" | "i" | "iB" | "ib") => Ok(*shift),
        (Some((known, _)), "B" | "b") => {
            bail!("`{unit}` could be decimal or binary: write `{known}`, which is binary")
        }
        _ => bail!("the unit `{unit}` is unknown: write K, M, G, T, P or E"),
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = |shift: u32| self.0 != 0 && self.0.trailing_zeros() >= shift;
        match UNITS.iter().rev().find(|(_, shift)| exact(*shift)) {
            Some((unit, shift)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SizeVisitor)
    }
}

struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = Size;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as `512M`, `4G` or a number of bytes")
    }

    fn visit_u64<E: Error>(self, bytes: u64) -> Result<Size, E> {
        Ok(Size(bytes))
    }

    fn visit_i64<E: Error>(self, bytes: i64) -> Result<Size, E> {
        u64::try_from(bytes)
            .map(Size)
            .map_err(|_| E::custom(format_args!("`{bytes}` is not a size: it is negative")))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Size, E> {
        text.parse().map_err(|error| E::custom(format_args!("{error:#}")))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn size(text: &str) -> u64 {
        text.parse::<Size>().unwrap_or_else(|error| panic!("{text}: {error:#}")).0
    }

    fn refusal(text: &str) -> String {
        format!("{:#}", text.parse::<Size>().expect_err(text))
    }

    #[test]
    fn reads_every_spelling_of_a_unit() {
        for text in ["4G", "4g", "4Gi", "4GiB", "4096M", "4096MiB", "4194304K", "4294967296"] {
            assert_eq!(size(text), 4 << 30, "{text}");
        }
        assert_eq!(size("512K"), 512 << 10);
        assert_eq!(size("1T"), 1 << 40);
        assert_eq!(size("2P"), 2 << 50);
        assert_eq!(size("0"), 0);
        assert_eq!(size("18446744073709551615"), u64::MAX);
        assert_eq!(size("15E"), 15 << 60);
    }

    #[test]
    fn refuses_invalid_sizes() {
        for text in ["", "G", "-1", "-4G", "+4G", "x4G", " 4G"] {
            let refusal = refusal(text);
            assert!(refusal.starts_with(&format!("`{text}` is not a size: write")), "{refusal}");
        }
        for text in ["4 gigs", "4 G", "4.5G", "1_000", "4GG", "4G ", "4Gib ", "0x10", "4µ", "4iB"]
        {
            let refusal = refusal(text);
            assert!(refusal.starts_with(&format!("`{text}` is not a size: the unit")), "{refusal}");
        }
    }

    #[test]
    fn refuses_a_unit_with_two_meanings() {
        assert_eq!(
            refusal("4GB"),
            "`4GB` is not a size: `GB` could be decimal or binary: write `G`, which is binary"
        );
    }

    #[test]
    fn refuses_a_size_beyond_64_bits() {
        for text in ["16E", "18446744073709551616", "99999999999999999999G", "17179869184G"] {
            let refusal = refusal(text);
            assert!(refusal.starts_with(&format!("`{text}` is too large")), "{refusal}");
        }
    }

    #[test]
    fn prints_the_largest_exact_unit_and_reads_it_back() {
        let printed =
            [(0, "0"), (1, "1"), (1024, "1K"), (1025, "1025"), (4 << 30, "4G"), (1 << 63, "8E")];
        for (bytes, text) in printed {
            assert_eq!(Size(bytes).to_string(), text);
        }
        assert_eq!(Size(3 << 29).to_string(), "1536M");
        for bytes in [0, 1, 1023, 1024, 3 << 29, 1 << 63, u64::MAX, u64::MAX - 1023] {
            assert_eq!(size(&Size(bytes).to_string()), bytes);
        }
    }

    #[test]
    fn is_a_number_or_a_text_in_json() {
        let read = |json: &str| serde_json::from_str::<Size>(json);
        assert_eq!(read("4096").unwrap(), Size(4096));
        assert_eq!(read("\"4G\"").unwrap(), Size(4 << 30));
        assert_eq!(serde_json::to_string(&Size(4 << 30)).unwrap(), "\"4G\"");
        for (json, sentence) in [
            ("-1", "`-1` is not a size: it is negative"),
            ("\"\"", "`` is not a size: write"),
            ("1.5", "invalid type: floating point `1.5`, expected a size such as"),
            ("true", "invalid type: boolean `true`, expected a size such as"),
            ("18446744073709551616", "invalid type: floating point"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.starts_with(sentence), "{error}");
        }
    }
}
