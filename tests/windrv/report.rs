//! The guest's report: one line for each check, and a line with their numbers.

use anyhow::{Result, ensure};

/// The report of one run of the guest.
#[derive(Debug)]
pub(crate) struct Report {
    passed: usize,
    failures: Vec<String>,
}

impl Report {
    /// Reads the lines `pass NAME …`, `fail NAME …` and `windrv: N passed, M failed`.
    pub(crate) fn read(output: &str) -> Result<Self> {
        let passed = output.lines().filter(|line| line.starts_with("pass ")).count();
        let failures = output.lines().filter(|line| line.starts_with("fail "));
        let failures: Vec<_> = failures.map(str::to_owned).collect();
        let counted = format!("windrv: {passed} passed, {} failed", failures.len());
        // A run that gives up has no line with numbers, but has a failed check.
        ensure!(
            !failures.is_empty() || output.lines().any(|line| line == counted),
            "the guest did not end with `{counted}`"
        );
        Ok(Self { passed, failures })
    }

    /// # Errors
    ///
    /// If checks failed (the error lists all), or if fewer than `least` checks passed.
    pub(crate) fn judge(&self, least: usize) -> Result<()> {
        let Self { passed, failures } = self;
        ensure!(failures.is_empty(), "{} checks failed:\n{}", failures.len(), failures.join("\n"));
        ensure!(*passed >= least, "{passed} checks passed: the guest left out some of {least}");
        Ok(())
    }
}

#[test]
fn a_report_with_all_checks_passes() {
    let report = Report::read("pass a.b.c x=1\n# fail\npass a.b.d\nwindrv: 2 passed, 0 failed\n");
    report.unwrap().judge(2).unwrap();
}

#[test]
fn a_run_without_enough_checks_fails() {
    assert!(Report::read("").is_err());
    let nothing = Report::read("windrv: 0 passed, 0 failed\n").unwrap();
    assert!(nothing.judge(1).is_err());
    let little = Report::read("pass a.b.c\nwindrv: 1 passed, 0 failed\n").unwrap();
    assert!(little.judge(2).is_err());
}

#[test]
fn a_run_that_stops_early_fails() {
    assert!(Report::read("pass a.b.c\n").is_err());
    assert!(Report::read("pass a.b.c\nwindrv: 2 passed, 0 failed\n").is_err());
}

#[test]
fn each_failed_check_is_named() {
    let report = Report::read("fail a.b.c x=1\nfail a.b.d y=2\nwindrv: 0 passed, 2 failed\n");
    let error = report.unwrap().judge(0).unwrap_err().to_string();
    assert!(error.contains("a.b.c x=1") && error.contains("a.b.d y=2"), "{error}");
    let gave_up = Report::read("fail a.b.c requests never ended\n").unwrap();
    assert!(gave_up.judge(0).is_err());
}
