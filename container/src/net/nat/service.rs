//! What the pod serves on the tap and on its own loopback: addresses, names, and a way to the
//! guest's ports for those who are in the pod already (`kubectl port-forward`, probes by `exec`).
//!
//! Threats: guest and clients may open connections without end and say nothing. Each kind has a
//! number that it cannot exceed, and who is silent at the name server is shown out.

use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::set_ipv6_v6only;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::choice::Subnet;
use crate::net::dhcp::{self, CLIENT_PORT, Config, SERVER_PORT};
use crate::net::dns::{self, Way};
use crate::net::relay::{Relay, read_framed, write_framed};
use crate::status::{Failure, Status};

/// Questions by UDP, connections to the name server, and connections to one port of the guest, at
/// a time.
const QUESTIONS: usize = 512;
const ASKERS: usize = 32;
const VISITORS: usize = 512;
/// Connections that wait to be let in.
const BACKLOG: u32 = 1024;
/// How long a connection to the name server may be silent, and one to the guest may take to begin.
const SILENCE: Duration = Duration::from_secs(10);
/// After an error that comes at once again.
const BREATH: Duration = Duration::from_millis(100);
/// The longest message of a client: what fits a packet.
const MESSAGE: usize = 1500;

/// The sockets, which are open from the beginning: who cannot be served is told before the guest
/// starts.
pub(super) struct Service {
    guest: Ipv4Addr,
    addresses: UdpSocket,
    names: Arc<UdpSocket>,
    askers: TcpListener,
    doors: Vec<TcpListener>,
}

impl Service {
    /// Opens them.
    pub(super) async fn open(
        tap: &str,
        subnet: Subnet,
        ports: &BTreeSet<u16>,
    ) -> anyhow::Result<Self> {
        let udp = |ip: Ipv4Addr, port: u16| async move {
            UdpSocket::bind((ip, port)).await.map_err(|error| refused(ip, port, &error))
        };
        // A guest that has no address yet reaches only who listens everywhere.
        let addresses = udp(Ipv4Addr::UNSPECIFIED, SERVER_PORT).await?;
        let on_tap = addresses.bind_device(Some(tap.as_bytes()));
        let on_tap = on_tap.and_then(|()| addresses.set_broadcast(true));
        on_tap.map_err(|error| {
            let sentence = format!(
                "DHCP cannot be bound to {tap}: {error}: add --cap-add NET_RAW, or say NETWORK=user"
            );
            Failure::new(Status::Network, sentence)
        })?;
        let names = Arc::new(udp(subnet.gateway, dns::PORT).await?);
        let askers = TcpListener::bind((subnet.gateway, dns::PORT)).await;
        let askers = askers.map_err(|error| refused(subnet.gateway, dns::PORT, &error))?;
        let mut doors = Vec::new();
        for port in ports {
            doors.extend(open_doors(*port).await);
        }
        Ok(Self { guest: subnet.guest, addresses, names, askers, doors })
    }

    /// Serves until it is dropped.
    pub(super) async fn run(&self, config: &Config, relay: &Arc<Relay>) {
        let doors = self.doors.iter().map(|door| self.let_in(door));
        let doors = futures_util::future::join_all(doors);
        tokio::join!(self.lease(config), self.tell(relay), self.hear(relay), doors);
    }

    /// Gives the guest its address.
    async fn lease(&self, config: &Config) {
        let mut message = [0; MESSAGE];
        loop {
            let Some((length, _)) = lasting(self.addresses.recv_from(&mut message)).await else {
                continue;
            };
            let Some(answer) = dhcp::answer(config, &message[..length]) else { continue };
            let sent = self.addresses.send_to(&answer.payload, (answer.to, CLIENT_PORT)).await;
            if let Err(error) = sent {
                tracing::warn!("DHCP: {}: {error}", answer.to);
            }
        }
    }

