//! IPv6 for the guest, if the pod has it. The guest gets a network of its own (RFC 4193), which we
//! advertise on the tap as its router. Outside, its packets have the pod's address. DNS is served
//! by IPv4 only.
//!
//! Threats: the guest may send any number of router solicitations. The answer is always the same
//! few bytes, at most twice per second.

use std::fs;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use anyhow::Context as _;
use host::mac::Mac;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, ipproto, socket_with, sockopt};
use tokio::net::UdpSocket;
use tokio::time::{sleep, timeout};

use crate::net::link::{Link, Links, PodNetwork};
use crate::net::user::lan::LanV6;
use crate::net::user::neighbors::{ALL_NODES, advertise_router};
use crate::settings::value::Value as _;

/// Prefix length of the network, in bits.
pub(super) const MASK: u8 = 64;
/// The router's link-local address, the source of its advertisements.
const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
/// The multicast group of all routers on the link.
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
/// The type of router solicitations (RFC 4861, 4.1).
const SOLICITATION: u8 = 133;
/// The interval of unsolicited advertisements, each of which is valid for 9000 seconds.
const INTERVAL: Duration = Duration::from_secs(600);
/// The minimum time between two advertisements.
const MIN_DELAY: Duration = Duration::from_millis(500);
const FORWARD: &str = "/proc/sys/net/ipv6/conf/all/forwarding";

/// The guest's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Prefix(pub(super) Ipv6Addr);

impl Prefix {
    /// The network of the guest with this MAC address, if the pod has an IPv6 default route.
    pub(super) fn choose(pod: &PodNetwork, uplink: &Link, mac: Mac) -> Option<Self> {
        let there = pod.default_v6 == Some(uplink.index) && pod.has_ipv6(uplink);
        there.then(|| Self::of(mac))
    }

    /// Derives the network from the MAC address, so that it does not change between starts.
    fn of(mac: Mac) -> Self {
        let md5::Digest(sum) = md5::compute(mac.show());
        let mut bytes = [0; 16];
        bytes[0] = 0xfd;
        bytes[1..6].copy_from_slice(&sum[..5]);
        Self(bytes.into())
    }

    pub(super) fn router(self) -> Ipv6Addr {
        let mut bytes = self.0.octets();
        bytes[15] = 1;
        bytes.into()
    }
}

pub(super) struct Config<'a> {
    pub(super) tap: &'a str,
    /// Index of the tap interface.
    pub(super) index: u32,
    pub(super) prefix: Prefix,
    /// MAC address of the gateway.
    pub(super) mac: Mac,
    pub(super) mtu: u16,
    pub(super) uplink: &'a str,
}

pub(super) struct Router {
    socket: UdpSocket,
    message: Vec<u8>,
    index: u32,
    /// Settings of the kernel that were changed, with their former values.
    changed: Vec<(fs::File, &'static str)>,
}

impl Router {
    /// Adds the router's addresses to the tap and enables forwarding. After an error, the addresses
    /// stay until the tap is removed.
    pub(super) async fn open(links: &Links, config: &Config<'_>) -> anyhow::Result<Self> {
        let Config { tap, index, prefix, mac, mtu, uplink } = *config;
        for address in [ROUTER, prefix.router()] {
            links.add_v6(index, address, MASK).await?;
        }
        let socket = listen(tap, index)?;
        let lan = LanV6 { prefix: prefix.0, gateway: ROUTER };
        let message = advertise_router(&lan, mac, mtu).payload().header.to_vec();
        let mut router = Self { socket, message, index, changed: Vec::new() };
        router.forward(uplink)?;
        Ok(router)
    }

    /// Enables forwarding, if it is not enabled already.
    fn forward(&mut self, uplink: &str) -> anyhow::Result<()> {
        let value = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        if value(FORWARD) == "1" {
            return Ok(());
        }
        // With forwarding, the kernel ignores router advertisements unless accept_ra is 2. The
        // pod's own default route may come from one.
        let accept_ra = format!("/proc/sys/net/ipv6/conf/{uplink}/accept_ra");
        let wanted = [(accept_ra.as_str(), "1", b"2"), (FORWARD, "0", b"1")];
        for (path, was, is) in wanted {
            if value(path) == was {
                let file = fs::OpenOptions::new().write(true).open(path);
                let file = file.and_then(|file| file.write_all_at(is, 0).map(|()| file));
                let file = file.map_err(|error| {
                    anyhow::anyhow!(
                        "net.ipv6.conf.all.forwarding is 0 and cannot be changed ({error}): add \
                         --sysctl net.ipv6.conf.all.forwarding=1"
                    )
                })?;
                self.changed.push((file, was));
            }
        }
        Ok(())
    }

    /// Advertises the router to the guest, until the future is dropped.
    pub(super) async fn run(&self) {
        let mut message = [0; 64];
        loop {
            let to = SocketAddrV6::new(ALL_NODES, 0, 0, self.index);
            if let Err(error) = self.socket.send_to(&self.message, to).await {
                tracing::debug!("router advertisement: {error}");
            }
            sleep(MIN_DELAY).await;
            let solicited = async {
                loop {
                    match self.socket.recv(&mut message).await {
                        Ok(1..) if message[0] == SOLICITATION => return,
                        Ok(_) => {}
                        Err(_) => sleep(MIN_DELAY).await,
                    }
                }
            };
            timeout(INTERVAL, solicited).await.ok();
        }
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        for (file, was) in self.changed.iter().rev() {
            if let Err(error) = file.write_all_at(was.as_bytes(), 0) {
                tracing::warn!("IPv6 forwarding cannot be restored: {error}");
            }
        }
    }
}

/// A socket for messages to routers.
fn listen(tap: &str, index: u32) -> anyhow::Result<UdpSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let kind = Some(ipproto::ICMPV6);
    let socket = socket_with(AddressFamily::INET6, SocketType::RAW, flags, kind)
        .context("its router needs --cap-add NET_RAW")?;
    // Hosts ignore advertisements with less, which may come from beyond a router.
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
    fn each_card_has_its_own_stable_ipv6_prefix() {
        let [one, other] = [1, 2].map(|last| Prefix::of(Mac([2, 0, 0, 0, 0, last])));
        assert_ne!(one, other);
        assert_eq!(one, Prefix::of(Mac([2, 0, 0, 0, 0, 1])));
        let segments = one.0.segments();
        assert_eq!((segments[0] >> 8, &segments[3..]), (0xfd, &[0; 5][..]));
        assert_eq!(one.router().segments()[7], 1);
    }
}
