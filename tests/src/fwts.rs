//! Reads reports of the firmware test suite (fwts).

use std::collections::BTreeSet;
use std::fmt;

use anyhow::{Context, ensure};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Such as `fadt`.
    test: String,
    /// `LOW`, `MEDIUM`, `HIGH` or `CRITICAL`.
    level: String,
    /// Such as `FADTReservedNonZero`; the same on every machine.
    label: String,
    text: String,
}

impl Failure {
    /// `[HIGH] Label: Test 1, sentence`
    fn read(test: &str, rest: &str) -> Option<Self> {
        let (level, rest) = rest.strip_prefix('[')?.split_once("] ")?;
        let (label, text) = rest.split_once(": ")?;
        let text = text.split_once(", ").map_or(text, |(_, text)| text);
        let [test, level, label, text] = [test, level, label, text].map(|it| it.trim().to_owned());
        Some(Self { test, level, label, text })
    }

    pub fn is_serious(&self) -> bool {
        ["HIGH", "CRITICAL"].contains(&self.level.as_str())
    }

    fn is_like(&self, other: &Self) -> bool {
        (&self.test, &self.label) == (&other.test, &other.label)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { test, level, label, text } = self;
        write!(f, "{test} [{level}] {label}: {text}")
    }
}

#[derive(Clone, Debug, Default)]
pub struct Report {
    passed: usize,
    /// Tests that passed or failed something, and were not skipped.
    tests: BTreeSet<String>,
    failures: Vec<Failure>,
}

impl Report {
    /// Reads a log, or only its headlines and results. A headline begins with the name of a test,
    /// and a ruled line follows it. Fails if nothing was tested.
    pub fn read(text: &str) -> anyhow::Result<Self> {
        let (mut report, mut test, mut before) = (Self::default(), "", "");
        for line in text.lines().map(str::trim) {
            // Tables in a log have ruled lines too, but their headings have no colon.
            let ruled_off = line.len() > 9 && line.bytes().all(|byte| byte == b'-');
            if let Some((name, _)) = before.split_once(": ").filter(|_| ruled_off) {
                test = name;
            } else if let Some(rest) = line.strip_prefix("FAILED ") {
                let failure = Failure::read(test, rest);
                let failure = failure.with_context(|| format!("a result of fwts: {line}"))?;
                report.tests.insert(test.to_owned());
                report.failures.push(failure);
            } else if line.starts_with("PASSED: ") {
                report.tests.insert(test.to_owned());
                report.passed += 1;
            }
            before = line;
        }
        ensure!(report.passed > 0, "fwts passed nothing: {text}");
        Ok(report)
    }

    /// Failures of which the other report has none of the same kind.
    pub fn failures_not_in(&self, other: &Self) -> Vec<Failure> {
        let new = |failure: &&Failure| !other.failures.iter().any(|it| it.is_like(failure));
        self.failures.iter().filter(new).cloned().collect()
    }

    /// Whether a test passed or failed something.
    pub fn has(&self, test: &str) -> bool {
        self.tests.contains(test)
    }

    pub fn tests_not_in(&self, other: &Self) -> Vec<String> {
        self.tests.difference(&other.tests).cloned().collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, tests, failures } = self;
        write!(f, "{passed} passed in {} tests, {} failed", tests.len(), failures.len())?;
        failures.iter().try_for_each(|failure| write!(f, "\n  {failure}"))
    }
}

/// The names in the output of `--show-tests-categories`: `fadt   acpi, batch`.
pub fn names(list: &str) -> anyhow::Result<Vec<String>> {
    let names = list.lines().filter_map(|line| line.split_whitespace().next());
    let names: Vec<_> = names.map(str::to_owned).collect();
    ensure!(names.len() > 100, "fwts lists only {} tests: {list}", names.len());
    Ok(names)
}

#[cfg(test)]
mod test {
    use super::*;

    const QEMU: &str = "\
fadt: FADT tests.
--------------------
PASSED: Test 1, FADT is there.

Memory Map Layout
-----------------
FAILED [MEDIUM] FADTX: Test 2, one, or two.

madt: MADT tests.
--------------------
FAILED [HIGH] MADTY: Test 1, three.
SKIPPED: Test 2, nothing.
";

    #[test]
    fn only_failures_that_qemu_lacks_count() {
        let qemu = Report::read(QEMU).unwrap();
        let text = format!("{QEMU}crs: CRS.\n----------\nFAILED [CRITICAL] C: Test 1, four.\n");
        let ours = Report::read(&text.replace("three", "five")).unwrap();
        let own = ours.failures_not_in(&qemu);
        assert_eq!(own.len(), 1);
        assert_eq!(own[0].to_string(), "crs [CRITICAL] C: four.");
        assert!(own[0].is_serious() && !ours.failures[0].is_serious());
        assert_eq!(ours.failures[0].text, "one, or two.");
        assert_eq!(ours.tests_not_in(&qemu), ["crs"]);
        assert!(ours.has("crs") && !qemu.has("crs"));
    }

    #[test]
    fn a_run_that_tested_nothing_is_an_error() {
        assert!(Report::read("fwts: no such test\n").is_err());
        assert!(Report::read(&format!("{QEMU}FAILED [odd\n")).is_err());
    }
}
