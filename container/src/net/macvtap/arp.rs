//! Learns the guest's address from its ARP packets (RFC 826). A host broadcasts one before it
//! reaches any other host.
//!
//! Threats: any host on the network can spoof these packets, as it can for every other host.
//! Special addresses are ignored, and the number of log messages is limited.

use std::io;
use std::net::Ipv4Addr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use host::mac::Mac;
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::log::LineLimit;

pub type LearnedAddress = watch::Receiver<Option<Ipv4Addr>>;

/// The pause after an error, which may repeat immediately.
const RETRY_DELAY: Duration = Duration::from_millis(100);
const ARP: u16 = 0x0806;
/// Ethernet, IPv4, and the lengths of their addresses.
const KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];

pub(super) struct Listener {
    /// A packet socket. Its packets can be received like datagrams.
    socket: UdpSocket,
    mac: Mac,
    address: watch::Sender<Option<Ipv4Addr>>,
    lines: Mutex<LineLimit>,
}

impl Listener {
    /// Needs NET_RAW.
    pub(super) fn open(mac: Mac, interface: u32) -> io::Result<Self> {
        let socket = host::net::packet::packet_socket(ARP, interface)?;
        let socket = UdpSocket::from_std(std::net::UdpSocket::from(socket))?;
        Ok(Self {
            socket,
            mac,
            address: watch::Sender::default(),
            lines: Mutex::new(LineLimit::new(1)),
        })
    }

    pub(super) fn learned_address(&self) -> LearnedAddress {
        self.address.subscribe()
    }

    /// Receives packets until the future is dropped.
    pub(super) async fn listen(&self) {
        let mut packet = [0; 64];
        loop {
            // An interface that is down causes errors, but may come up again.
            let Ok(length) = self.socket.recv(&mut packet).await else {
                sleep(RETRY_DELAY).await;
                continue;
            };
            let Some(address) = sender_address(&packet[..length], self.mac) else { continue };
            self.learn(address);
        }
    }

    /// Stores and logs the address of a packet, which may be spoofed.
    fn learn(&self, address: Ipv4Addr) {
        let changed = |last: &mut Option<Ipv4Addr>| last.replace(address) != Some(address);
        if !self.address.send_if_modified(changed) {
            return;
        }
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.take(Instant::now()) {
            tracing::info!("the guest has the address {address}");
        } else {
            tracing::debug!("the guest has the address {address}");
        }
    }
}

/// The sender's address in an ARP packet, if the sender has this MAC address and the address is one
/// of a host.
pub fn sender_address(packet: &[u8], mac: Mac) -> Option<Ipv4Addr> {
    let (kind, rest) = packet.split_first_chunk::<6>()?;
    let (_, rest) = rest.split_first_chunk::<2>()?;
    let (card, rest) = rest.split_first_chunk::<6>()?;
    let address = Ipv4Addr::from(*rest.first_chunk::<4>()?);
    let none = address.is_unspecified()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_broadcast();
    (*kind == KIND && *card == mac.0 && !none).then_some(address)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_the_guests_own_address_is_learned() {
        let mac = Mac([2, 0, 0, 0, 0, 9]);
        let packet = |address: [u8; 4]| {
            let from = [&KIND[..], &[0, 1], &mac.0, &address].concat();
            [from, vec![0; 6], vec![10, 0, 0, 1]].concat()
        };
        let good = packet([10, 0, 0, 7]);
        assert_eq!(sender_address(&good, mac), Some(Ipv4Addr::new(10, 0, 0, 7)));
        assert_eq!(sender_address(&good, Mac([2, 0, 0, 0, 0, 8])), None);
        for cut in 0..18 {
            assert_eq!(sender_address(&good[..cut], mac), None, "{cut}");
        }
        for none in [[0; 4], [127, 0, 0, 1], [169, 254, 1, 1], [224, 0, 0, 1], [255; 4]] {
            assert_eq!(sender_address(&packet(none), mac), None, "{none:?}");
        }
        let mut other = good;
        other[3] = 6;
        assert_eq!(sender_address(&other, mac), None);
    }
}
