//! Other people's programs, which make and judge media.

use std::path::Path;
use std::process::{Command, Stdio};

/// Whether all programs are there. Reports the test as not run if one is missing.
pub(crate) fn has(test: &str, programs: &[&str]) -> bool {
    let folders = ["/usr/bin", "/usr/sbin"];
    let missing = programs
        .iter()
        .find(|name| !folders.iter().any(|folder| Path::new(folder).join(name).is_file()));
    if let Some(missing) = missing {
        skip::not_run(test, &format!("there is no {missing}"));
    }
    missing.is_none()
}

/// Runs a program and returns its output, both streams.
pub(crate) fn run(program: &str, words: &[&str], folder: &Path) -> String {
    let path = format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(program);
    let command = command.args(words).current_dir(folder).env("PATH", path);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{program} {words:?}: {text}");
    text
}
