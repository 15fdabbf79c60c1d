//! The labels of a US keyboard, by scan codes of set 1.

/// Added to the codes of keys with the prefix E0.
pub(crate) const PREFIXED: u8 = 0x80;
/// The code of the only key with the prefix E1. No other key has it.
pub(crate) const PAUSE: u8 = 0xfe;

const PLAIN: &[u8; 0x3a] =
    b"\0\x1b1234567890-=\x08\tqwertyuiop[]\n\0asdfghjkl;'`\0\\zxcvbnm,./\0*\0 ";
const SHIFTED: &[u8; 0x3a] =
    b"\0\x1b!@#$%^&*()_+\x08\tQWERTYUIOP{}\n\0ASDFGHJKL:\"~\0|ZXCVBNM<>?\0*\0 ";
const KEYPAD: (u8, &[u8; 13]) = (0x47, b"789-456+1230.");

/// The character that a key types, including control characters.
pub(crate) fn character(key: u8, shift: bool, capitals: bool) -> Option<u8> {
    let typed = match key {
        0x9c => b'\n',
        0xb5 => b'/',
        0x47..=0x53 => KEYPAD.1[usize::from(key - KEYPAD.0)],
        0x56 => b"\\|"[usize::from(shift)],
        _ => {
            let plain = *PLAIN.get(usize::from(key))?;
            let shifts = shift != (capitals && plain.is_ascii_lowercase());
            if shifts { SHIFTED[usize::from(key)] } else { plain }
        }
    };
    (typed != 0 && typed != 0x1b).then_some(typed)
}

const NAMES: &[(u8, &str)] = &[
    (0x01, "Esc"),
    (0x0e, "Backspace"),
    (0x0f, "Tab"),
    (0x1c, "Enter"),
    (0x1d, "Left Ctrl"),
    (0x2a, "Left Shift"),
    (0x36, "Right Shift"),
    (0x37, "Keypad *"),
    (0x38, "Left Alt"),
    (0x39, "Space"),
    (0x3a, "Caps Lock"),
    (0x45, "Num Lock"),
    (0x46, "Scroll Lock"),
    (0x54, "SysRq"),
    (0x57, "F11"),
    (0x58, "F12"),
    (0x9c, "Keypad Enter"),
    (0x9d, "Right Ctrl"),
    (0xb5, "Keypad /"),
    (0xb7, "Print Screen"),
    (0xb8, "Right Alt"),
    (0xc6, "Break"),
    (0xc7, "Home"),
    (0xc8, "Up"),
    (0xc9, "Page Up"),
    (0xcb, "Left"),
    (0xcd, "Right"),
    (0xcf, "End"),
    (0xd0, "Down"),
    (0xd1, "Page Down"),
    (0xd2, "Insert"),
    (0xd3, "Delete"),
    (0xdb, "Left Super"),
    (0xdc, "Right Super"),
    (0xdd, "Menu"),
    (PAUSE, "Pause"),
];

pub(crate) enum Name {
    Text(&'static str),
    Function(u8),
    Keypad(char),
    Letter(char),
    Code(u8),
}

impl Name {
    pub(crate) fn of(key: u8) -> Self {
        if let Some((_, name)) = NAMES.iter().find(|(code, _)| *code == key) {
            return Self::Text(name);
        }
        match (key, character(key, false, false)) {
            (0x3b..=0x44, _) => Self::Function(key - 0x3a),
            (0x47..=0x53, Some(typed)) => Self::Keypad(typed.into()),
            (_, Some(typed)) => Self::Letter(typed.to_ascii_uppercase().into()),
            _ => Self::Code(key),
        }
    }
}

impl core::fmt::Display for Name {
    fn fmt(&self, f: &mut core::fmt::Formatter) -> core::fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Function(number) => write!(f, "F{number}"),
            Self::Keypad(digit) => write!(f, "Keypad {digit}"),
            Self::Letter(letter) => write!(f, "{letter}"),
            Self::Code(key) if *key >= PREFIXED => write!(f, "E0 {:02X}", key - PREFIXED),
            Self::Code(key) => write!(f, "{key:02X}"),
        }
    }
}
