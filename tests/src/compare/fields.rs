//! Fields of structures, by name and offset.

use super::Facts;

/// A field: its name, its offset, and its length in bytes.
pub(super) type Field = (&'static str, usize, usize);

/// The bytes of a field, if the structure is long enough.
pub(super) fn bytes(all: &[u8], at: usize, length: usize) -> Option<&[u8]> {
    all.get(at..at.checked_add(length)?)
}

/// Little-endian, up to eight bytes.
pub(super) fn number(all: &[u8], at: usize, length: usize) -> Option<u64> {
    let bytes = bytes(all, at, length)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// The value of a field: a number if it has at most eight bytes, otherwise its bytes.
pub(super) fn show(all: &[u8], at: usize, length: usize) -> Option<String> {
    if length <= 8 {
        let digits = 2 + 2 * length;
        return number(all, at, length).map(|number| format!("{number:#0digits$x}"));
    }
    bytes(all, at, length).map(hex)
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Adds the fields that exist to the facts.
pub(super) fn read(prefix: &str, all: &[u8], fields: &[Field], facts: &mut Facts) {
    for &(name, at, length) in fields {
        if let Some(value) = show(all, at, length) {
            facts.text(format!("{prefix} {name}"), value);
        }
    }
}

/// Text without padding, which is spaces or zeros.
pub(super) fn word(bytes: &[u8]) -> String {
    let text: String = bytes.iter().map(|&byte| char::from(byte)).collect();
    text.trim_end_matches(['\0', ' ']).escape_debug().to_string()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_missing_field_is_no_fact() {
        let mut facts = Facts::default();
        read("x", &[1, 2, 3], &[("a", 0, 2), ("b", 2, 2)], &mut facts);
        assert_eq!(facts.count("x"), 1);
        assert_eq!(show(&[1, 2, 3], 0, 2).unwrap(), "0x0201");
        assert_eq!(show(&[1; 9], 0, 9).unwrap(), "010101010101010101");
    }

    #[test]
    fn padding_is_not_part_of_a_word() {
        assert_eq!(word(b"BXPC    "), "BXPC");
        assert_eq!(word(b"a\0\0\0"), "a");
    }
}
