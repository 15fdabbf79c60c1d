//! The `vmm` program: reads the command line, and calls what it names.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;
use vmm::command;
use vmm::status::Failure;

fn main() -> ExitCode {
    log_to_stderr();
    end_on_panic();
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let result = command::obey(words);
    devices::backend::stream::restore_terminal();
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // Standard error may be closed, and then nobody wants to know.
            writeln!(std::io::stderr(), "vmm: {error:#}").ok();
            ExitCode::from(Failure::status(&error) as u8)
        }
    }
}

/// Lines for the operator; `VMM_LOG=debug` shows more, `VMM_LOG_FORMAT=json` is for machines.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_env("VMM_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time();
    if std::env::var_os("VMM_LOG_FORMAT").is_some_and(|format| format == "json") {
        log.json().init();
    } else {
        log.init();
    }
}

/// A thread of a machine that panics leaves it half alive: end it all, with the message.
fn end_on_panic() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        devices::backend::stream::restore_terminal();
        say(panic);
        std::process::abort();
    }));
}
