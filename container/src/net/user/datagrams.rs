//! UDP of the guest: a socket of the pod for each pair of ends.
//!
//! All sockets of one port of the guest have one port of the pod, so that whoever learns of it from
//! one host finds it from another (RFC 4787, 4.1), and each hears its own peer alone. Clients of
//! forwarded ports share the socket that listens there.
//!
//! Threats: floods from either side. Nothing is queued: a datagram goes on at once or is lost. When
//! places are scarce the oldest flow gives way to a new one, and without a place nothing is opened.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, sockopt};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::sync::Notify;
use tokio::task::spawn_local;

use super::icmp::Why;
use super::network::{Network, Way};
use super::packet::{Datagram, Draft, Packet, Pair, UDP};
use super::quota::{Place, Places};

/// How long a flow without traffic lives (RFC 4787, 4.3), and one that asks a name server.
const IDLE: Duration = Duration::from_secs(120);
const IDLE_DNS: Duration = Duration::from_secs(15);
const DNS: u16 = 53;
/// Most bytes of a datagram.
const LONGEST: usize = 65535;
/// How many datagrams of one flow go in a row.
const TURN: usize = 32;
/// How much of a packet is kept to be quoted in errors: all headers.
const QUOTED: usize = 80;
/// How many clients without an address of their own a forwarded port may have.
const MASKED: usize = 256;

/// Flows.
#[derive(Debug)]
pub struct Datagrams {
    flows: RefCell<HashMap<Pair, Rc<Flow>>>,
    /// The pod's port for each of the guest's, and how many sockets have it.
    ports: RefCell<HashMap<SocketAddr, (u16, usize)>>,
    doors: RefCell<Vec<Rc<Door>>>,
    room: RefCell<Vec<u8>>,
    places: Places,
}

/// A flow.
#[derive(Debug)]
struct Flow {
    pair: Pair,
    socket: UdpSocket,
    used: Cell<Instant>,
    end: Notify,
    /// The beginning of the guest's last packet.
    quoted: RefCell<Vec<u8>>,
    /// Given back after the socket.
    _place: Place,
}

/// A port of the pod that is the guest's.
#[derive(Debug)]
struct Door {
    socket: UdpSocket,
    port: u16,
    v4: bool,
    /// Clients that the guest sees at the gateway, by the ports that they have there.
    masked: RefCell<HashMap<u16, SocketAddr>>,
}

