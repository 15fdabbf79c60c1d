//! A connection of the guest and its other end, a socket of the pod or the gateway's name server:
//! bytes are carried between.
//!
//! A side that does not read holds the other one back: what waits in between has a bound (`tcp`),
//! and the rest waits in windows, here and outside.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, sockopt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Notify;

use super::icmp::Why;
use super::names::Names;
use super::network::Network;
use super::packet::{Draft, Pair, TCP};
use super::segment::{CHECKSUM, Segment};
use super::tcp::{Stage, Tcp};

/// How long memory that holds nothing is kept for what may come.
const KEEP: Duration = Duration::from_secs(5);

/// The side that asked for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The guest, to an outside host.
    Guest,
    /// The guest, to the gateway's name server.
    Names,
    /// An outside host, known by this address.
    Host(IpAddr),
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    pair: Pair,
    /// The side that asked for it.
    pub origin: Origin,
    tcp: RefCell<Tcp>,
    wake: Notify,
    /// When something last went either way.
    pub used: Cell<Instant>,
}

/// The other end.
pub enum Outside {
    /// To be connected; with the guest's packet, which errors quote.
    Dial(Vec<u8>),
    /// Connected.
    Here(TcpStream),
    /// The gateway's name server.
    Names,
}

/// What bytes are exchanged with.
enum Stream<'a> {
    Socket(TcpStream),
    Names(&'a Names),
}

impl Stream<'_> {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => stream.try_write(bytes),
            Self::Names(names) => names.try_write(bytes),
        }
    }

    fn try_read_buf(&self, room: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Socket(stream) => stream.try_read_buf(room),
            Self::Names(names) => names.try_read_buf(room),
        }
    }

    /// Waits until there is something to read.
    async fn readable(&self) {
        match self {
            // An error is read as well.
            Self::Socket(stream) => drop(stream.readable().await),
            Self::Names(names) => names.readable().await,
        }
    }

    /// Waits until something can be written.
    async fn writable(&self) {
        match self {
            Self::Socket(stream) => drop(stream.writable().await),
            Self::Names(names) => names.writable().await,
        }
    }

    /// No more bytes follow.
    fn shutdown(&self) {
        match self {
            Self::Socket(stream) => {
                // It may be gone already.
                rustix::net::shutdown(stream, Shutdown::Write).ok();
            }
            Self::Names(names) => names.shutdown(),
        }
    }
}

/// What a connection waits for.
struct Wish {
    read: bool,
    write: bool,
    room: bool,
    due: Option<Instant>,
}

impl Connection {
    /// A connection that begins.
    #[must_use]
    pub fn new(pair: Pair, origin: Origin, tcp: Tcp) -> Self {
        let used = Cell::new(Instant::now());
        Self { pair, origin, tcp: RefCell::new(tcp), wake: Notify::new(), used }
    }

    /// The guest sent something.
    pub fn hear(&self, segment: &Segment<'_>, now: Instant) {
        self.used.set(now);
        self.tcp.borrow_mut().hear(segment, now);
        self.wake.notify_one();
    }

    /// It ends at once.
    pub fn abort(&self) {
        self.tcp.borrow_mut().abort();
        self.wake.notify_one();
    }

    /// Lives until it is over.
    pub async fn live(&self, network: &Rc<Network>, outside: Outside) {
        let stream = match outside {
            Outside::Here(stream) => {
                self.tcp.borrow_mut().connected();
                Some(stream)
            }
            Outside::Dial(packet) => self.dial(network, &packet).await,
            Outside::Names => {
                // Few connections are for names: the others need no room for this.
                Box::pin(self.name(network)).await;
                None
            }
        };
        if let Some(stream) = stream {
            // What is not there to be told is no loss: small pieces wait, dead peers are not found.
            stream.set_nodelay(true).ok();
            sockopt::set_socket_keepalive(&stream, true).ok();
            let stream = Stream::Socket(stream);
            let in_order = self.carry(network, &stream).await;
            if let (false, Stream::Socket(stream)) = (in_order, &stream) {
                // Whoever is outside is to see that this was no orderly end.
                sockopt::set_socket_linger(stream, Some(Duration::ZERO)).ok();
            }
        }
        self.emit(network);
    }

