//! The remote desktop in the browser: a gateway between the RDP client of the page and the guest.
//!
//! A page can open neither a TCP connection nor a TLS session of its own. So its client (IronRDP)
//! sends its first packet in a request of RDCleanPath. The gateway exchanges that packet with the
//! guest, does the TLS handshake, and answers with the packet and the certificate of the guest.
//! From then on it copies bytes: client and guest do the sign-in (CredSSP) themselves. It changes
//! only flags that the client has no option for (see [`info`]), and divides the first packets of
//! the guest (see [`packets`]).
//!
//! Threats: a browser chooses its first packet and not where it goes, which is port 3389 of the
//! guest. The request of a browser and the answer of the guest have limits of size and time.
//! Somebody else may answer at the guest's address: see [`certificate`].

mod certificate;
mod handshake;
mod info;
mod packets;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use ironrdp_rdcleanpath::RDCleanPathPdu;
use screen::web::stage::Viewer;
use screen::web::viewers::copy_both_ways;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, join, split};
use tokio::time::timeout;

pub use self::certificate::Changed;
use self::certificate::{Accepted, Pin};
pub use self::handshake::answers;
use self::handshake::{Refusal, connect, read_request};
use self::info::Filtered;
pub use self::info::InfoFilter;
use self::packets::Divided;
pub use self::packets::Divider;
use crate::pod::network::GuestAddress;
pub use crate::settings::RDP;

/// From the request of the browser to our answer.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum desktops at once. Windows has one session for each user. Handshakes are limited as
/// viewers are.
const MAX_DESKTOPS: usize = 16;

pub struct Gateway {
    guest: Arc<OnceLock<GuestAddress>>,
    pin: Pin,
    /// The addresses of connected browsers.
    connected: Mutex<Vec<String>>,
    /// The name and the password of Windows' account, if the page may have them.
    login: OnceLock<(String, String)>,
}

impl Gateway {
    pub fn new(guest: Arc<OnceLock<GuestAddress>>) -> Self {
        let (connected, login) = (Mutex::default(), OnceLock::new());
        Self { guest, pin: Pin::default(), connected, login }
    }

    /// Keeps the guest's certificate in this file.
    pub fn keep_certificate(&self, file: PathBuf) {
        self.pin.keep_in(file);
    }

    /// Signs users of the page in with this account.
    pub fn set_login(&self, user: &str, password: String) {
        self.login.get_or_init(|| (user.to_owned(), password));
    }

    pub fn login(&self) -> Option<&(String, String)> {
        self.login.get()
    }

    /// The addresses of connected browsers.
    pub fn connected(&self) -> Vec<String> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Fingerprints of the kept certificate and of another one that the guest showed since.
    pub fn changed(&self) -> Option<Changed> {
        self.pin.changed()
    }

    /// Trusts the certificate with this fingerprint from now on, if it is the one that was shown.
    pub fn trust(&self, fingerprint: &str) -> anyhow::Result<()> {
        self.pin.trust(fingerprint)
    }

    /// An error is the reason why no remote desktop answers.
    pub async fn check(&self) -> Result<(), String> {
        match self.guest.get() {
            None => Err("the guest has no network".into()),
            Some(guest) => answers(guest).await,
        }
    }

    /// Connects a browser with the guest until one of them disconnects.
    pub async fn serve(self: Arc<Self>, viewer: Viewer) {
        let Viewer { mut stream, peer, view_only } = viewer;
        let connected = async {
            let request = read_request(&mut stream).await?;
            if view_only {
                return Err(Refusal::ViewOnly);
            }
            let guest = self.guest.get().ok_or(Refusal::NoNetwork)?;
            let connected = connect(guest, &request, &self.pin).await?;
            let place = self.take_place(&peer).ok_or(Refusal::Full)?;
            Ok((connected, place))
        };
        let connected = timeout(HANDSHAKE_TIMEOUT, connected).await;
        match connected.unwrap_or(Err(Refusal::TimedOut)) {
            Ok(((answer, guest, accepted), _place)) => {
                if send(&mut stream, &answer).await.is_ok() {
                    let gateway = self.clone();
                    let proven = move || match accepted {
                        Accepted::Known => {}
                        Accepted::First(fingerprint) => gateway.pin.proven(fingerprint),
                    };
                    let (from_client, to_client) = split(stream);
                    let (from_guest, to_guest) = split(guest);
                    let client = join(Filtered::new(from_client, Box::new(proven)), to_client);
                    let guest = join(Divided::new(from_guest), to_guest);
                    copy_both_ways(client, guest).await;
                }
            }
            Err(refusal) => {
                // Not a warning: clients choose how often this happens.
                tracing::debug!("desktop: {peer}: {refusal}");
                if send(&mut stream, &refusal.answer()).await.is_ok() {
                    linger(stream).await;
                }
            }
        }
    }

    fn take_place(&self, peer: &str) -> Option<Place<'_>> {
        let mut connected = self.connected.lock().unwrap_or_else(PoisonError::into_inner);
        if connected.len() >= MAX_DESKTOPS {
            return None;
        }
        connected.push(peer.to_owned());
        Some(Place { gateway: self, peer: peer.to_owned() })
    }
}

/// A connected browser.
struct Place<'a> {
    gateway: &'a Gateway,
    peer: String,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut connected = self.gateway.connected.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = connected.iter().position(|peer| *peer == self.peer) {
            connected.swap_remove(at);
        }
    }
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), answer: &RDCleanPathPdu) -> io::Result<()> {
    let bytes = answer.to_der().map_err(io::Error::other)?;
    timeout(HANDSHAKE_TIMEOUT, async {
        stream.write_all(&bytes).await?;
        stream.flush().await
    })
    .await?
}

/// Waits until the browser closes the connection, so that it reads the refusal first.
async fn linger(mut stream: impl AsyncRead + Unpin) {
    let mut rest = [0; 64];
    let closed = async { while stream.read(&mut rest).await.is_ok_and(|count| count > 0) {} };
    timeout(HANDSHAKE_TIMEOUT, closed).await.ok();
}

#[cfg(test)]
mod test;
