//! Admits clients: limits unauthenticated connections, delays guesses, and logs failures.
//!
//! The [`Server`](super::Server) of a machine has a lobby. A pod, whose machine is another process,
//! has its own, so that guesses of VNC viewers and of browsers are counted together. It relays
//! admitted clients to the machine ([`Entrant::relay`]).

use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy, split};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Duration, timeout};

use super::connection_limit::{ConnectionLimit, Slot};
use super::failure_log::FailureLog;
use super::handshake::{self, GREETING, NONE, Welcome};
use super::paint::{PIECE, STALL};
use super::security::{Access, LoginLimiter, PeerNetwork};
use super::{Admission, Duplex, Entry, MAX_CLIENTS, Rules, Wire};

/// Maximum clients that are not authenticated yet, in addition to [`MAX_CLIENTS`].
const MAX_UNAUTHENTICATED: usize = 32;
/// Maximum of these per address.
const MAX_PER_ADDRESS: usize = 8;
/// Maximum refusals that are sent at the same time. Further clients are disconnected silently.
const MAX_REFUSALS: usize = 8;
/// Time limit for the whole handshake, in which a person types a password.
pub(super) const HANDSHAKE: Duration = Duration::from_secs(120);
const REFUSAL: Duration = Duration::from_secs(5);
/// Time limit for the line that announces a client.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// How long to go on sending to one side after the other has disconnected.
const GRACE: Duration = Duration::from_secs(1);
/// Begins the line of a client that may only look.
const VIEW_ONLY: &str = "view-only ";
/// Maximum bytes of the line that announces a client.
const MAX_LINE: usize = 100;

pub struct Lobby {
    pub(super) limiter: Arc<LoginLimiter>,
    pub(super) slots: Arc<Semaphore>,
    unauthenticated: ConnectionLimit,
    failure_log: FailureLog,
    refusals: Semaphore,
}

/// The slot of a client during the handshake. Strangers do not take slots of admitted clients:
/// they could take all of them, and those slots never give way.
enum HandshakeSlot {
    Authenticated(OwnedSemaphorePermit),
    Unauthenticated(Slot),
}

pub struct Entrant {
    pub(super) welcome: Welcome,
    pub(super) slot: OwnedSemaphorePermit,
}

impl Lobby {
    pub fn new(limiter: Arc<LoginLimiter>) -> Self {
        Self {
            limiter,
            slots: Arc::new(Semaphore::new(MAX_CLIENTS)),
            unauthenticated: ConnectionLimit::new(MAX_UNAUTHENTICATED, MAX_PER_ADDRESS),
            failure_log: FailureLog::default(),
            refusals: Semaphore::new(MAX_REFUSALS),
        }
    }

    /// Performs the handshake. A client that is not admitted gets the reason.
    pub async fn admit(
        &self,
        rules: &Rules,
        stream: Wire,
        admission: &Admission,
    ) -> Option<Entrant> {
        let slot = match admission.entry {
            Entry::Authenticated { .. } => {
                self.slots.clone().try_acquire_owned().ok().map(HandshakeSlot::Authenticated)
            }
            Entry::Authenticate(_) if self.slots.available_permits() == 0 => None,
            Entry::Authenticate(network) => {
                self.unauthenticated.acquire_evictable(network).map(HandshakeSlot::Unauthenticated)
            }
        };
        let Some(slot) = slot else {
            self.refuse(stream, admission).await;
            return None;
        };
        let greet = handshake::greet(rules, &self.limiter, stream, admission);
        let greet = timeout(HANDSHAKE, greet);
        let entered = async {
            let (welcome, slot) = match slot {
                HandshakeSlot::Authenticated(slot) => (greet.await, Ok(slot)),
                HandshakeSlot::Unauthenticated(stranger) => tokio::select! {
                    welcome = greet => (welcome, self.slots.clone().try_acquire_owned()),
                    () = stranger.evicted() => bail!("its slot was given to a newer client"),
                },
            };
            let welcome = welcome.context("it did not complete the handshake in time").flatten()?;
            let slot = slot.context("all slots were taken during the handshake")?;
            Ok(Entrant { welcome, slot })
        };
        match entered.await {
            Ok(entrant) => Some(entrant),
            Err(error) => {
                self.log_failure(admission, &format!("was not admitted: {error:#}"));
                None
            }
        }
    }

    fn log_failure(&self, admission: &Admission, what: &str) {
        // Failures of authenticated clients were counted elsewhere.
        let Admission { peer, entry } = admission;
        let network =
            if let Entry::Authenticate(network) = entry { *network } else { PeerNetwork::Local };
        self.failure_log.log(network, &format!("vnc: {peer} {what}"));
    }

    async fn refuse(&self, mut stream: Wire, admission: &Admission) {
        let Ok(_turn) = self.refusals.try_acquire() else { return };
        self.log_failure(admission, "was refused: too many clients");
        let reason = format!(
            "too many clients: at most {MAX_CLIENTS}, and {MAX_UNAUTHENTICATED} without a login yet"
        );
        timeout(REFUSAL, handshake::refuse(&mut stream, &reason)).await.ok();
    }
}

impl Entrant {
    /// Relays the client to a machine in another process, over one of its `announced` sockets,
    /// until one side disconnects.
    pub async fn relay(self, peer: &str, mut machine: impl Duplex) -> anyhow::Result<()> {
        let (access, shared) = (self.welcome.access, self.welcome.shared);
        timeout(HANDSHAKE, handshake_as_client(&mut machine, peer, access, shared))
            .await
            .context("the machine did not reply")??;
        copy_both_ways(self.welcome.stream, machine).await;
        drop(self.slot);
        Ok(())
    }
}

