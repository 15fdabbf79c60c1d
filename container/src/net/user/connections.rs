//! All TCP connections: those of the guest, and those of outside hosts to forwarded ports.
//!
//! Threats: the guest and outside hosts open connections as fast as their links allow. Each side
//! has its own slots and its own budget for buffers, so that outside hosts cannot end the guest's
//! connections. An outside host gets at most half of the incoming slots. When these are scarce,
//! the host with the most connections loses its least recently used one.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::task::spawn_local;

use super::connection::{Connection, Origin, Remote};
use super::lan::Lan;
use super::network::Network;
use super::packet::{HEADER_V4, HEADER_V6, Pair};
use super::quota::{Limits, Slot, Slots};
use super::segment::{self, Segment, Seq};
use super::tcp::buffer::Budget;
use super::tcp::{Parameters, Tcp};

/// The budget for buffers of incoming connections, in bytes.
const INCOMING: usize = 32 << 20;
/// Bytes of the guest's SYN packet that are kept for ICMP errors: all headers.
const QUOTED: usize = 80;

#[derive(Debug)]
pub struct Connections {
    all: RefCell<HashMap<Pair, Rc<Connection>>>,
    guests: OriginLimits,
    names: OriginLimits,
    incoming: OriginLimits,
    max_per_host: usize,
    /// The secret for initial sequence numbers.
    secret: RandomState,
}

/// Slots and memory for connections of one kind of origin.
#[derive(Debug)]
struct OriginLimits {
    slots: Slots,
    budget: Budget,
}

/// The address that identifies an outside host. An IPv6 host may use all addresses of a /64.
fn host(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
    }
}

pub struct Syn<'a> {
    pub pair: Pair,
    /// Not `Host`.
    pub origin: Origin,
    pub segment: &'a Segment<'a>,
    /// The beginning of its packet, for ICMP errors.
    pub packet: &'a [u8],
}

impl Connections {
    pub fn new(limits: &Limits) -> Self {
        let (shared, incoming) = (Budget::default(), Budget::new(INCOMING));
        let side = |limit, budget: &Budget| {
            let (slots, budget) = (Slots::new(limit), budget.clone());
            OriginLimits { slots, budget }
        };
        Self {
            all: RefCell::default(),
            guests: side(limits.connections, &shared),
            names: side(limits.names, &shared),
            incoming: side(limits.incoming, &incoming),
            max_per_host: limits.incoming / 2,
            secret: RandomState::new(),
        }
    }

    /// Aborts all connections.
    pub fn end(&self) {
        self.all.borrow().values().for_each(|connection| connection.abort());
    }

    pub fn find(&self, pair: &Pair) -> Option<Rc<Connection>> {
        self.all.borrow().get(pair).cloned()
    }

    fn limits_of(&self, origin: Origin) -> &OriginLimits {
        match origin {
            Origin::Guest | Origin::Share => &self.guests,
            Origin::NameServer => &self.names,
            Origin::Host(_) => &self.incoming,
        }
    }

    /// Starts a connection of the guest. Without a free slot the SYN is dropped. The guest repeats
    /// it after a second.
    pub fn open(self: &Rc<Self>, network: &Rc<Network>, syn: &Syn<'_>) {
        let Syn { pair, origin, segment, packet } = *syn;
        let Some(slot) = self.limits_of(origin).slots.take() else { return };
        self.evict_oldest(network, origin);
        let tcp = Tcp::from_guest(&self.start(&network.lan, &pair, origin), segment);
        let remote = match origin {
            Origin::NameServer => Remote::NameServer,
            Origin::Share => match &network.share {
                Some(connector) => Remote::Share(connector.clone()),
                None => return,
            },
            Origin::Guest | Origin::Host(_) => {
                Remote::Connect(packet[..packet.len().min(QUOTED)].to_vec())
            }
        };
        self.spawn(network, Connection::new(pair, origin, tcp), slot, remote);
    }

