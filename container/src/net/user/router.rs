//! The router between the guest and the pod's sockets. It passes each frame of the guest to its
//! flow, and none to the pod itself.
//!
//! Threats: the guest sends any frames from any addresses. All tables are bounded and drop the
//! least recently used entry. A task needs a slot (`quota`) before it starts.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Instant;

use super::connection::Origin;
use super::connections::{Connections, Syn};
use super::datagrams::Datagrams;
use super::echoes::Echoes;
use super::fragments::Fragments;
use super::icmp::{self, Echo};
use super::lan::Lan;
use super::network::{Destination, Network};
use super::packet::{ARP, Datagram, ICMP, ICMPV6, IPV4, IPV6, Packet, Pair, Payload, TCP, UDP};
use super::quota::Limits;
use super::segment::{self, ACK, RST, SYN, Segment};
use super::service::Server;
use crate::net::dns;
use crate::net::nat::OLD_GATEWAY;
use crate::net::relay::Relay;
use crate::shared_folder::{self, Connector};

pub struct Router {
    /// All tasks share it.
    pub network: Rc<Network>,
    pub datagrams: Rc<Datagrams>,
    echoes: Rc<Echoes>,
    pub connections: Rc<Connections>,
    server: Server,
    fragments: RefCell<Fragments>,
}

impl Router {
    /// `files`: the maximum number of open descriptors of the process.
    pub fn new(lan: Lan, relay: Relay, share: Option<Connector>, files: usize) -> Self {
        let limits = Limits::of(files);
        Self {
            network: Rc::new(Network::new(lan, relay, share)),
            datagrams: Rc::new(Datagrams::new(limits.datagrams)),
            echoes: Rc::new(Echoes::new(limits.echoes)),
            connections: Rc::new(Connections::new(&limits)),
            server: Server::new(limits.questions),
            fragments: RefCell::default(),
        }
    }

    /// Ends all flows, when the guest has disconnected.
    pub fn unplug(&self) {
        self.network.unplug();
        self.connections.end();
        self.datagrams.end();
        self.echoes.end();
    }

    pub fn handle(&self, bytes: &[u8]) {
        let Some(frame) = self.network.parse_frame(bytes) else { return };
        match frame.kind {
            ARP => self.network.handle_arp(frame.payload),
            IPV4 | IPV6 => {
                let Some(packet) = Packet::read(frame.kind, frame.payload) else { return };
                let Some(part) = packet.fragment else { return self.handle_packet(&packet) };
                let whole = self.fragments.borrow_mut().take(&packet, part, Instant::now());
                if let Some(payload) = whole {
                    self.handle_packet(&Packet { fragment: None, payload: &payload, ..packet });
                }
            }
            _ => {}
        }
    }

    fn handle_packet(&self, packet: &Packet<'_>) {
        let datagram = if packet.protocol == UDP { Datagram::read(packet) } else { None };
        if datagram.is_some_and(|datagram| self.server.handle(&self.network, packet, &datagram)) {
            return;
        }
        if packet.protocol == ICMPV6 && self.network.handle_neighbor(packet) {
            return;
        }
        if packet.protocol == TCP {
            return self.handle_tcp(packet);
        }
        let Some(destination) = self.network.admit(packet) else { return };
        let back = (packet.to, packet.from);
        match packet.protocol {
            UDP => match (datagram, destination) {
                (None, _) | (_, Destination::Unroutable) => {}
                (Some(datagram), _) => {
                    self.datagrams.send(&self.network, packet, &datagram, destination);
                }
            },
            ICMP | ICMPV6 => {
                let Some(echo) = Echo::read(packet) else { return };
                match destination {
                    Destination::Gateway => {
                        let v4 = packet.from.is_ipv4();
                        let header = echo.answer(v4);
                        self.network.send(back, &icmp::payload(v4, &header, echo.data()));
                    }
                    Destination::Outside => self.echoes.send(&self.network, packet, &echo),
                    Destination::Forbidden | Destination::Unroutable => {}
                }
            }
            _ => {}
        }
    }

    fn handle_tcp(&self, packet: &Packet<'_>) {
        let Some(segment) = Segment::read(packet) else { return };
        let pair = Pair::of(packet, segment.ports);
        if let Some(connection) = self.connections.find(&pair) {
            return connection.handle(&segment, Instant::now());
        }
        let Some(destination) = self.network.admit(packet) else { return };
        let origin = self.origin(destination, packet.to, segment.ports.1);
        let origin = origin.filter(|_| segment.flags & (SYN | ACK | RST) == SYN);
        let Some(origin) = origin else { return self.reset(&pair, &segment) };
        let syn = Syn { pair, origin, segment: &segment, packet: packet.quoted() };
        self.connections.open(&self.network, &syn);
    }

    /// Where a connection of the guest goes. Nowhere if it is not allowed.
    fn origin(&self, destination: Destination, to: IpAddr, port: u16) -> Option<Origin> {
        let share = port == shared_folder::PORT && self.network.share.is_some() && to.is_ipv4();
        match destination {
            Destination::Gateway if port == dns::PORT => Some(Origin::NameServer),
            Destination::Gateway if share => Some(Origin::Share),
            Destination::Gateway if !to.is_ipv4() || !self.network.is_outside(to) => None,
            Destination::Outside if share && to == OLD_GATEWAY => Some(Origin::Share),
            Destination::Outside | Destination::Gateway => Some(Origin::Guest),
            Destination::Forbidden | Destination::Unroutable => None,
        }
    }

    /// Answers a segment without a connection.
    fn reset(&self, pair: &Pair, segment: &Segment<'_>) {
        let Some(refusal) = segment.refusal() else { return };
        let header = refusal.header();
        let header = header.bytes();
        let payload = Payload { protocol: TCP, header, checksum: segment::CHECKSUM, data: &[] };
        self.network.send(pair.back(), &payload);
    }
}