impl Datagrams {
    /// No flows, with so many places.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self {
            flows: RefCell::default(),
            ports: RefCell::default(),
            doors: RefCell::default(),
            room: RefCell::new(vec![0; LONGEST]),
            places: Places::new(places),
        }
    }

    /// All flows end.
    pub fn end(&self) {
        self.flows.borrow().values().for_each(|flow| flow.end.notify_one());
        self.doors.borrow().iter().for_each(|door| door.masked.borrow_mut().clear());
    }

    /// Sends a datagram of the guest.
    pub fn send(
        self: &Rc<Self>,
        network: &Rc<Network>,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        way: Way,
    ) {
        let pair = Pair::of(packet, (datagram.from, datagram.to));
        if self.answer(&pair, datagram.data, way) {
            return;
        }
        let outside = match way {
            Way::Outside => true,
            Way::Gateway => packet.to.is_ipv4() && network.is_outside(packet.to),
            Way::Closed | Way::Nowhere => false,
        };
        if !outside {
            return network.refuse(pair.back(), Why::NoPort, packet.quoted());
        }
        let known = self.flows.borrow().get(&pair).cloned();
        let flow = match known.map_or_else(|| self.open(network, pair), |it| Ok(Some(it))) {
            Ok(Some(flow)) => flow,
            Ok(None) => return,
            Err(error) => {
                match Why::of(&error) {
                    Some(why) => network.refuse(pair.back(), why, packet.quoted()),
                    None => network.say("datagram", || format!("{}: {error}", pair.peer)),
                }
                return;
            }
        };
        flow.used.set(Instant::now());
        {
            let mut quoted = flow.quoted.borrow_mut();
            quoted.clear();
            quoted.extend(packet.whole.iter().take(QUOTED));
        }
        // A socket says once what became of what it sent before. Not by way of the tasks, where a
        // new socket would have to be waited for.
        for _ in 0..2 {
            match rustix::net::send(&flow.socket, datagram.data, SendFlags::DONTWAIT) {
                Ok(_) | Err(Errno::AGAIN) => return,
                Err(error) => flow.tell(network, &error.into()),
            }
        }
    }

    /// Sends what a forwarded port answers; false when this is no such answer.
    fn answer(&self, pair: &Pair, data: &[u8], way: Way) -> bool {
        let doors = self.doors.borrow();
        let fits = |door: &&Rc<Door>, to: &SocketAddr| {
            door.port == pair.guest.port() && door.v4 == to.is_ipv4()
        };
        let masked = doors.iter().filter(|door| door.port == pair.guest.port());
        let mut masked = masked.filter_map(|door| {
            let peer = *door.masked.borrow().get(&pair.peer.port())?;
            fits(&door, &peer).then_some((door, peer))
        });
        let found = match way {
            Way::Gateway => masked.next_back(),
            Way::Outside => doors.iter().find(|it| fits(it, &pair.peer)).map(|it| (it, pair.peer)),
            Way::Closed | Way::Nowhere => None,
        };
        let Some((door, peer)) = found else { return false };
        // What is not taken at once is lost, as on any network.
        rustix::net::sendto(&door.socket, data, SendFlags::DONTWAIT, &peer).ok();
        true
    }

    /// Opens a flow; none without a place.
    fn open(self: &Rc<Self>, network: &Rc<Network>, pair: Pair) -> io::Result<Option<Rc<Flow>>> {
        let Some(place) = self.places.take() else { return Ok(None) };
        let mut flows = self.flows.borrow_mut();
        if self.places.are_scarce() {
            let oldest = flows.iter().min_by_key(|(_, flow)| flow.used.get());
            let oldest = oldest.map(|(pair, _)| *pair);
            if let Some(flow) = oldest.and_then(|pair| flows.remove(&pair)) {
                flow.end.notify_one();
            }
        }
        let socket = self.socket(&pair, network.outside(pair.peer))?;
        let used = Cell::new(Instant::now());
        let (end, quoted) = (Notify::new(), RefCell::default());
        let flow = Rc::new(Flow { pair, socket, used, end, quoted, _place: place });
        flows.insert(pair, flow.clone());
        let (all, network, live) = (self.clone(), network.clone(), flow.clone());
        spawn_local(async move {
            live.live(&network, &all.room).await;
            all.forget(&live);
        });
        Ok(Some(flow))
    }

    /// A socket at the port of the pod that is the guest's, connected.
    fn socket(&self, pair: &Pair, peer: SocketAddr) -> io::Result<UdpSocket> {
        let v4 = peer.is_ipv4();
        let any: IpAddr =
            if v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let family = if v4 { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
        let mut ports = self.ports.borrow_mut();
        let shared = ports.get(&pair.guest).map(|(port, _)| *port);
        if let Some(port) = shared {
            sockopt::set_socket_reuseaddr(&socket, true)?;
            rustix::net::bind(&socket, &SocketAddr::new(any, port))?;
        } else {
            // Another one than anybody has, and only then one to be shared.
            rustix::net::bind(&socket, &SocketAddr::new(any, 0))?;
            sockopt::set_socket_reuseaddr(&socket, true)?;
        }
        rustix::net::connect(&socket, &peer)?;
        let socket = UdpSocket::from_std(socket.into())?;
        let port = socket.local_addr()?.port();
        ports.entry(pair.guest).or_insert((port, 0)).1 += 1;
        Ok(socket)
    }

    fn forget(&self, flow: &Rc<Flow>) {
        let mut flows = self.flows.borrow_mut();
        // It may have given way to another one already.
        if flows.get(&flow.pair).is_some_and(|it| Rc::ptr_eq(it, flow)) {
            flows.remove(&flow.pair);
        }
        let mut ports = self.ports.borrow_mut();
        if let Some((_, count)) = ports.get_mut(&flow.pair.guest) {
            *count -= 1;
            if *count == 0 {
                ports.remove(&flow.pair.guest);
            }
        }
    }

    /// Serves a port of the pod that is the guest's, for ever.
    pub async fn serve(&self, network: &Network, socket: std::net::UdpSocket) -> io::Result<()> {
        let socket = UdpSocket::from_std(socket)?;
        let address = socket.local_addr()?;
        let (port, v4, masked) = (address.port(), address.is_ipv4(), RefCell::default());
        let door = Rc::new(Door { socket, port, v4, masked });
        self.doors.borrow_mut().push(door.clone());
        loop {
            door.socket.readable().await?;
            for _ in 0..TURN {
                let mut room = self.room.borrow_mut();
                // An error is about a datagram that was sent: there is nobody to be told.
                let (count, from) = match door.socket.try_recv_from(&mut room) {
                    Ok(received) => received,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => continue,
                };
                door.pass(network, from, &room[..count]);
            }
            tokio::task::yield_now().await;
        }
    }
}