    /// Starts a connection of an outside host to a forwarded port, once a slot is free.
    pub async fn accept(
        self: &Rc<Self>,
        network: &Rc<Network>,
        stream: TcpStream,
        from: SocketAddr,
        port: u16,
    ) {
        let origin = Origin::Host(host(from.ip()));
        self.evict_oldest(network, origin);
        let slot = self.incoming.slots.wait().await;
        let Some(pair) = self.pair(network, from, port) else {
            rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).ok();
            return;
        };
        let tcp = Tcp::to_guest(&self.start(&network.lan, &pair, origin));
        let connection = Connection::new(pair, origin, tcp);
        self.spawn(network, connection, slot, Remote::Connected(stream));
    }

    /// The ends of an incoming connection. Nothing without a guest or a free port.
    fn pair(&self, network: &Network, from: SocketAddr, port: u16) -> Option<Pair> {
        let (guest, peer) = network.map_client(from);
        let mut pair = Pair { guest: SocketAddr::new(guest, port), peer };
        let connections = self.all.borrow();
        // Two clients can have the same ends only if the guest sees both at the gateway's address.
        let free = (0..256).any(|_| {
            let free = !connections.contains_key(&pair);
            if !free {
                pair.peer.set_port(pair.peer.port().checked_add(1).unwrap_or(1024));
            }
            free
        });
        (free && network.link.is_connected()).then_some(pair)
    }

    /// Ends the least recently used connection, if a new one of this origin would exceed a limit.
    fn evict_oldest(&self, network: &Network, origin: Origin) {
        let Some(oldest) = self.victim(origin).and_then(|pair| self.all.borrow_mut().remove(&pair))
        else {
            return;
        };
        network.warn_once("connections", || {
            let whose = match origin {
                Origin::Guest => "the guest has",
                Origin::NameServer => "the guest's DNS client has",
                Origin::Share => "the guest's client of the shared folder has",
                Origin::Host(_) => "outside hosts have",
            };
            format!("{whose} too many connections: the least recently used one is ended")
        });
        oldest.abort();
    }

    /// The connection that must end for a new one of this origin, if any.
    fn victim(&self, origin: Origin) -> Option<Pair> {
        let connections = self.all.borrow();
        let scarce = self.limits_of(origin).slots.are_scarce();
        let whose = match origin {
            Origin::Host(_) => {
                let mut counts = HashMap::new();
                for connection in connections.values() {
                    if matches!(connection.origin, Origin::Host(_)) {
                        *counts.entry(connection.origin).or_insert(0) += 1;
                    }
                }
                match counts.get(&origin) {
                    Some(count) if *count >= self.max_per_host => origin,
                    _ if scarce => counts.into_iter().max_by_key(|(_, count)| *count)?.0,
                    _ => return None,
                }
            }
            Origin::Guest | Origin::NameServer | Origin::Share if scarce => origin,
            Origin::Guest | Origin::NameServer | Origin::Share => return None,
        };
        let theirs = connections.iter().filter(|(_, it)| it.origin == whose);
        theirs.min_by_key(|(_, it)| it.used.get()).map(|(pair, _)| *pair)
    }

    fn start(&self, lan: &Lan, pair: &Pair, origin: Origin) -> Parameters {
        let header = if pair.guest.is_ipv4() { HEADER_V4 } else { HEADER_V6 };
        let headers = u16::try_from(header + segment::HEADER).expect("headers are short");
        let now = Instant::now();
        let [.., a, b, c, d] = self.secret.hash_one((pair, now)).to_be_bytes();
        Parameters {
            ports: (pair.peer.port(), pair.guest.port()),
            first: Seq(u32::from_be_bytes([a, b, c, d])),
            mss: lan.mtu - headers,
            budget: self.limits_of(origin).budget.clone(),
            now,
        }
    }

    fn spawn(
        self: &Rc<Self>,
        network: &Rc<Network>,
        connection: Connection,
        slot: Slot,
        remote: Remote,
    ) {
        let pair = connection.pair;
        let connection = Rc::new(connection);
        self.all.borrow_mut().insert(pair, connection.clone());
        let (all, network) = (self.clone(), network.clone());
        let outside = matches!(connection.origin, Origin::Host(_));
        let counted = outside.then(|| network.link.count_connection()).flatten();
        spawn_local(async move {
            connection.run(&network, remote).await;
            drop(counted);
            all.remove(&pair, &connection);
            // Its buffers are freed before its slot.
            drop(connection);
            drop(slot);
        });
    }

    fn remove(&self, pair: &Pair, connection: &Rc<Connection>) {
        let mut all = self.all.borrow_mut();
        // A newer connection may have replaced it already.
        if all.get(pair).is_some_and(|it| Rc::ptr_eq(it, connection)) {
            all.remove(pair);
        }
    }
}

#[cfg(test)]
mod test {
    use super::super::tcp::buffer::{MIN_CAPACITY, SHARED};
    use super::*;

    #[test]
    fn memory_limits_match_the_documentation() {
        let limits = Limits::of(usize::MAX);
        assert_eq!(limits.sum(), 4512);
        let Limits { connections, incoming, names, questions, .. } = limits;
        let buffers = (connections + incoming + names) * 2 * MIN_CAPACITY + SHARED + INCOMING;
        // A question, the message of its server, and the answer. A task and its socket.
        let questions = (questions + names) * ((4 + 64 + 64) << 10);
        let tasks = limits.sum() * (4 << 10);
        // Queued frames, and incomplete packets.
        let link = 4 << 20;
        assert!(buffers + questions + tasks + link <= 256 << 20);
    }

    #[test]
    fn an_ipv6_host_is_identified_by_its_network() {
        let v6 = |text: &str| host(text.parse().unwrap());
        assert_eq!(v6("2001:db8:0:7::1"), v6("2001:db8:0:7:ffff::2"));
        assert_ne!(v6("2001:db8:0:7::1"), v6("2001:db8:0:8::1"));
        assert_ne!(v6("192.0.2.1"), v6("192.0.2.2"));
    }
}
