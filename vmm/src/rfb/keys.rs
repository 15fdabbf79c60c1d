//! From symbols to places on the keyboard, for clients that do not send the place.

use devices::input::Key;

/// A keyboard layout: where the key is that makes a symbol.
pub trait Layout: Send + Sync {
    /// The key that makes this symbol of X11, with or without modifiers.
    fn find(&self, keysym: u32) -> Option<Key>;
}

/// The keyboard of the United States.
pub struct Us;

/// Letters, digits and signs: the place, and what is made there without and with Shift.
const SIGNS: &[(u16, &[u8; 2])] = &[
    (0x02, b"1!"),
    (0x03, b"2@"),
    (0x04, b"3#"),
    (0x05, b"4$"),
    (0x06, b"5%"),
    (0x07, b"6^"),
    (0x08, b"7&"),
    (0x09, b"8*"),
    (0x0a, b"9("),
    (0x0b, b"0)"),
    (0x0c, b"-_"),
    (0x0d, b"=+"),
    (0x10, b"qQ"),
    (0x11, b"wW"),
    (0x12, b"eE"),
    (0x13, b"rR"),
    (0x14, b"tT"),
    (0x15, b"yY"),
    (0x16, b"uU"),
    (0x17, b"iI"),
    (0x18, b"oO"),
    (0x19, b"pP"),
    (0x1a, b"[{"),
    (0x1b, b"]}"),
    (0x1e, b"aA"),
    (0x1f, b"sS"),
    (0x20, b"dD"),
    (0x21, b"fF"),
    (0x22, b"gG"),
    (0x23, b"hH"),
    (0x24, b"jJ"),
    (0x25, b"kK"),
    (0x26, b"lL"),
    (0x27, b";:"),
    (0x28, b"'\""),
    (0x29, b"`~"),
    (0x2b, b"\\|"),
    (0x2c, b"zZ"),
    (0x2d, b"xX"),
    (0x2e, b"cC"),
    (0x2f, b"vV"),
    (0x30, b"bB"),
    (0x31, b"nN"),
    (0x32, b"mM"),
    (0x33, b",<"),
    (0x34, b".>"),
    (0x35, b"/?"),
    (0x39, b"  "),
];

/// Keys that are the same on all keyboards: X11's symbol and the place.
const PLACES: &[(u32, u16)] = &[
    (0xff08, 0x0e),   // BackSpace
    (0xff09, 0x0f),   // Tab
    (0xfe20, 0x0f),   // ISO_Left_Tab
    (0xff0d, 0x1c),   // Return
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
    (0xff31, 0xf2),   // Hangul
    (0xff34, 0xf1),   // Hangul_Hanja
    (0xff7f, 0x45),   // Num_Lock
    (0xff8d, 0xe01c), // KP_Enter
    (0xffaa, 0x37),   // KP_Multiply
    (0xffab, 0x4e),   // KP_Add
    (0xffac, 0x53),   // KP_Separator
    (0xffad, 0x4a),   // KP_Subtract
    (0xffae, 0x53),   // KP_Decimal
    (0xffaf, 0xe035), // KP_Divide
    (0xffb0, 0x52),   // KP_0 to KP_9
    (0xffb1, 0x4f),
    (0xffb2, 0x50),
    (0xffb3, 0x51),
    (0xffb4, 0x4b),
    (0xffb5, 0x4c),
    (0xffb6, 0x4d),
    (0xffb7, 0x47),
    (0xffb8, 0x48),
    (0xffb9, 0x49),
    (0xff95, 0x47),   // KP_Home
    (0xff96, 0x4b),   // KP_Left
    (0xff97, 0x48),   // KP_Up
    (0xff98, 0x4d),   // KP_Right
    (0xff99, 0x50),   // KP_Down
    (0xff9a, 0x49),   // KP_Page_Up
    (0xff9b, 0x51),   // KP_Page_Down
    (0xff9c, 0x4f),   // KP_End
    (0xff9d, 0x4c),   // KP_Begin
    (0xff9e, 0x52),   // KP_Insert
    (0xff9f, 0x53),   // KP_Delete
    (0xffc8, 0x57),   // F11
    (0xffc9, 0x58),   // F12
    (0xffe1, 0x2a),   // Shift_L
    (0xffe2, 0x36),   // Shift_R
    (0xffe3, 0x1d),   // Control_L
    (0xffe4, 0xe01d), // Control_R
    (0xffe5, 0x3a),   // Caps_Lock
    (0xffe7, 0xe05b), // Meta_L
    (0xffe8, 0xe05c), // Meta_R
    (0xffe9, 0x38),   // Alt_L
    (0xffea, 0xe038), // Alt_R
    (0xfe03, 0xe038), // ISO_Level3_Shift
    (0xff7e, 0xe038), // Mode_switch
    (0xffeb, 0xe05b), // Super_L
    (0xffec, 0xe05c), // Super_R
];

