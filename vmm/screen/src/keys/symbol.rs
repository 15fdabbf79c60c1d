//! X11 keysyms: characters, dead keys, and keys that are the same in all layouts.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use anyhow::Context;
use host::input::Key;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Symbol {
    Char(char),
    /// A dead key, by its keysym.
    Dead(u32),
}

/// Dead keys: the name in the table of layouts, the keysym, and the accent as a character.
const DEAD: &[(&str, u32, char)] = &[
    ("dead_grave", 0xfe50, '`'),
    ("dead_acute", 0xfe51, '´'),
    ("dead_circumflex", 0xfe52, '^'),
    ("dead_tilde", 0xfe53, '~'),
    ("dead_macron", 0xfe54, '¯'),
    ("dead_breve", 0xfe55, '˘'),
    ("dead_abovedot", 0xfe56, '˙'),
    ("dead_diaeresis", 0xfe57, '¨'),
    ("dead_abovering", 0xfe58, '°'),
    ("dead_doubleacute", 0xfe59, '˝'),
    ("dead_caron", 0xfe5a, 'ˇ'),
    ("dead_cedilla", 0xfe5b, '¸'),
    ("dead_ogonek", 0xfe5c, '˛'),
];

impl Symbol {
    /// The symbol of a keysym. `None` if it is neither a character nor a dead key.
    pub fn of(keysym: u32) -> Option<Self> {
        let character = match keysym {
            0x20..=0x7e | 0xa0..=0xff => Some(keysym),
            // Unicode
            0x0100_0000..=0x0110_ffff => Some(keysym - 0x0100_0000),
            0x100..0xfe00 => legacy(keysym),
            _ => None,
        };
        let character = character.and_then(char::from_u32).filter(|it| !it.is_control());
        let dead = || DEAD.iter().find(|it| it.1 == keysym).map(|it| Self::Dead(it.1));
        character.map(Self::Char).or_else(dead)
    }

    /// The accent of a dead key as a character, for layouts without that dead key.
    pub fn alone(self) -> Option<Self> {
        let Self::Dead(number) = self else { return None };
        DEAD.iter().find(|it| it.1 == number).map(|it| Self::Char(it.2))
    }
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Char(character) => write!(f, "{character}"),
            Self::Dead(number) => {
                f.write_str(DEAD.iter().find(|it| it.1 == *number).map_or("dead", |it| it.0))
            }
        }
    }
}

impl FromStr for Symbol {
    type Err = anyhow::Error;

    /// Parses the format of the table of layouts: the character, `U+0020` or `dead_acute`.
    fn from_str(word: &str) -> anyhow::Result<Self> {
        let mut characters = word.chars();
        if let (Some(only), None) = (characters.next(), characters.next()) {
            return Ok(Self::Char(only));
        }
        let number = word.strip_prefix("U+").and_then(|it| u32::from_str_radix(it, 16).ok());
        let dead = || DEAD.iter().find(|it| it.0 == word).map(|it| Self::Dead(it.1));
        let character = number.and_then(char::from_u32).map(Self::Char);
        character.or_else(dead).with_context(|| format!("`{word}` is not a symbol"))
    }
}

/// Keysyms from before Unicode. Each line of the table has the first keysym of a run, and the
/// characters of the run.
fn legacy(keysym: u32) -> Option<u32> {
    static RUNS: LazyLock<Vec<(u32, Vec<u32>)>> = LazyLock::new(|| {
        let lines = include_str!("symbols.txt").lines().filter(|line| !line.starts_with('#'));
        let number = |word| u32::from_str_radix(word, 16).unwrap_or_default();
        let runs = lines.filter_map(|line| {
            let mut numbers = line.split(' ').map(number);
            Some((numbers.next()?, numbers.collect()))
        });
        runs.collect()
    });
    let after = RUNS.partition_point(|(first, _)| *first <= keysym);
    let (first, run) = RUNS.get(after.checked_sub(1)?)?;
    run.get(usize::try_from(keysym - first).ok()?).copied()
}

