//! The end of a pod that failed: it says why at once, and shows it for a while. An engine that
//! starts it again would show nothing to anybody else, and spin.
//!
//! The log has the sentences immediately. The page at the web port stays, or comes if the pod got
//! no further than its settings; and the pod ends with the status of its failure, by itself or as
//! soon as a signal comes.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::apart;
use super::stop::Signals;
use crate::jail;
use crate::log::last_word;
use crate::settings::Settings;
use crate::settings::environment::{Environment, read_all};
use crate::status::{self, Status};
use crate::story::{Phase, Story};
use crate::web;

/// Those who look hear why it ends, even where nothing is held.
const LAST_WORD: Duration = Duration::from_millis(200);

/// Takes what became of a pod, and gives it back when the pod is to end. `shown` if its web port is
/// open already.
pub async fn hold(
    lived: anyhow::Result<u8>,
    environment: &Environment,
    (story, shown): (&Arc<Story>, bool),
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
    // What is wrong in the environment does not hide where its page is to be.
    let settings = read_all(environment).0.settings;
    let time = left(&settings, story);
    if time.is_zero() {
        let heard = story.is_watched();
        sleep(if heard { LAST_WORD } else { Duration::ZERO }).await;
        return lived;
    }
    let said = move || {
        sentences.iter().for_each(|sentence| last_word(sentence));
        Ok(())
    };
    apart("last-word", said).await.ok();
    let page = match shown {
        true => settings.screen.web,
        false => open(&settings, story),
    };
    // Whoever looks meets nobody with rights.
    jail::build(&[]);
    jail::serve();
    story.tell(&line(page.then(|| web::address(&settings)), time, code));
    tokio::select! {
        () = sleep(time) => {}
        _ = signals.next() => {}
    }
    Ok(code)
}

/// How long it is shown: the whole time if nothing ever ran, else what is left of it since the
/// start, so that a machine which breaks down early does not spin either.
fn left(settings: &Settings, story: &Story) -> Duration {
    let all = Duration::from_secs(settings.pod.hold.0.into());
    if story.phase() < Phase::Running { all } else { all.saturating_sub(story.since.elapsed()) }
}

/// Opens the page; whether there is one.
fn open(settings: &Settings, story: &Arc<Story>) -> bool {
    match web::open_failed(settings, story) {
        Ok(Some(page)) => {
            tokio::spawn(page);
            true
        }
        // What has the port may be why it failed.
        Ok(None) | Err(_) => false,
    }
}

/// What is going to happen.
fn line(page: Option<String>, time: Duration, code: u8) -> String {
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
    fn what_never_ran_is_shown_for_the_whole_time_and_what_ran_lives_as_long() {
        let settings =
            |seconds: &str| read(&[("ERROR_HOLD".into(), seconds.into())].into()).unwrap().settings;
        let story = Story::new();
        assert_eq!(left(&settings("30"), &story).as_secs(), 30);
        assert_eq!(left(&settings("0"), &story).as_secs(), 0);
        std::thread::sleep(Duration::from_millis(1100));
        assert_eq!(left(&settings("1"), &story).as_secs(), 1);
        story.enter(Phase::Running, "it runs");
        assert_eq!(left(&settings("1"), &story), Duration::ZERO);
        assert!(left(&settings("86400"), &story).as_secs() < 86400);
    }
}
