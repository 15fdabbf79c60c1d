//! Accepts connections from browsers: TLS if a certificate is configured, and HTTP.
//!
//! Threats: clients are not authenticated here. At most [`MAX_CONNECTIONS`] are open, and idle ones
//! give way to new ones (`slots`). The head of a request is small and must arrive in time. A
//! connection ends after a while unless it becomes a WebSocket, and the server limits those
//! ([`crate::rfb::MAX_CLIENTS`]).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net;
use tokio::time::timeout;

use super::gate::{Connection, Rules};
use super::sessions::Sessions;
use super::slots::{Slot, Slots};
use super::socket::Farewell;
use super::stage::{ExtraRoutes, Stage};
use super::trusted::{Origins, Proxies};
use super::{Config, routes};
use crate::rfb::listen::{self, keep_alive, pause_after_accept_error};
use crate::rfb::meter::Meter;
use crate::rfb::security::PeerNetwork;
use crate::rfb::{self, tls};
use host::listen::Socket;

const MAX_CONNECTIONS: usize = 256;
/// From one address, unless it is a proxy or this host. Browsers open six.
const MAX_PER_ADDRESS: usize = 64;
const TLS_TIMEOUT: Duration = Duration::from_secs(10);
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Large enough for cookies, which browsers send to all ports of a host.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// Connections are kept alive for this long. Then pending responses have [`CLOSE_TIMEOUT`] left.
const MAX_LIFETIME: Duration = Duration::from_secs(120);
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

pub struct Listener {
    socket: Socket,
    tls: Option<tls::Files>,
    rules: Rules,
    farewell: Farewell,
}

struct Shared {
    router: Router,
    tls: Option<tls::Files>,
    slots: Slots,
    proxies: Proxies,
}

impl Listener {
    /// Opens the socket, and reads passwords and certificates. Connections are accepted by `run`.
    /// Refuses a port that would be open to everybody.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        Self::open(config).with_context(|| option_name(config))
    }

    fn open(config: &Config) -> anyhow::Result<Self> {
        let address = config.address.as_ref().context("HOST:PORT, unix:PATH or fd:N is missing")?;
        let files = [&config.password, &config.view_password];
        let passwords = listen::passwords(files, config.user.as_ref(), config.auth)?;
        let tls = tls::Files::new(config.tls_cert.as_ref(), config.tls_key.as_ref())?;
        let origin = config.origin.as_deref().unwrap_or_default();
        let origins = Origins::read(origin).with_context(|| format!("origin={origin}"))?;
        let open = config.auth == listen::Auth::None;
        let needed = passwords.are_needed();
        let unguarded = !open && !needed;
        let socket = Socket::new(address, unguarded)?;
        if let (Socket::Tcp(socket), None, true) = (&socket, &tls, needed) {
            let far = socket.local_addr().is_ok_and(|it| !it.ip().to_canonical().is_loopback());
            if far && config.proxy.is_none() {
                let (option, tls) = (option_name(config), config.option_names.tls);
                tracing::warn!("{option}: without TLS, others can read passwords: {tls}");
            }
        }
        let rules = Rules {
            sessions: Arc::new(Sessions::new(&passwords)),
            passwords,
            open,
            view_only: config.view_only,
            any_host: config.any_host,
            origins,
            proxies: config.proxy.clone().unwrap_or_default(),
            option_names: config.option_names.clone(),
            name: listen::title(config.name.as_deref())?,
        };
        Ok(Self { socket, tls, rules, farewell: Farewell::default() })
    }

    pub fn farewell(&self) -> Farewell {
        self.farewell.clone()
    }

    pub fn sessions(&self) -> Arc<Sessions> {
        self.rules.sessions.clone()
    }

    /// The title of the window.
    pub fn name(&self) -> &str {
        &self.rules.name
    }

    /// The URL for clients, with the port that was allocated.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        match &self.socket {
            Socket::Tcp(socket) => {
                socket.local_addr().map_or("TCP".into(), |it| format!("{scheme}://{it}/"))
            }
            Socket::Unix(_) => "a Unix socket".into(),
        }
    }

    /// Accepts connections for as long as it is polled.
    pub async fn run(self, stage: Arc<dyn Stage>, extra: ExtraRoutes) -> anyhow::Result<()> {
        let proxies = self.rules.proxies.clone();
        let router = routes::router(stage, self.rules, self.farewell, extra);
        let slots = Slots::new(MAX_CONNECTIONS, MAX_PER_ADDRESS);
        let shared = Arc::new(Shared { router, tls: self.tls, slots, proxies });
        match self.socket {
            Socket::Tcp(socket) => {
                socket.set_nonblocking(true)?;
                let socket = net::TcpListener::from_std(socket)?;
                loop {
                    match socket.accept().await {
                        Ok((stream, peer)) => {
                            // The echo of a key press is one small packet.
                            stream.set_nodelay(true).ok();
                            keep_alive(&stream).ok();
                            tokio::spawn(shared.clone().tcp(stream, peer.ip()));
                        }
                        Err(error) => pause_after_accept_error(&error).await,
                    }
                }
            }
            Socket::Unix(bound) => {
                let socket = net::UnixListener::from_std(bound.listener.try_clone()?)?;
                loop {
                    match socket.accept().await {
                        Ok((stream, _)) => {
                            tokio::spawn(shared.clone().unix(stream));
                        }
                        Err(error) => pause_after_accept_error(&error).await,
                    }
                }
            }
        }
    }
}

