//! Health checks for orchestrators: live, started, ready.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;

use super::WebState;
use crate::agent::Agent;
use crate::desktop;
use crate::pod::doze;
use crate::pod::network::GuestAddress;
use crate::story::{Phase, Scene};

type Answer = (StatusCode, String);

pub(super) struct Ready {
    /// The guest is ready as soon as it runs.
    pub(super) runs: bool,
    pub(super) guest: Arc<OnceLock<GuestAddress>>,
    /// The first user is logged on automatically.
    pub(super) logon: bool,
    /// An answer of the agent means ready.
    pub(super) agent: Arc<Agent>,
    pub(super) asked: Asked,
}

/// When the guest's remote desktop was asked last, and its answer.
pub(super) type Asked = Mutex<Option<(Instant, Result<(), String>)>>;

/// Anybody may ask for the health of a pod, any number of times.
const ASK_AGAIN: Duration = Duration::from_secs(1);

impl Ready {
    /// While Windows is installed, its own report counts. Otherwise its services do.
    async fn check(&self, scene: &Scene) -> Result<(), String> {
        let installation = scene.installation.as_ref();
        match installation.map(|it| (it.is_ready(self.logon), it)) {
            Some((Some(true), _)) => Ok(()),
            Some((Some(false), installation)) => Err(installation.sentence()),
            Some((None, _)) | None => self.serves().await,
        }
    }

    async fn serves(&self) -> Result<(), String> {
        // A guest that is asleep serves its first client.
        if self.runs || self.agent.answers() || doze::is_asleep() {
            return Ok(());
        }
        let guest = match self.guest.get() {
            None => return Err("the guest has no network, and no agent in it answers".into()),
            // The guest cannot be reached from the pod, so there is nothing to check.
            Some(GuestAddress::Unknown) => return Ok(()),
            Some(guest) => guest,
        };
        let mut asked = self.asked.lock().await;
        match &*asked {
            Some((when, answer)) if when.elapsed() < ASK_AGAIN => answer.clone(),
            _ => {
                let answer = desktop::answers(guest).await;
                *asked = Some((Instant::now(), answer.clone()));
                answer
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// The pod responds.
    Live,
    Started,
    Ready,
}

/// Whether the check passes, and the text for the page.
pub(super) async fn answer(web: &WebState, health: Health) -> (bool, String) {
    let scene = web.story.scene().borrow().clone();
    let fine = match health {
        // The pod answers, so it lives.
        Health::Live => Ok(()),
        _ if scene.failed.is_some() => Err(scene.failed.unwrap_or_default()),
        Health::Started if scene.phase >= Phase::Running => Ok(()),
        Health::Ready if scene.phase == Phase::Asleep => Ok(()),
        Health::Ready if scene.phase == Phase::Running => web.ready.check(&scene).await,
        Health::Started | Health::Ready => Err(scene.doing),
    };
    match fine {
        Ok(()) => (true, "ok\n".into()),
        Err(why) => (false, format!("{why}\n")),
    }
}

async fn page(web: &WebState, health: Health) -> Answer {
    let (fine, text) = answer(web, health).await;
    (if fine { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text)
}

/// `/healthz`: fails only if the pod does not answer. Other failures end the pod anyway.
pub(super) async fn health(State(web): State<Arc<WebState>>) -> Answer {
    page(&web, Health::Live).await
}

pub(super) async fn startup(State(web): State<Arc<WebState>>) -> Answer {
    page(&web, Health::Started).await
}

pub(super) async fn readiness(State(web): State<Arc<WebState>>) -> Answer {
    page(&web, Health::Ready).await
}

#[cfg(test)]
mod test {
    use serde_json::Value;
    use tokio::net::UnixListener;

    use super::*;
    use crate::agent::test::serve;

    #[tokio::test]
    async fn a_guest_without_remote_desktop_is_ready_if_its_agent_answers() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let agent = Arc::new(Agent::new(socket));
        let (guest, asked) = (Arc::default(), Asked::default());
        let ready = Ready { runs: false, logon: true, guest, agent: agent.clone(), asked };
        assert!(ready.serves().await.unwrap_err().contains("no agent"));
        let served = tokio::spawn(serve(listener));
        agent.ask("guest-ping", Value::Null).await.unwrap_err();
        assert_eq!(ready.serves().await, Ok(()));
        served.abort();
        assert!(served.await.unwrap_err().is_cancelled());
        agent.ask("guest-ping", Value::Null).await.unwrap_err();
        assert!(ready.serves().await.unwrap_err().contains("no agent"));
    }
}
