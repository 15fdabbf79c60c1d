//! The page of evidence (`docs/evidence.md`): what Windows needs of the machine, as listed in
//! `tests/evidence`, and the tests that showed it in one run of `./test`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, bail, ensure};

use crate::lab::RUNS_ON;
use crate::tally::{fits, running};

/// A test of a run, by the name of its suite or crate and its own.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    name: String,
    result: Result,
    /// Where its guests ran, in the words of the suite.
    place: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Result {
    Failed,
    Skipped,
    Passed,
}

/// A line of the list.
struct Claim<'a> {
    says: &'a str,
    patterns: Vec<&'a str>,
    missing: &'a str,
}

/// Reads the output of `./test`. A test whose own output stands between its name and its result
/// did not run in whole, and counts as skipped.
pub fn read(output: &str) -> Vec<Outcome> {
    let (mut outcomes, mut target, mut place) = (Vec::new(), "", "");
    for line in output.lines() {
        if let Some(name) = running(line) {
            (target, place) = (name, "this host");
        } else if let Some((_, words)) = line.split_once(RUNS_ON) {
            place = words;
        } else if let Some((name, result)) = finished(line) {
            outcomes.push(Outcome {
                name: format!("{target}::{name}"),
                result,
                place: place.to_owned(),
            });
        }
    }
    without_skipped(outcomes)
}

/// Where libtest says that a test passed, the test says before or after that it was skipped. Some
/// know only the last part of their name.
fn without_skipped(outcomes: Vec<Outcome>) -> Vec<Outcome> {
    let (skipped, mut others): (Vec<_>, Vec<_>) =
        outcomes.into_iter().partition(|it| it.result == Result::Skipped);
    let mut alone = Vec::new();
    for skip in skipped {
        let (target, test) = skip.name.split_once("::").unwrap_or(("", &skip.name));
        let is_named = |name: &str| {
            name.strip_prefix(target)
                .and_then(|rest| rest.strip_suffix(test))
                .is_some_and(|between| between.starts_with("::") && between.ends_with("::"))
        };
        match others.iter_mut().find(|it| it.result == Result::Passed && is_named(&it.name)) {
            Some(passed) => passed.result = Result::Skipped,
            None => alone.push(skip),
        }
    }
    others.extend(alone);
    others
}

/// Results may begin anywhere in a line, as for `Tally`: standard error is another stream.
fn finished(line: &str) -> Option<(&str, Result)> {
    let Some((before, rest)) = line.split_once(" ... ") else {
        let (_, what) = line.split_once(skip::WHOLE)?;
        return Some((what.split_once(": ")?.0, Result::Skipped));
    };
    let (_, name) = before.rsplit_once("test ")?;
    let result = match rest.split(' ').next() {
        Some("ok") => Result::Passed,
        Some("FAILED") => Result::Failed,
        _ => Result::Skipped,
    };
    Some((name, result))
}

const HEAD: &str = "| what | shown by | where | not shown |\n|---|---|---|---|\n";

/// The page. Fails if a test of the list does not exist.
pub fn page(list: &str, outcomes: &[Outcome], run: &str) -> anyhow::Result<String> {
    let mut page = format!(
        "# Evidence\n\nThis page lists what Windows needs of the machine, the tests that show it, \
         and what is not shown yet. Windows\nitself has not run on it. `./test` makes the page \
         from its own output and from `tests/evidence`.\n\nThis one is from {run}.\n",
    );
    for line in list.lines().filter(|line| !line.is_empty() && !line.starts_with("# ")) {
        if let Some(title) = line.strip_prefix("## ") {
            write!(page, "\n## {title}\n\n{HEAD}")?;
            continue;
        }
        let claim = claim(line).with_context(|| format!("tests/evidence: {line}"))?;
        let row = row(&claim, outcomes).with_context(|| format!("tests/evidence: {line}"))?;
        writeln!(page, "{row}")?;
    }
    Ok(page)
}

fn claim(line: &str) -> anyhow::Result<Claim<'_>> {
    let columns: Vec<_> = line.split(" | ").collect();
    let [says, patterns, missing] = columns[..] else {
        bail!("the format is WHAT | SUITE::TEST, … | NOT SHOWN");
    };
    let patterns = if patterns == "-" { Vec::new() } else { patterns.split(", ").collect() };
    let missing = if missing == "-" { "" } else { missing };
    ensure!(!patterns.is_empty() || !missing.is_empty(), "no test, and no reason for that");
    Ok(Claim { says, patterns, missing })
}