/// Copies bytes between a client and its machine until one side disconnects. The other side is then
/// disconnected too, after it got the data in flight.
pub async fn copy_both_ways(client: impl Duplex, machine: impl Duplex) {
    let (mut from_client, mut to_client) = split(client);
    let (mut from_machine, mut to_machine) = split(machine);
    // Errors are ignored: clients may disconnect in any way.
    let up = async {
        copy(&mut from_client, &mut to_machine).await.ok();
        to_machine.shutdown().await.ok();
    };
    let down = async {
        let mut piece = vec![0; PIECE];
        while let Ok(count @ 1..) = from_machine.read(&mut piece).await {
            let give = async {
                to_client.write_all(&piece[..count]).await?;
                to_client.flush().await
            };
            // While the client stalls, a disconnect of the machine would go unnoticed.
            if !timeout(STALL, give).await.is_ok_and(|given| given.is_ok()) {
                return;
            }
        }
        timeout(GRACE, to_client.shutdown()).await.ok();
    };
    let (mut up, mut down) = (std::pin::pin!(up), std::pin::pin!(down));
    tokio::select! {
        () = &mut up => timeout(GRACE, down).await.ok(),
        () = &mut down => timeout(GRACE, up).await.ok(),
    };
}

/// Performs the client's side of the handshake with a machine (RFC 6143 7.1 to 7.3.1).
async fn handshake_as_client(
    machine: &mut impl Duplex,
    peer: &str,
    access: Access,
    shared: bool,
) -> anyhow::Result<()> {
    announce(machine, peer, access == Access::View).await?;
    machine.read_exact(&mut [0; GREETING.len()]).await?;
    machine.write_all(GREETING).await?;
    let mut kinds = vec![0; machine.read_u8().await?.into()];
    machine.read_exact(&mut kinds).await?;
    ensure!(kinds.contains(&NONE), "the machine requires a password, or has too many clients");
    machine.write_u8(NONE).await?;
    ensure!(machine.read_u32().await? == 0, "the machine refused the client");
    machine.write_u8(shared.into()).await?;
    Ok(machine.flush().await?)
}

/// Announces a client to a machine at an `announced` socket. The line precedes all other data.
pub async fn announce(
    machine: &mut impl Duplex,
    peer: &str,
    view_only: bool,
) -> std::io::Result<()> {
    let access = if view_only { VIEW_ONLY } else { "" };
    machine.write_all(format!("{access}{peer}\n").as_bytes()).await
}

/// The name of a client, and whether it may only look. The line must be short ASCII.
pub(super) async fn read_announcement(stream: &mut impl Duplex) -> anyhow::Result<(String, bool)> {
    let line = async {
        let mut line = String::new();
        loop {
            match stream.read_u8().await? {
                b'\n' => return anyhow::Ok(line),
                byte @ b' '..=b'~' if line.len() < MAX_LINE => line.push(byte.into()),
                _ => bail!("its first line does not announce a client"),
            }
        }
    };
    let line =
        timeout(INTRODUCTION, line).await.context("it did not announce a client in time")??;
    Ok(match line.strip_prefix(VIEW_ONLY) {
        Some(name) => (name.to_owned(), true),
        None => (line, false),
    })
}

#[cfg(test)]
mod test {
    use super::*;

    async fn announced(line: &[u8]) -> Option<(String, bool)> {
        let (mut near, mut far) = tokio::io::duplex(1024);
        near.write_all(line).await.unwrap();
        drop(near);
        read_announcement(&mut far).await.ok()
    }

    #[tokio::test]
    async fn an_announcement_is_one_short_printable_line() {
        for (line, view_only) in
            [(&b"10.88.0.1 (web)\nRFB"[..], false), (b"view-only 10.88.0.1 (web)\n", true)]
        {
            assert_eq!(announced(line).await, Some(("10.88.0.1 (web)".to_owned(), view_only)));
        }
        for bad in [&b"RFB 003.008"[..], b"a\x1b[2J\n", &[b'x'; 200], b"\xc3\xa4\n", b""] {
            assert_eq!(announced(bad).await, None, "{}", bad.escape_ascii());
        }
    }

    #[tokio::test]
    async fn the_client_is_disconnected_when_the_machine_leaves() {
        let (client, mut screen) = tokio::io::duplex(1024);
        let (relayed, mut machine) = tokio::io::duplex(1024);
        let welcome =
            Welcome { stream: Box::new(client), access: Access::Full, shared: true, security: "" };
        let slot = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        let led = tokio::spawn(Entrant { welcome, slot }.relay("a client", relayed));
        read_announcement(&mut machine).await.unwrap();
        machine.write_all(GREETING).await.unwrap();
        machine.read_exact(&mut [0; GREETING.len()]).await.unwrap();
        machine.write_all(&[1, NONE]).await.unwrap();
        assert_eq!(machine.read_u8().await.unwrap(), NONE);
        machine.write_u32(0).await.unwrap();
        assert_eq!(machine.read_u8().await.unwrap(), 1);
        machine.write_all(b"the last word").await.unwrap();
        drop(machine);
        // The client sends nothing and does not disconnect.
        timeout(HANDSHAKE, led).await.expect("an end").unwrap().unwrap();
        let mut received = Vec::new();
        screen.read_to_end(&mut received).await.unwrap();
        assert_eq!(received, b"the last word");
    }
}
