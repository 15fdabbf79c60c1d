//! Names on FAT (Microsoft's FAT specification 1.03): which names Windows can have, long names, and
//! the short names that every file has besides.

use std::collections::{HashMap, HashSet};

/// Bytes of a directory entry.
pub(super) const ENTRY_BYTES: usize = 32;
/// UTF-16 units of a name.
const MAX_UNITS: usize = 255;
/// UTF-16 units in one entry of a long name.
const UNITS: usize = 13;
/// Offsets of the units in such an entry.
const UNIT_OFFSETS: [usize; UNITS] = [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30];
/// Marks the entry that begins a long name, which has its last characters.
const LAST_ENTRY: u8 = 0x40;
/// Attributes of an entry of a long name.
const LONG_NAME: u8 = 0x0f;
/// Characters of a short name besides capitals and digits.
const SHORT_SIGNS: &[u8] = b"$%'-_@~`!(){}^#&";
/// Names of devices, which Windows does not use for files, whatever their extension.
const DEVICES: [&str; 4] = ["CON", "PRN", "AUX", "NUL"];
const NUMBERED_DEVICES: [&str; 2] = ["COM", "LPT"];

/// A name of eight characters and three of the extension, filled with spaces.
pub(super) type ShortName = [u8; 11];

/// Why Windows cannot have a file or folder of this name, if so.
pub(super) fn fault(name: &str) -> Option<&'static str> {
    let forbidden = |letter: char| letter.is_control() || "\"*/:<>?\\|".contains(letter);
    if name.is_empty() || name == "." || name == ".." {
        Some("is not a name")
    } else if name.contains(forbidden) {
        Some("has one of the characters \" * / : < > ? \\ | or a control character in its name")
    } else if name.ends_with(['.', ' ']) {
        Some("has a name that ends with a dot or a space")
    } else if name.encode_utf16().count() > MAX_UNITS {
        Some("has a name of more than 255 characters")
    } else if is_device(name) {
        Some("has the name of a device of Windows")
    } else {
        None
    }
}

fn is_device(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default().trim_end().to_ascii_uppercase();
    let is_numbered = NUMBERED_DEVICES.iter().any(|device| {
        let number = stem.strip_prefix(device).unwrap_or_default();
        matches!(number.as_bytes(), [b'1'..=b'9'])
    });
    DEVICES.contains(&stem.as_str()) || is_numbered
}

/// The form in which Windows compares names.
pub(super) fn folded(name: &str) -> String {
    let upper = |letter: char| {
        let mut upper = letter.to_uppercase();
        // Windows knows no capital that is more than one character.
        match (upper.next(), upper.next()) {
            (Some(one), None) => one,
            _ => letter,
        }
    };
    name.chars().map(upper).collect()
}

/// The short names of one folder.
#[derive(Default)]
pub(super) struct ShortNames {
    taken: HashSet<ShortName>,
    /// The last number after `~`, for the first two characters and the extension. Two characters
    /// are what always remains beside the number.
    last: HashMap<([u8; 2], [u8; 3]), u32>,
}

impl ShortNames {
    /// Takes the short forms of all names that have one: no other file may be found by them.
    pub(super) fn of<'a>(names: impl Iterator<Item = &'a str>) -> Self {
        Self { taken: names.filter_map(short).collect(), last: HashMap::new() }
    }

    /// The name in capitals if that is short, and otherwise a new one that is like it.
    pub(super) fn next(&mut self, name: &str) -> ShortName {
        if let Some(short) = short(name) {
            return short;
        }
        let (stem, extension) = basis(name);
        let mut made = [b' '; 11];
        made[8..8 + extension.len()].copy_from_slice(&extension);
        let start = [stem[0], stem.get(1).copied().unwrap_or(b' ')];
        let last = self.last.entry((start, [made[8], made[9], made[10]])).or_default();
        loop {
            *last += 1;
            let tail = format!("~{last}");
            let kept = stem.len().min(8_usize.saturating_sub(tail.len()));
            made[..8].fill(b' ');
            made[..kept].copy_from_slice(&stem[..kept]);
            made[kept..kept + tail.len()].copy_from_slice(tail.as_bytes());
            if self.taken.insert(made) {
                return made;
            }
        }
    }
}

/// Whether a name needs no long one besides.
fn is_short(name: &str) -> bool {
    short(name).is_some() && !name.bytes().any(|byte| byte.is_ascii_lowercase())
}

/// The name in capitals as a short name, if it can be one.
fn short(name: &str) -> Option<ShortName> {
    let name = name.to_ascii_uppercase();
    let (stem, extension) = name.split_once('.').unwrap_or((&name, ""));
    let fits = |part: &str, most: usize| part.len() <= most && part.bytes().all(is_short_character);
    if stem.is_empty() || !fits(stem, 8) || !fits(extension, 3) || name.ends_with('.') {
        return None;
    }
    let mut short = [b' '; 11];
    short[..stem.len()].copy_from_slice(stem.as_bytes());
    short[8..8 + extension.len()].copy_from_slice(extension.as_bytes());
    Some(short)
}

fn is_short_character(byte: u8) -> bool {
    byte.is_ascii_uppercase() || byte.is_ascii_digit() || SHORT_SIGNS.contains(&byte)
}

