//! Programs of Debian in the guest.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};

/// Runs a program that must succeed, and returns its output.
pub(crate) fn run(program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    run_with(program, arguments, "")
}

/// The same, with this text as its input.
pub(crate) fn run_with(program: &str, arguments: &[&str], input: &str) -> anyhow::Result<String> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| program.to_owned())?;
    let mut stdin = child.stdin.take().context("no input")?;
    stdin.write_all(input.as_bytes()).with_context(|| program.to_owned())?;
    drop(stdin);
    let output = child.wait_with_output().with_context(|| program.to_owned())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let (said, complaint) = (text(&output.stdout), text(&output.stderr));
    ensure!(
        output.status.success(),
        "{program} {arguments:?}: {}: {said} {complaint}",
        output.status
    );
    Ok(said)
}

/// Runs a program, and shows its output piece by piece, up to an end of line or a carriage return.
/// Returns its complaint, if it fails.
pub(crate) fn watch(
    program: &str,
    arguments: &[&str],
    show: &mut dyn FnMut(&str),
) -> anyhow::Result<Option<String>> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| program.to_owned())?;
    let mut output = child.stdout.take().context("no output")?;
    let (mut piece, mut bytes) = (Vec::new(), [0; 512]);
    loop {
        let count = output.read(&mut bytes)?;
        for byte in &bytes[..count] {
            match byte {
                b'\r' | b'\n' => show(&String::from_utf8_lossy(&std::mem::take(&mut piece))),
                other => piece.push(*other),
            }
        }
        if count == 0 {
            break;
        }
    }
    let ended = child.wait_with_output()?;
    let complaint = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
    Ok((!ended.status.success()).then_some(complaint))
}

/// A tool of busybox.
pub(crate) fn busybox(arguments: &[&str]) -> anyhow::Result<String> {
    run("/bin/busybox", arguments)
}
