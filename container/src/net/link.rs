//! The pod's interfaces, addresses and routes, by rtnetlink(7).
//!
//! The pod's network has one owner at a time, which replaces what a killed predecessor left.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::TryStreamExt;
use host::mac::Mac;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::{AddressAttribute, AddressHeaderFlags};
use rtnetlink::packet_route::link::{
    AfSpecInet, AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InetDevConf, InfoData, InfoKind,
    InfoMacVlan, LinkAttribute, LinkInfo, LinkMessage, MacVlanMode, MacVtapMode,
};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteType};
use rtnetlink::{Handle, LinkMacVtap, LinkUnspec, RouteMessageBuilder};
use tokio::time::sleep;

use crate::status::{Failure, Status};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) address: Ipv4Addr,
    pub(super) mask: u8,
}

impl Block {
    pub(super) fn new(address: Ipv4Addr, mask: u8) -> Self {
        Self { address, mask: mask.min(32) }
    }

    fn bits(mask: u8) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(mask)).unwrap_or(0)
    }

    /// Whether it is 0.0.0.0/0, the default route.
    pub(super) fn is_default(self) -> bool {
        self.mask == 0
    }

    pub(super) fn overlaps(self, other: Self) -> bool {
        let bits = Self::bits(self.mask.min(other.mask));
        (u32::from(self.address) ^ u32::from(other.address)) & bits == 0
    }
}

/// The addresses at which other hosts may reach the pod.
pub async fn own_addresses() -> anyhow::Result<Vec<IpAddr>> {
    let pod = Links::open()?.read().await?;
    let local = |address: &IpAddr| match address {
        IpAddr::V4(it) => it.is_loopback() || it.is_link_local(),
        IpAddr::V6(it) => it.is_loopback() || it.is_unicast_link_local(),
    };
    Ok(pod.addresses.into_iter().map(|(_, it, _)| it).filter(|it| !local(it)).collect())
}

/// The abstract socket whose holder owns the pod's network.
const OWNER: &str = "transom/nat";

/// The maximum time until the rules of a killed predecessor are removed.
const MAX_WAIT: Duration = Duration::from_secs(20);
/// The usual time. If it takes longer, because the host is busy, a message says so.
const LOG_AFTER: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Becomes the owner of the pod's network. The kernel frees the socket's name when its holder ends.
/// A killed predecessor leaves a process that holds it until the rules are removed.
pub(super) async fn claim_network() -> anyhow::Result<UnixListener> {
    let name = SocketAddr::from_abstract_name(OWNER).context("the name of the owner")?;
    let (start, mut logged) = (Instant::now(), false);
    loop {
        if let Ok(owner) = UnixListener::bind_addr(&name) {
            return Ok(owner);
        }
        let waited = start.elapsed();
        if waited >= LOG_AFTER && !logged {
            logged = true;
            tracing::info!(
                "another Transom uses the pod's network: waiting up to {MAX_WAIT:?} for its end"
            );
        }
        if waited >= MAX_WAIT {
            return Err(Failure::new(
                Status::Network,
                "another Transom uses the pod's network: run each in a pod of its own, or set \
                 NETWORK=user",
            ));
        }
        sleep(POLL_INTERVAL).await;
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) mtu: u32,
    /// Kind of a virtual interface. Nothing for a card.
    pub(super) kind: Option<InfoKind>,
    /// Whether it is a macvlan in bridge mode, which can communicate with others on the same card.
    pub(super) is_bridged: bool,
}

