//! A TCP connection: copies bytes between the guest and the other end: a socket of the pod, the
//! gateway's name server, or the server of the shared folder.
//!
//! A side that does not read slows down the other: buffers in between are bounded (`tcp`), and the
//! TCP windows on both sides close.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, sockopt};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio::sync::Notify;

use super::icmp::IcmpError;
use super::name_server::NameServer;
use super::network::Network;
use super::packet::{Pair, Payload, TCP};
use super::segment::{CHECKSUM, Segment};
use super::tcp::{State, Tcp};
use crate::shared_folder::Connector;

/// The time after which empty buffers of an idle connection are freed.
const IDLE_BUFFER_TIMEOUT: Duration = Duration::from_secs(5);

/// The side that opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The guest, to an outside host.
    Guest,
    /// The guest, to the gateway's name server.
    NameServer,
    /// The guest, to the shared folder at the gateway.
    Share,
    /// An outside host, identified by this address.
    Host(IpAddr),
}

#[derive(Debug)]
pub struct Connection {
    pub pair: Pair,
    pub origin: Origin,
    tcp: RefCell<Tcp>,
    wake: Notify,
    /// The last time that data was sent in either direction.
    pub used: Cell<Instant>,
}

pub enum Remote {
    /// An outside host to connect to. ICMP errors quote these bytes of the guest's packet.
    Connect(Vec<u8>),
    Connected(TcpStream),
    NameServer,
    Share(Connector),
}

/// The connected other end.
enum Stream<'a> {
    Socket(TcpStream),
    NameServer(&'a NameServer),
    Share(UnixStream),
}

impl Stream<'_> {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => stream.try_write(bytes),
            Self::NameServer(names) => names.try_write(bytes),
            Self::Share(stream) => stream.try_write(bytes),
        }
    }

    fn try_read_buf(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => stream.try_read_buf(buffer),
            Self::NameServer(names) => names.try_read_buf(buffer),
            Self::Share(stream) => stream.try_read_buf(buffer),
        }
    }

    async fn readable(&self) {
        match self {
            // After an error, the next read returns it.
            Self::Socket(stream) => drop(stream.readable().await),
            Self::NameServer(names) => names.readable().await,
            Self::Share(stream) => drop(stream.readable().await),
        }
    }

    async fn writable(&self) {
        match self {
            Self::Socket(stream) => drop(stream.writable().await),
            Self::NameServer(names) => names.writable().await,
            Self::Share(stream) => drop(stream.writable().await),
        }
    }

    /// Ends the data to the other end.
    fn shutdown(&self) {
        match self {
            Self::Socket(stream) => {
                // The connection may have ended already.
                rustix::net::shutdown(stream, Shutdown::Write).ok();
            }
            Self::NameServer(names) => names.shutdown(),
            Self::Share(stream) => {
                rustix::net::shutdown(stream, Shutdown::Write).ok();
            }
        }
    }
}

struct Interests {
    read: bool,
    write: bool,
    /// Room on the link to the guest.
    room: bool,
    due: Option<Instant>,
}

impl Connection {
    pub fn new(pair: Pair, origin: Origin, tcp: Tcp) -> Self {
        let used = Cell::new(Instant::now());
        Self { pair, origin, tcp: RefCell::new(tcp), wake: Notify::new(), used }
    }

    pub fn handle(&self, segment: &Segment<'_>, now: Instant) {
        self.used.set(now);
        self.tcp.borrow_mut().handle(segment, now);
        self.wake.notify_one();
    }

    pub fn abort(&self) {
        self.tcp.borrow_mut().abort();
        self.wake.notify_one();
    }

    pub async fn run(&self, network: &Rc<Network>, remote: Remote) {
        let stream = match remote {
            Remote::Connected(stream) => {
                self.tcp.borrow_mut().connected();
                Some(stream)
            }
            Remote::Connect(packet) => self.connect(network, &packet).await,
            Remote::NameServer => {
                // Boxed, so that the futures of other connections do not need its memory.
                Box::pin(self.serve_names(network)).await;
                None
            }
            Remote::Share(connector) => {
                self.share(network, &connector).await;
                None
            }
        };
        if let Some(stream) = stream {
            // The connection also works without these options.
            stream.set_nodelay(true).ok();
            sockopt::set_socket_keepalive(&stream, true).ok();
            let stream = Stream::Socket(stream);
            let in_order = self.relay(network, &stream).await;
            if let (false, Stream::Socket(stream)) = (in_order, &stream) {
                // The peer must see a reset, because the connection did not end in order.
                sockopt::set_socket_linger(stream, Some(Duration::ZERO)).ok();
            }
        }
        self.emit(network);
    }

    /// Serves the gateway's name server, within this task.
    async fn serve_names(&self, network: &Rc<Network>) {
        self.tcp.borrow_mut().connected();
        let names = NameServer::default();
        let stream = Stream::NameServer(&names);
        let serve = async {
            names.serve(&network.relay).await;
            // `relay` still has to send the end to the guest.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = self.relay(network, &stream) => {}
            () = serve => {}
        }
    }

