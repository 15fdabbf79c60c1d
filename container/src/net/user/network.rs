//! The network between the guest and its router: addresses, the way to the guest, and where the
//! addresses that it sends to lead.
//!
//! Threats: the guest sends to any address. The pod's own addresses, those of its loopback and all
//! that names no single host are nowhere; so is the loopback behind IPv6 names for IPv4 addresses.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use host::mac::Mac;

use super::icmp::{self, Why};
use super::lan::Lan;
use super::link::Link;
use super::neighbours;
use super::packet::{ARP, ArpRequest, Draft, Ends, Frame, Packet, write_frame};
use crate::net::relay::Relay;

/// For how long an address that was found out not to be the pod's is not.
const RECENT: Duration = Duration::from_secs(1);

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To us.
    Gateway,
    /// To another host.
    Outside,
    /// To the pod itself, or to what the guest could only find by mistake.
    Closed,
    /// To several hosts, or to none.
    Nowhere,
}

/// The network.
pub struct Network {
    /// Addresses.
    pub lan: Lan,
    /// The way to the guest.
    pub link: Link,
    /// The pod's resolvers.
    pub relay: Relay,
    /// The guest's card.
    card: Cell<Mac>,
    /// The guest's IPv6 address that other hosts know.
    guest_v6: Cell<Option<Ipv6Addr>>,
    /// What was said already.
    said: RefCell<HashSet<&'static str>>,
    /// Where the last packet went, and when that was found out.
    last: Cell<Option<(IpAddr, Instant, Way)>>,
    /// The number of the next packet that goes in parts.
    parts: Cell<u16>,
    /// A port of the loopback in place of all outside hosts.
    diverted: Cell<Option<u16>>,
}

impl Network {
    /// A network with these addresses, and nobody on it.
    #[must_use]
    pub fn new(lan: Lan, relay: Relay) -> Self {
        Self {
            lan,
            link: Link::default(),
            relay,
            card: Cell::new(Mac::BROADCAST),
            guest_v6: Cell::new(None),
            said: RefCell::default(),
            last: Cell::new(None),
            parts: Cell::new(0),
            diverted: Cell::new(None),
        }
    }

    /// Has all that is for outside hosts go to this port of the loopback, so that nothing that a
    /// fuzzer makes leaves the host.
    pub fn divert(&self, port: u16) {
        self.diverted.set(Some(port));
    }

    /// Where sockets for an outside host are connected to.
    #[must_use]
    pub fn outside(&self, peer: SocketAddr) -> SocketAddr {
        let loopback: IpAddr =
            if peer.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        self.diverted.get().map_or(peer, |port| SocketAddr::new(loopback, port))
    }

    /// The guest is there.
    pub fn plug(&self) {
        self.link.connect(true);
        if self.lan.v6.is_some() {
            self.advertise();
        }
    }

    /// The guest is gone.
    pub fn unplug(&self) {
        self.link.connect(false);
        self.guest_v6.set(None);
    }

    /// Says something the first time that it happens.
    pub fn say(&self, what: &'static str, sentence: impl FnOnce() -> String) {
        if self.said.borrow_mut().insert(what) {
            tracing::warn!("network: {}", sentence());
        }
    }

    /// The guest's card.
    #[must_use]
    pub fn card(&self) -> Mac {
        self.card.get()
    }

    /// The ends of a packet for the guest.
    #[must_use]
    pub fn ends(&self, addresses: (IpAddr, IpAddr)) -> Ends {
        Ends { cards: (self.lan.mac, self.card.get()), addresses }
    }

    /// Our address, of the family of another one.
    #[must_use]
    pub fn gateway(&self, like: IpAddr) -> IpAddr {
        match (like, self.lan.v6) {
            (IpAddr::V6(_), Some(lan)) => lan.gateway.into(),
            _ => self.lan.gateway.into(),
        }
    }

    /// Sends the guest what is not TCP; false when that is lost.
    pub fn send(&self, addresses: (IpAddr, IpAddr), draft: &Draft<'_>) -> bool {
        let id = self.parts.get();
        self.parts.set(id.wrapping_add(1));
        let ends = self.ends(addresses);
        let parts = (usize::from(self.lan.mtu), id);
        self.link.send(|output| draft.write_in_parts(output, &ends, parts))
    }

    /// Tells the guest why its packet did not arrive. `addresses` are those of an answer.
    pub fn refuse(&self, addresses: (IpAddr, IpAddr), why: Why, packet: &[u8]) {
        let (peer, guest) = addresses;
        let from = if why == Why::NoPort { peer } else { self.gateway(guest) };
        let mut header = [0; icmp::HEADER];
        let draft = why.draft(guest.is_ipv4(), &mut header, packet);
        self.send((from, guest), &draft);
    }