impl Shared {
    async fn tcp(self: Arc<Self>, mut stream: net::TcpStream, address: IpAddr) {
        let network = if self.proxies.contains(address) {
            PeerNetwork::Local
        } else {
            PeerNetwork::of(address)
        };
        let Some(slot) = self.slots.acquire(network) else {
            return tracing::debug!("web: too many connections: refused {address}");
        };
        let serve = async {
            if self.tls.is_some()
                && timeout(TLS_TIMEOUT, speaks_http(&stream)).await.unwrap_or(false)
            {
                timeout(TLS_TIMEOUT, explain(&mut stream)).await.ok();
                return;
            }
            let stream = Meter::new(slot.watch(stream));
            self.connection(Box::new(stream), Some(address), &slot).await;
        };
        until_evicted(&slot, serve).await;
    }

    async fn unix(self: Arc<Self>, stream: net::UnixStream) {
        let Some(slot) = self.slots.acquire(PeerNetwork::Local) else {
            return tracing::debug!("web: too many connections: refused one at the Unix socket");
        };
        let stream = Meter::new(slot.watch(stream));
        until_evicted(&slot, self.connection(Box::new(stream), None, &slot)).await;
    }

    /// Serves one connection until it ends or becomes a WebSocket.
    async fn connection(&self, stream: rfb::Wire, address: Option<IpAddr>, slot: &Slot) {
        let (stream, tls): (rfb::Wire, bool) = match &self.tls {
            Some(files) => match timeout(TLS_TIMEOUT, files.acceptor().accept(stream)).await {
                Ok(Ok(stream)) => (Box::new(stream), true),
                Ok(Err(error)) => return tracing::debug!("web: TLS handshake failed: {error}"),
                Err(_) => return tracing::debug!("web: TLS handshake timed out"),
            },
            None => (stream, false),
        };
        let connection = Connection { address, tls };
        let service = TowerToHyperService::new(self.router.clone());
        let service = service_fn(|mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(connection);
            let (request, active) = slot.request(request);
            let answer = hyper::service::Service::call(&service, request);
            async move { answer.await.map(|it| active.until_sent(it)) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_HEAD_BYTES)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        let mut connection = std::pin::pin!(connection);
        if timeout(MAX_LIFETIME, &mut connection).await.is_err() {
            connection.as_mut().graceful_shutdown();
            timeout(CLOSE_TIMEOUT, connection).await.ok();
        }
    }
}

/// Serves a connection until it ends or its slot is given to another connection.
async fn until_evicted(slot: &Slot, serve: impl Future<Output = ()>) {
    tokio::select! {
        () = serve => {}
        () = slot.evicted() => tracing::debug!("web: closed an idle connection for a new one"),
    }
}

/// The option that sets the listening address, for messages.
fn option_name(config: &Config) -> String {
    match (&config.option_names.address, &config.address) {
        (Some(option), _) => option.clone(),
        (None, Some(address)) => format!("--web {address}"),
        (None, None) => "--web".into(),
    }
}

/// Whether the client sends plain HTTP to a TLS port.
async fn speaks_http(stream: &net::TcpStream) -> bool {
    let mut first = [0];
    let count = stream.peek(&mut first).await;
    count.is_ok_and(|count| count == 1) && first[0].is_ascii_uppercase()
}

/// Answers plain HTTP on a TLS port with an error that names the right scheme.
async fn explain(stream: &mut net::TcpStream) -> std::io::Result<()> {
    let text = "This port uses TLS: its address begins with https://\n";
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{text}",
        text.len()
    );
    // Closing with unread input makes the kernel send a reset, which discards our answer.
    let _rest = stream.read(&mut [0; 4096]).await?;
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}
