//! The user-mode network: the guest's connections become the pod's own, for pods without
//! `NET_ADMIN` and without `/dev/net/tun`.
//!
//! `vmm` sends Ethernet frames over a Unix socket in the protocol of passt(1), and this is the
//! other end. TCP, UDP and ICMP of the guest leave through plain sockets of this process, so that
//! network policies and the sidecar of a mesh apply to them as to any other program. One thread
//! runs all tasks: one reads and writes frames, and each flow has one that carries its data. All
//! queues between the guest and the outside are bounded, and a side that does not read slows down
//! the other. `quota` limits the number of tasks and descriptors.

pub mod checksum;
pub mod connection;
pub mod connections;
pub mod datagrams;
pub mod echoes;
pub mod forwarding;
pub mod fragments;
pub mod icmp;
pub mod lan;
pub mod link;
pub mod name_server;
pub mod neighbors;
pub mod network;
pub mod packet;
pub mod quota;
pub mod router;
pub mod segment;
pub mod service;
pub mod tcp;

use std::fs;
use std::io;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::oneshot;
use tokio::task::{LocalSet, spawn_local};

use self::forwarding::Listeners;
use self::lan::{Lan, PodAddresses};
use self::link::Traffic;
use self::router::Router;
use super::dns::LocalNames;
use super::relay::Relay;
use crate::descriptors;
use crate::jail;
use crate::net::link::default_gateway;
use crate::settings::Settings;
use crate::settings::value::Value as _;
use crate::settings::words::Ports;
use crate::shared_folder::Connector;

/// The interval of IPv6 router advertisements, well below their lifetime.
const ADVERTISE: Duration = Duration::from_secs(1800);
/// The pause after a connection could not be accepted, for example for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Dropping it ends the network.
#[derive(Debug)]
pub struct UserNetwork {
    pub socket: PathBuf,
    pub mtu: u16,
    pub summary: String,
    /// The addresses that the guest knows, for another pod.
    pub address: String,
    pub traffic: Arc<Traffic>,
    /// Dropped to end the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl UserNetwork {
    /// Opens the forwarded ports, and listens for `vmm` in `folder`. The pod's resolvers are those
    /// of `etc/resolv.conf` below `root`.
    pub fn start(
        settings: &Settings,
        root: &Path,
        folder: &Path,
        share: Option<Connector>,
    ) -> anyhow::Result<Self> {
        if let Some(device) = &settings.network.uplink {
            tracing::warn!(
                "network: DEV={} has no effect: in user mode, connections follow the pod's routes",
                device.0
            );
        }
        let lan = Lan::new(&settings.network, &PodAddresses::read())?;
        let host = settings.account.host.as_ref().map_or(&settings.pod.app.0, |host| &host.0);
        let local = LocalNames {
            gateway: lan.gateway,
            guest: lan.guest,
            default_gateway: default_gateway(),
            host: host.clone(),
        };
        let relay = Relay::new(local, &root.join("etc"));
        let ports = forwarding::ports(settings);
        let listeners = Listeners::open(&ports);
        let socket = folder.join("network.sock");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let entered = runtime.enter();
        let listener = tokio::net::UnixListener::from_std(listen(&socket)?)?;
        let tcp = listeners.tcp.into_iter().map(tokio::net::TcpListener::from_std);
        let forwarded = Forwarded { tcp: tcp.collect::<io::Result<_>>()?, udp: listeners.udp };
        drop(entered);
        let (mtu, address) = (lan.mtu, lan.kept().to_string());
        let summary = format!(
            "user mode: the guest is {}, its gateway and name server {}; forwarded: {}",
            lan.guest,
            lan.gateway,
            Ports(ports).show(),
        );
        let traffic = Arc::<Traffic>::default();
        let counts = traffic.clone();
        let (stop, stopped) = oneshot::channel();
        let thread = Builder::new().name("network".into()).spawn(move || {
            // Drop privileges before the first frame of the guest is read.
            jail::serve();
            let router = Rc::new(Router::new(lan, relay, share, descriptors::limit()));
            router.network.link.count_in(counts);
            let serve = async {
                // As a task of its own, it takes turns with the others.
                let served = spawn_local(async move { serve(&router, listener, forwarded).await });
                tokio::select! {
                    _ = served => {}
                    // The sender is dropped to end the network.
                    _ = stopped => {}
                }
            };
            let tasks = LocalSet::new();
            runtime.block_on(tasks.run_until(serve));
        })?;
        let (stop, thread) = (Some(stop), Some(thread));
        Ok(Self { socket, mtu, summary, address, traffic, stop, thread })
    }

