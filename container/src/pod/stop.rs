//! Stops the machine when an engine or a cluster asks for it, within its time limit, whatever the
//! guest does.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use vmm::control::{Command, Then};

use super::child::Child;
use super::machine_client;
use super::suspend::SuspendFolder;
use crate::agent::{Agent, AgentError};

/// Interval between presses of the power button. Windows reacts only while a user is logged on, or
/// while nobody is, but not in between.
const PRESS_INTERVAL: Duration = Duration::from_secs(5);
/// Interval after the button could not be pressed: the machine may not listen yet.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// How the time for the shutdown is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Time for the guest to shut down.
    pub ask: Duration,
    /// Time for its devices to write their data, after that.
    pub off: Duration,
}

impl Budget {
    /// A part of the seconds is for the pod itself.
    pub fn of(seconds: u32) -> Self {
        let reserve = match seconds {
            30.. => 5,
            15.. => 4,
            7.. => 3,
            _ => 1,
        };
        let off = Duration::from_secs(reserve.min(u64::from(seconds) / 3));
        let all = Duration::from_secs(u64::from(seconds));
        Self { ask: all.saturating_sub(2 * off), off }
    }
}

/// The signals that end the pod.
pub struct Signals {
    sources: [(Signal, u8); 4],
    /// A signal that was peeked at, and not taken yet.
    seen: Option<u8>,
}

impl Signals {
    /// From now on the signals do not end the process.
    pub fn catch() -> anyhow::Result<Self> {
        let kinds = [
            SignalKind::terminate(),
            SignalKind::interrupt(),
            SignalKind::hangup(),
            SignalKind::quit(),
        ];
        let mut caught = Vec::new();
        for kind in kinds {
            let number = u8::try_from(kind.as_raw_value())?;
            caught.push((signal(kind)?, number));
        }
        let sources = caught.try_into().map_err(|_| anyhow::anyhow!("signals"))?;
        Ok(Self { sources, seen: None })
    }

    /// Waits for the next signal, as an exit status, without taking it: the caller may be canceled
    /// before it can act.
    pub async fn peek(&mut self) -> u8 {
        if let Some(status) = self.seen {
            return status;
        }
        let [one, two, three, four] = &mut self.sources;
        let number = tokio::select! {
            _ = one.0.recv() => one.1,
            _ = two.0.recv() => two.1,
            _ = three.0.recv() => three.1,
            _ = four.0.recv() => four.1,
        };
        *self.seen.insert(128 + number)
    }

    /// Takes the next signal, as an exit status.
    pub async fn next(&mut self) -> u8 {
        let status = self.peek().await;
        self.seen = None;
        status
    }
}

/// The exit status for SIGINT.
const INTERRUPTED: u8 = 128 + 2;

/// Asks the guest to shut down, once, by its power button and by its agent.
pub async fn ask(control: &Path, agent: &Arc<Agent>) -> anyhow::Result<Value> {
    resume_if_paused(control).await;
    let answer = machine_client::ask(control, Command::PowerButton).await?;
    let agent = agent.clone();
    // In the background: an agent that does not exist would only answer late.
    tokio::spawn(async move { log_result(agent.shut_down().await) });
    Ok(answer)
}

/// Most guests have no agent, so its absence is not logged.
fn log_result(asked: Result<(), AgentError>) {
    match asked {
        Ok(()) => tracing::info!("the guest's agent is asked to shut down"),
        Err(error @ AgentError::Refused(_)) => tracing::info!("{error}"),
        Err(AgentError::Absent(_)) => {}
    }
}

/// Stops the machine. Asks the guest and its agent, if `agent` is set. Then turns the machine off,
/// then kills it. A SIGINT, such as Ctrl-C, skips the first step.
pub async fn stop(child: &mut Child, budget: Budget, agent: Option<&Agent>, signals: &mut Signals) {
    let start = Instant::now();
    if let Some(agent) = agent {
        let end = start + budget.ask;
        tokio::select! {
            ended = press_until_off(child, agent, end) => if ended { return },
            () = wait_for_sigint(signals) => {}
        }
    }
    let off = Instant::now() + budget.off;
    if !matches!(timeout_at(off, child.ask(Command::Quit)).await, Ok(Ok(_))) {
        // The machine does not listen yet, or does not answer any more.
        child.terminate();
    }
    end(child, off, budget.off).await;
}

