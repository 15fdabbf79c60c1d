//! The pod's servers: DHCP, DNS and the shared folder on the tap, and on the loopback a relay to
//! the guest's ports, for clients inside of the pod (`kubectl port-forward`, probes by `exec`).
//!
//! Threats: guest and clients may open any number of connections and send nothing. Each kind of
//! connection has a limit, and the name server closes idle connections.

use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::set_ipv6_v6only;
use screen::web::stage::{ConnectionLimit, PeerNetwork, keep_alive};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::choice::{OLD_GATEWAY, Subnet};
use crate::net::dhcp::{self, CLIENT_PORT, Config, SERVER_PORT};
use crate::net::dns::{self, Transport};
use crate::net::relay::{Relay, read_framed, write_framed};
use crate::shared_folder::{self, Connector};
use crate::status::{Failure, Status};

const MAX_QUESTIONS: usize = 512;
const MAX_DNS_CONNECTIONS: usize = 32;
/// Per port.
const MAX_FORWARDED: usize = 512;
const BACKLOG: u32 = 1024;
/// For idle connections to the name server, and for connecting to the guest.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after an error, which may repeat immediately.
const RETRY_DELAY: Duration = Duration::from_millis(100);
/// The maximum size of a DHCP message, in bytes: one packet.
const MAX_MESSAGE: usize = 1500;

/// The sockets. All are opened before the guest starts, so that errors are reported early.
pub(super) struct Service {
    guest: Ipv4Addr,
    gateway: Ipv4Addr,
    dhcp: UdpSocket,
    dns: Arc<UdpSocket>,
    dns_tcp: TcpListener,
    forwarded: Vec<TcpListener>,
    share: Option<(Connector, Vec<TcpListener>)>,
}

impl Service {
    pub(super) async fn open(
        tap: &str,
        subnet: Subnet,
        ports: &BTreeSet<u16>,
    ) -> anyhow::Result<Self> {
        let udp = |ip: Ipv4Addr, port: u16| async move {
            UdpSocket::bind((ip, port)).await.map_err(|error| refused(ip, port, &error))
        };
        // Broadcasts of a guest without an address reach only sockets without an address.
        let dhcp = udp(Ipv4Addr::UNSPECIFIED, SERVER_PORT).await?;
        let on_tap = dhcp.bind_device(Some(tap.as_bytes()));
        let on_tap = on_tap.and_then(|()| dhcp.set_broadcast(true));
        on_tap.map_err(|error| {
            let sentence = format!(
                "DHCP cannot be bound to {tap}: {error}: add --cap-add NET_RAW, or set NETWORK=user"
            );
            Failure::new(Status::Network, sentence)
        })?;
        let dns = Arc::new(udp(subnet.gateway, dns::PORT).await?);
        let dns_tcp = TcpListener::bind((subnet.gateway, dns::PORT)).await;
        let dns_tcp = dns_tcp.map_err(|error| refused(subnet.gateway, dns::PORT, &error))?;
        let mut forwarded = Vec::new();
        for port in ports {
            forwarded.extend(listen(*port).await);
        }
        let Subnet { guest, gateway, .. } = subnet;
        Ok(Self { guest, gateway, dhcp, dns, dns_tcp, forwarded, share: None })
    }

    /// Serves the shared folder at the gateway's address, and at its old one if it has that. The
    /// guest can do without.
    pub(super) async fn share(&mut self, connector: Connector, old: bool) {
        let mut listeners = Vec::new();
        let addresses = [self.gateway].into_iter().chain(old.then_some(OLD_GATEWAY));
        for address in addresses.collect::<BTreeSet<_>>() {
            match TcpListener::bind((address, shared_folder::PORT)).await {
                Ok(listener) => listeners.push(listener),
                Err(error) => {
                    let port = shared_folder::PORT;
                    tracing::warn!("the shared folder: port {port} of {address}: {error}");
                }
            }
        }
        self.share = Some((connector, listeners));
    }

    /// Serves until the future is dropped.
    pub(super) async fn run(&self, config: &Config, relay: &Arc<Relay>) {
        let forwarded = self.forwarded.iter().map(|listener| self.forward(listener));
        let forwarded = futures_util::future::join_all(forwarded);
        tokio::join!(
            self.serve_dhcp(config),
            self.serve_dns(relay),
            self.serve_dns_tcp(relay),
            self.serve_share(),
            forwarded
        );
    }

    async fn serve_dhcp(&self, config: &Config) {
        let mut message = [0; MAX_MESSAGE];
        loop {
            let Some((length, _)) = or_pause(self.dhcp.recv_from(&mut message)).await else {
                continue;
            };
            let Some(answer) = dhcp::answer(config, &message[..length]) else { continue };
            let sent = self.dhcp.send_to(&answer.payload, (answer.to, CLIENT_PORT)).await;
            if let Err(error) = sent {
                tracing::warn!("DHCP: {}: {error}", answer.to);
            }
        }
    }

