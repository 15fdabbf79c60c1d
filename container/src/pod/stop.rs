//! The end that an engine or a cluster asks for: within its time, whatever the guest does.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep_until, timeout_at};
use vmm::control::Command;

use super::asked;
use super::child::Child;
use crate::agent::{Agent, Lack};

/// The button is pressed again so often: Windows hears it only where somebody is logged on, or
/// nobody at all.
const AGAIN: Duration = Duration::from_secs(5);
/// Who could not press it tries again so soon: the machine may not listen yet.
const SOON: Duration = Duration::from_secs(1);

/// How the time is shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The guest ends by itself.
    pub ask: Duration,
    /// After that its devices write what they hold.
    pub off: Duration,
}

impl Budget {
    /// Of so many seconds in all: some of them are for ourselves.
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

/// Signals that mean the end.
pub struct Signals {
    sources: [(Signal, u8); 4],
    /// One that was seen and is still to be acted upon.
    seen: Option<u8>,
}

impl Signals {
    /// From now on they do not end us.
    ///
    /// # Errors
    ///
    /// When the runtime has no place for them.
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

    /// The next one, as an exit status. It stays the next for whoever asks after us: we may be cut
    /// short before we act upon it.
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

    /// The next one, as an exit status.
    pub async fn next(&mut self) -> u8 {
        let status = self.peek().await;
        self.seen = None;
        status
    }
}

/// The exit status of one.
const INTERRUPTED: u8 = 128 + 2;

/// Asks the guest to shut down, once, by both ways that it may hear.
///
/// # Errors
///
/// When the machine is gone.
pub async fn ask(control: &Path, agent: &Arc<Agent>) -> anyhow::Result<Value> {
    let answer = asked::ask(control, Command::PowerButton).await?;
    let agent = agent.clone();
    // Whoever asks does not wait for an agent that may not be there.
    tokio::spawn(async move { tell(agent.shut_down().await) });
    Ok(answer)
}

/// What became of asking the agent. Most guests have none, and that is no news.
fn tell(asked: Result<(), Lack>) {
    match asked {
        Ok(()) => tracing::info!("the guest's agent is asked to shut down"),
        Err(lack @ Lack::Refused(_)) => tracing::info!("{lack}"),
        Err(Lack::Absent(_)) => {}
    }
}

/// Ends the machine: asks the guest, and its agent, if that makes sense; then switches it off, then
/// kills it. Somebody at a keyboard need not wait.
pub async fn stop(child: &mut Child, budget: Budget, agent: Option<&Agent>, signals: &mut Signals) {
    let start = Instant::now();
    if let Some(agent) = agent {
        let end = start + budget.ask;
        tokio::select! {
            ended = press(child, agent, end) => if ended { return },
            () = insisted(signals) => {}
        }
    }
    let off = Instant::now() + budget.off;
    if !matches!(timeout_at(off, child.ask(Command::Quit)).await, Ok(Ok(_))) {
        // It does not listen yet, or not any more.
        child.terminate();
    }
    // An answer that was late leaves time for what it announces.
    if timeout_at(off + budget.off / 2, child.end()).await.is_err() {
        tracing::warn!("the machine does not end: it is killed");
        child.kill();
        // Whom we may not kill ends with us.
        timeout_at(off + budget.off, child.end()).await.ok();
    }
}

/// Returns when somebody has said SIGINT, too. Supervisors say SIGTERM again while a guest installs
/// its updates, and a terminal says SIGHUP when it goes.
async fn insisted(signals: &mut Signals) {
    while signals.next().await != INTERRUPTED {
        tracing::info!("the guest is shutting down: SIGINT switches it off at once");
    }
}

/// Presses the power button, and asks the agent, until the machine is off; whether it is.
async fn press(child: &mut Child, agent: &Agent, end: Instant) -> bool {
    let (mut next, mut said) = (Instant::now(), String::new());
    timeout_at(end, wake(child)).await.ok();
    loop {
        let (pause, says) = match timeout_at(end, child.ask(Command::PowerButton)).await {
            Ok(Ok(_)) => (AGAIN, "the guest is asked to shut down".into()),
            Ok(Err(error)) => (SOON, format!("the guest cannot be asked to shut down: {error:#}")),
            Err(_) => (SOON, "the machine does not answer".into()),
        };
        if says != said {
            tracing::info!("{says}");
            said = says;
        }
        next = (next + pause).min(end);
        let asked = async {
            timeout_at(next, agent.shut_down()).await.map(tell).ok();
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

/// Lets a guest run on that somebody paused: it would hear nothing.
async fn wake(child: &Child) {
    let status = child.ask(Command::Status).await;
    let paused = status.is_ok_and(|status| status["state"] == "paused");
    if paused && child.ask(Command::Resume).await.is_ok() {
        tracing::info!("the guest was paused: it runs on, to shut down");
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_parts_are_never_more_than_the_whole() {
        for seconds in 1..200 {
            let budget = Budget::of(seconds);
            let all = budget.ask + 2 * budget.off;
            assert!(all <= Duration::from_secs(seconds.into()), "{seconds}: {budget:?}");
        }
        let usual = Budget::of(105);
        assert_eq!((usual.ask.as_secs(), usual.off.as_secs()), (95, 5));
    }
}
