//! Scan codes of clients that send more than symbols.

use host::input::Key;

/// The key of a QEMU Extended Key Event: scan code set 1, with E0 as the highest bit of the byte.
pub fn from_scan_code(code: u32) -> Option<Key> {
    let code = u16::try_from(code).ok()?;
    match code {
        // Codes that QEMU and browsers use.
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
    fn scan_codes_become_key_codes() {
        let code_of = |code| from_scan_code(code).map(Key::code);
        assert_eq!(code_of(0x1e), Some(0x1e));
        assert_eq!(code_of(0x9d), Some(0xe01d), "the right Control key");
        assert_eq!(code_of(0xe01d), Some(0xe01d));
        assert_eq!(from_scan_code(0xc6), Some(Key::PAUSE));
        assert_eq!(from_scan_code(0xb7), Some(Key::PRINT));
        assert_eq!(from_scan_code(0xf2), Some(Key::HANGUL));
        for nothing in [0, 0x80, 0x100, 0xe000, 0x1_001e, u32::MAX] {
            assert_eq!(from_scan_code(nothing), None, "{nothing:#x}");
        }
    }
}
