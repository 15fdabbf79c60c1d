//! The services of the gateway: DHCP and DNS.

use std::net::IpAddr;
use std::rc::Rc;

use tokio::task::spawn_local;

use super::datagrams;
use super::name_server::MAX_QUESTION;
use super::network::Network;
use super::packet::{Datagram, Packet, Pair};
use super::quota::Slots;
use crate::net::dhcp;
use crate::net::dns::{self, Transport};

pub struct Server {
    /// Slots of DNS questions by UDP.
    questions: Slots,
}

impl Server {
    pub fn new(questions: usize) -> Self {
        Self { questions: Slots::new(questions) }
    }

    /// Answers a datagram. Returns false if the gateway has no such service.
    pub fn handle(
        &self,
        network: &Rc<Network>,
        packet: &Packet<'_>,
        datagram: &Datagram<'_>,
    ) -> bool {
        match (packet.to, datagram.to) {
            (IpAddr::V4(to), dhcp::SERVER_PORT)
                if to.is_broadcast() || to == network.lan.gateway =>
            {
                answer_dhcp(network, datagram);
                true
            }
            (to, dns::PORT) if to == network.gateway(to) => {
                let pair = Pair::of(packet, (datagram.from, datagram.to));
                self.answer(network, pair, datagram.data);
                true
            }
            _ => false,
        }
    }

    /// Answers a DNS question. Without a free slot it is dropped, and the guest asks again.
    fn answer(&self, network: &Rc<Network>, pair: Pair, question: &[u8]) {
        if question.len() > MAX_QUESTION {
            return;
        }
        let Some(slot) = self.questions.take() else { return };
        let (network, question) = (network.clone(), question.to_vec());
        spawn_local(async move {
            if let Some(answer) = network.relay.answer(&question, Transport::Udp).await {
                datagrams::send_to_guest(&network, &pair, &answer);
            }
            drop(slot);
        });
    }
}

fn answer_dhcp(network: &Network, datagram: &Datagram<'_>) {
    let (lan, relay) = (&network.lan, &network.relay);
    let config = dhcp::Config {
        mac: network.card(),
        address: lan.guest,
        mask: lan.prefix,
        gateway: lan.gateway,
        dns: lan.gateway,
        host: relay.host().to_owned(),
        search: relay.resolv().search.clone(),
        mtu: Some(lan.mtu),
    };
    let Some(answer) = dhcp::answer(&config, datagram.data) else { return };
    let guest = (IpAddr::V4(answer.to), dhcp::CLIENT_PORT).into();
    let pair = Pair { guest, peer: (IpAddr::V4(lan.gateway), dhcp::SERVER_PORT).into() };
    datagrams::send_to_guest(network, &pair, &answer.payload);
}