    /// Ends the network: connections break, and ports and socket are freed.
    pub fn end(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic was already reported by its thread.
            thread.join().ok();
            fs::remove_file(&self.socket).ok();
        }
    }
}

impl Drop for UserNetwork {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Listens, for our user alone, in place of the socket that a killed pod left.
fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    let bind = || {
        if fs::symlink_metadata(path).is_ok() {
            fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        io::Result::Ok(listener)
    };
    bind().with_context(|| path.display().to_string())
}

struct Forwarded {
    tcp: Vec<tokio::net::TcpListener>,
    udp: Vec<UdpSocket>,
}

/// Serves one guest after another.
async fn serve(router: &Rc<Router>, listener: tokio::net::UnixListener, forwarded: Forwarded) {
    for listener in forwarded.tcp {
        spawn_local(accept(router.clone(), listener));
    }
    for socket in forwarded.udp {
        let router = router.clone();
        spawn_local(async move { router.datagrams.serve(&router.network, socket).await });
    }
    let network = &router.network;
    if network.lan.v6.is_some() {
        let network = network.clone();
        spawn_local(async move {
            loop {
                tokio::time::sleep(ADVERTISE).await;
                // The lifetime of advertisements stands still while the guest sleeps.
                if !network.link.is_quiet() {
                    network.advertise();
                }
            }
        });
    }
    loop {
        let warn = |error| network.warn_once("vmm", || format!("the socket to vmm: {error}"));
        let (socket, _) = next(async || listener.accept().await, warn).await;
        network.plug();
        let outcome = tokio::select! {
            outcome = link::read(&socket, |frame| {
                network.link.count(frame.len());
                router.handle(frame);
            }) => outcome,
            outcome = network.link.drain(&socket) => outcome,
        };
        router.unplug();
        if let Err(error) = outcome {
            network
                .warn_once("link", || format!("the socket to vmm: {error}: waiting for vmm again"));
        }
    }
}

async fn accept(router: Rc<Router>, listener: tokio::net::TcpListener) {
    let Ok(address) = listener.local_addr() else { return };
    loop {
        let warn = |error| {
            router.network.warn_once("accept", || format!("port {}: {error}", address.port()));
        };
        let (stream, from) = next(async || listener.accept().await, warn).await;
        router.connections.accept(&router.network, stream, from, address.port()).await;
    }
}

/// Accepts the next connection. After an error it tries again, with a pause.
async fn next<T>(accept: impl AsyncFn() -> io::Result<T>, warn: impl Fn(io::Error)) -> T {
    loop {
        match accept().await {
            Ok(accepted) => return accepted,
            Err(error) => warn(error),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod test {
    use std::cell::{Cell, RefCell};

    use super::*;

    #[tokio::test]
    async fn a_failed_accept_is_retried() {
        let (attempts, errors) = (Cell::new(0), RefCell::new(Vec::new()));
        let accept = async || match attempts.replace(attempts.get() + 1) {
            0 | 1 => Err(io::Error::other("no files")),
            _ => Ok("a client"),
        };
        let accepted = next(accept, |error| errors.borrow_mut().push(error.to_string())).await;
        assert_eq!((accepted, errors.into_inner()), ("a client", vec!["no files".to_owned(); 2]));
    }
}
