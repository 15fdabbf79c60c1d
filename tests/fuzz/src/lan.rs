//! What neighbours on the guest's network say: ARP, and solicitations of IPv6.

use std::net::Ipv6Addr;

use container::net::macvtap::arp;
use container::net::user::lan::LanV6;
use container::net::user::neighbours::{Question, advertise, answer};
use container::net::user::packet::{
    ARP, ArpRequest, Draft, Ends, Frame, ICMPV6, IPV6, Packet, write_frame,
};
use host::mac::Mac;
use host::testutil::noise::Noise;

const CARD: Mac = Mac([2, 0, 0, 0, 0, 0x77]);
const OURS: Mac = Mac([2, 0, 0, 0, 0, 1]);
const GATEWAY: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
const PREFIX: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0x77, 0, 0, 0, 0, 0);
/// How a frame begins on the link: with its length.
const LENGTH: usize = 4;

/// An ARP packet, as both networks hear it. No address is taken that is nobody's, and an answer is
/// one that can be read.
pub(crate) fn hear_arp(bytes: &[u8]) {
    if let Some(address) = arp::said(bytes, CARD) {
        assert!(!address.is_loopback() && !address.is_multicast() && !address.is_unspecified());
        assert!(bytes.len() >= 18 && bytes[14..18] == address.octets(), "it is what was said");
    }
    if let Some(request) = ArpRequest::read(bytes) {
        let answer = request.answer(OURS);
        assert_eq!(answer.len(), 28);
        assert!(ArpRequest::read(&answer).is_none(), "nobody answers answers");
        let mut frame = Vec::new();
        write_frame(&mut frame, (OURS, CARD), ARP, &answer);
        assert_eq!(Frame::read(&frame[LENGTH..]).map(|it| it.payload), Some(&answer[..]));
    }
}

/// Requests and answers with some of their bytes changed.
pub(crate) fn arp(noise: &mut Noise) -> Vec<u8> {
    let address = noise.of(&[[10, 0, 2, 15], [0; 4], [127, 0, 0, 1], [224, 0, 0, 1], [255; 4]]);
    let kind = [0, 1, 8, 0, 6, 4, 0, noise.of(&[1, 1, 2, 3])];
    let mut packet = [&kind[..], &CARD.0, &address, &[0; 6], &[10, 0, 2, 2]].concat();
    change(noise, &mut packet);
    packet
}

/// An IPv6 packet about neighbours. Whatever it asks, the answer can be read and is short.
pub(crate) fn hear_neighbour(bytes: &[u8]) {
    let Some(packet) = Packet::read(IPV6, bytes) else { return };
    assert!(packet.payload.len() <= bytes.len());
    if packet.protocol != ICMPV6 {
        return;
    }
    let lan = LanV6 { prefix: PREFIX, gateway: GATEWAY };
    let message = match Question::read(&packet) {
        Some(Question::Router) => advertise(&lan, OURS, 1500),
        Some(Question::Neighbour(wanted)) => answer(wanted, OURS),
        Some(Question::Other) | None => return,
    };
    assert_eq!(packet.hops, 255, "a question from beyond a router is none");
    let mut frame = Vec::new();
    let ends = Ends { cards: (OURS, CARD), addresses: (GATEWAY.into(), packet.from) };
    message.draft().write(&mut frame, &ends);
    let frame = Frame::read(&frame[LENGTH..]).expect("a frame of ours");
    let said = Packet::read(frame.kind, frame.payload);
    // Nobody has an address of the other kind.
    if packet.from.is_ipv6() {
        let said = said.expect("a packet of ours");
        assert!(said.is_sound() && said.whole.len() <= 1280);
        assert_ne!(Question::read(&said), Some(Question::Router), "nobody answers answers");
    }
}

/// Solicitations of routers and of neighbours, with some of their bytes changed.
pub(crate) fn neighbour(noise: &mut Noise) -> Vec<u8> {
    let kind = noise.of(&[133, 133, 135, 135, 134, 136, 137, 128]);
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    message.extend(GATEWAY.octets());
    message.extend([1, 1]);
    message.extend(CARD.0);
    let from = noise.of(&[GATEWAY, PREFIX, Ipv6Addr::UNSPECIFIED, Ipv6Addr::LOCALHOST]);
    let to = noise.of(&[GATEWAY, Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2)]);
    let ends = Ends { cards: (CARD, OURS), addresses: (from.into(), to.into()) };
    let mut frame = Vec::new();
    Draft { protocol: ICMPV6, header: &message, checksum: 2, data: &[] }.write(&mut frame, &ends);
    let mut packet = frame.split_off(LENGTH + container::net::user::packet::ETHERNET);
    change(noise, &mut packet);
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
