//! Holds the machine still while a client copies its disks: with the guest's file systems frozen by
//! its agent (VSS in Windows) where asked, and with the machine's devices parked.
//!
//! A task of its own owns the hold. Whatever ends it (the client, its death, the time limit, the
//! end of the pod), the machine goes on, and the file systems are thawed.
//!
//! Threats: the agent is part of the guest, and answers anything, late, or never. Nothing but the
//! label of the snapshot depends on its answers; thawing is repeated until one of them shows that
//! it is done.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use vmm::control::Command;

use super::{doze, machine_client};
use crate::agent::{Agent, AgentError};

/// How long the end of an earlier hold may take.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the machine may take to park its devices.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client waits for the file systems to be thawed. The task continues after that.
const THAW_TIMEOUT: Duration = Duration::from_secs(15);
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long an agent is asked again that does not answer.
const SILENCE: Duration = Duration::from_secs(600);
/// Maximum number of thaws that an agent answers with something else than a success.
const MAX_THAWS: u32 = 60;
/// More file systems than any guest has.
const MAX_FILE_SYSTEMS: u64 = 10_000;
/// The guest's clock is set after a longer hold.
const LATE: Duration = Duration::from_secs(1);
/// No client may hold the machine for longer.
const LONGEST: Duration = Duration::from_secs(3600);

/// A finished hold.
#[derive(Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The machine stood still until the client released it.
    pub in_time: bool,
    /// The guest's file systems were frozen all the time.
    pub frozen: bool,
    /// The reason why they were not.
    pub why: String,
    /// How long the machine stood still.
    pub seconds: f64,
}

/// Ends when it is released or dropped.
pub struct Hold {
    release: oneshot::Sender<()>,
    outcome: oneshot::Receiver<Outcome>,
}

impl Hold {
    pub async fn release(self) -> anyhow::Result<Outcome> {
        self.release.send(()).ok();
        self.outcome.await.context("the pod is being stopped")
    }
}

#[derive(Clone)]
pub struct Freezer {
    control: PathBuf,
    agent: Arc<Agent>,
    turn: Arc<Semaphore>,
    ends: Arc<watch::Sender<bool>>,
    /// Whether memory is saved encrypted.
    encrypts: bool,
}

impl Freezer {
    pub fn new(control: PathBuf, agent: Arc<Agent>, encrypts: bool) -> Self {
        let turn = Arc::new(Semaphore::new(1));
        Self { control, agent, turn, ends: Arc::new(watch::Sender::new(false)), encrypts }
    }

    /// Refuses a client that would save memory in another way than the pod, as its environment is
    /// another one.
    pub fn check_key(&self, encrypts: Option<bool>) -> anyhow::Result<()> {
        match (self.encrypts, encrypts) {
            (true, Some(false)) => bail!(
                "memory would not be encrypted: run the command with the SNAPSHOT_KEY_FILE of the \
                 pod"
            ),
            (false, Some(true)) => bail!(
                "the pod has no SNAPSHOT_KEY_FILE, and would not start from encrypted memory: \
                 leave it out here, or start the pod with it"
            ),
            _ => Ok(()),
        }
    }

    /// Returns when the machine stands still. It goes on after `limit` at the latest.
    pub async fn hold(&self, freeze: bool, limit: Duration) -> anyhow::Result<Hold> {
        // A machine that falls asleep has the turn.
        doze::wake().await?;
        let turn = timeout(TURN_TIMEOUT, self.turn.clone().acquire_owned()).await;
        let turn = turn.ok().and_then(Result::ok);
        let turn = turn.context("another snapshot is being taken, or its guest being thawed")?;
        ensure!(!*self.ends.borrow(), "the pod is being stopped");
        let status = machine_client::ask(&self.control, Command::Status).await?;
        let state = status["state"].as_str().unwrap_or("unknown");
        ensure!(state == "running", "the machine is {state}: resume it first");
        let (release, released) = oneshot::channel();
        let (tell, outcome) = oneshot::channel();
        let (ready, held) = oneshot::channel();
        let task = Task { freezer: self.clone(), ready, released, tell, _turn: turn };
        tokio::spawn(task.run(freeze, limit.min(LONGEST)));
        held.await.context("the pod is being stopped")??;
        Ok(Hold { release, outcome })
    }

    /// Permits no hold until the result is dropped. `None` while there is one.
    pub fn exclude(&self) -> Option<OwnedSemaphorePermit> {
        self.turn.clone().try_acquire_owned().ok()
    }

    /// Ends a hold, and permits no other. Waits for the guest to be thawed, at most this long.
    /// Returns whether it is.
    pub async fn end(&self, patience: Duration) -> bool {
        self.ends.send_replace(true);
        let thawed = timeout(patience, self.turn.acquire()).await.is_ok();
        if !thawed {
            tracing::warn!("the guest's agent does not answer: its file systems may be frozen");
        }
        thawed
    }

    /// Asks the agent to freeze the file systems. The error is the reason why none is frozen.
    /// `sent` is set if it may have got the request.
    async fn freeze(&self, sent: &mut bool) -> Result<(), String> {
        let asked = self.agent.ask("guest-ping", Value::Null).await;
        asked.map_err(|error| error.to_string())?;
        *sent = true;
        let frozen = self.agent.ask("guest-fsfreeze-freeze", Value::Null).await;
        let frozen = frozen.map_err(|error| error.to_string())?;
        match count(&frozen) {
            Some(1..) => Ok(()),
            _ => Err(format!("the guest's agent froze no file system: {}", short(&frozen))),
        }
    }

