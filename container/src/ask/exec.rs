//! Runs a program in the guest, through the guest's agent.

use std::io::Read;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;

use super::Pod;
use crate::agent::guest::{Ended, Outcome};
use crate::pod::inquiry::Question;
use crate::status::{Failure, Status};

/// Interval between polls of the program: it doubles from `MIN_POLL` to `MAX_POLL`.
const MIN_POLL: Duration = Duration::from_millis(20);
const MAX_POLL: Duration = Duration::from_millis(500);
/// Maximum time without an answer: a guest may be busy, or restart its agent.
const MAX_SILENCE: Duration = Duration::from_secs(30);
/// Maximum length of standard input in bytes: the agent takes it in one piece.
const MAX_INPUT: usize = 1 << 20;

#[derive(Deserialize)]
struct Started {
    pid: i64,
}

/// Reads standard input to its end, and encodes it as base64. More than 1 MiB is an error.
pub fn input(from: impl Read) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    let limit = u64::try_from(MAX_INPUT)? + 1;
    from.take(limit).read_to_end(&mut bytes).context("standard input")?;
    if bytes.len() > MAX_INPUT {
        let sentence = format!("standard input has more than {MAX_INPUT} bytes: split it");
        return Err(Failure::new(Status::Usage, sentence));
    }
    Ok(BASE64_STANDARD.encode(bytes))
}

/// Waits until the program ends, at most for `limit`. `input` is in base64.
pub fn run(
    program: &str,
    words: &[String],
    input: Option<String>,
    limit: Option<Duration>,
) -> anyhow::Result<Ended> {
    let (start, mut pod) = (Instant::now(), Pod::find()?);
    let left = || limit.map(|limit| limit.saturating_sub(start.elapsed()));
    let late = |what: String| {
        let seconds = limit.unwrap_or_default().as_secs();
        let sentence = format!("{program} {what}: the timeout of {seconds} s is over");
        Failure::new(Status::TimedOut, sentence)
    };
    let is_over = || left().is_some_and(|left| left.is_zero());
    let question = Question::Start { program: program.to_owned(), words: words.to_vec(), input };
    pod.within(left())?;
    let started = pod
        .ask(&question)
        .map_err(|error| if is_over() { late("may have been started".into()) } else { error });
    let started: Started = serde_json::from_slice(&started?).context("the agent")?;
    let question = Question::Outcome { pid: started.pid };
    let (mut pause, mut silent) = (MIN_POLL, None);
    loop {
        pod.within(left())?;
        match pod.ask(&question) {
            Ok(answer) => {
                if let Outcome::Ended(ended) = Outcome::read(&answer).context("the agent")? {
                    return Ok(ended);
                }
                silent = None;
            }
            Err(_) if is_over() => {}
            Err(error) if Status::of(&error) == Status::Agent => {
                let since = *silent.get_or_insert_with(Instant::now);
                if since.elapsed() > MAX_SILENCE {
                    return Err(error);
                }
            }
            Err(error) => {
                let sentence = format!("the result of {program} is unknown: {error:#}");
                return Err(Failure::new(Status::Agent, sentence));
            }
        }
        if is_over() {
            return Err(late(format!("still runs in the guest as process {}", started.pid)));
        }
        sleep(left().map_or(pause, |left| pause.min(left)));
        pause = (pause * 2).min(MAX_POLL);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn input_is_limited() {
        assert_eq!(input(&b"hi\n"[..]).unwrap(), "aGkK");
        assert_eq!(input(&b""[..]).unwrap(), "");
        let most = input(std::io::repeat(0).take(1 << 20)).unwrap();
        assert!(u64::try_from(most.len()).unwrap() < crate::pod::inquiry::MAX_QUESTION);
        let error = input(std::io::repeat(0)).unwrap_err();
        assert_eq!(Status::of(&error), Status::Usage);
    }
}
