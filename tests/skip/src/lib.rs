//! Reports tests that cannot run on this host. Tests of all crates use these functions.
//!
//! The report is a line of text, because text arrives from everywhere, also from the lab. `./test`
//! counts these lines and fails on each that `tests/skips` does not allow on this host.
#![forbid(unsafe_code)]

use std::io::Write as _;

/// Begins the report of a test that did not run.
pub const WHOLE: &str = "not run here: ";
/// Begins the report of a part that a test left out.
pub const PART: &str = "not run here, in part: ";

/// Reports that `test` cannot run on this host. The caller must return then.
pub fn not_run(test: &str, reason: &str) {
    report(WHOLE, test, reason);
}

/// Reports that a test leaves out `part` on this host, and runs the rest.
pub fn not_run_in_part(part: &str, reason: &str) {
    report(PART, part, reason);
}

/// Writes one line with one call, so that concurrent tests do not mix their lines. Unlike with
/// `eprintln`, libtest does not capture it.
fn report(begin: &str, what: &str, reason: &str) {
    let reason = reason.replace(['\n', '\r'], " ");
    std::io::stderr().write_all(format!("{begin}{what}: {reason}\n").as_bytes()).ok();
}
