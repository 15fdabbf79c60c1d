//! Scan codes: the bytes of each key in the three sets, and the controller's translation of set 2
//! to set 1.
//!
//! The codes are from the IBM Personal System/2 Hardware Interface Technical Reference,
//! "Keyboards". Microsoft's "USB HID to PS/2 Scan Code Translation Table" has the same tables.

use host::input::Key;

/// The prefix of a released key in sets 2 and 3.
pub(super) const BREAK: u8 = 0xf0;

/// Maps a make code of set 1 (7 bits) to set 2.
const SET2: [u8; 128] = [
    0x00, 0x76, 0x16, 0x1e, 0x26, 0x25, 0x2e, 0x36, 0x3d, 0x3e, 0x46, 0x45, 0x4e, 0x55, 0x66, 0x0d,
    0x15, 0x1d, 0x24, 0x2d, 0x2c, 0x35, 0x3c, 0x43, 0x44, 0x4d, 0x54, 0x5b, 0x5a, 0x14, 0x1c, 0x1b,
    0x23, 0x2b, 0x34, 0x33, 0x3b, 0x42, 0x4b, 0x4c, 0x52, 0x0e, 0x12, 0x5d, 0x1a, 0x22, 0x21, 0x2a,
    0x32, 0x31, 0x3a, 0x41, 0x49, 0x4a, 0x59, 0x7c, 0x11, 0x29, 0x58, 0x05, 0x06, 0x04, 0x0c, 0x03,
    0x0b, 0x83, 0x0a, 0x01, 0x09, 0x77, 0x7e, 0x6c, 0x75, 0x7d, 0x7b, 0x6b, 0x73, 0x74, 0x79, 0x69,
    0x72, 0x7a, 0x70, 0x71, 0x84, 0x60, 0x61, 0x78, 0x07, 0x0f, 0x17, 0x1f, 0x27, 0x2f, 0x37, 0x3f,
    0x47, 0x4f, 0x56, 0x5e, 0x08, 0x10, 0x18, 0x20, 0x28, 0x30, 0x38, 0x40, 0x48, 0x50, 0x57, 0x6f,
    0x13, 0x19, 0x39, 0x51, 0x53, 0x5c, 0x5f, 0x62, 0x63, 0x64, 0x65, 0x67, 0x68, 0x6a, 0x6d, 0x6e,
];

/// Maps set 2 to set 1: the table in the controller's ROM. It also translates the keyboard's
/// answers: bytes from 0x85 on map to themselves.
const TRANSLATED: [u8; 256] = {
    let mut table = [0; 256];
    let mut code: u8 = 0xff;
    while code > 0x7f {
        table[code as usize] = code;
        code -= 1;
    }
    let mut code: u8 = 0;
    while code < 0x80 {
        table[SET2[code as usize] as usize] = code;
        code += 1;
    }
    // The two exceptions for keys with codes above 0x7f, and "too many keys".
    table[0x02] = 0x41;
    table[0x7f] = 0x54;
    table[0x00] = 0xff;
    table
};

/// Translates a byte from the keyboard. `breaking` means that 0xF0 preceded it.
pub(super) fn translate(byte: u8, breaking: bool) -> u8 {
    TRANSLATED[usize::from(byte)] | if breaking { 0x80 } else { 0 }
}

/// The modifiers that are down. They change the codes of Print Screen and Pause.
#[derive(Clone, Copy, Default)]
pub(super) struct Modifiers {
    pub(super) ctrl: bool,
    pub(super) alt: bool,
    pub(super) shift: bool,
}

pub(super) fn set1(key: Key, down: bool, modifiers: Modifiers) -> Vec<u8> {
    let mut breaking = false;
    let translated = set2(key, down, modifiers).into_iter().filter_map(|byte| {
        if byte == BREAK {
            breaking = true;
            return None;
        }
        Some(match byte {
            0xe0 | 0xe1 => byte,
            _ => translate(byte, std::mem::take(&mut breaking)),
        })
    });
    translated.collect()
}

pub(super) fn set2(key: Key, down: bool, modifiers: Modifiers) -> Vec<u8> {
    let Modifiers { ctrl, alt, shift } = modifiers;
    let bytes: &[u8] = match (key, down) {
        (Key::PAUSE | Key::HANGUL | Key::HANJA, false) => &[],
        // With Ctrl the key is Break, which is released at once.
        (Key::PAUSE, true) if ctrl => &[0xe0, 0x7e, 0xe0, BREAK, 0x7e],
        (Key::PAUSE, true) => &[0xe1, 0x14, 0x77, 0xe1, BREAK, 0x14, BREAK, 0x77],
        (Key::PRINT, true) if alt => &[0x84],
        (Key::PRINT, false) if alt => &[BREAK, 0x84],
        (Key::PRINT, true) if ctrl || shift => &[0xe0, 0x7c],
        (Key::PRINT, false) if ctrl || shift => &[0xe0, BREAK, 0x7c],
        (Key::PRINT, true) => &[0xe0, 0x12, 0xe0, 0x7c],
        (Key::PRINT, false) => &[0xe0, BREAK, 0x7c, 0xe0, BREAK, 0x12],
        _ => return plain(key, down),
    };
    bytes.to_vec()
}