/// Keys that are the same in all layouts: the keysym and the scan code.
const FIXED_KEYS: &[(u32, u16)] = &[
    (0xff08, 0x0e),   // BackSpace
    (0xff09, 0x0f),   // Tab
    (0xfe20, 0x0f),   // ISO_Left_Tab
    (0xff0a, 0x1c),   // Linefeed
    (0xff0d, 0x1c),   // Return
    (0xfe34, 0x1c),   // ISO_Enter
    (0xff1b, 0x01),   // Escape
    (0xff13, 0xe11d), // Pause
    (0xff6b, 0xe11d), // Break
    (0xff14, 0x46),   // Scroll_Lock
    (0xff61, 0xe037), // Print
    (0xff15, 0xe037), // Sys_Req
    (0xff50, 0xe047), // Home
    (0xff51, 0xe04b), // Left
    (0xff52, 0xe048), // Up
    (0xff53, 0xe04d), // Right
    (0xff54, 0xe050), // Down
    (0xff55, 0xe049), // Page_Up
    (0xff56, 0xe051), // Page_Down
    (0xff57, 0xe04f), // End
    (0xff63, 0xe052), // Insert
    (0xffff, 0xe053), // Delete
    (0xff67, 0xe05d), // Menu
    (0xff22, 0x7b),   // Muhenkan
    (0xff23, 0x79),   // Henkan_Mode
    (0xff25, 0x70),   // Hiragana
    (0xff26, 0x70),   // Katakana
    (0xff27, 0x70),   // Hiragana_Katakana
    (0xff2d, 0x70),   // Kana_Lock
    (0xff28, 0x29),   // Zenkaku
    (0xff29, 0x29),   // Hankaku
    (0xff2a, 0x29),   // Zenkaku_Hankaku
    (0xff2f, 0x3a),   // Eisu_Shift
    (0xff30, 0x3a),   // Eisu_toggle
    (0xff31, 0xf2),   // Hangul
    (0xff34, 0xf1),   // Hangul_Hanja
    (0xff7f, 0x45),   // Num_Lock
    (0xff8d, 0xe01c), // KP_Enter
    (0xffaa, 0x37),   // KP_Multiply
    (0xffab, 0x4e),   // KP_Add
    (0xffad, 0x4a),   // KP_Subtract
    (0xffaf, 0xe035), // KP_Divide
    (0xffc8, 0x57),   // F11
    (0xffc9, 0x58),   // F12
    (0xffca, 0x64),   // F13 to F24
    (0xffcb, 0x65),
    (0xffcc, 0x66),
    (0xffcd, 0x67),
    (0xffce, 0x68),
    (0xffcf, 0x69),
    (0xffd0, 0x6a),
    (0xffd1, 0x6b),
    (0xffd2, 0x6c),
    (0xffd3, 0x6d),
    (0xffd4, 0x6e),
    (0xffd5, 0x76),
    (0xffe1, 0x2a),        // Shift_L
    (0xffe2, 0x36),        // Shift_R
    (0xffe3, 0x1d),        // Control_L
    (0xffe4, 0xe01d),      // Control_R
    (0xffe5, 0x3a),        // Caps_Lock
    (0xffe6, 0x3a),        // Shift_Lock
    (0xffe7, 0xe05b),      // Meta_L
    (0xffe8, 0xe05c),      // Meta_R
    (0xffe9, 0x38),        // Alt_L
    (0xffea, 0xe038),      // Alt_R
    (0xfe03, 0xe038),      // ISO_Level3_Shift
    (0xff7e, 0xe038),      // Mode_switch
    (0xffeb, 0xe05b),      // Super_L
    (0xffec, 0xe05c),      // Super_R
    (0xff20, 0xe05d),      // Multi_key: Compose is at the place of Menu
    (0x1008_ff11, 0xe02e), // XF86AudioLowerVolume
    (0x1008_ff12, 0xe020), // XF86AudioMute
    (0x1008_ff13, 0xe030), // XF86AudioRaiseVolume
    (0x1008_ff14, 0xe022), // XF86AudioPlay
    (0x1008_ff31, 0xe022), // XF86AudioPause
    (0x1008_ff15, 0xe024), // XF86AudioStop
    (0x1008_ff16, 0xe010), // XF86AudioPrev
    (0x1008_ff17, 0xe019), // XF86AudioNext
    (0x1008_ff18, 0xe032), // XF86HomePage
    (0x1008_ff19, 0xe06c), // XF86Mail
    (0x1008_ff1b, 0xe065), // XF86Search
    (0x1008_ff1d, 0xe021), // XF86Calculator
    (0x1008_ff26, 0xe06a), // XF86Back
    (0x1008_ff27, 0xe069), // XF86Forward
    (0x1008_ff28, 0xe068), // XF86Stop
    (0x1008_ff29, 0xe067), // XF86Refresh
    (0x1008_ff2a, 0xe05e), // XF86PowerOff
    (0x1008_ff2f, 0xe05f), // XF86Sleep
    (0x1008_ff30, 0xe066), // XF86Favorites
    (0x1008_ff32, 0xe06d), // XF86AudioMedia
    (0x1008_ff33, 0xe06b), // XF86MyComputer
];