    async fn serve_dns(&self, relay: &Arc<Relay>) {
        let mut tasks = JoinSet::new();
        let mut message = vec![0; usize::from(u16::MAX)];
        loop {
            while tasks.try_join_next().is_some() {}
            let Some((length, from)) = or_pause(self.dns.recv_from(&mut message)).await else {
                continue;
            };
            if from.ip() != self.guest || tasks.len() >= MAX_QUESTIONS {
                continue;
            }
            let (relay, dns, message) =
                (relay.clone(), self.dns.clone(), message[..length].to_vec());
            tasks.spawn(async move {
                if let Some(answer) = relay.answer(&message, Transport::Udp).await {
                    dns.send_to(&answer, from).await.ok();
                }
            });
        }
    }

    async fn serve_dns_tcp(&self, relay: &Arc<Relay>) {
        let (guest, relay) = (IpAddr::V4(self.guest), relay.clone());
        accept(&self.dns_tcp, MAX_DNS_CONNECTIONS, move |stream, from| {
            let relay = relay.clone();
            async move {
                if from.ip() == guest {
                    answer_all(stream, &relay).await;
                }
            }
        })
        .await;
    }

    /// Passes connections of the guest to the server of the shared folder.
    async fn serve_share(&self) {
        let Some((connector, listeners)) = &self.share else { return };
        let all = listeners.iter().map(|listener| async {
            loop {
                let Some((stream, from)) = or_pause(listener.accept()).await else { continue };
                if from.ip() != IpAddr::V4(self.guest) {
                    continue;
                }
                if let Err(error) = pass(connector, stream) {
                    tracing::debug!("the shared folder: {error}");
                }
            }
        });
        futures_util::future::join_all(all).await;
    }

    /// Forwards connections of a listener to the same port of the guest.
    async fn forward(&self, listener: &TcpListener) {
        let Ok(port) = listener.local_addr().map(|address| address.port()) else { return };
        let guest = SocketAddr::new(self.guest.into(), port);
        // One host leaves room for others.
        let limit = ConnectionLimit::new(MAX_FORWARDED, MAX_FORWARDED / 2);
        accept(listener, MAX_FORWARDED, move |mut stream, from| {
            let place = limit.acquire(PeerNetwork::of(from.ip()));
            async move {
                if place.is_none() {
                    return;
                }
                // The guest does not notice that a client has vanished: our kernel answers it.
                keep_alive(&stream).ok();
                if let Ok(Ok(mut to)) = timeout(TIMEOUT, TcpStream::connect(guest)).await {
                    // Small packets such as keystrokes are sent immediately.
                    stream.set_nodelay(true).and_then(|()| to.set_nodelay(true)).ok();
                    copy_bidirectional(&mut stream, &mut to).await.ok();
                }
                drop(place);
            }
        })
        .await;
    }
}

fn pass(connector: &Connector, stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // A guest that was reset knows nothing of its connections, and their files stay open.
    keep_alive(&stream)?;
    let stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    connector.pass(stream)
}

fn refused(ip: Ipv4Addr, port: u16, error: &io::Error) -> anyhow::Error {
    let way_out = match error.kind() {
        io::ErrorKind::PermissionDenied => "add --cap-add NET_BIND_SERVICE",
        io::ErrorKind::AddrInUse => "another program in the pod uses it: stop that program",
        _ => "check the pod's network",
    };
    let sentence =
        format!("port {port} of {ip} for the guest: {error}: {way_out}, or set NETWORK=user");
    Failure::new(Status::Network, sentence)
}

/// Listens on a port of the loopback, and of all IPv6 addresses if there are some. No rule forwards
/// from these to the guest. Another program in the pod may use the port.
async fn listen(port: u16) -> Vec<TcpListener> {
    let loopback = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
    if let Err(error) = &loopback {
        tracing::warn!(
            "port {port} of the guest is not forwarded from the pod's loopback: {error}"
        );
    }
    // Not every pod has IPv6.
    loopback.into_iter().chain(listen_v6(port)).collect()
}

fn listen_v6(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    set_ipv6_v6only(&socket, true)?;
    socket.set_reuseaddr(true)?;
    socket.bind((Ipv6Addr::UNSPECIFIED, port).into())?;
    socket.listen(BACKLOG)
}

/// The result, or nothing after an error and a pause.
async fn or_pause<T>(wait: impl Future<Output = io::Result<T>>) -> Option<T> {
    match wait.await {
        Ok(result) => Some(result),
        Err(error) => {
            tracing::debug!("network of the guest: {error}");
            sleep(RETRY_DELAY).await;
            None
        }
    }
}

/// Serves connections, up to `limit` at the same time, until the future is dropped. All connections
/// end with it.
async fn accept<T: Future<Output = ()> + Send + 'static>(
    listener: &TcpListener,
    limit: usize,
    serve: impl Fn(TcpStream, SocketAddr) -> T,
) {
    let permits = Arc::new(Semaphore::new(limit));
    let mut tasks = JoinSet::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let Some((stream, from)) = or_pause(listener.accept()).await else { continue };
        let served = serve(stream, from);
        tasks.spawn(async move {
            served.await;
            drop(permit);
        });
    }
}

/// Answers the questions of a DNS connection, one after the other.
async fn answer_all(mut stream: TcpStream, relay: &Relay) {
    while let Ok(Ok(message)) = timeout(TIMEOUT, read_framed(&mut stream)).await {
        let Some(answer) = relay.answer(&message, Transport::Tcp).await else { return };
        if !matches!(timeout(TIMEOUT, write_framed(&mut stream, &answer)).await, Ok(Ok(()))) {
            return;
        }
    }
}
