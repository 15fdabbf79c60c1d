//! The `vmm` program: reads the command line and runs the command.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use vmm::status::Status;
use vmm::{command, heap};

fn main() -> ExitCode {
    heap::return_large_buffers();
    log_to_stderr();
    end_on_panic();
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let result = command::execute(words);
    host::stream::restore_terminal();
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // Standard error may be closed.
            writeln!(std::io::stderr(), "vmm: {error:#}").ok();
            ExitCode::from(Status::of(&error) as u8)
        }
    }
}

/// Logs to standard error. `VMM_LOG=debug` shows more; `VMM_LOG_FORMAT=json` writes JSON.
fn log_to_stderr() {
    let wanted = std::env::var("VMM_LOG").ok();
    let filter: Option<Targets> = wanted.as_deref().and_then(|text| text.parse().ok());
    let invalid = wanted.filter(|_| filter.is_none());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        // Standard error may be closed, which must not end the machine.
        .log_internal_errors(false)
        .without_time();
    let log = tracing_subscriber::registry().with(filter);
    if std::env::var_os("VMM_LOG_FORMAT").is_some_and(|format| format == "json") {
        log.with(layer.json()).init();
    } else {
        log.with(layer).init();
    }
    if let Some(invalid) = invalid {
        tracing::warn!("VMM_LOG={invalid} is invalid: use off, error, warn, info or debug");
    }
}

/// A panic of one thread leaves the machine half alive: end the whole process, with the message.
fn end_on_panic() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        host::stream::restore_terminal();
        say(panic);
        std::process::abort();
    }));
}
