//! The network between the guest and its router: addresses, the link to the guest, and the decision
//! where packets of the guest go.
//!
//! Threats: the guest sends to any address. It cannot reach the addresses of the pod, of its
//! loopback, and those that are not of a single host, not even as IPv4 addresses within IPv6 ones.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use host::mac::Mac;

use super::icmp::{self, IcmpError};
use super::lan::Lan;
use super::link::Link;
use super::neighbors;
use super::packet::{ARP, ArpRequest, Ends, Frame, Packet, Payload, write_frame};
use crate::net::relay::Relay;
use crate::shared_folder::Connector;

/// The time for which the last decision is cached.
const CACHED: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    Gateway,
    Outside,
    /// The pod itself, or an address of no use to the guest. Packets are refused.
    Forbidden,
    /// Several hosts, or none. Packets are dropped.
    Unroutable,
}

pub struct Network {
    pub lan: Lan,
    pub link: Link,
    pub relay: Relay,
    /// The server of the shared folder, at port 445 of the gateway.
    pub share: Option<Connector>,
    /// MAC address of the guest.
    card: Cell<Mac>,
    /// Global IPv6 address of the guest.
    guest_v6: Cell<Option<Ipv6Addr>>,
    warned: RefCell<HashSet<&'static str>>,
    /// The last destination address, and when its `Destination` was decided.
    last: Cell<Option<(IpAddr, Instant, Destination)>>,
    /// The id of the next fragmented packet.
    fragment_id: Cell<u16>,
    /// For tests: a port of the loopback in place of all outside hosts.
    pub diverted: Cell<Option<u16>>,
}

impl Network {
    pub fn new(lan: Lan, relay: Relay, share: Option<Connector>) -> Self {
        Self {
            lan,
            link: Link::default(),
            relay,
            share,
            card: Cell::new(Mac::BROADCAST),
            guest_v6: Cell::new(None),
            warned: RefCell::default(),
            last: Cell::new(None),
            fragment_id: Cell::new(0),
            diverted: Cell::new(None),
        }
    }

    /// The address to connect to for an outside host.
    pub fn outside(&self, peer: SocketAddr) -> SocketAddr {
        let loopback: IpAddr =
            if peer.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        self.diverted.get().map_or(peer, |port| SocketAddr::new(loopback, port))
    }

    /// Called when the guest has connected.
    pub fn plug(&self) {
        self.link.connect(true);
        // A guest that continues after a suspension may wait for connections before it sends
        // anything: its answer tells its MAC address.
        let request =
            ArpRequest { mac: self.lan.mac, from: self.lan.gateway, wanted: self.lan.guest };
        let cards = (self.lan.mac, Mac::BROADCAST);
        self.link.send(|output| write_frame(output, cards, ARP, &request.write()));
        if self.lan.v6.is_some() {
            self.advertise();
        }
    }

    /// Called when the guest has disconnected.
    pub fn unplug(&self) {
        self.link.connect(false);
        self.guest_v6.set(None);
    }

    pub fn warn_once(&self, kind: &'static str, sentence: impl FnOnce() -> String) {
        if self.warned.borrow_mut().insert(kind) {
            tracing::warn!("network: {}", sentence());
        }
    }

    /// The MAC address of the guest. Broadcast until its first frame.
    pub fn card(&self) -> Mac {
        self.card.get()
    }

    /// Source and destination of a packet to the guest.
    pub fn ends(&self, addresses: (IpAddr, IpAddr)) -> Ends {
        Ends { cards: (self.lan.mac, self.card.get()), addresses }
    }

    /// The gateway's address, of the same family as another address.
    pub fn gateway(&self, like: IpAddr) -> IpAddr {
        match (like, self.lan.v6) {
            (IpAddr::V6(_), Some(lan)) => lan.gateway.into(),
            _ => self.lan.gateway.into(),
        }
    }

