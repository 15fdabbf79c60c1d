//! The `transom` program: reads the command line, and calls what it names.
#![forbid(unsafe_code)]

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use container::command;
use container::settings::value::switch;
use container::status::Failure;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::layer;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

fn main() -> ExitCode {
    log_to_stdout();
    match command::obey(std::env::args_os().skip(1).collect()) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // Standard error may be closed, and then nobody wants to know.
            writeln!(std::io::stderr(), "transom: {error:#}").ok();
            ExitCode::from(Failure::status(&error).code())
        }
    }
}

/// One line for each event, where an engine collects them; `LOG_FORMAT=json` is for programs.
fn log_to_stdout() {
    let on = |name| std::env::var(name).ok().and_then(|text| switch(&text)).unwrap_or(false);
    let level = match (on("TRACE"), on("DEBUG")) {
        (true, _) => LevelFilter::TRACE,
        (_, true) => LevelFilter::DEBUG,
        _ => LevelFilter::INFO,
    };
    let log = tracing_subscriber::registry().with(level);
    let layer = layer()
        .with_writer(std::io::stdout)
        .with_ansi(std::io::stdout().is_terminal())
        .with_target(false)
        .without_time();
    if std::env::var("LOG_FORMAT").is_ok_and(|format| format.eq_ignore_ascii_case("json")) {
        log.with(layer.json()).init();
    } else {
        log.with(layer).init();
    }
}
