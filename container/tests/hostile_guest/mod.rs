//! A guest that sends anything to the pod's DHCP and DNS, and resolvers that answer anything.

use std::net::Ipv4Addr;

use container::net::dhcp;
use container::net::dns::{self, LocalNames, Query, Transport};
use container::net::hosts::Hosts;
use container::net::resolv::Resolv;
use host::mac::Mac;

const GATEWAY: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(172, 30, 0, 2);
const SEARCH: &str = "search win.svc.cluster.local svc.cluster.local\noptions ndots:5\n";

/// Sends a DHCP message. Only the client's card is corrected.
pub(crate) fn dhcp(message: &[u8]) {
    let config = dhcp::Config {
        mac: Mac([2, 0, 0, 0, 0, 1]),
        address: GUEST,
        mask: 24,
        gateway: GATEWAY,
        dns: GATEWAY,
        host: "Windows".into(),
        search: Resolv::read(SEARCH).search,
        mtu: Some(1450),
    };
    let mut message = message.to_vec();
    if let Some(start) = message.get_mut(..3) {
        start.copy_from_slice(&[1, 1, 6]);
    }
    if let Some(card) = message.get_mut(28..34) {
        card.copy_from_slice(&config.mac.0);
    }
    let Some(answer) = dhcp::answer(&config, &message) else { return };
    assert!([GUEST, Ipv4Addr::BROADCAST].contains(&answer.to));
    assert!((300..=1472).contains(&answer.payload.len()));
    assert_eq!(answer.payload[4..8], message[4..8], "the transaction ID is kept");
    assert_eq!(dhcp::answer(&config, &answer.payload), None, "an answer gets no answer");
}

/// Sends a DNS query. A resolver answers with the rest of the bytes.
pub(crate) fn dns(data: &[u8]) {
    let Some((cut, data)) = data.split_first() else { return };
    let (message, told) = data.split_at(usize::from(*cut).min(data.len()));
    let query = match Query::read(message) {
        Ok(query) => query,
        Err(refusal) => return no_question(refusal.as_deref()),
    };
    let local = LocalNames {
        gateway: GATEWAY,
        guest: GUEST,
        default_gateway: None,
        host: "Windows".into(),
    };
    // Use the same bytes as a hosts file.
    let hosts = Hosts::read(&String::from_utf8_lossy(told));
    for answer in [local.answer(&query, &hosts), Some(query.refuse(dns::ResponseCode::ServFail))]
        .into_iter()
        .flatten()
    {
        assert!(dns::is_answer(message, &answer));
        assert!(query.fit(answer, Transport::Udp).len() <= 4096);
    }
    let resolv = Resolv::read(SEARCH);
    let names = dns::candidates(&query, &resolv);
    assert!((1..=1 + resolv.search.len()).contains(&names.len()));
    for name in names {
        let Some(sent) = query.forward([7, 9], name.as_deref()) else { continue };
        // An attacker's response, with the right ID and question.
        let mut received = sent.clone();
        received[2] |= 0x80;
        received.extend(told);
        for (byte, noise) in received[6..12].iter_mut().zip(told) {
            *byte = *noise;
        }
        assert!(dns::is_answer(&sent, &received));
        if let Some(answer) = dns::rename(&query, received, name.as_deref()) {
            assert_eq!(answer[..2], message[..2]);
            let fit = query.fit(answer, Transport::Udp);
            assert!(fit.len() <= 4096 && dns::is_answer(message, &fit));
        }
        assert!(told.starts_with(&[7, 9]) || !dns::is_answer(&sent, told));
    }
}

/// An invalid query gets an answer without records, or none.
fn no_question(refusal: Option<&[u8]>) {
    let Some(refusal) = refusal else { return };
    assert_eq!(refusal.len(), 12);
    assert_ne!(dns::response_code(refusal), dns::ResponseCode::NoError);
    assert_eq!(Query::read(refusal), Err(None), "an answer gets no answer");
}

/// Reads any bytes as a file with resolvers.
pub(crate) fn resolv(text: &[u8]) {
    let resolv = Resolv::read(&String::from_utf8_lossy(text));
    assert!(resolv.servers.len() <= 3 && resolv.search.len() <= 32);
    assert!(resolv.attempts >= 1 && resolv.timeout.as_secs() >= 1);
    assert!(resolv.search.iter().all(|domain| !domain.is_empty() && domain.is_ascii()));
}
