//! The last step of `./test`: counts the tests from their output in a file, and fails on skips that
//! `tests/skips` does not allow on this host.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

fn main() -> anyhow::Result<ExitCode> {
    let output = std::env::args_os().nth(1).ok_or_else(|| anyhow::anyhow!("usage: tally FILE"))?;
    let allowed = transom_tests::tally::close(Path::new(&output))?;
    Ok(if allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
