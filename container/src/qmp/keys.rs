//! QEMU's names of keys (`QKeyCode` in `qapi/ui.json`), and their scan codes.

use host::input::Key;
use screen::keys::Combination;
use serde::Deserialize;

use super::protocol::Failure;

/// Maximum keys that are pressed together.
const MAX_KEYS: usize = 10;

#[derive(Deserialize)]
#[serde(tag = "type", content = "data", rename_all = "lowercase")]
pub(super) enum KeyValue {
    Qcode(String),
    Number(u16),
}

/// Rows of keys with consecutive codes: the code of the first, and the names.
const ROWS: &[(u16, &str)] = &[
    (0x01, "esc 1 2 3 4 5 6 7 8 9 0 minus equal backspace"),
    (0x0f, "tab q w e r t y u i o p bracket_left bracket_right ret"),
    (0x1d, "ctrl a s d f g h j k l semicolon apostrophe grave_accent"),
    (0x2a, "shift backslash z x c v b n m comma dot slash shift_r"),
    (0x37, "kp_multiply alt spc caps_lock f1 f2 f3 f4 f5 f6 f7 f8 f9 f10"),
    (0x45, "num_lock scroll_lock kp_7 kp_8 kp_9 kp_subtract kp_4 kp_5 kp_6 kp_add"),
    (0x4f, "kp_1 kp_2 kp_3 kp_0 kp_decimal"),
    (0x56, "less f11 f12"),
    (0x70, "hiragana"),
    (0x73, "ro"),
    (0x79, "henkan"),
    (0x7b, "muhenkan"),
    (0x7d, "yen"),
    (0xf1, "lang2 lang1"),
    (0xe010, "audioprev"),
    (0xe019, "audionext"),
    (0xe01c, "kp_enter ctrl_r"),
    (0xe020, "audiomute calculator audioplay"),
    (0xe024, "audiostop"),
    (0xe02e, "volumedown"),
    (0xe030, "volumeup"),
    (0xe035, "kp_divide"),
    (0xe037, "print alt_r"),
    (0xe047, "home up pgup"),
    (0xe04b, "left"),
    (0xe04d, "right"),
    (0xe04f, "end down pgdn insert delete"),
    (0xe05b, "meta_l meta_r menu power sleep"),
    (0xe063, "wake"),
    (0xe11d, "pause"),
];

/// Other names of the same keys.
const ALIASES: &[(&str, &str)] = &[
    ("asterisk", "kp_multiply"),
    ("sysrq", "print"),
    ("compose", "menu"),
    ("enter", "ret"),
    ("left_shift", "shift"),
];

fn code(name: &str) -> Option<u16> {
    let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |it| it.1);
    let found = ROWS.iter().find_map(|(first, names)| {
        let at = names.split(' ').position(|it| it == name)?;
        Some(first + u16::try_from(at).ok()?)
    });
    found.or_else(|| u16::from_str_radix(name.strip_prefix("0x")?, 16).ok().map(number))
}

/// QEMU sets the highest bit of a code in place of the prefix E0.
fn number(code: u16) -> u16 {
    if (0x80..0x100).contains(&code) { 0xe000 | (code & 0x7f) } else { code }
}

/// Keys for the machine. An unknown key is an error, and no key is pressed.
pub(super) fn combination(keys: &[KeyValue]) -> Result<Combination, Failure> {
    if keys.is_empty() || keys.len() > MAX_KEYS {
        let text = format!("{} keys: give 1 to {MAX_KEYS} at once", keys.len());
        return Err(Failure::generic(text));
    }
    let key = |key: &KeyValue| match key {
        KeyValue::Qcode(name) => code(name).and_then(Key::new).ok_or_else(|| {
            Failure::generic(format!("Parameter 'data' does not accept value '{name}'"))
        }),
        KeyValue::Number(code) => Key::new(number(*code))
            .ok_or_else(|| Failure::generic(format!("no key has the code {code}"))),
    };
    Ok(Combination(keys.iter().map(key).collect::<Result<_, _>>()?))
}

/// Reads the keys of `sendkey`, as in `ctrl-alt-delete`.
pub(super) fn typed(text: &str) -> Result<Combination, Failure> {
    let keys: Vec<_> = text.split('-').take(MAX_KEYS + 1).collect();
    combination(&keys.into_iter().map(|it| KeyValue::Qcode(it.to_owned())).collect::<Vec<_>>())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn names_and_numbers_are_scan_codes() {
        let ours = |text: &str| text.parse::<Combination>().unwrap();
        for (typed_name, own) in [
            ("ctrl-alt-delete", "ctrl-alt-delete"),
            ("meta_l-r", "logo-r"),
            ("shift-a", "shift-a"),
            ("ret", "enter"),
            ("spc", "space"),
            ("pgdn", "pagedown"),
            ("f12", "f12"),
            ("kp_enter", "0xe01c"),
            ("grave_accent", "grave"),
            ("dot", "period"),
            ("0x1d-0xd3", "ctrl-delete"),
            ("alt_r", "rightalt"),
            ("menu", "menu"),
            ("sleep", "sleep"),
        ] {
            assert_eq!(typed(typed_name).unwrap(), ours(own), "{typed_name}");
        }
        let keys: Vec<KeyValue> =
            serde_json::from_str(r#"[{"type":"number","data":29},{"type":"qcode","data":"esc"}]"#)
                .unwrap();
        assert_eq!(combination(&keys).unwrap(), ours("ctrl-esc"));
    }

    #[test]
    fn every_name_is_a_key_of_ours() {
        for name in ROWS.iter().flat_map(|row| row.1.split(' ')) {
            assert!(code(name).and_then(Key::new).is_some(), "{name}");
        }
        let names: Vec<_> = ROWS.iter().flat_map(|row| row.1.split(' ')).collect();
        let codes: std::collections::BTreeSet<_> = names.iter().map(|name| code(name)).collect();
        assert_eq!(codes.len(), names.len(), "two names have one code");
        assert!(ALIASES.iter().all(|(_, name)| names.contains(name)));
    }

    #[test]
    fn unknown_and_too_many_keys_are_refused() {
        for text in ["", "ctrl-", "nokey", "0xzz", "0x0", "a-b-c-d-e-f-g-h-i-j-k"] {
            assert!(typed(text).is_err(), "{text}");
        }
        assert!(combination(&[]).is_err());
    }
}
