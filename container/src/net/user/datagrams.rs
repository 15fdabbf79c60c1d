//! UDP flows of the guest: a socket of the pod for each pair of ends.
//!
//! All sockets for one port of the guest have the same port of the pod, as NAT traversal needs it
//! (RFC 4787, 4.1), and each receives from its own peer only. Clients of a forwarded port share its
//! socket.
//!
//! Threats: floods from either side. Nothing is queued: a datagram is sent immediately or dropped.
//! When slots are scarce, a new flow replaces the least recently used one. Without a free slot,
//! no flow is opened.

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

use super::icmp::IcmpError;
use super::network::{Destination, Network};
use super::packet::{Datagram, Packet, Pair, Payload, UDP};
use super::quota::{Slot, Slots};

/// The idle time after which a flow ends (RFC 4787, 4.3).
const IDLE: Duration = Duration::from_secs(120);
/// The idle time after which a flow to a name server ends.
const IDLE_DNS: Duration = Duration::from_secs(15);
const DNS: u16 = 53;
/// The maximum size of a datagram, in bytes.
const MAX_DATAGRAM: usize = 65535;
/// The maximum number of datagrams of one flow before other tasks run.
const MAX_BURST: usize = 32;
/// Bytes of a packet that are kept for ICMP errors: all headers.
const QUOTED: usize = 80;
/// The maximum number of clients per forwarded port that the guest sees at the gateway's address.
const MAX_MASKED: usize = 256;

#[derive(Debug)]
pub struct Datagrams {
    flows: RefCell<HashMap<Pair, Rc<Flow>>>,
    /// The pod's port for each port of the guest, and its number of sockets.
    ports: RefCell<HashMap<SocketAddr, (u16, usize)>>,
    forwarded: RefCell<Vec<Rc<ForwardedPort>>>,
    buffer: RefCell<Vec<u8>>,
    slots: Slots,
}

#[derive(Debug)]
struct Flow {
    pair: Pair,
    socket: UdpSocket,
    used: Cell<Instant>,
    end: Notify,
    /// The beginning of the guest's last packet.
    quoted: RefCell<Vec<u8>>,
    /// Released after the socket.
    _slot: Slot,
}

#[derive(Debug)]
struct ForwardedPort {
    socket: UdpSocket,
    number: u16,
    v4: bool,
    /// Clients that the guest sees at the gateway's address, by their ports there.
    masked: RefCell<HashMap<u16, SocketAddr>>,
}

impl Datagrams {
    pub fn new(slots: usize) -> Self {
        Self {
            flows: RefCell::default(),
            ports: RefCell::default(),
            forwarded: RefCell::default(),
            buffer: RefCell::new(vec![0; MAX_DATAGRAM]),
            slots: Slots::new(slots),
        }
    }

    pub fn end(&self) {
        self.flows.borrow().values().for_each(|flow| flow.end.notify_one());
        self.forwarded.borrow().iter().for_each(|port| port.masked.borrow_mut().clear());
    }

