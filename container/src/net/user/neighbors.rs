//! Neighbor discovery (RFC 4861): the MAC addresses of neighbors, and the router.

use std::net::Ipv6Addr;

use host::mac::Mac;

use super::icmp;
use super::lan::LanV6;
use super::packet::{ICMPV6, Packet, Payload};

/// The multicast group of all hosts on the link.
pub const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// The MAC address of this group (RFC 2464, 7).
pub const ALL_NODES_CARD: Mac = Mac([0x33, 0x33, 0, 0, 0, 1]);

// Types of messages.
const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOR_SOLICITATION: u8 = 135;
const NEIGHBOR_ADVERTISEMENT: u8 = 136;
const REDIRECT: u8 = 137;

/// The lifetime of an advertisement in seconds: the maximum, because it is repeated rarely.
const ROUTER_LIFETIME: u16 = 9000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Solicitation {
    Router,
    Neighbor(Ipv6Addr),
    /// Any other message, which gets no answer.
    Other,
}

impl Solicitation {
    /// Parses a packet. Nothing if it has no neighbor discovery message.
    pub fn read(packet: &Packet<'_>) -> Option<Self> {
        let kind = *packet.payload.first()?;
        if !(ROUTER_SOLICITATION..=REDIRECT).contains(&kind) {
            return None;
        }
        // A lower hop limit shows that a router has forwarded the message.
        if packet.hops != 255 || packet.payload.get(1) != Some(&0) {
            return Some(Self::Other);
        }
        Some(match kind {
            ROUTER_SOLICITATION => Self::Router,
            NEIGHBOR_SOLICITATION => {
                let wanted = packet.payload.get(8..).and_then(|rest| rest.first_chunk::<16>());
                wanted.map_or(Self::Other, |wanted| Self::Neighbor(Ipv6Addr::from(*wanted)))
            }
            _ => Self::Other,
        })
    }
}

#[derive(Clone, Debug)]
pub struct Message(Vec<u8>);

impl Message {
    pub fn payload(&self) -> Payload<'_> {
        Payload { protocol: ICMPV6, header: &self.0, checksum: icmp::CHECKSUM, data: &[] }
    }
}

/// A neighbor advertisement: this address has our MAC address (4.4).
pub fn advertise_neighbor(wanted: Ipv6Addr, mac: Mac) -> Message {
    // The flags router, solicited and override.
    let mut bytes = vec![NEIGHBOR_ADVERTISEMENT, 0, 0, 0, 0xe0, 0, 0, 0];
    bytes.extend(wanted.octets());
    bytes.extend([2, 1]);
    bytes.extend(mac.0);
    Message(bytes)
}

/// A router advertisement for this network (4.2).
pub fn advertise_router(lan: &LanV6, mac: Mac, mtu: u16) -> Message {
    let mut bytes = vec![ROUTER_ADVERTISEMENT, 0, 0, 0, 64, 0];
    bytes.extend(ROUTER_LIFETIME.to_be_bytes());
    bytes.extend([0; 8]);
    bytes.extend([1, 1]);
    bytes.extend(mac.0);
    bytes.extend([5, 1, 0, 0]);
    bytes.extend(u32::from(mtu).to_be_bytes());
    // The prefix is for the guest's own address, but not on-link: other hosts of the network are
    // outside, behind us.
    bytes.extend([3, 4, 64, 0x40]);
    bytes.extend([0xff; 8]);
    bytes.extend([0; 4]);
    bytes.extend(lan.prefix.octets());
    Message(bytes)
}
