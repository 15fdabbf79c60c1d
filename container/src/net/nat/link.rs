//! The pod's interfaces, addresses and routes, by rtnetlink(7).

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use anyhow::Context;
use futures_util::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::{
    AfSpecInet, AfSpecUnspec, InetDevConf, InfoKind, LinkAttribute, LinkInfo, LinkMessage,
};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute};
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};

use super::choice::Block;
use crate::settings::words::Mac;
use crate::status::{Failure, Status};

/// An interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) mtu: u32,
    /// It is a tun or a tap.
    pub(super) is_tun: bool,
}

impl Link {
    fn of(message: &LinkMessage) -> Self {
        let mut link = Self { index: message.header.index, ..Self::default() };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::LinkInfo(infos) => {
                    link.is_tun = infos.contains(&LinkInfo::Kind(InfoKind::Tun));
                }
                _ => {}
            }
        }
        link
    }
}

/// What the pod has.
#[derive(Clone, Debug, Default)]
pub(super) struct Pod {
    pub(super) links: Vec<Link>,
    /// Addresses by the index of their interface.
    pub(super) addresses: Vec<(u32, IpAddr, u8)>,
    /// Networks that it knows the way to.
    pub(super) routes: Vec<Block>,
    /// The interface to everything else.
    pub(super) default: Option<u32>,
}

impl Pod {
    /// The interface with this name.
    pub(super) fn find(&self, name: &str) -> Option<&Link> {
        self.links.iter().find(|link| link.name == name)
    }

    /// The interface to the network: what is said, else as the reference chooses.
    pub(super) fn uplink(&self, said: Option<&str>) -> anyhow::Result<&Link> {
        if let Some(name) = said {
            return self.find(name).ok_or_else(|| {
                let names: Vec<_> = self.links.iter().map(|link| link.name.as_str()).collect();
                let sentence = format!("DEV={name}: the pod has only {}", names.join(", "));
                Failure::new(Status::Network, sentence)
            });
        }
        // Networks that Kubernetes adds to a pod come before its own.
        let added = ["net3", "net2", "net1", "net0"].into_iter().find_map(|name| self.find(name));
        let default = || self.links.iter().find(|link| Some(link.index) == self.default);
        added.or_else(default).or_else(|| self.find("eth0")).ok_or_else(|| {
            Failure::new(
                Status::Network,
                "the pod has no network, no default route and no eth0: give it one, or say \
                 NETWORK=none",
            )
        })
    }

    /// The first address of version 4 of an interface.
    pub(super) fn address(&self, link: &Link) -> Option<Ipv4Addr> {
        self.addresses.iter().find_map(|(index, address, _)| match address {
            IpAddr::V4(address) if *index == link.index => Some(*address),
            _ => None,
        })
    }

    /// Whether an interface has an address of version 6 that is not only for its neighbours.
    pub(super) fn has_ipv6(&self, link: &Link) -> bool {
        self.addresses.iter().any(|(index, address, _)| match address {
            IpAddr::V6(address) => *index == link.index && !address.is_unicast_link_local(),
            IpAddr::V4(_) => false,
        })
    }

    /// Blocks of addresses that are in use.
    pub(super) fn used(&self) -> Vec<Block> {
        let addresses = self.addresses.iter().filter_map(|(_, address, mask)| match address {
            IpAddr::V4(address) => Some(Block::new(*address, *mask)),
            IpAddr::V6(_) => None,
        });
        self.routes.iter().copied().chain(addresses).collect()
    }

    /// Whether some of these addresses are in use. The way to everything else is no use.
    pub(super) fn uses(&self, block: Block) -> bool {
        self.used().into_iter().any(|it| it.is_some() && it.meets(block))
    }
}

/// The door to the kernel.
pub(super) struct Links(Handle);

impl Links {
    /// Opens it.
    pub(super) fn open() -> anyhow::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection().context("rtnetlink")?;
        // It ends with the last handle.
        tokio::spawn(connection);
        Ok(Self(handle))
    }

    /// Looks at the pod.
    pub(super) async fn look(&self) -> anyhow::Result<Pod> {
        let links = self.0.link().get().execute().map_ok(|message| Link::of(&message));
        let mut pod = Pod { links: links.try_collect().await.context("links")?, ..Pod::default() };
        let mut addresses = self.0.address().get().execute();
        while let Some(message) = addresses.try_next().await.context("addresses")? {
            let (index, mask) = (message.header.index, message.header.prefix_len);
            // On a link between two, the local one is the own address.
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
        Ok(pod)
    }

    /// Takes an interface away.
    pub(super) async fn delete(&self, index: u32) -> anyhow::Result<()> {
        self.0.link().del(index).execute().await.with_context(|| format!("interface {index}"))
    }

    /// Gives an interface the address of a card.
    pub(super) async fn set_mac(&self, index: u32, mac: Mac) -> anyhow::Result<()> {
        let link = LinkUnspec::new_with_index(index).address(mac.0.to_vec()).build();
        self.0.link().change(link).execute().await.context("the gateway's MAC address")
    }

    /// Gives an interface an address.
    pub(super) async fn add(&self, index: u32, address: Ipv4Addr, mask: u8) -> anyhow::Result<()> {
        let request = self.0.address().add(index, address.into(), mask);
        request.execute().await.with_context(|| format!("the address {address}/{mask}"))
    }

    /// Lets packets through that come by an interface. This goes where /proc/sys is read-only.
    pub(super) async fn forward(&self, index: u32) -> anyhow::Result<()> {
        let mut inet = InetDevConf::default();
        inet.forwarding = 1;
        let inet = AfSpecUnspec::Inet(vec![AfSpecInet::DevConfRequest(inet)]);
        let link = LinkUnspec::new_with_index(index);
        let link = link.append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![inet])).build();
        self.0.link().change(link).execute().await.context("forwarding")
    }
}

/// Whether an interface is a card of the host, which no pod has but on the host's own network.
pub(super) fn is_card(name: &str) -> bool {
    Path::new("/sys/class/net").join(name).join("device").exists()
}