    /// Sends a packet other than TCP to the guest, in fragments if needed. Returns false if it is
    /// dropped.
    pub fn send(&self, addresses: (IpAddr, IpAddr), payload: &Payload<'_>) -> bool {
        let id = self.fragment_id.get();
        self.fragment_id.set(id.wrapping_add(1));
        let ends = self.ends(addresses);
        let mtu = usize::from(self.lan.mtu);
        self.link.send(|output| payload.write_fragments(output, &ends, mtu, id))
    }

    /// Sends an ICMP error to the guest. `addresses` are source and destination of an answer.
    pub fn refuse(&self, addresses: (IpAddr, IpAddr), reason: IcmpError, packet: &[u8]) {
        let (peer, guest) = addresses;
        let from = if reason == IcmpError::PortUnreachable { peer } else { self.gateway(guest) };
        let mut header = [0; icmp::HEADER];
        let payload = reason.payload(guest.is_ipv4(), &mut header, packet);
        self.send((from, guest), &payload);
    }

    /// Parses a frame of the guest, if it is for us or a multicast. Stores the guest's MAC address.
    pub fn parse_frame<'a>(&self, bytes: &'a [u8]) -> Option<Frame<'a>> {
        let frame = Frame::read(bytes)?;
        let for_many = frame.to.is_multicast();
        if frame.from.is_multicast() || !(for_many || frame.to == self.lan.mac) {
            return None;
        }
        self.card.set(frame.from);
        Some(frame)
    }

    /// Answers ARP requests. All addresses except the guest's own have our MAC address, also those
    /// of other hosts in its network.
    pub fn handle_arp(&self, bytes: &[u8]) {
        let Some(request) = ArpRequest::read(bytes) else { return };
        // A request for the guest's own address detects duplicates, and must get no answer.
        let own = request.wanted == request.from || request.wanted == self.lan.guest;
        if own || request.from.is_unspecified() && request.wanted != self.lan.gateway {
            return;
        }
        let answer = request.answer(self.lan.mac);
        let cards = (self.lan.mac, request.mac);
        self.link.send(|output| write_frame(output, cards, ARP, &answer));
    }

    /// The destination of a packet. Nothing if its source or its hop limit is invalid.
    pub fn admit(&self, packet: &Packet<'_>) -> Option<Destination> {
        if !self.is_guest(packet.from) {
            return None;
        }
        let destination = self.destination(packet.to);
        if packet.hops <= 1 && destination == Destination::Outside {
            self.refuse((packet.to, packet.from), IcmpError::TimeExceeded, packet.quoted());
            return None;
        }
        Some(destination)
    }

    /// Whether a guest can have this address. Stores the guest's global IPv6 address.
    fn is_guest(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => {
                let strange = address.is_loopback() || address.is_multicast();
                !strange
                    && address != self.lan.gateway
                    && address.octets()[0] != 0
                    && !self.lan.is_broadcast(address)
            }
            IpAddr::V6(address) => {
                let Some(lan) = self.lan.v6 else { return false };
                let strange = address.is_loopback() || address.is_multicast();
                let network = u128::from(address) >> 64 == u128::from(lan.prefix) >> 64;
                if network {
                    self.guest_v6.set(Some(address));
                }
                !strange && !address.is_unspecified() && address != lan.gateway
            }
        }
    }

    pub fn destination(&self, to: IpAddr) -> Destination {
        match to {
            IpAddr::V4(to) if to == self.lan.gateway => Destination::Gateway,
            IpAddr::V4(to) => {
                // 0.0.0.0/8 also means the pod's loopback. 240.0.0.0/4 is reserved.
                let first = to.octets()[0];
                if to.is_loopback() || first == 0 {
                    Destination::Forbidden
                } else if first >= 224 || self.lan.is_broadcast(to) {
                    Destination::Unroutable
                } else {
                    self.outside_unless_own(to.into())
                }
            }
            IpAddr::V6(to) if self.lan.v6.is_some_and(|lan| lan.gateway == to) => {
                Destination::Gateway
            }
            IpAddr::V6(to) => {
                // ::/96 and ::ffff:0:0/96 contain IPv4 addresses.
                let v4 = to.to_ipv4().is_some();
                if to.is_multicast() || to.is_unicast_link_local() {
                    Destination::Unroutable
                } else if v4 || self.lan.v6.is_none() {
                    Destination::Forbidden
                } else {
                    self.outside_unless_own(to.into())
                }
            }
        }
    }

    /// Whether the gateway's address is also that of an outside host.
    pub fn is_outside(&self, gateway: IpAddr) -> bool {
        self.outside_unless_own(gateway) == Destination::Outside
    }

    /// Outside, unless the pod has this address.
    fn outside_unless_own(&self, to: IpAddr) -> Destination {
        let now = Instant::now();
        if let Some((last, since, destination)) = self.last.get()
            && last == to
            && now.saturating_duration_since(since) < CACHED
        {
            return destination;
        }
        let destination =
            if to == IpAddr::V4(self.lan.guest) { Ok(Destination::Forbidden) } else { probe(to) };
        match destination {
            Ok(destination) => {
                self.last.set(Some((to, now, destination)));
                destination
            }
            // The pod may have the address.
            Err(error) => {
                self.warn_once("probe", || {
                    format!("{to} is blocked: cannot check whether the pod has it: {error}")
                });
                Destination::Forbidden
            }
        }
    }

    /// The guest's address for an outside client, and the client's address as the guest sees it:
    /// its own, if answers to that reach the client, else the gateway's.
    pub fn map_client(&self, from: SocketAddr) -> (IpAddr, SocketAddr) {
        let reachable = self.destination(from.ip()) == Destination::Outside;
        match (from.ip(), self.guest_v6.get()) {
            (IpAddr::V4(_), _) if reachable => (self.lan.guest.into(), from),
            (IpAddr::V6(_), Some(guest)) if reachable => (guest.into(), from),
            _ => {
                let gateway = SocketAddr::new(self.lan.gateway.into(), from.port());
                (self.lan.guest.into(), gateway)
            }
        }
    }

    /// Answers IPv6 neighbor and router solicitations. Returns false for any other packet.
    pub fn handle_neighbor(&self, packet: &Packet<'_>) -> bool {
        if self.lan.v6.is_none() || !icmp::is_sound(packet) {
            return false;
        }
        match neighbors::Solicitation::read(packet) {
            None => return false,
            Some(neighbors::Solicitation::Router) => self.advertise(),
            Some(neighbors::Solicitation::Neighbor(wanted)) => {
                // A solicitation for its own address detects duplicates, and must get no answer.
                let own = packet.from.is_unspecified() || self.guest_v6.get() == Some(wanted);
                if !own {
                    let answer = neighbors::advertise_neighbor(wanted, self.lan.mac);
                    self.send((wanted.into(), packet.from), &answer.payload());
                }
            }
            Some(neighbors::Solicitation::Other) => {}
        }
        true
    }

    /// Sends a router advertisement.
    pub fn advertise(&self) {
        let Some(lan) = self.lan.v6 else { return };
        let message = neighbors::advertise_router(&lan, self.lan.mac, self.lan.mtu);
        let all = IpAddr::V6(neighbors::ALL_NODES);
        let cards = (self.lan.mac, neighbors::ALL_NODES_CARD);
        let ends = Ends { cards, addresses: (lan.gateway.into(), all) };
        self.link.send(|output| message.payload().write(output, &ends));
    }
}

/// Checks whether the pod has an address: the kernel refuses to bind to one of another host.
fn probe(address: IpAddr) -> io::Result<Destination> {
    match UdpSocket::bind((address, 0)) {
        Ok(_) => Ok(Destination::Forbidden),
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => Ok(Destination::Outside),
        Err(error) => Err(error),
    }
}
