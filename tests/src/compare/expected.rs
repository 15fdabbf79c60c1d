//! The list of intended differences, with the reason of each.
//!
//! A reason is one or more lines that begin with `#`. The differences that it explains follow, one
//! per line, up to an empty line. `*` stands for any text.

use anyhow::{Context, bail, ensure};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// `*` stands for any text.
    pub pattern: String,
    pub reason: String,
}

/// Fails if a difference has no reason, a reason has no difference, or a difference is listed
/// twice.
pub fn read(list: &str) -> anyhow::Result<Vec<Expected>> {
    let mut all: Vec<Expected> = Vec::new();
    for group in list.split("\n\n").filter(|group| !group.trim().is_empty()) {
        let lines = || group.lines().filter(|line| !line.trim().is_empty());
        let reason = lines().take_while(|line| line.starts_with('#'));
        let reason: Vec<_> = reason.map(|line| line.trim_start_matches('#').trim()).collect();
        let patterns: Vec<_> = lines().skip(reason.len()).collect();
        let first = patterns.first().with_context(|| format!("explains nothing: {group}"))?;
        ensure!(!reason.is_empty(), "without a reason: {first}");
        for pattern in patterns {
            ensure!(!pattern.starts_with('#'), "a reason amid differences: {pattern}");
            ensure!(all.iter().all(|it| it.pattern != pattern), "listed twice: {pattern}");
            all.push(Expected { pattern: pattern.to_owned(), reason: reason.join(" ") });
        }
    }
    Ok(all)
}

/// Fails if a difference is not on the list, or one on the list was not found.
pub fn check(found: &[String], expected: &[Expected]) -> anyhow::Result<()> {
    let unknown = found.iter().filter(|line| !expected.iter().any(|it| fits(&it.pattern, line)));
    let gone = expected.iter().filter(|it| !found.iter().any(|line| fits(&it.pattern, line)));
    let unknown: Vec<_> = unknown.map(|line| format!("  new: {line}\n")).collect();
    let gone: Vec<_> = gone.map(|it| format!("  gone: {}\n", it.pattern)).collect();
    if unknown.is_empty() && gone.is_empty() {
        return Ok(());
    }
    bail!(
        "{} differences are not on the list, and {} of the list are gone:\n{}{}",
        unknown.len(),
        gone.len(),
        unknown.concat(),
        gone.concat()
    )
}

fn fits(pattern: &str, line: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == line };
    let Some(line) = line.strip_prefix(start) else { return false };
    if rest.is_empty() {
        return true;
    }
    line.char_indices().any(|(at, _)| fits(rest, &line[at..]))
}

#[cfg(test)]
mod test {
    use super::*;

    fn lines(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn wildcards_stand_for_anything() {
        assert!(fits("a*c: x", "abbc: x"));
        assert!(fits("a*", "a"));
        assert!(fits("*.*", "pci 00:1f.0"));
        assert!(!fits("a*c", "ab"));
        assert!(!fits("a", "ab"));
    }

    #[test]
    fn a_new_and_a_stale_difference_fail() {
        let list = read("# since\n# it is\na: *\n\n# so\nb: 1\n").unwrap();
        assert_eq!(list[0].reason, "since it is");
        check(&lines(&["a: 1", "a: 2", "b: 1"]), &list).unwrap();
        let error = check(&lines(&["a: 1", "c: 1"]), &list).unwrap_err().to_string();
        assert!(error.contains("new: c: 1") && error.contains("gone: b: 1"), "{error}");
    }

    #[test]
    fn every_difference_needs_a_reason() {
        assert!(read("a: 1\n").is_err());
        assert!(read("# nothing\n\n# so\nb: 1\n").is_err());
        assert!(read("# so\na\na\n").is_err());
    }
}
