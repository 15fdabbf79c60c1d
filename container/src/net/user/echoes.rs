//! Pings of the guest, by sockets that may send echoes and nothing else (`IPPROTO_ICMP` with
//! datagrams): no right is needed but the group range of `net.ipv4.ping_group_range`.
//!
//! Threats: floods of ever other pings. When places are scarce the oldest flow gives way to a new
//! one, and without a place nothing is opened.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto};
use tokio::net::UdpSocket;
use tokio::sync::Notify;
use tokio::task::spawn_local;

use super::icmp::{self, Echo, HEADER, Why};
use super::network::Network;
use super::packet::Packet;
use super::quota::{Place, Places};

/// How long an answer may take.
const IDLE: Duration = Duration::from_secs(30);
/// Most bytes of an answer.
const LONGEST: usize = 65535;
/// How many answers of one flow go in a row.
const TURN: usize = 32;

/// Who asks whom, and which of its programs.
type Key = (IpAddr, IpAddr, [u8; 2]);

/// Flows.
#[derive(Debug)]
pub struct Echoes {
    flows: RefCell<HashMap<Key, Rc<Flow>>>,
    places: Places,
}

#[derive(Debug)]
struct Flow {
    key: Key,
    /// It takes and gives messages of ICMP as one for UDP does datagrams.
    socket: UdpSocket,
    used: Cell<Instant>,
    end: Notify,
    /// Given back after the socket.
    _place: Place,
}

impl Echoes {
    /// No flows, with so many places.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self { flows: RefCell::default(), places: Places::new(places) }
    }

    /// All flows end.
    pub fn end(&self) {
        self.flows.borrow().values().for_each(|flow| flow.end.notify_one());
    }

    /// Sends an echo of the guest.
    pub fn send(self: &Rc<Self>, network: &Rc<Network>, packet: &Packet<'_>, echo: &Echo<'_>) {
        let key = (packet.from, packet.to, echo.ident);
        let back = (packet.to, packet.from);
        let known = self.flows.borrow().get(&key).cloned();
        let flow = known.map_or_else(|| self.open(network, key), |it| Ok(Some(it)));
        let sent = flow.and_then(|flow| {
            let Some(flow) = flow else { return Ok(0) };
            flow.used.set(Instant::now());
            Ok(rustix::net::send(&flow.socket, echo.message, SendFlags::DONTWAIT)?)
        });
        let Err(error) = sent else { return };
        let why = Why::of(&error);
        if why == Some(Why::Forbidden) {
            network.say("ping", || {
                "the guest cannot ping: the pod may send no echoes; set its sysctl \
                 net.ipv4.ping_group_range to \"0 2147483647\""
                    .to_owned()
            });
        }
        if let Some(why) = why {
            network.refuse(back, why, packet.quoted());
        }
    }

    /// Opens a flow; none without a place.
    fn open(self: &Rc<Self>, network: &Rc<Network>, key: Key) -> io::Result<Option<Rc<Flow>>> {
        let Some(place) = self.places.take() else { return Ok(None) };
        let (family, protocol) = match key.1 {
            IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP),
            IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6),
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let kind = SocketType::DGRAM;
        let socket = rustix::net::socket_with(family, kind, flags, Some(protocol))?;
        rustix::net::connect(&socket, &network.outside(SocketAddr::new(key.1, 0)))?;
        let socket = UdpSocket::from_std(socket.into())?;
        let (used, end) = (Cell::new(Instant::now()), Notify::new());
        let flow = Rc::new(Flow { key, socket, used, end, _place: place });
        let mut flows = self.flows.borrow_mut();
        if self.places.are_scarce() {
            let oldest = flows.iter().min_by_key(|(_, flow)| flow.used.get()).map(|(key, _)| *key);
            if let Some(flow) = oldest.and_then(|key| flows.remove(&key)) {
                flow.end.notify_one();
            }
        }
        flows.insert(key, flow.clone());
        let (all, network, live) = (self.clone(), network.clone(), flow.clone());
        spawn_local(async move {
            live.live(&network).await;
            all.forget(&live);
        });
        Ok(Some(flow))
    }

    fn forget(&self, flow: &Rc<Flow>) {
        let mut flows = self.flows.borrow_mut();
        if flows.get(&flow.key).is_some_and(|it| Rc::ptr_eq(it, flow)) {
            flows.remove(&flow.key);
        }
    }
}

impl Flow {
    /// Lives until no answer is to be expected any more.
    async fn live(&self, network: &Network) {
        loop {
            let due = self.used.get() + IDLE;
            tokio::select! {
                ready = self.socket.readable() => {
                    if ready.is_err() {
                        return;
                    }
                    self.receive(network);
                    tokio::task::yield_now().await;
                }
                () = self.end.notified() => return,
                () = tokio::time::sleep_until(due.into()) => {
                    if self.used.get() + IDLE <= Instant::now() {
                        return;
                    }
                }
            }
        }
    }

    /// Passes answers on.
    fn receive(&self, network: &Network) {
        let mut room = vec![0; LONGEST];
        for _ in 0..TURN {
            match self.socket.try_recv(&mut room) {
                Ok(count) => self.pass(network, &room[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // About an echo that was sent.
                Err(_) => {}
            }
        }
    }

    /// Passes an answer on; the kernel has put in a number of its own for who asked.
    fn pass(&self, network: &Network, message: &[u8]) {
        let (guest, peer, ident) = self.key;
        let Some((header, data)) = message.split_first_chunk::<HEADER>() else { return };
        let mut header = *header;
        let v4 = guest.is_ipv4();
        if header[0] != icmp::echo_types(v4).1 {
            return;
        }
        header[icmp::CHECKSUM..icmp::CHECKSUM + 2].fill(0);
        header[4..6].copy_from_slice(&ident);
        network.send((peer, guest), &icmp::draft(v4, &header, data));
    }
}
