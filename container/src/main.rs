//! The `transom` program: reads the command line and runs the command.
#![forbid(unsafe_code)]

use std::io::IsTerminal as _;
use std::process::ExitCode;

use container::command;
use container::log::{Log, write_final_error};
use container::settings::value::{strip, switch};
use container::shared_folder;
use container::status::{self, Status};
use container::story::log_layer::StoryLayer;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::layer;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

fn main() -> ExitCode {
    // Before the log has a thread: the jail of these processes is for one.
    if let Some(process) = shared_folder::asked() {
        return process();
    }
    let json = variable("LOG_FORMAT").eq_ignore_ascii_case("json");
    let log = log_to_stdout(json);
    log.make_global();
    let result = command::run(std::env::args_os());
    log.end();
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            status::sentences(&error).iter().for_each(|sentence| write_final_error(sentence));
            ExitCode::from(Status::of(&error).code())
        }
    }
}

/// The value of a variable that is needed before the whole environment is read.
fn variable(name: &str) -> String {
    std::env::var(name).map_or_else(|_| String::new(), |text| strip(&text).to_owned())
}

/// Logs one line per event, for container engines to collect; as JSON objects with
/// `LOG_FORMAT=json`.
fn log_to_stdout(json: bool) -> Log {
    let is_on = |name| switch(&variable(name)).unwrap_or(false);
    let level = match (is_on("TRACE"), is_on("DEBUG")) {
        (true, _) => LevelFilter::TRACE,
        (_, true) => LevelFilter::DEBUG,
        _ => LevelFilter::INFO,
    };
    let log = Log::new(rustix::stdio::stdout(), json);
    let all = tracing_subscriber::registry().with(level).with(StoryLayer::default());
    let layer = layer()
        .with_writer(log.clone())
        .with_ansi(std::io::stdout().is_terminal())
        .with_target(false)
        // A reader of the log that is gone is no reason to end.
        .log_internal_errors(false)
        .without_time();
    if json {
        all.with(layer.json()).init();
    } else {
        all.with(layer).init();
    }
    log
}
