//! Suggests the known word that a misspelled one probably means.

use vmm::config::edit_distance;

/// The nearest known word within one or two edits. Words of up to three letters get no suggestion.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let allowed = match word.chars().count() {
        0..=3 => 0,
        4..=6 => 1,
        7..=64 => 2,
        // Too long for a typing error, and its table would be large.
        _ => return None,
    };
    let letters = |word: &str| word.chars().collect::<Vec<_>>();
    let wanted = letters(word);
    let measured = known.iter().map(|known| (edit_distance(&wanted, &letters(known)), *known));
    let near = measured.filter(|(edits, _)| (1..=allowed).contains(edits));
    near.min_by_key(|(edits, _)| *edits).map(|(_, known)| known)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn finds_typos_and_no_unrelated_names() {
        let known = ["RAM_SIZE", "DISK_SIZE", "CPU_CORES", "IP", "VERSION"];
        assert_eq!(nearest("RAM_SIEZ", &known), Some("RAM_SIZE"));
        assert_eq!(nearest("DISKSIZE", &known), Some("DISK_SIZE"));
        assert_eq!(nearest("CPU_CORE", &known), Some("CPU_CORES"));
        assert_eq!(nearest("VERSOIN", &known), Some("VERSION"));
        assert_eq!(nearest("PS", &known), None);
        assert_eq!(nearest("HOSTNAME", &known), None);
        assert_eq!(nearest("VERSION", &known), None);
    }
}
