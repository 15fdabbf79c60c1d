//! The one way in which a test, of whatever crate, reports that it cannot run on this host.
//!
//! The report is a line of text, since text is what comes back from everywhere, also from the lab.
//! `./test` counts these lines and fails on each that `tests/skips` does not allow on this host.
#![forbid(unsafe_code)]

use std::io::Write as _;

/// Begins the report of a test that did not run.
pub const WHOLE: &str = "not run here: ";
/// Begins the report of a part that a test left out.
pub const PART: &str = "not run here, in part: ";

/// Reports that `test` cannot run on this host. The caller returns then.
pub fn not_run(test: &str, reason: &str) {
    report(WHOLE, test, reason);
}

/// Reports that a test leaves `part` out on this host, and runs the rest.
pub fn not_run_in_part(part: &str, reason: &str) {
    report(PART, part, reason);
}

/// Unlike `eprintln`, libtest does not capture what is written here. One write is one line, however
/// many tests write.
fn report(begin: &str, what: &str, reason: &str) {
    let reason = reason.replace(['\n', '\r'], " ");
    std::io::stderr().write_all(format!("{begin}{what}: {reason}\n").as_bytes()).ok();
}
