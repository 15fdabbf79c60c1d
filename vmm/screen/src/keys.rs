//! Names of keys for operators: the labels of a US keyboard.

pub mod layout;
pub mod symbol;
pub mod text;
pub mod translate;

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, ensure};
use host::input::Key;
use serde::{Deserialize, Serialize};

use host::keyvalue;

/// Names and codes of scan code set 1.
const NAMES: &[(&str, u16)] = &[
    ("esc", 0x01),
    ("minus", 0x0c),
    ("equal", 0x0d),
    ("backspace", 0x0e),
    ("tab", 0x0f),
    ("bracketleft", 0x1a),
    ("bracketright", 0x1b),
    ("enter", 0x1c),
    ("ctrl", 0x1d),
    ("semicolon", 0x27),
    ("apostrophe", 0x28),
    ("grave", 0x29),
    ("shift", 0x2a),
    ("backslash", 0x2b),
    ("comma", 0x33),
    ("period", 0x34),
    ("slash", 0x35),
    ("rightshift", 0x36),
    ("alt", 0x38),
    ("space", 0x39),
    ("capslock", 0x3a),
    ("f1", 0x3b),
    ("f2", 0x3c),
    ("f3", 0x3d),
    ("f4", 0x3e),
    ("f5", 0x3f),
    ("f6", 0x40),
    ("f7", 0x41),
    ("f8", 0x42),
    ("f9", 0x43),
    ("f10", 0x44),
    ("numlock", 0x45),
    ("scrolllock", 0x46),
    ("f11", 0x57),
    ("f12", 0x58),
    ("hanja", 0xf1),
    ("hangul", 0xf2),
    ("previous", 0xe010),
    ("next", 0xe019),
    ("rightctrl", 0xe01d),
    ("mute", 0xe020),
    ("play", 0xe022),
    ("stop", 0xe024),
    ("volumedown", 0xe02e),
    ("volumeup", 0xe030),
    ("print", 0xe037),
    ("rightalt", 0xe038),
    ("home", 0xe047),
    ("up", 0xe048),
    ("pageup", 0xe049),
    ("left", 0xe04b),
    ("right", 0xe04d),
    ("end", 0xe04f),
    ("down", 0xe050),
    ("pagedown", 0xe051),
    ("insert", 0xe052),
    ("delete", 0xe053),
    ("logo", 0xe05b),
    ("rightlogo", 0xe05c),
    ("menu", 0xe05d),
    ("sleep", 0xe05f),
    ("pause", 0xe11d),
];

/// Rows of letters and digits, each with the code of its first key.
const ROWS: &[(&str, u16)] =
    &[("1234567890", 0x02), ("qwertyuiop", 0x10), ("asdfghjkl", 0x1e), ("zxcvbnm", 0x2c)];

/// One key per finger; more are a mistake.
const MAX_KEYS: usize = 10;

/// Keys that are pressed together: `ctrl-alt-delete`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Combination(pub Vec<Key>);

impl FromStr for Combination {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let keys: Vec<Key> = text.split('-').map(key).collect::<Result<_, _>>()?;
        ensure!(keys.len() <= MAX_KEYS, "{text}: {} keys: at most {MAX_KEYS} at once", keys.len());
        Ok(Self(keys))
    }
}

/// Parses the name or the code of a key.
fn key(name: &str) -> anyhow::Result<Key> {
    let named = NAMES.iter().find(|it| it.0 == name).map(|it| it.1);
    let lettered = ROWS.iter().find_map(|(row, first)| {
        let at = row.find(name).filter(|_| name.len() == 1)?;
        Some(first + u16::try_from(at).ok()?)
    });
    let hexadecimal = name.strip_prefix("0x").and_then(|it| u16::from_str_radix(it, 16).ok());
    named.or(lettered).or(hexadecimal).and_then(Key::new).with_context(|| {
        let names: Vec<_> = NAMES.iter().map(|it| it.0).collect();
        let near = keyvalue::nearest(name, &names).unwrap_or("ctrl-alt-delete");
        format!(
            "there is no key `{name}`: did you mean {near}? Write letters, digits, {} or a scan \
             code like 0xe05b",
            names.join(", ")
        )
    })
}

impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, key) in self.0.iter().enumerate() {
            let dash = if at > 0 { "-" } else { "" };
            match NAMES.iter().find(|it| it.1 == key.code()) {
                Some((name, _)) => write!(f, "{dash}{name}")?,
                None => write!(f, "{dash}{:#x}", key.code())?,
            }
        }
        Ok(())
    }
}

host::as_text!(Combination);

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn keys_are_read_by_name_letter_and_code_and_print_back() {
        let read = |text: &str| text.parse::<Combination>().map(|it| (it.to_string(), it.0));
        let codes = |text: &str| {
            let (written, keys) = read(text).unwrap();
            assert_eq!(read(&written).unwrap().1, keys);
            keys.into_iter().map(Key::code).collect::<Vec<_>>()
        };
        assert_eq!(codes("ctrl-alt-delete"), [0x1d, 0x38, 0xe053]);
        assert_eq!(codes("shift-a-0-m-0xe05b"), [0x2a, 0x1e, 0x0b, 0x32, 0xe05b]);
        assert_eq!(codes("hangul"), [0xf2]);
        for (text, word) in [
            ("", "there is no key ``"),
            ("ctrl-", "there is no key ``"),
            ("contrl-a", "did you mean"),
            ("qw", "0xe05b"),
            ("0x80", "there is no key `0x80`"),
            ("a-b-c-d-e-f-g-h-i-j-k", "11 keys"),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