    /// Passes the other end of a socket to the server of the shared folder.
    async fn share(&self, network: &Rc<Network>, connector: &Connector) {
        match connector.connect().and_then(UnixStream::from_std) {
            Ok(stream) => {
                self.tcp.borrow_mut().connected();
                self.relay(network, &Stream::Share(stream)).await;
            }
            Err(error) => {
                network.warn_once("share", || format!("the shared folder: {error}"));
                self.abort();
            }
        }
    }

    /// Connects to the outside host, and reports the result to the guest.
    async fn connect(&self, network: &Rc<Network>, packet: &[u8]) -> Option<TcpStream> {
        let connected = tokio::select! {
            connected = connect(network.outside(self.pair.peer)) => connected,
            () = self.guest_gave_up() => return None,
        };
        let error = match connected {
            Ok(stream) => {
                self.tcp.borrow_mut().connected();
                return Some(stream);
            }
            Err(error) => error,
        };
        match IcmpError::of(&error) {
            Some(IcmpError::PortUnreachable) | None if error.kind() != io::ErrorKind::TimedOut => {
                if IcmpError::of(&error).is_none() {
                    network.warn_once("connect", || format!("{}: {error}", self.pair.peer));
                }
                self.abort();
            }
            Some(reason) => network.refuse(self.pair.back(), reason, packet),
            // After a timeout, the guest has given up as well.
            None => {}
        }
        None
    }

    /// Waits until the guest gives up, or the connection is aborted.
    async fn guest_gave_up(&self) {
        loop {
            self.wake.notified().await;
            if self.tcp.borrow().is_closed() {
                return;
            }
        }
    }

    /// Copies bytes until the connection ends. Returns whether it ended in order.
    async fn relay(&self, network: &Rc<Network>, stream: &Stream<'_>) -> bool {
        let (mut read_all, mut shut) = (false, false);
        loop {
            let interests = self.exchange(network, stream, &mut read_all);
            if !shut && self.tcp.borrow().has_ended() {
                shut = true;
                stream.shutdown();
            }
            if self.tcp.borrow().state == State::Closed {
                return false;
            }
            if shut && self.tcp.borrow().is_done() {
                return true;
            }
            self.wait(network, stream, &interests).await;
        }
    }

    /// Does all work that does not block.
    fn exchange(&self, network: &Network, stream: &Stream<'_>, read_all: &mut bool) -> Interests {
        let now = Instant::now();
        let mut tcp = self.tcp.borrow_mut();
        tcp.tick(now);
        let mut write = false;
        while !tcp.data().is_empty() {
            match stream.try_write(tcp.data()) {
                Ok(count) => tcp.take(count),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    write = true;
                    break;
                }
                Err(_) => {
                    tcp.abort();
                    break;
                }
            }
        }
        let space = if *read_all || !network.link.has_room() { 0 } else { tcp.space() };
        if space > 0 {
            match tcp.fill(space, |buffer| stream.try_read_buf(buffer)) {
                Ok(0) => {
                    *read_all = true;
                    tcp.finish();
                }
                Ok(_) => self.used.set(now),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => tcp.abort(),
            }
        }
        let sent = send(&mut tcp, self.pair, network, now);
        let full = !network.link.has_room();
        let read = !full && !*read_all && tcp.space() > 0;
        let room = !sent || (full && !*read_all);
        Interests { read, write, room, due: tcp.due() }
    }

    /// Waits for one of these events, or until empty buffers can be freed.
    async fn wait(&self, network: &Network, stream: &Stream<'_>, interests: &Interests) {
        let idle = self.tcp.borrow_mut().is_loaded().then(|| Instant::now() + IDLE_BUFFER_TIMEOUT);
        let due = [interests.due, idle].into_iter().flatten().min();
        let due = due.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        tokio::select! {
            () = stream.readable(), if interests.read => {}
            () = stream.writable(), if interests.write => {}
            () = network.link.room(), if interests.room => {}
            () = self.wake.notified() => {}
            () = tokio::time::sleep_until(due.into()) => self.tcp.borrow_mut().release(),
        }
    }

    fn emit(&self, network: &Network) {
        send(&mut self.tcp.borrow_mut(), self.pair, network, Instant::now());
    }
}

/// Sends the pending segments of a connection to the guest. Returns false if the link is full.
fn send(tcp: &mut Tcp, pair: Pair, network: &Network, now: Instant) -> bool {
    let ends = network.ends(pair.back());
    tcp.emit(now, &mut |segment| {
        let header = segment.header();
        let data = segment.data;
        // Segments without data use the spare room of the link: the guest waits for them.
        if !data.is_empty() && !network.link.has_room() {
            return false;
        }
        let payload = Payload { protocol: TCP, header: header.bytes(), checksum: CHECKSUM, data };
        network.link.send(|output| payload.write(output, &ends))
    })
}

async fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.connect(to).await
}