impl Layout for Us {
    fn find(&self, keysym: u32) -> Option<Key> {
        let place = match keysym {
            // F1 to F10
            0xffbe..=0xffc7 => u16::try_from(keysym - 0xffbe + 0x3b).ok(),
            _ => PLACES.iter().find(|(symbol, _)| *symbol == keysym).map(|(_, place)| *place),
        };
        let sign = || {
            let sign = u8::try_from(keysym).ok()?;
            SIGNS.iter().find(|(_, signs)| signs.contains(&sign)).map(|(place, _)| *place)
        };
        place.or_else(sign).and_then(Key::new)
    }
}

/// The key of a QEMU extended key event: scan code set 1, with E0 as the highest bit of the byte.
pub fn of_code(code: u32) -> Option<Key> {
    let code = u16::try_from(code).ok()?;
    match code {
        // As QEMU numbers them, and as browsers do.
        0xc6 => Some(Key::PAUSE),
        0x54 => Some(Key::PRINT),
        0x71 | 0xf1 => Some(Key::HANJA),
        0x72 | 0xf2 => Some(Key::HANGUL),
        1..=0x7f => Key::new(code),
        0x81..=0xff => Key::new(0xe000 | (code & 0x7f)),
        0xe001..=0xe0ff => Key::new(0xe000 | (code & 0x7f)),
        _ => None,
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn every_printable_sign_has_a_key_and_both_levels_the_same() {
        for sign in 0x20..0x7f_u32 {
            assert!(Us.find(sign).is_some(), "{sign:#x}");
        }
        assert_eq!(Us.find(u32::from(b'a')), Us.find(u32::from(b'A')));
        assert_eq!(Us.find(0xffbe).unwrap().code(), 0x3b, "F1");
        assert_eq!(Us.find(0xffc7).unwrap().code(), 0x44, "F10");
        assert_eq!(Us.find(0xff13), Some(Key::PAUSE));
        for nothing in [0, 0x1f, 0xfe, 0x0100_20ac, u32::MAX] {
            assert_eq!(Us.find(nothing), None, "{nothing:#x}");
        }
        for (symbol, place) in PLACES {
            assert!(Key::new(*place).is_some(), "{symbol:#x}");
        }
    }

    #[test]
    fn scan_codes_are_places() {
        let place = |code| of_code(code).map(Key::code);
        assert_eq!(place(0x1e), Some(0x1e));
        assert_eq!(place(0x9d), Some(0xe01d), "the right Control key");
        assert_eq!(place(0xe01d), Some(0xe01d));
        assert_eq!(of_code(0xc6), Some(Key::PAUSE));
        assert_eq!(of_code(0xb7), Some(Key::PRINT));
        assert_eq!(of_code(0xf2), Some(Key::HANGUL));
        for nothing in [0, 0x80, 0x100, 0xe000, 0x1_001e, u32::MAX] {
            assert_eq!(of_code(nothing), None, "{nothing:#x}");
        }
    }
}
