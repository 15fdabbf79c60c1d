//! The user-mode network: the guest's connections become the pod's own, for pods without
//! `NET_ADMIN` and without `/dev/net/tun`.
//!
//! `vmm` speaks Ethernet over a Unix socket as passt(1) has it, and this is the other end. What the
//! guest sends by TCP, UDP and ICMP leaves by plain sockets of this process: rules for the pod and
//! a mesh's sidecar apply to it as to any other program. It is one thread with tasks: one reads and
//! writes frames, and each flow has one that carries its data. Between the guest and the outside
//! nothing waits without a bound, and a side that does not read holds back the other. Places bound
//! how many tasks and descriptors there are (`quota`).

pub mod checksum;
pub mod connection;
pub mod connections;
pub mod datagrams;
pub mod doors;
pub mod echoes;
pub mod fragments;
pub mod icmp;
pub mod lan;
pub mod link;
pub mod names;
pub mod neighbours;
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
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::Context as _;
use tokio::sync::oneshot;
use tokio::task::{LocalSet, spawn_local};

use self::doors::Doors;
use self::lan::{Lan, Pod};
use self::router::Router;
use super::dns::Local;
use super::relay::Relay;
use crate::descriptors;
use crate::jail;
use crate::net::link::default_gateway;
use crate::settings::Settings;
use crate::settings::value::Value as _;
use crate::settings::words::Ports;

/// How often the guest is told of its IPv6 router: well before it forgets.
const ADVERTISE: Duration = Duration::from_secs(1800);
/// A pause after somebody who could not be accepted, as there are no files left.
const PAUSE: Duration = Duration::from_millis(100);

/// The network, as long as it is there.
#[derive(Debug)]
pub struct User {
    socket: PathBuf,
    mtu: u16,
    said: String,
    /// Dropped to end it.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl User {
    /// Starts it: opens the forwarded ports, and listens for `vmm` in `folder`. The pod's resolvers
    /// are those of `etc/resolv.conf` below `root`.
    ///
    /// # Errors
    ///
    /// When the guest cannot have its address, or the socket cannot be made.
    pub fn start(settings: &Settings, root: &Path, folder: &Path) -> anyhow::Result<Self> {
        if let Some(device) = &settings.network.uplink {
            tracing::warn!(
                "network: DEV={}: in user mode connections go by the pod's routes",
                device.0
            );
        }
        let lan = Lan::new(&settings.network, &Pod::read())?;
        let host = settings.account.host.as_ref().map_or(&settings.pod.app.0, |host| &host.0);
        let local = Local {
            gateway: lan.gateway,
            guest: lan.guest,
            outside: default_gateway(),
            host: host.clone(),
        };
        let relay = Relay::new(local, &root.join("etc"));
        let ports = doors::ports(settings);
        let doors = Doors::open(&ports);
        let socket = folder.join("network.sock");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let entered = runtime.enter();
        let listener = tokio::net::UnixListener::from_std(listen(&socket)?)?;
        let tcp = doors.tcp.into_iter().map(tokio::net::TcpListener::from_std);
        let doors = (tcp.collect::<io::Result<Vec<_>>>()?, doors.udp);
        drop(entered);
        let mtu = lan.mtu;
        let said = format!(
            "user mode: the guest is {}, its gateway and name server {}; forwarded: {}",
            lan.guest,
            lan.gateway,
            Ports(ports).show(),
        );
        let (stop, stopped) = oneshot::channel();
        let thread = Builder::new().name("network".into()).spawn(move || {
            // What the guest sends is read by who has no rights.
            jail::serve();
            let router = Rc::new(Router::new(lan, relay, descriptors::limit()));
            let serve = async {
                // A task like the others: all of them have their turn between two of its own.
                let served = spawn_local(async move { serve(&router, listener, doors).await });
                tokio::select! {
                    _ = served => {}
                    // The other end is dropped when it is to end.
                    _ = stopped => {}
                }
            };
            let tasks = LocalSet::new();
            runtime.block_on(tasks.run_until(serve));
        })?;
        Ok(Self { socket, mtu, said, stop: Some(stop), thread: Some(thread) })
    }

    /// The socket, for `vmm run --device virtio-net,to=passt:SOCKET,mtu=MTU`.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The longest packet, which `vmm` tells the guest.
    #[must_use]
    pub fn mtu(&self) -> u16 {
        self.mtu
    }

    /// What there is, in one line.
    #[must_use]
    pub fn said(&self) -> &str {
        &self.said
    }

    /// Ends it: connections break off, and ports and socket are free.
    pub fn end(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // That it panicked was told where it did.
            thread.join().ok();
            fs::remove_file(&self.socket).ok();
        }
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Listens, for our user alone, in place of what a pod that was killed left there.
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

/// Serves one guest after another, for ever.
async fn serve(
    router: &Rc<Router>,
    listener: tokio::net::UnixListener,
    (tcp, udp): (Vec<tokio::net::TcpListener>, Vec<UdpSocket>),
) {
    for listener in tcp {
        spawn_local(accept(router.clone(), listener));
    }
    for socket in udp {
        let router = router.clone();
        spawn_local(async move { router.datagrams.serve(&router.network, socket).await });
    }
    let network = &router.network;
    if network.lan.v6.is_some() {
        let network = network.clone();
        spawn_local(async move {
            loop {
                tokio::time::sleep(ADVERTISE).await;
                network.advertise();
            }
        });
    }
    loop {
        let say = |error| network.say("vmm", || format!("the socket to vmm: {error}"));
        let (socket, _) = next(async || listener.accept().await, say).await;
        network.plug();
        let outcome = tokio::select! {
            outcome = link::read(&socket, |frame| router.hear(frame)) => outcome,
            outcome = network.link.drain(&socket) => outcome,
        };
        router.unplug();
        if let Err(error) = outcome {
            network.say("link", || format!("the socket to vmm: {error}: it is expected again"));
        }
    }
}

/// Takes connections to a port that is the guest's.
async fn accept(router: Rc<Router>, listener: tokio::net::TcpListener) {
    let Ok(address) = listener.local_addr() else { return };
    loop {
        let say =
            |error| router.network.say("accept", || format!("port {}: {error}", address.port()));
        let (stream, from) = next(async || listener.accept().await, say).await;
        router.connections.accept(&router.network, stream, from, address.port()).await;
    }
}

/// The next who comes. What cannot be now is tried again after a pause.
async fn next<T>(accept: impl AsyncFn() -> io::Result<T>, say: impl Fn(io::Error)) -> T {
    loop {
        match accept().await {
            Ok(came) => return came,
            Err(error) => say(error),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod test {
    use std::cell::{Cell, RefCell};

    use super::*;

    #[tokio::test]
    async fn who_cannot_be_accepted_now_is_accepted_later() {
        let (asked, said) = (Cell::new(0), RefCell::new(Vec::new()));
        let accept = async || match asked.replace(asked.get() + 1) {
            0 | 1 => Err(io::Error::other("no files")),
            _ => Ok("somebody"),
        };
        let came = next(accept, |error| said.borrow_mut().push(error.to_string())).await;
        assert_eq!((came, said.into_inner()), ("somebody", vec!["no files".to_owned(); 2]));
    }
}