    /// Answers questions for names by UDP.
    async fn tell(&self, relay: &Arc<Relay>) {
        let mut tasks = JoinSet::new();
        let mut message = vec![0; usize::from(u16::MAX)];
        loop {
            while tasks.try_join_next().is_some() {}
            let Some((length, from)) = lasting(self.names.recv_from(&mut message)).await else {
                continue;
            };
            if from.ip() != self.guest || tasks.len() >= QUESTIONS {
                continue;
            }
            let (relay, names, message) =
                (relay.clone(), self.names.clone(), message[..length].to_vec());
            tasks.spawn(async move {
                if let Some(answer) = relay.answer(&message, Way::Datagram).await {
                    names.send_to(&answer, from).await.ok();
                }
            });
        }
    }

    /// Answers questions for names by TCP.
    async fn hear(&self, relay: &Arc<Relay>) {
        let (guest, relay) = (IpAddr::V4(self.guest), relay.clone());
        accept(&self.askers, ASKERS, move |stream, from| {
            let relay = relay.clone();
            async move {
                if from.ip() == guest {
                    converse(stream, &relay).await;
                }
            }
        })
        .await;
    }

    /// Leads connections to a port of the loopback to the same port of the guest.
    async fn let_in(&self, door: &TcpListener) {
        let Ok(port) = door.local_addr().map(|address| address.port()) else { return };
        let guest = SocketAddr::new(self.guest.into(), port);
        accept(door, VISITORS, move |mut stream, _| async move {
            if let Ok(Ok(mut to)) = timeout(SILENCE, TcpStream::connect(guest)).await {
                // Small packets at once: a keystroke is one.
                stream.set_nodelay(true).and_then(|()| to.set_nodelay(true)).ok();
                copy_bidirectional(&mut stream, &mut to).await.ok();
            }
        })
        .await;
    }
}

/// Why a port cannot be had.
fn refused(ip: Ipv4Addr, port: u16, error: &io::Error) -> anyhow::Error {
    let way_out = match error.kind() {
        io::ErrorKind::PermissionDenied => "add --cap-add NET_BIND_SERVICE",
        io::ErrorKind::AddrInUse => "another program in the pod has it: end that",
        _ => "look at the pod's network",
    };
    let sentence =
        format!("{ip}, port {port}, for the guest: {error}: {way_out}, or say NETWORK=user");
    Failure::new(Status::Network, sentence)
}

/// A port of the loopback, and of all addresses of version 6 where there are some: no rule leads
/// from there to the guest. It may be a program's of the pod.
async fn open_doors(port: u16) -> Vec<TcpListener> {
    let loopback = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
    if let Err(error) = &loopback {
        tracing::warn!(
            "port {port} of the guest is not on the pod's loopback (port-forward): {error}"
        );
    }
    // Not every pod has version 6.
    loopback.into_iter().chain(open_v6(port)).collect()
}

fn open_v6(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    set_ipv6_v6only(&socket, true)?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv6Addr::UNSPECIFIED, port).into())?;
    socket.listen(BACKLOG)
}

/// What came, or nothing after an error, and then not at once.
async fn lasting<T>(wait: impl Future<Output = io::Result<T>>) -> Option<T> {
    match wait.await {
        Ok(came) => Some(came),
        Err(error) => {
            tracing::debug!("network of the guest: {error}");
            sleep(BREATH).await;
            None
        }
    }
}

/// Takes connections, so many at a time, until it is dropped: they end with it.
async fn accept<T: Future<Output = ()> + Send + 'static>(
    listener: &TcpListener,
    most: usize,
    serve: impl Fn(TcpStream, SocketAddr) -> T,
) {
    let places = Arc::new(Semaphore::new(most));
    let mut tasks = JoinSet::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Some((stream, from)) = lasting(listener.accept()).await else { continue };
        let served = serve(stream, from);
        tasks.spawn(async move {
            served.await;
            drop(place);
        });
    }
}

/// One question after the other.
async fn converse(mut stream: TcpStream, relay: &Relay) {
    while let Ok(Ok(message)) = timeout(SILENCE, read_framed(&mut stream)).await {
        let Some(answer) = relay.answer(&message, Way::Stream).await else { return };
        if !matches!(timeout(SILENCE, write_framed(&mut stream, &answer)).await, Ok(Ok(()))) {
            return;
        }
    }
}
