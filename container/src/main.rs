//! The `transom` program: reads the command line, and calls what it names.
#![forbid(unsafe_code)]

use std::io::Write as _;
use std::process::ExitCode;

use container::command;
use container::status::Failure;

fn main() -> ExitCode {
    match command::obey(std::env::args_os().skip(1).collect()) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // Standard error may be closed, and then nobody wants to know.
            writeln!(std::io::stderr(), "transom: {error:#}").ok();
            ExitCode::from(Failure::status(&error).code())
        }
    }
}
