//! Packets of neighbors on the guest's network: ARP, and IPv6 solicitations.

use std::net::Ipv6Addr;

use container::net::macvtap::arp;
use container::net::user::checksum;
use container::net::user::lan::LanV6;
use container::net::user::neighbors::{Solicitation, advertise_neighbor, advertise_router};
use container::net::user::packet::{
    ARP, ArpRequest, Ends, Frame, HEADER_V4, ICMPV6, IPV4, IPV6, Packet, Payload, write_frame,
};
use host::mac::Mac;
use host::testutil::noise::Noise;

const CARD: Mac = Mac([2, 0, 0, 0, 0, 0x77]);
const OURS: Mac = Mac([2, 0, 0, 0, 0, 1]);
const GATEWAY: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
const PREFIX: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x77, 0, 0, 0, 0, 0);
/// Bytes of the length before each frame on the link.
const LENGTH: usize = 4;

/// Parses an ARP packet, as both networks do. Only addresses that a host can have are learned, and
/// answers are valid.
pub(crate) fn handle_arp(bytes: &[u8]) {
    if let Some(address) = arp::sender_address(bytes, CARD) {
        assert!(!address.is_loopback() && !address.is_multicast() && !address.is_unspecified());
        assert!(
            bytes.len() >= 18 && bytes[14..18] == address.octets(),
            "the address is the packet's sender"
        );
    }
    if let Some(request) = ArpRequest::read(bytes) {
        let answer = request.answer(OURS);
        assert_eq!(answer.len(), 28);
        assert!(ArpRequest::read(&answer).is_none(), "an answer must not be taken for a request");
        let mut frame = Vec::new();
        write_frame(&mut frame, (OURS, CARD), ARP, &answer);
        assert_eq!(Frame::read(&frame[LENGTH..]).map(|it| it.payload), Some(&answer[..]));
    }
}

/// Requests and answers with some changed bytes.
pub(crate) fn arp(noise: &mut Noise) -> Vec<u8> {
    let address = noise.choose(&[[10, 0, 2, 15], [0; 4], [127, 0, 0, 1], [224, 0, 0, 1], [255; 4]]);
    let kind = [0, 1, 8, 0, 6, 4, 0, noise.choose(&[1, 1, 2, 3])];
    let mut packet = [&kind[..], &CARD.0, &address, &[0; 6], &[10, 0, 2, 2]].concat();
    change(noise, &mut packet);
    packet
}

/// Parses a packet about neighbors, of IPv6 or as if IPv4 had them. Any answer is valid and short.
pub(crate) fn handle_neighbor(bytes: &[u8]) {
    let kind = if bytes.first().is_some_and(|it| it >> 4 == 4) { IPV4 } else { IPV6 };
    let Some(packet) = Packet::read(kind, bytes) else { return };
    assert!(packet.payload.len() <= bytes.len());
    if packet.protocol != ICMPV6 {
        return;
    }
    let lan = LanV6 { prefix: PREFIX, gateway: GATEWAY };
    let message = match Solicitation::read(&packet) {
        Some(Solicitation::Router) => advertise_router(&lan, OURS, 1500),
        Some(Solicitation::Neighbor(wanted)) => advertise_neighbor(wanted, OURS),
        Some(Solicitation::Other) | None => return,
    };
    assert_eq!(packet.hops, 255, "a solicitation from beyond a router must be ignored");
    let mut frame = Vec::new();
    let ends = Ends { cards: (OURS, CARD), addresses: (GATEWAY.into(), packet.from) };
    message.payload().write(&mut frame, &ends);
    let frame = Frame::read(&frame[LENGTH..]).expect("a frame of ours");
    let said = Packet::read(frame.kind, frame.payload).expect("a packet of ours");
    assert!(said.is_sound() && said.whole.len() <= 1280);
    assert_ne!(
        Solicitation::read(&said),
        Some(Solicitation::Router),
        "an answer must not be taken for a solicitation"
    );
}

/// Router and neighbor solicitations with some changed bytes.
pub(crate) fn neighbor(noise: &mut Noise) -> Vec<u8> {
    let kind = noise.choose(&[133, 133, 135, 135, 134, 136, 137, 128]);
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    message.extend(GATEWAY.octets());
    message.extend([1, 1]);
    message.extend(CARD.0);
    if noise.below(4) == 0 {
        return in_ipv4(&message);
    }
    let from = noise.choose(&[GATEWAY, PREFIX, Ipv6Addr::UNSPECIFIED, Ipv6Addr::LOCALHOST]);
    let to = noise.choose(&[GATEWAY, Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2)]);
    let ends = Ends { cards: (CARD, OURS), addresses: (from.into(), to.into()) };
    let mut frame = Vec::new();
    Payload { protocol: ICMPV6, header: &message, checksum: 2, data: &[] }.write(&mut frame, &ends);
    let mut packet = frame.split_off(LENGTH + container::net::user::packet::ETHERNET);
    change(noise, &mut packet);
    packet
}

/// An IPv4 packet with this message of IPv6, from the card's own link.
fn in_ipv4(message: &[u8]) -> Vec<u8> {
    let total = u8::try_from(HEADER_V4 + message.len()).expect("a short message");
    let mut packet = vec![0x45, 0, 0, total, 0, 0, 0, 0, 255, ICMPV6, 0, 0];
    packet.extend([[10, 0, 2, 15], [10, 0, 2, 2]].concat());
    let sum = checksum::finish(checksum::sum(&packet));
    packet[10..12].copy_from_slice(&sum);
    packet.extend(message);
    packet
}

fn change(noise: &mut Noise, bytes: &mut Vec<u8>) {
    for _ in 0..noise.below(4) {
        let at = usize::try_from(noise.below(bytes.len() as u64)).expect("it is below a length");
        bytes[at] = noise.next().unwrap_or(0);
    }
    if noise.below(8) == 0 {
        let end = usize::try_from(noise.below(bytes.len() as u64)).expect("it is below a length");
        bytes.truncate(end);
    }
}
