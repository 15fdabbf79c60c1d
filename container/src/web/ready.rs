//! Health, for orchestrators: whether we live, whether the guest has started, whether it serves.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Front;
use crate::story::Phase;

/// A remote desktop answers within.
const SOON: Duration = Duration::from_secs(2);
const RDP: u16 = 3389;
/// A connection request of ITU-T X.224 in a packet of RFC 1006, with the negotiation request of
/// MS-RDPBCGR 2.2.1.1 that allows TLS and CredSSP.
const REQUEST: [u8; 19] = [3, 0, 0, 19, 14, 0xe0, 0, 0, 0, 0, 0, 1, 0, 8, 0, 3, 0, 0, 0];
/// A connection confirm is one of its kind.
const CONFIRM: u8 = 0xd0;

type Answer = (StatusCode, String);

/// What it means that the guest serves.
pub(super) struct Ready {
    /// It needs no more than to run.
    pub(super) runs: bool,
    /// Where it is on the network, once that is known.
    pub(super) guest: Arc<OnceLock<IpAddr>>,
}

impl Ready {
    async fn serves(&self) -> Result<(), String> {
        if self.runs {
            return Ok(());
        }
        let Some(guest) = self.guest.get() else {
            return Err("the guest has no network".into());
        };
        match timeout(SOON, greet(SocketAddr::new(*guest, RDP))).await {
            Ok(Ok(true)) => Ok(()),
            Ok(Ok(false)) => Err("port 3389 of the guest speaks something else than RDP".into()),
            Ok(Err(error)) => Err(format!("port 3389 of the guest: {error}")),
            Err(_) => Err("port 3389 of the guest does not answer".into()),
        }
    }
}

/// Whether a remote desktop answers there.
async fn greet(place: SocketAddr) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(place).await?;
    stream.write_all(&REQUEST).await?;
    let mut answer = [0; 6];
    stream.read_exact(&mut answer).await?;
    Ok(answer[0] == 3 && answer[5] & 0xf0 == CONFIRM)
}

/// We live: whoever ends us because we do not answer is right. What goes wrong ends us anyway.
pub(super) async fn health() -> &'static str {
    "ok\n"
}

/// The guest has started.
pub(super) async fn startup(State(front): State<Arc<Front>>) -> Answer {
    let scene = front.story.scene().borrow().clone();
    match scene.phase {
        Phase::Running | Phase::Stopping => (StatusCode::OK, "ok\n".into()),
        _ => (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", scene.doing)),
    }
}

/// The guest serves those who come to use it.
pub(super) async fn readiness(State(front): State<Arc<Front>>) -> Answer {
    let scene = front.story.scene().borrow().clone();
    if scene.phase != Phase::Running {
        return (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", scene.doing));
    }
    match front.ready.serves().await {
        Ok(()) => (StatusCode::OK, "ok\n".into()),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

#[cfg(test)]
mod test {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn only_a_remote_desktop_is_one() {
        // The answer of Windows' own service: a confirm that takes TLS.
        let rdp = [3, 0, 0, 19, 14, 0xd0, 0, 0, 0x12, 0x34, 0, 2, 0, 8, 0, 2, 0, 0, 0];
        for (says, is) in [(&rdp[..], true), (b"SSH-2.0-OpenSSH_9.2\r\n", false)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let place = listener.local_addr().unwrap();
            let says = says.to_vec();
            let served = tokio::spawn(async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut heard = [0; REQUEST.len()];
                stream.read_exact(&mut heard).await.unwrap();
                stream.write_all(&says).await.unwrap();
                heard
            });
            assert_eq!(greet(place).await.unwrap(), is);
            assert_eq!(served.await.unwrap(), REQUEST);
        }
    }
}