/// Sends a datagram to the guest.
pub fn pass(network: &Network, pair: &Pair, data: &[u8]) {
    let header = Datagram::header(pair.peer.port(), pair.guest.port(), data.len());
    network.send(pair.back(), &Draft { protocol: UDP, header: &header, checksum: 6, data });
}

impl Door {
    /// Passes on what a client sent.
    fn pass(&self, network: &Network, from: SocketAddr, data: &[u8]) {
        let (guest, mut peer) = network.seen(from);
        if peer.ip() == IpAddr::V4(network.lan.gateway) {
            let mut masked = self.masked.borrow_mut();
            let known = masked.iter().find(|(_, it)| **it == from).map(|(port, _)| *port);
            let port = known.unwrap_or_else(|| {
                if masked.len() >= MASKED {
                    // Whoever comes again gets another port.
                    masked.clear();
                }
                let wanted = from.port().max(1024);
                let free = (wanted..=u16::MAX).chain(1024..wanted);
                let free = free.into_iter().find(|port| !masked.contains_key(port));
                let port = free.unwrap_or(wanted);
                masked.insert(port, from);
                port
            });
            peer.set_port(port);
        }
        pass(network, &Pair { guest: SocketAddr::new(guest, self.port), peer }, data);
    }
}

impl Flow {
    /// Lives until nothing goes either way any more. `room` is for datagrams on their way.
    async fn live(&self, network: &Network, room: &RefCell<Vec<u8>>) {
        let idle = if self.pair.peer.port() == DNS { IDLE_DNS } else { IDLE };
        loop {
            let due = self.used.get() + idle;
            tokio::select! {
                ready = self.socket.ready(Interest::READABLE | Interest::ERROR) => {
                    let Ok(ready) = ready else { return };
                    if ready.is_error() {
                        self.fail(network);
                    }
                    self.receive(network, &mut room.borrow_mut());
                    tokio::task::yield_now().await;
                }
                () = self.end.notified() => return,
                () = tokio::time::sleep_until(due.into()) => {
                    if self.used.get() + idle <= Instant::now() {
                        return;
                    }
                }
            }
        }
    }

    /// Something is wrong with what was sent.
    fn fail(&self, network: &Network) {
        if let Ok(Some(error)) = self.socket.take_error() {
            self.tell(network, &error);
        }
        // That is known now: it is the next one that is waited for.
        let known = || io::Result::<()>::Err(io::ErrorKind::WouldBlock.into());
        self.socket.try_io(Interest::ERROR, known).ok();
    }

    fn receive(&self, network: &Network, room: &mut [u8]) {
        for _ in 0..TURN {
            match self.socket.try_recv(room) {
                Ok(count) => {
                    self.used.set(Instant::now());
                    pass(network, &self.pair, &room[..count]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => self.tell(network, &error),
            }
        }
    }

    /// Tells the guest what became of its datagram.
    fn tell(&self, network: &Network, error: &io::Error) {
        if let Some(why) = Why::of(error) {
            network.refuse(self.pair.back(), why, &self.quoted.borrow());
        }
    }
}