/// The characters of a name that a short name can have: at least one, at most eight, and at most
/// three of the extension.
fn basis(name: &str) -> (Vec<u8>, Vec<u8>) {
    let plain = |part: &str, most: usize| -> Vec<u8> {
        let kept = part.chars().filter(|it| !matches!(it, ' ' | '.'));
        let byte = |letter: char| {
            let byte = u8::try_from(letter.to_ascii_uppercase()).unwrap_or(b'_');
            if is_short_character(byte) { byte } else { b'_' }
        };
        kept.map(byte).take(most).collect()
    };
    let (stem, extension) = match name.rsplit_once('.') {
        Some((stem, extension)) if !stem.is_empty() => (stem, extension),
        _ => (name, ""),
    };
    let mut stem = plain(stem, 8);
    if stem.is_empty() {
        stem.push(b'_');
    }
    (stem, plain(extension, 3))
}

/// The entries of a long name, which stand before the entry of the file. There are none for a name
/// that is short as it is.
pub(super) fn long_entries(name: &str, short_name: &ShortName) -> Vec<[u8; ENTRY_BYTES]> {
    if is_short(name) {
        return Vec::new();
    }
    let units: Vec<u16> = name.encode_utf16().collect();
    let sum = short_name.iter().fold(0_u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
    let mut entries: Vec<_> =
        (1..).zip(units.chunks(UNITS)).map(|(number, part)| entry(number, part, sum)).collect();
    if let Some(last) = entries.last_mut() {
        last[0] |= LAST_ENTRY;
    }
    entries.reverse();
    entries
}

fn entry(number: u8, part: &[u16], sum: u8) -> [u8; ENTRY_BYTES] {
    let mut entry = [0; ENTRY_BYTES];
    (entry[0], entry[11], entry[13]) = (number, LONG_NAME, sum);
    // A zero ends the name, and ones fill the entry.
    let filled = part.iter().copied().chain([0]).chain(std::iter::repeat(u16::MAX));
    for (at, unit) in UNIT_OFFSETS.iter().zip(filled) {
        entry[*at..at + 2].copy_from_slice(&unit.to_le_bytes());
    }
    entry
}

/// The number of entries of a file with this name, those of a long name included.
pub(super) fn entry_count(name: &str) -> usize {
    if is_short(name) { 1 } else { 1 + name.encode_utf16().count().div_ceil(UNITS) }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn names_that_windows_cannot_have_are_refused() {
        for name in ["install.bat", "$WinPEDriver$", ".x", "a..b", "COM10", "a b", "日本", "COM0"]
        {
            assert_eq!(fault(name), None, "{name}");
        }
        let long = "x".repeat(256);
        for name in [
            "", ".", "..", "a:b", "a\\b", "a?", "a\n", "a.", "a ", "nul", "Con.txt", "lpt9.a.b",
            "aux .c", &long,
        ] {
            assert!(fault(name).is_some(), "{name}");
        }
        assert_eq!(fault(&long[1..]), None);
        // One character of two units.
        assert!(fault(&"\u{1f600}".repeat(128)).is_some());
    }

    #[test]
    fn short_names_are_like_the_long_ones_and_each_is_there_once() {
        let all = [
            ("AB~1.TXT", "AB~1    TXT"),
            ("ab.txt", "AB      TXT"),
            // The number 1 is taken, and 3 by the last name.
            ("a b.txt", "AB~2    TXT"),
            ("AB.txt2", "AB~4    TXT"),
            ("日本.txt", "__~1    TXT"),
            (".git", "GIT~1      "),
            ("$OEM$", "$OEM$      "),
            ("x.y.z", "XY~1    Z  "),
            ("ab~3.txt", "AB~3    TXT"),
        ];
        let mut names = ShortNames::of(all.iter().map(|(name, _)| *name));
        for (name, short) in all {
            assert_eq!(str::from_utf8(&names.next(name)), Ok(short), "{name}");
        }
    }

    #[test]
    fn many_names_with_one_beginning_have_different_short_names() {
        let mut names = ShortNames::default();
        let made: HashSet<_> = (0..40_000).map(|at| names.next(&format!("driver{at}.x"))).collect();
        assert_eq!(made.len(), 40_000);
    }

    #[test]
    fn a_long_name_is_in_parts_of_thirteen_the_last_first() {
        let entries = long_entries("Autounattend.xml", b"AUTOUN~1XML");
        assert_eq!(entries.len() + 1, entry_count("Autounattend.xml"));
        assert_eq!((entries[0][0], entries[1][0]), (0x42, 1));
        assert_eq!(entries[0][1..11], *b"x\0m\0l\0\0\0\xff\xff");
        assert_eq!(entries[1][1..11], *b"A\0u\0t\0o\0u\0");
        assert!(entries.iter().all(|it| it[11] == LONG_NAME && it[13] == entries[0][13]));
        assert!(long_entries("$OEM$", b"$OEM$      ").is_empty());
        assert_eq!(long_entries("oem", b"OEM        ").len(), 1);
        // 26 characters fill two entries without an end.
        assert_eq!(long_entries(&"x".repeat(26), b"X~1        ")[0][28..], [b'x', 0, b'x', 0]);
    }
}