    /// Sends a datagram of the guest.
    pub fn send(
        self: &Rc<Self>,
        network: &Rc<Network>,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
        destination: Destination,
    ) {
        let pair = Pair::of(packet, (datagram.from, datagram.to));
        if self.answer(&pair, datagram.data, destination) {
            return;
        }
        let outside = match destination {
            Destination::Outside => true,
            Destination::Gateway => packet.to.is_ipv4() && network.is_outside(packet.to),
            Destination::Forbidden | Destination::Unroutable => false,
        };
        if !outside {
            return network.refuse(pair.back(), IcmpError::PortUnreachable, packet.quoted());
        }
        let known = self.flows.borrow().get(&pair).cloned();
        let flow = match known.map_or_else(|| self.open(network, pair), |it| Ok(Some(it))) {
            Ok(Some(flow)) => flow,
            Ok(None) => return,
            Err(error) => {
                match IcmpError::of(&error) {
                    Some(reason) => network.refuse(pair.back(), reason, packet.quoted()),
                    None => network.warn_once("datagram", || format!("{}: {error}", pair.peer)),
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
        // The first attempt may return the error of an earlier datagram. This bypasses tokio, where
        // a new socket is not ready yet.
        for _ in 0..2 {
            match rustix::net::send(&flow.socket, datagram.data, SendFlags::DONTWAIT) {
                Ok(_) | Err(Errno::AGAIN) => return,
                Err(error) => flow.refuse(network, &error.into()),
            }
        }
    }

    /// Sends a datagram from a forwarded port to its client. Returns false if it is for none.
    fn answer(&self, pair: &Pair, data: &[u8], destination: Destination) -> bool {
        let forwarded = self.forwarded.borrow();
        let fits = |port: &&Rc<ForwardedPort>, to: &SocketAddr| {
            port.number == pair.guest.port() && port.v4 == to.is_ipv4()
        };
        let masked = forwarded.iter().filter(|port| port.number == pair.guest.port());
        let mut masked = masked.filter_map(|port| {
            let peer = *port.masked.borrow().get(&pair.peer.port())?;
            fits(&port, &peer).then_some((port, peer))
        });
        let found = match destination {
            Destination::Gateway => masked.next_back(),
            Destination::Outside => {
                forwarded.iter().find(|it| fits(it, &pair.peer)).map(|it| (it, pair.peer))
            }
            Destination::Forbidden | Destination::Unroutable => None,
        };
        let Some((port, peer)) = found else { return false };
        // If the socket is not ready, the datagram is lost, as on any network.
        rustix::net::sendto(&port.socket, data, SendFlags::DONTWAIT, &peer).ok();
        true
    }

    /// Opens a flow. Nothing without a free slot.
    fn open(self: &Rc<Self>, network: &Rc<Network>, pair: Pair) -> io::Result<Option<Rc<Flow>>> {
        let Some(slot) = self.slots.take() else { return Ok(None) };
        let mut flows = self.flows.borrow_mut();
        if self.slots.are_scarce() {
            let oldest = flows.iter().min_by_key(|(_, flow)| flow.used.get());
            let oldest = oldest.map(|(pair, _)| *pair);
            if let Some(flow) = oldest.and_then(|pair| flows.remove(&pair)) {
                flow.end.notify_one();
            }
        }
        let socket = self.socket(&pair, network.outside(pair.peer))?;
        let used = Cell::new(Instant::now());
        let (end, quoted) = (Notify::new(), RefCell::default());
        let flow = Rc::new(Flow { pair, socket, used, end, quoted, _slot: slot });
        flows.insert(pair, flow.clone());
        let (all, network, task) = (self.clone(), network.clone(), flow.clone());
        spawn_local(async move {
            task.run(&network, &all.buffer).await;
            all.remove(&task);
        });
        Ok(Some(flow))
    }

    /// A connected socket, at the port of the pod that belongs to the guest's port.
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
            // A port that no other socket has. It can be shared after that.
            rustix::net::bind(&socket, &SocketAddr::new(any, 0))?;
            sockopt::set_socket_reuseaddr(&socket, true)?;
        }
        rustix::net::connect(&socket, &peer)?;
        let socket = UdpSocket::from_std(socket.into())?;
        let port = socket.local_addr()?.port();
        ports.entry(pair.guest).or_insert((port, 0)).1 += 1;
        Ok(socket)
    }

    fn remove(&self, flow: &Rc<Flow>) {
        let mut flows = self.flows.borrow_mut();
        // A newer flow may have replaced it already.
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

    pub async fn serve(&self, network: &Network, socket: std::net::UdpSocket) -> io::Result<()> {
        let socket = UdpSocket::from_std(socket)?;
        let address = socket.local_addr()?;
        let (number, v4, masked) = (address.port(), address.is_ipv4(), RefCell::default());
        let port = Rc::new(ForwardedPort { socket, number, v4, masked });
        self.forwarded.borrow_mut().push(port.clone());
        loop {
            port.socket.readable().await?;
            for _ in 0..MAX_BURST {
                let mut buffer = self.buffer.borrow_mut();
                // An error belongs to a datagram that was sent. It cannot be reported to the guest.
                let (count, from) = match port.socket.try_recv_from(&mut buffer) {
                    Ok(received) => received,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => continue,
                };
                port.send_to_guest(network, from, &buffer[..count]);
            }
            tokio::task::yield_now().await;
        }
    }
}

pub fn send_to_guest(network: &Network, pair: &Pair, data: &[u8]) {
    let header = Datagram::header(pair.peer.port(), pair.guest.port(), data.len());
    network.send(pair.back(), &Payload { protocol: UDP, header: &header, checksum: 6, data });
}

impl ForwardedPort {
    fn send_to_guest(&self, network: &Network, from: SocketAddr, data: &[u8]) {
        let (guest, mut peer) = network.map_client(from);
        if peer.ip() == IpAddr::V4(network.lan.gateway) {
            let mut masked = self.masked.borrow_mut();
            let known = masked.iter().find(|(_, it)| **it == from).map(|(port, _)| *port);
            let port = known.unwrap_or_else(|| {
                if masked.len() >= MAX_MASKED {
                    // All clients get new ports.
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
        send_to_guest(network, &Pair { guest: SocketAddr::new(guest, self.number), peer }, data);
    }
}

impl Flow {
    /// Runs until the flow is idle or ended. `buffer` is a buffer for datagrams.
    async fn run(&self, network: &Network, buffer: &RefCell<Vec<u8>>) {
        let idle = if self.pair.peer.port() == DNS { IDLE_DNS } else { IDLE };
        loop {
            let due = self.used.get() + idle;
            tokio::select! {
                ready = self.socket.ready(Interest::READABLE | Interest::ERROR) => {
                    let Ok(ready) = ready else { return };
                    if ready.is_error() {
                        self.fail(network);
                    }
                    self.receive(network, &mut buffer.borrow_mut());
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

    /// Handles an error of an earlier datagram.
    fn fail(&self, network: &Network) {
        if let Ok(Some(error)) = self.socket.take_error() {
            self.refuse(network, &error);
        }
        // This clears tokio's readiness, so that it waits for the next error.
        let clear = || io::Result::<()>::Err(io::ErrorKind::WouldBlock.into());
        self.socket.try_io(Interest::ERROR, clear).ok();
    }

    fn receive(&self, network: &Network, buffer: &mut [u8]) {
        for _ in 0..MAX_BURST {
            match self.socket.try_recv(buffer) {
                Ok(count) => {
                    self.used.set(Instant::now());
                    send_to_guest(network, &self.pair, &buffer[..count]);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => self.refuse(network, &error),
            }
        }
    }

    /// Reports an error to the guest, by ICMP.
    fn refuse(&self, network: &Network, error: &io::Error) {
        if let Some(reason) = IcmpError::of(error) {
            network.refuse(self.pair.back(), reason, &self.quoted.borrow());
        }
    }
}