    /// Has the gateway's name server answer, within this very task.
    async fn name(&self, network: &Rc<Network>) {
        self.tcp.borrow_mut().connected();
        let names = Names::default();
        let stream = Stream::Names(&names);
        let serve = async {
            names.serve(&network.relay).await;
            // The guest is still to hear the end.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = self.carry(network, &stream) => {}
            () = serve => {}
        }
    }

    /// Connects; the guest hears of it, whatever comes of it.
    async fn dial(&self, network: &Rc<Network>, packet: &[u8]) -> Option<TcpStream> {
        let dialled = tokio::select! {
            dialled = connect(network.outside(self.pair.peer)) => dialled,
            () = self.given_up() => return None,
        };
        let error = match dialled {
            Ok(stream) => {
                self.tcp.borrow_mut().connected();
                return Some(stream);
            }
            Err(error) => error,
        };
        match Why::of(&error) {
            Some(Why::NoPort) | None if error.kind() != io::ErrorKind::TimedOut => {
                if Why::of(&error).is_none() {
                    network.say("connect", || format!("{}: {error}", self.pair.peer));
                }
                self.abort();
            }
            Some(why) => network.refuse(self.pair.back(), why, packet),
            // It took as long as it takes the guest to find out for itself.
            None => {}
        }
        None
    }

    /// Until it is over without us.
    async fn given_up(&self) {
        loop {
            self.wake.notified().await;
            // Aborted or reset.
            if self.tcp.borrow().is_over() {
                return;
            }
        }
    }

    /// Carries bytes until it is over; says whether it ended in order.
    async fn carry(&self, network: &Rc<Network>, stream: &Stream<'_>) -> bool {
        let (mut read_all, mut shut) = (false, false);
        loop {
            let wish = self.exchange(network, stream, &mut read_all);
            if !shut && self.tcp.borrow().has_ended() {
                shut = true;
                stream.shutdown();
            }
            if self.tcp.borrow().stage() == Stage::Over {
                return false;
            }
            if shut && self.tcp.borrow().is_done() {
                return true;
            }
            self.wait(network, stream, &wish).await;
        }
    }

    /// Does all that can be done now.
    fn exchange(&self, network: &Network, stream: &Stream<'_>, read_all: &mut bool) -> Wish {
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
            match tcp.fill(space, |room| stream.try_read_buf(room)) {
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
        Wish { read, write, room, due: tcp.due() }
    }

    /// Waits until there is something to do.
    async fn wait(&self, network: &Network, stream: &Stream<'_>, wish: &Wish) {
        let quiet = self.tcp.borrow_mut().is_loaded().then(|| Instant::now() + KEEP);
        let due = [wish.due, quiet].into_iter().flatten().min();
        let due = due.unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        tokio::select! {
            () = stream.readable(), if wish.read => {}
            () = stream.writable(), if wish.write => {}
            () = network.link.room(), if wish.room => {}
            () = self.wake.notified() => {}
            () = tokio::time::sleep_until(due.into()) => self.tcp.borrow_mut().release(),
        }
    }

    /// Sends what there is to send.
    fn emit(&self, network: &Network) {
        send(&mut self.tcp.borrow_mut(), self.pair, network, Instant::now());
    }
}

/// Sends what a connection has for the guest; false when the link is full.
fn send(tcp: &mut Tcp, pair: Pair, network: &Network, now: Instant) -> bool {
    let ends = network.ends(pair.back());
    tcp.emit(now, &mut |segment| {
        let header = segment.header();
        let data = segment.data;
        // What is short does not wait: it is what the guest waits for.
        if !data.is_empty() && !network.link.has_room() {
            return false;
        }
        let draft = Draft { protocol: TCP, header: header.bytes(), checksum: CHECKSUM, data };
        network.link.send(|output| draft.write(output, &ends))
    })
}

async fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.connect(to).await
}