impl Link {
    fn of(message: &LinkMessage) -> Self {
        let mut link = Self { index: message.header.index, ..Self::default() };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::LinkInfo(infos) => infos.iter().for_each(|info| link.learn(info)),
                _ => {}
            }
        }
        link
    }

    fn learn(&mut self, info: &LinkInfo) {
        match info {
            LinkInfo::Kind(kind) => self.kind = Some(kind.clone()),
            LinkInfo::Data(InfoData::MacVlan(data)) => {
                self.is_bridged = data.contains(&InfoMacVlan::Mode(MacVlanMode::Bridge));
            }
            _ => {}
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct PodNetwork {
    pub(super) links: Vec<Link>,
    /// Index of the interface, address, and prefix length.
    pub(super) addresses: Vec<(u32, IpAddr, u8)>,
    /// Destinations of the routes.
    pub(super) routes: Vec<Block>,
    /// Interface of the IPv4 default route.
    pub(super) default: Option<u32>,
    /// Interface of the IPv6 default route.
    pub(super) default_v6: Option<u32>,
}

impl PodNetwork {
    pub(super) fn find(&self, name: &str) -> Option<&Link> {
        self.links.iter().find(|link| link.name == name)
    }

    /// The interface to the network: the one with this name, else the choice of the reference
    /// image.
    pub(super) fn uplink(&self, name: Option<&str>) -> anyhow::Result<&Link> {
        if let Some(name) = name {
            return self.find(name).ok_or_else(|| {
                let names: Vec<_> = self.links.iter().map(|link| link.name.as_str()).collect();
                let sentence = format!(
                    "DEV={name}: there is no such interface: choose one of {}",
                    names.join(", ")
                );
                Failure::new(Status::Network, sentence)
            });
        }
        // Interfaces that Kubernetes adds to a pod take precedence over its own.
        let added = ["net3", "net2", "net1", "net0"].into_iter().find_map(|name| self.find(name));
        let default = || self.links.iter().find(|link| Some(link.index) == self.default);
        added.or_else(default).or_else(|| self.find("eth0")).ok_or_else(|| {
            Failure::new(
                Status::Network,
                "the pod has no network (no default route and no eth0): attach it to one, or set \
                 NETWORK=none",
            )
        })
    }

    /// The first IPv4 address of an interface.
    pub(super) fn address(&self, link: &Link) -> Option<Ipv4Addr> {
        self.addresses.iter().find_map(|(index, address, _)| match address {
            IpAddr::V4(address) if *index == link.index => Some(*address),
            _ => None,
        })
    }

    /// Whether an interface has an IPv6 address that is not link-local.
    pub(super) fn has_ipv6(&self, link: &Link) -> bool {
        self.addresses.iter().any(|(index, address, _)| match address {
            IpAddr::V6(address) => *index == link.index && !address.is_unicast_link_local(),
            IpAddr::V4(_) => false,
        })
    }

    pub(super) fn used(&self) -> Vec<Block> {
        let addresses = self.addresses.iter().filter_map(|(_, address, mask)| match address {
            IpAddr::V4(address) => Some(Block::new(*address, *mask)),
            IpAddr::V6(_) => None,
        });
        self.routes.iter().copied().chain(addresses).collect()
    }
}

pub(super) struct Links(Handle);

impl Links {
    pub(super) fn open() -> anyhow::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection().context("rtnetlink")?;
        // The task ends with the last handle.
        tokio::spawn(connection);
        Ok(Self(handle))
    }

    pub(super) async fn read(&self) -> anyhow::Result<PodNetwork> {
        let links = self.0.link().get().execute().map_ok(|message| Link::of(&message));
        let mut pod = PodNetwork {
            links: links.try_collect().await.context("links")?,
            ..PodNetwork::default()
        };
        let mut addresses = self.0.address().get().execute();
        while let Some(message) = addresses.try_next().await.context("addresses")? {
            let (index, mask) = (message.header.index, message.header.prefix_len);
            // On a point-to-point link, `Address` is the peer's and `Local` is ours.
            let local = message.attributes.iter().find_map(|it| match it {
                AddressAttribute::Local(address) => Some(*address),
                _ => None,
            });
            let any = message.attributes.iter().find_map(|it| match it {
                AddressAttribute::Address(address) => Some(*address),
                _ => None,
            });
            pod.addresses.extend(local.or(any).map(|address| (index, address, mask)));
        }
        let all = RouteMessageBuilder::<Ipv4Addr>::new().build();
        let mut routes = self.0.route().get(all).execute();
        while let Some(message) = routes.try_next().await.context("routes")? {
            if message.header.address_family != AddressFamily::Inet {
                continue;
            }
            let mask = message.header.destination_prefix_length;
            let mut to = (0, Ipv4Addr::UNSPECIFIED);
            for attribute in &message.attributes {
                match attribute {
                    RouteAttribute::Oif(index) => to.0 = *index,
                    RouteAttribute::Destination(RouteAddress::Inet(address)) => to.1 = *address,
                    _ => {}
                }
            }
            if mask == 0 && to.0 != 0 {
                pod.default = pod.default.or(Some(to.0));
            }
            pod.routes.push(Block::new(to.1, mask));
        }
        pod.default_v6 = self.default_v6().await;
        Ok(pod)
    }

    /// The interface of the IPv6 default route. Some kernels do not have IPv6.
    async fn default_v6(&self) -> Option<u32> {
        let all = RouteMessageBuilder::<Ipv6Addr>::new().build();
        let mut routes = self.0.route().get(all).execute();
        let mut default = None;
        while let Ok(Some(message)) = routes.try_next().await {
            let header = &message.header;
            if header.address_family != AddressFamily::Inet6
                || header.destination_prefix_length != 0
                || header.kind != RouteType::Unicast
            {
                continue;
            }
            default = default.or(message.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Oif(index) => Some(*index),
                _ => None,
            }));
        }
        default
    }

    /// Removes the interface of this name that a killed predecessor left.
    pub(super) async fn clear(&self, name: &str) -> anyhow::Result<()> {
        let pod = self.read().await?;
        match pod.find(name) {
            None => Ok(()),
            Some(Link { kind: Some(InfoKind::Tun | InfoKind::MacVtap), index, .. }) => {
                self.delete(*index).await
            }
            Some(_) => {
                let sentence = format!(
                    "TAP={name}: the pod has another interface with this name: choose a new one"
                );
                Err(Failure::new(Status::Network, sentence))
            }
        }
    }

    /// Creates a macvtap in bridge mode on an interface. It is down at first.
    pub(super) async fn add_macvtap(
        &self,
        name: &str,
        on: u32,
        mac: Mac,
        mtu: u16,
    ) -> io::Result<()> {
        let link = LinkMacVtap::new(name, on, MacVtapMode::Bridge)
            .address(mac.0.to_vec())
            .mtu(u32::from(mtu))
            .build();
        self.0.link().add(link).execute().await.map_err(to_io)
    }

    /// Sets an interface up, without an IPv6 address, so that the pod itself does not send on it.
    pub(super) async fn raise(&self, index: u32) -> io::Result<()> {
        let none = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
        let silent = LinkUnspec::new_with_index(index);
        let silent = silent.append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![none])).build();
        // This fails on a kernel without IPv6, which adds no address anyway.
        self.0.link().change(silent).execute().await.ok();
        let up = LinkUnspec::new_with_index(index).up().build();
        self.0.link().change(up).execute().await.map_err(to_io)
    }

    pub(super) async fn delete(&self, index: u32) -> anyhow::Result<()> {
        self.0.link().del(index).execute().await.with_context(|| format!("interface {index}"))
    }

    pub(super) async fn set_mac(&self, index: u32, mac: Mac) -> anyhow::Result<()> {
        let link = LinkUnspec::new_with_index(index).address(mac.0.to_vec()).build();
        self.0.link().change(link).execute().await.context("the gateway's MAC address")
    }

    pub(super) async fn add(&self, index: u32, address: Ipv4Addr, mask: u8) -> anyhow::Result<()> {
        let request = self.0.address().add(index, address.into(), mask);
        request.execute().await.with_context(|| format!("the address {address}/{mask}"))
    }

    /// Adds an IPv6 address without duplicate address detection.
    pub(super) async fn add_v6(
        &self,
        index: u32,
        address: Ipv6Addr,
        mask: u8,
    ) -> anyhow::Result<()> {
        let mut request = self.0.address().add(index, address.into(), mask);
        request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        let added = request.execute().await.map_err(to_io);
        added.with_context(|| format!("the address {address}/{mask}"))
    }

    /// Enables IPv4 forwarding for an interface. Unlike /proc/sys, netlink is never read-only.
    pub(super) async fn forward(&self, index: u32) -> anyhow::Result<()> {
        let mut inet = InetDevConf::default();
        inet.forwarding = 1;
        let inet = AfSpecUnspec::Inet(vec![AfSpecInet::DevConfRequest(inet)]);
        let link = LinkUnspec::new_with_index(index);
        let link = link.append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![inet])).build();
        self.0.link().change(link).execute().await.context("forwarding")
    }
}

/// The kernel's error as an `io::Error` with its error number.
fn to_io(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}

/// Whether an interface is a card of the host. A pod has one only on the host's own network.
pub(super) fn is_card(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).join("device").exists()
}

pub(super) fn default_gateway() -> Option<Ipv4Addr> {
    gateway(&std::fs::read_to_string("/proc/net/route").unwrap_or_default())
}

/// The default gateway in `/proc/net/route`, whose numbers are in host byte order.
pub(super) fn gateway(routes: &str) -> Option<Ipv4Addr> {
    routes.lines().skip(1).find_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let number = |at: usize| u32::from_str_radix(fields.get(at)?, 16).ok();
        let (to, gateway, mask) = (number(1)?, number(2)?, number(7)?);
        (to == 0 && mask == 0 && gateway != 0).then(|| Ipv4Addr::from(gateway.to_ne_bytes()))
    })
}