fn row(claim: &Claim<'_>, outcomes: &[Outcome]) -> anyhow::Result<String> {
    let (mut tests, mut places) = (Vec::new(), BTreeMap::<_, usize>::new());
    for pattern in &claim.patterns {
        let found: Vec<_> = outcomes.iter().filter(|it| fits(pattern, &it.name)).collect();
        ensure!(!found.is_empty(), "{pattern}: no such test");
        let count = |result| found.iter().filter(|it| it.result == result).count();
        let (passed, failed) = (count(Result::Passed), count(Result::Failed));
        let mut text = format!("`{pattern}`");
        match (passed, failed) {
            (_, 1..) => write!(text, " **failed**")?,
            (0, _) => write!(text, " (not in this run)")?,
            (1, _) => {}
            _ => write!(text, " ({passed} tests)")?,
        }
        tests.push(text);
        for outcome in found.iter().filter(|it| it.result == Result::Passed) {
            *places.entry(outcome.place.as_str()).or_default() += 1;
        }
    }
    let places: Vec<_> = places.into_keys().collect();
    let Claim { says, missing, .. } = claim;
    Ok(format!("| {says} | {} | {} | {missing} |", tests.join(", "), places.join(", ")))
}

#[cfg(test)]
mod test {
    use super::*;

    const OUTPUT: &str = "\
     Running unittests src/lib.rs (target/test-fast/deps/devices-1a2b)
test ahci::test::a_port_resets ... ok
test ahci::test::b ... SKIP b: there is no x
ok
     Running linux.rs (target/test-fast/deps/linux-ffff)
guests run on: the lab
SKIP linux_12_boots: TRANSOM_TESTS is not all
test linux_13_boots ... ok <3.0s>
test linux_13_ends ... FAILED <3.0s>
";

    const RUN: &str = "     Running x.rs (target/test-fast/deps/x-1a2b)";

    fn output() -> String {
        OUTPUT.replace("SKIP ", skip::WHOLE)
    }

    #[test]
    fn each_result_is_read_with_its_place() {
        let outcomes = read(&output());
        let found = outcomes.iter().map(|it| (it.name.as_str(), it.result, it.place.as_str()));
        let expected = [
            ("devices::ahci::test::a_port_resets", Result::Passed, "this host"),
            ("linux::linux_13_boots", Result::Passed, "the lab"),
            ("linux::linux_13_ends", Result::Failed, "the lab"),
            ("devices::ahci::test::b", Result::Skipped, "this host"),
            ("linux::linux_12_boots", Result::Skipped, "the lab"),
        ];
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_skipped_test_has_not_passed_whatever_libtest_says() {
        for name in ["disk::wire", "wire"] {
            let said = format!("{}{name}: no sources: set X\ntest disk::wire ... ok", skip::WHOLE);
            let turned = said.lines().rev().collect::<Vec<_>>().join("\n");
            for said in [said, turned].map(|it| format!("{RUN}\n{it}\ntest tape::wires ... ok")) {
                let all = read(&said).into_iter().map(|it| (it.name, it.result));
                let wanted =
                    [("x::disk::wire", Result::Skipped), ("x::tape::wires", Result::Passed)];
                assert_eq!(all.collect::<Vec<_>>(), wanted.map(|(name, it)| (name.to_owned(), it)));
            }
        }
    }

    #[test]
    fn a_result_is_read_behind_words_of_standard_error() {
        assert_eq!(finished("pci: 47test it_is ... ok <0.4s>"), Some(("it_is", Result::Passed)));
        assert_eq!(finished("a test of ours failed"), None);
    }

    #[test]
    fn a_row_tells_what_passed_failed_and_is_missing() {
        let page = |list: &str| page(list, &read(&output()), "today");
        let text =
            page("## Disks\nAHCI | devices::ahci::*, linux::linux_13_boots | storahci\n").unwrap();
        let row = "| AHCI | `devices::ahci::*`, `linux::linux_13_boots` | the lab, this host \
                   | storahci |";
        assert!(text.contains(row), "{text}");
        assert!(page("a | linux::linux_12* | -").unwrap().contains("not in this run"));
        assert!(page("a | linux::* | -").unwrap().contains("**failed**"));
        assert!(page("a | - | real hosts").unwrap().contains("| a |  |  | real hosts |"));
        for wrong in ["a | linux::none | -", "a | - | -", "a | b"] {
            page(wrong).unwrap_err();
        }
    }
}
