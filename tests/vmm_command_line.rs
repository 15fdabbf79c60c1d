//! The command line from outside. A mistake is reported in one line that names it, with the right
//! status, and leaves nothing behind; help, reference, `inspect` and `doctor` are correct.
#![forbid(unsafe_code)]

#[path = "vmm_command_line/doctor.rs"]
mod doctor;
#[path = "vmm_command_line/mistakes.rs"]
mod mistakes;
#[path = "vmm_command_line/papers.rs"]
mod papers;
#[path = "vmm_command_line/rights.rs"]
mod rights;
#[path = "vmm_command_line/sharing.rs"]
mod sharing;
#[path = "vmm_command_line/views.rs"]
mod views;

use std::fs;
use std::path::Path;

use transom_tests::program::{Ended, run_in};

/// Exit statuses from the reference.
const FAILED: i32 = 1;
const USAGE: i32 = 2;
const NO_KVM: i32 = 88;

/// Runs `vmm` with a mistake that it must report before a guest starts. Returns the message without
/// `vmm: `.
fn refusal(folder: &Path, words: &[&str], status: i32) -> String {
    let before = listing(folder);
    let ended = run_in(folder, words).expect("vmm");
    let sentence = one_line(&ended, &format!("{words:?}"), status);
    assert_eq!(listing(folder), before, "{words:?} left something behind");
    sentence
}

/// Checks for a refusal: one line on standard error, this status, and no output of a guest.
fn one_line(ended: &Ended, what: &str, status: i32) -> String {
    assert_eq!(ended.stdout, "", "{what} started a guest");
    let mut lines = ended.stderr.lines();
    let line = lines.next().unwrap_or_default().to_owned();
    assert_eq!(lines.next(), None, "{what}: more than one line: {}", ended.stderr);
    assert_eq!(ended.status, status, "{what}: {line}");
    let sentence = line.strip_prefix("vmm: ");
    sentence.unwrap_or_else(|| panic!("{what}: no `vmm: ` in {line:?}")).to_owned()
}

/// Names and sizes of the files in a folder.
fn listing(folder: &Path) -> Vec<(String, u64)> {
    let entry = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.expect("an entry");
        let size = entry.metadata().expect("an entry").len();
        (entry.file_name().to_string_lossy().into_owned(), size)
    };
    let mut all: Vec<_> = fs::read_dir(folder).expect("a folder").map(entry).collect();
    all.sort();
    all
}
