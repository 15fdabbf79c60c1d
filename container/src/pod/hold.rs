//! The end of a pod that failed. The pod logs the error at once, and shows it at the web port for a
//! while: an engine that restarts it immediately would hide the error and loop.
//!
//! The page at the web port stays open, or is opened if the pod failed early. The pod ends with the
//! status of its failure, after the time in ERROR_HOLD or at the next signal.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::run_in_thread;
use super::stop::Signals;
use crate::jail;
use crate::log::write_final_error;
use crate::settings::Settings;
use crate::settings::environment::{Environment, read_all};
use crate::status::{self, Status};
use crate::story::{Phase, Story};
use crate::web;

/// How long viewers of the page get the error if ERROR_HOLD is 0.
const FINAL_DISPLAY_TIME: Duration = Duration::from_millis(200);

/// Takes the result of a pod's life, and returns it when the pod is to end. `shown` if its web port
/// is open already.
pub async fn hold(
    lived: anyhow::Result<u8>,
    environment: &Environment,
    story: &Arc<Story>,
    shown: bool,
    signals: &mut Signals,
) -> anyhow::Result<u8> {
    let (code, sentences) = match &lived {
        Ok(code) if story.has_failed() => (*code, Vec::new()),
        Ok(_) => return lived,
        Err(error) => (Status::of(error).code(), status::sentences(error)),
    };
    if lived.is_err() {
        story.fail(&sentences);
    }
    // Errors in other variables must not hide the port of the page.
    let settings = read_all(environment).0.settings;
    let time = remaining(&settings, story);
    if time.is_zero() {
        let watched = story.is_watched();
        sleep(if watched { FINAL_DISPLAY_TIME } else { Duration::ZERO }).await;
        return lived;
    }
    let write = move || {
        sentences.iter().for_each(|sentence| write_final_error(sentence));
        Ok(())
    };
    run_in_thread("last-word", write).await.ok();
    let page = match shown {
        true => settings.screen.web,
        false => open(&settings, story),
    };
    // Drop all rights while the page is served.
    jail::build(&[]);
    jail::serve();
    story.info(&end_line(page.then(|| web::address(&settings)), time, code));
    tokio::select! {
        () = sleep(time) => {}
        _ = signals.next() => {}
    }
    Ok(code)
}

/// How long the error is shown: the whole time if nothing ever ran, else the rest of it since the
/// pod's start, so that a machine which fails early does not restart in a fast loop either.
fn remaining(settings: &Settings, story: &Story) -> Duration {
    let all = Duration::from_secs(settings.pod.hold.0.into());
    if story.phase() < Phase::Running { all } else { all.saturating_sub(story.since.elapsed()) }
}

/// Returns whether the page is open.
fn open(settings: &Settings, story: &Arc<Story>) -> bool {
    match web::open_failed(settings, story) {
        Ok(Some(page)) => {
            tokio::spawn(page);
            true
        }
        // A port in use may be the reason of the failure.
        Ok(None) | Err(_) => false,
    }
}

fn end_line(page: Option<String>, time: Duration, code: u8) -> String {
    let seconds = time.as_secs().max(1);
    let now = match std::io::stdin().is_terminal() {
        true => "; Ctrl-C ends it now",
        false => "",
    };
    match page {
        Some(page) => format!(
            "the page at {page} shows this for {seconds} s (ERROR_HOLD); then the pod ends with \
             status {code}{now}"
        ),
        None => format!("the pod ends with status {code} in {seconds} s (ERROR_HOLD){now}"),
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::environment::read;

    #[test]
    fn run_time_counts_toward_the_error_hold() {
        let settings =
            |seconds: &str| read(&[("ERROR_HOLD".into(), seconds.into())].into()).unwrap().settings;
        let story = Story::new();
        assert_eq!(remaining(&settings("30"), &story).as_secs(), 30);
        assert_eq!(remaining(&settings("0"), &story).as_secs(), 0);
        std::thread::sleep(Duration::from_millis(1100));
        assert_eq!(remaining(&settings("1"), &story).as_secs(), 1);
        story.enter(Phase::Running, "it runs");
        assert_eq!(remaining(&settings("1"), &story), Duration::ZERO);
        assert!(remaining(&settings("86400"), &story).as_secs() < 86400);
    }
}
