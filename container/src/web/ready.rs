//! Health checks for orchestrators: live, started, ready.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use super::WebState;
use crate::agent::Agent;
use crate::pod::network::GuestAddress;
use crate::story::{Phase, Scene};

/// Timeout of a connection to the guest's remote desktop.
const RDP_TIMEOUT: Duration = Duration::from_secs(2);
const RDP: u16 = 3389;
/// A connection request of ITU-T X.224 in a packet of RFC 1006, with the negotiation request of
/// MS-RDPBCGR 2.2.1.1 that allows TLS and CredSSP.
const REQUEST: [u8; 19] = [3, 0, 0, 19, 14, 0xe0, 0, 0, 0, 0, 0, 1, 0, 8, 0, 3, 0, 0, 0];
/// Code of a connection confirm, in the upper four bits.
const CONFIRM: u8 = 0xd0;

type Answer = (StatusCode, String);

pub(super) struct Ready {
    /// The guest is ready as soon as it runs.
    pub(super) runs: bool,
    pub(super) guest: Arc<OnceLock<GuestAddress>>,
    /// The first user is logged on automatically.
    pub(super) logon: bool,
    /// An answer of the agent means ready.
    pub(super) agent: Arc<Agent>,
}

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
        if self.runs || self.agent.answers() {
            return Ok(());
        }
        let guest = match self.guest.get() {
            None => return Err("the guest has no network, and no agent in it answers".into()),
            // The guest cannot be reached from the pod, so there is nothing to check.
            Some(GuestAddress::Unknown) => return Ok(()),
            Some(guest) => guest,
        };
        match timeout(RDP_TIMEOUT, speaks_rdp(guest, RDP)).await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err("port 3389 of the guest does not speak RDP".into()),
            Ok(Err(error)) => Err(format!("port 3389 of the guest: {error:#}")),
            Err(_) => Err("port 3389 of the guest does not answer".into()),
        }
    }
}

async fn connect(guest: &GuestAddress, port: u16) -> anyhow::Result<TcpStream> {
    Ok(match guest {
        GuestAddress::Fixed(address) => TcpStream::connect((*address, port)).await?,
        GuestAddress::Learned(heard, interface) => {
            let address = *heard.borrow();
            let address = address.context("its address is not known yet")?;
            // The guest chooses its address, so the connection is bound to its interface.
            let socket = TcpSocket::new_v4()?;
            socket.bind_device(Some(interface.as_bytes()))?;
            socket.connect(SocketAddr::new(address.into(), port)).await?
        }
        GuestAddress::Unknown => anyhow::bail!("the guest cannot be reached from the pod"),
    })
}

async fn speaks_rdp(guest: &GuestAddress, port: u16) -> anyhow::Result<bool> {
    let mut stream = connect(guest, port).await?;
    stream.write_all(&REQUEST).await?;
    let mut answer = [0; 6];
    stream.read_exact(&mut answer).await?;
    Ok(answer[0] == 3 && answer[5] & 0xf0 == CONFIRM)
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
        Health::Started if matches!(scene.phase, Phase::Running | Phase::Stopping) => Ok(()),
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
    use tokio::net::{TcpListener, UnixListener};

    use super::*;
    use crate::agent::test::serve;

    #[tokio::test]
    async fn a_guest_without_remote_desktop_is_ready_if_its_agent_answers() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let agent = Arc::new(Agent::new(socket));
        let ready = Ready { runs: false, logon: true, guest: Arc::default(), agent: agent.clone() };
        assert!(ready.serves().await.unwrap_err().contains("no agent"));
        let served = tokio::spawn(serve(listener));
        agent.ask("guest-ping", Value::Null).await.unwrap_err();
        assert_eq!(ready.serves().await, Ok(()));
        served.abort();
        assert!(served.await.unwrap_err().is_cancelled());
        agent.ask("guest-ping", Value::Null).await.unwrap_err();
        assert!(ready.serves().await.unwrap_err().contains("no agent"));
    }

    #[tokio::test]
    async fn only_a_remote_desktop_answer_counts() {
        // The answer of Windows' own service: a confirm that selects TLS.
        let rdp = [3, 0, 0, 19, 14, 0xd0, 0, 0, 0x12, 0x34, 0, 2, 0, 8, 0, 2, 0, 0, 0];
        for (says, is) in [(&rdp[..], true), (b"SSH-2.0-OpenSSH_9.2\r\n", false)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let place = listener.local_addr().unwrap();
            let (guest, port) = (GuestAddress::Fixed(place.ip()), place.port());
            let says = says.to_vec();
            let served = tokio::spawn(async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut heard = [0; REQUEST.len()];
                stream.read_exact(&mut heard).await.unwrap();
                stream.write_all(&says).await.unwrap();
                heard
            });
            assert_eq!(speaks_rdp(&guest, port).await.unwrap(), is);
            assert_eq!(served.await.unwrap(), REQUEST);
        }
    }
}