    /// Reads a frame of the guest, if it is for us or for all; its card is known from then on.
    pub fn take<'a>(&self, bytes: &'a [u8]) -> Option<Frame<'a>> {
        let frame = Frame::read(bytes)?;
        let for_many = frame.to.is_multicast();
        if frame.from.is_multicast() || !(for_many || frame.to == self.lan.mac) {
            return None;
        }
        self.card.set(frame.from);
        Some(frame)
    }

    /// Answers ARP. Every address but the guest's own is behind our card, so that its neighbours
    /// are, too.
    pub fn hear_arp(&self, bytes: &[u8]) {
        let Some(request) = ArpRequest::read(bytes) else { return };
        // Who asks for its own address wants to know whether it has it alone.
        let own = request.wanted == request.from || request.wanted == self.lan.guest;
        if own || request.from.is_unspecified() && request.wanted != self.lan.gateway {
            return;
        }
        let answer = request.answer(self.lan.mac);
        let cards = (self.lan.mac, request.mac);
        self.link.send(|output| write_frame(output, cards, ARP, &answer));
    }

    /// Where a packet goes, if it is one of the guest's that may go on.
    #[must_use]
    pub fn admit(&self, packet: &Packet<'_>) -> Option<Way> {
        if !self.is_guest(packet.from) {
            return None;
        }
        let way = self.way(packet.to);
        if packet.hops <= 1 && way == Way::Outside {
            self.refuse((packet.to, packet.from), Why::TooFar, packet.quoted());
            return None;
        }
        Some(way)
    }

    /// Whether this is an address that a guest can have; an IPv6 one is remembered.
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

    /// Where a packet goes that is for this address.
    #[must_use]
    pub fn way(&self, to: IpAddr) -> Way {
        match to {
            IpAddr::V4(to) if to == self.lan.gateway => Way::Gateway,
            IpAddr::V4(to) => {
                // 0.0.0.0/8 is a name of the pod's own loopback, and 240.0.0.0/4 is nobody's.
                let first = to.octets()[0];
                if to.is_loopback() || first == 0 {
                    Way::Closed
                } else if first >= 224 || self.lan.is_broadcast(to) {
                    Way::Nowhere
                } else {
                    self.unless_own(to.into())
                }
            }
            IpAddr::V6(to) if self.lan.v6.is_some_and(|lan| lan.gateway == to) => Way::Gateway,
            IpAddr::V6(to) => {
                // ::/96 and ::ffff:0:0/96 are other names of IPv4 addresses.
                let v4 = to.to_ipv4().is_some();
                if to.is_multicast() || to.is_unicast_link_local() {
                    Way::Nowhere
                } else if v4 || self.lan.v6.is_none() {
                    Way::Closed
                } else {
                    self.unless_own(to.into())
                }
            }
        }
    }

    /// Whether the gateway's address is another host's as well.
    #[must_use]
    pub fn is_outside(&self, gateway: IpAddr) -> bool {
        self.unless_own(gateway) == Way::Outside
    }

    /// Outside, unless the address is one of the pod's now.
    fn unless_own(&self, to: IpAddr) -> Way {
        let now = Instant::now();
        if let Some((last, since, way)) = self.last.get()
            && last == to
            && now.saturating_duration_since(since) < RECENT
        {
            return way;
        }
        let way = if to == IpAddr::V4(self.lan.guest) { Ok(Way::Closed) } else { probe(to) };
        match way {
            Ok(way) => {
                self.last.set(Some((to, now, way)));
                way
            }
            // It may be one of the pod's.
            Err(error) => {
                self.say("probe", || {
                    format!("{to}: whose address this is cannot be found out now: {error}")
                });
                Way::Closed
            }
        }
    }

    /// The address of the guest for a client from outside, and the client's as the guest sees it:
    /// its own, unless that would lead the guest elsewhere than back to it.
    #[must_use]
    pub fn seen(&self, from: SocketAddr) -> (IpAddr, SocketAddr) {
        let honest = self.way(from.ip()) == Way::Outside;
        match (from.ip(), self.guest_v6.get()) {
            (IpAddr::V4(_), _) if honest => (self.lan.guest.into(), from),
            (IpAddr::V6(_), Some(guest)) if honest => (guest.into(), from),
            _ => {
                let gateway = SocketAddr::new(self.lan.gateway.into(), from.port());
                (self.lan.guest.into(), gateway)
            }
        }
    }

    /// Answers what is asked of neighbours and routers of IPv6; false for any other packet.
    pub fn hear_neighbour(&self, packet: &Packet<'_>) -> bool {
        if self.lan.v6.is_none() || !icmp::is_sound(packet) {
            return false;
        }
        match neighbours::Question::read(packet) {
            None => return false,
            Some(neighbours::Question::Router) => self.advertise(),
            Some(neighbours::Question::Neighbour(wanted)) => {
                // Its own addresses are those of no other host; it asks to be sure of that.
                let own = packet.from.is_unspecified() || self.guest_v6.get() == Some(wanted);
                if !own {
                    let answer = neighbours::answer(wanted, self.lan.mac);
                    self.send((wanted.into(), packet.from), &answer.draft());
                }
            }
            Some(neighbours::Question::Other) => {}
        }
        true
    }

    /// Tells the guest of its router and its network.
    pub fn advertise(&self) {
        let Some(lan) = self.lan.v6 else { return };
        let told = neighbours::advertise(&lan, self.lan.mac, self.lan.mtu);
        let all = IpAddr::V6(neighbours::ALL_NODES);
        let cards = (self.lan.mac, neighbours::ALL_NODES_CARD);
        let ends = Ends { cards, addresses: (lan.gateway.into(), all) };
        self.link.send(|output| told.draft().write(output, &ends));
    }
}

/// Whether an address is another host's: the kernel lets nobody bind to one.
fn probe(address: IpAddr) -> io::Result<Way> {
    match UdpSocket::bind((address, 0)) {
        Ok(_) => Ok(Way::Closed),
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => Ok(Way::Outside),
        Err(error) => Err(error),
    }
}