    /// Thaws them once. `None` if it is unknown whether they are thawed, otherwise whether they
    /// were frozen until now.
    async fn thaw(&self) -> Option<Result<(), String>> {
        let why = match self.agent.ask("guest-fsfreeze-thaw", Value::Null).await {
            Ok(thawed) => match count(&thawed) {
                Some(1..) => return Some(Ok(())),
                Some(0) => return Some(Err("the guest had thawed its file systems itself".into())),
                None => short(&thawed),
            },
            Err(AgentError::Absent(_)) => return None,
            Err(AgentError::Refused(why)) => why,
        };
        match self.agent.ask("guest-fsfreeze-status", Value::Null).await {
            Ok(status) if status == "thawed" => Some(Err(why)),
            // It cannot freeze, either.
            Err(AgentError::Refused(_)) => Some(Err(why)),
            _ => None,
        }
    }

    /// Returns the number of this standstill.
    async fn settle(&self) -> anyhow::Result<u64> {
        let asked = machine_client::ask_within(&self.control, &Command::Settle, SETTLE_TIMEOUT);
        asked.await?["continued"].as_u64().context("the machine does not say when it goes on")
    }

    /// The number of the present standstill. `None` if the machine runs.
    async fn standstill(&self) -> Option<u64> {
        let status = machine_client::ask(&self.control, Command::Status).await.ok()?;
        status["continued"].as_u64().filter(|_| status["state"] == "paused")
    }

    async fn resume(&self) {
        for _ in 0..5 {
            // The machine may still be parking its devices.
            let asked =
                machine_client::ask_within(&self.control, &Command::Resume, 6 * SETTLE_TIMEOUT);
            match asked.await {
                Ok(_) => return,
                Err(error) => tracing::warn!("the machine does not go on: {error:#}"),
            }
            sleep(RETRY_INTERVAL).await;
        }
    }
}

fn count(answer: &Value) -> Option<u64> {
    answer.as_u64().filter(|count| *count <= MAX_FILE_SYSTEMS)
}

/// The start of an answer, for people.
fn short(answer: &Value) -> String {
    answer.to_string().chars().filter(|it| !it.is_control()).take(80).collect()
}

/// The owner of a hold.
struct Task {
    freezer: Freezer,
    ready: oneshot::Sender<anyhow::Result<()>>,
    released: oneshot::Receiver<()>,
    tell: oneshot::Sender<Outcome>,
    _turn: OwnedSemaphorePermit,
}

impl Task {
    async fn run(self, freeze: bool, limit: Duration) {
        let Self { freezer, ready, mut released, tell, _turn } = self;
        let mut ends = freezer.ends.subscribe();
        // Whether the agent may have got the request.
        let mut sent = false;
        let frozen = match freeze {
            false => Err("it was not asked to freeze its file systems".to_owned()),
            true => tokio::select! {
                frozen = freezer.freeze(&mut sent) => frozen,
                _ = ends.wait_for(|ends| *ends) => Err("the pod is being stopped".to_owned()),
            },
        };
        let start = Instant::now();
        let ended = *ends.borrow();
        let settled = match ended {
            true => Err(anyhow!("the pod is being stopped")),
            false => freezer.settle().await,
        };
        // A machine that does not answer may settle later.
        let in_time = match settled {
            Err(error) => {
                ready.send(Err(error)).ok();
                false
            }
            // A client that is gone has dropped `released`, too.
            Ok(standstill) => {
                ready.send(Ok(())).ok();
                let in_time = tokio::select! {
                    released = &mut released => released.is_ok(),
                    () = sleep(limit) => false,
                    _ = ends.wait_for(|ends| *ends) => false,
                };
                // Somebody else may have resumed it, and paused it again.
                in_time && freezer.standstill().await == Some(standstill)
            }
        };
        if !ended {
            freezer.resume().await;
        }
        let stood = start.elapsed();
        let report = Report { tell: Some(tell), in_time, seconds: stood.as_secs_f64() };
        match sent {
            true => thaw_all(&freezer, frozen, report).await,
            false => report.send(&frozen),
        }
        if stood > LATE {
            freezer.agent.set_time().await.ok();
        }
    }
}

/// The answer to the client, once.
struct Report {
    tell: Option<oneshot::Sender<Outcome>>,
    in_time: bool,
    seconds: f64,
}

impl Report {
    fn send(mut self, frozen: &Result<(), String>) {
        self.send_now(frozen);
    }

    fn send_now(&mut self, frozen: &Result<(), String>) {
        let Self { tell, in_time, seconds } = self;
        let why = frozen.as_ref().err().cloned().unwrap_or_default();
        let (in_time, seconds, frozen) = (*in_time, *seconds, frozen.is_ok());
        // A client that is gone needs no answer.
        tell.take().map(|tell| tell.send(Outcome { in_time, frozen, why, seconds }));
    }
}

/// Thaws the guest's file systems until it is known that they are, and reports to the client.
async fn thaw_all(freezer: &Freezer, mut frozen: Result<(), String>, mut report: Report) {
    let start = Instant::now();
    for tries in 1.. {
        let thawed = freezer.thaw().await;
        let is_known = thawed.is_some();
        if let (Ok(()), Some(Err(why))) = (&frozen, thawed) {
            frozen = Err(why);
        }
        if is_known {
            break;
        }
        let late = Err("the guest's agent does not thaw its file systems".to_owned());
        if start.elapsed() > THAW_TIMEOUT {
            report.send_now(&late);
        }
        if start.elapsed() > SILENCE || tries >= MAX_THAWS && freezer.agent.answers() {
            tracing::warn!(
                "the file systems of the guest may be frozen: its agent answers wrongly"
            );
            frozen = late;
            break;
        }
        sleep(RETRY_INTERVAL).await;
    }
    report.send(&frozen);
}
