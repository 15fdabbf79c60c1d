//! IPv6 of the guest, where the pod has it: a network of the guest's own (RFC 4193), which we
//! advertise on the tap as its router, and outside the pod's address. Names are told by IPv4.
//!
//! Threats: what the guest says to its router is answered with the same few bytes at most twice a
//! second.

use std::fs;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use anyhow::Context as _;
use host::mac::Mac;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, socket_with, sockopt};
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

use crate::net::link::{Link, Links, Pod};
use crate::net::user::lan::LanV6;
use crate::net::user::neighbours::{ALL_NODES, advertise};
use crate::settings::value::Value as _;

/// Bits of the network.
pub(super) const MASK: u8 = 64;
/// The router's own address on the link, from which it speaks.
const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
/// All routers of the link.
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
/// Who asks for the router (RFC 4861, 4.1).
const SOLICITATION: u8 = 133;
/// How often it is told without a question: a router is one for 9000 seconds.
const REMINDER: Duration = Duration::from_secs(600);
/// Between two answers.
const BREATH: Duration = Duration::from_millis(500);
/// Whether packets may pass through.
const FORWARD: &str = "/proc/sys/net/ipv6/conf/all/forwarding";

/// The guest's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix(pub(super) Ipv6Addr);

impl Prefix {
    /// That of the guest with this card, if the pod has a way outside by IPv6.
    pub(super) fn choose(pod: &Pod, uplink: &Link, mac: Mac) -> Option<Self> {
        let there = pod.default_v6 == Some(uplink.index) && pod.has_ipv6(uplink);
        there.then(|| Self::of(mac))
    }

    /// The same card has the same network each time.
    fn of(mac: Mac) -> Self {
        let md5::Digest(sum) = md5::compute(mac.show());
        let mut bytes = [0; 16];
        bytes[0] = 0xfd;
        bytes[1..6].copy_from_slice(&sum[..5]);
        Self(bytes.into())
    }

    /// The router's address in it.
    pub(super) fn router(self) -> Ipv6Addr {
        let mut bytes = self.0.octets();
        bytes[15] = 1;
        bytes.into()
    }
}

/// The router, while it is one.
pub(super) struct Router {
    socket: UdpSocket,
    message: Vec<u8>,
    index: u32,
    /// What was changed, and what it was.
    changed: Vec<(fs::File, &'static str)>,
}

impl Router {
    /// Makes the tap one of the router's. What was done before an error stays with the tap.
    pub(super) async fn open(
        links: &Links,
        (tap, index): (&str, u32),
        (prefix, mac, mtu): (Prefix, Mac, u16),
        uplink: &str,
    ) -> anyhow::Result<Self> {
        for address in [ROUTER, prefix.router()] {
            links.add_v6(index, address, MASK).await?;
        }
        let socket = listen(tap, index)?;
        let lan = LanV6 { prefix: prefix.0, gateway: ROUTER };
        let message = advertise(&lan, mac, mtu).draft().header.to_vec();
        let mut router = Self { socket, message, index, changed: Vec::new() };
        router.forward(uplink)?;
        Ok(router)
    }

    /// Lets packets through, if they are not already.
    fn forward(&mut self, uplink: &str) -> anyhow::Result<()> {
        let said = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        if said(FORWARD) == "1" {
            return Ok(());
        }
        // Who passes packets on hears no routers any more, unless it is told to: the pod's own way
        // outside may be one that it has heard.
        let hears = format!("/proc/sys/net/ipv6/conf/{uplink}/accept_ra");
        let wanted = [(hears.as_str(), "1", b"2"), (FORWARD, "0", b"1")];
        for (path, was, is) in wanted {
            if said(path) == was {
                let file = fs::OpenOptions::new().write(true).open(path);
                let file = file.and_then(|file| file.write_all_at(is, 0).map(|()| file));
                let file = file.map_err(|error| {
                    anyhow::anyhow!(
                        "net.ipv6.conf.all.forwarding is 0 and cannot be changed ({error}): \
                         --sysctl net.ipv6.conf.all.forwarding=1 does it"
                    )
                })?;
                self.changed.push((file, was));
            }
        }
        Ok(())
    }

    /// Tells the guest who its router is, until it is dropped.
    pub(super) async fn run(&self) {
        let mut message = [0; 64];
        loop {
            let to = SocketAddrV6::new(ALL_NODES, 0, 0, self.index);
            if let Err(error) = self.socket.send_to(&self.message, to).await {
                tracing::debug!("router advertisement: {error}");
            }
            sleep(BREATH).await;
            let asked = async {
                loop {
                    match self.socket.recv(&mut message).await {
                        Ok(1..) if message[0] == SOLICITATION => return,
                        Ok(_) => {}
                        Err(_) => sleep(BREATH).await,
                    }
                }
            };
            timeout(REMINDER, asked).await.ok();
        }
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        for (file, was) in self.changed.iter().rev() {
            if let Err(error) = file.write_all_at(was.as_bytes(), 0) {
                tracing::warn!("whether the pod passes IPv6 on: {error}");
            }
        }
    }
}

/// A socket for what neighbours say to routers.
fn listen(tap: &str, index: u32) -> anyhow::Result<UdpSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let kind = Some(ipproto::ICMPV6);
    let socket = socket_with(AddressFamily::INET6, SocketType::RAW, flags, kind)
        .context("its router needs --cap-add NET_RAW")?;
    // Who is nearer than a router has not less.
    sockopt::set_ipv6_multicast_hops(&socket, 255)?;
    sockopt::set_ipv6_add_membership(&socket, &ALL_ROUTERS, index)?;
    bind(&socket, &SocketAddrV6::new(ROUTER, 0, 0, index)).context("the router's address")?;
    let socket = UdpSocket::from_std(std::net::UdpSocket::from(socket))?;
    socket.bind_device(Some(tap.as_bytes()))?;
    Ok(socket)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_card_has_a_network_of_its_own_and_the_same_each_time() {
        let [one, other] = [1, 2].map(|last| Prefix::of(Mac([2, 0, 0, 0, 0, last])));
        assert_ne!(one, other);
        assert_eq!(one, Prefix::of(Mac([2, 0, 0, 0, 0, 1])));
        let segments = one.0.segments();
        assert_eq!((segments[0] >> 8, &segments[3..]), (0xfd, &[0; 5][..]));
        assert_eq!(one.router().segments()[7], 1);
    }
}
