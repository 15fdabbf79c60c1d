//! What the gateway itself serves the guest: addresses by DHCP, and names by DNS.

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::rc::Rc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::spawn_local;
use tokio::time::timeout;

use super::connection::Pair;
use super::datagrams;
use super::network::Network;
use super::packet::{Datagram, Packet};
use crate::net::dhcp;
use crate::net::dns::{self, Way};
use crate::net::relay::{Relay, read_framed, write_framed};

/// How long a connection for names may say nothing (RFC 7766, 6.2.3).
const IDLE: Duration = Duration::from_secs(30);

/// Answers a datagram to a service of the gateway; false when it is for none.
pub fn hear(network: &Rc<Network>, packet: &Packet<'_>, datagram: &Datagram<'_>) -> bool {
    match (packet.to, datagram.to) {
        (IpAddr::V4(to), dhcp::SERVER_PORT) if to.is_broadcast() || to == network.lan.gateway => {
            lease(network, datagram);
            true
        }
        (to, dns::PORT) if to == network.gateway(to) => {
            let (network, message) = (network.clone(), datagram.data.to_vec());
            let pair = Pair::of(packet, (datagram.from, datagram.to));
            spawn_local(async move {
                let answer = network.relay.answer(&message, Way::Datagram).await;
                if let Some(answer) = answer {
                    datagrams::pass(&network, &pair, &answer);
                }
            });
            true
        }
        _ => false,
    }
}

fn lease(network: &Network, datagram: &Datagram<'_>) {
    let lan = &network.lan;
    let config = dhcp::Config {
        mac: network.card(),
        address: lan.guest,
        mask: lan.prefix,
        gateway: lan.gateway,
        dns: lan.gateway,
        host: network.relay.host().to_owned(),
        search: network.relay.resolv().search.clone(),
        mtu: Some(lan.mtu),
    };
    let Some(answer) = dhcp::answer(&config, datagram.data) else { return };
    let guest = (IpAddr::V4(answer.to), dhcp::CLIENT_PORT).into();
    let pair = Pair { guest, peer: (IpAddr::V4(lan.gateway), dhcp::SERVER_PORT).into() };
    datagrams::pass(network, &pair, &answer.payload);
}

/// The socket of a connection for names, whose other end is served here.
///
/// # Errors
///
/// When there are no sockets left.
pub fn connect(network: &Rc<Network>) -> io::Result<TcpStream> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = std::net::TcpStream::connect(listener.local_addr()?)?;
    let (far, from) = listener.accept()?;
    if from != near.local_addr()? {
        // Somebody else in the pod was faster.
        return Err(io::ErrorKind::AddrInUse.into());
    }
    near.set_nonblocking(true)?;
    far.set_nonblocking(true)?;
    let (near, far) = (TcpStream::from_std(near)?, TcpStream::from_std(far)?);
    let network = network.clone();
    spawn_local(async move {
        // It ends as the guest's connection does, or when it says nothing for too long.
        answer(&network.relay, far).await.ok();
    });
    Ok(near)
}

async fn answer(relay: &Relay, mut stream: TcpStream) -> io::Result<()> {
    while let Ok(message) = timeout(IDLE, read_framed(&mut stream)).await {
        let Some(answer) = relay.answer(&message?, Way::Stream).await else { return Ok(()) };
        write_framed(&mut stream, &answer).await?;
    }
    Ok(())
}