/// The result of an attempt to suspend the machine.
pub enum Outcome {
    /// The machine has ended.
    Suspended,
    /// A SIGINT is to turn it off at once.
    Interrupted,
    /// The machine runs, or does not answer.
    Failed(anyhow::Error),
}

/// Suspends the machine. After a failure there is time left to shut it down.
pub async fn suspend(
    child: &mut Child,
    folder: &SuspendFolder,
    budget: Budget,
    signals: &mut Signals,
) -> Outcome {
    let limit = budget.ask * 2 / 3;
    let saved = tokio::select! {
        saved = timeout(budget.ask * 4 / 5, folder.save(child, limit, Then::Quit)) => saved,
        () = wait_for_sigint(signals) => return Outcome::Interrupted,
    };
    match saved {
        Ok(Ok(())) => {
            end(child, Instant::now() + budget.off, budget.off).await;
            Outcome::Suspended
        }
        Ok(Err(error)) => Outcome::Failed(error),
        Err(_) => Outcome::Failed(anyhow!("the machine does not answer")),
    }
}

/// Waits until `off`, and then for some of `more`, for a machine that was asked to end. Kills it if
/// it does not.
pub async fn end(child: &mut Child, off: Instant, more: Duration) {
    // If the answer was late, its announcement needs some time.
    if timeout_at(off + more / 2, child.end()).await.is_err() {
        tracing::warn!("the machine does not end: killing it");
        child.kill();
        // A process that cannot be killed ends with the pod.
        timeout_at(off + more, child.end()).await.ok();
    }
}

/// Returns after a SIGINT. Other signals are ignored here: supervisors repeat SIGTERM while a guest
/// installs updates, and a closed terminal sends SIGHUP.
pub async fn wait_for_sigint(signals: &mut Signals) {
    while signals.next().await != INTERRUPTED {
        tracing::info!("the machine is being stopped: SIGINT turns it off immediately");
    }
}

/// Returns false if the machine is not off at `end`.
async fn press_until_off(child: &mut Child, agent: &Agent, end: Instant) -> bool {
    let (mut next, mut said) = (Instant::now(), String::new());
    timeout_at(end, resume_if_paused(child.control())).await.ok();
    loop {
        let (pause, says) = match timeout_at(end, child.ask(Command::PowerButton)).await {
            Ok(Ok(_)) => (PRESS_INTERVAL, "the guest is asked to shut down".into()),
            Ok(Err(error)) => {
                (RETRY_INTERVAL, format!("the guest cannot be asked to shut down: {error:#}"))
            }
            Err(_) => (RETRY_INTERVAL, "the machine does not answer".into()),
        };
        if says != said {
            tracing::info!("{says}");
            said = says;
        }
        next = (next + pause).min(end);
        let asked = async {
            timeout_at(next, agent.shut_down()).await.map(log_result).ok();
            sleep_until(next).await;
        };
        tokio::select! {
            _ = child.end() => return true,
            () = asked => {}
        }
        if next == end {
            tracing::warn!("the guest did not shut down in time");
            return false;
        }
    }
}

/// Resumes a paused guest, which could not react otherwise.
async fn resume_if_paused(control: &Path) {
    let status = machine_client::ask(control, Command::Status).await;
    let paused = status.is_ok_and(|status| status["state"] == "paused");
    if paused && machine_client::ask(control, Command::Resume).await.is_ok() {
        tracing::info!("the guest was paused: it is resumed to shut down");
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_time_limits_fit_into_the_total() {
        for seconds in 1..200 {
            let budget = Budget::of(seconds);
            let all = budget.ask + 2 * budget.off;
            assert!(all <= Duration::from_secs(seconds.into()), "{seconds}: {budget:?}");
        }
        let usual = Budget::of(105);
        assert_eq!((usual.ask.as_secs(), usual.off.as_secs()), (95, 5));
    }
}