/// The key of a keysym that is not a character, if all layouts have it at the same place.
pub fn fixed_key(keysym: u32) -> Option<Key> {
    let code = match keysym {
        // F1 to F10, and the keypad's F1 to F4
        0xffbe..=0xffc7 => u16::try_from(keysym - 0xffbe + 0x3b).ok(),
        0xff91..=0xff94 => u16::try_from(keysym - 0xff91 + 0x3b).ok(),
        _ => FIXED_KEYS.iter().find(|(symbol, _)| *symbol == keysym).map(|(_, code)| *code),
    };
    code.and_then(Key::new)
}

/// A key of the keypad whose meaning depends on Num Lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeypadKey {
    pub key: Key,
    /// The character that the keysym means. `None` for the meaning without Num Lock.
    pub typed: Option<char>,
    /// The key beside the keypad with the same meaning. `None` if the keysym means a character.
    pub twin: Option<Key>,
}

/// The keypad: the scan code, the keysyms with and without Num Lock, the character, and the twin.
const KEYPAD: &[(u16, u32, u32, char, u16)] = &[
    (0x52, 0xffb0, 0xff9e, '0', 0xe052),
    (0x4f, 0xffb1, 0xff9c, '1', 0xe04f),
    (0x50, 0xffb2, 0xff99, '2', 0xe050),
    (0x51, 0xffb3, 0xff9b, '3', 0xe051),
    (0x4b, 0xffb4, 0xff96, '4', 0xe04b),
    (0x4c, 0xffb5, 0xff9d, '5', 0x4c),
    (0x4d, 0xffb6, 0xff98, '6', 0xe04d),
    (0x47, 0xffb7, 0xff95, '7', 0xe047),
    (0x48, 0xffb8, 0xff97, '8', 0xe048),
    (0x49, 0xffb9, 0xff9a, '9', 0xe049),
    (0x53, 0xffae, 0xff9f, '.', 0xe053),
    (0x53, 0xffac, 0xff9f, ',', 0xe053),
];

pub fn keypad_key(keysym: u32) -> Option<KeypadKey> {
    let found = KEYPAD.iter().find(|it| it.1 == keysym || it.2 == keysym)?;
    let typed = (found.1 == keysym).then_some(found.3);
    let twin = Key::new(found.4).filter(|_| typed.is_none());
    Some(KeypadKey { key: Key::new(found.0)?, typed, twin })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn symbols_have_their_characters_for_all_keysyms() {
        for (keysym, character) in [
            (0x61, 'a'),
            (0xe4, 'ä'),
            (0x0100_20ac, '€'),
            (0x20ac, '€'),
            (0x1b1, 'ą'),
            (0x3b3, 'ŗ'),
            (0x6c1, 'а'),
            (0x7e1, 'α'),
            (0xce0, 'א'),
            (0x5c7, 'ا'),
            (0xda1, 'ก'),
            (0x4b1, 'ア'),
            (0xea1, 'ㄱ'),
        ] {
            assert_eq!(Symbol::of(keysym), Some(Symbol::Char(character)), "{keysym:#x}");
        }
        assert_eq!(Symbol::of(0xfe51), "dead_acute".parse().ok());
        for nothing in [0, 0x1f, 0x7f, 0xfe, 0xff0d, 0xffbe, 0x0100_0000, 0x0100_d800, u32::MAX] {
            let character = char::from_u32(nothing).filter(|it| *it == 'þ').map(Symbol::Char);
            assert_eq!(Symbol::of(nothing), character, "{nothing:#x}");
        }
    }

    #[test]
    fn every_fixed_key_is_a_key_and_not_a_character() {
        for (symbol, code) in FIXED_KEYS {
            assert!(Key::new(*code).is_some() && Symbol::of(*symbol).is_none(), "{symbol:#x}");
            assert_eq!(FIXED_KEYS.iter().filter(|it| it.0 == *symbol).count(), 1, "{symbol:#x}");
        }
        assert_eq!(fixed_key(0xffbe).unwrap().code(), 0x3b, "F1");
        assert_eq!(fixed_key(0xffc7).unwrap().code(), 0x44, "F10");
        assert_eq!(fixed_key(0xff13), Some(Key::PAUSE));
        assert!(KEYPAD.iter().all(|it| Key::new(it.0).is_some() && Key::new(it.4).is_some()));
        assert_eq!(keypad_key(0xffb7).unwrap().typed, Some('7'));
        assert_eq!(keypad_key(0xff95).unwrap().twin.unwrap().code(), 0xe047);
    }
}