fn plain(key: Key, down: bool) -> Vec<u8> {
    let [prefix, code] = key.code().to_be_bytes();
    let mut bytes = Vec::with_capacity(3);
    bytes.extend((prefix != 0).then_some(prefix));
    bytes.extend((!down).then_some(BREAK));
    // Only Hangul and Hanja have higher codes, which are the same in all sets.
    bytes.push(SET2.get(usize::from(code)).copied().unwrap_or(code));
    bytes
}

/// The code of a key in set 3, which has no prefixes and does not depend on modifiers. `None` for
/// keys that keyboards with set 3 did not have.
pub(super) fn set3(key: Key) -> Option<u8> {
    Some(match key.code() {
        0x01 => 0x08,
        // F1 to F10, F11, F12.
        code @ 0x3b..=0x44 => (u8::try_from(code).ok()? - 0x3b) * 8 + 0x07,
        0x57 => 0x56,
        0x58 => 0x5e,
        0x1d => 0x11,
        0x38 => 0x19,
        0x3a => 0x14,
        0x45 => 0x76,
        0x46 => 0x5f,
        0x2b => 0x5c,
        0x56 => 0x13,
        0x37 => 0x7e,
        0x4a => 0x84,
        0x4e => 0x7c,
        // The rest of the number pad, the letters, the digits and Shift are as in set 2.
        code @ (0x02..=0x39 | 0x47..=0x53) => SET2[usize::from(code)],
        0xe01c => 0x79,
        0xe01d => 0x58,
        0xe035 => 0x77,
        0xe037 => 0x57,
        0xe038 => 0x39,
        0xe047 => 0x6e,
        0xe048 => 0x63,
        0xe049 => 0x6f,
        0xe04b => 0x61,
        0xe04d => 0x6a,
        0xe04f => 0x65,
        0xe050 => 0x60,
        0xe051 => 0x6d,
        0xe052 => 0x67,
        0xe053 => 0x64,
        0xe05b => 0x8b,
        0xe05c => 0x8c,
        0xe05d => 0x8d,
        0xe11d => 0x62,
        _ => return None,
    })
}

#[cfg(test)]
mod test {
    use std::collections::BTreeSet;

    use super::*;

    fn key(code: u16) -> Key {
        Key::new(code).unwrap()
    }

    #[test]
    fn every_key_survives_translation_by_the_controller() {
        let codes: BTreeSet<u8> = SET2.into_iter().collect();
        assert_eq!(codes.len(), 128, "no two keys share a code");
        for code in (1..0x80).chain(0xe001..0xe080).filter(|it| *it != Key::PRINT.code()) {
            let low = code.to_be_bytes()[1];
            let prefix: &[u8] = if code > 0xff { &[0xe0] } else { &[] };
            let none = Modifiers::default();
            assert_eq!(set1(key(code), true, none), [prefix, &[low]].concat(), "{code:#x}");
            assert_eq!(set1(key(code), false, none), [prefix, &[low | 0x80]].concat());
        }
    }

    #[test]
    fn pause_and_print_screen_codes_depend_on_modifiers() {
        let none = Modifiers::default();
        let ctrl = Modifiers { ctrl: true, ..none };
        let alt = Modifiers { alt: true, ..none };
        assert_eq!(set1(Key::PAUSE, true, none), [0xe1, 0x1d, 0x45, 0xe1, 0x9d, 0xc5]);
        assert_eq!(set1(Key::PAUSE, true, ctrl), [0xe0, 0x46, 0xe0, 0xc6]);
        assert!(set1(Key::PAUSE, false, none).is_empty());
        assert_eq!(set1(Key::PRINT, true, none), [0xe0, 0x2a, 0xe0, 0x37]);
        assert_eq!(set1(Key::PRINT, false, none), [0xe0, 0xb7, 0xe0, 0xaa]);
        assert_eq!(set1(Key::PRINT, true, alt), [0x54]);
        assert_eq!(set1(Key::PRINT, true, ctrl), [0xe0, 0x37]);
        assert_eq!(set1(Key::HANGUL, true, none), [0xf2]);
    }

    #[test]
    fn set_3_has_a_unique_code_for_each_key() {
        let codes: Vec<u8> = (0..=0xffff)
            .filter_map(Key::new)
            .filter(|it| *it != Key::HANJA)
            .filter_map(set3)
            .collect();
        let different: BTreeSet<u8> = codes.iter().copied().collect();
        assert_eq!(codes.len(), different.len());
        assert!(codes.len() >= 101, "{} keys", codes.len());
        assert_eq!(set3(key(0x44)), Some(0x4f), "F10");
        assert_eq!(set3(key(0x35)), Some(0x4a), "slash");
    }
}
