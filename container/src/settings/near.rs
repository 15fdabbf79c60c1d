//! Which known word somebody may have meant.

/// The known word that is nearest, if a slip or two lie between.
pub(crate) fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let allowed = match word.chars().count() {
        0..=3 => 0,
        4..=6 => 1,
        7..=64 => 2,
        // Nobody's slip, and its table would be large.
        _ => return None,
    };
    let measured = known.iter().map(|known| (edits(word, known), *known));
    let near = measured.filter(|(edits, _)| (1..=allowed).contains(edits));
    near.min_by_key(|(edits, _)| *edits).map(|(_, known)| known)
}

/// Edits between two words, a swap of neighbours being one ("optimal string alignment").
fn edits(from: &str, to: &str) -> usize {
    let (from, to): (Vec<char>, Vec<char>) = (from.chars().collect(), to.chars().collect());
    let mut before = Vec::new();
    let mut last: Vec<usize> = (0..=to.len()).collect();
    for row in 1..=from.len() {
        let mut line = vec![row];
        for column in 1..=to.len() {
            let other = usize::from(from[row - 1] != to[column - 1]);
            let least = (last[column - 1] + other).min(last[column] + 1).min(line[column - 1] + 1);
            let swapped = row > 1
                && column > 1
                && from[row - 1] == to[column - 2]
                && from[row - 2] == to[column - 1];
            line.push(if swapped { least.min(before[column - 2] + 1) } else { least });
        }
        before = std::mem::replace(&mut last, line);
    }
    last[to.len()]
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn finds_slips_and_no_strangers() {
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
